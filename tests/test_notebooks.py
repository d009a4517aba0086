"""The notebooks run from the top, and what they compare is equal."""

import json
import re
import sys

import matplotlib
import pytest
from helpers import MODULES, ROOT


@pytest.mark.parametrize("name", ["llama3", "deepseek"])
def test_it_runs_from_the_top(name, monkeypatch, capsys):
    """In this process, which has their eight devices already. A newcomer's starts in their folder, too."""
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    matplotlib.use("agg")
    cells, namespace = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"], {}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), namespace)
    finally:
        matplotlib.pyplot.close("all")
        for module in MODULES:
            sys.modules.pop(module, None)
    printed = capsys.readouterr().out
    differences = re.findall(r"largest difference:? ([\d.e+-]+)", printed)
    assert differences and all(float(difference) < 1e-4 for difference in differences), printed
    if name == "llama3":
        assert printed.count("The capital of France is Paris.") == 2
    else:
        (prefilled, decoded) = re.findall(r"^(?:prefill|decode): +(\S+)", printed, re.M)
        assert prefilled == decoded
