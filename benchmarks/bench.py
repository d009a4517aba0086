"""Times prefill and decoding of a released size with random weights, on the machine at hand.

    python3 benchmarks/bench.py llama3 --config llama-3.1-8b --batch 1 8 --prompt_len 1024 --steps 128
    python3 benchmarks/bench.py llama3 --config llama-3.2-1b --layers 4 --vs transformers
    python3 benchmarks/bench.py llama3 --config llama-3.1-8b --components --save h200-8b

`generate`, which main.py calls too, decodes random prompts of each pair of --batch and --prompt_len: once to warm up,
then --rounds times, of which the median counts. No figure includes compilation.

MFU is the arithmetic of prefill over the published dense bfloat16 peak: 2 operations for each token and each number of
a matrix that it meets (of experts, the chosen ones), 4 for each number of a query and each token attended to, and the
output head for the last token alone. MBU is what a decode step has to read (`step_bytes`) over the published
bandwidth. They are null if the peak is not known, as for CPUs.

--vs transformers runs the Hugging Face class in this same process on the same weights, alternating: a round of ours,
a round of theirs, prefill and decode loop timed apart. --components divides a decode step's time among the parts of the
model, by a profiler's trace. --save NAME writes benchmarks/results/NAME.json, which draw.py and tables.py read.
"""

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

if any("transformers" in argument for argument in sys.argv):  # --vs: torch wants a part of a GPU's memory too
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "--components" in sys.argv:  # in a captured graph, a GPU's kernels would not carry their names
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import numpy as np
from folders import (
    ArgumentParser,
    check_batch,
    count,
    flops,
    import_all,
    provenance,
    read_config,
    result_name,
    run,
    save,
    with_drafts,
)

# Published dense bfloat16 peak in TFLOP/s of a device, by the beginning of jax's device_kind; sources as main.py's.
PEAK_TFLOPS = {
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5": 459,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
    "NVIDIA A100": 312,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
}

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def random_weights(abstract: dict, seed: int) -> dict:
    """Random numbers in the shapes, dtypes and shardings of `abstract`, made on the devices."""

    def numbers(key, field, x):
        if field in ("scale", "exponents"):  # of a number format
            return jnp.full(x.shape, 2e-4 if field == "scale" else 120, x.dtype)
        if x.dtype == jnp.int8:
            return jax.random.randint(key, x.shape, -127, 128, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.integer):  # bits of any meaning
            return jax.random.bits(key, x.shape, x.dtype)
        if len(x.shape) == 1:  # a norm
            return jnp.ones(x.shape, x.dtype)
        return 0.02 * jax.random.normal(key, x.shape, x.dtype)

    leaves, tree = jax.tree.flatten_with_path(abstract)
    kinds = [(getattr(path[-1], "name", None), x) for path, x in leaves]
    make = {  # a program for each kind of array
        kind: jax.jit(partial(numbers, field=kind[0], x=kind[1]), out_shardings=kind[1].sharding) for kind in set(kinds)
    }
    # Of this kind, the random bits of a matrix never lie in memory: else an embedding of 2.8 GB takes 20 more.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    return tree.unflatten(make[kind](key) for key, kind in zip(keys, kinds, strict=True))


def measure(folder, weights, config, mesh, args, batch: int, length: int) -> dict:
    """One round: what main.py's line of statistics says, and MFU. Of drafts it measures what a step costs, and takes
    the share --accepted of them as accepted: what a random model accepts is luck."""
    prompts = np.random.default_rng(args.seed).integers(config.vocab_size, size=(batch, length)).tolist()
    stats = {}
    options = {"max_new_tokens": args.steps + 1, "quantize_cache": args.quantize_cache, "stats": stats, "rows": batch}
    options |= {"draft": args.draft, "draft_tokens": args.draft_tokens}
    folder.generate.REPEATING = 0  # each step has drafts
    for _ in folder.generate.generate(weights, prompts, config, mesh, **options):
        pass
    report = folder.main.statistics({"model_type": args.folder}, mesh, 0.0, stats)
    del report["load_s"], report["compile_s"]  # the second is of programs compiled before
    if args.draft:
        report["drafts_accepted"] = args.accepted
        report["tokens_per_step"] = sum(args.accepted**i for i in range(args.draft_tokens + 1))
        report["decode_tokens_per_s"] = batch * report["tokens_per_step"] * report["decode_steps_per_s"]
    report["prefill_flops"] = flops(folder.model, config, batch, 0, length)
    middle = length + args.steps // 2
    report["step_flops"] = flops(folder.model, config, batch, middle, middle + 1)
    peak = folder.main.published(PEAK_TFLOPS, mesh.devices.flat[0].device_kind)
    report["mfu"] = peak and report["prefill_flops"] / stats["prefill_s"] / (peak * 1e12 * mesh.size)
    report["mbu"] = report.pop("bandwidth_utilization")
    return report


class Transformers:
    """The reference class on random weights, saved for us to load, and its decoding."""

    def __init__(self, raw_config: dict, args, folder: Path):
        import torch
        import transformers

        transformers.logging.disable_progress_bar()
        self.torch = torch
        torch.manual_seed(args.seed)
        self.device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
        kind = transformers.AutoConfig.for_model(**raw_config.get("text_config", raw_config))
        dtype = getattr(torch, args.dtype)
        self.model = transformers.AutoModelForCausalLM.from_config(kind, dtype=dtype).eval()
        self.model.save_pretrained(folder)
        self.model.to(self.device)

    def measure(self, args, batch: int, length: int) -> dict:
        """One round: greedy decoding as its own `generate` does it, without that one's overhead in Python."""
        torch = self.torch
        prompts = np.random.default_rng(args.seed).integers(self.model.config.vocab_size, size=(batch, length))
        with torch.inference_mode():
            tokens = torch.tensor(prompts, device=self.device)
            begin = time.perf_counter()
            out = self.model(tokens, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1:].argmax(-1)
            tokens[0, 0].item()  # waits for a GPU
            prefill_s, begin = time.perf_counter() - begin, time.perf_counter()
            for _ in range(args.steps):
                out = self.model(tokens, past_key_values=out.past_key_values, use_cache=True)
                tokens = out.logits[:, -1:].argmax(-1)
            tokens[0, 0].item()
            decode_s = time.perf_counter() - begin
        return {"prefill_tokens_per_s": batch * length / prefill_s, "decode_steps_per_s": args.steps / decode_s}


def parts(hlo: str) -> dict[str, str]:
    """Which part of the model each instruction of a compiled program belongs to, by its scope in model.py.

    Where a fusion carries no scope, what is fused in it does. Of a loop the instructions of its body count alone.
    """
    found, inside = {}, {}  # of instructions, and of the computations that fusions call
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line):
            computation = header[1]
        if not (match := re.match(r"\s+(?:ROOT )?%([\w.-]+) = .*? ([\w-]+)\(", line)):
            continue
        scope = re.search(r'op_name="[^"]*/(attention|mlp|experts|embed|head)/', line)
        calls = re.search(r"calls=%([\w.-]+)", line)
        part = scope[1] if scope else inside.get(calls[1], "rest") if calls else "rest"
        # The model's own kernel between chips is named exchange.
        if match[2] == "while":
            continue
        is_collective = match[2].startswith(COLLECTIVES) or match[1].startswith("exchange")
        found[match[1]] = "collectives" if is_collective else part
        if scope:
            inside.setdefault(computation, scope[1])
    return found


def components(folder, weights, config, mesh, args, batch: int, length: int) -> dict:
    """Milliseconds of a decode step's parts, as the trace of --steps steps shows them: the mean over the devices.

    A part is a jax.named_scope of model.py; collectives stand for themselves, as a kernel's time includes its waiting.
    """
    model, generate, slots = folder.model, folder.generate, length + args.steps
    dtype = weights["norm"].dtype
    cache = model.zeros(model.abstract_cache(config, mesh, batch, slots, dtype, args.quantize_cache))
    numbers = np.zeros((batch, slots), np.int32), *np.full((3, batch), [[length], [length + 1], [slots]], np.int32)
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    rows = generate.Rows(*jax.device_put((*numbers, np.zeros((batch, 2), np.uint32)), by_rows))
    options = {"T": 1, "config": config, "mesh": mesh, "sampling": generate.Sampling()}
    program = generate.step.lower(weights, cache, rows, **options).compile()
    kinds = parts(program.as_text())
    cache, rows, _ = program(weights, cache, rows)
    jax.block_until_ready(rows)
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            begin = time.perf_counter()
            for _ in range(args.steps):
                cache, rows, _ = program(weights, cache, rows)
            jax.block_until_ready(rows)
            step_ms = (time.perf_counter() - begin) / args.steps * 1e3
        found = Counter()
        for file in Path(trace).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines:
                    for event in line.events:
                        op = dict(event.stats).get("hlo_op")
                        if op in kinds:
                            found[kinds[op]] += event.duration_ns / 1e6 / args.steps / jax.local_device_count()
    return {"step": step_ms, **found, "between kernels": step_ms - sum(found.values())}


def bench(args) -> dict:
    """All measurements, and what is needed to repeat them."""
    folder = import_all(args.folder)
    model = folder.model
    raw_config = read_config(args.folder, args.config, args.layers)
    config = with_drafts(model.Config.from_dict(raw_config), args)
    if not 0 <= args.accepted <= 1:
        raise ValueError(f"--accepted {args.accepted} is no probability")
    if args.vs and args.draft == "mtp":
        raise ValueError("--vs transformers has no extra layer for --draft mtp; --draft lookup needs none")
    declared = model.in_format(model.weights_of(config), args.quantize)
    folder.convert.check_devices()
    mesh = model.make_mesh(*folder.convert.mesh_shape(declared, jax.devices(), args.dp, args.ep, args.tp))
    for batch in args.batch:
        check_batch(batch, mesh)
    abstract = model.abstract_weights(config, mesh, jnp.dtype(args.dtype), args.quantize)
    needed, there = model.stored_bytes(abstract), folder.generate.memory_of(mesh)
    if needed > there:
        raise ValueError(f"the weights take {needed / 1e9:.1f} GB and the devices have {there / 1e9:.1f}; see --layers")
    with tempfile.TemporaryDirectory() as checkpoint:
        rival = None
        if args.vs:
            rival = Transformers(raw_config, args, Path(checkpoint))
            ours = folder.convert.open_checkpoint(Path(checkpoint))
            config, weights = ours.config, folder.convert.load(ours, mesh, args.dtype, args.quantize)
        else:
            weights = random_weights(abstract, args.seed)
    results = []
    for batch in args.batch:
        for length in args.prompt_len:
            ours, theirs = [], []
            for _ in range(args.rounds + 1):
                ours.append(measure(folder, weights, config, mesh, args, batch, length))
                if rival:
                    theirs.append(rival.measure(args, batch, length))
            row = {"batch": batch, "prompt_len": length} | median(ours[1:])
            if rival:
                row["transformers"] = median(theirs[1:])
                row["transformers"] |= {f"{key}_ratio": row[key] / value for key, value in row["transformers"].items()}
            if args.components:
                row["components_ms"] = components(folder, weights, config, mesh, args, batch, length)
            results.append(row)
            show(row)
    return provenance(("jax", "jaxlib", "numpy", "torch", "transformers")) | {
        "device": {"kind": mesh.devices.flat[0].device_kind, "count": mesh.size} | roofs(mesh),
        "arguments": vars(args),
        "results": results,
    }


def roofs(mesh) -> dict:
    """What one device reaches in XLA's own programs: bytes/s reading 1 GiB, bfloat16 operations/s of a square product.

    The roofs of a CPU, which has no published ones; beside a GPU's or TPU's, they tell what can be had.
    """

    def fastest(program, *arguments):
        seconds = []
        for _ in range(8):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds.append(time.perf_counter() - begin)
        return min(seconds[1:])

    device, N = mesh.devices.flat[0], 2048 if mesh.devices.flat[0].platform == "cpu" else 8192
    ones = jax.device_put(jnp.ones((2**14, 2**14), jnp.float32), device)
    square = jax.device_put(jnp.ones((N, N), jnp.bfloat16), device)
    product = jax.jit(lambda x: jnp.einsum("ik,jk->ij", x, x, preferred_element_type=jnp.float32))
    return {
        "read_bytes_per_s": ones.nbytes / fastest(jax.jit(lambda x: x @ x[0]), ones),
        "product_flops_per_s": 2 * N**3 / fastest(product, square),
    }


def median(rounds: list[dict]) -> dict:
    """Of each number the median over the rounds; what is no number is the same in all."""
    return {
        key: statistics.median(r[key] for r in rounds) if isinstance(value, int | float) else value
        for key, value in rounds[0].items()
    }


def show(row: dict) -> None:
    """A measurement on standard error."""

    def number(value):
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    print(
        f"batch {row['batch']}, prompt {row['prompt_len']}: prefill {number(row['prefill_tokens_per_s'])} tokens/s, "
        f"MFU {number(row['mfu'])}; decode {number(row['decode_steps_per_s'])} steps/s, "
        f"{number(row['bandwidth_gb_per_s'])} GB/s, MBU {number(row['mbu'])}; peak {number(row['peak_memory_gb'])} GB",
        file=sys.stderr,
    )
    for name in ("transformers", "components_ms"):
        if name in row:
            print(
                f"  {name}: " + ", ".join(f"{key} {number(value)}" for key, value in row[name].items()), file=sys.stderr
            )


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument

    add("folder", help="a model folder, such as llama3")
    add("--config", required=True, help="a released size, FOLDER/configs without .json, or a config.json")
    add("--layers", type=count, help="so many layers of it")
    add("--batch", type=count, nargs="+", default=[1])
    add("--prompt_len", type=count, nargs="+", default=[128])
    add("--steps", type=count, default=64, help="decode steps of a round")
    add("--rounds", type=count, default=3)
    add("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    add("--quantize", choices=["int8", "int4"])
    add("--quantize_cache", choices=["int8"])
    for axis in ("dp", "ep", "tp"):
        add(f"--{axis}", type=count)
    add("--draft", choices=["lookup", "mtp"])
    add("--draft_tokens", type=count, default=3)
    add("--accepted", type=float, default=0.8, help="each draft's chance for tokens/s, default 0.8")
    add("--vs", choices=["transformers"])
    add("--components", action="store_true")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="everything as JSON on standard output")
    add("--save", type=result_name, metavar="NAME", help="the same in benchmarks/results/NAME.json")
    args = parser.parse_args()
    report = bench(args)
    if args.json:
        print(json.dumps(report))
    if args.save:
        save(args.save, report)


if __name__ == "__main__":
    run(main)
