"""What bfloat16 and int8 cost on the demo: the KL divergence from float32 of the next token's distribution."""

import json
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    decode,
    environment_of_users,
    floats,
    import_folder,
    in_format,
    reference_logprobs,
    save_random,
)
from shared import folders
from test_parity import gemma_3, glm, glm_moe, llama, oss, qwen_2, qwen_3, qwen_35, random_prompts
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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("folder", "dtype", "quantize", "quantize_cache", "mesh", "limit"),
    [
        *((folder, "bfloat16", None, None, (1, 1, 1), 2e-3) for folder in ("llama4", "deepseek", "glm5", "qwen3_5")),
        *((folder, "bfloat16", "int8", "int8", (1, 2, 2), 2e-2) for folder in ("deepseek", "gpt_oss", "gemma", "gpt2")),
        ("gemma4", "bfloat16", "int8", "int8", (1, 2, 2), 5e-2),  # bfloat16 alone gives 1e-2
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


def test_the_program():
    """benchmarks/precision.py as it is called, with two of its formats."""
    two = "precision.FORMATS = {name: precision.FORMATS[name] for name in ('float32', 'int8 cache')}"
    program = f"import sys; sys.path.insert(0, 'benchmarks'); import precision; {two}; precision.run(precision.main)"
    command = [
        sys.executable,
        "-c",
        program,
        "llama3",
        "--model_path",
        "llama3/demo",
        "--tokens",
        "48",
        "--window",
        "16",
    ]
    finished = subprocess.run(command, cwd=ROOT, env=environment_of_users(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    _, exact, rounded = (line.split() for line in finished.stdout.splitlines())
    assert exact[:2] == ["float32", "0.0e+00"] and rounded[:2] == ["int8", "cache"] and 0 < float(rounded[2]) < 2e-3


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
def test_a_single_row_on_a_cpu_is_one_loop(monkeypatch, quantize):
    """What makes it fast without AMX shows in the program: the weights are not turned to float32 in memory, nor handed
    to a library (either took ten times as long)."""
    monkeypatch.setattr(FOLDERS["llama3"].fast, "has_amx", lambda: False)
    x = jnp.ones((1, 1024), jnp.bfloat16)
    w = in_format(model, jnp.ones((4096, 1024), jnp.bfloat16), quantize)
    program = jax.jit(model.linear).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4096 * 1024 * 4 / 8
    reductions = [line for line in program.as_text().splitlines() if "/reduce" in line and " fusion(" in line]
    assert len(reductions) == 1 and "kind=kLoop" in reductions[0]


@pytest.mark.sampled
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
        (60, 96, jnp.bfloat16),  # int8 weights are cast, with AMX from 513 rows on
        (60, 2**16, jnp.bfloat16),  # in five pieces
        (130, 2**16, jnp.float32),
        (200, 96, jnp.bfloat16),
        (600, 96, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("has_amx", [False, True])
def test_products_on_a_cpu(monkeypatch, rows, contracted, dtype, quantize, has_amx):
    """Every form of a product against float64."""
    monkeypatch.setattr(FOLDERS["llama3"].fast, "has_amx", lambda: has_amx)
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, contracted)).astype(dtype)
    w = jax.random.normal(keys[1], (70, contracted)).astype(dtype)
    if contracted == 2048 and not quantize:
        w = jnp.pad(w, ((0, 0), (0, 32)))  # see Format.width
    w = in_format(model, w, quantize)
    wanted = floats(x) @ floats(w)[:, :contracted].T
    tolerance = 5e-3 if quantize else 1e-4 * max(1, contracted / 1024)
    if quantize and has_amx and rows >= 50 and contracted >= 2048:
        # An activation in 15 bits is off by a 60,000th of its row's largest at most. Errors add up as roots do.
        tolerance = 2e-4 * contracted**0.5
    linear = jax.jit(lambda *arguments: model.linear(*arguments))  # of model.linear, jit has what another case compiled
    np.testing.assert_allclose(linear(x, w), wanted, atol=tolerance)


# Of 32 numbers of a key two become large, each of another pair; in GLM one of them does not turn. As
# in Qwen2 and Gemma 3, queries are small there, and so no score is large.
LARGE, TURNED = [2, 19], [2, 3, 10, 11, 18, 19]  # these numbers, and all that turn with them, in each order of pairs


def enlarge_biases(attention, size):
    q, k = attention.q_proj, attention.k_proj
    k.bias.view(-1, 32)[:, LARGE] = size
    for of_q in (q.weight.view(4, 32, -1), q.bias.view(4, 32, 1)):
        of_q[:, TURNED] /= max(size / 4, 1)


def enlarge_norms(attention, size, added=0, turned=TURNED):
    """`added`: norms multiply by so much more than their weights."""
    for norm, factor, places in (attention.k_norm, max(size, 1), LARGE), (attention.q_norm, 1 / max(size, 1), turned):
        norm.weight[places] = (norm.weight[places] + added) * factor - added


def enlarge_sums(attention, size):
    enlarge_norms(attention, size, 1, [6, *TURNED])  # in Qwen3.5 a quarter of a key turns


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("build", "enlarge", "mesh"),
    [
        (qwen_2, enlarge_biases, (1, 1, 1)),
        (glm, enlarge_biases, (1, 1, 2)),
        (glm_moe, enlarge_biases, (1, 2, 4)),
        (partial(oss, num_experts_per_tok=8), enlarge_biases, (1, 2, 1)),  # all, or rounding would choose others
        (qwen_3, enlarge_norms, (1, 1, 4)),
        (partial(glm_moe, use_qk_norm=True), enlarge_norms, (1, 2, 1)),
        (gemma_3, enlarge_sums, (1, 1, 2)),
        (qwen_35, enlarge_sums, (1, 1, 1)),
    ],
)
def test_an_int8_cache_of_keys_with_large_numbers(tmp_path, build, enlarge, mesh):
    """It costs about what it costs where all numbers of a key are small."""
    folder, model_class, config = build(head_dim=32, num_attention_heads=4)
    reference = save_random(tmp_path, model_class, config)
    rows, means = random_prompts(90, 60), []
    for size in (0, 100):
        with torch.no_grad():
            for layer in reference.model.layers:
                if hasattr(layer, "self_attn"):
                    enlarge(layer.self_attn, size)
            exact = [reference(torch.tensor([row])).logits[0].log_softmax(-1).numpy() for row in rows]
        reference.save_pretrained(tmp_path)
        checkpoint = folder.convert.open_checkpoint(tmp_path)
        found = precision.scorer(folder, checkpoint, "float32", None, "int8", mesh)(rows)
        pairs = [(e, y[:, : e.shape[1]]) for e, y in zip(exact, found, strict=True)]
        means.append(np.mean(np.concatenate([(np.exp(e) * (e - y)).sum(-1) for e, y in pairs])))
    print("mean KL {:.1e}, with large numbers {:.1e}".format(*means))
    assert 0 < means[1] < 2 * means[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("build", "enlarge", "quantize", "mesh"),
    [
        (qwen_2, enlarge_biases, None, (1, 1, 4)),
        (qwen_2, enlarge_biases, "int8", (1, 2, 2)),
        (partial(glm, attention_bias=True), enlarge_biases, "int4", (1, 1, 2)),
        (qwen_3, enlarge_norms, None, (1, 1, 2)),
    ],
)
def test_even_keys_change_no_bit(tmp_path, monkeypatch, build, enlarge, quantize, mesh):
    folder, model_class, config = build(head_dim=32, num_attention_heads=4)
    reference = save_random(tmp_path, model_class, config)
    with torch.no_grad():
        for layer in reference.model.layers:
            enlarge(layer.self_attn, 100)
    reference.save_pretrained(tmp_path)
    checkpoint, rows = folder.convert.open_checkpoint(tmp_path), random_prompts(60, 30)
    found = precision.scorer(folder, checkpoint, "float32", quantize, None, mesh)(rows)
    monkeypatch.delattr(folder.model, "even_norms" if enlarge is enlarge_norms else "even_keys")
    without = precision.scorer(folder, checkpoint, "float32", quantize, None, mesh)(rows)
    for one, other in zip(found, without, strict=True):
        np.testing.assert_array_equal(one, other)
