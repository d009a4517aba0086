"""What config.json leaves out, or gives as null, is what transformers' configuration class makes of it, or it is asked
for by name."""

import copy
import dataclasses
import json
import random

import pytest
from helpers import import_folder
from transformers import CONFIG_MAPPING

FOLDERS = import_folder("llama3").convert.FOLDERS  # and the model_types that each reads
MODELS = {folder: import_folder(folder).model for folder in FOLDERS}
TYPES = [(folder, kind) for folder, model in MODELS.items() for kind in FOLDERS[folder] if kind != "kimi_k2"]
VALUES = {  # of configuration classes' fields: nowhere the default, and the groups that must divide do
    "vocab_size": 331, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 16, "rms_norm_eps": 0.1, "max_position_embeddings": 777, "mlp_bias": True,
    "n_embd": 72, "n_layer": 5, "n_head": 6, "n_inner": 101, "n_positions": 99, "layer_norm_epsilon": 0.1,
    "activation_function": "gelu",
    "moe_intermediate_size": 24, "n_routed_experts": 16, "n_shared_experts": 3, "num_experts_per_tok": 5,
    "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "first_k_dense_replace": 2, "routed_scaling_factor": 3.5, "n_group": 4, "topk_group": 2, "sliding_window": 50,
    "query_pre_attn_scalar": 24, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 5.0,
    "attention_k_eq_v": True, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "enable_moe_block": True,
    "vocab_size_per_layer_input": 333, "hidden_size_per_layer_input": 20, "top_k_experts": 3, "num_experts": 12,
    "num_local_experts": 12, "intermediate_size_mlp": 80, "attention_chunk_size": 48, "floor_scale": 41,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attn_scale": 0.3, "swiglu_alpha": 1.1,
    "swiglu_limit": 2.5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "max_window_layers": 3,
    "shared_expert_intermediate_size": 40, "linear_conv_kernel_dim": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "index_topk": 30, "index_n_heads": 5, "index_head_dim": 12,
}  # fmt: skip
SWITCHES = (  # the other way than they are by default
    "attention_bias", "norm_topk_prob", "rope_interleave", "use_qk_norm", "use_sliding_window",
    "attn_temperature_tuning", "tie_word_embeddings", "scale_attn_by_inverse_layer_idx",
)  # fmt: skip
REFUSED = {  # what a folder does not have
    "deepseek": ("mlp_bias",), "glm5": ("mlp_bias",),
    "gemma": ("attention_bias", "tie_word_embeddings"), "gpt2": ("tie_word_embeddings",),
    "gemma4": ("attention_bias", "tie_word_embeddings"),
    "qwen3_5": ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
}  # fmt: skip
LISTS = ("layer_types", "no_rope_layers", "moe_layers", "mlp_layer_types", "per_layer_config", "rope_parameters")
RELEASED = {  # what releases have in the place of these
    "gemma3_text": {
        "rope_theta": 77.0, "rope_local_base_freq": 99.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    },
    "gemma4_text": {"global_head_dim": 24, "num_global_key_value_heads": 2},
    **{kind: {"rope_theta": 77.0, "partial_rotary_factor": 0.25} for kind in ("glm", "glm4", "glm4_moe")},
    **{
        kind: {"rope_theta": 77.0, "partial_rotary_factor": 0.5, "full_attention_interval": 3}
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}  # fmt: skip
PATTERNS = ("sliding_window_pattern", "full_attention_interval", "max_window_layers", "use_sliding_window")  # of lists
OTHER_NAMES = {"num_local_experts": "num_experts"}
NULLS = dict.fromkeys(
    [("mistral", "num_key_value_heads"), ("ministral", "num_key_value_heads")],
    "which transformers 4 took for num_attention_heads, as we do",
)


def written(folder: str, kind: str) -> dict:
    """A config.json as transformers writes it, in which nothing is the default."""
    whole = CONFIG_MAPPING[kind]
    text = type(whole().get_text_config())
    fields = {field.name: field.default for field in dataclasses.fields(text)}
    values = VALUES | {name: not fields.get(name) for name in SWITCHES}
    values = {name: value for name, value in values.items() if name in fields and name not in REFUSED.get(folder, ())}
    if kind == "deepseek_v2":
        values["topk_method"] = "group_limited_greedy"
    if kind in ("qwen2", "qwen3_moe", "glm4_moe"):
        values["head_dim"] = 16  # which the class does not name, and the model takes
    config = whole(**(values if text is whole else {"text_config": values}))
    return json.loads(config.to_json_string())


def released(folder: str, kind: str) -> dict:
    """The same without the lists and tables that follow from other keys."""
    config = written(folder, kind)
    text = config.get("text_config", config)
    for name in LISTS:
        text.pop(name, None)
    text |= RELEASED.get(text["model_type"].replace("unified_", ""), {"rope_theta": 77.0})
    return config


def read(folder: str, config: dict):
    """The Config, or the message of why there is none."""
    try:
        found = MODELS[folder].Config.from_dict(copy.deepcopy(config))
    except MODELS[folder].InputError as error:
        return str(error)
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {name: value for name, value in values.items() if name not in PATTERNS}


def reference(folder: str, kind: str, config: dict):
    """What transformers' class makes of a config.json, read from what the class writes then. None if it refuses."""
    try:
        config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config))
    except Exception:
        return None
    return read(folder, json.loads(config.to_json_string()))


def names(found, name: str) -> bool:
    """Whether it is a message about a key."""
    return isinstance(found, str) and (name in found or OTHER_NAMES.get(name, name) in found)


def tables(config: dict):
    """The tables in a config.json that are about text, itself the first."""
    yield config
    for name, value in config.items():
        if isinstance(value, dict) and name not in ("vision_config", "audio_config"):
            yield from tables(value)


@pytest.mark.sampled
@pytest.mark.parametrize("form", [written, released])
@pytest.mark.parametrize(("folder", "kind"), TYPES)
def test_what_is_left_out_is_the_default_or_asked_for(folder, kind, form):
    full = form(folder, kind)
    assert isinstance(read(folder, full), dict), read(folder, full)
    for n, table in enumerate(tables(full)):
        for name in table.keys() - {"model_type"}:
            edited = copy.deepcopy(full)
            inner = list(tables(edited))[n]
            del inner[name]
            absent, expected = read(folder, edited), reference(folder, kind, edited)
            assert absent == expected or names(absent, name), f"without {name}"
            inner[name] = None
            null, expected = read(folder, edited), reference(folder, kind, edited)
            if (kind, name) not in NULLS:  # where the class has no null, it counts as absent
                assert null == (absent if expected is None else expected) or names(null, name), f"with null for {name}"


@pytest.mark.parametrize(("folder", "kind"), TYPES)
def test_several_are_left_out(folder, kind):
    draw = random.Random(0)
    for form in 5 * (written, released):
        config, without = form(folder, kind), []
        for table in list(tables(config)):
            for name in sorted(table.keys() - {"model_type", "text_config", "rope_parameters"}):
                if draw.random() < 0.1:
                    without.append(name)
                    del table[name]
        found = read(folder, config)
        assert found == reference(folder, kind, config) or any(names(found, name) for name in without), without
