"""Kills a conversion at random moments: what is incomplete may never open, and the run that comes to its end must leave
the same bytes as one that nobody killed.

    python3 tests/stress/kill.py FOLDER --config NAME [--layers N] [--kills 50] [--shards 8] [--quantize int8]

Random bfloat16 weights of that size are written to a temporary folder, three times their bytes. A conversion that is
complete before its kill begins anew. Prints one line of JSON; what fails is named on standard error, and makes
the exit status 1.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from folders import ROOT, import_from, read_config, run

PROGRAM = "import convert; convert.SHARD_BYTES = {}; print('started', flush=True); convert.run(convert.main)"


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, by name."""
    found = {}
    for path in folder.iterdir():
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, convert = (import_from(args.folder, module) for module in ("model", "convert"))
    raw_config = read_config(args.folder, args.config, args.layers)
    shapes = {}
    for weight in jax.tree.leaves(model.weights_of(model.Config.from_dict(raw_config))):
        for name, shape in weight.tensors().items():
            shapes[name] = convert.swapped(shape) if weight.is_packed() else shape
    counts = {"kills": 0, "refused": 0, "complete": 0, "failed": 0}
    with tempfile.TemporaryDirectory() as folder:
        source, whole, killed = (Path(folder, name) for name in ("source", "whole", "killed"))
        source.mkdir()
        draw, bfloat16 = np.random.default_rng(args.seed), ml_dtypes.bfloat16
        tensors = {name: draw.standard_normal(shape, np.float32).astype(bfloat16) for name, shape in shapes.items()}
        total = sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, source / "model.safetensors")
        del tensors
        (source / "config.json").write_text(json.dumps(raw_config))

        def start(output: Path) -> subprocess.Popen:
            """A conversion, from when it has imported its libraries."""
            command = [sys.executable, "-c", PROGRAM.format(total // args.shards), "--model_path", source]
            command += ["--output", output, *(["--quantize", args.quantize] if args.quantize else [])]
            environment = os.environ | {"PYTHONPATH": str(ROOT / args.folder), "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            process.stdout.readline()
            return process

        def finish(output: Path) -> float:
            """Seconds of a conversion that nobody kills."""
            process, begin = start(output), time.perf_counter()
            if process.wait() != 0:
                raise ValueError(f"the conversion ends with status {process.returncode}")
            return time.perf_counter() - begin

        seconds, chance = finish(whole), random.Random(args.seed)
        wanted = digests(whole)
        while counts["kills"] < args.kills:
            process = start(killed)
            time.sleep(chance.uniform(0, seconds))
            process.kill()
            counts["kills"] += process.wait() == -signal.SIGKILL
            try:
                convert.open_checkpoint(killed)
            except convert.InputError:
                counts["refused"] += 1
                continue
            is_same = digests(killed) == wanted
            counts["complete" if is_same else "failed"] += 1
            if not is_same:
                print(f"kill {counts['kills']}: what opens is not the whole", file=sys.stderr)
            shutil.rmtree(killed)
        finish(killed)
        if digests(killed) != wanted:
            counts["failed"] += 1
            print("what is left at the end is not the whole", file=sys.stderr)
    print(json.dumps({"folder": args.folder, "gigabytes": total / 1e9, "seconds": seconds, **counts}))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    run(main)
