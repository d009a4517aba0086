"""What several tests need: a model folder's modules, random checkpoints of the reference class, its numbers.

Only the functions of the reference class need torch.
"""

import dataclasses
import importlib
import json
import os
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("model", "fast", "generate", "convert", "main")
UNKNOWN_PROMPT = [n * n * 31 % 251 + 1 for n in range(1500)]  # tokens that no demo has seen, several pieces of prefill
# How tests interpret kernels: new memory holds NaN, and what is read out of bounds is an error. What another device or
# another copy still reads or writes is a race; conftest.py then fails the test, so jax 0.12 need not raise by itself.
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
if hasattr(STRICT, "on_race"):
    STRICT = dataclasses.replace(STRICT, on_race="warn")


def in_turns(cases: list[tuple], *ways: tuple) -> list[tuple]:
    """Each case in one of the ways, the next case in the next of them: for tests that gain little from all pairs."""
    return [(*case, *ways[n % len(ways)]) for n, case in enumerate(cases)]


FAST_OF = {}  # fast.py by the model.py that it was imported with


def import_folder(name: str | Path, modules=MODULES, without: str | None = None) -> SimpleNamespace:
    """The modules model, fast, generate, convert, main of a folder, or some of them. They have the same names in every
    folder, so none stays in sys.modules."""
    sys.path.insert(0, str(ROOT / name))
    try:
        if without:
            sys.modules[without] = None  # to import it raises ModuleNotFoundError
        folder = SimpleNamespace(**{module: importlib.import_module(module) for module in modules if module != without})
        FAST_OF[folder.model] = getattr(folder, "fast", None)
        return folder
    finally:
        sys.path.remove(str(ROOT / name))
        for module in MODULES:
            sys.modules.pop(module, None)


def interpret_kernels(monkeypatch, model, block: int | None = None, **of_prefill) -> None:
    """Has a model take the path of TPUs, with its kernels under the interpreter. `block` and what is `of_prefill` are
    options of those for attention."""
    fast = fast_of(model)
    monkeypatch.setattr(model, "platform", lambda: "tpu")
    monkeypatch.setattr(model, "decode_kernel", partial(model.decode_kernel, interpret=STRICT, block=block))
    prefill = partial(model.FAST["attend_to_stored", "tpu"], interpret=STRICT, block=block, **of_prefill)
    monkeypatch.setitem(model.FAST, ("attend_to_stored", "tpu"), prefill)
    for name in ("expert_kernel", "streamed_product"):
        if kernel := getattr(fast, name, None):
            monkeypatch.setattr(fast, name, partial(kernel, interpret=STRICT))
    for row in product(("exchange", "chosen_experts", "chosen_in_groups", "index_scores", "lowest_chosen"), ("tpu",)):
        if kernel := model.FAST.get(row):
            monkeypatch.setitem(model.FAST, row, partial(kernel, interpret=STRICT))


def read_in_pieces(monkeypatch, folder, length: int) -> None:
    """Has prompts of every length read in pieces of this one, so that tests compile few programs."""
    monkeypatch.setattr(folder.model, "PREFILL_PIECE", length)
    monkeypatch.setattr(folder.generate, "piece_lengths", lambda *_: [length])


def fast_of(model):
    """fast.py beside a model.py."""
    return FAST_OF[model]


def in_format(model, x, quantize: str | None):
    """Numbers x [.., C] in the format of a model that `quantize` names."""
    return jax.jit(model.quantize)(x) if quantize else model.Plain(x)


def floats(x) -> np.ndarray:
    """An array, or the numbers that a model's Plain or Int8 stands for, in float64."""
    if hasattr(x, "scale"):
        return floats(x.values) * floats(x.scale)[..., None]
    return np.asarray(getattr(x, "values", x), np.float64)


def save_random(folder: Path, model_class, config, seed: int = 0, rewrite=None, **save_options):
    """Saves a random checkpoint with a byte tokenizer, and returns the reference model in float32.

    Weights are large enough for the logits to differ, norms and biases are not trivial. `rewrite` takes the dict of
    config.json and returns what to write instead.
    """
    import torch

    torch.manual_seed(seed)
    reference = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name or ".ln_" in name or name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):
                parameter.normal_(0, 2)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.5, 0.5)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    reference.save_pretrained(folder, **save_options)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    if rewrite:
        file = folder / "config.json"
        file.write_text(json.dumps(rewrite(json.loads(file.read_text()))))
    return reference


def random_extra_layer(reference, spread: float = 0.5):
    """transformers' layer of multi-token prediction, with random numbers and, in its router, biases up to `spread`."""
    import torch
    from transformers.modeling_layers import MtpModel

    mtp = MtpModel(reference, 1).float().eval()
    # A block that chooses keys gives its choice, too, which the layer around it does not expect.
    mtp.layers[0].mtp_block.register_forward_hook(lambda module, given, out: out[0] if isinstance(out, tuple) else out)
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            if ".mlp.experts." in name or not parameter.any():  # the class leaves the first as memory was
                parameter.normal_(0, reference.config.initializer_range)
        for name, buffer in mtp.layers.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-spread, spread)
    return mtp


def extra_layer_tensors(mtp, layer: str) -> dict:
    """The tensors of random_extra_layer's layer as releases name them, `layer` being model.layers.N: an expert's apart,
    and once more the model's embedding and head."""
    block = mtp.layers[0].mtp_block
    found = {
        "embed_tokens.weight": mtp.embed_tokens.weight,
        "shared_head.head.weight": mtp.shared_head.weight,
        "shared_head.norm.weight": mtp.layers[0].post_norm.weight,
        **{f"{name}.weight": mtp.layers[0].get_parameter(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")},
        **block.state_dict(),
    }
    gate_up, down = found.pop("mlp.experts.gate_up_proj"), found.pop("mlp.experts.down_proj")
    for e in range(len(down)):
        parts = [*gate_up[e].chunk(2), down[e]]
        names = (f"mlp.experts.{e}.{name}_proj.weight" for name in ("gate", "up", "down"))
        found |= dict(zip(names, parts, strict=True))
    return {f"{layer}.{name}": x.detach().clone() for name, x in found.items()}


def qwen_extra_layer_tensors(mtp) -> dict:
    """The same as releases of Qwen3.5 name them, with packed experts."""
    layer = mtp.layers[0]
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    found = {f"mtp.{name}.weight": layer.get_parameter(f"{of_class}.weight") for name, of_class in names.items()}
    found |= {f"mtp.layers.0.{name}": x for name, x in layer.mtp_block.state_dict().items()}
    return {name: x.detach().clone() for name, x in found.items()}


def as_transformers_4(config: dict) -> dict:
    """A config.json in the older form: rope parameters flat and in rope_scaling, torch_dtype."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config[name] = rope.pop(name)
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


def experts_apart(tensors):
    """With a matrix for each expert, as what quantizes has them, in place of one tensor for all."""
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        module, kind = name.rsplit(".", 1)
        for e, matrix in enumerate(tensors.pop(name)):
            parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            tensors |= {f"{module}.{e}.{kind}.weight": part for kind, part in zip(kinds, parts, strict=True)}
    return tensors


def reference_logprobs(reference, prompt: list[int], generated: list[int]) -> np.ndarray:
    """Float32 log-probabilities [len(generated), vocab_size] of the reference class at each generated token."""
    import torch

    if type(reference).__name__ == "Llama4ForConditionalGeneration":  # in transformers 5.24 it fails without images
        reference = reference.language_model
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + generated])).logits[0].float()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].numpy()


def decode(
    folder, path: Path, prompts, mesh=(1, 1, 1), dtype="float32", quantize=None, platform: str | None = None, **options
):
    """Loads a checkpoint and decodes prompts, lists of token ids: the tokens of each row, in order. Prompts are read in
    pieces of one length, since a second one takes another program; others are compiled for the demos in test_device.py
    and in test_rows.py."""
    checkpoint = folder.convert.open_checkpoint(path, extra_layer=options.get("draft") == "mtp")
    config = checkpoint.config
    mesh = folder.model.make_mesh(*mesh, devices=jax.devices(platform)[: int(np.prod(mesh))])
    weights = folder.convert.load(checkpoint, mesh, dtype, quantize)
    rows = [[] for _ in prompts]
    with mock.patch.object(folder.generate, "SHORT_PIECES", (folder.model.PREFILL_PIECE,)):
        for tokens in folder.generate.generate(weights, prompts, config, mesh, **options):
            for token in tokens:
                rows[token.row].append(token)
    return rows


def assert_matches(reference, prompts, rows, atol: float = 1e-3) -> None:
    """Every token is the reference's greedy one, and its log-probability at most `atol` away."""
    for prompt, row in zip(prompts, rows, strict=True):
        ids = [token.id for token in row]
        wanted = reference_logprobs(reference, prompt, ids)
        assert ids == wanted.argmax(-1).tolist()
        difference = np.abs(wanted.max(-1) - [token.logprob for token in row]).max()
        print(f"largest difference {difference:.1e}")  # README.md states the largest of these
        assert difference <= atol, f"a log-probability differs by {difference:.1e}"


def run_here(module, *arguments: str) -> int:
    """Runs main() of a benchmark in this process: its exit status. The modules of a folder do not stay: those of all
    folders have the same names."""
    path = [*sys.path]
    with mock.patch.object(sys, "argv", [module.__file__, *map(str, arguments)]):
        try:
            module.run(module.main)
        except SystemExit as stop:
            return stop.code
        finally:
            sys.path[:] = path
            for name in MODULES:
                sys.modules.pop(name, None)
    return 0


def environment_of_users(**changes: str) -> dict[str, str]:
    """The environment for a program as its users run it: as many devices as there are, all optimizations, nothing of
    the tests'."""
    dropped = ["JAX_NUM_CPU_DEVICES", "JAX_DISABLE_MOST_OPTIMIZATIONS", "OMP_NUM_THREADS"]
    dropped += ["PYTEST_XDIST_WORKER", "TESTS_MARKED", "TESTS_BEGAN"]
    return {name: value for name, value in os.environ.items() if name not in dropped} | changes
