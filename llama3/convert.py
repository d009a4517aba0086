"""Hugging Face safetensors -> the weights of model.py.

`load` fills the pytree that model.abstract_weights declares, straight from a checkpoint folder: each host reads only
the slices that its own devices hold. Run as a program, this writes a checkpoint in another dtype or in int8:

    python3 convert.py --model_path HF --output DIR [--dtype bfloat16] [--quantize int8]

DIR keeps Hugging Face's names and shapes, so that it loads on any mesh; an int8 matrix `x.weight` [O, C] has its
float32 scales in `x.weight_scale` [O]. Tensors stream through in pieces of PIECE_BYTES. Shards appear under their final
name when they are whole, and config.json, without which nothing loads, comes last: an interrupted conversion is never
taken for a complete one, and the same command goes on where it stopped.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shlex
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes  # numpy's bfloat16
import numpy as np
from jax.sharding import Mesh
from model import Config, InputError, Int8, abstract_weights, make_mesh, memory_of, quantize, stored_bytes
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}
STORED = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "I8": "int8"}  # safetensors' names
INPUT_FIRST = ()  # how the names of tensors end that lie [.., input, output] in the checkpoint: none here
FLOAT32 = ()  # tensors that conversion never rounds
INT8 = {"quant_method": "int8_per_channel"}  # config.json's quantization_config
SHARD_BYTES = 4 * 2**30
PIECE_BYTES = 64 * 2**20
SMALL = 2**22  # numbers of a weight that loading looks at: norms, routers
READERS = 4  # threads that read; with one, copying and page faults take longer than a fast disk
TOKENIZER_FILES = (
    "tokenizer*", "tiktoken.model", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.jinja",
)  # fmt: skip
HUB_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "tiktoken.model", "model*.safetensors")


# ---------------------------------------------------------------------------------------------------------------------
# Which tensor of the checkpoint goes where


class Part(NamedTuple):
    """A tensor, or the `piece`-th of `pieces` equal parts of it along `axis`, that the devices share by whole units.

    A unit is a head, or a single row or column. Where there are more devices than units, neighbours take the same one,
    but where `groups` is given: then they deal out the units of a group, see model.local_heads.
    """

    name: str
    units: int
    axis: int = 0
    groups: int | None = None
    piece: int = 0
    pieces: int = 1
    within: tuple[int, int] | None = None  # of each unit only these rows, from and to; None: all


class Joined(NamedTuple):
    """Tensors one after the other along their first dimension, as if they were one."""

    names: list[str]


class Stack(NamedTuple):
    """The sources of matrices, such as experts, that are stacked along the weight's first dimension."""

    members: list


Source = str | Joined | list[Part] | Stack  # of a weight: one tensor, several as one, shares of several, a Stack


def sources(config: Config) -> dict:
    """abstract_weights' tree, with its Source in the checkpoint in the place of each weight."""
    heads, kv_heads, columns = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size

    def layer(i):
        def qkv(kind):
            return [
                Part(f"model.layers.{i}.self_attn.q_proj.{kind}", heads, groups=kv_heads),
                Part(f"model.layers.{i}.self_attn.k_proj.{kind}", kv_heads),
                Part(f"model.layers.{i}.self_attn.v_proj.{kind}", kv_heads),
            ]

        def gate_up(kind):
            return [Part(f"model.layers.{i}.mlp.{name}.{kind}", columns) for name in ("gate_proj", "up_proj")]

        tensors = {
            "attention_norm": f"model.layers.{i}.input_layernorm.weight",
            "qkv": qkv("weight"),
            "o": [Part(f"model.layers.{i}.self_attn.o_proj.weight", heads, axis=1, groups=kv_heads)],
            "mlp_norm": f"model.layers.{i}.post_attention_layernorm.weight",
            "gate_up": gate_up("weight"),
            "down": [Part(f"model.layers.{i}.mlp.down_proj.weight", columns, axis=1)],
        }
        if config.attention_bias:
            tensors |= {"qkv_bias": qkv("bias"), "o_bias": f"model.layers.{i}.self_attn.o_proj.bias"}
        if config.mlp_bias:
            tensors |= {"gate_up_bias": gate_up("bias"), "down_bias": f"model.layers.{i}.mlp.down_proj.bias"}
        return tensors

    tensors = {
        "embedding": "model.embed_tokens.weight",
        "layers": [layer(i) for i in range(config.num_hidden_layers)],
        "norm": "model.norm.weight",
    }
    if not config.tie_word_embeddings:
        tensors["head"] = "lm_head.weight"
    return tensors


def names_of(source: Source) -> list[str]:
    """The tensors of a source."""
    if isinstance(source, str):
        return [source]
    if isinstance(source, Joined):
        return source.names
    if isinstance(source, Stack):
        return [name for member in source.members for name in names_of(member)]
    return [part.name for part in source]


def with_sources(abstract: dict, config: Config) -> list[tuple]:
    """The weights of a tree as abstract_weights makes it, in its order, each with its Source."""

    def is_source(x):
        return isinstance(x, (str, Joined, Stack)) or (isinstance(x, list) and isinstance(x[0], Part))

    weights = jax.tree.leaves(abstract, is_leaf=lambda x: isinstance(x, Int8))
    return list(zip(weights, jax.tree.leaves(sources(config), is_leaf=is_source), strict=True))


def matrices(config: Config) -> list[str]:
    """The tensors of the weights that can be int8."""
    abstract = abstract_weights(config, make_mesh(devices=jax.devices()[:1]), np.float32, int8=True)
    weights = with_sources(abstract, config)
    return [name for weight, source in weights if isinstance(weight, Int8) for name in names_of(source)]


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the checkpoint must have, by name, its input dimension last."""
    D, H, F, V = config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size
    outputs = {"q_proj": config.num_attention_heads * H, "gate_proj": F, "up_proj": F, "embed_tokens": V, "lm_head": V}
    outputs |= dict.fromkeys(("k_proj", "v_proj"), config.num_key_value_heads * H)
    inputs = {"o_proj": config.num_attention_heads * H, "down_proj": F}
    shapes = {}
    for source in jax.tree.leaves(sources(config), is_leaf=lambda x: isinstance(x, Part)):
        name = source.name if isinstance(source, Part) else source
        module, kind = name.split(".")[-2:]
        is_vector = kind == "bias" or "norm" in module
        shapes[name] = (outputs.get(module, D),) if is_vector else (outputs.get(module, D), inputs.get(module, D))
    return shapes


def left_out(name: str, config: Config) -> str | None:
    """Why a tensor of the checkpoint is not used, where that is on purpose."""
    if name.endswith("rotary_emb.inv_freq"):
        return "computed from config.json"
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return "tied to model.embed_tokens.weight"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Reading a checkpoint folder


class Stored(NamedTuple):
    """A tensor on disk."""

    file: Path
    offset: int  # of its first byte in the file
    dtype: str  # a key of DTYPES, or safetensors' name of another
    shape: tuple[int, ...]  # with the input dimension last
    is_input_first: bool  # whether on disk the last two dimensions are exchanged


class Checkpoint(NamedTuple):
    """A checkpoint folder whose tensors are all there, in the shapes that config.json asks for."""

    folder: Path
    config: Config
    raw_config: dict  # the whole of config.json
    int8: bool  # whether convert.py wrote it in int8
    tensors: dict[str, Stored]  # those the model needs, by name
    left_out: dict[str, str]  # those it does not, with the reason


def find_checkpoint(path: str, local_files_only: bool = False) -> Path:
    """The folder `path`, or the snapshot of the hub id `path`: downloaded, or found in the hub's cache folder."""
    folder = Path(path)
    if path and folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        raise InputError(f"{path}: no such folder; give a checkpoint folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, allow_patterns=list(HUB_FILES), local_files_only=local_files_only))
    except Exception as error:  # whatever the network, the hub or the disk had to say
        raise InputError(f"{path}: no such folder, and the hub did not give it: {one_line(error)}") from error
    if not any(folder.glob("model*.safetensors")):
        command = f"hf download {path} --local-dir DIR && {unpickling('DIR')}"
        raise InputError(f"{path}: has no safetensors. Where it has pickled weights, this makes DIR of them: {command}")
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


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads config.json and the headers of all shards, and no tensor yet. Raises InputError for all that is wrong."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json: no checkpoint, or a conversion to be run again until it finishes")
    raw_config = read_json(folder / "config.json")
    quantization = raw_config.get("quantization_config")
    if quantization not in (None, INT8):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise InputError(f"{folder}: quantization {method!r:.40} is not supported; give the unquantized checkpoint")
    config, int8 = Config.from_dict(raw_config), quantization == INT8
    return Checkpoint(folder, config, raw_config, int8, *check_tensors(folder, stored_tensors(folder), config, int8))


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
            raise InputError(f"{folder}: {shard} has no tensor {name:.200}, where the index puts it; download it again")
    return found


def check_tensors(
    folder: Path, found: dict[str, Stored], config: Config, int8: bool
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Of the tensors found, those that `config` needs, and those left out on purpose, with the reason.

    Raises InputError with all that is missing, of a wrong shape or dtype, or unknown.
    """
    if config.num_hidden_layers > len(found):
        raise InputError(f"{folder}: {len(found)} tensors cannot be {config.num_hidden_layers} layers, see config.json")
    expected = expected_shapes(config)
    rounded = matrices(config) if int8 else []
    expected |= {f"{name}_scale": expected[name][:-1] for name in rounded}
    problems = [f"{name} is missing" for name in expected if name not in found]
    skipped = {}
    for name, stored in found.items():
        reason = left_out(name, config)
        if reason:
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
    if config.tie_word_embeddings:
        embedding = sources(config)["embedding"]
        for name in filter(lambda name: name.endswith("lm_head.weight"), skipped):
            if not is_same(found[name], found[embedding]):
                raise InputError(
                    f"{folder}: {name} differs from {embedding}, to which config.json ties it; "
                    "set tie_word_embeddings to false"
                )
    return {name: found[name] for name in expected}, skipped


def is_same(tensor: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same numbers."""
    if tensor.shape != other.shape:
        return False
    return all(np.array_equal(read_rows(tensor, rows), read_rows(other, rows)) for rows in pieces(tensor))


def pieces(tensor: Stored) -> Iterator[slice]:
    """The rows of a tensor in slices of some PIECE_BYTES, at least a row each."""
    row_bytes = max(1, math.prod(tensor.shape[1:])) * DTYPES[tensor.dtype].itemsize
    step = max(1, PIECE_BYTES // row_bytes)
    return (slice(first, first + step) for first in range(0, tensor.shape[0], step))


def read_header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds, once safetensors has found its header and its size to be right."""
    if not file.is_file():
        raise InputError(f"{file}: missing; download the checkpoint again")
    try:
        with safe_open(file, framework="np"):
            pass
    except SafetensorError as error:
        raise InputError(f"{file}: truncated or damaged ({one_line(error)}); download it again") from error
    with open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        dtype, shape = STORED.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])
        is_input_first = name.endswith(INPUT_FIRST) and len(shape) > 1
        shape = swapped(shape) if is_input_first else shape
        found[name] = Stored(file, 8 + size + entry["data_offsets"][0], dtype, shape, is_input_first)
    return found


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two dimensions exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def read_rows(tensor: Stored, *index: slice) -> np.ndarray:
    """A part of a tensor, mapped: it is read when it is used, and leaves memory when it is dropped."""
    on_disk = swapped(tensor.shape) if tensor.is_input_first else tensor.shape
    array = np.memmap(tensor.file, DTYPES[tensor.dtype], "r", tensor.offset, on_disk)
    return (array.swapaxes(-1, -2) if tensor.is_input_first else array)[index]


def one_line(error: Exception) -> str:
    """The beginning of an exception's message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load(checkpoint: Checkpoint, mesh: Mesh, dtype: str = "bfloat16", int8: bool = False) -> dict:
    """The weights of a checkpoint on the devices of `mesh`, as model.abstract_weights declares them.

    Some weights are read ahead, in threads. They reach the devices in the dtype that read_rows gives, and are cast
    there or, with `int8`, rounded (a checkpoint in int8 stays as it is). A scale needs the whole row, which may lie on
    several devices: the reduction over them makes it the same on every mesh.
    """
    target = abstract_weights(checkpoint.config, mesh, DTYPES[dtype], int8 or checkpoint.int8)
    needed, there = stored_bytes(target) / 1e9, memory_of(mesh) / 1e9
    if needed > there:
        raise InputError(
            f"{checkpoint.folder}: the weights take {needed:.1f} GB and the devices have {there:.1f}; "
            "give more devices, --dtype bfloat16 or --quantize int8"
        )
    print_left_out(checkpoint)

    def read(weight):
        """A weight as it is on disk, each device's part of it."""
        abstract, source = weight
        if checkpoint.int8 and isinstance(abstract, Int8):
            scale = scales(source, len(abstract.shape))
            return Int8(read((abstract.values, source)), read((abstract.scale, scale)))
        values = abstract.values if isinstance(abstract, Int8) else abstract
        dtypes = {checkpoint.tensors[name].dtype for name in names_of(source)}
        on_disk = DTYPES[dtypes.pop() if len(dtypes) == 1 else "float32"]

        def block(index):
            numbers = assemble(checkpoint.tensors, source, index, values.shape, on_disk)
            # A router with NaN would choose some experts all the same. What is larger shows in the first logits.
            if numbers.size < SMALL and not np.isfinite(numbers).all():
                names = names_of(source)  # of several, those that are to blame
                bad = [name for name in names if not np.isfinite(read_rows(checkpoint.tensors[name])).all()]
                raise InputError(f"{', '.join((bad or names)[:3])} has numbers that are not finite: damaged weights")
            return numbers

        return jax.block_until_ready(jax.make_array_from_callback(values.shape, values.sharding, block, dtype=on_disk))

    def cast_or_rounded(abstract, array):
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        if isinstance(abstract, Int8) and not checkpoint.int8:
            return jax.block_until_ready(jax.jit(quantize, out_shardings=shardings)(array))
        return jax.tree.map(lambda x, a: a if a.dtype == x.dtype else a.astype(x.dtype), abstract, array)

    weights = with_sources(target, checkpoint.config)
    arrays = read_ahead(read, weights)
    bar = tqdm(zip(weights, arrays, strict=True), total=len(weights), desc="loading", unit="weights", disable=None)
    loaded = [cast_or_rounded(weight, array) for (weight, _), array in bar]
    return jax.tree.unflatten(jax.tree.structure(target, is_leaf=lambda x: isinstance(x, Int8)), loaded)


def read_ahead(read, weights: list) -> Iterator:
    """`read` of each weight, in order, with READERS of them under way: no more, which bounds the memory."""
    pool, pending = ThreadPoolExecutor(READERS), deque()
    try:
        for weight in weights:
            if len(pending) == READERS:
                yield pending.popleft().result()
            pending.append(pool.submit(read, weight))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def scales(source: Source, dims: int) -> Source:
    """The source of the scales, one for each row, of an int8 weight that has so many dimensions."""
    if isinstance(source, str):
        return f"{source}_scale"
    if isinstance(source, Joined):
        return Joined([f"{name}_scale" for name in source.names])
    if isinstance(source, Stack):
        return Stack([scales(member, dims - 1) for member in source.members])
    if source[0].axis == dims - 1:  # each device has some columns of all rows
        return f"{source[0].name}_scale"
    return [part._replace(name=f"{part.name}_scale") for part in source]


def assemble(
    tensors: dict[str, Stored],
    source: Source,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """One device's block `index` of a weight of global `shape`.

    Of one tensor these are the same rows and columns, of Parts this device's share of each, in order. What lies
    past the end of a tensor or a share is zeros (see model.abstract_weights and model.stored_width).
    """
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    block = aligned([stop - start for start, stop in bounds], dtype)
    if isinstance(source, Stack):
        for matrix, member in zip(block, source.members[slice(*bounds[0])], strict=True):
            matrix[:] = assemble(tensors, member, index[1:], shape[1:], dtype)
        return block
    if isinstance(source, (str, Joined)):
        axis, (first, last), ranges = 0, bounds[0], []
        for name in names_of(source):
            rows = tensors[name].shape[0]
            start, stop = (min(max(row, 0), rows) for row in (first, last))
            ranges.append((name, start, stop, stop - start, slice(None)))
            first, last = first - rows, last - rows
    else:
        axis = source[0].axis
        first, last = bounds[axis]
        shard, shards = first // (last - first), shape[axis] // (last - first)
        ranges = [(part.name, *share(part, tensors[part.name].shape[axis], shard, shards)) for part in source]
    along = np.moveaxis(block, axis, 0)
    filled = 0
    for name, start, stop, room, picked in ranges:
        part = [slice(*b) for b in bounds]
        part[axis] = slice(start, stop)
        read = np.moveaxis(read_rows(tensors[name], *part), axis, 0)[picked]
        region = along[filled : filled + room]
        if read.shape != region.shape:
            region[...] = 0
        region[tuple(map(slice, read.shape))] = read
        filled += room
    along[filled:] = 0
    return block


def share(part: Part, size: int, shard: int, shards: int) -> tuple[int, int, int, slice | np.ndarray]:
    """Where the share of device `shard` of `shards` begins and ends in a tensor that has `size` rows, or columns, how
    many there is room for (what is missing is zeros), and which between begin and end are picked."""
    size //= part.pieces
    unit, begin = size // part.units, part.piece * size
    if part.groups is None or shards <= part.groups:
        room = max(part.units // shards, 1)
        first = shard * part.units // shards
        last = first + room
    else:
        neighbours, units = shards // part.groups, part.units // part.groups
        group, rank = divmod(shard, neighbours)
        room = -(-units // neighbours)
        first, last = (group * units + min(units, room * n) for n in (rank, rank + 1))
    start, stop = begin + unit * first, begin + unit * last
    if part.within is None:
        return start, stop, unit * room, slice(None)
    rows = np.arange(*part.within)
    return start, stop, len(rows) * room, np.add.outer(np.arange(0, stop - start, unit), rows).ravel()


def aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An empty array on a boundary of 64 bytes: on CPUs jax then takes it as it is, and copies nothing."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    first = -buffer.ctypes.data % 64
    return buffer[first : first + size].view(dtype).reshape(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Converting


class Output(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPES[self.dtype].itemsize


def convert(source: Path, output: Path, dtype: str, int8: bool) -> None:
    """Writes the checkpoint `source` to `output`, matrices in int8 where `int8` and all else in `dtype`."""
    checkpoint = open_checkpoint(source)
    if checkpoint.int8:
        raise InputError(f"{source}: is in int8 already; convert the original checkpoint")
    # A shard is a list of groups: a tensor, or an int8 matrix and its scales.
    shards: list[list[list[Output]]] = [[]]
    shard_bytes = 0
    rounded = set(matrices(checkpoint.config)) if int8 else set()
    for name, tensor in checkpoint.tensors.items():
        group = [Output(name, "float32" if name.endswith(FLOAT32) else dtype, tensor.shape)]
        if name in rounded:
            group = [Output(name, "int8", tensor.shape), Output(f"{name}_scale", "float32", tensor.shape[:-1])]
        group_bytes = sum(o.nbytes for o in group)
        if shards[-1] and shard_bytes + group_bytes > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(group)
        shard_bytes += group_bytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]

    provenance = {
        "source": fingerprint(checkpoint),
        "dtype": dtype,
        "quantize": "int8" if int8 else None,
        "left_out": checkpoint.left_out,
    }
    weight_map = {o.name: file for file, shard in zip(files, shards, strict=True) for group in shard for o in group}
    total = sum(o.nbytes for shard in shards for group in shard for o in group)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    config = {**checkpoint.raw_config, "dtype": dtype}
    for name in ("torch_dtype", "quantization_config"):
        config.pop(name, None)
    if int8:
        config["quantization_config"] = INT8
    with claimed(output, source, provenance):
        with tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=None) as bar:
            for file, shard in zip(files, shards, strict=True):
                write_shard(output / file, shard, checkpoint.tensors, bar)
        for pattern in (*TOKENIZER_FILES, "generation_config.json"):
            for file in sorted(source.glob(pattern)):
                if file.is_file():
                    write_whole(output / file.name, file.read_bytes())
        write_whole(output / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
        write_whole(output / "config.json", json.dumps(config, indent=2).encode())
    print_left_out(checkpoint)


def print_left_out(checkpoint: Checkpoint) -> None:
    """Says what is left out on purpose, on standard error, from process 0 alone."""
    if jax.process_index() == 0:
        for reason, count in Counter(checkpoint.left_out.values()).items():
            print(f"left out {count} tensors of the checkpoint: {reason}", file=sys.stderr)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Tells checkpoints apart without reading them whole: the configuration, of every tensor its place, dtype and
    shape, and of a thousand their first and last row."""
    digest = hashlib.sha256(json.dumps(checkpoint.raw_config, sort_keys=True).encode())
    names = sorted(checkpoint.tensors)
    for name in names:
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.file.name} {tensor.dtype} {tensor.shape} ".encode())
    for name in random.Random(0).sample(names, min(len(names), 1000)):
        tensor = checkpoint.tensors[name]
        for end in (slice(0, 1), slice(-1, None)):
            digest.update(read_rows(tensor, *[end] * max(1, len(tensor.shape) - 1)).tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def claimed(output: Path, source: Path, provenance: dict):
    """Makes the output folder, or finds that it holds a part or the whole of this very conversion; locks it."""
    if os.path.realpath(output) == os.path.realpath(source):
        raise InputError(f"{output}: is the source; choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output}: {error.strerror}; choose another --output") from error
    lock = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = output / "conversion.json"
        if record.exists():
            if read_json(record) != provenance:
                raise InputError(f"{output}: holds a conversion of another checkpoint or with other options; remove it")
        elif strangers := [file.name for file in output.iterdir() if file.name != "conversion.json.part"]:
            raise InputError(f"{output}: is not empty (it has {strangers[0]}); choose another --output")
        else:
            write_whole(record, json.dumps(provenance, indent=2).encode())
        yield
    except BlockingIOError as error:
        raise InputError(f"{output}: another conversion is writing here; wait for it or choose another") from error
    except OSError as error:  # of a full disk it names no file
        place = error.filename or output
        raise InputError(
            f"{place}: {error.strerror}; once that is mended, this command goes on where it was"
        ) from error
    finally:
        os.close(lock)


def write_whole(path: Path, content: bytes) -> None:
    """A file that is either there with all of `content` or not there."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def write_shard(path: Path, groups: list[list[Output]], tensors: dict[str, Stored], bar: tqdm) -> None:
    """One safetensors file, written in pieces of rows: its size and header are known before its contents.

    safetensors' own writer takes whole tensors in memory. Like that writer, this puts wide dtypes first, which aligns
    all of them.
    """
    header, end = {}, 0
    for o in sorted((o for group in groups for o in group), key=lambda o: -DTYPES[o.dtype].itemsize):
        stored = next(short for short, dtype in STORED.items() if dtype == o.dtype)
        shape = swapped(o.shape) if o.name.endswith(INPUT_FIRST) else o.shape
        header[o.name] = {"dtype": stored, "shape": list(shape), "data_offsets": [end, end + o.nbytes]}
        end += o.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    if path.exists() and path.stat().st_size == len(head) + end:
        with open(path, "rb") as f:
            if f.read(len(head)) == head:
                bar.update(end)
                return

    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        f.write(head)
        written = {name: len(head) + entry["data_offsets"][0] for name, entry in header.items()}
        for group in groups:
            name, tensor = group[0].name, tensors[group[0].name]
            for rows in map(partial(read_rows, tensor), pieces(tensor)):
                with np.errstate(over="ignore", invalid="ignore"):  # the next line says it
                    arrays = quantize_on_device(rows) if len(group) == 2 else [rows.astype(DTYPES[group[0].dtype])]
                if not all(np.isfinite(array).all() for array in (rows, *arrays)):
                    raise InputError(f"{tensor.file}: {name} has NaN or values too large for {group[0].dtype}")
                for o, array in zip(group, map(np.asarray, arrays), strict=True):
                    f.seek(written[o.name])
                    f.write((array.swapaxes(-1, -2) if o.name.endswith(INPUT_FIRST) else array).tobytes())
                    written[o.name] += array.nbytes
                    bar.update(array.nbytes)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


quantize_on_device = jax.jit(quantize)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class ArgumentParser(argparse.ArgumentParser):
    """argparse, with its errors in the one form that all errors have here."""

    def error(self, message: str) -> None:
        raise InputError(message)


def users_line(error: BaseException) -> str | None:
    """The line for an error that the user can mend, None for another one."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory ({one_line(error)}); give more devices, fewer prompts or tokens, or --quantize int8"
    if isinstance(error, (InputError, OSError)):  # an OSError names the file
        return "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    return None


def find_devices() -> list[jax.Device]:
    """jax.devices(), or InputError where it has none."""
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
        if not (line := users_line(error)):
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


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
