"""Eight virtual CPU devices, and libtpu told that it only compiles. This must stand before jax is imported."""

import os
import tempfile
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUM_CPU_DEVICES="8",
    NPROC="16",  # XLA's threads: a device that waits for another in an interpreted kernel occupies one
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-16",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # or a second compilation on this machine would find it locked
    HF_HUB_OFFLINE="1",
    JAX_DISABLE_MOST_OPTIMIZATIONS="1",  # compiles three times as fast; the marker `optimized` is for the rest
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent / "without_torch")  # of the programs that tests start
else:  # the process that starts the others: what one of them compiles is kept for all, and not in the user's folder
    compiled = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name

import jax
import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "optimized: compiles as users do, with all optimizations")


@pytest.fixture(autouse=True)
def optimizations(request):
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimized") is None)


@pytest.fixture(autouse=True)
def no_more_programs_than_a_process_can_map():
    """A compiled program takes dozens of mappings; Linux allows a process 65,530, and XLA crashes beyond them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
