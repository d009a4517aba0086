"""No folder imports another: what they share is the same text in each."""

import ast
import json

import pytest
from helpers import import_folder
from shared import FILES, ROOT, blocks, definitions, folders, propagate

REMEDY = "python3 tests/shared.py FOLDER takes FOLDER's text to the others"


def test_one_file_differs():
    for file in FILES:
        assert len({(ROOT / folder / file).read_bytes() for folder in folders()}) == 1, f"{file}: {REMEDY}"


def test_blocks_of_one_heading_are_the_same_text():
    texts = {}
    for folder in folders():
        for heading, block in (*blocks(folder).items(), *blocks(folder, "fast.py").items()):
            texts.setdefault(heading, {}).setdefault(block, []).append(folder)
    del texts[""]
    assert len(texts) > 10
    differ = {heading: min(found.values(), key=len) for heading, found in texts.items() if len(found) > 1}
    assert not differ, f"{REMEDY}; what only one of them needs is a block under another heading"


def test_a_name_of_the_first_part_is_one_text():
    texts = {}
    for folder in folders():
        for name, text in definitions(folder).items():
            texts.setdefault(name, set()).add(text)
    assert {"MODEL_AXES", "mlp", "softmax_scale"} <= set(texts)
    assert not [name for name, found in texts.items() if len(found) > 1], REMEDY


def test_blocks_have_one_order():
    for file in ("model.py", "fast.py"):
        orders = [list(blocks(folder, file)) for folder in folders()]
        for order in orders:
            for other in orders:
                assert [h for h in order if h in other] == [h for h in other if h in order]


def test_below_the_model_are_blocks_alone():
    """The first part defines the model, the blocks what runs it, and neither defines what the other does."""
    for folder in folders():
        halves = list(blocks(folder).values())
        first = {node.name for node in ast.parse(halves[0]).body if hasattr(node, "name")}
        second = {node.name for node in ast.parse("".join(halves[1:])).body if hasattr(node, "name")}
        assert not first & second
        assert {"Config", "weights_of", "attention", "feed_forward", "forward", "output_logits"} <= first
        assert {"abstract_weights", "cached_attention", "linear"} <= second


def test_a_changed_text_is_found_and_mended(tmp_path, monkeypatch):
    import shared

    for folder in ("llama3", "glm4"):
        (tmp_path / folder).mkdir()
        for file in ("model.py", "fast.py", *FILES):
            (tmp_path / folder / file).write_bytes((ROOT / folder / file).read_bytes())
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    propagate("llama3")  # of what differs already, the tests above tell
    before = [(tmp_path / "glm4" / file).read_bytes() for file in ("model.py", "fast.py", *FILES)]
    (tmp_path / "glm4" / "convert.py").write_text("")
    for old, new in (("FEW = 8", "FEW = 9"), ('"ep", "tp")', '"tp", "ep")')):
        path = tmp_path / "glm4" / "model.py"
        path.write_text(path.read_text().replace(old, new))
    path = tmp_path / "glm4" / "fast.py"
    path.write_text(path.read_text().replace("STREAM_BYTES = 40", "STREAM_BYTES = 41"))
    assert definitions("glm4")["MODEL_AXES"] != definitions("llama3")["MODEL_AXES"]
    assert blocks("glm4")["Attention in plain JAX"] != blocks("llama3")["Attention in plain JAX"]
    propagate("llama3")
    assert [(tmp_path / "glm4" / file).read_bytes() for file in ("model.py", "fast.py", *FILES)] == before


def test_each_family_is_read_by_the_folder_that_errors_name(tmp_path):
    modules = {folder: import_folder(folder).convert for folder in folders()}
    named = modules["llama3"].FOLDERS
    assert sorted(named) == folders()
    for folder, convert in modules.items():
        for other, types in named.items():
            for model_type in types:
                (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))  # more is missing
                with pytest.raises(convert.InputError) as error:
                    convert.open_checkpoint(tmp_path)
                assert str(error.value).endswith(f"; use the folder {other}") == (other != folder)
