r"""Compiles a model's real step for a machine that is not at hand, and reads off the program what a step costs.

    python3 benchmarks/plan.py llama3 --config llama-3.1-70b --target v5e:4x4 --batch 8 --max_seq_len 2048 \
        --quantize int8 --quantize_cache int8

The target is a TPU slice (v5e:4x4, v6e:2x4, v5p:2x2x4) or a GPU (h100, h200). No weights are needed, and no
memory: the shapes of a released size are in FOLDER/configs. Several targets, batches, lengths or tp give a table.

The estimate is core_ms + collective_ms.

core_ms is the larger of two times. The first is the compiler's count of cycles over the clock; a weight that XLA
fetches ahead costs no cycles. The second is the bytes that a device reads (every weight but the embedding, and the
whole cache) over the memory bandwidth. The compiler counts no cycles for a Pallas kernel, so attention, and weights
that a kernel streams, count by their bytes alone. For GPUs it counts no cycles at all: core_ms is the time of the bytes
plus 1.3 microseconds for each kernel, which is what one costs even in a captured graph.

serial_ms is a warning beside the estimate: the time if nothing overlapped a kernel. It adds up the compiler's cycles
and, for each kernel, a microsecond and the time of the bytes that the kernel says it reads.

With `--prefill P` it is the prefill of prompts of P tokens: all their pieces, of the length that generate takes. One
program serves all pieces, and what differs is how often its loops run and how many tokens attention meets. core_ms is
the sum over the pieces of the larger of the time of the bytes and that of cycles and kernels: each loop's body as often
as it runs, and each kernel's arithmetic at KERNEL_SHARE of the peak. For GPUs it is the larger of the time of the bytes
and that of all arithmetic at that share, which is a guess, plus the launches of one pass through each loop. floor_ms is
the larger of the time of the arithmetic at the peak (2 operations for each token and weight, and attention) and that of
reading every weight once; mfu is the arithmetic at the peak over the estimate.

collective_ms takes a microsecond for each collective, and the time of its bytes over all links of a chip. Among n
devices these are (n - 1) / n of an array: of what an all-gather returns and of what a reduce-scatter takes. An
all-reduce is both in turn. The model's own kernels that exchange data between chips (`exchanges`) carry all of their
bytes. Both constants were held against one published measurement: jax-llm-examples' Llama 3.1 70B int8 step (v5e:4x4,
batch 8, cache 2048) took 6.29 ms by its README. That program reads 5.91 ms of bytes and has 160 all-reduces of 128 KiB,
from which these constants make 6.27.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# Before jax is imported: nothing of this machine's own accelerators, and libtpu told that it only compiles, for as many
# chips as the target has, whatever else on this machine uses it.
CHIPS_ASKED = [math.prod(map(int, m[1].split("x"))) for m in (re.fullmatch(r"v\w+:([\dx]+)", a) for a in sys.argv) if m]
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": f"v5litepod-{max([4, *CHIPS_ASKED])}",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import jax
import jax.numpy as jnp
from folders import (
    ArgumentParser,
    attention_flops,
    check_batch,
    count,
    flops,
    import_from,
    provenance,
    read_config,
    result_name,
    run,
    save,
    with_drafts,
)
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVE_START_S = 1e-6
GPU_KERNEL_S = 1.3e-6


class Chip(NamedTuple):
    """Published figures of a device: memory in bytes, its bandwidth and that of all links together in bytes/s, and its
    dense bfloat16 peak in operations/s.

    `clock_hz`, which turns the compiler's cycles into time, is the published bf16 peak over what the matrix units do in
    a cycle (v5e: 197e12 / (2 x 4 x 128 x 128)), and None for GPUs. Sources: Google Cloud's page of each TPU version,
    NVIDIA's data sheets.
    """

    memory: float
    bandwidth: float
    links: float
    peak: float
    clock_hz: float | None


CHIPS = {
    "v5e": Chip(16 * 2**30, 819e9, 200e9, 197e12, 1.5e9),
    "v5p": Chip(95 * 2**30, 2765e9, 600e9, 459e12, 1.75e9),
    "v6e": Chip(32 * 2**30, 1640e9, 448e9, 918e12, 1.75e9),
    "h100": Chip(80e9, 3352e9, 450e9, 989e12, None),
    "h200": Chip(141e9, 4800e9, 450e9, 989e12, None),
}
# The share of the peak at which kernels compute, for which the compiler counts no cycles. On TPUs it is that of
# ragged_attention by the length of its compiled schedule, rounded down. (LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR
# --xla_jf_dump_llo_text=true" writes it.) For GPUs it is a guess.
KERNEL_SHARE = {"v5e": 0.8, "v5p": 0.8, "v6e": 0.33, "h100": 0.6, "h200": 0.6}

# What the compiler needs to know of a GPU that is not at hand: the text form of its device description.
GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 }} device_description_str: "NVIDIA H100 80GB HBM3"
"""

COLLECTIVE = re.compile(
    r"= (?P<shapes>[^=]*?) (?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
OVERLAPPED = re.compile(r"%async-collective-start[.\d]* = .*? calls=(%[\w.]+)")  # with other work, on TPUs
EXCHANGE = re.compile(r'%exchange[.\d]* = .*?"remote_bytes_transferred":"(\d+)"', re.DOTALL)
COPY = re.compile(r"= (?P<shapes>\w+\[[\d,]*\])\S* copy\(")
GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)|\[\d+,(\d+)\]|mesh\[(.*?)\].*?\{(.*?)\})")
KERNEL = re.compile(r"= [^=]*? (fusion|custom-call|copy|(all-reduce|all-gather|reduce-scatter)(-start)?)\(")
SHAPE = re.compile(r"(pred|[subf]\w*?(\d+))\[([\d,]*)\]")


def devices_of(target: str) -> list:
    """The devices of a machine that is not at hand, as jax.experimental.topologies describes them."""
    chip, _, shape = target.partition(":")
    if chip in ("h100", "h200"):
        if shape:
            raise ValueError(f"--target {target}: GPUs are planned one at a time, as {chip}")
        text = GPU.format(bandwidth=CHIPS[chip].bandwidth, memory=CHIPS[chip].memory)
        options = {"platform": "cuda", "topology_name": "h100", "topology": "1x1x1", "target_config": text}
        extra = "plan-gpu"
    else:
        options, extra = {"platform": "tpu", "topology_name": target}, "tpu"
        if math.prod(map(int, re.findall(r"\d+", shape))) < 4:  # a part of a host
            bounds = [*map(int, re.findall(r"\d+", shape)), 1, 1][:3]
            options["chips_per_host_bounds"] = bounds
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # a missing plugin and a wrong name show as many kinds of it
        what = f"no compiler for {target}: is it a slice such as v5e:2x4, and is '.[{extra}]' installed?"
        raise ValueError(f"{what} ({str(error)[:200]})") from error


def nbytes(shapes: str) -> int:
    """Bytes of all arrays named in a piece of HLO text."""
    total = 0
    for kind, bits, dims in SHAPE.findall(shapes):
        total += math.prod(int(d) for d in dims.split(",") if d) * (8 if kind == "pred" else int(bits)) // 8
    return total


def lower_program(generate, config, mesh, args, T: int, b: int | None):
    """A step of T tokens lowered, for all rows or for b of them on each device of dp; the abstract weights and
    cache."""

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("dp")))

    model, dtype, batch = generate.model, jnp.dtype(args.dtype), args.batch
    weights = model.abstract_weights(config, mesh, dtype, args.quantize)
    drafts = 0 if args.prefill else args.tokens - 1
    cache = model.abstract_cache(config, mesh, batch, args.max_seq_len, dtype, args.quantize_cache, drafts)
    history, seeds = array(batch, args.max_seq_len + 1), array(batch, 2, dtype=jnp.uint32)
    rows = generate.Rows(history, *[array(batch)] * 3, seeds)
    places = array(b * mesh.shape["dp"]) if b else None
    options = {"T": T, "draft": args.draft, "drafts": args.tokens - 1}
    options |= {"config": config, "mesh": mesh, "sampling": generate.Sampling(), "stop_tokens": (1, 2)}
    return generate.step.lower(weights, cache, rows, places, **options), weights, cache


def plan(args) -> dict:
    """The report on one configuration: the keys of --json."""
    model, generate, convert = (import_from(args.folder, name) for name in ("model", "generate", "convert"))
    config = with_drafts(model.Config.from_dict(read_config(args.folder, args.config, args.layers)), args)
    if args.tokens > model.FEW:
        raise ValueError(f"--tokens {args.tokens} is more than a decode step takes of a row, {model.FEW}")
    name = args.target.partition(":")[0]
    if name not in CHIPS:
        raise ValueError(f"--target {args.target} is of none of {', '.join(CHIPS)}")
    chip = CHIPS[name]
    devices = devices_of(args.target)
    dp = args.dp or (max(1, len(devices) // ((args.ep or 1) * args.tp)) if args.tp else None)
    declared = model.in_format(model.weights_of(config), args.quantize)
    mesh = model.make_mesh(*convert.mesh_shape(declared, devices, dp, args.ep, args.tp), devices=devices)
    check_batch(args.batch, mesh)
    R, piece, taken = model.cache_sharers(config, model.model_shards(mesh)), None, None
    if hasattr(model, "row_groups"):  # R: devices that share the tokens of a row
        R = model.row_groups(args.batch // mesh.shape["dp"], R)[1]
    if args.prefill:
        piece = generate.piece_lengths(args.prefill, config, mesh)[0]
        taken = min(args.batch // mesh.shape["dp"], max(1, generate.PREFILL_TOKENS // piece))  # rows of a device
        args.max_seq_len = max(args.max_seq_len, math.ceil(args.prefill / piece) * piece)
    begin = time.perf_counter()
    lowered, weights, cache = lower_program(generate, config, mesh, args, piece or args.tokens, taken)
    lengths = [args.max_seq_len] * args.batch
    one = model.make_mesh(devices=devices[:1])
    options = [config, one, args.batch, args.max_seq_len, args.dtype, args.quantize_cache]
    unsharded = model.abstract_weights(config, one, args.dtype, args.quantize), model.abstract_cache(*options)
    floor_bytes = generate.step_bytes(*unsharded, lengths, config, args.batch * args.tokens)
    report = {
        "mesh": dict(mesh.shape),
        "fits": False,
        "weights_bytes": model.stored_bytes(weights) // mesh.size,
        "cache_bytes": model.stored_bytes(cache) // mesh.size,
        "floor_ms": 1e3 * floor_bytes / mesh.size / chip.bandwidth,
    }
    needed = flops(model, config, args.batch, 0, args.prefill) / mesh.size if piece else None
    if piece:
        nbytes = weight_bytes(generate, *unsharded, args.batch * args.prefill, config) / mesh.size
        report |= {"piece": piece, "floor_ms": 1e3 * max(needed / chip.peak, nbytes / chip.bandwidth)}
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise ValueError(f"{args.target}: the compiler failed: {str(error)[:300]}") from error
        return report | dict.fromkeys(PROGRAM_KEYS)
    report["compile_s"] = time.perf_counter() - begin
    nbytes = generate.step_bytes(weights, cache, lengths, config, args.batch * args.tokens / mesh.shape["dp"])
    if args.draft == "mtp":
        nbytes += draft_bytes(generate, weights, cache, args, config, args.batch / mesh.shape["dp"])
    runs = [Run(nbytes / mesh.size)]
    if piece:
        runs, rows = [], taken * mesh.shape["dp"]
        for start in range(0, args.prefill, piece):
            nbytes = weight_bytes(generate, weights, cache, taken * piece, config)
            nbytes += model.cache_bytes_read(cache, [start + piece] * rows, config)
            attention = rows * attention_flops(config, start, start + piece) / mesh.size
            operations = flops(model, config, rows, start, start + piece) / mesh.size
            trips = loop_trips(model, cache, R, taken, start, piece)
            runs += [Run(nbytes / mesh.size, trips, attention, operations)] * math.ceil(args.batch / rows)
    shards, layers = model.model_shards(mesh), config.num_hidden_layers
    report |= costs(program.as_text(), program.memory_analysis(), shards, layers, name, runs)
    if piece:
        report["mfu"] = 1e3 * needed / chip.peak / report["estimated_ms"]
    # A compiled program leaves out what it does not use, such as an indexer where all tokens are seen.
    held = sum(report[f"{part}_bytes"] for part in ("weights", "cache", "temp"))
    report["hbm_bytes"] = max(report["hbm_bytes"], held)
    report["fits"] = report["hbm_bytes"] <= chip.memory
    return report


PROGRAM_KEYS = (  # null where the compiler finds that the program does not fit
    "temp_bytes", "hbm_bytes", "collectives", "exchanges", "copy_bytes", "kernels_per_layer", "core_ms", "serial_ms",
    "collective_ms", "estimated_ms", "compile_s",
)  # fmt: skip


def weight_bytes(generate, weights: dict, cache: list, tokens: float, config) -> float:
    """Bytes of the weights that a step has to read on all devices, with so many tokens on each of dp."""
    return generate.step_bytes(weights, cache, [], config, tokens)


def draft_bytes(generate, weights: dict, cache: list, args, config, rows: float) -> float:
    """Bytes that drafts of the extra layer read again, on all devices, with so many rows on each of dp: the head for
    each draft, the layer for all but one."""
    others = {name: weight for name, weight in weights.items() if name != "extra"}
    without = weight_bytes(generate, others, cache, rows, dataclasses.replace(config, uses_extra_layer=False))
    layer = weight_bytes(generate, weights, cache, rows, config) - without
    head = generate.model.stored_bytes(weights.get("head", weights["embedding"]))
    return (args.tokens - 2) * layer + (args.tokens - 1) * head


class Run(NamedTuple):
    """One execution of a program on a device: the bytes that it must read, and for a piece of prefill how often each of
    its loops runs, the operations of attention and of all."""

    nbytes: float
    trips: tuple[int, ...] = ()
    attention: float | None = None
    operations: float | None = None


def loop_trips(model, cache: list, R: int, rows: int, start: int, piece: int) -> tuple[int, ...]:
    """How often each loop runs in a piece of prefill at `start`, on a TPU: a layer has one over several rows that store
    their tokens and, if keys have to be expanded, one over several blocks of them, and both once more if it chooses
    keys; one with a state goes through chunks of tokens."""
    trips = []
    for layer in cache:
        chooses = getattr(layer, "index_key", None) is not None
        if hasattr(layer, "state"):
            trips.append(math.ceil(piece / model.CHUNK))
            continue
        of_layer = [rows] * (rows > 1)
        slots = jax.tree.leaves(layer)[0].shape[2]
        is_expanded = hasattr(model, "row_groups")
        block = math.gcd(slots, max(1, model.power_of_two(max(piece, 128)) // R)) if is_expanded else slots
        if block < slots:
            of_layer.append((start + piece - 1) // (block * R) + 1)
        trips += of_layer * (1 + chooses)
    return tuple(trips)


def loop_bodies(text: str) -> list[str]:
    """The text of the body of each loop of a compiled program, in the order of the loops."""
    names = re.findall(r" while\(.*?body=%([\w.\-]+)", text[text.index("\nENTRY") :])
    return [text[text.index(f"\n%{name} (") :].partition("\n}\n")[0] for name in names]


def kernels_of(text: str) -> list[str]:
    """The Pallas kernels that a text of a compiled program calls."""
    return [each for each in re.split(r"\n  (?=%|ROOT)", text) if 'custom_call_target="tpu_custom_call"' in each]


def cycles_of(text: str) -> int:
    """The cycles that the compiler estimates for all that the text of a program contains. What it gives to SparseCores
    has the largest number there is, for none: with libtpu 0.0.50 the embedding of a prompt, on v5p and v6e."""
    return sum(cycles for cycles in map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)) if cycles < 2**63 - 1)


def group_size(line: str, shards: int) -> int:
    """How many devices take part in a collective of a compiled program: it lists those of the first group, counts them
    or, with libtpu 0.0.50, names axes of the mesh. A permutation has pairs, and counts as one of `shards` devices."""
    if not (group := GROUP.search(line)):
        return shards
    listed, counted, mesh, axes = group.groups()
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes))
    return int(counted) if counted else listed.count(",") + 1


def costs(text: str, memory, shards: int, layers: int, name: str, runs: list[Run]) -> dict:
    """What the text of a compiled program and its memory analysis say of its costs, where `shards` devices share a
    layer. The times are those of all runs together."""
    chip, entry, bodies = CHIPS[name], text[text.index("\nENTRY") :], loop_bodies(text)
    kernels = len(KERNEL.findall(entry))
    own = kernels_of(text)
    bytes_read = [sum(map(int, re.findall(r'"bytes_accessed":"(\d+)"', each))) for each in own]
    started = sum(n > 0 for n in bytes_read)  # exchanges count as collectives

    def operations(text):
        others = (each for each in kernels_of(text) if not each.startswith("%ragged_attention"))
        return sum(int(n) for each in others for n in re.findall(r'"flops":"(\d+)"', each))

    def traffic(part):
        """Of collectives: a Counter of their kinds, the number of exchanges, bytes."""
        parts = [part, *(text[text.index(f"\n{name} (") :].partition("\n}")[0] for name in OVERLAPPED.findall(part))]
        found, exchanges = [match for each in parts for match in COLLECTIVE.finditer(each)], EXCHANGE.findall(part)
        carried = 0.0
        for match in found:
            n = group_size(match.string[match.end() :].partition("\n")[0], shards)
            arrays = {"all-reduce": 2, "reduce-scatter": n}.get(match["kind"], 1)  # of the size of the result
            carried += nbytes(match["shapes"]) * arrays * (n - 1) / n
        return Counter(match["kind"] for match in found), len(exchanges), carried + sum(map(int, exchanges))

    def seconds(kinds, exchanges, carried):
        return (kinds.total() + exchanges) * COLLECTIVE_START_S + carried / chip.links

    outside, inside = cycles_of(text) - sum(map(cycles_of, bodies)), list(map(cycles_of, bodies))
    core_s = serial_s = collective_s = 0.0
    for one in runs:
        if chip.clock_hz and len(one.trips) != len(bodies):
            what = f"the compiled program has {len(bodies)} loops, and {len(one.trips)} are known"
            raise ValueError(
                f"{what}; is a weight's share no multiple of 128 (try --ep), or its cache new to loop_trips?"
            )
        collective_s += seconds(*traffic(entry))
        collective_s += sum(n * seconds(*traffic(body)) for n, body in zip(one.trips, bodies))
        read_s, speed = one.nbytes / chip.bandwidth, KERNEL_SHARE[name] * chip.peak
        if not chip.clock_hz:
            core_s += max(read_s, (one.operations or 0) / speed) + kernels * GPU_KERNEL_S
            continue
        cycles_s = (outside + sum(n * c for n, c in zip(one.trips, inside, strict=True))) / chip.clock_hz
        computed_s = 0.0
        if one.attention is not None:
            in_loops = sum((n - 1) * operations(body) for n, body in zip(one.trips, bodies, strict=True))
            computed_s = (one.attention + operations(text) + in_loops) / speed
        core_s += max(cycles_s + computed_s, read_s)
        serial_s += max(cycles_s + computed_s, read_s, cycles_s + sum(bytes_read) / chip.bandwidth + started * 1e-6)
    hbm = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    hbm += memory.output_size_in_bytes - memory.alias_size_in_bytes
    # What a decode step copies in pieces of a mebibyte and more can only be weights or the cache.
    copies = [size for match in COPY.finditer(entry) if (size := nbytes(match["shapes"])) >= 2**20]
    kinds, exchanges, _ = traffic(entry)
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "hbm_bytes": hbm,
        "collectives": dict(kinds),
        "exchanges": exchanges,
        "copy_bytes": sum(copies),
        "kernels_per_layer": round(kernels / layers, 1),
        "core_ms": 1e3 * core_s,
        "serial_ms": 1e3 * (max(core_s, serial_s) + collective_s),
        "collective_ms": 1e3 * collective_s,
        "estimated_ms": 1e3 * (core_s + collective_s),
    }


# Measured by others on the machines themselves, in ms: what an estimate is to be held against.
# jax-llm-examples' README, Llama 3.1 70B in int8 with an int8 cache, which was mostly empty, on meshes of dp x 16 / dp.
PUBLISHED = {
    ("llama-3.1-70b", "v5e:4x4", "int8", "int8", dp, batch, slots): 1e3 / steps_per_s
    for dp, batch, slots, steps_per_s in (
        (1, 8, 2048, 159), (1, 8, 4096, 146), (1, 8, 8192, 146), (1, 32, 2048, 108), (1, 32, 4096, 100),
        (1, 32, 8192, 93.8), (1, 128, 2048, 39.3),
        (2, 8, 2048, 84.4), (2, 8, 4096, 83.4), (2, 8, 8192, 81.7), (2, 32, 2048, 74.5), (2, 32, 4096, 74),
        (2, 32, 8192, 71.3), (2, 128, 2048, 50.2),
    )
}  # fmt: skip
# And of Llama 4 Scout, likewise; how it stores its cache is not said.
PUBLISHED |= {
    ("llama-4-scout-17b-16e", "v5e:4x4", "int8", "int8", 1, batch, 4096): 1e3 / steps_per_s
    for batch, steps_per_s in ((1, 85.5), (16, 76.3), (32, 73.0))
}
# And of DeepSeek R1: 75.9 steps/s, and what its README gives as 20.8 and 57.5 ms.
PUBLISHED |= {
    ("deepseek-r1", "v5e:8x8", "int8", "int8", 1, batch, 512): 1e3 / steps_per_s
    for batch, steps_per_s in ((1, 75.9), (8, 48.0), (128, 17.4))
}


def table(rows: list[dict]) -> str:
    """The reports as Markdown, steps/s or prompts' tokens/s against the floor and what was published."""
    prefill = "prefill" in rows[0]
    head = (
        "target", "dp, ep, tp", "batch", "prompt" if prefill else "slots", "GB a chip", "core ms", "collective ms",
        "estimate ms", "serial ms", "floor ms", "tokens/s" if prefill else "estimate steps/s", "of the floor",
        "published ms",
    )  # fmt: skip

    def number(ms):
        return "" if ms is None else f"{ms:.2f}"

    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        mesh = "{dp}, {ep}, {tp}".format(**row["mesh"])
        cells = [row["target"], mesh, row["batch"], row["prefill" if prefill else "max_seq_len"]]
        if row["hbm_bytes"] is None:
            cells += ["does not fit", "", "", "", "", number(row["floor_ms"]), "", ""]
        else:
            cells += [
                f"{row['hbm_bytes'] / 1e9:.2f}" + ("" if row["fits"] else " (does not fit)"),
                *(number(row[key]) for key in ("core_ms", "collective_ms", "estimated_ms", "serial_ms", "floor_ms")),
                f"{(row['batch'] * row['prefill'] if prefill else 1) * 1e3 / row['estimated_ms']:.0f}",
                f"{row['floor_ms'] / row['estimated_ms']:.0%}" if row["floor_ms"] else "",
            ]
        cells.append(number(row["published_ms"]))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def sweep(args, errors: list[str]) -> Iterator[dict]:
    """A report for every combination of the arguments that have several values, with what tells them apart. `errors`
    gets what is wrong with one that cannot be planned."""
    for values in itertools.product(
        args.target, args.batch, args.max_seq_len, args.tp or [None], args.prefill or [None]
    ):
        one = argparse.Namespace(**vars(args))
        one.target, one.batch, one.max_seq_len, one.tp, one.prefill = values
        try:
            report = plan(one)
        except ValueError as error:
            errors.append(str(error))
            continue
        dp = report["mesh"]["dp"]
        key = one.config, one.target, one.quantize, one.quantize_cache, dp, one.batch, one.max_seq_len
        published_ms = None if args.layers or args.prefill else PUBLISHED.get(key)
        named = {"target": one.target, "batch": one.batch, "max_seq_len": one.max_seq_len}
        if one.prefill:
            named["prefill"] = one.prefill
        yield named | report | {"published_ms": published_ms}


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("folder", help="a model folder, such as llama3")
    add("--config", required=True, help="a released size, FOLDER/configs without .json, or a config.json")
    add("--layers", type=count, help="so many layers of it")
    add("--target", required=True, nargs="+", help="v5e:4x4, v6e:2x4, v5p:2x2x4, .., h100, h200")
    add("--batch", type=count, nargs="+", default=[8])
    add("--max_seq_len", type=count, nargs="+", default=[2048], help="cache slots for a sequence, all of them filled")
    add("--tokens", type=count, default=1, help="of a row in a decode step, all but one of them drafts, default 1")
    add("--draft", choices=["lookup", "mtp"], help="where these come from, by default from the caller")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--quantize", choices=["int8", "int4"])
    add("--quantize_cache", choices=["int8"])
    add(
        "--prefill",
        type=count,
        nargs="+",
        metavar="P",
        help="the prefill of P tokens a row, in all its pieces, not the decode step",
    )
    add("--dp", type=count)
    add("--ep", type=count)
    add("--tp", type=count, nargs="+")
    add("--json", action="store_true", help="a line for each combination of targets, batches, slots and tp")
    add("--save", type=result_name, metavar="NAME", help="all of it in benchmarks/results/NAME.json")
    args = parser.parse_args()
    rows, errors = [], []
    try:
        for row in sweep(args, errors):
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
        if args.save and rows:
            packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
            save(args.save, provenance(packages) | {"arguments": vars(args), "plans": rows})
    finally:  # an interrupt loses no row
        if len(rows) > 1 and not args.json:
            print(table(rows))
        elif rows and not args.json:
            for name, value in rows[0].items():
                print(f"{name:18} {value:.3f}" if isinstance(value, float) else f"{name:18} {value}")
    if errors:
        raise ValueError("; ".join(dict.fromkeys(errors)))


if __name__ == "__main__":
    run(main)
