"""What an accelerator has to show: `python -m pytest -m device` runs this file on whatever jax finds.

Kernels at the shapes of released models are compared with numpy in float64. They run as the machine runs them: on a TPU
a Pallas kernel, compiled; elsewhere plain JAX, and on CPUs the kernel too, interpreted. The demos are compared with
transformers' answers in float32 (golden_tokens.json) and, on an accelerator, with what its host's CPU computes.
"""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_experts
import test_kernel
import test_latent
from helpers import ROOT, UNKNOWN_PROMPT, decode, fast_of, floats, import_folder, in_format, interpret_kernels
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file
from shared import folders

pytestmark = pytest.mark.device

FOLDERS = {name: import_folder(name) for name in folders()}
GOLDEN = json.loads((ROOT / "tests" / "golden_tokens.json").read_text())
FORMATS = {"bf16": None, "int8": "int8"}
ON_CPU = jax.default_backend() == "cpu"
# On a CPU one of them, and not in the default run, since test_releases.py runs all demos there.
SHOWN = [pytest.param("llama3", marks=pytest.mark.slow)] if ON_CPU else FOLDERS

# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def combined(**choices):
    """Parametrizes by all combinations of the choices, each a dict by label. On a CPU by the first and the fourth,
    which run compiled and interpreted: test_kernel.py, test_latent.py and test_experts.py have more, at smaller
    shapes."""
    rows = list(itertools.product(*(choice.items() for choice in choices.values())))
    rows, ways = (rows[:4:3], ("compiled", "interpreted")) if ON_CPU else (rows, ("compiled",))
    cases = [(way, *zip(*row, strict=True)) for way in ways for row in rows]
    cases = [pytest.param(way, *values, id="-".join((way, *labels))) for way, labels, values in cases]
    return pytest.mark.parametrize(("run", *choices), cases, indirect=["run"])


@pytest.fixture
def run(request, monkeypatch):
    """A function that compiles another for this machine and runs it."""
    if request.param == "interpreted":
        for model in (test_kernel.model, test_latent.model, test_experts.model):
            interpret_kernels(monkeypatch, model)

    def compiled(function, *arguments):
        # A new function, since jit remembers how it traced this one before its kernels were interpreted.
        program = jax.jit(lambda *arguments: function(*arguments))
        if jax.default_backend() == "tpu":
            assert "tpu_custom_call" in program.lower(*arguments).as_text(), "no kernel"
        return program(*arguments)

    return compiled


def numbers(seed, *shape, scale=1.0):
    """Random ones of a normal distribution, in bfloat16."""
    return (np.random.default_rng(seed).standard_normal(shape, np.float32) * scale).astype(bfloat16)


def exact_attention(q, k, v, at, first, last):
    """Softmax attention in float64 of q [B, K, A, M, H] to those keys k [B, K, S, H] whose positions `at` [B, S] are
    from first to last [B, M], and beside it the log-sum-exp of the scores."""
    seen = (first[..., None] <= at[:, None]) & (at[:, None] <= last[..., None])
    scores = np.where(seen[:, None, None], q @ k[:, :, None].swapaxes(-1, -2), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    sums = scores.max(-1, keepdims=True) + np.log(total)
    return np.concatenate([(p / total) @ v[:, :, None], sums], axis=-1)


def check_attention(run, model, q, widths, S, T, starts, window, quantize):
    """store_and_attend of T tokens: they are in their slots, rounded rightly, nothing else has changed, and queries
    attend to what is stored. Slots that no query may see hold large numbers: a wrong mask lets them in. The rows of a
    piece are in the cache in another order."""
    (B, K, _, M, width), positions = q.shape, starts[:, None] + np.arange(T)
    cache, new = (model.LayerCache(*(numbers(n + i, B, K, n, w) for i, w in enumerate(widths, 1))) for n in (S, T))
    at = positions[:, -1:] - (positions[:, -1:] - np.arange(S)) % S  # the last position in each slot, or a negative one
    first, is_new = np.maximum(positions - (window or S) + 1, 0), at >= starts[:, None]
    factors = np.where((at >= first[:, :1]) & ~is_new, 1, 20).astype(bfloat16)
    cache = model.LayerCache(*(x * factors[:, None, :, None] for x in cache))
    cache = model.LayerCache(*(in_format(model, x, quantize) for x in cache))
    places, arguments = (np.arange(B), None) if T <= model.FEW else (np.arange(B)[::-1], np.arange(B)[::-1])

    def attend(*arguments):
        return model.store_and_attend(*arguments, model.Mask(window), T, 1, M // T)

    def other_slots(x):
        return np.where(is_new.reshape(B, 1, S, *[1] * (x.ndim - 3)), 0, np.asarray(x, np.float32))

    out, after = run(attend, q, new, jax.tree.map(lambda x: x[places], cache), starts, arguments)
    after = jax.tree.map(lambda x: x[places], after)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(*map(other_slots, (x, y))), cache, after)
    keys, values = map(floats, after)
    for token, side in zip(map(floats, new), (keys, values), strict=True):
        stored = side[np.arange(B)[:, None], :, positions % S].swapaxes(1, 2)
        step = np.abs(token).max(-1, keepdims=True) / 127 if quantize else 0
        assert (np.abs(stored - token) <= 0.51 * step).all()
    if width > widths[0]:
        keys, values = np.concatenate([keys, values], axis=-1), keys
    wanted = exact_attention(floats(q), keys, values, at, *(np.repeat(x, M // T, axis=1) for x in (first, positions)))
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=3e-2)


HEADS = {
    "llama-3.1-8b": (4, 8, 4, 2048, None),
    "gpt-oss-20b": (4, 8, 8, 1280, 128),
    "glm-4-9b": (1, 2, 16, 2048, None),
}
FEW = {"1": 1, "4": 4}


@pytest.mark.sampled
@combined(shape=HEADS, T=FEW, quantize=FORMATS)
def test_attention_of_a_decode_step(run, shape, T, quantize):
    """Rows of all lengths. With a window the cache is a ring, and one of them has begun it anew."""
    B, K, G, S, window = shape
    q = numbers(0, B, K, 1, T * G, 128, scale=3 * 128**-0.5)
    starts = np.int32([3 * S - 2 if window else S - T, 1278, 255, 0])[:B]
    check_attention(run, test_kernel.model, q, (128, 128), S, T, starts, window, quantize)


PIECES = {
    "llama-3.1-8b on four devices": (2, 4, 2048, 1024, None),
    "gpt-oss-20b on eight": (1, 8, 1280, 3000, 128),
}


@pytest.mark.sampled
@combined(shape=PIECES, quantize=FORMATS)
def test_attention_of_a_piece_of_prefill(run, shape, quantize):
    """1,024 tokens of two rows, of which one is further on."""
    K, G, S, start, window = shape
    q, starts = numbers(0, 2, K, G, 1024, 128, scale=3 * 128**-0.5), np.int32([77, start])
    check_attention(run, test_kernel.model, q, (128, 128), S, 1024, starts, window, quantize)


@pytest.mark.sampled
@combined(T=FEW, B={"1": 1, "8": 8}, quantize=FORMATS)
def test_attention_to_latents(run, B, T, quantize):
    """A decode step of GLM-4.7-Flash on one device: 20 heads, latents of 512 and rope keys of 64, in whole lanes."""
    q, starts = numbers(0, B, 1, 1, T * 20, 640, scale=0.1), np.linspace(2048 - T, 510, B).astype(np.int32)
    check_attention(run, test_latent.model, q, (512, 128), 2048, T, starts, None, quantize)


def test_rounding():
    """To int8, which other tests take as it is: no number is more than half a step away."""
    x = numbers(0, 64, 4096)
    rounded, step = jax.jit(test_kernel.model.quantize)(x), np.abs(floats(x)).max(-1) / 127
    np.testing.assert_allclose(rounded.scale, step, rtol=1e-5)
    assert (np.abs(floats(rounded) - floats(x)) <= 0.501 * step[:, None]).all()


@pytest.mark.sampled
@combined(B={"1": 1, "8": 8}, quantize=FORMATS)
def test_products(run, B, quantize):
    """gate_up of Llama 3.1 8B on two devices, which TPUs stream by a kernel."""
    model = test_kernel.model
    x, w = numbers(0, B, 4096), in_format(model, numbers(1, 14336, 4096, scale=1 / 64), quantize)
    out = run(model.linear, x, w)
    np.testing.assert_allclose(np.asarray(out, np.float64), floats(x) @ floats(w).T, atol=5e-3)


@combined(B={"1": 1, "8": 8})
def test_products_in_4_bits(run, B):
    """Int4 in groups of 32. GPUs, and TPUs, have a kernel for it."""
    model, fast = test_kernel.model, fast_of(test_kernel.model)
    held = fast.Int4Lanes if jax.default_backend() == "tpu" else fast.Int4
    w = fast.Int4Groups(held=held).declare((3072, 4096), jnp.bfloat16)
    x, w = numbers(0, B, 4096), jax.jit(w.encode)(numbers(1, 3072, 4096, scale=1 / 64))
    wanted = floats(w.in_order(x)) @ floats(w.values_and_scale(jnp.float32)[0]).T
    np.testing.assert_allclose(np.asarray(run(model.linear, x, w), np.float64), wanted, atol=2e-2)


def in_4_bits(random, *shape):
    """MXFP4: random bytes of two numbers each, and an exponent for each 32 numbers."""
    values = random.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    return values, random.integers(119, 123, (*shape[:-1], shape[-1] // 32), np.uint8)


def from_4_bits(values, exponents, are_neighbours=False):
    """The numbers, in float64. The two of a byte are neighbours in a checkpoint, and 16 apart in model.py's Mxfp4."""
    magnitudes = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = values.reshape(*exponents.shape, 16)
    found = np.stack([values & 15, values >> 4], axis=-1 if are_neighbours else -2).reshape(*exponents.shape, 32)
    found = magnitudes[found & 7] * np.where(found & 8, -1, 1) * 2.0 ** (exponents[..., None] - 127.0)
    return found.reshape(*exponents.shape[:-1], -1)


@pytest.mark.sampled
@combined(B={"1": 1, "8": 8, "256": 256}, quantize=FORMATS)
def test_experts_that_were_chosen(run, B, quantize):
    """Experts of Qwen3-30B-A3B, 16 of its 128, and 8 of them for each token."""
    arguments = test_experts.random_arguments(B, 8, 16, 2048, 768, jnp.bfloat16, quantize)
    mesh = test_experts.model.make_mesh(devices=jax.devices()[:1])
    out = run(lambda *arguments: test_experts.on_mesh(mesh, *arguments), *arguments)
    test_experts.assert_close(out, test_experts.reference(*arguments), jnp.bfloat16)


@pytest.mark.slow
def test_experts_in_4_bits():
    """Those of gpt-oss-20b, 4 of its 32, with 2,944 columns as a device has them."""
    model, random = FOLDERS["gpt_oss"].model, np.random.default_rng(0)
    kind, run = (fast_of(model).Mxfp4Lanes, 512) if jax.default_backend() == "tpu" else (model.Mxfp4, 32)
    gate_up, down = in_4_bits(random, 4, 5888, 2880), in_4_bits(random, 4, 2880, 2944)
    biases = jnp.zeros((4, 5888))

    def held(values, exponents):
        nibbles = values.reshape(*exponents.shape, 16)
        codes = np.stack([nibbles & 15, nibbles >> 4], axis=-2).reshape(*exponents.shape[:-1], -1)
        codes = np.pad(codes, [(0, 0), (0, 0), (0, -codes.shape[-1] % run)])
        exponents = np.pad(exponents, [(0, 0), (0, 0), (0, codes.shape[-1] // 32 - exponents.shape[-1])])
        return kind(kind.packed(codes), kind.ordered(kind.scales(exponents)))

    def body(*arguments):
        return model.experts(*arguments, lambda gate, up, score: jnp.tanh(gate) * up * score, biases)

    mesh = model.make_mesh(devices=jax.devices()[:1])
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    x, scores = numbers(0, 8, 2880), random.uniform(0.2, 1, (8, 4)).astype(np.float32)
    wanted = np.zeros(x.shape)
    for e, matrices in enumerate(zip(from_4_bits(*gate_up), from_4_bits(*down), strict=True)):
        gate, up = np.split(floats(x) @ matrices[0].T, 2, axis=1)
        wanted += scores[:, e : e + 1] * ((np.tanh(gate) * up) @ matrices[1].T)
    for B in (1, 8):
        ids = np.tile(np.arange(4, dtype=np.int32), (B, 1))
        out = program(x[:B], ids, scores[:B], held(*gate_up), held(*down))
        np.testing.assert_allclose(out, wanted[:B], atol=0.02 * np.abs(wanted).max())


@combined(B={"1": 1, "8": 8, "256": 256})
def test_routing(run, B):
    """R1's: the 8 best of 256 experts, which lie in the 4 best of 8 groups."""
    config = test_latent.routing_config(256, 8, 4, 8)
    logits, bias = numbers(0, B, 256).astype(np.float32), numbers(1, 256, scale=0.1).astype(np.float32)
    logits += np.arange(256, dtype=np.float32) / 2**16  # no two are equal
    ids, weights = run(lambda *args: test_latent.model.route(*args, config), logits, bias)
    scores = 1 / (1 + np.exp(-floats(logits)))
    for b, choice in enumerate((scores + bias).reshape(B, 8, 32)):
        best = np.argsort(np.sort(choice)[:, -2:].sum(-1))[-4:]
        eligible = np.where(np.isin(np.arange(8), best)[:, None], choice, -np.inf).ravel()
        assert set(np.asarray(ids[b]).tolist()) == set(np.argsort(eligible)[-8:].tolist())
        chosen = scores[b, np.asarray(ids[b])]
        np.testing.assert_allclose(weights[b], chosen / chosen.sum() * 2.5, rtol=1e-4)


@combined(kind={"queries": "queries", "outputs": "outputs"})
def test_exchange(run, kind):
    """Of a decode step of GLM-4-9B, whose heads several devices share: each sends its queries to all, and to each the
    part of the outputs that is its own, with a log-sum-exp."""
    model, R = test_kernel.model, min(len(jax.devices()), 4)
    if R == 1:
        pytest.skip("there is one device")
    shape, dtype = ((1, 8, 16 // R, 128), bfloat16) if kind == "queries" else ((R, 8, 16 // R, 129), np.float32)
    x, mesh = numbers(0, R, *shape).astype(dtype), model.make_mesh(tp=R, devices=jax.devices()[:R])
    options = {"mesh": mesh, "in_specs": P(model.MODEL_AXES), "out_specs": P(model.MODEL_AXES), "check_vma": False}
    exchanged = run(jax.shard_map(lambda x: model.exchange(x[0], R)[None], **options), x)
    np.testing.assert_array_equal(exchanged, np.broadcast_to(x, (R, R, *shape[1:])).swapaxes(0, 1))


# ---------------------------------------------------------------------------------------------------------------------
# Whole models


def all_devices(folder):
    """The mesh of them that main.py takes."""
    convert = FOLDERS[folder].convert
    return convert.mesh_shape(convert.open_checkpoint(ROOT / folder / "demo").weights, jax.devices())


def answers(folder, mesh=(1, 1, 1), path=None, **options):
    """The tokens of the answers to the prompts of golden_tokens.json, and their log-probabilities."""
    rows, path = GOLDEN[folder], path or ROOT / folder / "demo"
    asked = [row.get("prompt_tokens", UNKNOWN_PROMPT) for row in rows]
    stop_tokens = tuple({row["tokens"][-1] for row in rows[:-1]})
    found = decode(FOLDERS[folder], path, asked, mesh, max_new_tokens=64, stop_tokens=stop_tokens, **options)
    rows = [row[: len(wanted["tokens"])] for row, wanted in zip(found, rows, strict=True)]
    return [[token.id for token in row] for row in rows], [[token.logprob for token in row] for row in rows]


def golden(folder):
    """transformers' answers in float32, in the form of `answers`."""
    return [row["tokens"] for row in GOLDEN[folder]], [row["logprobs"] for row in GOLDEN[folder]]


@pytest.fixture
def assert_near(record_property):
    """Asserts that answers have the same tokens, and log-probabilities at most `atol` away. Of the last prompt, which
    is unknown, and rounded numbers it asks for the first token alone, at most `unknown` away: others may be nearly as
    probable."""

    def near(found, wanted, atol, is_rounded=False, unknown=None):
        ends = [None] * (len(wanted[0]) - 1) + [1 if is_rounded else None]
        pairs = [[(x[:end], y[:end]) for x, y, end in zip(*each, ends, strict=True)] for each in zip(found, wanted)]
        *known, last = [np.abs(np.subtract(x, y)).max() for x, y in pairs[1]]
        record_property("largest difference", f"{max(*known, last):.1e}")
        assert [x for x, _ in pairs[0]] == [y for _, y in pairs[0]]
        assert max(known) <= atol and last <= (unknown or atol)

    return near


@pytest.mark.parametrize("folder", SHOWN)
def test_demos_in_float32(folder, assert_near):
    """On all devices. On an accelerator, as on its host's CPU too, unless jax was told to leave that out."""
    found = answers(folder, all_devices(folder))
    assert_near(found, golden(folder), 1e-4)
    if not ON_CPU and "cpu" in (jax.config.jax_platforms or "cpu"):
        assert_near(found, answers(folder, platform="cpu"), 1e-4)


@pytest.mark.skipif(ON_CPU, reason="test_drafts.py has more of them")
@pytest.mark.parametrize(("folder", "draft"), [("gpt_oss", "lookup"), ("deepseek", "mtp")])
def test_demos_with_drafts(monkeypatch, folder, draft, assert_near):
    """In every step, on all devices, in float32."""
    monkeypatch.setattr(FOLDERS[folder].generate, "REPEATING", 0)
    assert_near(answers(folder, all_devices(folder), draft=draft), golden(folder), 1e-4)


@pytest.mark.parametrize("folder", SHOWN)
def test_demos_in_bfloat16(folder, assert_near):
    """As main.py runs them: on all devices and, on an accelerator, on one."""
    meshes = {all_devices(folder), *[(1, 1, 1)] * (not ON_CPU)}
    # In gpt_oss the unknown prompt has a near-tied choice of an expert (margin 0.0016), which bfloat16 may turn: 0.13
    # on one device, 0.002 to 0.13 on several, 0.04 to 0.06 if the choice is given; the same before steps took T tokens.
    unknown = 0.15 if folder == "gpt_oss" else None
    for mesh in meshes:
        assert_near(answers(folder, mesh, dtype="bfloat16"), golden(folder), 6e-2, is_rounded=True, unknown=unknown)


@pytest.mark.parametrize("folder", SHOWN)
def test_demos_in_int8(folder, assert_near):
    found = answers(folder, all_devices(folder), dtype="bfloat16", quantize="int8", quantize_cache="int8")
    assert_near(found, golden(folder), 0.2, is_rounded=True)


@pytest.mark.skipif(ON_CPU, reason="test_gpt_oss.py has more of them")
def test_experts_of_a_checkpoint_in_4_bits(tmp_path, assert_near):
    """gpt-oss's demo with random experts: as MXFP4, and as the numbers that these bytes stand for. (TPUs load both in
    bfloat16, so there it is a test of loading.)"""
    demo, random = ROOT / "gpt_oss" / "demo", np.random.default_rng(0)
    tensors = load_file(demo / "model.safetensors")
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        values, exponents = in_4_bits(random, experts, outputs, inputs)
        packed |= {f"{name}_blocks": values.reshape(*exponents.shape, 16), f"{name}_scales": exponents}
        plain[name] = from_4_bits(values, exponents, are_neighbours=True).swapaxes(1, 2).astype(bfloat16)
    for kind, tensors, changes in (("packed", packed, {"quant_method": "mxfp4"}), ("plain", plain, None)):
        (path := tmp_path / kind).mkdir()
        config = json.loads((demo / "config.json").read_text()) | {"quantization_config": changes}
        (path / "config.json").write_text(json.dumps(config))
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path / "model.safetensors")
    wanted = answers("gpt_oss", path=tmp_path / "plain")
    assert_near(answers("gpt_oss", all_devices("gpt_oss"), path=tmp_path / "packed"), wanted, 1e-4)
