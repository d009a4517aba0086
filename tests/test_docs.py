"""The pages of docs/: their excerpts are the code's own lines, their flags exist, their links lead somewhere."""

import ast
import re

import pytest
from helpers import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = ["llama3/main.py", "llama3/convert.py", "benchmarks/plan.py", "benchmarks/bench.py"]
OTHER_FLAGS = set()  # of other programs, such as pytest
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"`([\w./]+\.py)`,\s+`(\w+)`[^`]*\Z")


def excerpts(text: str) -> list[tuple[str, str]]:
    """The python blocks of a page, each behind the paragraph before it."""
    blocks = list(BLOCK.finditer(text))
    assert {block[1] for block in blocks} <= {"python", "shell", "text"}, "a block of another kind would not be checked"
    assert 2 * len(blocks) == len(re.findall("```", text)), "a block that does not begin and end with a line"
    return [(text[: b.start()].rstrip().rpartition("\n\n")[2], b[2]) for b in blocks if b[1] == "python"]


def definition(file, name: str) -> str:
    """The lines of the definition `name` at the top level of a file."""
    text = file.read_text()
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        if name in (getattr(target, "id", getattr(target, "name", None)) for target in targets):
            return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{file} does not define {name}")


def check_excerpt(before: str, lines: str) -> None:
    """`lines` stand, as they are and one after the other, in the definition that the paragraph `before` names last."""
    named = NAMED.search(before)
    assert named, f"no `file.py`, `name` at the end of the paragraph before an excerpt:\n{before}"
    assert lines.strip(), f"an empty excerpt after:\n{before}"
    file = ROOT / named[1]
    assert file.is_file(), f"{named[1]}: no such file"
    source = "\n" + definition(file, named[2])
    assert "\n" + lines in source, f"not in {named[1]}, {named[2]}:\n{lines}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_excerpts_are_verbatim(page):
    for before, lines in excerpts(page.read_text()):
        check_excerpt(before, lines)


def test_excerpts_that_are_not_are_found():
    """What the test above would miss, it would miss in silence."""
    line = "    return max(shards // config.num_key_value_heads, 1)\n"
    check_excerpt("See `llama3/model.py`, `neighbours`:", line)
    for before, lines in [
        ("See `llama3/model.py`:", line),
        ("See above:", line),
        ("See `llama3/no.py`, `neighbours`:", line),
        ("See `llama3/model.py`, `no_such_name`:", line),
        ("See `llama3/model.py`, `local_heads`:", line),
        ("See `deepseek/model.py`, `neighbours`:", line),
        ("See `llama3/model.py`, `neighbours`:", line.strip() + "\n"),
        ("See `llama3/model.py`, `neighbours`:", line.replace("max", "min")),
        ("See `llama3/model.py`, `neighbours`:", line.replace(", 1)", ", 1")),
        ("See `llama3/model.py`, `neighbours`:", ""),
    ]:
        with pytest.raises(AssertionError):
            check_excerpt(before, lines)
    assert excerpts(f"No.\n\nSee `a.py`,\n`b`:\n\n```python\n{line}```\n") == [("See `a.py`,\n`b`:", line)]
    for text in (f"```python {line}```", f"```py\n{line}```\n", f"- a\n  ```python\n{line}  ```\n"):
        with pytest.raises(AssertionError):
            excerpts(text)


def test_there_are_pages_and_excerpts():
    assert {page.name for page in PAGES} >= {"parallelism.md", "measuring.md"}
    assert len(excerpts((ROOT / "docs" / "parallelism.md").read_text())) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_exist(page):
    defined = {"dp", "ep", "tp"}  # main.py and bench.py add these in a loop
    for program in PROGRAMS:
        defined |= set(re.findall(r'\b(?:add|add_argument)\(\s*"--(\w+)"', (ROOT / program).read_text()))
    mentioned = set(re.findall(r"(?<![\w-])--([a-z]\w*)", page.read_text()))
    assert mentioned <= defined | OTHER_FLAGS, mentioned - defined - OTHER_FLAGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_programs_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link} leads nowhere"
    for program in re.findall(r"python3 ([\w/]+\.py)", text):
        assert (ROOT / program).is_file(), f"{page.name}: {program}: no such program"
