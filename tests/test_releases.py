"""config.json in the forms that released checkpoints have: it says what the demo's says. Where tensors get a prefix by
it, the demo's text comes out.

transformers' own configuration classes refuse some of these forms (Llama 4's number for a switch, Kimi K2's yarn).
"""

import json
import shutil

import pytest
from helpers import ROOT, as_transformers_4, import_folder
from safetensors.numpy import load_file, save_file
from test_main import GOLDEN, json_rows, main  # noqa: F401 (a fixture)

OLD = {
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "transformers_version": "4.43.0.dev0",
    "_name_or_path": "org/name",
}
LATENT = {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "seq_aux": True,
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
}  # fmt: skip


def flat(raw: dict) -> dict:
    """The form of most releases: rope_theta and rope_scaling beside the rest, torch_dtype."""
    return as_transformers_4(raw) | OLD


def deepseek(raw: dict, number) -> dict:
    """`type` in the place of `rope_type`; R1 writes yarn's numbers without a point where it can, Kimi K2 with one."""
    raw = flat(raw) | LATENT
    scaling = {"type": raw["rope_scaling"].pop("rope_type")} | raw["rope_scaling"]
    for key in ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"):
        scaling[key] = number(scaling[key])
    return raw | {"rope_scaling": scaling, "rope_theta": number(raw["rope_theta"])}


def qwen3(raw: dict) -> dict:
    """The releases are older than the name num_local_experts."""
    raw = flat(raw) | {"rope_scaling": None, "max_window_layers": raw["num_hidden_layers"]}
    return raw | {"num_experts": raw.pop("num_local_experts")}


def gemma_3(raw: dict) -> dict:
    """A scaling of the layers that see all tokens, a second base for the others; kinds of layers by a period alone."""
    added = ("architectures", "layer_types", "_sliding_window_pattern", "max_position_embeddings")
    raw = {k: v for k, v in raw.items() if k not in added} | {"sliding_window_pattern": 2}
    tables, torch_dtype = raw.pop("rope_parameters"), raw.pop("dtype")
    full, local = (tables[f"{kind}_attention"] for kind in ("full", "sliding"))
    raw |= {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": local["rope_theta"], "rope_scaling": full}
    return raw | OLD | {"torch_dtype": torch_dtype, "cache_implementation": "hybrid"}


def gemma_3_with_vision(raw: dict) -> dict:
    """As transformers 4 wrote it: nothing that is the default."""
    text = {k: v for k, v in gemma_3(raw).items() if k not in ("rope_theta", "rope_local_base_freq", "torch_dtype")}
    vision = {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "num_hidden_layers": 27}
    nested = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256}
    return nested | {"text_config": text, "vision_config": vision, "torch_dtype": "bfloat16"}


def gemma_4(raw: dict) -> dict:
    """The heads of layers that see all tokens have names of their own; nested beside towers for images and sound."""
    text = {k: v for k, v in raw.items() if k not in ("architectures", "per_layer_config", "_name_or_path")}
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"}
    nested = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16"}
    return nested | {"text_config": text, "vision_config": {"model_type": "gemma4_vision"}, "audio_config": None}


def glm_5(raw: dict) -> dict:
    """As before transformers listed the layers: which of them choose stands in a pattern. head_dim is not rope's."""
    letters = "".join(kind[0].upper() for kind in raw["indexer_types"])
    kept = {k: v for k, v in raw.items() if k not in ("indexer_types", "layer_types")}
    kept |= {"index_topk_pattern": letters, "index_topk_freq": 1, "index_skip_topk_offset": 3, "head_dim": 192}
    return kept | {"num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}


def llama_4(raw: dict) -> dict:
    """Llama 4's: the text model nested beside a vision tower, a number for a switch, special token ids of images."""
    text = {k: v for k, v in flat(raw).items() if k not in ("architectures", "layer_types", "_name_or_path")}
    text |= {"attn_temperature_tuning": 4, "for_llm_compressor": False, "cache_implementation": "hybrid"}
    vision = {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34, "rope_theta": 10000}
    nested = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080}
    return nested | {"text_config": text, "vision_config": vision, "torch_dtype": "bfloat16"}


def gpt_2(raw: dict) -> dict:
    """OpenAI's say little, and n_positions twice."""
    keys = ("model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
    return OLD | {key: raw[key] for key in keys} | {"n_ctx": raw["n_positions"], "predict_special_tokens": True}


FORMS = {
    "llama 3": ("llama3", flat),
    "glm-4-0414": ("glm4", lambda raw: flat(raw) | {"rope_scaling": None}),
    "glm-4.7-flash": (
        "glm4_flash",
        lambda raw: flat(raw) | {"rope_scaling": None, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
    ),
    "glm-4.5-air": (
        "glm4_moe",
        lambda raw: flat(raw) | {"rope_scaling": None, "attention_dropout": 0.0, "num_nextn_predict_layers": 1},
    ),
    "glm-5.2": ("glm5", glm_5),
    "deepseek r1": ("deepseek", lambda raw: deepseek(raw, int)),
    "kimi k2": ("deepseek", lambda raw: deepseek(raw, float) | {"model_type": "kimi_k2"}),
    "qwen3 30b-a3b": ("qwen3", qwen3),
    "qwen3 coder 480b": (
        "qwen3",
        lambda raw: qwen3(raw) | {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0},
    ),
    "gpt-oss": (
        "gpt_oss",
        lambda raw: flat(raw) | {"experts_per_token": 2, "initial_context_length": 512, "swiglu_limit": 7.0},
    ),
    "mixtral": ("mixtral", lambda raw: {k: v for k, v in flat(raw).items() if k != "head_dim"}),
    "gemma 3 1b": ("gemma", gemma_3),
    "gemma 3 4b": ("gemma", gemma_3_with_vision),
    "gemma 4": ("gemma4", gemma_4),
    "gpt-2": ("gpt2", gpt_2),
    "llama 4": ("llama4", llama_4),
    "llama 4, text alone": ("llama4", lambda raw: flat(raw) | {"attn_temperature_tuning": 4}),
}


NESTED = ("gemma 3 4b", "gemma 4", "llama 4")  # in these the text model's tensors have a prefix


@pytest.mark.parametrize("name", [name for name in FORMS if name not in NESTED])
def test_a_released_form_says_what_the_demo_says(name):
    folder, form = FORMS[name]
    raw, read = (ROOT / folder / "demo" / "config.json").read_text(), import_folder(folder).model.Config.from_dict
    assert read(form(json.loads(raw))) == read(json.loads(raw))


@pytest.mark.sampled
@pytest.mark.parametrize("name", NESTED)
def test_the_demo_with_a_released_configuration(main, tmp_path, name):  # noqa: F811
    folder, form = FORMS[name]
    shutil.copytree(ROOT / folder / "demo", tmp_path, dirs_exist_ok=True)
    raw = form(json.loads((tmp_path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    begin, prefix = ("model.", "model.language_model.") if name == "gemma 4" else ("", "language_model.")
    tensors = {prefix + key.removeprefix(begin): x for key, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    prompt, answer = max(GOLDEN[folder].items(), key=lambda item: len(item[1]))
    status, out, err = main("--model_path", tmp_path, "--prompt", prompt, "--output", "json", folder=folder)
    assert status == 0, err
    assert [row["text"] for row in json_rows(out)[0]] == [answer]


ABSENT = {  # keys of configs/ that the released file does not have: they are the default
    "llama3": {
        "llama-2-": ("rope_theta", "head_dim", "attention_bias", "mlp_bias"),
        "open-llama-": ("rope_theta", "head_dim", "attention_bias", "mlp_bias", "num_key_value_heads"),
        "mistral-7b-": ("head_dim",),
    },
    "glm4": {"glm-4-9b-chat-hf": ("partial_rotary_factor",)},
    "llama4": {"llama-4-scout": ("attn_temperature_tuning", "floor_scale", "attn_scale", "tie_word_embeddings")},
    "deepseek": {"moonlight": ("rope_scaling",)},
    "qwen3": {"qwen3-coder-480b": ("attention_bias",)},
    "gpt_oss": {"gpt-oss-": ("attention_bias", "layer_types", "swiglu_limit")},
    "mixtral": {"mixtral-": ("sliding_window", "tie_word_embeddings", "hidden_act")},
}


@pytest.mark.parametrize("folder", ABSENT)
def test_keys_that_a_release_leaves_out(folder):
    read = import_folder(folder).model.Config.from_dict
    for prefix, keys in ABSENT[folder].items():
        files = list((ROOT / folder / "configs").glob(f"{prefix}*.json"))
        assert files
        for file in files:
            raw = json.loads(file.read_text())
            released = json.loads(file.read_text())
            text = released.get("text_config", released)
            for key in keys:
                text.pop(key, None)
            assert read(released) == read(raw), file
