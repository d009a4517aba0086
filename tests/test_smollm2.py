"""A real model: SmolLM2-135M-Instruct, a Llama of 30 layers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, assert_matches, decode, environment_of_users, import_folder
from real import real_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))
import precision

llama3 = import_folder("llama3")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The checkpoint's folder."""
    return real_checkpoint("smollm2-135m-instruct")


@pytest.mark.slow
def test_it_answers(smollm2):
    """As its users run it."""
    command = [sys.executable, ROOT / "llama3" / "main.py", "--model_path", smollm2, "--max_new_tokens", "48"]
    command += ["--output", "json", "--prompt", "What is the capital of France?", "Why is the sky blue?"]
    finished = subprocess.run(command, env=environment_of_users(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    france, sky, _ = map(json.loads, finished.stdout.splitlines())
    assert france["text"] == "The capital of France is Paris." and france["finish_reason"] == "stop"
    assert "scatter" in sky["text"]


def test_parity_in_float32(smollm2):
    """Greedy tokens and log-probabilities of the reference class."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ["Why is the sky blue?", "def fibonacci(n):", "今天天气很好"]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    rows = decode(llama3, smollm2, prompts, (1, 1, 3), max_new_tokens=48)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype="float32")
    assert_matches(reference, prompts, rows, atol=1e-4)


@pytest.mark.slow
def test_what_number_formats_cost_on_real_text(smollm2, monkeypatch):
    """benchmarks/precision.py on fewer tokens and formats than the README has; the limits are two to three times its
    figures."""
    limits = {"bfloat16": 1.5e-3, "int8 weights and cache": 1.3e-2}
    formats = {name: precision.FORMATS[name] for name in ("float32", *limits)}
    monkeypatch.setattr(precision, "FORMATS", formats)
    tokenizer = llama3.main.read_tokenizer(llama3.convert.open_checkpoint(smollm2))
    table = precision.measure(llama3, smollm2, precision.real_rows(tokenizer, 512, 256))
    for name, limit in limits.items():
        assert 0 < table[name]["mean_kl"] < limit, name
        assert table[name]["perplexity"] < 1.03 * table["float32"]["perplexity"], name
    assert table["float32"]["mean_kl"] == 0 and table["float32"]["perplexity"] < 30
