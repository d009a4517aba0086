"""Prompts that are too many for one batch."""

import random

import jax
import pytest
from helpers import ROOT, import_folder


def test_what_memory_holds(monkeypatch):
    """In batches of four rows and of eight, each row draws the tokens that it draws in one batch."""
    folder = import_folder("llama3")
    main, model = folder.main, folder.model
    checkpoint = folder.convert.open_checkpoint(ROOT / "llama3" / "demo")
    mesh = model.make_mesh(2, 1, 2, devices=jax.devices()[:4])
    weights = folder.convert.load(checkpoint, mesh, "float32")
    chance, lengths = random.Random(0), [3, 40, 300, 7, 2, 90, 1, 12, 33, 5, 8, 4, 6]
    prompts = [[chance.randrange(checkpoint.config.vocab_size) for _ in range(length)] for length in lengths]
    generate, batches = main.generate, []

    def recorded(*arguments, rows, **options):
        batches.append((rows, options["max_seq_len"]))
        return generate(*arguments, rows=rows, **options)

    def decoded():
        rows, stats, options = [[] for _ in prompts], {}, {"max_new_tokens": 20, "sampling": model.Sampling(2.0)}
        for tokens in main.generate_in_batches(weights, prompts, checkpoint.config, mesh, stats=stats, **options):
            for token in tokens:
                rows[token.row].append(token)
        return rows, stats

    monkeypatch.setattr(main, "generate", recorded)
    whole, stats_of_one = decoded()
    cache = model.abstract_cache(checkpoint.config, mesh, 4, 512, weights["norm"].dtype)
    memory = (model.stored_bytes(weights) + 1.01 * model.stored_bytes(cache)) / main.MEMORY_SHARE
    monkeypatch.setattr(main, "memory_of", lambda mesh: memory)
    dealt, stats = decoded()
    assert batches == [(list(range(13)), 319), ([1, 2, 5, 8], 512), ([0, 3, 4, 7, 9, 10, 11, 12], 256), ([6], 20)]
    for one, other in zip(whole, dealt, strict=True):
        assert [(t.row, t.id, t.finish_reason) for t in one] == [(t.row, t.id, t.finish_reason) for t in other]
        assert [t.logprob for t in one] == pytest.approx([t.logprob for t in other], abs=1e-4)
    assert stats["decode_steps"] == 3 * stats_of_one["decode_steps"] == 3 * 19
    for name in "prefill_tokens", "decode_tokens":
        assert stats_of_one[name] == stats[name]
    assert model.stored_bytes(weights) < stats["step_bytes"] < stats_of_one["step_bytes"]


def test_what_only_just_fits(monkeypatch):
    """Alone, a row has the slots that it needs, where memory has no room for a power of two. If there is no room for
    these either, the row is refused before anything is decoded."""
    folder = import_folder("llama3")
    main, model = folder.main, folder.model
    checkpoint = folder.convert.open_checkpoint(ROOT / "llama3" / "demo")
    mesh = model.make_mesh(devices=jax.devices()[:1])
    weights = folder.convert.load(checkpoint, mesh, "float32")
    cache = model.abstract_cache(checkpoint.config, mesh, 1, 512 + 99, weights["norm"].dtype)
    memory = model.stored_bytes(weights) + 1.01 * model.stored_bytes(cache)
    monkeypatch.setattr(main, "memory_of", lambda mesh: memory)
    prompts, options = [[7] * 512, [8] * 512], {"max_new_tokens": 100, "stats": {}}
    steps = main.generate_in_batches(weights, prompts, checkpoint.config, mesh, **options)
    tokens = [token for step in steps for token in step]
    assert [token.row for token in tokens] == [1] * 100 + [0] * 100
    memory /= 1.1
    with pytest.raises(model.InputError, match="no memory for a cache of 1 x 611 tokens"):
        next(main.generate_in_batches(weights, prompts, checkpoint.config, mesh, **options))


@pytest.mark.parametrize("rows", [1, 8, 5000])
def test_pieces_divide_a_prompt_evenly(rows):
    """As few pieces as there may be, with little padding."""
    model = import_folder("llama3").model
    mesh = model.make_mesh(devices=jax.devices()[:1])
    most = min(model.PREFILL_PIECE, max(1, model.PREFILL_TOKENS // model.power_of_two(rows)))
    for longest in range(1, 3000, 7):
        piece, pieces = model.padded_piece(longest, rows, mesh), -(-longest // most)
        assert piece <= most and longest <= pieces * piece <= max(1.25 * longest, longest + 16) + pieces * 16
