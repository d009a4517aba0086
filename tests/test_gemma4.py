"""What gemma4/ alone has: heads that differ by layer, layers that share keys and values, per-layer embeddings, and the
forms of its config.json."""

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, assert_matches, decode, read_in_pieces, save_random
from safetensors.torch import load_file, save_file
from test_compile import COLLECTIVE, KERNEL, compile_step, full_size, largest_copy, tpu_mesh
from test_parity import gemma4, gemma_4_moe, gemma_4_nested, gemma_4_small, random_prompts
from transformers import CONFIG_MAPPING

model, generate = gemma4.model, gemma4.generate
CONFIGS = sorted(file.stem for file in (ROOT / "gemma4" / "configs").glob("*.json"))


def read_raw(name):
    return json.loads((ROOT / "gemma4" / "configs" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("written_again", [False, True], ids=["", "by transformers 5"])
def test_a_released_configuration_is_read_as_transformers_reads_it(name, written_again):
    raw = read_raw(name)
    reference = CONFIG_MAPPING[raw["model_type"]](**raw)
    config = model.Config.from_dict(json.loads(reference.to_json_string()) if written_again else raw)
    reference = reference.get_text_config()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(config, field) == getattr(reference, field)
    for field in ("num_kv_shared_layers", "use_double_wide_mlp", "attention_k_eq_v", "rms_norm_eps"):
        assert getattr(config, field) == getattr(reference, field)
    for field in ("hidden_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts"):
        assert getattr(config, field) == (getattr(reference, field, 0) or 0)
    assert config.final_logit_softcapping == (reference.final_logit_softcapping or 0)
    for i, (of_layer, sharing) in enumerate(zip(reference.per_layer_config, reference.kv_sharing_modes, strict=True)):
        kind, type_ = config.kind(i), reference.layer_types[i]
        table, rope = reference.rope_parameters[type_], kind.rope
        assert kind.mask.window == (reference.sliding_window if type_ == "sliding_attention" else None)
        assert (kind.head_dim, kind.num_key_value_heads) == (of_layer.head_dim, of_layer.num_key_value_heads)
        assert kind.is_shared == (sharing == "reuse")
        assert (type(rope), rope.dim) == (model.ROPES[table["rope_type"]], kind.head_dim)
        assert rope.rope_theta == table["rope_theta"]
        assert rope.partial_rotary_factor == table.get("partial_rotary_factor", 1)
        if kind.is_shared:
            stored = [j for j in range(i) if reference.kv_sharing_modes[j] == "store"]
            assert config.source(i) == max(j for j in stored if reference.layer_types[j] == type_)


def test_what_is_cached_and_what_is_read():
    """Gemma 4 E2B with rows of 4,096 tokens: 15 of 35 layers cache, and 35 read. Of the embedding of each layer, larger
    than all other weights, a step reads one row for each token."""
    config, mesh = model.Config.from_dict(read_raw("gemma-4-e2b")), model.make_mesh(devices=jax.devices("cpu")[:1])
    weights = model.abstract_weights(config, mesh, jnp.bfloat16)
    cache = model.abstract_cache(config, mesh, 2, 4096, jnp.bfloat16, "int8")
    shapes = [layer.k.shape for layer in cache]
    assert shapes.count((2, 1, 1536, 256)) == 12 and shapes.count((2, 1, 4096, 512)) == 3 and len(shapes) == 15
    # Of each token of a layer, keys and values, and a scale of 4 bytes for either.
    read = 2 * (28 * 512 * 2 * 260 + 7 * 4096 * 2 * 516)
    assert model.cache_bytes_read(cache, [4096, 4096], config) == read
    table = model.stored_bytes(weights["per_layer_embedding"])
    others = model.stored_bytes({name: weight for name, weight in weights.items() if name != "per_layer_embedding"})
    assert table > others * 0.9
    assert generate.step_bytes(weights, cache, [4096, 4096], config, 2) == others + read + 2 * 35 * 256 * 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), [(gemma_4_small, (2, 2, 2)), (gemma_4_moe, (1, 1, 2))])
def test_rows_take_the_places_of_others(tmp_path, monkeypatch, family, mesh):
    """More prompts than rows, in several pieces and at different times, and drafts."""
    read_in_pieces(monkeypatch, gemma4, 64)
    _, *reference = family()
    reference = save_random(tmp_path, *reference)
    prompts, options = random_prompts(250, 9, 130, 70, 2), {"draft": "lookup", "draft_tokens": 3}
    assert_matches(reference, prompts, decode(gemma4, tmp_path, prompts, mesh, rows=2, max_new_tokens=20, **options))


@pytest.mark.slow
def test_released_form(tmp_path):
    """Layers that share keys and values have tensors for them in a release, which say nothing."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    _, *reference = gemma_4_nested(**layers, num_kv_shared_layers=2, hidden_size_per_layer_input=20)
    reference = save_random(tmp_path / "released", *reference)
    file = tmp_path / "released" / "model.safetensors"
    tensors, prompts = load_file(file), random_prompts(70, 3)
    for i in (2, 3):
        for part in ("k_proj", "k_norm", "v_proj"):
            name = f"model.language_model.layers.{{}}.self_attn.{part}.weight"
            if name.format(i - 2) in tensors:
                tensors[name.format(i)] = tensors[name.format(i - 2)] * 3
    save_file(tensors, file)
    assert_matches(reference, prompts, decode(gemma4, file.parent, prompts, (1, 1, 2), max_new_tokens=8))
    gemma4.convert.convert(file.parent, tmp_path / "int8", "float32", "int8")
    converted, loaded = (
        decode(gemma4, path, prompts, (1, 1, 4), quantize=quantize, max_new_tokens=8)
        for path, quantize in ((tmp_path / "int8", None), (file.parent, "int8"))
    )
    assert [token.id for row in converted for token in row] == [token.id for row in loaded for token in row]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "layers", "ep", "tp", "quantize", "T"),
    [
        ("gemma-4-31b", {"num_hidden_layers": 6}, 1, 8, "int8", 1),
        ("gemma-4-31b", {"num_hidden_layers": 6}, 1, 8, "int4", 4),
        ("gemma-4-26b-a4b", {"num_hidden_layers": 6}, 4, 2, None, 1),
        ("gemma-4-e2b", {"num_hidden_layers": 10, "num_kv_shared_layers": 5}, 1, 8, None, 1),
    ],
)
def test_full_size_on_tpus(name, layers, ep, tp, quantize, T):
    """Two all-reduces a layer, since those of MLP and experts are one; one for the embeddings, one all-gather for new
    tokens, and one for what the layers get besides."""
    config = full_size(name, "gemma4", **layers)
    quantize_cache, layers = quantize and "int8", config.num_hidden_layers
    options = 8, 2048, quantize, "gemma4", quantize_cache, T
    text = compile_step(config, tpu_mesh("v5e:2x4", tp, ep), *options).as_text()
    kernels, counts = Counter(KERNEL.findall(text)), Counter(COLLECTIVE.findall(text))
    gathers = set(re.findall(r" all-gather(?:-start)?\(.* channel_id=(\d+)", text))  # one may be cut into pieces
    assert counts["all-reduce"] == 2 * layers + 1 and counts.keys() == {"all-reduce", "all-gather"}
    assert len(gathers) == 1 + bool(config.hidden_size_per_layer_input)
    sharing = sum(config.kind(i).num_key_value_heads < 8 for i in range(layers))
    assert kernels["ragged_attention"] == layers and kernels["exchange"] == 2 * sharing
    assert kernels["experts"] == layers * config.enable_moe_block
    assert largest_copy(text) < 2**20


SHARES = "num_kv_shared_layers 35 leaves no layer whose keys and values another of its kind could share"
DIFFERS = "per_layer_config must give all full_attention layers the same"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma-4-e2b", {"num_kv_shared_layers": 35}, SHARES),
        ("gemma-4-e2b", {"layer_types": ["full_attention"] * 34}, "layer_types has 34 entries for 35 layers"),
        ("gemma-4-31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ("gemma-4-31b", {"attention_bias": True}, "attention_bias True is not supported"),
        ("gemma-4-31b", {"num_global_key_value_heads": 5}, "num_key_value_heads 5 does not divide"),
        ("gemma-4-31b", {"per_layer_config": {"4": {"head_dim": 512}}}, DIFFERS),
        ("gemma-4-31b", {"per_layer_config": {"59": {"head_dim": 512}}}, DIFFERS),
        ("gemma-4-31b", {"rope_parameters": {"full_attention": {"rope_type": "ntk"}}}, "rope_type 'ntk'"),
        ("gemma-4-26b-a4b", {"top_k_experts": None}, "top_k_experts is missing"),
        ("gemma-4-26b-a4b", {"top_k_experts": 129}, "top_k_experts 129 exceeds num_experts 128"),
    ],
)
def test_refused(name, changes, words):
    raw = read_raw(name)
    with pytest.raises(model.InputError, match=words):
        model.Config.from_dict(raw | {"text_config": raw["text_config"] | changes})
    with pytest.raises(model.InputError, match="model_type 'gemma4_assistant' is not supported"):
        model.Config.from_dict(raw | {"model_type": "gemma4_assistant"})
    assert np.isfinite(model.Config.from_dict(raw).rms_norm_eps)
