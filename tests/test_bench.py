"""benchmarks/bench.py: what it counts, against numbers counted by hand, and its errors."""

import json
import subprocess
import sys

import jax
import pytest
from helpers import ROOT, environment_of_users, run_here

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench

BENCH = [sys.executable, ROOT / "benchmarks" / "bench.py"]
ENVIRONMENT = environment_of_users(JAX_NUM_CPU_DEVICES="1", OMP_NUM_THREADS="1")
D, L, N, K, H, F, V = 64, 3, 4, 2, 16, 96, 512
CONFIG = {
    "model_type": "llama", "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": N, "num_key_value_heads": K,
    "intermediate_size": F, "vocab_size": V, "tie_word_embeddings": False,
}  # fmt: skip


def flags(tmp_path):
    """For a small model."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["llama3", "--config", tmp_path / "config.json", "--steps", "8", "--rounds", "1", "--json"]


def run(tmp_path, *arguments):
    command = [*BENCH, *flags(tmp_path), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_counts_and_both_sides(tmp_path):
    report = run(tmp_path, "--layers", "2", "--batch", "1", "3", "--prompt_len", "20", "--vs", "transformers")
    matrices = 2 * D * H * (2 * N + 2 * K) + 2 * 3 * D * F  # of two layers
    for row, batch in zip(report["results"], (1, 3), strict=True):
        pairs = 20 * 21 // 2
        assert row["prefill_flops"] == batch * (2 * matrices * 20 + 2 * V * D + 4 * N * H * 2 * pairs)
        assert row["step_flops"] == batch * (2 * matrices + 2 * V * D + 4 * N * H * 2 * 25)
        # bfloat16 weights without the embedding, keys and values of 20 + 8 / 2 tokens or so: see cache_layout
        weights, token = 2 * (matrices + V * D + 5 * D), 2 * 2 * K * H * (2 if jax.__version_info__ >= (0, 11) else 4)
        assert row["step_bytes"] == pytest.approx(weights + batch * 24.5 * token, rel=0.01)
        assert row["bandwidth_gb_per_s"] == pytest.approx(row["step_bytes"] * row["decode_steps_per_s"] / 1e9)
        assert row["mfu"] is None and row["mbu"] is None  # a CPU has no published peak
        theirs = row["transformers"]
        ratio = row["decode_steps_per_s"] / theirs["decode_steps_per_s"]
        assert theirs["decode_steps_per_s_ratio"] == pytest.approx(ratio)
    assert "--vs transformers" in report["command"] and report["versions"]["transformers"]


def test_a_batch_decodes_at_once(tmp_path, monkeypatch, capsys):
    """Also one of more rows than generate takes by itself."""
    monkeypatch.setattr(bench, "roofs", lambda mesh: {})  # test_counts_and_both_sides has them
    monkeypatch.setattr(jax, "devices", lambda *_, found=jax.devices(): found[:1])
    assert run_here(bench, *flags(tmp_path), "--layers", "1", "--batch", "257", "--prompt_len", "4") == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["decode_tokens_per_s"] == pytest.approx(257 * row["decode_steps_per_s"])


@pytest.mark.slow
def test_components_make_up_a_step(tmp_path):
    (row,) = run(tmp_path, "--components", "--quantize", "int8")["results"]
    parts = dict(row["components_ms"])
    assert parts.keys() >= {"attention", "mlp", "head", "embed", "collectives"}
    step = parts.pop("step")
    assert sum(parts.values()) == pytest.approx(step) and min(parts.values()) > -0.5 * step


def test_parts_of_a_program():
    """By scope, also of what is fused; collectives by kind; a loop's event would count its body twice."""
    program = """
%fused (p: f32[8]) -> f32[8] {
  ROOT %multiply = f32[8]{0} multiply(%p, %p), metadata={op_name="jit(step)/mlp/mul"}
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %inner = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/head/while/body/add"}
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
  %all-reduce.2 = f32[8]{0} all-reduce(%fusion.1), metadata={op_name="jit(step)/mlp/psum"}
  %exchange.3 = f32[8]{0} custom-call(%a), metadata={op_name="jit(step)/attention/exchange"}
  %while.4 = (s32[], f32[8]) while(%t), condition=%c, body=%body, metadata={op_name="jit(step)/head/while"}
  ROOT %copy.5 = f32[8]{0} copy(%a)
}
"""
    assert bench.parts(program) == {
        "multiply": "mlp", "inner": "head", "fusion.1": "mlp", "all-reduce.2": "collectives",
        "exchange.3": "collectives", "copy.5": "rest",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--config", "llama-3.1-8b"], "nothing: no such model folder"),
        (["llama3", "--config", "llama-9b"], "llama-9b"),
        (["llama3", "--config", "README.md"], "README.md: cannot be read"),
        (["llama3", "--config", "llama-3.1-8b", "--layers", "33"], "--layers 33"),
        (
            ["deepseek", "--config", "deepseek/demo/config.json", "--vs", "transformers", "--draft", "mtp"],
            "no extra layer",
        ),
        (["llama3", "--config", "llama-3.1-8b", "--tp", "9"], "needs 9 devices"),
        (["llama3", "--config", "llama-3.1-8b", "--save", "nowhere/"], "'nowhere/' is no name"),
        (["llama3", "--config", "llama-3.1-8b", "--batch", "0"], "argument --batch: '0' is not a positive number"),
    ],
)
def test_errors(arguments, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run_here(bench, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words", "status"),
    [
        ("sys.modules['torch'] = None; sys.argv += ['--vs', 'transformers']", "pip install '.[bench]'", 2),
        ("generate.memory_of = lambda mesh: 2**20", "the weights take", 2),
        ("bench.bench = lambda args: bytearray(2**62)", "out of memory", 2),
        ("bench.jax.config.update('jax_platforms', 'nothing')", "jax finds no devices", 2),
        ("bench.bench = lambda args: signal.default_int_handler(2, None)", "interrupted", 130),
    ],
)
def test_errors_of_a_machine(before, words, status):
    program = f"import sys, signal; sys.path[:0] = ['benchmarks', 'llama3']; import bench, generate; {before}"
    command = [sys.executable, "-c", f"{program}; bench.run(bench.main)", "llama3"]
    command += ["--config", "llama3/demo/config.json", "--steps", "1", "--rounds", "1"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    (line,) = finished.stderr.splitlines()
    assert finished.returncode == status and line.startswith("error: ") and words in line
