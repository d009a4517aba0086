"""No folder imports another: what they share is the same text in each."""

import pytest
from shared import DIFFERENT, FILES, LATENT, ROOT, definitions, folders


@pytest.mark.parametrize("file", FILES)
def test_shared_definitions_are_the_same_text(file):
    texts = {}
    for folder in folders():
        for name, definition in definitions(ROOT / folder / file).items():
            texts.setdefault(name, {})[folder] = definition
    differing = {name for name, by_folder in texts.items() if len(set(by_folder.values())) > 1}
    assert differing <= DIFFERENT.keys(), "python3 tests/shared.py FOLDER takes FOLDER's text to the others"


@pytest.mark.parametrize("file", FILES)
def test_folders_of_one_architecture(file):
    """deepseek and glm4_flash are the same but for a handful of names."""
    texts, others = (definitions(ROOT / folder / file) for folder in LATENT[0])
    assert texts.keys() == others.keys()
    assert {name for name in texts if texts[name] != others[name]} <= set(LATENT[1])


def test_every_exception_is_one():
    differing = set()
    for file in FILES:
        of_folder = [definitions(ROOT / folder / file) for folder in folders()]
        for name in set().union(*of_folder):
            if len({found[name] for found in of_folder if name in found}) > 1:
                differing.add(name)
    assert differing == DIFFERENT.keys()


def test_main_is_the_same_file():
    assert len({(ROOT / folder / "main.py").read_bytes() for folder in folders()}) == 1
