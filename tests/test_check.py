"""benchmarks/check.py: the sizes that it takes, and a table whatever happens to a size."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from helpers import ROOT, environment_of_users

sys.path.insert(0, str(ROOT / "benchmarks"))
import check

TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """main() on a tiny model in the place of the CPU's: status, standard output and error, and the file of results."""
    for name in set(os.environ) - set(environment_of_users()):
        monkeypatch.delenv(name)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))

    def call(*arguments, configs):
        sizes = [("llama3", str(tmp_path / f"{config}.json"), "bfloat16") for config in configs]
        monkeypatch.setattr(check, "CPU_SIZES", sizes)
        monkeypatch.setattr(sys, "argv", ["check.py", "--save", str(tmp_path / "report"), *arguments])
        with pytest.raises(SystemExit) as ended:
            check.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err, json.loads((tmp_path / "report.json").read_text())

    return call


@pytest.mark.slow
def test_a_table_whatever_happens(run, monkeypatch):
    """A size that fails is a row, what no table knows, such as a CPU's peak, is left out, and an interrupt loses no
    more than the batch under way."""
    measure, begun = check.measure, []

    def interrupted(*arguments):
        begun.append(arguments)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(check, "measure", interrupted)
    monkeypatch.setattr(check, "BATCHES", (1,))
    status, out, err, report = run(configs=("missing", "tiny", "tiny"))
    bad, *good = report["rows"]
    assert status == 130 and "interrupted" in err and len(begun) == 3
    assert (bad["model"], bad["weights"], bad["batch"]) == ("missing", "bfloat16", "1")
    assert bad["stderr"][0].startswith(f"error: {bad['error']}")
    assert "missing.json is neither a file nor one of" in bad["error"] and "\n" not in bad["error"]
    assert [(row["step"], row["batch"]) for row in good] == [("decode", 1), ("prefill", 1)]
    for row in good:
        assert row["measured_ms"] > 0 and row["share"] is None and "estimated_ms" not in row
    rate, seconds = good[1]["tflops"] * 1e12, good[1]["measured_ms"] / 1e3
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    operations = 2 * matrices * 1024 + 2 * 4 * 64 * 1024 * 1025 // 2 + 2 * 512 * 64
    assert rate * seconds == pytest.approx(operations)
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3 and bad["error"] in lines[2] and f"{good[0]['measured_ms']:,.2f}" in lines[3]
    assert report["device"]["kind"] == "cpu" and report["device"]["driver"] and report["versions"]["jax"]


def test_minutes_that_are_over(run):
    status, _, _, report = run("--minutes", "0.01", configs=("tiny", "tiny"))
    assert status == 0 and report["rows"][-1]["error"].endswith("the minutes were over")


def test_errors_of_other_programs():
    assert check.error_line("noise\nerror: no such thing\n", 2) == "no such thing"
    text = 'Traceback\n  File "x"\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\nAllocation: 3\n'
    assert check.error_line(text, 1) == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert check.error_line("", -9) == "ended by SIGKILL" and check.error_line("", 3) == "status 3"


FITTING = {  # of check.SIZES, in its order
    "v5e:1x1": [3],
    "v6e:1x1": [0, 1, 3, 6],
    "v5e:2x2": [0, 1, 3, 5, 6],
    "v5e:2x4": [0, 1, 2, 3, 4, 5, 6],
    "v5p:2x2x1": [0, 1, 2, 3, 4, 5, 6],
}


@pytest.mark.parametrize("target", FITTING)
def test_sizes_that_fit(monkeypatch, target):
    """They, and the name of these devices for plan.py."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # plan sets that of its process
    import plan

    devices, memory = plan.devices_of(target), plan.CHIPS[target.partition(":")[0]].memory
    assert check.target_of(devices) == target
    fitting = [n for n, size in enumerate(check.SIZES) if check.fits(*size, devices, memory)]
    assert fitting == FITTING[target]


@pytest.mark.optimized
def test_the_tightest_fits_by_the_compiler():
    """8B in int8 with eight rows on one v5e chip."""
    folder, config, weights = check.SIZES[3]
    command = [folder, "--config", config, "--target", "v5e:1x1", "--batch", "8", "--max_seq_len", "1088", "--json"]
    (report,) = check.output_of(["benchmarks/plan.py", *command, "--quantize", weights], time.monotonic() + 600)
    assert report["fits"] and report["estimated_ms"] >= report["floor_ms"] > 9


def test_minutes_of_the_tests_on_devices():
    """A case of each test comes first; what the minutes leave out is counted."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "device",
        "--minutes",
        "0",
        "-n",
        "0",
        "-v",
        "tests/test_device.py",
    ]
    environment = environment_of_users()
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    names = re.findall(r"::(\w+).*SKIPPED", ran.stdout)
    kinds, left_out = set(names), re.search(r"(\d+) tests were not begun: the minutes were over", ran.stdout)
    assert ran.returncode == 0 and 10 < len(kinds) <= int(left_out[1]) and set(names[: len(kinds)]) == kinds
