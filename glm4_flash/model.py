"""GLM-4.7-Flash inference in JAX: the whole model in one file.

It covers `Glm4MoeLiteForCausalLM` of transformers. Its layer of multi-token prediction is loaded to draft tokens alone.
The file has three parts. "The model" is what makes this a GLM-4.7-Flash: its configuration, its weights, its layers.
"Running it" is the rest in plain JAX: sharding, attention over the cache, int8. "Fast on each machine" is the appendix:
kernels, and what compilers need to be told. The last two consist of blocks that other models have too, with options
that not every model uses. The file needs only jax and numpy; generate.py decodes with it.

Differs from deepseek in: `Config`, `weights_of` and `route`, whose router has sigmoids and a bias in every model.
Differs from llama3 in: `attention` and the cache, which are latent; `feed_forward`, which has experts in most layers,
with `mlp`, `route`, `weighed` and `activation`; and `predict`, with the block "Multi-token prediction".

    config = Config.from_dict(json.loads(Path("config.json").read_text()))
    mesh = make_mesh(tp=jax.device_count())
    weights = ...  # the pytree that abstract_weights(config, mesh, dtype) describes; convert.load reads one
    for tokens in generate(weights, [[1, 2, 3]], config, mesh, max_new_tokens=16):  # of generate.py
        ...

Latent attention (DeepSeek-AI 2024, "DeepSeek-V2"). The cache holds two vectors for each token, which all heads share:
a latent c and a rotary key r. The key of a head is (k_b c, r), and its value is v_b c, where k_b and v_b are the head's
own matrices. Long pieces compute these keys and values. Few tokens do not: q . (k_b c) = (q k_b) . c, so it multiplies
the query by k_b, attends to the latents themselves, and multiplies their weighted sum by v_b.

Some words of JAX. A pytree is nested dicts, lists and tuples of arrays; jax.tree.map applies a function to each array.
Arrays never change: code that stores something returns a new array. A donated argument gives its memory to the result.
jit compiles a function once for each set of shapes, and for each value of its static arguments. Inside it, an array is
traced: it has a shape and a dtype, but no values yet. A ShapeDtypeStruct is an array's shape, dtype and sharding
without the array. A mesh names the axes of a grid of devices, and a PartitionSpec (P) says which of them splits which
dimension of an array. Under shard_map, code sees this device's part of each array. A collective acts among the devices
along the axes that it names: psum adds their arrays (an all-reduce), all_gather stacks them or, with tiled=True,
concatenates them. axis_index is the place of this device along such axes.

Parallelism. A mesh of devices has three axes. `dp` splits the batch. `ep` splits the experts, and `tp` the intermediate
dimension of each. Both together split all other matrices but the router: attention by heads, and MLPs by their
intermediate dimension (Shoeybi et al. 2019, "Megatron-LM"). All device code runs under `jax.shard_map`, and devices
exchange nothing except in the collectives that the code spells out. A decode step has one `psum` in the embedding and
two `all_gather` for the next token, and as many for each draft of the extra layer; each layer has two psums, in
`summed`, and an all_gather of the outputs of `qkv_a`. In prefill the devices along ep divide the tokens of the residual
stream (see `divide_tokens`). The cache has no heads to split: each device holds some of its rows and some of their
tokens. Long pieces collect them in blocks; steps of few tokens exchange queries and outputs (see `exchange`).

Dimension letters, in shapes and einsums. Under shard_map B, N, F, E and V are the sizes on one device.

    B  rows of the batch         D  hidden_size           V  vocab_size
    T  tokens of a row           N  num_attention_heads   F  intermediate_size, or moe_intermediate_size
    C  any contracted dimension  Q  q_lora_rank           X  devices that share a layer, ep x tp
    O  any output dimension      L  kv_lora_rank          R  devices that share a cache
    E  n_routed_experts          H  qk_nope_head_dim      U  qk_rope_head_dim
    k  num_experts_per_tok       W  v_head_dim

Dtypes. Weights, residual stream and cache are bfloat16 by default; `weights_of`, `cache_layout` and `head_dtype` name
the exceptions. Matrices that devices split, and the cache, can be int8 with float32 scales; matrices can be in 4 bits
too (see "Int4"). Products accumulate in float32, and `linear` returns float32. The partial sums that devices add with a
psum are rounded to the residual stream's dtype first, which halves the traffic. Norms, rotary embedding, softmax,
routing and logits are float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator
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
    """The values of config.json that inference needs, under config.json's own names, and a fact of the checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a layer without experts
    moe_intermediate_size: int  # of an expert
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int  # one MLP, this many times as wide as an expert
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0  # 0, in config.json null: queries are not compressed
    mlp_layer_types: tuple[str, ...] = ()  # for each layer "dense" or "sparse", with experts
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.8
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope: Rope | None = None  # from_dict sets it
    rope_interleave: bool = True
    has_extra_layer: bool = False  # in the checkpoint, for multi-token prediction
    uses_extra_layer: bool = False  # to draft tokens: then it is among the weights

    @classmethod
    def from_dict(cls, config: dict, names: Collection[str] = ()) -> Config:
        """Reads the dict of a config.json, as transformers 4 or 5 writes it. The names of the checkpoint's tensors tell
        whether it has an extra layer.

        Raises InputError for a missing or impossible value and, by name, for a feature that is not supported.
        """
        check_supported(
            model_type=(config.get("model_type"), ("glm4_moe_lite",)),
            hidden_act=(config.get("hidden_act", "silu"), ("silu", "swish")),
            scoring_func=(config.get("scoring_func", "sigmoid"), ("sigmoid",)),
            topk_method=(config.get("topk_method", "noaux_tc"), ("noaux_tc",)),
        )
        given = read_fields(cls, {"q_lora_rank": 768} | config)
        interleaved = given.get("rope_interleave", True)
        given["rope"] = read_rope(config, "qk_rope_head_dim", given["qk_rope_head_dim"], interleaved)
        layers = given["num_hidden_layers"]
        default = ["dense"] + ["sparse"] * (layers - 1)
        kinds = read_list(config, "mlp_layer_types", ("dense", "sparse"), default, layers)
        extra = f"model.layers.{layers}.eh_proj.weight"  # no other layer has this tensor
        result = cls(**given | {"has_extra_layer": extra in names}, mlp_layer_types=kinds[:layers])
        check_routing(result, result.n_routed_experts, best=2)
        return result

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of an MLP."""
        return layer >= len(self.mlp_layer_types) or self.mlp_layer_types[layer] == "sparse"


def weights_of(config: Config) -> dict:
    """A pytree of Weight: which tensors of the checkpoint make each array, its shape, and how devices split it.

    A matrix is [output, input], as in the checkpoint. Split by output, each device computes some of the outputs. Split
    by input, each device computes a partial sum of all outputs, and a psum adds the sums. `qkv_a` is one product for
    what all heads share: the compressed query, the latent and the rope key. `gate_up` is one product too: a device
    holds its gate rows, then its up rows. Experts are split over ep, and each like an MLP over tp. The router, which
    every device needs, is whole on each. "Declaring weights" explains Part, by_output, by_input, bias and whole. `k_b`
    and `v_b` expand a latent to each head's key and value. The norms in a layer are float32, in which they are
    computed.
    """
    D, Q, L, U = config.hidden_size, config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    N, H, W, E = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim, config.n_routed_experts
    float32_vector = partial(whole, dtype="float32")

    def layer(i):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"

        def heads(name, width, within=None):
            return Part({f"{attention}.{name}": N * width}, units=N, within=within)

        queries = {f"{attention}.q_a_proj": Q} if Q else {}
        qkv_a = Part(queries | {f"{attention}.kv_a_proj_with_mqa": L + U})
        weights = {
            "attention_norm": float32_vector(f"model.layers.{i}.input_layernorm.weight", D),
            "qkv_a": by_output(D, qkv_a),
            "kv_norm": float32_vector(f"{attention}.kv_a_layernorm.weight", L),
            "q": by_output(Q or D, heads("q_b_proj" if Q else "q_proj", H + U)),
            "k_b": by_output(L, heads("kv_b_proj", H + W, within=(0, H)), per_head=True),
            "v_b": by_output(L, heads("kv_b_proj", H + W, within=(H, H + W)), per_head=True),
            "o": by_input(D, heads("o_proj", W)),
            "mlp_norm": float32_vector(f"model.layers.{i}.post_attention_layernorm.weight", D),
        }
        if Q:
            weights["q_norm"] = float32_vector(f"{attention}.q_a_layernorm.weight", Q)
        if config.attention_bias:
            weights |= {"qkv_a_bias": bias(qkv_a), "o_bias": whole(f"{attention}.o_proj.bias", D)}

        def mlp_of(module, columns, experts=0):
            gate, up, down = (Part({f"{module}.{name}": columns}) for name in ("gate_proj", "up_proj", "down_proj"))
            return by_output(D, gate, up, experts=experts), by_input(D, down, experts=experts)

        if config.has_experts(i):
            F, shared = config.moe_intermediate_size, config.n_shared_experts
            weights["router"] = whole(f"{mlp}.gate.weight", E, D)
            weights["router_bias"] = float32_vector(f"{mlp}.gate.e_score_correction_bias", E)
            weights["shared_gate_up"], weights["shared_down"] = mlp_of(f"{mlp}.shared_experts", shared * F)
            weights["experts_gate_up"], weights["experts_down"] = mlp_of(f"{mlp}.experts.{{}}", F, E)
        else:
            weights["gate_up"], weights["down"] = mlp_of(mlp, config.intermediate_size)
        return weights

    weights = {
        "embedding": by_output(D, Part({"model.embed_tokens": config.vocab_size})),
        "layers": [layer(i) for i in range(config.num_hidden_layers)],
        "norm": whole("model.norm.weight", D),
    }
    if config.uses_extra_layer:
        extra = f"model.layers.{config.num_hidden_layers}"
        weights["extra"] = layer(config.num_hidden_layers) | {
            "embedding_norm": float32_vector(f"{extra}.enorm.weight", D),
            "hidden_norm": float32_vector(f"{extra}.hnorm.weight", D),
            "projection": by_output(2 * D, Part({f"{extra}.eh_proj": D})),
            "norm": whole(f"{extra}.shared_head.norm.weight", D),
        }
    if not config.tie_word_embeddings:
        weights["head"] = by_output(D, Part({"lm_head": config.vocab_size}))
    return weights


def left_out(name: str, config: Config) -> str | None:
    """Why a tensor of the checkpoint is left out on purpose, or None."""
    if name.endswith("rotary_emb.inv_freq"):
        return "computed from config.json"
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return "tied to model.embed_tokens.weight"
    if config.has_extra_layer and name.startswith(f"model.layers.{config.num_hidden_layers}."):
        if not config.uses_extra_layer:
            return "of the layer of multi-token prediction, which only drafts need"
        if name.endswith((".embed_tokens.weight", ".shared_head.head.weight")):
            return "the same as the model's own"
    return None


@jax.named_scope("attention")  # the name in a profiler's trace
def attention(x: Array, w: dict, cache: LayerCache, positions: Array, attend, config: Config):
    """The first half of a layer, on the residual stream x, [1, B T, D] or a share (see divide_tokens), at positions
    [B, T]: norm, attention, residual. Returns the new x and the new cache.

    `attend(q, q_rope, new, cache, positions, w)` is cached_attention; `step` binds its other arguments. q [B, T, N, H]
    and q_rope [B, T, N, U] are scaled already; `new` is the latents [B, T, L] and rotary keys [B, T, U] of these
    tokens, in x's dtype. It returns the attention output float32 [B, T, N, W], and this layer's cache with `new` in it.
    """
    B, T = positions.shape
    Q, L, H, U = config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    eps = 1e-6  # of the norms of latents and compressed queries, whatever rms_norm_eps is

    h = all_tokens(rms_norm(x, w["attention_norm"], config.rms_norm_eps)).reshape(B, T, -1)
    # Each device computes some columns and needs all of them; the last ones may be padding.
    qkv_a = linear(h, w["qkv_a"], w.get("qkv_a_bias")).astype(x.dtype)
    qkv_a = jax.lax.all_gather(qkv_a, MODEL_AXES, axis=2, tiled=True)
    compressed, latent, rope_key, _ = jnp.split(qkv_a, [Q, Q + L, Q + L + U], axis=-1)
    latent = rms_norm(latent, w["kv_norm"], eps)
    rope_key = rotate(rope_key[:, :, None].astype(jnp.float32), positions, config.rope)[:, :, 0]
    if Q:
        h = rms_norm(compressed, w["q_norm"], eps)
    q, q_rope = jnp.split(linear(h, w["q"]).reshape(B, T, -1, H + U) * (H + U) ** -0.5, [H], axis=-1)
    q, q_rope = q.astype(x.dtype), rotate(q_rope, positions, config.rope).astype(x.dtype)
    new = LayerCache(latent, rope_key.astype(x.dtype))
    out, cache = attend(q, q_rope, new, cache, positions, w)
    x = x + summed(linear(out.astype(x.dtype).reshape(B, T, -1), w["o"]), x)
    if config.attention_bias:
        x = x + w["o_bias"]  # after the sum; otherwise it is added X times
    return x, cache


@jax.named_scope("mlp")
def feed_forward(x: Array, w: dict, config: Config) -> Array:
    """The second half of a layer, on x as above: an MLP, or shared experts and those that the router chooses."""
    h = all_tokens(rms_norm(x, w["mlp_norm"], config.rms_norm_eps))
    if "router" in w:
        tokens = h.reshape(-1, h.shape[-1])
        ids, scores = route(linear(tokens, w["router"]), w.get("router_bias"), config)
        routed = experts(tokens, ids, scores, w["experts_gate_up"], w["experts_down"], activation)
        out = mlp(h, w["shared_gate_up"], w["shared_down"]) + routed.reshape(h.shape)
    else:
        out = mlp(h, w["gate_up"], w["down"])
    return x + summed(out, x)


def mlp(x: Array, gate_up: Format, down: Format) -> Array:
    """This device's part of down(silu(gate(x)) up(x)), for x [.., D]: float32 [.., D], to be summed over ep x tp."""
    gate, up = linear_halves(x, gate_up)
    return linear((jax.nn.silu(gate) * up).astype(x.dtype), down)


def route(logits: Array, bias: Array, config: Config) -> tuple[Array, Array]:
    """The experts of each token, int32 [B, k], and the weights of their outputs, float32 [B, k], from the router's
    float32 logits [B, E]. B counts tokens here, and E all experts.

    The sigmoids plus a bias [E] choose the experts, and the sigmoids alone become the weights, see `weighed`
    (DeepSeek-AI 2024, "DeepSeek-V3"). If there are groups of experts, the groups whose two best experts add up to the
    most are eligible.
    """
    scores = jax.nn.sigmoid(logits)
    return chosen_experts(scores, scores + bias, 2, config)


def weighed(scores: Array, config: Config) -> Array:
    """The weights [B, k] of the chosen experts' outputs, from their scores. chosen_experts calls it."""
    if config.norm_topk_prob:
        scores = scores / (jnp.sum(scores, axis=1, keepdims=True) + 1e-20)
    return scores * config.routed_scaling_factor


def activation(gate: Array, up: Array, score: Array) -> Array:
    """silu(gate) * up of an expert, times the score [B, 1] that weighs its output: float32 [B, F]. The next product is
    linear, so the score can be applied before it. `experts` passes score 0 for a row that did not choose the expert."""
    return jax.nn.silu(gate) * up * score


def forward(weights: dict, tokens: Array, positions: Array, cache: list[LayerCache], attend, config: Config):
    """The layers on tokens [B, T] at positions [B, T]: hidden states [B, T, D], not yet normed, and the new cache.

    It is a Python loop, not a jax.lax.scan over stacked weights: the compiler can then fetch the next layer's weights
    ahead, and copies neither weights nor cache. The inner jit has JAX trace `layer` once for each kind of layer.
    """

    @jax.jit
    def layer(x, w, layer_cache):
        x, layer_cache = attention(x, w, layer_cache, positions, attend, config)
        return feed_forward(x, w, config), layer_cache

    x = divide_tokens(embed(tokens, weights, config))
    cache = list(cache)  # the caller's list stays as it is
    for i, w in enumerate(weights["layers"]):
        x, cache[i] = layer(x, w, cache[i])
    return all_tokens(x).reshape(*tokens.shape, -1), cache


@jax.named_scope("head")
def output_logits(weights: dict, x: Array, config: Config) -> Array:
    """The logits of this device's part of the vocabulary, float32 [B, V], for hidden states x [B, D]."""
    x = rms_norm(x, weights["norm"], config.rms_norm_eps)
    return mask_padding(linear(x, weights.get("head", weights["embedding"])), config)


def predict(weights: dict, x: Array, norm: Array, tokens: Array, positions: Array, cache, attend, config: Config):
    """The extra layer, of multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3"). It takes the hidden states x
    [B, T, D] at positions [B, T], the weight of their norm, and the token that follows each, tokens [B, T]. It returns
    hidden states [B, T, D], not yet normed, from which the output head predicts the token after that one, and its new
    cache.

    The reference counts each position one higher. Rotary embedding depends on differences alone.
    """
    w, eps = weights["extra"], config.rms_norm_eps
    embedded = rms_norm(embed(tokens, weights, config), w["embedding_norm"], eps)
    both = jnp.concatenate([embedded, rms_norm(rms_norm(x, norm, eps), w["hidden_norm"], eps)], axis=-1)
    # Each device computes some columns and needs all of them; the last ones may be padding.
    x = jax.lax.all_gather(linear(both, w["projection"]).astype(x.dtype), MODEL_AXES, axis=2, tiled=True)
    x = divide_tokens(x[..., : config.hidden_size])
    x, cache = attention(x, w, cache, positions, attend, config)
    return all_tokens(feed_forward(x, w, config)).reshape(*tokens.shape, -1), cache


# =====================================================================================================================
# Running it
# =====================================================================================================================


# ---------------------------------------------------------------------------------------------------------------------
# Mesh and sharding


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line that names the thing and the remedy."""


def make_mesh(dp: int = 1, ep: int = 1, tp: int = 1, devices: list | None = None) -> Mesh:
    """A mesh (dp, ep, tp) over `devices`, by default all of them. Those along `ep` and `tp` are next to each other,
    since they communicate in every layer: in a TPU's torus, elsewhere on one host as far as it goes."""
    devices = jax.devices() if devices is None else devices
    if dp * ep * tp != len(devices):
        needs = f"dp x ep x tp = {dp} x {ep} x {tp} needs {dp * ep * tp} devices, and there are {len(devices)}"
        raise InputError(f"the mesh {needs}; choose --dp --ep --tp so that their product is that number")
    if devices[0].platform == "tpu":  # jax.make_mesh splits an axis of the torus on v5e alone
        grid = mesh_utils.create_device_mesh((dp, ep, tp), devices, allow_split_physical_axes=True)
    else:  # and it takes each host of GPUs for a slice of its own, which it refuses to join
        grid = np.array(sorted(devices, key=lambda device: device.process_index)).reshape(dp, ep, tp)
    return Mesh(grid, ("dp", *MODEL_AXES), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def model_shards(mesh: Mesh) -> int:
    """X, the number of devices that share each layer."""
    return mesh.shape["ep"] * mesh.shape["tp"]


def sharers(groups: int, shards: int) -> int:
    """R, how many consecutive devices of `shards` share each of these groups, such as kv heads. It divides `shards`."""
    return max(R for R in range(1, max(shards // groups, 1) + 1) if shards % R == 0)


def shard_index(R: int) -> Array | int:
    """Which of the R consecutive devices that share a cache this device is."""
    return 0 if R == 1 else jax.lax.rem(jax.lax.axis_index(MODEL_AXES), R)


def sharer_groups(R: int) -> list[list[int]]:
    """The devices of MODEL_AXES in groups of R consecutive ones, for the axis_index_groups of a collective."""
    return np.arange(jax.lax.axis_size(MODEL_AXES)).reshape(-1, R).tolist()


def sharded(body, mesh: Mesh, weights: dict, config: Config, in_specs: tuple, out_specs: object):
    """`body(weights, ..)` under shard_map. The specs of the weights are those declared: traced arrays have none."""
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


FAST = {}  # (name of a function, platform): what takes its place there
PRODUCTS = {}  # (platform, format): what multiplies there instead of `product`


def platform() -> str:
    """What the devices of the mesh are: "cpu", "tpu" or, whatever else they are, "gpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return "cpu" if device.device_kind == "cpu" else "tpu" if device.device_kind.startswith("TPU") else "gpu"


def by_machine(plain):
    """`plain` or, where FAST has a row for it, what is faster on this machine. (jax.lax.platform_dependent would trace
    all of them.) `plain` says what is computed, and is right everywhere."""

    @functools.wraps(plain)
    def chosen(*arguments, **options):
        return FAST.get((plain.__name__, platform()), plain)(*arguments, **options)

    chosen.plain = plain
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# Number formats


class Format:
    """How a matrix, or a side of the cache, holds its numbers [.., C]: a pytree of arrays. Each format has these
    methods; what stands here is what most of them do."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.values.shape

    @classmethod
    def on(cls, weight: Weight, mesh: Mesh) -> type[Format]:
        """The format in which the devices of a mesh hold a weight that is declared in this one."""
        return cls

    @classmethod
    def declare(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> Format:
        """The format of numbers of a shape, with a ShapeDtypeStruct for each array. `dtype` is that of numbers that are
        not rounded."""
        raise NotImplementedError

    @classmethod
    def width(cls, C: int, weight: Weight, dtype: jnp.dtype, mesh: Mesh) -> int:
        """The input dimension C of a device's part of a weight as it is stored, maybe with zeros beside it."""
        return stored_width(C, weight, jnp.dtype(jnp.int8), mesh)

    def specs(self, spec: P) -> Format:
        """The format with a PartitionSpec for each array, by that of the numbers."""
        return jax.tree.map(lambda array: P(*spec[: len(array.shape)]), self)

    def of(self, x: Array) -> Format:
        """Numbers x [.., C] in this format, with its dtypes."""
        raise NotImplementedError

    def in_order(self, x: Array) -> Array:
        """x [.., C] with its columns in the order in which values_and_scale gives those of the format."""
        return x

    def values_and_scale(self, dtype: jnp.dtype) -> tuple[Array, Array | None]:
        """The numbers [.., C], rounded ones in `dtype`, and the scale [..] by which they are still to be multiplied,
        None where there is none."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Format:
        """Some rows of a matrix."""
        return jax.tree.map(lambda array: array[start:stop], self)

    kernel_columns = 128  # of an expert, which a kernel for TPUs takes at a time


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

    @classmethod
    def width(cls, C, weight, dtype, mesh):
        return stored_width(C, weight, jnp.dtype(dtype), mesh)

    def of(self, x):
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

    def of(self, x):
        return quantize(x)

    def values_and_scale(self, dtype):
        return self.values.astype(dtype), self.scale


def quantize(x: Array) -> Int8:
    """Symmetric rounding to int8 along the last dimension: the largest magnitude becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    values = jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None])
    return Int8(values.astype(jnp.int8), scale)


FORMATS = {None: Plain, "int8": Int8}  # by what main.py's --quantize asks for; the block "Int4" adds one


# ---------------------------------------------------------------------------------------------------------------------
# Declaring weights


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of the checkpoint's tensors that devices split; columns, if the weight is split by input.

    `tensors` maps names to numbers of rows; they are concatenated. A name with `{}` stands for one tensor per expert;
    in the weight of several experts, a name without it is a packed tensor [experts, input, output], or of vectors.

    The rows form `units` of equal size that are never cut, such as heads (0: each row is one). Units form `groups`,
    such as the query heads of one kv head. A device holds whole groups. If R devices share a group, its units are
    divided among them; a `replicated` part is copied to each. The last devices may get fewer groups or units, or none,
    and have zeros for them. `rows` (start, stop) limits the part to these rows. `of_group` (start, stop) makes units of
    these rows of each group alone, and `within` (start, stop) takes these rows of each unit. The units of a device are
    rounded up to a multiple of `multiple`, with zeros.
    """

    tensors: dict[str, int]
    units: int = 0
    groups: int = 1
    replicated: bool = False
    rows: tuple[int, int] | None = None
    of_group: tuple[int, int] | None = None
    within: tuple[int, int] | None = None
    multiple: int = 1

    def layout(self) -> tuple[int, int, int]:
        """The first row to take, the number of units, and the rows of one."""
        first, last = self.rows or (0, sum(self.tensors.values()))
        units = self.units or last - first
        start, stop = self.of_group or (0, (last - first) // self.groups)
        return first + start, units, (stop - start) * self.groups // units

    def assigned_units(self, shard: int, shards: int) -> tuple[int, int, int]:
        """The units of device `shard` of `shards`: the first, the one after the last, and how many it has room for."""
        R, units = sharers(self.groups, shards), self.layout()[1]
        size = units // self.groups * ceil_div(self.groups, shards // R)  # units of the groups of a device
        room = size if self.replicated else ceil_div(size, R * self.multiple) * self.multiple
        begin = min(shard // R * size, units)
        end = min(begin + size, units)
        first = begin if self.replicated else min(begin + shard % R * room, end)
        return first, min(first + room, end), room

    def rows_per_device(self, shards: int) -> int:
        """How many rows each of `shards` devices has room for."""
        start, stop = self.within or (0, self.layout()[2])
        return self.assigned_units(0, shards)[2] * (stop - start)

    def row_slices(self, shard: int, shards: int) -> Iterator[tuple[str, slice]]:
        """The rows of device `shard` of `shards` in order, as slices of tensors by name."""
        (first, last, _), (begin, units, rows) = self.assigned_units(shard, shards), self.layout()
        runs, step = [(begin + rows * first, begin + rows * last)], 1
        if self.of_group:
            of_one, pitch = units // self.groups, sum(self.tensors.values()) // self.groups  # units and rows of a group
            firsts = [begin + i // of_one * pitch + i % of_one * rows for i in range(first, last)]
            runs = [(i, i + rows) for i in firsts]
        if self.within:
            start, stop = self.within
            runs = [(begin + rows * i + start, begin + rows * i + stop) for i in range(first, last)]
            if stop - start == 1 < len(runs):  # one slice instead of thousands
                runs, step = [(runs[0][0], runs[-1][1])], rows
        for start, stop in runs:
            for name, size in self.tensors.items():
                if max(start, 0) < min(stop, size):
                    yield name, slice(start % step if start < 0 else start, min(stop, size), step)
                start, stop = start - size, stop - size


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight: its parts, concatenated along the output or the input dimension of a matrix.

    `split` is the dimension that devices split: 0 the output, 1 the input, None: each device holds all of it.
    `other_dim` is the size of the other dimension of a matrix, None for a vector. `experts` is how many matrices are
    stacked along a first dimension, 0 for one matrix alone. `dtype` is a fixed one, also in converted checkpoints.
    `per_head` says that each head is multiplied on its own (see head_dtype). `transposed` says that the checkpoint has
    the matrix as [input, output], as most have packed experts. A matrix is held in `format`.
    """

    parts: tuple[Part, ...]
    split: int | None
    other_dim: int | None
    suffix: str  # of the tensors' names
    experts: int = 0
    dtype: str | None = None
    per_head: bool = False
    transposed: bool = False
    format: type[Format] | Int4Groups = Plain

    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that split one matrix. Experts are split over ep, so only tp splits each one."""
        return () if self.split is None else MODEL_AXES[1:] if self.experts else MODEL_AXES

    def is_packed(self) -> bool:
        """Whether the matrices, or vectors, of all experts are one tensor."""
        return bool(self.experts) and not any("{}" in name for part in self.parts for name in part.tensors)

    def is_matrix(self) -> bool:
        """Whether it is a matrix that devices split, in no dtype of its own: it can be rounded."""
        return self.split is not None and self.other_dim is not None and self.dtype is None

    def full_name(self, name: str, expert: int = 0) -> str:
        """The full name in the checkpoint of a part's tensor."""
        return name.format(expert) + self.suffix

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of one matrix, or vector, with `rows` rows."""
        if self.other_dim is None:
            return (rows,)
        return (self.other_dim, rows) if self.split == 1 else (rows, self.other_dim)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the checkpoint, with their shapes. Input dimensions are last, of transposed ones too."""
        shapes = {name: self.shape(rows) for part in self.parts for name, rows in part.tensors.items()}
        if self.is_packed():
            return {self.full_name(name): (self.experts, *shape) for name, shape in shapes.items()}
        return {self.full_name(name, e): shape for e in range(self.experts or 1) for name, shape in shapes.items()}

    def columns(self) -> int:
        """The input dimension of a matrix in the checkpoint."""
        return sum(self.parts[0].tensors.values()) if self.split == 1 else self.other_dim

    def uncut_columns(self, mesh: Mesh) -> int:
        """The largest number of columns of a matrix of which no device has only a part: its first column, and how many
        it has, are multiples of it."""
        part, shards = self.parts[0], math.prod(mesh.shape[axis] for axis in self.axes())
        if self.split != 1:
            return self.other_dim
        firsts = (part.assigned_units(shard, shards)[0] for shard in range(shards))
        return math.gcd(*firsts, part.assigned_units(0, shards)[2]) * part.layout()[2]

    def spec(self) -> P:
        """Which axes of the mesh split its dimensions."""
        split = [] if self.split is None else [None] * (1 if self.other_dim is None else 2)
        if split:
            split[self.split] = self.axes()
        return P(*[MODEL_AXES[0]] * bool(self.experts), *split)

    def specs(self, held: Array | Format) -> P | Format:
        """The PartitionSpec of each array of the weight."""
        return self.spec() if self.other_dim is None else held.specs(self.spec())

    def abstract(self, mesh: Mesh, dtype: jnp.dtype) -> jax.ShapeDtypeStruct | Format:
        """The weight on a mesh, a jax.ShapeDtypeStruct with its sharding for each array. Raises InputError if the
        devices along ep cannot hold as many experts each."""
        if self.experts % mesh.shape["ep"]:
            raise InputError(f"ep = {mesh.shape['ep']} does not divide the {self.experts} experts; choose a divisor")
        shards = math.prod(mesh.shape[axis] for axis in self.axes())
        shape = list(self.shape(shards * sum(part.rows_per_device(shards) for part in self.parts)))
        dtype, format = self.dtype or (head_dtype(dtype, mesh) if self.per_head else dtype), self.format.on(self, mesh)
        if self.is_matrix() and not self.per_head:
            cuts = shards if self.split == 1 else 1
            shape[1] = cuts * format.width(shape[1] // cuts, self, dtype, mesh)
        shape = (*[self.experts] * bool(self.experts), *shape)
        held = jax.ShapeDtypeStruct(shape, dtype) if self.other_dim is None else format.declare(shape, dtype)

        def array(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(array, held, self.specs(held))


def by_output(inputs: int, *parts: Part, experts: int = 0, per_head=False, transposed: bool | None = None) -> Weight:
    """A matrix [rows of the parts, inputs] split by output, or `experts` of them: transposed, if they are packed."""
    weight = Weight(parts, 0, inputs, ".weight", experts, per_head=per_head, transposed=bool(transposed))
    return dataclasses.replace(weight, suffix="", transposed=transposed is not False) if weight.is_packed() else weight


def by_input(outputs: int, part: Part, experts: int = 0, transposed: bool | None = None) -> Weight:
    """A matrix [outputs, rows of the part] split by input, or `experts` of them."""
    return dataclasses.replace(by_output(outputs, part, experts=experts, transposed=transposed), split=1)


def bias(*parts: Part, suffix: str = ".bias", experts: int = 0, dtype: str | None = None) -> Weight:
    """A vector split over devices, such as the biases of a matrix that is split by output; or one for each expert."""
    return Weight(parts, 0, None, suffix, experts, dtype)


def whole(name: str, *shape: int, dtype: str | None = None, transposed=False) -> Weight:
    """A vector or a matrix that each device holds whole, and that is never rounded."""
    other_dim = shape[1] if shape[1:] else None
    return Weight((Part({name: shape[0]}),), None, other_dim, "", dtype=dtype, transposed=transposed)


def abstract_weights(config: Config, mesh: Mesh, dtype: jnp.dtype, quantize: str | None = None) -> dict:
    """Every weight as a jax.ShapeDtypeStruct with its sharding; a matrix as a Format of these, which `quantize`, a name
    in FORMATS, chooses. Raises InputError if the mesh does not divide the experts.

    Matrices are [output, input], so a row is contiguous. Loading transposes only packed experts and what is declared
    `transposed`. If devices cannot share rows evenly, the arrays have rows or columns of zeros, which change nothing.
    """
    return jax.tree.map(lambda weight: weight.abstract(mesh, dtype), in_format(weights_of(config), quantize))


def in_format(weights: dict, quantize: str | None) -> dict:
    """A pytree of Weight whose matrices are held as `quantize` says, if devices split them. None changes nothing. In
    "int4" embeddings, the head, what is multiplied head by head and rows that are no whole groups are in int8. What has
    as few bits already stays as it is."""

    def asked(path, weight):
        if not quantize or not weight.is_matrix():
            return weight
        format = FORMATS[quantize]
        if quantize == "int4":
            is_apart = path[0].key.endswith(("embedding", "head")) or weight.per_head
            format = Int8 if is_apart or weight.columns() % format.size else format
        return weight if weight.format.bits == format.bits else dataclasses.replace(weight, format=format)

    return jax.tree_util.tree_map_with_path(asked, weights)


# ---------------------------------------------------------------------------------------------------------------------
# Multi-token prediction


def draft_by_extra_layer(
    rows, cache: list[LayerCache], drafts: int, weights: dict, x, positions, attend, config: Config, choose
) -> tuple[Array, list[LayerCache]]:
    """Puts guesses into `history` of generate.py's Rows, behind the tokens that are known: those of the extra layer,
    each from the one before it, as `choose` takes them from logits. Returns history and cache, in which the extra layer
    is the last.

    It reads what a step has computed, the hidden states x [B, T, D] of the tokens at `positions` [B, T]. What it caches
    of drafts that failed is overwritten before it is read. Sampled guesses are chosen by the key of their row and
    position, as the tokens themselves will be: the more alike the two distributions, the more often they are the same.
    Behind a piece of a prompt there is one guess. Where a row begins like the one before it in its place, the last slot
    that they share has the state of that row's next token: guesses may be worse for it, tokens are not.
    """
    history, w, T = rows.history, weights["extra"], positions.shape[1]
    tokens = jnp.take_along_axis(history, positions + 1, axis=1, mode="clip")
    x, extra = predict(weights, x, weights["norm"], tokens, positions, cache[-1], attend, config)
    newest = jnp.clip(rows.filled[:, None] - 1 - positions[:, :1], 0, T - 1)
    x = jnp.take_along_axis(x, newest[:, :, None], axis=1)
    count = drafts if T <= FEW else 1
    for i in range(count):
        at = rows.lengths[:, None] + i
        logits = output_logits(weights | {"norm": w["norm"]}, x[:, 0], config)
        guess = choose(logits, at[:, 0] - 1, rows.seeds)[0][:, None]
        history = jnp.where(jnp.arange(history.shape[1]) == at, guess, history)
        if i + 1 < count:
            x, extra = predict(weights, x, w["norm"], guess, at - 1, extra, attend, config)
    return history, [*cache[:-1], extra]


DRAFTS = {"mtp": draft_by_extra_layer}  # which generate.py calls at the end of a step


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

    def wavelengths(self) -> np.ndarray:
        """float32 [dim / 2]: over how many positions each pair turns by 1."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        return (np.float64(self.rope_theta) ** exponents).astype(np.float32)

    def frequencies(self) -> np.ndarray:
        """float32 [dim / 2]: the angle by which each pair turns per position. In each class the rounding is that of
        transformers: at large positions the last digit of a frequency matters."""
        return 1 / self.wavelengths()


ROPES = {"default": Rope}  # of each rope_type that this model can have: the blocks below add theirs


def read_rope(
    config: dict, field: str, size: int, interleaved=False, rope_theta: float | None = 1e4, part: float | None = None
) -> Rope:
    """The Rope of a config.json, whose `field` says that heads have `size` numbers. Its parameters stand in
    `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5), or beside the other fields. As in
    transformers, the table wins, except for original_max_position_embeddings, which defaults to
    max_position_embeddings. `rope_theta` is the default, None if there is none. Heads turn whole, unless `part` is
    given: the default of partial_rotary_factor.

    Raises InputError for a missing or impossible value and, by name, for what is not supported.
    """
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise InputError(f"config.json: the rope parameters must be one table for all layers, not {table!r:.40}")
    key = "original_max_position_embeddings"
    places = (  # the later ones win
        {"rope_theta": rope_theta, "partial_rotary_factor": part or 1, key: config.get("max_position_embeddings")},
        {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")},
        table,
        {key: config.get(key), "size": size, "interleaved": interleaved},
    )
    given = {name: value for place in places for name, value in place.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    check_supported(rope_type=(kind, tuple(ROPES)))
    rope = ROPES[kind](**read_fields(ROPES[kind], given))
    share = rope.partial_rotary_factor
    if part is None and rope.dim != size:
        check_supported(partial_rotary_factor=(share, (1,)))
    if rope.dim % 2 or not rope.dim or share > 1:
        share_of = f"partial_rotary_factor {share} of " if share != 1 else ""
        raise InputError(f"config.json: {share_of}{field} {size} must be even: rotary embedding turns pairs")
    return rope


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """Turns pairs of the first `dim` numbers of float32 x [B, T, heads, H] by positions [B, T] times frequencies."""
    return turned(x, *cos_and_sin(positions, rope), rope)


def cos_and_sin(positions: Array, rope: Rope) -> tuple[Array, Array]:
    """Of positions [B, T] times frequencies, times the rope's scale: float32 [B, T, 1, dim / 2] each."""
    angles = positions[:, :, None, None].astype(jnp.float32) * rope.frequencies()
    return rope.scale * jnp.cos(angles), rope.scale * jnp.sin(angles)


def turned(x: Array, cos: Array, sin: Array, rope: Rope) -> Array:
    """Turns pairs of x [B, T, heads, H] by their cos_and_sin: rotate, where many layers share these."""
    x, rest = jnp.split(x, [rope.dim], axis=-1)
    x1, x2 = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else jnp.split(x, 2, axis=-1)
    # Pairs are not interleaved again: queries and keys are permuted alike, and their dot products stay the same.
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Norm, embedding, vocabulary


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over its root mean square along the last dimension, times weight; float32 inside, x's dtype outside."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32)).astype(x.dtype)


@jax.named_scope("embed")
def embed(tokens: Array, weights: dict, config: Config) -> Array:
    """The embeddings of tokens [B, T]: [B, T, D] in the residual stream's dtype."""
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
    x = x[..., :columns]  # see stored_width
    return jax.lax.psum(jnp.where(is_here[..., None], x, 0).astype(dtype), MODEL_AXES)


def mask_padding(logits: Array, config: Config) -> Array:
    """logits [B, V] of this device's part of the vocabulary, with MASKED for the rows that only pad the table."""
    ids = jax.lax.axis_index(MODEL_AXES) * logits.shape[1] + jnp.arange(logits.shape[1])
    return jnp.where(ids < config.vocab_size, logits, MASKED)


# ---------------------------------------------------------------------------------------------------------------------
# Attention in plain JAX


# The score of a slot that is not attended to, the logit of a token that does not exist. It is finite, so that a block
# with nothing else gives no NaN: once a real score arrives, what the block added is multiplied by exp(MASKED - m) = 0.
MASKED = -1e30

CACHE_SPEC = P("dp", MODEL_AXES)  # rows over dp; kv heads, or what devices share of a cache, over ep x tp
FEW = 8  # tokens of a row that a step takes as decoding does: with all rows, and all queries of a kv head together
PREFILL_PIECE = 1024  # of a prompt, in one step: each weight that is read serves many; not yet tuned on hardware


class Mask(NamedTuple):
    """Which tokens up to its own one attends to: all, the last `window`, or those of its chunk of `chunk` tokens. And
    how far from 0 scores may be: see softcapped."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    def first_seen(self, positions: Array) -> Array:
        """The first position that tokens at `positions` attend to."""
        if self.chunk:
            return positions - jnp.fmod(positions, self.chunk)
        return jnp.maximum(positions - (self.window - 1), 0) if self.window else jnp.zeros_like(positions)

    def is_attended(self, keys: Array, queries: Array) -> Array:
        """Whether queries at some positions see keys at others, in shapes that broadcast."""
        seen = keys <= queries
        return seen & (keys >= self.first_seen(queries)) if self.window or self.chunk else seen

    def wraps(self, slots: int, T: int) -> bool:
        """Whether a cache is a ring, in which position p of a row is in slot p % slots: it has so many slots that none
        of T new tokens overwrites one that another of them sees. Else a position beyond the slots is not stored."""
        span = self.window or self.chunk
        return bool(span) and slots >= span + T - 1


def cache_slots(tokens: int) -> int:
    """The slots to allocate for `tokens`, so that large blocks divide them: the next multiple of 256 or, beyond 2,048,
    of an eighth of the next power of two."""
    unit = max(256, power_of_two(tokens) // 8)
    return ceil_div(tokens, unit) * unit


def softcapped(x: Array, cap: float | None) -> Array:
    """x within `cap` of 0, by a tanh (Bello et al. 2016), or x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention_scores(q: Array, k: Format, mask: Array, softcap: float | None = None) -> Array:
    """q [B, K, A, M, H], k [B, K, S, H], mask [.., M, S]: float32 [B, K, A, M, S]. With `softcap` they cannot be added
    to those of another side of the keys."""
    keys, scale = k.values_and_scale(q.dtype)
    scores = query_key_product(q.astype(keys.dtype), keys)
    scores = scores if scale is None else scores * scale[:, :, None, None]
    return jnp.where(mask, softcapped(scores, softcap), MASKED)


@by_machine
def query_key_product(q: Array, k: Array) -> Array:
    """q [B, K, A, M, H] times k [B, K, S, H]: float32 [B, K, A, M, S]."""
    return einsum("bkamh,bksh->bkams", q, k)


@by_machine
def probability_value_product(p: Array, v: Array) -> Array:
    """p [B, K, A, M, S] times v [B, K, S, W]: float32 [B, K, A, M, W]."""
    return einsum("bkams,bksw->bkamw", p, v)


def attention_with_sum(scores: Array, v: Format, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The softmax of scores [B, K, A, M, S] times values v [B, K, S, W], float32 [B, K, A, M, W], and the log-sum-exp
    of the scores, float32 [B, K, A, M, 1]. `dtype` is for the product with rounded values."""
    values, scale = v.values_and_scale(dtype)
    m = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - m)
    l = jnp.sum(p, axis=-1, keepdims=True)
    p = p / l if scale is None else p / l * scale[:, :, None, None]
    return probability_value_product(p.astype(values.dtype), values), m + jnp.log(l)


def merged(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Softmax outputs over two sets of keys as one over both: pairs of an output and the log-sum-exp of its scores."""
    log_sum_exp = jnp.logaddexp(a[1], b[1])
    return sum(out * jnp.exp(each - log_sum_exp) for out, each in (a, b)), log_sum_exp


def joined(out: Array, log_sum_exp: Array, axis: int) -> tuple[Array, Array]:
    """What `merged` gives for many sets of keys, along `axis`."""
    m = jnp.max(log_sum_exp, axis, keepdims=True)
    weights = jnp.exp(log_sum_exp - m)
    l = jnp.sum(weights, axis)
    return jnp.sum(weights * out, axis) / l, jnp.squeeze(m, axis) + jnp.log(l)


def over_blocks(attend, first: Array, last: Array, shape) -> tuple[Array, Array]:
    """attend(i), an output of this shape and the log-sum-exp of its scores, merged over the blocks i from `first` to
    `last`."""
    nothing = jnp.zeros(shape), jnp.full((*shape[:-1], 1), MASKED)  # adds nothing to what it is merged with
    return jax.lax.fori_loop(first, last + 1, lambda i, state: merged(state, attend(i)), nothing)


def plain_attention(q, cache, starts, places, mask: Mask, T: int, R=1, run=None, rows=None, tile=None, block=None):
    """Causal attention of T tokens a row over this device's slots, where they are stored already.

    Queries are [B, K, A, M, H]. Of each M, the first `run` (by default M / T) are of the token at position starts [B],
    the next ones of the token after it, and so on; after T runs it begins anew. Position p of a row is in slot p // R
    of device p % R of the R that share its tokens; if the cache is a ring, modulo its slots. The rows are those at
    `places` [B] of the cache, or all (None).

    The cache is keys [.., K, S, H] and values [.., K, S, W]. Or, if queries are wider than its first side, both sides
    are keys: the first columns of a query are for the first side, the rest for the second. The first side is the values
    too.

    Returns float32 [B, K, A, M, W + 1], side by side the output and the log-sum-exp of the scores: MASKED or little
    more for a query that sees no key, and then its output means nothing.

    It takes tiles of `rows` rows and at most `tile` queries and, for each, the blocks of at most `block` slots that its
    queries see. By default all is one tile and one block, and there is no loop.
    """
    (B, K, A, M, H), (*_, S, width) = q.shape, cache[0].shape
    W = width if width < H else cache[1].shape[-1]
    sizes = (rows, B), (tile, M), (block, S)
    rows, tile, block = (max(n for n in range(1, (most or size) + 1) if size % n == 0) for most, size in sizes)
    wraps, offsets = mask.wraps(R * S, T), jnp.arange(M) // (run or M // T) % T
    taken = jnp.arange(B) if places is None else places

    def attend(row, m, i):  # the tile that begins at (row, m), to the i-th block of positions
        of_rows = partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=rows)

        def some_slots(x):
            def of_place(place):
                return jax.lax.dynamic_slice(x, (place, 0, begin, 0)[: x.ndim], (1, K, block, *x.shape[3:]))[0]

            begin = i % (S // block) * block if wraps else i * block
            return x if places is None and (rows, block) == (B, S) else jax.vmap(of_place)(of_rows(taken))

        queries = jax.lax.dynamic_slice(q, (row, 0, 0, m, 0), (rows, K, A, tile, H))
        first, second = jax.tree.map(some_slots, tuple(cache))
        at = of_rows(starts)[:, None] + jax.lax.dynamic_slice_in_dim(offsets, m, tile)
        keys = (i * block + jnp.arange(block)[None]) * R + shard_index(R)
        if wraps and block == S:  # behind the slot of the last token, a ring holds what was stored a round before
            last = of_rows(starts)[:, None] + T - 1
            keys += last - last % (R * S)
            keys = jnp.where(keys > last, keys - R * S, keys)
        seen = mask.is_attended(keys[:, None], at[:, :, None])[:, None, None]
        scores = attention_scores(queries[..., :width], first, seen, mask.softcap)
        if width < H:
            scores, second = scores + attention_scores(queries[..., width:], second, seen), first
        return attention_with_sum(scores, second, q.dtype)

    def of_tile(n):
        row, m = n // (M // tile) * rows, n % (M // tile) * tile
        if block == S:
            return jnp.concatenate(attend(row, m, 0), axis=-1)
        begin = jax.lax.dynamic_slice_in_dim(starts, row, rows)
        last = jnp.max(begin) + offsets[m + tile - 1]
        last = last if wraps else jnp.minimum(last, R * S - 1)
        first = jnp.min(mask.first_seen(begin + offsets[m]))
        out = over_blocks(partial(attend, row, m), first // (R * block), last // (R * block), (rows, K, A, tile, W))
        return jnp.concatenate(out, axis=-1)

    if (rows, tile) == (B, M):
        return of_tile(0)
    out = jax.lax.map(of_tile, jnp.arange(B // rows * (M // tile)))
    out = out.reshape(B // rows, M // tile, rows, K, A, tile, -1)
    return out.transpose(0, 2, 3, 4, 1, 5, 6).reshape(B, K, A, M, -1)


def as_stored(new: LayerCache, cache: LayerCache) -> LayerCache:
    """New tokens, arrays that are as wide as the cache already, in its format."""
    return LayerCache(*(side.of(x) for x, side in zip(new, cache, strict=True)))


def store_few(cache: LayerCache, new: LayerCache, starts, mask: Mask, R: int) -> LayerCache:
    """`cache` with this device's share of the tokens `new` [B, K, T, ..], at positions starts [B] and after it."""
    S, T = cache[0].shape[2], new[0].shape[2]
    positions = starts[:, None] + jnp.arange(T)
    slots = positions // R % S if mask.wraps(R * S, T) else positions // R
    if R > 1:  # what another device stores has a slot beyond the last one, and is dropped
        slots = jnp.where(positions % R == shard_index(R), slots, S)
    rows = jnp.arange(len(starts))[:, None]

    def store(x, n):
        return keep_layout(x.at[rows, :, slots].set(n.swapaxes(1, 2), mode="drop"))

    return jax.tree.map(store, cache, as_stored(new, cache))


def store_many(cache: LayerCache, new: LayerCache, starts, places, mask: Mask, R: int, is_own=None) -> LayerCache:
    """store_few for T tokens, a multiple of R, of the rows at `places` [B] of the cache, a row at a time.

    Slots that are not new are written again as they are: where a piece ends beyond the last slot and, in a ring, begins
    again at the first. `is_own` bool [B] says which rows this device holds (None: all).
    """
    S, T = cache[0].shape[2], new[0].shape[2]
    size, wraps = T // R, mask.wraps(R * S, T)

    def store_row(b, cache):
        first = (shard_index(R) - starts[b]) % R  # this device's first token among the new ones
        slot = (starts[b] + first) // R
        slot = slot % S if wraps else slot
        begin = jnp.minimum(slot, S - size)
        shift = slot - begin

        def store(x, n):
            n = n[b].reshape(n.shape[1], size, R, *n.shape[3:])
            n = jax.lax.dynamic_index_in_dim(n, first, axis=2, keepdims=False)
            n = jnp.roll(n, shift, axis=1)[None]

            def write(x, begin, is_new):
                at = (places[b], 0, begin, 0)[: x.ndim]
                is_new = is_new if is_own is None else is_new & is_own[b]
                old = jax.lax.dynamic_slice(x, at, n.shape)
                new = jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 3)), n, old)
                return jax.lax.dynamic_update_slice(x, new, at)

            is_late = jnp.arange(size) >= shift
            x = write(x, begin, is_late)
            return write(x, 0, ~is_late) if wraps else x

        return jax.tree.map(store, cache, new)

    new = as_stored(new, cache)
    return jax.lax.fori_loop(0, len(starts), store_row, cache)


def store_and_attend(q, new: LayerCache, cache: LayerCache, starts, places, mask: Mask, T: int, R: int, run=None):
    """Stores the tokens `new` [B, K, T, ..] and attends to all up to each. Args and result as in plain_attention.
    Returns the cache too."""
    if T > FEW:
        places = jnp.arange(len(q)) if places is None else places
        cache = store_many(cache, new, starts, places, mask, R)
        return attend_to_stored(q, cache, starts, places, mask, T, R), cache
    if platform() == "tpu":
        return attention_kernel(q, new, cache, starts, mask=mask, T=T, R=R, run=run)
    cache, block, sizes = store_few(cache, new, starts, mask, R), 128 if len(q) > 8 else 512, {}
    if platform() == "cpu" and cache[0].shape[2] > block:
        sizes = {"rows": 1, "block": block}  # stays in the processor's cache; what a row has not filled is not read
    return plain_attention(q, cache, starts, None, mask, T, R, run, **sizes), cache


@by_machine
def attend_to_stored(q, cache, starts, places, mask: Mask, T: int, R: int) -> Array:
    """store_and_attend of many tokens, which are in the cache."""
    if platform() == "tpu":
        return attention_kernel(q, (), cache, starts, places, mask=mask, T=T, R=R)[0]
    sizes = {"rows": 1, "tile": 256, "block": 128 if T <= 128 else 256} if platform() == "cpu" else {"block": 512}
    return plain_attention(q, cache, starts, places, mask, T, R, **sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Attention over latents in plain JAX
#
# More letters: S is the slots of a row on a device, I the groups of rows that R devices divide among them, gcd(B, R).
# In the block before this one, K counts heads that have keys and values, and G query heads for each.


CACHE_SHARERS = 32  # more devices exchange so much that a second copy of the cache costs less


class LayerCache(NamedTuple):
    """What a layer keeps of each token: its latent [B / I, X, S, L], and its key of rotary embedding [B / I, X, S, U].

    The R devices that share a cache divide its rows first, then their tokens. There are I groups of B / I rows, and R /
    I devices to each, the parts. Device r of R belongs to group r // (R / I) and is part r % (R / I). It holds the
    tokens at positions p with p % (R / I) == part, in slot p // (R / I). With 3 rows on 8 devices I is 1: each device
    has every eighth token of all rows. With 4 rows I is 4: two devices have a row, every second token each.
    """

    latent: Format
    rope_key: Format


def abstract_cache(
    config: Config, mesh: Mesh, batch: int, max_seq_len: int, dtype: jnp.dtype, quantize: str | None = None, drafts=0
) -> list[LayerCache]:
    """The cache as jax.ShapeDtypeStructs, for rows of `max_seq_len` tokens and somewhat more, which has room for
    `drafts`. Dtype and widths are as cache_layout has them, the format is FORMATS[quantize]."""
    X, dp = model_shards(mesh), mesh.shape["dp"]
    I, parts = row_groups(batch // dp, cache_sharers(config, X))
    slots = ceil_div(cache_slots(max_seq_len), parts)
    sharding = NamedSharding(mesh, CACHE_SPEC)

    def side(width):
        padded_width, stored = cache_layout(width, dtype, mesh)

        def of_slots(n):
            return FORMATS[quantize].declare((batch // I, X, n, padded_width), stored)

        # Whole tiles of the dtype, and of 128 lanes of scales, or a single one of these that is not filled.
        unit = max(32 // jax.tree.leaves(of_slots(1))[0].dtype.itemsize, min(128, power_of_two(slots)))
        arrays = of_slots(ceil_div(slots, unit) * unit)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)

    layers = config.num_hidden_layers + config.uses_extra_layer
    return [LayerCache(side(config.kv_lora_rank), side(config.qk_rope_head_dim))] * layers


def cache_sharers(config: Config, shards: int) -> int:
    """R, the number of devices that share a cache: the largest divisor of `shards` that is at most CACHE_SHARERS."""
    return next(n for n in range(min(shards, CACHE_SHARERS), 0, -1) if shards % n == 0)


def tokens_held(cache: list[LayerCache], config: Config, shards: int) -> int:
    """How many tokens of a row each layer's cache has room for."""
    return cache_sharers(config, shards) * min(layer.latent.shape[2] for layer in cache)


def cache_bytes_read(cache: list[LayerCache], lengths: list[float], config: Config) -> float:
    """Bytes of the cache that a decode step has to read, on all devices, for rows of these lengths."""
    rows, devices, slots, _ = cache[0].latent.shape
    return stored_bytes(cache) * sum(lengths) / (rows * cache_sharers(config, devices) * slots)


def row_groups(B: int, R: int) -> tuple[int, int]:
    """How R devices share a cache of B rows: I groups of rows, and in each so many devices that share tokens."""
    return math.gcd(B, R), R // math.gcd(B, R)


def as_wide(new: LayerCache, cache: LayerCache) -> LayerCache:
    """New tokens, or queries for them, [.., L] and [.., U], with zeros, which change no score, as wide as the cache."""
    missing = (side.shape[-1] - x.shape[-1] for x, side in zip(new, cache, strict=True))
    return LayerCache(*(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n)]) for x, n in zip(new, missing, strict=True)))


def cached_attention(
    q, q_rope, new: LayerCache, cache: LayerCache, positions, w: dict, *, places=None, batch, known=None, R: int
):
    """Causal attention of T tokens of each row, over all positions up to theirs: stores their latents, then attends.
    Args and results as in `attention`; places as in `step`, of `batch` rows on these devices."""
    if q.shape[1] > FEW:
        places = jnp.arange(batch) if places is None else places
        return expanded_attention(q, q_rope, new, cache, positions[:, 0], w, places, batch, R)
    return absorbed_attention(q, q_rope, new, cache, positions[:, 0], w, R)


def expanded_attention(q, q_rope, new: LayerCache, cache: LayerCache, starts, w: dict, places, batch: int, R: int):
    """cached_attention of many tokens. Each block of latents is collected from the devices that share the cache, and
    expanded to the keys and values of this device's heads."""
    (B, T, N, _), U, L, S = q.shape, q_rope.shape[-1], w["v_b"].shape[1], cache.latent.shape[2]
    I, parts = row_groups(batch, R)
    is_own = places // (batch // I) == jax.lax.div(shard_index(R), parts)
    places = places % (batch // I)
    n = math.gcd(S, max(1, power_of_two(max(T, 128)) // parts))  # slots of a block; a kernel takes no fewer keys

    def collected(x, i):  # the i-th n slots of the rows, in the order of their tokens: [B, parts n, ..]
        width = x.shape[3:]
        x = jax.lax.dynamic_slice_in_dim(x[:, 0], i * n, n, axis=1)[places]
        if parts > 1:
            x = jax.lax.all_gather(x, MODEL_AXES, axis=2, axis_index_groups=sharer_groups(parts))
        if I > 1:  # one group of devices has the row, and the others add zeros
            groups = np.arange(jax.lax.axis_size(MODEL_AXES)).reshape(-1, I, parts).swapaxes(1, 2).reshape(-1, I)
            x = jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
            x = jax.lax.psum(x, MODEL_AXES, axis_index_groups=groups.tolist())
        return x.reshape(B, parts * n, *width)

    def load(i):  # keys [B, N, parts n, H + U] and values [B, N, parts n, W]
        latent, rope_key = (scaled(jax.tree.map(partial(collected, i=i), x), q.dtype) for x in cache)
        k, v = (linear(latent[..., :L], w[b]).reshape(B, parts * n, N, -1).astype(q.dtype) for b in ("k_b", "v_b"))
        rope_key = jnp.broadcast_to(rope_key[:, :, None, :U], (*k.shape[:3], U))
        return Plain(jnp.concatenate([k, rope_key], axis=-1).swapaxes(1, 2)), Plain(v.swapaxes(1, 2))

    def attend(i):
        out = attend_to_stored(queries, load(i), starts - i * n * parts, jnp.arange(B), Mask(), T, 1)
        return out[..., :-1], out[..., -1:]

    new = LayerCache(*(x[:, None] for x in as_wide(new, cache)))
    cache = store_many(cache, new, starts, places, Mask(), parts, is_own)
    queries = jnp.concatenate([q, q_rope], axis=-1).swapaxes(1, 2)[:, :, None]  # [B, K, A, M, H + U]: K = N, A = 1
    if n == S:
        out, _ = attend(0)
    else:
        last = jnp.minimum(jnp.max(starts) + T, parts * S) - 1
        shape = *queries.shape[:4], jax.eval_shape(load, 0)[1].shape[-1]
        out, _ = over_blocks(attend, 0, last // (n * parts), shape)
    return out[:, :, 0].swapaxes(1, 2), cache


def own_rows(x: Array, R: int) -> Array:
    """Of x [B, ..], which all devices have, this device's rows of the cache."""
    I, parts = row_groups(len(x), R)
    group = jax.lax.div(shard_index(R), parts)
    return jax.lax.dynamic_slice_in_dim(x, group * (len(x) // I), len(x) // I)


def scaled(x: Format, dtype: jnp.dtype) -> Array:
    """The numbers of x in `dtype`, times their scales."""
    values, scale = x.values_and_scale(jnp.float32)
    return (values if scale is None else values * scale[..., None]).astype(dtype)


def absorbed_attention(q, q_rope, new: LayerCache, cache: LayerCache, starts, w: dict, R: int):
    """cached_attention of few tokens, of all rows. Latents are not expanded (the absorbed form, see the top of the
    file).

    Each of the R devices that share the cache attends to its rows and tokens with the query heads of all R. They
    exchange the queries before, and afterwards the outputs with the log-sum-exp of their scores, by which the partial
    softmaxes of a row merge (as in Dao et al. 2023, "Flash-Decoding"). So no part of the cache is read twice.
    """
    (B, T, N, H), L = q.shape, w["v_b"].shape[1]
    I, parts = row_groups(B, R)
    # The first product sums over the dimension of k_b's scales, so they go to q; v_b's belong to the output.
    (w_k, k_scale), (w_v, v_scale) = (by_head(w[name], N, q.dtype) for name in ("k_b", "v_b"))

    scaled = (q if k_scale is None else (q * k_scale).astype(q.dtype)).reshape(B * T, N, H)
    absorbed = head_product("bnh,nhl->bnl", scaled, w_k).astype(q.dtype).reshape(B, T, N, -1)
    queries = jnp.concatenate(as_wide([absorbed, q_rope], cache), axis=-1)
    queries = queries.reshape(I, B // I, T, N, -1)
    if R > 1:
        queries = exchange(queries, R)  # to each device those of its rows
        new, starts = jax.tree.map(partial(own_rows, R=R), (new, starts))
    queries = queries.swapaxes(0, 1).reshape(B // I, 1, 1, R * T * N, -1)
    new = LayerCache(*(x[:, None] for x in as_wide(new, cache)))  # one head of keys, K = 1
    out, cache = store_and_attend(queries, new, cache, starts, None, Mask(), T, parts, run=N)
    out = out.reshape(B // I, R, T, N, -1).swapaxes(0, 1)
    if R > 1:
        out = exchange(out, R).reshape(I, parts, B // I, T, N, -1)
        out, _ = joined(out[..., :-1], out[..., -1:], axis=1)
    out = out.reshape(B * T, N, -1)[..., :L].astype(q.dtype)
    out = head_product("bnl,nwl->bnw", out, w_v).reshape(B, T, N, -1)
    return out if v_scale is None else out * v_scale, cache


def by_head(w: Format, N: int, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """The values [N, .., L] of a weight [N .., L], rounded ones in `dtype`, and their scales [N, ..], None without."""
    values, scale = w.values_and_scale(dtype)
    return values.reshape(N, -1, values.shape[-1]), None if scale is None else scale.reshape(N, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Experts in plain JAX


@jax.named_scope("experts")
def experts(x, ids, scores, w_gate_up, w_down, activate, biases: tuple[Array, Array] | None = None) -> Array:
    """What this device's experts, and its columns of them, contribute to the rows that chose them: float32 [B, D], to
    be summed over ep x tp.

    Args: x [B, D]; ids int32 [B, k], the experts chosen, counted over all devices; scores float32 [B, k]; w_gate_up
    [E, 2F, D], gate rows before up rows; w_down [E, D, F]; activate(gate, up, score), which gives float32 [B, F] for
    gate and up [B, F] of one expert and the scores [B, 1] of its rows, 0 for one that did not choose it; biases, if
    there are any: float32 [E, 2F] of gate and up, and [E, D] of down, the same on the devices of tp.

    B counts tokens here, rows times T. A pair is a token and an expert that it chose. An expert that no token chose is
    not read.
    """
    E = w_down.shape[0]
    ids = ids - jax.lax.axis_index("ep") * E
    ids = jnp.where((ids >= 0) & (ids < E), ids, E)  # E: on another device
    gate_up_bias, down_bias = biases or (None, None)
    out = local_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate)
    if biases:
        by_expert = scores_by_expert(ids, scores, E)
        # XLA for TPUs turns fewer than 8 rows into slow vector code.
        by_expert = jnp.pad(by_expert, ((0, max(8 - len(x), 0)), (0, 0)))
        added = einsum("be,ed->bd", by_expert.astype(down_bias.dtype), down_bias)[: len(x)]
        out += added / jax.lax.axis_size("tp")  # each of these devices adds a part
    return out


@by_machine
def local_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate) -> Array:
    """experts, with ids counted on this device: E is one on another device. Each expert that a token chose is
    multiplied with all tokens, and those that did not choose it count nothing."""
    by_expert = scores_by_expert(ids, scores, E := w_down.shape[0])

    def add(e, out):
        gate_up, down, bias = jax.tree.map(lambda a: a[e], (w_gate_up, w_down, gate_up_bias))
        y = multiply(x, gate_up)
        gate, up = jnp.split(y if bias is None else y + bias, 2, axis=-1)
        return out + multiply(activate(gate, up, by_expert[:, e, None]).astype(x.dtype), down)

    def visit(e, out):
        return jax.lax.cond(jnp.any(ids == e), add, lambda e, out: out, e, out)

    return jax.lax.fori_loop(0, E, visit, jnp.zeros((len(x), w_down.shape[1]), jnp.float32))


def scores_by_expert(ids: Array, scores: Array, E: int) -> Array:
    """ids, scores [B, k]: float32 [B, E], the score of each token for each expert, 0 if it did not choose it."""
    return jnp.sum(jnp.where(ids[:, :, None] == jnp.arange(E), scores[:, :, None], 0), axis=1)


def divide_tokens(x: Array) -> Array:
    """This device's share [B T / ep, D] of the residual stream x [B, T, D], so that devices along ep do not all compute
    the same norms and residuals (as in Korthikanti et al. 2022, "sequence parallelism"). In decoding, or if ep does not
    divide the tokens, it is all of it, [1, B T, D]. Along tp nothing is divided: XLA for TPUs turns a reduce-scatter
    among many chips into an all-reduce."""
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


def check_routing(config: Config, experts: int, best: int = 1) -> None:
    """Raises InputError if a token cannot choose `num_experts_per_tok` of so many experts, in groups of which the
    `best` experts count."""
    k, groups, top = config.num_experts_per_tok, config.n_group, config.topk_group
    if experts % groups or experts < best * groups:
        raise InputError(
            f"config.json: n_group {groups} does not divide {experts} experts into groups of {best} or more"
        )
    if top > groups:
        raise InputError(f"config.json: topk_group {top} exceeds n_group {groups}")
    if k > (eligible := top * (experts // groups)):
        raise InputError(f"config.json: num_experts_per_tok {k} exceeds the {eligible} experts that a token can choose")


@by_machine
def chosen_experts(scores: Array, choice: Array, best: int, config: Config) -> tuple[Array, Array]:
    """The k experts whose float32 choice [B, E] is highest, and their scores, [B, k] each. If topk_group is less than
    n_group, only experts of so many groups are eligible: of the groups whose `best` highest choices add up to the most.
    """
    B, E = scores.shape
    if config.topk_group < config.n_group:
        in_groups = choice.reshape(B, config.n_group, -1)
        totals = jnp.sum(jax.lax.top_k(in_groups, best)[0], axis=-1)
        groups = jax.lax.top_k(totals, config.topk_group)[1]
        is_eligible = jnp.any(groups[:, :, None] == jnp.arange(config.n_group), axis=1)
        choice = jnp.where(is_eligible[:, :, None], in_groups, MASKED).reshape(B, E)
    ids = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
    return ids, weighed(jnp.take_along_axis(scores, ids, axis=1), config)


# ---------------------------------------------------------------------------------------------------------------------
# Reading config.json


FOLDERS = {  # of the repository that this file is from, and the model_types that each reads
    "deepseek": ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"),
    "gemma": ("gemma", "gemma2", "gemma3", "gemma3_text"),
    "gemma4": ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "glm4": ("glm", "glm4"),
    "glm4_flash": ("glm4_moe_lite",),
    "glm4_moe": ("glm4_moe",),
    "gpt2": ("gpt2",),
    "gpt_oss": ("gpt_oss",),
    "llama3": ("llama", "mistral"),
    "llama4": ("llama4", "llama4_text"),
    "mixtral": ("mixtral",),
    "qwen3": ("qwen2", "qwen3", "qwen3_moe"),
    "qwen3_5": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
COUNTS = {  # where they are not from 1 to 2**31; layers and experts are bounded before lists of that length are made
    "num_hidden_layers": range(1, 2**16), "n_layer": range(1, 2**16),
    "first_k_dense_replace": range(2**16), "max_window_layers": range(2**16),
    "num_kv_shared_layers": range(2**16), "hidden_size_per_layer_input": range(2**16),
    "num_experts": range(2**12), "num_local_experts": range(1, 2**12), "n_routed_experts": range(1, 2**12),
}  # fmt: skip


def check_supported(**features: tuple[object, tuple]) -> None:
    """Each feature is a pair (value, supported values). Raises InputError if a value is not among them."""
    for name, (value, supported) in features.items():
        if value not in supported:
            message = f"config.json: {name} {value!r:.40} is not supported, only {', '.join(map(str, supported))}"
            others = [folder for folder, types in FOLDERS.items() if name == "model_type" and value in types]
            raise InputError(message + "".join(f"; use the folder {folder}" for folder in others))


def read_fields(cls: type, given: dict, needed: tuple[str, ...] = ()) -> dict:
    """Those of `given` that are plain fields of the dataclass `cls`, in their types; null counts as absent.

    Raises InputError for a value that such a field cannot have, and for a missing one that is needed or has no default.
    """
    plain = (bool, int, float, str, int | None)
    kinds = {name: kind for name, kind in get_type_hints(cls, globals()).items() if kind in plain}
    given = {name: value for name, value in given.items() if name in kinds and value is not None}
    for name, value in given.items():
        if not is_valid(value, kinds[name], name):
            raise InputError(f"config.json: {name} cannot be {value!r:.40}")
    required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    for name in (*required, *needed):
        if name not in given:
            raise InputError(f"config.json: {name} is missing")
    return {name: float(value) if kinds[name] is float else value for name, value in given.items()}


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


def is_valid(value: object, kind: type, name: str = "") -> bool:
    """Whether a value of a JSON file can be a field of type `kind`. Numbers are positive and bounded."""
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind is float:
        return type(value) in (int, float) and 1e-30 < value < 1e30
    return type(value) is int and value in COUNTS.get(name, range(1, 2**31))  # isinstance would take a bool


# =====================================================================================================================
# Fast on each machine
# =====================================================================================================================
#
# The compiler moves nothing across an optimization_barrier. A Pallas kernel is the program of a TPU core, which fetches
# blocks of its arguments (a BlockSpec says which) into the core's fast memory, VMEM.


# ---------------------------------------------------------------------------------------------------------------------
# Memory on each machine


def mesh_shape(weights: dict, devices: list, dp: int | None = None, ep: int | None = None, tp: int | None = None):
    """dp, ep and tp for a pytree of Weight on these devices. Those not given are 1, except tp, which takes the
    remaining devices. On TPUs ep leaves each device whole lanes of an expert's columns; it is the smallest with few
    zeros beside them in pieces of Format.kernel_columns, or else with the fewest."""
    dp = dp or 1
    left = len(devices) // dp
    if not ep and not tp and devices[0].platform == "tpu":
        experts = [weight for weight in jax.tree.leaves(weights) if weight.experts and weight.split == 1]

        def columns(weight, tp):
            return weight.parts[0].rows_per_device(tp)

        def suits(weight, ep, tp):
            return weight.experts % ep == columns(weight, tp) % 128 == 0

        def share(weight, tp):  # of the columns with zeros in those without
            piece = weight.format.kernel_columns
            return tp * ceil_div(columns(weight, tp), piece) * piece / weight.columns()

        divisors = [n for n in range(1, left + 1) if left % n == 0]
        divisors = [n for n in divisors if all(suits(weight, n, left // n) for weight in experts)]
        ep = min(divisors, key=lambda n: max([1.1, *(share(weight, left // n) for weight in experts)]), default=None)
    ep = ep or 1
    return dp, ep, tp or max(1, left // ep)


def stored_width(C: int, weight: Weight, dtype: jnp.dtype, mesh: Mesh) -> int:
    """Format.width of numbers in `dtype`.

    On TPUs a matrix that is split by output gets whole lanes of 128 numbers. Otherwise XLA would store it with the
    output dimension last, and copy it for a kernel in every step. On CPUs 16-bit rows must not lie a multiple of 4,096
    bytes apart, since such rows map to the same places in the processor's cache, and the product would take up to 1.7
    times as long. They get 32 numbers more, unless they are experts.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "tpu" and weight.split == 0:
        return ceil_div(C, 128) * 128
    return C + 32 if platform == "cpu" and dtype.itemsize == 2 and 2 * C % 4096 == 0 and not weight.experts else C


def head_dtype(dtype: jnp.dtype, mesh: Mesh) -> jnp.dtype:
    """The dtype of weights that are multiplied head by head: float32 on CPUs, where any other is slow."""
    return jnp.float32 if mesh.devices.flat[0].platform == "cpu" else dtype


def cache_layout(H: int, dtype: jnp.dtype, mesh: Mesh) -> tuple[int, jnp.dtype]:
    """The width and the dtype of a cache of width H. On CPUs a 16-bit cache is kept in float32: to update one slot XLA
    would convert all of it to float32 and back. On TPUs H is rounded up to the 128 lanes: a narrower array would have
    its slots innermost in memory, and be copied to another layout for the kernel in every step."""
    platform = mesh.devices.flat[0].platform
    return ceil_div(H, 128) * 128 if platform == "tpu" else H, jnp.float32 if platform == "cpu" else dtype


SHORT_PIECES = 64, 16  # for what is left of a prompt, or new in a conversation; the shortest only on CPUs


def piece_lengths(longest: int, config: Config, mesh: Mesh) -> list[int]:
    """The lengths of the pieces in which prefill takes prompts of up to `longest` tokens: a long one and, if that is
    longer than they are, short ones. All are multiples of the devices that share a cache. The long one is a power of
    two; on CPUs, where padding costs more, a multiple of an eighth of one."""
    R = cache_sharers(config, model_shards(mesh))
    tokens = ceil_div(longest, ceil_div(longest, PREFILL_PIECE))
    unit, short = power_of_two(max(tokens, 16)), SHORT_PIECES[:1]
    if mesh.devices.flat[0].platform == "cpu":
        unit, short = max(16, unit // 8), SHORT_PIECES  # a product takes as long for fewer than 16 rows more
    long = min(ceil_div(ceil_div(tokens, unit) * unit, R) * R, PREFILL_PIECE // R * R)
    short = [ceil_div(T, R) * R for T in short]
    return [long, *short] if long > short[0] else [long]


def keep_layout(x: Array) -> Array:
    """x in row-major order: for a single row, XLA for GPUs would copy a whole cache to another layout, twice a step."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# ---------------------------------------------------------------------------------------------------------------------
# Products


def einsum(subscripts: str, a: Array, b: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """jnp.einsum with sums in `dtype`, and without bf16 or tf32 passes if the operands are float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)


def linear(x: Array, w: Format, bias: Array | None = None) -> Array:
    """x [..., C] times w [O, C], plus bias [O]: float32 [..., O]."""
    y = multiply(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def multiply(x: Array, w: Format) -> Array:
    """x [B, C] times w [O, C], or a wider w (see stored_width): float32 [B, O]."""
    return PRODUCTS.get((platform(), type(w)), product)(x, w)


def product(x: Array, w: Format) -> Array:
    """`multiply` for all machines and formats."""
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
# Products and attention on CPUs


def plain_cpu_product(x: Array, w: Array) -> Array:
    """product for CPUs of numbers as they are. One row uses `row_product` if its length allows: XLA's own product of 16
    bits is ten times slower for one row than for two. Of up to 4 rows, pieces of the weight are turned to float32 and
    multiplied while they are in the processor's cache: without AVX512-BF16, XLA's product of 16 bits takes 1.5 times as
    long. Up to 128 rows the weight is the left operand, because XLA repacks the right one."""
    (B, C), is_16_bit = x.shape, x.dtype != jnp.float32
    if B == 1 and is_16_bit and (runs := runs_of(C, 24, 8192)):
        return row_product(x, w, runs)
    if B <= 4 and is_16_bit and (pieces := pieces_of(w, 2**19, least=2)) > 1:
        return over_rows(partial(in_float32, x), w, pieces)
    if w.shape[1] > C:  # see stored_width
        x = repeat_columns(x, w.shape[1])
    if B > 128:
        return product(x, Plain(w))
    return weights_first(padded(x, w, 2 if is_16_bit else 1), w, jnp.float32)[:B]


def int8_cpu_product(x: Array, w: Array) -> Array:
    """product for CPUs of int8 values, not yet scaled. For a few rows the fast product is that of int8 and int8. Two
    int8 numbers hold 15 bits of an activation: a coarse one, and a fine one for its rounding error. As rows of one
    product they cost little and lose next to nothing. From some 50 rows on, pieces of the weight are cast, and
    multiplied while they are in the processor's cache."""
    B, C = x.shape
    if B == 1 and (runs := runs_of(C, 32, 4096)):
        return row_product(x, w, runs)
    if B < 50:
        coarse = quantize(x)
        fine = quantize(x - coarse.values * coarse.scale[:, None])
        y = weights_first(jnp.concatenate([coarse.values, fine.values]), w, jnp.int32)
        return y[:B] * coarse.scale[:, None] + y[B:] * fine.scale[:, None]

    def cast_first(piece):
        return plain_cpu_product(x, jax.lax.optimization_barrier(piece.astype(x.dtype)))

    return over_rows(cast_first, w, pieces_of(w, 2**21))


def runs_of(columns: int, most: int, longest: int) -> int:
    """How many runs of 32 columns row_product should add up in one loop: at most `most`, and a divisor of all of them.
    0 if it should not be used, because a row is longer than `longest` columns or would have fewer than 9 runs."""
    divisors = (n for n in range(most, 8, -1) if columns % (32 * n) == 0)
    return next(divisors, 0) if columns <= longest else 0


def row_product(x: Array, w: Array, runs: int) -> Array:
    """x [1, C] times w [O, C] of 16 or 8 bits, C a multiple of 32 * runs: float32 [1, O]. It ignores columns that only
    w has. With bfloat16 it is 1.5 times as fast as two rows of XLA's own product, with int8 twice as fast.

    XLA makes one unrolled loop that multiplies and adds `runs` runs of 32 columns, with the 32 side by side in vector
    registers. The 32 sums are then multiplied with ones. A large w is taken in pieces, whose sums stay in cache.

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

    return over_rows(multiply, w, pieces_of(w, 2**24))


def in_float32(x: Array, w: Array) -> Array:
    """x [B, C] times w [O, C], or a wider w: float32 [B, O]. The barrier has w in float32 in memory."""
    w = jax.lax.optimization_barrier(w[:, : x.shape[1]].astype(jnp.float32))
    return weights_first(x.astype(jnp.float32), w, jnp.float32)


def pieces_of(w: Array | Format, size: int, least: int = 1) -> int:
    """Into how many pieces of equal rows to divide w [O, C]: `least` or more, of at most `size` numbers each. 1 if no
    number near does."""
    fewest = max(least, ceil_div(math.prod(w.shape), size))
    return next((n for n in range(fewest, 4 * fewest) if w.shape[0] % n == 0), 1)


def over_rows(multiply, w: Array | Format, pieces: int) -> Array:
    """multiply(w), float32 [B, O], a piece of w [O, C] at a time."""
    O, B = w.shape[0], jax.eval_shape(multiply, w).shape[0]
    rows = O // pieces

    def step(i, y):
        # The barrier ties w to i: else XLA would turn all of it to float32 before the loop.
        tied, i = jax.lax.optimization_barrier((w, i))
        piece = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * rows, rows), tied)
        return jax.lax.dynamic_update_slice_in_dim(y, multiply(piece), i * rows, axis=1)

    return multiply(w) if pieces == 1 else jax.lax.fori_loop(0, pieces, step, jnp.zeros((B, O), jnp.float32))


def repeat_columns(x: Array, width: int) -> Array:
    """x [B, C] of 16 bits, widened with its own first columns for a weight that is zero there. XLA would fuse a padding
    of zeros with the elementwise operations before it, which would then take four times as long."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16)  # XLA would concatenate bfloat16 as float32
    bits = jnp.concatenate([bits, bits[:, : width - x.shape[1]]], axis=1)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def weights_first(x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """x [B, C] times w [O, C] with w as the left operand; a barrier keeps XLA from swapping them: `dtype` [B, O]."""
    return jax.lax.optimization_barrier(einsum("oc,bc->ob", w, x, dtype)).T


def cpu_query_key_product(q: Array, k: Array) -> Array:
    """query_key_product for CPUs."""
    queries = math.prod(q.shape[2:4])
    if queries <= 4:
        return query_by_query("bkh,bksh->bks", q, k)
    return keys_first(q, k) if queries <= 64 else query_key_product.plain(q, k)


def cpu_probability_value_product(p: Array, v: Array) -> Array:
    """probability_value_product for CPUs."""
    if math.prod(p.shape[2:4]) <= 4:
        return query_by_query("bks,bksw->bkw", p, v)
    return probability_value_product.plain(p, v)


def query_by_query(subscripts: str, x: Array, of_slots: Array) -> Array:
    """A product [B, K, A, M, ..] of a few queries as a product of a matrix and a vector for each. XLA computes these up
    to twice as fast, since all queries after the first find the slots in the processor's cache."""
    one_by_one = jnp.moveaxis(x.reshape(*x.shape[:2], -1, x.shape[-1]), 2, 0)
    return jnp.stack([einsum(subscripts, one, of_slots) for one in one_by_one], axis=2).reshape(*x.shape[:4], -1)


def keys_first(q: Array, k: Array) -> Array:
    """query_key_product for CPUs and some queries. XLA rearranges the second operand of a product there, which should
    not be the keys; the barrier keeps XLA from exchanging the two."""
    return jax.lax.optimization_barrier(einsum("bksh,bkamh->bksam", k, q)).transpose(0, 1, 3, 4, 2)


PRODUCTS["cpu", Plain] = lambda x, w: plain_cpu_product(x, w.values)
PRODUCTS["cpu", Int8] = lambda x, w: int8_cpu_product(x, w.values) * w.scale
FAST["query_key_product", "cpu"] = cpu_query_key_product
FAST["probability_value_product", "cpu"] = cpu_probability_value_product


# ---------------------------------------------------------------------------------------------------------------------
# Products and attention on GPUs

try:
    from jax.experimental.pallas import triton
except ImportError:  # Windows has none, and a later jax may have none
    triton = None


def gpu_product(x: Array, w: Format) -> Array:
    """product for GPUs. Of one row XLA reads the matrix faster if it sees a sum: an H100 reads one of 28,672 x 4,096 at
    2.98 TB/s, in int8 at 2.84, instead of 2.71 and 2.16."""
    if len(x) > 1:
        return product(x, w)
    values, scale = w.values_and_scale(x.dtype)
    x = jax.lax.optimization_barrier(w.in_order(padded(x, w)))  # it is not to be computed again for each sum
    y = jnp.sum(x.astype(jnp.float32) * values.astype(jnp.float32), axis=-1)[None]
    return y if scale is None else y * scale


def gpu_attend_to_stored(q, cache, starts, places, mask: Mask, T: int, R: int) -> Array:
    """attend_to_stored for GPUs."""
    if suits_triton(q, cache):
        return triton_attention(q, cache, starts, places, mask=mask, R=R)
    return attend_to_stored.plain(q, cache, starts, places, mask, T, R)


def suits_triton(q: Array, cache: LayerCache) -> bool:
    """Whether triton_attention can take these queries and this cache, on the GPU at hand: Triton knows widths that are
    powers of two, and NVIDIA's chips from Ampere on."""
    (*_, T, H), S = q.shape, cache[0].shape[2]
    fits = H in (16, 32, 64, 128, 256) and all(side.shape[-1] == H for side in cache) and T % 16 == S % 64 == 0
    device = jax.devices()[0]  # a CPU, if this is compiled for a GPU that is not at hand
    major = "9" if device.platform == "cpu" else getattr(device, "compute_capability", "").partition(".")[0]
    return bool(triton) and fits and q.dtype.itemsize == 2 and major.isdigit() and int(major) >= 8


def triton_attention(q, cache, starts, places, mask: Mask, R: int, interpret=False) -> Array:
    """attend_to_stored as one Pallas kernel for GPUs. Scores stay on the chip (as in Dao et al. 2022,
    "FlashAttention"), and a tile of queries reads only the blocks of slots that it sees. Args and result as in
    plain_attention, with queries [B, K, A, T, H]."""
    (B, K, A, T, H), S = q.shape, cache[0].shape[2]
    # Within a fifth of the best of six sizes tried on an H100, with three stages; two need less of a chip's memory.
    tile, block, wraps = math.gcd(T, 64), 64 if H <= 128 else 32, mask.wraps(R * S, T)

    def kernel(q, cache, starts, places, shard, out, log_sum_exp):
        n, m = pl.program_id(1), pl.program_id(0) * tile
        b, k, a = n // (K * A), n // A % K, n % A
        begin, last = starts[b] + m, starts[b] + T - 1
        at, queries = begin + jnp.arange(tile), q[b, k, a, pl.ds(m, tile), :]
        first_block = 0 if wraps else mask.first_seen(begin) // (R * block)
        end = jnp.minimum((last if wraps else begin + tile - 1) // R, S - 1) // block + 1

        def add_block(i, state):
            total, top, out = state
            slots = pl.ds(i * block, block)
            keys, values = jax.tree.map(lambda x: x[(places[b], k, slots, slice(None))[: len(x.shape)]], tuple(cache))
            (keys, scale), (values, value_scale) = (x.values_and_scale(queries.dtype) for x in (keys, values))
            scores = einsum("mh,sh->ms", queries, keys)
            scores = softcapped(scores if scale is None else scores * scale[None], mask.softcap)
            position = (i * block + jnp.arange(block)) * R + shard[0]
            if wraps:  # behind the slot of the last token, a ring holds what was stored a round before
                position += last - last % (R * S)
                position = jnp.where(position > last, position - R * S, position)
            scores = jnp.where(mask.is_attended(position[None], at[:, None]), scores, MASKED)
            highest = jnp.maximum(top, jnp.max(scores, axis=1))
            p, kept = jnp.exp(scores - highest[:, None]), jnp.exp(top - highest)
            total = total * kept + jnp.sum(p, axis=1)
            p = (p if value_scale is None else p * value_scale[None]).astype(values.dtype)
            return total, highest, out * kept[:, None] + einsum("ms,sw->mw", p, values)

        nothing = jnp.zeros(tile), jnp.full(tile, MASKED), jnp.zeros((tile, H))
        total, top, sums = jax.lax.fori_loop(first_block, end, add_block, nothing)
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
# Products on TPUs


STREAM_BYTES = 40 * 2**20  # XLA for TPUs does not fetch a weight ahead if a device holds more of it than this


def tpu_product(x: Array, w: Format) -> Array:
    """product for TPUs."""
    B, x = len(x), padded(x, w)
    if 4 * x.size > 2**25:  # if x comes of float32 arrays too large for VMEM, XLA would read them for each tile of w
        x = jax.lax.optimization_barrier(x)
    if isinstance(w, Plain | Int8) and is_streamed(x, w.values):
        y = streamed_product(x, w.values)
        return y * w.scale if isinstance(w, Int8) else y
    return product(padded(x, w, 8), w)[:B]  # XLA turns fewer rows into slow vector code


def is_streamed(x: Array, w: Array) -> bool:
    """Whether a kernel streams a weight: if it is too large to be fetched ahead and the rows are few."""
    (B, C), itemsize = x.shape, w.dtype.itemsize
    # Two buffers each of 128 rows of w and of x. A kernel gets 16 MiB.
    vmem = 2 * C * (128 * itemsize + B * x.dtype.itemsize)
    return B <= 64 and C % 128 == 0 and w.size * itemsize >= STREAM_BYTES and vmem <= 12 * 2**20


def streamed_product(x: Array, w: Array, block: int | None = None, interpret=False) -> Array:
    """A product as a Pallas kernel for TPUs: x [B, C] times w [O, C]: float32 [B, O].

    It reads w once, in blocks of whole rows. Each block is contiguous, while XLA's own product of a weight in
    HBM fetches narrow columns. The next block is fetched while this one is multiplied, which takes less time than
    fetching, the cast of int8 values included. Rows of the last block beyond O are undefined, and are not stored.

    `block` is the number of rows in a grid step, a multiple of 128, by default as many as make 2 MiB: no more, since
    nothing overlaps the first block of a product; no fewer, since a step has to outlast its own overhead.
    """
    (B, C), O = x.shape, w.shape[0]
    block = block or max(128, 2**21 // (C * w.dtype.itemsize) // 128 * 128)

    def kernel(x, w, y):
        y[...] = einsum("bc,oc->bo", x[...], w[...].astype(x.dtype))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((B, O), jnp.float32),
        grid=(pl.cdiv(O, block),),
        in_specs=[pl.BlockSpec((B, C), lambda i: (0, 0)), pl.BlockSpec((block, C), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((B, block), lambda i: (0, i)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),  # shared by the two cores of a v5p
        cost_estimate=kernel_cost(2 * B * O * C, w),
        interpret=interpret,
        name="streamed_product",
    )(x, pltpu.with_memory_space_constraint(w, pltpu.HBM))


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

    bits, kernel_columns = 4, 512  # of Int4Lanes

    def on(self, weight: Weight, mesh: Mesh) -> GroupsOn | type[Format]:
        """Groups that no device has only a part of; Plain, where 16 numbers are too many for that, and for what is
        multiplied head by head. On TPUs they are for kernels, which experts without whole lanes have none of."""
        size = math.gcd(self.size, weight.uncut_columns(mesh), 128)
        columns = weight.parts[0].rows_per_device(math.prod(mesh.shape[axis] for axis in weight.axes()))
        has_kernel = mesh.devices.flat[0].platform == "tpu" and not (weight.experts and columns % 128)
        kind = Int4Lanes if has_kernel else Int4
        return Plain if size < 16 or weight.per_head else GroupsOn(kind, self._replace(size=size))


class GroupsOn(NamedTuple):
    """Int4Groups on a machine, as `kind` of Int4."""

    kind: type[Int4]
    groups: Int4Groups

    def width(self, C: int, weight: Weight, dtype: jnp.dtype, mesh: Mesh) -> int:
        return ceil_div(C, self.kind.run) * self.kind.run

    def declare(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Int4:
        values = jax.eval_shape(self.kind.packed, jax.ShapeDtypeStruct(shape, jnp.uint8))
        scale = (*shape[:-1], shape[-1] // self.groups.size)
        scale = jax.ShapeDtypeStruct(self.kind.ordered(scale), jnp.dtype(self.groups.dtype))
        zero = jax.ShapeDtypeStruct(scale.shape, self.kind.zero_dtype) if self.groups.has_zeros else None
        return self.kind(values, scale, zero)


@format_of_arrays
class Int4(Format):
    """Codes of 4 bits, less their group's zero, times its scale. A group is 16 to 128 numbers of a row.

    `values` uint16 [.., O, 8, L] has 4 codes in a word, the first in the lowest bits. L is C / 32, and a lane has 32
    neighbours of a row: word j of the 8 has the codes 4 j to 4 j + 3 of each lane. So an instruction can work on the
    same place of many groups. `scale` is [.., O, C / group], `zero` uint8 too, or None if all zeros are 8.
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
        spec = P(*spec, *[None] * (len(self.shape) - len(spec)))
        return Int4(P(*spec[:-1], None, spec[-1]), spec, None if self.zero is None else spec)

    @staticmethod
    def ordered(x):
        """A shape, or an array, of scales [.., O, C / group] as this format has it."""
        return x

    @staticmethod
    def ordered_values(x):
        """An array of values, or a shape without the 8 words of a lane."""
        return (*x[:-2], x[-1]) if isinstance(x, tuple) else x

    @staticmethod
    def packed(codes: Array | np.ndarray) -> Array | np.ndarray:
        """uint8 codes [.., C] as values."""
        lanes = codes.shape[-1] // 32
        codes = codes.reshape(*codes.shape[:-1], lanes, 32).swapaxes(-1, -2).reshape(codes.shape)
        return packed_codes(codes, 4, lanes).reshape(*codes.shape[:-1], 8, lanes)

    def of(self, x):
        codes, scale = quantize_in_groups(x, self.ordered(self.scale.shape)[-1], self.scale.dtype)
        return type(self)(self.packed(codes), self.ordered(scale))

    def in_order(self, x):
        return x.reshape(*x.shape[:-1], -1, 32).swapaxes(-1, -2).reshape(x.shape)

    def of_lanes(self, a: Array) -> Array:
        """Scales or zeros [.., C / group] as [.., n, L], for each n-th of a lane's words. n is 2 for groups of 16."""
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

    values: Array
    scale: Array
    zero: Array | None = None

    run, zero_dtype = 512, jnp.bfloat16
    kernel_columns = 512

    @property
    def shape(self):
        return (*self.values.shape[:-1], 4 * self.values.shape[-1])

    @staticmethod
    def ordered(x):
        return (*x[:-2], x[-1], x[-2]) if isinstance(x, tuple) else x.swapaxes(-1, -2)

    @staticmethod
    def ordered_values(x):
        return x

    @staticmethod
    def packed(codes):
        return packed_codes(codes, 4, 128)

    def specs(self, spec):
        of_groups = P(*spec[:-2], spec[-1], spec[-2])
        return type(self)(spec, of_groups, None if self.zero is None else of_groups)

    def rows(self, start, stop):
        return type(self)(
            self.values[start:stop], *(x if x is None else x[:, start:stop] for x in (self.scale, self.zero))
        )

    def in_order(self, x):
        return x

    def values_and_scale(self, dtype):
        scale = self.ordered(self.scale)[..., None].astype(jnp.float32)
        zero = 8 if self.zero is None else self.ordered(self.zero)[..., None]
        codes = codes_of(self.values.reshape(*self.values.shape[:-1], -1, 1, 128)).reshape(*scale.shape[:-1], -1)
        return ((codes - zero).astype(jnp.float32) * scale).astype(dtype).reshape(self.shape), None

    @staticmethod
    def bits_of(words: Array, k: int) -> Array:
        """The k-th codes of uint32 words of two rows, as the bits of two bfloat16 numbers: a code by its bits alone
        becomes 128 more."""
        return words >> 4 * k & 0xF000F | 0x43004300

    def offset(self, n: int, count: int) -> Array | int | None:
        """By how much the numbers of bits_of are too large in `count` groups from the n-th on: float32 [count, O] of
        whole numbers, one for all, or None."""
        return 136 if self.zero is None else 128 + self.zero[n : n + count].astype(jnp.float32)


def quantize_in_groups(x: Array, groups: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """x [.., C] as uint8 codes from 0 to 15 [.., C], 8 for a zero, and scales [.., groups] in `dtype`. The scale of a
    group is the one with the least squared error among those that make its largest number one of INT4_LARGEST."""
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    largest = jnp.take_along_axis(x, jnp.argmax(jnp.abs(x), axis=-1, keepdims=True), axis=-1)
    scales = jnp.stack([(largest / n).astype(dtype) for n in INT4_LARGEST])
    divisors = jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    codes = jnp.clip(jnp.round(x / divisors), -8, 7)
    best = jnp.argmin(jnp.sum((codes * divisors - x) ** 2, axis=-1, keepdims=True), axis=0)[None]
    codes, scales = (jnp.take_along_axis(a, best, axis=0)[0] for a in (codes, scales))
    return (codes + 8).astype(jnp.uint8).reshape(*x.shape[:-2], -1), scales[..., 0]


INT4_LARGEST = (-8.0, 7.0)  # codes less 8


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
    of the weight are unpacked while the piece before is multiplied. If the same turn of the loop did both, XLA would
    fuse the change of shape between them with the unpacking, which then takes five times as long."""
    x, O = w.in_order(padded(x, w)), w.shape[0]
    if len(x) <= 4:
        return jnp.concatenate([int4_row_product(row, w) for row in x])
    pieces = pieces_of(w, 2**21, least=4)
    rows = O // pieces

    def unpack(i, w):
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * rows, rows), w).numbers(x.dtype)

    def step(i, state):
        numbers, y = state
        tied, i = jax.lax.optimization_barrier((w, i))  # as in over_rows
        part = plain_cpu_product(x, numbers.reshape(rows, -1))
        return unpack(i + 1, tied), jax.lax.dynamic_update_slice_in_dim(y, part, i * rows, axis=1)

    return jax.lax.fori_loop(0, pieces, step, (unpack(0, w), jnp.zeros((len(x), O), jnp.float32)))[1]


def int4_row_product(x: Array, w: Int4) -> Array:
    """x [C] in the order of w, times w [O, C]: float32 [1, O]. XLA makes one unrolled loop over the rows of w, with the
    lanes side by side in vector registers. Nothing is shifted: a code is masked where it stands in its word, and x is
    divided by that power of two. A lane's sum is scaled once."""
    lanes = w.values.shape[-1]
    scale, zero = w.of_lanes(w.scale), None if w.zero is None else w.of_lanes(w.zero)
    parts = scale.shape[1]
    if scale.shape[1:] != (1, w.scale.shape[1]):  # XLA would not keep lanes together where it repeats numbers
        scale, zero = jax.lax.optimization_barrier((scale, zero))
    x = x.astype(jnp.float32)
    added = jnp.sum(x.reshape(parts, -1, lanes), axis=1)  # what is taken off for each unit of the zero
    # XLA repeats no division in a loop. With more dimensions it would have a lane's numbers of x side by side.
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
    """product for GPUs in 4 bits. For up to 8 rows it is a sum of terms for each, which XLA computes in one loop that
    reads and unpacks w once. It would not for more, so some rows of w at a time are unpacked to memory and multiplied.
    """
    x, O = padded(x, w), w.shape[0]
    if len(x) <= 8:
        numbers, rows = w.numbers(jnp.float32), x.astype(jnp.float32).reshape(len(x), -1, 32)
        return jnp.stack([jnp.sum(numbers * row.T, axis=(1, 2)) for row in rows])
    x = w.in_order(x)
    size, y = O // pieces_of(w, 2**24), []
    for first in range(0, O, size):
        piece, x, y = jax.lax.optimization_barrier((w.rows(first, first + size), x, y))  # no piece before its turn
        y.append(product(x, Plain(piece.values_and_scale(x.dtype)[0])))
    return jnp.concatenate(y, axis=1)


def lanes_kernel_product(x: Array, w: Int4Lanes) -> Array:
    """x [B, C], B a multiple of 8, times w [O, C] in a kernel: float32 [B, O]."""
    (B, C), O = x.shape, w.shape[0]
    group, total = C // w.scale.shape[0], jnp.zeros((B, O), jnp.float32)
    add = add_scaled_sums if B * 128 // group <= 256 else add_scaled_numbers
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


def lanes_product(x: Array, w: Int4Lanes, block: int | None = None, interpret=False) -> Array:
    """streamed_product of a weight in 4 bits: x [B, C] times w [O, C]: float32 [B, O]."""
    (B, C), O = x.shape, w.shape[0]
    block = block or max(128, 2**21 // (C // 2) // 128 * 128)
    x = jnp.pad(x, ((0, -B % 8), (0, 0)))

    def kernel(x, w, y):
        y[...] = lanes_kernel_product(x[...], jax.tree.map(lambda a: a[...], w))

    def rows_of(a):
        return pl.BlockSpec((block, a.shape[1]), lambda i: (i, 0))

    def columns_of(a):
        return pl.BlockSpec((a.shape[0], block), lambda i: (0, i))

    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((len(x), O), jnp.float32),
        grid=(pl.cdiv(O, block),),
        in_specs=[
            pl.BlockSpec(x.shape, lambda i: (0, 0)),
            Int4Lanes(rows_of(w.values), columns_of(w.scale), None if w.zero is None else columns_of(w.zero)),
        ],
        out_specs=pl.BlockSpec((len(x), block), lambda i: (0, i)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),  # shared by the two cores of a v5p
        cost_estimate=kernel_cost(2 * B * O * C, w),
        interpret=interpret,
        name="lanes_product",
    )(x, jax.tree.map(lambda a: pltpu.with_memory_space_constraint(a, pltpu.HBM), w))
    return y[:B]


def tpu_lanes_product(x: Array, w: Int4Lanes) -> Array:
    """product for TPUs in 4 bits."""
    return lanes_product(padded(x, w), w) if len(x) <= 32 else tpu_product(x, w)


PRODUCTS["cpu", Int4] = int4_cpu_product
PRODUCTS["gpu", Int4] = int4_gpu_product
PRODUCTS["tpu", Int4] = tpu_product
PRODUCTS["tpu", Int4Lanes] = tpu_lanes_product


# ---------------------------------------------------------------------------------------------------------------------
# Experts on each machine


def has_few_pairs(ids: Array, E: int) -> bool:
    """Whether each pair should read its own expert, at full speed. Many pairs share the experts that they read, and
    their rows are sorted by expert."""
    return ids.size < 3 * E


def cpu_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate) -> Array:
    """local_experts for CPUs."""
    E = w_down.shape[0]
    mean = ids.size // (E * jax.lax.axis_size("ep"))  # tokens of an expert
    tile = 1 if has_few_pairs(ids, E) else min(2 * power_of_two(mean), 64)
    columns = cpu_columns(w_down, w_gate_up.shape[1] // 2, tile)
    return expert_loop(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile, columns)


def gpu_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate) -> Array:
    """local_experts for GPUs."""
    if has_few_pairs(ids, w_down.shape[0]):
        return gathered_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate)
    return expert_loop(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile=512)


def tpu_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate) -> Array:
    """local_experts for TPUs."""
    if w_gate_up.shape[1] // 2 % 128:  # the kernel fetches whole lanes
        return expert_loop(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile=128)
    return expert_kernel(padded(x, w_gate_up), ids, scores, w_gate_up, w_down, gate_up_bias, activate)


EXPERT_COLUMNS = {}  # of an expert, by format: the first that divides them is what CPUs multiply one row with at a time
EXPERT_PRODUCTS = {}  # by format: what takes the place of expert_product
FAST["local_experts", "cpu"], FAST["local_experts", "gpu"] = cpu_experts, gpu_experts
FAST["local_experts", "tpu"] = tpu_experts


def cpu_columns(w_down: Format, F: int, rows: int) -> int:
    """How many of an expert's F columns CPUs multiply with `rows` rows at a time: as its format says for one row. For
    more rows they are whole groups of the format, of which 8 MB in bfloat16 stay in a processor's caches."""
    if rows == 1:
        return next((n for n in EXPERT_COLUMNS.get(type(w_down), (2048,)) if F % n == 0), F)
    group = math.lcm(*(w_down.shape[2] // a.shape[-1] for a in jax.tree.leaves(w_down) if a.ndim > 2))
    fewest = ceil_div(w_down.shape[1] * F, 2**22)
    return next((F // n for n in range(fewest, 4 * fewest) if F % (n * group) == 0), F)


def expert_loop(
    x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile: int, columns: int | None = None
) -> Array:
    """For CPUs, and GPUs with many rows: a loop over visits, and over pieces of their experts, of so many columns, or
    of all. A visit is an expert and at most `tile` of the tokens that chose it, whose rows lie together since pairs are
    sorted by expert. Up to `tile` tokens are not sorted: all of them are multiplied with every expert that one of them
    chose."""
    (B, k), (E, D, _), F, x = ids.shape, w_down.shape, w_gate_up.shape[1] // 2, padded(x, w_gate_up)
    columns, is_sorted = columns or F, tile < B
    counts = jnp.sum(ids.ravel() == jnp.arange(E)[:, None], axis=1)  # the pairs of each expert
    visits = ceil_div(counts, tile) if is_sorted else (counts > 0).astype(jnp.int32)
    ends, steps = jnp.cumsum(visits), jnp.arange(min(E, B * k) + B * k // tile)  # steps: as many as there can be
    expert = jnp.sum(ends <= steps[:, None], axis=1)  # of each visit
    first = jnp.zeros_like(steps)  # its first row
    if is_sorted:
        first = (jnp.cumsum(counts) - counts)[expert] + (steps - (ends - visits)[expert]) * tile
        order = jnp.argsort(ids.ravel())
        # The last visit of an expert may go beyond its pairs: these have other experts, or none.
        x = x[jnp.pad(order // k, (0, tile))]
        ids = jnp.pad(ids.ravel()[order], (0, tile), constant_values=E)[:, None]
        scores = jnp.pad(scores.ravel()[order], (0, tile))[:, None]
    tile = min(tile, B)

    def step(i, out):
        # The barrier ties the weights to i: otherwise XLA for CPUs would convert all experts before the loop.
        weights, i = jax.lax.optimization_barrier(((w_gate_up, w_down, gate_up_bias), i))
        visit, column = i // (F // columns), i % (F // columns) * columns
        e, begin = expert[visit], first[visit]

        def part(w, axis, start):  # of the expert e, `columns` of an axis; all of it, if it has zeros beside F
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
        gate, up = (multiply(of_visit(x), part(weights[0], 1, start + column)) for start in (0, F))
        if gate_up_bias is not None:
            gate, up = (y + part(weights[2], 1, start + column) for y, start in ((gate, 0), (up, F)))
        h = activate(gate, up, score).astype(x.dtype)
        y = of_visit(out) + multiply(h, part(weights[1], -1, column))
        return jax.lax.dynamic_update_slice_in_dim(out, y, begin, axis=0)

    out = jax.lax.fori_loop(0, ends[-1] * (F // columns), step, jnp.zeros((len(x), D), jnp.float32))
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
    y = jnp.sum(x[:, None] * values[expert].astype(jnp.float32), axis=-1)
    return y if scale is None else y * scale[expert]


def gathered_experts(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate) -> Array:
    """For GPUs and a few pairs, each of which reads its expert. (A pair whose expert is on another device reads the
    last one here, times 0.)"""
    (B, k), E = ids.shape, w_down.shape[0]
    expert = jnp.minimum(ids.ravel(), E - 1)
    gate_up = expert_product(jnp.repeat(x, k, axis=0), w_gate_up, expert)
    gate, up = jnp.split(gate_up if gate_up_bias is None else gate_up + gate_up_bias[expert], 2, axis=-1)
    h = activate(gate, up, jnp.where(ids < E, scores, 0).reshape(-1, 1)).astype(x.dtype)
    # The barrier: one sum over columns and pairs would give a GPU too few rows to work on.
    of_pairs = jax.lax.optimization_barrier(expert_product(h, w_down, expert))
    return jnp.sum(of_pairs.reshape(B, k, -1), axis=1)


GROUP_BYTES = 48 * 2**20  # of VMEM, for the rows of a group of tokens and their sums


def expert_kernel(x, ids, scores, w_gate_up, w_down, gate_up_bias, activate, tile: int = 128, interpret=False) -> Array:
    """One Pallas kernel for TPUs: it fetches the experts that tokens chose, and no others.

    It first lists its visits, in less time than XLA's launches would take. Then it goes through them, 128 of an
    expert's columns at a time, or 512 in 4 bits and maybe fewer in the end. It fetches the next piece of gate, up and
    down while it multiplies this one. The hidden columns never leave the chip, and the sums stay in VMEM until the end.
    A device without work fetches nothing.

    Up to `tile` tokens are all multiplied with every expert that one of them chose, so a visit is an expert. Of more
    tokens, a visit is an expert and at most `tile` of those that chose it: the kernel copies their rows together, and
    adds each result to the sum of its token. The pairs are sorted before, by expert. The grid is groups of tokens, as
    many as VMEM holds.
    """
    (B, width), (E, D, _), k = x.shape, w_down.shape, ids.shape[1]
    F, columns = w_gate_up.shape[1] // 2, w_down.kernel_columns
    pieces, unit = ceil_div(F, columns), math.gcd(F, columns)
    units, last_units = columns // unit, (F - 1) % columns // unit + 1  # of a piece, and of an expert's last one
    is_sorted = tile < B
    fitting, fewest = GROUP_BYTES // (width * (x.dtype.itemsize + 4)), 8 if isinstance(w_down, Int4Lanes) else 1
    group = min(power_of_two(B), power_of_two(fitting + 1) // 2) if is_sorted else max(B, fewest)
    groups, pairs = ceil_div(B, group), group * k
    visits = min(E, pairs) + pairs // tile * is_sorted
    dtype, missing = x.dtype, ((0, groups * group - B), (0, 0))
    x, ids, scores = jnp.pad(x, missing), jnp.pad(ids, missing, constant_values=E), jnp.pad(scores, missing)
    scores, ids = scores_by_expert(ids, scores, E), ids.reshape(groups, pairs)
    listed, tokens = ids, jnp.zeros(1, jnp.int32)
    if is_sorted:
        counts = jnp.sum(ids.reshape(groups, group, k, 1) == jnp.arange(E), axis=(1, 2), dtype=jnp.int32)
        listed = jnp.pad(jnp.cumsum(counts, axis=1), ((0, 0), (1, 0)))
        x, tokens = packed(x), (jnp.argsort(ids, axis=1) // k).astype(jnp.int32).ravel()

    def kernel(listed, tokens, x, scores, weights, out, seen, active, first, rows, picked, y, buffers, arrived):
        # listed has the experts of the pairs or, if they are sorted, where each expert's pairs begin; tokens the token
        # of each sorted pair. active has the expert of each visit, first its first pair. seen[e] is 1 once e is active.
        # rows, picked and y are a visit's rows, scores and results.
        def begin_of(e):
            return listed[pl.program_id(0) * (E + 1) + e]

        def clear(e, _):
            seen[e] = 0

        def enter(i, count):
            e = listed[i]
            active[count] = e  # the next one takes this place if this is in the list already
            count += 1 - seen[e]
            seen[e] = 1
            return count

        def enter_pairs(e, count):
            begin, end = begin_of(e), begin_of(e + 1)

            def enter_tile(i, count):
                active[count], first[count] = e, begin + i * tile
                return count + 1

            return jax.lax.fori_loop(0, pl.cdiv(end - begin, tile), enter_tile, count)

        if is_sorted:
            steps = jax.lax.fori_loop(0, E, enter_pairs, 0) * pieces
        else:
            jax.lax.fori_loop(0, E, clear, None)
            seen[E] = 1  # what is elsewhere never enters the list
            steps = jax.lax.fori_loop(0, pairs, enter, 0) * pieces

        def for_copies(i, action):
            """action(copy) for all of the i-th piece: rows of gate and up, maybe with biases; columns of down."""
            e, f, slot = active[jax.lax.div(i, pieces)], jax.lax.rem(i, pieces), jax.lax.rem(i, 2)

            def copy(w, buffers, axis, i, n, count):
                places = places_of(w, e, axis, i, n, count)
                for a, buffer, place in zip(jax.tree.leaves(w), jax.tree.leaves(buffers), places, strict=True):
                    target = buffer.at[slot, *(pl.ds(0, n) for n in piece_shape(a, place))]
                    action(pltpu.make_async_copy(a.at[place], target, arrived.at[slot]))

            def copy_all(count):
                *gate_up, down = weights
                for of_half, first in zip(buffers, (0, F // unit), strict=False):
                    for w, buffer in zip(gate_up, of_half, strict=True):
                        copy(w, buffer, 0, first + f * units, unit, count)
                copy(down, buffers[2], 1, f, columns, 1)

            if last_units == units:
                copy_all(units)
            else:
                pl.when(f < pieces - 1)(lambda: copy_all(units))
                pl.when(f == pieces - 1)(lambda: copy_all(last_units))

        def start(i):
            pl.when(i < steps)(lambda: for_copies(i, lambda copy: copy.start()))

        def for_rows(visit, action):
            """action(row of the visit, row of its token), for each pair of the visit."""
            begin, end = first[visit], begin_of(active[visit] + 1)

            def of_row(n, _):
                action(pl.ds(n, 1), pl.ds(tokens[pl.program_id(0) * pairs + begin + n], 1))

            jax.lax.fori_loop(0, jnp.minimum(end - begin, tile), of_row, None)

        def collect(row, token):
            rows[row], picked[row] = x[token], scores[token]

        def add_to_token(row, token):
            out[token] += y[row]

        def add(i, _):
            start(i + 1)
            visit, f, slot = jax.lax.div(i, pieces), jax.lax.rem(i, pieces), jax.lax.rem(i, 2)
            if is_sorted:

                @pl.when(f == 0)
                def begin():
                    for_rows(visit, collect)
                    y[...] = jnp.zeros(y.shape, jnp.float32)

            for_copies(i, lambda copy: copy.wait())

            def multiply(x, w, *bias):
                w = jax.tree.map(lambda buffer: buffer[slot], w)
                return sum((one.values[slot] for one in bias), kernel_product(x, w))

            h, score = (unpacked(rows[...], dtype)[:, :width], picked) if is_sorted else (x[...], scores)
            is_e = jax.lax.broadcasted_iota(jnp.int32, (1, E), 1) == active[visit]
            score = jnp.sum(jnp.where(is_e, score[...], 0), axis=1, keepdims=True)
            gate, up = (multiply(h, *w) for w in buffers[:2])
            h = activate(gate, up, score)
            if last_units < units:  # beyond them are rows of the piece before
                h = jnp.where(jax.lax.broadcasted_iota(jnp.int32, h.shape, 1) < F - f * columns, h, 0)
            total = y if is_sorted else out
            total[...] += multiply(h.astype(dtype), buffers[2])
            if is_sorted:
                pl.when(f == pieces - 1)(lambda: for_rows(visit, add_to_token))

        start(0)
        out[...] = jnp.zeros(out.shape, jnp.float32)
        jax.lax.fori_loop(0, steps, add, None)

    def piece_shape(a, place):  # without the expert
        sizes = [n if part == slice(None) else getattr(part, "size", 1) for part, n in zip(place, a.shape, strict=True)]
        return sizes[a.ndim == 3 :]

    def two_slots(w, axis):  # for a piece of a matrix, or of biases
        arrays, tree = jax.tree.flatten(w)
        places = places_of(w, 0, axis, 0, columns)
        return tree.unflatten(
            pltpu.VMEM((2, *piece_shape(a, at)), a.dtype) for a, at in zip(arrays, places, strict=True)
        )

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
    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((groups * group, D), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups,),
            in_specs=[of_group(x.shape[1]), of_group(E), jax.tree.map(lambda _: in_hbm, weights)],
            out_specs=of_group(D),
            scratch_shapes=[
                *(pltpu.SMEM((n + 1,), jnp.int32) for n in (E, visits, visits)),  # seen, active, first
                pltpu.VMEM((tile, x.shape[1]), x.dtype),
                *(pltpu.VMEM((tile, width), jnp.float32) for width in (E, D)),
                (*[[two_slots(w, 0) for w in gate_up]] * 2, two_slots(w_down, 1)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=60 * 2**20),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0),
        interpret=interpret,
        name="experts",
    )(listed.ravel(), tokens, x, scores, weights)
    return y[:B]


def kernel_product(x: Array, w: Format) -> Array:
    """x [B, C] times a piece w [O, C] of a matrix in a kernel for TPUs: float32 [B, O]."""
    if isinstance(w, Int4Lanes):
        return lanes_kernel_product(x, w)
    values, scale = w.values_and_scale(x.dtype)
    y = einsum("bc,oc->bo", x, values)
    return y if scale is None else y * scale


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


def packed(x: Array) -> Array:
    """x [B, D] of 16 bits as uint32 [B, D / 2], one half over the other: a kernel cannot copy a row of 16 bits. D is
    first rounded up, so that a half is whole lanes."""
    if x.dtype == jnp.float32:
        return x
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 256)))
    low, high = (jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in jnp.split(x, 2, axis=1))
    return low | high << 16


def unpacked(x: Array, dtype: jnp.dtype) -> Array:
    """The inverse of packed, but for the rounding up."""
    if dtype == jnp.float32:
        return x
    halves = (x & 0xFFFF, x >> 16)
    return jnp.concatenate([jax.lax.bitcast_convert_type(half.astype(jnp.uint16), dtype) for half in halves], axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# Routing on TPUs


def routing_kernel(scores, choice, best: int, config: Config, interpret=False) -> tuple[Array, Array]:
    """chosen_experts as one Pallas kernel for TPUs: k times it takes the highest choice, and strikes it out. XLA's
    dozen small ones would take longer than to read the experts."""
    (B, E), k = scores.shape, config.num_experts_per_tok
    groups, size = config.n_group, E // config.n_group

    def highest(x, lanes):  # x [B, n]: the highest and, of equal ones, the first lane that has it, [B, 1] each
        value = jnp.max(x, axis=1, keepdims=True)
        return value, jnp.min(jnp.where(x == value, lanes, x.shape[1]), axis=1, keepdims=True)

    def kernel(scores, choice, ids, weights):
        lanes = jax.lax.broadcasted_iota(jnp.int32, (tile, E), 1)
        columns = jax.lax.broadcasted_iota(jnp.int32, (tile, k), 1)
        left = choice[...]
        if config.topk_group < groups:
            group_of = jax.lax.div(lanes, size)
            group_lanes = jax.lax.broadcasted_iota(jnp.int32, (tile, groups), 1)
            totals = jnp.zeros((tile, groups), jnp.float32)
            for group in range(groups):
                rest, total = jnp.where(group_of == group, left, MASKED), 0.0
                for _ in range(best):
                    value, lane = highest(rest, lanes)
                    rest, total = jnp.where(lanes == lane, MASKED, rest), total + value
                totals = jnp.where(group_lanes == group, total, totals)
            is_eligible = lanes < 0
            for _ in range(config.topk_group):
                _, group = highest(totals, group_lanes)
                totals = jnp.where(group_lanes == group, MASKED, totals)
                is_eligible |= group_of == group
            left = jnp.where(is_eligible, left, MASKED)
        chosen, found = jnp.zeros((tile, k), jnp.int32), jnp.zeros((tile, k), jnp.float32)
        for n in range(k):
            _, lane = highest(left, lanes)
            left = jnp.where(lanes == lane, 2 * MASKED, left)  # below those that are not eligible
            score = jnp.sum(jnp.where(lanes == lane, scores[...], 0), axis=1, keepdims=True)
            chosen, found = jnp.where(columns == n, lane, chosen), jnp.where(columns == n, score, found)
        ids[...] = chosen
        weights[...] = weighed(found, config)

    tile = min(B, 128)
    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((B, k), jnp.int32), jax.ShapeDtypeStruct((B, k), jnp.float32)),
        grid=(pl.cdiv(B, tile),),
        in_specs=[pl.BlockSpec((tile, E), lambda i: (i, 0))] * 2,
        out_specs=[pl.BlockSpec((tile, k), lambda i: (i, 0))] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=kernel_cost(8 * k * B * E, (scores, choice)),
        interpret=interpret,
        name="routing",
    )(scores, choice)


FAST["chosen_experts", "tpu"] = routing_kernel


# ---------------------------------------------------------------------------------------------------------------------
# Products for each head on each machine


def head_product(subscripts: str, x: Array, w: Array) -> Array:
    """einsum of x [B, N, ..] and w [N, .., ..], int8 cast to x's dtype: float32 [B, N, ..]. On CPUs it is in float32
    (see head_dtype), on TPUs with at least 8 rows: XLA makes slow vector code of one."""
    dtype, rows = jnp.float32 if platform() == "cpu" else x.dtype, 8 if platform() == "tpu" else 1
    of_rows = jnp.pad(x, ((0, max(rows - len(x), 0)), (0, 0), (0, 0)))
    return einsum(subscripts, of_rows.astype(dtype), w.astype(dtype))[: len(x)]


# ---------------------------------------------------------------------------------------------------------------------
# Attention on TPUs


def kernel_cost(flops: int, read) -> pl.CostEstimate:
    """The cost, for the compiler, of a kernel that reads the arrays of the pytree `read`."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
    return pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0)


def attention_kernel(
    q, new, cache, starts, places=None, *, mask: Mask, T: int, R=1, run=None, queries=1024, block=None, interpret=False
):
    """store_and_attend as one Pallas kernel for TPUs; scores stay in VMEM (as in Dao et al. 2022, "FlashAttention").
    Few tokens are `new`, and it stores them; for many `new` is (), as they are in the cache already.

    The grid is (rows of the batch, kv heads, tiles of queries, blocks of keys). A tile is about `queries` of them: some
    of M, with all A of each. A block that a tile does not see is neither fetched nor computed: its index is mapped to a
    block that is there already. Only blocks at the edge of what a tile sees are masked. Blocks are those of a row's
    positions; if the cache is a ring, they lie there modulo its blocks. Of few tokens all kv heads of a block are
    fetched at once, since one is too few bytes.

    That the kernel stores the new tokens saves launches and, for the scales, a change of layout. A single slot of a
    packed dtype cannot be written, so the tile around it is patched in VMEM, before queries attend to it, and written
    back. If there are several tokens, one more step of the grid writes the second tile that they may reach. The cache
    goes out in the memory that it came in: a row's tile is written after the block that holds it was read, and other
    rows never read it.

    `block` is by default 1,024 slots, or 512 if keys and values are wide; of few tokens a power of two that makes at
    most half a MiB of keys, or 128. It is cut to a divisor of the slots.
    """
    (B, K, A, M, width), S = q.shape, cache[0].shape[2]
    split = cache[0].shape[-1]
    W = cache[1].shape[-1] if width == split else split
    fitting = 2**19 // (K * split * jax.tree.leaves(cache)[0].dtype.itemsize)
    many = 1024 if sum(side.shape[-1] for side in cache) < 1024 else 512
    block = math.gcd(S, block or (max(128, power_of_two(fitting + 1) // 2) if new else many))
    lanes = min(block, 128)  # of m and l, and as many slots in a tile that is written back
    # kv heads of a grid step; queries of a tile for each of A; and the positions that they span
    heads, tile = (K, M) if new else (1, min(M, max(queries // power_of_two(A), 16)))
    span, blocks = T if new else tile, S // block
    wraps, span_seen = mask.wraps(R * S, T), mask.window or mask.chunk

    # No dividend here is negative, so lax.div, which truncates, equals //, and saves the instructions of rounding down.
    def stored(position):  # the last position with a slot that is not beyond this one
        return position if wraps else jnp.clip(position, 0, R * S - 1)

    def last_block(start, t):
        return jax.lax.div(stored(start + (t + 1) * span - 1), R * block)

    def first_block(start, t):
        return jnp.minimum(jax.lax.div(mask.first_seen(start + t * span), R * block), last_block(start, t))

    def tile_of(position):  # the tile of `lanes` slots to patch and write for a new token
        return jax.lax.div(stored(position), R * lanes)

    steps = blocks
    if span_seen:
        steps = (span_seen + span - 2) // (R * block) + 2
        steps = steps if wraps else min(steps, blocks)
    if not new:
        steps = jnp.minimum(steps, last_block(jnp.max(starts), pl.cdiv(M, tile) - 1) + 1)
    steps += bool(new) and T > 1

    def kernel(starts, places, q, new, cache, out, new_cache, m, l, acc):
        # m and l are as wide as scores are, up to 128 lanes. m repeats one number, and l has sums of some keys each: to
        # add up lanes is slow, and is done once, at the end.
        t, n, start, r = pl.program_id(2), pl.program_id(3), starts[pl.program_id(0)], shard_index(R)
        first, last = first_block(start, t), last_block(start, t)
        i = jnp.minimum(first + n, last)

        def side(x, h):  # [slots, ..] of a kv head, and the scale of each slot [1, slots]
            values, *scale = jax.tree.leaves(x)
            scales = slice(h, h + 1) if heads == K else pl.ds(pl.program_id(1), 1)
            return values[0, h].astype(q.dtype), scale[0][0, scales] if scale else 1.0

        @pl.when(n == 0)
        def begin():
            m[...] = jnp.full(m.shape, MASKED)
            l[...] = jnp.zeros(l.shape)
            acc[...] = jnp.zeros(acc.shape)

        def slots_of(tile):
            return pl.ds(0 if lanes == block else pl.multiple_of(tile * lanes - i * block, lanes), lanes)

        def is_here(tile):
            return jax.lax.div(tile, block // lanes) == i

        def patch(tile):
            def patch_side(x, token):
                slots = tile * lanes + jax.lax.broadcasted_iota(jnp.int32, (1, K, lanes) + (1,) * (x.ndim - 3), 2)
                patched = x[:, :, slots_of(tile)]
                for j in range(T):
                    patched = jnp.where(slots * R + r == start + j, token[:, :, j : j + 1], patched)
                x[:, :, slots_of(tile)] = patched

            @pl.when(is_here(tile))
            def patch_here():
                jax.tree.map(patch_side, cache, as_stored(jax.tree.map(lambda x: x[...], new), cache))

        def write_back(tile):
            def write_side(x, y):
                y[...] = x[:, :, slots_of(tile)]

            jax.tree.map(write_side, cache, new_cache)

        def fold(seen):
            for h in range(heads):
                (first, first_scale), (second, second_scale) = (side(x, h) for x in cache)
                queries = q[0, h].reshape(A * tile, width)
                scores = einsum("th,sh->ts", queries[:, :split], first) * first_scale
                if width > split:
                    scores += einsum("th,sh->ts", queries[:, split:], second) * second_scale
                    second, second_scale = first, first_scale
                scores = softcapped(scores, mask.softcap)
                if seen is not None:
                    scores = jnp.where(seen, scores.reshape(A, tile, block), MASKED).reshape(scores.shape)
                new_m = jnp.maximum(m[h], jnp.max(scores, axis=-1, keepdims=True))
                alpha, p = jnp.exp(m[h] - new_m), jnp.exp(scores - jnp.tile(new_m, (1, block // lanes)))
                m[h] = new_m
                l[h] = l[h] * alpha + sum(jnp.split(p, block // lanes, axis=1))
                acc[h] = acc[h] * alpha[:, :1] + einsum("ts,sw->tw", (p * second_scale).astype(q.dtype), second)

        @pl.when(first + n <= last)
        def visit():
            if new:
                patch(tile_of(start))
                if T > 1:
                    patch(tile_of(start + T - 1))
                pl.when(is_here(tile_of(start)))(lambda: write_back(tile_of(start)))
            keys = (i * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)) * R + r
            first_query, offsets = start + t * span, 0
            if span > 1:
                offsets = jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
                offsets = jnp.fmod(jax.lax.div(offsets, run or M // T), T) if new else offsets
            is_whole = (i + 1) * block * R <= first_query + 1
            if span_seen:
                is_whole &= i * block * R >= mask.first_seen(first_query + span - 1)
            pl.when(is_whole)(lambda: fold(None))
            pl.when(~is_whole)(lambda: fold(mask.is_attended(keys, first_query + offsets)[None]))

        @pl.when(n == pl.num_programs(3) - 1)
        def finish():
            if new and T > 1:
                write_back(tile_of(start + T - 1))
            total = jnp.sum(l[...], axis=-1, keepdims=True)
            out[0, :, :, :, :W] = (acc[...] / total).reshape(heads, A, tile, W)
            out[0, :, :, :, W:] = (m[:, :, :1] + jnp.log(total)).reshape(heads, A, tile, 1)

    def of_tile(width):
        return pl.BlockSpec((1, heads, A, tile, width), lambda b, h, t, n, *_: (b, h, 0, t, 0))

    def of_tokens(x):
        return pl.BlockSpec((1, *x.shape[1:]), lambda b, *_: (b,) + (0,) * (x.ndim - 1))

    def slots(x, size, index):  # `size` slots: the index(start, t, n)-th of the row, with the scales of all heads
        def at(b, h, t, n, starts, places):
            i = jax.lax.rem(index(starts[b], t, n), S // size) if wraps else index(starts[b], t, n)
            row = b if new else places[b]
            return (row, h, i, 0) if x.ndim == 4 else (row, 0, i)

        return pl.BlockSpec((1, heads, size, x.shape[3]) if x.ndim == 4 else (1, K, size), at)

    def read(x):  # the block to attend to
        return slots(x, block, lambda start, t, n: jnp.minimum(first_block(start, t) + n, last_block(start, t)))

    def write(x):  # the tile of the first new token, at last that of the last one
        return slots(x, lanes, lambda start, t, n: tile_of(start + jnp.where(n == steps - 1, T - 1, 0)))

    written = ()
    if new:  # otherwise XLA moves the whole cache to VMEM and back if it fits
        written = cache = jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), cache)
    out, cache = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((*q.shape[:4], W + 1), jnp.float32),
            jax.tree.map(lambda x: pltpu.HBM(x.shape, x.dtype), written),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, K // heads, pl.cdiv(M, tile), steps),
            in_specs=[of_tile(width), jax.tree.map(of_tokens, new), jax.tree.map(read, cache)],
            out_specs=(of_tile(W + 1), jax.tree.map(write, written)),
            scratch_shapes=[pltpu.VMEM((heads, A * tile, width), jnp.float32) for width in (lanes, lanes, W)],
        ),
        input_output_aliases={5 + i: 1 + i for i in range(len(jax.tree.leaves(written)))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=kernel_cost(2 * B * K * A * M * S * (width + W), cache),
        interpret=interpret,
        name="ragged_attention",
    )(starts, starts if places is None else places, q, new, cache)
    return out, cache


# ---------------------------------------------------------------------------------------------------------------------
# Exchange between devices


@by_machine
def exchange(x: Array, R: int) -> Array:
    """All-to-all among R consecutive devices of MODEL_AXES. x is [I, ..] with I a divisor of R: each group of R / I
    consecutive devices receives the same block. Returns [R, ..], a block from each device."""
    blocks = jnp.repeat(x, R // x.shape[0], axis=0)
    return jax.lax.all_to_all(blocks, MODEL_AXES, 0, 0, axis_index_groups=sharer_groups(R))


def exchange_kernel(x: Array, R: int, interpret: bool | pltpu.InterpretParams = False) -> Array:
    """exchange for TPUs: a block has some kilobytes, and launching XLA's all-to-all takes longer than moving them. Each
    device writes into the memory of the others, once all R have entered. A device leaves when it has a block from each,
    so all have passed the barrier by then: no signal of the next exchange is mistaken for one of this one, and no block
    of the next arrives too early."""
    receivers = R // x.shape[0]  # devices that receive the same block

    def kernel(x, y, semaphores):
        device, r = jax.lax.axis_index(MODEL_AXES), shard_index(R)
        group = [{MODEL_AXES: device - r + n} for n in range(R)]  # itself among them
        barrier = pltpu.get_barrier_semaphore()
        for other in group:
            pl.semaphore_signal(barrier, device_id=other)
        pl.semaphore_wait(barrier, R)
        sent, received = semaphores.at[0], semaphores.at[1]
        copies = [
            pltpu.make_async_remote_copy(x.at[n // receivers], y.at[r], sent, received, group[n]) for n in range(R)
        ]
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


FAST["exchange", "tpu"] = exchange_kernel
