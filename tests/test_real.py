"""Real weights of families other than SmolLM2's against transformers' classes: `pytest -m real`, since it takes minutes
and fetches 600 MB."""

import pytest
from helpers import assert_matches, decode, import_folder
from real import real_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

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
