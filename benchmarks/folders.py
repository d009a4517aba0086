"""What the programs of this folder share: model folders and their released sizes, files of results, errors."""

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def import_from(folder: str, module: str) -> ModuleType:
    """A module of a model folder: model, fast, generate, convert, main. One process uses one folder: all have these
    names. fast.py fills the tables of model.py, whichever is asked for.

    Raises ValueError where there is no such folder.
    """
    path = ROOT / folder
    if not (path / f"{module}.py").is_file():
        raise ValueError(f"{folder}: no such model folder")
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    importlib.import_module("fast")
    return importlib.import_module(module)


def import_all(folder: str) -> SimpleNamespace:
    """The modules of a model folder that load and decode."""
    return SimpleNamespace(**{name: import_from(folder, name) for name in ("model", "generate", "convert", "main")})


def import_apart(folder: str, module: str = "model") -> ModuleType:
    """import_from for programs that need several folders: sys.modules keeps nothing of them."""
    names = "model", "fast", "generate", "convert"
    for name in names:
        sys.modules.pop(name, None)
    found = import_from(folder, module)
    for name in names:
        sys.modules.pop(name, None)
    sys.path.remove(str(ROOT / folder))
    return found


def read_config(folder: str, name: str, layers: int | None = None) -> dict:
    """config.json of a released size of the folder, or of the file `name`, cut to `layers` layers.

    Raises ValueError where there is neither, no JSON object, or fewer layers.
    """
    released = {file.stem: file for file in sorted((ROOT / folder / "configs").glob("*.json"))}
    file = released.get(name, Path(name))
    if not file.is_file():
        raise ValueError(f"--config {name} is neither a file nor one of {', '.join(released)}")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a JSON object")
    if layers is not None:
        text = config.get("text_config", config)
        key = "n_layer" if "n_layer" in text else "num_hidden_layers"
        if not 0 < layers <= text.get(key, 0):
            raise ValueError(f"--layers {layers} is not from 1 to the model's {text.get(key)}")
        text[key] = layers
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            if text.get(name):
                text[name] = text[name][:layers]
    return config


def with_drafts(config, args):
    """The configuration for --draft, with an extra layer for mtp. Raises ValueError if the folder knows of none."""
    if args.draft != "mtp":
        return config
    if not hasattr(config, "uses_extra_layer"):
        raise ValueError(f"{args.folder} has no layer of multi-token prediction for --draft mtp")
    return dataclasses.replace(config, uses_extra_layer=True)


def check_batch(batch: int, mesh) -> None:
    """Raises ValueError for a batch that dp does not divide."""
    if batch % mesh.shape["dp"]:
        raise ValueError(f"--batch {batch} is no multiple of dp {mesh.shape['dp']}")


class ArgumentParser(argparse.ArgumentParser):
    """argparse, with its errors in the one form that all errors have here."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> None:
        raise ValueError(message)


def count(text: str) -> int:
    """A positive number of the command line."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def result_name(text: str) -> str:
    """The name of a file of results on the command line, without .json, or its path."""
    if text.endswith(".json") or not (RESULTS / f"{text}.json").parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no name without .json, or in a folder that there is not")
    return text


def shape_of(weight) -> tuple[int, ...]:
    """The shape of a weight that weights_of declares, on all devices together, without room for zeros."""
    shape = weight.shape(sum(dataclasses.replace(part, multiple=1).rows_per_device(1) for part in weight.parts))
    return (weight.experts, *shape) if weight.experts else shape


def split_of(weight) -> str:
    """How devices split it."""
    if weight.split is None:
        return "experts over ep" if weight.experts else "whole on each device"
    split = f"{('rows', 'columns')[weight.split]} over {' x '.join(weight.axes())}"
    return f"experts over ep, {split}" if weight.experts else split


def flops(model: ModuleType, config, batch: int, first: int, last: int) -> int:
    """Operations that the tokens of `batch` rows at positions first to last - 1 need, on all devices.

    The output head counts once a row, and so do layers that take the last token alone.
    """
    active = 0  # numbers of the matrices that a token meets, times tokens
    for i, layer in enumerate(model.weights_of(config)["layers"]):
        for weight in layer.values():
            shape = shape_of(weight)
            if len(shape) > 1:
                chosen = config.num_experts_per_tok / weight.experts if weight.experts else 1
                active += math.prod(shape) * chosen * (last - first_taken(config, i, first, last))
    attention = attention_flops(config, first, last)
    return batch * (2 * int(active) + attention + 2 * config.vocab_size * config.hidden_size)


def first_taken(config, layer: int, first: int, last: int) -> int:
    """The first of the positions first to last - 1 that a layer computes anything for: the last one of them, if later
    tokens need nothing of the layer."""
    own = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    return first if layer < own else last - 1


def attention_flops(config, first: int, last: int) -> int:
    """Operations of attention for the tokens of a row at positions first to last - 1, in all layers, on all devices."""
    total = 0
    for layer in range(config.num_hidden_layers):
        if hasattr(config, "kv_lora_rank"):  # two widths; what expands latents is among the matrices
            widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        else:
            widths = 2 * (config.kind(layer) if hasattr(config, "kind") else config).head_dim
        positions = range(first_taken(config, layer, first, last), last)
        total += widths * sum(tokens_attended(config, layer, position) for position in positions)
    return 2 * config.num_attention_heads * total


def tokens_attended(config, layer: int, position: int) -> int:
    """How many tokens the one at `position` attends to in a layer: none where it has a state, which is little work."""
    mask = config.mask(layer) if hasattr(config, "mask") else (None, None, None)
    if mask is None:
        return 0
    window, chunk, *_ = mask
    return position % chunk + 1 if chunk else min(position + 1, window or position + 1)


def provenance(packages: tuple[str, ...]) -> dict:
    """What is needed to repeat a measurement: command, commit, date, host, versions of those packages installed."""
    file = Path("/proc/cpuinfo")  # where Linux tells the processor's name
    names = re.findall(r"model name\s*: (.*)", file.read_text()) if file.exists() else []
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": shlex.join(["python3", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "host": {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count()},
        "versions": versions,
    }


def commit() -> str | None:
    """The commit of this repository, with + if files have changed since; None without git."""
    try:
        described = ["git", "-C", ROOT, "describe", "--always", "--dirty=+"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def save(name: str, report: dict) -> None:
    """Writes benchmarks/results/NAME.json."""
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def run(main) -> None:
    """Calls main(). What the user can mend ends with one line on standard error and status 2, an interrupt with 130."""
    try:
        main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    # A model's InputError is a ValueError, and jax's errors are RuntimeErrors.
    except (MemoryError, ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in line:
            line = f"out of memory ({line[:300]})"
        elif isinstance(error, ModuleNotFoundError):
            line += "; pip install '.[bench]'"
        elif isinstance(error, RuntimeError):
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
