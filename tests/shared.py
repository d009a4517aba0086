"""What the model folders share, so that each can be copied alone: main.py, convert.py, and the blocks of model.py.

A block is what stands below a heading of model.py after its first part, "The model". Blocks with the same heading are
the same text.

    python3 tests/shared.py llama3            # llama3's main.py, convert.py and blocks to every other folder
    python3 tests/shared.py llama3 Decoding   # one block alone
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("main.py", "convert.py")
SECOND_HALF = "# " + 117 * "=" + "\n# Running it\n"
HEADING = re.compile(r"^# (?:-{117}\n# (.+)|={117}\n# (.+)\n# ={117})\n", re.M)


def folders() -> list[str]:
    """The model folders."""
    return sorted(file.parent.name for file in ROOT.glob("*/model.py"))


def blocks(folder: str) -> dict[str, str]:
    """The text of each block of a folder's model.py, its heading included, in order. Under "" stands the first part."""
    text = (ROOT / folder / "model.py").read_text()
    half = text.index(SECOND_HALF)
    starts = [match for match in HEADING.finditer(text) if match.start() >= half]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    found = {match[1] or match[2]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)}
    assert len(found) == len(starts), f"{folder}/model.py: a heading stands there twice"
    return {"": text[:half]} | {heading: block.rstrip("\n") + "\n" for heading, block in found.items()}


def propagate(source: str, heading: str | None = None) -> None:
    """Gives every other folder the files and the blocks of `source`, or one block alone."""
    wanted = blocks(source)
    for folder in folders():
        if folder == source:
            continue
        for file in FILES if heading is None else ():
            (ROOT / folder / file).write_bytes((ROOT / source / file).read_bytes())
        path, text = ROOT / folder / "model.py", (ROOT / folder / "model.py").read_text()
        for name, block in blocks(folder).items():
            if name and name in wanted and heading in (None, name) and block != wanted[name]:
                text = text.replace(block, wanted[name])
                print(f"{folder}/model.py: {name}")
        path.write_text(text)


if __name__ == "__main__":
    propagate(*sys.argv[1:])
