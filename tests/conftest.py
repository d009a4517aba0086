"""The environment of the tests, which must stand before jax is imported, and what every test is asked at its end.

Tests run on eight virtual CPU devices, and libtpu is told that it only compiles. With `-m device` those of this marker
run on whatever jax finds, compiled as users do: a TPU belongs to one process, several share a GPU. They need no package
but jax, pytest, pytest-xdist and main.py's own. After `--minutes` none begins; a case of each test comes before the
second of any.
"""

import argparse
import collections
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

command_line = argparse.ArgumentParser(add_help=False)
command_line.add_argument("-m", default="")
HAS_NVIDIA = Path("/proc/driver/nvidia/version").exists()
# Workers have another command line, and this environment.
ON_DEVICE = os.environ.setdefault("TESTS_MARKED", command_line.parse_known_args(sys.argv[1:])[0].m) == "device"
NOT_BEGUN = "not begun: the minutes were over"
BEGIN = float(os.environ.setdefault("TESTS_BEGAN", str(time.time())))

if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has the environment of the process that started it
    # What one of the workers compiles is kept for all, and not in the user's folder.
    compiled = tempfile.TemporaryDirectory()
    os.environ.update(
        JAX_NUM_CPU_DEVICES="8",
        NPROC="16",  # XLA's threads: a device that waits for another in an interpreted kernel occupies one
        OMP_NUM_THREADS="1",  # torch's, which spin when they have nothing to do
        HF_HUB_OFFLINE="1",
        PYTHONDONTWRITEBYTECODE="",  # 14 folders are imported many times
        JAX_COMPILATION_CACHE_DIR=compiled.name,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
        JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",  # to note who traced what takes 3 % of the time
        XLA_PYTHON_CLIENT_PREALLOCATE="false",  # several processes share a GPU
    )
    if not ON_DEVICE:
        os.environ.update(
            JAX_PLATFORMS="cpu",
            TPU_SKIP_MDS_QUERY="1",
            TPU_ACCELERATOR_TYPE="v5litepod-16",
            TPU_WORKER_HOSTNAMES="localhost",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # or a second compilation on this machine would find it locked
            JAX_DISABLE_MOST_OPTIMIZATIONS="1",  # compiles three times as fast; the marker `optimized` is for the rest
        )
    elif HAS_NVIDIA:  # XLA would try several kernels for each product, which took most of the time on an H100
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

tests = Path(__file__).parent.glob("test_*.py")
collect_ignore = [file.name for file in tests if ON_DEVICE and "pytest.mark.device" not in file.read_text()]

kernels_interpreted = []  # in the present test: of each kernel what the interpreter saw of its memory accesses


def recorded(new=interpreter.RaceDetectionState, **options):
    """A new state of the interpreter, which itself keeps that of the last kernel alone."""
    kernels_interpreted.append(new(**options))
    return kernels_interpreted[-1]


interpreter.RaceDetectionState = recorded


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=5, help="with -m device: begin no test after this, default 5")


def pytest_configure(config):
    config.addinivalue_line("markers", "optimized: compiles as users do, with all optimizations")
    config.addinivalue_line("markers", "device: runs on an accelerator too: pytest -m device")
    config.addinivalue_line("markers", "slow: not in the default run; pytest -m 'not real' runs all")
    config.addinivalue_line("markers", "sampled: all but one in six of its cases are slow")
    if ON_DEVICE:
        config.addinivalue_line("filterwarnings", "default")  # what a later library advises against is no failure there
        config.option.dist, config.option.maxschedchunk = "load", 1  # each process takes the next test


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items):
    seen = collections.Counter()
    for item in items:
        item.case = seen[item.function]
        seen[item.function] += 1
        if item.get_closest_marker("sampled") and item.case % 6:
            item.add_marker("slow")
    if ON_DEVICE:
        items.sort(key=lambda item: item.case)


def pytest_runtest_setup(item):
    if ON_DEVICE and time.time() - BEGIN >= 60 * item.config.option.minutes:
        pytest.skip(NOT_BEGUN)


def pytest_xdist_auto_num_workers(config):
    """On two cores three, since some tests wait. On a GPU they compile most of the time, two cores to a process."""
    if not ON_DEVICE:
        return 3
    return min(os.cpu_count() // 2, 8) if HAS_NVIDIA else 0


def pytest_collection_finish(session):
    """Python's garbage collector does not look at what is imported by now, and seldom at what tracing makes."""
    if not ON_DEVICE:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)


def pytest_terminal_summary(terminalreporter):
    """What a report from an accelerator needs: which devices these were, and how near the tests came."""
    if ON_DEVICE:
        device = jax.devices()[0]
        versions = f"jax {jax.__version__}, {' '.join(device.client.platform_version.split())}"
        terminalreporter.section(f"{jax.device_count()} x {device.device_kind}, {versions}")
        late = sum(NOT_BEGUN in report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
        if late:
            terminalreporter.write_line(f"{late} tests were not begun: the minutes were over, see --minutes")
        for report in terminalreporter.stats.get("passed", []):
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {name} {value}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a test whose interpreted kernels have a race: the interpreter prints RACE DETECTED, and goes on."""
    kernels_interpreted.clear()
    result = yield
    assert not any(kernel.races_found for kernel in kernels_interpreted), "RACE DETECTED, see the output above"
    return result


@pytest.fixture
def races():
    """For a test of that check: whether there were races so far, which then are forgiven."""

    def were_found():
        found = any(kernel.races_found for kernel in kernels_interpreted)
        kernels_interpreted.clear()
        return found

    return were_found


@pytest.fixture(autouse=True)
def optimizations(request):
    without = not ON_DEVICE and request.node.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", without)


@pytest.fixture(autouse=True)
def no_more_programs_than_a_process_can_map():
    """A compiled program takes dozens of mappings; Linux allows a process 65,530, and XLA crashes beyond them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 45_000:
        jax.clear_caches()
