"""--chat, and what standard error says while a run works."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from helpers import ROOT, import_folder, read_in_pieces
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

llama3 = import_folder("llama3")
DEMO = ROOT / "llama3" / "demo"
CHAT = [sys.executable, ROOT / "llama3" / "main.py", "--chat", "--dtype", "float32", "--max_new_tokens", "40"]
ENVIRONMENT = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}


@pytest.fixture
def one_device(monkeypatch):
    """This process sees one, for which programs compile in half the time."""
    monkeypatch.setattr(jax, "devices", lambda *_, found=jax.devices(): found[:1])


def reference_answers(folder, turns: list[str], new_tokens: int) -> list[str]:
    """What transformers' class answers, greedily and with the whole history in each turn; /reset begins anew."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages, answers = [], []
    for turn in turns:
        if turn == "/reset":
            messages = []
            continue
        messages.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(out, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


CHANGING = """{% for m in messages %}{{ '<' + m.role[0] + '>' }}{% if m.role == 'assistant' and not loop.last %}{{ \
m.content[:7] }}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""


@pytest.mark.parametrize("template", [None, CHANGING], ids=["", "changing"])
def test_a_conversation(tmp_path, template):
    """Ten turns and a reset, as transformers answers them; also where a template shortens earlier answers. Each turn
    reads what is new, and few programs are compiled."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    turns = ["Hello!", "What is the capital of France?", "And 3 plus 4?", "/reset", "Hello!", "What is 3 plus 4?"]
    turns += ["Of Italy?", "x" * 90, "What is the capital of Japan?", "Hello!", "And 2 plus 2?", "Thank you."]
    command = [*CHAT, "--model_path", tmp_path, "--no_compilation_cache"]
    finished = subprocess.run(command, env=ENVIRONMENT, input="\n".join(turns) + "\n\n", capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "".join(f"{answer}\n" for answer in reference_answers(tmp_path, turns, 40))
    compiled = re.findall(r"^compiling (\w+) \.\.\.$", finished.stderr, re.M)
    assert compiled.count("prefill") <= 3 and compiled.count("decoding") == 1, finished.stderr
    # The bar of the last turn counts what was read: the message, and what the template made of the answer before it.
    last = [line for line in finished.stderr.splitlines() if line.startswith("prefill: 100%")][-1]
    assert float(re.search(r"([\d.]+)/\1 ", last)[1]) < (80 if template else 64), last
    assert finished.stderr.splitlines()[-1].startswith("stats: {")


def test_what_a_turn_refuses():
    """The conversation goes on without a message that cannot be answered. The ends of Windows' lines, and the mark of
    the encoding at the beginning of a file, are no part of a message."""
    turns = b"\xef\xbb\xbfHello!\r\n" + b"x" * 600 + b"\n\xff\xfe\nWhat is 3 plus 4?\r\n"
    finished = subprocess.run([*CHAT, "--max_seq_len", "256"], env=ENVIRONMENT, input=turns, capture_output=True)
    assert finished.returncode == 0
    errors = [line for line in finished.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and "more than max_seq_len 256" in errors[0] and "not in UTF-8" in errors[1]
    assert finished.stdout.decode().splitlines() == reference_answers(DEMO, ["Hello!", "What is 3 plus 4?"], 40)


def test_letters_typed_where_the_locale_is_c():
    """readline takes bytes above 127 for commands there, unless it is told otherwise."""
    terminal, of_program = pty.openpty()
    program = subprocess.Popen(
        CHAT, env=ENVIRONMENT | {"LC_ALL": "C"}, stdin=of_program, stdout=of_program, stderr=subprocess.PIPE, text=True
    )
    os.close(of_program)
    message = "你好 как дела é"
    os.write(terminal, f"{message}\r/exit\r".encode())
    said = program.communicate()[1]
    template = {"add_generation_prompt": True, "return_dict": False}
    tokens = AutoTokenizer.from_pretrained(DEMO).apply_chat_template([{"role": "user", "content": message}], **template)
    assert f" {len(tokens)}.0/{len(tokens)}.0 " in said, said


def test_a_thought_without_an_answer(tmp_path):
    """The conversation forgets the question, and says so."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>\n"
    (tmp_path / "chat_template.jinja").write_text(template)
    command = [*CHAT, "--model_path", tmp_path, "--max_new_tokens", "3"]
    finished = subprocess.run(command, env=ENVIRONMENT, input="Hello!\n", capture_output=True, text=True)
    assert "note: there is no answer, so the question is forgotten" in finished.stderr and finished.stdout.strip()


def test_a_question_asked_again(one_device, monkeypatch, capsys):
    """Sampled, it gets another answer; the whole chat is the same with the same seed."""
    options, chats = ["--temperature", "3", "--seed", "4294967295", "--max_new_tokens", "12"], []
    monkeypatch.setattr(sys, "argv", ["main.py", "--chat", *options])
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n/reset\nHello!\n")))
        llama3.convert.run(llama3.main.main)
        chats.append(capsys.readouterr().out)
    first, again = chats[0].splitlines()
    assert first and again and first != again and chats[0] == chats[1]


def test_nobody_reads_the_answers():
    """The conversation ends, as a list of prompts would."""
    with open("/dev/full", "w") as full:
        finished = subprocess.run(CHAT, env=ENVIRONMENT, input=b"Hello!\n" * 3, stdout=full, stderr=subprocess.PIPE)
    errors = [line for line in finished.stderr.decode().splitlines() if line.startswith("error: ")]
    assert finished.returncode == 2 and len(errors) == 1 and "standard output cannot be written" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chat", "--raw"], "leave out --raw"),
        (["--chat", "--output", "json"], "--output json"),
        (["--chat", "--prompt", "a"], "not allowed with argument"),
    ],
)
def test_flags_that_do_not_go_with_it(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    with pytest.raises(SystemExit):
        llama3.convert.run(llama3.main.main)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_checkpoint_without_a_template(monkeypatch, capsys, tmp_path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["main.py", "--chat", "--model_path", str(tmp_path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit):
        llama3.convert.run(llama3.main.main)
    assert "--chat needs a chat template" in capsys.readouterr().err


def test_stages_in_a_log_file(tmp_path):
    """Compilations, prefill with its rate; nothing that a log file shows badly."""
    command = [sys.executable, ROOT / "llama3" / "main.py", "--no_compilation_cache", "--max_new_tokens", "3"]
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "\r" not in finished.stderr
    lines = finished.stderr.splitlines()
    stages = [
        r"\d+ CPU cores, as JAX_PLATFORMS=cpu says",
        "compiling prefill ...",
        "compiling decoding ...",
        "prefill: +0%.*",
        "prefill: 100%.*tokens/s.*",
        "note: 4 of 4 answers ended at --max_new_tokens 3",
        "stats: {.*",
    ]
    assert len(lines) == len(stages) and all(map(re.fullmatch, stages, lines)), finished.stderr


def test_bars_are_lines_in_a_log_file(capsys):
    """A line for each state that is shown, and none at all for what is done at once."""
    with llama3.convert.progress_bar(range(3), desc="loading", unit=" weights") as bar:
        assert list(bar) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    with llama3.convert.progress_bar(range(2), desc="loading", unit=" weights", delay=0, mininterval=0) as bar:
        list(bar)
    lines = capsys.readouterr().err.splitlines()
    assert list(dict.fromkeys(line.split("|")[0] for line in lines)) == [
        "loading:   0%",
        "loading:  50%",
        "loading: 100%",
    ]


def test_two_bars_in_a_log_file(capsys):
    """Of a long batch prefill is not over when decoding begins. No line has codes that move a terminal's cursor."""
    options = {"delay": 0, "mininterval": 0, "total": 2}
    with llama3.convert.progress_bar(desc="prefill", **options) as bar:
        with llama3.convert.progress_bar(desc="decoding", **options) as other:
            other.update(1)
        bar.update(1)
    text = capsys.readouterr().err
    assert "decoding:  50%" in text and "prefill:  50%" in text and "\x1b" not in text


def test_a_line_while_a_bar_is_shown(monkeypatch):
    """It stands alone, above the bar."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with llama3.convert.progress_bar(total=2, desc="prefill"):
        llama3.convert.say("compiling prefill ...")
    *_, line = terminal.getvalue().partition("\n")[0].split("\r")
    assert line == "compiling prefill ...", terminal.getvalue()


@pytest.mark.parametrize("flags", [[], ["--output", "json", "--max_new_tokens", "1"]])
def test_rows_done(tmp_path, flags):
    """Of all, in a terminal that shows no results; also those that end at once."""
    (tmp_path / "prompts").write_text("Hello!\nWhat is 3 plus 4?\nHello!\n")
    command = [sys.executable, ROOT / "llama3" / "main.py", "--prompts_file", tmp_path / "prompts", *flags]
    terminal, of_program = pty.openpty()
    termios.tcsetwinsize(of_program, (24, 80))
    with (tmp_path / "answers").open("wb") as answers:
        program = subprocess.Popen(command, env=ENVIRONMENT, stdout=answers, stderr=of_program)
    program.wait()  # the terminal holds what is said, which is little
    os.close(of_program)
    said = os.read(terminal, 2**16).decode()
    os.close(terminal)
    assert re.search(r"decoding: 100%.* 3/3 .*rows", said), said


# ---------------------------------------------------------------------------------------------------------------------
# Reasoning. In small, the templates of releases: what they do with an earlier answer, and how they begin a new one


TURNS = "{% for m in messages %}{% if m.role != 'assistant' %}<u>{{ m.content }}{% else %}"
THINK_APART = """{% set c = m.content.split('</think>')[-1] if m.reasoning_content is not defined else m.content %}\
<a>{{ c.lstrip('\n') }}<e>"""
CHANNELS = """{% if '<|channel|>analysis' in m.content %}{{ raise_exception('channels in content') }}{% endif %}\
<|start|>assistant<|channel|>final<|message|>{{ m.content }}({{ m.thinking }})<|end|>"""
FAMILIES = {  # what the template does with an answer, how it begins one; an answer; its reasoning, its text, as history
    "qwen3": (
        THINK_APART,
        "<a>",
        "<think>\nWell, é.\n</think>\n\nIt is </think> é.<e>",
        ("Well, é.", "It is </think> é.", "<a>It is </think> é.<e>"),
    ),
    "qwen3, another word": (
        THINK_APART,
        "<a>",
        "<think>\nIf\n</think>\n\nA <think>!<e>",
        ("If", "A <think>!", "<a>A <think>!<e>"),
    ),
    "qwen3, a first word": (
        THINK_APART,
        "<a>",
        "<think>\nOk\n</think>\n\n</think> is it.<e>",
        ("Ok", "</think> is it.", "<a></think> is it.<e>"),
    ),
    "qwen3, the other as a first word": (
        THINK_APART,
        "<a>",
        "<think>\nOk\n</think>\n\n<think> begins it, </think> ends it.<e>",
        ("Ok", "<think> begins it, </think> ends it.", "<a><think> begins it, </think> ends it.<e>"),
    ),
    "qwen3, not thinking": (THINK_APART, "<a><think>\n\n</think>\n\n", "Yes.\n<e>", ("", "Yes.\n", "<a>Yes.\n<e>")),
    "qwen3, no thought": (THINK_APART, "<a>", "No </think>!\n<e>", ("", "No </think>!\n", "<a>No </think>!\n<e>")),
    "r1": (
        "{{ '<a>' + m.content.split('</think>')[-1] }}<e>",
        "<a><think>\n",
        "Hm.\n</think>\n\nNo.<e>",
        ("Hm.", "No.", "<a>\n\nNo.<e>"),
    ),
    "r1, begun once more": (
        "{{ '<a>' + m.content.split('</think>')[-1] }}<e>",
        "<a><think>\n",
        "<think>\nHm.\n</think>\n\nNo.<e>",
        ("Hm.", "No.", "<a>\n\nNo.<e>"),
    ),
    "v3.1, not thinking": (
        "{{ '<a>' + m.content.split('</think>')[-1] }}<e>",
        "<a></think>",
        "\n\nNo.<e>",
        ("", "No.", "<a>\n\nNo.<e>"),
    ),
    "magistral": ("<a>{{ m.content }}<e>{# [/THINK] #}", "", "[THINK]So[/THINK]Two<e>", ("So", "Two", "<a>Two<e>")),
    "magistral, another word": (
        "<a>{{ m.content }}<e>{# [/THINK] #}",
        "",
        "[THINK]So[/THINK]No [THINK], no [/THINK].<e>",
        ("So", "No [THINK], no [/THINK].", "<a>No [THINK], no [/THINK].<e>"),
    ),
    "gemma 4": (
        "<a>{{ m.content.split('<channel|>')[-1] }}<e>",
        "<a>",
        "<|channel>thought\nA name\nhere<channel|>Four<e>",
        ("A name\nhere", "Four", "<a>Four<e>"),
    ),
    "gpt-oss": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Paris, analysis.<|return|>",
        (
            "They ask.\nI look.",
            "Paris, analysis.",
            "<|start|>assistant<|channel|>final<|message|>Paris, analysis.(They ask.\nI look.)<|end|>",
        ),
    ),
    "gpt-oss, words of its format": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>As <|start|> is.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Use <|start|>assistant, <|channel|>\nand <|message|>.<|return|>",
        (
            "As <|start|> is.",
            "Use <|start|>assistant, <|channel|>\nand <|message|>.",
            "<|start|>assistant<|channel|>final<|message|>"
            "Use <|start|>assistant, <|channel|>\nand <|message|>.(As <|start|> is.)<|end|>",
        ),
    ),
    "gpt-oss, a first word": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>final<|message|><|channel|> is it.<|return|>",
        (
            "",
            "<|channel|> is it.",
            "<|start|>assistant<|channel|>final<|message|><|channel|> is it.()<|end|>",
        ),
    ),
    "gpt-oss, a call": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary to=functions.f json"
        '<|message|>{"x": 1}<|return|>',
        (
            "They ask.",
            'commentary to=functions.f json{"x": 1}',
            '<|start|>assistant<|channel|>final<|message|>commentary to=functions.f json{"x": 1}(They ask.)<|end|>',
        ),
    ),
    "gpt-oss, a call whose channel comes last": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=f<|channel|>commentary<|message|>{}<|return|>",
        ("Hm.", "assistant to=f{}", "<|start|>assistant<|channel|>final<|message|>assistant to=f{}(Hm.)<|end|>"),
    ),
    "gpt-oss, the final channel begun": (
        CHANNELS,
        "<|start|>assistant<|channel|>final<|message|>",
        "A <|channel|> has a <|message|>.<|return|>",
        (
            "",
            "A <|channel|> has a <|message|>.",
            "<|start|>assistant<|channel|>final<|message|>A <|channel|> has a <|message|>.()<|end|>",
        ),
    ),
    "gpt-oss, analysis begun": (
        CHANNELS,
        "<|start|>assistant<|channel|>analysis<|message|>",
        "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Rome<|return|>",
        ("Hm.", "Rome", "<|start|>assistant<|channel|>final<|message|>Rome(Hm.)<|end|>"),
    ),
    "no reasoning": ("<a>{{ m.content }}<e>", "<a>", "<think>\n</think>Seven<e>", None),
}


def tokenizer_of(of_answer, begin, has_think=True):
    """Bytes, and the tokens above, those for thoughts not special, as in releases."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens(["<think>", "</think>"] if has_think else [])
    channels = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>", "<|channel>", "<channel|>"]
    backend.add_special_tokens(["<u>", "<a>", "<e>", "[THINK]", "[/THINK]", *channels])
    end = "{% endif %}{% endfor %}{% if add_generation_prompt %}" + begin + "{% endif %}"
    template = TURNS + of_answer + end
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", chat_template=template)


def collected(tokenizer, prompt, answer, output="text", finish_reason="stop"):
    """The Results of an answer, token by token."""
    args = SimpleNamespace(output=output, logprobs=False, draft=None)
    (prompt_tokens,) = llama3.main.encode(tokenizer, [prompt], False)
    results = llama3.main.Results(args, tokenizer, [prompt], [prompt_tokens], llama3.main.read_markers(tokenizer))
    *ids, last = tokenizer(answer, add_special_tokens=False)["input_ids"]
    for i, reason in [*((i, None) for i in ids), (last, finish_reason)]:
        results.add([llama3.generate.Token(0, i, 0.0, reason)])
    return results


def test_a_text_for_a_list_of_prompts():
    """It is one prompt, and not one for each letter."""
    tokenizer = llama3.main.read_tokenizer(llama3.convert.open_checkpoint(ROOT / "llama3" / "demo"))
    for raw in (True, False):
        assert llama3.main.encode(tokenizer, "Hello!", raw) == llama3.main.encode(tokenizer, ["Hello!"], raw)


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning(capsys, family):
    """It stands apart in text and in JSON, and the next turn has what the template makes of it."""
    tokenizer, (_, begin, answer, wanted) = tokenizer_of(*FAMILIES[family][:2]), FAMILIES[family]
    printed, row = (
        collected(tokenizer, "Hm?", answer, output) and capsys.readouterr().out for output in ("text", "json")
    )
    row = json.loads(row)
    if wanted is None:
        assert printed == "<think>\n</think>Seven\n" and row["text"] == printed[:-1] and "reasoning" not in row
        return
    reasoning, text, history = wanted
    assert (row["reasoning"], row["text"]) == (reasoning, text)
    assert printed.endswith(f"\n[answer]\n{text}\n" if reasoning else f"{text}\n")
    assert printed.startswith(f"[reasoning]\n{reasoning}\n") or not reasoning
    message = collected(tokenizer, "Hm?", answer).answers[0].message()
    messages = [{"role": "user", "content": "Hm?"}, message]
    (ids,) = llama3.main.encode(tokenizer, ["And?"], False, messages)
    assert tokenizer.decode(ids) == f"<u>Hm?{history}<u>And?{begin}"


@pytest.mark.parametrize("family", [name for name, (*_, wanted) in FAMILIES.items() if wanted and wanted[0]])
def test_a_thought_that_was_cut_is_no_answer(capsys, family):
    tokenizer, (_, _, answer, (reasoning, _, _)) = tokenizer_of(*FAMILIES[family][:2]), FAMILIES[family]
    cut = answer[: answer.index(reasoning[:2]) + 2]
    (row,) = collected(tokenizer, "Hm?", cut, finish_reason="length").answers
    assert row.message() is None and row.text("reasoning") == reasoning[:2] and row.text() == ""
    assert capsys.readouterr().out == f"[reasoning]\n{reasoning[:2]}\n"


@pytest.mark.parametrize("begin", ["<a>", "<a><think>\n"])
@pytest.mark.parametrize(("answer", "wanted"), [("Hm.\n</think>\n\n No.<e>", ("Hm.", " No.")), ("Hm", ("Hm", ""))])
def test_thoughts_whose_marks_are_no_tokens(capsys, begin, answer, wanted):
    """As in GLM-Z1 and Nemotron. Text has them as they are."""
    tokenizer = tokenizer_of("{{ '<a>' + m.content.split('</think>')[-1] }}<e>", begin, has_think=False)
    answer = answer if "<think>" in begin else "<think>\n" + answer
    reason = "stop" if answer.endswith("<e>") else "length"
    results = collected(tokenizer, "Hm?", answer, "json", reason)
    row = json.loads(capsys.readouterr().out)
    assert (row["reasoning"], row["text"]) == wanted
    assert (
        collected(tokenizer, "Hm?", answer, finish_reason=reason)
        and capsys.readouterr().out == answer.removesuffix("<e>") + "\n"
    )
    message = results.answers[0].message()
    assert message is None if not wanted[1] else message["content"] == answer.removesuffix("<e>")


@pytest.mark.parametrize("of_answer", ["<a>{{ m.content }}<e>", "<a>{{ m.content.split('</think>')[-1] }}<e>"])
def test_a_stop_token_that_is_not_special(capsys, of_answer):
    """One that generation_config.json names alone is not printed, and the next prompt does not have it twice."""
    tokenizer = tokenizer_of(of_answer, "<a>", has_think=False)
    tokenizer.add_tokens(["<stop>"])
    results = collected(tokenizer, "Hm?", "Seven<stop>")
    assert capsys.readouterr().out == "Seven\n" and results.answers[0].message()["content"] == "Seven"


def test_what_is_typed_in_a_conversation(monkeypatch, capsys):
    """/exit, Ctrl-C at the prompt, which keeps the conversation, once more while its line ends, and before the first
    word, which keeps no answer, and says so."""
    lines = iter(["Hello!", KeyboardInterrupt, "What is 3 plus 4?", "Of Italy?", "/exit", "never read"])
    histories, calls, twice = [], iter(range(9)), iter([True])
    encode, generate, write = llama3.main.encode, llama3.main.generate, llama3.main.write

    def written(text):
        if text == "\n" and next(twice, False):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        write(text)

    def typed(*_):
        if (line := next(lines)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    def recorded(tokenizer, prompts, raw, history=(), *rest):
        histories.append([message["content"] for message in history])
        return encode(tokenizer, prompts, raw, history, *rest)

    def interrupted(*arguments, **options):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(llama3.main, "encode", recorded)
    monkeypatch.setattr(llama3.main, "generate", interrupted)
    monkeypatch.setattr(llama3.main, "write", written)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, "argv", ["main.py", "--chat", "--system", "Be brief."])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        llama3.convert.run(llama3.main.main)
    finally:
        signal.signal(signal.SIGINT, handler)
    out, err = capsys.readouterr()
    (hello, italy), turns = [line for line in out.splitlines() if line], histories[1:]
    assert turns == [["Be brief."], *[["Be brief.", "Hello!", hello]] * 2] and italy
    assert "/exit" in err.partition("\n")[0] or "\nchat: " in err
    assert err.count("the question is forgotten") == 1


def test_a_key_that_is_held(monkeypatch):
    """At a prompt, one interrupt is an interrupt. Those that come as it is handled are none."""
    monkeypatch.setattr("builtins.input", lambda _: os.kill(os.getpid(), signal.SIGINT) or time.sleep(9))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with llama3.main.interrupts_noted():
            with pytest.raises(KeyboardInterrupt), llama3.main.interrupts_noted(at_once=True):
                input("> ")
            for _ in range(9):
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_interrupts_at_any_moment(one_device, monkeypatch, capsys):
    """A conversation goes on from what was printed, and what is kept gives the answers of a fresh start."""
    turns = iter(["Hello!", *["What is the capital of France?", "And 3 plus 4?", "x" * 90] * 6, "Hello!"])
    random, timers, answers, arguments = np.random.default_rng(0), [], [], []
    generate = llama3.main.generate
    read_in_pieces(monkeypatch, llama3, 32)

    def typed(*_):
        while timers:  # what was not interrupted yet is now, at its prompt
            timers.pop().join()
        text = next(turns, "/exit")
        if answers and text != "/exit":
            timers.append(threading.Timer(random.choice([0.005, 0.03, 0.1, 0.3, 1]), os.kill, (os.getpid(), 2)))
            timers[-1].start()
        return text

    def recorded(weights, prompts, config, mesh, **options):
        arguments[:] = weights, config, mesh, options
        answers.append((prompts[0], []))
        for tokens in generate(weights, prompts, config, mesh, **options):
            answers[-1][1].extend(token.id for token in tokens)
            yield tokens

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(llama3.main, "generate", recorded)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, "argv", ["main.py", "--chat", "--dtype", "float32"])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        llama3.convert.run(llama3.main.main)
    finally:
        signal.signal(signal.SIGINT, handler)
    weights, config, mesh, options = arguments
    options["progress"], fresh = llama3.main.Progress(), []
    for prompt, _ in answers:  # with the programs of the conversation
        steps = generate(weights, [prompt], config, mesh, **options | {"kept": {}})
        fresh.append([token.id for tokens in steps for token in tokens])
    assert "Traceback" not in capsys.readouterr().err
    assert len(answers) > 12 and 1 < sum(ids == whole for (_, ids), whole in zip(answers, fresh)) < len(answers)
    assert all(ids == whole[: len(ids)] for (_, ids), whole in zip(answers, fresh))
