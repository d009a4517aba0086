"""What llama4/ alone has: FP8 experts, the cache of chunked layers, what its config.json may not say."""

import json

import jax
import jax.numpy as jnp
import pytest
import torch
from helpers import assert_matches, decode, import_folder, save_random
from safetensors.torch import load_file, save_file
from test_parity import llama_4, llama_4_with_vision, random_prompts

llama4 = import_folder("llama4")


def as_fp8(packed):
    """Of experts [E, input, output], each as a matrix [output, input] in e4m3 with a scale for each row, and those
    numbers again [E, input, output] in float32."""
    matrices = packed.transpose(1, 2).contiguous()
    scale = (matrices.abs().amax(-1, keepdim=True) / 448).bfloat16()
    values = (matrices / scale.float()).to(torch.float8_e4m3fn)
    return values, scale, (values.float() * scale.float()).transpose(1, 2)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A checkpoint as the released FP8 Maverick has it, and the reference model with the same numbers."""
    path = tmp_path_factory.mktemp("fp8")
    _, model_class, config = llama_4_with_vision(interleave_moe_layer_step=2)
    reference = save_random(path, model_class, config)
    tensors = load_file(path / "model.safetensors")
    parameters = dict(reference.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        values, scale, dequantized = as_fp8(tensors.pop(name))
        with torch.no_grad():
            parameters[f"model.{name}" if f"model.{name}" in parameters else name].copy_(dequantized)
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for e in range(len(values)):
            for part, v, s in zip(parts, values[e].chunk(len(parts)), scale[e].chunk(len(parts)), strict=True):
                tensors[f"{prefix}.{e}.{part}.weight"] = v.clone()
                tensors[f"{prefix}.{e}.{part}.weight_scale"] = s.clone()
    save_file(tensors, path / "model.safetensors")
    file = path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"quantization_config": {"quant_method": "compressed-tensors"}}))
    return path, reference


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_fp8(fp8, mesh):
    path, reference = fp8
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(llama4, path, prompts, mesh, max_new_tokens=8))


def test_fp8_converted(fp8, tmp_path):
    """To float32 it stays what it is; to int8 it is what loading in int8 gives."""
    path, reference = fp8
    prompts = random_prompts(30)
    llama4.convert.convert(path, tmp_path / "float32", "float32")
    assert_matches(reference, prompts, decode(llama4, tmp_path / "float32", prompts, (1, 2, 2), max_new_tokens=8))
    llama4.convert.convert(path, tmp_path / "int8", "float32", "int8")
    converted = decode(llama4, tmp_path / "int8", prompts, max_new_tokens=8)
    loaded = decode(llama4, path, prompts, quantize="int8", max_new_tokens=8)
    assert [token.id for token in converted[0]] == [token.id for token in loaded[0]]


@pytest.mark.parametrize("change", [None, lambda s: s[:-1], lambda s: s[:1], lambda s: s.to(torch.int8)])
def test_fp8_without_the_scales_of_its_rows(fp8, tmp_path, change):
    path, _ = fp8
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale"))
    scale = tensors.pop(name)
    if change:
        tensors[name] = change(scale).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    words = (
        r"weight_scale has \w+ \[.*, not BF16/F32/F16 \[" if change else "is in FP8 and no matrix with a weight_scale"
    )
    with pytest.raises(llama4.model.InputError, match=words):
        llama4.convert.open_checkpoint(tmp_path)


def test_a_chunked_layer_holds_a_chunk_and_a_piece():
    _, _, config = llama_4(attention_chunk_size=1024, num_hidden_layers=5, no_rope_layer_interval=4)
    config = llama4.model.Config.from_dict(config.to_dict())
    mesh = llama4.model.make_mesh(1, 1, 4, devices=jax.devices()[:4])  # two devices share a kv head
    cache = llama4.model.abstract_cache(config, mesh, 2, 5000, jnp.float32)
    slots = [2 * layer.k.shape[2] for layer in cache]
    assert slots[:3] == [2048] * 3 and slots[4] == 2048 and 5000 <= slots[3] < 6300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_rope_layers": [1, 1]}, "no_rope_layers has 2 entries for 5 layers"),
        ({"no_rope_layers": [1, 2, 0, 1, 1]}, "no_rope_layers cannot be"),
        ({"moe_layers": [0, -1]}, "moe_layers cannot be"),
        ({"moe_layers": "all"}, "moe_layers cannot be"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types cannot be"),
        ({"interleave_moe_layer_step": 0, "moe_layers": None}, "interleave_moe_layer_step cannot be 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds num_local_experts 4"),
        ({"num_local_experts": 0}, "num_local_experts cannot be 0"),
        ({"num_local_experts": 10**6}, "num_local_experts cannot be 1000000"),
        ({"num_hidden_layers": 2**31 - 1, "moe_layers": None}, "num_hidden_layers cannot be 2147483647"),
        ({"attention_chunk_size": None}, "attention_chunk_size is missing"),
        ({"attention_chunk_size": -4}, "attention_chunk_size cannot be -4"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ],
)
def test_configurations_that_cannot_be(changes, words):
    _, _, config = llama_4(num_hidden_layers=5)
    with pytest.raises(llama4.model.InputError, match=words):
        llama4.model.Config.from_dict(config.to_dict() | changes)


def test_a_config_without_its_text_model():
    with pytest.raises(llama4.model.InputError, match="text_config must be a table"):
        llama4.model.Config.from_dict({"model_type": "llama4"})


def test_chunks_of_any_length(tmp_path):
    """A prime chunk, and one longer than anything."""
    for chunk in (37, 4096):
        _, model_class, config = llama_4(attention_chunk_size=chunk)
        reference = save_random(tmp_path / str(chunk), model_class, config)
        prompts = random_prompts(200, 36, 37, 38)
        assert_matches(reference, prompts, decode(llama4, tmp_path / str(chunk), prompts, max_new_tokens=8))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"interleave_moe_layer_step": 0, "num_local_experts": 0, "num_experts_per_tok": 0}, (1, 2, 2)),
        ({"attention_chunk_size": None, "no_rope_layers": [1, 0], "attn_temperature_tuning": False}, (1, 1, 3)),
    ],
    ids=["as Llama Guard 4", "no chunks"],
)
def test_no_layer_has_experts(tmp_path, options, mesh):
    """Without the list layer_types, than which releases are older."""

    def rewrite(raw):
        return raw | {"text_config": {name: x for name, x in raw["text_config"].items() if name != "layer_types"}}

    _, model_class, config = llama_4_with_vision(moe_layers=[], **options)
    reference = save_random(tmp_path, model_class, config, rewrite=rewrite)
    assert not [
        name for name in llama4.convert.open_checkpoint(tmp_path).tensors if "expert" in name or "router" in name
    ]
    prompts = random_prompts(200, 36, 5)
    assert_matches(reference, prompts, decode(llama4, tmp_path, prompts, mesh, max_new_tokens=8))
    llama4.convert.convert(tmp_path, tmp_path / "int8", "float32", "int8")
    converted = decode(llama4, tmp_path / "int8", prompts, mesh, max_new_tokens=8)
    loaded = decode(llama4, tmp_path, prompts, mesh, quantize="int8", max_new_tokens=8)
    assert [[token.id for token in row] for row in converted] == [[token.id for token in row] for row in loaded]
