"""Hugging Face safetensors -> the weights that model.py declares.

`load` fills the pytree of model.abstract_weights straight from a checkpoint folder: each host reads only the slices
that its own devices hold. Run as a program, this writes a checkpoint in another dtype or in int8:

    python3 convert.py --model_path HF --output DIR [--dtype bfloat16] [--quantize int8]

DIR keeps Hugging Face's names and shapes, so that it loads on any mesh. An int8 matrix `x.weight` [O, C] has its
float32 scales in `x.weight_scale` [O]; packed experts [E, input, O] have theirs in [E, O]. Tensors stream through in
pieces of PIECE_BYTES. A shard gets its final name when it is whole, and config.json, without which nothing loads, comes
last. So an interrupted conversion never loads, and the same command goes on where it stopped.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes  # numpy's bfloat16 and FP8
import model
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from model import Config, InputError, Int8, Part, Weight, abstract_weights, quantize, weights_of
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

DTYPES = {name: np.dtype(name) for name in ("bfloat16", "float32", "float16", "int8")}
STORED = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "I8": "int8"}  # safetensors' names
INT8 = {"quant_method": "int8_per_channel"}  # config.json's quantization_config
SHARD_BYTES = 4 * 2**30
PIECE_BYTES = 64 * 2**20
SMALL = 2**22  # loading checks weights with fewer numbers than this for NaN: norms, routers
READERS = 4  # threads that read; with one, copying and page faults take longer than a fast disk
COPIED = (  # by convert, and read from the hub: the tokenizer's files, and the stop tokens
    "tokenizer*", "tiktoken.model", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.jinja", "generation_config.json",
)  # fmt: skip
quantize_on_device = jax.jit(quantize)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a checkpoint folder


class Stored(NamedTuple):
    """A tensor on disk."""

    file: Path
    offset: int  # of its first byte in the file
    dtype: str  # of what read_rows returns, a key of DTYPES; any other is safetensors' name, and cannot be read
    shape: tuple[int, ...]  # with the input dimension last
    is_transposed: bool = False  # on disk, the last two dimensions are exchanged; but not in MXFP4
    scale: "Stored | None" = None  # for a matrix in FP8 (e4m3): one factor for each block of it
    block: tuple[int, int] = (1, 1)  # rows and columns of such a block
    exponents: "Stored | None" = None  # for MXFP4: one for each 32 numbers of a row


class Checkpoint(NamedTuple):
    """A checkpoint folder whose tensors are all there, in the shapes that config.json asks for."""

    folder: Path
    config: Config
    raw_config: dict  # the whole of config.json
    int8: bool  # whether convert.py wrote it in int8
    tensors: dict[str, Stored]  # those the model needs, by name
    left_out: dict[str, str]  # those it does not, with the reason


def find_checkpoint(path: str) -> Path:
    """The folder `path`, or the snapshot of the hub id `path`: downloaded, or found in the hub's cache folder."""
    folder = Path(path)
    if path and folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        raise InputError(f"{path}: no such folder; give a checkpoint folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, allow_patterns=[*COPIED, "config.json", "model*.safetensors*"]))
    except Exception as error:  # from the network, the hub or the disk
        raise InputError(f"{path}: no such folder, and the hub did not give it: {one_line(error)}") from error
    if not any(folder.glob("model*.safetensors")):
        command = f"hf download {path} --local-dir DIR && {unpickling('DIR')}"
        raise InputError(f"{path}: has no safetensors. If it has pickled weights, this makes DIR of them: {command}")
    return folder


def unpickling(folder: Path | str) -> str:
    """The command that writes the pickled weights of a folder beside them as safetensors. It needs torch."""
    program = "import sys; from transformers import AutoModelForCausalLM as Model; folder = sys.argv[1]; "
    program += "Model.from_pretrained(folder, dtype='auto').save_pretrained(folder)"
    return f'python3 -c "{program}" {shlex.quote(str(folder))}'


def read_json(path: Path) -> dict:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value


def open_checkpoint(folder: Path, extra_layer: bool = False) -> Checkpoint:
    """Reads config.json and the headers of all shards, and no tensor yet. Raises InputError for all that is wrong. A
    layer of multi-token prediction, where there is one, counts among the weights if `extra_layer` asks for it."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json: no checkpoint, or a conversion to be run again until it finishes")
    raw_config = read_json(folder / "config.json")
    quantization = raw_config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    unsupported = (
        f"{folder}: quantization {method or quantization!r:.40} is not supported; give the unquantized checkpoint"
    )
    if quantization not in (None, INT8) and method not in ("fp8", "compressed-tensors", "mxfp4"):
        raise InputError(unsupported)
    Config.from_dict(raw_config)  # reports what is wrong with config.json before what is wrong with the tensors
    found = stored_tensors(folder)
    config = Config.from_dict(raw_config, found)
    if extra_layer and getattr(config, "has_extra_layer", False):
        config = dataclasses.replace(config, uses_extra_layer=True)
    with_fp8_scales(folder, found, quantization)
    with_mxfp4_exponents(folder, found)
    int8 = quantization == INT8
    try:
        return Checkpoint(folder, config, raw_config, int8, *check_tensors(folder, found, config, int8))
    except InputError as error:
        if quantization in (None, INT8) or any(tensor.scale or tensor.exponents for tensor in found.values()):
            raise
        raise InputError(f"{unsupported} ({error})") from error  # of these methods, only FP8 and MXFP4 are read


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of all shards, by name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index}: has no weight_map from tensor to file")
    elif (folder / "model.safetensors").is_file():
        weight_map = dict.fromkeys(read_header(folder / "model.safetensors"), "model.safetensors")
    else:
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pt*")]
        remedy = f"; pickled weights are never read, {unpickling(folder)} saves them as safetensors" if pickles else ""
        raise InputError(f"{folder}: neither model.safetensors nor model.safetensors.index.json{remedy}")
    found: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise InputError(f"{index}: the shard {shard!r:.200} is not a file of this folder")
        for name, stored in read_header(folder / shard).items():
            if name in found:
                raise InputError(f"{folder}: {name:.200} is both in {found[name].file.name} and in {shard}")
            found[name] = stored
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise InputError(f"{folder}: {shard} has no tensor {name:.200}, but the index says so; download it again")
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, after safetensors itself has checked its header and size."""
    if not file.is_file():
        raise InputError(f"{file}: missing; download the checkpoint again")
    try:
        safe_open(file, framework="np")
    except SafetensorError as error:
        raise InputError(f"{file}: truncated or damaged ({one_line(error)}); download it again") from error
    with open(file, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(start - 8))
    header.pop("__metadata__", None)
    return {
        name: Stored(file, start + t["data_offsets"][0], STORED.get(t["dtype"], t["dtype"]), tuple(t["shape"]))
        for name, t in header.items()
    }


def with_fp8_scales(folder: Path, found: dict[str, Stored], quantization: object) -> None:
    """Attaches scales to each FP8 tensor `x`: `x_scale_inv` has one for each block, `x_scale` one for each row."""
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    block = [128, 128] if block is None else block
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block)):
        raise InputError(f"{folder}: weight_block_size {block!r:.40} is not two numbers, of rows and columns")
    for name in [name for name, tensor in found.items() if tensor.dtype == "F8_E4M3"]:
        tensor, ending = found[name], "_scale_inv" if f"{name}_scale_inv" in found else "_scale"
        scale = found.pop(name + ending, None)
        if scale is None or len(tensor.shape) != 2:
            raise InputError(f"{folder}: {name:.200} is in FP8 and no matrix with a weight_scale_inv or weight_scale")
        sizes = block if ending == "_scale_inv" else [1, max(tensor.shape[1], 1)]
        wanted = tuple(-(-size // n) for size, n in zip(tensor.shape, sizes, strict=True))
        if scale.shape != wanted or scale.dtype not in ("bfloat16", "float32", "float16"):
            asked = f"blocks of {block} ask" if ending == "_scale_inv" else "a scale a row asks"
            has = f"{scale.dtype:.40} {list(scale.shape)}, and {asked} for float32 {list(wanted)}"
            raise InputError(f"{folder}: {name:.200}{ending} has {has}")
        found[name] = tensor._replace(dtype="float32", scale=scale, block=tuple(sizes))


def with_mxfp4_exponents(folder: Path, found: dict[str, Stored]) -> None:
    """Puts one tensor `x` of MXFP4 [E, O, C] in the place of each `x_blocks` [E, O, C / 32, 16], two numbers a byte,
    and `x_scales` [E, O, C / 32]."""
    for name in [name.removesuffix("_blocks") for name in found if name.endswith("_blocks")]:
        blocks, exponents = found.pop(f"{name}_blocks"), found.pop(f"{name}_scales", None)
        sizes = exponents.shape if exponents and name not in found else ()
        if len(sizes) != 3 or blocks.shape != (*sizes, 16) or {blocks.dtype, exponents.dtype} != {"U8"}:
            raise InputError(f"{folder}: {name:.200}_blocks and {name:.200}_scales are no MXFP4 of 8-bit numbers")
        shape = (*sizes[:2], 32 * sizes[2])
        found[name] = blocks._replace(dtype="bfloat16", shape=shape, exponents=exponents)


def check_tensors(folder: Path, found: dict[str, Stored], config: Config, int8: bool) -> tuple[dict, dict]:
    """Of the tensors found, those that `config` needs, and those left out on purpose, with the reason.

    Raises InputError with all that is missing, of a wrong shape or dtype, or unknown.
    """
    if config.num_hidden_layers > len(found):
        raise InputError(f"{folder}: {len(found)} tensors cannot be {config.num_hidden_layers} layers, see config.json")
    expected, rounded = {}, set()
    for weight in jax.tree.leaves(weights_of(config)):
        expected |= weight.tensors()
        for name in weight.tensors() if weight.is_transposed() else ():
            if tensor := found.get(name):
                shape = tensor.shape if tensor.exponents else swapped(tensor.shape)
                found[name] = tensor._replace(shape=shape, is_transposed=True)
        if int8 and weight.is_matrix():
            rounded |= weight.tensors().keys()
    expected |= {f"{name}_scale": expected[name][:-1] for name in expected if name in rounded}
    problems = [f"{name} is missing" for name in expected if name not in found]
    skipped = {}
    for name, stored in found.items():
        if reason := model.left_out(name, config):
            skipped[name] = reason
        elif name not in expected:
            problems.append(f"{name:.200} is not a tensor of this model")
        elif stored.shape != expected[name]:
            problems.append(f"{name} has shape {list(stored.shape)}, and config.json asks for {list(expected[name])}")
        elif (stored.dtype == "int8") != (name in rounded) or stored.dtype not in DTYPES:
            problems.append(f"{name} has dtype {stored.dtype:.40}, which is not supported here")
    if problems:
        more = f", and {len(problems) - 3} more such" if len(problems) > 3 else ""
        raise InputError(f"{folder}: {'; '.join(problems[:3])}{more}")
    (embedding,) = weights_of(config)["embedding"].tensors()
    for name in filter(lambda name: config.tie_word_embeddings and name.endswith("lm_head.weight"), skipped):
        head, tied = found[name], found[embedding]
        compared = (np.array_equal(read_rows(head, rows), read_rows(tied, rows)) for rows in pieces(tied))
        if head.shape != tied.shape or head.dtype not in DTYPES or not all(compared):
            differs = f"{name} differs from {embedding}, to which config.json ties it"
            raise InputError(f"{folder}: {differs}; set tie_word_embeddings to false")
    return {name: found[name] for name in expected}, skipped


def pieces(tensor: Stored) -> Iterator[slice]:
    """The rows of a tensor in slices of some PIECE_BYTES, at least a row each. All rows of a transposed matrix are one
    slice: on disk they do not stand one behind the other."""
    row_bytes = max(1, math.prod(tensor.shape[1:])) * DTYPES[tensor.dtype].itemsize
    is_whole = tensor.is_transposed and len(tensor.shape) == 2
    step = max(1, tensor.shape[0] if is_whole else PIECE_BYTES // row_bytes)
    return (slice(first, first + step) for first in range(0, tensor.shape[0], step))


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two dimensions exchanged."""
    return (*shape[:-2], *shape[:-3:-1])


def read_rows(tensor: Stored, *index: slice | int) -> np.ndarray:
    """A part of a tensor, memory-mapped: it is read from disk when used, and leaves memory when dropped. FP8 becomes
    float32, MXFP4 bfloat16."""
    if tensor.exponents:
        return read_mxfp4(tensor, *index)
    on_disk = swapped(tensor.shape) if tensor.is_transposed else tensor.shape
    dtype = ml_dtypes.float8_e4m3fn if tensor.scale else DTYPES.get(tensor.dtype, np.uint8)
    array = np.memmap(tensor.file, dtype, "r", tensor.offset, on_disk)
    array = (array.swapaxes(-1, -2) if tensor.is_transposed else array)[index]
    if tensor.scale is None:
        return array
    index = (*index, slice(None), slice(None))
    blocks = [np.arange(tensor.shape[i])[index[i]] // tensor.block[i] for i in range(2)]
    with np.errstate(over="ignore", invalid="ignore"):  # damaged scales overflow; that is caught later
        return array.astype(np.float32) * read_rows(tensor.scale)[np.ix_(*blocks)].astype(np.float32)


def read_mxfp4(tensor: Stored, *index: slice | int) -> np.ndarray:
    """read_rows for MXFP4 (Rouhani et al. 2023, "Microscaling Data Formats"): numbers of 4 bits, 1 of them the sign, 2
    the exponent and 1 the mantissa, times a power of two for each 32 of a row."""
    numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    both = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=-1)  # of each byte, the lower half first
    shape = (*tensor.shape[:-1], tensor.shape[-1] // 32)
    *rows, columns = (*index, *[slice(None)] * (3 - len(index)))
    start, stop, _ = columns.indices(tensor.shape[-1])
    first = start // 32
    part = (*rows, slice(first, -(-stop // 32)))
    powers = np.memmap(tensor.exponents.file, ml_dtypes.float8_e8m0fnu, "r", tensor.exponents.offset, shape)[part]
    values = both[np.memmap(tensor.file, np.uint8, "r", tensor.offset, (*shape, 16))[part]]
    values *= powers.astype(np.float32)[..., None, None]
    values = values.reshape(*powers.shape[:-1], -1).astype(ml_dtypes.bfloat16)
    return values[..., start - 32 * first : stop - 32 * first]


def fingerprint(checkpoint: Checkpoint) -> str:
    """Tells checkpoints apart without reading them whole: by config.json, every tensor's place, dtype and shape, and
    the first and last row of up to a thousand tensors."""
    digest = hashlib.sha256(json.dumps(checkpoint.raw_config, sort_keys=True).encode())
    names = sorted(checkpoint.tensors)
    for name in names:
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.file.name} {tensor.dtype} {tensor.shape} ".encode())
    for name in names[:: len(names) // 1000 + 1]:
        for end in (slice(0, 1), slice(-1, None)):
            rows = [end] * max(1, len(checkpoint.tensors[name].shape) - 1)
            digest.update(read_rows(checkpoint.tensors[name], *rows).tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def memory_of(mesh: Mesh) -> float:
    """Bytes of memory of a mesh's devices, infinite if they do not tell. CPUs share the machine's.

    All processes must call it. All get the same result, from the process with the least.
    """
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        local = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        local = sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in devices)
    least = float(np.min(multihost_utils.process_allgather(np.float32(local))))
    return least * mesh.size / len(devices)


def load(checkpoint: Checkpoint, mesh: Mesh, dtype: str = "bfloat16", int8: bool = False) -> dict:
    """The weights of a checkpoint on the devices of `mesh`, as model.abstract_weights declares them.

    Threads read some weights ahead. Weights reach the devices in the dtype that read_rows returns. There they are cast
    or, with `int8`, rounded (an int8 checkpoint stays as it is). A scale depends on a whole row, which several devices
    may share: a reduction over them makes it the same on every mesh.
    """
    target = abstract_weights(checkpoint.config, mesh, DTYPES[dtype], int8 or checkpoint.int8)
    needed, there = model.stored_bytes(target) / 1e9, memory_of(mesh) / 1e9
    if needed > there:
        sizes = f"the weights take {needed:.1f} GB and the devices have {there:.1f}"
        raise InputError(f"{checkpoint.folder}: {sizes}; give more devices, --dtype bfloat16 or --quantize int8")
    print_left_out(checkpoint)

    def read(abstract, weight):
        """A weight as it is on disk, each device's part of it."""
        if checkpoint.int8 and isinstance(abstract, Int8):
            return Int8(read(abstract.values, weight), read(abstract.scale, scales_of(weight)))
        if isinstance(abstract, tuple) and not isinstance(abstract, Int8):
            return type(abstract)(*read_4_bits(checkpoint.tensors, weight, *abstract))
        values = abstract.values if isinstance(abstract, Int8) else abstract
        names = weight.tensors()
        dtypes = {checkpoint.tensors[name].dtype for name in names}
        on_disk = DTYPES[dtypes.pop() if len(dtypes) == 1 else "float32"]

        def block(index):
            numbers = block_of(checkpoint.tensors, weight, index, values.shape, on_disk)
            # A router with NaN would choose experts as if nothing were wrong. In larger weights, logits show a NaN.
            if numbers.size < SMALL and not np.isfinite(numbers).all():
                bad = [name for name in names if not np.isfinite(read_rows(checkpoint.tensors[name])).all()]
                raise InputError(f"{', '.join(bad[:3])} has numbers that are not finite: damaged weights")
            return numbers

        return jax.block_until_ready(jax.make_array_from_callback(values.shape, values.sharding, block, dtype=on_disk))

    def cast_or_rounded(abstract, array):
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        if isinstance(abstract, Int8) and not checkpoint.int8:
            return jax.block_until_ready(jax.jit(quantize, out_shardings=shardings)(array))
        return jax.tree.map(lambda x, a: a if a.dtype == x.dtype else a.astype(x.dtype), abstract, array)

    abstract, tree = jax.tree.flatten(target, is_leaf=lambda x: isinstance(x, tuple))
    arrays = read_ahead(read, abstract, jax.tree.leaves(weights_of(checkpoint.config)))
    pairs, delay = zip(abstract, arrays, strict=True), 1 if needed < 0.1 else 0  # seconds before the bar appears
    with progress_bar(pairs, total=len(abstract), desc="loading", unit=" weights", delay=delay) as bar:
        return tree.unflatten([cast_or_rounded(*pair) for pair in bar])


def read_4_bits(tensors: dict, weight: Weight, values, exponents) -> Iterator[jax.Array]:
    """The bytes of an MXFP4 weight, each device's part: pairs of numbers, in the order of Mxfp4 in model.py, and
    exponents. `values` and `exponents` are their ShapeDtypeStructs."""
    if plain := [name for name in weight.tensors() if not tensors[name].exponents]:
        raise InputError(f"{plain[0]} is not in MXFP4, as other experts of the checkpoint are")

    def with_columns(n):  # the weight, for n numbers to a byte
        if weight.split == 0:
            return dataclasses.replace(weight, other_dim=weight.other_dim // n)
        rows = {name: size // n for name, size in weight.parts[0].tensors.items()}
        part = dataclasses.replace(weight.parts[0], tensors=rows, multiple=weight.parts[0].multiple // n)
        return dataclasses.replace(weight, parts=(part,))

    def pairs(index):
        plain = {"dtype": "U8", "exponents": None, "is_transposed": False}
        shapes = {name: (*tensors[name].shape[:-1], tensors[name].shape[-1] // 2) for name in weight.tensors()}
        stored = {name: tensors[name]._replace(shape=shape, **plain) for name, shape in shapes.items()}
        found = block_of(stored, with_columns(2), index, values.shape, values.dtype)
        groups = found.reshape(*found.shape[:-1], -1, 16)
        numbers = np.stack([groups & 15, groups >> 4], axis=-1).reshape(*groups.shape[:-1], 2, 16)
        return (numbers[..., 0, :] | numbers[..., 1, :] << 4).reshape(found.shape)

    def powers(index):
        stored = {name: tensors[name].exponents for name in weight.tensors()}
        return block_of(stored, with_columns(32), index, exponents.shape, exponents.dtype)

    for array, block in ((values, pairs), (exponents, powers)):
        yield jax.make_array_from_callback(array.shape, array.sharding, block, dtype=array.dtype)


def read_ahead(read, *arguments: list) -> Iterator:
    """Yields `read` of each set of arguments, in order. At most READERS calls run ahead, which bounds the memory."""
    pending = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for each in zip(*arguments, strict=True):
            if len(pending) == READERS:
                yield pending.popleft().result()
            pending.append(pool.submit(read, *each))
        while pending:
            yield pending.popleft().result()


def scales_of(weight: Weight) -> Weight:
    """The scales of an int8 weight, one for each row of its tensors."""
    suffix = f"{weight.suffix}_scale"
    if weight.split == 0:
        return dataclasses.replace(weight, other_dim=None, suffix=suffix)
    part = Part(dict.fromkeys(weight.parts[0].tensors, weight.other_dim))  # each device has some columns of all rows
    return dataclasses.replace(weight, parts=(part,), split=None, other_dim=None, suffix=suffix)


def block_of(tensors: dict, weight: Weight, index: tuple, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One device's block `index` of a weight of global `shape`, with zeros for what no tensor has."""
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
            for name, rows in part.row_slices(shard, shards):
                where = (*[e] * weight.is_packed(), *[slice(None)] * axis, rows)
                values = np.moveaxis(read_rows(tensors[weight.full_name(name, e)], *where), axis, 0)
                along[place : place + len(values)][tuple(map(slice, values.shape))] = values
                place += len(values)
            filled += part.rows_per_device(shards)
    return block


# ---------------------------------------------------------------------------------------------------------------------
# Converting


def convert(source: Path, output: Path, dtype: str, int8: bool) -> None:
    """Writes the checkpoint `source` to `output`, matrices in int8 if `int8`, and all else in `dtype`."""
    checkpoint = open_checkpoint(source, extra_layer=True)
    if checkpoint.int8:
        raise InputError(f"{source}: is in int8 already; convert the original checkpoint")
    shards = planned_shards(checkpoint, dtype, int8)
    config = checkpoint.raw_config | {"dtype": dtype, "quantization_config": INT8}
    for name in ["torch_dtype"] if int8 else ["torch_dtype", "quantization_config"]:
        config.pop(name, None)
    metadata = {"format": "pt", "source": fingerprint(checkpoint)}
    total = sum(size for shard in shards.values() for group in shard for *_, size in group)
    weight_map = {name: file for file, shard in shards.items() for group in shard for name, *_ in group}
    index = {"metadata": {"total_size": total, "left_out": checkpoint.left_out}, "weight_map": weight_map}
    with claimed(output, source, next(iter(shards))), progress_bar(total=total, desc="converting", unit="B") as bar:
        for file, shard in shards.items():
            write_shard(output / file, metadata, shard, checkpoint.tensors, bar)
        found = [file for pattern in COPIED for file in sorted(source.glob(pattern)) if file.is_file()]
        files = {file.name: file.read_bytes() for file in found}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
        files["config.json"] = json.dumps(config, indent=2).encode()  # last: without it nothing loads
        for name, content in files.items():
            with whole_file(output / name) as f:
                f.write(content)
    print_left_out(checkpoint)


def planned_shards(checkpoint: Checkpoint, dtype: str, int8: bool) -> dict[str, list]:
    """The files to write, by name. Each is a list of groups: one tensor, or an int8 matrix and its scales. A tensor is
    its (name, dtype, shape, bytes)."""
    declared = {name: weight for weight in jax.tree.leaves(weights_of(checkpoint.config)) for name in weight.tensors()}
    shards, shard_bytes = [[]], 0
    for name, tensor in checkpoint.tensors.items():
        group = [(name, declared[name].dtype or dtype, tensor.shape)]
        if int8 and declared[name].is_matrix():
            group = [(name, "int8", tensor.shape), (f"{name}_scale", "float32", tensor.shape[:-1])]
        group = [(*output, math.prod(output[2]) * DTYPES[output[1]].itemsize) for output in group]
        group_bytes = sum(size for *_, size in group)
        if shards[-1] and shard_bytes + group_bytes > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(group)
        shard_bytes += group_bytes
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}


def print_left_out(checkpoint: Checkpoint) -> None:
    """Says what is left out on purpose, on standard error, from process 0 alone."""
    if jax.process_index() == 0:
        for reason, count in Counter(checkpoint.left_out.values()).items():
            print(f"left out {count} tensors of the checkpoint: {reason}", file=sys.stderr)


@contextlib.contextmanager
def claimed(output: Path, source: Path, first: str):
    """Creates the output folder and locks it. If it is not empty, it must hold the `first` shard, whole or in part: the
    start of a conversion to go on with."""
    if os.path.realpath(output) == os.path.realpath(source):
        raise InputError(f"{output}: is the source; choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    lock = os.open(output, os.O_RDONLY)
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
    stored = {dtype: short for short, dtype in STORED.items()}
    header, end = {"__metadata__": metadata}, 0
    outputs = [output for group in groups for output in group]
    for name, dtype, shape, size in sorted(outputs, key=lambda output: -DTYPES[output[1]].itemsize):
        shape = swapped(shape) if name in tensors and tensors[name].is_transposed else shape
        header[name] = {"dtype": stored[dtype], "shape": shape, "data_offsets": [end, end + size]}
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
        for group in groups:
            (name, dtype, *_), tensor = group[0], tensors[group[0][0]]
            for rows in (read_rows(tensor, piece) for piece in pieces(tensor)):
                with np.errstate(over="ignore", invalid="ignore"):  # reported below
                    arrays = quantize_on_device(rows) if dtype == "int8" else [rows.astype(DTYPES[dtype])]
                if not all(np.isfinite(array).all() for array in (rows, *arrays)):
                    raise InputError(f"{tensor.file}: {name} has NaN or values too large for {dtype}")
                for (part, *_), array in zip(group, map(np.asarray, arrays), strict=True):
                    f.seek(written[part])
                    f.write((array.swapaxes(-1, -2) if tensor.is_transposed and part == name else array).tobytes())
                    written[part] += array.nbytes
                    bar.update(array.nbytes)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class LogLines:
    """Where a progress bar writes if standard error is not a terminal: each state of the bar becomes a line."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)


def progress_bar(*items, **options) -> tqdm:
    """tqdm's bar on standard error, of process 0 alone. In a log file it is a line, every two seconds or so."""
    if not sys.stderr.isatty():
        options = {"file": LogLines(), "ncols": 80, "mininterval": 1.5, "miniters": 1, "delay": 1} | options
    return tqdm(*items, unit_scale=True, disable=jax.process_index() > 0, **options)


class ArgumentParser(argparse.ArgumentParser):
    """argparse, with its errors in the one form that all errors have here."""

    def error(self, message: str) -> None:
        raise InputError(message)


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


def find_devices() -> list[jax.Device]:
    """jax.devices(), or InputError if it has none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"jax finds no devices ({one_line(error)}); see JAX_PLATFORMS") from error


def run(main) -> None:
    """Calls main(). What the user can mend ends with one line on standard error and status 2, an interrupt with 130."""
    try:
        main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        line, is_joined = users_line(error), jax.distributed.is_initialized()
        if is_joined and isinstance(error, jax.errors.JaxRuntimeError):  # a collective fails if a process is gone
            line = line or one_line(error)
        if not line and not is_joined:
            raise
        print(f"error: {line}" if line else traceback.format_exc(), file=sys.stderr, flush=True)
        (os._exit if is_joined else sys.exit)(2 if line else 1)  # jax's own exit waits for the other processes


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True, help="a Hugging Face checkpoint folder or a hub id")
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--dtype", choices=[d for d in DTYPES if d != "int8"], default="bfloat16")
    parser.add_argument("--quantize", choices=["int8"], help="matrices in int8, one scale for each output channel")
    args = parser.parse_args()
    if not args.output:
        raise InputError("--output is empty")
    find_devices()
    convert(find_checkpoint(args.model_path), Path(args.output), args.dtype, args.quantize == "int8")


if __name__ == "__main__":
    run(main)
