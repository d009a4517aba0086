"""The notebook of docs/hosts.md, its commands and cells as they stand there: two engines of two virtual devices each
print what main.py prints with four."""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil  # which ipyparallel needs
import pytest

ROOT = Path(__file__).resolve().parent.parent  # not from helpers, which need torch
IPYTHON = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
print(shell.user_ns["prompt"])
"""


def from_the_page() -> tuple[str, list[str], str]:
    """The commands, the notebook's cells, and what it prints."""
    page = (ROOT / "docs" / "hosts.md").read_text()
    before, marker, after = page.partition("(run by `tests/test_ipyparallel.py`):")
    assert marker and marker not in after
    block = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    (_, commands), ((_, cells), (_, printed)) = block.findall(before)[-1], block.findall(after)[:2]
    return commands, [cell.strip() for cell in cells.split("# %%\n") if cell], printed


def processes_of(folder: str) -> list:
    """Of the controller, the engines and what they start in turn; some of it outlives its parents."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("IPYTHONDIR") == folder:
                found.append(process)
    return found


@pytest.fixture
def environment(tmp_path):
    """Of a user who has nothing in IPython's folder. What runs in it ends with the test."""
    folder = str(tmp_path)
    yield os.environ | {"IPYTHONDIR": folder, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    deadline = time.monotonic() + 30
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 5)
    assert not left


@pytest.mark.slow
def test_the_notebook_of_the_page(environment):
    commands, cells, printed = from_the_page()
    assert len(cells) == 6 and sum(cell.startswith("%%px\n") for cell in cells) == 2
    options = {"cwd": ROOT, "env": environment, "text": True}
    with open(os.devnull, "w") as nowhere:
        subprocess.run(["bash", "-c", commands], check=True, timeout=60, stdout=nowhere, stderr=nowhere, **options)
    notebook, given = [sys.executable, "-c", IPYTHON], json.dumps(cells)
    ran = subprocess.run(notebook, input=given, capture_output=True, timeout=180, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, answers, prompt = ran.stdout.splitlines()
    assert answers + "\n" == printed, ran.stdout
    assert not psutil.wait_procs(processes_of(environment["IPYTHONDIR"]), 60)[1], "the last cell does not end all"

    command = [sys.executable, "llama3/main.py", "--tp", "4", "--prompt", prompt]
    options["env"] = environment | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    alone = subprocess.run(command, capture_output=True, timeout=180, **options)
    assert alone.returncode == 0, alone.stderr
    assert ast.literal_eval(answers) == [alone.stdout.strip()] * 2
