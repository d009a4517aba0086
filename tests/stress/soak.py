"""Decodes for a long time in one process, in batches that grow and shrink: nothing may pile up.

    python3 tests/stress/soak.py llama3 --minutes 20 [--dtype bfloat16] [--quantize int8]

Takes the folder's demo and prompts of 1 to 200 random tokens, 1 to 16 in a batch. The first half of the time meets
every shape; from then on the process's resident memory may not grow by more than a tenth, nor anything be compiled, or
the exit status is 1. Prints a line of figures a minute on standard error, at the end one of JSON.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from folders import ROOT, import_from, run

SHAPES = [(rows, length) for rows in (1, 2, 4, 8, 16, 8, 4, 2) for length in (1, 20, 200, 20)]


def resident_mb() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=["int8"])
    args = parser.parse_args()
    if not 1 <= args.minutes < math.inf:
        raise ValueError(f"--minutes {args.minutes} is less than 1")
    model, generate, convert = (import_from(args.folder, name) for name in ("model", "generate", "convert"))
    compilations = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(time.perf_counter())

    jax.monitoring.register_event_duration_secs_listener(listen)
    checkpoint = convert.open_checkpoint(ROOT / args.folder / "demo")
    config = checkpoint.config
    mesh = model.make_mesh(*convert.mesh_shape(model.weights_of(config), jax.devices()))
    weights = convert.load(checkpoint, mesh, args.dtype, args.quantize)
    chance, begin = random.Random(0), time.perf_counter()
    half, end = begin + 30 * args.minutes, begin + 60 * args.minutes
    tokens = batches = 0
    resident: list[tuple[float, float]] = []  # pairs of a time and megabytes
    while time.perf_counter() < end:
        rows, length = SHAPES[batches % len(SHAPES)]
        prompts = [[chance.randrange(config.vocab_size) for _ in range(length)] for _ in range(rows)]
        for step in generate.generate(weights, prompts, config, mesh, max_new_tokens=16 * rows):
            tokens += len(step)
        batches += 1
        resident.append((time.perf_counter(), resident_mb()))
        if len(resident) == 1 or resident[-1][0] // 60 != resident[-2][0] // 60:
            print(f"{batches} batches, {tokens} tokens, {resident[-1][1]:.0f} MB", file=sys.stderr)
    before = max(mb for at, mb in resident if at < half)
    after = max(mb for at, mb in resident if at >= half)
    late = sum(at >= half for at in compilations)
    figures = {"folder": args.folder, "minutes": args.minutes, "batches": batches, "tokens": tokens}
    figures |= {"resident_mb_first_half": before, "resident_mb_second_half": after}
    figures |= {"compilations": len(compilations), "compilations_second_half": late}
    print(json.dumps(figures))
    sys.exit(after > 1.1 * before or late > 0)


if __name__ == "__main__":
    run(main)
