"""What qwen3_5/ alone has: states in the place of caches, and the forms of its releases."""

import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ROOT,
    STRICT,
    assert_matches,
    decode,
    experts_apart,
    fast_of,
    floats,
    qwen_extra_layer_tensors,
    random_extra_layer,
    read_in_pieces,
    save_random,
)
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from test_parity import qwen3_5, qwen_35, qwen_35_moe, random_prompts
from transformers import AutoConfig

model, generate = qwen3_5.model, qwen3_5.generate


def random_tokens(B, T, N=3, H=16, W=24, decay=0.3, seed=0):
    """q, k, v, log_decay, beta and a state, as token_by_token takes them: float32."""
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((B, T, N, H)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = random.standard_normal((B, T, N, W)), random.standard_normal((B, N, H, W))
    log_decay, beta = -decay * random.exponential(size=(B, T, N)), random.uniform(size=(B, T, N))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta, state)]


def reference(q, k, v, log_decay, beta, state):
    """The gated delta rule in numpy and float64, a token at a time: outputs, and the state after each token."""
    q, k, v, log_decay, beta, state = map(floats, (q, k, v, log_decay, beta, state))
    out, states = np.zeros(v.shape), [state]
    for t in range(q.shape[1]):
        state = state * np.exp(log_decay[:, t])[..., None, None]
        error = v[:, t] - np.einsum("bnhw,bnh->bnw", state, k[:, t])
        state = state + np.einsum("bnh,bnw->bnhw", k[:, t], beta[:, t, :, None] * error)
        out[:, t] = np.einsum("bnhw,bnh->bnw", state, q[:, t])
        states.append(state)
    return out, states


@pytest.mark.parametrize("T", [1, 8, 9, 64, 200])
@pytest.mark.parametrize("decay", [0.0, 0.3, 30.0])  # none, and so fast that a chunk forgets its first tokens
def test_delta_rule_against_float64(T, decay):
    tokens = random_tokens(2, T, decay=decay)
    wanted, states = reference(*tokens)
    for rule in [model.chunk_by_chunk, model.token_by_token][: 1 + (T <= 9)]:
        out, state = jax.jit(rule)(*tokens, np.full(2, T))
        # A sum of 64 logarithms of 30 has an error of 1e-4, in transformers too.
        np.testing.assert_allclose(out, wanted, atol=3e-4 if decay == 30 else 1e-4)
        np.testing.assert_allclose(state, states[-1], atol=3e-4 if decay == 30 else 1e-4)


def test_equal_keys():
    """Where each token overwrites what the one before wrote, powers of a chunk's matrix are beyond float32."""
    q, k, v, log_decay, _, state = random_tokens(1, 128, decay=0)
    k, beta = np.broadcast_to(k[:, :1], k.shape), np.ones((1, 128, 3), np.float32)
    wanted, states = reference(q, k, v, log_decay, beta, state)
    out, state = jax.jit(model.chunk_by_chunk)(q, k, v, log_decay, beta, state, np.array([128]))
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(state, states[-1], atol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("is_kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize(("T", "drafts"), [(1, 0), (4, 0), (4, 3), (1, 3), (8, 7), (40, 3)])
def test_states_and_drafts_against_float64(T, drafts, is_kernel):
    """Rows that keep all, one or none of the last drafts, and know all, some or none of the new tokens. One begins."""
    if is_kernel and T > model.FEW:
        return
    random, (B, K, N, H), taps = np.random.default_rng(0), (4, 2, 4, 128), 4
    M, count = (2 * K + N) * H, taps - 1
    numbers = [(B, N, H, H), (B, 1, count + drafts, M), (B, N, 2, drafts)]
    state, inputs, gates = (random.standard_normal(shape).astype(np.float32) for shape in numbers)
    gates[:, :, 0], gates[:, :, 1] = -np.abs(gates[:, :, 0]), np.abs(gates[:, :, 1]) % 1
    old = model.StateCache(*map(jnp.asarray, (state, inputs)))
    if drafts:
        old = old._replace(gates=jnp.asarray(gates), begin=jnp.zeros((B, 1), jnp.int32))
    qkv, weights = random.standard_normal((B, T, M)), random.standard_normal((M, taps)) / 2
    log_decay, beta = -random.exponential(size=(B, T, N)), random.uniform(size=(B, T, N))
    is_new = np.array([False, False, True, False])
    kept, known = np.array([drafts, min(drafts, 1), 0, 0]), np.array([T, 1, T // 2, 0])
    rule = partial(fast_of(model).delta_kernel, interpret=STRICT) if is_kernel else model.recurrence
    arguments = [jnp.float32(x) for x in (qkv, weights, log_decay, beta)]
    out, new = jax.jit(rule)(*arguments, old, is_new, kept, known)
    for b in range(B):
        memory = np.zeros_like(inputs[b, 0]) if is_new[b] else inputs[b, 0]
        wanted = np.concatenate([memory[: kept[b] + count], qkv[b]])  # of the convolution, from the first draft kept
        mixed = sum(wanted[i : len(wanted) - count + i] * weights[:, i] for i in range(taps))
        q, k, v = np.split(mixed / (1 + np.exp(-mixed)), [K * H, 2 * K * H], axis=1)
        q, k, v = (x.reshape(1, len(mixed), -1, H) for x in (q, k, v))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat(N // K, axis=2) for x in (q * H**-0.5, k))
        both = [np.concatenate([gates[b, :, i, : kept[b]].T, x[b]])[None] for i, x in enumerate((log_decay, beta))]
        begin = np.zeros_like(state[b, None]) if is_new[b] else state[b, None]
        outs, states = reference(q, k, v, *both, begin)
        shown = slice(T) if T <= model.FEW else slice(known[b])  # a piece of a prompt verifies no drafts
        np.testing.assert_allclose(out[b, shown], outs[0, kept[b] :][shown], atol=1e-4)
        np.testing.assert_allclose(new.state[b], states[kept[b] + known[b]][0], atol=1e-4)
        kept_inputs = np.pad(wanted[kept[b] + known[b] :], ((0, count + drafts), (0, 0)))[: count + drafts]
        np.testing.assert_allclose(new.inputs[b, 0], kept_inputs, atol=1e-6)
        for i, x in enumerate((log_decay, beta)[: 2 if drafts else 0]):
            np.testing.assert_allclose(new.gates[b, :, i].T, np.pad(x[b, known[b] :], ((0, drafts), (0, 0)))[:drafts])


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(("K", "N", "T", "drafts"), [(1, 2, 1, 0), (16, 48, 1, 0), (2, 6, 4, 3)])
def test_the_kernel_compiles_for_tpus(topology, K, N, T, drafts):
    """In place: the state is neither copied nor read by anything else."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh, B, M = model.make_mesh(1, 1, 4, devices=devices), 2, 128 * (2 * K + N)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    old = model.StateCache(array(B, N, 128, 128), array(B, 1, 3 + drafts, M, dtype=jnp.bfloat16))
    if drafts:
        old = old._replace(gates=array(B, N, 2, drafts), begin=array(B, 1, dtype=jnp.int32))
    counts = array(B, dtype=jnp.bool), *[array(B, dtype=jnp.int32)] * 2
    body = jax.shard_map(fast_of(model).delta_kernel, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    arguments = array(B, T, M, dtype=jnp.bfloat16), array(M, 4), *[array(B, T, N)] * 2, old, *counts
    text = jax.jit(body, donate_argnums=4).lower(*arguments).compile().as_text()
    assert len(re.findall(r"%delta_rule[.\d]* = ", text)) == 1
    assert not re.findall(rf"f32\[{B},{N},128,128\]\S* (?:copy|fusion)\(", text)


@pytest.mark.slow
@pytest.mark.parametrize(("draft_tokens", "mesh"), [(1, (1, 2, 2)), (7, (2, 1, 2))])
def test_drafts_change_no_token(tmp_path, monkeypatch, draft_tokens, mesh):
    """Of rows that repeat themselves, so that some drafts are kept and others fail; more prompts than rows."""
    read_in_pieces(monkeypatch, qwen3_5, 64)
    monkeypatch.setattr(generate, "REPEATING", 0.3)  # on CPUs, steps with drafts and without
    _, *reference = qwen_35_moe(vocab_size=10)
    save_random(tmp_path, *reference)
    random = np.random.default_rng(0)
    prompts = [[*random.integers(0, 10, 5)] * n for n in (30, 2, 9, 14)]
    prompts = [[int(token) for token in prompt] for prompt in prompts]
    options, stats = {"rows": 2, "max_new_tokens": 40, "mesh": mesh}, {}
    without = decode(qwen3_5, tmp_path, prompts, **options)
    drafted = decode(qwen3_5, tmp_path, prompts, draft="lookup", draft_tokens=draft_tokens, stats=stats, **options)
    assert 0 < stats["drafts_accepted"] < stats["drafts"]
    for row, other in zip(without, drafted, strict=True):
        assert [token.id for token in row] == [token.id for token in other]
        np.testing.assert_allclose([t.logprob for t in row], [t.logprob for t in other], atol=1e-4)


def test_places(T=6):
    """Rows at two of four places, one of which begins: the others keep what they have."""
    random, (K, N, H, W), taps = np.random.default_rng(0), (2, 4, 8, 8), 4
    M = 2 * K * H + N * W
    cache = model.StateCache(*(random.standard_normal(s) for s in ((4, N, H, W), (4, 1, taps - 1, M))))
    cache, places, positions = (
        jax.tree.map(jnp.float32, cache),
        jnp.array([2, 1]),
        jnp.array([[7], [0]]) + jnp.arange(T),
    )
    tokens = [random.standard_normal(shape) for shape in ((2, T, M), (M, taps), (2, T, N), (2, T, N))]
    known = jnp.array([T, 2])
    out, new = jax.jit(model.cached_recurrence)(
        *map(jnp.float32, tokens), cache, model.Span(positions, places, known, 4, 1)
    )
    old = jax.tree.map(lambda x: x[places], cache)
    wanted, rows = model.recurrence(*map(jnp.float32, tokens), old, positions[:, 0] == 0, 0 * known, known)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)
    for x, row, before in zip(new[:2], rows[:2], cache[:2], strict=True):
        np.testing.assert_allclose(x[places], row, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(x[jnp.array([0, 3])], before[jnp.array([0, 3])])


@pytest.mark.parametrize("file", sorted((ROOT / "qwen3_5" / "configs").glob("*.json")), ids=lambda file: file.stem)
def test_a_released_configuration(file):
    """Is what transformers' class reads, and has as many weights as the model's name says."""
    raw = json.loads(file.read_text())
    config, reference = model.Config.from_dict(raw), AutoConfig.for_model(**raw)
    reference = getattr(reference, "text_config", reference)
    for field in dataclasses.fields(config):
        if hasattr(reference, field.name) and field.name not in ("intermediate_size", "num_experts"):
            wanted = getattr(reference, field.name)
            assert getattr(config, field.name) == (tuple(wanted) if isinstance(wanted, list) else wanted), field.name
    count = sum(np.prod(s) for w in jax.tree.leaves(model.weights_of(config)) for s in w.tensors().values())
    assert count / 1e9 == pytest.approx(float(re.search(r"-([\d.]+)b", file.stem)[1]), rel=0.07)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A checkpoint as it is released: nested, experts packed, beside a vision tower and a layer of multi-token
    prediction; and the reference model."""
    path = tmp_path_factory.mktemp("qwen3_5")
    _, model_class, config = qwen_35_moe(linear_num_value_heads=4)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    reference = save_random(path, model_class, config)
    tensors = load_file(path / "model.safetensors")
    for name, parameter in reference.named_parameters():
        if ".mlp.experts." in name:
            tensors[name] = parameter.detach()
    tensors = {name: x for name, x in tensors.items() if not name.endswith("proj.weight") or ".experts." not in name}
    tensors = {name.replace("model.", "model.language_model.", 1): x.contiguous() for name, x in tensors.items()}
    for prefix in ("model.visual.", "model.language_model.visual."):  # transformers 5.5 wrote the second
        tensors[f"{prefix}pos_embed.weight"] = tensors["lm_head.weight"].clone()
    tensors |= qwen_extra_layer_tensors(random_extra_layer(reference))
    save_file(tensors, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    released = json.loads((ROOT / "qwen3_5" / "configs" / "qwen3.5-35b-a3b.json").read_text())
    released["text_config"] |= {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    released["text_config"]["rope_parameters"]["mrope_section"] = [11, 11, 10]
    (path / "config.json").write_text(json.dumps(released))
    return path, reference


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 1, 8)], ids=str)
def test_released_form(released, mesh):
    path, reference = released
    prompts = random_prompts(70, 3)
    assert_matches(reference, prompts, decode(qwen3_5, path, prompts, mesh, max_new_tokens=8))


@pytest.mark.slow
def test_released_form_converted(released, tmp_path):
    path, reference = released
    prompts = random_prompts(30)
    qwen3_5.convert.convert(path, tmp_path / "float32", "float32")
    assert_matches(reference, prompts, decode(qwen3_5, tmp_path / "float32", prompts, (1, 2, 2), max_new_tokens=8))
    qwen3_5.convert.convert(path, tmp_path / "int8", "float32", "int8")
    options = {"mesh": (1, 1, 4), "max_new_tokens": 8, "draft": "mtp"}
    converted = decode(qwen3_5, tmp_path / "int8", prompts, **options)
    loaded = decode(qwen3_5, path, prompts, quantize="int8", **options)
    assert [token.id for token in converted[0]] == [token.id for token in loaded[0]]


def test_experts_in_two_forms(released, tmp_path):
    """Quantized releases have a matrix for each expert, and the layer of multi-token prediction as it was."""
    path, reference = released
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    extra = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in extra
    tensors = {name: x.contiguous() for name, x in experts_apart(tensors).items()}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    prompts = random_prompts(30)
    rows = decode(qwen3_5, tmp_path, prompts, (1, 2, 1), max_new_tokens=8, draft="mtp")
    assert_matches(reference, prompts, rows)


def test_no_drift(tmp_path):
    """300 tokens of an answer, each of which changes the states, where decay is slow."""
    _, *reference = qwen_35(num_hidden_layers=4, full_attention_interval=4)
    reference = save_random(tmp_path, *reference, seed=1)
    prompts = random_prompts(100, 20)
    assert_matches(reference, prompts, decode(qwen3_5, tmp_path, prompts, (1, 1, 2), max_new_tokens=300))


@pytest.mark.slow
def test_rows_take_the_places_of_others(tmp_path, monkeypatch):
    """More prompts than rows, which end at different times: the tokens are those of each row alone."""
    read_in_pieces(monkeypatch, qwen3_5, 64)
    _, *reference = qwen_35_moe()
    save_random(tmp_path, *reference)
    prompts = random_prompts(150, 9, 40, 70, 2)
    options = {"max_new_tokens": 20, "max_seq_len": 170}
    alone = [decode(qwen3_5, tmp_path, [prompt], **options)[0] for prompt in prompts]
    stop = alone[0][4].id
    together = decode(qwen3_5, tmp_path, prompts, rows=2, stop_tokens=(stop,), **options)
    for row, others in zip(alone, together, strict=True):
        ids = [token.id for token in row]
        assert [token.id for token in others] == ids[: ids.index(stop) + 1 if stop in ids else None]


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_conversation_goes_on(tmp_path, draft):
    """A prompt that begins with all that the states have seen, after an answer that ended at its limit, with a stop
    token or broken off, and one that goes back: none depends on what was kept, and the first two read what is new."""
    _, *reference = qwen_35()
    save_random(tmp_path, *reference)
    checkpoint = qwen3_5.convert.open_checkpoint(tmp_path)
    mesh = model.make_mesh(devices=jax.devices()[:1])
    weights = qwen3_5.convert.load(checkpoint, mesh, "float32")
    kept, read, tokens = {}, [], random_prompts(50)[0]
    options = {"max_new_tokens": 9, "max_seq_len": 200, "draft": draft}
    everything = decode(qwen3_5, tmp_path, [tokens], max_new_tokens=9)[0]
    stop = next(token.id for n, token in enumerate(everything) if n > 3)
    for n, stop_tokens in enumerate([(stop,), (), (), ()]):
        stats = {}
        of_call = options | {"stop_tokens": stop_tokens, "stats": stats}
        steps = generate.generate(weights, [tokens], checkpoint.config, mesh, kept=kept, **of_call)
        row = [token for step in steps for token in step]
        fresh = decode(qwen3_5, tmp_path, [tokens], stop_tokens=stop_tokens, max_new_tokens=9, max_seq_len=200)[0]
        assert [token.id for token in row] == [token.id for token in fresh]
        assert row[-1].finish_reason == ("stop" if stop_tokens else "length")
        read.append(stats["prefill_tokens"])
        tokens += [*(token.id for token in row), *random_prompts(10 + n)[0]]
        if n == 1:
            steps = generate.generate(weights, [tokens], checkpoint.config, mesh, kept=kept, **of_call)
            next(steps), steps.close()
        if n == 2:
            tokens = tokens[:70]
    assert read[:2] == [50, 11], read
    assert read[3] == 70, read


def test_what_is_refused(released):
    path, _ = released
    raw = json.loads((path / "config.json").read_text())
    for changes, words in [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide linear_num_value_heads 4"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"model_type": "qwen3_5_text", "intermediate_size": None}, "intermediate_size is missing"),
    ]:
        text = raw["text_config"] | changes
        with pytest.raises(model.InputError, match=words):
            model.Config.from_dict(text if "model_type" in changes else raw | {"text_config": text})


def test_packed_experts_converted_to_4_bits(tmp_path):
    """They stay packed, and load as what loading in 4 bits gives."""
    reference = save_random(tmp_path, *qwen_35_moe(moe_intermediate_size=32)[1:])
    save_file({name: x.contiguous() for name, x in reference.state_dict().items()}, tmp_path / "model.safetensors")
    prompts = random_prompts(5)
    qwen3_5.convert.convert(tmp_path, tmp_path / "int4", "float32", "int4")
    wanted = decode(qwen3_5, tmp_path, prompts, quantize="int4", max_new_tokens=2)
    assert decode(qwen3_5, tmp_path / "int4", prompts, max_new_tokens=2) == wanted
