"""Rows that go at their own pace: more prompts than rows, steps of several tokens, conversations that keep their
cache."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, decode, import_folder, read_in_pieces, save_random
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

LENGTHS = [3, 40, 300, 7, 2, 90, 1, 12, 33, 5, 8, 4, 6]


def demo(name: str, mesh, dtype="float32", extra_layer=False):
    """A folder's modules, and the demo's config, mesh and weights."""
    folder = import_folder(name)
    checkpoint = folder.convert.open_checkpoint(ROOT / name / "demo", extra_layer=extra_layer)
    mesh = folder.model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    return folder, checkpoint.config, mesh, folder.convert.load(checkpoint, mesh, dtype)


def random_prompts(lengths, vocab_size=250, seed=0):
    chance = random.Random(seed)
    return [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]


def collected(steps, count: int):
    """The tokens of each row."""
    rows = [[] for _ in range(count)]
    for tokens in steps:
        for token in tokens:
            rows[token.row].append(token)
    return rows


def stopped(rows, stop_tokens):
    """What the rows are with these stop tokens."""
    ends = [next((n for n, token in enumerate(row) if token.id in stop_tokens), None) for row in rows]
    return [
        row if n is None else [*row[:n], row[n]._replace(finish_reason="stop")]
        for row, n in zip(rows, ends, strict=True)
    ]


def assert_equal(rows, others, atol=1e-4):
    """The same tokens for the same reasons, and nearly the same log-probabilities."""
    for row, other in zip(rows, others, strict=True):
        assert [(t.id, t.finish_reason) for t in row] == [(t.id, t.finish_reason) for t in other]
        np.testing.assert_allclose([t.logprob for t in row], [t.logprob for t in other], atol=atol)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mesh", "rows", "temperature"),
    [
        ("llama3", (2, 1, 2), 3, 2.0),
        ("gpt_oss", (1, 1, 4), 4, 0.0),
    ],
)
def test_more_prompts_than_rows(monkeypatch, name, mesh, rows, temperature):
    """A row's tokens are those of all prompts at once, whatever place it takes and when. Some rows end early."""
    folder, config, mesh, weights = demo(name, mesh)
    model, generate, prompts = folder.model, folder.generate, random_prompts(LENGTHS)
    monkeypatch.setattr(generate, "SHORT_PIECES", (model.PREFILL_PIECE,))  # one program reads all prompts
    options = {"max_new_tokens": 20, "sampling": generate.Sampling(temperature), "seed": 5}
    whole = collected(generate.generate(weights, prompts, config, mesh, **options), len(prompts))
    options["stop_tokens"] = tuple({row[n].id for row, n in zip(whole, (3, 0, 9, 12), strict=False)})
    whole = stopped(whole, options["stop_tokens"])
    assert "stop" in {row[-1].finish_reason for row in whole}
    monkeypatch.setattr(model, "PREFILL_PIECE", 64)
    stats = {}
    some = collected(generate.generate(weights, prompts, config, mesh, rows=rows, stats=stats, **options), len(prompts))
    assert_equal(some, whole)
    assert stats["prefill_tokens"] == sum(LENGTHS)
    wanted = sum(len(row) - 1 for row in whole)  # the first token is prefill's, but for rows that go on meanwhile
    assert 0.9 * wanted <= stats["decode_tokens"] <= min(wanted, stats["row_steps"])
    assert stats["row_steps"] == rows * stats["decode_steps"]
    if mesh.shape["dp"] == 1:
        assert stats["decode_tokens"] == wanted


def test_what_prompts_share_is_read_once(monkeypatch):
    """The first prompt reads it, and those after it only what differs. The last one is all shared."""
    folder, config, mesh, weights = demo("llama3", (1, 1, 1))
    generate, beginning = folder.generate, random_prompts([140])[0]
    read_in_pieces(monkeypatch, folder, 32)
    prompts = [beginning + end for end in random_prompts([7, 9, 20, 3, 5], seed=1)] + [beginning]
    options, stats = {"max_new_tokens": 8, "max_seq_len": 170}, {}
    apart = [collected(generate.generate(weights, [each], config, mesh, **options), 1)[0] for each in prompts]
    rows = collected(generate.generate(weights, prompts, config, mesh, rows=2, stats=stats, **options), 6)
    assert_equal(rows, apart)
    assert stats["prefill_tokens"] == 147 + 9 + 20 + 3 + 5 + 1
    assert stats["row_steps"] == stats["decode_tokens"] == 6 * 7  # no place waits: each first token is prefill's


def places_of(prompts, rows: int, held: float, dp: int = 1):
    """generate.Places, `rows` of them, whose caches have room for `held` tokens of a row; 0 if they are states."""
    generate = import_folder("llama3").generate
    sizes = {"count": rows, "batch": rows, "dp": dp, "together": rows // dp, "pieces": [512, 64, 16]}
    sizes |= {"drafts": 0, "seed": 0}
    limits = {"max_new_tokens": 2, "max_seq_len": 500, "stop_tokens": (), "sparing": False}
    forgetting = generate.Forgetting([], held, opening=0, preamble=0)
    return generate.Places([*map(np.array, prompts)], **sizes, **limits, forgetting=forgetting)


@pytest.mark.parametrize("held", [512, 1024, np.inf])
def test_a_word_in_common_lets_no_prompt_wait(held):
    """When the first row has read what all share, all others begin, though each agrees with some for a word more. So in
    a ring that holds a whole row, but less than PREFILL_PIECE."""
    beginning, *words = random_prompts([400, 2, 2, 2])
    prompts = [beginning + words[i % 3] + end for i, end in enumerate(random_prompts([10] * 9, seed=1))]
    places = places_of(prompts, 9, held=held)
    for wanted in (1, 9):
        copies, _ = places.plan()
        assert (places.numbers >= 0).sum() == wanted
        places.start(*places.choose())
    assert copies.tokens.tolist() == [0] + [400] * 2 + [402] + [400] * 2 + [402] + [400] * 2


def test_each_device_reads_what_prompts_share_at_once():
    """None waits for what another device reads, from which it could copy nothing."""
    (beginning,), ends = random_prompts([400]), random_prompts([10] * 8, seed=1)
    places = places_of([beginning + end for end in ends], 8, held=1024, dp=4)
    for wanted in (4, 8):
        copies, _ = places.plan()
        assert (places.numbers >= 0).sum() == wanted
        places.start(*places.choose())
    assert copies.tokens.tolist() == [0, 400] * 4


def test_a_prompt_begins_on_the_device_that_has_read_its_beginning():
    """Though a place is free on the first device too."""
    beginning, *ends = random_prompts([400, 10, 10])
    first, second = (beginning + end for end in ends)
    places = places_of([*random_prompts([20, 20], seed=1), first, [7] * 20, second], 4, held=1024, dp=2)
    places.plan()
    places.start(*places.choose())
    places.numbers[[0, 3]] = -1  # their rows have ended
    assert places.plan()[0].tokens.tolist() == [0, 0, 0, 400]


def read_with_states(prompts, rows: int) -> int:
    """How many tokens of prompts a model with states reads, `rows` at a time."""
    places, read = places_of(prompts, rows, 0), 0
    places.plan()
    while (places.numbers >= 0).any():
        if places.has_more():
            places.start(*places.choose())
            read += places.in_flight[-1].prompt_tokens
        else:
            n = len(places.in_flight[0].places)
            places.receive(places.rows.lengths[places.in_flight[0].places], [[5]] * n, [[0.0]] * n)
        places.plan()
    return read


@pytest.mark.parametrize("rows", [1, 3])
def test_a_word_in_common_moves_no_copy_of_states(rows):
    """What all prompts share is read once, though each agrees with some of the next ones for a word more."""
    beginning, *words = random_prompts([400, 2, 2, 2])
    ends = random_prompts([10] * 30, seed=1)
    prompts = [beginning + words[i * i % 7 % 3] + end for i, end in enumerate(ends)]
    assert read_with_states(prompts, rows) <= 400 + 30 * 12 + rows


def test_groups_of_prompts_that_share_more_than_all_do():
    """With states, too, what all share is read once, and so is what each group does: by its first row, which has the
    rest from another place. The group of the very first reads it twice: that row keeps what all share."""
    beginning, *groups = random_prompts([200, 150, 150, 150])
    prompts = [beginning + groups[i % 3] + end for i, end in enumerate(random_prompts([10] * 12, seed=1))]
    assert read_with_states(prompts, 12) == 200 + 4 * 150 + 12 * 10


def test_where_places_stand_still_after_steps_with_drafts_were_broken_off():
    """Where states were saved: a step writes from there on, and what they return to needs the tokens that other layers
    have before."""
    places = places_of(random_prompts([16, 16, 16]), 3, held=0)
    places.drafts = 3
    places.plan()
    places.start(*places.choose())
    places.reuse.saved_at[1], places.numbers[2] = (10, 5), -1  # the last row has ended
    assert places.reuse.remaining().tolist() == [0, 10, 16]


def test_a_ring_that_holds_a_whole_row(monkeypatch):
    """What is written behind its last slot, padding and a row that stands still there, lands in the first ones: a row
    cannot go on after few tokens."""
    folder, config, mesh, weights = demo("gemma", (1, 1, 1))
    monkeypatch.setattr(folder.generate, "SHORT_PIECES", (folder.model.PREFILL_PIECE,))
    first, other = random_prompts([250, 30], seed=1)
    options, kept, rows = {"max_seq_len": 256, "max_new_tokens": 12}, {}, []
    assert config.sliding_window == 32 and folder.model.PREFILL_PIECE > 256
    for prompts in ([first, other], [first[:10] + other, other[:5]]):
        rows = collected(folder.generate.generate(weights, prompts, config, mesh, kept=kept, **options), 2)
    alone = collected(folder.generate.generate(weights, [first[:10] + other], config, mesh, **options), 1)
    assert_equal(rows[:1], alone)


def test_a_ring_that_was_saved_with_what_is_behind_it(monkeypatch):
    """A ring that is saved may hold tokens of an earlier row, up to PREFILL_PIECE behind it. Where a row returns to it,
    they are there again: the next row cannot go back as far as if padding alone were behind."""
    folder, config, mesh, weights = demo("gemma", (1, 1, 1))
    monkeypatch.setattr(folder.model, "PREFILL_PIECE", 224)  # with a window of 32, rings have 256 slots
    monkeypatch.setattr(folder.generate, "SHORT_PIECES", (16,))
    first, *ends = random_prompts([460, 20, 20, 20], seed=1)
    goes_back = first[:260] + ends[0]
    prompts = [first, goes_back, goes_back[:-8] + ends[1], first[:210] + ends[2]]
    options, kept = {"max_seq_len": 480, "max_new_tokens": 12}, {}
    for prompt in prompts:
        steps = folder.generate.generate(weights, [prompt], config, mesh, kept=kept, **options)
        alone = folder.generate.generate(weights, [prompt], config, mesh, **options)
        assert_equal(collected(steps, 1), collected(alone, 1))


# By default full caches, rings and states run: the first, the seventh, the thirteenth.
SHARED = [  # the folder; mesh; rows; tokens that all share; how often they are read; options
    ("llama3", (1, 1, 1), 8, 300, 1, {"quantize_cache": "int8"}),
    ("llama3", (2, 1, 4), 8, 300, 2, {"temperature": 2.0}),  # two devices share a head
    ("llama3", (1, 1, 1), 3, 170, 1, {"draft": "lookup"}),
    ("gemma4", (1, 1, 4), 8, 330, 1, {"quantize_cache": "int8"}),  # layers with other numbers of heads
    ("gpt_oss", (1, 2, 1), 5, 290, 1, {"temperature": 1.0}),
    ("llama4", (1, 1, 8), 8, 300, 1, {}),  # chunks
    ("gemma", (1, 1, 2), 4, 400, 1, {}),  # rings of 256 slots
    ("deepseek", (1, 1, 4), 8, 300, 4, {"draft": "mtp"}),  # each of four devices has two rows
    ("deepseek", (1, 1, 8), 4, 300, 4, {"quantize_cache": "int8"}),  # pairs of devices have one row each
    ("glm4_flash", (2, 1, 2), 6, 300, 2, {}),  # and three rows: devices share their tokens
    ("qwen3_5", (1, 1, 1), 3, 70, None, {}),  # too few to copy states for
    ("qwen3_5", (1, 1, 1), 3, 170, 1, {"quantize_cache": "int8"}),
    ("qwen3_5", (1, 1, 4), 8, 300, 1, {"temperature": 1.0}),
    ("qwen3_5", (2, 1, 2), 8, 300, 2, {"draft": "lookup"}),
    ("qwen3_5", (1, 1, 2), 1, 300, 2, {}),  # one place keeps them for the next row, until one shares half
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "mesh", "rows", "common", "times", "options"), SHARED, ids=str)
def test_the_first_row_reads_for_all(monkeypatch, name, mesh, rows, common, times, options):
    """Tokens are those of rows that read all themselves: prompts that go on after what they share, of which one is the
    beginning of another, two are equal, one shares half; more of them than rows."""
    folder, config, mesh, weights = demo(name, mesh, extra_layer=options.get("draft") == "mtp")
    generate, beginning = folder.generate, random_prompts([common])[0]
    monkeypatch.setattr(folder.model, "PREFILL_PIECE", 64)  # of windows of 32, rings have 256 slots
    if "draft" not in options:  # those with drafts read in short pieces too
        read_in_pieces(monkeypatch, folder, 64)
    ends = random_prompts([7, 40, 3, 1, 20, 9, 5, 11, 2, 70], seed=1)
    prompts = [beginning + end for end in (*ends, ends[1] + ends[0], ends[2])]
    prompts.insert(3, beginning[: common // 2] + ends[3])
    options = {**options, "sampling": generate.Sampling(options.get("temperature", 0.0)), "seed": 5}
    options = {name: value for name, value in options.items() if name != "temperature"} | {"max_new_tokens": 12}

    def decoded(**more):
        steps = generate.generate(weights, prompts, config, mesh, **options, **more)
        return collected(steps, len(prompts))

    stats = {}
    shared = decoded(rows=rows, stats=stats)
    monkeypatch.setattr(generate.Reuse, "source", lambda self, p, *_: (p, 0))
    monkeypatch.setattr(generate.Reuse, "shared", lambda *_: 0)
    apart, atol = decoded(rows=rows), 1e-3 if "quantize_cache" in options else 1e-4  # a number may be rounded up
    assert_equal(shared, apart, atol)
    own = sum(map(len, prompts)) - common * len(prompts)
    assert not times or times * common <= stats["prefill_tokens"] <= times * common + own + common


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mesh", "temperature", "quantize_cache", "T"),
    [
        ("llama3", (1, 1, 1), 0.0, "int8", 2),
        ("llama3", (2, 1, 2), 2.0, None, 4),
        ("deepseek", (1, 1, 4), 0.0, None, 4),
        ("llama4", (1, 1, 8), 2.0, None, 8),
        ("gpt_oss", (1, 1, 2), 0.0, None, 3),
    ],
)
def test_steps_that_verify(name, mesh, temperature, quantize_cache, T):
    """Drafts that are right, wrong, half right or left to chance: the tokens of steps of one, and a row advances past
    those that agree. Rows read prompts, decode, and end, each at its own pace."""
    folder, config, mesh, weights = demo(name, mesh)
    model, generate, (prompts, new) = folder.model, folder.generate, (random_prompts([3, 30, 11, 1]), 18)
    options = {"sampling": generate.Sampling(temperature), "seed": 5, "quantize_cache": quantize_cache}
    wanted = collected(generate.generate(weights, prompts, config, mesh, max_new_tokens=new, **options), 4)
    history, limits = np.zeros((4, 64), np.int32), np.array([len(prompt) + new for prompt in prompts], np.int32)
    for b, prompt in enumerate(prompts):
        answer = np.array([token.id for token in wanted[b]])
        history[b, : limits[b]] = [*prompt, *answer]  # the drafts: what stands behind `lengths`
        if b == 1:
            history[b, len(prompt) : limits[b]] = (answer + 1) % config.vocab_size
        if b == 2:
            history[b, len(prompt) : limits[b] : 3] = (answer[::3] + 1) % config.vocab_size
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    numbers = history, np.zeros(4, np.int32), lengths, limits, np.array([(b, 5) for b in range(4)], np.uint32)
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    rows = generate.Rows(*jax.device_put(numbers, by_rows))
    cache = model.zeros(model.abstract_cache(config, mesh, 4, 64, jnp.float32, quantize_cache))
    given, steps = [[] for _ in prompts], np.zeros(4, int)
    fixed = {"config": config, "mesh": mesh, "sampling": options["sampling"]}
    while min(map(len, given)) < new:
        cache, rows, (after, chosen, logprobs) = generate.step(weights, cache, rows, T=T, **fixed)
        for b in range(4):
            grown = int(after[b] - lengths[b])
            given[b] += zip(np.asarray(chosen)[b, :grown].tolist(), np.asarray(logprobs)[b, :grown], strict=True)
            steps[b] += bool(grown)
        lengths = np.asarray(after)
    for b, row in enumerate(wanted):
        assert [token for token, _ in given[b]] == [token.id for token in row]
        np.testing.assert_allclose([p for _, p in given[b]], [token.logprob for token in row], atol=1e-4)
        assert np.asarray(rows.history)[b, : limits[b]].tolist() == prompts[b] + [token.id for token in row]
    fewest = -(-new // T)
    assert fewest <= steps[0] <= fewest + 1 and steps[1] == new and fewest < steps[2] < new


SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("full", (1, 1, 1)), ("window", (1, 1, 4)), ("chunks", (1, 1, 1)), ("both", (1, 1, 4))],
    ids=str,
)
def test_a_conversation_keeps_its_cache(tmp_path, monkeypatch, kind, mesh):
    """Each call continues what is there, goes back a little or far, or is broken off. With windows and chunks much
    shorter than the conversation, the caches are rings that have gone round several times. Heads in Gemma 4's layers
    with a window are shared by 2 of 4 devices, in the others by 4, and its last layers share keys and values."""
    name, config = "llama3", MistralConfig(**SMALL, sliding_window=50 if kind == "window" else None, head_dim=16)
    if kind == "chunks":
        moe = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        name, config = "llama4", Llama4TextConfig(**SMALL, **moe, head_dim=16, attention_chunk_size=44)
    model_class = Llama4ForCausalLM if kind == "chunks" else MistralForCausalLM
    if kind == "both":
        one_head = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 1}
        embeddings = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        sizes = {"head_dim": 16, "global_head_dim": 24, "sliding_window": 50, "layer_types": kinds}
        name, config = "gemma4", Gemma4TextConfig(**SMALL | {"rms_norm_eps": 1e-6}, **one_head, **embeddings, **sizes)
        model_class = Gemma4ForCausalLM
    folder = import_folder(name)
    save_random(tmp_path, model_class, config)
    model, generate, convert = folder.model, folder.generate, folder.convert
    read_in_pieces(monkeypatch, folder, 32)
    checkpoint = convert.open_checkpoint(tmp_path)
    grid = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    weights, options = convert.load(checkpoint, grid, "float32"), {"max_new_tokens": 9, "max_seq_len": 1024}
    kept, tokens, read = {}, [], []
    # The tokens that are new, and the beginning that stays: of all, of a little less, of next to nothing.
    for new, staying in ((300, 0), (40, 308), (70, 345), (33, 423), (5, 20), (500, 25), (60, 520), (1, 576)):
        prompt = tokens[:staying] + random_prompts([new], seed=new)[0]
        stats = {}
        steps = generate.generate(weights, [prompt], checkpoint.config, grid, kept=kept, stats=stats, **options)
        (row,) = collected(steps, 1)
        assert_equal(decode(folder, tmp_path, [prompt], mesh, **options), [row])
        tokens = prompt + [token.id for token in row]
        read.append(stats["prefill_tokens"])
        steps = generate.generate(weights, [[*tokens, 1, 2, 3]], checkpoint.config, grid, kept=kept, **options)
        for _ in range(new % 4):
            next(steps)
        steps.close()
    # A conversation that outgrows its slots is read again.
    prompt, options["max_seq_len"], stats = [*tokens, 4], 2048, {}
    (row,) = collected(
        generate.generate(weights, [prompt], checkpoint.config, grid, kept=kept, stats=stats, **options), 1
    )
    assert_equal(decode(folder, tmp_path, [prompt], mesh, **options), [row])
    assert stats["prefill_tokens"] == len(prompt)
    # A ring forgets what is further back than a piece, and then all is read again.
    assert read == [300, 40, 70, 33, 5 if kind == "full" or mesh != (1, 1, 1) else 25, 500, 60, 1]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("qwen3_5", (1, 1, 1), {"quantize_cache": "int8"}),
        ("qwen3_5", (1, 1, 4), {"temperature": 1.0}),  # devices share a head
        ("qwen3_5", (1, 2, 2), {"draft": "lookup"}),
        ("gemma", (1, 1, 2), {}),
        ("gpt_oss", (1, 1, 1), {"draft": "lookup"}),
        ("llama4", (1, 1, 8), {}),
    ],
    ids=str,
)
def test_a_conversation_whose_thoughts_are_dropped(monkeypatch, name, mesh, options):
    """Ten turns, one of them broken off. Each next prompt lacks the words that begin the answer, and its thought: what
    states and rings had before these is kept, and a turn reads what follows. Then two that begin anew: they read what
    follows the preamble, and one whose preamble is another."""
    folder, config, mesh, weights = demo(name, mesh)
    generate = folder.generate
    monkeypatch.setattr(folder.model, "PREFILL_PIECE", 16)  # a ring has forgotten what is further back
    options = {"sampling": generate.Sampling(options.get("temperature", 0.0)), "seed": 5, "max_seq_len": 1024} | options
    options.pop("temperature", None)
    kept, history, before, opening = {}, random_prompts([200])[0], None, [1, 2, 3, 4, 5, 6, 7]
    atol = 1e-3 if "quantize_cache" in options else 1e-4  # a number may be rounded up
    for turn, said in enumerate(random_prompts([30, 12, 9, 40, 20, 11, 8, 25, 60, 14], seed=1)):
        prompt, stats, options["max_new_tokens"] = history + said + opening, {}, 40 + turn
        steps = generate.generate(weights, [prompt], config, mesh, kept=kept, preamble=150, stats=stats, **options)
        fresh = collected(generate.generate(weights, [prompt], config, mesh, **options), 1)
        history = prompt[:-4]
        if turn == 4:
            for _ in range(9):
                next(steps)
            steps.close()
        else:
            row = collected(steps, 1)
            assert_equal(row, fresh, atol)
            new = len(prompt) - (len(before) - generate.OPENING if before else 0)
            # A ring that has not gone round yet has all.
            assert new - 7 * (name != "qwen3_5") <= stats["prefill_tokens"] <= new
            history += [token.id for token in row[0]][-6:]
        before = prompt
    other, *messages = random_prompts([170, 30, 9], seed=2)
    for prompt in (prompt[:150] + messages[0], prompt[:150] + messages[1], other):
        steps = generate.generate(weights, [prompt], config, mesh, kept=kept, preamble=150, stats=stats, **options)
        fresh = generate.generate(weights, [prompt], config, mesh, **options)
        assert_equal(*(collected(steps, 1) for steps in (steps, fresh)), atol)
        assert stats["prefill_tokens"] == len(prompt) - 150 * (prompt is not other)


@pytest.mark.slow
def test_a_row_gets_states_that_its_source_has_just_got():
    """Of three equal prompts, the first goes on in the last place, and gives its states to the second; that to the
    third."""
    folder, config, mesh, weights = demo("qwen3_5", (1, 1, 1))
    options, kept = {"max_new_tokens": 6, "max_seq_len": 512}, {}
    before = random_prompts([60, 60, 160])
    prompt = before[2][:-8] + random_prompts([190], seed=1)[0]
    alone = collected(folder.generate.generate(weights, [prompt], config, mesh, **options), 1)
    for prompts in (before, [prompt] * 3):
        rows = collected(folder.generate.generate(weights, prompts, config, mesh, kept=kept, **options), 3)
    assert_equal(rows, alone * 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_a_place_keeps_its_rings_when_it_gets_tokens(monkeypatch, name):
    """A row that could go back to what its place kept gets more tokens from another place instead, and a later one goes
    back to what was kept."""
    folder, config, mesh, weights = demo(name, (1, 1, 1))
    monkeypatch.setattr(folder.model, "PREFILL_PIECE", 16)  # a ring has forgotten what is further back
    whole, other, end, later = random_prompts([1000, 40, 8, 30], seed=3)
    longer, options, kept = [*whole[:700], 1], {"max_new_tokens": 6, "max_seq_len": 1200}, {}
    turns = [whole[:158] + end, other], [whole[:158] + end, whole[:700]], [longer, whole[:697]]
    for prompts in (*turns, [longer, whole[:158] + later]):
        rows = collected(folder.generate.generate(weights, prompts, config, mesh, kept=kept, **options), 2)
        alone = [folder.generate.generate(weights, [prompt], config, mesh, **options) for prompt in prompts]
        assert_equal(rows, [collected(steps, 1)[0] for steps in alone])


@pytest.mark.slow
def test_a_full_cache_forgets_nothing():
    """Whatever was stored behind it, a beginning stays, and is not read again; neither is one that ends behind a
    piece."""
    folder, config, mesh, weights = demo("llama3", (1, 1, 1))
    stats, (prompt, end, middle) = {}, random_prompts([1900, 30, 9])
    options, kept = {"max_new_tokens": 4, "max_seq_len": 2048, "stats": stats}, {}
    for prompt, read in ((prompt[:1100], 1100), (prompt, 800), (prompt[:500] + end, 30)):
        list(folder.generate.generate(weights, [prompt], config, mesh, kept=kept, **options))
        assert stats["prefill_tokens"] == read
    first = next(folder.generate.generate(weights, [middle], config, mesh, max_new_tokens=1))[0].id
    prompts = [random_prompts([1900])[0], middle, [*random_prompts([1900])[0][:1000], 1, 2, 3]]
    options = {"max_new_tokens": 140, "rows": 2, "stop_tokens": (first,), "stats": stats}
    list(folder.generate.generate(weights, prompts, config, mesh, **options))
    assert stats["prefill_tokens"] == 1900 + 9 + 3


def test_a_row_that_fills_its_cache():
    """While another row goes on, it stores behind its last slot or in that one: the next prompt needs the others."""
    folder, config, mesh, weights = demo("llama3", (2, 1, 1))  # each device has a row
    prompt, other = random_prompts([228, 20])
    options, kept, stats = {"max_new_tokens": 60, "max_seq_len": 256}, {}, {}
    steps = folder.generate.generate(weights, [prompt, other], config, mesh, kept=kept, **options)
    answer, _ = collected(steps, 2)
    prompt += [token.id for token in answer[:28]]
    steps = folder.generate.generate(weights, [prompt], config, mesh, rows=2, kept=kept, stats=stats, **options)
    assert_equal(collected(steps, 1), [answer[28:]])
    assert stats["prefill_tokens"] == 1


@pytest.mark.slow
def test_what_ends_behind_a_piece_is_copied(monkeypatch):
    """Of a ring, too, the tokens that prompts share are read once, wherever they end."""
    folder, config, mesh, weights = demo("gemma", (1, 1, 1))
    monkeypatch.setattr(folder.model, "PREFILL_PIECE", 64)
    for n in (384, 385, 400):
        beginning, *ends = random_prompts([n, 9, 9])
        prompts, stats = [beginning + end for end in ends], {}
        list(folder.generate.generate(weights, prompts, config, mesh, max_new_tokens=4, stats=stats))
        assert stats["prefill_tokens"] == n + 18


@pytest.mark.slow
def test_another_number_of_rows_in_a_cache_of_the_same_shapes(monkeypatch):
    """Sixteen devices that share latents pad 256 slots in int8, so that one row has the shapes of two. With 128 slots
    eight devices do."""
    folder, config, mesh, weights = demo("deepseek", (1, 1, 8))
    read_in_pieces(monkeypatch, folder, 32)
    monkeypatch.setattr(folder.model, "cache_slots", lambda tokens: 128)
    options, shapes = {"max_new_tokens": 3, "max_seq_len": 100, "quantize_cache": "int8"}, []
    for B in (1, 2):
        cache = folder.model.abstract_cache(config, mesh, B, 100, jnp.float32, "int8")
        shapes.append([x.shape for x in jax.tree.leaves(cache)])
    assert shapes[0] == shapes[1]
    kept, prompts = {}, random_prompts([30, 9])
    one, two = (
        collected(folder.generate.generate(weights, prompts[:n], config, mesh, kept=kept, **options), n) for n in (1, 2)
    )
    assert_equal(two[:1], one, atol=1e-3)
    assert len(two[1]) == 3


def test_broken_off_while_it_compiles():
    """The cache has what was computed, and not the piece whose program was missing."""
    folder, config, mesh, weights = demo("llama3", (1, 1, 1))
    generate, prompt, kept, seen = folder.generate, random_prompts([1100])[0], {}, []

    def progress(stage, *_):
        seen.append(stage)
        if seen.count("compiling prefill") == 2:
            raise KeyboardInterrupt

    options = {"max_new_tokens": 4, "max_seq_len": 2048}
    with pytest.raises(KeyboardInterrupt):
        list(generate.generate(weights, [prompt], config, mesh, kept=kept, progress=progress, **options))
    whole = collected(generate.generate(weights, [prompt], config, mesh, **options), 1)
    assert_equal(collected(generate.generate(weights, [prompt], config, mesh, kept=kept, **options), 1), whole)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["qwen3_5", "llama3"])
def test_called_from_a_program_that_needs_64_bits(name):
    """jax_enable_x64 changes no token: all numbers of the cache and of the indices have the dtypes that they had."""
    folder, config, mesh, weights = demo(name, (1, 1, 1))
    prompts, options = random_prompts([40, 3]), {"max_new_tokens": 4, "sampling": folder.generate.Sampling(0.7, 9, 0.9)}
    wanted = collected(folder.generate.generate(weights, prompts, config, mesh, **options), 2)
    with jax.enable_x64(True):
        assert collected(folder.generate.generate(weights, prompts, config, mesh, **options), 2) == wanted


def test_prompts_that_are_arrays():
    """As a tokenizer returns them that is asked for arrays; stop tokens may be a list, as in generation_config.json."""
    folder, config, mesh, weights = demo("llama3", (1, 1, 1))
    generate, prompts = folder.generate.generate, [[3, 4, 5, 6], [7, 8, 9, 10]]
    wanted = collected(generate(weights, prompts, config, mesh, max_new_tokens=4), 2)
    options = {"max_new_tokens": 4, "stop_tokens": [wanted[0][1].id]}
    for given in (np.array(prompts), jnp.array(prompts), [*map(np.array, prompts)], [*map(tuple, prompts)]):
        found = collected(generate(weights, given, config, mesh, **options), 2)
        assert found == stopped(wanted, options["stop_tokens"])
    for array in (np.array, jnp.array, tuple):
        with pytest.raises(folder.model.InputError, match="prompt 2 is empty"):
            next(generate(weights, [array([1]), array([])], config, mesh, **options))


def test_what_is_no_prompt():
    """numpy's integers count tokens as Python's do. What is no list of token ids is named."""
    folder, config, mesh, weights = demo("llama3", (1, 1, 1))
    generate, options = folder.generate.generate, {"max_new_tokens": 3}
    wanted = collected(generate(weights, [[3, 4]], config, mesh, **options), 1)
    for options in ({"max_new_tokens": np.int64(3)}, {"max_new_tokens": 3, "max_seq_len": np.int64(256)}):
        assert_equal(collected(generate(weights, [[3, 4]], config, mesh, **options), 1), wanted)
    for prompts in ([3, 4], "Hello", ["Hello"], [["Hello"]], [[[3, 4]]], [[0.5]], {"input_ids": [[3, 4]]}, [None]):
        with pytest.raises(folder.model.InputError, match=r"prompt 1 is .*, not a list of token ids"):
            next(generate(weights, prompts, config, mesh, max_new_tokens=3))
    with pytest.raises(folder.model.InputError, match="quantize_cache 'int4' is neither None nor 'int8'"):
        next(generate(weights, [[3, 4]], config, mesh, max_new_tokens=3, quantize_cache="int4"))


def test_weights_from_elsewhere():
    """Weights that another program kept, and put on a device, know of no mesh."""
    folder, config, mesh, weights = demo("llama3", (1, 1, 1))
    options, stats = {"config": config, "mesh": mesh, "max_new_tokens": 4}, [{}, {}]
    kept = jax.device_put(jax.tree.map(np.asarray, weights), jax.devices()[0])
    found = [
        collected(folder.generate.generate(w, [[3, 4]], stats=s, **options), 1) for w, s in zip((weights, kept), stats)
    ]
    assert found[0] == found[1] and stats[0]["step_bytes"] == stats[1]["step_bytes"]


def test_pieces_divide_a_prompt_evenly():
    """As few long pieces as there may be, with little padding, and what is left in short ones."""
    folder = import_folder("llama3")
    model, generate = folder.model, folder.generate
    config = model.Config.from_dict(folder.convert.read_json(ROOT / "llama3" / "demo" / "config.json"))
    for R in (1, 4):
        mesh = model.make_mesh(
            tp=config.num_key_value_heads * R, devices=jax.devices()[: config.num_key_value_heads * R]
        )
        for longest in range(1, 3000, 7):
            long, *short = generate.piece_lengths(longest, config, mesh)
            pieces = -(-longest // model.PREFILL_PIECE)
            assert long <= model.PREFILL_PIECE and longest <= pieces * long <= 1.25 * longest + pieces * 16
            assert short in ([], list(generate.SHORT_PIECES))
            assert all(n % R == 0 and n > model.FEW for n in (long, *short))


def test_how_many_rows_memory_holds(monkeypatch):
    """As many as fit beside the weights, or as asked. A row that does not fit is refused before anything is decoded."""
    folder, config, mesh, weights = demo("llama3", (2, 1, 2))
    generate, model = folder.generate, folder.model
    abstract = model.abstract_cache(config, mesh, 2, 512 + 99, weights["norm"].dtype)
    used, size = model.stored_bytes(weights), model.stored_bytes(abstract)
    monkeypatch.setattr(generate, "MEMORY_SHARE", 0.99)
    known = (1, None, 2), (2, None, 2), (2.5, None, 4), (4, None, 6), (40, None, 9), (40, 5, 5)
    for share, asked, rows in (*known, (np.inf, None, 9), (np.inf, 3, 3)):
        monkeypatch.setattr(generate, "memory_of", lambda mesh, share=share: used + share * 1.001 * size)
        assert generate.rows_at_once(9, asked, weights, abstract, mesh) == rows, share
    prompts, stats = [[7] * 512] * 9, {}
    monkeypatch.setattr(generate, "memory_of", lambda mesh: used + 2.5 * size)
    whole = collected(generate.generate(weights, prompts, config, mesh, max_new_tokens=3, stats=stats), 9)
    assert len(whole) == 9 and stats["row_steps"] == 4 * stats["decode_steps"]
    monkeypatch.setattr(generate, "memory_of", lambda mesh: used + 0.9 * size)
    with pytest.raises(model.InputError, match="no memory for a cache of 2 rows"):
        list(generate.generate(weights, prompts, config, mesh, max_new_tokens=100))


def test_what_memory_a_container_has(tmp_path):
    """Control groups of both versions: the least of a group and those around it."""
    limit = import_folder("llama3").generate.memory_limit
    assert limit(tmp_path) == np.inf  # no such files, as on macOS
    groups = tmp_path / "sys" / "fs" / "cgroup"
    for folder, name, text in (
        ("job/step", "memory.max", "max\n"),
        ("job", "memory.max", "4294967296\n"),
        ("", "memory.max", "8589934592\n"),
        ("memory/docker/a", "memory.limit_in_bytes", "1073741824\n"),
        ("memory", "memory.limit_in_bytes", "9223372036854771712\n"),
    ):
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / name).write_text(text)
    own = tmp_path / "proc" / "self" / "cgroup"
    own.parent.mkdir(parents=True)
    for text, wanted in (
        ("0::/job/step\n", 2**32),
        ("0::/\n", 2**33),
        ("0::/seen/from/outside\n", 2**33),
        ("9:cpu,cpuacct:/\n4:memory:/docker/a\n0::/\n", 2**30),
    ):
        own.write_text(text)
        assert limit(tmp_path) == wanted, text


def accepted(history: list, filled: int, lengths: int, limits: int, chosen: list, stops: tuple, T: int):
    """What generate.accept makes of a row, token by token."""
    for position in range(filled, filled + T):
        if position == limits - 1 or position == lengths:  # the last token is not computed, nor one that is not known
            break
        filled = position + 1
        if filled == lengths:
            guess, token, *chosen = history[lengths], *chosen
            history[lengths], lengths = token, lengths + 1
            limits = lengths if token in stops else limits
            if token != guess or not chosen:
                break
    return history, filled, lengths, limits


class Device:
    """A batch whose next token is a sum of those before it, a cache of the tokens themselves, of which each sees the
    last `window`, and states, which are the tokens that they have taken in."""

    VOCABULARY, STOPS = 40, (0, 1)

    def __init__(self, generate, chance, drafts, has_states, window, shape):
        self.generate, self.chance, self.drafts, self.has_states = generate, chance, drafts, has_states
        self.rows, self.window, self.cache = None, window, np.full(shape, -1)
        self.states, self.saved = [[] for _ in self.cache], [[([], None)] * 2 for _ in self.cache]

    def next(self, tokens):
        return (sum(tokens) * 7 + len(tokens)) % self.VOCABULARY

    def fill(self, is_new, rows):
        new = self.generate.Rows(*(column.copy() for column in rows))
        self.rows = self.generate.replace(self.rows, is_new, new) if self.rows else new
        self.rows = self.generate.Rows(*map(np.array, self.rows))

    def copy(self, copies):
        """What generate.copy does."""
        keeps, returns, sources, tokens = copies
        for p, k in np.argwhere(keeps):
            self.saved[p][k] = self.states[p], self.cache[p].copy()
        for p in np.flatnonzero(tokens):
            self.cache[p, : tokens[p]] = self.cache[sources[p], : tokens[p]]
            self.saved[p] = [*self.saved[sources[p]]]
        for p, k in np.argwhere(returns):
            self.states[p], ring = self.saved[p][k]
            self.cache[p] = self.cache[p] if self.has_states else ring

    def step(self, T, places):
        """What generate.step does and returns."""
        history, filled, lengths, limits, _ = self.rows
        results = {}
        for p in set(places.tolist()):
            row, first = history[p].tolist(), filled[p]
            if self.has_states:
                assert first == 0 or self.states[p] == row[:first]
            ends = range(lengths[p], lengths[p] + (T if T <= self.generate.FEW else 1))
            chosen = [self.next(row[:n]) for n in ends]
            numbers = int(first), int(lengths[p]), int(limits[p])
            history[p], filled[p], lengths[p], limits[p] = accepted(row, *numbers, chosen, self.STOPS, T)
            # Each token is stored with its position, what is not known as -1. All that the new ones see must be there.
            new, seen = np.arange(first, first + T), np.arange(max(0, first + 1 - self.window), filled[p])
            codes, slots = history[p] + self.VOCABULARY * np.arange(len(row)), self.cache.shape[1]
            self.cache[p, new % slots] = np.where(new < filled[p], codes[np.minimum(new, len(row) - 1)], -1)
            assert first == filled[p] or (self.cache[p, seen % slots] == codes[seen]).all()
            self.states[p] = history[p, : filled[p]].tolist()
            for i in range(self.drafts):  # most of them right
                if (n := lengths[p] + i) < history.shape[1]:
                    history[p, n] = self.next(history[p, :n]) if self.chance.random() < 0.8 else 5
            results[p] = int(lengths[p]), chosen, [0.0] * len(chosen)
        return zip(*(results[p] for p in places.tolist()), strict=True)


def test_places(monkeypatch):
    """Random lists of prompts, and conversations: every prompt ends as it would alone, in places that never hold what
    the device does not have; what is shared is read once, and conversations go back to where states are kept."""
    generate, random_lists = import_folder("llama3").generate, np.random.default_rng(0)
    monkeypatch.setattr(generate, "FEWEST_COPIED", 5)
    monkeypatch.setattr(generate.model, "PREFILL_PIECE", 32)
    read = shared = copied = copied_states = returned = 0
    for _ in range(150):
        chance = np.random.default_rng(random_lists.integers(2**32))
        dp, drafts, new = int(chance.integers(1, 3)), int(chance.integers(4)), int(chance.integers(1, 12))
        batch, slots = dp * int(chance.integers(1, 5)), int(chance.integers(70, 90))
        count = int(chance.integers(batch - dp + 1, batch + 1))
        kind, equal = chance.choice(["full", "ring", "states"]), chance.choice([0, 0, 0.7])
        has_states, window = kind == "states", int(chance.choice([4, 12, 20, 30])) if kind == "ring" else slots
        held = min(slots, window + 32) if kind == "ring" else slots + 32
        device, past, beginning = Device(generate, chance, drafts, has_states, window, (batch, held)), None, []
        for _ in range(3):  # turns of a conversation
            prompts = [
                (beginning if chance.random() < 0.7 else []) + chance.integers(2, 40, chance.integers(1, 40)).tolist()
                for _ in range(chance.integers(count, 9))
            ]
            prompts = [(prompts[0] if chance.random() < equal else prompt)[:slots] for prompt in prompts]
            sizes = {"count": count, "batch": batch, "dp": dp, "pieces": [32, 16], "drafts": drafts, "seed": 0}
            limits = {"max_new_tokens": new, "max_seq_len": slots, "stop_tokens": device.STOPS, "sparing": True}
            sizes["together"] = chance.choice([n for n in (1, 2, 3, 4) if batch // dp % n == 0])
            least = {"full": np.inf, "ring": held, "states": 0}[kind]
            opening = int(chance.choice([0, 4, 8])) if least < slots else 0
            preamble = int(chance.choice([0, 1, 7, 20])) if opening else 0
            kinds = {"forgetting": generate.Forgetting([], least, opening, preamble), "past": past}
            places, answers, results = generate.Places(prompts, **sizes, **limits, **kinds), [[] for _ in prompts], []
            places.verifies = lambda chance=chance: chance.random() < 0.7
            device.rows = None

            def update(places=places, device=device, prompts=prompts):
                """What Engine.update does: how many tokens new rows had, how many got copies, and how many returned."""
                waiting, before = [*places.waiting], set(places.numbers)
                copies, has_changed = places.plan()
                device.copy(copies)
                new = set(places.numbers) - before
                assert [*places.waiting] == [number for number in waiting if number not in new]  # in order
                assert len([number for number in places.waiting if number < max(new, default=0)]) <= generate.PASSED
                new = [*new]
                for p, k in np.argwhere(copies.saves | copies.returns):
                    assert places.reuse.saved_at[p, k] == len(device.saved[p][k][0]) < len(prompts[places.numbers[p]])
                device.fill(has_changed, places.rows)
                given, had = copies.tokens > 0, places.rows.filled[np.isin(places.numbers, new)].sum()
                return np.array([had, given.sum(), (copies.returns.any(axis=1) & ~given).sum()])

            counts = update()
            while (places.numbers >= 0).any():
                if places.has_more() and len(results) <= generate.LOOKAHEAD:
                    T, taken = places.choose()
                    places.start(T, taken)
                    read += places.in_flight[-1].prompt_tokens
                    results.append(device.step(T, places.in_flight[-1].places))
                else:
                    for token in places.receive(*results.pop(0)):
                        answers[token.row].append(token)
                counts += update()
            shared, copied, returned = shared + counts[0], copied + counts[1], returned + counts[2]
            copied_states += has_states * counts[1]
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens = [*prompt]
                while len(tokens) < min(len(prompt) + new, slots + 1):
                    tokens.append(device.next(tokens))
                    if tokens[-1] in device.STOPS:
                        break
                assert [token.id for token in answer] == tokens[len(prompt) :]
                is_stop = tokens[-1] in device.STOPS
                assert [token.finish_reason for token in answer] == [None] * (len(answer) - 1) + [
                    "stop" if is_stop else "length"
                ]
            shared -= sum(map(len, prompts))
            past, beginning = (
                places,
                max(([*p, *(t.id for t in a)] for p, a in zip(prompts, answers, strict=True)), key=len),
            )
            beginning = beginning[: slots - 20]
            if chance.random() < 0.3:  # a thought is dropped, and the words that began it
                beginning = beginning[: -new - 8]
    assert read + shared == 0 and copied > 100 and copied_states > 50 and returned > 50
