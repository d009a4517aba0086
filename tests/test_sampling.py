"""Sampling against its definition in numpy, in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, decode, import_folder

llama3 = import_folder("llama3")
DEMO = ROOT / "llama3" / "demo"


def reference_probabilities(y, temperature, top_k, top_p):
    """Of one row of logits, in float64, a token at a time."""
    y = y.astype(np.float64) / temperature
    order = np.argsort(-y)
    probabilities = np.exp(y - y.max())
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in order:
        if mass < top_p or token == order[0]:
            kept[token] = probabilities[token]
        mass += probabilities[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, 0, 1), (0.5, 0, 1), (1, 1, 1), (1, 7, 1), (1, 1000, 1), (1, 0, 0.7), (1, 0, 0), (1.5, 0, 1e-6), (2, 20, 0.9)],
)
def test_kept_tokens_and_their_probabilities(temperature, top_k, top_p):
    y = np.random.default_rng(0).normal(0, 3, (5, 50)).astype(np.float32)
    kept = llama3.generate.keep_probable(jnp.array(y) / temperature, top_k, top_p)
    for row, logits in zip(jax.nn.softmax(kept), y, strict=True):
        np.testing.assert_allclose(row, reference_probabilities(logits, temperature, top_k, top_p), atol=1e-5)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_drawn_frequencies(mesh):
    """4,000 draws through next_token on a mesh: frequencies, log-probabilities, fresh draws for rows and positions."""
    model, generate, draws = llama3.model, llama3.generate, 4000
    y = np.random.default_rng(1).normal(0, 2, 24).astype(np.float32)
    devices = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    sampling = generate.Sampling(0.8, 10, 0.95)
    P = jax.sharding.PartitionSpec
    program = jax.shard_map(
        lambda y, positions, seeds: generate.next_token(y, positions, seeds, sampling),
        mesh=devices,
        in_specs=(P("dp", model.MODEL_AXES), P("dp"), P("dp")),
        out_specs=P("dp"),
        check_vma=False,
    )
    rows = jnp.tile(y, (draws, 1))
    seeds = jnp.stack([jnp.arange(draws), jnp.full(draws, 3)], axis=1).astype(jnp.uint32)
    tokens, logprobs = jax.jit(program)(rows, jnp.zeros(draws, jnp.int32), seeds)
    wanted = reference_probabilities(y, 0.8, 10, 0.95)
    frequencies = np.bincount(tokens, minlength=24) / draws
    assert (frequencies[wanted == 0] == 0).all()
    np.testing.assert_allclose(frequencies, wanted, atol=4 * np.sqrt(0.25 / draws))
    unmodified = y - np.log(np.exp(y.astype(np.float64)).sum())
    np.testing.assert_allclose(logprobs, unmodified[np.asarray(tokens)], atol=1e-5)
    again, _ = jax.jit(program)(rows, jnp.ones(draws, jnp.int32), seeds)
    assert (np.asarray(again) != np.asarray(tokens)).mean() > 0.3


def test_seed_and_mesh():
    """The same seed draws the same on every mesh, another seed does not; top_k 1 is greedy."""
    prompts, known = [[507, 291, 261], [507, 300]], json.loads((ROOT / "tests" / "golden_tokens.json").read_text())

    def ids(prompts, mesh=(1, 1, 1), seed=0, sampling=(2.0,)):
        options = {"max_new_tokens": 24, "seed": seed, "sampling": llama3.generate.Sampling(*sampling)}
        return [[token.id for token in row] for row in decode(llama3, DEMO, prompts, mesh, **options)]

    assert ids(prompts) == ids(prompts, (2, 1, 4)) != ids(prompts, seed=1)
    greedy = known["llama3"][0]
    assert ids([greedy["prompt_tokens"]], sampling=(1.0, 1))[0][: len(greedy["tokens"])] == greedy["tokens"][:24]


@pytest.mark.parametrize(
    ("sampling", "seed"),
    [((-1.0,), 0), ((np.nan,), 0), ((1.0, -3), 0), ((1.0, 0, -0.1), 0), ((1, 0, 2), 0), ((1.0,), -1), ((1.0,), 2**32)],
)
def test_what_is_out_of_range(sampling, seed):
    """A negative temperature would draw the least probable tokens, and one that is no number any."""
    options = {"sampling": llama3.generate.Sampling(*sampling), "seed": seed}
    with pytest.raises(llama3.model.InputError, match="out of range"):
        decode(llama3, DEMO, [[507, 291]], max_new_tokens=2, **options)


def test_a_draft_that_the_model_has_not():
    with pytest.raises(llama3.model.InputError, match="draft 'mtp' is none of this model's: lookup"):
        decode(llama3, DEMO, [[507, 291]], max_new_tokens=2, draft="mtp")
