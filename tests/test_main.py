"""main.py from outside: the demo's golden text, JSON, streaming, a copied folder, and what bad input ends with."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, environment_of_users, import_folder, reference_logprobs, save_random
from safetensors.numpy import load_file, save_file
from shared import folders
from test_parity import llama, qwen_3_moe
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDERS = {name: import_folder(name) for name in folders()}
DEMO = ROOT / "llama3" / "demo"
GOLDEN = json.loads((ROOT / "tests" / "golden_demo.json").read_text())


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs a folder's main.py in this process: returns exit status, standard output, standard error. By default it sees
    one device, for which programs compile in half the time."""
    found = jax.devices()

    def call(*arguments, folder="llama3", devices=1):
        monkeypatch.setattr(jax, "devices", lambda *_: found[:devices])
        monkeypatch.setattr(sys, "argv", ["main.py", *map(str, arguments)])
        capsys.readouterr()  # what came before does not count
        status = 0
        try:
            FOLDERS[folder].convert.run(FOLDERS[folder].main.main)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def json_rows(text):
    lines = [json.loads(line) for line in text.splitlines()]
    return lines[:-1], lines[-1]["stats"]


@pytest.mark.sampled
@pytest.mark.parametrize("folder", ["llama3", "deepseek"])
def test_golden_text_of_a_folder_copied_alone(tmp_path, folder):
    """`python3 main.py` with no arguments, in a new process and far from the repository, and from another folder."""
    shutil.copytree(ROOT / folder, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, tmp_path / "copied" / "main.py"]
    finished = subprocess.run(command, cwd="/", env=environment_of_users(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "".join(f"> {prompt}\n{answer}\n" for prompt, answer in GOLDEN[folder].items())
    assert finished.stderr.splitlines()[-1].startswith("stats: {")


@pytest.mark.sampled
@pytest.mark.parametrize("folder", FOLDERS)
def test_model_py_alone(tmp_path, folder):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(ROOT / folder / "model.py", alone)
    subprocess.run([sys.executable, "-c", "import model"], cwd=alone, check=True)


@pytest.mark.sampled
@pytest.mark.parametrize("folder", ["llama4", "glm4_flash"])
def test_golden_text_in_int8_on_a_mesh(main, folder):
    options = ["--dp", "2", "--ep", "2", "--quantize", "int8", "--quantize_cache", "int8", "--dtype", "float16"]
    status, out, _ = main("--output", "json", *options, folder=folder, devices=8)
    rows, stats = json_rows(out)
    assert status == 0
    assert {row["prompt"]: row["text"] for row in rows} == GOLDEN[folder]
    assert math.prod(stats["mesh"].values()) == stats["devices"] == 8


def test_the_mesh_that_nobody_asked_for(main, monkeypatch):
    """Is the one that convert.py proposes, which on TPUs is not always tp alone."""
    proposed = FOLDERS["deepseek"].convert.mesh_shape
    monkeypatch.setattr(FOLDERS["deepseek"].main, "mesh_shape", lambda *args: proposed(*args[:3], 2, *args[4:]))
    _, out, _ = main("--output", "json", "--prompt", "Hello!", "--max_new_tokens", "2", folder="deepseek", devices=8)
    assert json_rows(out)[1]["mesh"] == {"dp": 1, "ep": 2, "tp": 4}


@pytest.mark.parametrize("folder", ["llama3", "glm4_flash"])
def test_json(main, tmp_path, folder):
    """Every field of the contract; tokens and log-probabilities against the reference class and its tokenizer."""
    (tmp_path / "prompts").write_text("What is the capital of Peru?\n\nHello!\r\nWhat is 5 plus 9?", newline="")
    options = ["--output", "json", "--logprobs", "--dtype", "float32"]
    status, out, _ = main("--prompts_file", tmp_path / "prompts", *options, folder=folder, devices=8)
    rows, stats = json_rows(out)
    assert status == 0
    demo = ROOT / folder / "demo"
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(demo).float(), AutoTokenizer.from_pretrained(demo)
    assert [row["prompt"] for row in rows] == ["What is the capital of Peru?", "Hello!", "What is 5 plus 9?"]
    for row in rows:
        message = [{"role": "user", "content": row["prompt"]}]
        assert row["prompt_tokens"] == tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        wanted = reference_logprobs(reference, row["prompt_tokens"], row["tokens"])
        assert row["tokens"] == wanted.argmax(-1).tolist()
        np.testing.assert_allclose(row["logprobs"], wanted.max(-1), atol=1e-3)
        assert row["tokens"][-1] in reference.generation_config.eos_token_id and row["finish_reason"] == "stop"
        assert row["text"] == tokenizer.decode(row["tokens"][:-1])
    assert (
        stats["model_type"] == reference.config.model_type
        and stats["platform"] == "cpu"
        and stats["bandwidth_utilization"] is None
    )
    positive = ["load_s", "compile_s", "prefill_s", "prefill_tokens_per_s", "decode_steps_per_s", "decode_tokens_per_s"]
    assert all(stats[name] > 0 for name in [*positive, "step_bytes", "bandwidth_gb_per_s", "peak_memory_gb"])
    tokens_a_step = sum(len(row["tokens"]) - 1 for row in rows) / max(len(row["tokens"]) - 1 for row in rows)
    assert stats["decode_tokens_per_s"] / stats["decode_steps_per_s"] == pytest.approx(tokens_a_step)
    assert stats["rows_busy"] == pytest.approx(tokens_a_step / len(rows)) and stats["tokens_per_step"] == 1
    assert stats["drafts_accepted"] is None and "tokens_per_step" not in rows[0]
    assert stats["bandwidth_gb_per_s"] == pytest.approx(stats["step_bytes"] * stats["decode_steps_per_s"] / 1e9)


def test_step_bytes(main):
    """By hand, for a tied float32 model on one device of each of eight data-parallel rows."""
    options = ["--output", "json", "--dtype", "float32", "--dp", "8", "--max_new_tokens", "5"]
    _, out, _ = main(*options, "--prompt", "Hello!", devices=8)
    (row,), stats = json_rows(out)
    weights = sum(tensor.size for tensor in load_file(DEMO / "model.safetensors").values()) * 4 * 8
    config = json.loads((DEMO / "config.json").read_text())
    slot = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    mean_length = len(row["prompt_tokens"]) + 5 / 2
    assert stats["step_bytes"] == int(weights + slot * mean_length)


def test_raw_and_lengths(main):
    """--raw adds the tokenizer's own special tokens and nothing else; max_new_tokens and max_seq_len end a row."""
    text = "The capital of France is"
    _, out, _ = main("--prompt", text, "--raw", "--output", "json", "--max_new_tokens", "3")
    (row,), _ = json_rows(out)
    assert row["prompt_tokens"] == AutoTokenizer.from_pretrained(DEMO)(text)["input_ids"]
    assert len(row["tokens"]) == 3 and row["finish_reason"] == "length" and "logprobs" not in row
    length = len(row["prompt_tokens"])
    _, out, _ = main("--prompt", text, "--raw", "--output", "json", "--max_seq_len", length + 1)
    (row,), _ = json_rows(out)
    assert len(row["tokens"]) == 2 and row["finish_reason"] == "length"


def test_one_prompt_of_many_lines(main, monkeypatch, tmp_path):
    """From a file, through a pipe and on the command line, with a megabyte of it refused like any long prompt."""
    text = "What is the capital\r\nof France?\n\n\tAnd é?"
    (tmp_path / "prompt").write_bytes(f"\ufeff{text}\n".encode())
    flags = ["--output", "json", "--max_new_tokens", "4"]
    (wanted,), _ = json_rows(main(*flags, "--prompt", text)[1])
    (row,), _ = json_rows(main(*flags, "--prompt_file", tmp_path / "prompt")[1])
    assert row == wanted and row["prompt"] == text
    command = [sys.executable, DEMO.parent / "main.py", *flags, "--prompt", "-"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "LC_ALL": "C"}
    found = subprocess.run(command, input=f"{text}\n".encode(), env=environment, capture_output=True)
    assert json.loads(found.stdout.splitlines()[0]) == wanted, found.stderr
    (tmp_path / "prompt").write_text("word " * 200_000)
    assert_refused(main("--prompt_file", tmp_path / "prompt"), "prompt 1 has 600010 tokens")


def test_a_system_message_and_what_a_template_takes(main, tmp_path):
    """Both reach the template, which says in its own words what it does not take."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    flags = ["--model_path", tmp_path, "--prompt", "Hello!", "--output", "json"]
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood if mood else 'none' }}>"
    template(text)(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for more, wanted in (
        ([], "[user]Hello!none>"),
        (["--system", "Be brief."], "[system]Be brief.[user]Hello!none>"),
        (["--system", ""], "[system][user]Hello!none>"),  # in the place of a template's own
        (["--template_args", '{"mood": "glad"}'], "[user]Hello!glad>"),
    ):
        (row,), _ = json_rows(main(*flags, *more)[1])
        assert row["prompt_tokens"] == tokenizer(wanted, add_special_tokens=False)["input_ids"]
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('I take no system role') }}{% endif %}x"
    template(refusing)(tmp_path)
    for more in flags[2:], ["--chat"]:
        result = main(*flags[:2], *more, "--system", "Be brief.")
        assert_refused(result, "I take no system role")
        assert "--raw" not in result[2]


LISTS = {  # templates that leave out a content that is text
    "Llama Guard": "{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text | trim }}{% endfor %}",
    "SmolVLM": "{{ ':' if m.content[0]['type'] == 'image' else ': ' }}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", LISTS)
def test_a_template_that_takes_lists_alone(main, tmp_path, name):
    """As those of Llama Guard and SmolVLM. A word that its own text has is no exception."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    template("Is it safe?{% for m in messages %}[{{ m.role }}]" + LISTS[name] + "{% endfor %}>")(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    flags = ["--model_path", tmp_path, "--output", "json", "--max_new_tokens", "1", "--system", "Be brief."]
    for prompt in "How tall is he?", " safe ":
        (row,), _ = json_rows(main(*flags, "--prompt", prompt)[1])
        contents = [{"type": "text", "text": "Be brief."}], [{"type": "text", "text": prompt}]
        messages = [{"role": role, "content": x} for role, x in zip(("system", "user"), contents, strict=True)]
        wanted = tokenizer.apply_chat_template(messages, tokenize=False)
        assert row["prompt_tokens"] == tokenizer(wanted, add_special_tokens=False)["input_ids"]


def test_files_that_an_editor_on_windows_saved(main, tmp_path):
    """With a mark of their encoding and its line ends: the tokens are the same, and stop tokens are read."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    for name in "config.json", "generation_config.json", "chat_template.jinja":
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (DEMO / name).read_bytes().replace(b"\n", b"\r\n"))
    flags = ["--prompt", "Hello!", "--output", "json"]
    (row,), _ = json_rows(main("--model_path", tmp_path, *flags)[1])
    assert row == json_rows(main(*flags)[1])[0][0] and row["finish_reason"] == "stop"


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_folder_whose_name_is_not_in_utf_8(main, tmp_path):
    """As a ZIP file of Windows leaves one on Linux."""
    folder = tmp_path / os.fsdecode("modèle [1] $x".encode("latin-1"))
    shutil.copytree(DEMO, folder)
    assert main("--model_path", folder, "--prompt", "What is 3 plus 4?")[1] == "3 plus 4 is 7.\n"


def test_sampling_that_a_release_asks_for(main, tmp_path):
    """A note says so, unless there is sampling."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    flags = ["--model_path", tmp_path, "--prompt", "Hello!", "--max_new_tokens", "1"]
    assert "generation_config.json asks for --temperature 0.6 --top_k 20;" in main(*flags)[2]
    assert "asks for" not in main(*flags, "--temperature", "0.6")[2]
    edit_json("generation_config.json", temperature=None, top_k=None)(tmp_path)
    assert "generation_config.json asks for --temperature 1.0;" in main(*flags)[2]
    edit_json("generation_config.json", do_sample=False)(tmp_path)
    assert "asks for" not in main(*flags)[2]
    for flag in ("--top_k", "--top_p"):  # a user who asks for half of it gets a note too
        assert "--top_k and --top_p need a --temperature" in main(*flags, flag, "0.5" if flag == "--top_p" else "5")[2]
    edit_json("generation_config.json", do_sample=False, repetition_penalty=1.05, min_p=0.0)(tmp_path)
    assert re.findall("for a (.*), which", main(*flags)[2]) == ["repetition_penalty of 1.05"]
    edit_json("generation_config.json", repetition_penalty=1.0, min_p=0.05)(tmp_path)
    assert re.findall("for a (.*), which", main(*flags)[2]) == ["min_p of 0.05"]


def test_a_raw_prompt_with_its_own_bos(main):
    """It gets no second one, and a note."""
    (wanted,), _ = json_rows(main("--prompt", "Hello", "--raw", "--output", "json")[1])
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert wanted["prompt_tokens"][0] == tokenizer.bos_token_id
    _, out, err = main("--prompt", f"{tokenizer.bos_token}Hello", "--raw", "--output", "json")
    assert json_rows(out)[0][0]["prompt_tokens"] == wanted["prompt_tokens"] and "gets no other" in err


def test_a_raw_prompt_behind_which_the_tokenizer_puts_an_end(main, tmp_path):
    """As one that was saved after training. An end that somebody wrote stays."""
    prompts, flags = ("The capital", "The capital<|eot_id|>"), ("--raw", "--output", "json", "--max_new_tokens", "4")
    wanted, _ = json_rows(main("--prompt", *prompts, *flags)[1])
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    bos, eos = special = [(name, tokenizer.token_to_id(name)) for name in ("<|begin_of_text|>", "<|eot_id|>")]
    assert wanted[1]["prompt_tokens"] == [*wanted[0]["prompt_tokens"], eos[1]]
    shutil.copytree(DEMO, tmp_path / "checkpoint")
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos[0]} $A {eos[0]}", special_tokens=special)
    tokenizer.save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    _, out, err = main("--model_path", tmp_path / "checkpoint", "--prompt", prompts[0], *flags)
    assert json_rows(out)[0] == wanted[:1] and "prompt 1 is continued without the <|eot_id|>" in err


@pytest.mark.slow
def test_which_answers_were_cut(main):
    flags = ["--prompt", "Hello!", "What are the days of the week?", "--max_new_tokens"]
    assert "note: 2 of 2 answers ended at --max_new_tokens 3\n" in main(*flags, "3")[2]
    assert "note: 1 of 2 answers ended at --max_new_tokens 60\n" in main(*flags, "60")[2]
    assert "note: the answer ended at --max_seq_len 30\n" in main("--prompt", "a" * 20, "--max_seq_len", "30")[2]
    err = main(*flags, "14", "--max_seq_len", "30")[2]  # of the second there is room for fewer than 14
    assert "note: 1 of 2 answers ended at --max_new_tokens 14\n" in err
    assert "note: 1 of 2 answers ended at --max_seq_len 30\n" in err
    assert "note" not in main("--prompt", "Hello!")[2]


def test_text_as_it_comes(main, monkeypatch):
    """One prompt prints the answer alone; words appear before the answer is complete."""
    writes = []

    class Recorder(io.StringIO):
        def write(self, text):
            writes.append(text)
            return super().write(text)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Recorder())
        main("--prompt", "What are the days of the week?")
    assert "".join(writes) == GOLDEN["llama3"]["What are the days of the week?"] + "\n"
    assert len(writes) > 10


def test_stop_tokens_and_no_chat_template(main, tmp_path):
    """Those of generation_config.json, of config.json and of the tokenizer together; without a template a note."""
    folder = FOLDERS["llama3"]
    save_random(tmp_path, *llama()[1:])
    arguments = ["--model_path", tmp_path, "--prompt", "abc", "--output", "json", "--max_new_tokens", "12"]
    _, out, err = main(*arguments)
    assert "no chat template" in err
    (row,), _ = json_rows(out)
    free = row["tokens"]
    assert len(free) == 12

    def edit(name, **changes):
        file = tmp_path / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))

    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    names = {i: name for name, i in tokenizer["model"]["vocab"].items()}
    for config_ids, generation_ids, of_tokenizer in (
        (free[3], None, None),
        ([330, free[4]], None, None),
        (free[5], free[3], None),
        (free[3], [free[6], 330], None),
        (None, None, free[3]),
        (free[5], [free[4], 330], free[3]),
    ):
        edit("config.json", eos_token_id=config_ids)
        edit("generation_config.json", eos_token_id=generation_ids)
        edit("tokenizer_config.json", eos_token=names[of_tokenizer] if of_tokenizer else "</s>")
        checkpoint = folder.convert.open_checkpoint(tmp_path)
        stops = folder.main.read_stop_tokens(checkpoint, folder.main.read_tokenizer(checkpoint))
        assert set(stops) == {*np.hstack([config_ids or [], generation_ids or [], of_tokenizer or []])}
    (row,), _ = json_rows(main(*arguments)[1])
    end = min(free.index(token) for token in stops if token in free)
    assert row["tokens"] == free[: end + 1] and row["finish_reason"] == "stop"


def test_the_end_that_only_the_template_names(main, tmp_path):
    """As in releases whose three files name the end of a text, and not that of a turn."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        edit_json(name, eos_token_id=508)(tmp_path)
    edit_json("tokenizer_config.json", eos_token="<|end_of_text|>")(tmp_path)
    flags = ["--prompt", "What is 3 plus 4?", "--output", "json", "--max_new_tokens", "40"]
    (row,), _ = json_rows(main("--model_path", tmp_path, *flags)[1])
    assert (row["text"], row["finish_reason"]) == ("3 plus 4 is 7.", "stop")
    (row,), _ = json_rows(main(*flags)[1])
    assert row["text"] == "3 plus 4 is 7."


@pytest.mark.parametrize(("end", "stops"), [("\n", []), ("\n<|end_of_text|>\n", ["<|end_of_text|>"])])
def test_line_ends_behind_an_answer(end, stops):
    """They end no answer, also if they are tokens, as in Gemma's vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens("\n")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    checkpoint = SimpleNamespace(raw_config={}, generation_config={})
    found = FOLDERS["llama3"].main.read_stop_tokens(checkpoint, tokenizer)
    assert tokenizer.convert_ids_to_tokens(found) == [tokenizer.eos_token, *stops]


def test_a_beginning_that_only_the_settings_name(main, tmp_path):
    """Gemma 4's and DeepSeek's tokenizer.json adds no BOS to text. A template writes it itself."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    edit_json("tokenizer.json", post_processor=None)(tmp_path)
    edit_json("tokenizer_config.json", add_bos_token=True)(tmp_path)
    flags = ["--model_path", tmp_path, "--output", "json", "--max_new_tokens", "1", "--prompt"]
    note = "note: the tokenizer puts no <|begin_of_text|> before a prompt"
    for prompt, more, has_note in (
        ("Hi", ["--raw"], True),
        ("<|begin_of_text|>Hi", ["--raw"], False),
        ("Hi", [], False),
    ):
        _, out, err = main(*flags, prompt, *more)
        (row,), _ = json_rows(out)
        assert (note in err) == has_note == (row["prompt_tokens"][0] != 507)


def test_prompts_one_by_one(main):
    """A flag that is given twice has the prompts of both."""
    _, out, _ = main("--prompt", "Hello!", "--prompt", "What is 3 plus 4?", "Hello!", "--max_new_tokens", "1")
    assert [line for line in out.splitlines() if line[:1] == ">"] == ["> Hello!", "> What is 3 plus 4?", "> Hello!"]


def test_rows_that_end_at_once(main, tmp_path):
    """The first token of each is a stop token: steps of decoding are started, and none gives a token."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    flags = ["--model_path", tmp_path, "--prompt", "Hello!", "Hello!", "--batch_size", "1", "--output", "json"]
    first = json_rows(main(*flags)[1])[0][0]["tokens"][0]
    edit_json("generation_config.json", eos_token_id=first)(tmp_path)
    status, out, err = main(*flags)
    rows, stats = json_rows(out)
    assert status == 0 and [row["tokens"] for row in rows] == [[first]] * 2, err
    assert stats["tokens_per_step"] is None


def test_profile(main, tmp_path):
    status, _, _ = main("--prompt", "Hello!", "--profile", tmp_path / "trace")
    assert status == 0 and list((tmp_path / "trace").rglob("*.xplane.pb"))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: status 2, one line that names the thing, nothing on standard output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model_path", "/no/such/folder", "--prompt", "a"], "/no/such/folder: no such folder"),
        (["--model_path", "no_such_folder", "--prompt", "a"], "no_such_folder: no such folder"),
        (["--model_path", "nobody/nothing", "--prompt", "a"], "nobody/nothing: no such folder, and the hub"),
        (["--prompt", "a", "--prompts_file", "b"], "not allowed with"),
        (["--prompts_file", "/no/file"], "/no/file"),
        (["--prompts_file", "/dev/null"], "no prompt"),
        (["--prompts_file", "/bin/true"], "/bin/true"),
        (["--prompts_file", "/dev/zero"], "/dev/zero: has more than"),
        (["--prompt_file", "/dev/null"], "/dev/null: has no prompt"),
        (["--prompt_file", "/no/file", "--prompt", "a"], "not allowed with"),
        (["--prompt", "-5+3"], "one with a - first as --prompt=VALUE"),
        (["--prompt", "a", "-5+3"], "-5+3; one with a - first as --flag=VALUE"),
        (["--prompt", "-", "x"], "error: --prompt - stands alone"),
        (["--prompt", "x", "-"], "error: --prompt - stands alone"),
        (["--model_path", str(DEMO / "config.json")], "config.json: is a file; give a folder"),
        (["--system", "a", "--raw"], "--raw leaves out"),
        (["--template_args", "[1]"], "--template_args: '[1]' is not a JSON object"),
        (["--template_args", "{"], "is not a JSON object"),
        (["--template_args", '{"tokenize": 1}', "--prompt", "a"], "multiple values"),
        (["--logprobs"], "--logprobs is for JSON rows: add --output json"),
        (["--prompt", "Hello!", "a\udcffb"], "prompt 2 cannot be encoded"),
        (["--system", "caf\udce9", "--prompt", "Hello!"], "--system, is not in UTF-8"),
        (["--prompt", "Hello!", "Ho", "--max_new_tokens", "1000000000"], "no memory for a cache"),
        (["--prompt", "a" * 10**6], "prompt 1 has 1000010 tokens"),
        (["--prompt", "", "--max_seq_len", "4"], "max_seq_len 4"),
        (["--prompt", "Hello!", "--max_seq_len", "5"], "max_seq_len 5"),
        (["--max_new_tokens", "0"], "--max_new_tokens"),
        (["--max_seq_len", "-3"], "--max_seq_len"),
        (["--dtype", "int4"], "--dtype"),
        (["--draft", "mtp"], "--draft"),
        (["--draft_tokens", "8"], "--draft_tokens"),
        (["--quantize", "int3"], "--quantize"),
        (["--quantize_cache", "fp8"], "--quantize_cache"),
        (["--tp", "3"], "devices"),
        (["--dp", "3"], "devices"),
        (["--dp", "16"], "devices"),
        (["--tp", "0"], "--tp"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "inf"], "--temperature"),
        (["--temperature", "1e-50"], "--temperature"),
        (["--top_k", "-1"], "--top_k"),
        (["--top_p", "0"], "--top_p"),
        (["--top_p", "1.01"], "--top_p"),
        (["--seed", "-1"], "--seed"),
        (["--output", "yaml"], "--output"),
        (["--coordinator", "localhost:1"], "go together"),
        (["--coordinator", "here", "--num_processes", "2", "--process_id", "0"], "HOST:PORT"),
        (["--coordinator", ":8476", "--num_processes", "2", "--process_id", "0"], "HOST:PORT"),
        (["--coordinator", "a:1", "--num_processes", "2", "--process_id", "2"], "--process_id 2"),
        (["--coordinator", "a:99999", "--num_processes", "2", "--process_id", "0"], "HOST:PORT"),
        (["--model_path", "", "--prompt", "a"], "--model_path"),
        (["--model_path", "a" * 5000, "--prompt", "a"], "File name too long"),
        (["--prompt", "Hello!", "--max_new_tokens", str(10**9)], "lower max_new_tokens"),
        (["--prompt", "Hello!", "--max_new_tokens", str(10**12)], "--max_new_tokens"),
        (["--profile", "/dev/null/trace"], "/dev/null/trace"),
        (["--no_such_flag"], "--no_such_flag"),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_bad_arguments(main, arguments, words):
    assert_refused(main(*arguments, devices=8), words)


def assert_refused(result, words):
    status, out, err = result
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def edit_json(name, **changes):
    def edit(folder):
        file = folder / name
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))

    return edit


def edit_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def as_trainer_leaves_it(folder):
    """After training with DeepSpeed's ZeRO-3: no weights, and states in files that torch pickled."""
    (folder / "model.safetensors").rename(folder / "rng_state_0.pth")
    for name in ("scheduler.pt", "training_args.bin", "zero_to_fp32.py"):
        (folder / name).touch()


def truncate(name, keep):
    def edit(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep) if keep < 1 else len(data) - 1])

    return edit


HERE = {"model.embed_tokens.weight": "model.safetensors"}


def index_to(weight_map):
    def edit(folder):
        content = {"weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return edit


def with_a_token_of_which_no_embedding_was_saved(folder):
    edit_json("tokenizer_config.json", added_tokens_decoder={"512": {"content": "<|im_start|>"}})(folder)
    template("<|im_start|>{{ messages[0].content }}")(folder)


def template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (truncate("config.json", 0.5), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (edit_json("config.json", model_type="falcon"), "'falcon' is not supported"),
        (edit_json("config.json", model_type="kimi_k2"), "only llama, mistral, ministral; use the folder deepseek"),
        (edit_json("config.json", model_type="absent"), "model_type None"),
        (edit_json("config.json", text_config=[1]), "text_config must be a table"),
        (edit_json("config.json", model_type=["qwen3"]), "model_type ['qwen3'] is not"),
        (edit_json("config.json", vocab_size="absent"), "vocab_size is missing"),
        (edit_json("config.json", num_hidden_layers=-1), "num_hidden_layers"),
        (edit_json("config.json", num_hidden_layers="3"), "num_hidden_layers"),
        (edit_json("config.json", rms_norm_eps=float("nan")), "rms_norm_eps"),
        (edit_json("config.json", num_hidden_layers=4), "layers.3."),
        (edit_json("config.json", num_hidden_layers=2), "layers.2."),
        (edit_json("config.json", num_key_value_heads=3), "num_key_value_heads 3"),
        (edit_json("config.json", hidden_size=256), "config.json asks for"),
        (edit_json("config.json", vocab_size=511), "[512, 128]"),
        (edit_json("config.json", tie_word_embeddings=False), "missing (if the embedding is the head, set tie_word"),
        (edit_json("config.json", hidden_act="gelu"), "'gelu'"),
        (edit_json("config.json", rope_parameters={"rope_type": "longrope", "factor": 4.0}), "'longrope'"),
        (
            edit_json("config.json", rope_parameters={"rope_type": "llama3", "factor": 4.0}),
            "low_freq_factor is missing",
        ),
        (edit_json("config.json", rope_parameters=[1]), "rope"),
        (edit_json("config.json", rope_parameters={"rope_theta": 10**400}), "rope_theta"),
        (edit_json("config.json", num_hidden_layers=10**8), "num_hidden_layers cannot be"),
        (edit_json("config.json", num_hidden_layers=10**4), "tensors cannot be"),
        (edit_json("config.json", quantization_config=[1]), "quantization"),
        (edit_json("config.json", quantization_config={"quant_method": "eetq"}), "eetq"),
        (edit_json("generation_config.json", eos_token_id="x"), "eos_token_id"),
        (edit_json("generation_config.json", eos_token_id=True), "eos_token_id"),
        (edit_json("generation_config.json", eos_token_id=2**31), "eos_token_id"),
        (truncate("generation_config.json", 0.5), "generation_config.json"),
        (truncate("model.safetensors", 0.7), "truncated or damaged"),
        (truncate("model.safetensors", 1), "truncated or damaged"),
        (truncate("model.safetensors", 0), "truncated or damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "truncated or damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "give what transformers' save_pretrained wrote"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "x.safetensors"), "rename a single file"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "consolidated.safetensors"),
            "as Meta or Mistral",
        ),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "never read"),
        (as_trainer_leaves_it, "zero_to_fp32.py, or accelerate merge-weights, joins them"),
        (edit_tensors(lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
        (edit_tensors(lambda t: t.update({"model.norm.weight": np.ones(5, np.float32)})), "shape [5]"),
        (edit_tensors(lambda t: t.update({"model.norm.weight": np.ones(0, np.float32)})), "zero_to_fp32.py, or for"),
        (edit_tensors(lambda t: t.update({"model.norm.bias": np.ones(5, np.float32)})), "model.norm.bias is not"),
        (edit_tensors(lambda t: t.update({"model.norm.weight": np.ones(128, np.int64)})), "I64"),
        (
            edit_tensors(lambda t: t["model.norm.weight"].fill(np.nan)),
            "model.norm.weight has numbers that are not finite",
        ),
        (
            edit_tensors(lambda t: t["model.layers.1.self_attn.k_proj.weight"].fill(np.inf)),
            "error: model.layers.1.self_attn.k_proj.weight has",
        ),
        (edit_tensors(lambda t: t.update({"model.\x1b[31mred": np.ones(5, np.float32)})), "model.?[31mred is not a"),
        (index_to(HERE | {"model.norm.weight": "other.safetensors"}), "other.safetensors: missing"),
        (index_to(HERE | {"model.norm.weight": "../demo/model.safetensors"}), "is not in this folder"),
        (index_to(HERE | {"model.norm.weight": str(DEMO / "model.safetensors")}), "is not in this folder"),
        (index_to([1]), "weight_map"),
        (index_to(HERE | {"model.norm.weight": "a\nb.safetensors"}), "missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (truncate("tokenizer.json", 0.5), "download it again"),
        (lambda folder: (folder / "tokenizer.json").write_text("version https://git-lfs"), "run git lfs pull"),
        (with_a_token_of_which_no_embedding_was_saved, "prompt 1 has token 512, outside the vocabulary of 512"),
        (template("{% if %}"), "--raw"),
        (template("{{ raise_exception('no') }}"), "--raw"),
        (template("{{ cycler.__init__.__globals__ }}"), "is unsafe"),
        (template("{% include '/etc/passwd' %}"), "no loader"),
        (template("{{ 'a' * 10000000000000 }}"), "MemoryError"),
    ],
)
def test_bad_checkpoints(main, tmp_path, edit, words):
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder)
    edit(folder)
    assert_refused(main("--model_path", folder, "--prompt", "Hello!"), words)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_PLATFORMS": "cuda"}, "see JAX_PLATFORMS; accelerators need a plugin"),
        ({"JAX_NUM_CPU_DEVICES": "0"}, "see JAX_PLATFORMS"),
    ],
)
def test_no_devices(variables, words):
    command = [sys.executable, ROOT / "llama3" / "main.py"]
    finished = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    line = finished.stderr.splitlines()[-1]
    assert finished.returncode == 2 and line.startswith("error: jax finds no devices") and words in line, line
    assert "Traceback" not in finished.stderr


def test_as_other_programs_want_python_and_jax(tmp_path):
    """Without docstrings, with a path that lacks the program's folder, with 64-bit numbers, with a list of platforms of
    which one alone is there."""
    variables = {"JAX_ENABLE_X64": "1", "JAX_DISABLE_JIT": "1", "JAX_PLATFORMS": "cuda,cpu"}
    command = [sys.executable, "-OO", "-P", ROOT / "llama3" / "main.py", "--prompt", "What is 3 plus 4?"]
    finished = subprocess.run(command, env=environment_of_users(**variables), capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, "3 plus 4 is 7.\n"), finished.stderr
    assert "CPU cores: jax found no GPU or TPU" in finished.stderr


def test_a_broken_torch(tmp_path):
    """It is not imported: an intact one would take seconds."""
    (tmp_path / "torch.py").write_text("raise OSError('libcurand.so.10: no such file')")
    command = [sys.executable, ROOT / "llama3" / "main.py", "--prompt", "What is 3 plus 4?"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_NUM_CPU_DEVICES": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, "3 plus 4 is 7.\n"), finished.stderr


@pytest.mark.parametrize("text", ["", "raise OSError('libcurand.so.10: no\\nsuch file')"])
def test_a_transformers_that_is_too_old(tmp_path, text):
    """Or that cannot be imported."""
    (tmp_path / "transformers.py").write_text(text)
    command = [sys.executable, ROOT / "llama3" / "main.py"]
    finished = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert finished.returncode != 0 and finished.stderr.startswith("error: transformers 5.23 or newer cannot be")
    assert finished.stderr.count("\n") == 1


def test_more_than_memory_holds(main, monkeypatch):
    """Refused before anything is loaded; and what runs out of memory later is one line too."""
    convert = FOLDERS["llama3"].convert
    with monkeypatch.context() as patch:
        patch.setattr(convert, "memory_of", lambda mesh: 1e6)
        patch.setattr(convert, "block_of", None)
        assert_refused(main("--prompt", "Hello!"), "the weights take 0.0 GB and the devices have 0.0")
    for allocate in (np.empty, jnp.empty):
        with monkeypatch.context() as patch:
            patch.setattr(FOLDERS["llama3"].main, "generate", lambda *_, f=allocate, **__: f(2**50, np.uint8))
            assert_refused(main("--prompt", "Hello!"), "out of memory")


def test_prompts_with_special_tokens_and_nul(main, tmp_path):
    """They are encoded as transformers encodes them."""
    text = "a\0b <|begin_of_text|><|eot_id|> <|no_token|> \ufffd\ue000"
    (tmp_path / "prompts").write_text(text)
    status, out, _ = main("--prompts_file", tmp_path / "prompts", "--raw", "--output", "json", "--max_new_tokens", "2")
    assert status == 0
    assert json_rows(out)[0][0]["prompt_tokens"] == AutoTokenizer.from_pretrained(DEMO)(text)["input_ids"]


def test_interrupted_while_importing():
    """It ends at once, as any program does that leaves the signal to the system."""
    command = ["env", "--default-signal=INT", sys.executable, ROOT / "llama3" / "main.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


@pytest.mark.sampled
@pytest.mark.parametrize("output", ["json", "text"])
def test_interrupted(main, tmp_path, output):
    """What was finished is printed, though a row before it never will be; status 130 and one line."""
    save_random(tmp_path, *llama()[1:])
    arguments = ["--model_path", tmp_path, "--dtype", "float32", "--prompt", "ab", "cde", "ab"]
    rows, _ = json_rows(main(*arguments, "--output", "json", "--max_new_tokens", "300")[1])
    stop = next(token for token in rows[0]["tokens"][3:] if token not in rows[1]["tokens"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    # A shell has its background jobs ignore SIGINT, and so what they start.
    command = ["env", "--default-signal=INT", sys.executable, ROOT / "llama3" / "main.py", *arguments]
    command += ["--output", output]
    command += ["--max_new_tokens", "100000", "--no_compilation_cache"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, bufsize=0, **pipes) as process:  # no line is read ahead of its turn
        first = b""
        for line in process.stdout:  # the first row ends in the same step as the last
            first += line
            if output == "json" or line == b"> cde\n":
                break
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith(b"error: interrupted\n") and b"Traceback" not in err
    if output == "json":
        assert json.loads(first)["tokens"][-1] == stop and rest == first
    else:
        assert (first + rest).endswith(b"\n" + first.removesuffix(b"> cde\n"))


def test_a_mesh_that_does_not_divide_the_experts(main, tmp_path):
    _, model_class, config = qwen_3_moe(num_experts=6)
    save_random(tmp_path, model_class, config)
    arguments = ["--model_path", tmp_path, "--prompt", "a", "--max_new_tokens", "2"]
    assert_refused(main(*arguments, "--ep", "4", folder="qwen3", devices=8), "ep = 4 does not divide the 6 experts")
    assert main(*arguments, "--ep", "2", folder="qwen3", devices=8)[0] == 0


def test_streamed_text_is_the_decoded_text(main, tmp_path):
    """Also where a token is a part of a character, and where decoding strips the spaces at its beginning."""
    save_random(tmp_path, *llama(vocab_size=256)[1:])
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], {"type": "Fuse"}, strip]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for prompts in (["ab"], ["ab", "c"]):
        arguments = ["--model_path", tmp_path, "--prompt", *prompts, "--max_new_tokens", "64", "--temperature", "1"]
        rows, _ = json_rows(main(*arguments, "--output", "json")[1])
        _, out, _ = main(*arguments)
        heading = "> {prompt}\n" if len(prompts) > 1 else ""
        assert out == "".join(heading.format(**row) + row["text"] + "\n" for row in rows)


def test_standard_output_that_is_full():
    with open("/dev/full", "w") as full:
        command = [sys.executable, ROOT / "llama3" / "main.py", "--prompt", "Hello!", "--max_new_tokens", "1"]
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
        finished = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1].startswith("error: standard output cannot be written")


def test_compiled_programs_are_kept(tmp_path):
    """In the user's cache folder, unless a flag says not to, whatever variables say; a second run, of a prompt that is
    somewhat longer, compiles nothing, and removes what a full disk had cut off."""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, ROOT / "llama3" / "main.py", "--max_new_tokens", "2", "--prompt"]
    kept, named = [], {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "named")}
    for variables, options in (
        (named, ["Hello!", "--no_compilation_cache"]),
        ({}, ["Hello!"]),
        ({}, ["Hello you!"]),
    ):
        subprocess.run([*command, *options], env=environment | variables, capture_output=True, check=True)
        kept.append({file.name for file in tmp_path.glob("*/jit_step-*-cache")})  # others are kept if they took long
        if variables != named:
            (tmp_path / "open-llms-in-jax" / "jit_step-0-cache").write_text("half a program")
    assert not kept[0] and kept[1] and kept[1] == kept[2]


def test_peaks_are_of_devices_of_that_name():
    """jax's names of devices go on after the table's; a part of a GPU has no peak of its own."""
    published, peaks = FOLDERS["llama3"].main.published, FOLDERS["llama3"].main.PEAK_GB_PER_S
    for kind, wanted in {
        "TPU v5 lite": 819, "TPU v5e": 819, "TPU v5": 2765, "TPU v6 lite": 1640, "NVIDIA L4": 300, "NVIDIA H200": 4800,
        "NVIDIA L40": None, "NVIDIA H100 80GB HBM3": 3352, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "cpu": None,
    }.items():  # fmt: skip
        assert published(peaks, kind) == wanted, kind
