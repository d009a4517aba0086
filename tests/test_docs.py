"""The pages: their excerpts are the code's own lines, their flags and links exist, their tables are of the results."""

import ast
import re
import sys
import xml.etree.ElementTree

import pytest
from helpers import ROOT, import_folder
from shared import folders
from transformers import dependency_versions_table

sys.path.insert(0, str(ROOT / "benchmarks"))
import architecture
import tables

PAGES = sorted((ROOT / "docs").glob("*.md"))
LINKING = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
PROGRAMS = ["llama3/main.py", "llama3/convert.py"]
PROGRAMS += ["benchmarks/plan.py", "benchmarks/bench.py", "benchmarks/precision.py", "benchmarks/check.py"]
OTHER_FLAGS = {  # of other programs (pytest, say, or here gcloud, Slurm, mpirun and ipyparallel), by page
    "performance": {"xla_backend_extra_options"},
    "hosts": {"accelerator", "command", "exclusive", "file", "gpus", "host", "ip", "nodes", "ntasks", "python",
              "version", "worker", "zone"},
}  # fmt: skip
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = re.compile(r"\(run by `(tests/test_\w+\.py)`\):\Z")
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


def check_run(page: str, text: str, before: str) -> bool:
    """Whether the paragraph `before` says that a test runs the block after it. Then the test must read this page, and
    the page may say so once, since the test takes one block."""
    run = RUN.search(before)
    if run:
        assert (ROOT / run[1]).is_file() and f'"{page}"' in (ROOT / run[1]).read_text(), f"{run[1]} does not run {page}"
        assert text.count(run[0]) == 1, f"{page}: more than one block {run[0]}"
    return bool(run)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_excerpts_are_verbatim(page):
    text = page.read_text()
    for before, lines in excerpts(text):
        if not check_run(page.name, text, before):
            check_excerpt(before, lines)


def test_excerpts_that_are_not_are_found():
    """What the test above would miss, it would miss in silence."""
    line = "    return sharers(config.num_key_value_heads, shards)\n"
    check_excerpt("See `llama3/model.py`, `cache_sharers`:", line)
    for before, lines in [
        ("See `llama3/model.py`:", line),
        ("See above:", line),
        ("See `llama3/no.py`, `cache_sharers`:", line),
        ("See `llama3/model.py`, `no_such_name`:", line),
        ("See `llama3/model.py`, `split_heads`:", line),
        ("See `deepseek/model.py`, `cache_sharers`:", line),
        ("See `llama3/model.py`, `cache_sharers`:", line.strip() + "\n"),
        ("See `llama3/model.py`, `cache_sharers`:", line.replace("sharers", "divisors")),
        ("See `llama3/model.py`, `cache_sharers`:", line.replace(")", "")),
        ("See `llama3/model.py`, `cache_sharers`:", ""),
    ]:
        with pytest.raises(AssertionError):
            check_excerpt(before, lines)
    assert excerpts(f"No.\n\nSee `a.py`,\n`b`:\n\n```python\n{line}```\n") == [("See `a.py`,\n`b`:", line)]
    for text in (f"```python {line}```", f"```py\n{line}```\n", f"- a\n  ```python\n{line}  ```\n"):
        with pytest.raises(AssertionError):
            excerpts(text)


def test_only_what_a_test_runs_is_no_excerpt():
    said = "As here (run by `tests/test_ipyparallel.py`):"
    assert check_run("hosts.md", said, said)
    for before in ("As here (run by a test):", f"{said} And:", "See `llama3/model.py`, `cache_sharers`:"):
        assert not check_run("hosts.md", before, before)
    for page, text, before in [
        ("parallelism.md", said, said),
        ("hosts.md", said + said, said),
        ("hosts.md", said, said.replace("ipyparallel", "no_such")),
    ]:
        with pytest.raises(AssertionError):
            check_run(page, text, before)


def test_there_are_pages_and_excerpts():
    assert {page.name for page in PAGES} >= {"parallelism.md", "measuring.md", "hosts.md"}
    assert len(excerpts((ROOT / "docs" / "parallelism.md").read_text())) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_exist(page):
    defined = {"dp", "ep", "tp"}  # main.py and bench.py add these in a loop
    for program in PROGRAMS:
        defined |= set(re.findall(r'\b(?:add|add_argument)\(\s*"--(\w+)"', (ROOT / program).read_text()))
    mentioned = set(re.findall(r"(?<![\w-])--([a-z]\w*)", page.read_text()))
    defined |= OTHER_FLAGS.get(page.stem, set())
    assert mentioned <= defined, mentioned - defined


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_programs_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link} leads nowhere"
    for program in re.findall(r"python3 ([\w/]+\.py)", text):
        assert any((place / program).is_file() for place in (ROOT, page.parent)), f"{page.name}: {program}"


def test_tables_are_those_of_the_results():
    assert tables.MEMORY_SHARE == import_folder("llama3").generate.MEMORY_SHARE
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert "<!-- end -->" in text and tables.filled(text) == text, f"{page}: run python3 benchmarks/tables.py"


def test_pictures_are_those_of_the_models():
    for folder in folders():
        file = ROOT / folder / "architecture.svg"
        drawn = architecture.draw(folder)
        xml.etree.ElementTree.fromstring(drawn)
        assert drawn == file.read_text(), f"{file}: run python3 benchmarks/architecture.py"
        assert f"({file.name})" in (ROOT / folder / "README.md").read_text()


def test_an_older_jinja2_is_not_enough():
    """pip leaves an older one in place, which transformers refuses when a template is used."""
    asked = re.search(r'"(jinja2[^"]*)"', (ROOT / "pyproject.toml").read_text())[1]
    assert asked == dependency_versions_table.deps["jinja2"]
