"""The Pallas ragged decode kernel: numbers under the TPU interpreter, and the real compiler for TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STRICT, import_folder, interpret_kernels
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

llama3 = import_folder("llama3")
model = llama3.model


def random_arguments(B, K, G, S, H, dtype, int8):
    keys = jax.random.split(jax.random.key(0), 5)
    q = (jax.random.normal(keys[0], (B, K, G, 1, H)) * 3 / H**0.5).astype(dtype)
    new, cache = (
        model.LayerCache(*(jax.random.normal(key, (B, K, slots, H)).astype(dtype) for key in pair))
        for slots, pair in ((1, keys[1:3]), (S, keys[3:5]))
    )
    if int8:
        cache = model.LayerCache(*map(model.quantize, cache))
    return q, new, cache


def floats(x):
    return x.values * x.scale[..., None] if isinstance(x, model.Int8) else x


def reference(q, new, cache, positions, window):
    """In numpy and float64, a row at a time."""
    q = np.asarray(q, np.float64)[:, :, :, 0]
    k, v = (np.array(floats(x), np.float64) for x in cache)
    new = model.as_stored(new, cache)
    out = np.zeros(q.shape)
    for b, position in enumerate(positions):
        k[b, :, position], v[b, :, position] = floats(new.k)[b, :, 0], floats(new.v)[b, :, 0]
        first = max(0, position - window + 1) if window else 0
        seen = slice(first, position + 1)
        scores = np.einsum("kgh,ksh->kgs", q[b], k[b, :, seen])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b] = np.einsum("kgs,ksh->kgh", weights / weights.sum(-1, keepdims=True), v[b, :, seen])
    return out[:, :, :, None]


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(
    ("shape", "positions", "window", "block", "dtype"),
    [
        ((4, 2, 4, 1024, 64), (0, 255, 256, 1023), None, 256, jnp.float32),
        ((4, 2, 4, 1024, 64), (0, 255, 256, 1023), 100, 256, jnp.bfloat16),
        ((2, 8, 1, 512, 128), (511, 77), 300, 128, jnp.float32),  # no groups, a window wider than a block
        ((3, 1, 9, 768, 96), (3, 700, 127), None, None, jnp.bfloat16),  # more query heads than sublanes
    ],
)
def test_against_float64(monkeypatch, shape, positions, window, block, dtype, int8):
    q, new, cache = random_arguments(*shape, dtype, int8)
    at = jnp.array(positions, jnp.int32)
    monkeypatch.setattr(model, "attention_kernel", partial(model.attention_kernel, block=block, interpret=STRICT))

    def attend(by, *arguments):
        out, _, cache = by(*arguments, window, 1)
        return out, cache

    out, updated = jax.jit(partial(attend, model.attention_kernel))(q, new, cache, at)
    out_plain, updated_plain = jax.jit(partial(attend, model.plain_slot_attention))(q, new, cache, at)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    wanted = reference(q, new, cache, positions, window)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=tolerance)
    np.testing.assert_allclose(np.asarray(out_plain, np.float64), wanted, atol=tolerance)
    jax.tree.map(np.testing.assert_array_equal, updated, updated_plain)
    jax.tree.map(
        lambda after, before, n: np.testing.assert_array_equal(after, np_set(before, n, positions)),
        updated, cache, model.as_stored(new, cache),
    )  # fmt: skip


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(
    ("shape", "T", "start", "window", "rows", "block", "dtype"),
    [
        ((2, 2, 4, 512, 64), 64, 0, None, 64, 128, jnp.float32),  # from the beginning; several tiles
        ((1, 2, 3, 768, 128), 128, 384, None, 1024, 128, jnp.bfloat16),  # one tile, no power of two of heads
        ((1, 1, 1, 512, 96), 40, 300, 70, 32, 128, jnp.float32),  # a window; a tile that is not full
        ((1, 2, 2, 1024, 64), 64, 900, 10, 64, 256, jnp.float32),  # blocks that no query sees
        ((2, 1, 2, 256, 64), 1, 77, None, 1024, 1024, jnp.float32),  # one token
        ((1, 1, 2, 256, 64), 64, -32, None, 1024, 64, jnp.float32),  # keys that begin after the first queries
        ((1, 1, 2, 256, 64), 64, 300, 50, 64, 64, jnp.float32),  # keys that end before the window of some queries
        ((1, 1, 3, 128, 64), 64, 192, 100, 1024, 32, jnp.float32),  # keys that end, and a window of several blocks
    ],
)
def test_piece_against_float64(monkeypatch, shape, T, start, window, rows, block, dtype, int8):
    """Attention of prefill: kernel, plain JAX, and its tiles for CPUs. Queries that see nothing must only say so."""
    B, K, G, S, H = shape
    options = {"queries": rows, "block": block, "interpret": STRICT}
    monkeypatch.setattr(model, "attention_kernel", partial(model.attention_kernel, **options))
    keys = jax.random.split(jax.random.key(1), 3)
    q = (jax.random.normal(keys[0], (B, K, G, T, H)) * 3 / H**0.5).astype(dtype)
    k, v = (jax.random.normal(key, (B, K, S, H)).astype(dtype) for key in keys[1:])
    k, v = (model.quantize(x) if int8 else x for x in (k, v))
    scores = np.einsum("bkgth,bksh->bkgts", *(np.asarray(floats(x), np.float64) for x in (q, k)))
    at, queries = np.arange(S), start + np.arange(T)[:, None]
    seen = (at <= queries) & (at > queries - (window or 2 * S))
    sees = seen.any(-1)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    total = np.maximum(p.sum(-1), 1e-300)
    wanted = np.einsum("bkgts,bksh->bkgth", p, np.asarray(floats(v), np.float64)) / total[..., None]
    wanted_sum = np.log(total) + scores.max(-1)
    plain = partial(model.plain_piece_attention, rows=B, tile=T, block=S)
    tiled = partial(model.plain_piece_attention, rows=1, tile=24, block=block)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for attend in (model.piece_attention_kernel, plain, tiled):
        out, log_sum_exp = map(np.asarray, jax.jit(partial(attend, window=window))(q, k, v, jnp.int32(start)))
        np.testing.assert_allclose(out[..., sees, :], wanted[..., sees, :], atol=tolerance)
        np.testing.assert_allclose(log_sum_exp[..., sees, 0], wanted_sum[..., sees], atol=tolerance)
        assert np.isfinite(out).all() and (log_sum_exp[..., ~sees, 0] < -1e29).all()


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(
    ("mesh", "kv_heads", "G", "positions", "window"),
    [
        ((1, 1, 4), 2, 4, (0, 255, 511), None),
        ((1, 2, 2), 1, 3, (1, 130, 400, 1023), None),  # devices along both axes
        ((2, 1, 2), 1, 2, (7, 256), 100),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_devices_that_share_a_head(monkeypatch, platform, mesh, kv_heads, G, positions, window, int8):
    """Each has a part of the sequence, and they exchange queries and outputs, on TPUs by a kernel."""
    mesh = model.make_mesh(*mesh, devices=jax.devices()[: np.prod(mesh)])
    X, R, B, S, H = model.model_shards(mesh), model.model_shards(mesh) // kv_heads, len(positions), 256, 64
    q, new, cache = random_arguments(B, kv_heads, R * G, R * S, H, jnp.float32, int8)
    wanted = reference(q, new, cache, positions, window)

    def dealt(x):  # [B, K, R S, ..] -> [B, X, S, ..]
        return jnp.moveaxis(x.reshape(B, kv_heads, S, R, *x.shape[3:]), 3, 2).reshape(B, X, S, *x.shape[3:])

    if platform == "tpu":
        interpret_kernels(monkeypatch, model)
    attend = partial(model.decode_attention, mask=model.Mask(window=window), R=R)
    heads = jax.sharding.PartitionSpec("dp", None, model.MODEL_AXES)
    specs = heads, heads, heads, model.CACHE_SPEC, jax.sharding.PartitionSpec("dp")
    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, model.CACHE_SPEC), check_vma=False)
    new_k, new_v = (jnp.repeat(x, R, 1).swapaxes(1, 2) for x in new)
    arguments = q.reshape(B, 1, X * G, H), new_k, new_v, jax.tree.map(dealt, cache)
    out, updated = jax.jit(program)(*arguments, jnp.array(positions, jnp.int32)[:, None])
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(wanted.shape), wanted, atol=1e-5)
    after = jax.tree.map(lambda x, n: dealt(jnp.asarray(np_set(x, n, positions))), cache, model.as_stored(new, cache))
    jax.tree.map(np.testing.assert_array_equal, updated, after)


@pytest.mark.parametrize("R", [1, 3, 5, 6, 8])
def test_short_prompts_lower_for_tpus(R):
    """However many devices share a head, the keys that they gather are enough for a block of the kernel."""
    mesh = model.make_mesh(tp=R, devices=jax.devices()[:R])
    heads = jax.sharding.PartitionSpec("dp", None, model.MODEL_AXES)

    def attend(q, k, v, cache, positions):
        options = {"start": 0, "is_live": jnp.ones(1, bool), "R": R}
        return model.prefill_attention(q, k, v, cache, positions, model.Mask(), **options)

    specs = heads, heads, heads, model.CACHE_SPEC, jax.sharding.PartitionSpec("dp")
    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
    x, side = (jnp.ones((1, *shape, 128), jnp.bfloat16) for shape in ((2 * R, R), (R, 256)))
    cache = model.LayerCache(side, side)
    jax.jit(program).trace(x, x, x, cache, jnp.arange(2 * R)[None]).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize(("window", "int8"), [(None, True), (100, False)])
def test_prefill_of_devices_that_share_a_head(monkeypatch, window, int8):
    """Pieces of a prompt by the kernel, in several blocks gathered from two devices, as by plain JAX."""
    mesh, R, B, T = model.make_mesh(1, 2, 2, devices=jax.devices()[:4]), 2, 2, 64
    heads = jax.sharding.PartitionSpec("dp", None, model.MODEL_AXES)

    def attend(q, k, v, cache, positions):
        options = {"start": positions[0, 0], "is_live": jnp.ones(B, bool), "R": R}
        return model.prefill_attention(q, k, v, cache, positions, model.Mask(window=window), **options)

    specs = heads, heads, heads, model.CACHE_SPEC, jax.sharding.PartitionSpec("dp")

    def prefilled():
        program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
        q, _, cache = random_arguments(B, 4, 3, 256, 64, jnp.float32, int8)
        outs, program = [], jax.jit(program)
        for i in range(4):
            q, k, v = (jax.random.normal(jax.random.key(10 * i + n), (B, T, N, 64)) for n, N in enumerate((12, 4, 4)))
            out, cache = program(q / 8, k, v, cache, jnp.broadcast_to(i * T + jnp.arange(T), (B, T)))
            outs.append(out)
        return outs, cache

    (wanted, wanted_cache) = prefilled()
    interpret_kernels(monkeypatch, model, block=32)
    monkeypatch.setattr(model, "BLOCK_TOKENS", 128)
    outs, cache = prefilled()
    np.testing.assert_allclose(outs, wanted, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, wanted_cache)


def np_set(cache, new, positions):
    """cache with the new token's slot set, and nothing else changed."""
    cache = np.array(cache)
    for b, position in enumerate(positions):
        cache[b, :, position] = np.asarray(new)[b, :, 0]
    return cache


@pytest.mark.parametrize(("rows", "O", "C"), [(1, 333, 256), (8, 1001, 128), (33, 512, 384), (3, 1, 128)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_streamed_product(rows, O, C, dtype, int8):
    """In blocks that do not divide the rows of the weight, too."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, C), dtype)
    w = jax.random.normal(keys[1], (O, C), dtype)
    w = model.quantize(w) if int8 else w
    y = jax.jit(partial(model.streamed_product, block=128, interpret=STRICT))(x, w)
    exact = np.asarray(w.values, np.float64) * np.asarray(w.scale)[:, None] if int8 else np.asarray(w, np.float64)
    wanted = np.asarray(x, np.float64) @ exact.T
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.optimized
@pytest.mark.parametrize(("topology", "int8"), [("v5e:2x2", True), ("v6e:2x2", False)])
@pytest.mark.parametrize(
    "shape",
    [
        (8, 1, 4, 2048, 128),  # 70B on 16 chips
        (1, 8, 3, 256, 128),  # 3.2 3B on one chip, one row
        (2, 32, 1, 4096, 128),  # Llama 2 7B, no groups
        (2, 3, 5, 1280, 256),  # nothing a power of two
    ],
)
def test_compiles_for_tpus(topology, int8, shape):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    arguments = *random_arguments(*shape, jnp.bfloat16, int8), jnp.zeros(shape[0], jnp.int32)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), arguments)
    kernel = partial(model.attention_kernel, window=None, R=1)
    program = jax.jit(kernel, donate_argnums=2).lower(*abstract).compile()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(arguments[2]))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 8  # no copy of the cache


@pytest.mark.optimized
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    ("shape", "T", "window", "int8"),
    [
        ((1, 2, 4, 2048, 128), 1024, None, True),  # 8B on four chips
        ((1, 2, 16, 1280, 128), 256, 300, False),  # GLM-4-9B on one
        ((2, 3, 1, 512, 192), 512, None, False),  # heads of a latent model, which are wider than their values
    ],
)
def test_piece_compiles_for_tpus(topology, shape, T, window, int8):
    (B, K, G, S, H), W = shape, min(shape[-1], 128)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    k, v = array(B, K, S, H), array(B, K, S, W)
    if int8:
        scale = array(B, K, S, dtype=jnp.float32)
        k, v = (model.Int8(array(*x.shape, dtype=jnp.int8), scale) for x in (k, v))
    kernel = partial(model.piece_attention_kernel, window=window)
    program = jax.jit(kernel).lower(array(B, K, G, T, H), k, v, array(dtype=jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * 4 * B * K * G * T * 128  # no scores: output, padding


@pytest.mark.parametrize("is_broken", [False, True], ids=["", "broken"])
def test_no_block_arrives_before_all_have_entered(monkeypatch, races, is_broken):
    """Until a device enters the exchange, its result's memory may hold something else: here it is written once more.
    Without the barrier that is a race, and conftest.py sees it."""
    call = pl.pallas_call

    def writing_before(kernel, **options):
        def writes_and_exchanges(x, y, semaphores):
            pltpu.sync_copy(x, y)
            kernel(x, y, semaphores)

        return call(writes_and_exchanges, **options)

    monkeypatch.setattr(pl, "pallas_call", writing_before)
    if is_broken:
        monkeypatch.setattr(pl, "semaphore_wait", lambda *arguments: None)
    R, spec = 4, jax.sharding.PartitionSpec(model.MODEL_AXES)
    mesh = model.make_mesh(tp=R, devices=jax.devices()[:R])
    body = partial(model.exchange_kernel, R=R, interpret=STRICT)
    x = np.random.default_rng(0).standard_normal((R, R, 8, 128)).astype(np.float32)
    program = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    y = jax.block_until_ready(jax.jit(program)(x.reshape(R * R, 8, 128)))
    assert races() == is_broken
    if not is_broken:
        np.testing.assert_array_equal(np.asarray(y).reshape(x.shape), x.swapaxes(0, 1))
