"""Latent attention and routing of deepseek/ and glm4_flash/: every path against numpy in float64, the kernels under the
interpreter and compiled."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import floats, import_folder, in_format, in_turns, interpret_kernels
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

model = import_folder("deepseek").model
N, H, U, W, L = 8, 16, 8, 24, 32  # over all devices


def random_arguments(starts, T, dtype, quantize=None):
    """q, q_rope, the latents and rotary keys of all tokens up to the last new one, and kv_b: as one device would see
    them."""
    random = np.random.default_rng(0)

    def array(*shape, scale=1.0):
        return jnp.asarray(random.standard_normal(shape) * scale, dtype)

    B, tokens = len(starts), max(starts) + T
    q, q_rope = array(B, T, N, H, scale=0.7), array(B, T, N, U, scale=0.7)
    history, kv_b = model.LayerCache(array(B, tokens, L), array(B, tokens, U)), array(N, H + W, L, scale=L**-0.5)
    return q, q_rope, history, in_format(model, kv_b, quantize)


def reference(q, q_rope, history, starts, kv_b):
    """In numpy and float64, a token and a head at a time, keys and values expanded."""
    q, q_rope, latents, rope_keys, kv_b = map(floats, (q, q_rope, *history, kv_b))
    out = np.zeros((*q.shape[:3], W))
    for b, t, n in np.ndindex(q.shape[:3]):
        latent, rope_key = (x[b, : starts[b] + t + 1] for x in (latents, rope_keys))
        scores = latent @ (kv_b[n, :H].T @ q[b, t, n]) + rope_key @ q_rope[b, t, n]
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ (latent @ kv_b[n, H:].T) / weights.sum()
    return out


def wide(x, width):
    """[B, tokens, C] with zeros up to `width` columns; scales have no columns."""
    return x if width is None or x.ndim < 3 else jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))


def dealt(x, dp, X, R):
    """[B, tokens, ..] as LayerCache's docstring says that devices hold it: [B / I, X, S, ..]."""
    x = np.asarray(x)
    shares = []
    for rows in np.split(x, dp):
        groups = np.gcd(len(rows), R)
        devices, parts = [], R // groups
        for r in range(X):
            group, part = divmod(r % R, parts)
            devices.append(np.split(rows, groups)[group][:, part::parts])
        shares.append(np.stack(devices, axis=1))
    return np.concatenate(shares)


def select(monkeypatch, platform, **options):
    """Has the model take the path of another platform, its kernels under the interpreter."""
    if platform == "tpu":
        interpret_kernels(monkeypatch, model, **options)
    if platform == "gpu":
        monkeypatch.setattr(model, "platform", lambda: "gpu")


ATTENTION = in_turns(
    [
        ((1, 1, 1), 32, (0, 127, 128, 300, 511), 1, 512),
        ((1, 1, 1), 32, (0, 257, 640), 1, 768),  # several blocks
        ((1, 1, 4), 32, (0, 130, 255), 1, 256),  # tokens dealt out
        ((1, 2, 2), 32, (5, 77, 200, 128), 1, 256),  # rows dealt out
        ((1, 1, 4), 32, (3, 511), 1, 512),  # rows, then tokens
        ((1, 1, 2), 32, (3, 300, 511, 80), 1, 512),  # several rows a device
        ((1, 2, 4), 2, (255, 0, 90), 1, 256),  # several copies
        ((2, 1, 2), 32, (1, 250, 31, 64), 1, 256),
        ((1, 1, 1), 32, (0, 126, 254), 3, 512),  # several tokens, in two tiles and two blocks
        ((1, 1, 4), 32, (3, 504), 8, 512),
        ((1, 1, 1), 32, (0, 77, 440), 64, 512),  # many, expanded
        ((1, 1, 4), 32, (0, 77, 190), 64, 256),
        ((1, 1, 4), 32, (130, 448), 64, 512),
        ((2, 1, 4), 2, (0, 190, 187, 3), 32, 256),  # as many blocks on all devices, for the interpreter
    ],
    ("tpu", "int8"),
    ("cpu", None),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "sharers", "starts", "T", "slots", "platform", "quantize"), ATTENTION, ids=str)
def test_against_float64(monkeypatch, platform, mesh, sharers, starts, T, slots, quantize):
    width = 128 if platform == "tpu" else None  # as abstract_cache has it there
    monkeypatch.setattr(model, "CACHE_SHARERS", sharers)
    select(monkeypatch, platform, block=256 if slots > 512 else None)
    dp, B = mesh[0], len(starts)
    mesh = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    X = model.model_shards(mesh)
    R = model.cache_sharers(None, X)
    q, q_rope, history, kv_b = random_arguments(starts, T, jnp.float32, quantize)
    new = model.LayerCache(*(jnp.stack([x[b, s : s + T] for b, s in enumerate(starts)]) for x in history))
    history = model.LayerCache(*(in_format(model, x, quantize) for x in history))
    wanted = reference(q, q_rope, history, starts, kv_b)

    def cache_with(n):  # the tokens up to the n-th new one, and something else behind them
        def side(x):
            x = np.asarray(wide(x, width))
            held = np.full((B, slots, *x.shape[2:]), 3, x.dtype)
            for b, start in enumerate(starts):
                held[b, : start + n] = x[b, : start + n]
            return jnp.asarray(dealt(held, dp, X, R))

        return jax.tree.map(side, history)

    heads = P("dp", None, model.MODEL_AXES)
    k_b, v_b = (jax.tree.map(lambda x: x[:, part].reshape(-1, *x.shape[2:]), kv_b) for part in np.s_[:H, H:])
    specs = heads, heads, P("dp"), model.CACHE_SPEC, P("dp"), P(model.MODEL_AXES)

    def attend(q, q_rope, new, cache, positions, w):
        return model.cached_attention(
            q, q_rope, new, cache, model.Span(positions, None, None, B // dp, R), w, lambda i: model.Mask()
        )

    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
    positions = jnp.array(starts)[:, None] + jnp.arange(T)
    out, cache = jax.jit(program)(q, q_rope, new, cache_with(0), positions, {"k_b": k_b, "v_b": v_b})
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, cache_with(T))


def routing_config(E, groups, topk_group, k, norm=True):
    fields = dict.fromkeys(
        (f.name for f in dataclasses.fields(model.Config) if f.default is dataclasses.MISSING), 8
    ) | {
        "n_routed_experts": E,
        "num_experts_per_tok": k,
        "n_group": groups,
        "topk_group": topk_group,
        "norm_topk_prob": norm,
        "routed_scaling_factor": 2.5,
    }
    return model.Config(**fields)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("B", "E", "groups", "topk_group", "k"), [(1, 256, 8, 4, 8), (5, 64, 1, 1, 6), (130, 32, 4, 1, 3), (8, 12, 3, 2, 8)]
)
def test_routing_against_float64(monkeypatch, platform, has_bias, B, E, groups, topk_group, k):
    select(monkeypatch, platform)
    config = routing_config(E, groups, topk_group, k, norm=has_bias)
    random = np.random.default_rng(0)
    logits = random.standard_normal((B, E)).astype(np.float32)
    bias = random.uniform(-2, 0.5, E).astype(np.float32) if has_bias else None  # so low that choices are negative
    ids, scores = jax.jit(partial(model.route, config=config))(logits, bias)

    exact = logits.astype(np.float64)
    probabilities = 1 / (1 + np.exp(-exact)) if has_bias else np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    choice = probabilities + bias if has_bias else probabilities
    for b in range(B):
        by_group = choice[b].reshape(groups, -1)
        totals = np.sort(by_group)[:, -2 if has_bias else -1 :].sum(-1)
        allowed = np.argsort(totals)[-topk_group:]
        in_question = [e for e in range(E) if e // (E // groups) in allowed]
        wanted = sorted(in_question, key=lambda e: -choice[b, e])[:k]
        assert sorted(np.asarray(ids[b]).tolist()) == sorted(wanted)
        weights = probabilities[b, np.asarray(ids[b])]
        weights = weights / (weights.sum() if has_bias else 1) * 2.5
        np.testing.assert_allclose(scores[b], weights, rtol=1e-5)


COMPILED = in_turns(
    [
        (8, 10, 4096, 1),  # Flash on two chips (for R1 on 64 see test_compile)
        (1, 20, 1280, 3),
        (3, 7, 640, 1),
        (1, 256, 64, 1),  # R1, a row on 32 chips
        (1, 256, 64, 2),
    ],
    ("v5e:2x2", "int8"),
    ("v6e:2x2", None),
    ("v5p:2x2x1", "int8"),
    ("v5e:2x2", None),
)


@pytest.mark.optimized
@pytest.mark.parametrize(("B", "G", "S", "T", "topology", "quantize"), COMPILED)
def test_compiles_for_tpus(topology, quantize, B, G, S, T):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def side(slots, width):
        held = model.FORMATS[quantize].declare((B, 1, slots, width), jnp.bfloat16)
        return jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), held)

    arguments = (
        array(B, 1, 1, T * G, 640),
        model.LayerCache(array(B, 1, T, 512), array(B, 1, T, 128)),
        model.LayerCache(side(S, 512), side(S, 128)),
        array(B, dtype=jnp.int32),
    )
    kernel = partial(model.decode_kernel, mask=model.Mask(), T=T, run=G)
    program = jax.jit(kernel, donate_argnums=2).lower(*arguments).compile()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[2]))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    expected = 4 * B * T * G * (512 + 128) + 2**18  # the output, 513 columns as 640, and what a v5p always takes
    assert memory.temp_size_in_bytes < expected + cache_bytes / 8  # no copy of the cache
