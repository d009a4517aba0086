"""Hugging Face safetensors -> the weights that model.py declares.

`load` fills the pytree of model.abstract_weights straight from a checkpoint folder: each host reads only the slices
that its own devices hold. Run as a program, this writes a checkpoint in another dtype, in int8 or in 4 bits:

    python3 convert.py --model_path HF --output DIR [--dtype bfloat16] [--quantize int8|int4]

DIR keeps Hugging Face's names, and the shapes but for a convolution's [channels, 1, taps], so that it loads on any
mesh. An int8 matrix `x.weight` [O, C] has its float32 scales in `x.weight_scale` [O]; packed experts [E, input, O] have
theirs in [E, O]. In 4 bits there are `x.weight_packed` and `x.weight_scale` instead (see PackQuantized). Tensors stream
through in pieces of PIECE_BYTES. A shard gets its final name when it is whole, and config.json, without which nothing
loads, comes last. So an interrupted conversion never loads, and the same command goes on where it stopped.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

if __name__ == "__main__":  # python3 -m llama3.convert, or python3 -P
    sys.path.insert(0, os.path.dirname(__file__))

import jax
import jax.numpy as jnp
import ml_dtypes  # numpy's bfloat16 and FP8
import model
import numpy as np
from generate import fast, memory_of
from jax.sharding import Mesh, NamedSharding
from model import Config, InputError, Int8, Part, Plain, Weight, in_format, weights_of
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

NUMPY = {  # by safetensors' name
    "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
FLOATS = ("BF16", "F32", "F16")
DTYPES = {name: np.dtype(name) for name in ("bfloat16", "float32", "float16")}  # of numbers that no format rounds
METHODS = (  # which config.json may name; bitsandbytes only for weights that were merged back into 16 bits
    "fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "mxfp4", "awq", "gptq", "bitsandbytes", "quark",
)  # fmt: skip
QUANTIZATION = "quantization_config", "compression_config", "quantization"  # in config.json; the last is MLX's
AUTO_ROUND = {  # by its packing_format, what others would say; the first alone stores zeros less one
    "auto_round:auto_gptq": {"quant_method": "gptq"}, "auto_round:auto_awq": {"quant_method": "awq"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:fp8": {"quant_method": "fp8"}, "auto_round:fp8_static": {"quant_method": "fp8"},
}  # fmt: skip
OURS = {  # config.json's quantization_config of what convert writes
    "int8": {"quant_method": "int8_per_channel"}, "int4": {"quant_method": "int4_in_groups", "group_size": 32},
}  # fmt: skip
# What rounds activations and the cache, and no weight.
OF_ACTIVATIONS = re.compile(r"\.((input|(prob_)?output|act\w*|[qkv]|kv|prob)_(scale|zero_point)|input_scale_ub)$")
# Transforms of compressed-tensors and Quark that a model needs while it runs, or it would answer wrongly. (GPTQModel's
# stand under "rotation".)
ONLINE_TRANSFORMS = r"'location': '(input|output|k_cache|q_attn)'|rotation|quarot"
SHARD_BYTES = 4 * 2**30
PIECE_BYTES = 64 * 2**20
SMALL = 2**22  # a device's part of fewer numbers is checked for NaN: norms, routers
READERS = 4  # threads that read; with one, copying and page faults take longer than a fast disk
INDEX = "model.safetensors.index.json"  # says which file has which tensor
FOLDERS = {  # of the repository that this file is from, and the model_types that each reads
    "deepseek": ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"),
    "gemma": ("gemma", "gemma2", "gemma3", "gemma3_text"),
    "gemma4": ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "glm4": ("glm", "glm4"),
    "glm4_flash": ("glm4_moe_lite",),
    "glm4_moe": ("glm4_moe",),
    "glm5": ("glm_moe_dsa",),
    "gpt2": ("gpt2",),
    "gpt_oss": ("gpt_oss",),
    "llama3": ("llama", "mistral", "ministral"),
    "llama4": ("llama4", "llama4_text"),
    "mixtral": ("mixtral",),
    "qwen3": ("qwen2", "qwen3", "qwen3_moe"),
    "qwen3_5": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
COPIED = (  # by convert, and read from the hub: the tokenizer's files, and the stop tokens
    "tokenizer*", "tiktoken.model", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.jinja", "additional_chat_templates/*.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Forms in which checkpoints store a tensor
#
# Each form has the `shape` of its numbers, with the input dimension last, their `dtype` in what `read` returns, and the
# `format` in which model.py can hold what is stored. If that is not Plain, `arrays` reads it so. `collect` finds the
# tensors in this form among what stands in the files.


class Stored(NamedTuple):
    """Numbers as they are."""

    file: Path
    offset: int  # of the first byte in the file
    kind: str  # safetensors' name of the dtype
    shape: tuple[int, ...]
    is_transposed: bool = False  # on disk, the last two dimensions are exchanged

    format = Plain
    dtype = property(lambda self: np.dtype(NUMPY.get(self.kind, np.uint8)))  # of one that NUMPY lacks, bytes
    T = property(lambda self: self._replace(shape=swapped(self.shape), is_transposed=not self.is_transposed))

    def read(self, *index: slice | int) -> np.ndarray:
        """A part of the tensor, memory-mapped: it is read from disk when used, and leaves memory when dropped."""
        if self.is_transposed:
            return self.T.read().swapaxes(-1, -2)[index]
        return np.memmap(str(self.file), self.dtype, "r", self.offset, self.shape)[index]  # a Path would be looked up


class Scaled(NamedTuple):
    """A matrix [.., O, C] in FP8 (e4m3) or int8, times a scale for each block of so many rows and columns. In int8 with
    a scale for each row, as convert and compressed-tensors ("int-quantized") write it, it is held so."""

    values: Stored
    scale: Stored  # [.., O / rows, C / columns]
    block: tuple[int, int]

    dtype = DTYPES["float32"]
    format = property(lambda self: Int8 if self.values.kind == "I8" and self.block[0] == 1 else Plain)
    shape = property(lambda self: self.values.shape)

    @staticmethod
    def collect(folder: Path, found: dict, quantization: dict) -> None:
        """`x_scale_inv` or `x_scale` has a scale for each block, for each row, or one for all."""
        keys = "weight_block_size", "block_structure"
        given = [group[key] for group in groups_of(quantization) for key in keys if group.get(key) is not None]
        block = given[0] if given else [128, 128]
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block)):
            raise InputError(f"{folder}: weight_block_size {block!r:.40} is not two numbers, of rows and columns")
        by_row = any(x.shape[1:] == (1,) != x.shape[:1] for name, x in found.items() if name.endswith("_scale"))
        has_one_scale = not by_row or "tensor" in [group.get("strategy") for group in groups_of(quantization)]
        for name in [name for name, tensor in found.items() if tensor.dtype in (ml_dtypes.float8_e4m3fn, np.int8)]:
            if OF_ACTIVATIONS.search(name) or name.endswith("_zero_point"):
                continue
            values, ending = found[name], "_scale_inv" if f"{name}_scale_inv" in found else "_scale"
            scale, rows, is_int8 = found.pop(name + ending, None), values.shape[:-1], values.kind == "I8"
            if scale is None or not rows or (len(rows) > 1 and not is_int8):
                what = f"{'int8' if is_int8 else 'FP8'} and no matrix with a weight_scale_inv or weight_scale"
                raise InputError(f"{folder}: {name:.200} is in {what}")
            by_block = tuple(-(-size // n) for size, n in zip(values.shape, block, strict=False))
            if is_spread := scale.shape[1::2] == (1, 1):  # [n, 1, m, 1], as ModelOpt has scales of blocks
                scale = scale._replace(shape=scale.shape[::2])
            shape = scale.shape if scale.kind in FLOATS else None
            if shape in (rows, (*rows, 1)):
                found[name] = Scaled(values, scale._replace(shape=(*rows, 1)), (1, max(values.shape[-1], 1)))
            elif shape == by_block and (given or is_spread or ending == "_scale_inv") and not is_int8:
                found[name] = Scaled(values, scale, tuple(block))
            elif len(rows) == 1 and (shape in ((), (1,)) or (shape == (1, 1) and has_one_scale)):  # else it was cut
                found[name] = Scaled(values, scale._replace(shape=(1, 1)), values.shape)
            else:
                wanted = by_block if ending == "_scale_inv" and not is_int8 else (*rows, 1)
                expect(folder, name + ending, scale, FLOATS, wanted)

    def read(self, *index: slice | int) -> np.ndarray:
        *matrices, rows, columns = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        rows, columns = (np.arange(self.shape[i])[some] // self.block[i] for i, some in ((-2, rows), (-1, columns)))
        scale = self.scale.read(*matrices)[..., rows[:, None], columns].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # damaged scales overflow; that is caught later
            return self.values.read(*index).astype(np.float32) * scale

    endings = "", "_scale"  # of the names of what convert writes for a matrix in int8, which `rounded` makes of rows
    rounded = staticmethod(jax.jit(lambda rows: jax.tree.leaves(model.quantize(rows))))

    @staticmethod
    def arrays(held: Int8, weight: Weight, tensors: dict) -> Iterator[jax.Array]:
        yield on_devices(held.values, weight, {name: tensor.values.read for name, tensor in tensors.items()})
        scales = {name: tensor.scale._replace(shape=tensor.shape[:-1]).read for name, tensor in tensors.items()}
        yield on_devices(held.scale, scales_of(weight), scales)


@dataclasses.dataclass(frozen=True)
class InGroups:
    """A matrix [.., O, C] of codes of 4 or 8 bits, less a zero and times a scale for each group of a row's numbers. A
    word of 32 bits has the codes of n neighbouring inputs (in AWQ, outputs), or the zeros of n neighbouring outputs.
    `codes` and `zeros` are of some rows, and of some columns or groups of these."""

    shape: tuple[int, ...]
    group: int
    words: Stored  # [.., O, C / n], in AWQ [O / n, C]
    scale: Stored  # [.., O, C / group]
    zero: Stored | None  # [O / n, C / group]
    places: np.ndarray | None = None  # the group of each number of a row, if those of a group are not neighbours
    bits: int = 4

    dtype = DTYPES["float32"]
    order = slice(None)  # of the codes in a word: from the lowest bits on

    @property
    def format(self) -> type[Plain]:  # or Int4Groups
        if self.places is not None or self.bits == 8 or not fast:  # "act-order"; model.py has no 8 bits in groups
            return Plain
        dtype = "bfloat16" if self.scale.kind == "BF16" else "float32"
        return fast.Int4Groups(self.group, self.zero is not None, dtype)

    def codes(self, *index: slice | int) -> np.ndarray:
        *rows, columns = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        return self.unpacked(lambda words: self.words.read(*rows, words), columns, self.shape[-1])

    def by_output(self, words: Stored, rows=slice(None), columns=slice(None), more: int = 0) -> np.ndarray:
        """Codes [rows, columns] from words [O / n, columns], to each of which `more` is added."""
        return self.unpacked(lambda some: words.read(some, columns).T + np.int32(more), rows, self.shape[0]).T

    def unpacked(self, words, wanted: slice, size: int) -> np.ndarray:
        """The codes `wanted` of `size`: uint8 [.., codes]. `words` reads some of the words [.., size / n]."""
        (start, stop, step), n = wanted.indices(size), 32 // self.bits
        words = np.ascontiguousarray(words(slice(start // n, -(-stop // n))))
        codes = words.view(np.uint8)
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*words.shape, n)[..., self.order]
        return codes.reshape(*words.shape[:-1], -1)[..., start % n : stop - start // n * n : step]

    def zeros(self, *index: slice) -> np.ndarray:
        return self.by_output(self.zero, *index)

    def read(self, *index: slice | int) -> np.ndarray:
        zeros = 2 ** (self.bits - 1) if self.zero is None else self.of_groups(self.zeros, 1, *index)
        scales = self.of_groups(self.scale.read, 1, *index).astype(np.float32)
        return (self.codes(*index) - np.float32(zeros)) * scales

    @staticmethod
    def arrays(held, weight: Weight, tensors: dict) -> Iterator[jax.Array]:
        (values, *of_groups), codes = jax.tree.leaves(held), {name: tensor.codes for name, tensor in tensors.items()}
        n = held.shape[-1] // values.shape[-1]
        yield on_devices(values, weight, codes, held.packed, n, np.dtype(np.uint8))
        group, part = held.shape[-1] // held.ordered(of_groups[0].shape)[-1], weight.parts[0]
        step = math.gcd(group, part.layout()[1]) if weight.split == 1 and part.units else group  # units are not cut
        n, of_steps = group // step, with_columns(weight, step)
        finish = getattr(held, "scales", lambda x: x)  # MXFP4's exponents, which bfloat16 too holds exactly
        for array, read in zip(of_groups, (lambda tensor: tensor.scale.read, lambda tensor: tensor.zeros)):
            readers = {name: functools.partial(x.of_groups, read(x), step) for name, x in tensors.items()}
            yield on_devices(array, of_steps, readers, lambda x: finish(x[..., ::n]), n, order=held.ordered)

    def of_groups(self, read, n: int, *index: slice | int) -> np.ndarray:
        """Scales or zeros, which `read` gives of some rows: of each n numbers one."""
        *rows, columns = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        places = np.arange(0, self.shape[-1], n) // self.group if self.places is None else self.places
        return read(*rows)[..., places[columns]]


def parts_of(found: dict, *endings: str) -> Iterator[tuple[str, list[Stored | None]]]:
    """Takes out of `found` what stands there in several tensors: the name without the endings, and a tensor for each
    ending, None for one that is not there. The first always is."""
    for name in [name.removesuffix(endings[0]) for name in found if name.endswith(endings[0])]:
        yield name, [found.pop(name + ending, None) for ending in endings]


class PackQuantized(InGroups):
    """As compressed-tensors' "pack-quantized" and convert store it: `x_packed` int32 [.., O, C / n], with the first of
    n codes in the lowest bits, `x_scale` [.., O, C / group], `x_shape`, and `x_zero_point` int32 [O / n, C / group]."""

    @classmethod
    def collect(cls, folder: Path, found: dict, quantization: dict) -> None:
        endings = "_packed", "_shape", "_scale", "_zero_point", "_g_idx"
        for name, (words, shape, scale, zero, g_idx) in parts_of(found, *endings):
            *rows, length = shape_of(folder, f"{name}_packed", words)
            if shape is not None:
                expect(folder, f"{name}_shape", shape, ("I64", "I32"), (len(words.shape),))
            columns = length * 8 if shape is None else int(shape.read()[-1])
            n = 4 if length == -(-columns // 4) else 8  # codes in a word
            sizes, has_zeros = settings_of(folder, quantization, 32 // n)
            sizes = [columns if size == -1 else size for size in sizes]  # of several, the one that fits the scales
            fits = (size for size in sizes if scale is not None and scale.shape[-1:] == (-(-columns // size),))
            group = next(fits, sizes[0])
            groups = -(-columns // group)
            expect(folder, f"{name}_packed", words, ("I32",), (*rows, -(-columns // n)))
            expect(folder, f"{name}_scale", scale, FLOATS, (*rows, groups))
            if has_zeros:
                expect(folder, f"{name}_zero_point", zero, ("I32",), (-(-rows[0] // n), groups))
            places = g_idx and places_of(folder, f"{name}_g_idx", g_idx, columns, group)
            found[name] = cls((*rows, columns), group, words, scale, zero if has_zeros else None, places, 32 // n)

    endings = "_packed", "_scale"  # as in Scaled

    @staticmethod
    @jax.jit
    def rounded(rows: np.ndarray) -> list[jax.Array]:
        codes, scale = fast.quantize_in_groups(rows, rows.shape[-1] // OURS["int4"]["group_size"], jnp.bfloat16)
        return [jax.lax.bitcast_convert_type(fast.packed_codes(codes, 8, 1), jnp.int32), scale]


class Mxfp4Blocks(InGroups):
    """Experts in MXFP4 (Rouhani et al. 2023, "Microscaling Data Formats"): numbers of 4 bits, 1 of them the sign, 2 the
    exponent and 1 the mantissa, times a power of two for each 32 of a row. `scale` has the exponents of these."""

    format, dtype = getattr(model, "Mxfp4", Plain), DTYPES["bfloat16"]

    @classmethod
    def collect(cls, folder: Path, found: dict, quantization: dict) -> None:
        """Puts one tensor `x` in the place of `x_blocks`, uint8 [E, O, C / 32, 16], in whose bytes the first of two
        numbers is the lower half, and `x_scales`, exponents in uint8 [E, O, C / 32]."""
        for name, (pairs, exponents) in parts_of(found, "_blocks", "_scales"):
            expect(folder, f"{name}_blocks", pairs, ("U8",), (*pairs.shape[:3], 16))
            expect(folder, f"{name}_scales", exponents, ("U8",), pairs.shape[:3])
            *rows, blocks = exponents.shape
            words = pairs._replace(kind="I32", shape=(*rows, 4 * blocks))
            found[name] = cls((*rows, 32 * blocks), 32, words, exponents, None)

    def read(self, *index):
        numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        powers = self.of_groups(self.scale.read, 1, *index).view(ml_dtypes.float8_e8m0fnu)
        return (numbers[self.codes(*index)] * powers.astype(np.float32)).astype(ml_dtypes.bfloat16)


class Awq(InGroups):
    """As AutoAWQ's GEMM stores it: `qweight` int32 [C, O / 8], whose word has the codes of 8 outputs in the order
    0 2 4 6 1 3 5 7 from the lowest bits on, `qzeros` [C / group, O / 8] likewise, and `scales` [C / group, O]."""

    method, key, versions, order = "awq", "version", ("gemm", "GEMM"), np.argsort((0, 2, 4, 6, 1, 3, 5, 7))
    has_8_bits, packed_axis = False, 0  # a word has the codes of several outputs (0) or inputs (1)

    @classmethod
    def collect(cls, folder: Path, found: dict, quantization: dict) -> None:
        if quantization.get("quant_method") != cls.method:
            return
        if (version := quantization.get(cls.key)) not in (None, *cls.versions):
            what = f"{cls.key} {version!r:.40} is not supported, only {' and '.join(cls.versions)}"
            raise InputError(f"{folder}: quantization {cls.method} of {what}")
        bits = 8 if quantization.get("bits") == 8 and cls.has_8_bits else 4
        (size, *_), _ = settings_of(folder, quantization, bits)
        for name, (*tensors, g_idx) in parts_of(found, ".qweight", ".qzeros", ".scales", ".g_idx"):
            words, zero, scale = (tensor and tensor.T for tensor in tensors)
            sizes, n = shape_of(folder, f"{name}.qweight", words)[-2:], 32 // bits
            rows, columns = (n * words if axis == cls.packed_axis else words for axis, words in enumerate(sizes))
            group = columns if size == -1 else size
            expect(folder, f"{name}.qweight", words, ("I32",), sizes)
            expect(folder, f"{name}.qzeros", zero, ("I32",), (-(-rows // n), -(-columns // group)))
            expect(folder, f"{name}.scales", scale, FLOATS, (rows, -(-columns // group)))
            places = g_idx and places_of(folder, f"{name}.g_idx", g_idx, columns, group)
            found[f"{name}.weight"] = cls((rows, columns), group, words, scale, zero, places, bits)

    def codes(self, *index):
        return self.by_output(self.words, *index)


@dataclasses.dataclass(frozen=True)
class Gptq(Awq):
    """As GPTQ stores it: `qweight` int32 [C / n, O], whose word has the codes of n inputs from the lowest bits on,
    `qzeros` [C / group, O / n], `scales` [C / group, O], `g_idx` [C], the group of each input. Version 1 stores zeros
    less one: `less` is taken from each, or `words_less` from a whole word, where a zero of 0 borrows from the next."""

    less: int = 0
    words_less: int = 0

    method, key, versions, order = "gptq", "checkpoint_format", ("gptq", "gptq_v2"), slice(None)
    has_8_bits, packed_axis, codes = True, 1, InGroups.codes

    @classmethod
    def collect(cls, folder: Path, found: dict, quantization: dict) -> None:
        parts = quantization.get("dynamic")  # GPTQModel's settings for some weights, by name
        for part in parts.values() if isinstance(parts, dict) else ():
            if isinstance(part, dict) and quantization | part != quantization:
                raise InputError(f"{folder}: quantization_config: dynamic gives some weights {part!r:.200}")
        super().collect(folder, found, quantization)
        less = int(quantization.get("checkpoint_format") != "gptq_v2")
        keys = quantization.keys() & {"meta", "provider", "packing_format", "autoround_version"}
        writer = str([(key, quantization[key]) for key in keys]).lower()
        is_by_words = less and re.search("gptqmodel|auto.?round", writer)  # other tools: by codes
        has_lost = False
        for name, tensor in [(name, tensor) for name, tensor in found.items() if type(tensor) is cls]:
            words, most = tensor.zero.read(), 2**tensor.bits - 1
            is_alike = quantization.get("sym") and (words == words.flat[0]).all()
            zeros = words.flat[:1] if is_alike else words
            zeros = zeros[..., None] >> np.arange(0, 32, tensor.bits, dtype=np.int32) & most
            if is_alike and {*zeros.flat} in ({most // 2}, {most // 2 + 1}):
                found[name] = dataclasses.replace(tensor, zero=None)  # half, whatever checkpoint_format says
                continue
            # AutoGPTQ, and AutoRound of 2024, write -1 over the rest of its word: nothing else follows it anywhere.
            is_most = zeros == most
            is_lost = less and is_most[..., :-1].any() and (is_most[..., :-1] <= is_most[..., 1:]).all()
            has_lost |= is_lost
            taken = {"words_less": 0xFFFFFFFF // most} if is_by_words and not is_lost else {"less": less}
            found[name] = dataclasses.replace(tensor, **taken)
        if has_lost:
            say("note: zeros of GPTQ that follow a zero of 0 seem to be overwritten; answers may be wrong")

    def zeros(self, *index):
        return self.by_output(self.zero, *index, more=self.words_less) + np.uint8(self.less) & 2**self.bits - 1


def groups_of(quantization: dict) -> list[dict]:
    """What config.json says about weights: once, or for each of several groups of layers."""
    groups = quantization.get("config_groups")
    groups = [*groups.values()] if isinstance(groups, dict) else [{"weights": quantization}]
    return [group["weights"] for group in groups if isinstance(group, dict) and isinstance(group.get("weights"), dict)]


def settings_of(folder: Path, quantization: dict, width: int) -> tuple[list[int], bool]:
    """What config.json says about so many bits: the sizes of groups, -1 for whole rows, and whether they have zeros."""
    groups = groups_of(quantization)
    bits = [next((group[name] for name in ("num_bits", "bits", "w_bit") if name in group), 4) for group in groups]
    if width not in bits:
        what = f"weights of {bits[0]!r:.40} bits are not supported" if bits else "nothing about weights"
        raise InputError(f"{folder}: quantization_config: {what}")
    groups = [group for group, n in zip(groups, bits, strict=True) if n == width]  # others may be in FP8
    sizes = [group.get("group_size", group.get("q_group_size")) or -1 for group in groups]  # null: whole rows
    if not all(type(size) is int and (size == -1 or 16 <= size < 2**31) for size in sizes):
        raise InputError(f"{folder}: group_size {sizes[0]!r:.40} is neither -1 nor 16 or more")
    return sizes, any(group.get("symmetric") is False for group in groups)


def expect(folder: Path, name: str, tensor: Stored | None, kinds, shape: tuple[int, ...]) -> None:
    """Raises InputError unless there is a tensor of this name, shape and one of these dtypes."""
    if tensor is None:
        raise InputError(f"{folder}: {name:.200} is missing")
    if tensor.kind not in kinds or tensor.shape != shape:
        has, wanted = ([*(swapped(x) if tensor.is_transposed else x)] for x in (tensor.shape, shape))
        raise InputError(f"{folder}: {name:.200} has {tensor.kind} {has}, not {'/'.join(kinds)} {wanted}")


def shape_of(folder: Path, name: str, words: Stored) -> tuple[int, ...]:
    """The shape of packed codes, of a matrix or of several."""
    if len(words.shape) not in (2, 3) or 0 in words.shape:
        raise InputError(f"{folder}: {name:.200} is no matrix, but {list(words.shape)}")
    return words.shape


def places_of(folder: Path, name: str, g_idx: Stored, columns: int, group: int) -> np.ndarray | None:
    """The group of each column by a tensor g_idx, None if the columns of each group are neighbours."""
    expect(folder, name, g_idx, ("I32", "I64"), (columns,))
    places = np.array(g_idx.read())
    if (places == np.arange(columns) // group).all() or (places == -1).all():
        return None
    if places.min() < 0 or places.max() >= -(-columns // group):
        raise InputError(f"{folder}: {name:.200} names groups that there are not")
    return places


FORMS = (PackQuantized, Awq, Gptq, Scaled, Mxfp4Blocks)
WRITERS = {Int8: Scaled, model.FORMATS.get("int4"): PackQuantized}  # the form in which convert writes a format


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two dimensions exchanged."""
    return (*shape[:-2], *shape[:-3:-1])


def pieces(tensor, is_transposed: bool = False) -> Iterator[slice]:
    """A tensor's rows in slices of some PIECE_BYTES. A transposed matrix is one: on disk its rows are scattered."""
    row_bytes = max(1, math.prod(tensor.shape[1:])) * tensor.dtype.itemsize
    is_whole = is_transposed and len(tensor.shape) == 2
    step = max(1, tensor.shape[0] if is_whole else PIECE_BYTES // row_bytes)
    return (slice(first, first + step) for first in range(0, tensor.shape[0], step))


# ---------------------------------------------------------------------------------------------------------------------
# Reading a checkpoint folder


class Checkpoint(NamedTuple):
    """A checkpoint folder whose tensors are all there, in the shapes that config.json asks for."""

    folder: Path
    config: Config
    raw_config: dict  # the whole of config.json
    generation_config: dict  # of generation_config.json, empty without one
    weights: dict  # weights_of(config), each in the format in which the checkpoint has it
    tensors: dict  # those the model needs, by name, each in one of the forms above
    left_out: dict[str, str]  # those it does not, with the reason


def find_checkpoint(path: str | Path, extra_layer: bool = False) -> Path:
    """The folder `path`, or the snapshot of the hub id `path`, org/name or org/name@revision: downloaded, but for files
    with nothing that is needed, or found in the hub's cache folder. `extra_layer` is that of open_checkpoint."""
    hub_id = re.fullmatch(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w./-]+))?", str(path))
    folder = Path(os.path.expanduser(path))  # in --flag=~/x a shell leaves the ~
    if path and folder.is_dir():
        return folder
    if folder.exists() or not hub_id:
        raise InputError(f"{path}: {'is a file' if folder.is_file() else 'no such folder'}; give a folder or a hub id")
    from huggingface_hub import constants, errors, list_repo_files, snapshot_download

    name, revision = hub_id.groups()
    about = [*COPIED, "config.json", INDEX, "adapter_config.json", "quantize_config.json"]

    def ask(function, revision, **options):
        try:
            return function(name, revision=revision, **options)
        except errors.IncompleteSnapshotError as error:  # without the hub; below we see whether the cache has enough
            say(f"note: {one_line(error)}")
            return error.snapshot_path
        except errors.GatedRepoError as error:
            remedy = f"accept its license on {constants.ENDPOINT}/{name}, then log in (hf auth login, or HF_TOKEN)"
            raise InputError(f"{path}: is gated; {remedy}") from error
        except Exception as error:  # from the network, the hub or the disk
            why = f"the hub did not give it (not downloaded): {one_line(error)}"
            raise InputError(f"{path}: no such folder, and {why}") from error

    folder = Path(ask(snapshot_download, revision, allow_patterns=about))
    for files in needed_files(folder, extra_layer), ["config.json", "model.safetensors"]:  # an index can be stale
        ask(snapshot_download, folder.name, allow_patterns=files)
        if all((folder / file).is_file() for file in files):
            return folder
    names = ask(list_repo_files, folder.name)  # an error if the hub does not answer
    command = f"hf download {name} --local-dir DIR && {unpickling('DIR')}"
    other = something_else(folder, [name for name in names if name.endswith(("adapter_config.json", ".gguf"))])
    other = other or f". If it has pickled weights, this makes DIR of them: {command}"
    raise InputError(f"{path}: has no safetensors with a config.json{other}")


def needed_files(folder: Path, extra_layer: bool) -> list[str]:
    """The files that an index names, without those whose tensors are all left out."""
    if not (folder / INDEX).is_file() or not (folder / "config.json").is_file():
        return ["config.json", "model.safetensors"]
    weight_map = weight_map_of(folder)
    config = config_of(read_json(folder / "config.json"), weight_map, extra_layer)
    return sorted({file for name, file in weight_map.items() if not model.left_out(name, config)})


def something_else(folder: Path, names: Iterable[str]) -> str:
    """The rest of a message: what a folder with files of these names is instead, and what to do."""
    if lost := [name for name in names if name.endswith(".safetensors") and not (folder / name).exists()]:
        return f": {lost[0]} is a link to a file that is not there; copy the files themselves (cp -L)"
    if {"params.json", "consolidated.safetensors"} & {*names}:
        return ": weights as Meta or Mistral write them; give those of the same release for transformers"
    if "adapter_config.json" in names:
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return f": a PEFT adapter of {base!r:.200}; merge it into that model (peft's merge_and_unload) and save this"
    if any(name.endswith(".gguf") for name in names):
        return ": GGUF, which llama.cpp reads; give the safetensors that it was made from"
    if any(re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin", name) for name in names):
        return f"; pickled weights are never read, {unpickling(folder)} saves them as safetensors"
    if {"zero_to_fp32.py", "pytorch_model_fsdp_0"} & {*names}:
        return ": shards of a training run; DeepSpeed's zero_to_fp32.py, or accelerate merge-weights, joins them"
    inner = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
    return f"; give the folder in it that has one, such as {inner[-1].parent}" if inner else ""


def unpickling(folder: Path | str) -> str:
    """The command that writes the pickled weights of a folder beside them as safetensors. It needs torch."""
    program = "import sys; from transformers import AutoModelForCausalLM as Model; folder = sys.argv[1]; "
    program += "Model.from_pretrained(folder, dtype='auto').save_pretrained(folder)"
    return f'python3 -c "{program}" {shlex.quote(str(folder))}'


def read_json(path: Path) -> dict:
    """A JSON object from a file, an empty one if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig") if path.is_file() else "{}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value


def open_checkpoint(folder: str | Path, extra_layer: bool = False) -> Checkpoint:
    """Reads config.json and the headers of all shards, and no tensor yet. Raises InputError for all that is wrong. A
    layer of multi-token prediction, where there is one, counts among the weights if `extra_layer` asks for it."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    if not (folder / "config.json").is_file():
        other = something_else(folder, names) or ": no checkpoint, or a conversion to be run again until it finishes"
        raise InputError(f"{folder}: no config.json{other}")
    raw_config, generation_config = (read_json(folder / name) for name in ("config.json", "generation_config.json"))
    places = raw_config, raw_config.get("text_config") or {}
    if not isinstance(places[1], dict):
        raise InputError(f"{folder}: config.json: text_config must be a table, not {places[1]!r:.40}")
    given = next((place[key] for place in places for key in QUANTIZATION if place.get(key)), {})
    quantization = given if isinstance(given, dict) else {"quant_method": given}
    if quantization.get("quant_method") == "auto-round":
        packing = str(quantization.get("packing_format", "auto-round"))
        quantization = quantization | AUTO_ROUND.get(packing, {"quant_method": packing})
    method, remedy = quantization.get("quant_method", "MLX"), "give the unquantized checkpoint"
    transforms = [quantization.get(name) for name in ("transform_config", "algo_config")]
    if re.search(ONLINE_TRANSFORMS, str(transforms)) or quantization.get("rotation"):
        method = f"{method} with transforms"
    if quantization.get("weight_scale_semantics") == "inverse":  # of GPTQModel; the scales of all others multiply
        method = f"{method} with scales that divide"
    is_quantized = quantization not in ({}, *OURS.values())
    if is_quantized and method not in METHODS:
        raise InputError(f"{folder}: quantization {method!r:.40} is not supported; {remedy}")
    config_of(raw_config, [], False)  # reports what is wrong with config.json before what is wrong with the tensors
    found, absent = stored_tensors(folder)
    for name, tensor in found.items():
        if name.endswith(("_scale", "_scale_inv")) and tensor.kind in ("F8_E4M3", "F8_E8M0", "U8"):
            what = f"weights in NVFP4, MXFP4 or MXFP8 ({name:.200} is {tensor.kind}) are not supported"
            raise InputError(f"{folder}: {what}; {remedy}")
    if not quantization and any(name.endswith(".qweight") for name in found):
        what, remedy = "weights in 4 bits, and config.json has no quantization_config", "download config.json again"
        remedy += '; or, for GPTQ of 2023, copy quantize_config.json into it as that, with "quant_method": "gptq" added'
        raise InputError(f"{folder}: {what}; {remedy}")
    with_absent = config_of(raw_config, [*found, *absent], False)
    skipped = {name: model.left_out(name, with_absent) for name in absent}
    if needed := [absent[name] for name, reason in skipped.items() if not reason]:
        raise InputError(f"{folder / needed[0]}: missing; download the checkpoint again")
    config = config_of(raw_config, found, True) if extra_layer else with_absent
    for weight in jax.tree.leaves(weights_of(config)):
        for name in found.keys() & weight.tensors() if weight.transposed else ():
            found[name] = found[name].T
        if weight.experts and not weight.is_packed():
            unpack_experts(found, weight)
    try:
        for form in FORMS:
            form.collect(folder, found, quantization)
        config = with_head(folder, found, config) if config.tie_word_embeddings else config
        tensors, left_out = check_tensors(folder, found, config)
    except InputError as error:
        if not is_quantized:
            raise
        why = f"damaged, or a form of quantization {method!r} that is not supported"
        raise InputError(f"{error}: {why}; {remedy}") from error

    def as_stored(path, weight):
        formats = {tensors[name].format for name in weight.tensors()}
        format = formats.pop() if weight.is_matrix() and len(formats) == 1 else Plain
        is_table = path[0].key.endswith("embedding") and format.bits < 8  # its rows are looked up
        return dataclasses.replace(weight, format=Plain if is_table else format)

    if "adapter_config.json" in names:
        say(f"note: {folder} has weights and a PEFT adapter beside them, which is not applied")
    if not fast and any(isinstance(tensor, InGroups) and tensor.format is Plain for tensor in tensors.values()):
        say("note: without fast.py, weights in 4 bits are held in the dtype of the others")
    weights = jax.tree_util.tree_map_with_path(as_stored, weights_of(config))
    return Checkpoint(folder, config, raw_config, generation_config, weights, tensors, skipped | left_out)


def config_of(raw_config: dict, names: Iterable[str], extra_layer: bool) -> Config:
    """The Config of a config.json and of the checkpoint's tensors. Its InputError names the folder of another model."""
    try:
        config = Config.from_dict(raw_config, [re.sub("_packed$|q(?=weight$)", "", name) for name in names])
    except InputError as error:
        kind = raw_config.get("model_type")
        others = [other for other, types in FOLDERS.items() if kind in types and f"model_type {kind!r}" in str(error)]
        raise InputError("; use the folder ".join([str(error), *others])) from error
    uses_it = extra_layer and getattr(config, "has_extra_layer", False)
    return dataclasses.replace(config, uses_extra_layer=True) if uses_it else config


def unpack_experts(found: dict, weight: Weight) -> None:
    """Finds each expert's matrices in the one tensor of all, [experts, output, input], that transformers 5 writes, and
    each one's scales in that of all scales of its own FP8, beside which the matrices may stand apart."""
    parts = {name: rows for part in weight.parts for name, rows in part.tensors.items()}
    name = f"{next(iter(parts)).partition('.{}')[0]}.{'gate_up_proj' if len(parts) > 1 else 'down_proj'}"
    shape = (weight.experts, *weight.shape(sum(parts.values())))
    for ending in ("", "_scale_inv"):
        packed = found.get(name + ending)
        if packed is None or len(packed.shape) != 3 or packed.kind not in (*FLOATS, "F8_E4M3"):
            continue
        experts, rows, columns = packed.shape
        if experts != weight.experts or rows % len(parts) or (not ending and packed.shape != shape):
            continue
        del found[name + ending]
        of_part = rows // len(parts), columns  # gate and up have as many rows
        for i, part in enumerate(part.format(e) for e in range(experts) for part in parts):
            offset = packed.offset + i * math.prod(of_part) * packed.dtype.itemsize
            found[part + weight.suffix + ending] = packed._replace(offset=offset, shape=of_part)


def weight_map_of(folder: Path) -> dict[str, str]:
    """The file of each tensor. As in transformers, an index that names all tensors of model.safetensors is stale. So is
    one of which no file is there: that of the source, which a quantized copy brought along."""
    index, whole, weight_map = folder / INDEX, folder / "model.safetensors", {}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index}: has no weight_map from tensor to file")
    if whole.is_file() and whole.name not in weight_map.values():
        of_whole = dict.fromkeys(read_header(whole), whole.name)
        others = any((folder / name).is_file() for name in {*weight_map.values()})
        if of_whole.keys() <= weight_map.keys() or not others:
            return of_whole
    if weight_map:
        return weight_map
    remedy = "; download the index, rename a single file to the first, or give what transformers' save_pretrained wrote"
    other = something_else(folder, os.listdir(folder)) or remedy
    raise InputError(f"{folder}: neither model.safetensors nor {INDEX}{other}")


def stored_tensors(folder: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of all shards, by name, and the files of those whose shard is not there."""
    weight_map = weight_map_of(folder)
    found: dict[str, Stored] = {}
    shards = {shard: (folder / shard).is_file() for shard in sorted(set(weight_map.values()))}
    for shard, is_there in shards.items():
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise InputError(f"{folder / INDEX}: the shard {shard!r:.200} is not in this folder")
        for name, stored in read_header(folder / shard).items() if is_there else ():
            if name in found and name not in weight_map:
                raise InputError(f"{folder}: {name:.200} is both in {found[name].file.name} and in {shard}")
            if weight_map.get(name, shard) == shard:  # patched copies have a tensor twice
                found[name] = stored
    if "embed_tokens.weight" in found:  # saved from transformers' class without the output head
        found = {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in found.items()}
    return found, {name: shard for name, shard in weight_map.items() if not shards[shard]}


def download_again(file: Path) -> str:
    """What to do about a damaged file. Without LFS, Git leaves a pointer in the place of a large one."""
    with open(file, "rb") as f:
        is_pointer = f.read(19) == b"version https://git"
    return "it is a pointer of Git LFS: run git lfs pull, or download it" if is_pointer else "download it again"


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, after safetensors itself has checked its header and size."""
    with open(file, "rb") as f:  # first: safetensors calls a file that may not be read missing
        try:
            safe_open(file, framework="np")
        except SafetensorError as error:
            raise InputError(f"{file}: truncated or damaged ({one_line(error)}); {download_again(file)}") from error
        start = 8 + int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(start - 8))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        if len(shape) == 3 and shape[1] == 1:  # [channels, 1, taps], as torch has a convolution of each channel
            shape = shape[0], shape[2]
        found[name] = Stored(file, start + entry["data_offsets"][0], entry["dtype"], shape)
    return found


def with_head(folder: Path, found: dict, config: Config) -> Config:
    """The `config` of tied embeddings, untied if the checkpoint has an output head with numbers of its own. If it has
    the head alone, this is the embedding too. transformers does both."""
    (embedding,) = weights_of(config)["embedding"].tensors()
    for name in [name for name in found if name.endswith("lm_head.weight")]:
        head, tied = found[name], found.setdefault(embedding, found[name])
        compared = (np.array_equal(head.read(rows), tied.read(rows)) for rows in pieces(tied))
        if head is not tied and (head.shape != tied.shape or not all(compared)):
            if "tie_word_embeddings" not in Config.__dataclass_fields__:
                raise InputError(f"{folder}: {name} differs from {embedding}, which is not supported here")
            config = dataclasses.replace(config, tie_word_embeddings=False)
    return config


def check_tensors(folder: Path, found: dict, config: Config) -> tuple[dict, dict]:
    """Of the tensors found, those that `config` needs, and those left out on purpose, with the reason.

    Raises InputError with all that is missing, of a wrong shape or dtype, or unknown.
    """
    if config.num_hidden_layers > len(found):
        raise InputError(f"{folder}: {len(found)} tensors cannot be {config.num_hidden_layers} layers, see config.json")
    weights = jax.tree.leaves(weights_of(config))
    expected = {name: shape for weight in weights for name, shape in weight.tensors().items()}
    missing, problems = [f"{name} is missing" for name in expected if name not in found], []
    if len(missing) == 1 and missing[0].startswith("lm_head."):
        missing[0] += " (if the embedding is the head, set tie_word_embeddings to true in config.json)"
    skipped = {}
    for name, tensor in found.items():
        if reason := model.left_out(name, config):
            skipped[name] = reason
        elif name not in expected and name.endswith((".bias", "_zero_point")) and not tensor.read().any():
            skipped[name] = "all zeros"  # AutoGPTQ has a bias for each matrix, compressed-tensors a zero for each scale
        elif name not in expected and OF_ACTIVATIONS.search(name):
            skipped[name] = "for activations and the cache, which stay in the dtype of the model"
        elif name.startswith("v_head."):
            skipped[name] = "a value head, which training needs"
        elif name not in expected:
            problems.append(f"{name:.200} is not a tensor of this model")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, and config.json asks for {list(expected[name])}")
        elif tensor.dtype not in DTYPES.values():
            problems.append(f"{name} has dtype {tensor.kind:.40}, which is not supported here")
    if problems := [*missing[:2], *problems, *missing[2:]]:  # names on both sides tell what differs
        more = f", and {len(problems) - 3} more such" if len(problems) > 3 else ""
        absent = f".{missing[0].split()[0]}" if missing else None  # wrappers stand before it or amid it
        if any(".lora_" in name or ".modules_to_save." in name for name in found):
            more += "; weights of PEFT that are not merged: save what its merge_and_unload gives"
        elif wrapped := next((x for x in found if absent and re.sub(r"\._\w+", "", f".{x}").endswith(absent)), None):
            more += f"; {wrapped} stands in a wrapper: save the model in it"
        if any(name.startswith("score.") for name in found):
            more += "; a classifier or a reward model, which writes no text"
        if any(found[name].shape == (0,) for name in expected.keys() & found):
            more += "; shards of a run: DeepSpeed's zero_to_fp32.py, or for FSDP accelerate merge-weights, joins them"
        raise InputError(f"{folder}: {'; '.join(problems[:3])}{more}")
    return {name: found[name] for name in expected}, skipped


def fingerprint(checkpoint: Checkpoint) -> str:
    """Tells checkpoints apart without reading them whole: by config.json, and rows of up to 1,000 tensors."""
    digest = hashlib.sha256(json.dumps(checkpoint.raw_config, sort_keys=True).encode())
    for tensor in [*checkpoint.tensors.values()][:: len(checkpoint.tensors) // 1000 + 1]:
        for end in (slice(0, 1), slice(-1, None)):
            digest.update(tensor.read(*[end] * max(1, len(tensor.shape) - 1)).tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def mesh_shape(weights: dict, devices: list, dp: int | None = None, ep: int | None = None, tp: int | None = None):
    """dp, ep and tp for a pytree of Weight on these devices. Those not given are 1, except tp, which takes the
    remaining devices. On TPUs ep, if tp is not given either, leaves each device whole lanes of an expert's columns.
    Kernels take them in pieces of model.Format.kernel_columns: ep is the smallest with which the zeros that fill these
    up are a tenth at most, or else the one with the fewest zeros."""
    dp = dp or 1
    left = len(devices) // dp
    if not ep and not tp and devices[0].platform == "tpu":
        experts = [weight for weight in jax.tree.leaves(weights) if weight.experts and weight.split == 1]

        def columns(weight, ep):
            return weight.parts[0].rows_per_device(left // ep)

        def share(weight, ep):  # columns with zeros, over those without
            piece = weight.format.kernel_columns
            return left // ep * model.ceil_div(columns(weight, ep), piece) * piece / weight.columns()

        fitting = [n for n in range(1, left + 1) if left % n == 0]
        for w in experts:
            fitting = [n for n in fitting if w.experts % n == columns(w, n) % 128 == 0]
        ep = min(fitting, key=lambda n: max([1.1, *(share(weight, n) for weight in experts)]), default=None)
    ep = ep or 1
    return dp, ep, tp or max(1, left // ep)


def load(checkpoint: Checkpoint, mesh: Mesh, dtype: str | type = "bfloat16", quantize: str | None = None) -> dict:
    """The weights of a checkpoint on the devices of `mesh`, as model.abstract_weights declares them. Without
    `quantize`, weights stay in the format in which the checkpoint has them.

    Threads read some weights ahead. What is to be cast or rounded reaches the devices in the dtype in which it is read.
    A scale depends on a whole row, which several devices may share: a reduction over them makes it the same on every
    mesh.
    """
    weights = in_format(checkpoint.weights, quantize)
    target = jax.tree.map(lambda weight: weight.abstract(mesh, DTYPES[np.dtype(dtype).name]), weights)
    needed, there = model.stored_bytes(target) / 1e9, memory_of(mesh) / 1e9
    if needed > there:
        sizes = f"the weights take {needed:.1f} GB and the devices have {there:.1f}"
        raise InputError(f"{checkpoint.folder}: {sizes}; give more devices, --dtype bfloat16 or --quantize int8")
    say_left_out(checkpoint)

    def read(weight, stored, held):
        """A weight as it is on disk, each device's part of it. Its arrays, if they are held as they are stored."""
        tensors = {name: checkpoint.tensors[name] for name in weight.tensors()}
        if weight.format == stored.format != Plain and type(held) is not Plain:
            form = type(next(iter(tensors.values())))
            return type(held)(*form.arrays(held, weight, tensors))
        dtypes = {tensor.dtype for tensor in tensors.values()}
        on_disk = dtypes.pop() if len(dtypes) == 1 else DTYPES["float32"]
        readers = {name: tensor.read for name, tensor in tensors.items()}
        array = jax.ShapeDtypeStruct(held.shape, on_disk, sharding=NamedSharding(mesh, weight.spec()))
        return on_devices(array, weight, readers, functools.partial(check_finite, readers))

    def in_memory(held, array):
        if type(array) is type(held):
            return array
        declared, tree = jax.tree.flatten(held)
        if len(declared) == 1:  # a vector, or numbers that are not rounded
            return tree.unflatten([array if array.dtype == declared[0].dtype else array.astype(declared[0].dtype)])
        return jax.block_until_ready(rounding(tree, tuple(declared))(array))

    leaves, tree = jax.tree.flatten(weights)
    stored, held = jax.tree.leaves(checkpoint.weights), tree.flatten_up_to(target)
    arrays = read_ahead(read, leaves, stored, held)
    pairs, delay = zip(held, arrays, strict=True), 1 if needed < 0.1 else 0  # seconds before the bar appears
    with progress_bar(pairs, total=len(leaves), desc="loading", unit=" weights", delay=delay) as bar:
        weights = tree.unflatten([in_memory(*pair) for pair in bar])
    for name in {"even_keys", "even_norms"} & vars(model).keys():  # blocks of models whose keys need it
        getattr(model, name)(weights, checkpoint.config)
    return weights


@functools.cache
def rounding(tree, declared: tuple[jax.ShapeDtypeStruct, ...]):
    """The program that rounds numbers to a format, a pytree of `declared` arrays: one for all weights of this kind."""
    held = tree.unflatten(declared)
    return jax.jit(held.encode, out_shardings=tree.unflatten([x.sharding for x in declared]))


def read_ahead(read, *arguments: list) -> Iterator:
    """Yields `read` of each set of arguments, in order. At most READERS calls run ahead, which bounds the memory."""
    with ThreadPoolExecutor(READERS) as pool:
        calls = (pool.submit(read, *each) for each in zip(*arguments, strict=True))
        pending = deque(islice(calls, READERS))
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(calls, 1))


def scales_of(weight: Weight) -> Weight:
    """The scales of a weight, one for each row of its tensors."""
    if weight.split == 0:
        return dataclasses.replace(weight, other_dim=None)
    part = Part(dict.fromkeys(weight.parts[0].tensors, weight.other_dim))  # each device has some columns of all rows
    return dataclasses.replace(weight, parts=(part,), split=None, other_dim=None)


def with_columns(weight: Weight, n: int) -> Weight:
    """A weight with one number for each `n` of a row of this one."""
    if weight.split == 0:
        return dataclasses.replace(weight, other_dim=weight.other_dim // n)
    part = weight.parts[0]
    rows = {name: -(-size // n) for name, size in part.tensors.items()}
    part = dataclasses.replace(part, tensors=rows, multiple=max(part.multiple // n, 1))
    return dataclasses.replace(weight, parts=(part,))


def on_devices(
    array: jax.ShapeDtypeStruct, weight: Weight, readers: dict, finish=lambda x: x, n=1, dtype=None, order=lambda x: x
) -> jax.Array:
    """The array that is declared as `array`: `weight`, or what stands beside it, whose tensors are read by `readers`.
    `finish` checks what was read, or makes of each n numbers in `dtype` one of the array. `order` exchanges dimensions
    of a shape, or of an array, where those of `array` are in another order than those of the weight. A dimension that
    the weight has not, Int4's words of a lane, is the last but one."""
    last, shape = len(weight.stacked(weight.shape(1))) - 1, order(array.shape)
    shape = *shape[:last], shape[-1]

    def block(index):
        index = order(index)
        start, stop, _ = index[-1].indices(shape[-1])
        index = (*index[:last], slice(n * start, n * stop))
        return order(finish(block_of(readers, weight, index, (*shape[:-1], n * shape[-1]), dtype or array.dtype)))

    return jax.block_until_ready(jax.make_array_from_callback(array.shape, array.sharding, block, dtype=array.dtype))


def check_finite(readers: dict, numbers: np.ndarray) -> np.ndarray:
    """The numbers that were read. A router with NaN would choose experts as if nothing were wrong. In larger weights,
    logits show a NaN."""
    if numbers.size < SMALL and not np.isfinite(numbers).all():
        bad = [name for name, read in readers.items() if not np.isfinite(read()).all()]
        raise InputError(f"{', '.join(bad[:3])} has numbers that are not finite: damaged weights")
    return numbers


def row_slices(part: Part, shard: int, shards: int) -> Iterator[tuple[str, slice]]:
    """The rows of device `shard` of `shards` in order, as slices of tensors by name."""
    first, last, _ = part.assigned_units(shard, shards)
    for run in part.rows_of(first, last):
        start, stop, step = run.start, run.stop, run.step
        for name, size in part.tensors.items():
            if max(start, 0) < min(stop, size):
                yield name, slice(start % step if start < 0 else start, min(stop, size), step)
            start, stop = start - size, stop - size


def block_of(readers: dict, weight: Weight, index: tuple, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One device's block `index` of a weight of global `shape`, with zeros for what no tensor has. `readers` has a
    function for each tensor, which gives a part of it."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    sizes = [stop - start for start, stop in bounds]
    buffer = np.zeros(math.prod(sizes) * dtype.itemsize + 64, np.uint8)
    aligned = -buffer.ctypes.data % 64  # on CPUs jax takes an array on such a boundary as it is, and copies nothing
    block = buffer[aligned : aligned + buffer.size - 64].view(dtype).reshape(sizes)
    axis, stacked = weight.split or 0, bool(weight.experts)
    first, last = bounds[axis + stacked]
    shard, shards = first // (last - first), shape[axis + stacked] // (last - first)
    for e, matrix in zip(range(*bounds[0]), block, strict=True) if stacked else [(0, block)]:
        along, filled = np.moveaxis(matrix, axis, 0), 0
        for part in weight.parts:
            place = filled
            for name, rows in row_slices(part, shard, shards):
                where = (*[e] * (stacked and weight.is_packed()), *[slice(None)] * axis, rows)
                values = np.moveaxis(readers[name.format(e) + weight.suffix](*where), axis, 0)
                along[place : place + len(values)][tuple(map(slice, values.shape))] = values
                place += len(values)
            filled += part.rows_per_device(shards)
    return block


# ---------------------------------------------------------------------------------------------------------------------
# Converting


def convert(source: Path, output: Path, dtype: str, quantize: str | None = None) -> None:
    """Writes the checkpoint `source` to `output`, matrices as `quantize` says, and all else in `dtype`."""
    checkpoint = open_checkpoint(source, extra_layer=True)
    if (ours := checkpoint.raw_config.get("quantization_config")) in OURS.values():
        raise InputError(f"{source}: is converted already, to {ours['quant_method']}; convert the original checkpoint")
    shards = planned_shards(checkpoint, dtype, quantize)
    if quantize == "int4" and any(tensor.format.bits < 8 for tensor in checkpoint.tensors.values()):
        say("note: weights in 4 bits are rounded once more; main.py reads the original as it is, and more exactly")
    config, former = checkpoint.raw_config, {*QUANTIZATION, "torch_dtype"}
    if isinstance(of_text := config.get("text_config"), dict):  # Kimi K2.5's quantization stands there
        config = config | {"text_config": {name: value for name, value in of_text.items() if name not in former}}
    config = {name: value for name, value in config.items() if name not in former} | {"dtype": dtype}
    config |= {"quantization_config": OURS[quantize]} if quantize else {}
    metadata = {"format": "pt", "source": fingerprint(checkpoint)}
    written = [(*output, file) for file, shard in shards.items() for *_, outputs in shard for output in outputs]
    total, weight_map = sum(size for *_, size, _ in written), {name: file for name, *_, file in written}
    index = {"metadata": {"total_size": total, "left_out": checkpoint.left_out}, "weight_map": weight_map}
    with claimed(output, source, next(iter(shards))), progress_bar(total=total, desc="converting", unit="B") as bar:
        for file, shard in shards.items():
            write_shard(output / file, metadata, shard, checkpoint.tensors, bar)
        found = [file for pattern in COPIED for file in sorted(source.glob(pattern)) if file.is_file()]
        files = {file.relative_to(source): file.read_bytes() for file in found}
        files[INDEX] = json.dumps(index, indent=2).encode()
        files["config.json"] = json.dumps(config, indent=2).encode()  # last: without it nothing loads
        for name, content in files.items():
            with whole_file(output / name) as f:
                f.write(content)
    say_left_out(checkpoint)


def planned_shards(checkpoint: Checkpoint, dtype: str, quantize: str | None) -> dict[str, list]:
    """The files to write, by name. Each is a list with, for every tensor, its name, whether a checkpoint has it
    transposed, the function that turns some rows of it into those of its outputs, and (name, safetensors' dtype, shape,
    bytes) of each output."""
    kinds = {np.dtype(dtype): kind for kind, dtype in NUMPY.items()}
    casts = {name: lambda rows, kept=kept: [rows.astype(kept)] for name, kept in DTYPES.items()}
    weights = jax.tree.leaves(in_format(weights_of(checkpoint.config), quantize))
    declared = {name: weight for weight in weights for name in weight.tensors()}
    shards, shard_bytes = [[]], 0
    for name, tensor in checkpoint.tensors.items():
        weight = declared[name]
        if quantize and weight.is_matrix():
            if weight.format not in WRITERS:
                raise InputError(f"{checkpoint.folder}: {name:.200} is in 4 bits already, in which main.py reads it")
            endings, rounded = WRITERS[weight.format].endings, WRITERS[weight.format].rounded
        else:
            endings, rounded = [""], casts[weight.dtype or dtype]
        made = jax.eval_shape(rounded, jax.ShapeDtypeStruct(tensor.shape, tensor.dtype))
        outputs = [(name + end, kinds[x.dtype], x.shape, x.size * x.dtype.itemsize) for end, x in zip(endings, made)]
        nbytes = sum(size for *_, size in outputs)
        if shards[-1] and shard_bytes + nbytes > SHARD_BYTES:
            shards, shard_bytes = [*shards, []], 0
        shards[-1].append((name, weight.transposed, rounded, outputs))
        shard_bytes += nbytes
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}


def say_left_out(checkpoint: Checkpoint) -> None:
    """Says what is left out on purpose."""
    for reason, count in Counter(checkpoint.left_out.values()).items():
        say(f"left out {count} tensors of the checkpoint: {reason}")
    if '"input_activations": {' in json.dumps(checkpoint.raw_config):
        say("left out: rounding of activations, which stay in the dtype of the model")


@contextlib.contextmanager
def claimed(output: Path, source: Path, first: str):
    """Creates the output folder and locks it. If it is not empty, it must hold the `first` shard, whole or in part: the
    start of a conversion to go on with."""
    if os.path.realpath(output) == os.path.realpath(source):
        raise InputError(f"{output}: is the source; choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = os.open(output, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{output}: cannot be created ({error.strerror}); choose another --output") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = os.listdir(output)
        is_ours = first in names or (f"{first}.part" in names and "config.json" not in names)  # which comes last
        if names and not is_ours:
            raise InputError(f"{output}: is not empty (it has {names[0]}); choose another --output")
        yield
    except BlockingIOError as error:
        raise InputError(f"{output}: another conversion is writing here; wait for it or choose another") from error
    except OSError as error:  # if the disk is full, it names no file
        remedy = "once that is mended, this command goes on where it was"
        raise InputError(f"{error.filename or output}: {error.strerror}; {remedy}") from error
    finally:
        os.close(lock)


@contextlib.contextmanager
def whole_file(path: Path):
    """Opens a file to write. It gets its name when all of it is on disk."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(exist_ok=True)
    with open(part, "wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def write_shard(path: Path, metadata: dict[str, str], groups: list, tensors: dict[str, Stored], bar: tqdm) -> None:
    """One safetensors file, in pieces of rows: its size and header are known before its contents. If it is there
    already, its header must be this one.

    safetensors' own writer takes whole tensors in memory. As that writer does, this puts wide dtypes first, which
    aligns all of them.
    """
    header, end = {"__metadata__": metadata}, 0
    outputs = [output for *_, of_tensor in groups for output in of_tensor]
    transposed = {name for name, is_transposed, *_ in groups if is_transposed}
    for name, kind, shape, size in sorted(outputs, key=lambda output: -np.dtype(NUMPY[output[1]]).itemsize):
        shape = swapped(shape) if name in transposed else shape
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    if path.exists():
        with open(path, "rb") as f:
            if f.read(len(head)) != head:
                what = f"{path.name} is of a conversion of another checkpoint or with other options"
                raise InputError(f"{path.parent}: {what}; choose another --output")
        if path.stat().st_size == len(head) + end:
            bar.update(end)
            return
    written = {name: len(head) + header[name]["data_offsets"][0] for name in header if name != "__metadata__"}
    with whole_file(path) as f:
        f.write(head)
        for name, is_transposed, rounded, outputs in groups:
            tensor = tensors[name]
            for rows in (tensor.read(piece) for piece in pieces(tensor, is_transposed)):
                with np.errstate(over="ignore", invalid="ignore"):  # reported below
                    arrays = list(map(np.asarray, rounded(rows)))
                if not all(np.isfinite(array).all() for array in (rows, *arrays)):
                    raise InputError(f"{path}: {name} has NaN or values too large for {arrays[0].dtype}")
                for (part, *_), array in zip(outputs, arrays, strict=True):
                    f.seek(written[part])
                    f.write((array.swapaxes(-1, -2) if part in transposed else array).tobytes())
                    written[part] += array.nbytes
                    bar.update(array.nbytes)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def say(text: str) -> None:
    """A line on standard error, of process 0 alone."""
    if jax.process_index() == 0:
        tqdm.write(text, file=sys.stderr)  # above a bar that is shown


def progress_bar(*items, is_shown=True, unit_scale=True, **options) -> tqdm:
    """tqdm's bar on standard error, of process 0 alone. In a log file it is a line, every two seconds or so."""
    if not sys.stderr.isatty():
        lines = SimpleNamespace(write=lambda text: text.strip() and print(text.strip(), file=sys.stderr, flush=True))
        options = {"file": lines, "ncols": 80, "mininterval": 1.5, "miniters": 1, "delay": 1, "position": 0} | options
    return tqdm(*items, unit_scale=unit_scale, disable=not is_shown or jax.process_index() > 0, **options)


class ArgumentParser(argparse.ArgumentParser):
    """argparse, with its errors in the one form that all errors have here."""

    def error(self, message: str) -> None:
        message = re.sub(r"argument (--\w+): expected .*", r"\g<0>; one with a - first as \1=VALUE", message)
        raise InputError(re.sub("unrecognized .*: -[^-].*", r"\g<0>; one with a - first as --flag=VALUE", message))


def one_line(error: Exception) -> str:
    """The beginning of an exception's message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def users_line(error: BaseException) -> str | None:
    """The line for an error that the user can mend, None for another one."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory ({one_line(error)}); give more devices, fewer prompts or tokens, or --quantize int8"
    if isinstance(error, (InputError, OSError)):  # an OSError names the file
        return "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    return None


def check_devices() -> None:
    """Raises InputError if jax finds no devices, or if processes have different numbers of them."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        remedy = "see JAX_PLATFORMS; accelerators need a plugin of jax (pip install '.[cuda]' or '.[tpu]')"
        raise InputError(f"jax finds no devices ({one_line(error)}); {remedy}") from error
    counts = Counter(device.process_index for device in devices)
    if len({*counts.values()}) > 1:
        numbers = ", ".join(str(counts[i]) for i in sorted(counts))
        raise InputError(f"processes 0 to {len(counts) - 1} have {numbers} devices; give each as many as the others")


def run(main) -> None:
    """Calls main(). What the user can mend ends with one line on standard error and status 2, an interrupt with 130."""
    try:
        main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # Python's own exit waits for threads, and jax's for the other processes
    except Exception as error:
        line, is_joined = users_line(error), jax.distributed.is_initialized()
        if is_joined and isinstance(error, jax.errors.JaxRuntimeError):  # a collective fails if a process is gone
            line = line or one_line(error)
        if not line and not is_joined:
            raise
        print(f"error: {line}" if line else traceback.format_exc(), file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError, AssertionError):  # jax found no devices
            if is_joined and jax.process_index() == 0:
                time.sleep(2)  # as soon as process 0 is gone, jax aborts the others, who may have to say the same
        (os._exit if is_joined else sys.exit)(2 if line else 1)  # jax's own exit waits for the other processes


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True, help="a Hugging Face checkpoint folder or a hub id")
    parser.add_argument("--output", required=True, type=os.path.expanduser, help="the folder to write")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--quantize", choices=["int8", "int4"], help="matrices in int8 or in 4 bits")
    args = parser.parse_args()
    if not args.output:
        raise InputError("--output is empty")
    check_devices()
    convert(find_checkpoint(args.model_path, extra_layer=True), Path(args.output), args.dtype, args.quantize)


if __name__ == "__main__":
    run(main)
