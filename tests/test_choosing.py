"""Sparse attention: which keys are chosen, and attention to these alone, against numpy in float64, with the kernels
under the interpreter; whole models against transformers' class."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    STRICT,
    assert_matches,
    decode,
    extra_layer_tensors,
    fast_of,
    floats,
    in_format,
    random_extra_layer,
    read_in_pieces,
    reference_logprobs,
    save_random,
)
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from test_deepseek import save_fp8
from test_latent import H, N, dealt, model, random_arguments, select, wide
from test_parity import YARN, deepseek_32, glm_5, random_prompts

HEADS, WIDTH, K = 8, 24, 20  # of the indexer, over all devices


def chosen_in_numpy(scores, k):
    """bool [B, T, tokens]: the k highest of scores, of equal ones the earliest."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.put_along_axis(mask := np.zeros(scores.shape, bool), order[..., :k], True, -1) or mask


def tied_scores(k):
    """float32 [6, 4, 64], with many equal ones, negative zeros and some that are -inf. And of those that are not, which
    are the k highest."""
    random = np.random.default_rng(k)
    scores = np.round(random.standard_normal((6, 4, 64)), 1).astype(np.float32)
    scores[0, 1:] = -np.inf
    scores[1] = np.where(random.random((4, 64)) < 0.5, 0.0, -0.0)
    by_position = np.moveaxis(scores, 1, 2).reshape(6, -1).astype(np.float64)
    return scores, np.moveaxis(chosen_in_numpy(by_position, k).reshape(6, 64, 4), 2, 1) & (scores > -np.inf)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("k", [1, 7, 64, 200])
def test_the_lowest_that_is_chosen(platform, k):
    scores, wanted = tied_scores(k)
    positions, lowest = np.arange(64)[None] * 4 + np.arange(4)[:, None], model.lowest_chosen.plain
    if platform == "tpu":
        lowest = partial(fast_of(model).lowest_kernel, interpret=STRICT)
    chosen = model.is_chosen(jnp.array(scores), positions, *lowest(jnp.array(scores), jnp.array(positions), k))
    np.testing.assert_array_equal(chosen & (scores > -np.inf), wanted)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("k", [1, 7, 64, 200])
def test_slots_of_four_devices(platform, k):
    """They are marked or, on GPUs, listed."""
    scores, wanted = tied_scores(k)
    choose = {"cpu": model.chosen_slots.plain, "gpu": fast_of(model).listed_slots}[platform]
    mesh, spec = model.make_mesh(tp=4, devices=jax.devices()[:4]), P(None, model.MODEL_AXES)

    def body(scores):  # [6, 1, 64], as two rows of three tokens
        return choose(scores.reshape(2, 3, 64), k, 4).reshape(6, 1, -1)

    found = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(scores)
    if platform == "gpu":
        found = np.sum(np.asarray(found)[..., None] == np.arange(64), axis=2)
    np.testing.assert_array_equal(np.where(scores > -np.inf, found, 0), wanted)


CASES = [
    ((1, 1, 1), 32, (0, 127, 300), 1, 512, "tpu", "int8"),
    ((1, 1, 1), 32, (0, 126, 254), 3, 512, "tpu", None),
    ((1, 1, 4), 32, (0, 130, 255), 1, 256, "cpu", "int8"),
    ((1, 2, 4), 2, (250, 0, 90), 4, 256, "cpu", None),
    ((2, 1, 2), 32, (1, 250, 31, 64), 1, 256, "tpu", "int8"),
    ((1, 1, 1), 32, (0, 15, 300), 1, 512, "gpu", "int8"),
    ((2, 1, 2), 32, (1, 250, 31, 64), 3, 256, "gpu", None),
    ((1, 2, 4), 32, (250, 0, 90), 4, 256, "gpu", None),
    ((1, 2, 4), 4, (511, 130), 2, 512, "gpu", "int8"),
    ((1, 1, 1), 32, (0, 77, 640), 64, 768, "tpu", None),  # more blocks than one number has bits for
    ((1, 1, 4), 32, (130, 700), 64, 768, "cpu", "int8"),
    ((1, 2, 4), 2, (0, 190), 24, 256, "cpu", None),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("mesh", "sharers", "starts", "T", "slots", "platform", "quantize"), CASES, ids=str)
def test_against_float64(monkeypatch, platform, mesh, sharers, starts, T, slots, quantize):
    """Choosing and attention together, on what the cache holds."""
    monkeypatch.setattr(model, "CACHE_SHARERS", sharers)
    select(monkeypatch, platform)
    dp, B, tpu = mesh[0], len(starts), 128 if platform == "tpu" else None
    mesh = model.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    X = model.model_shards(mesh)
    R, random = model.cache_sharers(None, X), np.random.default_rng(1)
    q, q_rope, latents, kv_b = random_arguments(starts, T, jnp.float32, quantize)
    tokens = latents[0].shape[1]
    index_q, index_key = (
        random.standard_normal((B, n, *shape)).astype(np.float32)
        for n, shape in ((T, (HEADS, WIDTH)), (tokens, (WIDTH,)))
    )
    weights = random.standard_normal((B, T, HEADS)).astype(np.float32)
    sides = [*latents, jnp.array(index_key)]
    new = [jnp.stack([x[b, s : s + T] for b, s in enumerate(starts)]) for x in sides]
    history = [in_format(model, x, quantize) for x in sides]

    def side(x):
        x = np.asarray(wide(x, tpu))
        held = np.full((B, slots, *x.shape[2:]), 3, x.dtype)
        for b, start in enumerate(starts):
            held[b, :start] = x[b, :start]
        return jnp.asarray(dealt(held, dp, X, R))

    *stored, index_key = (jax.tree.map(side, x) for x in history)
    cache = model.IndexedCache(model.LayerCache(*stored), index_key)
    heads = P("dp", None, model.MODEL_AXES)
    k_b, v_b = (jax.tree.map(lambda x: x[:, part].reshape(-1, *x.shape[2:]), kv_b) for part in np.s_[:H, H:])

    def attend(q, q_rope, index_q, weights, new, cache, positions, w):
        span = model.Span(positions, None, None, B // dp, R)
        choice, _ = model.choose_keys(index_q, new[2], weights, cache.index_key, span, K)
        masks = partial(model.mask_of_choice, choice)
        return model.cached_attention(q, q_rope, model.LayerCache(*new[:2]), cache.latents, span, w, masks)[0]

    specs = heads, heads, heads, P("dp"), P("dp"), model.CACHE_SPEC, P("dp"), P(model.MODEL_AXES)
    program = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    positions = jnp.array(starts)[:, None] + jnp.arange(T)
    out = jax.jit(program)(q, q_rope, index_q, weights, new, cache, positions, {"k_b": k_b, "v_b": v_b})

    latent, rope_key, key = map(floats, history)
    q, q_rope, kv_b = map(floats, (q, q_rope, kv_b))
    for b, start in enumerate(starts):
        products = np.maximum(np.einsum("tnh,sh->tns", np.float64(index_q[b]), key[b]), 0)
        scores = np.einsum("tn,tns->ts", np.float64(weights[b]), products)
        for t in range(T):
            scores[t, start + t + 1 :] = -np.inf
        seen = chosen_in_numpy(scores, K) & (scores > -np.inf)
        for t, n in np.ndindex(T, N):
            l, r = latent[b, :tokens][seen[t]], rope_key[b, :tokens][seen[t]]
            s = l @ (kv_b[n, :H].T @ q[b, t, n]) + r @ q_rope[b, t, n]
            p = np.exp(s - s.max())
            np.testing.assert_allclose(out[b, t, n], p @ (l @ kv_b[n, H:].T) / p.sum(), atol=3e-5)


SPARSE = {"deepseek": lambda: deepseek_32(rope_parameters=YARN, index_topk=16), "glm5": lambda: glm_5(index_topk=16)}


@pytest.fixture(scope="module", params=SPARSE)
def sparse(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sparse")
    folder, *reference = SPARSE[request.param]()
    return folder, path, save_random(path, *reference)


@pytest.mark.sampled
@pytest.mark.parametrize(("draft", "platform"), [(None, "cpu"), ("lookup", "cpu"), ("lookup", "gpu")])
def test_pieces_and_drafts(sparse, monkeypatch, draft, platform):
    """A prompt in many pieces, unequal rows in two places, and drafts: transformers' tokens."""
    folder, path, reference = sparse
    monkeypatch.setattr(folder.model, "platform", lambda: platform)
    read_in_pieces(monkeypatch, folder, 32)
    monkeypatch.setattr(folder.generate, "PREFILL_TOKENS", 32)  # one row at a time, since two take another program
    monkeypatch.setattr(folder.generate, "REPEATING", 0)
    prompts = random_prompts(250, 3, 70)
    rows = decode(folder, path, prompts, (1, 1, 2), max_new_tokens=10, rows=2, draft=draft)
    assert_matches(reference, prompts, rows)


@pytest.mark.sampled
def test_shared_beginnings_and_a_conversation(sparse, monkeypatch):
    """Rows get the indexer's keys of what they share, too, and a conversation keeps them: transformers' tokens."""
    folder, path, reference = sparse
    read_in_pieces(monkeypatch, folder, 64)
    beginning, *ends = random_prompts(150, 9, 4, 30, 1, 20)
    prompts, options = [beginning + end for end in ends], {"rows": 3, "max_new_tokens": 6, "max_seq_len": 300}
    read, options["kept"], options["stats"] = [], {}, {}
    for _ in range(3):
        rows = decode(folder, path, prompts, (1, 1, 2), **options)  # two devices share the tokens of three rows
        assert_matches(reference, prompts, rows)
        read.append(options["stats"]["prefill_tokens"])
        turns = zip(prompts[-3:], rows[-3:], ends[:3], strict=True)
        prompts = [[*prompt, *(token.id for token in row), *end] for prompt, row, end in turns]
    assert read == [150 + 9 + 4 + 30 + 1 + 20, *[9 + 4 + 30 + 3] * 2]  # and the last token of each answer


@pytest.mark.sampled
@pytest.mark.parametrize("name", SPARSE)
def test_drafts_of_an_extra_layer(tmp_path, name):
    """It has an indexer of its own. With its guesses or without, the tokens are transformers'."""
    folder, model_class, config = SPARSE[name]()
    config.num_mtp_layers, config.mtp_mlp_layer_types, config.mtp_layer_types = 1, ["sparse"], config.layer_types[:1]
    reference, file = save_random(tmp_path, model_class, config), tmp_path / "model.safetensors"
    extra = extra_layer_tensors(random_extra_layer(reference), f"model.layers.{config.num_hidden_layers}")
    save_file(load_file(file) | extra, file)
    prompts, options = random_prompts(90, 5, 33), {"draft": "mtp", "draft_tokens": 2}  # a guess behind a guess
    assert_matches(reference, prompts, decode(folder, tmp_path, prompts, (1, 1, 2), max_new_tokens=12, **options))


def test_a_short_cache_has_no_indexer(sparse):
    """Up to index_topk slots nothing is chosen, so a step reads no weights for that. A longer cache leaves out what
    dense attention would see."""
    folder, path, reference = sparse
    config = folder.convert.open_checkpoint(path).config
    mesh = folder.model.make_mesh(devices=jax.devices()[:1])
    indexers = [layer.self_attn.indexer for layer in reference.model.layers]
    weights, read = folder.model.abstract_weights(config, mesh, jnp.float32), []
    for slots in (16, 17):
        cache = folder.model.abstract_cache(config, mesh, 1, slots, jnp.float32)
        assert [layer.index_key is not None for layer in cache] == [bool(x) and slots > 16 for x in indexers]
        read.append(folder.generate.step_bytes(weights, cache, [], config, 1))
    parameters = sum(x.numel() for indexer in filter(None, indexers) for x in indexer.parameters())
    assert read[1] - read[0] == 4 * parameters
    (prompt,) = random_prompts(120)
    sparse_logprobs = reference_logprobs(reference, prompt, [0])
    for indexer in filter(None, indexers):
        indexer.index_topk = 10**6
    dense_logprobs = reference_logprobs(reference, prompt, [0])
    for indexer in filter(None, indexers):
        indexer.index_topk = 16
    assert np.abs(sparse_logprobs - dense_logprobs).max() > 0.1


@pytest.mark.parametrize("name", SPARSE)
def test_fp8_with_an_indexer(tmp_path, name):
    """As the release has it: two of the indexer's matrices in FP8, the third as it is."""
    folder, *reference = SPARSE[name]()
    reference, prompts = save_fp8(tmp_path, *reference, (32, 16)), random_prompts(90)
    assert_matches(reference, prompts, decode(folder, tmp_path, prompts, (1, 1, 2), max_new_tokens=4))
