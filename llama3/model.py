"""Llama and Mistral inference in JAX: the whole model in one file.

Covers what `LlamaForCausalLM` and `MistralForCausalLM` of transformers cover: Llama 2, 3, 3.1, 3.2, 3.3,
DeepSeek-R1-Distill-Llama, OpenLLaMA, Mistral 7B. The file reads from top to bottom: configuration, quantization,
weights and their shardings, the KV cache, layers, attention (plain XLA, and a Pallas kernel for TPUs), the forward
pass, the choice of the next token, decoding. It needs jax and numpy alone.

    config = Config.from_dict(json.load(open("config.json")))
    mesh = make_mesh(tp=jax.device_count())
    weights = ...  # a pytree as abstract_weights(config, mesh, dtype) describes it; convert.py loads one
    for tokens in generate(weights, [[1, 2, 3]], config, mesh, max_new_tokens=16):
        ...

Parallelism. A mesh has three axes. `dp` splits the batch. `ep` and `tp` together split every layer: attention by
heads and the MLP by columns (Shoeybi et al. 2019, "Megatron-LM"); `ep` is there for models with experts, and here only
multiplies `tp`. All device code runs under `jax.shard_map`, where an array is this device's part and nothing is
communicated but by the collectives written out here. A decode step has one `psum` after attention and one after the MLP
of each layer, one after the embedding, and at its end an `all_gather` over ep x tp for the next token and one over dp,
so that every host sees all rows. Where ep x tp exceeds the kv heads, the devices that share one each hold a part of the
sequence and `exchange` queries and outputs.

Some words of JAX. A pytree is nested dicts, lists and tuples of arrays; jax.tree.map applies a function to each array.
jit compiles a function once for each set of shapes; inside, arrays are traced: they have a shape and a dtype, and no
numbers yet. A donated argument gives its memory to the result. A mesh names the axes of a grid of devices, and a
PartitionSpec (P) says which of them splits which dimension of an array. psum adds an array over devices, all_gather
joins their parts. platform_dependent takes one of several functions, by the platform that is compiled for; the compiler
moves nothing across an optimization_barrier. A Pallas kernel is the program of a TPU core, which itself fetches blocks
of its arguments (BlockSpec says which) into the fast memory, VMEM.

Dimension letters, in shapes and einsums. Under shard_map B, N, K, F and V are the sizes on one device.

    B  rows of the batch         D  hidden_size               V  vocab_size
    T  tokens of a row           N  num_attention_heads       F  intermediate_size
    S  cache slots of a row      K  num_key_value_heads       X  devices that share a layer, ep x tp
    C  any contracted dimension  G  query heads per kv head   R  of them, those that share a kv head; or 1
    O  any output dimension      H  head_dim

Dtypes. Weights, residual stream and cache are bfloat16 unless asked otherwise; matrices and the cache can be int8 with
float32 scales (CPUs differ in two ways: see abstract_cache and cpu_product). Every product accumulates in float32 on
its device; partial sums cross devices in the residual stream's dtype, which halves the traffic. Norms, rotary
embedding, softmax and logits are float32.
"""

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MODEL_AXES = ("ep", "tp")

# The score of a slot that is not attended to, the logit of a token that does not exist. Finite, so that a block with
# nothing else gives no NaN: once a real score arrives, what the block added is multiplied by exp(MASKED - score) = 0.
MASKED = -1e30


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line that names the thing and the remedy."""


# ---------------------------------------------------------------------------------------------------------------------
# Configuration and mesh


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The numbers of config.json that inference needs, under config.json's own names.

    The rope fields stand flat here; config.json nests them in `rope_scaling` (transformers 4) or `rope_parameters`
    (transformers 5). The last four matter to the rope types that ROPE_PARAMETERS names them for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 0.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0

    @classmethod
    def from_dict(cls, config: dict) -> "Config":
        """Reads the dict of a config.json, as transformers 4 or 5 writes it.

        Raises InputError for a missing or impossible value and, by name, for a feature that is not supported.
        """
        model_type, rope = config.get("model_type"), read_rope(config)
        check_supported(
            model_type=(model_type, ("llama", "mistral")),
            rope_type=(rope["rope_type"], tuple(ROPE_PARAMETERS)),
            partial_rotary_factor=(rope.get("partial_rotary_factor", 1), (1,)),
            hidden_act=(config.get("hidden_act", "silu"), ("silu", "swish")),
        )
        # transformers' MistralForCausalLM has no biases, LlamaForCausalLM no window; where they have defaults that
        # config.json may leave out, these are theirs.
        is_mistral = model_type == "mistral"
        defaults = {"num_key_value_heads": 8, "sliding_window": 4096} if is_mistral else {}
        overrides = {"attention_bias": False, "mlp_bias": False} if is_mistral else {"sliding_window": None}
        needed = ROPE_PARAMETERS[rope["rope_type"]]
        rope = {name: value for name, value in rope.items() if name in ("rope_type", "rope_theta", *needed)}
        given = read_fields(cls, {**defaults, **config, **rope, **overrides}, (*REQUIRED, *needed))
        given.setdefault("num_key_value_heads", given["num_attention_heads"])
        given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
        result = cls(**given)
        result.check()
        return result

    def check(self) -> None:
        """Raises InputError for numbers that do not go together."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise InputError(f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        if self.head_dim % 2 or not self.head_dim:
            raise InputError(f"config.json: head_dim {self.head_dim} must be even: rotary embedding turns pairs")
        if self.rope_type == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise InputError("config.json: low_freq_factor must not be above high_freq_factor")


def read_rope(config: dict) -> dict:
    """The rope parameters of a config.json, wherever they stand in it. As in transformers, the table wins over the top
    level, except for original_max_position_embeddings, which defaults to max_position_embeddings."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict):
        raise InputError(f"config.json: the rope parameters must be a table, not {table!r:.40}")
    given_types = [table[name] for name in ("rope_type", "type") if table.get(name) is not None]
    rope_type = given_types[0] if given_types else "default"
    top_level = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    given = {name: value for name, value in table.items() if value is not None}
    given = {name: value for name, value in top_level.items() if value is not None} | given
    context = "original_max_position_embeddings"
    given[context] = config.get(context) or given.get(context) or config.get("max_position_embeddings")
    return given | {"rope_type": rope_type}


def check_supported(**features: tuple[object, tuple]) -> None:
    """Raises InputError for a feature whose value, the first of its pair, is not one of the second."""
    for name, (value, supported) in features.items():
        if value not in supported:
            names = ", ".join(map(str, supported))
            raise InputError(f"config.json: {name} {value!r:.40} is not supported, only {names}")


def read_fields(cls: type, given: dict, required: tuple[str, ...]) -> dict:
    """Of `given`, what is a field of the dataclass `cls`, in the field's type; null counts as absent.

    Raises InputError for a value that such a field cannot have, and for a required one that is not there.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}
    given = {name: value for name, value in given.items() if name in kinds and value is not None}
    for name, value in given.items():
        if not is_valid(value, kinds[name]):
            raise InputError(f"config.json: {name} cannot be {value!r:.40}")
    for name in required:
        if name not in given:
            raise InputError(f"config.json: {name} is missing")
    return {name: float(value) if kinds[name] is float else value for name, value in given.items()}


def is_valid(value: object, kind: type) -> bool:
    """Whether a value of a JSON file can be a field of type `kind`. Numbers are positive and bounded."""
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool):  # an int to Python
        return False
    if kind is float:
        return isinstance(value, (int, float)) and 1e-30 < value < 1e30
    return isinstance(value, int) and 0 < value < 2**31


def make_mesh(dp: int = 1, ep: int = 1, tp: int = 1, devices: list | None = None) -> Mesh:
    """A mesh (dp, ep, tp) over `devices`, by default all of them.

    The innermost axes communicate in every layer: jax.make_mesh places their devices next to each other.
    """
    devices = jax.devices() if devices is None else devices
    if dp * ep * tp != len(devices):
        raise InputError(
            f"the mesh dp x ep x tp = {dp} x {ep} x {tp} needs {dp * ep * tp} devices, and there are {len(devices)}; "
            "choose --dp --ep --tp so that their product is that number"
        )
    axis_types = (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh((dp, ep, tp), ("dp", *MODEL_AXES), axis_types=axis_types, devices=devices)


def mesh_shape(
    config: Config, devices: list, dp: int | None = None, ep: int | None = None, tp: int | None = None
) -> tuple[int, int, int]:
    """dp, ep and tp for these devices: what is given, and for the others 1, but all devices that are left for tp."""
    dp, ep = dp or 1, ep or 1
    return dp, ep, tp or max(1, len(devices) // (dp * ep))


def model_shards(mesh: Mesh) -> int:
    """X, the number of devices that share each layer."""
    return mesh.shape["ep"] * mesh.shape["tp"]


def neighbours(config: Config, shards: int) -> int:
    """R, the number of devices that share a kv head, where `shards` devices share a layer."""
    return max(shards // config.num_key_value_heads, 1)


def local_heads(config: Config, shards: int) -> tuple[int, int]:
    """K and G on each of `shards` devices.

    Neighbours that share a kv head deal out its query heads. Where R does not divide them, G is rounded up, and some
    devices have heads of zeros, which change nothing.
    """
    kv_heads = config.num_key_value_heads
    return max(kv_heads // shards, 1), -(-(config.num_attention_heads // kv_heads) // neighbours(config, shards))


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raises InputError where the mesh does not divide the model."""
    shards, kv_heads = model_shards(mesh), config.num_key_value_heads
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % shards:
            raise InputError(
                f"ep x tp = {shards} does not divide {name} {getattr(config, name)}; choose a divisor of it"
            )
    if kv_heads % shards and shards % kv_heads:
        raise InputError(f"ep x tp = {shards} is neither a divisor nor a multiple of num_key_value_heads {kv_heads}")


# ---------------------------------------------------------------------------------------------------------------------
# Int8


class Int8(NamedTuple):
    """int8 `values [..., C]` times float32 `scale [...]`: one scale for each vector along the last dimension.

    A weight [.., O, C] has a scale for each output channel, which moves to the output side of the product; the
    embedding [V, D] one for each token; a cache [B, K, S, H] one for each token and head; an activation [B, C] one for
    each row.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def quantize(x: jax.Array) -> Int8:
    """Symmetric rounding to int8 along the last dimension: the largest magnitude becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    values = jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None])
    return Int8(values.astype(jnp.int8), scale)


def values_and_scale(x: jax.Array | Int8, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """The values, int8 ones in `dtype`, and the scale still to be applied, None where there is none."""
    return (x.values.astype(dtype), x.scale) if isinstance(x, Int8) else (x, None)


# ---------------------------------------------------------------------------------------------------------------------
# Weights and cache: shape, dtype and sharding, declared once


CACHE_SPEC = P("dp", MODEL_AXES)  # [B, K, ..]: rows over dp, kv heads or parts of one over ep x tp


def abstract_weights(config: Config, mesh: Mesh, dtype: jnp.dtype, int8: bool = False) -> dict:
    """Every weight as a jax.ShapeDtypeStruct with its sharding, matrices as Int8 where `int8`. Raises as check_mesh.

    Matrices are [output, input], as Hugging Face stores them: the contracted dimension comes last, so that a row is
    read as one run of memory, and loading transposes nothing. Split by output, each device computes a part of the
    outputs, without communication. Split by input, as `o` and `down` are, each has a partial sum of every
    output, and a psum adds them.

    `qkv` and `gate_up` are one product each. Their rows are grouped by device: device x of X holds its query heads, its
    key heads and its value heads, or its gate rows and its up rows, one after the other. Where X exceeds the kv heads,
    neighbours hold the same one (and see local_heads).
    """
    check_mesh(config, mesh)
    D, H, V = config.hidden_size, config.head_dim, config.vocab_size
    X = model_shards(mesh)
    V = -(-V // X) * X  # rows that only even out the shards; their logits are masked
    K, G = local_heads(config, X)
    NH, KH, F = X * K * G * H, X * K * H, config.intermediate_size
    by_output, by_input = P(MODEL_AXES, None), P(None, MODEL_AXES)

    def array(shape, spec, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def matrix(O, C, spec):
        if int8:
            return Int8(array((O, C), spec, jnp.int8), array((O,), P(spec[0]), jnp.float32))
        shards = X if spec == by_input else 1
        return array((O, shards * stored_width(C // shards, dtype, mesh)), spec)

    def layer_weights():
        weights = {
            "attention_norm": array((D,), P()),
            "qkv": matrix(NH + 2 * KH, D, by_output),
            "o": matrix(D, NH, by_input),
            "mlp_norm": array((D,), P()),
            "gate_up": matrix(2 * F, D, by_output),
            "down": matrix(D, F, by_input),
        }
        if config.attention_bias:
            weights |= {"qkv_bias": array((NH + 2 * KH,), P(MODEL_AXES)), "o_bias": array((D,), P())}
        if config.mlp_bias:
            weights |= {"gate_up_bias": array((2 * F,), P(MODEL_AXES)), "down_bias": array((D,), P())}
        return weights

    weights = {
        "embedding": matrix(V, D, by_output),
        "layers": [layer_weights() for _ in range(config.num_hidden_layers)],
        "norm": array((D,), P()),  # never Int8: its dtype is the model's
    }
    if not config.tie_word_embeddings:
        weights["head"] = matrix(V, D, by_output)
    return weights


def stored_width(C: int, dtype: jnp.dtype, mesh: Mesh) -> int:
    """The input dimension of a matrix as each device stores it: somewhat more than C on CPUs, with zeros, where 16-bit
    rows would lie a multiple of 4,096 bytes apart. Those share places in the processor's cache: the product takes up to
    1.7 times as long."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return C + 32 if on_cpu and jnp.dtype(dtype).itemsize == 2 and 2 * C % 4096 == 0 else C


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, K, S, H] each, the token at position p of a row in slot p of that row.

    Where R neighbours share a kv head, its tokens are dealt out to them: neighbour r holds the positions p with
    p % R == r, in slot p // R. (K is then 1 on a device, and X in the whole array.)
    """

    k: jax.Array | Int8
    v: jax.Array | Int8


def abstract_cache(
    config: Config, mesh: Mesh, batch: int, max_seq_len: int, dtype: jnp.dtype, int8: bool = False
) -> list[LayerCache]:
    """The KV cache as jax.ShapeDtypeStructs, for rows of `max_seq_len` tokens and somewhat more.

    On CPUs a 16-bit cache is kept in float32: to update one slot XLA would convert all of it to float32 and back. On
    TPUs H is rounded up to the 128 lanes: a narrower array would have its slots innermost in memory, and be laid out
    anew for the kernel in every step.
    """
    platform, H = mesh.devices.flat[0].platform, config.head_dim
    dtype = jnp.float32 if platform == "cpu" else dtype
    H = -(-H // 128) * 128 if platform == "tpu" else H
    X = model_shards(mesh)
    slots = cache_slots(-(-max_seq_len // neighbours(config, X)))
    shape = (batch, max(config.num_key_value_heads, X), slots, H)
    sharding = NamedSharding(mesh, CACHE_SPEC)
    if int8:
        values = jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding)
        side = Int8(values, jax.ShapeDtypeStruct(shape[:-1], jnp.float32, sharding=sharding))
    else:
        side = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return [LayerCache(side, side) for _ in range(config.num_hidden_layers)]


def specs(abstract) -> object:
    """The PartitionSpecs of a pytree of arrays or ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding.spec, abstract)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def cache_slots(tokens: int) -> int:
    """Slots to allocate for `tokens`: some more, so that large blocks divide them (at most a quarter more beyond 2,048
    tokens, below that up to a multiple of 256)."""
    unit = max(256, power_of_two(tokens) // 8)
    return -(-tokens // unit) * unit


def capacity(cache: list[LayerCache], config: Config, R: int) -> int:
    """Tokens of a row that the cache holds, on all R neighbours that share a kv head."""
    return R * cache[0].k.shape[2]


# ---------------------------------------------------------------------------------------------------------------------
# Layers


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """jnp.einsum with float32 sums, and without bf16 or tf32 passes where the operands are float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def linear(x: jax.Array, w: jax.Array | Int8, bias: jax.Array | None = None) -> jax.Array:
    """x [..., C] times w [O, C], plus bias [O]: float32 [..., O]."""
    flat = jnp.pad(x.reshape(-1, x.shape[-1]), ((0, 0), (0, w.shape[-1] - x.shape[-1])))  # see stored_width
    on_cpu = partial(cpu_product, columns=x.shape[-1])
    y = jax.lax.platform_dependent(flat, w, cpu=on_cpu, tpu=tpu_product, default=product)
    y = y.reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def product(x: jax.Array, w: jax.Array | Int8, min_rows: int = 1) -> jax.Array:
    """x [B, C] times w [O, C]: float32 [B, O].

    Padded to `min_rows`, since the compiler for TPUs turns fewer rows into slow vector code.
    """
    values, scale = values_and_scale(w, x.dtype)
    y = einsum("bc,oc->bo", pad_rows(x, min_rows), values)[: x.shape[0]]
    return y if scale is None else y * scale


def cpu_product(x: jax.Array, w: jax.Array | Int8, columns: int | None = None) -> jax.Array:
    """product on a CPU, of which all but the first `columns` columns are zeros (None: no such).

    A single row has a way of its own where its length allows, since XLA's products of 16 bits are ten times slower for
    one row than for two. Otherwise few rows come second, since XLA rearranges the second operand; and a short row of
    another length goes in as its two halves, against the halves of each row of the weight.

    With int8 weights and more rows, the fast product is int8 with int8: two int8 planes hold 15 bits of an activation,
    a coarse one, and a fine one of what its rounding left. As rows of one product they cost little and lose next to
    nothing. (From some 50 rows on, casting the weight costs less.)
    """
    (B, C), O = x.shape, w.shape[0]
    is_16_bit, columns = x.dtype != jnp.float32, columns or C
    if B == 1 and isinstance(w, Int8) and columns % 512 == 0 and columns <= 4096:
        return row_product(x, w.values) * w.scale
    if B == 1 and not isinstance(w, Int8) and is_16_bit and columns % 512 == 0 and columns <= 8192:
        return row_product(x[:, :columns], w)
    if isinstance(w, Int8) and B < 50:
        coarse = quantize(x)
        fine = quantize(x - coarse.values * coarse.scale[:, None])
        y = weights_first(jnp.concatenate([coarse.values, fine.values]), w.values, jnp.int32)
        return (y[:B] * coarse.scale[:, None] + y[B:] * fine.scale[:, None]) * w.scale
    if isinstance(w, Int8) or B >= 128:
        return product(x, w)
    if B == 1 and is_16_bit and C < 2048 and C % 2 == 0:
        y = einsum("bc,oc->bo", x.reshape(2, C // 2), w.reshape(2 * O, C // 2))
        return y[:1, ::2] + y[1:, 1::2]
    return weights_first(pad_rows(x, 2 if is_16_bit else 1), w, jnp.float32)[:B]


def row_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [1, C] times w [O, C] of 16 or 8 bits, C a multiple of 512: float32 [1, O]. For CPUs: of bfloat16 1.5 times as
    fast as two rows of XLA's own product, of int8 twice as fast. Columns that only w has are left out.

    Each 512 columns are 16 runs of 32: XLA makes one loop of multiplying and adding the 16, unrolled, with the 32 side
    by side in vector registers. (Of int8, each 1,024 are 16 runs of 64, where C allows.) What is left, 32 sums for each
    512 columns, is a small product with ones. A large w goes in pieces, whose sums stay in the processor's cache.

    reduce_precision changes nothing. It keeps the sum from XLA's library of reductions, which would have all weights
    turned to float32 in memory first; the barriers keep what follows from being drawn into the loop. Nor does dividing
    by ones: XLA repeats no division in a loop, and so turns x to float32 once, not for each row of w.
    """
    O, C, runs, lanes = len(w), x.shape[1], 16, 32
    x = x.astype(jnp.float32)
    if w.dtype == jnp.int8:
        lanes = 64 if C % 1024 == 0 else 32
        x = x / jax.lax.optimization_barrier(jnp.ones(x.shape))

    def multiply(w):
        terms = w[:, :C].reshape(-1, C // (runs * lanes), runs, lanes).astype(jnp.float32) * x.reshape(-1, runs, lanes)
        sums = jax.lax.reduce(terms, np.float32(0), lambda a, b: jax.lax.reduce_precision(a + b, 8, 23), (2,))
        sums = jax.lax.optimization_barrier(sums).reshape(-1, lanes)
        y = jax.lax.optimization_barrier(einsum("rc,bc->rb", sums, jnp.ones((1, lanes)))).reshape(len(w), -1)
        return sum(y[:, i] for i in range(y.shape[1]))[None]

    def step(i, y):
        # The barrier ties w to i: else XLA would turn all of it to float32 before the loop.
        rows, i = jax.lax.optimization_barrier((w, i))
        piece = jax.lax.dynamic_slice_in_dim(rows, i * (O // pieces), O // pieces)
        return jax.lax.dynamic_update_slice_in_dim(y, multiply(piece), i * (O // pieces), axis=1)

    fewest = -(-O * C // 2**24)
    pieces = next((n for n in range(fewest, 4 * fewest) if O % n == 0), 1)
    return multiply(w) if pieces == 1 else jax.lax.fori_loop(0, pieces, step, jnp.zeros((1, O), jnp.float32))


def weights_first(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x [B, C] times w [O, C], w being the first operand, which a barrier keeps XLA from changing: `dtype` [B, O]."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("oc,bc->ob", w, x, precision=precision, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y).T


STREAM_BYTES = 40 * 2**20  # of a weight on a device: from here on XLA for TPUs does not fetch all of it ahead


def tpu_product(x: jax.Array, w: jax.Array | Int8) -> jax.Array:
    """product on a TPU: few rows times a weight too large to be fetched ahead go to a kernel that streams it."""
    (B, C), O = x.shape, w.shape[0]
    itemsize = jax.tree.leaves(w)[0].dtype.itemsize
    vmem = 2 * C * (128 * itemsize + B * x.dtype.itemsize)  # two blocks of 128 rows, and x; a kernel gets 16 MiB
    is_streamed = B <= 64 and C % 128 == 0 and O * C * itemsize >= STREAM_BYTES and vmem <= 12 * 2**20
    return streamed_product(x, w) if is_streamed else product(x, w, min_rows=8)


def streamed_product(
    x: jax.Array, w: jax.Array | Int8, block: int | None = None, interpret: bool | pltpu.InterpretParams = False
) -> jax.Array:
    """product for TPUs, as a Pallas kernel: x [B, C] times w [O, C]: float32 [B, O].

    Reads w once, in blocks of whole rows, each one piece of memory, where XLA's own product of a weight in HBM fetches
    narrow columns. While one is multiplied, the next is on its way. Multiplying takes less time than fetching, int8
    values cast to x's dtype included. What the last block has beyond O is not defined, nor stored.

    `block` rows of w in a grid step: a multiple of 128, by default as many as make 2 MiB. Nothing overlaps the first
    block of a product, so no larger; a step has to outlast its own overhead, so no smaller.
    """
    (B, C), O = x.shape, w.shape[0]
    values, scale = w if isinstance(w, Int8) else (w, None)
    block = block or max(128, 2**21 // (C * values.dtype.itemsize) // 128 * 128)

    def kernel(x, w, y):
        y[...] = einsum("bc,oc->bo", x[...], w[...].astype(x.dtype))

    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((B, O), jnp.float32),
        grid=(pl.cdiv(O, block),),
        in_specs=[pl.BlockSpec((B, C), lambda i: (0, 0)), pl.BlockSpec((block, C), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((B, block), lambda i: (0, i)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),  # shared by the two cores of a v5p
        cost_estimate=kernel_cost(2 * B * O * C, values),
        interpret=interpret,
        name="streamed_product",
    )(x, pltpu.with_memory_space_constraint(values, pltpu.HBM))
    return y if scale is None else y * scale


def kernel_cost(flops: int, read) -> pl.CostEstimate:
    """What a kernel that reads the arrays of the pytree `read` tells the compiler, which cannot see it."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
    return pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0)


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """x [B, C] with zeros up to `rows` rows."""
    return jnp.pad(x, ((0, max(rows - x.shape[0], 0)), (0, 0)))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x over its root mean square along the last dimension, times weight; float32 inside, x's dtype outside."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: Config) -> np.ndarray:
    """float32 [H / 2]: the angle by which a position turns each pair (Su et al. 2021).

    "linear" divides the frequencies by `factor`. "llama3" divides by it those that turn less than `low_freq_factor`
    times over the original context, keeps those that turn more than `high_freq_factor` times, and blends between.
    All is rounded where the reference class rounds it: far along a sequence, a last place of a frequency shows.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = 1 / (np.float64(config.rope_theta) ** exponents).astype(np.float32)
    if config.rope_type == "linear":
        frequencies = frequencies / np.float32(config.factor)
    if config.rope_type == "llama3":
        turns = config.original_max_position_embeddings / (np.float32(2 * np.pi) / frequencies)
        between = max(config.high_freq_factor - config.low_freq_factor, 1e-30)  # 0 in Llama 4 Scout: nothing blends
        keep = np.clip((turns - config.low_freq_factor) / between, 0, 1)
        frequencies = (1 - keep) * frequencies / config.factor + keep * frequencies
    return frequencies.astype(np.float32)


def rope(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turns the pairs (x[i], x[i + H/2]) of float32 x [B, T, heads, H] by positions [B, T] times frequencies [H/2]."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


@jax.named_scope("embed")  # the name in a profiler's trace
def embed(tokens: jax.Array, table: jax.Array | Int8, norm: jax.Array) -> jax.Array:
    """Rows of the vocabulary-sharded table [V, D] for tokens [B, T]: [B, T, D] in the dtype of a norm [D].

    Each device looks up the tokens it holds and contributes zeros for the others; the psum puts them together.
    """
    local = tokens - jax.lax.axis_index(MODEL_AXES) * table.shape[0]
    is_here = (local >= 0) & (local < table.shape[0])
    # One more row than needed: for a single row of an int8 table, XLA for TPUs would lay the whole table out anew.
    index = jnp.pad(jnp.where(is_here, local, 0), ((0, 1), (0, 0)))
    x, scale = values_and_scale(jax.tree.map(lambda t: t[index][:-1], table), jnp.float32)
    x = x if scale is None else x * scale[..., None]
    x = x[..., : norm.shape[0]]  # see stored_width
    return jax.lax.psum(jnp.where(is_here[..., None], x, 0).astype(norm.dtype), MODEL_AXES)


@jax.named_scope("attention")
def attention(x: jax.Array, w: dict, cache: LayerCache, positions: jax.Array, attend, config: Config):
    """The first half of a layer, on x [B, T, D] at positions [B, T]. Returns the new x and the new cache.

    `attend(q [B, K, G, T, H], new, cache, positions, window)` stores the LayerCache `new` of these T tokens in `cache`
    and returns the attention output [B, K, G, T, H] and the cache. Prefill and decode differ in nothing else.
    """
    B, T, _ = x.shape
    H = config.head_dim
    K, G = local_heads(config, jax.lax.axis_size(MODEL_AXES))
    N = K * G

    h = rms_norm(x, w["attention_norm"], config.rms_norm_eps)
    qkv = linear(h, w["qkv"], w.get("qkv_bias")).reshape(B, T, N + 2 * K, H)
    q, k, v = jnp.split(qkv, [N, N + K], axis=2)
    frequencies = rope_frequencies(config)
    q = rope(q, positions, frequencies) * H**-0.5  # scaled here, in float32, for all scores to come
    k = rope(k, positions, frequencies)
    # On TPUs the cache is wider than H (see abstract_cache): with zeros, which change neither scores nor values.
    q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, cache.k.shape[-1] - H))) for a in (q, k, v))
    q = q.astype(x.dtype).reshape(B, T, K, G, -1).transpose(0, 2, 3, 1, 4)
    store = quantize if isinstance(cache.k, Int8) else lambda a: a.astype(cache.k.dtype)
    new = LayerCache(store(k.swapaxes(1, 2)), store(v.swapaxes(1, 2)))
    out, cache = attend(q, new, cache, positions, config.sliding_window)
    out = out.transpose(0, 3, 1, 2, 4)[..., :H].reshape(B, T, N * H)
    x = x + jax.lax.psum(linear(out, w["o"]).astype(x.dtype), MODEL_AXES)
    if config.attention_bias:
        x = x + w["o_bias"]  # after the psum: before it, every device would add it once more
    return x, cache


@jax.named_scope("mlp")
def mlp(x: jax.Array, w: dict, config: Config) -> jax.Array:
    """The second half of a layer, on x [B, T, D]."""
    h = rms_norm(x, w["mlp_norm"], config.rms_norm_eps)
    gate, up = jnp.split(linear(h, w["gate_up"], w.get("gate_up_bias")), 2, axis=-1)
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    x = x + jax.lax.psum(linear(h, w["down"]).astype(x.dtype), MODEL_AXES)
    if config.mlp_bias:
        x = x + w["down_bias"]
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def rank(R: int) -> jax.Array | int:
    """Which of the R neighbours that share a kv head this device is."""
    return 0 if R == 1 else jax.lax.rem(jax.lax.axis_index(MODEL_AXES), R)


def groups(R: int) -> list[list[int]]:
    """The devices of MODEL_AXES in groups of R neighbours."""
    return np.arange(jax.lax.axis_size(MODEL_AXES)).reshape(-1, R).tolist()


def is_attended(keys: jax.Array, queries: jax.Array, window: int | None) -> jax.Array:
    """Whether queries see keys, both given by their positions (in shapes that broadcast): no later token, none before
    the window (of models that have a sliding window, None elsewhere)."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def prefill_attention(
    q: jax.Array,
    new: LayerCache,
    cache: LayerCache,
    positions: jax.Array,
    window: int | None = None,
    *,
    is_live: jax.Array,
    R: int,
) -> tuple[jax.Array, LayerCache]:
    """Causal attention of T tokens of every row, at the same positions in each, over all positions up to theirs.

    Keys are taken in blocks with a running softmax (Milakov and Gimelshein 2018), as many as are filled: memory is
    bounded whatever the prompt's length, and the positions are traced, so that one program serves all pieces of a
    prompt. Where R neighbours share a kv head, they gather each block from all of them.

    Args: q [B, K, G, T, H]; new, cache as in `attention`; positions int32 [B, T], start to start + T in each row, where
    start and T are multiples of R; window in tokens, or None for all; is_live bool [B], the rows to store: the others
    have ended before.
    """
    T, block = q.shape[3], math.gcd(cache.k.shape[2], 512)
    positions = positions[0]
    start = positions[0]

    def store(cache, new):
        if R > 1:  # this device's share of the new tokens
            new = new.reshape(*new.shape[:2], T // R, R, *new.shape[3:])
            new = jax.lax.dynamic_index_in_dim(new, rank(R), axis=3, keepdims=False)
        old = jax.lax.dynamic_slice_in_dim(cache, start // R, T // R, axis=2)
        new = jnp.where(is_live.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start // R, axis=2)

    def load(cache, i):
        slots = jax.lax.dynamic_slice_in_dim(cache, i * block, block, axis=2)
        if R > 1:
            slots = jax.lax.all_gather(slots, MODEL_AXES, axis=3, axis_index_groups=groups(R))
            slots = slots.reshape(*cache.shape[:2], R * block, *cache.shape[3:])
        return slots

    cache = jax.tree.map(store, cache, new)

    def fold(i, state):
        largest, total, out = state
        k, v = jax.tree.map(partial(load, i=i), cache)
        mask = is_attended(i * block * R + jnp.arange(block * R), positions[:, None], window)
        scores = attention_scores(q, k, mask)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        shrink = jnp.exp(largest - new_largest)
        exps = jnp.exp(scores - new_largest[..., None])
        total = total * shrink + jnp.sum(exps, axis=-1)
        return new_largest, total, out * shrink[..., None] + weighted_sum(exps, v, q.dtype)

    shape = q.shape[:-1]
    state = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    first = 0 if window is None else jnp.maximum(start - window + 1, 0) // (block * R)
    _, total, out = jax.lax.fori_loop(first, (start + T - 1) // (block * R) + 1, fold, state)
    return (out / total[..., None]).astype(q.dtype), cache


def attention_scores(q: jax.Array, k: jax.Array | Int8, mask: jax.Array) -> jax.Array:
    """q [B, K, G, T, H], k [B, K, S, H], mask [.., T, S]: float32 [B, K, G, T, S]."""
    keys, scale = values_and_scale(k, q.dtype)
    q = q.astype(keys.dtype)
    scores = jax.lax.platform_dependent(q, keys, cpu=cpu_scores, default=partial(einsum, "bkgth,bksh->bkgts"))
    scores = scores if scale is None else scores * scale[:, :, None, None]
    return jnp.where(mask, scores, MASKED)


def cpu_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [B, K, G, T, H] times k [B, K, S, H]: float32 [B, K, G, T, S].

    XLA's products on CPUs rearrange their second operand first. For few queries that should not be the keys, and the
    barrier keeps XLA from exchanging the two.
    """
    if q.shape[3] > 1:
        return einsum("bkgth,bksh->bkgts", q, k)
    return jax.lax.optimization_barrier(einsum("bksh,bkgth->bksgt", k, q)).transpose(0, 1, 3, 4, 2)


def weighted_sum(p: jax.Array, v: jax.Array | Int8, dtype: jnp.dtype) -> jax.Array:
    """p [B, K, G, T, S], v [B, K, S, H]: float32 [B, K, G, T, H]. `dtype` is for the product with int8 values."""
    values, scale = values_and_scale(v, dtype)
    p = p if scale is None else p * scale[:, :, None, None]
    return einsum("bkgts,bksh->bkgth", p.astype(values.dtype), values)


def decode_attention(
    q: jax.Array, new: LayerCache, cache: LayerCache, positions: jax.Array, window: int | None = None, *, R: int
) -> tuple[jax.Array, LayerCache]:
    """Attention of one token a row, at positions [B, 1], over the positions up to its own: q [B, K, G, 1, H].

    On TPUs by the kernel below, elsewhere by plain XLA, which reads all slots there are.

    Where R neighbours share a kv head, each attends to its own slots, with the query heads of all R. They exchange the
    queries before, and after it the outputs with the log-sum-exp of their scores, by which partial softmaxes merge (as
    in Dao et al. 2023, "Flash-Decoding"). So no part of the cache is read, or held, twice.
    """
    B, _, G, _, H = q.shape
    positions = positions[:, 0]

    def plain(q, new, cache, positions):
        rows, S = jnp.arange(B), cache.k.shape[2]
        slots = positions if R == 1 else jnp.where(positions % R == rank(R), positions // R, S)
        # Where a neighbour stores the token, the slot is S: out of bounds, dropped.
        cache = jax.tree.map(lambda c, n: c.at[rows, :, slots].set(n[:, :, 0], mode="drop"), cache, new)
        # As it is stored: for a single row XLA's GPU backend would lay the keys out anew, all of them and twice a step.
        cache = jax.tree.map(lambda c: with_layout_constraint(c, Layout(tuple(range(c.ndim)))), cache)
        mask = is_attended(jnp.arange(S) * R + rank(R), positions[:, None], window)
        scores = attention_scores(q, cache.k, mask[:, None, None, None])
        largest = jnp.max(scores, axis=-1, keepdims=True)
        exps = jnp.exp(scores - largest)
        total = jnp.sum(exps, axis=-1, keepdims=True)
        return weighted_sum(exps / total, cache.v, q.dtype), largest + jnp.log(total), cache

    queries = q
    if R > 1:  # K is 1 then; all get the same, so that this exchange is a gather
        queries = exchange(q.reshape(1, B, G, H), R)
        queries = queries.swapaxes(0, 1).reshape(B, 1, R * G, 1, H)
    kernel = partial(ragged_decode_attention, window=window, R=R)
    out, log_sum_exp, cache = jax.lax.platform_dependent(queries, new, cache, positions, tpu=kernel, default=plain)
    if R > 1:
        parts = jnp.concatenate([out, log_sum_exp], axis=-1).reshape(B, R, G, H + 1)
        parts = exchange(parts.swapaxes(0, 1), R)
        out = jnp.sum(parts[..., :H] * jax.nn.softmax(parts[..., H:], axis=0), axis=0).reshape(q.shape)
    return out.astype(q.dtype), cache


def exchange(x: jax.Array, R: int) -> jax.Array:
    """x [I, ..], where I divides R: the R neighbours that share a kv head, or a cache, get its parts in turn, R / I of
    them the same. Returns [R, ..], a part from each.

    On TPUs by a kernel: these are some kilobytes, and to launch XLA's all-to-all would take longer than to move them.
    """

    def plain(x):
        parts = jnp.repeat(x, R // x.shape[0], axis=0)
        return jax.lax.all_to_all(parts, MODEL_AXES, 0, 0, axis_index_groups=groups(R))

    return jax.lax.platform_dependent(x, tpu=partial(exchange_kernel, R=R), default=plain)


def exchange_kernel(x: jax.Array, R: int, interpret: bool | pltpu.InterpretParams = False) -> jax.Array:
    """exchange for TPUs: each device writes into its neighbours' memory.

    Nothing is written before all have entered. A device leaves when it has a part from each, so all have passed the
    barrier by then: no signal of the next exchange is taken for one of this, and nothing of the next is written before
    all have finished this one.
    """
    alike = R // x.shape[0]

    def kernel(x, y, semaphores):
        device = jax.lax.axis_index(MODEL_AXES)
        r = rank(R)
        group = [{MODEL_AXES: device - r + n} for n in range(R)]  # itself among them
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in group:
            pl.semaphore_signal(barrier, device_id=neighbour)
        pl.semaphore_wait(barrier, R)
        sent, received = semaphores.at[0], semaphores.at[1]
        copies = [pltpu.make_async_remote_copy(x.at[n // alike], y.at[r], sent, received, group[n]) for n in range(R)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((R, *x.shape[1:]), x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        compiler_params=pltpu.CompilerParams(collective_id=0),
        interpret=interpret,
        name="exchange",
    )(x)


def ragged_decode_attention(
    q: jax.Array,
    new: LayerCache,
    cache: LayerCache,
    positions: jax.Array,
    window: int | None,
    R: int = 1,
    block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, LayerCache]:
    """decode_attention for TPUs, as one Pallas kernel: reads the blocks of a row up to its position and no other.

    The grid is (rows of the batch, blocks of a row). A block index beyond the last needed one is mapped to the last:
    the same block again is not fetched again. The running softmax starts with the new token, which is at hand, so the
    cache is read only for the tokens before it.

    The new token goes into its slot here too: an update by XLA would cost launches and, for the scales, a change of
    layout. A single slot of a packed dtype cannot be written, so the tile around it is patched in VMEM and written
    back. The cache that comes in and the one that goes out are the same memory; that is safe, since a row's tile is
    written after the last block of the row was read, and other rows never read it.

    Where R neighbours share a kv head, the new token, which all of them start with, counts 1 / R on each, and is stored
    by one.

    Args: q [B, K, G, 1, H]; new and cache as in `attention`; positions int32 [B], each below R S; `window` in tokens;
    `block` slots a grid step, by default a power of two that makes at most half a MiB of keys, or 128; `interpret` for
    tests on a CPU. Returns the output over this device's slots, float32 [B, K, G, 1, H], the log-sum-exp of its scores,
    [B, K, G, 1, 1], and the cache.
    """
    B, K, G, _, H = q.shape
    S = cache.k.shape[2]
    itemsize = jax.tree.leaves(cache)[0].dtype.itemsize
    most_slots = max(128, 2**19 // (K * H * itemsize))
    block = block or math.gcd(S, 1 << (most_slots.bit_length() - 1))
    tile = math.gcd(block, 128)  # slots: the lanes of a scale tile, and whole packed tiles of any dtype
    blocks = S // block if window is None else min(S // block, -(-window // (R * block)) + 1)
    padded_G = -(-G // 8) * 8  # a product of fewer rows than a register has sublanes may not compile
    q = jnp.pad(q[:, :, :, 0], ((0, 0), (0, 0), (0, padded_G - G), (0, 0)))

    # Positions are never negative, so lax.div, which truncates, equals //, and saves the instructions of rounding down.
    def block_of(position):
        return jax.lax.div(position, R * block)

    def first_block(position):
        return 0 if window is None else block_of(jnp.maximum(position - window + 1, 0))

    def kernel(positions, q, new, cache, out, log_sum_exp, new_cache, largest, total, acc):
        # largest and total have one number for each query head, repeated over the 128 lanes of a register: a vector
        # of them alone would have another layout than the scores.
        b, step = pl.program_id(0), pl.program_id(1)
        position = positions[b]
        i = first_block(position) + step
        last = block_of(position)
        r = rank(R)

        def head(x, h):  # [slots, H], and the scale of each slot [1, slots]
            if isinstance(x, Int8):
                return x.values[0, h].astype(q.dtype), x.scale[0, h : h + 1]
            return x[0, h].astype(q.dtype), 1.0

        @pl.when(step == 0)
        def begin():
            for h in range(K):
                (k, k_scale), (v, v_scale) = head(new.k, h), head(new.v, h)
                products = q[0, h].astype(jnp.float32) * k.astype(jnp.float32)
                scores = jnp.sum(products, axis=-1, keepdims=True) * k_scale
                largest[h] = jnp.broadcast_to(scores, largest.shape[1:])
                total[h] = jnp.full(total.shape[1:], 1 / R, jnp.float32)
                acc[h] = jnp.broadcast_to(v.astype(jnp.float32) * (v_scale / R), acc.shape[1:])

        @pl.when(i <= last)
        def fold():
            keys = (i * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)) * R + r
            mask = is_attended(keys, position, window) & (keys != position)
            for h in range(K):
                (k, k_scale), (v, v_scale) = head(cache.k, h), head(cache.v, h)
                scores = einsum("gh,sh->gs", q[0, h], k) * k_scale
                scores = jnp.where(mask, scores, MASKED)
                old_largest = largest[h][:, :1]
                new_largest = jnp.maximum(old_largest, jnp.max(scores, axis=-1, keepdims=True))
                shrink = jnp.exp(old_largest - new_largest)
                exps = jnp.exp(scores - new_largest)
                largest[h] = jnp.broadcast_to(new_largest, largest.shape[1:])
                total[h] = total[h] * shrink + jnp.sum(exps, axis=-1, keepdims=True)
                acc[h] = acc[h] * shrink + einsum("gs,sh->gh", (exps * v_scale).astype(q.dtype), v)

        @pl.when(i == last)
        def store():
            first = jax.lax.div(position, R * tile) * tile
            start = pl.multiple_of(first - last * block, tile)

            def patch(old, new, patched):
                shape = (1, K, tile) + (1,) * (old.ndim - 3)
                here = (first + jax.lax.broadcasted_iota(jnp.int32, shape, 2)) * R + r == position
                patched[...] = jnp.where(here, new[...], old[:, :, pl.ds(start, tile)])

            jax.tree.map(patch, cache, new, new_cache)

        @pl.when(step == blocks - 1)
        def finish():
            out[0] = acc[...] / total[...][:, :, :1]
            log_sum_exp[0] = largest[...] + jnp.log(total[...])

    def of_row(shape):  # the whole of a row's array
        return pl.BlockSpec((1, *shape[1:]), lambda b, step, positions: (b,) + (0,) * (len(shape) - 1))

    def read(x):  # the block to attend to
        def index(b, step, positions):
            i = jnp.minimum(first_block(positions[b]) + step, block_of(positions[b]))
            return (b, 0, i) + (0,) * (x.ndim - 3)

        return pl.BlockSpec((1, K, block, *x.shape[3:]), index)

    def write(x):  # the tile with the new token's slot
        def index(b, step, positions):
            return (b, 0, jax.lax.div(positions[b], R * tile)) + (0,) * (x.ndim - 3)

        return pl.BlockSpec((1, K, tile, *x.shape[3:]), index)

    # Else XLA would move the whole cache to VMEM and back where it fits.
    cache = jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), cache)
    first_cache_argument = 1 + 1 + len(jax.tree.leaves(new))
    log_sum_exp = jax.ShapeDtypeStruct((*q.shape[:3], 128), jnp.float32)
    out, log_sum_exp, cache = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            log_sum_exp,
            jax.tree.map(lambda x: pltpu.HBM(x.shape, x.dtype), cache),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, blocks),
            in_specs=[of_row(q.shape), jax.tree.map(lambda x: of_row(x.shape), new), jax.tree.map(read, cache)],
            out_specs=(of_row(q.shape), of_row(log_sum_exp.shape), jax.tree.map(write, cache)),
            scratch_shapes=[
                pltpu.VMEM((K, padded_G, 128), jnp.float32),
                pltpu.VMEM((K, padded_G, 128), jnp.float32),
                pltpu.VMEM((K, padded_G, H), jnp.float32),
            ],
        ),
        input_output_aliases={first_cache_argument + i: 2 + i for i in range(len(jax.tree.leaves(cache)))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=kernel_cost(4 * B * K * G * S * H, cache),
        interpret=interpret,
        name="ragged_decode_attention",
    )(positions, q, new, cache)
    return out[:, :, :G, None], log_sum_exp[:, :, :G, None, :1], cache


# ---------------------------------------------------------------------------------------------------------------------
# Forward pass


def forward(
    weights: dict, tokens: jax.Array, positions: jax.Array, cache: list[LayerCache], attend, config: Config
) -> tuple[jax.Array, list[LayerCache]]:
    """The layers over tokens [B, T] at positions [B, T]: hidden states [B, T, D], not yet normed, and the cache.

    A Python loop and not a scan over stacked layers: so the compiler fetches the next layer's weights ahead, and copies
    neither weights nor cache, at the price of a longer compilation. jit has Python go through one layer for all.
    """

    @jax.jit
    def layer(x, w, layer_cache):
        x, layer_cache = attention(x, w, layer_cache, positions, attend, config)
        return mlp(x, w, config), layer_cache

    x = embed(tokens, weights["embedding"], weights["norm"])
    cache = list(cache)
    for i, w in enumerate(weights["layers"]):
        x, cache[i] = layer(x, w, cache[i])
    return x, cache


@jax.named_scope("head")
def output_logits(weights: dict, x: jax.Array, config: Config) -> jax.Array:
    """This device's part of the vocabulary, float32 [B, V], for hidden states x [B, D]."""
    x = rms_norm(x, weights["norm"], config.rms_norm_eps)
    y = linear(x, weights.get("head", weights["embedding"]))
    ids = jax.lax.axis_index(MODEL_AXES) * y.shape[1] + jnp.arange(y.shape[1])
    return jnp.where(ids < config.vocab_size, y, MASKED)


class Sampling(NamedTuple):
    """How the next token is chosen. `temperature` 0 takes the most probable one.

    Otherwise the logits are divided by `temperature`, the `top_k` largest are kept (0: all), then of these the most
    probable ones until their probabilities add up to `top_p` (Holtzman et al. 2020).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def next_token(
    logits: jax.Array, positions: jax.Array, seeds: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 and their log-probabilities float32, [B] each: of the whole batch, and on every device.

    The log-probability is that of the unmodified softmax. Sampling draws from a key of its own for each row and each
    position, so that no key is used twice.

    Args: logits [B, V], this device's part; positions int32 [B], of the tokens that gave them; seeds uint32 [B, 2], of
    each row its number and the seed of all.
    """
    if sampling.temperature == 0:
        # Each device has a candidate: its largest logit, that token, and the sum of exp(logit - largest).
        largest, V = jnp.max(logits, axis=-1), logits.shape[1]
        local = jnp.min(jnp.where(logits == largest[:, None], jnp.arange(V), V - 1), axis=-1)  # argmax is slow on CPUs
        ids = local + jax.lax.axis_index(MODEL_AXES) * V
        total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1)
        # One collective for all of it; float32 holds every id below 2**24 exactly.
        candidates = jnp.stack([largest, total, ids.astype(jnp.float32)])
        largest, total, ids = jax.lax.all_gather(candidates, MODEL_AXES, axis=1)  # [X, B] each
        winner = jnp.argmax(largest, axis=0)[None]
        logprobs = -jnp.log(jnp.sum(total * jnp.exp(largest - jnp.max(largest, axis=0)), axis=0))
        tokens = jnp.take_along_axis(ids, winner, axis=0)[0].astype(jnp.int32)
    else:
        logits = jax.lax.all_gather(logits, MODEL_AXES, axis=1, tiled=True)
        keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")  # of this generator, two numbers are a key
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
        kept = keep_probable(logits / sampling.temperature, sampling.top_k, sampling.top_p)
        tokens = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    # Every host needs the tokens of all rows, to look for stop tokens.
    chosen = jnp.stack([tokens.astype(jnp.float32), logprobs])
    tokens, logprobs = jax.lax.all_gather(chosen, "dp", axis=1, tiled=True)
    return tokens.astype(jnp.int32), logprobs


def keep_probable(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Logits [B, V] with -inf for all that `top_k` and then `top_p` leave out; the most probable token stays."""
    if top_k:
        smallest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.sum(before < top_p, axis=-1, keepdims=True)
        smallest = jnp.take_along_axis(descending, kept - 1, axis=-1)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


# ---------------------------------------------------------------------------------------------------------------------
# The three programs: prefill, first_token, decode_step
#
# Here jit and shard_map begin: outside, an array is the whole one, spread over the mesh; inside `body` it is this
# device's part.


def sharded(body, mesh: Mesh, weights: dict, config: Config, in_specs: tuple, out_specs: object):
    """`body(weights, ..)` under shard_map. The weights' specs come from their declaration: traced arrays have none."""
    int8 = isinstance(weights["embedding"], Int8)
    weight_specs = specs(abstract_weights(config, mesh, weights["norm"].dtype, int8))
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(weight_specs, *in_specs),
        out_specs=out_specs,
        check_vma=False,  # the kernel's outputs do not say which axes they vary over
    )


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache", "last_hidden"))
def prefill(
    weights: dict,
    cache: list[LayerCache],
    last_hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    config: Config,
    mesh: Mesh,
) -> tuple[list[LayerCache], jax.Array]:
    """One piece of the prompts, T tokens of each row, at positions start to start + T.

    Rows are padded at the end. What is computed there is not attended to: each of those slots is overwritten before a
    later token could. A row that has ended before this piece stores nothing (where attention is chunked, that would
    overwrite its last chunk).

    Args: cache and last_hidden [B, D] are donated; tokens int32 [B, T]; start int32 []; lengths int32 [B], of the
    prompts. Returns the cache, and `last_hidden` with the hidden state of each prompt's last token where that stands
    in this piece.
    """

    def body(weights, cache, last_hidden, tokens, start, lengths):
        T, R = tokens.shape[1], neighbours(config, model_shards(mesh))
        positions = jnp.broadcast_to(start + jnp.arange(T), tokens.shape)
        attend = partial(prefill_attention, is_live=start < lengths, R=R)
        x, cache = forward(weights, tokens, positions, cache, attend, config)
        index = lengths - 1 - start
        is_here = (index >= 0) & (index < T)
        hidden = jnp.take_along_axis(x, jnp.clip(index, 0, T - 1)[:, None, None], axis=1)[:, 0]
        return cache, jnp.where(is_here[:, None], hidden, last_hidden)

    in_specs = (CACHE_SPEC, P("dp"), P("dp"), P(), P("dp"))
    program = sharded(body, mesh, weights, config, in_specs, (CACHE_SPEC, P("dp")))
    return program(weights, cache, last_hidden, tokens, start, lengths)


@partial(jax.jit, static_argnames=("config", "mesh", "sampling"))
def first_token(
    weights: dict,
    last_hidden: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    *,
    config: Config,
    mesh: Mesh,
    sampling: Sampling,
) -> tuple[jax.Array, jax.Array]:
    """The first generated token and its log-probability, [B] each, from the hidden states that prefill returns."""

    def body(weights, last_hidden, lengths, seeds):
        return next_token(output_logits(weights, last_hidden, config), lengths - 1, seeds, sampling)

    program = sharded(body, mesh, weights, config, (P("dp"), P("dp"), P("dp")), P())
    return program(weights, last_hidden, lengths, seeds)


@partial(jax.jit, static_argnames=("config", "mesh", "sampling"), donate_argnames=("cache",))
def decode_step(
    weights: dict,
    cache: list[LayerCache],
    tokens: jax.Array,
    positions: jax.Array,
    seeds: jax.Array,
    *,
    config: Config,
    mesh: Mesh,
    sampling: Sampling,
) -> tuple[list[LayerCache], jax.Array, jax.Array, jax.Array]:
    """One token for every row: feeds tokens [B] at positions [B], for which see decode_attention.

    Returns the cache (donated), the next tokens int32 [B], their log-probabilities float32 [B] and their positions.
    """

    def body(weights, cache, tokens, positions, seeds):
        R = neighbours(config, model_shards(mesh))
        # A row that is finished goes on until all are, in the last slot when there is no further one.
        positions = jnp.minimum(positions, capacity(cache, config, R) - 1)
        attend = partial(decode_attention, R=R)
        x, cache = forward(weights, tokens[:, None], positions[:, None], cache, attend, config)
        tokens, logprobs = next_token(output_logits(weights, x[:, 0], config), positions, seeds, sampling)
        return cache, tokens, logprobs, positions + 1

    in_specs = (CACHE_SPEC, P("dp"), P("dp"), P("dp"))
    program = sharded(body, mesh, weights, config, in_specs, (CACHE_SPEC, P(), P(), P("dp")))
    return program(weights, cache, tokens, positions, seeds)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

PREFILL_TOKENS = 4096  # of all rows of a device in one piece: bounds the memory of prefill
PREFILL_PIECE = 1024  # of one row: chosen so that a weight read serves many tokens; not yet tuned on hardware
LOOKAHEAD = 2  # decode steps that the device may be ahead of the host's look at their tokens
BATCH = 256  # rows of a device: by data sheets, from 240 (TPU v5e) or 295 (H100) on computing outlasts reading bfloat16
MEMORY_SHARE = 0.85  # for weights and cache, where prompts are dealt into batches; a guess of what steps need beside


class Token(NamedTuple):
    """A generated token of prompt `row`, with `finish_reason` "stop" or "length" where it is the row's last."""

    row: int
    id: int
    logprob: float
    finish_reason: str | None


def generate(
    weights: dict,
    prompts: list[list[int]],
    config: Config,
    mesh: Mesh,
    *,
    rows: list[int] | None = None,
    max_new_tokens: int,
    max_seq_len: int | None = None,
    stop_tokens: tuple[int, ...] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
    int8_cache: bool = False,
    stats: dict | None = None,
) -> Iterator[list[Token]]:
    """Decodes all prompts as one batch and yields, step by step, the new tokens of the rows that are not finished.

    A row ends with the first of `stop_tokens`, after `max_new_tokens`, or when it has filled `max_seq_len` slots (by
    default as many as all this needs). What it generates does not depend on the other rows: sampling draws by the seed
    and the row's number, which `rows` gives where it is not the place in `prompts`, and which its tokens carry.

    The device does not wait for the host: a step takes its tokens from the step before on the device, and the host
    looks for stop tokens LOOKAHEAD steps behind. Where attention is plain XLA, which reads the whole cache, the cache
    doubles as it fills, at one compilation for each size.

    `stats` receives seconds and counts: compile_s, prefill_s, prefill_tokens, decode_s, decode_steps, decode_tokens,
    and at the end step_bytes of a decode step of mean length. The clock of decode_s stands still while the cache grows.
    As a generator, it raises InputError (for prompts that check_prompts refuses, or a cache that does not fit) when its
    first item is asked for; later, where there is no memory left for the cache to grow.
    """
    stats = {} if stats is None else stats
    stats |= {"compile_s": 0.0, "decode_s": 0.0, "decode_steps": 0, "decode_tokens": 0}
    check_prompts(prompts, config, max_seq_len)
    lengths = [len(prompt) for prompt in prompts]
    max_seq_len = max_seq_len or max(lengths) + max_new_tokens - 1  # the last token needs no slot
    limits = [min(max_new_tokens, max_seq_len - length + 1) for length in lengths]

    # The prompts in one array, padded at the end of each row, and with rows of one token so that dp divides them.
    dp = mesh.shape["dp"]
    batch = -(-len(prompts) // dp) * dp
    R = neighbours(config, model_shards(mesh))
    piece = piece_length(max(lengths), batch // dp, R, config)
    pieces = -(-max(lengths) // piece)
    prompt_tokens = np.zeros((batch, pieces * piece), np.int32)
    for row, prompt in enumerate(prompts):
        prompt_tokens[row, : len(prompt)] = prompt
    prompt_lengths = np.array(lengths + [1] * (batch - len(prompts)), np.int32)

    def on_mesh(array, spec=P()):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    dtype, most_tokens = weights["norm"].dtype, max(max_seq_len, pieces * piece)

    def cache_for(position):
        """The cache with which a step at `position` is compiled."""
        tokens = most_tokens
        if mesh.devices.flat[0].platform != "tpu":  # there, the kernel reads no more than it needs
            tokens = min(most_tokens, max(256, power_of_two(position + 1)))
        return abstract_cache(config, mesh, batch, tokens, dtype, int8_cache)

    no_memory = f"no memory for a cache of {batch} x {most_tokens} tokens; lower max_new_tokens or max_seq_len"
    if stored_bytes((weights, cache_for(most_tokens - 1))) > memory_of(mesh):
        raise InputError(no_memory)  # now, and not when the cache has grown

    def in_memory(make, *arguments):
        try:
            return jax.block_until_ready(make(*arguments))
        except jax.errors.JaxRuntimeError as error:
            raise InputError(no_memory) from error

    cache = in_memory(zeros, cache_for(max(*lengths, pieces * piece - 1)))
    hidden = jax.ShapeDtypeStruct((batch, config.hidden_size), dtype, sharding=NamedSharding(mesh, P("dp")))
    last_hidden = zeros(hidden)
    positions = on_mesh(prompt_lengths, P("dp"))  # of the next token of each row; for prefill, the prompts' lengths
    rows = list(range(len(prompts))) if rows is None else rows
    seeds = np.array([(row, seed) for row in rows] + [(0, seed)] * (batch - len(prompts)), np.uint32)
    seeds = on_mesh(seeds, P("dp"))

    def compiled(program, *arguments, **options):
        begin = time.perf_counter()
        executable = program.lower(*arguments, config=config, mesh=mesh, **options).compile()
        stats["compile_s"] += time.perf_counter() - begin
        return executable

    # Prefill. All that it and the first decode step need is compiled before the clock starts.
    tokens = on_mesh(prompt_tokens[:, :piece])
    prefill_piece = compiled(prefill, weights, cache, last_hidden, tokens, on_mesh(np.int32(0)), positions)
    pick_first = compiled(first_token, weights, last_hidden, positions, seeds, sampling=sampling)
    tokens = on_mesh(prompt_lengths)  # of the shape and sharding of a step's tokens
    step = compiled(decode_step, weights, cache, tokens, positions, seeds, sampling=sampling)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("compiled")  # or the clock would count what others still compile
    begin = time.perf_counter()
    for start in range(0, pieces * piece, piece):
        tokens = on_mesh(prompt_tokens[:, start : start + piece])
        cache, last_hidden = prefill_piece(weights, cache, last_hidden, tokens, on_mesh(np.int32(start)), positions)
    tokens, logprobs = jax.block_until_ready(pick_first(weights, last_hidden, positions, seeds))
    stats |= {"prefill_s": time.perf_counter() - begin, "prefill_tokens": sum(lengths)}

    live = set(range(len(prompts)))  # the rows that are not finished
    seen = 0  # tokens of a row that the host has looked at

    def look(tokens, logprobs):
        """Fetches the tokens of a step, and takes the rows that end with them out of `live`."""
        nonlocal seen
        seen += 1
        ids, logs = np.asarray(tokens), np.asarray(logprobs)
        new = []
        for row in sorted(live):
            is_stop = int(ids[row]) in stop_tokens
            reason = "stop" if is_stop else "length" if seen == limits[row] else None
            new.append(Token(rows[row], int(ids[row]), float(logs[row]), reason))
            if reason:
                live.remove(row)
        return new

    yield look(tokens, logprobs)

    # Decode.
    in_flight = deque()  # the tokens of steps that the host has not looked at
    started = 1  # tokens of a row, in flight or seen
    begin = time.perf_counter()
    while live:
        while started < max(limits[row] for row in live) and len(in_flight) <= LOOKAHEAD:
            # No further than a row's limit: one that has reached it is live until the host has looked.
            position = max(lengths[row] + min(started, limits[row] - 1) for row in live) - 1
            if position >= capacity(cache, config, R):
                jax.block_until_ready(tokens)  # no step runs while the clock stands still
                pause = time.perf_counter()
                cache = in_memory(grown, cache, cache_for(position))
                step = compiled(decode_step, weights, cache, tokens, positions, seeds, sampling=sampling)
                begin += time.perf_counter() - pause
            cache, tokens, logprobs, positions = step(weights, cache, tokens, positions, seeds)
            tokens.copy_to_host_async()
            in_flight.append((tokens, logprobs))
            started += 1
        new = look(*in_flight.popleft())
        stats["decode_s"] = time.perf_counter() - begin
        stats["decode_steps"] += 1
        stats["decode_tokens"] += len(new)
        yield new
    jax.block_until_ready(cache)  # steps still in flight: no process may leave while others wait for it in a collective
    stats["step_bytes"] = step_bytes(weights, cache, [length + seen / 2 for length in lengths], config)


def generate_in_batches(
    weights: dict,
    prompts: list[list[int]],
    config: Config,
    mesh: Mesh,
    *,
    max_new_tokens: int,
    max_seq_len: int | None = None,
    int8_cache: bool = False,
    stats: dict | None = None,
    **options,
) -> Iterator[list[Token]]:
    """What generate does, for prompts that may be too many for one batch.

    Then rows of similar length go together, at most BATCH on a device, the longest first: what does not fit is said at
    once. The numbers of rows and of slots are powers of two, which bounds what has to be compiled. `stats` is of all
    batches, step_bytes of a mean step.
    """
    check_prompts(prompts, config, max_seq_len)
    stats = {} if stats is None else stats
    dp, dtype = mesh.shape["dp"], weights["norm"].dtype
    room = MEMORY_SHARE * memory_of(mesh) - stored_bytes(weights)

    def fits(count, slots):
        cache = abstract_cache(config, mesh, -(-count // dp) * dp, slots, dtype, int8_cache)
        return count <= BATCH * dp and stored_bytes(cache) <= room

    left = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    while left:
        needed = max_seq_len or len(prompts[left[-1]]) + max_new_tokens - 1
        count, slots = len(left), needed
        if not fits(count, slots):
            count, slots = BATCH * dp, max_seq_len or max(256, power_of_two(needed))
            while count > dp and not fits(count, slots):
                count //= 2
            if not fits(count, slots):  # by not much, perhaps
                slots = needed
        rows, left = sorted(left[-count:]), left[:-count]
        measured = {}
        options |= {"max_new_tokens": max_new_tokens, "max_seq_len": slots, "int8_cache": int8_cache}
        yield from generate(weights, [prompts[row] for row in rows], config, mesh, rows=rows, stats=measured, **options)
        steps = stats.get("decode_steps", 0) + measured["decode_steps"]
        share = measured["decode_steps"] / steps if steps else 1
        mean_bytes = round(share * measured.pop("step_bytes") + (1 - share) * stats.get("step_bytes", 0))
        stats |= {key: stats.get(key, 0) + value for key, value in measured.items()} | {"step_bytes": mean_bytes}


def piece_length(longest: int, rows: int, R: int, config: Config) -> int:
    """Tokens of a row that prefill takes at once, where a device has `rows` of them: a multiple of R."""
    piece = min(PREFILL_PIECE, power_of_two(longest), max(1, PREFILL_TOKENS // power_of_two(rows)))
    return -(-piece // R) * R


def check_prompts(prompts: list[list[int]], config: Config, max_seq_len: int | None) -> None:
    """Raises InputError for no prompt, and one that is empty, longer than `max_seq_len` or outside the vocabulary."""
    if not prompts:
        raise InputError("there is no prompt")
    for row, prompt in enumerate(prompts, 1):
        if not prompt:
            raise InputError(f"prompt {row} is empty: it has no tokens")
        if max_seq_len and len(prompt) > max_seq_len:
            raise InputError(f"prompt {row} has {len(prompt)} tokens, more than max_seq_len {max_seq_len}; raise it")
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise InputError(f"prompt {row} has a token outside the model's vocabulary of {config.vocab_size}")


def zeros(abstract) -> object:
    """A pytree of zeros in the shapes, dtypes and shardings of `abstract`, made on the devices."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)


def grown(cache: list[LayerCache], abstract: list[LayerCache]) -> list[LayerCache]:
    """The cache with as many slots as `abstract` has, the new ones empty. Takes the layers out of the list that it is
    given, one at a time, so that no more than one is in memory twice."""
    return [jax.block_until_ready(grow_layer(cache.pop(0), wanted=layer)) for layer in abstract]


@partial(jax.jit, static_argnames="wanted")
def grow_layer(layer: LayerCache, wanted: LayerCache) -> LayerCache:
    """A layer's cache, padded to the shapes of `wanted`, in its shardings."""

    def padded(x, wanted):
        x = jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, wanted.shape, strict=True)])
        return jax.lax.with_sharding_constraint(x, wanted.sharding)

    return jax.tree.map(padded, layer, wanted)


def stored_bytes(tree) -> int:
    """Bytes of a pytree of arrays or ShapeDtypeStructs on all devices; what several devices hold counts on each."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * x.sharding.num_devices
        for x in jax.tree.leaves(tree)
    )


def memory_of(mesh: Mesh) -> float:
    """Bytes of memory of a mesh's devices, infinite where they do not tell. CPUs share the machine's.

    All processes must call it, and all get the same: with the least that one of them has.
    """
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        local = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        local = sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in devices)
    if jax.process_count() > 1:
        local = float(np.min(multihost_utils.process_allgather(np.float32(local))))
    return local * mesh.size / len(devices)


def step_bytes(weights: dict, cache: list[LayerCache], lengths: list[float], config: Config) -> int:
    """Bytes that a decode step has to read on all devices: all weights but the embedding, `lengths` slots of the rows.

    A tied embedding is the output head too, and counts. A weight counts on every device that holds it.
    """
    if "head" in weights:
        weights = {name: value for name, value in weights.items() if name != "embedding"}
    batch, tokens = cache[0].k.shape[0], cache[0].k.shape[1] * cache[0].k.shape[2] // config.num_key_value_heads
    read = sum(min(length, config.sliding_window or tokens) for length in lengths)
    return int(stored_bytes(weights) + stored_bytes(cache) * read / (batch * tokens))
