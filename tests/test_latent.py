"""Latent attention and routing of deepseek/ and glm4_flash/: every path against numpy in float64, the kernels under the
interpreter and compiled."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import import_folder, interpret_kernels
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

model = import_folder("deepseek").model
N, H, U, W, L = 8, 16, 8, 24, 32  # over all devices


def random_arguments(B, tokens, dtype, int8_weights=False):
    """q, q_rope, the new token, all tokens' latents and rope keys, and kv_b: as one device would see them."""
    random = np.random.default_rng(0)

    def array(*shape, scale=1.0):
        return jnp.asarray(random.standard_normal(shape) * scale, dtype)

    q, q_rope = array(B, 1, N, H, scale=0.7), array(B, 1, N, U, scale=0.7)
    new, cached = (model.LayerCache(array(B, T, L), array(B, T, U)) for T in (1, tokens))
    kv_b = array(N, H + W, L, scale=L**-0.5)
    return q, q_rope, new, cached, model.quantize(kv_b) if int8_weights else kv_b


def floats(x):
    if isinstance(x, model.Int8):
        return np.asarray(x.values, np.float64) * np.asarray(x.scale, np.float64)[..., None]
    return np.asarray(x, np.float64)


def reference(q, q_rope, new, cached, positions, kv_b):
    """In numpy and float64, a row and a head at a time, keys and values expanded."""
    kv_b = floats(kv_b)
    out = np.zeros((len(positions), 1, N, W))
    for b, position in enumerate(positions):
        latent, rope_key = (
            np.concatenate([floats(old)[b, :position], floats(token)[b]])
            for old, token in zip(cached, new, strict=True)
        )
        for n in range(N):
            keys, values = latent @ kv_b[n, :H].T, latent @ kv_b[n, H:].T
            scores = keys @ floats(q)[b, 0, n] + rope_key @ floats(q_rope)[b, 0, n]
            weights = np.exp(scores - scores.max())
            out[b, 0, n] = weights @ values / weights.sum()
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


def select(monkeypatch, platform):
    """Has the model take the path of another platform, its kernels under the interpreter."""
    if platform == "tpu":
        interpret_kernels(monkeypatch, model)


@pytest.mark.parametrize(
    ("mesh", "B", "int8"), [((1, 1, 1), 2, False), ((1, 2, 2), 1, True), ((1, 1, 4), 2, False), ((1, 2, 2), 3, False)]
)
def test_prefill_of_a_tpu(monkeypatch, mesh, B, int8):
    """Pieces of a prompt by the kernel, in several blocks, as by plain JAX."""
    T, tokens = 64, 256
    mesh = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    R = model.cache_sharers(None, model.model_shards(mesh))
    heads = P("dp", None, model.MODEL_AXES)

    def attend(q, q_rope, new, cache, positions, w):
        options = {"start": positions[0, 0], "is_live": jnp.ones(B, bool), "R": R}
        return model.prefill_attention(q, q_rope, new, cache, positions, w, **options)

    specs = heads, heads, P("dp"), model.CACHE_SPEC, P("dp"), P(model.MODEL_AXES)
    kv_b = random_arguments(B, 1, jnp.float32)[4]
    w = {"k_b": kv_b[:, :H].reshape(-1, L), "v_b": kv_b[:, H:].reshape(-1, L)}

    def prefilled():
        program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
        I, parts = model.row_groups(B, R)
        cache = model.LayerCache(*(jnp.zeros((B // I, R, tokens // parts, width)) for width in (L, U)))
        cache = model.LayerCache(*map(model.quantize, cache)) if int8 else cache
        random, outs, program = np.random.default_rng(1), [], jax.jit(program)
        for i in range(tokens // T):
            q, q_rope, latent, rope_key = (
                jnp.asarray(random.standard_normal((B, T, *shape)), jnp.float32)
                for shape in ((N, H), (N, U), (L,), (U,))
            )
            positions = jnp.broadcast_to(i * T + jnp.arange(T), (B, T))
            out, cache = program(q / 5, q_rope / 5, model.LayerCache(latent, rope_key), cache, positions, w)
            outs.append(out)
        return outs, cache

    wanted, wanted_cache = prefilled()
    select(monkeypatch, "tpu")
    monkeypatch.setattr(model, "BLOCK_TOKENS", 128)
    outs, cache = prefilled()
    np.testing.assert_allclose(outs, wanted, atol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, wanted_cache)


@pytest.mark.parametrize(("platform", "int8"), [("cpu", False), ("tpu", True)])
@pytest.mark.parametrize(
    ("mesh", "sharers", "positions", "tokens"),
    [
        ((1, 1, 1), 32, (0, 127, 128, 300, 511), 512),
        ((1, 1, 1), 32, (0, 257, 640), 768),  # several blocks
        ((1, 1, 4), 32, (0, 130, 255), 256),  # tokens dealt out
        ((1, 2, 2), 32, (5, 77, 200, 128), 256),  # rows dealt out
        ((1, 1, 4), 32, (3, 511), 512),  # rows, then tokens
        ((1, 1, 2), 32, (3, 300, 511, 80), 512),  # several rows a device
        ((1, 2, 4), 2, (255, 0, 90), 256),  # several copies
        ((2, 1, 2), 32, (1, 250, 31, 64), 256),
    ],
    ids=str,
)
def test_decode_against_float64(monkeypatch, platform, mesh, sharers, positions, tokens, int8):
    width = 128 if platform == "tpu" else None  # as abstract_cache has it there
    monkeypatch.setattr(model, "CACHE_SHARERS", sharers)
    select(monkeypatch, platform)
    if tokens > 512:
        monkeypatch.setattr(model, "attention_kernel", partial(model.attention_kernel, block=256))
    dp = mesh[0]
    mesh = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    X = model.model_shards(mesh)
    R = model.cache_sharers(None, X)
    q, q_rope, new, cached, kv_b = random_arguments(len(positions), tokens, jnp.float32, int8)
    stored = new
    if int8:
        cached, stored = (model.LayerCache(*map(model.quantize, x)) for x in (cached, new))
    wanted = reference(q, q_rope, stored, cached, positions, kv_b)
    cached, stored = (jax.tree.map(partial(wide, width=width), x) for x in (cached, stored))
    cache = jax.tree.map(lambda x: jnp.asarray(dealt(x, dp, X, R)), cached)

    heads = P("dp", None, model.MODEL_AXES)
    k_b, v_b = (jax.tree.map(lambda x: x[:, part].reshape(-1, *x.shape[2:]), kv_b) for part in np.s_[:H, H:])
    specs = heads, heads, P("dp"), model.CACHE_SPEC, P("dp"), P(model.MODEL_AXES)
    program = jax.shard_map(
        partial(model.decode_attention, R=R), mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False
    )
    out, updated = jax.jit(program)(
        q, q_rope, new, cache, jnp.array(positions, jnp.int32)[:, None], {"k_b": k_b, "v_b": v_b}
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=2e-5)

    def with_new(old, token):
        old = np.array(old)
        for b, position in enumerate(positions):
            old[b, position] = np.asarray(token)[b, 0]
        return dealt(old, dp, X, R)

    jax.tree.map(np.testing.assert_array_equal, updated, jax.tree.map(with_new, cached, stored))


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


@pytest.mark.optimized
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(
    ("B", "G", "S"),
    [
        (8, 10, 4096),  # Flash on two chips (for R1 on 64 see test_compile)
        (1, 20, 1280),
        (3, 7, 640),
        (1, 256, 64),  # R1, a row on 32 chips
    ],
)
def test_compiles_for_tpus(topology, int8, B, G, S):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def side(slots, width):
        shape = B, 1, slots
        return (
            model.Int8(array(*shape, width, dtype=jnp.int8), array(*shape, dtype=jnp.float32))
            if int8
            else array(*shape, width)
        )

    arguments = (
        array(B, 1, G, 1, 640),
        model.LayerCache(array(B, 1, 1, 512), array(B, 1, 1, 128)),
        model.LayerCache(side(S, 512), side(S, 128)),
        array(B, dtype=jnp.int32),
    )
    kernel = partial(model.attention_kernel, window=None, R=1)
    program = jax.jit(kernel, donate_argnums=2).lower(*arguments).compile()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[2]))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < max(cache_bytes / 8, 2**20)  # no copy of the cache
