"""Full-size decode steps compiled for machines that are not there: their collectives, copies and bytes."""

import itertools
import json
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, import_folder
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shared import folders

pytestmark = pytest.mark.optimized

FOLDERS = {name: import_folder(name) for name in folders()}
KERNEL = re.compile(r"%(ragged_attention|exchange|routing|experts|streamed_product)[.\d]* = ")
COLLECTIVE = re.compile(r"= [^=]*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* copy\(")
BITS = {"bf16": 16, "f32": 32, "s32": 32, "s8": 8, "u32": 32, "pred": 8}


def full_size(name, folder="llama3", **changes):
    config = json.loads((ROOT / folder / "configs" / f"{name}.json").read_text())
    config.get("text_config", config).update(changes)
    return FOLDERS[folder].model.Config.from_dict(config)


def compile_step(config, mesh, batch, slots, quantize, folder="llama3", quantize_cache="as weights", T=1):
    """The compiled decode step, with the cache in int8 if the weights are, unless `quantize_cache` says."""
    model, generate = FOLDERS[folder].model, FOLDERS[folder].generate

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("dp")))

    rows = generate.Rows(array(batch, slots + 1), *[array(batch)] * 3, array(batch, 2, dtype=jnp.uint32))
    weights = model.abstract_weights(config, mesh, jnp.bfloat16, quantize)
    quantize_cache = quantize if quantize_cache == "as weights" else quantize_cache
    cache = model.abstract_cache(config, mesh, batch, slots, jnp.bfloat16, quantize_cache)
    options = {"T": T, "config": config, "mesh": mesh, "sampling": generate.Sampling()}
    return generate.step.lower(weights, cache, rows, **options).compile()


def tpu_mesh(topology, tp, ep=1):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return FOLDERS["llama3"].model.make_mesh(1, ep, tp, devices=topology.devices[: ep * tp])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("folder", "name", "topology", "ep", "tp", "quantize", "slots", "T"),
    [
        ("llama3", "llama-3.1-8b", "v5e:2x4", 1, 8, None, 2048, 1),
        ("llama3", "llama-3.1-70b", "v5e:4x4", 1, 16, "int8", 2048, 1),
        ("llama3", "llama-3.1-70b", "v5e:4x4", 1, 16, "int8", 2048, 4),
        ("glm4", "glm-4-9b-0414", "v5e:4x4", 1, 16, None, 2048, 1),
        ("llama4", "llama-4-scout-17b-16e", "v5e:4x4", 1, 16, "int8", 4096, 1),
        ("qwen3", "qwen3-30b-a3b", "v5e:2x4", 4, 2, None, 2048, 1),
        ("qwen3_5", "qwen3.5-35b-a3b", "v5e:2x4", 2, 4, None, 2048, 1),
        ("gpt_oss", "gpt-oss-120b", "v5e:4x4", 2, 8, "int8", 2048, 1),
        ("mixtral", "mixtral-8x7b", "v5e:2x4", 1, 8, "int8", 2048, 1),
        ("gemma", "gemma-2-9b", "v5e:4x4", 1, 16, None, 8192, 1),
        ("glm4_moe", "glm-4.5-air", "v5e:4x4", 16, 1, "int8", 2048, 1),
        ("gpt2", "gpt2-xl", "v5e:2x4", 1, 8, None, 1024, 1),
    ],
)
def test_full_size_on_tpus(folder, name, topology, ep, tp, quantize, slots, T):
    """Two all-reduces a layer, one for the embedding, one all-gather for new tokens, and no other collective. A
    layer of each kind stands for all; test_plan.py compiles a whole model."""
    layers = 4 if folder in ("llama4", "qwen3_5") else 2
    config = full_size(name, folder, **{"n_layer" if folder == "gpt2" else "num_hidden_layers": layers})
    text = compile_step(config, tpu_mesh(topology, tp, ep), 8, slots, quantize, folder, T=T).as_text()
    counts, layers = Counter(COLLECTIVE.findall(text)), config.num_hidden_layers
    assert counts == {"all-reduce": 2 * layers + 1, "all-gather": 1}
    kernels = Counter(KERNEL.findall(text))
    attending = sum(config.mask(i) is not None for i in range(layers))  # others keep a state
    assert kernels["ragged_attention"] == attending
    assert kernels["exchange"] == (2 * attending if ep * tp > config.num_key_value_heads else 0)
    assert kernels["experts"] == sum("router" in layer for layer in FOLDERS[folder].model.weights_of(config)["layers"])
    assert largest_copy(text) < 2**20


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("folder", "name", "topology", "ep_tp", "batch", "slots", "quantize", "T"),
    [
        ("deepseek", "deepseek-r1", "v5e:8x8", (4, 16), 8, 512, "int8", 1),
        ("deepseek", "deepseek-r1", "v5e:8x8", (4, 16), 8, 512, "int8", 4),
        ("deepseek", "moonlight-16b-a3b", "v5e:2x2", (4, 1), 3, 4096, None, 1),
        ("glm4_flash", "glm-4.7-flash", "v5p:1x1x2", (1, 2), 1, 2048, None, 1),
        ("glm5", "glm-5.2", "v5e:8x8", (4, 16), 8, 1024, "int8", 1),
    ],
)
def test_latent_attention_on_tpus(folder, name, topology, ep_tp, batch, slots, quantize, T):
    """Three collectives a layer: the gather of what all heads need, after attention, after the feed-forward. A
    dense layer and one with experts stand for all."""
    of_glm5 = {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]} if folder == "glm5" else {}
    config = full_size(name, folder, num_hidden_layers=2, first_k_dense_replace=1, **of_glm5)
    model = FOLDERS[folder].model
    options = {"chips_per_host_bounds": [1, 1, 2]} if topology == "v5p:1x1x2" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    program = compile_step(config, model.make_mesh(1, *ep_tp, devices=devices), batch, slots, quantize, folder, T=T)
    text = program.as_text()
    counts, layers = Counter(COLLECTIVE.findall(text)), config.num_hidden_layers
    # A small gather may be turned into a sum of zeros; to embed and to choose the token take one each.
    assert counts.keys() <= {"all-reduce", "all-gather"} and counts.total() == 3 * layers + 2
    kernels, experts = Counter(KERNEL.findall(text)), sum(map(config.has_experts, range(layers)))
    assert kernels["ragged_attention"] == layers and kernels["exchange"] == 2 * layers
    assert kernels["experts"] == kernels["routing"] == experts
    assert largest_copy(text) < 2**20


@pytest.mark.sampled
@pytest.mark.parametrize(("T", "batch", "quantize"), [(1, 8, "int8"), (4, 3, None), (128, 1, "int8")])
def test_chosen_keys_on_tpus(T, batch, quantize):
    """With more slots than keys that are chosen: a step of a token, one with drafts, a piece of a prompt."""
    config = full_size("deepseek-v3.2", "deepseek", num_hidden_layers=1, n_routed_experts=8, n_group=1, topk_group=1)
    program = compile_step(config, tpu_mesh("v5e:2x4", 8), batch, 4096, "int8", "deepseek", quantize, T=T)
    kernels = Counter(re.findall(r"%(index_scores|lowest_chosen)[.\d]* = ", program.as_text()))
    assert kernels == {"index_scores": 1, "lowest_chosen": 1}


def test_experts_are_not_cut_finer_than_lanes():
    """The mesh where none is asked for: on TPUs ep takes what tp cannot."""
    wanted = [
        ("deepseek", "deepseek-r1", "v5e:8x8", (1, 4, 16)),
        ("deepseek", "moonlight-16b-a3b", "v5e:2x2", (1, 4, 1)),
    ]
    wanted += [("glm4_flash", "glm-4.7-flash", "v5e:2x4", (1, 2, 4))]
    wanted += [("llama4", "llama-4-maverick-17b-128e", "v5e:8x8", (1, 1, 64))]
    wanted += [("qwen3", "qwen3-30b-a3b", "v5e:2x4", (1, 4, 2)), ("gpt_oss", "gpt-oss-120b", "v5e:4x4", (1, 8, 2))]
    for folder, name, topology, shape in wanted:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        convert, weights = FOLDERS[folder].convert, FOLDERS[folder].model.weights_of(full_size(name, folder))
        assert convert.mesh_shape(weights, devices) == shape
        assert convert.mesh_shape(weights, jax.devices()) == (1, 1, 8)
        assert convert.mesh_shape(weights, jax.devices(), dp=2, ep=2) == (2, 2, 2)
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:8x8").devices
    convert, model = FOLDERS["deepseek"].convert, FOLDERS["deepseek"].model
    weights = model.in_format(model.weights_of(full_size("kimi-k2", "deepseek")), "int4")
    assert convert.mesh_shape(weights, devices) == (1, 16, 4)  # 512 columns


@pytest.mark.sampled
@pytest.mark.parametrize(("batch", "quantize_cache"), [(1, None), (128, "int8")])
def test_latent_caches_of_other_shapes(batch, quantize_cache):
    """Few slots a device, and many rows: the cache is not copied."""
    config, model = (
        full_size("deepseek-r1", "deepseek", num_hidden_layers=2, first_k_dense_replace=1),
        FOLDERS["deepseek"].model,
    )
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = model.make_mesh(1, 4, 4, devices=devices)
    program = compile_step(config, mesh, batch, 600, "int8", "deepseek", quantize_cache)
    # Of 128 rows the queries are laid out anew, 1.25 MiB; a layer's cache has five.
    assert largest_copy(program.as_text()) < (2**21 if batch == 128 else 2**18)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "batch", "quantize"),
    [("llama-3.2-1b", 1, "int8"), ("open-llama-3b", 4, None), ("mistral-7b-v0.1", 1, None)],
)
def test_other_shapes_on_a_tpu(name, quantize, batch):
    """Heads narrower than the lanes, a window, a single row: neither cache nor embedding is laid out anew."""
    program = compile_step(full_size(name, num_hidden_layers=2), tpu_mesh("v6e:2x2", 1), batch, 1280, quantize)
    assert largest_copy(program.as_text()) < 2**20


@pytest.mark.parametrize("quantize", [None, "int8"], ids=["", "int8"])
def test_on_a_cpu_the_cache_is_updated_in_place(quantize):
    """No copy of it: of one layer at a time, int8 keys turn to float32, and there are scores."""
    config = full_size("llama-3.2-1b", num_hidden_layers=2, vocab_size=1024)
    mesh = FOLDERS["llama3"].model.make_mesh(devices=jax.devices()[:1])
    temporaries = compile_step(config, mesh, 8, 16384, quantize).memory_analysis().temp_size_in_bytes
    keys = 8 * config.num_key_value_heads * 16384 * config.head_dim * 4
    assert temporaries < (1.1 if quantize else 0.2) * keys


def largest_copy(text: str) -> int:
    """Bytes of the largest copy instruction of a compiled program, outside fusions' own operands."""
    entry = text[text.index("\nENTRY") :]
    copies = [
        math.prod(map(int, filter(None, dims.split(",")))) * BITS[kind] // 8 for kind, dims in COPY.findall(entry)
    ]
    return max(copies, default=0)


@pytest.mark.parametrize(
    ("topology", "shape"),
    [("v6e:4x4", (2, 1, 8)), ("v6e:4x4", (1, 8, 2)), ("v6e:8x8", (1, 16, 4)), ("v5p:4x4x4", (2, 4, 8))],
)
def test_meshes_that_split_an_axis_of_the_torus(topology, shape):
    """jax.make_mesh refuses them. Most devices along tp are neighbours of the next one."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = FOLDERS["llama3"].model.make_mesh(*shape, devices=devices)
    assert mesh.devices.shape == shape and set(mesh.devices.flat) == set(devices)
    for row in mesh.devices.reshape(-1, shape[-1]):
        near = [sum(abs(a - b) for a, b in zip(x.coords, y.coords, strict=True)) for x, y in itertools.pairwise(row)]
        assert np.median(near) == 1


def test_gpus_of_two_hosts():
    """Each host is a slice of its own for jax. Whatever the order of the devices, tp stays on a host."""

    class Gpu:
        platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

        def __init__(self, host):
            self.process_index = self.slice_index = host

    mesh = FOLDERS["llama3"].model.make_mesh(2, 1, 4, devices=[Gpu(host) for host in (0, 1, 1, 0, 1, 0, 0, 1)])
    assert [{gpu.process_index for gpu in row} for row in mesh.devices.reshape(2, 4)] == [{0}, {1}]
