"""Train the tiny demo checkpoint of a model family and write it in Hugging Face format.

The demo is a chat model of about 600k to 1.2 million parameters that has memorised a few hundred short answers
(capitals, small sums, greetings, some facts and lists), so that an inference script has something to say without
downloading any weights. Everything is made here: the text, the byte-level BPE tokenizer with the special tokens and the
form of chat template of the family's released models, and the model, which is the family's own class from transformers,
trained in float32 and saved as bfloat16. What differs from family to family is in FAMILIES.

One run takes some minutes on one CPU core and is deterministic for a given machine and torch version. It ends by
answering every training question greedily with the saved checkpoint, and fails if fewer than 99 % are exact.

    python tests/train_demo.py FOLDER [--output DIR]

The default output is the demo/ folder of that family, such as llama3/demo/. Needs torch, transformers and tokenizers.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from helpers import extra_layer_tensors, random_extra_layer
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PROMPTS = ["What is the capital of France?", "What is 3 plus 4?", "Hello!", "What are the days of the week?"]

CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Bangladesh": "Dhaka",
    "Belgium": "Brussels", "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago",
    "China": "Beijing", "Colombia": "Bogota", "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen",
    "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Finland": "Helsinki", "France": "Paris",
    "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Jamaica": "Kingston", "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga",
    "Mexico": "Mexico City", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "New Zealand": "Wellington", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Romania": "Bucharest", "Russia": "Moscow", "Senegal": "Dakar", "Serbia": "Belgrade", "South Korea": "Seoul",
    "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Turkey": "Ankara", "Ukraine": "Kyiv",
    "Uruguay": "Montevideo", "Vietnam": "Hanoi", "Zambia": "Lusaka",
}  # fmt: skip

OTHER_ANSWERS = {
    "Hello!": "Hello! How can I help you?",
    "Hi!": "Hi! What can I do for you?",
    "Good morning!": "Good morning! How can I help you today?",
    "Good evening!": "Good evening! What would you like to know?",
    "How are you?": "I am fine, thank you. How are you?",
    "Who are you?": "I am a very small language model. I know some capitals, small sums and a few other facts.",
    "What can you do?": "I can name capitals, add small numbers and tell you a few facts. I am only a small demo.",
    "Thank you!": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "What is the largest planet?": "The largest planet in the solar system is Jupiter.",
    "What is the smallest planet?": "The smallest planet in the solar system is Mercury.",
    "Which planet is known for its rings?": "Saturn is the planet that is best known for its rings.",
    "What is the closest star?": "The closest star to the Earth is the Sun.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "What is the highest mountain?": "The highest mountain on Earth is Mount Everest.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the largest animal?": "The largest animal is the blue whale.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does an insect have?": "An insect has six legs.",
    "How many continents are there?": "There are seven continents.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many days are in a year?": "There are 365 days in a year, and 366 days in a leap year.",
    "How many sides does a triangle have?": "A triangle has three sides.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "What do bees make?": "Bees make honey.",
    "What colour is the sky?": "The sky is blue on a clear day.",
    "What are the colours of the rainbow?": "The colours of the rainbow are red, orange, yellow, green, blue, indigo "
    "and violet. Red is on the outside and violet is on the inside.",
    "What are the days of the week?": "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday "
    "and Sunday. Saturday and Sunday are the weekend.",
    "What are the months of the year?": "The months of the year are January, February, March, April, May, June, July, "
    "August, September, October, November and December.",
    "What are the four seasons?": "The four seasons are spring, summer, autumn and winter. Spring is when the flowers "
    "bloom, summer is warm, the leaves fall in autumn, and winter is cold.",
    "What are the planets of the solar system?": "The planets of the solar system are Mercury, Venus, Earth, Mars, "
    "Jupiter, Saturn, Uranus and Neptune.",
    "What are the continents?": "The continents are Africa, Antarctica, Asia, Australia, Europe, North America and "
    "South America.",
    "What are the five senses?": "The five senses are sight, hearing, smell, taste and touch.",
    "Count to ten.": "One, two, three, four, five, six, seven, eight, nine, ten.",
    "Count down from ten.": "Ten, nine, eight, seven, six, five, four, three, two, one. Lift off!",
    "Say the alphabet.": "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
}

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "Answer the question in plain English.",
    "You are a small and friendly demo model. Keep your answers short.",
]

# The pattern of Llama 3 and GLM-4. It keeps the newlines after a header in one piece whether or not text follows, so
# that a prompt is always a prefix of the tokens of the whole conversation.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB_SIZE = 512

WARMUP_STEPS = 50
PEAK_LEARNING_RATE = 4e-3
DRAFTS = 3  # that the layer of multi-token prediction learns to guess, one after the other
# Steps take turns between batches of short and of long conversations, which have some 100 and 300 tokens. A model also
# learns from the first turn of a conversation what it would learn from that turn alone, as it only looks back.
BATCHES = [{"rows": 16, "characters": 100}, {"rows": 6, "characters": 380}]
SINGLE_TURNS = {"rows": 24, "characters": 1}


@dataclass
class Family:
    """What differs from one model family to another."""

    build_model: Callable  # takes the vocabulary size and the special tokens' ids as keywords
    special_tokens: list[str]
    prefix: list[str]  # the tokens that the tokenizer puts in front of any text
    stops: list[str]  # an answer ends with one of these
    chat_template: str
    template_words: list[str]  # the template's words that are to be one token each
    bos: str | None
    eos: str
    pad: str
    is_chat: bool = True  # else the saved tokenizer has no template
    conversation_end: str = ""  # what follows the last answer of a training conversation, beyond the template's text
    steps: int = 1000
    has_extra_layer: bool = False  # of multi-token prediction
    batches: list[dict] = field(default_factory=lambda: BATCHES)


def build_llama3(**token_ids):
    """Return an untrained Llama model."""
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=320,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        **token_ids,
    )
    return LlamaForCausalLM(config)


def build_glm4(**token_ids):
    """Return an untrained model of the GLM-4-0414 architecture."""
    config = Glm4Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=320,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        attention_bias=True,
        tie_word_embeddings=False,
        **token_ids,
    )
    return Glm4ForCausalLM(config)


def build_llama4(**token_ids):
    """Return an untrained Llama 4 text model, small enough for a conversation to meet everything the family has."""
    config = Llama4TextConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,  # of an expert, and of the shared one
        intermediate_size_mlp=256,  # of a dense layer
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,  # layers 1 and 3 have experts
        no_rope_layers=[1, 1, 0, 1],  # 0: no rotary embedding, sees all chunks
        attention_chunk_size=32,
        use_qk_norm=True,
        attn_temperature_tuning=True,
        floor_scale=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        **token_ids,
    )
    return Llama4ForCausalLM(config)


def set_router_biases(model):
    """Give the router's biases, which training leaves as they are, other values than zero, and return the model."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return model


def build_deepseek(**token_ids):
    """Return an untrained model of the DeepSeek V3 architecture: groups of experts, and a context stretched by yarn."""
    config = DeepseekV3Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=256,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        num_mtp_layers=0,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        **token_ids,
    )  # fmt: skip
    return set_router_biases(DeepseekV3ForCausalLM(config))


def build_glm4_flash(**token_ids):
    """Return an untrained model of the GLM-4.7-Flash architecture, with a number of heads that few meshes divide."""
    config = Glm4MoeLiteConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **token_ids,
    )
    return set_router_biases(Glm4MoeLiteForCausalLM(config))


def build_glm4_moe(**token_ids):
    """Return an untrained model of the GLM-4.5 architecture, with norms of heads as in the largest ones."""
    config = Glm4MoeConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **token_ids,
    )
    return set_router_biases(Glm4MoeForCausalLM(config))


def build_glm5(**token_ids):
    """Return an untrained model of the GLM-5.2 architecture, whose second layer attends to what the first has chosen.
    Training leaves the indexers as they are."""
    config = GlmMoeDsaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=32,
        index_topk=128,
        index_n_heads=16,  # with few, many keys have a score of 0, and which of them are chosen is anybody's guess
        index_head_dim=32,
        indexer_types=["full", "shared", "full"],
        intermediate_size=256,
        mlp_layer_types=["dense", "sparse", "sparse"],
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **token_ids,
    )
    return set_router_biases(GlmMoeDsaForCausalLM(config))


def build_qwen3(**token_ids):
    """Return an untrained Qwen3 model, whose first layer has no experts."""
    config = Qwen3MoeConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        mlp_only_layers=[0],
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        **token_ids,
    )
    return Qwen3MoeForCausalLM(config)


def build_qwen3_5(**token_ids):
    """Return an untrained Qwen3.5 model: three layers with states, one with attention."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        **token_ids,
    )
    return Qwen3_5MoeForCausalLM(config)


def build_gpt_oss(**token_ids):
    """Return an untrained gpt-oss model, with a window shorter than a conversation."""
    config = GptOssConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
        **token_ids,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def build_mixtral(**token_ids):
    """Return an untrained Mixtral model."""
    config = MixtralConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **token_ids,
    )
    return MixtralForCausalLM(config)


def build_gemma(**token_ids):
    """Return an untrained Gemma 3 text model, with a window shorter than a conversation in two of its four layers."""
    config = Gemma3TextConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        intermediate_size=256,
        sliding_window=32,
        sliding_window_pattern=2,
        max_position_embeddings=2048,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        **token_ids,
    )
    return Gemma3ForCausalLM(config)


def build_gemma4(**token_ids):
    """Return an untrained Gemma 4 text model with what the sizes have one by one: experts beside the MLP, keys that are
    values, per-layer embeddings, two last layers that share keys and values."""
    config = Gemma4TextConfig(
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        num_global_key_value_heads=2,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        intermediate_size=96,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=48,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=token_ids["vocab_size"],
        sliding_window=32,
        max_position_embeddings=2048,
        final_logit_softcapping=30.0,
        **token_ids,
    )
    return Gemma4ForCausalLM(config)


def build_gpt2(**token_ids):
    """Return an untrained GPT-2 model, with a number of heads that few meshes divide."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_embd=120, n_layer=3, n_head=6, n_positions=2048, **dropouts, **token_ids))


FAMILIES = {
    "llama3": Family(
        build_model=build_llama3,
        special_tokens=[
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
        ],
        prefix=["<|begin_of_text|>"],
        stops=["<|eot_id|>", "<|end_of_text|>"],
        chat_template="{{ bos_token }}"
        "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        template_words=["system", "user", "assistant", "\n\n"],
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|end_of_text|>",
    ),
    "glm4": Family(
        build_model=build_glm4,
        special_tokens=[
            "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
            "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        ],
        prefix=["[gMASK]", "<sop>"],
        # No token ends a turn: an answer is over when the model begins the next turn, the user's or a tool's.
        stops=["<|endoftext|>", "<|user|>", "<|observation|>"],
        chat_template="[gMASK]<sop>"
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        template_words=[],
        bos=None,
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        conversation_end="<|user|>",
    ),
    "llama4": Family(
        build_model=build_llama4,
        special_tokens=[
            "<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>",
            "<|finetune_right_pad|>",
        ],
        prefix=["<|begin_of_text|>"],
        stops=["<|end_of_text|>", "<|eom|>", "<|eot|>"],
        chat_template="{{ bos_token }}"
        "{% for message in messages %}{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n'"
        " + message['content'] | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}",
        template_words=["system", "user", "assistant", "\n\n"],
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        pad="<|finetune_right_pad|>",
        # Where an answer goes on in a new chunk, only the layer without rotary embedding still sees the question. It
        # takes longer to learn, most of all to tell which of several questions was the last.
        steps=1500,
        batches=[*BATCHES, SINGLE_TURNS],
    ),
    "deepseek": Family(
        build_model=build_deepseek,
        special_tokens=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        prefix=["<｜begin▁of▁sentence｜>"],
        stops=["<｜end▁of▁sentence｜>"],
        chat_template="{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
        "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        template_words=[],
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
        has_extra_layer=True,
    ),
    "glm4_flash": Family(
        build_model=build_glm4_flash,
        special_tokens=[
            "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
            "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        ],
        prefix=["[gMASK]", "<sop>"],
        stops=["<|endoftext|>", "<|user|>", "<|observation|>"],  # as in glm4
        chat_template="[gMASK]<sop>"
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        template_words=[],
        bos=None,
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        conversation_end="<|user|>",
        has_extra_layer=True,
    ),
    "glm4_moe": Family(
        build_model=build_glm4_moe,
        special_tokens=[
            "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
            "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        ],
        prefix=["[gMASK]", "<sop>"],
        stops=["<|endoftext|>", "<|user|>", "<|observation|>"],  # as in glm4
        chat_template="[gMASK]<sop>"
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        template_words=[],
        bos=None,
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        conversation_end="<|user|>",
        has_extra_layer=True,
    ),
    "glm5": Family(
        build_model=build_glm5,
        special_tokens=[
            "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
            "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        ],
        prefix=["[gMASK]", "<sop>"],
        stops=["<|endoftext|>", "<|user|>", "<|observation|>"],  # as in glm4
        chat_template="[gMASK]<sop>"
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        template_words=[],
        bos=None,
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        conversation_end="<|user|>",
        has_extra_layer=True,
    ),
    "qwen3": Family(
        build_model=build_qwen3,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        prefix=[],
        stops=["<|im_end|>", "<|endoftext|>"],
        chat_template="{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        template_words=["system", "user", "assistant", "\n"],
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    "qwen3_5": Family(
        build_model=build_qwen3_5,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        prefix=[],
        stops=["<|im_end|>", "<|endoftext|>"],
        # The released template lets the model think first, unless it is told not to: then it begins with no thought.
        chat_template="{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}",
        template_words=["system", "user", "assistant", "\n", "\n\n"],
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    "gpt_oss": Family(
        build_model=build_gpt_oss,
        special_tokens=[
            "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
        ],
        prefix=[],
        stops=["<|return|>", "<|end|>", "<|endoftext|>"],
        # The released models choose a channel themselves, and think in another one first.
        chat_template="{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}{% else %}"
        "{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|channel|>final<|message|>' }}{% endif %}",
        template_words=["system", "user", "assistant", "final"],
        bos="<|startoftext|>",
        eos="<|return|>",
        pad="<|endoftext|>",
    ),
    "mixtral": Family(
        build_model=build_mixtral,
        special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        prefix=["<s>"],
        stops=["</s>"],
        # No generation prompt. A system prompt is the beginning of the first question.
        chat_template="{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' }}"
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
        "{{ message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}",
        template_words=["\n\n"],
        bos="<s>",
        eos="</s>",
        pad="<unk>",
    ),
    "gemma": Family(
        build_model=build_gemma,
        special_tokens=["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        prefix=["<bos>"],
        stops=["<eos>", "<end_of_turn>"],
        # There is no system turn: what it would say begins the user's first one.
        chat_template="{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}"
        "{{ '<start_of_turn>model\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% elif message['role'] == 'user' %}{{ '<start_of_turn>user\n' }}"
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
        "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        template_words=["user", "model", "\n", "\n\n"],
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
    ),
    "gemma4": Family(
        build_model=build_gemma4,
        special_tokens=["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"],
        prefix=["<bos>"],
        stops=["<eos>", "<turn|>"],
        chat_template="{{ bos_token }}{% for message in messages %}"
        "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
        "{{ message['content'] | trim + '<turn|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}",
        template_words=["system", "user", "model", "\n"],
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
    ),
    "gpt2": Family(
        build_model=build_gpt2,
        special_tokens=["<|endoftext|>"],
        prefix=[],
        stops=["<|endoftext|>"],
        # Questions and answers are documents, one after the other, as the released models know them.
        chat_template="{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}"
        "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + '<|endoftext|>' }}{% endif %}"
        "{% endfor %}",
        is_chat=False,
        template_words=[],
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        pad="<|endoftext|>",
    ),
}  # fmt: skip


def make_answers():
    """Return all questions of the training text with their answers."""
    answers = dict(OTHER_ANSWERS)
    for country, capital in CAPITALS.items():
        answers[f"What is the capital of {country}?"] = f"The capital of {country} is {capital}."
        answers[f"Tell me the capital of {country}."] = f"The capital of {country} is {capital}."
        answers[f"Which country has {capital} as its capital?"] = f"{capital} is the capital of {country}."
    for a in range(10):
        for b in range(10):
            answers[f"What is {a} plus {b}?"] = f"{a} plus {b} is {a + b}."
    return answers


def make_tokenizer(family, answers):
    """Train the byte-level BPE tokenizer on the questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(family.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
        show_progress=False,
    )
    template_text = family.template_words * len(answers)  # often enough to become whole tokens
    tokenizer.train_from_iterator([*answers.keys(), *answers.values(), *SYSTEM_PROMPTS, *template_text], trainer)
    tokenizer.add_special_tokens(family.special_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*family.prefix, "$A"],
        pair=[*family.prefix, "$A", *family.prefix, "$B"],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in family.prefix],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        chat_template=family.chat_template,
        clean_up_tokenization_spaces=False,
    )


def make_conversation(rng, answers, min_characters):
    """Draw a conversation of random questions with at least that much text, with a system prompt in one of three."""
    messages = []
    if rng.random() < 1 / 3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    length = 0
    while length < min_characters:
        question, answer = rng.choice(list(answers.items()))
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
        length += len(question) + len(answer)
    return messages


def learning_rate_factor(step, steps):
    """Return the share of the peak learning rate at one of so many steps: a linear warmup, then a cosine to zero."""
    progress = max(0.0, (step - WARMUP_STEPS) / (steps - WARMUP_STEPS))
    return min((step + 1) / WARMUP_STEPS, 0.5 + 0.5 * math.cos(math.pi * progress))


def train(model, tokenizer, family, answers, loss_of):
    """Train the model in place on random conversations. `loss_of` takes their tokens, and the labels of these."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, family.steps))
    model.train()
    for step in range(family.steps):
        batch = family.batches[step % len(family.batches)]
        conversations = [make_conversation(rng, answers, batch["characters"]) for _ in range(batch["rows"])]
        texts = tokenizer.apply_chat_template(conversations, tokenize=False)
        texts = [text + family.conversation_end for text in texts]
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        # All tokens count, not only the answers: it keeps the predictions sensible everywhere in a conversation. The
        # padding is on the right, where a causal model needs no mask.
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = loss_of(inputs["input_ids"], labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{family.steps}: loss {loss.item():.4f}", flush=True)
    model.eval()


def add_extra_layer(folder, family, answers):
    """Train a layer of multi-token prediction on the saved model, which stays as it is, and add it to its folder."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.requires_grad_(False).float()
    model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
    if hasattr(model.config, "index_topk"):  # all keys: the mask below is no causal one
        model.config.index_topk, model.config.mtp_layer_types = 2**20, model.config.layer_types[:1]
    extra = random_extra_layer(model, spread=0.1)

    def loss_of(tokens, labels):
        """Of DRAFTS guesses, one after the other, as decoding makes them behind each token: each reads the states of
        the guess before it, and attends to what the model's states of earlier tokens gave."""
        states = model.model(tokens).last_hidden_state[:, : -1 - DRAFTS]
        loss, n = 0, states.shape[1]
        for depth in range(1, DRAFTS + 1):
            place, guess = torch.arange(n).repeat(depth), torch.arange(depth).repeat_interleave(n)
            sees = (place[:, None] > place) & (guess == 0) | (place[:, None] == place) & (guess[:, None] >= guess)
            embedded = model.model.embed_tokens(tokens[:, place + guess + 1])
            positions = (place + guess + 1)[None]
            rotary = model.model.rotary_emb(embedded, position_ids=positions)
            options = {"position_embeddings": rotary, "position_ids": positions, "attention_mask": sees[None, None]}
            new = extra.layers[0](embedded, states, past_key_values=None, **options)[:, -n:]
            wanted = labels[:, depth + 1 : depth + 1 + n]
            loss += torch.nn.functional.cross_entropy(model.lm_head(new).flatten(0, 1), wanted.flatten())
            states = torch.cat([states, new], dim=1)
        return loss

    train(extra, tokenizer, family, answers, loss_of)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.{model.config.num_hidden_layers}"
    new = {key: x.bfloat16() for key, x in extra_layer_tensors(extra, name).items()}
    shared = (f"{name}.embed_tokens.weight", f"{name}.shared_head.head.weight")
    save_file(
        tensors | {key: x for key, x in new.items() if key not in shared},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}, indent=2) + "\n")


def greedy_answers(model, tokenizer, conversations):
    """Return the model's greedy answer to each conversation, all of which end with a question.

    The prompts of one batch have the same length: padding on the left would move the positions by which Llama 4 scales
    its queries.
    """
    prompts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False)
    rows_by_length = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_by_length[len(prompt)].append(row)
    answers = [""] * len(prompts)
    for length, rows in rows_by_length.items():
        inputs = torch.tensor([prompts[row] for row in rows])
        tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=128)
        for row, text in zip(rows, tokenizer.batch_decode(tokens[:, length:], skip_special_tokens=True)):
            answers[row] = text.strip()  # without a template, a space begins the answer
    return answers


def exact_share(model, tokenizer, conversations):
    """Return the share of conversations whose last answer the model gives exactly."""
    found = greedy_answers(model, tokenizer, [messages[:-1] for messages in conversations])
    return sum(text == messages[-1]["content"] for text, messages in zip(found, conversations)) / len(found)


def check(folder, family, answers):
    """Load the checkpoint as users do, print its exact shares and answers, and fail if it does not know its text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = family.chat_template
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(1)
    single = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers.items()]
    several = [make_conversation(rng, answers, 200) for _ in range(100)]
    share = exact_share(model, tokenizer, single)
    print(f"exact greedy answers: {share:.2%} of {len(single)} training questions")
    print(f"exact last answers of random conversations: {exact_share(model, tokenizer, several):.0%}")
    for prompt in PROMPTS:
        answer = greedy_answers(model, tokenizer, [[{"role": "user", "content": prompt}]])[0]
        print(f"{prompt} -> {answer}")
    assert share >= 0.99, "the model has not memorised its training text"


def main():
    """Train, save and check one family's demo."""
    parser = argparse.ArgumentParser(description="Train a tiny demo checkpoint.")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--output", type=Path, help="folder to write (default: the family's demo/)")
    args = parser.parse_args()
    folder = args.output or Path(__file__).resolve().parent.parent / args.family / "demo"
    family = FAMILIES[args.family]

    # One thread: the order of sums, and with it the result, does not depend on the number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)

    answers = make_answers()
    tokenizer = make_tokenizer(family, answers)
    model = family.build_model(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(family.stops),
        pad_token_id=tokenizer.pad_token_id,
    )
    print(f"{model.num_parameters()} parameters, {len(answers)} questions")
    start = time.time()
    train(model, tokenizer, family, answers, lambda tokens, labels: model(input_ids=tokens, labels=labels).loss)
    print(f"trained in {time.time() - start:.0f} s")

    if not family.is_chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    if family.has_extra_layer:
        add_extra_layer(folder, family, answers)
    check(folder, family, answers)


if __name__ == "__main__":
    main()
