"""The Pallas ragged attention kernel: numbers under the TPU interpreter, and the real compiler for TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STRICT, fast_of, floats, import_folder, in_format, in_turns, interpret_kernels
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

llama3 = import_folder("llama3")
model = llama3.model
fast = fast_of(model)


def random_rows(B, K, N, T, starts, H, dtype, quantize):
    """Queries [B, T, N, H], keys and values [B, K, P, H] of all positions up to the last new one, as the cache has
    them, and of the T new ones, as they come."""
    random = np.random.default_rng(0)
    q = (random.standard_normal((B, T, N, H)) * 3 / H**0.5).astype(dtype)
    history = [random.standard_normal((B, K, max(starts) + T, H)).astype(dtype) for _ in range(2)]
    new = model.LayerCache(*(np.stack([x[b, :, s : s + T] for b, s in enumerate(starts)]) for x in history))
    return q, model.LayerCache(*(in_format(model, x, quantize) for x in history)), new


def reference(q, history, starts, mask):
    """In numpy and float64, a query at a time: [B, T, N, H], and the log-sum-exp of its scores, [B, T, N]."""
    q, k, v = (floats(x) for x in (q, *history))
    G, out, sums = q.shape[2] // k.shape[1], np.zeros((*q.shape[:3], v.shape[-1])), np.zeros(q.shape[:3])
    for b, t, n in np.ndindex(sums.shape):
        position = starts[b] + t
        first = position - position % mask.chunk if mask.chunk else max(0, position + 1 - (mask.window or position + 1))
        scores = k[b, n // G, first : position + 1] @ q[b, t, n]
        scores = mask.softcap * np.tanh(scores / mask.softcap) if mask.softcap else scores
        weights = np.exp(scores - scores.max())
        out[b, t, n], sums[b, t, n] = weights @ v[b, n // G, first : position + 1] / weights.sum(), scores.max()
        sums[b, t, n] += np.log(weights.sum())
    return out, sums


def cache_with(history, lengths, S, R, ring):
    """What R devices hold of so many tokens of each row: [B, R K, S, ..], the last ones of a ring."""

    def side(x):
        x = np.asarray(x)
        out = np.random.default_rng(0).integers(1, 9, (x.shape[0], x.shape[1], R, S, *x.shape[3:])).astype(x.dtype)
        for b, length in enumerate(lengths):
            for p in range(max(0, length - R * S) if ring else 0, min(length, R * S) if not ring else length):
                out[b, :, p % R, p // R % S] = x[b, :, p]
        return out.reshape(x.shape[0], -1, S, *x.shape[3:])

    return jax.tree.map(side, history)


ATTENTION = in_turns(
    [
        ((2, 4, 1024, 64), 1, (0, 255, 256, 1023), {}, 256),
        ((2, 4, 1024, 64), 1, (0, 255, 256, 1023), {"window": 100}, 256),
        ((8, 1, 512, 128), 1, (511, 77), {"window": 300}, 128),  # no groups, a window wider than a block
        ((1, 9, 768, 96), 1, (3, 700, 127), {}, None),  # more query heads than sublanes
        ((2, 2, 512, 256), 1, (300, 0), {"softcap": 2.0}, 256),  # most scores are beyond it
        ((2, 3, 512, 64), 3, (0, 126, 254, 509), {}, 256),  # two tiles, two blocks
        ((1, 2, 512, 64), 8, (120, 252, 376, 0), {}, 128),
        ((1, 1, 256, 64), 4, (254, 5, 600), {"window": 90}, 128),  # a ring; a row that has begun it anew
        ((2, 1, 256, 64), 8, (249, 1003, 511), {"window": 249}, 128),  # the shortest ring there may be
        ((1, 2, 256, 64), 3, (255, 300, 2), {"window": 90, "softcap": 5.0}, 128),
        ((1, 2, 256, 64), 2, (255, 300, 95), {"chunk": 96}, 128),  # a chunk ends between the tokens
        ((2, 4, 512, 64), 64, (0, 448, 77), {}, 128),  # several tiles
        ((2, 3, 768, 128), 128, (384, 1), {}, 128),  # no power of two of heads
        ((1, 2, 512, 96), 40, (300, 0), {"window": 70}, 128),
        ((2, 1, 256, 64), 130, (77, 126), {}, 256),  # tiles that are not full
        ((1, 2, 256, 64), 64, (1000, 3, 230), {"window": 100}, 64),  # rings
        ((1, 2, 512, 64), 64, (448, 3), {"softcap": 2.0}, 128),
        ((1, 2, 256, 64), 64, (990, 30), {"chunk": 100}, 128),  # chunks end in a piece, the ring too
    ],
    (jnp.float32, None),
    (jnp.bfloat16, "int8"),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "T", "starts", "mask", "block", "dtype", "quantize"), ATTENTION)
def test_against_float64(monkeypatch, shape, T, starts, mask, block, dtype, quantize):
    """The kernels, plain JAX, and the tiles of fast.py: outputs, log-sum-exps, and the cache, where nothing else
    changes. The rows are some of a larger cache if there are many tokens."""
    (K, G, S, H), B, mask = shape, len(starts), model.Mask(**mask)
    q, history, new = random_rows(B, K, K * G, T, starts, H, dtype, quantize)
    wanted, wanted_sum = reference(q, history, starts, mask)
    ring, at = mask.wraps(S, T), jnp.array(starts, jnp.int32)
    places = None if T <= model.FEW else jnp.arange(B)[::-1]
    order = slice(None) if places is None else slice(None, None, -1)
    before, after = (
        jax.tree.map(lambda x: x[order], cache_with(history, [s + n for s in starts], S, 1, ring)) for n in (0, T)
    )
    few = T <= model.FEW
    folded = q.reshape(B, T, K, G, H).transpose((0, 2, 1, 3, 4) if few else (0, 2, 3, 1, 4))
    folded = folded.reshape((B, K, 1, T * G, H) if few else (B, K, G, T, H))

    def attend():
        return jax.jit(lambda *args: model.store_and_attend(*args, places, mask, T, 1, G))(folded, new, before, at)

    results = [attend()]
    with monkeypatch.context() as without:
        without.setattr(model, "FAST", {})
        results.append(attend())
    options = {"block": block} if few else {"block": block, "queries": 128}
    interpret_kernels(monkeypatch, model, **options)
    results.append(attend())
    tiles = {"rows": B, "tile": G * T, "run": G} if few else {"rows": 1, "tile": 24}
    results.append((fast.tiled_attention(folded, after, at, places, mask, T, **tiles, block=64), after))
    if not few:
        on_gpu = fast.triton_attention(folded, after, at, places, mask, 1, interpret=True)
        results.append((on_gpu, after))
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for out, cache in results:
        out = np.asarray(out, np.float64).reshape((B, K, T, G, -1) if few else (B, K, G, T, -1))
        out = out.transpose((0, 2, 1, 3, 4) if few else (0, 3, 1, 2, 4)).reshape(B, T, K * G, -1)
        np.testing.assert_allclose(out[..., :-1], wanted, atol=tolerance)
        np.testing.assert_allclose(out[..., -1], wanted_sum, atol=tolerance)
        jax.tree.map(np.testing.assert_array_equal, cache, after)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pallas itself
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("mask", [{}, {"window": 100}, {"chunk": 128}, {"window": 3000, "softcap": 2.0}])
def test_triton_takes_it(mask, quantize):
    """Lowered for a GPU that is not at hand: the interpreter also takes what Triton's own language does not have."""
    chip = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
    q, cache, _ = random_rows(2, 2, 8, 128, (0, 300), 128, jnp.bfloat16, quantize)
    q, cache = (
        q.reshape(2, 2, 4, 128, 128),
        jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 84)] + [(0, 0)] * (x.ndim - 3)), cache),
    )
    at, mask = jnp.array((0, 300), jnp.int32), model.Mask(**mask)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=chip)):
        program = jax.jit(lambda *args: fast.triton_attention(*args, jnp.arange(2), mask, 1)).trace(q, cache, at)
        assert "triton" in program.lower(lowering_platforms=("cuda",)).as_text()


SHARED_HEADS = in_turns(
    [
        ((1, 1, 4), 2, 4, 1, (0, 255, 511), {}),
        ((1, 2, 2), 1, 3, 1, (1, 130, 400, 1023), {}),  # devices along both axes
        ((2, 1, 2), 1, 2, 1, (7, 256), {"window": 100}),
        ((1, 1, 3), 1, 1, 5, (765, 2), {}),  # tokens beyond the last slot are not stored
        ((1, 1, 8), 1, 2, 8, (1023, 77), {"chunk": 100}),
        ((1, 1, 4), 2, 3, 64, (0, 77, 400), {"window": 70}),
        ((1, 1, 8), 1, 1, 32, (5, 4001), {"window": 1000, "softcap": 2.0}),  # a ring of 2,048
        ((1, 2, 2), 2, 2, 48, (464, 11), {}),
        ((1, 1, 4), 2, 2, 4, (300, 9), {}),
    ],
    ("tpu", "int8"),
    ("cpu", None),
)
SHARED_HEADS += [
    ((1, 1, 4), 2, 3, 64, (0, 77, 400), {"window": 70}, "gpu", "int8"),
    ((1, 1, 8), 1, 1, 32, (5, 4001), {"window": 1000, "softcap": 2.0}, "gpu", None),
    ((1, 2, 2), 2, 2, 48, (464, 11), {}, "gpu", None),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "kv_heads", "G", "T", "starts", "mask", "platform", "quantize"), SHARED_HEADS)
def test_devices_that_share_a_head(monkeypatch, platform, mesh, kv_heads, G, T, starts, mask, quantize):
    """Each has a part of the sequence, and they exchange queries and outputs, on TPUs by a kernel."""
    mesh, mask = model.make_mesh(*mesh, devices=jax.devices()[: np.prod(mesh)]), model.Mask(**mask)
    X, B, S, H = model.model_shards(mesh), len(starts), 256, 64
    R = X // kv_heads
    q, history, new = random_rows(B, kv_heads, X * G, T, starts, H, jnp.float32, quantize)
    wanted, _ = reference(q, history, starts, mask)
    ring = mask.wraps(R * S, T)
    before, after = (cache_with(history, [s + n for s in starts], S, R, ring) for n in (0, T))
    if platform == "tpu":
        interpret_kernels(monkeypatch, model)
    if platform == "gpu":
        monkeypatch.setattr(model, "platform", lambda: "gpu")
        monkeypatch.setattr(fast, "suits_triton", lambda *_: True)
        monkeypatch.setattr(fast, "triton_attention", partial(fast.triton_attention, interpret=True))
    heads, rows = jax.sharding.PartitionSpec("dp", None, model.MODEL_AXES), jax.sharding.PartitionSpec("dp")

    def attend(q, k, v, cache, positions):
        return model.cached_attention(q, k, v, cache, model.Span(positions, None, None, B, R), mask)

    specs = heads, heads, heads, model.CACHE_SPEC, rows
    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, model.CACHE_SPEC), check_vma=False)
    new_k, new_v = (np.repeat(x, R, 1).swapaxes(1, 2) for x in new)
    out, cache = jax.jit(program)(
        q, new_k, new_v, before, np.array(starts, np.int32)[:, None] + np.arange(T, dtype=np.int32)
    )
    out = np.asarray(out, np.float64).reshape(wanted.shape)
    stored = R * S if not ring else 10**9  # what comes after has nothing to attend to but what is there
    for b, start in enumerate(starts):
        seen = max(0, min(T, stored - start))
        np.testing.assert_allclose(out[b, :seen], wanted[b, :seen], atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, after)


@pytest.mark.parametrize("R", [1, 8])
def test_short_prompts_lower_for_tpus(R):
    """However many devices share a head, and however few tokens there are."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = model.make_mesh(tp=R, devices=topology.devices[:R])
    heads = jax.sharding.PartitionSpec("dp", None, model.MODEL_AXES)

    def attend(q, k, v, cache, positions):
        return model.cached_attention(q, k, v, cache, model.Span(positions, None, None, 1, R), model.Mask())

    specs = heads, heads, heads, model.CACHE_SPEC, jax.sharding.PartitionSpec("dp")
    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(heads, specs[3]), check_vma=False)
    side = model.Plain(jax.ShapeDtypeStruct((1, R, 256, 128), jnp.bfloat16))
    for T in (1, 2, 8, 24 // R * R + R):
        x, positions = jax.ShapeDtypeStruct((1, T, R, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, T), jnp.int32)
        arguments = x, x, x, model.LayerCache(side, side), positions
        assert "tpu_custom_call" in jax.jit(program).lower(*arguments).as_text()


@pytest.mark.parametrize(("rows", "O", "C"), [(1, 333, 256), (8, 1001, 128), (33, 512, 384), (3, 1, 128)])
@pytest.mark.parametrize(("dtype", "quantize"), [(jnp.float32, None), (jnp.bfloat16, "int8")])
def test_streamed_product(monkeypatch, rows, O, C, dtype, quantize):
    """In blocks that do not divide the rows of the weight, too."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, C), dtype)
    w = in_format(model, jax.random.normal(keys[1], (O, C), dtype), quantize)
    kernel = partial(fast.streamed_product, block=128, interpret=STRICT)
    monkeypatch.setattr(fast, "streamed_product", kernel)
    monkeypatch.setattr(fast, "is_streamed", lambda x, w: True)
    y = jax.jit(model.PRODUCTS["tpu", type(w)])(x, w)
    wanted = floats(x) @ floats(w).T
    np.testing.assert_allclose(floats(y), wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("dtype", "quantize"), [(jnp.bfloat16, None), (jnp.bfloat16, "int8"), (jnp.float32, None)])
def test_product_for_gpus(rows, dtype, quantize):
    x = jax.random.normal(jax.random.key(0), (rows, 96), dtype)
    w = in_format(model, jax.random.normal(jax.random.key(1), (130, 128), dtype).at[:, 96:].set(0), quantize)
    wanted = floats(x) @ floats(w)[:, :96].T
    np.testing.assert_allclose(jax.jit(model.PRODUCTS["gpu", type(w)])(x, w), wanted, atol=2e-6 * np.abs(wanted).max())


def array_on(topology):
    """A function that makes ShapeDtypeStructs on a device of a TPU that is not at hand."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=device)


def row_major(x):
    """An argument that a model computes, in the layout that its fusions write and the kernel reads. For a parameter XLA
    chooses another, and the program would copy it first; 0.10.2 did so in the memory of the program's results."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=Format(Layout(tuple(range(x.ndim))), x.sharding))


def abstract_side(array, shape, quantize, dtype=jnp.bfloat16):
    side = model.FORMATS[quantize].declare(shape, dtype)
    return jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), side)


COMPILED = in_turns(
    [
        ((8, 1, 4, 2048, 128), 1, {}),  # 70B on 16 chips
        ((8, 1, 8, 2048, 128), 4, {}),
        ((1, 8, 3, 256, 128), 1, {}),  # 3.2 3B on one chip, one row
        ((2, 32, 1, 4096, 128), 2, {}),  # Llama 2 7B, no groups
        ((2, 3, 5, 1280, 256), 3, {"window": 1000}),  # nothing a power of two
        ((1, 8, 8, 1280, 128), 8, {"window": 128}),  # gpt-oss
        ((1, 1, 5, 10240, 128), 5, {"chunk": 8192}),  # Scout
        ((1, 4, 2, 5120, 256), 1, {"window": 4096, "softcap": 50.0}),  # Gemma 2 2B
    ],
    ("v5e:2x2", "int8"),
    ("v6e:2x2", None),
    ("v5p:2x2x1", "int8"),
)


@pytest.mark.optimized
@pytest.mark.parametrize(("shape", "T", "mask", "topology", "quantize"), COMPILED)
def test_compiles_for_tpus(topology, quantize, shape, T, mask):
    (B, K, G, S, H), array = shape, array_on(topology)
    side, new = abstract_side(array, (B, K, S, H), quantize), row_major(array(B, K, T, H))
    arguments = row_major(array(B, K, 1, T * G, H)), model.LayerCache(new, new), model.LayerCache(side, side)

    def attend(*arguments):  # as the models do; XLA 0.10.2 fails if what the kernel returns leaves the program as it is
        out, cache = model.decode_kernel(*arguments, mask=model.Mask(**mask), T=T, run=G)
        return out[..., :-1], out[..., -1:], cache

    program = jax.jit(attend, donate_argnums=2).lower(*arguments, array(B, dtype=jnp.int32)).compile()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[2]))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    # No copy of the cache. The output is there, 129 columns as 256; on a v5p 256 KiB are always taken.
    expected = 4 * B * K * T * G * (H + 128) + 2**18 * topology.startswith("v5p")
    assert memory.temp_size_in_bytes < expected + cache_bytes / 8


@pytest.mark.sampled
@pytest.mark.optimized
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    ("shape", "T", "mask", "quantize"),
    [
        ((1, 2, 4, 2048, 128), 1024, {}, "int8"),  # 8B on four chips
        ((1, 2, 16, 1280, 128), 256, {"window": 300, "softcap": 50.0}, None),
        ((2, 1, 5, 2560, 128), 512, {"chunk": 2000}, "int8"),
        ((2, 3, 1, 512, 192), 512, {}, None),  # heads of a latent model, which are wider than their values
    ],
)
def test_piece_compiles_for_tpus(topology, shape, T, mask, quantize):
    (B, K, G, S, H), W, array = shape, min(shape[-1], 128), array_on(topology)
    cache = tuple(abstract_side(array, (B + 1, K, S, width), quantize) for width in (H, W))
    at = array(B, dtype=jnp.int32)
    kernel = partial(fast.prefill_kernel, mask=model.Mask(**mask), T=T, R=1)
    program = jax.jit(kernel).lower(row_major(array(B, K, G, T, H)), cache, at, at).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 4 * B * K * G * T * 128  # no scores: 129 columns as 256


@pytest.mark.sampled
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("topology", "shape", "T"),
    [
        ("v5e:2x2", (4, 32, 1, 2048, 128), 1),  # OpenLLaMA 3B
        ("v5p:2x2x1", (1, 40, 1, 4096, 128), 8),  # Llama 2 13B
        ("v5p:2x2x1", (1, 16, 1, 8192, 256), 1024),  # Gemma 7B
    ],
)
def test_float32_fits_into_vmem(topology, shape, T):
    """Many kv heads, or wide ones: the compiler refuses a kernel that needs more of VMEM than 16 MiB."""
    (B, K, G, S, H), array = shape, partial(array_on(topology), dtype=jnp.float32)
    cache = model.LayerCache(*[abstract_side(array, (B, K, S, H), None, jnp.float32)] * 2)
    new = model.LayerCache(*[row_major(array(B, K, T, H))] * 2)
    at = array(B, dtype=jnp.int32)
    if T <= model.FEW:
        kernel = partial(model.decode_kernel, mask=model.Mask(), T=T, run=G)
        arguments = row_major(array(B, K, 1, T * G, H)), new, cache, at
    else:
        kernel = partial(fast.prefill_kernel, mask=model.Mask(), T=T, R=1)
        arguments = row_major(array(B, K, G, T, H)), cache, at, at
    jax.jit(lambda *arguments: jax.tree.map(lambda x: x[..., :-1], kernel(*arguments))).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("R", "shape", "dtype", "finish"),
    [
        (16, (16, 1, 640), jnp.bfloat16, None),  # queries for latents: a row of 8, a head of 16
        (16, (16, 2, 640), jnp.bfloat16, None),
        (16, (1, 3, 7, 128), jnp.bfloat16, None),
        (8, (8, 4, 16, 128), jnp.bfloat16, None),
        (16, (16, 1, 513), jnp.float32, model.joined),
        (4, (4, 5, 7, 129), jnp.float32, model.joined),
        (2, (2, 500, 257), jnp.float32, model.joined),  # nearly as many as there may be
    ],
)
def test_exchange_compiles_for_tpus(R, shape, dtype, finish):
    """Rows that fill no tile, of packed dtypes and of one lane more than a whole number."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh, spec = model.make_mesh(tp=16, devices=devices), jax.sharding.PartitionSpec(model.MODEL_AXES)
    body = partial(fast.exchange_kernel, R=R, **({"finish": finish} if finish else {}))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.ShapeDtypeStruct((16 * shape[0], *shape[1:]), dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
    text = program.lower(x).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1 and "all-to-all" not in text


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("is_broken", [False, True], ids=["", "broken"])
def test_no_block_arrives_before_all_have_entered(monkeypatch, races, is_broken, rows):
    """Until a device enters the exchange, the memory for its blocks may hold something else: here it is written once
    more. Without the barrier that is a race, and conftest.py sees it."""
    call = pl.pallas_call

    def writing_before(kernel, **options):
        def writes_and_exchanges(x, y, mine, arrived, *semaphores):
            arrived[...] = jnp.zeros(arrived.shape, arrived.dtype)
            kernel(x, y, mine, arrived, *semaphores)

        return call(writes_and_exchanges, **options)

    monkeypatch.setattr(pl, "pallas_call", writing_before)
    if is_broken:
        monkeypatch.setattr(pl, "semaphore_wait", lambda *arguments: None)
    R, spec = 4, jax.sharding.PartitionSpec(model.MODEL_AXES)
    mesh = model.make_mesh(tp=R, devices=jax.devices()[:R])
    body = partial(fast.exchange_kernel, R=R, interpret=STRICT)
    x = np.random.default_rng(0).standard_normal((R, R, rows, 128)).astype(np.float32)
    program = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    y = jax.block_until_ready(jax.jit(program)(x.reshape(R * R, rows, 128)))
    assert races() == is_broken
    if not is_broken:
        np.testing.assert_array_equal(np.asarray(y).reshape(x.shape), x.swapaxes(0, 1))
