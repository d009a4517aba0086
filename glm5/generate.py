"""From prompts to tokens: each row of a batch decodes until it ends, and the next prompt takes its place.

    for tokens in generate(weights, [[1, 2, 3]], config, mesh, max_new_tokens=16):
        ...

The devices run `step`: it computes some tokens of some rows with model.py's `forward`, chooses the next tokens, and
accepts drafts. A step takes its tokens from `Rows`, which stay on the devices. So the host can start a step before it
has read the results of the last one. The host runs `generate`, which reads results LOOKAHEAD steps later: `Places`
foresees how far the started steps bring each row, and chooses the next one. `Engine` compiles the programs and runs
them.

A row is a prompt with its answer. A place is an index into the batch, which one row after another takes. A piece is
the part of a prompt that one step takes. A draft is a guessed token: it stands behind the last known one until a step
verifies it.

What has been read once is not read again: `Reuse` finds it for Places, and `copy` copies it between two steps. Both
stand behind `generate`, which can be read without them.

The file is the same in every folder. model.py explains the letters of shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import model
import numpy as np
from jax import Array, NamedSharding, P
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from model import CACHE_SPEC, FEW, MODEL_AXES, Config, InputError, LayerCache, ceil_div

try:
    import fast  # fills the model's tables
except ModuleNotFoundError as error:
    if error.name != "fast":
        raise
    fast = None  # everything runs without it; convert.py asks for it


# ---------------------------------------------------------------------------------------------------------------------
# A step


class Rows(NamedTuple):
    """The state of a batch, on the devices: a place for each row, which another prompt takes when a row has ended.

        history  [ prompt ............ answer ... | ............. | drafts ... | ......... ]
                   `filled` are in the cache        known, not yet  guessed       up to
                                                    in the cache                  `limits`
                 |------------- `lengths` are known --------------|

    `history` int32 [B, the largest limit or more] holds the tokens. `filled` int32 [B] counts those in the cache, and
    `lengths` int32 [B] those that are known: always more. A row stands still if it would need more than `limits` int32
    [B] tokens, for good or until its limit is raised. `seeds` uint32 [B, 2] has the row's number, whatever its place,
    and the seed.

    For example, a prompt of 5 tokens begins with filled 0 and lengths 5. The step that takes the prompt chooses the
    sixth token: then filled is 5 and lengths 6. A decode step computes that one and chooses the next: 6 and 7.
    """

    history: Array
    filled: Array
    lengths: Array
    limits: Array
    seeds: Array


def accept(rows: Rows, chosen: Array, stop_tokens: tuple[int, ...], T: int) -> Rows:
    """The rows after a step that computed T tokens of each, from `filled` on.

    `chosen` int32 [B, 1 + verified] has the token after the last known one, then the token after each draft behind
    it. Drafts are accepted as long as they equal the tokens that were chosen in their place, and the token after the
    last of them is known too. A row that still reads its prompt only advances by T. One at its limit stands still, and
    a stop token sets the limit. Nothing is ever taken back: what the cache holds beyond `filled` is overwritten before
    a token could see it.
    """
    history, filled, lengths, limits, seeds = rows
    verified = chosen.shape[1] - 1
    is_stop = jnp.isin(chosen, np.array(stop_tokens, np.int32))
    drafts = jnp.take_along_axis(history, lengths[:, None] + jnp.arange(verified), axis=1, mode="clip")
    is_right = (chosen[:, :verified] == drafts) & ~is_stop[:, :verified]
    accepted = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1, dtype=jnp.int32)  # up to the first that is not right
    # Three bounds: what was computed; what was known or is accepted; all but the last token, which is never computed.
    filled = jnp.minimum(jnp.minimum(filled + T, lengths + accepted), limits - 1)
    has_new = filled >= lengths  # else the row reads its prompt, or stands still
    # Accepted drafts are in `history` already. The token that was chosen after the last of them goes behind them.
    index = jnp.maximum(filled - lengths, 0)[:, None]  # of that token in `chosen`
    last, ends = (jnp.take_along_axis(x, index, axis=1) for x in (chosen, is_stop))
    is_last = (jnp.arange(history.shape[1]) == filled[:, None]) & has_new[:, None]
    history, limits = jnp.where(is_last, last, history), jnp.where(ends[:, 0] & has_new, filled + 1, limits)
    return Rows(history, filled, jnp.maximum(lengths, filled + 1), limits, seeds)


def look_up(rows: Rows, cache: list[LayerCache], drafts: int, *_) -> tuple[Array, list[LayerCache]]:
    """Puts `drafts` drafts into `history`, behind the known tokens: those that followed the latest earlier occurrence
    of the last three, or else of the last two (Saxena 2023, "prompt lookup decoding"). If fewer followed, they are
    repeated. Without an occurrence the drafts are arbitrary tokens. Returns history and cache."""
    history, at, last = rows.history, jnp.arange(rows.history.shape[1]), rows.lengths[:, None] - 1

    def agrees(back):  # whether the token `back` before each token is the one `back` before the last
        token = jnp.take_along_axis(history, last - back, axis=1, mode="clip")
        return (jnp.roll(history, back, axis=1) == token) & (at >= back)

    # Where two agree, the index behind them. Where three agree it is len(at) more, so that they win over any two.
    found = jnp.where(agrees(0) & agrees(1) & (at < last), at + 1 + len(at) * agrees(2), 0)
    first = jnp.max(found, axis=1, keepdims=True) % len(at)
    drafted = jnp.take_along_axis(history, first + jnp.arange(drafts) % (last + 1 - first), axis=1)
    for i in range(drafts):
        history = jnp.where(at == last + 1 + i, drafted[:, i : i + 1], history)
    return history, cache


# Sources of drafts, called at the end of a step. A model with an extra layer has one more, which uses all arguments.
DRAFTS = {"lookup": look_up} | getattr(model, "DRAFTS", {})
STATIC = "T", "draft", "drafts", "config", "mesh", "sampling", "stop_tokens"
# XLA for CPUs uses half of a vector register of AVX-512 unless it is told. Other compilers do not look at it.
COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": 512}


@partial(jax.jit, static_argnames=STATIC, donate_argnames=("cache", "rows"), compiler_options=COMPILER_OPTIONS)
def step(
    weights: dict,
    cache: list[LayerCache],
    rows: Rows,
    places: Array | None = None,
    *,
    T: int,
    draft: str | None = None,
    drafts: int = 0,
    config: Config,
    mesh: Mesh,
    sampling: Sampling,
    stop_tokens: tuple[int, ...] = (),
):
    """Computes T tokens of each row, from the first that the cache lacks, and chooses the next ones.

    With T up to FEW it is a decode step, and takes all rows. A row computes its last known token and T - 1 drafts
    behind it in `history`. The step chooses a token after each of these T, and `accept` decides which drafts were right
    (Leviathan et al. 2023, "speculative decoding"; greedy or sampled, the tokens are those of steps with T = 1).

    With a longer T, a multiple of the number of devices that share a row's cache, it takes a piece of prompts. It
    chooses one token, after the last known one, and verifies nothing. It takes the rows at `places`, or all (None).
    `places` int32 [dp b] lists b places for each device of dp, which counts its own from 0. With fewer rows to read, a
    device computes some twice, with equal results.

    At the end `draft`, a name in DRAFTS, puts `drafts` drafts behind what is known, for the next step.

    Returns (cache, rows, result). The arguments cache and rows are donated: the new ones take their memory. `result` is
    the same on every device, and is of all dp b rows that were taken: `lengths` int32 [dp b], the chosen tokens int32
    [dp b, T], of a piece [dp b, 1], and their log-probabilities, float32. Of a row's chosen tokens, the first ones are
    new: as many as its length has grown by.
    """
    verified = T - 1 if T <= FEW else 0  # drafts that this step verifies; it leaves `drafts` for the next

    def body(weights, cache, rows, places):
        taken = rows if places is None else jax.tree.map(lambda x: x[places], rows)
        positions = taken.filled[:, None] + jnp.arange(T)
        tokens = jnp.take_along_axis(taken.history, positions, axis=1, mode="clip")
        known = jnp.clip(jnp.minimum(taken.lengths, taken.limits - 1) - taken.filled, 0, T)
        R = model.cache_sharers(config, model.model_shards(mesh))
        span = model.Span(positions, places, known, batch=len(rows.filled), R=R)
        x, cache = model.forward(weights, tokens, span, cache, config)

        # Logits are computed for the last known token and its drafts alone. A row that does not end its prompt here has
        # computed none of these. Another token's x is taken, and `accept` ignores what is chosen by it.
        newest = taken.lengths[:, None] - 1 + jnp.arange(1 + verified)
        last_x = x if T == 1 else jnp.take_along_axis(x, jnp.clip(newest - positions[:, :1], 0, T - 1)[:, :, None], 1)
        logits = model.output_logits(weights, last_x.reshape(-1, x.shape[-1]), config)
        seeds = jnp.repeat(taken.seeds, 1 + verified, axis=0)
        choose = partial(next_token, sampling=sampling)
        chosen, logprobs = (y.reshape(newest.shape) for y in choose(logits, newest.reshape(-1), seeds))

        taken = accept(taken, chosen, stop_tokens, T)
        if draft:
            history, cache = DRAFTS[draft](taken, cache, drafts, weights, x, span, config, choose)
            taken = taken._replace(history=history)
        rows = taken if places is None else jax.tree.map(lambda x, new: x.at[places].set(new), rows, taken)
        # Every host needs the tokens of all rows, to see which rows have ended.
        result = jax.lax.all_gather((taken.lengths, chosen, logprobs), "dp", tiled=True)
        return cache, rows, result

    in_specs, out_specs = (CACHE_SPEC, P("dp"), P("dp")), (CACHE_SPEC, P("dp"), P())
    return model.sharded(body, mesh, weights, config, in_specs, out_specs)(weights, cache, rows, places)


# ---------------------------------------------------------------------------------------------------------------------
# Choosing a token


class Sampling(NamedTuple):
    """How the next token is chosen. `temperature` 0 takes the most probable one.

    Otherwise the logits are divided by `temperature`, the `top_k` largest are kept (0: all), then of these the most
    probable ones until their probabilities add up to `top_p` (Holtzman et al. 2020).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def next_token(logits: Array, positions: Array, seeds: Array, sampling: Sampling) -> tuple[Array, Array]:
    """The next tokens int32 [B] and their log-probabilities float32 [B], of the unmodified softmax: the same on all
    devices that share the rows. Each position of each row has a random key of its own. An extra layer that drafts uses
    the same one, so that it guesses as the step will choose.

    Args: logits [B, V], this device's part; positions int32 [B], of the tokens that gave them; seeds uint32 [B, 2], the
    number of each row and the seed.
    """
    if sampling.temperature == 0:
        # Each device has a candidate: its largest logit, that token, and the sum of exp(logit - largest).
        largest, V = jnp.max(logits, axis=-1), logits.shape[1]
        local = jnp.min(jnp.where(logits == largest[:, None], jnp.arange(V), V - 1), axis=-1)  # the first of them
        ids = local + jax.lax.axis_index(MODEL_AXES) * V
        total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1)
        # One collective for all three; float32 holds every id below 2**24 exactly.
        candidates = jnp.stack([largest, total, ids.astype(jnp.float32)])
        largest, total, ids = jax.lax.all_gather(candidates, MODEL_AXES, axis=1)  # [X, B] each
        winner = jnp.argmax(largest, axis=0)[None]
        logprobs = -jnp.log(jnp.sum(total * jnp.exp(largest - jnp.max(largest, axis=0)), axis=0))
        return jnp.take_along_axis(ids, winner, axis=0)[0].astype(jnp.int32), logprobs
    logits = jax.lax.all_gather(logits, MODEL_AXES, axis=1, tiled=True)
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")  # a key of this generator is two numbers
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    kept = keep_probable(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    tokens = jax.vmap(jax.random.categorical)(keys, kept)
    return tokens, jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]


def keep_probable(logits: Array, top_k: int, top_p: float) -> Array:
    """Logits [B, V] with -inf for all that `top_k` and then `top_p` leave out; the most probable token stays."""
    if not top_k and top_p == 1:
        return logits
    V = logits.shape[-1]
    descending = jax.lax.top_k(logits, min(top_k or V, V))[0]
    smallest = descending[:, -1:]
    if top_p < 1:
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        smallest = jnp.take_along_axis(descending, jnp.sum(before[:, 1:] < top_p, axis=-1, keepdims=True), axis=-1)
    return jnp.where(logits < smallest, -jnp.inf, logits)


# ---------------------------------------------------------------------------------------------------------------------
# The host's view of a batch

PREFILL_TOKENS = 4096  # of one piece, over all rows of a device: bounds the memory of prefill
REPEATING = 0.75  # on CPUs "lookup" drafts if this share of the rows ends in four tokens that it had before
PASSED = 16  # prompts that wait for a copy, and that others may pass: each is asked before every step, which takes long


class Token(NamedTuple):
    """A generated token of prompt `row`, with `finish_reason` "stop" or "length" if it is the row's last."""

    row: int
    id: int
    logprob: float
    finish_reason: str | None


class Step(NamedTuple):
    """A started step: how many prompt tokens it reads, its places in the batch, int [dp b], and their rows' numbers."""

    prompt_tokens: int
    places: np.ndarray
    numbers: np.ndarray


@dataclasses.dataclass
class Places:
    """What the host knows of a batch: which prompt has which place, the steps that were started, the tokens that were
    received.

    `rows`, of numpy arrays that change in place, tells how far the steps that were started bring each row at least, if
    no stop token comes: with drafts the devices may be ahead of it. Of each place:

        numbers         its row, -1 if it is free: then it stands still at its limit
        prompt_lengths  how many tokens its prompt has
        received        how many tokens the host has, with the prompt

    Prompts take `count` of the `batch` places, and those of a device of `dp` stand together. `sparing` steps verify
    drafts only where they pay.

    `reuse` knows what places have read already. So a prompt may begin with tokens that it need not read: `reused`
    counts those of the first `count` prompts. A row may have to pause within its prompt, so that its cache is saved:
    until then its limit is lower. `past` is the places of an earlier call, with the same batch and slots. Its cache is
    still there.
    """

    prompts: list[np.ndarray]
    count: int
    batch: int
    dp: int
    pieces: list[int]  # the lengths in which prompts are read
    drafts: int
    sparing: bool
    seed: int
    max_new_tokens: int
    max_seq_len: int
    stop_tokens: tuple[int, ...]
    forgetting: dataclasses.InitVar[Forgetting]
    together: dataclasses.InitVar[int]
    past: dataclasses.InitVar[Places | None] = None

    def __post_init__(self, forgetting, together, past):
        self.prompt_lengths, self.received, filled = np.zeros((3, self.batch), np.int32)
        history = np.zeros((self.batch, self.max_seq_len + 1), np.int32)
        if past:
            history, filled, self.received = past.rows.history, past.reuse.remaining(), past.received
        # Each place is free until `plan`: it stands still behind what it has.
        self.rows = Rows(history, filled, filled + 1, filled + 1, np.zeros((self.batch, 2), np.uint32))
        self.numbers, self.reused = np.full(self.batch, -1), 0
        self.waiting = deque(range(len(self.prompts)))  # the numbers of prompts that have had no place
        self.in_flight = deque()  # each Step that was started, but whose results were not received
        self.reuse = Reuse(self, forgetting, together, past and past.reuse)

    def plan(self) -> tuple[Copies, np.ndarray]:
        """Lets paused rows go on, and gives free places to prompts. Returns what to copy before the next step, and bool
        [batch], which rows have changed."""
        rows = self.rows
        paused = (rows.filled < self.prompt_lengths) & (rows.filled == rows.limits - 1)
        copies = self.reuse.save(paused)
        has_changed = self.admit(copies) | paused
        for p in np.flatnonzero(has_changed):
            whole = min(self.prompt_lengths[p] + self.max_new_tokens, self.max_seq_len + 1)
            rows.limits[p] = min([whole, *(n + 1 for n in self.reuse.pauses[p] if n > rows.filled[p])])
        return copies, has_changed

    def admit(self, copies: Copies) -> np.ndarray:
        """Gives free places to prompts that wait, in their order, and adds to `copies` what they get. Others may pass
        up to PASSED prompts that have something to wait for; a place stays free for each of these. Returns which rows
        are new, bool [batch]."""
        rows, is_new, passed = self.rows, np.zeros(self.batch, bool), 0
        free = np.flatnonzero(self.numbers[: self.count] < 0).tolist()
        while passed < min(len(free), len(self.waiting), PASSED + 1):
            number = self.waiting[passed]
            prompt = self.prompts[number]
            found = self.reuse.find(prompt, free, is_new)
            if found is None:  # it waits on
                passed += 1
                continue
            p, source, n = found
            free.remove(p)
            del self.waiting[passed]
            rows.history[p, : len(prompt)], rows.seeds[p], rows.filled[p] = prompt, (number, self.seed), n
            self.prompt_lengths[p] = self.received[p] = rows.lengths[p] = len(prompt)
            self.numbers[p], is_new[p] = number, True
            self.reuse.take(p, source, n, copies)
            self.reused += int(n) * (number < self.count)
        return is_new

    def unread(self) -> np.ndarray:
        """How many tokens of its prompt no step has taken, for each place, up to where it pauses."""
        return np.maximum(np.minimum(self.prompt_lengths, self.rows.limits - 1) - self.rows.filled, 0)

    def choose(self) -> tuple[int, np.ndarray]:
        """The next step: its T, and the places [dp b] that it takes, b of each device of dp. A decode step takes all.
        Otherwise T is the longest piece of which the longest rest of a prompt fills more than half, or the shortest."""
        places, left = np.arange(self.batch, dtype=np.int32), self.unread()
        if not left.any():
            return 1 + self.drafts * self.verifies(), places
        T = next((T for T in self.pieces if 2 * left.max() > T), self.pieces[-1])
        reads = (left > (T // 2 if self.pieces[-1] < T else 0)).reshape(self.dp, -1)
        most = min(reads.shape[1], max(1, PREFILL_TOKENS // T))
        b = most if 2 * reads.sum(axis=1).max() > most else 1  # no other, so that each T has two programs at most
        # A device with fewer rows to read takes some twice. One with none takes its first place, which may be decoding.
        pairs = zip(places.reshape(self.dp, -1), reads, strict=True)
        return T, np.concatenate([np.resize(here[read] if read.any() else here[0], b) for here, read in pairs])

    def start(self, T: int, places: np.ndarray) -> None:
        """Foresees what a step will do to the places that `choose` gave."""
        rows = self.rows
        prompt_tokens = int(np.minimum(self.unread(), T)[np.unique(places)].sum())
        self.reuse.note_writes(places, T)
        rows.filled[places] = np.minimum(rows.filled + T, np.minimum(rows.lengths, rows.limits - 1))[places]
        rows.lengths[places] = np.maximum(rows.lengths, rows.filled + 1)[places]
        self.in_flight.append(Step(prompt_tokens, places, self.numbers[places]))

    def receive(self, lengths: np.ndarray, chosen: list[list[int]], logprobs: list[list[float]]) -> list[Token]:
        """The new tokens of the oldest step in flight, from its results. Places of rows that end with them are free."""
        rows, new, step = self.rows, [], self.in_flight.popleft()
        for p, row, length, tokens, values in zip(step.places, step.numbers, lengths, chosen, logprobs, strict=True):
            for token, logprob in zip(tokens, values, strict=True):
                # The row has ended, or the place had none; or the drafts failed.
                if row < 0 or row != self.numbers[p] or length <= self.received[p]:
                    break
                rows.history[p, self.received[p]] = token
                n = self.received[p] = self.received[p] + 1
                rows.filled[p], rows.lengths[p] = max(rows.filled[p], n - 1), max(rows.lengths[p], n)
                reason = "stop" if token in self.stop_tokens else "length" if n == rows.limits[p] else None
                new.append(Token(int(row), token, logprob, reason))
                if reason:  # the place stands still on the device too
                    self.numbers[p], rows.filled[p], rows.lengths[p], rows.limits[p] = -1, n - 1, n, n
        return new

    def has_more(self) -> bool:
        """Whether another step would bring a row further, as far as the host knows."""
        return bool((self.rows.filled < self.rows.limits - 1).any())

    def verifies(self) -> bool:
        """Whether the next decode step verifies drafts. Where `sparing`, it does if a share REPEATING of the rows
        ends in four tokens that occur earlier. All hosts must decide alike: by the tokens, not by a clock."""

        def repeats(p):
            tokens = np.pad(self.rows.history[p, : self.received[p]], (4, 0), constant_values=-1)
            fours = np.lib.stride_tricks.sliding_window_view(tokens, 4)
            return (fours[:-1] == fours[-1]).all(axis=1).any()

        return not self.sparing or np.mean([repeats(p) for p in np.flatnonzero(self.numbers >= 0)]) >= REPEATING


# ---------------------------------------------------------------------------------------------------------------------
# Running the steps

LOOKAHEAD = 2  # steps started beyond the one whose tokens the host reads
WARM_UP_BYTES = 2**38  # of weights, times tokens: on two cores such a step should take some 0.6 s (a guess)


class Engine:
    """The steps of a batch on the devices: its cache, its Rows, the programs, the results in flight; and the clock,
    which counts into `stats` of generate. `saved` has copies of the layers that forget. A program takes the memory of
    `cache`, which is None until the program has started: a call that is broken off then leaves no cache to the next."""

    def __init__(self, weights, cache, saved, programs, places: Places, options, stats: dict, progress):
        self.weights, self.cache, self.saved, self.programs, self.places = weights, cache, saved, programs, places
        self.options, self.stats, self.progress = options, stats, progress  # options: the static ones of step
        stats |= dict.fromkeys(("compile_s", "prefill_s", "decode_s"), 0.0)
        stats |= dict.fromkeys(("prefill_tokens", "decode_steps", "decode_tokens", "row_steps", "busy_row_steps"), 0)
        stats |= dict.fromkeys(("drafts", "drafts_accepted"), 0)
        self.results, self.clock = deque(), time.perf_counter()
        self.length_sums = np.zeros(places.count)  # tokens in the cache, summed over decoding steps
        self.first_tokens = sum(map(len, places.prompts[: places.count]))  # of the first prompts
        self.rows, self.by_places = None, NamedSharding(options["mesh"], P("dp"))
        self.replace = jax.jit(replace, out_shardings=self.by_places, donate_argnums=0)

    def prepare(self, *steps: tuple[int, np.ndarray]) -> None:
        """Compiles steps of T tokens at some places. On CPUs, those of a first call also run once, for rows that stand
        still, which changes nothing that will be read. XLA prepares products when a program first runs: so it does that
        for the first step while the second is compiled. (llama.cpp warms up likewise.) A step of more than
        WARM_UP_BYTES does not run: it would take longer than it saves."""
        rows, mesh = self.places.rows, self.options["mesh"]
        still = rows._replace(lengths=rows.filled + 1, limits=rows.filled + 1)
        is_first = mesh.devices.flat[0].platform == "cpu" and not self.programs
        for T, places in steps:
            program, taken = self.program(T, places)
            if is_first and T * model.stored_bytes(self.weights) <= WARM_UP_BYTES:
                given, self.cache = self.cache, None
                self.cache, *_ = program(self.weights, given, self.on_mesh(still), taken)
        jax.block_until_ready(self.cache)
        self.tick("compile_s")

    def start(self, T: int, places: np.ndarray) -> None:
        """Starts a step of T tokens of the rows at these places."""
        program, taken = self.program(T, places)
        given, self.cache = self.cache, None
        self.places.start(T, places)
        self.cache, self.rows, result = program(self.weights, given, self.rows, taken)
        jax.tree.map(lambda x: x.copy_to_host_async(), result)
        self.results.append(result)

    def fetch(self) -> list[Token]:
        """The new tokens of the oldest step in flight: waits for its results."""
        stats, count = self.stats, self.places.count
        lengths, chosen, logprobs = map(np.asarray, self.results.popleft())
        prompt_tokens = self.places.in_flight[0].prompt_tokens
        self.tick("prefill_s" if prompt_tokens else "decode_s")
        new = self.places.receive(lengths, chosen.tolist(), logprobs.tolist())
        counts = {"prefill_tokens": prompt_tokens}
        if not prompt_tokens:
            busy = len({token.row for token in new})
            counts = {"decode_steps": 1, "decode_tokens": len(new), "row_steps": count, "busy_row_steps": busy}
            counts |= {"drafts": busy * (chosen.shape[1] - 1), "drafts_accepted": len(new) - busy}
            self.length_sums += lengths[:count] - 1
        for name, n in counts.items():
            stats[name] += n
        total = self.first_tokens - self.places.reused
        self.progress("prefill", min(stats["prefill_tokens"], total), total)
        return new

    def update(self) -> None:
        """Has the devices copy what Places plans before the next step, and tells them what has changed of the rows."""
        cache, self.cache = self.cache, None  # before the plan: one that is broken off leaves no cache
        copies, has_changed = self.places.plan()
        if any(map(np.any, copies)):
            fixed = {name: self.options[name] for name in ("config", "mesh")}
            arguments = cache, self.saved, self.on_mesh(copies)
            cache, self.saved = self.compiled("copies", self.places.batch, copy, *arguments, **fixed)(*arguments)
        self.cache = cache
        if has_changed.any():
            has_changed, new = self.on_mesh((has_changed, self.places.rows))
            given = self.rows, has_changed, new
            self.rows = self.compiled("rows", self.places.batch, self.replace, *given)(*given) if self.rows else new

    def finish(self) -> None:
        """Waits for steps in flight, since no process may leave while others wait for it in a collective, and counts
        step_bytes."""
        jax.block_until_ready(self.cache)
        stats, config = self.stats, self.options["config"]
        mean_lengths = list(self.length_sums / max(stats["decode_steps"], 1))
        tokens = len(mean_lengths) / self.places.dp * (1 + stats["drafts"] / max(stats["busy_row_steps"], 1))
        stats["step_bytes"] = step_bytes(self.weights, self.cache, mean_lengths, config, tokens)

    def program(self, T: int, places: np.ndarray):
        """The program of a step of T tokens of the rows at these places, and the places as it takes them."""
        own = self.places.batch // self.places.dp  # of each device of dp
        taken = None if T <= FEW else self.on_mesh(places % own)
        arguments = step, self.weights, self.cache, self.rows, taken
        return self.compiled("decoding" if T <= FEW else "prefill", len(places), *arguments, T=T, **self.options), taken

    def compiled(self, what: str, count: int, function: Callable, *arguments, **static):
        """A program of so many rows, which is compiled when it is first needed."""
        key = what, count, *static.values()
        if key not in self.programs:
            jax.block_until_ready(self.rows)
            in_flight = self.places.in_flight
            self.tick(("prefill_s" if in_flight[-1].prompt_tokens else "decode_s") if in_flight else None)
            self.progress(f"compiling {what}", 0, 1)
            with jax.enable_x64(False):  # whoever calls may need it for other things
                self.programs[key] = function.lower(*arguments, **static).compile()
            multihost_utils.sync_global_devices("compiled")  # the clock should not count others' compilation
            self.tick("compile_s")
        return self.programs[key]

    def on_mesh(self, arrays):
        """A pytree of arrays on the devices, split by places; copied, since the host goes on writing in its own."""
        put = jax.make_array_from_callback
        return jax.tree.map(lambda x: put(x.shape, self.by_places, lambda index: x[index].copy()), arrays)

    def tick(self, part: str | None = None) -> None:
        """Adds the time since the last tick to a part of `stats`."""
        begin, self.clock = self.clock, time.perf_counter()
        if part:
            self.stats[part] += self.clock - begin


def generate(
    weights: dict,
    prompts: list[list[int]],
    config: Config,
    mesh: Mesh,
    *,
    rows: int | None = None,
    max_new_tokens: int,
    max_seq_len: int | None = None,
    stop_tokens: tuple[int, ...] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
    draft: str | None = None,
    draft_tokens: int = 3,
    quantize_cache: str | None = None,
    kept: dict | None = None,
    preamble: int = 0,
    stats: dict | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Iterator[list[Token]]:
    """Decodes the prompts, `rows` of them at a time (by default as many as memory holds), and yields the new tokens of
    each step. A step that reads prompts gives the first token of each row whose prompt it has read to the end; with dp,
    a row that decodes may get one too. When a row ends, the next prompt takes its place: it is read in pieces, while
    the other rows keep their caches. The first `next` raises InputError for what check_prompts refuses, for a draft
    that is not in DRAFTS, sampling, a seed or draft_tokens out of range, and for too large a cache.

    A row ends with its first token that is one of `stop_tokens`, after `max_new_tokens`, or when it has filled
    `max_seq_len` slots (by default what the longest row needs, rounded up as its cache is). What it generates does not
    depend on the others: sampling uses the seed and the row's number in `prompts`, `Token.row`. `quantize_cache` is
    None or "int8".

    With `draft`, a name in DRAFTS, steps verify `draft_tokens` drafts of each row, fewer than FEW. The tokens are the
    same, but for rounding where two are as likely. On CPUs three drafts more than double a step's time, so there
    "lookup" verifies drafts only while most rows repeat what they have.

    A prompt that begins like the row before it in its place is read from where they differ. What it shares with another
    row is copied from there, so what all prompts begin with is read once on each device of dp. `kept`, a dict that is
    empty at first, takes places and programs to the next call with the same weights, even after a call that was broken
    off. So a conversation reads only what is new, and calls with the same `max_seq_len` compile once. Where the model's
    cache forgets (see Forgetting), the next prompt goes on from where its place has come to or, in a ring, from up to a
    piece before; or it goes back to shortly before the end of the last prompt, or to the end of the first `preamble`
    tokens, if these are FEWEST_COPIED or more.

    `stats` receives seconds and counts: compile_s, prefill_s, prefill_tokens, decode_s; of steps that read no prompt
    decode_steps, decode_tokens, row_steps (places times steps), busy_row_steps (those that gave a token), drafts
    (verified in these) and drafts_accepted; at the end step_bytes, of a mean decode step. The time from one result to
    the next is prefill's if the step of the later one read a prompt, else decoding's. Only compile_s has compilation
    and, on CPUs, the first run of the first programs. `progress(stage, done, total)` is called before a compilation,
    and with how many tokens of the first prompts were read. `total` falls by what need not be read."""
    check_prompts(prompts, config, max_seq_len, max_new_tokens)
    if not (min(sampling) >= 0 and sampling.top_p <= 1 and 0 <= seed < 2**32):
        raise InputError(f"{sampling} or seed {seed} is out of range")
    if draft and draft not in DRAFTS:
        raise InputError(f"draft {draft!r} is none of this model's: {', '.join(DRAFTS)}")
    if not 0 < draft_tokens < FEW:
        raise InputError(f"draft_tokens {draft_tokens} is not from 1 to {FEW - 1}")
    if quantize_cache not in (None, "int8"):
        raise InputError(f"quantize_cache {quantize_cache!r} is neither None nor 'int8'")
    prompts, stop_tokens = [np.int32(prompt) for prompt in prompts], tuple(stop_tokens)
    drafts = draft_tokens if draft else 0
    longest, dp = max(map(len, prompts)), mesh.shape["dp"]
    max_seq_len = int(max_seq_len or model.cache_slots(int(longest + max_new_tokens - 1)))  # the last token needs none
    goes_on, kept = kept is not None, {} if kept is None else kept  # whether a later call may go on from this one
    pieces = piece_lengths(max_seq_len if goes_on else longest, config, mesh)  # the calls of a conversation share them

    # The cache of a single row on each device of dp tells which layers forget, and how many rows memory holds.
    slots, dtype = max(max_seq_len, pieces[0]), weights["norm"].dtype  # a piece is stored whole, with its padding
    of_cache = dict(max_seq_len=slots, dtype=dtype, quantize=quantize_cache, drafts=drafts)
    of_one = model.abstract_cache(config, mesh, dp, **of_cache)
    forgets = what_forgets(of_one, prompts, max_seq_len, goes_on, preamble, config, mesh)
    count = rows_at_once(len(prompts), rows, weights, [of_one, forgets.saved(of_one)], mesh)
    batch = ceil_div(count, dp) * dp  # the places beyond `count` stay free
    cache = model.abstract_cache(config, mesh, batch, **of_cache)
    caches, past, programs = take_up(kept, (cache, forgets.saved(cache)), (batch, max_seq_len))

    together = jax.tree.leaves(cache)[0].shape[0] // dp  # in some models devices of a dp divide the places too
    sparing = draft == "lookup" and mesh.devices.flat[0].platform == "cpu"
    decoding = dict(drafts=drafts, sparing=sparing, seed=seed, max_new_tokens=max_new_tokens, max_seq_len=max_seq_len)
    reuse = dict(forgetting=forgets, together=together, past=past)
    places = Places(prompts, count, batch, dp, pieces, **decoding, stop_tokens=stop_tokens, **reuse)
    options = dict(config=config, mesh=mesh, draft=draft, drafts=drafts, sampling=sampling, stop_tokens=stop_tokens)
    stats = {} if stats is None else stats
    engine = Engine(weights, *caches, programs, places, options, stats, progress)

    try:
        engine.update()
        # Compiles the first step and a decode step now, so that the progress of prefill is not interrupted.
        engine.prepare(places.choose(), (1 + drafts * places.verifies(), np.arange(batch)))
        progress("prefill", 0, engine.first_tokens - places.reused)
        while (places.numbers >= 0).any():  # some row has not ended
            if places.has_more() and len(places.in_flight) <= LOOKAHEAD:
                engine.start(*places.choose())
            else:
                yield engine.fetch()
            engine.update()
        engine.finish()
    finally:
        kept |= {"cache": engine.cache, "saved": engine.saved, "places": places, "programs": programs}


def take_up(kept: dict, shapes: tuple, of_rows: tuple[int, int]) -> tuple[tuple, Places | None, dict]:
    """Takes out of `kept` what an earlier call left, since programs take the memory of its caches. Returns the caches,
    places and programs, or empty ones if the caches have other shapes than these, or the rows another batch or
    max_seq_len. (Among many devices, latents of one row may be padded to the shapes of two.)"""
    *caches, past, programs = (kept.pop(name, None) for name in ("cache", "saved", "places", "programs"))
    found, wanted = ([x.shape for x in jax.tree.leaves(tree)] for tree in (caches, shapes))  # of None there are none
    if found == wanted and (past.batch, past.max_seq_len) == of_rows:
        return caches, past, programs
    del caches  # before others take memory
    return model.zeros(shapes), None, {}


# ---------------------------------------------------------------------------------------------------------------------
# What is known is not read again

FEWEST_COPIED = 128  # tokens: fewer are read in less time than a program that copies them is compiled in (a guess)
OPENING = 8  # tokens at the end of a prompt, by which a template begins the answer: the next turn may lack them
BLOCK = 512  # slots copied at once


class Forgetting(NamedTuple):
    """How the cache of a model forgets. A ring overwrites its oldest tokens, so a row can go back by a piece at most. A
    state sums all tokens up, so a row cannot go back at all. So where another row may go on later, a row pauses before
    a step, and these `layers`, by their index, are saved: if a later call may follow, `opening` tokens before the end
    of its prompt and, if it is above 0, after the first `preamble` tokens; else as `pauses_of` says. Every layer has
    room for `held` tokens of a row, 0 if it is a state.
    """

    layers: list[int]
    held: float
    opening: int
    preamble: int

    def saved(self, cache: list) -> list[dict]:
        """One or two copies of the layers that forget, from a cache or its shapes."""
        return [{i: cache[i] for i in self.layers}] * (2 if self.preamble else 1)


def what_forgets(of_one: list, prompts, max_seq_len: int, goes_on: bool, preamble: int, config, mesh) -> Forgetting:
    """The Forgetting of a call of generate, from the shapes of a cache. If it `goes_on`, a later call may have to go
    back in all that forgets. Otherwise states alone are saved, if prompts begin alike."""
    held = model.tokens_held(of_one, config, model.model_shards(mesh))
    some_begin_alike = len({tuple(prompt[:FEWEST_COPIED]) for prompt in prompts}) < len(prompts)
    layers = [i for i, n in enumerate(held) if (n < max_seq_len if goes_on else n == 0 and some_begin_alike)]
    opening = OPENING if layers and goes_on else 0
    return Forgetting(layers, min(held), opening, preamble if opening and preamble >= FEWEST_COPIED else 0)


class Reuse:
    """What need not be read again, since a place has read it, for an earlier row or in an earlier call. The caches of
    `together` neighbours are on the same devices, and can be copied to one another. Of each place:

        pauses    after how many tokens the row pauses, or has paused, so that its layers that forget are saved
        saved_at  two numbers: after how many tokens they were saved, the second after the preamble; 0 if not
        written   the position behind the last that may have been written: it matters for rings
    """

    def __init__(self, places: Places, forgetting: Forgetting, together: int, past: Reuse | None):
        self.places, self.together, self.has_states = places, together, forgetting.held == 0
        _, self.held, self.opening, self.preamble = forgetting
        self.pauses = [[] for _ in range(places.batch)]
        nothing = np.zeros(places.batch, np.int32), np.zeros((places.batch, 2), np.int32)
        self.written, self.saved_at = (past.written, past.saved_at) if past else nothing

    def remaining(self) -> np.ndarray:
        """How many tokens of each place a later call finds in the cache, or where it must return to what was saved."""
        places, filled = self.places, self.places.rows.filled
        # If steps with drafts were broken off, it is not known how many drafts the states took in.
        is_unknown = self.has_states and places.drafts and places.in_flight
        return np.where(places.numbers >= 0, np.max(self.saved_at, axis=1), filled) if is_unknown else filled

    def save(self, paused: np.ndarray) -> Copies:
        """Has the layers that forget saved of the places that paused, bool [batch]."""
        filled = self.places.rows.filled
        of_preamble = filled == self.preamble
        saves = np.stack([paused & ~of_preamble, paused & of_preamble], axis=1)
        self.saved_at = np.where(saves, filled[:, None], self.saved_at)
        return Copies(saves, np.zeros_like(saves), *np.zeros((2, len(filled)), np.int32))

    def find(self, prompt: np.ndarray, free: list[int], is_new: np.ndarray) -> tuple[int, int, int] | None:
        """The free place where a prompt has to read the least; the place from which it gets its first tokens, which may
        be the same; and how many. None if it waits, whichever place it would take."""
        agreeing, best = self.agreeing(prompt), {}  # of each group of neighbours, the place that shares most
        for p in sorted(free, key=lambda p: self.shared(p, agreeing[p]), reverse=True):
            best.setdefault(p // self.together, p)
        found = [(p, *source) for p in best.values() if (source := self.source(p, agreeing, is_new))]
        return max(found, key=lambda each: each[2], default=None)

    def take(self, p: int, q: int, n: int, copies: Copies) -> None:
        """Has a new row of place p begin with the first n tokens of place q, and adds to `copies` what it needs."""
        if q != p:
            copies.sources[p], copies.tokens[p] = q, n
        self.saved_at[p] = self.saved_at[q] * (self.saved_at[q] <= n)  # what was saved later is of no use
        copies.returns[p] = (self.saved_at[p] == n) & (n > 0)
        # What was saved may have had a piece behind it, of padding or of an earlier row. To begin anew is no return.
        self.written[p] = n + model.PREFILL_PIECE if copies.returns[p].any() else self.written[q] * (n > 0)
        self.pauses[p] = self.pauses_of(p)

    def note_writes(self, taken: np.ndarray, T: int) -> None:
        """Notes what a step of T tokens of the places `taken` will overwrite; called before `filled` advances."""
        places, rows = self.places, self.places.rows
        # The devices may be ahead of `rows` by as many tokens as the steps in flight compute.
        ahead = (1 + places.drafts) * len(places.in_flight) * (rows.filled >= places.prompt_lengths)
        most = np.minimum(rows.filled + ahead, rows.limits - 1)
        self.written[taken] = np.maximum(self.written, most + T)[taken]

    def agreeing(self, prompt: np.ndarray, taken=slice(None)) -> np.ndarray:
        """How many tokens at the beginning of a prompt, but for its last one, are those in the histories of places."""
        differ = self.places.rows.history[taken, : len(prompt)] != prompt
        differ[:, -1] = True
        return np.argmax(differ, axis=1)

    def shared(self, p: int, agreeing: int) -> int:
        """How many of the first tokens of a prompt, which agree with those of a place, need not be read there."""
        filled = self.places.rows.filled[p]
        n = min(agreeing, self.places.received[p] - 1, filled)  # a foreseen token may not have come
        stays = n == filled if self.has_states else self.offers(p, n)
        return n if n > 0 and stays else max(self.saved_at[p] * (self.saved_at[p] <= agreeing))

    def offers(self, p: int, n: int) -> bool:
        """Whether a row can go on after the first n tokens of a place without states, which has computed them. In a
        ring that has wrapped, at most a piece may have been written behind these n: it has room for what a token sees
        and a piece more. One that holds all `max_seq_len` tokens of a row may lack that room."""
        has_room = self.held < self.places.max_seq_len and self.written[p] - n <= model.PREFILL_PIECE
        return has_room or self.written[p] <= self.held

    def source(self, p: int, agreeing: np.ndarray, is_new: np.ndarray) -> tuple[int, int] | None:
        """From which place a prompt gets its first tokens if it takes the place p, and how many: from p itself, unless
        another row has at least FEWEST_COPIED more. None if it waits: some row will have as many more than these, when
        it has read them or has gone back to them."""
        places, own, there, to_come = self.places, self.shared(p, agreeing[p]), [], []
        is_near = np.arange(places.batch) // self.together == p // self.together
        for q in np.flatnonzero(is_near & (places.numbers >= 0) & (agreeing >= own + FEWEST_COPIED)).tolist():
            n = min(agreeing[q], max(places.prompt_lengths[q], places.received[q] - 1))  # what it will have for certain
            filled = places.rows.filled[q]
            if self.has_states:
                ends = *self.saved_at[q], *(end for end in self.pauses[q] if end > filled)
                n = max((end for end in ends if end <= n), default=0)
            elif n <= filled and not self.offers(q, n):
                n = 0
            (to_come if is_new[q] or filled < n else there).append((n, q))
        n, source = max(there, default=(0, p))
        if n < own + FEWEST_COPIED:
            n, source = own, p
        return None if max(to_come, default=(0, p))[0] >= n + FEWEST_COPIED else (source, n)

    def pauses_of(self, p: int) -> list[int]:
        """After how many tokens of its prompt a row's layers that forget are saved: the `preamble`, and all but the
        `opening`. If no later call may follow, states are saved where the next prompts gain the most tokens: those that
        share the first n, times what each need not read."""
        places, length = self.places, self.places.prompt_lengths[p]
        if self.opening:
            return [n for n in (self.preamble, length - self.opening) if n < length]
        if not self.has_states:
            return []
        following = itertools.islice(places.waiting, places.count)
        common = sorted(min(self.agreeing(places.prompts[n], [p])[0], length - 1) for n in following)
        known = places.rows.filled[p]  # the next prompts can have as much from where this row has it
        gains = [((len(common) - i) * (n - known), n) for i, n in enumerate(common)]
        best = max(gains, default=(0, 0))[1]
        # It would replace what is saved. A few tokens more, in which some agree by chance, do not pay.
        return [best] if best >= known + FEWEST_COPIED else []


def replace(old, is_new: Array, new):
    """The pytree `old` of arrays [B, ..], with the rows of `new` where `is_new`, bool [B], is true."""
    return jax.tree.map(lambda x, y: jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), y, x), old, new)


class Copies(NamedTuple):
    """What `copy` does to the places of a batch between two steps, in this order.

    1. Where `saves`, bool [batch, 2], is true, the layers that forget are copied into their first or second copy.
    2. A place whose `tokens`, int32 [batch], is above 0 gets that many first tokens from the place `sources`, int32
       [batch], and what was saved there. The places get them one after another.
    3. Where `returns`, bool [batch, 2], is true, the layers that forget get back what that copy has.
    """

    saves: Array
    returns: Array
    sources: Array
    tokens: Array


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache", "saved"))
def copy(cache: list, saved: list[dict], copies: Copies, *, config: Config, mesh: Mesh) -> tuple[list, list[dict]]:
    """The cache, and one or two copies of its layers that forget, by their index, after `copies`. Both are donated."""
    R = model.cache_sharers(config, model.model_shards(mesh))

    def body(cache, saved, copies):
        saves, returns, sources, tokens = copies
        # R devices share the cache of the places here. It is split by tokens or, in some models, by rows too. Then each
        # device has `rows` of the places, those for which place // rows is its `part`. (If 4 devices share 4 places and
        # each has 2, two of them have part 0 and divide its tokens.)
        rows = jax.tree.leaves(cache)[0].shape[0]
        part = model.shard_index(R) // (R * rows // len(sources))
        places = jnp.flatnonzero(tokens, size=len(tokens))  # first those that get tokens
        receivers = jnp.count_nonzero(tokens) if len(tokens) > 1 else 0  # a place alone has no other

        def share(i, trees):
            (arrays, tree), place = jax.tree.flatten(trees), places[i]
            blocks = [ceil_div(math.prod(x.shape[2:3]), BLOCK) for x in arrays]  # of each array; a state must be one

            def shared(x, n):  # the n-th block; if it ends beyond the last slot, XLA moves it back on both sides
                at = (0, n * BLOCK, 0)[: x.ndim - 1]
                size = 1, x.shape[1], *(min(S, BLOCK) for S in x.shape[2:3]), *x.shape[3:]
                block = jax.lax.dynamic_slice(x, (sources[place] % rows, *at), size)
                return jax.lax.dynamic_update_slice(x, block, (place % rows, *at))

            # No token is in a slot that is higher than its position. A ring of fewer blocks is copied whole.
            needed = ceil_div(tokens[place], BLOCK) * (place // rows == part)
            for most in sorted({*blocks}):  # arrays of as many blocks are copied in one loop

                def share_block(n, arrays):
                    return [shared(x, n) if count == most else x for x, count in zip(arrays, blocks, strict=True)]

                arrays = jax.lax.fori_loop(0, jnp.minimum(needed, most), share_block, arrays)
            return tree.unflatten(arrays)

        saved = [replace(one, saves[:, k], {i: cache[i] for i in one}) for k, one in enumerate(saved)]
        cache, saved = jax.lax.fori_loop(0, receivers, share, (cache, saved))
        for k, one in enumerate(saved):
            cache = [replace(layer, returns[:, k], one[i]) if i in one else layer for i, layer in enumerate(cache)]
        return cache, saved

    specs = CACHE_SPEC, CACHE_SPEC, P("dp")
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)(cache, saved, copies)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what fits

SHORT_PIECES = 64, 16  # for what is left of a prompt, or new in a conversation; the shortest only on CPUs
BATCH = 256  # rows of a device: beyond 240 (TPU v5e) or 295 (H100) to multiply a matrix takes longer than to read it
MEMORY_SHARE = 0.85  # of a device's memory, for weights and cache; the rest is for activations (a guess)


def check_prompts(prompts: list[list[int]], config: Config, max_seq_len: int | None, max_new_tokens: int) -> None:
    """Raises InputError for no new tokens, no prompt, and a prompt that is no list of integers, empty, longer than
    `max_seq_len`, outside the vocabulary or, with its answer, longer than the `n_positions` that a model has learned.
    """
    positions = getattr(config, "n_positions", math.inf)
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} is not at least 1")
    if not len(prompts):
        raise InputError("there is no prompt")
    for row, prompt in enumerate(prompts, 1):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iub"):
            raise InputError(f"prompt {row} is {prompt!r:.40}, not a list of token ids")
        if not len(prompt):
            raise InputError(f"prompt {row} is empty: it has no tokens")
        if max_seq_len and len(prompt) > max_seq_len:
            raise InputError(f"prompt {row} has {len(prompt)} tokens, more than max_seq_len {max_seq_len}; raise it")
        needed = len(prompt) + max_new_tokens - 1  # the last token needs none
        if min(needed, max_seq_len or needed) > positions:
            what = f"prompt {row} and its answer need {needed} positions, more than n_positions {positions}"
            raise InputError(f"{what}; shorten it, lower max_new_tokens or give max_seq_len {positions}")
        if len(wrong := ids[(ids < 0) | (ids >= config.vocab_size)]):
            raise InputError(f"prompt {row} has token {wrong[0]}, outside the vocabulary of {config.vocab_size}")


def piece_lengths(longest: int, config: Config, mesh: Mesh) -> list[int]:
    """The lengths of the pieces in which prefill takes prompts of up to `longest` tokens: a long one, at most
    PREFILL_PIECE, and, if it is longer than the first of SHORT_PIECES, this one too, on CPUs both. All are rounded to
    multiples of R, the number of devices that share a cache. The long one is a power of two before that; on CPUs, where
    padding costs more, a multiple of an eighth of one."""
    R = model.cache_sharers(config, model.model_shards(mesh))
    tokens = ceil_div(longest, ceil_div(longest, model.PREFILL_PIECE))
    unit, short = model.power_of_two(max(tokens, 16)), SHORT_PIECES[:1]
    if mesh.devices.flat[0].platform == "cpu":
        unit, short = max(16, unit // 8), SHORT_PIECES  # fewer than 16 rows more take no longer
    long = min(ceil_div(ceil_div(tokens, unit) * unit, R) * R, model.PREFILL_PIECE // R * R)
    short = [ceil_div(T, R) * R for T in short]
    return [long, *short] if long > short[0] else [long]


def rows_at_once(prompts: int, wanted: int | None, weights: dict, cache: list, mesh: Mesh) -> int:
    """How many rows decode at once: `wanted`, by default as many as fit beside the weights and at most BATCH on a
    device. `cache` is that of a row on each device of dp, with its copies. Raises InputError if the rows do not
    fit."""
    dp, memory = mesh.shape["dp"], memory_of(mesh)
    used, size = model.stored_bytes(weights), model.stored_bytes(cache)
    fitting = int(min(max(1, (MEMORY_SHARE * memory - used) / size), BATCH))
    rows = min(prompts, wanted or fitting * dp)
    if used + ceil_div(rows, dp) * size > memory:
        what = f"a cache of {rows} rows, {size / dp / 1e9:.3g} GB each"
        raise InputError(f"no memory for {what}; lower max_new_tokens, max_seq_len or batch_size")
    return rows


def memory_of(mesh: Mesh) -> float:
    """Bytes of memory of a mesh's devices, infinite if they do not tell. CPUs share the machine's. All processes must
    call it, and get the same result, from the process with the least."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        local = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit())
    else:
        local = sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in devices)
    least = float(np.min(multihost_utils.process_allgather(np.float32(local))))
    return least * mesh.size / len(devices)


def memory_limit(root: str = "/") -> float:
    """Bytes that control groups allow this process, as containers and Slurm set them; infinite if none is set."""
    file, found = Path(root, "proc/self/cgroup"), [math.inf]
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controller, group = line.split(":", 2)  # of version 2 it is empty
        if controller in ("", "memory"):
            name = "memory.limit_in_bytes" if controller else "memory.max"
            folder = Path(root, "sys/fs/cgroup", controller, group[1:])
            files = [above / name for above in (folder, *folder.parents) if (above / name).is_file()]
            found += [int(text) for text in (one.read_text() for one in files) if text.strip().isdigit()]
    return min(found)


def step_bytes(weights: dict, cache: list[LayerCache], lengths: list[float], config: Config, tokens: float) -> int:
    """Bytes that a step has to read on all devices, with so many tokens on each of dp: all weights, and `lengths` slots
    of the rows. A tied embedding counts, since it is the head too; an untied one does not. Of an embedding for each
    layer, the rows of the tokens count. Of experts, those count that a uniform router would choose on average."""

    def read(weight, array):
        share = 1 - (1 - config.num_experts_per_tok / weight.experts) ** tokens if weight.experts else 1
        return share * model.stored_bytes(array)

    total = sum(jax.tree.leaves(jax.tree.map(read, model.weights_of(config), weights)))
    if "head" in weights:
        total -= model.stored_bytes(weights["embedding"])
    if table := weights.get("per_layer_embedding"):
        total -= model.stored_bytes(table) * max(0, 1 - tokens / table.shape[0])
    for layer, of_layer in zip(weights["layers"], cache):
        if getattr(of_layer, "index_key", 0) is None:  # so few slots that no indexer chooses among them
            total -= model.stored_bytes({name: x for name, x in layer.items() if name.startswith("index_")})
    return int(total + model.cache_bytes_read(cache, lengths, config))
