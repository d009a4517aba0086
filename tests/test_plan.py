"""benchmarks/plan.py: its figures against numbers counted by hand, and its errors."""

import importlib
import json
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from helpers import ROOT, environment_of_users, import_folder, interpret_kernels, run_here
from jax.sharding import PartitionSpec as P

PLAN = [sys.executable, ROOT / "benchmarks" / "plan.py"]
ENVIRONMENT = environment_of_users()


@pytest.fixture
def plan(monkeypatch):
    """The program as a module. It sets the environment of its process, which here is a copy."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return importlib.import_module("plan")


def test_8b_on_two_by_four_chips():
    command = [*PLAN, "llama3", "--config", "llama-3.1-8b", "--target", "v5e:2x4", "--batch", "4", "--json"]
    command += ["--layers", "8"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    embedding, norms = 128256 * 4096, 16 * 4096
    parameters = 8_030_261_248 - 24 * 218_112_000  # of the released model, and of each layer that is left out
    cache = 2 * 8 * 8 * 128 * 2048 * 4 * 2
    # Everything is split over the eight chips but the norms, which every chip holds: those of layers in float32.
    others = parameters - norms - 4096
    assert report["weights_bytes"] == 2 * (others // 8 + 4096) + 4 * norms
    assert report["cache_bytes"] == cache // 8
    assert report["fits"] and report["hbm_bytes"] >= report["weights_bytes"] + report["cache_bytes"]
    read = 2 * (parameters - embedding + norms) + cache
    assert report["floor_ms"] == pytest.approx(read / 8 / 819e9 * 1e3, rel=1e-6)
    assert report["floor_ms"] <= report["core_ms"] < report["estimated_ms"] < 1.3 * report["floor_ms"]
    assert report["collectives"] == {"all-reduce": 17, "all-gather": 1} and report["copy_bytes"] == 0
    # 17 all-reduces of 4 rows in bfloat16 (padded to 8 on the chip or not), and the token's all-gather.
    seconds = 18e-6 + 17 * 2 * 7 / 8 * 4 * 4096 * 2 / 200e9
    assert report["collective_ms"] == pytest.approx(seconds * 1e3, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--config", "llama-3.1-8b", "--target", "v5e:2x4"], "nothing: no such model folder"),
        (["llama3", "--config", "llama-9b", "--target", "v5e:2x4"], "llama-9b"),
        (["llama3", "--config", "llama-3.1-8b", "--target", "v9:2x4"], "v9:2x4"),
        (["qwen3", "--config", "qwen3-30b-a3b", "--target", "v5e:2x4", "--ep", "3"], "1 x 3 x 2 needs 6"),
        (["qwen3", "--config", "qwen3-0.6b", "--target", "v5e:2x2", "--draft", "mtp"], "no layer of multi-token"),
        (["qwen3", "--config", "qwen3-0.6b", "--target", "v5e:2x2", "--batch", "3", "--dp", "2"], "multiple of dp 2"),
        (["qwen3", "--config", "qwen3-0.6b", "--target", "h100:8"], "one at a time"),
        (["qwen3", "--config", "qwen3-0.6b", "--target", "v5e:3x3"], "a slice such as v5e:2x4"),
        (["qwen3", "--config", "qwen3-0.6b"], "required: --target"),
        (
            ["qwen3", "--config", "qwen3-30b-a3b", "--layers", "1", "--target", "v5e:2x2", "--tp", "4"],
            "no multiple of 128 (try --ep)",
        ),
    ],
)
def test_errors(plan, capsys, arguments, words):
    assert run_here(plan, *arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and words in line


def test_prompts_as_a_table(plan):
    """Rows that differ in the prompt alone are told apart, and a step is not counted as one of decoding."""
    row = {"target": "v5e:1x1", "mesh": {"dp": 1, "ep": 1, "tp": 1}, "batch": 2, "max_seq_len": 2048, "fits": True}
    row |= dict.fromkeys(("hbm_bytes", "core_ms", "collective_ms", "serial_ms", "floor_ms"), 1.0)
    rows = [row | {"prefill": n, "estimated_ms": 4.0, "published_ms": None} for n in (256, 512)]
    head, _, *cells = [line.split(" | ") for line in plan.table(rows).splitlines()]
    speed = [(each[head.index("prompt")], each[head.index("tokens/s")]) for each in cells]
    assert speed == [("256", "128000"), ("512", "256000")]


@pytest.mark.slow
def test_a_sweep_leaves_out_what_cannot_be_planned():
    """The other rows are printed, and the status tells of it."""
    command = [*PLAN, "llama3", "--config", "llama-3.2-1b", "--layers", "1", "--target", "v5e:1x1", "v5e:3x3", "--json"]
    finished = subprocess.run([*command, "--tp", "1", "3"], capture_output=True, text=True, env=ENVIRONMENT)
    (row,) = map(json.loads, finished.stdout.splitlines())
    assert row["target"] == "v5e:1x1" and finished.returncode == 2
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "needs 3 devices" in errors[0] and errors[0].count("no compiler for v5e:3x3") == 1


@pytest.mark.slow
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


@pytest.mark.slow
def test_devices_that_share_a_head_read_the_cache_once():
    command = [*PLAN, "llama3", "--config", "llama-3.1-70b", "--layers", "2", "--target", "v5e:4x4", "--json"]
    command += ["--quantize", "int8", "--quantize_cache", "int8", "--max_seq_len", "8192"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    assert report["cache_bytes"] == 2 * 2 * 8 * 8192 * 8 * (128 + 4) // 16
    assert report["exchanges"] == 4 and report["copy_bytes"] == 0
    assert report["collectives"] == {"all-reduce": 5, "all-gather": 1}


@pytest.mark.slow
def test_collectives_count_the_devices_that_take_part():
    """A prompt's norms divide its tokens over ep, so devices join along ep, along tp, and all together."""
    command = [*PLAN, "qwen3", "--config", "qwen3-30b-a3b", "--layers", "1", "--target", "v5e:2x4", "--batch", "1"]
    command += ["--prefill", "256", "--ep", "4", "--tp", "2", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    assert report["collectives"] == {"all-reduce": 3, "all-gather": 4, "reduce-scatter": 2, "all-to-all": 1}
    # The embedding is summed over all eight; ep gathers before attention, before the experts and at the end, and
    # scatters the sums after both; tp sums a quarter each. Two devices share a kv head: they exchange the queries of
    # four heads, small enough for the model's own kernel, and outputs with a log-sum-exp in float32.
    nbytes = (2 * 7 / 8 + 3 * 3 / 4 + 2 * 3 / 4 + 2 * (2 / 2) / 4) * 256 * 2048 * 2
    nbytes += 2 * 256 * 4 * (128 * 2 + 129 * 4 / 2)
    assert report["exchanges"] == 1
    assert report["collective_ms"] == pytest.approx(11e-3 + nbytes / 200e9 * 1e3, rel=1e-3)


@pytest.mark.slow
def test_prefill_of_two_pieces():
    command = [*PLAN, "llama3", "--config", "llama-3.1-8b", "--layers", "1", "--target", "v6e:2x2", "--batch", "1"]
    command += ["--prefill", "2000", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    a_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    attention = 4 * 4096 * 2000 * 2001 // 2
    operations = 2 * a_layer * 2000 + attention + 2 * 128256 * 4096
    assert report["piece"] == 1024 and report["max_seq_len"] == 2048 and report["fits"]
    assert report["floor_ms"] == pytest.approx(operations / 4 / 918e12 * 1e3, rel=1e-6)
    assert report["mfu"] == pytest.approx(operations / 4 / 918e12 * 1e3 / report["estimated_ms"], rel=1e-6)
    # On a v6e some of it may be the SparseCores', for which the compiler counts no cycles.
    assert report["floor_ms"] < report["core_ms"] < 2.5 * report["floor_ms"]
    # 3 all-reduces of 1,024 rows in bfloat16, and the token's all-gather; twice.
    seconds = 2 * (4e-6 + 3 * 2 * 3 / 4 * 1024 * 4096 * 2 / 448e9)
    assert report["collective_ms"] == pytest.approx(seconds * 1e3, rel=0.1)


@pytest.mark.slow
def test_devices_along_ep_divide_the_tokens_of_a_piece():
    """By a reduce-scatter and an all-gather for each sum. XLA may also make all-reduces of them, which cost more."""
    command = [*PLAN, "qwen3", "--config", "qwen3-30b-a3b", "--layers", "1", "--target", "v5e:2x4", "--batch", "1"]
    command += ["--prefill", "1024", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout)
    assert report["mesh"] == {"dp": 1, "ep": 4, "tp": 2}
    # All-reduces: the embedding, and each sum along tp. Other all-gathers: the end, a token. Two devices share each kv
    # head: an all-gather of queries, which XLA overlaps with other work, and an all-to-all of outputs.
    of_heads = {"reduce-scatter": 2, "all-reduce": 1 + 2, "all-gather": 2 + 2 + 1, "all-to-all": 1}
    assert report["collectives"] == of_heads and report["exchanges"] == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_loops_run_as_often_as_counted(plan, monkeypatch, rows):
    """Over rows, and over blocks of latents, whose tokens, or rows, two devices share: by the real loops."""
    model, count, T = import_folder("deepseek").model, Counter(), 64

    def counted(first, last, body, state, loop=jax.lax.fori_loop):
        def counts(i, state):
            jax.debug.callback(lambda: count.update([body]))
            return body(i, state)

        return loop(first, last, body if isinstance(last, int) and last == 1 else counts, state)  # XLA has no such loop

    monkeypatch.setattr(jax.lax, "fori_loop", counted)
    interpret_kernels(monkeypatch, model)
    monkeypatch.setitem(model.FAST, ("attend_to_stored", "tpu"), model.attend_to_stored.plain)
    mesh, heads = model.make_mesh(1, 1, 2, devices=jax.devices()[:2]), P("dp", None, model.MODEL_AXES)
    specs = heads, heads, P("dp"), model.CACHE_SPEC, P("dp"), P(model.MODEL_AXES)

    def attend(q, q_rope, new, cache, positions, w):
        return model.cached_attention(
            q, q_rope, new, cache, model.Span(positions, None, None, rows, 2), w, lambda i: model.Mask()
        )

    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
    program, R = jax.jit(program), model.row_groups(rows, 2)[1]
    x, new, w = jnp.ones((rows, T, 2, 16)), jnp.ones((rows, T, 16)), model.Plain(jnp.ones((2 * 16, 16)))
    cache = model.LayerCache(*[model.Plain(jnp.zeros((1, 2, 512 // R, 16)))] * 2)
    for start in (0, 64, 192, 448):
        count.clear()
        positions = start + jnp.tile(jnp.arange(T), (rows, 1))
        arguments = x, x, model.LayerCache(new, new), cache, positions, {"k_b": w, "v_b": w}
        jax.block_until_ready(program(*arguments))
        jax.effects_barrier()
        assert plan.loop_trips(model, [cache], R, rows, start, T) == tuple(n / 2 for n in count.values())
