"""The routed experts of llama4/: every path against numpy in float64, the kernel under the interpreter and compiled."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STRICT, fast_of, floats, import_folder, in_format
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

model = import_folder("llama4").model


def random_arguments(B, k, E, D, F, dtype, quantize, chosen=None):
    """x, ids, scale, w_gate_up, w_down of the whole mesh; `chosen`: the experts that rows may choose."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((B, D)), dtype)
    chosen = np.arange(E) if chosen is None else np.array(chosen)
    ids = np.stack([random.permutation(chosen)[:k] for _ in range(B)]).astype(np.int32)
    scale = random.uniform(0.2, 1, (B, k)).astype(np.float32)
    weights = [random.standard_normal(shape) * shape[-1] ** -0.5 for shape in ((E, 2 * F, D), (E, D, F))]
    weights = [in_format(model, jnp.asarray(w, None if quantize else dtype), quantize) for w in weights]
    return x, ids, scale, *weights


def reference(x, ids, scale, w_gate_up, w_down):
    """In numpy and float64, an expert at a time, the scale on the expert's input."""
    x, w_gate_up, w_down = floats(x), floats(w_gate_up), floats(w_down)
    out = np.zeros(x.shape)
    for e in range(len(w_down)):
        rows, slots = np.nonzero(ids == e)
        gate, up = np.split((x[rows] * scale[rows, slots, None]) @ w_gate_up[e].T, 2, axis=1)
        np.add.at(out, rows, (gate / (1 + np.exp(-gate)) * up) @ w_down[e].T)
    return out


def grouped(w, tp):
    """The rows of gate_up as a mesh of `tp` holds them: each device's gate rows, then its up rows."""

    def change(a):
        return a.reshape(a.shape[0], 2, tp, -1, *a.shape[2:]).swapaxes(1, 2).reshape(a.shape)

    return jax.tree.map(change, w)


def on_mesh(mesh, x, ids, scale, w_gate_up, w_down):
    """experts(..) on a mesh (dp, ep, tp), summed as the model does it."""

    def body(*arguments):
        return jax.lax.psum(model.experts(*arguments, model.activation), model.MODEL_AXES)

    weights = w_gate_up.specs(P("ep", "tp", None)), w_down.specs(P("ep", None, "tp"))
    rows = (P("dp"),) * 3
    program = jax.shard_map(body, mesh=mesh, in_specs=(*rows, *weights), out_specs=P("dp"), check_vma=False)
    return jax.jit(program)(x, ids, scale, grouped(w_gate_up, mesh.shape["tp"]), w_down)


def assert_close(out, wanted, dtype):
    tolerance = 2e-3 if dtype == jnp.float32 else 5e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=tolerance)


KINDS = pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, "int8")],
    ids=["f32", "bf16", "int8"],
)


def select(monkeypatch, platform, model=model):
    """Has experts(..) of a folder take the path of another platform, its kernels under the interpreter."""
    if platform == "cpu":
        return
    fast = fast_of(model)
    monkeypatch.setattr(model, "platform", lambda: platform)
    monkeypatch.setattr(fast, "expert_kernel", partial(fast.expert_kernel, interpret=STRICT))
    for name in ("tiled_experts", "triton_int4_product"):
        monkeypatch.setattr(fast, name, partial(getattr(fast, name), interpret=True))
    monkeypatch.setattr(fast, "GROUP_BYTES", 2**17)  # 140 rows of 128 numbers are two groups


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("platform", "B", "k"),
    [
        *(("cpu", *rows) for rows in ((1, 1), (300, 1), (5, 8), (300, 2))),
        *(("gpu", *rows) for rows in ((1, 1), (300, 2))),
        *(("tpu", *rows) for rows in ((1, 1), (5, 8), (140, 2))),
    ],
)
@KINDS
def test_against_float64(monkeypatch, platform, dtype, quantize, B, k):
    select(monkeypatch, platform)
    arguments = random_arguments(B, k, 8, 128, 256, dtype, quantize)
    mesh = model.make_mesh(devices=jax.devices()[:1])
    assert_close(on_mesh(mesh, *arguments), reference(*arguments), dtype)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("platform", "mesh"),
    [("cpu", (2, 2, 2)), ("gpu", (1, 4, 2)), ("tpu", (1, 2, 2))],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "quantize", "B", "k"), [(jnp.float32, None, 2, 1), (jnp.bfloat16, "int8", 140, 2)], ids=["f32", "int8"]
)
def test_on_meshes(monkeypatch, platform, dtype, quantize, mesh, B, k):
    select(monkeypatch, platform)
    arguments = random_arguments(B, k, 8, 64, 256, dtype, quantize)
    mesh = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    assert_close(on_mesh(mesh, *arguments), reference(*arguments), dtype)


@pytest.mark.parametrize(("platform", "B"), [("cpu", 150), ("gpu", 150), ("tpu", 3)])
def test_devices_without_work(monkeypatch, platform, B):
    """All rows choose experts of one device."""
    select(monkeypatch, platform)
    arguments = random_arguments(B, 2, 8, 64, 256, jnp.float32, "int8", chosen=(4, 5))
    assert_close(on_mesh(model.make_mesh(1, 4, 2), *arguments), reference(*arguments), jnp.float32)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("platform", "B", "dtype", "quantize"),
    [
        ("cpu", 1, jnp.float32, None),
        ("cpu", 1, jnp.bfloat16, "int8"),
        ("cpu", 40, jnp.bfloat16, "int8"),
        ("gpu", 2, jnp.float32, None),
        ("gpu", 40, jnp.bfloat16, "int8"),
        ("tpu", 3, jnp.float32, None),
        ("tpu", 140, jnp.bfloat16, "int8"),
    ],
)
def test_biases_and_a_residual_stream_of_no_whole_lanes(monkeypatch, platform, B, dtype, quantize):
    """160 columns, which TPUs store as 256, and biases of gate and up, on two devices along tp."""
    select(monkeypatch, platform)
    x, ids, scale, w_gate_up, w_down = random_arguments(B, 2, 8, 160, 256, dtype, quantize)
    random = np.random.default_rng(1)
    biases = random.standard_normal((8, 512)).astype(np.float32)
    wanted = np.zeros(x.shape)
    for b, row in enumerate(ids):
        for slot, e in enumerate(row):
            up_down = [floats(w)[e] for w in (w_gate_up, w_down)]
            gate, up = np.split(up_down[0] @ floats(x[b]) + biases[e], 2)
            wanted[b] += scale[b, slot] * (up_down[1] @ (np.tanh(gate) * up))

    def body(x, ids, scale, w_gate_up, w_down, biases):
        def activate(gate, up, score):
            return jnp.tanh(gate) * up * score

        return jax.lax.psum(model.experts(x, ids, scale, w_gate_up, w_down, activate, biases), model.MODEL_AXES)

    if platform == "tpu":
        values = jnp.pad(w_gate_up.values, ((0, 0), (0, 0), (0, 96)))
        w_gate_up = dataclasses.replace(w_gate_up, values=values)
    mesh = model.make_mesh(1, 1, 2, devices=jax.devices()[:2])
    split, down = w_gate_up.specs(P(None, "tp", None)), w_down.specs(P(None, None, "tp"))
    specs = (P(), P(), P(), split, down, P(None, "tp"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    out = program(x, ids, scale, grouped(w_gate_up, 2), w_down, grouped(biases, 2))
    assert_close(out, wanted, dtype)


def test_rows_do_not_depend_on_others():
    """What a tile's other rows are must not show: not even where they are not finite."""
    arguments = random_arguments(16, 2, 8, 128, 256, jnp.float32, None)
    x = arguments[0].at[3].set(jnp.nan)
    mesh = model.make_mesh(devices=jax.devices()[:1])
    out = np.asarray(on_mesh(mesh, x, *arguments[1:]))
    rest = np.arange(16) != 3
    assert_close(out[rest], reference(*arguments)[rest], jnp.float32)


@pytest.mark.sampled
@pytest.mark.optimized
@pytest.mark.parametrize(("topology", "quantize"), [("v5e:4x4", "int8"), ("v5p:2x2x4", None)])
@pytest.mark.parametrize(
    ("ep", "tp", "B", "k", "E", "D", "F"),
    [
        (1, 16, 1, 1, 16, 5120, 8192),  # Scout
        (1, 16, 16, 1, 16, 5120, 8192),
        (1, 16, 4096, 1, 16, 5120, 8192),
        (16, 1, 16, 8, 64, 7168, 2048),  # DeepSeek, a quarter of its experts
    ],
)
def test_compiles_for_tpus(topology, quantize, ep, tp, B, k, E, D, F):
    """The kernel and XLA agree on layouts: no copy of a weight, and nothing of a weight's size beside it."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = model.make_mesh(1, ep, tp, devices=devices)

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def weight(shape, *spec):
        held = model.FORMATS[quantize].declare(shape, jnp.bfloat16)
        return jax.tree.map(lambda x, spec: array(x.shape, x.dtype, *spec), held, held.specs(P(*spec)))

    arguments = (
        array((B, D), jnp.bfloat16),
        array((B, k), jnp.int32),
        array((B, k), jnp.float32),
        weight((E, 2 * F, D), "ep", "tp", None),
        weight((E, D, F), "ep", None, "tp"),
    )

    def body(*arguments):
        return jax.lax.psum(model.experts(*arguments, model.activation).astype(jnp.bfloat16), model.MODEL_AXES)

    specs = jax.tree.map(lambda a: a.sharding.spec, arguments)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    program = program.lower(*arguments).compile()
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    for dims in re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|copy-start|slice-start)\(", text):
        assert np.prod([int(d) for d in dims.split(",") if d]) < 4 * 2**10 or B == 4096
    activations = 0 if B < 128 else (B * k + 128) * D * 4 * 3
    assert program.memory_analysis().temp_size_in_bytes < 2**20 + activations
