"""Eight virtual CPU devices, and libtpu told that it only compiles. This must stand before jax is imported."""

import os
import tempfile
from pathlib import Path

# Programs that tests start keep what they compile for each other, and not in the user's folder.
compiled = tempfile.TemporaryDirectory()

os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUM_CPU_DEVICES="8",
    NPROC="16",  # XLA's threads: a device that waits for another in an interpreted kernel occupies one
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-16",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # or a second compilation on this machine would find it locked
    HF_HUB_OFFLINE="1",
    JAX_COMPILATION_CACHE_DIR=compiled.name,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
)

import jax
import pytest


@pytest.fixture(autouse=True)
def no_more_programs_than_a_process_can_map():
    """A compiled program takes dozens of mappings; Linux allows a process 65,530, and XLA crashes beyond them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
