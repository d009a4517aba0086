"""benchmarks/plan.py: its figures against numbers counted by hand, and its errors."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, environment_of_users

PLAN = [sys.executable, ROOT / "benchmarks" / "plan.py"]
ENVIRONMENT = environment_of_users()


def test_8b_on_two_by_four_chips():
    command = [*PLAN, "llama3", "--config", "llama-3.1-8b", "--target", "v5e:2x4", "--batch", "4", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    parameters, embedding, norms = 8_030_261_248, 128256 * 4096, 65 * 4096  # of the released model
    cache = 2 * 32 * 8 * 128 * 2048 * 4 * 2
    # Everything is split over the eight chips but the norms, which every chip holds.
    assert report["weights_bytes"] == 2 * ((parameters - norms) // 8 + norms)
    assert report["cache_bytes"] == cache // 8
    assert report["fits"] and report["hbm_bytes"] >= report["weights_bytes"] + report["cache_bytes"]
    assert report["floor_ms"] == pytest.approx((2 * (parameters - embedding) + cache) / 8 / 819e9 * 1e3, rel=1e-6)
    assert report["floor_ms"] <= report["core_ms"] < report["estimated_ms"] < 1.3 * report["floor_ms"]
    assert report["collectives"] == {"all-reduce": 65, "all-gather": 1} and report["copy_bytes"] == 0
    # 65 all-reduces of 4 rows in bfloat16 (padded to 8 on the chip or not), and the token's all-gather.
    seconds = 66e-6 + 65 * 2 * 7 / 8 * 4 * 4096 * 2 / 200e9
    assert report["collective_ms"] == pytest.approx(seconds * 1e3, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--config", "llama-3.1-8b", "--target", "v5e:2x4"], "nothing: no such model folder"),
        (["llama3", "--config", "llama-9b", "--target", "v5e:2x4"], "llama-9b"),
        (["llama3", "--config", "llama-3.1-8b", "--target", "v9:2x4"], "v9:2x4"),
        (["llama3", "--config", "llama-3.2-3b", "--target", "v5e:4x4"], "num_attention_heads 24"),
    ],
)
def test_errors(arguments, words):
    finished = subprocess.run([*PLAN, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert finished.returncode == 2 and words in finished.stderr.splitlines()[-1]
    assert finished.stderr.splitlines()[-1].startswith("error: ")


def test_a_sweep_as_a_table():
    command = [*PLAN, "llama3", "--config", "llama-3.1-70b", "--layers", "1", "--target", "v5e:4x4", "--tp", "8", "16"]
    command += ["--batch", "8", "32"]
    table = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout.splitlines()
    assert len(table) == 2 + 4
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [row[1:4] for row in cells] == [
        ["2, 1, 8", "8", "2048"],
        ["1, 1, 16", "8", "2048"],
        ["2, 1, 8", "32", "2048"],
        ["1, 1, 16", "32", "2048"],
    ]


def test_devices_that_share_a_head_read_the_cache_once():
    command = [*PLAN, "llama3", "--config", "llama-3.1-70b", "--layers", "2", "--target", "v5e:4x4", "--json"]
    command += ["--quantize", "int8", "--quantize_cache", "int8", "--max_seq_len", "8192"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    assert report["cache_bytes"] == 2 * 2 * 8 * 8192 * 8 * (128 + 4) // 16
    assert report["exchanges"] == 4 and report["copy_bytes"] == 0
    assert report["collectives"] == {"all-reduce": 5, "all-gather": 1}
