"""What the model folders share, so that each can be copied alone: main.py, convert.py, generate.py, and the blocks of
model.py and fast.py.

A block is what stands below a heading: of fast.py, or of model.py after its first part, "The model". Blocks with the
same heading are the same text. So are definitions of the first part with the same name, except for what makes a model
its own.

    python3 tests/shared.py llama3            # all of llama3 that is shared, to every other folder
    python3 tests/shared.py llama3 Products   # one block alone, or one definition

What fast.py imports of model.py depends on its blocks: ruff says what is missing there, and what is not used.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("main.py", "convert.py", "generate.py")
RULE, SECOND_HALF = "# " + 117 * "-" + "\n", "# " + 117 * "=" + "\n# Running it\n"
OWN = {  # what makes a model its own
    "Config", "weights_of", "left_out", "attention", "feed_forward", "route", "weighed", "activation", "forward",
    "output_logits", "predict",
}  # fmt: skip
HEADING = re.compile(r"^# (?:-{117}\n# (.+)|={117}\n# (.+)\n# ={117})\n", re.M)


def folders() -> list[str]:
    """The model folders."""
    return sorted(file.parent.name for file in ROOT.glob("*/model.py"))


def blocks(folder: str, file: str = "model.py") -> dict[str, str]:
    """The text of each block of model.py or fast.py, its heading included, in order. Under "" stands what comes first:
    the first part of model.py, the imports of fast.py."""
    text = (ROOT / folder / file).read_text()
    half = text.index(SECOND_HALF if file == "model.py" else RULE)
    starts = [match for match in HEADING.finditer(text) if match.start() >= half]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    found = {match[1] or match[2]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)}
    assert len(found) == len(starts), f"{folder}/{file}: a heading stands there twice"
    return {"": text[:half]} | {heading: block.rstrip("\n") + "\n" for heading, block in found.items()}


def definitions(folder: str) -> dict[str, str]:
    """The text of each function, class and constant of a folder's first part, by its name, except for OWN."""
    text = blocks(folder)[""]
    lines, found = text.splitlines(keepends=True), {}
    for node in ast.parse(text).body:
        names = [node.name] if hasattr(node, "name") else [t.id for t in getattr(node, "targets", [])]
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        found |= {name: "".join(lines[start - 1 : node.end_lineno]) for name in names if name not in OWN}
    return found


def propagate(source: str, name: str | None = None) -> None:
    """Gives every other folder the files, the blocks and the definitions of `source`, or what bears a name alone."""
    wanted = blocks(source) | blocks(source, "fast.py") | definitions(source)
    for folder in folders():
        if folder == source:
            continue
        for file in FILES if name is None else ():
            (ROOT / folder / file).write_bytes((ROOT / source / file).read_bytes())
        for file, texts in (("model.py", blocks(folder) | definitions(folder)), ("fast.py", blocks(folder, "fast.py"))):
            path, text = ROOT / folder / file, (ROOT / folder / file).read_text()
            for key, old in texts.items():
                if key and key in wanted and name in (None, key) and old != wanted[key]:
                    text = text.replace(old, wanted[key])
                    print(f"{folder}/{file}: {key}")
            path.write_text(text)


if __name__ == "__main__":
    propagate(*sys.argv[1:])
