"""convert.py: what it writes, that it streams, resumes and accounts for every tensor; and what load refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import torch
from helpers import ROOT, assert_matches, decode, import_folder, save_random
from safetensors.torch import load_file, save_file
from test_parity import CASES, llama, random_prompts

llama3 = import_folder("llama3")
CONVERT = ROOT / "llama3" / "convert.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    return path, save_random(path, *llama()[1:], max_shard_size="100KB")


SOURCES = ["glm 0414", "llama 4 scout, nested", "deepseek v3"]


@pytest.fixture(scope="module", params=SOURCES)
def of_every_folder(request, tmp_path_factory):
    """The modules, a checkpoint and its tensors that the model uses."""
    modules, *reference = CASES[request.param]
    path = tmp_path_factory.mktemp("source")
    save_random(path, *reference, max_shard_size="100KB")
    used = {
        name: tensor for name, tensor in load_all(path).items() if "vision" not in name and "multi_modal" not in name
    }
    return modules, path, used


def files(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def load_all(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_float32_is_lossless(of_every_folder, tmp_path):
    """Same tensors under the same names."""
    modules, path, tensors = of_every_folder
    modules.convert.convert(path, tmp_path / "out", "float32")
    converted = load_all(tmp_path / "out")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


def test_paths_and_dtypes_in_any_form(checkpoint):
    """A Path or a text, jax's or numpy's type or its name."""
    find, read = llama3.convert.find_checkpoint, llama3.convert.open_checkpoint
    mesh = llama3.model.make_mesh(devices=jax.devices()[:1])
    wanted = llama3.convert.load(read(checkpoint[0]), mesh, "float32")
    for path, dtype in ((find(checkpoint[0]), jax.numpy.float32), (str(checkpoint[0]), np.dtype("float32"))):
        jax.tree.map(np.testing.assert_array_equal, llama3.convert.load(read(path), mesh, dtype), wanted)


def test_the_reference_class_reads_it(checkpoint, tmp_path):
    path, reference = checkpoint
    llama3.convert.convert(path, tmp_path / "out", "float32")
    again = type(reference).from_pretrained(tmp_path / "out")
    prompts = random_prompts(12)
    assert_matches(again, prompts, decode(llama3, tmp_path / "out", prompts, max_new_tokens=5))


@pytest.mark.sampled
def test_int8_is_what_loading_in_int8_gives(of_every_folder, tmp_path, monkeypatch):
    """Converted, and quantized while loading, are the same weights, on one device and on several."""
    modules, path, originals = of_every_folder
    monkeypatch.setattr(modules.convert, "SHARD_BYTES", 30_000)
    monkeypatch.setattr(modules.convert, "PIECE_BYTES", 5_000)
    modules.convert.convert(path, tmp_path / "out", "float32", "int8")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    tensors = load_all(tmp_path / "out")
    for name, original in originals.items():
        if original.ndim > 1 and "router" not in name and "mlp.gate." not in name:
            # Half a step of the scale, and the largest of each row exact.
            inputs = 1 if original.ndim == 3 else -1  # packed experts are [E, input, output]
            scale = tensors[f"{name}_scale"].unsqueeze(inputs)
            error = (tensors[name] * scale - original).abs()
            assert (error <= 0.51 * scale).all()
            assert (tensors[name].abs().amax(inputs) == 127).all()
        else:
            assert torch.equal(tensors[name], original)
    for shape in ((1, 1, 1), (2, 2, 2)):
        mesh = modules.model.make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
        converted, loaded = (
            modules.convert.load(modules.convert.open_checkpoint(folder), mesh, "float32", quantize)
            for folder, quantize in ((tmp_path / "out", None), (path, "int8"))
        )
        jax.tree.map(np.testing.assert_array_equal, converted, loaded)


@pytest.mark.sampled
@pytest.mark.parametrize("case", ["llama 3.2, tied", "glm, tied, a quarter turned, one kv head"])
def test_a_head_beside_tied_embeddings(case, tmp_path):
    """With numbers of its own it counts; if it is the same, it is left out; alone, it is the embedding too."""
    modules, *reference = CASES[case]
    reference = save_random(tmp_path, *reference)
    tensors, prompts = load_file(tmp_path / "model.safetensors"), random_prompts(5, 3)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    table = tensors.pop(embedding)
    for held in {"lm_head.weight": table}, {"lm_head.weight": table, embedding: table.clone()}:
        save_file(tensors | held, tmp_path / "model.safetensors")
        assert "lm_head.weight" in modules.convert.open_checkpoint(tmp_path).left_out
        assert_matches(reference, prompts, decode(modules, tmp_path, prompts, max_new_tokens=3))
    save_file(tensors | {"lm_head.weight": table.flip(0), embedding: table}, tmp_path / "model.safetensors")
    reference = type(reference).from_pretrained(tmp_path, dtype="float32")
    assert_matches(reference, prompts, decode(modules, tmp_path, prompts, max_new_tokens=3))
    modules.convert.convert(tmp_path, tmp_path / "out", "float32")
    assert_matches(reference, prompts, decode(modules, tmp_path / "out", prompts, max_new_tokens=3))


def test_killed_and_run_again(checkpoint, tmp_path, monkeypatch):
    """Killed at many moments, never loads as complete, and ends byte-identical to a conversion in one go."""
    path, _ = checkpoint
    monkeypatch.setattr(llama3.convert, "SHARD_BYTES", 60_000)
    llama3.convert.convert(path, tmp_path / "whole", "bfloat16", "int8")
    output = tmp_path / "killed"
    slow = (
        "import sys, time, runpy, os\n"
        f"sys.path.insert(0, {str(CONVERT.parent)!r})\n"
        "import convert\n"
        "convert.SHARD_BYTES, convert.PIECE_BYTES = 60_000, 3_000\n"
        "read, replace = convert.Stored.read, os.replace\n"
        "convert.Stored.read = lambda *a: (time.sleep(0.002), read(*a))[1]\n"
        "os.replace = lambda *a: (time.sleep(0.02), replace(*a))\n"
        "print('started', flush=True)\n"
        "convert.run(convert.main)\n"
    )
    command = [sys.executable, "-c", slow, "--model_path", path, "--output", output, "--quantize", "int8"]
    for attempt in range(6):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdout.readline()
        time.sleep(0.15 + 0.2 * attempt)
        process.send_signal(signal.SIGKILL)
        killed = process.wait() == -signal.SIGKILL
        if killed and not (output / "config.json").exists():
            with pytest.raises(llama3.model.InputError):
                llama3.convert.open_checkpoint(output)
        if not killed:
            break
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert files(output) == files(tmp_path / "whole")
    assert len(decode(llama3, output, [[1, 2]], max_new_tokens=3)[0]) == 3


def test_a_disk_that_is_full(checkpoint, tmp_path):
    """One line that names the place; nothing that loads; with room, the same command goes on. The limit of a file's
    size stands for the disk's."""
    path, _ = checkpoint
    output = tmp_path / "out"
    llama3.convert.convert(path, tmp_path / "whole", "float32")
    size = (tmp_path / "whole" / "model-00001-of-00001.safetensors").stat().st_size
    command = [sys.executable, CONVERT, "--model_path", path, "--output", output, "--dtype", "float32"]
    limited = ["bash", "-c", f'ulimit -f {size // 2048}; exec "$@"', "-", *command]
    full = subprocess.run(limited, capture_output=True, text=True)
    assert full.returncode == 2 and full.stderr.count("\n") == 1, full.stderr
    assert full.stderr.startswith(f"error: {output}: File too large; once that is mended")
    with pytest.raises(llama3.model.InputError, match=r"no config.json"):
        llama3.convert.open_checkpoint(output)
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert files(output) == files(tmp_path / "whole")
    command[command.index(output)] = "/proc/out"
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2, refused.stderr
    assert re.fullmatch("error: /proc/out: cannot be created .*; choose another --output\n", refused.stderr)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """A checkpoint of 1.3 GB in one file, a third of it one tensor, converts in under 400 MB above the interpreter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100_000, hidden_size=1024, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=8
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(tmp_path)
    save_file({name: torch.zeros(shape) + 0.5 for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    measure = (
        "import resource, sys, jax, numpy\n"
        f"sys.path.insert(0, {str(CONVERT.parent)!r})\n"
        "import convert\n"
        "convert.Scaled.rounded(numpy.ones((8, 8), 'float32'))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "convert.run(convert.main)\n"
        "print((peak() - before) / 1024)\n"
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 1.3e9
    for options in (["--quantize", "int8"],):
        command = [sys.executable, "-c", measure, "--model_path", tmp_path, "--output", tmp_path / options[1], *options]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        assert float(finished.stdout) < 400


def test_left_out_on_purpose_or_refused(checkpoint, tmp_path, capsys):
    path, reference = checkpoint
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for file in path.iterdir():
        if "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    names = {f"model.layers.0.self_attn.rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")}
    stray = tensors | {name: torch.ones(4) for name in names}
    save_file(stray, tmp_path / "model.safetensors")
    llama3.convert.convert(tmp_path, tmp_path / "out", "float32")
    assert "left out 3 tensors of the checkpoint: computed from config.json" in capsys.readouterr().err
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["left_out"].keys() == names
    assert load_all(tmp_path / "out").keys() == tensors.keys()

    bad = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    bad[7, 3] = float("nan")
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    for content, words in (
        (tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is not a tensor"),
        (missing, "model.norm.weight is missing"),
        (tensors | {"model.norm.weight": torch.ones(63)}, r"shape \[63\], and config.json asks for \[64\]"),
        (tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int32)}, "dtype I32"),
        (tensors | {"model.layers.1.mlp.up_proj.weight": bad}, "up_proj.weight has NaN"),
    ):
        save_file(content, tmp_path / "model.safetensors")
        with pytest.raises(llama3.model.InputError, match=words):
            llama3.convert.convert(tmp_path, tmp_path / "other", "float32")
        assert not (tmp_path / "other" / "config.json").exists()


def test_another_conversion_is_not_touched(checkpoint, tmp_path):
    path, _ = checkpoint
    llama3.convert.convert(path, tmp_path / "out", "float32")
    before = files(tmp_path / "out")
    llama3.convert.convert(path, tmp_path / "out", "float32")  # the same again is fine
    for output, dtype, words in (
        (tmp_path / "out", "bfloat16", "another checkpoint or with other options"),
        (path, "float32", "is the source"),
        (tmp_path, "float32", "is not empty"),
        (path / "config.json", "float32", "cannot be created .*; choose another --output"),
        (path / "config.json" / "out", "float32", "cannot be created .*; choose another --output"),
    ):
        with pytest.raises(llama3.model.InputError, match=words):
            llama3.convert.convert(path, output, dtype)
    assert files(tmp_path / "out") == before


def test_a_home_that_no_shell_put_there(checkpoint, tmp_path, monkeypatch):
    """bash leaves --flag=~/x as it is. A folder that is called ~ is a trap for whoever removes it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(shutil.copytree(checkpoint[0], tmp_path / "source"))
    monkeypatch.setattr(sys, "argv", ["convert.py", "--model_path=~/source", "--output=~/out"])
    llama3.convert.main()
    assert sorted(os.listdir(tmp_path)) == ["out", "source"] and "~" not in os.listdir()


def test_a_changed_source_and_a_second_conversion(checkpoint, tmp_path):
    """The same headers with other numbers are another checkpoint; two at once do not write one folder."""
    path, reference = checkpoint
    source = shutil.copytree(path, tmp_path / "source")
    output = tmp_path / "out"
    llama3.convert.convert(source, output, "float32")
    first = min(file.name for file in output.glob("model-*"))
    busy = pytest.raises(llama3.model.InputError, match="another conversion is writing here")
    with llama3.convert.claimed(output, source, first), busy:
        llama3.convert.convert(source, output, "float32")
    with torch.no_grad():
        reference.model.norm.weight *= 3
        reference.save_pretrained(source, max_shard_size="100KB")
        reference.model.norm.weight /= 3
    with pytest.raises(llama3.model.InputError, match="conversion of another checkpoint"):
        llama3.convert.convert(source, output, "float32")


def test_each_device_reads_its_own_slices(checkpoint, monkeypatch):
    """Loading on 8 devices reads every matrix once, and nothing twice but the kv heads that devices share."""
    path, reference = checkpoint
    read = []
    original = llama3.convert.Stored.read

    def counting(tensor, *index):
        rows = original(tensor, *index)
        read.append((tensor, rows.size))
        return rows

    monkeypatch.setattr(llama3.convert.Stored, "read", counting)
    mesh = llama3.model.make_mesh(1, 1, 8)
    stored = llama3.convert.open_checkpoint(path)
    llama3.convert.load(stored, mesh, "float32")
    for name, tensor in reference.state_dict().items():
        if tensor.ndim == 2:
            copies = 4 if "k_proj" in name or "v_proj" in name else 1  # 8 devices, 2 kv heads
            assert sum(size for other, size in read if other == stored.tensors[name]) == copies * tensor.numel()


def test_a_finished_shard_that_is_damaged_is_written_again(checkpoint, tmp_path):
    path, _ = checkpoint
    llama3.convert.convert(path, tmp_path / "out", "float32")
    before = files(tmp_path / "out")
    shard = min((tmp_path / "out").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    llama3.convert.convert(path, tmp_path / "out", "float32")
    assert files(tmp_path / "out") == before


def test_a_checkpoint_that_is_being_downloaded_is_not_taken_over(checkpoint, tmp_path):
    path, _ = checkpoint
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00001.safetensors.part").write_text("")
    with pytest.raises(llama3.model.InputError, match="is not empty"):
        llama3.convert.convert(path, tmp_path, "float32")
    assert (tmp_path / "config.json").read_text() == "{}"
