"""Damaged checkpoints: each of thousands must be refused in one line, or be one that can be read.

    python3 tests/stress/fuzz.py llama3 --headers 10000 --configs 2000 [--seed 0]

Takes the folder's demo, damages the header of its safetensors file (bits, bytes, lengths, numbers, names, entries) or
the values of its config.json, and opens it as loading does. What is not refused is read, every tensor of it. Prints
how many ended how; whatever else happens, an exception, more than a few seconds or a gigabyte, is printed with the
number of the case, and makes the exit status 1. Case n of a seed is always the same.
"""

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from folders import ROOT, import_from, run

NUMBERS = [0, -1, 1, 7, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64, 10**30, -(10**30), 0.5, 1e308, -1e-308]
OTHERS = [None, True, False, "", "1", "a" * 10_000, [], [0], [[]], {}, {"a": 1}, "../../etc/passwd", "\0", "\ud800"]
SECONDS, BYTES = 5, 2**30


class TooSlow(BaseException):  # no Exception: the loader turns some of those into a refusal
    pass


def damaged_header(chance: random.Random, file: bytes) -> bytes:
    """A safetensors file with another header: its length of 8 bytes, or the JSON object that follows."""
    size = int.from_bytes(file[:8], "little")
    text, body = bytearray(file[8 : 8 + size]), file[8 + size :]
    kind = chance.randrange(8)
    if kind == 0:  # some bits
        for _ in range(chance.choice([1, 2, 10, 100])):
            text[chance.randrange(size)] ^= 1 << chance.randrange(8)
    elif kind == 1:  # a stretch of bytes
        begin = chance.randrange(size)
        text[begin : begin + chance.randrange(1, 40)] = chance.randbytes(chance.randrange(40))
    elif kind == 2:  # the length alone
        return chance.choice([chance.randbytes(8), chance.choice(NUMBERS[:9]).to_bytes(9, "little", signed=True)[:8],
                              (size + chance.randrange(-9, 9)).to_bytes(8, "little")]) + file[8:]  # fmt: skip
    elif kind == 3:  # the end of the file
        return file[: chance.randrange(len(file))]
    else:
        text = changed_json(chance, json.loads(text), kind)
    if chance.random() < 0.5:
        size = len(text)
    return size.to_bytes(8, "little") + bytes(text) + body


def changed_json(chance: random.Random, header: dict, kind: int) -> bytes:
    """A header with other entries."""
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    if kind == 4:  # a number
        place = entry[chance.choice(["shape", "data_offsets"])]
        place[chance.randrange(len(place))] = chance.choice(NUMBERS)
    elif kind == 5:  # a value
        entry[chance.choice(list(entry))] = chance.choice(NUMBERS + OTHERS)
    elif kind == 6:  # a name
        del header[name]
        header[chance.choice([*header, "", "\0", "../" + name, name + " ", "a" * 100_000])] = entry
    else:  # an entry that is missing, or there twice, or nested deeply
        text = json.dumps(header)
        piece = f"{json.dumps(name)}: {json.dumps(entry)}"
        deep = "[" * 100_000 + "]" * 100_000
        return text.replace(piece, chance.choice([f"{piece}, {piece}", f'"x": {deep}', '"x": {}', ""]), 1).encode()
    return json.dumps(header).encode("utf-8", "surrogatepass")


def damaged_config(chance: random.Random, config: dict) -> dict:
    """A config.json with some other values, at the top or one level below."""
    config = json.loads(json.dumps(config))
    for _ in range(chance.choice([1, 1, 2, 5])):
        table = chance.choice([config, *(value for value in config.values() if isinstance(value, dict) and value)])
        name = chance.choice(list(table))
        if chance.random() < 0.1:
            del table[name]
        else:
            table[name] = chance.choice(NUMBERS + OTHERS)
    return config


def open_and_read(convert, path: Path) -> str:
    """How a checkpoint ends: "refused" or "read"."""
    try:
        checkpoint = convert.open_checkpoint(path)
    except convert.InputError as error:
        if "\n" in str(error).strip() or len(str(error)) > 2000:
            raise ValueError("more than a line") from error
        return "refused"
    for tensor in checkpoint.tensors.values():
        tensor.read().sum()
    return "read"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--headers", type=int, default=10_000)
    parser.add_argument("--configs", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    convert, demo = import_from(args.folder, "convert"), ROOT / args.folder / "demo"
    file, config = (demo / "model.safetensors").read_bytes(), json.loads((demo / "config.json").read_text())

    def give_up(*_):
        raise TooSlow(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, give_up)
    counts = Counter()
    with tempfile.TemporaryDirectory() as path:
        path = Path(shutil.copytree(demo, Path(path) / "checkpoint"))
        open_and_read(convert, path)  # what this takes once does not count
        cases = [("header", i) for i in range(args.headers)] + [("config", i) for i in range(args.configs)]
        for kind, i in cases:
            chance = random.Random(f"{args.seed} {kind} {i}")
            damaged = kind == "config"
            (path / "model.safetensors").write_bytes(file if damaged else damaged_header(chance, file))
            (path / "config.json").write_text(json.dumps(damaged_config(chance, config) if damaged else config))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.alarm(SECONDS)
            try:
                end = open_and_read(convert, path)
                if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > BYTES:
                    raise MemoryError("more than a gigabyte")
            except (Exception, TooSlow):
                end = "failed"
                print(f"{kind} {i} of seed {args.seed}:", traceback.format_exc(), file=sys.stderr)
            finally:
                signal.alarm(0)
            counts[f"{kind} {end}"] += 1
    print(json.dumps({"folder": args.folder, **dict(sorted(counts.items()))}))
    sys.exit(any(name.endswith("failed") for name in counts))


if __name__ == "__main__":
    run(main)
