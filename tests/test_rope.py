"""Rotary embedding: which folder has which rope types, and their frequencies against transformers' functions."""

import re

import numpy as np
import pytest
from helpers import ROOT, import_folder
from shared import folders
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

MODELS = {folder: import_folder(folder).model for folder in folders() if folder != "gpt2"}  # which has no rope
PARAMETERS = {  # of each rope type, in several forms; 512 is max_position_embeddings
    "default": [{}, {"rope_theta": 77.0}],
    "linear": [{"factor": 2.5}],
    "llama3": [
        {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 3.7, "low_freq_factor": 1, "high_freq_factor": 32},
    ],
    "yarn": [
        {"factor": 4.0, "original_max_position_embeddings": 128},
        {"factor": 40, "beta_fast": 16, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
        {"factor": 0.5, "mscale": 0.7},
        {"factor": 2.0, "attention_factor": 1.3, "rope_theta": 5.0},  # all pairs are slow
    ],
    "proportional": [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.4, "factor": 8.0}, {}],
}
CASES = [(kind, options) for kind, forms in PARAMETERS.items() for options in forms]


def reference(table: dict, size: int) -> tuple[np.ndarray, float]:
    """The frequencies of a head of `size` numbers, and the scale, as transformers computes them."""
    sizes = {"hidden_size": 2 * size, "num_attention_heads": 2, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, rope_parameters=dict(table))
    functions = {"default": LlamaRotaryEmbedding.compute_default_rope_parameters} | ROPE_INIT_FUNCTIONS
    frequencies, scale = functions[table["rope_type"]](config)
    return frequencies.numpy(), scale


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_frequencies(kind, options):
    for folder, model in MODELS.items():
        if kind in model.ROPES:
            for size, part in ((96, None), (24, None), *(((128, 0.5),) if kind != "proportional" else ())):
                table = {"rope_type": kind, "rope_theta": 1e5} | options
                defaults = {"partial_rotary_factor": part} if part else {}
                config = {"rope_parameters": table, "max_position_embeddings": 512}
                rope = model.read_rope(config, "", size, **defaults)
                frequencies, scale = reference(table, int(size * (part or 1)))
                np.testing.assert_allclose(rope.frequencies(), frequencies, rtol=3e-7, err_msg=folder)
                assert rope.frequencies().dtype == np.float32 and rope.dim == int(size * (part or 1))
                assert rope.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_table_that_was_added_to_that_of_transformers_5(kind):
    """As pages of releases say how to read longer texts. transformers would lose the base, and take 10,000."""
    table, before = {"rope_type": kind} | PARAMETERS[kind][0], {"rope_type": "default", "rope_theta": 1e6}
    frequencies, scale = reference(table | {"rope_theta": 1e6}, 96)
    for folder, model in MODELS.items():
        if kind in model.ROPES:
            rope = model.read_rope({"rope_scaling": table, "rope_parameters": before}, "head_dim", 96)
            np.testing.assert_allclose(rope.frequencies(), frequencies, rtol=3e-7, err_msg=folder)
            assert rope.scale == pytest.approx(scale, rel=1e-12)
            of_config = {"rope_scaling": table, "rope_parameters": before, "rope_theta": 5e5}  # as in transformers
            assert model.read_rope(of_config, "head_dim", 96).rope_theta == 5e5


@pytest.mark.parametrize("folder", MODELS)
def test_a_folder_has_the_types_that_its_page_names(folder):
    model, page = MODELS[folder], (ROOT / folder / "README.md").read_text()
    (types,) = re.findall(r"ope\s+types\s+other\s+than\s+((?:\w+,\s+)*\w+(?:\s+and\s+\w+)?)", page)
    assert re.split(r",\s+|\s+and\s+", types) == list(model.ROPES)
    for kind in {*PARAMETERS, "longrope", "dynamic"} - model.ROPES.keys():
        for key in ("rope_scaling", "rope_parameters"):
            table = {"rope_type": kind, "factor": 2.0, "partial_rotary_factor": 1.0}
            with pytest.raises(
                model.InputError, match=f"rope_type '{kind}' is not supported, only {', '.join(model.ROPES)}$"
            ):
                model.read_rope({key: table}, "head_dim", 64)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        (PARAMETERS["llama3"][0] | {"rope_type": "llama3", "low_freq_factor": 5.0}, "must not be above"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta 1.0 must exceed 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor cannot be '2'"),
        ({"factor": 8.0}, "have a factor and no rope_type, such as linear"),
        ({"rope_type": ["linear"]}, "rope_type .'linear'. is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"full_attention": {"rope_theta": 1e4}}, "must be one table for all layers"),
    ],
    ids=str,
)
def test_what_a_table_may_not_say(table, words):
    model = MODELS["llama3"]
    with pytest.raises(model.InputError, match=words):
        model.read_rope({"rope_scaling": table, "max_position_embeddings": 512}, "head_dim", 64)


@pytest.mark.parametrize("share", [1.5, 0.34, 0.001, "0.5", True])
def test_a_part_of_a_head_is_even(share):
    for folder in ("glm4", "gemma4"):
        model = MODELS[folder]
        table = {"rope_type": "default" if folder == "glm4" else "proportional", "partial_rotary_factor": share}
        if folder == "gemma4" and share in (0.34, 0.001):  # some pairs of a head may stand still, or all
            frequencies = model.read_rope({"rope_parameters": table}, "head_dim", 64).frequencies()
            assert (frequencies > 0).sum() == int(share * 64) // 2
            continue
        with pytest.raises(model.InputError, match="partial_rotary_factor"):
            model.read_rope({"rope_parameters": table}, "head_dim", 64, partial_rotary_factor=0.5)
