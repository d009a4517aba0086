"""What makes Llama 4 fast on each machine: the appendix of model.py.

Each block adds rows to the tables of model.py. FAST says what takes the place of a function on a machine, PRODUCTS what
multiplies a format there, and FORMATS what --quantize may name. generate.py imports this file if it is there. Without
it everything runs, but slower, and without int4.

The compiler moves nothing across an optimization_barrier. A Pallas kernel is a program that a device runs as it is
written. model.py explains one for TPUs; Triton compiles those for GPUs.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from model import (
    FAST,
    FEW,
    FORMATS,
    MASKED,
    MODEL_AXES,
    PRODUCTS,
    Blocks,
    Format,
    Int8,
    LayerCache,
    Mask,
    Plain,
    Weight,
    as_stored,
    attend_to_stored,
    attention_with_sum,
    begin_softmax,
    ceil_div,
    einsum,
    exchange,
    finish_softmax,
    fold,
    format_of_arrays,
    inverse_rms,
    kernel_cost,
    linear,
    linear_halves,
    local_ids,
    over_blocks,
    padded,
    power_of_two,
    product,
    quantize,
    query_key_product,
    shard_index,
    softcapped,
    softmax_state,
    store,
    turned,
)

# ---------------------------------------------------------------------------------------------------------------------
# Products on CPUs


def plain_cpu_product(x: Array, w: Array) -> Array:
    """product for CPUs of numbers as they are. Up to 128 rows the weight is the left operand, because XLA repacks the
    right one. A single row in 16 bits gets a row of zeros beside it: XLA's own product of one takes ten times as long.

    In 16 bits without AMX, one row uses `row_product` if its length allows. Otherwise, up to 4 rows, pieces of the
    weight are turned to float32 and multiplied while they are in the processor's cache: without AVX512-BF16, XLA's own
    product takes 1.5 times as long."""
    (B, C), is_16_bit = x.shape, x.dtype != jnp.float32
    if is_16_bit and not has_amx():
        if B == 1 and (runs := runs_of(C, 24, 8192)):
            return row_product(x, w, runs)
        if B <= 4 and (pieces := pieces_of(w, 2**19, least=2)) > 1:
            return over_rows(partial(cast_product, x.astype(jnp.float32)), w, pieces)
    if w.shape[1] > C:  # see Format.width
        # Where w has zeros, x gets its first columns again. XLA would fuse a padding of zeros with the operations
        # before it, which would take four times as long. It would pad bfloat16 as float32, so bits are padded.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        bits = jnp.pad(bits, ((0, 0), (0, w.shape[1] - C)), mode="wrap")
        x = jax.lax.bitcast_convert_type(bits, x.dtype)
    if B > 128:
        return product(x, Plain(w))
    return weights_first(padded(x, w, 2 if is_16_bit else 1), w, jnp.float32)[:B]


def int8_cpu_product(x: Array, w: Array) -> Array:
    """product for CPUs of int8 values, not yet scaled. For a few rows a product of int8 and int8 is fast. So each
    activation becomes two int8 numbers, together of 15 bits: a coarse one, and a fine one for its rounding error. As
    rows of one product they cost little and lose next to nothing. From 50 rows on, with AMX from 513, pieces of the
    weight are cast, and multiplied while they are in the processor's cache."""
    B, C = x.shape
    if B == 1 and not has_amx() and (runs := runs_of(C, 32, 4096)):
        return row_product(x, w, runs)
    if B < 50 or (B <= 512 and has_amx()):
        coarse = quantize(x)
        fine = quantize(x - coarse.values * coarse.scale[:, None])
        x = jnp.concatenate([coarse.values, fine.values])
        y = weights_first(x, w, jnp.int32) if B < 50 else einsum("bc,oc->bo", x, w, jnp.int32)
        return y[:B] * coarse.scale[:, None] + y[B:] * fine.scale[:, None]
    return over_rows(partial(cast_product, x), w, pieces_of(w, 2**21))


def cast_product(x: Array, w: Array) -> Array:
    """plain_cpu_product of w [O, C], or a wider w, in the dtype of x. The barrier puts w in that dtype into memory."""
    return plain_cpu_product(x, jax.lax.optimization_barrier(w[:, : x.shape[1]].astype(x.dtype)))


@functools.cache
def has_amx() -> bool:
    """Whether the processor has Intel's AMX, which multiplies tiles of 16 and of 8 bits. With it, XLA's own products
    read a weight of 16,384 x 2,048 at 30 GB/s for one row as for eight, in bfloat16 and in int8. The loops for one row
    read it at 5 and at 10 there (two cores, jax 0.12, a scratch script)."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and " amx_bf16" in cpus.read_text()


def runs_of(columns: int, most: int, longest: int) -> int:
    """How many runs of 32 columns row_product should add up in one loop: at most `most`, and a divisor of all of them.
    0 if it should not be used: a row is longer than `longest` columns, or no divisor is above 8."""
    divisors = (n for n in range(most, 8, -1) if columns % (32 * n) == 0)
    return next(divisors, 0) if columns <= longest else 0


def row_product(x: Array, w: Array, runs: int) -> Array:
    """x [1, C] times w [O, C] of 16 or 8 bits, C a multiple of 32 * runs: float32 [1, O]. It ignores columns that only
    w has. With bfloat16 it is 1.5 times as fast as two rows of XLA's own product, with int8 twice as fast.

    XLA makes one unrolled loop that multiplies and adds `runs` runs of 32 columns, with the 32 side by side in vector
    registers. A product with ones then adds up the 32 sums. Before jax 0.12, a large w is taken in pieces, whose sums
    stay in cache. Later XLA for CPUs runs the body of such a loop, products excepted, on one thread.

    reduce_precision changes no number. It keeps XLA from its library of reductions, which would turn all weights to
    float32 in memory first. The barriers keep the product with ones out of the loop. Dividing by ones changes no number
    either: XLA repeats no division in a loop, so it turns x to float32 once, and not for each row of w.
    """
    C, lanes = x.shape[1], 32
    x = x.astype(jnp.float32)
    if w.dtype == jnp.int8:
        x = x / jax.lax.optimization_barrier(jnp.ones(x.shape))

    def multiply(w):
        terms = w[:, :C].reshape(-1, C // (runs * lanes), runs, lanes).astype(jnp.float32) * x.reshape(-1, runs, lanes)
        sums = jax.lax.reduce(terms, np.float32(0), lambda a, b: jax.lax.reduce_precision(a + b, 8, 23), (2,))
        sums = jax.lax.optimization_barrier(sums).reshape(-1, lanes)
        y = jax.lax.optimization_barrier(einsum("rc,bc->rb", sums, jnp.ones((1, lanes)))).reshape(len(w), -1)
        return sum(y[:, i] for i in range(y.shape[1]))[None]

    return over_rows(multiply, w, pieces_of(w, 2**24) if jax.__version_info__ < (0, 12) else 1)


def pieces_of(w: Array | Format, size: int, least: int = 1) -> int:
    """Into how many equal pieces to divide the rows of w [O, C]: `least` or more, of at most `size` numbers each. 1 if
    O has no such divisor, or only one that is four times as large as needed."""
    fewest = max(least, ceil_div(math.prod(w.shape), size))
    return next((n for n in range(fewest, 4 * fewest) if w.shape[0] % n == 0), 1)


def over_rows(multiply, w: Array | Format, pieces: int) -> Array:
    """multiply(w), float32 [B, O], a piece of w [O, C] at a time."""
    if pieces == 1:
        return multiply(w)
    O, B = w.shape[0], jax.eval_shape(multiply, w).shape[0]
    rows = O // pieces

    def step(i, y):
        # The barrier ties w to i: else XLA would turn all of it to float32 before the loop.
        tied, i = jax.lax.optimization_barrier((w, i))
        piece = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * rows, rows), tied)
        return jax.lax.dynamic_update_slice_in_dim(y, multiply(piece), i * rows, axis=1)

    return jax.lax.fori_loop(0, pieces, step, jnp.zeros((B, O), jnp.float32))


def weights_first(x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """x [B, C] times w [O, C] with w as the left operand; a barrier keeps XLA from swapping them: `dtype` [B, O]."""
    return jax.lax.optimization_barrier(einsum("oc,bc->ob", w, x, dtype)).T


PRODUCTS["cpu", Plain] = lambda x, w: plain_cpu_product(x, w.values)
PRODUCTS["cpu", Int8] = lambda x, w: int8_cpu_product(x, w.values) * w.scale


# ---------------------------------------------------------------------------------------------------------------------
# Many tokens and slots


def store_many(cache: LayerCache, new: LayerCache, starts, places, mask: Mask, R: int, is_own=None) -> LayerCache:
    """store, where many tokens of a row are written side by side, and one row after another.

    Tokens beyond the last slot are dropped or, in a ring, go to the first slots. Then the slots that are written end
    with the last one, and those before the tokens' own keep what they have.
    """
    S, T = cache[0].shape[2], new[0].shape[2]
    if len(starts) == T == R == 1 and is_own is None:
        # There is no case for a slot beyond the last one, which would be a kernel more on GPUs. Such a token overwrites
        # the last slot. Only a row that has ended stores one, and nothing reads that slot any more.
        slot = starts[0] % S if mask.wraps(S, T) else starts[0]

        def write(x, n):
            x = jax.lax.dynamic_update_slice_in_dim(x, n, slot, axis=2)
            return with_layout_constraint(x, Layout(tuple(range(x.ndim))))  # see store

        return jax.tree.map(write, cache, as_stored(new, cache))
    if T <= FEW:
        return store.plain(cache, new, starts, places, mask, R, is_own)
    size, wraps = T // R, mask.wraps(R * S, T)

    def store_row(b, cache):
        first = (shard_index(R) - starts[b]) % R  # this device's first token among the new ones
        slot = (starts[b] + first) // R
        slot = slot % S if wraps else slot
        begin = jnp.minimum(slot, S - size)
        is_late = jnp.arange(size) >= slot - begin
        parts = [(begin, is_late), (0, ~is_late)] if wraps else [(begin, is_late)]

        def stored(x, n):
            n = n[b].reshape(n.shape[1], size, R, *n.shape[3:])
            n = jax.lax.dynamic_index_in_dim(n, first, axis=2, keepdims=False)
            n = jnp.roll(n, slot - begin, axis=1)[None]
            for start, is_new in parts:
                at = (places[b], 0, start, 0)[: x.ndim]
                is_new = is_new if is_own is None else is_new & is_own[b]
                old = jax.lax.dynamic_slice(x, at, n.shape)
                kept = jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 3)), n, old)
                x = jax.lax.dynamic_update_slice(x, kept, at)
            return x

        return jax.tree.map(stored, cache, new)

    new = as_stored(new, cache)
    return jax.lax.fori_loop(0, len(starts), store_row, cache)


def tiled_attention(q, cache, starts, places, mask: Mask, T: int, R=1, run=1, *, rows: int, tile: int, block: int):
    """attend_to_stored in tiles of `rows` rows and at most `tile` queries. A tile attends to one block after another of
    at most `block` slots: from the first that one of its queries sees to the last."""
    (B, K, A, M, H), (*_, S, width) = q.shape, cache[0].shape
    W = width if width < H else cache[1].shape[-1]
    tile, block = (max(n for n in range(1, most + 1) if size % n == 0) for most, size in ((tile, M), (block, S)))
    blocks, offsets = Blocks(block, S, R, mask, mask.wraps(R * S, T)), jnp.arange(M) // run % T

    def of_tile(n):
        row, m = n // (M // tile) * rows, n % (M // tile) * tile
        of_rows = partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=rows)
        of_queries = partial(jax.lax.dynamic_slice_in_dim, start_index=m, slice_size=tile)
        queries, begin = of_queries(of_rows(q), axis=3), of_rows(starts)

        def attend(i):  # to the i-th block of positions
            slot = i % (S // block) * block

            def some_slots(x):
                if places is None:  # all rows; the barrier keeps XLA for CPUs from transposing what it copies
                    return jax.lax.optimization_barrier(jax.lax.dynamic_slice_in_dim(x, slot, block, axis=2))
                sizes = 1, K, block, *x.shape[3:]
                of_place = jax.vmap(lambda place: jax.lax.dynamic_slice(x, (place, 0, slot, 0)[: x.ndim], sizes)[0])
                return of_place(of_rows(places))

            tokens = begin[:, None] + of_queries(offsets)
            seen = mask.is_attended(blocks.positions(i)[:, None], tokens[:, :, None])
            if mask.chosen is not None:
                chosen = jax.lax.dynamic_slice_in_dim(of_rows(mask.chosen), i * block, block, axis=2)
                seen &= chosen[:, of_queries(offsets)] != 0
            return attention_with_sum(queries, jax.tree.map(some_slots, tuple(cache)), seen, mask.softcap)

        first, last = blocks.seen(begin + offsets[m], offsets[m + tile - 1] - offsets[m] + 1)
        out = over_blocks(attend, jnp.min(first), jnp.max(last), (rows, K, A, tile, W))
        return jnp.concatenate(out, axis=-1)

    out = jax.lax.map(of_tile, jnp.arange(B // rows * (M // tile)))
    out = out.reshape(B // rows, M // tile, rows, K, A, tile, -1)
    return out.transpose(0, 2, 3, 4, 1, 5, 6).reshape(B, K, A, M, -1)


def cpu_query_key_product(q: Array, k: Array) -> Array:
    """query_key_product for CPUs. XLA first transposes the right operand. That should not be the keys, if queries are
    few. For one row with 1,024 slots this takes a quarter to a half of the time (a scratch script)."""
    if q.shape[2] * q.shape[3] > 64:
        return query_key_product.plain(q, k)
    of_slots = einsum("bksh,bkmh->bksm", k, q.reshape(*q.shape[:2], -1, q.shape[-1]))
    return of_slots.swapaxes(2, 3).reshape(*q.shape[:4], -1)


def cpu_attend_to_stored(q, cache, starts, places, mask: Mask, T: int, R=1, run=1) -> Array:
    """attend_to_stored for CPUs. Few tokens attend to all slots at once, which copies nothing. If there are many slots,
    and fewer than half are filled, they attend to the filled blocks alone."""
    tiled, S = partial(tiled_attention, q, cache, starts, places, mask, T, R, run), cache[0].shape[2]
    if T > FEW:
        return tiled(rows=1, tile=256, block=128 if T <= 128 else 256)
    plain = partial(attend_to_stored.plain, q, cache, starts, places, mask, T, R, run)
    if S <= 2048:
        return plain()
    return jax.lax.cond(2 * jnp.max(starts) < R * S, partial(tiled, rows=len(q), tile=q.shape[3], block=512), plain)


FAST["query_key_product", "cpu"] = cpu_query_key_product
FAST["attend_to_stored", "cpu"] = cpu_attend_to_stored
FAST["store", "cpu"] = FAST["store", "gpu"] = FAST["store", "tpu"] = store_many


# ---------------------------------------------------------------------------------------------------------------------
# Products and attention on GPUs

try:
    from jax.experimental.pallas import triton
except ImportError:  # Windows has none, and a later jax may have none
    triton = None


def gpu_product(x: Array, w: Format) -> Array:
    """product for GPUs. For one row it is written as a sum, since XLA then reads the matrix faster: an H100 reads
    28,672 x 4,096 numbers at 2.98 TB/s, in int8 at 2.84, instead of 2.71 and 2.16."""
    if len(x) > 1:
        return product(x, w)
    values, scale = w.values_and_scale(x.dtype)
    x = jax.lax.optimization_barrier(w.in_order(padded(x, w)))  # it is not to be computed again for each sum
    y = jnp.sum(x.astype(jnp.float32) * values.astype(jnp.float32), axis=-1)[None]
    return y if scale is None else y * scale


def gpu_attend_to_stored(q, cache, starts, places, mask: Mask, T: int, R=1, run=1) -> Array:
    """attend_to_stored for GPUs."""
    if T <= FEW:
        return attend_to_stored.plain(q, cache, starts, places, mask, T, R, run)
    if suits_triton(q, cache) and mask.chosen is None:
        return triton_attention(q, cache, starts, places, mask=mask, R=R)
    return tiled_attention(q, cache, starts, places, mask, T, R, rows=len(q), tile=q.shape[3], block=512)


def suits_triton(q: Array, cache: LayerCache) -> bool:
    """Whether triton_attention can take these queries and this cache. Triton knows widths that are powers of two, and
    the kernel takes whole tiles of tokens and whole blocks of slots."""
    (*_, T, H), S = q.shape, cache[0].shape[2]
    fits = H in (16, 32, 64, 128, 256) and all(side.shape[-1] == H for side in cache) and T % 16 == S % 64 == 0
    return fits and q.dtype.itemsize == 2 and has_triton(cache)


def has_triton(read) -> bool:
    """Whether the GPU at hand can run what Pallas compiles by Triton, as NVIDIA's chips from Ampere on can, and whether
    that can read the arrays of the pytree `read`. Pallas counts the numbers of an array in 32 bits up to 4 GiB. If each
    is a byte, these are too few beyond 2 GiB."""
    device = jax.devices()[0]  # a CPU, if this is compiled for a GPU that is not at hand
    major = "9" if device.platform == "cpu" else getattr(device, "compute_capability", "").partition(".")[0]
    can_read = all(x.size <= 2**31 or x.size * x.dtype.itemsize > 2**32 for x in jax.tree.leaves(read))
    return bool(triton) and major.isdigit() and int(major) >= 8 and can_read


def triton_attention(q, cache, starts, places, mask: Mask, R: int, interpret=False) -> Array:
    """attend_to_stored as one Pallas kernel for GPUs. Scores stay on the chip (as in Dao et al. 2022,
    "FlashAttention"), and a tile of queries reads only the blocks of slots that it sees. Args and result as in
    attend_to_stored, with queries [B, K, A, T, H]."""
    (B, K, A, T, H), S = q.shape, cache[0].shape[2]
    # On an H100 within a fifth of the best of six sizes, tried with three stages. Two need less of a chip's memory.
    tile, block = math.gcd(T, 64), 64 if H <= 128 else 32
    blocks = Blocks(block, S, R, mask, mask.wraps(R * S, T))

    def kernel(q, cache, starts, places, shard, out, log_sum_exp):
        n, m = pl.program_id(1), pl.program_id(0) * tile
        b, k, a = n // (K * A), n // A % K, n % A
        at, queries = starts[b] + m + jnp.arange(tile), q[b, k, a, pl.ds(m, tile), :]
        first, last = blocks.seen(starts[b] + m, tile)

        def add_block(i, state):
            total, top, out = state
            slots = pl.ds(jax.lax.rem(i, S // block) * block, block)  # of a ring, round after round
            keys, values = jax.tree.map(lambda x: x[(places[b], k, slots, slice(None))[: len(x.shape)]], tuple(cache))
            (keys, scale), (values, value_scale) = (x.values_and_scale(queries.dtype) for x in (keys, values))
            scores = einsum("mh,sh->ms", queries, keys)
            scores = softcapped(scores if scale is None else scores * scale[None], mask.softcap)
            positions = (i * block + jnp.arange(block)) * R + shard[0]
            scores = jnp.where(mask.is_attended(positions[None], at[:, None]), scores, MASKED)
            highest = jnp.maximum(top, jnp.max(scores, axis=1))
            p, kept = jnp.exp(scores - highest[:, None]), jnp.exp(top - highest)
            total = total * kept + jnp.sum(p, axis=1)
            p = (p if value_scale is None else p * value_scale[None]).astype(values.dtype)
            return total, highest, out * kept[:, None] + einsum("ms,sw->mw", p, values)

        nothing = jnp.zeros(tile), jnp.full(tile, MASKED), jnp.zeros((tile, H))
        total, top, sums = jax.lax.fori_loop(first, last + 1, add_block, nothing)
        total = jnp.maximum(total, 1e-30)  # of queries that see nothing
        out[b, k, a, pl.ds(m, tile), :] = sums / total[:, None]
        log_sum_exp[b, k, a, pl.ds(m, tile)] = top + jnp.log(total)

    out, log_sum_exp = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:-1])],
        grid=(T // tile, B * K * A),
        compiler_params=triton.CompilerParams(num_warps=4 if H <= 128 else 8, num_stages=2),
        interpret=interpret,
        name="attention",
    )(q, cache, starts, places, jnp.full(1, shard_index(R)))
    return jnp.concatenate([out, log_sum_exp[..., None]], axis=-1)


PRODUCTS["gpu", Plain] = PRODUCTS["gpu", Int8] = gpu_product
FAST["attend_to_stored", "gpu"] = gpu_attend_to_stored


# ---------------------------------------------------------------------------------------------------------------------
# Attention of many tokens on TPUs


def prefill_kernel(q, cache, starts, places, mask: Mask, T: int, R: int, queries=1024, block=None, interpret=False):
    """attend_to_stored as a Pallas kernel for TPUs.

    The grid is (rows, kv heads, tiles of queries, blocks of keys). A tile has about `queries` queries: the A of each of
    some tokens. Queries are as wide as keys. A block that a tile does not see is neither fetched nor computed, as in
    decode_kernel. `block` is by default 1,024 slots, or fewer if keys and values are wide or float32, and is cut to a
    divisor of the slots. If some are chosen, it is all slots, and mask.chosen int32 [B, T, S / 8]: bit j of number n is
    for slot j (S / 8) + n.
    """
    (B, K, A, _, H), S, W = q.shape, cache[0].shape[2], cache[1].shape[-1]
    width = sum(side.shape[-1] for side in cache)
    fitting = 1024 if width < 1024 else 512
    if q.dtype == jnp.float32:
        fitting = power_of_two(2**17 // width + 1) // 2
    block = math.gcd(S, block or fitting) if mask.chosen is None else S
    tile = min(T, max(queries // power_of_two(A), 16))
    blocks, tiles = Blocks(block, S, R, mask, mask.wraps(R * S, T)), ceil_div(T, tile)
    steps = jnp.minimum(blocks.most_seen(tile), blocks.holding(jnp.max(starts) + tiles * tile - 1) + 1)

    def kernel(starts, places, q, cache, chosen, out, *softmax):
        start, n = starts[pl.program_id(0)] + pl.program_id(2) * tile, pl.program_id(3)
        first, last = blocks.seen(start, tile)
        i, offsets = first + n, jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        pl.when(n == 0)(lambda: begin_softmax(*softmax))

        def visit(is_whole):
            seen = None if is_whole else mask.is_attended(blocks.positions(i), start + offsets)
            if chosen is not None and not is_whole:
                seen &= jnp.concatenate([chosen[0] >> j & 1 for j in range(8)], axis=1) != 0
            fold(0, pl.ds(pl.program_id(1), 1), q, cache, seen, mask.softcap, *softmax)

        is_whole = blocks.is_whole(i, start, tile)
        pl.when((i <= last) & is_whole)(lambda: visit(True))
        pl.when((i <= last) & ~is_whole)(lambda: visit(False))
        pl.when(n == pl.num_programs(3) - 1)(lambda: finish_softmax(out, *softmax))

    def of_tile(width):
        return pl.BlockSpec((1, 1, A, tile, width), lambda b, h, t, *_: (b, h, 0, t, 0))

    def read(b, h, t, n, starts, places):
        first, last = blocks.seen(starts[b] + t * tile, tile)
        return places[b], h, jnp.minimum(first + n, last)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((*q.shape[:4], W + 1), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, K, tiles, steps),
            in_specs=[
                of_tile(H),
                jax.tree.map(lambda x: blocks.spec(x, 1, read), cache),
                jax.tree.map(lambda _: pl.BlockSpec((1, tile, block // 8), lambda b, h, t, *_: (b, t, 0)), mask.chosen),
            ],
            out_specs=of_tile(W + 1),
            scratch_shapes=softmax_state(1, A * tile, block, W),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=kernel_cost(2 * B * K * A * T * S * (H + W), cache),
        interpret=interpret,
        name="ragged_attention",
    )(starts, places, q, cache, mask.chosen)


FAST["attend_to_stored", "tpu"] = prefill_kernel


# ---------------------------------------------------------------------------------------------------------------------
# Norms on TPUs and GPUs


LARGE = 2**21  # numbers of an activation: a long piece of a prompt has more, and gains nothing by fewer kernels


def tpu_inverse_rms(x: Array, eps: float) -> Array:
    """inverse_rms for TPUs, repeated for each number of x: the compiler then takes the root along with the product that
    uses it, and not in a kernel of its own, by estimate 1.2 us each. If it merely repeated the sum, it would take the
    root before that. The maximum is the sum, since no square is larger, but the compiler does not know that."""
    if x.size > LARGE:
        return inverse_rms.plain(x, eps)
    squares = x * x
    total = jnp.maximum(jnp.sum(squares, axis=-1, keepdims=True), squares)
    return jax.lax.rsqrt(total / x.shape[-1] + eps)


def gpu_inverse_rms(x: Array, eps: float) -> Array:
    """inverse_rms for GPUs, of the sum of x * x + eps. XLA makes one kernel of the norm of a single row if there is no
    arithmetic with constants between the sum and the root; else two."""
    return jax.lax.rsqrt(jnp.sum((x * x + eps) * (1 / x.shape[-1]), axis=-1, keepdims=True))


FAST["inverse_rms", "tpu"], FAST["inverse_rms", "gpu"] = tpu_inverse_rms, gpu_inverse_rms


# ---------------------------------------------------------------------------------------------------------------------
# Rope on TPUs


def tpu_turned(x: Array, cos: Array, sin: Array, rope) -> Array:
    """turned for TPUs. A product with zeros and ones puts each number where the other one of its pair was. It is exact,
    and takes one kernel, where halves that are cut out and put together again take several. By estimate this saves 4 of
    34 us in a layer of Qwen3 30B."""
    if x.size > LARGE:
        return turned.plain(x, cos, sin, rope)
    H, half = x.shape[-1], rope.dim // 2
    pairs, rest = np.arange(rope.dim), np.arange(rope.dim, H)
    first, second = pairs.reshape(half, 2).T if rope.interleaved else pairs.reshape(2, half)

    def taken(*columns):
        return einsum("bthi,oi->btho", x, np.eye(H, dtype=np.float32)[np.concatenate(columns)])

    def factors(*halves, of_rest):
        return jnp.pad(jnp.concatenate(halves, -1), [(0, 0)] * 3 + [(0, len(rest))], constant_values=of_rest)

    own = taken(first, second, rest) if rope.interleaved else x
    return own * factors(cos, cos, of_rest=1) + taken(second, first, rest) * factors(-sin, sin, of_rest=0)


FAST["turned", "tpu"] = tpu_turned


# ---------------------------------------------------------------------------------------------------------------------
# Products on TPUs


STREAM_BYTES = 40 * 2**20  # XLA for TPUs does not fetch a weight ahead if a device holds more of it than this


def tpu_product(x: Array, w: Format) -> Array:
    """product for TPUs."""
    B, x = len(x), padded(x, w)
    if 4 * x.size > 2**25:  # if x comes of float32 arrays too large for VMEM, XLA would read them for each tile of w
        x = jax.lax.optimization_barrier(x)
    if isinstance(w, Plain | Int8) and is_streamed(x, w.values):
        y = streamed_product(x, Plain(w.values), lambda x, w: einsum("bc,oc->bo", x, w.values.astype(x.dtype)))
        return y * w.scale if isinstance(w, Int8) else y
    values, scale = w.values_and_scale(x.dtype)
    y = einsum("bc,oc->bo", w.in_order(padded(x, w, 8)), values)[:B]  # XLA turns fewer rows into slow vector code
    return y if scale is None else y * scale


def is_streamed(x: Array, w: Array) -> bool:
    """Whether a kernel streams a weight: if it is too large to be fetched ahead and the rows are few."""
    (B, C), itemsize = x.shape, w.dtype.itemsize
    # Two buffers for 128 rows of w, and two for x. A kernel gets 16 MiB.
    vmem = 2 * C * (128 * itemsize + B * x.dtype.itemsize)
    return B <= 64 and C % 128 == 0 and w.size * itemsize >= STREAM_BYTES and vmem <= 12 * 2**20


def streamed_product(x: Array, w: Format, multiply, block: int | None = None, interpret=False) -> Array:
    """A product as a Pallas kernel for TPUs: x [B, C] times w [O, C], by multiply(x, rows of w): float32 [B, O].

    It reads w once, in blocks of whole rows. Each block is contiguous, while XLA's own product of a weight in
    HBM fetches narrow columns. The next block is fetched while this one is multiplied, which takes less time than
    fetching, the cast of int8 values included. Rows of the last block beyond O are undefined, and are not stored.

    `block` is the number of rows in a grid step, a multiple of 128, by default as many as make 2 MiB, or 128: no more,
    since nothing overlaps the first block of a product; no fewer, since a step has to outlast its own overhead.
    """
    (B, C), O = x.shape, w.shape[0]
    block = block or max(128, 2**21 // (w.values.shape[1] * w.values.dtype.itemsize) // 128 * 128)

    def kernel(x, w, y):
        y[...] = multiply(x[...], jax.tree.map(lambda a: a[...], w))

    def some_rows(a, spec):  # blocks of an array of w, along the dimension that the spec calls "rows"
        sizes = [block if of_rows else n for n, of_rows in zip(a.shape, spec, strict=True)]
        return pl.BlockSpec(sizes, lambda i: tuple(i if of_rows else 0 for of_rows in spec))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((B, O), jnp.float32),
        grid=(ceil_div(O, block),),
        in_specs=[pl.BlockSpec((B, C), lambda i: (0, 0)), jax.tree.map(some_rows, w, w.specs(P("rows", None)))],
        out_specs=pl.BlockSpec((B, block), lambda i: (0, i)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),  # shared by the two cores of a v5p
        cost_estimate=kernel_cost(2 * B * O * C, w),
        interpret=interpret,
        name="streamed_product",
    )(x, jax.tree.map(lambda a: pltpu.with_memory_space_constraint(a, pltpu.HBM), w))


PRODUCTS["tpu", Plain] = PRODUCTS["tpu", Int8] = tpu_product


# ---------------------------------------------------------------------------------------------------------------------
# Gate and up on TPUs


def tpu_linear_halves(x: Array, w: Format) -> tuple[Array, Array]:
    """linear_halves for TPUs. Many rows get a product for each half, since XLA can then do what follows elementwise
    along with the second. One product would write all of its output to memory."""
    if math.prod(x.shape[:-1]) < 128:
        return linear_halves.plain(x, w)
    middle = w.shape[0] // 2
    return linear(x, w.rows(0, middle)), linear(x, w.rows(middle, 2 * middle))


FAST["linear_halves", "tpu"] = tpu_linear_halves


# ---------------------------------------------------------------------------------------------------------------------
# Int4


class Int4Groups(NamedTuple):
    """How Int4 is declared: a scale in `dtype` for each `size` numbers of a row, and zero points or none."""

    size: int = 32
    has_zeros: bool = False
    dtype: str = "bfloat16"
    held: type[Int4] | None = None  # Int4, or what TPUs have in its place: see for_mesh

    bits, kernel_columns = 4, 512  # of Int4Lanes

    def for_mesh(self, weight: Weight, mesh: Mesh) -> Int4Groups | type[Format]:
        """Groups so small that no device has a part of one; Plain if they had fewer than 16 numbers, or if the weight
        is multiplied head by head. On TPUs it is Int4Lanes, for kernels; experts without whole lanes have none."""
        part, shards = weight.parts[0], math.prod(mesh.shape[axis] for axis in weight.axes())
        own, uncut = part.rows_per_device(shards), [weight.other_dim]
        if weight.split == 1:  # how many columns a device has, and the first one of each device
            uncut = [own, *(part.assigned_units(i, shards)[0] * part.layout()[1] for i in range(shards))]
        size = math.gcd(self.size, 128, *uncut)
        has_kernel = mesh.devices.flat[0].platform == "tpu" and not (weight.experts and own % 128)
        held = Int4Lanes if has_kernel else Int4
        return Plain if size < 16 or weight.is_by_head else self._replace(size=size, held=held)

    def width(self, C: int, weight: Weight, dtype: jnp.dtype, mesh: Mesh) -> int:
        """C rounded up to a multiple of 512 if that is a seventh more at most, else as `held` needs it. Such rows fill
        whole vector registers: CPUs multiply 960 columns as 1,024 in a third of the time, and GPUs have a kernel."""
        whole, least = (ceil_div(C, run) * run for run in (512, self.held.run))
        return whole if 7 * whole <= 8 * C else least

    def declare(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Int4:
        values = jax.eval_shape(self.held.packed, jax.ShapeDtypeStruct(shape, jnp.uint8))
        scale = jax.ShapeDtypeStruct(self.held.ordered((*shape[:-1], shape[-1] // self.size)), jnp.dtype(self.dtype))
        zero = jax.ShapeDtypeStruct(scale.shape, self.held.zero_dtype) if self.has_zeros else None
        return self.held(values, scale, zero)


@format_of_arrays
class Int4(Format):
    """Codes of 4 bits, less their group's zero, times its scale. A group is 16 to 128 numbers of a row.

    `values` uint16 [.., O, 8, L] has 4 codes in a word, the first in the lowest bits. L is C / 32, and a lane has 32
    neighbours of a row: word j of the 8 has the codes 4 j to 4 j + 3 of each lane. So an instruction can work on the
    same place of many groups. `scale` is [.., O, C / group], and so is `zero`, uint8, or None if all zeros are 8.
    """

    values: Array
    scale: Array
    zero: Array | None = None

    bits = 4
    run, zero_dtype = 32, jnp.uint8  # C is a multiple of `run`

    @property
    def shape(self):
        return (*self.values.shape[:-2], 32 * self.values.shape[-1])

    def specs(self, spec):
        return Int4(P(*spec[:-1], None, spec[-1]), spec, None if self.zero is None else spec)

    @staticmethod
    def ordered(x):
        """A shape, or an array, of scales [.., O, C / group] as this format has it."""
        return x

    @staticmethod
    def packed(codes: Array | np.ndarray) -> Array | np.ndarray:
        """uint8 codes [.., C] as values."""
        lanes = codes.shape[-1] // 32
        return packed_codes(Int4.in_order(codes), 4, lanes).reshape(*codes.shape[:-1], 8, lanes)

    def encode(self, x):
        codes, scale = quantize_in_groups(x, self.ordered(self.scale.shape)[-1], self.scale.dtype)
        return type(self)(self.packed(codes), self.ordered(scale))

    @staticmethod
    def in_order(x):
        return x.reshape(*x.shape[:-1], -1, 32).swapaxes(-1, -2).reshape(x.shape)

    def of_lanes(self, a: Array) -> Array:
        """Scales or zeros [.., C / group] as [.., n, L]: n is 2 if a lane has two groups of 16 numbers, otherwise 1."""
        group = self.shape[-1] // a.shape[-1]
        if group >= 32:
            return jnp.repeat(a, group // 32, axis=-1)[..., None, :]
        return a.reshape(*a.shape[:-1], -1, 32 // group).swapaxes(-1, -2)

    def numbers(self, dtype: jnp.dtype) -> Array:
        """The numbers [.., O, 32, L], those of a lane below each other."""
        scale = self.of_lanes(self.scale)[..., None, None, :].astype(jnp.float32)
        zero = 8 if self.zero is None else self.of_lanes(self.zero)[..., None, None, :].astype(jnp.int32)
        words = self.values.reshape(*scale.shape[:-3], -1, 1, scale.shape[-1])
        numbers = (codes_of(words) - zero).astype(jnp.float32) * scale
        return numbers.astype(dtype).reshape(*self.shape[:-1], 32, -1)

    def values_and_scale(self, dtype):
        return self.numbers(dtype).reshape(self.shape), None


@format_of_arrays
class Int4Lanes(Int4):
    """Int4 as TPUs have it, in runs of 512 columns, which unpack to four vectors of 128 lanes: `values` uint16
    [.., O, C / 4], where word w of the 128 of a run has its codes w, 128 + w, 256 + w and 384 + w. `scale` and `zero`
    are [.., C / group, O]."""

    run, kernel_columns, zero_dtype = 512, 512, jnp.bfloat16
    in_order = Format.in_order  # columns stay where they are

    @property
    def shape(self):
        return (*self.values.shape[:-1], 4 * self.values.shape[-1])

    @staticmethod
    def ordered(x):
        return (*x[:-2], x[-1], x[-2]) if isinstance(x, tuple) else x.swapaxes(-1, -2)

    @staticmethod
    def packed(codes):
        return packed_codes(codes, 4, 128)

    def specs(self, spec):
        of_groups = P(*spec[:-2], spec[-1], spec[-2])
        return type(self)(spec, of_groups, None if self.zero is None else of_groups)

    def rows(self, start, stop):
        of_groups = (x if x is None else x[:, start:stop] for x in (self.scale, self.zero))
        return type(self)(self.values[start:stop], *of_groups)

    def values_and_scale(self, dtype):
        scale = self.ordered(self.scale)[..., None].astype(jnp.float32)
        zero = 8 if self.zero is None else self.ordered(self.zero)[..., None]
        codes = codes_of(self.values.reshape(*self.values.shape[:-1], -1, 1, 128)).reshape(*scale.shape[:-1], -1)
        return ((codes - zero).astype(jnp.float32) * scale).astype(dtype).reshape(self.shape), None

    @staticmethod
    def bits_of(words: Array, k: int) -> Array:
        """The k-th codes of uint32 words, each of two rows, as the bits of two bfloat16 numbers: 0x4300, which is 128,
        with a code in its last bits is 128 plus the code."""
        return words >> 4 * k & 0xF000F | 0x43004300

    def offset(self, n: int, count: int) -> Array | int | None:
        """By how much the numbers of bits_of are too large in `count` groups from the n-th on: whole numbers, float32
        [count, O], or one for all; None: not at all."""
        return 136 if self.zero is None else 128 + self.zero[n : n + count].astype(jnp.float32)


def quantize_in_groups(x: Array, groups: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """x [.., C] as uint8 codes from 0 to 15 [.., C], 8 for a zero, and scales [.., groups] in `dtype`. With one
    scale a group's largest number has the code 0, with another 15. The one with the smaller squared error is taken."""
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    largest = jnp.take_along_axis(x, jnp.argmax(jnp.abs(x), axis=-1, keepdims=True), axis=-1)
    scales = jnp.stack([(largest / n).astype(dtype) for n in (-8.0, 7.0)])
    divisors = jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    codes = jnp.clip(jnp.round(x / divisors), -8, 7)
    best = jnp.argmin(jnp.sum((codes * divisors - x) ** 2, axis=-1, keepdims=True), axis=0)[None]
    codes, scales = (jnp.take_along_axis(a, best, axis=0)[0] for a in (codes, scales))
    return (codes + 8).astype(jnp.uint8).reshape(*x.shape[:-2], -1), scales[..., 0]


def packed_codes(codes: Array | np.ndarray, n: int, lanes: int) -> Array | np.ndarray:
    """uint8 codes of 4 bits [.., C] as words [.., C / n] of n of them. They stand in runs of n * lanes codes: word w of
    a run has its codes w, lanes + w, 2 lanes + w and so on, the first in the lowest bits."""
    runs = codes.reshape(*codes.shape[:-1], -1, n, lanes).astype(f"uint{4 * n}")
    return sum(runs[..., k, :] << 4 * k for k in range(n)).reshape(*codes.shape[:-1], -1)


def codes_of(words: Array) -> Array:
    """The four codes of words [.., 1, lanes]: int32 [.., 4, lanes]."""
    return (words >> 4 * jnp.arange(4, dtype=words.dtype)[:, None] & 15).astype(jnp.int32)


FORMATS["int4"] = Int4Groups()


def int4_cpu_product(x: Array, w: Int4) -> Array:
    """product for CPUs in 4 bits. Up to 4 rows are multiplied one by one, in a loop that unpacks. For more rows, pieces
    of the weight are unpacked, and multiplied while they are in the processor's cache. Without the barrier, XLA would
    fuse the change of shape with the unpacking, which then takes five times as long."""
    x = w.in_order(padded(x, w))
    if len(x) <= 4:
        return jnp.concatenate([int4_row_product(row, w) for row in x])

    def unpack_first(piece):
        numbers = jax.lax.optimization_barrier(piece.numbers(x.dtype))
        return plain_cpu_product(x, numbers.reshape(piece.shape))

    return over_rows(unpack_first, w, pieces_of(w, 2**21))


def int4_row_product(x: Array, w: Int4) -> Array:
    """x [C] in the order of w, times w [O, C]: float32 [1, O]. XLA makes one unrolled loop over the rows of w, with the
    lanes side by side in vector registers. Nothing is shifted: a code is masked where it stands in its word, and x is
    divided by that power of two. A lane's sum, or that of each group in it, is scaled once."""
    lanes = w.values.shape[-1]
    scale, zero = w.of_lanes(w.scale), None if w.zero is None else w.of_lanes(w.zero)
    parts = scale.shape[1]
    if scale.shape[1:] != (1, w.scale.shape[1]):  # XLA would not keep lanes together where it repeats numbers
        scale, zero = jax.lax.optimization_barrier((scale, zero))
    x = x.astype(jnp.float32)
    added = jnp.sum(x.reshape(parts, -1, lanes), axis=1)  # what is taken off for each unit of the zero
    # XLA repeats no division in a loop. The arrays are flat: as [32, L] they would have a lane's numbers side by side.
    powers = jax.lax.optimization_barrier(jnp.tile(jnp.repeat(16.0 ** jnp.arange(4), lanes), 8))
    x, added = jax.lax.optimization_barrier((x / powers, added))
    x, words = x.reshape(32, lanes), [w.values[:, j].astype(jnp.int32) for j in range(8)]

    def scaled_sum(n):
        places = range(n * 32 // parts, (n + 1) * 32 // parts)
        total = sum((words[i // 4] & 15 << i % 4 * 4).astype(jnp.float32) * x[i] for i in places)
        return (total - added[n] * (8 if zero is None else zero[:, n])) * scale[:, n].astype(jnp.float32)

    sums = jax.lax.optimization_barrier(sum(map(scaled_sum, range(parts))))
    return einsum("ol,bl->bo", sums, jnp.ones((1, lanes)))


def int4_gpu_product(x: Array, w: Int4) -> Array:
    """product for GPUs in 4 bits. Up to 64 rows are multiplied by a kernel. Without it, up to 8 rows are sums of terms,
    which XLA computes in one loop that reads and unpacks w once. For more it would not, so some rows of w at a time are
    unpacked to memory and multiplied."""
    x, O = padded(x, w), w.shape[0]
    if len(x) <= 64 and int4_suits_triton(x, w):
        return triton_int4_product(x, w)
    if len(x) <= 8:
        numbers, rows = w.numbers(jnp.float32), x.astype(jnp.float32).reshape(len(x), -1, 32)
        return jnp.stack([jnp.sum(numbers * row.T, axis=(1, 2)) for row in rows])
    x = w.in_order(x)
    size, y = O // pieces_of(w, 2**24), []
    for first in range(0, O, size):
        piece, x, y = jax.lax.optimization_barrier((w.rows(first, first + size), x, y))  # no piece before its turn
        y.append(product(x, Plain(piece.values_and_scale(x.dtype)[0])))
    return jnp.concatenate(y, axis=1)


def int4_suits_triton(x: Array, w: Int4) -> bool:
    """Whether add_int4_lanes can take these rows and this weight. It needs one scale for the 32 numbers of a lane."""
    O, L = w.values.shape[-3], w.values.shape[-1]
    return O % 16 == L % 16 == L % w.scale.shape[-1] == 0 and x.dtype == jnp.bfloat16 and has_triton(w)


def triton_int4_product(x: Array, w: Int4, interpret=False) -> Array:
    """x [B, C], at most 64 rows, times w [O, C], as one Pallas kernel for GPUs: float32 [B, O]. Unpacking numbers and
    waiting for words take most of the time, so several programs share the lanes of a row."""
    (B, _), O, L = x.shape, w.shape[0], w.values.shape[-1]
    M, rows, lanes = power_of_two(max(B, 16)), math.gcd(O, 64), math.gcd(L, 64)
    blocks = L // lanes
    # About 500 programs or more, each with as many blocks as the others.
    splits = next(n for n in range(1, blocks + 1) if blocks % n == 0 and (n * O // rows >= 500 or n == blocks))
    x = jnp.pad(x, ((0, M - B), (0, 0))).reshape(M, L, 32).transpose(2, 0, 1)

    def kernel(x, w, y):
        n, split = pl.program_id(0), pl.program_id(1)
        of_rows = pl.ds(n * rows, rows)

        def add_block(i, total):
            at = pl.ds((split * (blocks // splits) + i) * lanes, lanes)
            return add_int4_lanes(total, x, w, 0, slice(None), of_rows, at)

        y[split, :, of_rows] = jax.lax.fori_loop(0, blocks // splits, add_block, jnp.zeros((M, rows), jnp.float32))

    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((splits, M, O), jnp.float32),
        grid=(O // rows, splits),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="int4_product",
    )(x, jax.tree.map(lambda a: a[None], w))
    return jnp.sum(y, axis=0)[:B]


def add_int4_lanes(total, x, w, e, of_tile, of_rows, at) -> Array:
    """In a kernel for GPUs: float32 total [M, O], plus the product of M rows of x and O rows of w in some lanes.

    x bfloat16 [32, rows, L] has first the first number of each lane, then the second, and so on; w is [E, rows, C].
    `of_tile` says which rows of x these are, `e` and `of_rows` which of w, and `at` which lanes.
    """
    row, group = of_rows.start + jnp.arange(of_rows.size), w.values.shape[-1] // w.scale.shape[-1]
    groups = e, row[:, None], (at.start + jnp.arange(at.size))[None] // group
    scale = w.scale[groups].astype(jnp.bfloat16)
    zero = 8 if w.zero is None else w.zero[groups].astype(jnp.bfloat16)

    def add_words(j, total):
        words = w.values[e, of_rows, j, at].astype(jnp.int32)
        for k in range(4):
            # 128 plus the code: in bfloat16 between 128 and 256 the code is the last bits.
            number = jax.lax.bitcast_convert_type((words >> 4 * k & 15 | 0x4300).astype(jnp.int16), jnp.bfloat16)
            total += einsum("mc,oc->mo", x[4 * j + k, of_tile, at], (number - (zero + 128)) * scale)
        return total

    return jax.lax.fori_loop(0, 8, add_words, total)


def lanes_kernel_product(x: Array, w: Int4Lanes, add) -> Array:
    """x [B, C], B a multiple of 8, times w [O, C] in a kernel: float32 [B, O]. `add` is add_scaled_sums or, for many
    rows, another function that gives the same."""
    (B, C), O = x.shape, w.shape[0]
    group, total = C // w.scale.shape[0], jnp.zeros((B, O), jnp.float32)
    for at in range(0, C, 512):
        words = pltpu.bitcast(w.values[:, at // 4 : at // 4 + 128], jnp.uint32)
        numbers = [pltpu.bitcast(w.bits_of(words, k), jnp.bfloat16) for k in range(4)]
        total = add(total, x[:, at : at + 512], numbers, w, at // group, group)
    return total


def add_scaled_sums(total: Array, x: Array, numbers: list[Array], w: Int4Lanes, first: int, group: int) -> Array:
    """total [B, O] and x [B, 512] times `numbers`, four bfloat16 [O, 128] of w.bits_of, whose groups are those from
    `first` on. For few rows: to scale each number would take longer than to fetch it. So products come first, and sums
    are scaled. 128 columns of x are multiplied as a row for each group among them, with zeros in the place of the other
    groups. What the offset adds to a sum is taken off again."""
    B, groups = len(x), 128 // group
    own = jax.lax.broadcasted_iota(jnp.int32, (B, 128), 1) // group
    for k in range(4):
        columns = x[:, 128 * k : 128 * k + 128].astype(jnp.float32)
        alone = jnp.concatenate([jnp.where(own == g, columns, 0) for g in range(groups)])
        sums = einsum("bc,oc->bo", alone.astype(x.dtype), numbers[k].astype(x.dtype))
        added = jnp.sum(alone, axis=1, keepdims=True)
        for g in range(groups):
            n, of_g = first + k * groups + g, slice(g * B, (g + 1) * B)
            offset = w.offset(n, 1)
            of_n = sums[of_g] if offset is None else sums[of_g] - added[of_g] * offset
            total += of_n * w.scale[n : n + 1].astype(jnp.float32)
    return total


def tpu_lanes_product(x: Array, w: Int4Lanes) -> Array:
    """product for TPUs in 4 bits."""
    if len(x) > 32:
        return tpu_product(x, w)
    rows = jnp.pad(padded(x, w), ((0, -len(x) % 8), (0, 0)))
    return streamed_product(rows, w, partial(lanes_kernel_product, add=add_scaled_sums))[: len(x)]


PRODUCTS["cpu", Int4] = int4_cpu_product
PRODUCTS["gpu", Int4] = int4_gpu_product
PRODUCTS["tpu", Int4] = tpu_product
PRODUCTS["tpu", Int4Lanes] = tpu_lanes_product


# ---------------------------------------------------------------------------------------------------------------------
# Experts on each machine


def has_few_pairs(ids: Array, E: int) -> bool:
    """Whether pairs, of a token and an expert that it chose, are so few that each reads its expert by itself, at full
    speed. Many pairs share what they read, and their rows are sorted by expert."""
    return ids.size < 3 * E


def cpu_experts(x, ids, scores, w_gate_up, w_down, activate, gate_up_bias=None) -> Array:
    """`experts` for CPUs."""
    ids = local_ids(ids, E := w_down.shape[0])
    mean = ids.size // (E * jax.lax.axis_size("ep"))  # tokens of an expert
    tile = 1 if has_few_pairs(ids, E) else min(2 * power_of_two(mean), 64)
    columns = cpu_columns(w_down, w_gate_up.shape[1] // 2, tile)
    return expert_loop(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile, columns)


def gpu_experts(x, ids, scores, w_gate_up, w_down, activate, gate_up_bias=None) -> Array:
    """`experts` for GPUs. On an H100 tiles are faster where there are more pairs than experts."""
    ids = local_ids(ids, E := w_down.shape[0])
    if ids.size > E and tiles_suit(x, w_gate_up) and tiles_suit(x, w_down):
        return tiled_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate)
    if has_few_pairs(ids, E):
        return gathered_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate)
    return expert_loop(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile=512)


def tpu_experts(x, ids, scores, w_gate_up, w_down, activate, gate_up_bias=None) -> Array:
    """`experts` for TPUs."""
    if w_gate_up.shape[1] // 2 % 128:  # the kernel fetches whole lanes
        ids = local_ids(ids, w_down.shape[0])
        return expert_loop(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile=128)
    return expert_kernel(padded(x, w_gate_up), ids, scores, w_gate_up, w_down, gate_up_bias, activate)


EXPERT_COLUMNS = {}  # by format, best first: how many of an expert's F columns CPUs multiply with one row at a time
EXPERT_PRODUCTS = {}  # by format: what takes the place of expert_product
FAST["experts", "cpu"], FAST["experts", "gpu"], FAST["experts", "tpu"] = cpu_experts, gpu_experts, tpu_experts


def cpu_columns(w_down: Format, F: int, rows: int) -> int:
    """How many of an expert's F columns CPUs multiply with `rows` rows at a time: as its format says for one row. For
    more rows they are whole groups of the format, of which 8 MB in bfloat16 stay in a processor's caches."""
    if rows == 1:
        return next((n for n in EXPERT_COLUMNS.get(type(w_down), (2048,)) if F % n == 0), F)
    group = math.lcm(*(w_down.shape[2] // a.shape[-1] for a in jax.tree.leaves(w_down) if a.ndim > 2))
    fewest = ceil_div(w_down.shape[1] * F, 2**22)
    return next((F // n for n in range(fewest, 4 * fewest) if F % (n * group) == 0), F)


def visits_of(ids: Array, E: int, tile: int) -> tuple[Array, ...]:
    """The experts `ids` [pairs], E for one on another device, as visits: an expert and at most `tile` of its pairs,
    which lie together, since pairs are sorted by expert.

    Returns that order of the pairs; of each visit its expert, its first pair in that order, and how many it has; and
    the number of visits. The arrays have room for as many as there can be.
    """
    counts = jnp.sum(ids == jnp.arange(E)[:, None], axis=1, dtype=jnp.int32)
    visits = ceil_div(counts, tile)  # of each expert
    ends, steps = jnp.cumsum(visits), jnp.arange(min(E, ids.size) + ids.size // tile)[:, None]
    # TPUs are slow to look up numbers one by one, so they are sums over the experts before, and up to, that of a visit.
    expert, begin, earlier = (jnp.sum(jnp.where(ends <= steps, n, 0), axis=1) for n in (1, counts, visits))
    first, end = begin + (steps[:, 0] - earlier) * tile, jnp.sum(jnp.where(ends - visits <= steps, counts, 0), axis=1)
    return jnp.argsort(ids), jnp.minimum(expert, E - 1), first, jnp.clip(end - first, 0, tile), ends[-1]


def expert_loop(
    x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile: int, columns: int | None = None
) -> Array:
    """Where no kernel fits: a loop over visits of at most `tile` rows, and over pieces of their experts, of `columns`
    columns, or of all. Up to `tile` tokens are not sorted: all of them are multiplied with every expert that one of
    them chose."""
    (B, k), (E, D, _), F, x = ids.shape, w_down.shape, w_gate_up.shape[1] // 2, padded(x, w_gate_up)
    columns, is_sorted = columns or F, tile < B
    order, expert, first, _, count = visits_of(ids.ravel(), E, tile if is_sorted else B * k)
    if is_sorted:
        # The last visit of an expert may go beyond its pairs: these have other experts, or none.
        x = x[jnp.pad(order // k, (0, tile))]
        ids = jnp.pad(ids.ravel()[order], (0, tile), constant_values=E)[:, None]
        scores = jnp.pad(scores.ravel()[order], (0, tile))[:, None]
    tile = min(tile, B)

    def step(i, out):
        # The barrier ties the weights to i: otherwise XLA for CPUs would convert all experts before the loop.
        weights, i = jax.lax.optimization_barrier(((w_gate_up, w_down, gate_up_bias), i))
        visit, column = i // (F // columns), i % (F // columns) * columns
        e, begin = expert[visit], first[visit] if is_sorted else 0

        def part(w, axis, start):  # of the expert e: `columns` of an axis; of down all, zeros included, if that is F
            def cut(a):
                starts, sizes = [e] + [0] * (a.ndim - 1), [1, *a.shape[1:]]
                if axis == 1 or (a.ndim > 2 and columns < F):  # a scale [E, O] has no columns
                    n = w.shape[axis] // a.shape[axis]  # columns to a number of this array
                    starts[axis], sizes[axis] = start // n, columns // n
                # As integers: XLA for CPUs would turn all of a bfloat16 array to float32 to cut a piece of it.
                bits = jax.lax.bitcast_convert_type(a, jnp.uint16) if a.dtype == jnp.bfloat16 else a
                piece = jax.lax.dynamic_slice(bits, starts, sizes)[0]
                return jax.lax.bitcast_convert_type(piece, a.dtype)

            return jax.tree.map(cut, w)

        def of_visit(a):
            return jax.lax.dynamic_slice_in_dim(a, begin, tile)

        score = jnp.sum(jnp.where(of_visit(ids) == e, of_visit(scores), 0), axis=1, keepdims=True)
        gate, up = (linear(of_visit(x), part(weights[0], 1, start + column)) for start in (0, F))
        if gate_up_bias is not None:
            gate, up = (y + part(weights[2], 1, start + column) for y, start in ((gate, 0), (up, F)))
        h = activate(gate, up, score).astype(x.dtype)
        y = of_visit(out) + linear(h, part(weights[1], -1, column))
        return jax.lax.dynamic_update_slice_in_dim(out, y, begin, axis=0)

    out = jax.lax.fori_loop(0, count * (F // columns), step, jnp.zeros((len(x), D), jnp.float32))
    if not is_sorted:
        return out
    return jnp.sum(out[jnp.argsort(order)].reshape(B, k, D), axis=1)  # zeros for experts on other devices


def expert_product(x: Array, w: Format, expert: Array) -> Array:
    """x [pairs, C], each row times the matrix of its expert, int32 [pairs]: float32 [pairs, O], for GPUs. In this form
    XLA fuses the choice of the expert into the product: nothing is copied."""
    if own := EXPERT_PRODUCTS.get(type(w)):
        return own(x, w, expert)
    values, scale = w.values_and_scale(jnp.float32)
    x = w.in_order(padded(x, w)).astype(jnp.float32)
    # The barrier: one sum over columns and pairs would give a GPU too few rows to work on.
    y = jax.lax.optimization_barrier(jnp.sum(x[:, None] * values[expert].astype(jnp.float32), axis=-1))
    return y if scale is None else y * scale[expert]


def gathered_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate) -> Array:
    """For GPUs and a few pairs, each of which reads its expert. (A pair whose expert is on another device reads the
    last one here, times 0.)"""
    (B, k), E = ids.shape, w_down.shape[0]
    expert = jnp.minimum(ids.ravel(), E - 1)
    gate_up = expert_product(jnp.repeat(x, k, axis=0), w_gate_up, expert)
    gate, up = jnp.split(gate_up if gate_up_bias is None else gate_up + gate_up_bias[expert], 2, axis=-1)
    h = activate(gate, up, jnp.where(ids < E, scores, 0).reshape(-1, 1)).astype(x.dtype)
    return jnp.sum(expert_product(h, w_down, expert).reshape(B, k, -1), axis=1)


def tiled_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, interpret=False) -> Array:
    """For GPUs and many pairs. Two kernels multiply the visits, each as a tile with a row for each pair that a visit
    may have. What a tile has beyond its pairs is not used."""
    (B, k), E, pairs = ids.shape, w_down.shape[0], ids.ravel()
    tile = min(power_of_two(max(pairs.size // (E * jax.lax.axis_size("ep")), 16)), 64)
    order, expert, first, rows, count = visits_of(pairs, E, tile)
    pair = order[jnp.minimum(first[:, None] + jnp.arange(tile), pairs.size - 1).ravel()]  # of each row of the tiles
    is_pair = (jnp.arange(tile) < rows[:, None]).ravel()
    score = jnp.where(is_pair, scores.ravel()[pair], 0)
    h = tile_products(x[pair // k], w_gate_up, expert, count[None], (activate, score, gate_up_bias), interpret)
    y = tile_products(h, w_down, expert, count[None], interpret=interpret)
    row = jnp.zeros_like(pairs).at[jnp.where(is_pair, pair, pairs.size)].set(jnp.arange(len(pair)), mode="drop")
    return jnp.sum(jnp.where((pairs < E)[:, None], y[row], 0).reshape(B, k, -1), axis=1)


def tiles_suit(x: Array, w: Format) -> bool:
    """Whether tile_products can take these rows and this weight."""
    if type(w) not in TILES or x.dtype != jnp.bfloat16:
        return False
    parts, _, _ = TILES[type(w)]
    fits = w.shape[1] // 2 % 16 == w.shape[2] // parts % 16 == 0
    return fits and has_triton(w) and (type(w) is not Int4 or int4_suits_triton(x, w))


def tile_products(x: Array, w: Format, expert: Array, count: Array, gated=None, interpret=False) -> Array:
    """One Pallas kernel for GPUs: tiles, x bfloat16 [rows, C], times the matrices of their experts, w [E, O, C]:
    float32 [rows, O]. `gated` is activate, the scores [rows], and biases [E, O] or None. If it is given, the result is
    what activate makes of gate and up: [rows, O / 2] in the dtype of x.

    Args: expert int32 [tiles]; count int32 [1], how many of the tiles are multiplied. The others are not written.
    """
    activate, *added = gated or (None,)
    parts, run, add_block = TILES[type(w)]
    x = padded(x, w).reshape(len(x), -1, parts, run).transpose(2, 0, 1, 3).reshape(parts, len(x), -1)
    halves = 2 if activate else 1
    tile, columns = x.shape[1] // len(expert), w.shape[1] // halves
    rows, size = math.gcd(columns, 64), math.gcd(x.shape[2], 64)

    def kernel(x, w, expert, count, added, out):
        n, t = pl.program_id(0), pl.program_id(1)

        @pl.when(t < count[0])
        def multiply_tile():
            e, of_tile = expert[t], pl.ds(t * tile, tile)
            of_rows = [pl.ds(half * columns + n * rows, rows) for half in range(halves)]

            def add(i, sums):
                at = pl.ds(i * size, size)
                return [add_block(total, x, w, e, of_tile, of, at) for total, of in zip(sums, of_rows, strict=True)]

            sums = jax.lax.fori_loop(0, x.shape[2] // size, add, [jnp.zeros((tile, rows), jnp.float32)] * halves)
            if activate:
                score, bias = added
                if bias is not None:
                    sums = [total + bias[e, of][None] for total, of in zip(sums, of_rows, strict=True)]
                sums = [activate(*sums, score[of_tile][:, None])]
            out[of_tile, of_rows[0]] = sums[0].astype(out.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[1], columns), x.dtype if activate else jnp.float32),
        grid=(columns // rows, len(expert)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="tile_products",
    )(x, w, expert, count, added)


def add_tile_block(total, x, w, e, of_tile, of_rows, at) -> Array:
    """In tile_products: total plus the product of the rows `of_tile` of x, and the rows `of_rows` of expert e, in the
    columns `at`."""
    values, scale = jax.tree.map(lambda a: a[(e, of_rows, at)[: len(a.shape)]], w).values_and_scale(jnp.bfloat16)
    y = einsum("mc,oc->mo", x[0, of_tile, at], values)
    return total + (y if scale is None else y * scale)


# By format: into how many parts the columns of x are dealt, how many neighbours at a time go to one part, and what adds
# the product of a block of columns.
TILES = {Plain: (1, 1, add_tile_block), Int8: (1, 1, add_tile_block), Int4: (32, 1, add_int4_lanes)}
GROUP_BYTES = 48 * 2**20  # of VMEM, for the rows of a group of tokens and their sums


def expert_kernel(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile: int = 128, interpret=False) -> Array:
    """One Pallas kernel for TPUs: it fetches the experts that tokens chose, and no others.

    It goes through its visits, 128 of an expert's columns at a time, or 512 in 4 bits, and maybe fewer the last time.
    It fetches the next piece of gate, up and down while it multiplies this one. The hidden columns never leave the
    chip, and the sums stay in VMEM until the end. A device without work fetches nothing.

    Up to `tile` tokens are all multiplied with every expert that one of them chose. A visit is such an expert, and the
    kernel lists them itself, in less time than XLA's launches would take. Of more tokens, a visit is an expert and at
    most `tile` of those that chose it: the kernel copies their rows together, and adds each result to the sum of its
    token. The pairs are sorted before, by expert. The grid is groups of tokens, as many as VMEM holds.
    """
    (B, width), (E, D, _), k = x.shape, w_down.shape, ids.shape[1]
    F, columns, is_sorted = w_gate_up.shape[1] // 2, w_down.kernel_columns, tile < B
    pieces = ceil_div(F, columns)
    fitting = GROUP_BYTES // (width * (x.dtype.itemsize + 4))
    fewest = 8 if Int4Lanes in (type(w_gate_up), type(w_down)) else 1
    group = min(power_of_two(B), power_of_two(fitting + 1) // 2) if is_sorted else max(B, fewest)
    groups, pairs = ceil_div(B, group), group * k
    dtype, missing = x.dtype, ((0, groups * group - B), (0, 0))
    x, ids, scores = jnp.pad(x, missing), jnp.pad(ids, missing, constant_values=-1), jnp.pad(scores, missing)
    ids = local_ids(ids, E) if is_sorted else ids  # otherwise the kernel counts them itself, which saves a launch
    choices, ids = [ids, scores], ids.reshape(groups, pairs)
    listed, visits = (ids,), 0
    if is_sorted:
        order, *listed = jax.vmap(partial(visits_of, E=E, tile=tile))(ids)
        x, listed, visits = as_words(x), (order // k, *listed), listed[0].shape[1]

    def kernel(listed, x, choices, weights, out, seen, chosen, rows, picked, y, buffers, arrived):
        # listed has the experts of the pairs or, if they are sorted, what visits_of returns, with the token of each
        # pair. rows, picked and y are a visit's rows of x, of the choices and of the result.
        g, before = pl.program_id(0), 0 if is_sorted else jax.lax.axis_index("ep") * E  # experts on earlier devices
        steps = pieces * (listed[4][g] if is_sorted else list_chosen(listed[0], before, seen, chosen))

        def expert_of(visit):
            return listed[1][g * visits + visit] if is_sorted else chosen[visit]

        def for_piece(i, action):
            e, f, slot = expert_of(jax.lax.div(i, pieces)), jax.lax.rem(i, pieces), jax.lax.rem(i, 2)
            for_copies(action, e, f, slot, weights, buffers, arrived, F, columns)

        def start(i):
            pl.when(i < steps)(lambda: for_piece(i, lambda copy: copy.start()))

        def for_rows(visit, action):
            """action(row of the visit, row of its token), for each pair of the visit."""
            tokens, _, first, sizes, _ = listed
            first_pair = g * pairs + first[g * visits + visit]

            def of_row(n, _):
                action(pl.ds(n, 1), pl.ds(tokens[first_pair + n], 1))

            jax.lax.fori_loop(0, sizes[g * visits + visit], of_row, None)

        def collect(row, token):
            for of_visit, of_all in zip((rows, *picked), (x, *choices), strict=True):
                of_visit[row] = of_all[token]

        def begin(visit):
            for_rows(visit, collect)
            y[...] = jnp.zeros(y.shape, jnp.float32)

        def add_to_token(row, token):
            out[token] += y[row]

        def add(i, _):
            start(i + 1)
            visit, f, slot = jax.lax.div(i, pieces), jax.lax.rem(i, pieces), jax.lax.rem(i, 2)
            if is_sorted:
                pl.when(f == 0)(lambda: begin(visit))
            for_piece(i, lambda copy: copy.wait())
            h, (experts, scores) = (from_words(rows[...], dtype)[:, :width], picked) if is_sorted else (x[...], choices)
            score = jnp.sum(jnp.where(experts[...] == before + expert_of(visit), scores[...], 0), axis=1, keepdims=True)
            gate, up = (piece_product(h, slot, *w) for w in buffers[:2])
            h = activate(gate, up, score)
            if F % columns:  # beyond an expert's last rows are those of the piece before
                h = jnp.where(jax.lax.broadcasted_iota(jnp.int32, h.shape, 1) < F - f * columns, h, 0)
            total = y if is_sorted else out
            total[...] += piece_product(h.astype(dtype), slot, buffers[2])
            if is_sorted:
                pl.when(f == pieces - 1)(lambda: for_rows(visit, add_to_token))

        start(0)
        out[...] = jnp.zeros(out.shape, jnp.float32)
        jax.lax.fori_loop(0, steps, add, None)

    def of_group(width):
        return pl.BlockSpec((group, width), lambda g, *_: (g, 0), pipeline_mode=pl.Buffered(1))

    # How many experts are read if the router prefers none.
    reads = groups * E * (1 - (1 - 1 / (E * jax.lax.axis_size("ep"))) ** min(pairs, B * k))
    nbytes = int(reads / E * sum(w.size * w.dtype.itemsize for w in jax.tree.leaves((w_gate_up, w_down))))
    flops = 6 * D * F * (B * k // jax.lax.axis_size("ep") if is_sorted else int(B * reads))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    gate_up = [w_gate_up] if gate_up_bias is None else [w_gate_up, Plain(gate_up_bias)]
    # Otherwise XLA moves all weights to VMEM if they fit, chosen or not.
    weights = jax.tree.map(lambda w: pltpu.with_memory_space_constraint(w, pltpu.HBM), [*gate_up, w_down])
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((groups * group, D), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups,),
            in_specs=[of_group(x.shape[1]), [of_group(k)] * 2, jax.tree.map(lambda _: in_hbm, weights)],
            out_specs=of_group(D),
            scratch_shapes=[
                *(pltpu.SMEM((n + 1,), jnp.int32) for n in (E, min(E, pairs))),  # seen, chosen
                pltpu.VMEM((tile, x.shape[1]), x.dtype),
                [pltpu.VMEM((tile, k), dtype) for dtype in (jnp.int32, jnp.float32)],
                pltpu.VMEM((tile, D), jnp.float32),
                (*[[two_slots(w, 0, columns) for w in gate_up]] * 2, two_slots(w_down, 1, columns)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=60 * 2**20),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0),
        interpret=interpret,
        name="experts",
    )([a.ravel() for a in listed], x, choices, weights)[:B]


def list_chosen(ids, before, seen, chosen) -> Array:
    """Lists each expert of `ids` that is here once in `chosen`, and returns how many there are; `before` are on earlier
    devices. seen[e] is 1 once e is listed; the last of `seen`, for what is elsewhere, is 1 from the start."""
    E = seen.shape[0] - 1

    def clear(e, _):
        seen[e] = 0

    def enter(i, count):
        e = ids[i] - before
        e = jnp.where((e >= 0) & (e < E), e, E)
        chosen[count] = e  # the next one takes this place if this is in the list already
        count += 1 - seen[e]
        seen[e] = 1
        return count

    jax.lax.fori_loop(0, E, clear, None)
    seen[E] = 1
    return jax.lax.fori_loop(0, ids.shape[0], enter, 0)


def for_copies(action, e: Array, f: Array, slot: Array, weights, buffers, arrived, F: int, columns: int) -> None:
    """action(copy) for all of piece f of expert e, which has F columns, into a slot of the buffers: rows of gate and
    up, maybe with biases, and columns of down. An expert's last piece may have fewer rows."""
    unit, last = math.gcd(F, columns), ceil_div(F, columns) - 1

    def copy(w, buffers, axis, i, n, count):
        places = places_of(w, e, axis, i, n, count)
        for a, buffer, place in zip(jax.tree.leaves(w), jax.tree.leaves(buffers), places, strict=True):
            target = buffer.at[slot, *(pl.ds(0, n) for n in piece_shape(a, place))]
            action(pltpu.make_async_copy(a.at[place], target, arrived.at[slot]))

    def copy_all(rows):
        *gate_up, down = weights
        for of_half, first in zip(buffers[:2], (0, F // unit), strict=True):
            for w, buffer in zip(gate_up, of_half, strict=True):
                copy(w, buffer, 0, first + f * (columns // unit), unit, rows // unit)
        copy(down, buffers[2], 1, f, columns, 1)

    if F % columns:
        pl.when(f < last)(lambda: copy_all(columns))
        pl.when(f == last)(lambda: copy_all(F % columns))
    else:
        copy_all(columns)


def piece_shape(a: Array, place: tuple) -> list[int]:
    """The shape of a[place], without the expert."""
    sizes = [n if part == slice(None) else getattr(part, "size", 1) for part, n in zip(place, a.shape, strict=True)]
    return sizes[a.ndim == 3 :]


def two_slots(w: Format, axis: int, columns: int) -> object:
    """Memory for two pieces of a matrix, or of biases."""
    arrays, tree = jax.tree.flatten(w)
    places = places_of(w, 0, axis, 0, columns)
    return tree.unflatten(pltpu.VMEM((2, *piece_shape(a, at)), a.dtype) for a, at in zip(arrays, places, strict=True))


def piece_product(x: Array, slot: Array, w: Format, *bias: Plain) -> Array:
    """x [B, C] times the piece [O, C] in a slot of the buffers of a matrix, and maybe of biases: float32 [B, O]."""
    w, bias = jax.tree.map(lambda buffer: buffer[slot], (w, bias))
    if isinstance(w, Int4Lanes):
        groups = 128 * w.scale.shape[0] // w.shape[1]  # in 128 columns
        y = lanes_kernel_product(x, w, add_scaled_sums if len(x) * groups <= 256 else add_scaled_numbers)
    else:
        values, scale = w.values_and_scale(x.dtype)
        y = einsum("bc,oc->bo", x, values)
        y = y if scale is None else y * scale
    return sum((one.values for one in bias), y)


def add_scaled_numbers(total: Array, x: Array, numbers: list[Array], w: Int4Lanes, first: int, group: int) -> Array:
    """add_scaled_sums for many rows: each number is scaled. A product with ones gives a group's scale to its columns,
    since a kernel's lanes are slow to spread otherwise."""
    many = 512 // group
    is_of_group = [jax.lax.broadcasted_iota(jnp.int32, (many, 512), axis) for axis in (0, 1)]
    is_of_group = is_of_group[0] == is_of_group[1] // group

    def spread(a):  # [many, O] to [O, 512]
        return einsum("go,gc->oc", a, is_of_group.astype(a.dtype))

    numbers, offset = jnp.concatenate(numbers, axis=1).astype(jnp.float32), w.offset(first, many)
    if offset is not None:
        numbers -= offset if w.zero is None else spread(offset.astype(jnp.bfloat16))
    return total + einsum("bc,oc->bo", x, (numbers * spread(w.scale[first : first + many])).astype(x.dtype))


def places_of(w: Format, e: Array, axis: int, i: int | Array, n: int, count: int = 1) -> list[tuple]:
    """Where `count` times n rows (axis 0) or columns (1) of expert e are in each array of w, from row i * n on."""

    def part(size):
        return pl.ds(pl.multiple_of(i * size, size), count * size)

    arrays = jax.tree.leaves(w)
    if isinstance(w, Int4Lanes):
        group = w.shape[-1] // w.scale.shape[-2]
        of_groups = (slice(None), part(n)) if axis == 0 else (part(n // group), slice(None))
        of_words = (part(n), slice(None)) if axis == 0 else (slice(None), part(n // 4))
        return [(e, *of_words), *[(e, *of_groups)] * (len(arrays) - 1)]
    index = (part(n), slice(None)) if axis == 0 else (slice(None), part(n))
    return [(e if a.ndim == 3 else pl.ds(e, 1), *index)[: a.ndim] for a in arrays]


def as_words(x: Array) -> Array:
    """x [B, D] of 16 bits as uint32 [B, D / 2], one half over the other: a kernel cannot copy a row of 16 bits. D is
    first rounded up, so that a half is whole lanes."""
    if x.dtype == jnp.float32:
        return x
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 256)))
    low, high = (jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in jnp.split(x, 2, axis=1))
    return low | high << 16


def from_words(x: Array, dtype: jnp.dtype) -> Array:
    """The inverse of as_words, but for the rounding up."""
    if dtype == jnp.float32:
        return x
    halves = (x & 0xFFFF, x >> 16)
    return jnp.concatenate([jax.lax.bitcast_convert_type(half.astype(jnp.uint16), dtype) for half in halves], axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# Exchange on TPUs


def exchange_kernel(x: Array, R: int, finish=lambda y: y, interpret: bool | pltpu.InterpretParams = False) -> Array:
    """exchange for TPUs. It moves a few kilobytes, and XLA takes longer to launch an all-to-all, the changes of layout
    around it and `finish`. One kernel does all this in VMEM. It cuts x into blocks as float32, since a row of a packed
    dtype cannot be cut from others. More than 2**18 numbers, of a piece of a prompt, are left to XLA.

    Each device writes into the memory of the others, once all R have entered. A device leaves when it has a block from
    each, so all have passed the barrier by then: no signal of the next exchange is mistaken for one of this one, and no
    block of the next arrives too early.
    """
    (I, *shape, W), M = x.shape, x.size // (len(x) * x.shape[-1])  # M rows of a block
    if R * M * W > 2**18:
        return exchange.plain(x, R, finish)
    result = jax.eval_shape(finish, jax.ShapeDtypeStruct((R, *shape, W), x.dtype))
    word = 4 // x.dtype.itemsize  # so many rows share the words of a tile, and are sent together

    def kernel(x, y, mine, arrived, sent, received):
        mine[...] = x[...].astype(jnp.float32).reshape(mine.shape).astype(mine.dtype)
        device, r = jax.lax.axis_index(MODEL_AXES), shard_index(R)
        group = [{MODEL_AXES: device - r + n} for n in range(R)]  # itself among them
        barrier = pltpu.get_barrier_semaphore()
        for other in group:
            pl.semaphore_signal(barrier, device_id=other)
        pl.semaphore_wait(barrier, R)
        copies = [  # R / I devices receive the same block
            pltpu.make_async_remote_copy(mine.at[n * I // R], arrived.at[r], sent, received, group[n]) for n in range(R)
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()
        y[...] = finish(arrived[...].astype(jnp.float32)).reshape(y.shape).astype(y.dtype)

    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((math.prod(result.shape[:-1]), result.shape[-1]), result.dtype),
        scratch_shapes=[*(pltpu.VMEM((n, M, W), x.dtype) for n in (I, R)), *[pltpu.SemaphoreType.DMA] * 2],
        compiler_params=pltpu.CompilerParams(collective_id=0),
        cost_estimate=pl.CostEstimate(0, 0, 0, remote_bytes_transferred=4 * R * ceil_div(M, word) * W),
        interpret=interpret,
        name="exchange",
    )(x.reshape(I * M, W))
    return out.reshape(result.shape)


FAST["exchange", "tpu"] = exchange_kernel
