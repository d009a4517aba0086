"""Properties that hold for any input (hypothesis): config.json, safetensors headers and flags are taken, or refused in
one line, and nothing else happens. tests/stress/fuzz.py tries thousands more."""

import json
import random
import shutil
import subprocess
import sys
import typing

import pytest
from helpers import ROOT, import_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared import folders

FOLDERS = {name: import_folder(name) for name in folders()}
sys.path.insert(0, str(ROOT / "tests" / "stress"))
import fuzz

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3))
NUMBERS = st.sampled_from(fuzz.NUMBERS + fuzz.OTHERS)
several = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module", params=FOLDERS)
def demo(request, tmp_path_factory):
    """A folder's modules, a copy of its demo, and the values of its config.json."""
    path = tmp_path_factory.mktemp("hostile") / "demo"
    shutil.copytree(ROOT / request.param / "demo", path)
    return FOLDERS[request.param], path, json.loads((path / "config.json").read_text())


def places(config):
    """The names of a config.json: of its top level, and pairs with those in its tables."""
    tables = [(name, inner) for name, value in config.items() if isinstance(value, dict) for inner in value]
    return [(name,) for name in config] + tables


@settings(several, max_examples=70)
@given(data=st.data())
def test_any_config(demo, data):
    """What is taken has fields of the declared types, and can be compared with the tensors that are there."""
    modules, path, config = demo
    config = json.loads(json.dumps(config))
    for place in data.draw(st.lists(st.sampled_from(places(config)), min_size=1, max_size=3)):
        table = config if len(place) == 1 else config[place[0]]
        if isinstance(table, dict):  # not replaced yet
            table[place[-1]] = data.draw(VALUES | NUMBERS)
    (path / "config.json").write_text(json.dumps(config))
    try:
        checkpoint = modules.convert.open_checkpoint(path)
    except modules.model.InputError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return
    for name, kind in typing.get_type_hints(modules.model.Config, vars(modules.model)).items():
        if isinstance(kind, type):  # no union, no tuple of something
            assert type(getattr(checkpoint.config, name)) is kind, name
    assert checkpoint.tensors


@pytest.mark.parametrize("demo", ["llama3", "deepseek"], indirect=True)
@several
@given(seed=st.integers())
def test_any_header(demo, seed):
    modules, path, config = demo
    (path / "config.json").write_text(json.dumps(config))
    whole = (path / "model.safetensors").read_bytes()
    try:
        (path / "model.safetensors").write_bytes(fuzz.damaged_header(random.Random(seed), whole))
        assert fuzz.open_and_read(modules.convert, path) in ("refused", "read")
    finally:
        (path / "model.safetensors").write_bytes(whole)


FLAGS = ["--prompt", "--max_new_tokens", "--tp", "--dp", "--temperature", "--top_p", "--top_k", "--seed", "--output"]
FLAGS += ["--dtype", "--quantize", "--coordinator", "--num_processes", "--process_id", "--max_seq_len", "--raw", "--"]
WORDS = st.sampled_from([*FLAGS, "1", "0", "-1", "nan", "1e999", "json", "int8", "9" * 400, "a:1"]) | st.text(
    max_size=5
)


@several
@given(arguments=st.lists(WORDS, max_size=8))
def test_any_flags(arguments):
    main, patch = FOLDERS["llama3"].main, pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(sys, "argv", ["main.py", *arguments])
        try:
            args = main.parse_arguments()
        except main.InputError as error:
            assert str(error)
            return
        except SystemExit as stop:
            assert stop.code == 0  # --help, or an abbreviation of it
            return
    assert args.max_new_tokens > 0 and args.temperature >= 0 and 0 < args.top_p <= 1 and args.top_k >= 0


def test_the_fuzzer():
    command = [sys.executable, ROOT / "tests" / "stress" / "fuzz.py", "deepseek", "--headers", "200", "--configs", "50"]
    finished = subprocess.run(command, capture_output=True, text=True)
    counts = json.loads(finished.stdout)
    assert finished.returncode == 0, finished.stderr
    assert counts["header refused"] + counts["header read"] == 200 and counts["header refused"] > 150
    assert counts["config refused"] + counts["config read"] == 50
