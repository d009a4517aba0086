"""What deepseek/ and glm4_flash/ alone have: FP8 in blocks, the layer of multi-token prediction, what their config.json
may not say."""

import copy
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    assert_matches,
    decode,
    extra_layer_tensors,
    random_extra_layer,
    reference_logprobs,
    save_random,
)
from safetensors.torch import load_file, save_file
from test_parity import YARN, deepseek, deepseek_2, deepseek_3, deepseek_32, flash, glm4_flash, random_prompts
from transformers import CONFIG_MAPPING

SCALED = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALED += ("q_proj", "k_proj", "v_proj", "wq_b", "wk")
EXTRA = "model.layers.{}"


def as_fp8(matrix, block):
    """A matrix in e4m3, the inverse scales of its blocks, and its numbers again in float32."""
    rows, columns = (-(-size // n) for size, n in zip(matrix.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.reshape(rows, block[0], columns, block[1])
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: matrix.shape[0], : matrix.shape[1]]
    values = values.to(torch.float8_e4m3fn)
    whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values.contiguous(), scale, values.float() * whole[: matrix.shape[0], : matrix.shape[1]]


def save_fp8(path, model_class, config, block, with_extra_layer=False):
    """A checkpoint as the released FP8 ones are; the reference model has the same numbers."""
    reference = save_random(path, model_class, config)
    tensors = load_file(path / "model.safetensors")
    if with_extra_layer:
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
        tensors |= extra_layer_tensors(random_extra_layer(reference), EXTRA.format(config.num_hidden_layers))
    for name in [name for name in tensors if name.split(".")[-2] in SCALED]:
        tensors[name], tensors[f"{name}_scale_inv"], exact = as_fp8(tensors[name], block)
        owner, _, kind = name.removesuffix(".weight").rpartition(".")
        with torch.no_grad():
            if name.startswith(EXTRA.format(config.num_hidden_layers)):
                continue  # which the reference does not have
            if ".experts." in name:
                module, _, e = owner.rpartition(".")
                packed = reference.get_submodule(module)
                columns = config.moe_intermediate_size
                first = {"gate_proj": 0, "up_proj": columns}.get(kind)
                whole = packed.down_proj if first is None else packed.gate_up_proj[:, first : first + columns]
                whole[int(e)].copy_(exact)
            else:
                reference.get_parameter(name).copy_(exact)
    save_file(tensors, path / "model.safetensors")
    file = path / "config.json"
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return reference


def save_fp8_deepseek(path, block):
    """With an extra layer."""
    _, model_class, config = deepseek_3(rope_parameters=YARN, hidden_size=80)
    return save_fp8(path, model_class, config, block, with_extra_layer=True)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8")
    return path, save_fp8_deepseek(path, (32, 16))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_fp8_against_its_dequantized_twin(fp8, mesh):
    path, reference = fp8
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(deepseek, path, prompts, mesh, max_new_tokens=8))


def test_fp8_in_blocks_of_128(tmp_path):
    """Larger than most of these matrices."""
    reference = save_fp8_deepseek(tmp_path, (128, 128))
    prompts = random_prompts(9)
    assert_matches(reference, prompts, decode(deepseek, tmp_path, prompts, (1, 1, 2), max_new_tokens=4))


@pytest.mark.slow
def test_fp8_converted(fp8, tmp_path, capsys):
    """To float32 it stays what it is, with its extra layer; to int8 it is what loading in int8 gives."""
    path, reference = fp8
    prompts = random_prompts(30)
    deepseek.convert.convert(path, tmp_path / "float32", "float32")
    assert "left out 2 tensors of the checkpoint: the same as the model's own" in capsys.readouterr().err
    assert_matches(reference, prompts, decode(deepseek, tmp_path / "float32", prompts, (1, 2, 2), max_new_tokens=8))
    mesh, loaded = deepseek.model.make_mesh(devices=jax.devices()[:1]), []
    for folder in (path, tmp_path / "float32"):
        checkpoint = deepseek.convert.open_checkpoint(folder, extra_layer=True)
        loaded.append(deepseek.convert.load(checkpoint, mesh, "float32")["extra"])
    jax.tree.map(np.testing.assert_array_equal, *loaded)
    deepseek.convert.convert(path, tmp_path / "int8", "float32", "int8")
    converted = decode(deepseek, tmp_path / "int8", prompts, max_new_tokens=8)
    loaded = decode(deepseek, path, prompts, quantize="int8", max_new_tokens=8)
    assert [token.id for token in converted[0]] == [token.id for token in loaded[0]]


@pytest.mark.parametrize("change", [None, lambda s: s[:, :1], lambda s: s[:1], lambda s: s.to(torch.int8)])
def test_fp8_without_the_scales_of_its_blocks(fp8, tmp_path, change):
    path, _ = fp8
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.q_a_proj.weight_scale_inv"
    scale = tensors.pop(name)
    if change:
        tensors[name] = change(scale).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    words = (
        r"weight_scale_inv has \w+ \[.*, not BF16/F32/F16 \["
        if change
        else "is in FP8 and no matrix with a weight_scale_inv"
    )
    with pytest.raises(deepseek.model.InputError, match=words):
        deepseek.convert.open_checkpoint(tmp_path)


def test_the_routers_bias_stays_in_float32(tmp_path):
    """Whatever the dtype: a bfloat16 bias would choose other experts."""
    _, model_class, config = flash()
    reference = save_random(tmp_path / "source", model_class, config)
    glm4_flash.convert.convert(tmp_path / "source", tmp_path / "converted", "bfloat16", "int8")
    mesh = glm4_flash.model.make_mesh(devices=jax.devices()[:1])
    for folder in ("source", "converted"):
        checkpoint = glm4_flash.convert.open_checkpoint(tmp_path / folder)
        bias = glm4_flash.convert.load(checkpoint, mesh, "bfloat16")["layers"][1]["router_bias"]
        exact = reference.model.layers[1].mlp.gate.e_score_correction_bias
        np.testing.assert_array_equal(bias, exact.numpy())
        assert bias.dtype == np.float32


def test_a_layer_too_many_is_not_taken_for_the_extra_one(tmp_path):
    """Without what only that one has, it says that config.json has one layer less than the checkpoint."""
    _, model_class, config = deepseek_3()
    save_random(tmp_path, model_class, config, rewrite=lambda raw: raw | {"num_hidden_layers": 1})
    with pytest.raises(deepseek.model.InputError, match=r"layers\.1\..* is not a tensor of this model"):
        deepseek.convert.open_checkpoint(tmp_path)


def test_kimi_k2_from_the_command_line(tmp_path):
    """A model type that transformers does not know: the tokenizer is loaded all the same."""
    _, model_class, config = deepseek_3(n_group=1, topk_group=1)
    reference = save_random(tmp_path, model_class, config, rewrite=lambda raw: raw | {"model_type": "kimi_k2"})
    command = [sys.executable, ROOT / "deepseek" / "main.py", "--model_path", tmp_path, "--raw", "--prompt", "Hello!"]
    command += ["--max_new_tokens", "6", "--output", "json", "--logprobs", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[0])
    wanted = torch.log_softmax(reference(torch.tensor([row["prompt_tokens"] + row["tokens"]])).logits[0], -1)
    wanted = wanted[len(row["prompt_tokens"]) - 1 : -1].max(-1)
    assert row["tokens"] == wanted.indices.tolist()
    np.testing.assert_allclose(row["logprobs"], wanted.values.detach(), atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (deepseek_3, {"n_group": 3}, "n_group 3 does not divide 16 experts"),
        (deepseek_3, {"n_group": 16}, "n_group 16 does not divide 16 experts into groups of 2 or more"),
        (deepseek_3, {"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
        (deepseek_3, {"topk_group": 1, "num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds the 4"),
        (deepseek_3, {"qk_rope_head_dim": 7}, "must be even"),
        (deepseek_3, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (deepseek_3, {"q_lora_rank": -1}, "q_lora_rank cannot be -1"),
        (deepseek_3, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (deepseek_3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (deepseek_3, {"model_type": "deepseek_v4"}, "model_type 'deepseek_v4' is not supported"),
        (
            deepseek_32,
            {"mlp_layer_types": ["sparse", "dense"]},
            r"mlp_layer_types \['sparse', 'dense'\] is not supported",
        ),
        (deepseek_32, {"index_topk": 0}, "index_topk cannot be 0"),
        (deepseek_3, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (deepseek_3, {"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        (deepseek_3, {"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta 1.0 must exceed 1"),
        (deepseek_3, {"rope_parameters": YARN | {"rope_theta": 0}}, "rope_theta cannot be 0"),
        (deepseek_3, {"rope_parameters": YARN | {"rope_type": False}}, "rope_type False is not supported"),
        (deepseek_3, {"rope_parameters": YARN | {"beta_fast": []}}, r"beta_fast cannot be \[\]"),
        (deepseek_2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (deepseek_2, {"mlp_bias": True}, "mlp_bias True is not supported"),
        (flash, {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for"),
        (flash, {"mlp_layer_types": ["dense", "odd", "dense"]}, "mlp_layer_types cannot be"),
        (flash, {"model_type": "glm4_moe"}, "model_type 'glm4_moe' is not supported"),
    ],
)
def test_configurations_that_cannot_be(family, changes, words):
    modules, _, config = family()
    with pytest.raises(modules.model.InputError, match=words):
        modules.model.Config.from_dict(config.to_dict() | changes)


def test_latents_of_2048_numbers_in_bfloat16(tmp_path):
    """On CPUs, rows of other weights that are so long are stored somewhat wider."""
    _, model_class, config = deepseek_3(kv_lora_rank=2048, num_hidden_layers=1)
    reference = save_random(tmp_path, model_class, config)
    (prompt,) = random_prompts(7)
    ((token, _),) = decode(deepseek, tmp_path, [prompt], dtype="bfloat16", max_new_tokens=2)
    assert token.logprob == pytest.approx(reference_logprobs(reference, prompt, [token.id])[0, token.id], abs=0.3)


@pytest.mark.parametrize(("name", "billions"), [("deepseek-r1", 671), ("moonlight-16b-a3b", 16), ("kimi-k2.6", 1027)])
def test_a_released_configuration(name, billions):
    """Is what transformers' class makes of it, and has as many weights as its model card says."""
    raw, read = (
        json.loads((ROOT / "deepseek" / "configs" / f"{name}.json").read_text()),
        deepseek.model.Config.from_dict,
    )
    reference = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    config = read(raw)
    assert config == read(json.loads(reference.to_json_string()))
    count = sum(np.prod(s) for w in jax.tree.leaves(deepseek.model.weights_of(config)) for s in w.tensors().values())
    assert count / 1e9 == pytest.approx(billions, rel=0.03)
