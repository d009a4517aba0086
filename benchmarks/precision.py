"""What bfloat16, int8 and int4 cost on real text: how far the distribution of every next token moves from float32's.

    python3 benchmarks/precision.py llama3 --model_path PATH --tokens 4096 --save NAME

The text is prose (Python's language reference, as the standard library carries it for help()) and code (modules of the
standard library), half of the tokens each, in windows of --window tokens. For each number format this prints, over all
tokens: the mean Kullback-Leibler divergence from float32 in nats, its 99th percentile, the share of tokens whose most
probable successor is another one, and the perplexity of the text.
"""

import argparse
import importlib
import inspect
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from folders import ArgumentParser, count, import_all, provenance, result_name, run, save
from jax.sharding import PartitionSpec as P

FORMATS = {  # dtype of all that is not rounded; how weights are, how the cache is
    "float32": ("float32", None, None),
    "bfloat16": ("bfloat16", None, None),
    "int4 weights": ("bfloat16", "int4", None),
    "int8 weights": ("bfloat16", "int8", None),
    "int8 cache": ("bfloat16", None, "int8"),
    "int8 weights and cache": ("bfloat16", "int8", "int8"),
}


def texts() -> dict[str, str]:
    """Prose and code, from the standard library: some 470,000 and 120,000 characters."""
    from pydoc_data.topics import topics

    return {
        "prose": "\n\n".join(topics[name] for name in sorted(topics)),
        "code": inspect.getsource(argparse) + inspect.getsource(textwrap),
    }


def scorer(folder, checkpoint, dtype: str, quantize: str | None, quantize_cache: str | None, mesh_shape=(1, 1, 1)):
    """A function from rows of token ids to a list of float32 [len(row), V]: the log-probabilities of the token after
    each of them, by main.py's prefill."""
    model, convert = folder.model, folder.convert
    config = checkpoint.config
    mesh = model.make_mesh(*mesh_shape, devices=jax.devices()[: int(np.prod(mesh_shape))])
    weights = convert.load(checkpoint, mesh, dtype, quantize)
    R = model.cache_sharers(config, model.model_shards(mesh))

    def body(weights, cache, tokens, start):
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        span = model.Span(positions, None, None, len(tokens), R)
        x, cache = model.forward(weights, tokens, span, cache, config)
        y = model.output_logits(weights, x.reshape(-1, x.shape[-1]), config)
        y = jax.lax.all_gather(y, model.MODEL_AXES, axis=1, tiled=True).reshape(*tokens.shape, -1)
        return jax.nn.log_softmax(y.astype(jnp.float32)), cache

    specs = (model.CACHE_SPEC, P(), P())
    program = jax.jit(model.sharded(body, mesh, weights, config, specs, (P(), model.CACHE_SPEC)))

    def score(rows):
        longest = max(map(len, rows))
        T = folder.generate.piece_lengths(longest, config, mesh)[0]
        tokens = np.zeros((len(rows), -(-longest // T) * T), np.int32)  # padded at the end, where nothing looks
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        slots = model.cache_slots(tokens.shape[1])
        abstract = model.abstract_cache(config, mesh, len(rows), slots, convert.DTYPES[dtype], quantize_cache)
        cache = model.zeros(abstract)
        pieces = []
        for start in range(0, tokens.shape[1], T):
            y, cache = program(weights, cache, tokens[:, start : start + T], start)
            pieces.append(np.asarray(y))
        y = np.concatenate(pieces, axis=1)
        return [y[i, : len(row)] for i, row in enumerate(rows)]

    return score


def reference_scorer(path: Path):
    """The same of the reference class in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16").eval()

    def score(rows):
        with torch.no_grad():
            logits = [reference(torch.tensor([row])).logits[0].float() for row in rows]
        return [torch.log_softmax(y, -1).numpy() for y in logits]

    return score


def compare(exact: np.ndarray, rounded: np.ndarray, row: list[int]) -> dict[str, np.ndarray]:
    """Of each token of a row but the last: the divergence, whether the most probable successor is another one, and the
    negative log-likelihood of the successor that the text has."""
    exact, rounded = exact[:-1], rounded[:-1]
    return {
        "kl": (np.exp(exact) * (exact - rounded)).sum(-1),
        "other": exact.argmax(-1) != rounded.argmax(-1),
        "nll": -rounded[np.arange(len(row) - 1), row[1:]],
    }


def measure(folder, path: Path, rows: list[list[int]], vs_transformers: bool = False) -> dict[str, dict[str, float]]:
    """The table: by format, the figures over all tokens of `rows`."""
    checkpoint = folder.convert.open_checkpoint(path)
    score = scorer(folder, checkpoint, *FORMATS["float32"])
    exact = [score([row])[0] for row in rows]
    table = {}
    for name in [*FORMATS, *["transformers bfloat16"] * vs_transformers]:
        if name != "float32":
            score = scorer(folder, checkpoint, *FORMATS[name]) if name in FORMATS else reference_scorer(path)
        rounded = exact if name == "float32" else [score([row])[0] for row in rows]
        found = [compare(*each) for each in zip(exact, rounded, rows, strict=True)]
        kl, other, nll = (np.concatenate([f[key] for f in found]) for key in ("kl", "other", "nll"))
        table[name] = {
            "mean_kl": float(kl.mean()),
            "p99_kl": float(np.quantile(kl, 0.99)),
            "other_token": float(other.mean()),
            "perplexity": float(np.exp(nll.mean())),
        }
    return table


def real_rows(tokenizer, tokens: int, window: int) -> list[list[int]]:
    """`tokens` token ids of texts() in all, in rows of at most `window`."""
    rows = []
    for text in texts().values():
        ids = tokenizer(text[: 20 * tokens], add_special_tokens=False)["input_ids"][: tokens // len(texts())]
        rows += [ids[i : i + window] for i in range(0, len(ids), window)]
    return rows


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", help="a model folder, such as llama3")
    parser.add_argument("--model_path", required=True, help="a checkpoint folder or a hub id")
    parser.add_argument("--tokens", type=count, default=4096, help="default 4096")
    parser.add_argument("--window", type=count, default=1024, help="default 1024")
    parser.add_argument("--vs", choices=["transformers"], help="the reference class too")
    parser.add_argument("--save", type=result_name, metavar="NAME", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    folder = import_all(args.folder)
    folder.convert.check_devices()
    if args.vs:
        importlib.import_module("torch")  # before the hour that our side takes
    path = folder.convert.find_checkpoint(args.model_path)
    tokenizer = folder.main.read_tokenizer(folder.convert.open_checkpoint(path))
    table = measure(folder, path, real_rows(tokenizer, args.tokens, args.window), args.vs == "transformers")
    if args.save:
        save(args.save, {**provenance(("jax", "transformers")), "results": table})
    print(f"{'':24}{'mean KL':>10}{'p99 KL':>10}{'other token':>13}{'perplexity':>12}")
    for name, row in table.items():
        print(
            f"{name:24}{row['mean_kl']:10.1e}{row['p99_kl']:10.1e}{row['other_token']:13.2%}{row['perplexity']:12.3f}"
        )


if __name__ == "__main__":
    run(main)
