"""Real weights of families other than SmolLM2's against transformers' classes: `pytest -m real`, since it takes minutes
and fetches 600 MB."""

import sys

import pytest
from helpers import ROOT, assert_matches, decode, import_folder
from real import real_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(ROOT / "benchmarks"))
import precision

TEXTS = ["The capital of France is", "def fibonacci(n):", "今天天气很好", "Ein Satz, der länger ist, steht hier: " * 40]
pytestmark = pytest.mark.real


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize(("folder", "name"), [("gemma", "gemma-3-270m"), ("qwen3", "qwen2.5-0.5b-instruct")])
def test_parity_in_float32(folder, name, mesh):
    """Greedy tokens and log-probabilities, of prompts up to several hundred tokens."""
    path, modules = real_checkpoint(name), import_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    read = modules.main.read_tokenizer(modules.convert.open_checkpoint(path))
    prompts = tokenizer(TEXTS)["input_ids"]
    assert read(TEXTS)["input_ids"] == prompts
    rows = decode(modules, path, prompts, mesh, max_new_tokens=32)
    assert_matches(AutoModelForCausalLM.from_pretrained(path, dtype="float32"), prompts, rows, atol=1e-4)


@pytest.mark.parametrize(
    ("folder", "name", "limit"), [("gemma", "gemma-3-270m", 0.02), ("qwen3", "qwen2.5-0.5b-instruct", 0.003)]
)
def test_int8_on_prose_and_code(monkeypatch, folder, name, limit):
    """The mean divergence from float32 of int8 weights is below `limit`; an int8 cache costs at most as much again."""
    path, modules = real_checkpoint(name), import_folder(folder)
    formats = ("float32", "int8 weights", "int8 weights and cache")
    monkeypatch.setattr(precision, "FORMATS", {name: precision.FORMATS[name] for name in formats})
    rows = precision.real_rows(AutoTokenizer.from_pretrained(path), 1024, 512)
    _, weights, both = (row["mean_kl"] for row in precision.measure(modules, path, rows).values())
    assert weights < limit and both < 2 * weights, (weights, both)
