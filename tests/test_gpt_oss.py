"""What gpt_oss/ alone has: MXFP4, and what its config.json may not say."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import ROOT, assert_matches, decode, fast_of, save_random
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from test_experts import select
from test_parity import gpt_oss, oss, random_prompts
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A checkpoint as it is released, with every byte in its experts, and the reference model with what transformers
    makes of these bytes."""
    path = tmp_path_factory.mktemp("mxfp4")
    _, model_class, config = oss(num_local_experts=4)
    reference = save_random(path, model_class, config)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, exponents
        with torch.no_grad():
            reference.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32))
    save_file(tensors, path / "model.safetensors")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return path, reference


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 1, 4)], ids=str)
def test_mxfp4(mxfp4, mesh):
    path, reference = mxfp4
    assert gpt_oss.convert.open_checkpoint(path).config.experts_are_mxfp4  # and so they stay
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(gpt_oss, path, prompts, mesh, max_new_tokens=8))


@pytest.mark.parametrize(("platform", "tokens"), [("cpu", 5), ("gpu", 5), ("gpu", 1)])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (4, 1)], ids=str)
def test_output_biases(monkeypatch, mesh, platform, tokens):
    """Each is added once for each token, whichever devices share an expert or have none that a token chose."""
    random, (ep, tp), model = np.random.default_rng(1), mesh, gpt_oss.model
    monkeypatch.setattr(model, "platform", lambda: platform)
    ids = np.stack([random.permutation(8)[:3] for _ in range(tokens)]).astype(np.int32)
    scores, biases = random.random((tokens, 3), np.float32), random.standard_normal((8, 160)).astype(np.float32)

    def summed(*arguments):
        return jax.lax.psum(model.output_biases(*arguments), model.MODEL_AXES)

    one = model.make_mesh(1, ep, tp, devices=jax.devices()[: ep * tp])
    program = jax.shard_map(summed, mesh=one, in_specs=(P(), P(), P("ep")), out_specs=P(), check_vma=False)
    wanted = (scores[:, :, None].astype(float) * biases[ids]).sum(1)
    np.testing.assert_allclose(jax.jit(program)(ids, scores, biases), wanted, atol=1e-5)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_what_tpus_hold(quantize):
    """Matrices of 4 bits as their kernels take them: the released experts, and with int4 all others."""
    raw_config = json.loads((ROOT / "gpt_oss" / "configs" / "gpt-oss-20b.json").read_text())
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    model, mesh = gpt_oss.model, gpt_oss.model.make_mesh(ep=4, devices=devices)
    layer = model.abstract_weights(model.Config.from_dict(raw_config), mesh, "bfloat16", quantize)["layers"][0]
    fast = fast_of(model)
    assert {type(layer[name]) for name in ("experts_gate_up", "experts_down")} == {fast.Mxfp4Lanes}
    assert {type(layer[name]) for name in ("qkv", "o")} == {fast.Int4Lanes if quantize else model.Plain}


def test_mxfp4_for_tpus(mxfp4, monkeypatch):
    """What TPUs would hold is the same numbers, and zeros beside them."""
    model, mesh, loaded = gpt_oss.model, gpt_oss.model.make_mesh(2, 2, 2), []
    fast = fast_of(model)
    lanes = fast.Int4Groups(held=fast.Mxfp4Lanes)
    checkpoint = gpt_oss.convert.open_checkpoint(mxfp4[0])
    for kind in (model.Mxfp4, lanes):
        monkeypatch.setattr(model.Mxfp4, "for_mesh", lambda *_, kind=kind: kind)
        layer = gpt_oss.convert.load(checkpoint, mesh, "float32")["layers"][1]
        loaded.append([layer[name].values_and_scale(jnp.float32)[0] for name in ("experts_gate_up", "experts_down")])
    for w, wide, devices in zip(*loaded, (1, 2), strict=True):  # as many share a row
        wide, w = (np.asarray(a).reshape(*a.shape[:2], devices, -1) for a in (wide, w))
        np.testing.assert_array_equal(wide[..., : w.shape[-1]], w)
        assert not wide[..., w.shape[-1] :].any()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("platform", "B", "dtype"),
    [
        *(("cpu", B, np.float32) for B in (1, 40)),
        *(("gpu", B, dtype) for B in (2, 40) for dtype in (np.float32, ml_dtypes.bfloat16)),
        *(("tpu", B, np.float32) for B in (3, 140)),
    ],
)
def test_experts_in_4_bits(monkeypatch, platform, B, dtype):
    """Each way of multiplying them, against float64."""
    model, random = gpt_oss.model, np.random.default_rng(0)
    select(monkeypatch, platform, model)
    x, scores = random.standard_normal((B, 64)).astype(dtype), random.uniform(0.2, 1, (B, 2)).astype(np.float32)
    ids = np.stack([random.permutation(4)[:2] for _ in range(B)]).astype(np.int32)

    def in_4_bits(*shape, C):
        kind, width = (fast_of(model).Mxfp4Lanes, 512) if platform == "tpu" else (model.Mxfp4, C)
        codes = np.pad(random.integers(0, 16, (*shape, C), np.uint8), [*[(0, 0)] * len(shape), (0, width - C)])
        exponents = random.integers(121, 126, (*shape, width // 32), np.uint8)
        numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)[..., :C]
        numbers *= (2.0 ** (exponents - 127.0)).repeat(32, axis=-1)[..., :C]
        return kind(jnp.asarray(kind.packed(codes)), jnp.asarray(kind.ordered(kind.scales(exponents)))), numbers

    (w_gate_up, gate_and_up), (w_down, down) = in_4_bits(4, 256, C=64), in_4_bits(4, 64, C=128)
    biases = random.standard_normal((4, 256)).astype(np.float32), random.standard_normal((4, 64)).astype(np.float32)
    wanted = np.zeros(x.shape)
    for b, n in np.ndindex(B, 2):
        e = ids[b, n]
        gate, up = np.split(gate_and_up[e] @ x[b].astype(np.float64) + biases[0][e], 2)
        wanted[b] += scores[b, n] * (down[e] @ (np.tanh(gate) * up) + biases[1][e])

    def body(*arguments):
        *arguments, (of_gate_and_up, of_down) = arguments
        out = model.experts(*arguments, lambda gate, up, score: jnp.tanh(gate) * up * score, of_gate_and_up)
        return out + model.output_biases(*arguments[1:3], of_down)

    mesh = model.make_mesh(devices=jax.devices()[:1])
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    out = program(x, ids, scores, w_gate_up, w_down, biases)
    np.testing.assert_allclose(out, wanted, atol=1e-3 if dtype == np.float32 else 5e-3 * np.abs(wanted).max())


@pytest.mark.slow
def test_mxfp4_converted(mxfp4, tmp_path):
    """To bfloat16 or float32 experts stay what they are, in the form of other checkpoints. To int8 they are what
    loading in int8 gives."""
    path, reference = mxfp4
    prompts = random_prompts(30)
    gpt_oss.convert.convert(path, tmp_path / "float32", "float32")
    assert_matches(reference, prompts, decode(gpt_oss, tmp_path / "float32", prompts, (1, 2, 2), max_new_tokens=8))
    gpt_oss.convert.convert(path, tmp_path / "bfloat16", "bfloat16")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    converted = load_file(tmp_path / "bfloat16" / "model-00001-of-00001.safetensors")[name]
    np.testing.assert_array_equal(converted.float(), reference.get_parameter(name).detach())
    gpt_oss.convert.convert(path, tmp_path / "int8", "float32", "int8")
    converted = decode(gpt_oss, tmp_path / "int8", prompts, (1, 1, 4), max_new_tokens=8)
    loaded = decode(gpt_oss, path, prompts, quantize="int8", max_new_tokens=8)
    assert [token.id for token in converted[0]] == [token.id for token in loaded[0]]


def test_mxfp4_is_not_rounded_again(mxfp4, tmp_path):
    with pytest.raises(gpt_oss.model.InputError, match="down_proj is in 4 bits already, in which main"):
        gpt_oss.convert.convert(mxfp4[0], tmp_path / "int4", "bfloat16", "int4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda blocks, scales: (blocks, None), "down_proj_scales is missing"),
        (lambda blocks, scales: (blocks, scales.float()), "down_proj_scales has F32 .*, not U8"),
        (lambda blocks, scales: (blocks[..., :8], scales), r"down_proj_blocks has U8 .* 8\], not U8 .* 16\]"),
        (lambda blocks, scales: (blocks[:, 1:], scales[:, 1:]), "has shape .* and config.json asks for"),
    ],
)
def test_damaged_mxfp4(mxfp4, tmp_path, change, words):
    path, _ = mxfp4
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    blocks, scales = change(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    tensors |= {f"{name}_blocks": blocks.contiguous()} | ({} if scales is None else {f"{name}_scales": scales})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(gpt_oss.model.InputError, match=words):
        gpt_oss.convert.open_checkpoint(tmp_path)


def test_experts_in_two_formats(mxfp4, tmp_path):
    """Each weight is held as it is stored."""
    path, reference = mxfp4
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    save_file(tensors | {name: reference.get_parameter(name).detach()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    prompts = random_prompts(30, 3)
    assert_matches(reference, prompts, decode(gpt_oss, tmp_path, prompts, (1, 1, 2), max_new_tokens=4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types cannot be"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
        ({"num_local_experts": 10**6}, "num_local_experts cannot be 1000000"),
        ({"swiglu_limit": 0}, "swiglu_limit cannot be 0"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor is missing"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers cannot be"),
    ],
)
def test_what_config_json_may_not_say(changes, words):
    _, _, config = oss()
    with pytest.raises(gpt_oss.model.InputError, match=words):
        gpt_oss.model.Config.from_dict(config.to_dict() | changes)


def test_a_table_without_yarn():
    _, _, config = oss()
    read = gpt_oss.model.Config.from_dict(config.to_dict() | {"rope_parameters": {"rope_theta": 1e4}})
    assert type(read.rope) is gpt_oss.model.Rope and read.rope.rope_theta == 1e4
