"""Writes what transformers' class answers to the prompts of the demos in float32: golden_demo.json has the texts,
golden_tokens.json the tokens with their natural log-probabilities.

    python3 tests/golden.py [FOLDER ...]    # by default all folders

test_device.py compares other machines with these tokens, without torch. The demos know their answers by heart, at
log-probabilities near 0, which hide small errors: the last prompt of each is UNKNOWN_PROMPT.
"""

import json
import sys
from pathlib import Path

import torch
from helpers import ROOT, UNKNOWN_PROMPT, reference_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).resolve().parent


def answers(folder: str) -> tuple[dict[str, str], list[dict]]:
    """The answer to each prompt of a folder's demo, and of each its token ids, with the log-probabilities of the
    answer's."""
    demo = ROOT / folder / "demo"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    reference = AutoModelForCausalLM.from_pretrained(demo, dtype="float32").eval()
    texts, found = {}, []
    for prompt in (demo / "prompts.txt").read_text().splitlines():
        asked = tokenizer(prompt)["input_ids"]
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        whole = reference.generate(torch.tensor([asked]), do_sample=False, max_new_tokens=128)[0].tolist()
        tokens = whole[len(asked) :]
        logprobs = reference_logprobs(reference, asked, tokens)
        assert tokens == logprobs.argmax(-1).tolist() and len(tokens) < 128
        texts[prompt] = tokenizer.decode(tokens, skip_special_tokens=True)
        found.append({"prompt_tokens": asked, "tokens": tokens, "logprobs": logprobs.max(-1)})
    tokens, ended = [], {row["tokens"][-1] for row in found}
    while len(tokens) < 8 and not ended & set(tokens):
        logprobs = reference_logprobs(reference, UNKNOWN_PROMPT, [*tokens, 0])
        tokens.append(int(logprobs[-1].argmax()))
    found.append({"tokens": tokens, "logprobs": logprobs.max(-1)})
    return texts, [row | {"logprobs": [round(float(x), 6) for x in row["logprobs"]]} for row in found]


if __name__ == "__main__":
    from shared import folders

    demo, tokens = TESTS / "golden_demo.json", TESTS / "golden_tokens.json"
    texts, rows = (json.loads(file.read_text()) for file in (demo, tokens))
    for folder in sys.argv[1:] or folders():
        texts[folder], rows[folder] = answers(folder)
    demo.write_text(json.dumps(texts, indent=2) + "\n")
    lines = [f'"{folder}": [\n' + ",\n".join(map(json.dumps, rows[folder])) + "\n]" for folder in sorted(rows)]
    tokens.write_text("{" + ",\n".join(lines) + "}\n")
