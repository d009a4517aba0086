"""What qwen3/ alone has: FP8 in blocks of its mixtures, and what its config.json may not say."""

import jax.numpy as jnp
import pytest
from helpers import assert_matches, decode
from test_deepseek import save_fp8
from test_parity import qwen3, qwen_2, qwen_3, qwen_3_moe, random_prompts


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_fp8_against_its_dequantized_twin(tmp_path, mesh):
    _, *reference = qwen_3_moe(norm_topk_prob=True, mlp_only_layers=[0])
    reference = save_fp8(tmp_path, *reference, (32, 16))
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(qwen3, tmp_path, prompts, mesh, max_new_tokens=8))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (qwen_3, {"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
        (qwen_3, {"model_type": "qwen3_next"}, "model_type 'qwen3_next' is not supported"),
        (qwen_3, {"layer_types": ["sliding_attention"] * 2}, "layer_types cannot be"),
        (qwen_3, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        (qwen_3, {"use_sliding_window": 1}, "use_sliding_window cannot be 1"),
        (qwen_3, {"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers cannot be -1"),
        (qwen_3, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        (qwen_3, {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (qwen_3, {"head_dim": 7}, "head_dim 7 must be even"),
        (qwen_3, {"is_causal": False}, "is_causal False is not supported"),
        (qwen_3, {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 0}}, "truncate cannot be 0"),
        (
            qwen_3,
            {"rope_scaling": {"full_attention": {"rope_theta": 1e4}}},
            "one table for all layers",
        ),
        (qwen_3, {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        (qwen_3_moe, {"num_experts_per_tok": 17}, "num_experts_per_tok 17 exceeds the 16 experts"),
        (qwen_3_moe, {"num_local_experts": 10**6}, "num_experts cannot be 1000000"),
        (qwen_3_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step cannot be 0"),
        (qwen_3_moe, {"mlp_only_layers": 0}, "mlp_only_layers cannot be 0"),
        (qwen_3_moe, {"mlp_only_layers": [True]}, "mlp_only_layers cannot be"),
        (qwen_3_moe, {"num_hidden_layers": 10**6}, "num_hidden_layers cannot be"),
    ],
)
def test_what_config_json_may_not_say(family, changes, words):
    _, _, config = family()
    with pytest.raises(qwen3.model.InputError, match=words):
        qwen3.model.Config.from_dict(config.to_dict() | changes)


@pytest.mark.parametrize(
    ("family", "options", "moe_layers", "windowed_layers"),
    [
        (qwen_3, {}, (), ()),
        (qwen_3, {"num_experts": 0}, (), ()),
        (qwen_3, {"use_sliding_window": True, "max_window_layers": 3}, (), (3, 4)),
        (qwen_3, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (), ()),
        (qwen_2, {}, (), ()),
        (qwen_2, {"use_sliding_window": True, "max_window_layers": 2}, (), (2, 3, 4)),
        (qwen_3_moe, {}, (0, 1, 2, 3, 4), ()),
        (qwen_3_moe, {"num_experts": 0}, (), ()),
        (qwen_3_moe, {"decoder_sparse_step": 2, "mlp_only_layers": [1], "use_sliding_window": True}, (3,), range(5)),
    ],
)
def test_what_a_layer_has(family, options, moe_layers, windowed_layers):
    """As transformers' own classes have it, whose modules say so. Releases are older than the list layer_types."""
    _, model_class, config = family(num_hidden_layers=5, **options)
    written = config.to_dict()
    for raw in (written, {name: value for name, value in written.items() if name != "layer_types"}):
        raw |= {"sliding_window": options.get("sliding_window", 4096)}  # transformers 5 writes null where none has one
        read = qwen3.model.Config.from_dict(raw)
        windowed = tuple(i for i in range(5) if read.mask(i).window)
        assert (tuple(filter(read.has_experts, range(5))), windowed) == (moe_layers, tuple(windowed_layers))
    layers = model_class(config).model.layers
    assert moe_layers == tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    assert tuple(windowed_layers) == tuple(i for i, layer in enumerate(layers) if layer.self_attn.sliding_window)


def test_a_mesh_that_does_not_divide_the_experts():
    _, _, config = qwen_3_moe(num_experts=12)
    config = qwen3.model.Config.from_dict(config.to_dict())
    with pytest.raises(qwen3.model.InputError, match="ep = 8 does not divide the 12 experts"):
        qwen3.model.abstract_weights(config, qwen3.model.make_mesh(1, 8, 1), jnp.float32)
