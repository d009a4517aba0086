"""Checkpoints as people have them: quantized by other tools, patched, in pieces, half there, or something else.

References are transformers' classes with the numbers that the files stand for.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_matches, decode, experts_apart, import_folder, save_random
from safetensors.torch import load_file, save_file
from test_deepseek import as_fp8
from test_four_bits import (
    LINEAR,
    RELEASES,
    awq,
    config_of,
    dense_parameter,
    gptq,
    gptq_2,
    lowest_first,
    pack_quantized,
    save_in_4_bits,
)
from test_parity import (
    gemma_3,
    glm,
    llama,
    llama3,
    mixtral_8,
    qwen_2,
    qwen_3_moe,
    qwen_35_moe,
    qwen_35_with_vision,
    random_prompts,
)
from transformers import AutoModelForCausalLM

PROMPTS = random_prompts(23, 3)


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def matrices(tensors):
    return [name for name in tensors if name.endswith("_proj.weight")]


# ---------------------------------------------------------------------------------------------------------------------
# GPTQ's zeros


def save_gptq(folder, family, store, is_quantized, seed, **settings):
    """A random model in GPTQ with groups of 16. In the first group of outputs 2 to 6 no weight is negative: zeros are
    0. `store` packs zeros [groups, O]. Codes are those of the weights, or random. Returns the model of the numbers."""
    random = np.random.default_rng(seed)
    _, *reference = family()
    reference = save_random(folder, *reference)
    tensors, parameters = load_file(folder / "model.safetensors"), dict(reference.named_parameters())
    for name in matrices(tensors):
        weight = tensors.pop(name).float().numpy()
        O, C = weight.shape
        weight[2:7, :16] = np.abs(weight[2:7, :16])
        groups = np.pad(weight, [(0, 0), (0, -C % 16)]).reshape(O, -1, 16)
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = ((high - low) / 15).astype(np.float16)
        zero = np.rint(-low / scale.astype(np.float32)).astype(int)
        if not is_quantized:
            zero = random.integers(4, 12, zero.shape)
            zero[2:7, 0] = 0
        places = np.arange(C) // 16
        codes = np.clip(np.rint(weight / scale.astype(np.float32)[:, places]) + zero[:, places], 0, 15).astype(int)
        codes = codes if is_quantized else random.integers(0, 16, codes.shape)
        numbers = (codes - zero[:, places]) * scale[:, places].astype(np.float64)
        packed = gptq(name, codes, zero + 1, scale, places.astype(np.int32))  # of the zeros themselves
        packed[name.replace("weight", "qzeros")] = store(zero.T)
        for key, array in packed.items():
            tensors.setdefault(key, torch.from_numpy(array))
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(numbers))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=config_of(gptq, 16, True) | settings)
    return reference


def by_zero(zero):
    return lowest_first((zero - 1) % 16)


def by_word(zero):
    return lowest_first(zero) - np.int32(0x11111111)


WRITERS = [  # who takes one from each zero, and who from whole words
    (by_zero, {}),
    (by_word, {"meta": {"quantizer": ["optimum:1.24.0", "gptqmodel:1.4.1"]}}),
    (by_word, {"provider": "auto-round", "autoround_version": "0.6.0"}),
]


@pytest.mark.parametrize(("store", "settings"), WRITERS)
@pytest.mark.parametrize(("family", "is_quantized"), [(llama, True), (qwen_2, False)])
def test_gptq_zeros_of_0(tmp_path, store, settings, family, is_quantized):
    reference = save_gptq(tmp_path, family, store, is_quantized, seed=1, **settings)
    assert_matches(reference, PROMPTS, decode(family()[0], tmp_path, PROMPTS, max_new_tokens=4))


def by_zero_as_autogptq(zero):
    """It shifts -1 as 32 bits into the word, which leaves nothing of the zeros behind."""
    words = (zero - 1).astype(np.int64).astype(np.uint32).reshape(len(zero), -1, 8) << (
        4 * np.arange(8, dtype=np.uint32)
    )
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


@pytest.mark.parametrize(
    ("store", "settings", "is_lost"),
    [
        *((*x, False) for x in WRITERS),
        (by_zero_as_autogptq, {}, True),
        (by_zero_as_autogptq, {"provider": "auto-round", "autoround_version": "0.2"}, True),
        (lambda zero: by_zero_as_autogptq(np.where(np.arange(zero.shape[1]) % 8 == 7, 0, zero + 1)), {}, False),
    ],
)
def test_gptq_says_what_is_lost(tmp_path, capfd, store, settings, is_lost):
    save_gptq(tmp_path, llama, store, True, seed=3, **settings)
    llama3.convert.open_checkpoint(tmp_path)
    assert ("zeros of GPTQ that follow a zero of 0" in capfd.readouterr().err) == is_lost


AUTO_ROUND = {"auto_gptq": gptq, "gptqmodel": gptq_2, "auto_awq": awq}


@pytest.mark.parametrize("packing", ["auto_round", *(f"auto_round:{name}" for name in AUTO_ROUND)])
def test_auto_round(tmp_path, packing):
    """It packs as GPTQ or AWQ does, and names that otherwise."""
    _, *reference = llama()
    form = AUTO_ROUND.get(packing.partition(":")[2], gptq_2)
    reference = save_in_4_bits(tmp_path, reference, form, 32, True, LINEAR)
    quantization = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
    edit_config(tmp_path, quantization_config=quantization | {"packing_format": packing})
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))


@pytest.mark.parametrize(("stored", "version"), [(8, "gptq"), (7, "gptq_v2"), (7, "gptq"), (8, None)])
def test_gptq_zeros_that_are_all_alike(tmp_path, stored, version):
    """A symmetric zero is 8; version 1 stores 7, whatever checkpoint_format says."""
    _, *reference = llama()
    reference = save_in_4_bits(tmp_path, reference, gptq, 32, False, LINEAR)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name][:] = int(np.array(stored * 0x11111111, np.uint32).view(np.int32))
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = config_of(gptq, 32, False) | {"sym": True, "checkpoint_format": version}
    edit_config(tmp_path, quantization_config=quantization)
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=3))


# ---------------------------------------------------------------------------------------------------------------------
# compressed-tensors


def save_8_bits(folder, family, kind, scale_of, form):
    """Matrices in int8 or FP8, where the scale of a matrix has the shape that `scale_of` makes of its own: one for each
    row, for each block of 16 x 16, or one. `form` has config.json's words. Returns the model of the numbers."""
    _, *reference = family()
    reference = save_random(folder, *reference)
    tensors, parameters = experts_apart(load_file(folder / "model.safetensors")), dict(reference.named_parameters())
    for name in [name for name in tensors if re.search(r"(_proj|\.w\d)\.weight$", name)]:
        weight = tensors.pop(name).float()
        shape = scale_of(*weight.shape)
        if kind == "int8":
            scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
            values = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
            exact = values.float() * scale.float()
        else:
            row = dict.fromkeys((by_row, by_row_of_modelopt), (1, weight.shape[1]))
            blocks = dict.fromkeys((in_blocks, in_blocks_of_modelopt), (16, 16))
            block = (row | blocks).get(scale_of, tuple(weight.shape))
            values, scale, exact = as_fp8(weight, block)
        with torch.no_grad():
            dense_parameter(parameters, name).copy_(exact)
        tensors |= {name: values, f"{name}_scale": scale.reshape(shape), name.replace("weight", "input_scale"): one()}
    tensors["model.layers.0.mlp.act_scale"] = one()  # AutoFP8 once called input_scale so
    tensors |= {"model.layers.0.self_attn.prob_output_scale": one()}  # of Quark
    tensors |= {"model.layers.0.self_attn.k_scale": one(), "model.layers.1.self_attn.v_proj.v_scale": one()}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, **form)
    return reference


def one():
    return torch.ones(1)


def compressed(kind, **weights):
    weights |= {"num_bits": 8, "type": "int" if kind == "int8" else "float"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


def by_row(O, C):
    return O, 1


def in_blocks(O, C):
    return -(-O // 16), -(-C // 16)


def by_row_of_modelopt(O, C):
    return (O,)


def in_blocks_of_modelopt(O, C):
    return -(-O // 16), 1, -(-C // 16), 1


BY_ROW = compressed("int8", strategy="channel")
IN_BLOCKS = compressed("fp8", strategy="block", block_structure=[16, 16])
FBGEMM = {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
QUARK = {"quantization_config": {"quant_method": "quark", "export": {"weight_format": "real_quantized"}}}
AUTO_ROUND_FP8 = {"quantization_config": {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"}}
MODELOPT_IN_BLOCKS = {"quantization_config": {"quant_method": "modelopt", "weight_block_size": [16, 16]}}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "kind", "scale_of", "form", "mesh"),
    [
        (qwen_2, "int8", by_row, BY_ROW, (1, 1, 2)),
        (mixtral_8, "int8", by_row, BY_ROW, (1, 2, 2)),
        (glm, "int8", lambda O, C: (O,), BY_ROW, (1, 1, 4)),
        (qwen_2, "fp8", in_blocks, IN_BLOCKS, (1, 1, 2)),
        (gemma_3, "fp8", in_blocks, IN_BLOCKS, (1, 1, 1)),
        (qwen_2, "fp8", lambda *_: (1, 1), compressed("fp8", strategy="tensor"), (1, 1, 2)),
        (llama, "fp8", by_row, FBGEMM, (1, 1, 4)),
        (llama, "fp8", lambda *_: (), MODELOPT, (2, 1, 2)),
        (llama, "fp8", in_blocks_of_modelopt, MODELOPT_IN_BLOCKS, (1, 1, 2)),
        (mixtral_8, "fp8", by_row_of_modelopt, MODELOPT, (1, 2, 1)),
        (llama, "fp8", by_row_of_modelopt, AUTO_ROUND_FP8, (1, 1, 2)),
        (llama, "fp8", lambda *_: (), QUARK, (1, 1, 2)),
        (qwen_3_moe, "fp8", lambda *_: (), {}, (1, 2, 1)),  # ModelOpt's older releases say so in another file alone
    ],
)
def test_8_bits(tmp_path, capfd, family, kind, scale_of, form, mesh):
    folder = family()[0]
    reference = save_8_bits(tmp_path, family, kind, scale_of, form)
    checkpoint = folder.convert.open_checkpoint(tmp_path)
    is_held = checkpoint.weights["layers"][0]["o"].format is folder.model.Int8
    assert is_held == (kind == "int8")
    tolerance = 0.05 if is_held else 1e-3  # activations are rounded to int8 too on CPUs
    rows = decode(folder, tmp_path, PROMPTS, mesh, max_new_tokens=1)
    assert_matches(reference, PROMPTS, rows, atol=tolerance)
    assert capfd.readouterr().err.count("left out: rounding of activations") == ("input_activations" in str(form))


def test_two_kinds_of_groups_in_one_file(tmp_path):
    """The MLP in 4 bits, attention in FP8."""
    folder, family, form, group, has_zeros, _, mesh = RELEASES["compressed-tensors"]
    _, *reference = family()
    reference = save_in_4_bits(tmp_path, reference, form, group, has_zeros, r"mlp\..*_proj\.weight$")
    tensors, parameters = load_file(tmp_path / "model.safetensors"), dict(reference.named_parameters())
    for name in matrices(tensors):
        values, scale, exact = as_fp8(tensors.pop(name).float(), (1, parameters[name].shape[1]))
        with torch.no_grad():
            parameters[name].copy_(exact)
        tensors |= {name: values, f"{name}_scale": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = config_of(pack_quantized, group, has_zeros) | {"format": "mixed-precision"}
    in_fp8 = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    quantization["config_groups"] = {"group_0": in_fp8, "group_1": quantization["config_groups"]["group_0"]}
    edit_config(tmp_path, quantization_config=quantization)
    assert_matches(reference, PROMPTS, decode(folder, tmp_path, PROMPTS, mesh, max_new_tokens=4))


def test_other_bits_for_some_weights(tmp_path):
    """GPTQModel's `dynamic`: what it leaves out of quantization is read, weights in 8 bits are refused by that name."""
    _, *reference = llama()
    reference = save_in_4_bits(tmp_path, reference, gptq, 32, False, r"mlp\..*_proj\.weight$")
    quantization = config_of(gptq, 32, False)
    edit_config(tmp_path, quantization_config=quantization | {"dynamic": {"-:.*self_attn.*": {}, ".*": {"bits": 4}}})
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))
    edit_config(tmp_path, quantization_config=quantization | {"dynamic": {".*down_proj.*": {"bits": 8}}})
    with pytest.raises(llama3.model.InputError, match=r"dynamic gives some weights {'bits': 8}: damaged, .* not supp"):
        llama3.convert.open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def save_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.sampled
@pytest.mark.parametrize("family", [qwen_3_moe, mixtral_8, qwen_35_moe])
def test_experts_as_transformers_holds_them(tmp_path, family):
    """In one tensor, under its own names; converted, too."""
    folder, *reference = family()
    reference = save_random(tmp_path / "source", *reference)
    tensors = {name: x.contiguous() for name, x in reference.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    assert_matches(reference, PROMPTS, decode(folder, tmp_path / "source", PROMPTS, (1, 2, 2), max_new_tokens=4))
    folder.convert.convert(tmp_path / "source", tmp_path / "output", "float32")
    assert_matches(reference, PROMPTS, decode(folder, tmp_path / "output", PROMPTS, max_new_tokens=2))


@pytest.mark.parametrize("is_apart", [True, False])
def test_experts_in_fp8_that_transformers_made(tmp_path, is_apart):
    """It saves the scales of all experts in one tensor (transformers #44222), beside matrices apart or in one, too."""
    folder, *reference = qwen_3_moe()
    reference = save_random(tmp_path, *reference)
    tensors, parameters = load_file(tmp_path / "model.safetensors"), dict(reference.named_parameters())
    tensors = {name: x for name, x in tensors.items() if ".experts." not in name}
    for name in [name for name in parameters if name.endswith((".gate_up_proj", ".down_proj"))]:
        values, scale, exact = zip(*(as_fp8(matrix.detach(), (8, 8)) for matrix in parameters[name]))
        with torch.no_grad():
            parameters[name].copy_(torch.stack(exact))
        tensors |= {name: torch.stack(values), f"{name}_scale_inv": torch.stack(scale)}
    tensors = experts_apart(tensors) if is_apart else tensors
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})
    assert_matches(reference, PROMPTS, decode(folder, tmp_path, PROMPTS, (1, 2, 2), max_new_tokens=2))


def test_the_text_model_of_a_nested_release(tmp_path):
    """transformers saves it alone under the names that it has in the whole."""
    folder, *reference = qwen_35_with_vision()
    save_random(tmp_path / "whole", *reference)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    shutil.copytree(tmp_path / "whole", tmp_path / "text")
    text.save_pretrained(tmp_path / "text")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert_matches(text, PROMPTS, decode(folder, tmp_path / "text", PROMPTS, max_new_tokens=4))


@pytest.mark.parametrize("prefix", ["model.", "model." + "language_model." * 3])
def test_a_nested_release_under_other_names(tmp_path, prefix):
    """Its config.json beside tensors of the text model alone, and what transformers 5.5.0 wrote."""
    folder, *reference = qwen_35_with_vision()
    reference = save_random(tmp_path, *reference)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.language_model.", prefix): x for name, x in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert_matches(reference, PROMPTS, decode(folder, tmp_path, PROMPTS, max_new_tokens=2))


def test_shards_and_their_index(tmp_path):
    """A tensor in two shards, where the index says which counts; a stale index; a file that nobody needs."""
    _, *reference = llama()
    reference = save_random(tmp_path, *reference)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    # No file of the index is there.
    save_index(tmp_path, {name: "model-00001-of-00002.safetensors" for name in [*names, "lm_head.weight"]})
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(llama3.model.InputError, match=r"model-00001-of-00002.safetensors: missing; download"):
        llama3.convert.open_checkpoint(tmp_path)
    # The second shard is a patch of the first.
    damaged = tensors | {name: torch.full_like(tensors[name], 7.0) for name in names[::2]}
    save_file(damaged, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "b.safetensors")
    where = {name: "b.safetensors" if i % 2 == 0 else "a.safetensors" for i, name in enumerate(names)}
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": "c.safetensors"}  # and this file is not there
    save_index(tmp_path, where | rotary)
    assert llama3.convert.open_checkpoint(tmp_path).left_out.keys() == rotary.keys()
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))
    save_index(tmp_path, where | {"model.norm.weight": "c.safetensors"})
    with pytest.raises(llama3.model.InputError, match=r"c.safetensors: missing; download"):
        llama3.convert.open_checkpoint(tmp_path)
    (tmp_path / "layers").mkdir()  # as GPTQModel has a folder for each layer
    (tmp_path / "b.safetensors").rename(tmp_path / "layers" / "b.safetensors")
    save_index(tmp_path, {name: shard.replace("b.", "layers/b.") for name, shard in where.items()})
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))


def test_an_extra_layer_of_which_a_part_was_downloaded(tmp_path):
    """The shard with its projection has nothing that is needed, so a hub id does not bring it; others have the rest."""
    folder = import_folder("deepseek")
    shutil.copytree(ROOT / "deepseek" / "demo", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = [name for name in tensors if "eh_proj" in name]
    save_index(tmp_path, {name: "b.safetensors" if name in names else "a.safetensors" for name in tensors})
    save_file({name: x for name, x in tensors.items() if name not in names}, tmp_path / "a.safetensors")
    assert names and names[0] in folder.convert.open_checkpoint(tmp_path).left_out


def test_a_file_that_may_not_be_read():
    """safetensors alone would say that it is not there."""
    with tempfile.TemporaryDirectory() as parent:  # root can read all, so another user is to look
        shutil.copytree(llama3_demo(), folder := Path(parent, "checkpoint"))
        (folder / "model.safetensors").chmod(0o600 if os.geteuid() == 0 else 0)
        Path(parent).chmod(0o755)
        try:
            os.seteuid(65534 if os.geteuid() == 0 else os.geteuid())
            with pytest.raises(PermissionError, match=r"Permission denied: '.*model.safetensors'"):
                llama3.convert.open_checkpoint(folder)
        finally:
            os.seteuid(os.getuid())


def test_the_index_of_the_source_beside_a_quantized_file(tmp_path):
    """It names shards that are not there, and none of the tensors that are in 4 bits."""
    _, *reference = llama()
    save_random(tmp_path, *reference)
    save_index(tmp_path, dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model-00001-of-00001.safetensors"))
    reference = save_in_4_bits(tmp_path, reference, awq, 32, True, LINEAR)
    assert_matches(reference, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))
    # A quantized file beside the source: the index says what is read.
    quantized, shard = tmp_path / "model.safetensors", tmp_path / "model-00001-of-00001.safetensors"
    shutil.copy(quantized, tmp_path / "quantized")
    _, *source = llama()
    source = save_random(tmp_path, *source)
    quantized.rename(shard)
    (tmp_path / "quantized").rename(quantized)
    assert_matches(source, PROMPTS, decode(llama3, tmp_path, PROMPTS, max_new_tokens=2))


def edit_tensors(edit):
    def edit_file(folder):
        save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors")

    return edit_file


def without_prefix(tensors):
    return {name.removeprefix("model."): x for name, x in tensors.items()}


def with_tensors_that_are_nowhere(folder):
    names = [*load_file(folder / "model.safetensors"), "lm_head.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    save_index(folder, dict.fromkeys(names, "model-00001-of-00001.safetensors"))


def with_a_value_head(tensors):
    return tensors | {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}


def with_adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def with_bitsandbytes(folder):
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


@pytest.mark.parametrize(
    ("edit", "note"),
    [
        (edit_tensors(without_prefix), ""),  # saved by the class without an output head
        (with_tensors_that_are_nowhere, ""),
        (edit_tensors(with_a_value_head), "a value head, which training needs"),
        (with_adapter, "a PEFT adapter beside them, which is not applied"),
        (with_bitsandbytes, ""),  # of what was merged into 16 bits
    ],
)
def test_what_others_leave_behind(tmp_path, capfd, edit, note):
    folder, *reference = qwen_2(tie_word_embeddings=True)
    reference = save_random(tmp_path, *reference)
    edit(tmp_path)
    assert_matches(reference, PROMPTS, decode(folder, tmp_path, PROMPTS, max_new_tokens=2))
    assert note in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "form"), [("int8", BY_ROW), ("fp8", compressed("fp8", strategy="channel"))])
def test_zero_points_that_change_nothing(tmp_path, kind, form):
    """Those of activations, which are not rounded here, and zeros."""
    folder, reference = qwen_2()[0], save_8_bits(tmp_path, qwen_2, kind, by_row, form)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight")]
    more = {f"{name}_zero_point": torch.zeros(len(tensors[name]), 1).to(tensors[name].dtype) for name in names}
    more |= {name.replace("weight", "input_zero_point"): torch.full((1,), 3, dtype=torch.int8) for name in names}
    save_file(tensors | more, tmp_path / "model.safetensors")
    checkpoint = folder.convert.open_checkpoint(tmp_path)
    assert {name.rpartition(".")[2] for name in checkpoint.left_out} >= {"input_zero_point"}
    rows = decode(folder, tmp_path, PROMPTS, max_new_tokens=1)
    assert_matches(reference, PROMPTS, rows, atol=0.05 if kind == "int8" else 1e-3)
    more = {names[0] + "_zero_point": torch.ones(len(tensors[names[0]]), 1).to(tensors[names[0]].dtype)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    with pytest.raises(folder.model.InputError, match=f"{names[0]}_zero_point is not a tensor of this model"):
        folder.convert.open_checkpoint(tmp_path)


def scales_in(kind, dtype):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(dtype)
        tensors[f"{name}_scale"] = torch.ones(8, 8).to(kind)
        save_file(tensors, folder / "model.safetensors")
        edit_config(folder, quantization_config={"quant_method": "modelopt"})

    return edit


def in_float64_with_a_head(folder):
    """Beside the embedding to which it is tied."""
    tensors = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")


def as_peft_holds_it(tensors):
    """A matrix with its low-rank update beside it, all in the wrapper."""
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.base_layer.weight"] = tensors.pop(f"{name}.weight")
    tensors |= {f"{name}.lora_{side}.default.weight": torch.ones(8, 8) for side in "AB"}
    return {f"base_model.model.{name}": x for name, x in tensors.items()}


def only(name, text="{}"):
    def edit(folder):
        for file in folder.iterdir():
            file.unlink()
        (folder / name).write_text(text)

    return edit


def inside(name):
    def edit(folder):
        (folder / name).mkdir(parents=True)
        (folder / "config.json").rename(folder / name / "config.json")

    return edit


def link_to_nothing(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blob")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2097152\n"


AUTO_ROUND_NVFP4 = {"quantization_config": {"quant_method": "auto-round", "packing_format": "auto_round:nvfp4"}}


def in_int8_of_bitsandbytes(folder):
    """With a scale for each row, by which the rows are multiplied and divided by 127."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    scale = tensors[f"{name}weight"].float().abs().amax(1)
    tensors[f"{name}weight"] = torch.round(tensors[f"{name}weight"] / scale[:, None] * 127).to(torch.int8)
    save_file(tensors | {f"{name}SCB": scale}, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})


def without_settings(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] = torch.ones(8, 8, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors")


QUIP = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"config_groups": {"v": {
        "type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}, {"location": "weight_input"}],
    }}},
}  # fmt: skip
QUAROT = {"quant_method": "quark", "algo_config": [{"name": "rotation", "r4": True}]}
ROTATED = {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}
DIVIDED = {"quant_method": "fp8", "weight_scale_method": "row", "weight_scale_semantics": "inverse"}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (only("adapter_config.json", '{"base_model_name_or_path": "org/base"}'), "a PEFT adapter of 'org/base'; merge"),
        (  # what a trainer saved beside config.json
            lambda folder: [
                with_adapter(folder),
                (folder / "model.safetensors").rename(folder / "adapter.safetensors"),
            ],
            "a PEFT adapter of None; merge it",
        ),
        (only("params.json"), "as Meta or Mistral write them; give those of the same release for transformers"),
        (only("model.Q4_K_M.gguf"), "GGUF, which llama.cpp reads; give the safetensors"),
        (lambda folder: edit_config(folder, quantization={"group_size": 64, "bits": 4}), "quantization 'MLX' is not"),
        (in_float64_with_a_head, "has dtype F64, which is not supported here"),
        (lambda folder: edit_config(folder, quantization_config=QUIP), "'compressed-tensors with transforms' is not"),
        (lambda folder: edit_config(folder, quantization_config=QUAROT), "'quark with transforms' is not supported"),
        (lambda folder: edit_config(folder, quantization_config=ROTATED), "'gptq with transforms' is not supported"),
        (lambda folder: edit_config(folder, quantization_config=DIVIDED), "'fp8 with scales that divide' is not"),
        (lambda folder: edit_config(folder, **AUTO_ROUND_NVFP4), "quantization 'auto_round:nvfp4' is not supported"),
        (in_int8_of_bitsandbytes, "a form of quantization 'bitsandbytes' that is not supported; give the unquantized"),
        (scales_in(torch.float8_e4m3fn, torch.uint8), "weights in NVFP4, MXFP4 or MXFP8 .* give the unquantized"),
        (scales_in(torch.uint8, torch.float8_e4m3fn), "weights in NVFP4, MXFP4 or MXFP8 .* give the unquantized"),
        (  # of litgpt; the command for pickled weights that transformers can read would fail
            lambda folder: (folder / "model.safetensors").rename(folder / "lit_model.pth"),
            "or give what transformers' save_pretrained wrote",
        ),
        (inside("checkpoint-500"), "no config.json; give the folder .*checkpoint/checkpoint-500"),
        (inside("snapshots/0123"), "no config.json; give the folder .*checkpoint/snapshots/0123"),
        (link_to_nothing, "model.safetensors is a link to a file that is not there"),
        (
            edit_tensors(lambda tensors: {f"module.{name}": x for name, x in tensors.items()}),
            "module.model.embed_tokens.weight stands in a wrapper: save the model in it",
        ),
        (
            edit_tensors(lambda tensors: {re.sub(r"(\.\d+)", r"\1._orig_mod", name): x for name, x in tensors.items()}),
            r"model.layers.0._orig_mod.\S+ stands in a wrapper: save the model in it",
        ),
        (
            edit_tensors(
                lambda tensors: {name: x.flatten()[: len(x) * ("norm" in name)] for name, x in tensors.items()}
            ),
            "shards of a run: DeepSpeed's zero_to_fp32.py, or for FSDP accelerate merge-weights, joins them",
        ),
        (edit_tensors(as_peft_holds_it), "of PEFT that are not merged: save what its merge_and_unload gives$"),
        (
            edit_tensors(lambda tensors: tensors | {"score.weight": torch.ones(1, 128)}),
            "score.weight is not .*; a classifier or a reward model, which writes no text",
        ),
        (lambda folder: (folder / "model.safetensors").write_text(POINTER), "it is a pointer of Git LFS: run git lfs"),
        (without_settings, "no quantization_config; download config.json again"),
        (
            lambda folder: [without_settings(folder), (folder / "quantize_config.json").touch()],
            "for GPTQ of 2023, copy quantize_config",
        ),
    ],
)
def test_something_else(tmp_path, capfd, edit, words):
    """It is refused, and nothing else is said."""
    shutil.copytree(llama3_demo(), tmp_path / "checkpoint")
    edit(tmp_path / "checkpoint")
    with pytest.raises(llama3.model.InputError, match=words):
        llama3.convert.open_checkpoint(tmp_path / "checkpoint")
    assert not capfd.readouterr().err


def llama3_demo():
    return import_folder("llama3").main.DEMO
