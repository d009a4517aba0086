"""The notebooks run from the top, and what they compare is equal."""

import json
import re
import subprocess
import sys

import matplotlib
import pytest
from helpers import MODULES, ROOT, environment_of_users


@pytest.mark.sampled
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


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="it clones the repository")
def test_a_first_try(tmp_path):
    """On CPUs, by IPython, as on Kaggle and Colab: it installs nothing here, needs no hub, and takes fewer minutes."""
    changes = {
        "https://github.com/OWNER/open-llms-in-jax": f"file://{ROOT}",
        "-m pip install": "-c pass",
        "HuggingFaceTB/SmolLM2-135M-Instruct": "llama3/demo",
        "-m device --minutes 10": "-m device -k routing -n 0",
        "check.py --minutes 10": "check.py --minutes 0.1",
    }
    cells = json.loads((ROOT / "notebooks" / "try.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "try.ipy").write_text(text)
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "try.ipy"]
    environment = environment_of_users(IPYTHONDIR=str(tmp_path / "ipython"))
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert "The capital of France is Paris." in finished.stdout, finished.stdout + finished.stderr
    assert "no accelerator . bfloat16" in finished.stdout and "CPU cores" in finished.stdout + finished.stderr
    assert " passed" in finished.stdout and "| model | weights | step |" in finished.stdout, finished.stdout
    assert "Traceback" not in finished.stdout + finished.stderr
