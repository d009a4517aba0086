"""Measures released sizes on the devices at hand, and puts beside each figure what plan.py estimates for it.

    python3 benchmarks/check.py                # the sizes of SIZES that fit, for at most ten minutes
    python3 benchmarks/check.py --minutes 5

Weights are random. bench.py times decoding at batch 1 and 8 and the prefill of 1,024 tokens, each the median of two
rounds. In the last quarter of the time plan.py compiles what was measured for the same kind of machine. (A size takes
an H100 a minute, a program plan.py ten seconds.) The table on standard output has, in milliseconds, what was measured,
what was estimated, the floor (see plan.py), and the share of the published memory bandwidth (decoding) or of the
published bfloat16 peak (prefill). What cannot be known, such as the peak of a device that no table has, is left empty.
A size that fails is a row with its error, and the others go on.

All of it is in benchmarks/results/NAME.json after each size: an interrupt loses no more than one. NAME is that of the
devices unless --save gives another; a second run writes over the first. Several GPUs are measured together, without an
estimate, which plan.py has for one alone (CUDA_VISIBLE_DEVICES=0). A slice of several hosts cannot be checked.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax  # alone it takes no device
import tables
from folders import RESULTS, ROOT, ArgumentParser, import_apart, provenance, read_config, result_name, run, save

SIZES = (  # folder, released size, weights; in this order, until the minutes are over
    ("llama3", "llama-3.1-8b", "bfloat16"),
    ("gpt_oss", "gpt-oss-20b", "bfloat16"),  # on GPUs its experts stay in 4 bits
    ("qwen3", "qwen3-30b-a3b", "bfloat16"),
    ("llama3", "llama-3.1-8b", "int8"),
    ("glm4_flash", "glm-4.7-flash", "bfloat16"),
    ("qwen3", "qwen3-30b-a3b", "int8"),
    ("glm4", "glm-4-9b-chat-hf", "bfloat16"),
)
CPU_SIZES = (("llama3", "benchmarks/llama-16x1024.json", "bfloat16"),)
BATCHES, PROMPT, STEPS = (1, 8), 1024, 64
TARGETS = {  # of plan.py, by the beginning of jax's device_kind
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


def describe() -> dict:
    """The devices that jax finds, the target of plan.py that they are, and those of SIZES that fit."""
    devices = jax.devices()
    device = devices[0]
    driver = Path("/proc/driver/nvidia/version")
    described = {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": len(devices),
        "driver": " ".join(device.client.platform_version.split()),
    }
    if device.platform == "gpu" and driver.exists():
        described["driver"] += f"; {driver.read_text().splitlines()[0]}"
    memory = min((each.memory_stats() or {}).get("bytes_limit", math.inf) for each in devices)
    sizes = [] if device.platform == "cpu" else [size for size in SIZES if fits(*size, devices, memory)]
    return described | {"target": target_of(devices), "sizes": sizes}


def target_of(devices: list) -> str | None:
    """The --target of plan.py that these devices are, None if it has none."""
    kinds = [kind for kind in TARGETS if re.match(rf"{kind}\b(?!.* MIG )", devices[0].device_kind)]
    if not kinds or (devices[0].platform == "gpu" and len(devices) > 1):
        return None
    target = TARGETS[max(kinds, key=len)]
    if devices[0].platform == "gpu":
        return target
    sides = [max(along) - min(along) + 1 for along in zip(*(device.coords for device in devices), strict=True)]
    return f"{target}:{'x'.join(map(str, sides if target == 'v5p' else sides[:2]))}"


def fits(folder: str, config: str, weights: str, devices: list, memory: float) -> bool:
    """Whether the mesh that main.py takes divides the model, and its weights and the cache of eight rows fit into
    MEMORY_SHARE of `memory`, the bytes of a device."""
    convert = import_apart(folder, "convert")
    model = convert.model
    config = model.Config.from_dict(read_config(folder, config))
    try:
        mesh = model.make_mesh(*convert.mesh_shape(model.weights_of(config), devices), devices=devices)
        abstract = model.abstract_weights(config, mesh, "bfloat16", "int8" if weights == "int8" else None)
    except model.InputError:
        return False
    cache = model.abstract_cache(config, mesh, max(BATCHES), PROMPT + STEPS, "bfloat16")
    return model.stored_bytes((abstract, cache)) <= tables.MEMORY_SHARE * memory * mesh.size


def output_of(arguments: list[str], deadline: float) -> list:
    """The JSON lines that a Python program prints. Raises RuntimeError with one line if it fails or if it is not done
    by `deadline`, a time of time.monotonic()."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise RuntimeError("not begun: the minutes were over")
    try:
        finished = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError("stopped: the minutes were over") from error
    if finished.returncode:
        error = RuntimeError(error_line(finished.stderr, finished.returncode))
        error.add_note(finished.stderr[-4000:])
        raise error
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]


def error_line(stderr: str, status: int) -> str:
    """The line of standard error that names the error: the last that looks like one. XLA's fatal ones begin with F."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b|F\d{4} ", line)]
    if status < 0:
        return ": ".join([f"ended by {signal.Signals(-status).name}", *named[-1:]])[:200]
    return (named or lines or [f"status {status}"])[-1].removeprefix("error: ")[:200]


def model_of(folder: str, config: str, weights: str) -> list[str]:
    """The arguments of bench.py and plan.py that name a size."""
    return [folder, "--config", config, "--json", *(["--quantize", "int8"] if weights == "int8" else [])]


def measure(size: tuple[str, str, str], deadline: float) -> list[dict]:
    """The rows of a size: decoding at each batch and, of one row, prefill. Or one row with the error."""
    row = {"model": Path(size[1]).stem if size[1].endswith(".json") else size[1], "weights": size[2]}
    lengths = ["--prompt_len", str(PROMPT), "--steps", str(STEPS), "--rounds", "2", "--batch", *map(str, BATCHES)]
    try:
        (report,) = output_of(["benchmarks/bench.py", *model_of(*size), *lengths], deadline)
    except RuntimeError as error:
        batches = ", ".join(map(str, BATCHES))
        return [row | {"batch": batches, "error": str(error), "stderr": getattr(error, "__notes__", [])}]
    row |= {roof: report["device"][roof] for roof in ("read_bytes_per_s", "product_flops_per_s")}
    rows = []
    for found in report["results"]:
        row |= {"batch": found["batch"]}
        times = {"step": "decode", "measured_ms": 1e3 / found["decode_steps_per_s"]}
        rows.append(row | times | {"gb_per_s": found["bandwidth_gb_per_s"], "share": found["mbu"]})
        if found["batch"] == 1:
            times = {"step": "prefill", "measured_ms": 1e3 * found["prefill_s"]}
            rate = found["prefill_flops"] / found["prefill_s"] / 1e12
            rows.append(row | times | {"tflops": rate, "share": found["mfu"]})
    return rows


def estimate(size: tuple[str, str, str], row: dict, target: str, deadline: float) -> dict:
    """What plan.py says of the program of a row, or the error."""
    command = ["benchmarks/plan.py", *model_of(*size), "--target", target, "--max_seq_len", str(PROMPT + STEPS)]
    prefill = ["--prefill", str(PROMPT)] if row["step"] == "prefill" else []
    try:
        (plan,) = output_of([*command, "--batch", str(row["batch"]), *prefill], deadline)
    except RuntimeError as error:
        return {"error": f"no estimate: {error}", "stderr": getattr(error, "__notes__", [])}
    return {key: plan[key] for key in ("estimated_ms", "floor_ms", "hbm_bytes", "fits")}


def main() -> None:
    parser = ArgumentParser(__doc__)

    def positive(text):
        value = float(text)
        if not 0 < value < 1e6:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
        return value

    parser.add_argument("--minutes", type=positive, default=10.0, help="measure no longer than this, default 10")
    parser.add_argument(
        "--save", type=result_name, metavar="NAME", help="benchmarks/results/NAME.json, default the devices' name"
    )
    args = parser.parse_args()
    if not os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")  # of a GPU's memory; jax would take 0.75
    program = "import sys; sys.path.insert(0, 'benchmarks'); import check, json; print(json.dumps(check.describe()))"
    try:
        # This process leaves the devices to others.
        (described,) = output_of(["-c", program], time.monotonic() + 300)
    except RuntimeError as error:
        raise ValueError(f"jax finds no devices: {error}") from error
    begin = time.monotonic()
    deadline = begin + 60 * args.minutes
    sizes, target = described.pop("sizes"), described.pop("target")
    sizes = CPU_SIZES if described["platform"] == "cpu" else sizes
    name = args.save or re.sub(r"\W+", "-", f"check {described['kind']} {described['count']}".lower())
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")
    report = provenance(packages) | {"device": described, "target": target, "rows": []}
    print(f"{described['count']} x {described['kind']}, {described['driver']}", file=sys.stderr)
    if not sizes:
        raise ValueError(f"the memory of {described['count']} x {described['kind']} holds none of the released sizes")
    if not target:
        print("plan.py knows no such machine: there are no estimates", file=sys.stderr)
    save(name, report)
    status = 0
    try:
        size_of = []  # of each row
        for size in sizes:
            minutes = (time.monotonic() - begin) / 60
            print(f"{minutes:.1f} min: {size[1]}, {size[2]}", file=sys.stderr, flush=True)
            report["rows"] += measure(size, deadline - (15 * args.minutes if target else 0))
            size_of += [size] * (len(report["rows"]) - len(size_of))
            save(name, report)
        for size, row in zip(size_of, report["rows"], strict=True):
            if target and "measured_ms" in row:
                row |= estimate(size, row, target, deadline)
                save(name, report)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    print("\n".join(tables.check(report)))
    print(f"written: {RESULTS / name}.json", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    run(main)
