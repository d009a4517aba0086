"""Qwen2 and Qwen3 inference in JAX: the whole model in one file.

It covers `Qwen2ForCausalLM`, `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` of transformers: Qwen2 and Qwen2.5 with Coder
and QwQ, DeepSeek-R1-Distill-Qwen, Qwen3 from 0.6B to 32B, Qwen3-30B-A3B and 235B-A22B with their releases of July 2025
(2507), and Qwen3-Coder. The file has two parts. "The model" is what makes this a Qwen: its configuration, its weights,
its layers. "Running it" is the rest: sharding, attention over the cache, int8, and one kernel for TPUs. The latter
consists of blocks. Each is the same text in every model that has it, so some have options that this model does not set.
The first part uses names that blocks explain: Weight and Part ("Declaring weights"), Mask and Span ("Attention in plain
JAX"), LayerCache ("Attention over heads in plain JAX"). The file needs only jax and numpy. generate.py decodes with it,
and fast.py, the appendix, makes it fast on each machine.

Differs from llama3 in: `attention`, which has a norm of each query head and each key head or, in Qwen2, biases;
`feed_forward`, which can have experts, chosen by `route`; `Config`, which says what each layer has.

    config = Config.from_dict(json.loads(Path("config.json").read_text()))
    mesh = make_mesh(tp=jax.device_count())
    weights = ...  # the pytree that abstract_weights(config, mesh, dtype) describes; convert.load reads one
    for tokens in generate(weights, [[1, 2, 3]], config, mesh, max_new_tokens=16):  # of generate.py
        ...

Some words of JAX. A pytree is nested dicts, lists and tuples of arrays; jax.tree.map applies a function to each array.
Arrays never change: code that stores something returns a new array. jit compiles a function once for each set of
shapes. Inside it, an array is traced: it has a shape and a dtype, but no values yet. A ShapeDtypeStruct is an array's
shape, dtype and sharding without the array. A mesh names the axes of a grid of devices, and a PartitionSpec (P) says
which of them splits which dimension of an array. Under shard_map, code sees this device's part of each array. A
collective acts among the devices along the axes that it names: psum adds their arrays (an all-reduce), all_gather
stacks them or, with tiled=True, concatenates them. axis_index is the place of this device along such axes.

Parallelism. A mesh of devices has three axes. `dp` splits the batch. `ep` splits the experts, and `tp` the intermediate
dimension of each. Both together split all other matrices but the router: attention by heads, MLPs by intermediate_size
(Shoeybi et al. 2019, "Megatron-LM"), embedding and head by vocab_size. A step runs under `jax.shard_map`: devices
exchange nothing except in the collectives that the code spells out. A decode step has one `psum` in the embedding, two
in each layer (in `summed`), and two `all_gather` in generate.py, for the next token and for the results. In prefill the
devices along ep divide the tokens of the residual stream (see `divide_tokens`). If ep x tp is at least twice
num_key_value_heads, R devices share each kv head (see `sharers`), and each caches every R-th token for it. They
exchange queries and outputs (see `exchange`).

Dimension letters, in shapes and einsums. Under shard_map B, N, K, F, E, V and S are the sizes on one device.

    B  rows of the batch         D  hidden_size               V  vocab_size
    T  tokens of a row           N  num_attention_heads       F  intermediate_size, or moe_intermediate_size
    S  cache slots of a row      K  num_key_value_heads       X  devices that share a layer, ep x tp
    C  any contracted dimension  H  head_dim                  R  devices that share a kv head
    O  any output dimension      W  the width of a value      E  num_experts
    k  num_experts_per_tok
    A, M  queries of a kv head: of up to FEW tokens, A is 1 and M all of them; of more, A query heads and M tokens

Dtypes. Weights, residual stream and cache are bfloat16 by default; `weights_of` and `cache_layout` name the exceptions.
Matrices that devices split, and the cache, can be int8 with float32 scales; matrices can be in 4 bits too (see
fast.py). Products accumulate in float32, and `linear` returns float32. The partial sums that devices add with a psum
are rounded to the residual stream's dtype first, which halves the traffic. Norms, rotary embedding, softmax and logits
are float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from functools import partial
from typing import NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, NamedSharding, P
from jax.experimental import mesh_utils
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

MODEL_AXES = ("ep", "tp")  # the axes of the mesh whose devices share a layer


# =====================================================================================================================
# The model
# =====================================================================================================================


@dataclasses.dataclass(frozen=True)
class Config:
    """The values of config.json that inference needs, under config.json's own names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a layer without experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int  # 0: all layers have an MLP
    head_dim: int = 0  # from_dict sets this and the next one
    rope: Rope | None = None
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768  # of an expert
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1  # every so many layers one has experts,
    mlp_only_layers: tuple[int, ...] = ()  # unless it is among these
    layer_types: tuple[str, ...] = ()  # for each layer "sliding_attention" or "full_attention"
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28  # number of leading layers without a window, if config.json has no layer_types
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    norm_offset = 0  # a constant: norms multiply by their weight

    @classmethod
    def from_dict(cls, config: dict, names: Collection[str] = ()) -> Config:
        """Reads the dict of a config.json, as transformers 4 or 5 writes it. `names`, of tensors, are not needed here.

        Raises InputError for a missing or impossible value and, by name, for a feature that is not supported.
        """
        check_supported(
            model_type=(config.get("model_type"), ("qwen2", "qwen3", "qwen3_moe")),
            hidden_act=(config.get("hidden_act", "silu"), ("silu", "swish")),
            is_causal=(config.get("is_causal", True), (True,)),
        )
        # In transformers all layers of a mixture have the window, or none. There are two names for its experts.
        experts = config.get("num_local_experts", config.get("num_experts", 128))
        of_mixtures = {"num_experts": experts, "max_window_layers": 0, "layer_types": None}
        config = config | (of_mixtures if config["model_type"] == "qwen3_moe" else {"num_experts": 0})
        if config["model_type"] == "qwen3" and config.get("head_dim") is None:
            config["head_dim"] = 128
        given = read_heads(cls, {"sliding_window": 4096} | config)
        if not given.get("use_sliding_window"):
            given["sliding_window"] = None
        given["rope"] = read_rope(config, "head_dim", given["head_dim"])
        result = cls(**given, mlp_only_layers=read_list(config, "mlp_only_layers", range(2**16), ()))
        if result.num_experts:
            check_routing(result, result.num_experts)
        kinds = ("full_attention", "sliding_attention")[: 1 + (result.sliding_window is not None)]
        layers, first = result.num_hidden_layers, result.max_window_layers
        default = [kinds[-1] if i >= first else kinds[0] for i in range(layers)]
        return dataclasses.replace(result, layer_types=read_list(config, "layer_types", kinds, default, layers))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of an MLP."""
        is_among = layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and is_among

    def mask(self, layer: int) -> Mask:
        """Which tokens a token attends to in a layer: all up to its own, or the last ones."""
        return Mask(window=self.sliding_window if self.layer_types[layer] == "sliding_attention" else None)


def weights_of(config: Config) -> dict:
    """A pytree of Weight: which tensors of the checkpoint make each array, its shape, and how devices split it.

    A matrix is [output, input], as in the checkpoint. Split by output, each device computes some of the outputs. Split
    by input, each device computes a partial sum of all outputs, and a psum adds the sums. `qkv` joins q_proj, k_proj
    and v_proj, so that they are one product: a device holds its query heads, then its key heads, then its value heads.
    `gate_up` joins gate_proj and up_proj likewise. Experts are split over ep, and each like an MLP over tp. The router,
    which every device needs, is whole on each, and so are the norms. Those in layers are float32, so that no step
    converts them. "Declaring weights" explains Part, by_output, by_input, bias and whole; "Experts in plain JAX",
    of_experts.
    """
    D, H, E = config.hidden_size, config.head_dim, config.num_experts
    N, K = config.num_attention_heads, config.num_key_value_heads

    def layer(i):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        # A device has whole kv heads with their query heads. If R devices share a kv head, each has some of its query
        # heads, and all have a copy of its key and value rows.
        q, o = (Part({f"{attention}.{name}": N * H}, units=N, groups=K) for name in ("q_proj", "o_proj"))
        k, v = (
            Part({f"{attention}.{name}": K * H}, units=K, groups=K, replicated=True) for name in ("k_proj", "v_proj")
        )
        weights = {
            "attention_norm": whole(f"model.layers.{i}.input_layernorm.weight", D, dtype="float32"),
            "qkv": by_output(D, q, k, v),
            "o": by_input(D, o),
            "mlp_norm": whole(f"model.layers.{i}.post_attention_layernorm.weight", D, dtype="float32"),
        }
        if config.model_type != "qwen2":
            weights |= {f"{x}_norm": whole(f"{attention}.{x}_norm.weight", H, dtype="float32") for x in ("q", "k")}
        if config.attention_bias or config.model_type == "qwen2":
            weights["qkv_bias"] = bias(q, k, v, dtype="float32")
        if config.attention_bias:
            weights["o_bias"] = whole(f"{attention}.o_proj.bias", D)

        def mlp_of(module, columns, experts=0):
            gate, up, down = (Part({f"{module}.{name}": columns}) for name in ("gate_proj", "up_proj", "down_proj"))
            return of_experts(experts, by_output(D, gate, up)), of_experts(experts, by_input(D, down))

        if config.has_experts(i):
            experts = mlp_of(f"{mlp}.experts.{{}}", config.moe_intermediate_size, E)
            weights["router"] = whole(f"{mlp}.gate.weight", E, D)
            weights["experts_gate_up"], weights["experts_down"] = experts
        else:
            weights["gate_up"], weights["down"] = mlp_of(mlp, config.intermediate_size)
        return weights

    weights = {
        "embedding": by_output(D, Part({"model.embed_tokens": config.vocab_size})),
        "layers": [layer(i) for i in range(config.num_hidden_layers)],
        "norm": whole("model.norm.weight", D),  # its dtype is that of the residual stream
    }
    if not config.tie_word_embeddings:
        weights["head"] = by_output(D, Part({"lm_head": config.vocab_size}))
    return weights


def left_out(name: str, config: Config) -> str | None:
    """Why a tensor of the checkpoint is left out on purpose, or None."""
    if "rotary_emb." in name:  # frequencies, or cosines and sines
        return "computed from config.json"
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return "tied to model.embed_tokens.weight"
    return None


@jax.named_scope("attention")  # the name in a profiler's trace
def attention(x: Array, w: dict, cache: LayerCache, span: Span, config: Config, mask: Mask):
    """The first half of a layer, on the residual stream x, [1, B T, D] or a share (see divide_tokens), at
    `span.positions`: norm, attention, residual. Returns the new x and the new cache.

    cached_attention stores the keys and values of these tokens, and returns their attention output, [B, T, N H].
    """
    h = all_tokens(rms_norm(x, w["attention_norm"], config.rms_norm_eps)).reshape(*span.positions.shape, -1)
    q, k, v = split_heads(linear(h, w["qkv"], w.get("qkv_bias")), config)
    if "q_norm" in w:  # of each head; not in Qwen2
        q, k = rms_norm(q, w["q_norm"], config.rms_norm_eps), rms_norm(k, w["k_norm"], config.rms_norm_eps)
    q, k = rotate(q, span.positions, config.rope), rotate(k, span.positions, config.rope)
    q = (q * config.head_dim**-0.5).astype(x.dtype)  # scales the attention scores
    out, cache = cached_attention(q, k, v, cache, span, mask)
    x = x + summed(linear(out, w["o"]), x)
    if config.attention_bias:
        x = x + w["o_bias"]  # after the sum; otherwise it is added X times
    return x, cache


@jax.named_scope("mlp")
def feed_forward(x: Array, w: dict, config: Config) -> Array:
    """The second half of a layer, on x as above: norm, a gated MLP, SwiGLU (Shazeer 2020), or the experts that the
    router chooses, each of which is such an MLP, residual."""
    h = all_tokens(rms_norm(x, w["mlp_norm"], config.rms_norm_eps))
    if "router" in w:
        tokens = h.reshape(-1, h.shape[-1])
        ids, scores = route(linear(tokens, w["router"]), config)
        out = experts(tokens, ids, scores, w["experts_gate_up"], w["experts_down"], activation).reshape(h.shape)
    else:
        gate, up = linear_halves(h, w["gate_up"])
        out = linear((jax.nn.silu(gate) * up).astype(x.dtype), w["down"])
    return x + summed(out, x)


def route(logits: Array, config: Config) -> tuple[Array, Array]:
    """The experts of each token, int32 [B, k], and the weights of their outputs, float32 [B, k], from the router's
    float32 logits [B, E]: the k most probable. B counts tokens here, and E all experts."""
    scores = logits if config.norm_topk_prob else jax.nn.softmax(logits)
    return chosen_experts(scores, scores, config)


def weighed(scores: Array, config: Config) -> Array:
    """The weights [B, k] of the chosen experts' outputs, from their scores. chosen_experts calls it. With
    norm_topk_prob it is a softmax over these alone, the same as one over all that is divided by its sum over these."""
    return jax.nn.softmax(scores, axis=1) if config.norm_topk_prob else scores


def activation(gate: Array, up: Array, score: Array) -> Array:
    """silu(gate) * up of an expert, times the score [B, 1] that weighs its output: float32 [B, F]. The next product is
    linear, so the score can be applied before it. `experts` passes score 0 for a row that did not choose the expert."""
    return jax.nn.silu(gate) * up * score


def forward(weights: dict, tokens: Array, span: Span, cache: list[LayerCache], config: Config):
    """The layers on tokens [B, T] at `span.positions`: hidden states [B, T, D], not yet normed, and the new cache.

    It is a Python loop, not a jax.lax.scan over stacked weights: the compiler can then fetch the next layer's weights
    ahead, and copies neither weights nor cache. The inner jit has JAX trace `layer` once for each kind of layer.
    """

    @partial(jax.jit, static_argnums=3)
    def layer(x, w, layer_cache, mask):
        x, layer_cache = attention(x, w, layer_cache, span, config, mask)
        return feed_forward(x, w, config), layer_cache

    x = divide_tokens(embed(tokens, weights, config))
    cache = list(cache)  # the caller's list stays as it is
    for i, w in enumerate(weights["layers"]):
        x, cache[i] = layer(x, w, cache[i], config.mask(i))
    return all_tokens(x).reshape(*tokens.shape, -1), cache


@jax.named_scope("head")
def output_logits(weights: dict, x: Array, config: Config) -> Array:
    """The logits of this device's part of the vocabulary, float32 [B, V], for hidden states x [B, D]."""
    x = rms_norm(x, weights["norm"], config.rms_norm_eps)
    return mask_padding(linear(x, weights.get("head", weights["embedding"])), config)


# =====================================================================================================================
# Running it
# =====================================================================================================================


# ---------------------------------------------------------------------------------------------------------------------
# Mesh and sharding


class InputError(ValueError):
    """What the user gave cannot be used. One line names the thing and, if there is one, the remedy."""


def make_mesh(dp: int = 1, ep: int = 1, tp: int = 1, devices: list | None = None) -> Mesh:
    """A mesh (dp, ep, tp) over `devices`, by default all of them. Those along `ep` and `tp` are next to each other,
    since they communicate in every layer: in a TPU's torus, elsewhere on one host if it has enough."""
    devices = jax.devices() if devices is None else devices
    if dp * ep * tp != len(devices):
        needs = f"dp x ep x tp = {dp} x {ep} x {tp} needs {dp * ep * tp} devices, and there are {len(devices)}"
        raise InputError(f"the mesh {needs}; choose --dp, --ep and --tp with the product {len(devices)}")
    # Not jax.make_mesh: it splits an axis of the torus on v5e alone, and refuses to join the GPUs of several hosts.
    if devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh((dp, ep, tp), devices, allow_split_physical_axes=True)
    else:
        grid = np.array(sorted(devices, key=lambda device: device.process_index)).reshape(dp, ep, tp)
    return Mesh(grid, ("dp", *MODEL_AXES), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def model_shards(mesh: Mesh) -> int:
    """X, the number of devices that share each layer."""
    return mesh.shape["ep"] * mesh.shape["tp"]


def sharers(groups: int, shards: int) -> int:
    """R, how many consecutive devices of `shards` share each of these groups, such as kv heads. It divides `shards`."""
    return max(R for R in range(1, max(shards // groups, 1) + 1) if shards % R == 0)


def shard_index(R: int) -> Array | int:
    """This device's place, 0 to R - 1, among the R consecutive ones that share a cache."""
    return 0 if R == 1 else jax.lax.rem(jax.lax.axis_index(MODEL_AXES), R)


def sharer_groups(R: int) -> list[list[int]]:
    """The devices of MODEL_AXES in groups of R consecutive ones, for the axis_index_groups of a collective."""
    return np.arange(jax.lax.axis_size(MODEL_AXES)).reshape(-1, R).tolist()


def sharded(body, mesh: Mesh, weights: dict, config: Config, in_specs: tuple, out_specs: object):
    """`body(weights, ..)` under shard_map, which needs the spec of each array. A traced array does not tell its own, so
    weights_of gives those of the weights."""
    in_specs = (jax.tree.map(Weight.specs, weights_of(config), weights), *in_specs)
    # check_vma would have each kernel declare which devices' outputs differ.
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def zeros(abstract) -> object:
    """A pytree of zeros in the shapes, dtypes and shardings of `abstract`, made on the devices."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)


def stored_bytes(tree) -> int:
    """Bytes of a pytree of arrays or ShapeDtypeStructs on all devices. A copy counts on each device that holds it."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * x.sharding.num_devices for x in leaves)


ceil_div, power_of_two = pl.cdiv, pl.next_power_of_2  # both round up: a / b, and n to a power of two


# ---------------------------------------------------------------------------------------------------------------------
# What differs by machine


# fast.py fills these tables. Without it they are empty, and everything runs, but slower.
FAST = {}  # (name of a function, platform): what takes its place there
PRODUCTS = {}  # (platform, format): what multiplies there instead of `product`


def platform() -> str:
    """The kind of machine that is compiled for: "cpu", "tpu" or, for all else, "gpu". If the mesh describes devices
    that are not here, as in plan.py, it is theirs."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return "cpu" if device.device_kind == "cpu" else "tpu" if device.device_kind.startswith("TPU") else "gpu"


def by_machine(plain):
    """`plain` or, where FAST has a row for it, what is faster on this machine. `plain` says what is computed, and is
    right everywhere."""

    @functools.wraps(plain)
    def dispatch(*arguments, **options):
        return FAST.get((plain.__name__, platform()), plain)(*arguments, **options)

    dispatch.plain = plain
    return dispatch


def cache_layout(H: int, dtype: jnp.dtype, mesh: Mesh) -> tuple[int, jnp.dtype]:
    """The width and the dtype in which a cache holds H numbers. On TPUs H is rounded up to the 128 lanes: a narrower
    array would have its slots innermost in memory, and be copied to another layout for the kernel in every step. Before
    jax 0.11 XLA for CPUs would convert all of a 16-bit cache to float32 and back to update one slot, so it is float32
    there."""
    platform = mesh.devices.flat[0].platform
    is_converted = platform == "cpu" and jax.__version_info__ < (0, 11)
    return ceil_div(H, 128) * 128 if platform == "tpu" else H, jnp.float32 if is_converted else dtype


# ---------------------------------------------------------------------------------------------------------------------
# Number formats


class Format:
    """How a matrix, or a side of the cache (keys or values), holds its numbers [.., C]: a pytree of arrays. A format
    defines `bits`, declare, encode and values_and_scale. What else stands here is what most of them do."""

    kernel_columns = 128  # of an expert, which a kernel for TPUs takes at a time

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.values.shape

    @classmethod
    def for_mesh(cls, weight: Weight, mesh: Mesh) -> type[Format]:
        """The format in which the devices of a mesh hold a weight that is declared in this one."""
        return cls

    @classmethod
    def declare(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> Format:
        """The format of numbers of a shape, with a ShapeDtypeStruct for each array. `dtype` is for formats that do not
        round."""
        raise NotImplementedError

    @classmethod
    def width(cls, C: int, weight: Weight, dtype: jnp.dtype, mesh: Mesh) -> int:
        """How many columns a device stores where its part of a weight has C: those beyond C are zeros.

        On TPUs a matrix that is split by output gets whole lanes of 128 numbers. Otherwise XLA would store it with the
        output dimension last, and copy it for a kernel in every step. On CPUs 16-bit rows must not lie a multiple of
        4,096 bytes apart, since such rows map to the same places in the processor's cache, and the product would take
        up to 1.7 times as long. They get 32 numbers more, unless they are experts.
        """
        platform = mesh.devices.flat[0].platform
        if platform == "tpu" and weight.split == 0:
            return ceil_div(C, 128) * 128
        is_16_bit = cls.bits == 16 and jnp.dtype(dtype).itemsize == 2
        return C + 32 if platform == "cpu" and is_16_bit and 2 * C % 4096 == 0 and not weight.experts else C

    def specs(self, spec: P) -> Format:
        """The format with a PartitionSpec for each array, by that of the numbers."""
        return jax.tree.map(lambda array: P(*spec[: len(array.shape)]), self)

    def encode(self, x: Array) -> Format:
        """Numbers x [.., C] in this format, with its dtypes."""
        raise NotImplementedError

    def in_order(self, x: Array) -> Array:
        """x [.., C] with its columns in the order in which values_and_scale has those of the weight."""
        return x

    def values_and_scale(self, dtype: jnp.dtype) -> tuple[Array, Array | None]:
        """The numbers [.., C], rounded ones in `dtype`, and the scale [..] by which they are still to be multiplied,
        None where there is none."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Format:
        """Some rows of a matrix."""
        return jax.tree.map(lambda array: array[start:stop], self)


def format_of_arrays(cls: type) -> type:
    """A format as a pytree: the dataclass `cls`, whose fields are arrays."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


@format_of_arrays
class Plain(Format):
    """Numbers as they are: `values` [.., C]."""

    values: Array

    bits = 16

    @classmethod
    def declare(cls, shape, dtype):
        return cls(jax.ShapeDtypeStruct(shape, dtype))

    def encode(self, x):
        return Plain(x.astype(self.values.dtype))

    def values_and_scale(self, dtype):
        return self.values, None


@format_of_arrays
class Int8(Format):
    """int8 `values` [.., C] times float32 `scale` [..]: one scale for each vector along the last dimension.

    A weight [.., O, C] has a scale for each output channel, which is applied after the product. The embedding [V, D]
    has one for each token, a cache [B, K, S, H] one for each token and head, an activation [B, C] one for each row.
    """

    values: Array
    scale: Array

    bits = 8

    @classmethod
    def declare(cls, shape, dtype):
        return cls(jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:-1], jnp.float32))

    def encode(self, x):
        return quantize(x)

    def values_and_scale(self, dtype):
        return self.values.astype(dtype), self.scale


def quantize(x: Array) -> Int8:
    """Symmetric rounding to int8 along the last dimension: the largest magnitude becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    values = jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None])
    return Int8(values.astype(jnp.int8), scale)


FORMATS = {None: Plain, "int8": Int8}  # by what --quantize and --quantize_cache ask for; fast.py adds "int4"


# ---------------------------------------------------------------------------------------------------------------------
# Declaring weights


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of the checkpoint's tensors, which devices divide. (Of a weight that is split by input they are columns, and
    are called rows too.) `tensors` maps names to numbers of rows; they are concatenated.

    The rows form `units` of equal size that are never cut, such as heads (0: each row is one). Units form `groups`,
    such as the query heads of one kv head (1: all are one group, which all devices share). A device holds whole groups.
    If R devices share a group, each has some of its units, or all of them if the part is `replicated`. For example, 32
    query heads in 8 groups on 16 devices: two devices share the 4 heads of a group. The last devices may get fewer
    groups or units, or none, and have zeros for them. The units of a device are rounded up to a multiple of `multiple`,
    with zeros.
    """

    tensors: dict[str, int]
    units: int = 0
    groups: int = 1
    replicated: bool = False
    multiple: int = 1

    def layout(self) -> tuple[int, int]:
        """The number of units, and the rows of one."""
        rows = sum(self.tensors.values())
        return self.units or rows, rows // (self.units or rows)

    def assigned_units(self, shard: int, shards: int) -> tuple[int, int, int]:
        """The units of device `shard` of `shards`: the first, the one after the last, and how many it has room for."""
        R, (units, _) = sharers(self.groups, shards), self.layout()
        size = units // self.groups * ceil_div(self.groups, shards // R)  # units of the groups of a device
        room = size if self.replicated else ceil_div(size, R * self.multiple) * self.multiple
        begin = min(shard // R * size, units)
        end = min(begin + size, units)
        first = begin if self.replicated else min(begin + shard % R * room, end)
        return first, min(first + room, end), room

    def rows_per_device(self, shards: int) -> int:
        """How many rows each of `shards` devices has room for."""
        return self.assigned_units(0, shards)[2] * self.layout()[1]

    def rows_of(self, first: int, last: int) -> list[range]:
        """The rows of the units `first` to `last` - 1."""
        rows = self.layout()[1]
        return [range(rows * first, rows * last)]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight: on each device its parts, concatenated along the output or the input dimension of a matrix. (On two
    devices the whole array of q, k and v is q0 k0 v0 q1 k1 v1.)

    `split` is the dimension that devices split: 0 the output, 1 the input, None: each device holds all of it.
    `other_dim` is the size of the other dimension of a matrix, None for a vector. `dtype`, if given, overrides the
    user's, also in converted checkpoints: XLA for TPUs may widen a norm that is not float32 in a kernel of its own, by
    estimate a tenth of a layer's time. `transposed` says that the checkpoint has the matrix as [input, output]. A
    matrix is held in what `format.for_mesh` gives.
    """

    parts: tuple[Part, ...]
    split: int | None
    other_dim: int | None
    suffix: str  # of the tensors' names
    dtype: str | None = None
    transposed: bool = False
    format: type[Format] = Plain  # or fast.py's Int4Groups, which declares one

    experts, is_by_head = 0, False  # other kinds of weights say otherwise

    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that split one matrix."""
        return () if self.split is None else MODEL_AXES

    def is_matrix(self) -> bool:
        """Whether it is a matrix that devices split, in no dtype of its own: it can be rounded."""
        return self.split is not None and self.other_dim is not None and self.dtype is None

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of one matrix, or vector, with `rows` rows."""
        if self.other_dim is None:
            return (rows,)
        return (self.other_dim, rows) if self.split == 1 else (rows, self.other_dim)

    def stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all matrices, or vectors, of the weight, by that of one."""
        return shape

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the checkpoint, with their shapes: [output, input], also of transposed ones."""
        return {name + self.suffix: self.shape(rows) for part in self.parts for name, rows in part.tensors.items()}

    def columns(self) -> int:
        """The input dimension of a matrix in the checkpoint."""
        return sum(self.parts[0].tensors.values()) if self.split == 1 else self.other_dim

    def spec(self) -> P:
        """Which axes of the mesh split its dimensions."""
        dims = 1 if self.other_dim is None else 2
        return P() if self.split is None else P(*(self.axes() if i == self.split else None for i in range(dims)))

    def specs(self, held: Array | Format) -> P | Format:
        """The PartitionSpec of each array of the weight."""
        return self.spec() if self.other_dim is None else held.specs(self.spec())

    def abstract(self, mesh: Mesh, dtype: jnp.dtype) -> jax.ShapeDtypeStruct | Format:
        """The weight on a mesh, a jax.ShapeDtypeStruct with its sharding for each array."""
        shards = math.prod(mesh.shape[axis] for axis in self.axes())
        shape = list(self.shape(shards * sum(part.rows_per_device(shards) for part in self.parts)))
        dtype, format = self.dtype or dtype, self.format.for_mesh(self, mesh)
        if self.is_matrix() and not self.is_by_head:
            cuts = shards if self.split == 1 else 1
            shape[1] = cuts * format.width(shape[1] // cuts, self, dtype, mesh)
        shape = self.stacked(tuple(shape))
        held = jax.ShapeDtypeStruct(shape, dtype) if self.other_dim is None else format.declare(shape, dtype)

        def array(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(array, held, self.specs(held))


def by_output(inputs: int, *parts: Part, **fields) -> Weight:
    """A matrix [rows of the parts, inputs] split by output. `fields` are Weight's."""
    return Weight(parts, 0, inputs, ".weight", **fields)


def by_input(outputs: int, part: Part, **fields) -> Weight:
    """A matrix [outputs, rows of the part] split by input."""
    return Weight((part,), 1, outputs, ".weight", **fields)


def bias(*parts: Part, **fields) -> Weight:
    """A vector split over devices, such as the biases of a matrix that is split by output."""
    return Weight(parts, 0, None, **{"suffix": ".bias"} | fields)


def whole(name: str, *shape: int, **fields) -> Weight:
    """A vector or a matrix that each device holds whole, and that is never rounded."""
    other_dim = shape[1] if shape[1:] else None
    return Weight((Part({name: shape[0]}),), None, other_dim, "", **fields)


def abstract_weights(config: Config, mesh: Mesh, dtype: jnp.dtype, quantize: str | None = None) -> dict:
    """Every weight as a jax.ShapeDtypeStruct with its sharding; a matrix as a Format of these, which `quantize`, a name
    in FORMATS, chooses. Raises InputError as in_format does, and for experts that the mesh does not divide.

    Matrices are [output, input], so a row is contiguous. Loading transposes only what is declared `transposed`. If
    devices cannot share rows evenly, the arrays have rows or columns of zeros, which change nothing.
    """
    return jax.tree.map(lambda weight: weight.abstract(mesh, dtype), in_format(weights_of(config), quantize))


def in_format(weights: dict, quantize: str | None) -> dict:
    """`weights`, a pytree of Weight, in which the matrices that devices split have the format FORMATS[quantize]. None
    changes nothing. In place of a format of fewer than 8 bits, embeddings, the head, what is multiplied head by head,
    and matrices whose rows are no whole groups have int8. A matrix of as many bits stays as it is. Raises InputError
    for a name that is not in FORMATS."""
    if quantize not in FORMATS:
        raise InputError(f"quantize {quantize!r} is none of {[*FORMATS]}; int4 needs fast.py beside model.py")

    def asked(path, weight):
        if not quantize or not weight.is_matrix():
            return weight
        format = FORMATS[quantize]
        if format.bits < 8:
            is_apart = path[0].key.endswith(("embedding", "head")) or weight.is_by_head
            format = Int8 if is_apart or weight.columns() % format.size else format
        return weight if weight.format.bits == format.bits else dataclasses.replace(weight, format=format)

    return jax.tree_util.tree_map_with_path(asked, weights)


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """How the first `dim` of the `size` numbers of a head turn (Su et al. 2021, "RoFormer"). All fields but the first
    two are config.json's."""

    size: int
    interleaved: bool  # the pairs are (x[2i], x[2i + 1]), and not (x[i], x[i + dim / 2])
    rope_theta: float
    partial_rotary_factor: float

    scale = 1.0  # the factor of what turns
    dim = property(lambda self: int(self.size * self.partial_rotary_factor))

    def positions_per_radian(self) -> np.ndarray:
        """float32 [dim / 2]: over how many positions each pair turns by one radian."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / self.dim
        return (np.float64(self.rope_theta) ** exponents).astype(np.float32)

    def frequencies(self) -> np.ndarray:
        """float32 [dim / 2]: the angle by which each pair turns per position. In each class the rounding is that of
        transformers: at large positions the last digit of a frequency matters."""
        return 1 / self.positions_per_radian()


ROPES = {"default": Rope}  # of each rope_type that this model can have: blocks below may add some


def read_rope(config: dict, field: str, size: int, **defaults) -> Rope:
    """The Rope of a config.json, whose `field` says that heads have `size` numbers. As in transformers, a table wins
    over fields beside it: `rope_scaling` (transformers 4), or else `rope_parameters` (5). What a `rope_scaling` and the
    fields leave out of rope_theta and partial_rotary_factor is read from rope_parameters. Only of
    original_max_position_embeddings, by default max_position_embeddings, the field wins. `defaults` are the model's
    own, of Rope's fields. Without a partial_rotary_factor among them, only 1 is supported.

    Raises InputError for a missing or impossible value and, by name, for what is not supported.
    """
    scaling, parameters = (config.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    for table in (parameters, scaling):
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise InputError(f"config.json: the rope parameters must be one table for all layers, not {table!r:.40}")
    key = "original_max_position_embeddings"
    sources = (  # the later ones win
        {"rope_theta": 1e4, "partial_rotary_factor": 1, key: config.get("max_position_embeddings")} | defaults,
        *({name: part.get(name) for name in ("rope_theta", "partial_rotary_factor")} for part in (parameters, config)),
        scaling or parameters,
        {key: config.get(key), "size": size, "interleaved": defaults.get("interleaved", False)},
    )
    given = {name: value for source in sources for name, value in source.items() if value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if given.get("factor", 1) != 1 and not {"rope_type", "type"} & given.keys():  # transformers would ignore it
        raise InputError("config.json: the rope parameters have a factor and no rope_type, such as linear")
    check_supported(rope_type=(rope_type, tuple(ROPES)))
    rope = ROPES[rope_type](**read_fields(ROPES[rope_type], given))
    share = rope.partial_rotary_factor
    if "partial_rotary_factor" not in defaults and rope.dim != size:
        check_supported(partial_rotary_factor=(share, (1,)))
    if rope.dim % 2 or not rope.dim or share > 1:
        share_of = f"partial_rotary_factor {share} of " if share != 1 else ""
        raise InputError(f"config.json: {share_of}{field} {size} must be even: rotary embedding turns pairs")
    return rope


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """Turns pairs of the first `dim` numbers of float32 x [B, T, heads, H] by positions [B, T] times frequencies."""
    return turned(x, *cos_and_sin(positions, rope), rope)


def cos_and_sin(positions: Array, rope: Rope) -> tuple[Array, Array]:
    """The cosine and the sine of positions [B, T] times frequencies, both times the rope's scale: float32
    [B, T, 1, dim / 2] each."""
    angles = positions[:, :, None, None].astype(jnp.float32) * rope.frequencies()
    return rope.scale * jnp.cos(angles), rope.scale * jnp.sin(angles)


@by_machine
def turned(x: Array, cos: Array, sin: Array, rope: Rope) -> Array:
    """`rotate` of x [B, T, heads, H] by what cos_and_sin gave, which many layers can share."""
    x, rest = jnp.split(x, [rope.dim], axis=-1)
    x1, x2 = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else jnp.split(x, 2, axis=-1)
    # Pairs are not interleaved again: queries and keys are permuted alike, and their dot products stay the same.
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Linear rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """All frequencies are divided by `factor`, for a context so many times as long."""

    factor: float

    def frequencies(self) -> np.ndarray:
        return super().frequencies() / self.factor


ROPES["linear"] = LinearRope


# ---------------------------------------------------------------------------------------------------------------------
# Yarn


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """Frequencies that make fewer than `beta_slow` turns over the original context are divided by `factor`, those that
    make more than `beta_fast` stay. Between the two it interpolates along the number of the pair (Peng et al. 2023,
    "YaRN"). It also scales what turns."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0

    def __post_init__(self):
        if self.rope_theta <= 1:
            raise InputError(f"config.json: rope_theta {self.rope_theta} must exceed 1: yarn divides by its logarithm")

    def frequencies(self) -> np.ndarray:
        def pair_that_turns(times):
            positions_per_radian = self.original_max_position_embeddings / (times * 2 * math.pi)
            return self.dim * math.log(positions_per_radian) / (2 * math.log(self.rope_theta))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        last += 0.001 if first == last else 0
        pairs = np.arange(self.dim // 2, dtype=np.float32)
        kept = 1 - np.clip((pairs - first) / (last - first), 0, 1)
        positions = self.positions_per_radian()
        return 1 / (self.factor * positions) * (1 - kept) + 1 / positions * kept

    @property
    def scale(self) -> float:
        """As in transformers, attention_factor wins over the two mscales."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's factor of queries and of keys for a context `factor` times as long. Scores get its square."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


ROPES["yarn"] = YarnRope


# ---------------------------------------------------------------------------------------------------------------------
# Norm, embedding, vocabulary


@by_machine
def inverse_rms(x: Array, eps: float) -> Array:
    """One over the root mean square of float32 x [.., C] along the last dimension: [.., 1], or repeated, [.., C]."""
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over its root mean square along the last dimension, times weight; float32 inside, x's dtype outside."""
    x32 = x.astype(jnp.float32)
    return (x32 * inverse_rms(x32, eps) * weight.astype(jnp.float32)).astype(x.dtype)


@jax.named_scope("embed")
def embed(tokens: Array, weights: dict, config: Config) -> Array:
    """The embeddings of tokens [B, T]: [B, T, D] in the residual stream's dtype, that of the last norm."""
    return rows_of_tokens(tokens, weights["embedding"], config.hidden_size, weights["norm"].dtype)


def rows_of_tokens(tokens: Array, table: Format, columns: int, dtype: jnp.dtype) -> Array:
    """Rows of a vocabulary-sharded table [V, columns] for tokens [B, T]: [B, T, columns]. Each device looks up the
    tokens that it holds and has zeros for the others; the psum puts them together."""
    local = tokens - jax.lax.axis_index(MODEL_AXES) * table.shape[0]
    is_here = (local >= 0) & (local < table.shape[0])
    # One row more than needed: for a single row, XLA would copy a whole int8 table to another layout.
    index = jnp.pad(jnp.where(is_here, local, 0), ((0, 1), (0, 0)))
    x, scale = jax.tree.map(lambda t: t[index][:-1], table).values_and_scale(jnp.float32)
    x = x if scale is None else x * scale[..., None]
    x = x[..., :columns]  # see Format.width
    return jax.lax.psum(jnp.where(is_here[..., None], x, 0).astype(dtype), MODEL_AXES)


def mask_padding(logits: Array, config: Config) -> Array:
    """logits [B, V] of this device's part of the vocabulary, with MASKED for the rows that only pad the table."""
    ids = jax.lax.axis_index(MODEL_AXES) * logits.shape[1] + jnp.arange(logits.shape[1])
    return jnp.where(ids < config.vocab_size, logits, MASKED)


# ---------------------------------------------------------------------------------------------------------------------
# Products


def einsum(subscripts: str, a: Array, b: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """jnp.einsum with sums in `dtype`, and without bf16 or tf32 passes if the operands are float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)


def linear(x: Array, w: Format, bias: Array | None = None) -> Array:
    """x [..., C] times w [O, C], or a wider w (see Format.width), plus bias [O]: float32 [..., O]."""
    multiply = PRODUCTS.get((platform(), type(w)), product)
    y = multiply(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def product(x: Array, w: Format) -> Array:
    """x [B, C] times w [O, C], for all machines and formats: float32 [B, O]."""
    values, scale = w.values_and_scale(x.dtype)
    y = einsum("bc,oc->bo", w.in_order(padded(x, w)), values)
    return y if scale is None else y * scale


def padded(x: Array, w: Format, rows: int = 1) -> Array:
    """x [B, C] with zeros up to the columns of w, and up to `rows` rows."""
    return jnp.pad(x, ((0, max(rows - len(x), 0)), (0, w.shape[-1] - x.shape[1])))


# ---------------------------------------------------------------------------------------------------------------------
# Gate and up


@by_machine
def linear_halves(x: Array, w: Format) -> tuple[Array, Array]:
    """The two halves of linear's output."""
    return tuple(jnp.split(linear(x, w), 2, axis=-1))


# ---------------------------------------------------------------------------------------------------------------------
# Exchange between devices


@by_machine
def exchange(x: Array, R: int, finish=lambda y: y) -> Array:
    """R consecutive devices of MODEL_AXES send blocks to one another. Returns finish(y), where y [R, .., W] has a block
    from each. A device sends each of its own blocks x [I, .., W] to R / I consecutive ones: with I = 1 one to all, with
    I = R one to each. On TPUs one kernel does all this for few numbers."""
    groups, blocks = sharer_groups(R), x.reshape(len(x), -1, x.shape[-1])  # XLA for TPUs lays out few dimensions well
    if len(x) == 1:
        y = jax.lax.all_gather(blocks[0], MODEL_AXES, axis_index_groups=groups)
    else:
        y = jax.lax.all_to_all(jnp.repeat(blocks, R // len(x), axis=0), MODEL_AXES, 0, 0, axis_index_groups=groups)
    return finish(y.reshape(R, *x.shape[1:]))


# ---------------------------------------------------------------------------------------------------------------------
# Attention in plain JAX


# The score of a slot that is not attended to, the logit of a token that does not exist. It is finite, so that a block
# with nothing else gives no NaN: once a real score arrives, what the block added is multiplied by exp(MASKED - m) = 0.
MASKED = -1e30

CACHE_SPEC = P("dp", MODEL_AXES)  # rows over dp; kv heads, or what devices share of a cache, over ep x tp
FEW = 8  # a step of up to so many tokens a row is a decode step, and takes all rows
PREFILL_PIECE = 1024  # the most tokens of a prompt in one step, which reads each weight once for all of them


class Mask(NamedTuple):
    """Which of the tokens up to its own a token attends to, by default all; and what bounds their scores."""

    window: int | None = None  # the last so many tokens, its own among them
    chunk: int | None = None  # those of its own chunk of so many tokens
    softcap: float | None = None  # how far from 0 scores may be: see softcapped
    chosen: Array | None = None  # [B, T, S]: 0 where a new token must not see a slot; kernels may have other forms

    @property
    def reach(self) -> int | None:
        """How many tokens a token sees at most, with its own; None if all."""
        return self.window or self.chunk

    def first_seen(self, positions: Array) -> Array:
        """The first position that tokens at `positions` attend to."""
        if self.chunk:
            return positions - jax.lax.rem(positions, self.chunk)
        return jnp.maximum(positions - (self.window - 1), 0) if self.window else jnp.zeros_like(positions)

    def is_attended(self, keys: Array, queries: Array) -> Array:
        """Whether queries at some positions see keys at others, in shapes that broadcast."""
        seen = keys <= queries
        return seen & (keys >= self.first_seen(queries)) if self.reach else seen

    def wraps(self, slots: int, T: int) -> bool:
        """Whether the cache is a ring for a step of T tokens, with position p of a row in slot p % slots. It is if
        there is a window or a chunk, and slots enough that no new token overwrites one that another new token sees.
        Else position p is in slot p, and a position beyond the last slot is not stored."""
        return bool(self.reach) and slots >= self.reach + T - 1


class Span(NamedTuple):
    """Which tokens a step takes: T consecutive ones of each of B rows, on each device of dp."""

    positions: Array  # int32 [B, T]
    places: Array | None  # int32 [B]: the rows of the cache where these rows are; None: all, in order
    known: Array | None  # int32 [B]: how many of the T tokens are known; drafts and padding follow. None: all
    batch: int  # rows of the cache
    R: int  # devices that share what the cache has of a row


def cache_slots(tokens: int) -> int:
    """The slots to allocate for `tokens`, so that large blocks divide them: the next multiple of 256 or, beyond 2,048,
    of an eighth of the next power of two."""
    unit = max(256, power_of_two(tokens) // 8)
    return ceil_div(tokens, unit) * unit


def softcapped(x: Array, cap: float | None) -> Array:
    """x within `cap` of 0, by a tanh (Bello et al. 2016), or x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


@by_machine
def query_key_product(q: Array, k: Array) -> Array:
    """q [B, K, A, M, H] times k [B, K, S, H]: float32 [B, K, A, M, S]."""
    return einsum("bkamh,bksh->bkams", q, k)


def attention_with_sum(q: Array, cache: tuple[Format, Format], seen: Array, softcap: float | None):
    """Attention of queries to a cache, both as in attend_to_stored. `seen` bool [B, M, S] says which slots a query
    sees. Returns the output, float32 [B, K, A, M, W], and the log-sum-exp of the scores, float32 [B, K, A, M, 1]."""

    def products(q, k):
        keys, scale = k.values_and_scale(q.dtype)
        scores = query_key_product(q.astype(keys.dtype), keys)
        return scores if scale is None else scores * scale[:, :, None, None]

    (first, second), split = cache, cache[0].shape[-1]
    scores, values = products(q[..., :split], first), second
    if split < q.shape[-1]:  # then the first side is the values too
        scores, values = scores + products(q[..., split:], second), first
    scores = jnp.where(seen[:, None, None], softcapped(scores, softcap), MASKED)
    values, scale = values.values_and_scale(q.dtype)
    m = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - m)
    l = jnp.sum(p, axis=-1, keepdims=True)
    p = p / l if scale is None else p / l * scale[:, :, None, None]
    return einsum("bkams,bksw->bkamw", p.astype(values.dtype), values), m + jnp.log(l)


def merged(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Softmax outputs over some sets of keys as one over all: pairs of an output and the log-sum-exp of its scores."""
    log_sum_exp = functools.reduce(jnp.logaddexp, [each for _, each in parts])  # logsumexp takes TPUs longer
    return sum(out * jnp.exp(each - log_sum_exp) for out, each in parts), log_sum_exp


def joined(parts: Array) -> Array:
    """`merged` of n `parts` [n, .., W + 1]. Each, and the result, is an output with its log-sum-exp beside it."""
    return jnp.concatenate(merged(*((part[..., :-1], part[..., -1:]) for part in parts)), axis=-1)


def over_blocks(attend, first: Array, last: Array, shape) -> tuple[Array, Array]:
    """attend(i), an output of this shape and the log-sum-exp of its scores, merged over the blocks i from `first` to
    `last`."""
    nothing = jnp.zeros(shape), jnp.full((*shape[:-1], 1), MASKED)  # adds nothing to what it is merged with
    return jax.lax.fori_loop(first, last + 1, lambda i, state: merged(state, attend(i)), nothing)


@by_machine
def attend_to_stored(q, cache, starts, places, mask: Mask, T: int, R=1, run=1) -> Array:
    """Causal attention of T tokens a row over this device's slots, where they are stored already.

    Queries are [B, K, A, M, H]. Along M, `run` neighbours are query heads of one token, then come those of the next.
    After T tokens it begins again, with the heads of another device. So the m-th is of the token at position starts [B]
    + m // run % T. Position p of a row is in slot p // R of device p % R of the R that share its tokens; if the cache
    is a ring, modulo its slots. The rows are those at `places` [B] of the cache, or all (None, for few tokens).

    The cache is keys [.., K, S, H] and values [.., K, S, W]. With latent attention queries are wider than its first
    side. Then both sides are keys: the first columns of a query are for the first side, the rest for the second. The
    first side is the values too.

    Returns float32 [B, K, A, M, W + 1], side by side the output and the log-sum-exp of the scores. If a query sees no
    key, this is MASKED, and its output means nothing.
    """
    M, S = q.shape[3], cache[0].shape[2]
    cache = tuple(cache) if places is None else jax.tree.map(lambda x: x[places], tuple(cache))
    tokens = jnp.arange(M) // run % T  # of each query
    keys = jnp.arange(S)[None] * R + shard_index(R)
    if mask.wraps(R * S, T):  # behind the slot of the last token, a ring holds what was stored a round before
        last = starts[:, None] + T - 1
        keys += last - last % (R * S)
        keys = jnp.where(keys > last, keys - R * S, keys)
    seen = mask.is_attended(keys[:, None], (starts[:, None] + tokens)[:, :, None])
    if mask.chosen is not None:
        seen &= mask.chosen[:, tokens] != 0
    return jnp.concatenate(attention_with_sum(q, cache, seen, mask.softcap), axis=-1)


def as_stored(new: LayerCache, cache: LayerCache) -> LayerCache:
    """New tokens, arrays that are as wide as the cache already, in its format."""
    return jax.tree.map(lambda side, x: side.encode(x), cache, new, is_leaf=lambda side: isinstance(side, Format))


@by_machine
def store(cache: LayerCache, new: LayerCache, starts, places, mask: Mask, R: int, is_own=None) -> LayerCache:
    """`cache` with this device's share of the tokens `new` [B, K, T, ..], from positions starts [B] on, of the rows at
    `places` [B] of the cache, or all (None, for few tokens). T is at most FEW, or a multiple of R. `is_own` bool [B]
    says which rows this device holds (None: all)."""
    S, T = cache[0].shape[2], new[0].shape[2]
    positions = starts[:, None] + jnp.arange(T)
    slots = positions // R % S if mask.wraps(R * S, T) else positions // R
    if R > 1:  # what another device stores has a slot beyond the last one, and is dropped
        slots = jnp.where(positions % R == shard_index(R), slots, S)
    if is_own is not None:
        slots = jnp.where(is_own[:, None], slots, S)
    rows = (jnp.arange(len(starts)) if places is None else places)[:, None]

    def stored(x, n):
        x = x.at[rows, :, slots].set(n.swapaxes(1, 2), mode="drop")
        # Row-major: for a single row, XLA for GPUs would copy a whole cache to another layout, twice a step.
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(stored, cache, as_stored(new, cache))


def store_and_attend(q, new: LayerCache, cache: LayerCache, starts, places, mask: Mask, T: int, R: int, run: int):
    """Stores the tokens `new` [B, K, T, ..], then has each attend to itself and those before it. With T up to FEW they
    are of all rows, and only then is `run` used. Args and result as in attend_to_stored. Returns the cache too."""
    if T > FEW:
        places = jnp.arange(len(q)) if places is None else places
        cache = store(cache, new, starts, places, mask, R)
        return attend_to_stored(q, cache, starts, places, mask, T, R), cache
    if platform() == "tpu":
        return decode_kernel(q, new, cache, starts, mask=mask, T=T, R=R, run=run)
    cache = store(cache, new, starts, None, mask, R)
    return attend_to_stored(q, cache, starts, None, mask, T, R, run=run), cache


# ---------------------------------------------------------------------------------------------------------------------
# Attention over heads in plain JAX


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, K, S, H] each, position p of a row in its slot p, or p % S if it is a ring.

    If R devices share a kv head, device r of them holds the positions p with p % R == r, in slot p // R. (K is then 1
    on a device, and X in the whole array.)
    """

    k: Format
    v: Format


def read_heads(cls: type, config: dict) -> dict:
    """read_fields, with the heads: by default N kv heads, and a head_dim of hidden_size / N."""
    given = read_fields(cls, config)
    heads = given["num_attention_heads"]
    given = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads} | given
    if heads % (kv_heads := given["num_key_value_heads"]):
        raise InputError(f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    return given


def cached_attention(q, k, v, cache: LayerCache, span: Span, mask: Mask, sinks=None) -> tuple[Array, LayerCache]:
    """Causal attention of the tokens of `span`, over all positions up to theirs: stores their keys and values, then
    attends. q [B, T, N, H] is scaled already; k and v are float32 [B, T, K, H]. `sinks` float32 [N], if any, add a
    logit without a value to each head's softmax, so that a head can attend to nothing (as in Xiao et al. 2023,
    "attention sinks"). Returns the attention output [B, T, N H], and the cache.

    Where R devices share a kv head, each attends to its own slots, with the query heads of all R. They exchange the
    queries before, and afterwards the outputs with the log-sum-exp of their scores, by which partial softmaxes merge
    (as in Dao et al. 2023, "Flash-Decoding"). So no part of the cache is read, or held, twice.
    """
    (B, T, N, H), K, width, R = q.shape, k.shape[2], cache.k.shape[-1], span.R
    # The cache may be wider than a head (see cache_layout). Zeros there change neither scores nor values.
    q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, width - H))) for a in (q, k, v))
    new = LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2))
    if T <= FEW:  # A x M is 1 x (R T N / K): all queries of a kv head together
        order, folded = (0, 2, 1, 3, 4), (B, K, 1, -1, width)
    else:  # A x M is (R N / K) x T
        order, folded = (0, 2, 3, 1, 4), (B, K, -1, T, width)
    q = q.reshape(B, T, K, N // K, width).transpose(order)[None]
    q = exchange(q, R) if R > 1 else q  # [R, B, K, ..]: each device sends its block to all
    q = jnp.moveaxis(q, 0, 2)
    starts = span.positions[:, 0]
    out, cache = store_and_attend(q.reshape(folded), new, cache, starts, span.places, mask, T, R, run=N // K)
    if R > 1:
        out = exchange(jnp.moveaxis(out.reshape(*q.shape[:5], -1), 2, 0), R, joined)
    out, log_sum_exp = out[..., :-1], out[..., -1:]
    of_heads, back = (B, K, *q.shape[3:5], -1), np.argsort(order)
    out, log_sum_exp = (x.reshape(of_heads).transpose(back) for x in (out, log_sum_exp))  # [B, T, K, N / K, ..]
    if sinks is not None:
        out = out * jax.nn.sigmoid(log_sum_exp - sinks.reshape(*out.shape[2:4], 1))
    return out[..., :H].astype(q.dtype).reshape(B, T, N * H), cache


# ---------------------------------------------------------------------------------------------------------------------
# The cache of heads


def abstract_cache(
    config: Config, mesh: Mesh, batch: int, max_seq_len: int, dtype: jnp.dtype, quantize: str | None = None, drafts=0
):
    """The KV cache as a list of LayerCache of jax.ShapeDtypeStructs, for rows of `max_seq_len` tokens, rounded up. A
    layer with a window or chunks holds no more than that and a piece of prefill: it is a ring then. Dtype and width are
    as cache_layout has them, the format is FORMATS[quantize]. `drafts` are for states, which need room for them."""
    X, sharding = model_shards(mesh), NamedSharding(mesh, CACHE_SPEC)
    H, dtype = cache_layout(config.head_dim, dtype, mesh)

    def layer_cache(i):
        reach = config.mask(i).reach
        tokens = min(max_seq_len, reach + PREFILL_PIECE) if reach else max_seq_len
        slots = cache_slots(ceil_div(tokens, cache_sharers(config, X)))
        shape = (batch, X * ceil_div(config.num_key_value_heads, X), slots, H)
        side = FORMATS[quantize].declare(shape, dtype)
        side = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), side)
        return LayerCache(side, side)

    layers = config.num_hidden_layers + getattr(config, "uses_extra_layer", False)
    return [layer_cache(i) for i in range(layers)]


def cache_sharers(config: Config, shards: int) -> int:
    """R, the number of devices that share a kv head, of `shards` devices that share a layer."""
    return sharers(config.num_key_value_heads, shards)


def tokens_held(cache: list[LayerCache], config: Config, shards: int) -> list[int]:
    """How many tokens of a row each layer's cache can keep. A ring keeps as many as it has slots, and a longer row
    overwrites its first tokens there. Without a window or a chunk it is math.inf: nothing is overwritten."""
    slots = [cache_sharers(config, shards) * layer.k.shape[2] for layer in cache]
    return [n if config.mask(i).reach else math.inf for i, n in enumerate(slots)]


def cache_bytes_read(cache: list[LayerCache], lengths: list[float], config: Config) -> float:
    """Bytes of the cache that a decode step has to read, on all devices, for rows of these lengths."""
    read = 0.0
    for i, layer in enumerate(cache):
        window, chunk, *_ = config.mask(i)
        tokens = sum((length - 1) % chunk + 1 if chunk else min(length, window or length) for length in lengths)
        batch, heads, slots, _ = layer.k.shape
        room = batch * heads * slots / config.num_key_value_heads  # in tokens
        read += stored_bytes(layer) * tokens / room
    return read


def split_heads(qkv: Array, config: Config) -> tuple[Array, Array, Array]:
    """This device's queries [B, T, N, H], keys and values [B, T, K, H] of the product with `qkv`. Devices that share a
    kv head divide its query heads. What does not divide evenly leaves some devices heads of zeros."""
    heads = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)  # [B, T, N + K + K, H]
    K = ceil_div(config.num_key_value_heads, jax.lax.axis_size(MODEL_AXES))
    return jnp.split(heads, [heads.shape[2] - 2 * K, heads.shape[2] - K], axis=2)


# ---------------------------------------------------------------------------------------------------------------------
# Keys with biases


def even_keys(weights: dict, config: Config) -> None:
    """Changes `qkv` and its biases in each layer that has some, so that int8 suits its keys; convert.load calls it.

    A key in the cache has one scale. A few large biases, up to 240 in Qwen2.5 0.5B, would fill its range, and leave a
    few steps of it to the other numbers. So the rows that make a number of keys are divided by its size, and those of
    queries multiplied by it. Rotation turns the two numbers of a pair into each other, so they have one size: the root
    of 1 + (b1^2 + b2^2) / 4^2, where b1 and b2 are their biases, and 4 is about what tokens add to these. Rounded
    to a power of two, it changes no bit of a score. Behind a norm, biases would be no measure of a size.
    """
    X, H, rope = model_shards(weights["norm"].sharding.mesh), config.head_dim, config.rope
    K, i = ceil_div(config.num_key_value_heads, X), np.arange(H)
    other = np.where(i < rope.dim, i ^ 1 if rope.interleaved else (i + rope.dim // 2) % rope.dim, i)  # of a pair

    def even(qkv, biases):
        heads = biases.astype(jnp.float32).reshape(X, -1, H)  # of each device
        q, k, v = jnp.split(heads, [heads.shape[1] - 2 * K, heads.shape[1] - K], axis=1)
        size = jnp.sqrt(1 + (k**2 + k[..., other] ** 2) / 4**2)
        size = jax.lax.reduce_precision(size, exponent_bits=8, mantissa_bits=0)
        factors = jnp.repeat(size, q.shape[1] // K, axis=1), 1 / size, jnp.ones_like(v)
        factors = jnp.concatenate(factors, axis=1).reshape(-1)
        return with_rows_times(qkv, factors), (biases * factors).astype(biases.dtype)

    for w in (*weights["layers"], weights.get("extra", {})):
        if "qkv_bias" in w and "k_norm" not in w:
            arrays = w["qkv"], w["qkv_bias"]
            shardings = jax.tree.map(lambda x: x.sharding, arrays)
            w["qkv"], w["qkv_bias"] = jax.jit(even, out_shardings=shardings)(*arrays)


def with_rows_times(w: Format, factors: Array) -> Format:
    """A matrix [O, C] whose rows are multiplied by powers of two, [O]."""
    if isinstance(w, Plain):
        return Plain((w.values * factors[:, None]).astype(w.values.dtype))
    scale = w.scale * factors if w.scale.ndim == 1 else w.ordered(w.ordered(w.scale) * factors[:, None])
    return dataclasses.replace(w, scale=scale.astype(w.scale.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Keys behind a norm


def even_norms(weights: dict, config: Config) -> None:
    """Changes `q_norm` and `k_norm` in each layer that has them, so that int8 suits its keys; convert.load calls it.

    A key in the cache has one scale. A few large weights of its norm, up to 30 in Gemma 3 270M, where the median is 2,
    would fill its range, and leave a few steps of it to the other numbers. So each weight of keys is divided by its
    size, and that of queries multiplied by it; where norms multiply by 1 + weight, this sum is. Rotation turns the two
    numbers of a pair into each other, so they have one size: the root of their mean square, rounded to a power of two.
    A score stays what it was.
    """
    rope, one, i = config.rope, config.norm_offset, np.arange(config.head_dim)
    other = np.where(i < rope.dim, i ^ 1 if rope.interleaved else (i + rope.dim // 2) % rope.dim, i)  # of a pair

    def even(q, k):
        factors = one + k.astype(jnp.float32)
        size = jnp.maximum(jnp.sqrt((factors**2 + factors[other] ** 2) / 2), 2**-8)
        size = jax.lax.reduce_precision(size, exponent_bits=8, mantissa_bits=0)
        return ((one + q) * size - one).astype(q.dtype), (factors / size - one).astype(k.dtype)

    for w in (*weights["layers"], weights.get("extra", {})):
        if "k_norm" in w:
            q, k = w["q_norm"], w["k_norm"]
            w["q_norm"], w["k_norm"] = jax.jit(even, out_shardings=(q.sharding, k.sharding))(q, k)


# ---------------------------------------------------------------------------------------------------------------------
# Experts in plain JAX


@dataclasses.dataclass(frozen=True)
class ExpertWeight(Weight):
    """Matrices, or vectors, of `experts`, stacked along a first dimension, which ep splits; so only tp splits each one.

    A part's name with `{}` stands for one tensor per expert. A name without it is a packed tensor of all.
    """

    experts: int = 1

    def axes(self):
        return super().axes()[1:]

    def is_packed(self) -> bool:
        """Whether the matrices, or vectors, of all experts are one tensor."""
        return not any("{}" in name for part in self.parts for name in part.tensors)

    def stacked(self, shape):
        return (self.experts, *shape)

    def tensors(self):
        of_one = super().tensors().items()
        if self.is_packed():
            return {name: self.stacked(shape) for name, shape in of_one}
        return {name.format(e): shape for e in range(self.experts) for name, shape in of_one}

    def spec(self):
        return P(MODEL_AXES[0], *super().spec())

    def abstract(self, mesh, dtype):
        """As of Weight. Raises InputError if the devices along ep cannot hold as many experts each."""
        if self.experts % mesh.shape["ep"]:
            raise InputError(f"ep = {mesh.shape['ep']} does not divide the {self.experts} experts; choose a divisor")
        return super().abstract(mesh, dtype)


def of_experts(experts: int, weight: Weight) -> Weight:
    """`weight`, that of one expert, stacked for all; with 0 experts as it is. A packed tensor's name has no suffix."""
    if not experts:
        return weight
    stacked = ExpertWeight(**vars(weight), experts=experts)
    return dataclasses.replace(stacked, suffix="") if stacked.is_packed() else stacked


@jax.named_scope("experts")
@by_machine
def experts(x, ids, scores, w_gate_up, w_down, activate, gate_up_bias: Array | None = None) -> Array:
    """What this device's experts, and its columns of them, contribute to the rows that chose them: float32 [B, D], to
    be summed over ep x tp.

    Args: x [B, D]; ids int32 [B, k], the experts chosen, counted over all devices; scores float32 [B, k]; w_gate_up
    [E, 2F, D], gate rows before up rows; w_down [E, D, F]; activate(gate, up, score), which gives float32 [B, F] for
    gate and up [B, F] of one expert and the scores [B, 1] of its rows, 0 for one that did not choose it; gate_up_bias
    float32 [E, 2F], if there is one.

    B counts tokens here, rows times T. A pair is a token and an expert that it chose. An expert that no token chose is
    not read. Here, one that is chosen is multiplied with all tokens, and adds nothing to those that did not choose it.
    """
    ids = local_ids(ids, E := w_down.shape[0])

    def add(e, out):
        gate_up, down, bias = jax.tree.map(lambda a: a[e], (w_gate_up, w_down, gate_up_bias))
        gate, up = jnp.split(linear(x, gate_up, bias), 2, axis=-1)
        score = jnp.sum(jnp.where(ids == e, scores, 0), axis=1, keepdims=True)
        return out + linear(activate(gate, up, score).astype(x.dtype), down)

    def visit(e, out):
        return jax.lax.cond(jnp.any(ids == e), add, lambda e, out: out, e, out)

    return jax.lax.fori_loop(0, E, visit, jnp.zeros((len(x), w_down.shape[1]), jnp.float32))


def local_ids(ids: Array, E: int) -> Array:
    """`ids`, which are counted over all devices, as this one counts its E experts: E for one on another device."""
    ids = ids - jax.lax.axis_index("ep") * E
    return jnp.where((ids >= 0) & (ids < E), ids, E)


def divide_tokens(x: Array) -> Array:
    """This device's share [B T / ep, D] of the residual stream x [B, T, D], so that devices along ep do not all compute
    the same norms and residuals (as in Korthikanti et al. 2022, "sequence parallelism"). In decoding, or if ep does not
    divide the tokens, each device has all of it, [1, B T, D]. Along tp nothing is divided: XLA for TPUs turns a
    reduce-scatter among many chips into an all-reduce."""
    (B, T, D), ep = x.shape, jax.lax.axis_size("ep")
    if ep == 1 or T <= FEW or B * T % ep:
        return x.reshape(1, -1, D)
    share = B * T // ep
    return jax.lax.dynamic_slice_in_dim(x.reshape(-1, D), jax.lax.axis_index("ep") * share, share)


def all_tokens(x: Array) -> Array:
    """All tokens [B T, D] of a residual stream that is divided, or x [1, B T, D] that is not."""
    return x if x.ndim == 3 else jax.lax.all_gather(x, "ep", tiled=True)


def summed(parts: Array, x: Array) -> Array:
    """The sums over ep x tp of `parts`, which have all tokens: those of this device's tokens, in the shape and dtype of
    x, the residual stream to which they are to be added."""
    parts = parts.astype(x.dtype).reshape(-1, x.shape[-1])
    if x.ndim == 3:
        return jax.lax.psum(parts, MODEL_AXES)[None]
    return jax.lax.psum(jax.lax.psum_scatter(parts, "ep", tiled=True), "tp")


# ---------------------------------------------------------------------------------------------------------------------
# Routing in plain JAX


def check_routing(config: Config, eligible: int) -> None:
    """Raises InputError if a token cannot choose `num_experts_per_tok` of so many experts."""
    if (k := config.num_experts_per_tok) > eligible:
        raise InputError(f"config.json: num_experts_per_tok {k} exceeds the {eligible} experts that a token can choose")


@by_machine
def chosen_experts(scores: Array, choice: Array, config: Config) -> tuple[Array, Array]:
    """The k experts whose float32 choice [B, E] is highest, and the weights of their outputs, [B, k] each."""
    highest, ids = jax.lax.top_k(choice, config.num_experts_per_tok)
    return ids, weighed(highest if choice is scores else jnp.take_along_axis(scores, ids, axis=1), config)


# ---------------------------------------------------------------------------------------------------------------------
# Reading config.json


COUNTS = {  # integers with other bounds than 1 to 2**31 - 1: some may be 0, layers and experts are listed one by one
    "num_hidden_layers": range(1, 2**16), "n_layer": range(1, 2**16),
    "first_k_dense_replace": range(2**16), "max_window_layers": range(2**16),
    "num_kv_shared_layers": range(2**16), "hidden_size_per_layer_input": range(2**16),
    "num_experts": range(2**12), "num_local_experts": range(1, 2**12), "n_routed_experts": range(1, 2**12),
}  # fmt: skip


def check_supported(**features: tuple[object, tuple]) -> None:
    """Each feature is a pair (value, supported values). Raises InputError if a value is not among them."""
    for name, (value, supported) in features.items():
        if value not in supported:
            only = ", ".join(map(str, supported))
            raise InputError(f"config.json: {name} {value!r:.40} is not supported, only {only}")


def read_fields(cls: type, given: dict) -> dict:
    """Those of `given` that are plain fields of the dataclass `cls`, in their types; null counts as absent.

    Raises InputError for a value that such a field cannot have, and for a missing one that has no default.
    """
    plain = (bool, int, float, str, int | None)
    kinds = {name: kind for name, kind in get_type_hints(cls, globals()).items() if kind in plain}
    given = {name: value for name, value in given.items() if name in kinds and value is not None}
    for name, value in given.items():
        if not is_valid(value, kinds[name], name):
            raise InputError(f"config.json: {name} cannot be {value!r:.40}")
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in given:
            raise InputError(f"config.json: {field.name} is missing")
    return {name: float(value) if kinds[name] is float else value for name, value in given.items()}


def is_valid(value: object, kind: type, name: str) -> bool:
    """Whether a value of a JSON file can be a field of type `kind`. Numbers are positive unless COUNTS has a 0."""
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind is float:
        return type(value) in (int, float) and 1e-30 < value < 1e30
    return type(value) is int and value in COUNTS.get(name, range(1, 2**31))  # isinstance would take a bool


# ---------------------------------------------------------------------------------------------------------------------
# Lists in config.json


def read_list(config: dict, name: str, allowed: Collection, default: Collection, least: int = 0) -> tuple:
    """A list of config.json, of `least` entries at least, which are all among `allowed`."""
    values = config.get(name)
    if values is None:
        return tuple(default)
    kind = type(allowed[0])  # True does not pass for 1
    if not isinstance(values, list) or any(type(value) is not kind or value not in allowed for value in values):
        raise InputError(f"config.json: {name} cannot be {values!r:.40}")
    if len(values) < least:
        raise InputError(f"config.json: {name} has {len(values)} entries for {least} layers")
    return tuple(values)


# ---------------------------------------------------------------------------------------------------------------------
# Attention on TPUs
#
# A Pallas kernel is the program of a TPU core. It runs once for each step of a grid, the last index fastest. Arguments
# are references: x[...] reads, and x[...] = y writes. A BlockSpec says which block of an array a step has in the core's
# fast memory, VMEM. A block that stays the same is not fetched again, and one of an output is written out when another
# takes its place. Scratch memory keeps what it has between steps. pl.when(condition)(f) calls f if the condition holds.
#
# The kernel here is for few new tokens, and stores them too; the layout of a cache on TPUs is made for it. fast.py has
# one for many, which are stored already. Both go over the slots of a row in blocks, and fold one after another into a
# running softmax, so that scores stay in VMEM (as in Dao et al. 2022, "FlashAttention").


def kernel_cost(flops: int, read) -> pl.CostEstimate:
    """The cost, for the compiler, of a kernel that reads the arrays of the pytree `read`."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
    return pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0)


class Blocks(NamedTuple):
    """The positions of a row in blocks of `size` slots on each of R devices: block i begins with position i R size. In
    a ring of n blocks, i goes on beyond n, and block i is stored as i % n."""

    size: int
    slots: int  # of the cache
    R: int  # devices that share the row
    mask: Mask
    wraps: bool  # whether the cache is a ring

    # No dividend here is negative, so lax.div, which truncates, equals //, and saves the instructions of rounding down.
    def holding(self, position: Array) -> Array:
        """The block that holds a position, the last one if the position has no slot. (A position below 0 is of a token
        before all keys that a caller gives, which sees none of them.)"""
        stored = position if self.wraps else jnp.clip(position, 0, self.R * self.slots - 1)
        return jax.lax.div(stored, self.R * self.size)

    def seen(self, position: Array, tokens: int) -> tuple[Array, Array]:
        """The first and the last block that `tokens` consecutive tokens see, the first of them at `position`."""
        last = self.holding(position + tokens - 1)
        return jnp.minimum(jax.lax.div(self.mask.first_seen(position), self.R * self.size), last), last

    def most_seen(self, tokens: int) -> int:
        """How many blocks `tokens` consecutive tokens see at most."""
        blocks, reach = self.slots // self.size, self.mask.reach
        most = (reach + tokens - 2) // (self.R * self.size) + 2 if reach else blocks
        return most if self.wraps else min(most, blocks)

    def is_whole(self, i: Array, position: Array, tokens: int) -> Array:
        """Whether each of `tokens` consecutive tokens, the first of them at `position`, sees all of block i."""
        is_whole = (i + 1) * self.size * self.R <= position + 1
        if self.mask.reach:
            is_whole &= i * self.size * self.R >= self.mask.first_seen(position + tokens - 1)
        return is_whole if self.mask.chosen is None else is_whole & False  # some slots of a block are chosen

    def positions(self, i: Array) -> Array:
        """The positions of block i on this device, int32 [1, size]."""
        slots = i * self.size + jax.lax.broadcasted_iota(jnp.int32, (1, self.size), 1)
        return slots * self.R + shard_index(self.R)

    def spec(self, x: Array, heads: int, at) -> pl.BlockSpec:
        """Blocks of the numbers [B, K, slots, H], of so many heads, or of the scales [B, K, slots], of all heads.
        at(..) is the row, the head and the block for a step of the grid."""

        def index(*step):
            row, head, i = at(*step)
            i = jax.lax.rem(i, self.slots // self.size) if self.wraps else i
            return (row, head, i, 0) if x.ndim == 4 else (row, 0, i)

        return pl.BlockSpec((1, heads, self.size, x.shape[3]) if x.ndim == 4 else (1, x.shape[1], self.size), index)


def softmax_state(heads: int, queries: int, block: int, width: int) -> list[pltpu.VMEM]:
    """Memory for a running softmax: of each query, m, the largest score so far; l, the sum of exp(score - m); and acc,
    the sum of exp(score - m) times values. m and l are as wide as scores are, up to 128 lanes. m repeats one number,
    and l has sums of some keys each: to add up lanes is slow, and is done once, at the end."""
    lanes = min(block, 128)
    return [pltpu.VMEM((heads, queries, columns), jnp.float32) for columns in (lanes, lanes, width)]


def begin_softmax(m, l, acc) -> None:
    m[...] = jnp.full(m.shape, MASKED)
    l[...] = jnp.zeros(l.shape)
    acc[...] = jnp.zeros(acc.shape)


def fold(h: int, scales, q, cache, seen: Array | None, softcap: float | None, m, l, acc) -> None:
    """Folds a block of the cache [1, heads, slots, ..], as in attend_to_stored, into the running softmax of the queries
    q [1, heads, A, M, H] of head h. `scales` selects its scales, since a block has those of all heads; `seen` [M or 1,
    slots] says which keys its queries see (None: all)."""

    def side(x):
        values, *scale = jax.tree.leaves(x)
        return values[0, h].astype(q.dtype), scale[0][0, scales] if scale else 1.0

    (first, first_scale), (second, second_scale) = map(side, cache)
    (A, M, H), split = q.shape[2:], first.shape[1]
    pieces = first.shape[0] // m.shape[2]  # of as many keys as m has lanes
    queries = q[0, h].reshape(A * M, H)
    scores = einsum("th,sh->ts", queries[:, :split], first) * first_scale
    if split < H:
        scores += einsum("th,sh->ts", queries[:, split:], second) * second_scale
        second, second_scale = first, first_scale
    scores = softcapped(scores, softcap)
    if seen is not None:
        scores = jnp.where(seen[None], scores.reshape(A, M, -1), MASKED).reshape(scores.shape)
    new_m = jnp.maximum(m[h], jnp.max(scores, axis=-1, keepdims=True))
    alpha, p = jnp.exp(m[h] - new_m), jnp.exp(scores - jnp.tile(new_m, (1, pieces)))
    m[h] = new_m
    l[h] = l[h] * alpha + sum(jnp.split(p, pieces, axis=1))
    acc[h] = acc[h] * alpha[:, :1] + einsum("ts,sw->tw", (p * second_scale).astype(q.dtype), second)


def finish_softmax(out, m, l, acc) -> None:
    """Writes the outputs and, beside them, the log-sum-exps of the scores to `out` [1, heads, A, M, W + 1]."""
    total, W = jnp.sum(l[...], axis=-1, keepdims=True), acc.shape[-1]
    out[0, :, :, :, :W] = (acc[...] / total).reshape(*out.shape[1:4], W)
    out[0, :, :, :, W:] = (m[:, :, :1] + jnp.log(total)).reshape(*out.shape[1:4], 1)


def decode_kernel(q, new, cache, starts, *, mask: Mask, T: int, R=1, run=1, block=None, interpret=False):
    """store_and_attend of few tokens as a Pallas kernel for TPUs.

    The grid is (rows of the batch, blocks of keys). All kv heads of a block are fetched at once, since one is too few
    bytes. A block that a row does not see is neither fetched nor computed: its index is mapped to a block that is there
    already. Only blocks at the edge of what a row sees are masked.

    That the kernel stores the new tokens saves launches and, for the scales, a change of layout. A single slot of a
    packed dtype cannot be written, so the tile around it is patched in VMEM, before queries attend to it, and written
    back. If there are several tokens, one more step of the grid writes the second tile that they may reach. The cache
    goes out in the memory that it came in: a row's tile is written after the block that holds it was read, and other
    rows never read it.

    `block` is by default the power of two of slots that makes at most half a MiB of keys, or 128, or 64 in float32. It
    is cut to a divisor of the slots.
    """
    (B, K, A, M, H), (*_, S, split) = q.shape, cache[0].shape
    W = split if split < H else cache[1].shape[-1]
    itemsize = jax.tree.leaves(cache)[0].dtype.itemsize
    fitting, least = 2**19 // (K * split * itemsize), min(128, 256 // itemsize)
    block = math.gcd(S, block or max(least, power_of_two(fitting + 1) // 2))
    blocks = Blocks(block, S, R, mask, mask.wraps(R * S, T))
    tiles = blocks._replace(size=min(block, 128))  # that are written back
    steps = blocks.most_seen(T) + (T > 1)

    def kernel(starts, q, new, cache, chosen, out, new_cache, *softmax):
        start, n = starts[pl.program_id(0)], pl.program_id(1)
        first, last = blocks.seen(start, T)
        i = jnp.minimum(first + n, last)  # the block of this step
        first_tile, last_tile = tiles.holding(start), tiles.holding(start + T - 1)
        pl.when(n == 0)(lambda: begin_softmax(*softmax))

        def is_here(tile):  # whether it is in the block of this step
            return jax.lax.div(tile, block // tiles.size) == i

        def slots_of(tile):  # of the block
            offset = 0 if tiles.size == block else pl.multiple_of(tile * tiles.size - i * block, tiles.size)
            return pl.ds(offset, tiles.size)

        def patch(tile):  # puts the new tokens into it
            stored = as_stored(jax.tree.map(lambda x: x[...], new), cache)
            for x, token in zip(jax.tree.leaves(cache), jax.tree.leaves(stored), strict=True):
                slots = tile * tiles.size + jax.lax.broadcasted_iota(jnp.int32, (1, K, tiles.size, 1)[: x.ndim], 2)
                patched = x[:, :, slots_of(tile)]
                for j in range(T):
                    is_new = slots * R + shard_index(R) == start + j
                    patched = jnp.where(is_new, token[:, :, j : j + 1], patched)
                x[:, :, slots_of(tile)] = patched

        def write_back(tile):
            for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(new_cache), strict=True):
                y[...] = x[:, :, slots_of(tile)]

        def attend(is_whole):
            offsets = 0
            if T > 1:
                offsets = jax.lax.rem(jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (M, 1), 0), run), T)
            seen = None if is_whole else mask.is_attended(blocks.positions(i), start + offsets)
            if chosen is not None and not is_whole:
                seen &= sum(jnp.where(offsets == j, chosen[0, j : j + 1], 0) for j in range(T)) != 0
            for h in range(K):
                fold(h, slice(h, h + 1), q, cache, seen, mask.softcap, *softmax)

        @pl.when(first + n <= last)
        def visit():
            for tile in (first_tile, last_tile)[:T]:  # of a single token they are the same
                pl.when(is_here(tile))(lambda: patch(tile))
            pl.when(is_here(first_tile))(lambda: write_back(first_tile))
            is_whole = blocks.is_whole(i, start, T)
            pl.when(is_whole)(lambda: attend(True))
            pl.when(~is_whole)(lambda: attend(False))

        @pl.when(n == steps - 1)
        def finish():
            if T > 1:
                write_back(last_tile)
            finish_softmax(out, *softmax)

    def of_row(shape):
        return pl.BlockSpec((1, *shape[1:]), lambda b, *_: (b,) + (0,) * (len(shape) - 1))

    def read(b, n, starts):  # the row, head and block to attend to
        first, last = blocks.seen(starts[b], T)
        return b, 0, jnp.minimum(first + n, last)

    def written(b, n, starts):  # the tile of the first new token, at last that of the last one
        return b, 0, tiles.holding(starts[b] + jnp.where(n == steps - 1, T - 1, 0))

    # Otherwise XLA moves the whole cache to VMEM and back if it fits.
    cache = jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), cache)
    out_shape = *q.shape[:4], W + 1
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(out_shape, jnp.float32),
            jax.tree.map(lambda x: pltpu.HBM(x.shape, x.dtype), cache),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, steps),
            in_specs=[
                of_row(q.shape),
                jax.tree.map(lambda x: of_row(x.shape), new),
                jax.tree.map(lambda x: blocks.spec(x, K, read), cache),
                jax.tree.map(lambda x: blocks.spec(x, K, read), mask.chosen),
            ],
            out_specs=(of_row(out_shape), jax.tree.map(lambda x: tiles.spec(x, K, written), cache)),
            scratch_shapes=softmax_state(K, A * M, block, W),
        ),
        input_output_aliases={4 + i: 1 + i for i in range(len(jax.tree.leaves(cache)))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=kernel_cost(2 * B * K * A * M * S * (H + W), cache),
        interpret=interpret,
        name="ragged_attention",
    )(starts, q, new, cache, mask.chosen)
