"""benchmarks/plan.py: its figures against numbers counted by hand, and its errors."""

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers import ROOT, environment_of_users, import_folder
from jax.sharding import PartitionSpec as P

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


def test_prefill_of_two_pieces():
    command = [*PLAN, "llama3", "--config", "llama-3.1-8b", "--layers", "2", "--target", "v5e:2x2", "--batch", "1"]
    command += ["--prefill", "2000", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    a_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    attention = 2 * 4 * 4096 * 2000 * 2001 // 2
    operations = 2 * 2 * a_layer * 2000 + attention + 2 * 128256 * 4096
    assert report["piece"] == 1024 and report["max_seq_len"] == 2048 and report["fits"]
    assert report["floor_ms"] == pytest.approx(operations / 4 / 197e12 * 1e3, rel=1e-6)
    assert report["mfu"] == pytest.approx(operations / 4 / 197e12 * 1e3 / report["estimated_ms"], rel=1e-6)
    assert report["floor_ms"] < report["core_ms"] < 2 * report["floor_ms"]
    # 5 all-reduces of 1,024 rows in bfloat16, and the token's all-gather; twice.
    seconds = 2 * (6e-6 + 5 * 2 * 3 / 4 * 1024 * 4096 * 2 / 200e9)
    assert report["collective_ms"] == pytest.approx(seconds * 1e3, rel=0.1)


def test_devices_along_ep_divide_the_tokens_of_a_piece():
    """By a reduce-scatter and an all-gather for each sum. XLA may also make all-reduces of them, which cost more."""
    command = [*PLAN, "qwen3", "--config", "qwen3-30b-a3b", "--layers", "2", "--target", "v5e:2x4", "--batch", "1"]
    command += ["--prefill", "1024", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    assert report["mesh"] == {"dp": 1, "ep": 4, "tp": 2}
    # All-reduces: the embedding, and each sum along tp. Other all-gathers: keys and values of layers, the end, a token.
    assert report["collectives"] == {"reduce-scatter": 4, "all-reduce": 1 + 4, "all-gather": 4 + 4 + 2}


@pytest.mark.parametrize("window", [None, 100])
def test_loops_run_as_often_as_counted(monkeypatch, window):
    """Those over blocks of a cache that two devices share, by the real loop."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # plan sets that of its process
    import plan

    model = import_folder("llama3").model
    count, T = [], 64

    def counted(a, b, merged=model.merged):
        jax.debug.callback(lambda: count.append(1))
        return merged(a, b)

    monkeypatch.setattr(model, "merged", counted)
    monkeypatch.setattr(model, "BLOCK_TOKENS", 64)
    plain = partial(model.plain_piece_attention, rows=1, tile=T, block=64)
    monkeypatch.setattr(model, "piece_attention_kernel", plain)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, default, tpu=None, cpu=None: (tpu or default)(*args)
    )
    mesh, heads = model.make_mesh(1, 1, 2, devices=jax.devices()[:2]), P("dp", None, model.MODEL_AXES)
    mask = model.Mask(window=window)

    def attend(q, k, v, cache, positions):
        options = {"start": positions[0, 0], "is_live": jnp.ones(1, bool), "R": 2}
        return model.prefill_attention(q, k, v, cache, positions, mask, **options)

    specs = heads, heads, heads, model.CACHE_SPEC, P("dp")
    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
    program = jax.jit(program)
    x, cache = jnp.ones((1, T, 2, 16)), model.LayerCache(*[jnp.zeros((1, 2, 256, 16))] * 2)
    config = SimpleNamespace(mask=lambda layer: mask)
    for start in (0, 64, 192, 448):
        count.clear()
        jax.block_until_ready(program(x, x, x, cache, start + jnp.arange(T)[None]))
        jax.effects_barrier()
        assert plan.loop_trips(model, config, [cache], 2, start, T) == (len(count) / 2,)
