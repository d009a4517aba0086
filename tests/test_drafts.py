"""Drafts: where they come from, and that they change no token."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    extra_layer_tensors,
    import_folder,
    qwen_extra_layer_tensors,
    random_extra_layer,
    read_in_pieces,
    save_random,
)
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from test_main import assert_refused, json_rows, main  # noqa: F401 (a fixture)
from test_parity import deepseek_3, flash, glm_moe, qwen_35_moe
from test_rows import LENGTHS, accepted, assert_equal, collected, demo, random_prompts, stopped

MTP, LOOKUP = ["--draft", "mtp"], ["--draft", "lookup"]


def test_look_up():
    """The tokens after the latest earlier occurrence of the last three tokens, or of two, and then from there again."""
    generate, chance = import_folder("llama3").generate, np.random.default_rng(0)
    history, lengths = chance.integers(0, 4, (200, 30)), chance.integers(1, 26, 200)
    rows = generate.Rows(jnp.asarray(history), None, jnp.asarray(lengths), None, None)
    found = np.asarray(generate.look_up(rows, [], 5)[0])
    for row, guessed, length in zip(history.tolist(), found.tolist(), lengths, strict=True):
        known = row[:length]
        for n in (3, 2):
            places = [i for i in range(n, length) if known[i - n : i] == known[-n:]]
            if length > n and places:
                again = known[max(places) :]
                assert guessed == known + (again * 5)[:5] + row[length + 5 :]
                break
        assert guessed[:length] == known and guessed[length + 5 :] == row[length + 5 :]


@pytest.mark.parametrize("T", [1, 2, 4, 8, 16])
def test_accept(T):
    """Right, wrong and half-right guesses, stops and limits inside them, rows that read prompts or stand still."""
    generate, chance = import_folder("llama3").generate, np.random.default_rng(T)
    B, verified, stops = 3000, T - 1 if T <= 8 else 0, (3, 4)
    lengths = chance.integers(1, 20, B)
    filled = np.where(chance.random(B) < 0.7, lengths - 1, chance.integers(0, lengths))
    limits = np.minimum(lengths + chance.integers(0, 12, B), 31)
    history = chance.integers(0, 30, (B, 32))
    at = lengths[:, None] + np.arange(1 + verified)
    chosen = np.where(chance.random(at.shape) < 0.8, np.take_along_axis(history, np.minimum(at, 31), 1), 3)
    wanted = [
        accepted(row.tolist(), *map(int, numbers), tokens.tolist(), stops, T)
        for row, *numbers, tokens in zip(history, filled, lengths, limits, chosen, strict=True)
    ]
    rows = generate.Rows(*map(jnp.asarray, (history, filled, lengths, limits)), None)
    found = generate.accept(rows, jnp.asarray(chosen), stops, T)
    for column, values in zip(found[:4], zip(*wanted, strict=True), strict=True):
        np.testing.assert_array_equal(column, values)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mesh", "rows", "temperature", "drafts"),
    [
        ("llama3", (2, 1, 2), 4, 0.3, 7),
        ("gpt_oss", (1, 1, 2), 4, 0.0, 5),
    ],
)
def test_drafts_change_no_token(monkeypatch, name, mesh, rows, temperature, drafts):
    """Rows that accept different numbers, stop or end in the middle of a draft, and are refilled. The last slot of the
    longest row is the last of the cache."""
    folder, config, mesh, weights = demo(name, mesh)
    model, generate, prompts = folder.model, folder.generate, random_prompts([*LENGTHS[:6], 217])
    monkeypatch.setattr(generate, "SHORT_PIECES", (model.PREFILL_PIECE,))  # one program reads all prompts,
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 1)  # a row at a time
    options = {"max_new_tokens": 40, "max_seq_len": 256, "seed": 5, "rows": rows}
    prompts = [prompt[:216] for prompt in prompts] + [[5, 6, 7] * 20, [9] * 30]
    options["sampling"] = generate.Sampling(temperature, top_k=50, top_p=0.95)
    wanted = collected(generate.generate(weights, prompts, config, mesh, **options), len(prompts))
    options["stop_tokens"] = tuple({row[n].id for row, n in zip(wanted, (30, 35), strict=False)})
    wanted = stopped(wanted, options["stop_tokens"])
    monkeypatch.setattr(generate, "REPEATING", 0)  # always drafts
    options |= {"draft": "lookup", "draft_tokens": drafts, "stats": (stats := {})}
    assert_equal(collected(generate.generate(weights, prompts, config, mesh, **options), len(prompts)), wanted)
    assert 0 < stats["drafts_accepted"] < stats["drafts"] <= drafts * stats["busy_row_steps"]
    assert stats["decode_tokens"] == stats["busy_row_steps"] + stats["drafts_accepted"]


@pytest.mark.slow
def test_a_ring_knows_how_far_drafts_wrote(monkeypatch):
    """Steps in flight, all of whose drafts are right, have filled a ring once around when a call is broken off. The
    next row shares its beginning with this one, which the ring has forgotten."""
    folder, config, mesh, weights = demo("gpt_oss", (1, 1, 1))
    model, generate, prompt, other = folder.model, folder.generate, [20] + [9] * 40, [20] + [9] * 15 + [7] * 5
    monkeypatch.setattr(model, "PREFILL_PIECE", 64)
    options = {"max_seq_len": 500, "kept": {}}
    fresh = collected(generate.generate(weights, [other], config, mesh, max_new_tokens=8, max_seq_len=500), 1)
    (row,) = collected(generate.generate(weights, [prompt], config, mesh, max_new_tokens=250, max_seq_len=500), 1)
    answer = jnp.array(prompt + [token.id for token in row])

    def know(rows, cache, drafts, *_):
        at, last = jnp.arange(rows.history.shape[1]), rows.lengths[:, None] - 1
        return jnp.where((at > last) & (at <= last + drafts), jnp.resize(answer, at.shape), rows.history), cache

    monkeypatch.setitem(generate.DRAFTS, "know", know)
    known, ring = len(prompt), min(layer[0].shape[2] for layer in model.abstract_cache(config, mesh, 1, 500, "float32"))
    for tokens in generate.generate(weights, [prompt], config, mesh, max_new_tokens=250, draft="know", **options):
        if (known := known + len(tokens)) > ring - 10:  # two more steps of four tokens are in flight
            break
    assert known == ring - 6
    assert_equal(collected(generate.generate(weights, [other], config, mesh, max_new_tokens=8, **options), 1), fresh)


def save_with_extra_layer(path, case, **options):
    """A random checkpoint with the layer of multi-token prediction, as releases have it: its folder of modules, the
    reference class, and the reference of the layer."""
    folder, model_class, config = case(**options)
    config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    if case is qwen_35_moe:
        config.mtp_layer_types = ["full_attention"]
    reference = save_random(path, model_class, config)
    mtp, file = random_extra_layer(reference), path / "model.safetensors"
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    if case is qwen_35_moe:
        extra = {name: x for name, x in qwen_extra_layer_tensors(mtp).items() if ".experts." not in name}
        of_experts = extra_layer_tensors(mtp, "mtp.layers.0")
        extra |= {name: x for name, x in of_experts.items() if ".experts." in name}  # apart, as the others are here
    else:
        extra = extra_layer_tensors(mtp, f"model.layers.{config.num_hidden_layers}")
    save_file(load_file(file) | extra, file)
    return folder, reference, mtp


def reference_drafts(reference, mtp, tokens, count):
    """What the layer guesses behind these tokens, one after the other, and its hidden states at the first."""
    with torch.no_grad():
        ids, hidden, guesses = torch.tensor([tokens]), None, []
        states, after = reference.model(ids).last_hidden_state[:, :-1], ids[:, 1:]
        for _ in range(count):
            out = mtp.forward_layer(0, states, torch.arange(1, after.shape[1] + 1)[None], None, input_ids=after)
            hidden = out[0] if hidden is None else hidden
            guesses.append(int(reference.lm_head(out[0, -1]).argmax()))
            states, after = torch.cat([states, out[:, -1:]], 1), torch.cat([after, torch.tensor([guesses[-1:]])], 1)
    return guesses, hidden.numpy()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "mesh"),
    [(deepseek_3, (2, 1, 4)), (flash, (1, 1, 1)), (glm_moe, (1, 4, 2)), (qwen_35_moe, (2, 2, 2))],
)
def test_the_extra_layer_guesses_as_the_reference(tmp_path, case, mesh):
    """Hidden states, and the guesses behind a prompt read in two pieces, and behind each step that follows."""
    folder, reference, mtp = save_with_extra_layer(tmp_path, case)
    model, generate, N = folder.model, folder.generate, 2
    checkpoint = folder.convert.open_checkpoint(tmp_path, extra_layer=True)
    config, mesh = checkpoint.config, model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    weights, prompts = folder.convert.load(checkpoint, mesh, "float32"), random_prompts([30, 19, 25, 32])
    history, lengths = np.zeros((4, 64), np.int32), np.array([len(prompt) for prompt in prompts], np.int32)
    for b, prompt in enumerate(prompts):
        history[b, : len(prompt)] = prompt
    by_rows = jax.sharding.NamedSharding(mesh, P("dp"))
    numbers = history, np.zeros(4, np.int32), lengths, np.full(4, 60, np.int32), np.zeros((4, 2), np.uint32)
    rows = generate.Rows(*jax.device_put(numbers, by_rows))
    cache = model.zeros(model.abstract_cache(config, mesh, 4, 64, jnp.float32, drafts=N))
    options = {"config": config, "mesh": mesh, "sampling": generate.Sampling(), "draft": "mtp", "drafts": N}
    for step, T in enumerate([16, 16, 1 + N, 1 + N, 1 + N]):
        cache, rows, (after, *_) = generate.step(weights, cache, rows, T=T, **options)
        found = np.asarray(rows.history)
        for b, length in enumerate(np.asarray(after).tolist() if step else []):
            guesses, _ = reference_drafts(reference, mtp, found[b, :length].tolist(), N if T <= model.FEW else 1)
            assert found[b, length : length + len(guesses)].tolist() == guesses

    def body(weights, cache, tokens):
        positions = jnp.zeros((2, 1), jnp.int32) + jnp.arange(tokens.shape[1] - 1)
        R = model.cache_sharers(config, model.model_shards(mesh))
        known = jnp.full(2, tokens.shape[1] - 1)
        span = model.Span(positions, None, known, 2, R)
        x, cache = model.forward(weights, tokens[:, :-1], span, cache, config)
        x, _ = model.predict(weights, x, weights["norm"], tokens[:, 1:], span, cache[-1], config)
        norm = getattr(model, "norm_plus_one", model.rms_norm)
        return norm(x, weights["extra"]["norm"], config.rms_norm_eps)

    tokens = np.array(random_prompts([17, 17], seed=3), np.int32)
    cache = model.zeros(model.abstract_cache(config, mesh, 2 * mesh.shape["dp"], 64, jnp.float32))
    program = model.sharded(body, mesh, weights, config, (model.CACHE_SPEC, P()), P())
    for row, x in zip(tokens, np.asarray(jax.jit(program)(weights, cache, tokens)), strict=True):
        np.testing.assert_allclose(x, reference_drafts(reference, mtp, row.tolist(), 1)[1], atol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "mesh", "temperature", "drafts", "quantize"),
    [
        (deepseek_3, (2, 2, 1), 0.5, 1, "int8"),
        (glm_moe, (1, 2, 2), 0.0, 4, None),
        (qwen_35_moe, (1, 2, 2), 0.5, 3, None),
    ],
)
def test_guesses_of_the_extra_layer_change_no_token(tmp_path, monkeypatch, case, mesh, temperature, drafts, quantize):
    """Refilled rows, and a checkpoint that convert.py wrote, in int8 too."""
    folder, *_ = save_with_extra_layer(tmp_path / "source", case, num_hidden_layers=1)
    folder.convert.convert(tmp_path / "source", tmp_path / "output", "float32", quantize)
    model, generate, prompts = folder.model, folder.generate, random_prompts(LENGTHS[:6])
    read_in_pieces(monkeypatch, folder, 64)
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 64)  # one row at a time, since several take another program
    options = {"max_new_tokens": 12, "sampling": generate.Sampling(temperature), "seed": 5}
    found = []
    for uses in (False, True):
        checkpoint = folder.convert.open_checkpoint(tmp_path / "output", extra_layer=uses)
        grid = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
        weights, stats = folder.convert.load(checkpoint, grid, "float32"), {}
        options |= {"draft": "mtp", "draft_tokens": drafts, "rows": 4, "stats": stats} if uses else {}
        steps = generate.generate(weights, prompts, checkpoint.config, grid, **options)
        found.append(collected(steps, len(prompts)))
    assert_equal(*found, atol=1e-3 if quantize else 1e-4)
    assert stats["drafts"] and stats["decode_tokens"] == stats["busy_row_steps"] + stats["drafts_accepted"]


@pytest.mark.slow
def test_the_demo_accepts_its_drafts(main):  # noqa: F811
    """Over 60 %, in rows that say how many. Without drafts the tokens are the same."""
    flags = "--dtype", "float32", "--output", "json", "--logprobs", "--batch_size", "2"
    (rows, _), (with_drafts, stats) = (json_rows(main(*flags, *more, folder="glm4_moe")[1]) for more in ([], MTP))
    assert 0.6 < stats["drafts_accepted"] < 1
    assert stats["tokens_per_step"] == pytest.approx(1 + 3 * stats["drafts_accepted"])
    for row, other in zip(rows, with_drafts, strict=True):
        assert 1.5 < other.pop("tokens_per_step") <= 4
        np.testing.assert_allclose(row.pop("logprobs"), other.pop("logprobs"), atol=1e-4)
        assert row == other


@pytest.mark.slow
def test_a_conversation_with_drafts():
    """Is one without: what is kept from turn to turn is right, though it includes the extra layer's cache."""
    turns = "Hello!\nWhat is the capital of France?\n/reset\nWhat is 3 plus 4?\nHello!\n"
    command = [sys.executable, ROOT / "deepseek" / "main.py", "--chat", "--dtype", "float32"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    runs = [
        subprocess.run([*command, *more], env=environment, input=turns, capture_output=True, text=True)
        for more in ([], MTP)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs
    assert len(runs[0].stdout.splitlines()) == 4 and len({run.stdout for run in runs}) == 1, runs


def test_the_shortest_rows(main):  # noqa: F811
    """With nothing to look up, and no step of decoding."""
    status, out, _ = main("--raw", "--prompt", "a", "--max_new_tokens", "1", "--output", "json", *LOOKUP)
    (row,), stats = json_rows(out)
    assert status == 0 and len(row["tokens"]) == 1 and row["tokens_per_step"] is stats["tokens_per_step"] is None


def test_no_extra_layer(main, tmp_path):  # noqa: F811
    """One line for --draft mtp."""
    _, model_class, config = deepseek_3()
    save_random(tmp_path, model_class, config)
    refused = main("--model_path", tmp_path, "--raw", "--prompt", "Hello!", *MTP, folder="deepseek")
    assert_refused(refused, "no layer of multi-token prediction")
