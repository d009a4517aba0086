"""A folder without fast.py: the same tokens, without 4 bits. And what fast.py says of each machine and format."""

import importlib
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST_OF, ROOT, UNKNOWN_PROMPT, decode, fast_of, import_folder, read_in_pieces
from jax import P
from shared import folders

GOLDEN = json.loads((ROOT / "tests" / "golden_tokens.json").read_text())
PLATFORMS = ("cpu", "gpu", "tpu")


@pytest.mark.sampled
@pytest.mark.parametrize("name", folders()[2:] + folders()[:2])  # by default gemma4, gpt_oss, deepseek
def test_demos_without_it(name, monkeypatch):
    """As transformers in float32, on two devices, which share each expert and some kv head."""
    folder, demo = import_folder(name, without="fast"), ROOT / name / "demo"
    assert not folder.model.FAST and not folder.model.PRODUCTS
    read_in_pieces(monkeypatch, folder, 256)
    monkeypatch.setattr(folder.generate, "PREFILL_TOKENS", 256)  # one row at a time, since all take another program
    prompts = [row.get("prompt_tokens", UNKNOWN_PROMPT) for row in GOLDEN[name]]
    rows = decode(folder, demo, prompts, (1, 1, 2), max_new_tokens=max(len(row["tokens"]) for row in GOLDEN[name]))
    for row, golden in zip(rows, GOLDEN[name], strict=True):
        row = row[: len(golden["tokens"])]
        assert [token.id for token in row] == golden["tokens"]
        np.testing.assert_allclose([token.logprob for token in row], golden["logprobs"], atol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("name", folders())
def test_model_alone(name, tmp_path):
    """`forward`, where there is only model.py: of an answer it gives the tokens, one after each before it."""
    shutil.copy(ROOT / name / "model.py", tmp_path)
    alone, folder = import_folder(tmp_path, ("model",)).model, import_folder(name)
    checkpoint = folder.convert.open_checkpoint(ROOT / name / "demo")
    mesh, config = alone.make_mesh(devices=jax.devices()[:1]), checkpoint.config
    loaded = folder.convert.load(checkpoint, mesh, "float32")
    config = alone.Config(**{field: getattr(config, field) for field in config.__dataclass_fields__})
    weights = jax.tree.unflatten(
        jax.tree.structure(alone.abstract_weights(config, mesh, jnp.float32)), jax.tree.leaves(loaded)
    )
    golden = GOLDEN[name][0]
    tokens = jnp.array([golden["prompt_tokens"] + golden["tokens"][:-1]])
    cache = alone.zeros(alone.abstract_cache(config, mesh, 1, tokens.shape[1], jnp.float32))

    def body(weights, tokens, cache):
        positions = jnp.arange(tokens.shape[1])[None]
        x, _ = alone.forward(weights, tokens, alone.Span(positions, None, None, 1, 1), cache, config)
        return alone.output_logits(weights, x[0], config)

    program = jax.jit(alone.sharded(body, mesh, weights, config, (P("dp"), alone.CACHE_SPEC), P()))
    logits = program(weights, tokens, cache)[len(golden["prompt_tokens"]) - 1 :]
    assert jnp.argmax(logits, axis=-1).tolist() == golden["tokens"]


@pytest.mark.slow
def test_numbers_of_4_bits_without_it(tmp_path, capsys):
    """What convert.py wrote in 4 bits gives the same tokens. To round to 4 bits is refused."""
    folder, without = import_folder("llama3"), import_folder("llama3", without="fast")
    folder.convert.convert(ROOT / "llama3" / "demo", tmp_path / "int4", "float32", "int4")
    capsys.readouterr()
    prompts = [row["prompt_tokens"] for row in GOLDEN["llama3"][:-1]]
    rows = [decode(each, tmp_path / "int4", prompts, max_new_tokens=8) for each in (folder, without)]
    assert re.fullmatch("note: without fast.py, weights in 4 bits .*\n", capsys.readouterr().err)
    for row, other in zip(*rows, strict=True):
        assert [token.id for token in row] == [token.id for token in other]
        np.testing.assert_allclose([t.logprob for t in row], [t.logprob for t in other], atol=1e-3)
    with pytest.raises(without.model.InputError, match=r"int4 needs fast\.py"):
        decode(without, ROOT / "llama3" / "demo", prompts, quantize="int4")


def test_a_package_has_it(tmp_path, monkeypatch):
    """In a folder that was copied into a package, and whose imports were made relative."""
    (tmp_path / "copied").mkdir()
    for name in ("model", "fast", "generate"):
        text = re.sub(r"^from model\b", "from .model", (ROOT / "llama3" / f"{name}.py").read_text(), flags=re.M)
        text = re.sub(r"^( *)import (model|fast)\b", r"\1from . import \2", text, flags=re.M)
        (tmp_path / "copied" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    generate = importlib.import_module("copied.generate")
    assert generate.fast and "int4" in generate.model.FORMATS


@pytest.mark.parametrize("name", folders())
def test_each_machine_has_a_row_for_each_format(name):
    """`product` would take the place of what is missing, without a word."""
    model = import_folder(name).model
    fast = fast_of(model)
    wanted = {(platform, kind) for platform in PLATFORMS for kind in (model.Plain, model.Int8, fast.Int4)}
    wanted |= {("tpu", fast.Int4Lanes)}
    if hasattr(model, "Mxfp4"):
        wanted |= {("cpu", model.Mxfp4), ("gpu", model.Mxfp4), ("tpu", fast.Mxfp4Lanes)}
    assert set(model.PRODUCTS) == wanted
    for function, platform in model.FAST:
        assert getattr(model, function).plain and platform in PLATFORMS


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 640), (8, 2, 4, 128)])
def test_norms(platform, shape):
    """Rows of every size, one of zeros among them, against numpy in float64."""
    x = np.random.default_rng(1).standard_normal(shape) * np.logspace(-12, 12, shape[0]).reshape(
        -1, *[1] * len(shape[1:])
    )
    x = np.concatenate([x, 0 * x[:1]]).astype(np.float32)
    found = import_folder("llama3").model.FAST["inverse_rms", platform](x, 1e-5)
    wanted = 1 / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.broadcast_to(found, x.shape), np.broadcast_to(wanted, x.shape), rtol=1e-6)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_turned_for_tpus(share, interleaved):
    """The same numbers to the last bit, in the same order. (The block is the same text in each folder.)"""
    model = import_folder("llama3").model
    rope = model.Rope(size=48, interleaved=interleaved, rope_theta=1e4, partial_rotary_factor=share)
    x = jax.random.normal(jax.random.key(1), (2, 3, 5, 48)) * 100
    cos, sin = model.cos_and_sin(jnp.array([[0, 1, 2], [7, 1000, 1001]]), rope)
    found = model.FAST["turned", "tpu"](x, cos, sin, rope)
    np.testing.assert_array_equal(found, model.turned.plain(x, cos, sin, rope))


@pytest.mark.parametrize(("starts", "window"), [((5, 300), None), ((40, 2900), None), ((2900, 9000), 2500)])
@pytest.mark.parametrize("quantize", ["", "int8"])
def test_attention_of_few_tokens_on_cpus(monkeypatch, starts, window, quantize):
    """Of 3,072 slots a tenth, most, or all of a ring are filled: as attention in plain JAX."""
    model = import_folder("llama3").model
    numbers = [jax.random.normal(jax.random.key(i), (2, 2, 3072, 16)) for i in range(2)]
    cache = model.LayerCache(*(model.quantize(x) if quantize else model.Plain(x) for x in numbers))
    q, mask = jax.random.normal(jax.random.key(2), (2, 2, 1, 3 * 5, 16)), model.Mask(window=window)
    given = q, cache, jnp.array(starts), None, mask, 3, 1, 5
    found = jax.jit(lambda: model.FAST["attend_to_stored", "cpu"](*given))()
    monkeypatch.delitem(model.FAST, ("query_key_product", "cpu"))
    np.testing.assert_allclose(found, model.attend_to_stored.plain(*given), atol=2e-5)


def test_an_error_in_it_is_no_absence(tmp_path):
    """generate.py goes on without fast.py where there is none, and not where a package is missing."""
    shutil.copytree(ROOT / "llama3", tmp_path / "llama3", ignore=shutil.ignore_patterns("demo", "configs"))
    (tmp_path / "llama3" / "fast.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        import_folder(tmp_path / "llama3")
    assert not any("a_package" in str(module) for module in FAST_OF)


@pytest.mark.parametrize(("experts", "is_right"), [(127, True), (128, False), (256, True)])
def test_kernels_for_gpus_count_in_32_bits(experts, is_right):
    """gpt-oss-120b in int8 has 2.17e9 numbers in gate and up. Pallas takes 64 bits beyond 2**32 bytes alone."""
    model = import_folder("mixtral").model
    fast = fast_of(model)
    x = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16)
    for format, has_bytes in ((model.Int8, True), (model.Plain, False)):
        w = format.declare((experts, 4128, 4096), jnp.bfloat16)  # of 127, just below 2**31
        assert fast.tiles_suit(x, w) == (is_right or not has_bytes)
