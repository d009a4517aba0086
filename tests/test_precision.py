"""What bfloat16 and int8 cost on the demo: the KL divergence from float32 of the next token's distribution."""

import json
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import ROOT, decode, floats, import_folder, in_format, reference_logprobs, save_random
from shared import folders
from test_parity import glm, llama, qwen_2, random_prompts
from transformers import AutoTokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))
import precision

FOLDERS = {name: import_folder(name) for name in folders()}
model = FOLDERS["llama3"].model


def conversations(folder):
    """The demo's prompts with the demo's answers, and text that it never saw: token ids of each."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / folder / "demo")
    golden = json.loads((ROOT / "tests" / "golden_demo.json").read_text())
    for prompt, answer in golden[folder].items():
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        if tokenizer.chat_template:
            yield tokenizer.apply_chat_template(messages, return_dict=False)
        else:
            yield tokenizer(prompt + answer)["input_ids"]
    yield tokenizer("The quick brown fox jumps over the lazy dog while 17 bees watch the moon.")["input_ids"]


@cache
def log_probabilities(folder, dtype, quantize=None, quantize_cache=None, mesh_shape=(1, 1, 1)):
    """float32 [len(row), V] for each row of conversations: the distribution of the token after each of them."""
    checkpoint = FOLDERS[folder].convert.open_checkpoint(ROOT / folder / "demo")
    return precision.scorer(FOLDERS[folder], checkpoint, dtype, quantize, quantize_cache, mesh_shape)(
        list(conversations(folder))
    )


@pytest.mark.parametrize(
    ("folder", "dtype", "quantize", "quantize_cache", "mesh", "limit"),
    [
        *((folder, "bfloat16", None, None, (1, 1, 1), 2e-3) for folder in ("llama4", "deepseek", "qwen3_5")),
        *((folder, "bfloat16", "int8", "int8", (1, 2, 4), 2e-2) for folder in ("deepseek", "gpt_oss", "gemma", "gpt2")),
        ("gemma4", "bfloat16", "int8", "int8", (1, 2, 4), 5e-2),  # bfloat16 alone gives 1e-2
        ("glm4", "float16", None, None, (1, 1, 1), 2e-3),
    ],
)
def test_mean_kl_from_float32(folder, dtype, quantize, quantize_cache, mesh, limit):
    exact = log_probabilities(folder, "float32")
    rounded = log_probabilities(folder, dtype, quantize, quantize_cache, mesh)
    divergences = [(np.exp(e) * (e - r)).sum(-1) for e, r in zip(exact, rounded, strict=True)]
    mean = np.concatenate(divergences).mean()
    print(f"mean KL {mean:.1e}, of unseen text {divergences[-1].mean():.1e}")
    assert 0 < mean < limit
    assert divergences[-1].mean() < limit


@pytest.mark.parametrize("mesh", [(1, 2, 2)], ids=str)
def test_matrices_stored_wider_on_a_cpu(tmp_path, mesh):
    """Rows of 4,096 bytes: in the embedding, qkv and gate_up, and in o and down where four devices share them."""
    _, model_class, config = llama(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=4, head_dim=2048, num_hidden_layers=1
    )
    reference = save_random(tmp_path, model_class, config)
    prompts = random_prompts(3, 9)
    rows = decode(FOLDERS["llama3"], tmp_path, prompts, mesh, "bfloat16", max_new_tokens=1)
    for prompt, (token,) in zip(prompts, rows, strict=True):
        wanted = reference_logprobs(reference, prompt, [token.id])[0]
        assert token.logprob == pytest.approx(wanted[token.id], abs=0.1) and wanted[token.id] > wanted.max() - 0.1


@pytest.mark.parametrize("quantize", [None, "int8"], ids=["", "int8"])
def test_a_single_row_on_a_cpu_is_one_loop(quantize):
    """What makes it fast shows in the program: the weights are not turned to float32 in memory, nor handed to a library
    (either took ten times as long)."""
    x = jnp.ones((1, 1024), jnp.bfloat16)
    w = in_format(model, jnp.ones((4096, 1024), jnp.bfloat16), quantize)
    program = jax.jit(model.linear).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4096 * 1024 * 4 / 8
    reductions = [line for line in program.as_text().splitlines() if "/reduce" in line and " fusion(" in line]
    assert len(reductions) == 1 and "kind=kLoop" in reductions[0]


@pytest.mark.optimized
@pytest.mark.parametrize("quantize", [None, "int8"], ids=["", "int8"])
@pytest.mark.parametrize(
    ("rows", "contracted", "dtype"),
    [
        (1, 95, jnp.bfloat16),
        (1, 928, jnp.bfloat16),  # with int8 weights, a loop of its own over 29 runs
        (1, 576, jnp.bfloat16),  # a loop over 18
        (1, 512, jnp.bfloat16),
        (1, 1536, jnp.bfloat16),  # twice 24, with int8 weights as well
        (1, 2560, jnp.bfloat16),  # four times 20
        (1, 2080, jnp.bfloat16),
        (1, 96, jnp.bfloat16),
        (1, 2048, jnp.bfloat16),  # stored with more columns
        (3, 2048, jnp.bfloat16),
        (200, 2048, jnp.bfloat16),
        (1, 1024, jnp.float32),  # with int8 weights
        (1, 96, jnp.float32),
        (3, 96, jnp.bfloat16),
        (3, 96, jnp.float32),
        (60, 96, jnp.bfloat16),  # int8 weights are cast
        (60, 2**16, jnp.bfloat16),  # in five pieces
        (130, 2**16, jnp.float32),
        (200, 96, jnp.bfloat16),
    ],
)
def test_products_on_a_cpu(rows, contracted, dtype, quantize):
    """Every form of cpu_product against float64."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, contracted)).astype(dtype)
    w = jax.random.normal(keys[1], (70, contracted)).astype(dtype)
    if contracted == 2048 and not quantize:
        w = jnp.pad(w, ((0, 0), (0, 32)))  # see stored_width
    w = in_format(model, w, quantize)
    wanted = floats(x) @ floats(w)[:, :contracted].T
    tolerance = 5e-3 if quantize else 1e-4 * max(1, contracted / 1024)
    np.testing.assert_allclose(jax.jit(model.linear)(x, w), wanted, atol=tolerance)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize(("family", "mesh"), [(qwen_2, (1, 1, 2)), (qwen_2, (1, 2, 2)), (glm, (1, 1, 1))])
def test_large_biases_of_keys(tmp_path, family, mesh, quantize):
    """They cost an int8 cache next to nothing, and change nothing without one."""
    folder, model_class, config = family(attention_bias=True) if family is glm else family()
    reference = save_random(tmp_path, model_class, config)
    H = config.hidden_size // config.num_attention_heads if family is qwen_2 else config.head_dim
    with torch.no_grad():
        for name, bias in reference.named_parameters():
            if name.endswith("k_proj.bias"):
                bias[1] = bias[H + 3] = 100.0
            if name.endswith("q_proj.weight"):  # little of what tokens add meets a large bias: attention stays spread
                bias.view(-1, H, bias.shape[-1])[:, [1, 3]] *= 0.01
            if name.endswith("q_proj.bias"):
                bias.view(-1, H)[:, [1, 3]] *= 0.01
    reference.save_pretrained(tmp_path)
    checkpoint = folder.convert.open_checkpoint(tmp_path)
    rows = random_prompts(60, 60)
    without, found = (
        np.concatenate(precision.scorer(folder, checkpoint, "float32", quantize, cache, mesh)(rows))
        for cache in (None, "int8")
    )
    without, found = without[:, : config.vocab_size], found[:, : config.vocab_size]
    if quantize is None:
        with torch.no_grad():
            logits = np.concatenate([reference(torch.tensor([row])).logits[0].numpy() for row in rows])
        np.testing.assert_allclose(without, jax.nn.log_softmax(logits), atol=1e-3)
    kl = (np.exp(without) * (without - found)).sum(-1).mean()
    print(f"mean KL {kl:.1e}")
    assert 0 < kl < 1e-2  # with keys as they are, 2.5e-2 and more
