"""Greedy tokens and float32 log-probabilities of every folder against transformers' own classes."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers import as_transformers_4, assert_matches, decode, import_folder, read_in_pieces, save_random
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

llama3, glm4, llama4 = import_folder("llama3"), import_folder("glm4"), import_folder("llama4")
deepseek, glm4_flash = import_folder("deepseek"), import_folder("glm4_flash")
glm4_moe, gemma, mixtral = import_folder("glm4_moe"), import_folder("gemma"), import_folder("mixtral")
qwen3, gpt_oss, gpt2 = import_folder("qwen3"), import_folder("gpt_oss"), import_folder("gpt2")
qwen3_5, gemma4, glm5 = import_folder("qwen3_5"), import_folder("gemma4"), import_folder("glm5")

SMALL = {
    "vocab_size": 331,  # no multiple of anything: the vocabulary's shards are uneven
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


def llama(**options):
    return llama3, LlamaForCausalLM, LlamaConfig(**SMALL | options)


def mistral(**options):
    return llama3, MistralForCausalLM, MistralConfig(**SMALL | options)


def ministral(**options):
    """With a window within a prompt in every other layer."""
    options = {"head_dim": 16, "sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]} | options
    return llama3, MinistralForCausalLM, MinistralConfig(**SMALL | options)


def glm(**options):
    return glm4, GlmForCausalLM, GlmConfig(**SMALL | {"head_dim": 16} | options)


def glm_0414(**options):
    return glm4, Glm4ForCausalLM, Glm4Config(**SMALL | {"head_dim": 16} | options)


LLAMA4 = {
    "head_dim": 8,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "no_rope_layer_interval": 2,  # the second has no rope and sees all tokens
    "num_local_experts": 4,
    "attention_chunk_size": 48,
    "floor_scale": 41,  # the temperature rises within a short prompt; as a float32, 1 / 41 is rounded down
    "attn_scale": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SCOUT_ROPE = LLAMA3_ROPE | {"high_freq_factor": 1.0}


def llama_4(**options):
    return llama4, Llama4ForCausalLM, Llama4TextConfig(**SMALL | LLAMA4 | options)


def llama_4_with_vision(**options):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"vision_output_dim": 16, "image_size": 28, "projector_input_dim": 16, "projector_output_dim": 16}
    config = Llama4Config(text_config=SMALL | LLAMA4 | options, vision_config=vision)
    return llama4, Llama4ForConditionalGeneration, config


LATENT = {
    "moe_intermediate_size": 48,
    "num_attention_heads": 6,  # on 4 and on 8 devices, some have heads of zeros
    "num_key_value_heads": 6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,  # of max_position_embeddings
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


OSS_ROPE = QWEN_YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False}


def deepseek_3(**options):
    return deepseek, DeepseekV3ForCausalLM, DeepseekV3Config(**SMALL | LATENT | options)


INDEXER = {"index_topk": 20, "index_n_heads": 12, "index_head_dim": 24}  # so many heads that no two scores are equal


def deepseek_32(**options):
    """With an indexer that leaves out tokens of most prompts."""
    return deepseek, DeepseekV32ForCausalLM, DeepseekV32Config(**SMALL | LATENT | INDEXER | options)


def deepseek_2(**options):
    return deepseek, DeepseekV2ForCausalLM, DeepseekV2Config(**SMALL | LATENT | {"hidden_size": 72} | options)


def flash(**options):
    options = SMALL | LATENT | {"n_group": 1, "topk_group": 1} | options
    return glm4_flash, Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(**options)


def glm_5(**options):
    """With a layer that shares what the one before it has chosen."""
    options = {"indexer_types": ["full", "shared"]} | options
    return glm5, GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**SMALL | LATENT | INDEXER | options)


def glm_moe(**options):
    """With heads that together are wider than the residual stream, and biases of q, k and v."""
    names = ("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group")
    latent = {name: LATENT[name] for name in (*names, "topk_group", "first_k_dense_replace")}
    return (
        glm4_moe,
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**SMALL | latent | {"head_dim": 16, "attention_bias": True} | options),
    )


def qwen_2(**options):
    return qwen3, Qwen2ForCausalLM, Qwen2Config(**SMALL | options)


def qwen_3(**options):
    return qwen3, Qwen3ForCausalLM, Qwen3Config(**SMALL | {"head_dim": 16} | options)


def qwen_3_moe(**options):
    """With experts narrower than an MLP, and heads that together are wider than the residual stream."""
    moe = {"head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    return qwen3, Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL | moe | options)


STATES = {
    "head_dim": 16,
    "full_attention_interval": 2,  # the second has attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,  # three to a key head
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def qwen_35(**options):
    return qwen3_5, Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SMALL | STATES | options)


def qwen_35_moe(**options):
    """With heads that together are wider than the residual stream, and a shared expert wider than the others."""
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    options = SMALL | STATES | experts | {"shared_expert_intermediate_size": 40} | options
    return qwen3_5, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**options)


def qwen_3_next(**options):
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    options = SMALL | STATES | experts | {"shared_expert_intermediate_size": 40} | options
    return qwen3_5, Qwen3NextForCausalLM, Qwen3NextConfig(**options)


def qwen_35_with_vision(**options):
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=SMALL | STATES | options, vision_config=vision)
    return qwen3_5, Qwen3_5ForConditionalGeneration, config


def mixtral_8(**options):
    return mixtral, MixtralForCausalLM, MixtralConfig(**SMALL | {"num_local_experts": 8} | options)


def oss(**options):
    """With experts of 96 columns, for which a device has 128, and a window within a prompt."""
    options = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 50} | options
    options = {"rope_parameters": OSS_ROPE} | options
    return gpt_oss, GptOssForCausalLM, GptOssConfig(**SMALL | options)


def gemma_1(**options):
    return gemma, GemmaForCausalLM, GemmaConfig(**SMALL | {"head_dim": 16} | options)


SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}  # far below the largest score and logit


def gemma_2(**options):
    """With a window within a prompt in every other layer."""
    options = {"head_dim": 16, "sliding_window": 50, "query_pre_attn_scalar": 24} | options
    return gemma, Gemma2ForCausalLM, Gemma2Config(**SMALL | SOFTCAPS | options)


GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 50,
    "sliding_window_pattern": 2,  # the second layer sees all tokens
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def gemma_3(**options):
    return gemma, Gemma3ForCausalLM, Gemma3TextConfig(**SMALL | GEMMA3 | options)


def gemma_3_with_vision(**options):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"image_size": 28, "patch_size": 14}
    text, others = SMALL | GEMMA3 | options, {"eos_token_id": None, "mm_tokens_per_image": 4}
    return gemma, Gemma3ForConditionalGeneration, Gemma3Config(text_config=text, vision_config=vision, **others)


GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 50,
    "final_logit_softcapping": 5.0,  # far below the largest logit
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}


def gemma_4(**options):
    """As 31B is, or, with per-layer embeddings, as the small ones are."""
    options = GEMMA4 | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 331} | options
    return gemma4, Gemma4ForCausalLM, Gemma4TextConfig(**SMALL | options)


def gemma_4_small(**options):
    sizes = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sharing = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_key_value_heads": 1}
    return gemma_4(**sizes | sharing | {"hidden_size_per_layer_input": 20} | options)


def gemma_4_moe(**options):
    sizes = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40}
    return gemma_4(**KEYS_AS_VALUES | sizes | options)


def gemma_4_nested(unified=False, **options):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = SMALL | GEMMA4 | KEYS_AS_VALUES | {"pad_token_id": 0}
    if unified:
        vision = {"mm_embed_dim": 16, "output_proj_dims": 16}
        config = Gemma4UnifiedConfig(text_config=text | options, vision_config=vision)
        return gemma4, Gemma4UnifiedForConditionalGeneration, config
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 331} | options
    vision |= {"num_key_value_heads": 2, "head_dim": 8}
    return gemma4, Gemma4ForConditionalGeneration, Gemma4Config(text_config=text, vision_config=vision)


def gpt_2(**options):
    """With heads that few meshes divide."""
    options = {"n_embd": 96, "n_layer": 2, "n_head": 12, "n_positions": 2048} | options
    kept = {name: SMALL[name] for name in ("vocab_size", "initializer_range", "eos_token_id", "bos_token_id")}
    return gpt2, GPT2LMHeadModel, GPT2Config(**kept | options)


CASES = {
    "llama 3.2, tied": llama(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "llama 3.1": llama(rope_parameters=LLAMA3_ROPE),
    "llama 2, no groups, linear rope": llama(num_key_value_heads=8, rope_parameters=LINEAR_ROPE),
    "llama, biases, large eps, wide heads, one kv head": llama(
        attention_bias=True, mlp_bias=True, rms_norm_eps=0.1, head_dim=24, num_key_value_heads=1
    ),
    "mistral 0.1, window": mistral(sliding_window=50),
    "mistral, yarn": mistral(sliding_window=None, rope_parameters=YARN),
    "mistral 0.3": mistral(sliding_window=None),
    "ministral": ministral(),
    "glm": glm(),
    "glm, tied, a quarter turned, one kv head": glm(
        tie_word_embeddings=True,
        num_key_value_heads=1,
        head_dim=24,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    "glm, yarn of half a head": glm(rope_parameters=QWEN_YARN | {"partial_rotary_factor": 0.5}),
    "glm 0414": glm_0414(rms_norm_eps=1e-5),
    "glm 0414, no biases, all turned, large eps": glm_0414(
        attention_bias=False,
        rms_norm_eps=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    ),
    "llama 4 scout, nested": llama_4_with_vision(rope_parameters=SCOUT_ROPE, num_local_experts=8),
    "llama 4 maverick": llama_4(
        num_hidden_layers=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=4,
        use_qk_norm=False,
        num_attention_heads=10,
    ),
    "llama 4, two experts a token, other layers": llama_4(
        num_experts_per_tok=2,
        num_hidden_layers=3,
        moe_layers=[0, 2],
        no_rope_layers=[0, 1, 0],
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "llama 4, chunks alone": llama_4(no_rope_layers=[1, 1], rms_norm_eps=0.1, num_key_value_heads=1),
    "deepseek v3": deepseek_3(rope_parameters=YARN),
    "moonlight": deepseek_3(q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2, rms_norm_eps=0.1),
    "deepseek v3, biases, halves turned, weights as they are": deepseek_3(
        attention_bias=True, rope_interleave=False, norm_topk_prob=False, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "deepseek v2 lite": deepseek_2(
        q_lora_rank=None, topk_method="greedy", n_group=None, topk_group=None, rope_parameters=YARN | {"mscale": 0.7}
    ),
    "deepseek v2": deepseek_2(topk_method="group_limited_greedy", routed_scaling_factor=3.0, n_shared_experts=2),
    "deepseek v3.2": deepseek_32(rope_parameters=YARN),
    "glm 5": glm_5(indexer_types=None, n_group=1, topk_group=1),
    "glm 5, two heads": glm_5(
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
    ),
    "glm 5.2, shared choices": glm_5(
        num_hidden_layers=4, indexer_types=["full", "shared", "shared", "full"], attention_bias=True, index_topk=64
    ),
    "glm 4.7 flash": flash(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "glm 4.7 flash, other layers, groups": flash(
        mlp_layer_types=["sparse", "dense"],
        q_lora_rank=None,
        n_group=4,
        topk_group=1,
        attention_bias=True,
        rope_interleave=False,
        norm_topk_prob=False,
        rms_norm_eps=0.1,
    ),
    "qwen2.5": qwen_2(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2.5 0.5b, tied, seven query heads to a kv head": qwen_2(
        tie_word_embeddings=True, hidden_size=112, num_attention_heads=14, num_key_value_heads=2
    ),
    "qwen2, yarn, later layers with a window, wide heads, large eps, one kv head": qwen_2(
        rope_parameters=QWEN_YARN,
        use_sliding_window=True,
        sliding_window=50,
        max_window_layers=1,
        head_dim=24,
        rms_norm_eps=0.1,
        num_key_value_heads=1,
    ),
    "glm 4.5": glm_moe(use_qk_norm=True, n_group=1, topk_group=1, routed_scaling_factor=2.5),
    "glm 4.5 air, groups, no biases, all turned, weights as they are, large eps": glm_moe(
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        norm_topk_prob=False,
        n_shared_experts=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
    ),
    "qwen3": qwen_3(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3, tied, biases, yarn, later layers with a window, large eps": qwen_3(
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters=QWEN_YARN,
        use_sliding_window=True,
        sliding_window=50,
        max_window_layers=1,
        rms_norm_eps=0.1,
        num_key_value_heads=1,
    ),
    "qwen3 moe": qwen_3_moe(norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3 moe, other layers, weights as they are, window": qwen_3_moe(
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        num_attention_heads=12,  # on 4 devices two share three query heads
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=33,
        rope_parameters=QWEN_YARN | {"attention_factor": 1.3, "truncate": False},
    ),
    "qwen3.5, nested": qwen_35_with_vision(),
    "qwen3.5, tied, biases, other layers, a key head to each value head, long convolution, large eps": qwen_35(
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_num_key_heads=5,  # which no mesh divides
        linear_num_value_heads=5,
        linear_conv_kernel_dim=6,
        rms_norm_eps=0.1,
        num_key_value_heads=1,
    ),
    "qwen3.5 moe": qwen_35_moe(),
    "qwen3.5 moe, other layers, short convolution": qwen_35_moe(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
        linear_conv_kernel_dim=2,
    ),
    "qwen3 next": qwen_3_next(num_hidden_layers=4, full_attention_interval=4),
    "qwen3 next, tied, a key head to each value head": qwen_3_next(
        tie_word_embeddings=True, linear_num_key_heads=6, num_key_value_heads=1
    ),
    "mixtral": mixtral_8(),
    "mixtral, tied, window, three of four experts, wide heads, one kv head, large eps": mixtral_8(
        tie_word_embeddings=True,
        rope_parameters=LLAMA3_ROPE,  # as in mergekit's Mixtrals of Llama 3.1
        sliding_window=50,
        num_local_experts=4,
        num_experts_per_tok=3,
        head_dim=24,
        num_key_value_heads=1,
        rms_norm_eps=0.1,
    ),
    "gpt-oss": oss(),
    "gpt-oss, tied, no biases of attention, small limit, one kv head": oss(
        tie_word_embeddings=True,
        attention_bias=False,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        swiglu_limit=0.5,
        swiglu_alpha=1.1,
        rms_norm_eps=0.1,
        num_key_value_heads=1,
        num_experts_per_tok=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gemma": gemma_1(num_key_value_heads=8),
    "gemma, one kv head, large eps": gemma_1(num_key_value_heads=1, head_dim=24, rms_norm_eps=0.1),
    "gemma 2": gemma_2(),
    "gemma 2, other layers, one kv head, large eps": gemma_2(
        num_key_value_heads=1, rms_norm_eps=0.1, layer_types=["full_attention", "sliding_attention"]
    ),
    "gemma 3, nested": gemma_3_with_vision(final_logit_softcapping=5.0),  # which this class does not use
    "gemma 4, nested": gemma_4_nested(),
    "gemma 4 unified": gemma_4_nested(unified=True),
    "gemma 4, no softcap, large eps": gemma_4(final_logit_softcapping=None, rms_norm_eps=0.1, num_key_value_heads=1),
    "gemma 4 e2b": gemma_4_small(),
    "gemma 4 e4b, other layers, as wide": gemma_4_small(
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        use_double_wide_mlp=False,
        num_key_value_heads=2,
        layer_types=["full_attention", *["sliding_attention"] * 3, *["full_attention"] * 2],
    ),
    "gemma 4 26b": gemma_4_moe(),
    "gemma 3, four heads, other bases, softcap of logits, large eps": gemma_3(
        num_attention_heads=4,  # on eight devices, some have heads of zeros
        num_key_value_heads=1,
        num_hidden_layers=3,
        sliding_window_pattern=3,
        rms_norm_eps=0.1,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=2.0,  # which the reference does not use
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    ),
    "gpt-2": gpt_2(),
    "gpt-2, five heads, narrow mlp, large eps": gpt_2(n_embd=80, n_head=5, n_inner=101, layer_norm_epsilon=0.1),
    "gpt-2, three heads": gpt_2(n_head=3),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By name of a case: the modules, the checkpoint's folder and the reference model, made once."""
    made = {}

    def get(name):
        if name not in made:
            path = tmp_path_factory.mktemp("checkpoint")
            modules, *reference = CASES[name]
            made[name] = modules, path, save_random(path, *reference)
        return made[name]

    return get


def in_float64(reference, monkeypatch):
    """A copy of the reference model that computes in float64 also where its class casts to float32."""
    reference = copy.deepcopy(reference).double()
    reference.set_experts_implementation("eager")  # the others have no float64
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    return reference


def random_prompts(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, SMALL["vocab_size"], length).tolist() for length in lengths]


OTHER_MESHES = {  # meshes that replace (2, 2, 2): tp beyond the kv heads or dividing nothing, dp that divides no batch
    "llama 3.2, tied": [(8, 1, 1)],
    "llama 3.1": [(1, 1, 1), (2, 2, 2)],
    "llama 2, no groups, linear rope": [(1, 1, 5)],
    "mistral 0.3": [(1, 1, 3)],
    "glm": [(1, 1, 7)],
    "llama 4 scout, nested": [(1, 2, 3)],
    "moonlight": [(1, 2, 3)],
    "qwen3": [(1, 1, 6)],
    "llama, biases, large eps, wide heads, one kv head": [(1, 1, 8)],
    "glm, tied, a quarter turned, one kv head": [(1, 2, 2)],
    "glm 0414": [(2, 1, 4)],
    "llama 4 maverick": [(1, 2, 2)],
    "llama 4, chunks alone": [(1, 1, 8)],
    "deepseek v3": [(1, 1, 8), (8, 1, 1), (2, 2, 2)],
    "deepseek v2 lite": [(2, 1, 4)],
    "deepseek v2": [(1, 1, 1)],
    "deepseek v3.2": [(2, 2, 2), (1, 1, 5)],
    "glm 4.7 flash, other layers, groups": [(1, 2, 2)],
    "glm 5, two heads": [(1, 2, 2), (1, 1, 8)],  # two devices share a head, and each has half of its values; or four
    "qwen2.5 0.5b, tied, seven query heads to a kv head": [(1, 1, 8)],
    "glm 4.5 air, groups, no biases, all turned, weights as they are, large eps": [(1, 4, 2)],
    "qwen3, tied, biases, yarn, later layers with a window, large eps": [(1, 1, 8)],
    "qwen3 moe": [(2, 2, 2), (1, 8, 1)],
    "qwen3 moe, other layers, weights as they are, window": [(1, 4, 2)],
    "qwen3.5, nested": [(1, 1, 8), (2, 1, 4)],
    "qwen3.5, tied, biases, other layers, a key head to each value head, long convolution, large eps": [(1, 1, 8)],
    "qwen3.5 moe": [(1, 1, 1), (2, 2, 2)],
    "qwen3 next": [(2, 1, 2), (1, 1, 8)],
    "qwen3 next, tied, a key head to each value head": [(1, 2, 2)],
    "mixtral": [(1, 1, 1), (2, 2, 2)],
    "mixtral, tied, window, three of four experts, wide heads, one kv head, large eps": [(1, 2, 4)],
    "gpt-oss": [(1, 1, 1), (2, 2, 2)],
    "gpt-oss, tied, no biases of attention, small limit, one kv head": [(1, 4, 2)],
    "gemma 2": [(1, 1, 1), (2, 2, 2)],
    "gemma 2, other layers, one kv head, large eps": [(1, 1, 8)],
    "gemma 3, four heads, other bases, softcap of logits, large eps": [(1, 1, 8)],
    "gemma 4, nested": [(1, 1, 1), (2, 2, 2)],
    "gemma 4, no softcap, large eps": [(1, 1, 8)],
    "gemma 4 e2b": [(1, 1, 1), (1, 1, 8), (2, 1, 3)],
    "gemma 4 26b": [(2, 2, 2), (1, 8, 1)],
    "gpt-2": [(1, 1, 1), (2, 2, 2)],
    "gpt-2, five heads, narrow mlp, large eps": [(1, 3, 1), (1, 2, 4)],
    "gpt-2, three heads": [(1, 1, 8)],
}


BY_DEFAULT = {  # the others are slow: at least one of each folder, on meshes of all kinds
    "llama 3.2, tied": (8, 1, 1),
    "ministral": (2, 2, 2),
    "glm": (1, 1, 7),
    "llama 4, chunks alone": (1, 1, 8),
    "moonlight": (1, 2, 3),
    "glm 5, two heads": (1, 1, 8),
    "glm 4.7 flash, other layers, groups": (1, 2, 2),
    "glm 4.5 air, groups, no biases, all turned, weights as they are, large eps": (1, 4, 2),
    "qwen3 moe": (1, 8, 1),
    "qwen3 next": (2, 1, 2),
    "mixtral": (2, 2, 2),
    "gpt-oss, tied, no biases of attention, small limit, one kv head": (1, 4, 2),
    "gemma 2": (2, 2, 2),
    "gemma 4 e2b": (1, 1, 8),
    "gemma 4 26b": (1, 8, 1),
    "gpt-2, five heads, narrow mlp, large eps": (1, 3, 1),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.slow] * (BY_DEFAULT.get(name) != mesh))
        for name in CASES
        for mesh in OTHER_MESHES.get(name, [(2, 2, 2)])
    ],
    ids=str,
)
def test_unequal_prompts_in_one_batch(checkpoints, name, mesh):
    modules, path, reference = checkpoints(name)
    prompts = random_prompts(5, 300, 1, 40)[: 4 if mesh == (2, 2, 2) else 3]
    prompts[0][-1] = 0  # a real token 0 is not padding
    assert_matches(reference, prompts, decode(modules, path, prompts, mesh, max_new_tokens=12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama 4 maverick", "deepseek v3", "gpt-oss", "qwen3.5 moe", "gemma 4 e2b"])
def test_long_prompt_and_a_long_answer(checkpoints, name, monkeypatch):
    """Many pieces of prefill, then decoding over several blocks of the cache: of one row, and of more than 8."""
    modules, path, reference = checkpoints(name)
    atol = 1e-3
    if name == "qwen3.5 moe":  # transformers' float32 is up to 2e-3 from its float64 here, and ours up to 1.1e-3
        reference, atol = in_float64(reference, monkeypatch), 2e-3
    prompts = random_prompts(1100)
    assert_matches(reference, prompts, decode(modules, path, prompts, max_new_tokens=4))
    read_in_pieces(monkeypatch, modules, 32)
    prompts = random_prompts(250, 60, *range(1, 8))
    assert_matches(reference, prompts, decode(modules, path, prompts, (1, 1, 2), max_new_tokens=150), atol)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "scale", "rope"),
    [
        (llama, 0.6, LLAMA3_ROPE),
        # At 0.6 the reference's own float32 is up to 0.015 from its float64 here.
        (glm_0414, 0.3, {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        (deepseek_3, 0.3, YARN),
    ],
)
def test_sharp_attention_far_along(tmp_path, family, scale, rope):
    """Weights so large that attention picks single tokens: a last place of a rotary frequency changes what it picks."""
    options = {"initializer_range": scale, "hidden_size": 128, "num_hidden_layers": 3, "rope_parameters": rope}
    modules, *reference = family(**options)
    reference = save_random(tmp_path, *reference, seed=4)
    prompts = random_prompts(2000, 3, 511)
    assert_matches(reference, prompts, decode(modules, tmp_path, prompts, max_new_tokens=6))


@pytest.mark.slow
@pytest.mark.parametrize("quantize_cache", ["int8"])
def test_pieces_of_prefill_change_nothing(checkpoints, monkeypatch, quantize_cache):
    modules, path, _ = checkpoints("llama 3.1")
    prompts = random_prompts(700, 90)
    whole = decode(modules, path, prompts, max_new_tokens=6, quantize_cache=quantize_cache)
    read_in_pieces(monkeypatch, modules, 64)
    pieces = decode(modules, path, prompts, max_new_tokens=6, quantize_cache=quantize_cache)
    for row, other in zip(whole, pieces, strict=True):
        assert [token.id for token in row] == [token.id for token in other]
        np.testing.assert_allclose([t.logprob for t in row], [t.logprob for t in other], atol=1e-4)


def test_more_devices_than_tokens_in_the_vocabulary(tmp_path):
    """Some devices hold nothing but padding."""
    modules, *reference = llama(vocab_size=9)
    reference = save_random(tmp_path, *reference)
    prompts = [[0, 8, 3], [5]]
    assert_matches(reference, prompts, decode(modules, tmp_path, prompts, (1, 1, 8), max_new_tokens=6))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},  # beside rope_parameters, as some tools leave it
        {"rope_parameters": LLAMA3_ROPE, "original_max_position_embeddings": 300},
        {
            "rope_parameters": {k: v for k, v in LLAMA3_ROPE.items() if not k.startswith("original")},
            "max_position_embeddings": 128,
        },
        {"rope_theta": 77.0, "rope_parameters": None},
    ],
)
def test_config_json_is_read_as_transformers_reads_it(tmp_path, changes):
    modules, *reference = llama()
    save_random(tmp_path, *reference, rewrite=lambda config: config | changes)
    reference = LlamaForCausalLM.from_pretrained(tmp_path)
    prompts = random_prompts(200)
    assert_matches(reference, prompts, decode(modules, tmp_path, prompts, max_new_tokens=4))


@pytest.mark.parametrize(
    ("family", "changes"), [(partial(llama, rope_parameters=LLAMA3_ROPE), {"head_dim": None}), (glm, {})]
)
def test_checkpoints_in_other_forms(tmp_path, family, changes):
    """config.json of transformers 4, head_dim null, shards with an index, bfloat16 on disk, stray buffers."""
    modules, model_class, config = family()
    reference = save_random(
        tmp_path, model_class, config, rewrite=lambda config: as_transformers_4(config) | changes, max_shard_size="60KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    prompts = random_prompts(30, 4)
    assert_matches(reference, prompts, decode(modules, tmp_path, prompts, max_new_tokens=8))

    other = tmp_path / "bfloat16"
    reference.bfloat16().save_pretrained(other)
    reference = model_class.from_pretrained(other, dtype="float32")
    assert_matches(reference, prompts, decode(modules, other, prompts, max_new_tokens=8))


def test_rows_stop_on_their_own(checkpoints):
    """A stop token ends its row and no other, and is the row's last token; max_seq_len ends the rest."""
    modules, path, reference = checkpoints("llama 3.1")
    prompts = random_prompts(9, 30, 17)
    free = decode(modules, path, prompts, max_new_tokens=20)
    stop = free[0][5].id
    rows = decode(modules, path, prompts, max_new_tokens=20, stop_tokens=(stop,), max_seq_len=40)
    for prompt, row, unstopped in zip(prompts, rows, free, strict=True):
        ids = [token.id for token in unstopped][: 40 - len(prompt) + 1]
        ids = ids[: ids.index(stop) + 1] if stop in ids else ids
        assert [token.id for token in row] == ids
        assert row[-1].finish_reason == ("stop" if stop in ids else "length")
        assert all(token.finish_reason is None for token in row[:-1])
    assert_matches(reference, prompts, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_a_row_does_not_depend_on_its_batch(checkpoints, dtype):
    modules, path, _ = checkpoints("llama 3.1")
    prompts = random_prompts(9, 400, 50)
    options = {"dtype": dtype, "max_new_tokens": 10, "max_seq_len": 410}
    together = decode(modules, path, prompts, **options)
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = decode(modules, path, [prompt], **options)
        assert [token.id for token in alone] == [token.id for token in row]


def test_rows_end_with_max_seq_len(checkpoints):
    """A row that has filled max_seq_len stands still until the host has seen that it ended."""
    modules, path, _ = checkpoints("llama 3.1")
    rows = decode(modules, path, random_prompts(250, 2), max_new_tokens=300, max_seq_len=256)
    assert [len(row) for row in rows] == [7, 255]
