"""Weights in 4 bits: the forms of releases, packed here as their authors describe them, and --quantize int4.

References are transformers' classes with the numbers that a form stands for.
"""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_experts
import torch
from helpers import ROOT, STRICT, assert_matches, decode, experts_apart, fast_of, floats, import_folder, save_random
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from test_deepseek import as_fp8
from test_parity import (
    deepseek,
    deepseek_3,
    gemma4,
    gemma_4_moe,
    gemma_4_small,
    llama,
    llama3,
    mixtral,
    mixtral_8,
    qwen3,
    qwen3_5,
    qwen_2,
    qwen_3_next,
    qwen_35_moe,
    random_prompts,
)

model = llama3.model
fast = fast_of(model)

# ---------------------------------------------------------------------------------------------------------------------
# Released forms


def lowest_first(codes, bits=4):
    """Codes [.., n x 32 / bits] as int32 [.., n], the first in the lowest bits, with zeros for what is missing."""
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % (32 // bits))]).astype(np.uint32)
    words = codes.reshape(*codes.shape[:-1], -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


def pack_quantized(name, codes, zero, scale, g_idx, bits=4):
    """compressed-tensors: codes and zeros are signed numbers plus 8, or plus 128."""
    module = name.removesuffix(".weight")
    packed = {"weight_packed": lowest_first(codes, bits), "weight_shape": np.array(codes.shape), "weight_scale": scale}
    if zero is not None:
        packed["weight_zero_point"] = np.ascontiguousarray(lowest_first(zero.T, bits).T)
    if (np.diff(g_idx) < 0).any():
        packed["weight_g_idx"] = g_idx
    return {f"{module}.{key}": array for key, array in packed.items()}


def awq(name, codes, zero, scale, g_idx):
    """AutoAWQ: of 8 neighbouring outputs, nibble i is the one at (0 2 4 6 1 3 5 7)[i]."""

    def words(x):  # [n, O]
        order = np.arange(x.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        return lowest_first(x[:, order])

    zero = np.full(scale.shape, 8) if zero is None else zero
    packed = {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T.astype(np.float16)}
    return {f"{name.removesuffix('.weight')}.{key}": array for key, array in packed.items()}


def gptq(name, codes, zero, scale, g_idx, bits=4, less=1):
    """AutoGPTQ: zeros less one, and a bias of zeros where there is none."""
    module, zero = name.removesuffix(".weight"), np.full(scale.shape, 2 ** (bits - 1)) if zero is None else zero
    packed = {
        "qweight": np.ascontiguousarray(lowest_first(codes, bits).T),
        "qzeros": lowest_first(zero.T - less, bits),
        "scales": scale.T.astype(np.float16),
        "g_idx": g_idx,
        "bias": np.zeros(len(codes), np.float16),
    }
    return {f"{module}.{key}": array for key, array in packed.items()}


def gptq_2(*arguments):
    packed = gptq(*arguments, less=0)
    return {name: array for name, array in packed.items() if not name.endswith(".bias")}


def config_of(form, group, has_zeros, bits=4):
    if form is pack_quantized:
        weights = {"num_bits": bits, "group_size": group, "symmetric": not has_zeros}
        weights["strategy"] = "group" if group else "channel"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    if form is awq:
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    more = {"checkpoint_format": "gptq_v2"} if form is gptq_2 else {}
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": not has_zeros} | more


def save_in_4_bits(folder, reference, form, group, has_zeros, pattern, ordered=True, bits=4):
    """Saves a random model whose matrices with names like `pattern` are in 4 `bits`, or 8. Returns the model of their
    numbers. A `group` of None is a whole row. Groups of an input that is not `ordered` are no neighbours."""
    random = np.random.default_rng(0)
    reference = save_random(folder, *reference)
    tensors, parameters = experts_apart(load_file(folder / "model.safetensors")), dict(reference.named_parameters())
    for name in [name for name in tensors if re.search(pattern, name)]:
        weight = tensors.pop(name).float()
        (O, C), half = weight.shape, 2 ** (bits - 1)
        size = group or C
        places = (np.arange(C) if ordered else random.permutation(C)) // size
        scale = (weight.std().item() / 3 * 8 / half * random.uniform(0.5, 1.5, (O, -(-C // size)))).astype(np.float16)
        zero = random.integers(half // 2, half * 3 // 2, scale.shape) if has_zeros else None
        codes = random.integers(0, 2 * half, (O, C))
        numbers = (codes - (half if zero is None else zero[:, places])) * scale[:, places].astype(np.float64)
        packed = form(name, codes, zero, scale, places.astype(np.int32), **{"bits": bits} if bits != 4 else {})
        for key, array in packed.items():
            array = torch.from_numpy(
                array if array.dtype.kind == "f" else array.astype(np.int64 if "shape" in key else np.int32)
            )
            tensors.setdefault(key, array)  # a bias that the model has stays
        with torch.no_grad():
            target = dense_parameter(parameters, name)
            target.copy_(torch.from_numpy(numbers).to(target.dtype))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config_of(form, group, has_zeros, bits)
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def dense_parameter(parameters, name):
    """Where transformers has the matrix of a checkpoint: experts are joined in one parameter."""
    if name in parameters:
        return parameters[name]
    name = name.replace("block_sparse_moe", "mlp")  # as releases of Mixtral have it
    module, expert, matrix = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name).groups()
    if matrix in ("down_proj", "w2"):
        return parameters[f"{module}.down_proj"][int(expert)]
    joined = parameters[f"{module}.gate_up_proj"][int(expert)]
    return joined.chunk(2)[matrix in ("up_proj", "w3")]


LINEAR = r"(q|k|v|o|gate|up|down)_proj\.weight$"
RELEASES = {
    "compressed-tensors": (llama3, llama, pack_quantized, 32, False, LINEAR, (1, 1, 1)),
    "compressed-tensors with zeros, on a mesh": (llama3, llama, pack_quantized, 32, True, LINEAR, (2, 1, 2)),
    "its v_proj and down_proj ignored": (
        qwen3,
        qwen_2,
        pack_quantized,
        16,
        True,
        r"(q|k|o|gate|up)_proj\.weight$",
        (1, 2, 2),
    ),
    "routed experts alone, as in Kimi K2": (
        deepseek,
        deepseek_3,
        pack_quantized,
        16,
        False,
        r"\.experts\.\d",
        (1, 2, 2),
    ),
    "all matrices of latent attention": (
        deepseek,
        deepseek_3,
        pack_quantized,
        16,
        True,
        r"(_proj|kv_a_proj_with_mqa)\.weight$",
        (1, 2, 4),
    ),
    "awq": (llama3, llama, awq, 32, True, LINEAR, (1, 1, 4)),
    "awq of a mixture": (mixtral, mixtral_8, awq, 16, True, r"(self_attn\..|\.experts\.\d+\.w\d)", (1, 4, 1)),
    "gptq": (qwen3, qwen_2, gptq, 32, True, LINEAR, (1, 1, 2)),
    "gptq, version 2": (llama3, llama, gptq_2, 64, True, LINEAR, (1, 1, 1)),
    "every matrix of a small Gemma 4 but the embeddings": (
        gemma4,
        gemma_4_small,
        pack_quantized,
        32,
        False,
        r"(_proj|_projection|_gate)\.weight$",
        (1, 1, 2),
    ),
    "the experts of a Gemma 4": (gemma4, gemma_4_moe, pack_quantized, 32, False, r"\.experts\.\d", (1, 2, 2)),
    "gptq, the experts of Qwen3.5": (qwen3_5, qwen_35_moe, gptq, 24, True, r"\.experts\.\d", (1, 2, 2)),
    "all matrices of Qwen3-Next": (
        qwen3_5,
        qwen_3_next,
        pack_quantized,
        16,
        True,
        r"_proj(_qkvz)?\.weight$",
        (1, 1, 2),
    ),
    "the outputs of wide heads of Qwen3-Next, cut between them": (
        qwen3_5,
        partial(qwen_3_next, linear_key_head_dim=32, linear_value_head_dim=32),
        pack_quantized,
        16,
        False,
        r"\.out_proj\.weight$",
        (1, 1, 2),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", RELEASES)
def test_released_forms(tmp_path, name):
    folder, family, form, group, has_zeros, pattern, mesh = RELEASES[name]
    _, *reference = family()
    reference = save_in_4_bits(tmp_path, reference, form, group, has_zeros, pattern)
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(folder, tmp_path, prompts, mesh, max_new_tokens=6))


@pytest.mark.parametrize(
    ("folder", "family", "form", "group", "has_zeros", "ordered", "mesh"),
    [
        (llama3, llama, pack_quantized, None, False, True, (1, 1, 2)),
        (qwen3, qwen_2, pack_quantized, 32, True, True, (2, 1, 2)),
        (qwen3, qwen_2, gptq, 32, False, True, (1, 1, 2)),
        (llama3, llama, gptq, 64, True, False, (1, 1, 1)),
    ],
)
def test_8_bits_in_words(tmp_path, folder, family, form, group, has_zeros, ordered, mesh):
    """W8A16 of compressed-tensors, and GPTQ-Int8."""
    _, *reference = family()
    reference = save_in_4_bits(tmp_path, reference, form, group, has_zeros, LINEAR, ordered, bits=8)
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(folder, tmp_path, prompts, mesh, max_new_tokens=3))


def test_an_embedding_in_4_bits(tmp_path):
    """As compressed-tensors writes it. It is the head too."""
    _, *reference = qwen_2(tie_word_embeddings=True)
    pattern = rf"{LINEAR}|embed_tokens\.weight$"
    reference = save_in_4_bits(tmp_path, reference, pack_quantized, 16, False, pattern)
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(qwen3, tmp_path, prompts, (1, 1, 2), max_new_tokens=6))


def test_kimi_k25(tmp_path):
    """Kimi K2 in a model that sees: a nested config.json, a prefix of names, other tensors; experts in 4 bits."""
    _, model_class, config = deepseek_3(n_group=1, topk_group=1)
    reference = save_in_4_bits(tmp_path, (model_class, config), pack_quantized, 32, False, r"\.experts\.\d")
    tensors, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"vision_tower.encoder.weight": torch.ones(4), "mm_projector.linear_1.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = {"model_type": "kimi_k25", "text_config": raw | {"model_type": "kimi_k2"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = deepseek.convert.open_checkpoint(tmp_path)
    assert set(checkpoint.left_out) == {"vision_tower.encoder.weight", "mm_projector.linear_1.weight"}
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(deepseek, tmp_path, prompts, (1, 2, 1), max_new_tokens=6))
    for quantize in (None, "int8"):  # of the former quantization, config.json keeps nothing
        deepseek.convert.convert(tmp_path, tmp_path / str(quantize), "float32", quantize)
        text = (tmp_path / str(quantize) / "config.json").read_text()
        assert "pack-quantized" not in text and json.loads(text).get("quantization_config") == (
            quantize and deepseek.convert.OURS[quantize]
        )
        deepseek.convert.open_checkpoint(tmp_path / str(quantize))


FP8 = {  # the rows and columns that share a scale, its shape if it is none of [rows, columns], where experts are
    "one scale": (llama3, llama, (None, None), (), "", (1, 1, 2)),
    "one scale in a list": (llama3, llama, (None, None), (1,), "", (1, 1, 1)),
    "blocks of Qwen3.5": (qwen3_5, qwen_35_moe, (16, 16), None, "experts", (1, 2, 2)),
    "blocks of Qwen3-Next": (qwen3_5, qwen_3_next, (16, 16), None, "experts", (1, 1, 2)),
    "a scale for each row of Gemma 4": (gemma4, gemma_4_moe, (1, None), None, "moe.experts", (1, 2, 2)),
    "blocks of a small Gemma 4": (gemma4, gemma_4_small, (16, 16), None, "", (1, 1, 2)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FP8)
def test_fp8(tmp_path, name):
    """All matrices but the embeddings, in blocks, by row or with one scale. The scales of activations are not used."""
    folder, family, (rows, columns), shape, experts, mesh = FP8[name]
    _, *reference = family()
    reference = save_random(tmp_path, *reference)
    tensors, parameters = experts_apart(load_file(tmp_path / "model.safetensors")), dict(reference.named_parameters())
    for name in [name for name in tensors if re.search(r"_proj(_qkvz|_qkv|_z)?\.weight$", name)]:
        block = rows or len(tensors[name]), columns or len(tensors[name][0])
        matrix, scale, exact = as_fp8(tensors.pop(name).float(), block)
        with torch.no_grad():
            dense_parameter(parameters, name).copy_(exact)
        name, kind = name.replace("experts", experts), "" if columns is None else "_inv"
        scale = scale if shape is None else scale.reshape(shape)
        tensors |= {
            name: matrix,
            f"{name}_scale{kind}": scale,
            f"{name.removesuffix('weight')}input_scale": torch.ones(1),
        }
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8"} | ({"weight_block_size": [rows, columns]} if columns else {})
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(folder, tmp_path, prompts, mesh, max_new_tokens=6))


@pytest.mark.parametrize("form", [gptq, pack_quantized])
def test_groups_that_are_no_neighbours(tmp_path, form):
    """ "act-order". Such a matrix is held in the dtype of the model."""
    _, *reference = llama()
    reference = save_in_4_bits(tmp_path, reference, form, 32, True, LINEAR, ordered=False)
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(llama3, tmp_path, prompts, (1, 1, 2), max_new_tokens=6))


@pytest.mark.parametrize(("quantize", "kind"), [("int8", "Int8"), ("int4", "Int4"), (None, "Int4")])
def test_a_release_in_another_format(tmp_path, quantize, kind):
    """It stays in 4 bits, unless int8 is asked for. Converted without --quantize, it is in the dtype of the model."""
    _, *reference = llama()
    reference = save_in_4_bits(tmp_path / "source", reference, awq, 32, True, LINEAR)
    mesh = model.make_mesh(devices=jax.devices()[:1])
    weights = llama3.convert.load(llama3.convert.open_checkpoint(tmp_path / "source"), mesh, "float32", quantize)
    assert {type(weights["layers"][0][name]).__name__ for name in ("qkv", "o", "gate_up", "down")} == {kind}
    llama3.convert.convert(tmp_path / "source", tmp_path / "output", "float32")
    prompts = random_prompts(23)
    assert_matches(reference, prompts, decode(llama3, tmp_path / "output", prompts, max_new_tokens=3))


def damaged(tensors, config, change):
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    down = "model.layers.0.mlp.down_proj.weight"
    if change == "zero":
        del tensors[f"{down}_zero_point"]
    elif change == "scale":
        del tensors[f"{down}_scale"]
    elif change == "cut scale":
        tensors[f"{down}_scale"] = tensors[f"{down}_scale"][:, :-1].contiguous()
    elif change == "packed":
        tensors[f"{down}_packed"] = tensors[f"{down}_packed"][:, :-1].contiguous()
    elif change == "shape":
        tensors[f"{down}_shape"] = torch.tensor([64, 72])
    elif change == "flat":
        tensors[f"{down}_packed"] = tensors[f"{down}_packed"].flatten()
    elif change == "dtype":
        tensors[f"{down}_packed"] = tensors[f"{down}_packed"].long()
    else:
        weights |= change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("zero", "down_proj.weight_zero_point is missing"),
        ("scale", "down_proj.weight_scale is missing"),
        ("cut scale", r"down_proj.weight_scale has F16 \[64, 2\], not BF16/F32/F16 \[64, 3\]"),
        ("packed", r"down_proj.weight_packed has I32 \[64, 11\], not I32 \[64, 12\]"),
        ("shape", "down_proj.weight_packed has I32"),
        ("dtype", "down_proj.weight_packed has I64"),
        ("flat", "down_proj.weight_packed is no matrix"),
        ({"num_bits": 8}, "weights of 8 bits are not supported"),
        ({"group_size": 64}, "_scale has F16"),
        ({"group_size": 7}, "group_size 7 is neither"),
    ],
    ids=str,
)
def test_damaged(tmp_path, change, words):
    _, *reference = llama()
    save_in_4_bits(tmp_path, reference, pack_quantized, 32, True, LINEAR)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    damaged(tensors, config, change)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(model.InputError, match=f"{words}.*: damaged, .* not supported; give the unquantized"):
        llama3.convert.open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# --quantize int4


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("folder", "meshes"),
    [("llama3", [(1, 1, 1), (1, 2, 4)]), ("gpt_oss", [(1, 2, 4)]), ("deepseek", [(1, 2, 4)])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_converted_is_what_loading_gives(tmp_path, folder, meshes):
    """The same tokens and numbers, also on eight devices, where these cut groups."""
    source, folder = ROOT / folder / "demo", import_folder(folder)
    prompts = [[token % 256 for token in prompt] for prompt in random_prompts(40)]
    folder.convert.convert(source, tmp_path / "output", "float32", "int4")
    runs = (source, "int4", (1, 1, 1)), *((tmp_path / "output", None, mesh) for mesh in meshes)
    rows = [decode(folder, path, prompts, mesh, quantize=how, max_new_tokens=5) for path, how, mesh in runs]
    for others in rows[1:]:
        for row, other in zip(rows[0], others, strict=True):
            assert [token.id for token in row] == [token.id for token in other]
            np.testing.assert_allclose([t.logprob for t in row], [t.logprob for t in other], atol=2e-3)


def test_a_release_in_4_bits_rounded_again(tmp_path, capfd):
    """It loads, and a note says what it costs."""
    _, *reference = llama()
    save_in_4_bits(tmp_path, reference, pack_quantized, 32, True, LINEAR)
    llama3.convert.convert(tmp_path, tmp_path / "output", "float32", "int4")
    assert "note: weights in 4 bits are rounded once more" in capfd.readouterr().err
    (prompt,) = random_prompts(23)
    ((token,),) = decode(llama3, tmp_path, [prompt], max_new_tokens=1)
    ((again,),) = decode(llama3, tmp_path / "output", [prompt], max_new_tokens=1)
    assert 0 < abs(token.logprob - again.logprob) < 1


def in_groups(kind, *shape, size, has_zeros, width=None):
    """Random codes, scales and maybe zeros as `kind` of Int4, and the numbers [.., O, C] in float64. Columns up to
    `width` have scales of 0."""
    *rows, C = shape
    shape = *rows, width or C
    random = np.random.default_rng(0)
    codes, of_groups = random.integers(0, 16, shape, np.uint8), (*shape[:-1], shape[-1] // size)
    scale = random.uniform(0.5, 1, of_groups).astype(np.float32) / C**0.5 / 4
    scale[..., C // size :] = 0
    zero = random.integers(0, 17, of_groups) if has_zeros else np.full(of_groups, 8)
    numbers = (codes.reshape(*of_groups, size) - zero[..., None]) * scale[..., None].astype(np.float64)
    arrays = [kind.ordered(x) for x in (scale, zero.astype(kind.zero_dtype))][: 1 + has_zeros]
    return kind(jnp.asarray(kind.packed(codes)), *map(jnp.asarray, arrays)), numbers.reshape(shape)[..., :C]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("O", "C", "size", "has_zeros"),
    [(256, 1024, 32, False), (384, 1536, 128, True), (128, 512, 16, True), (128, 640, 64, True)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_against_float64(monkeypatch, O, C, size, has_zeros, dtype):
    """On CPUs, on GPUs, where the kernel takes two of the cases in bfloat16, and on TPUs. Kernels are interpreted."""
    monkeypatch.setattr(fast, "triton_int4_product", partial(fast.triton_int4_product, interpret=True))
    random = np.random.default_rng(0)
    x = random.standard_normal((60, C)).astype(dtype)
    w, numbers = in_groups(fast.Int4, O, C, size=size, has_zeros=has_zeros)
    products = {name: partial(model.PRODUCTS[name, fast.Int4], w=w) for name in ("cpu", "gpu")}
    if C % 512 == 0:
        lanes, _ = in_groups(fast.Int4Lanes, O, C, size=size, has_zeros=has_zeros)
        monkeypatch.setattr(fast, "streamed_product", partial(fast.streamed_product, block=128, interpret=STRICT))
        products["tpu"] = partial(model.PRODUCTS["tpu", fast.Int4Lanes], w=lanes)
    for name, multiply in products.items():
        for B in (1, 3, 9, 60)[: 3 if name == "tpu" else 4]:
            out = jax.jit(multiply)(x[:B])
            # More rows are multiplied with weights in their own dtype.
            tolerance = 3e-4 if dtype == jnp.float32 else 6e-2
            np.testing.assert_allclose(np.asarray(out, np.float64), floats(x[:B]) @ numbers.T, atol=tolerance)


def test_a_single_row_on_a_cpu_is_one_loop():
    """What makes it fast shows in the program: one loop reads the words, and turns no number of the row to float32 for
    each row of the weight."""
    w, _ = in_groups(fast.Int4, 4096, 1024, size=32, has_zeros=False)
    program = jax.jit(model.PRODUCTS["cpu", fast.Int4]).lower(jnp.ones((1, 1024), jnp.bfloat16), w).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**20  # the sums of lanes
    loops = re.findall(r"fusion\((.*)\), kind=kLoop, calls=(\S+?),", program.as_text())
    (body,) = [name for operands, name in loops if "w_values" in operands]
    (text,) = re.findall(rf"^{re.escape(body)} .*?^}}", program.as_text(), re.DOTALL | re.MULTILINE)
    assert "bf16[1,1024]" not in text and "f32[4096,32]" in text.splitlines()[-2]


def test_half_a_step():
    """No number is further off than half a step of its group, but for one of 8 steps, which is cut to 7."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    held = jax.jit(fast.Int4Groups(held=fast.Int4).declare(x.shape, jnp.float32).encode)(x)
    steps = held.in_order(np.abs(floats(held.scale)).repeat(32, axis=-1))
    errors = np.abs(np.asarray(held.values_and_scale(jnp.float32)[0]) - held.in_order(x))
    assert (errors <= 1.05 * steps).all() and (errors <= 0.51 * steps).mean() > 0.97


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("platform", "kind", "dtype"),
    [
        ("cpu", "Int4", jnp.float32),
        ("gpu", "Int4", jnp.float32),
        ("gpu", "Int4", jnp.bfloat16),
        ("tpu", "Int4Lanes", jnp.float32),
    ],
)
@pytest.mark.parametrize(("B", "k", "F"), [(1, 1, 512), (5, 8, 384), (140, 2, 768)])
def test_experts_against_float64(monkeypatch, platform, kind, dtype, B, k, F):
    """Also of experts whose columns are no whole pieces of the kernel."""
    test_experts.select(monkeypatch, platform)
    model, arguments = test_experts.model, test_experts.random_arguments(B, k, 8, 512, F, dtype, None)[:3]
    kind, shapes = getattr(fast_of(model), kind), ((8, 2 * F, 512), (8, 512, F))
    widths = [-(-shape[-1] // kind.run) * kind.run for shape in shapes]
    pairs = [in_groups(kind, *s, size=32, has_zeros=k > 1, width=n) for s, n in zip(shapes, widths, strict=True)]
    (weights, numbers), mesh = zip(*pairs, strict=True), model.make_mesh(devices=jax.devices()[:1])
    out = test_experts.on_mesh(mesh, *arguments, *weights)
    test_experts.assert_close(out, test_experts.reference(*arguments, *numbers), dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v5p:2x2x4"])
def test_kernels_compile_for_tpus(topology):
    """A product of Llama 3.1 8B and the experts of Kimi K2 on 16 devices. Weights are not copied."""
    devices, model = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices, test_experts.model
    mesh = model.make_mesh(1, 16, 1, devices=devices)

    def array(shape, dtype, spec=P()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def weight(shape, *spec):
        held = fast_of(model).Int4Groups(held=fast_of(model).Int4Lanes).declare(shape, jnp.bfloat16)
        return jax.tree.map(lambda x, spec: array(x.shape, x.dtype, spec), held, held.specs(P(*spec)))

    def body(x, ids, scores, gate_up, down, w):
        out = model.experts(x, ids, scores, gate_up, down, model.activation)
        return jax.lax.psum(out.astype(x.dtype), model.MODEL_AXES), model.linear(x, w)

    x, ids, scores = array((8, 7168), jnp.bfloat16), array((8, 8), jnp.int32), array((8, 8), jnp.float32)
    experts = weight((384, 4096, 7168), "ep", "tp", None), weight((384, 7168, 2048), "ep", None, "tp")
    arguments = x, ids, scores, *experts, weight((28672, 7168), None, None)
    specs = jax.tree.map(lambda a: a.sharding.spec, arguments)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    program = program.lower(*arguments).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert program.memory_analysis().temp_size_in_bytes < 4 * 2**20
