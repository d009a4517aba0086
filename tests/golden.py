"""Writes golden_tokens.json: what transformers' class answers to the prompts of golden_demo.json in float32.

    python3 tests/golden.py

test_device.py compares other machines with these tokens and natural log-probabilities, without torch. The demos know
their answers by heart, at log-probabilities near 0, which hide small errors: the last prompt of each is UNKNOWN_PROMPT.
"""

import json
from pathlib import Path

from helpers import ROOT, UNKNOWN_PROMPT, reference_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).resolve().parent


def answers(folder: str) -> list[dict]:
    """Of each prompt of a folder's demo: its token ids, those of the greedy answer, and their log-probabilities."""
    demo = ROOT / folder / "demo"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    reference = AutoModelForCausalLM.from_pretrained(demo, dtype="float32").eval()
    found, stop = [], reference.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    for prompt, text in json.loads((TESTS / "golden_demo.json").read_text())[folder].items():
        messages = [{"role": "user", "content": prompt}]
        asked = tokenizer(prompt)["input_ids"]
        if tokenizer.chat_template:
            asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        logprobs = reference_logprobs(reference, asked, [*tokens, 0])
        tokens.append(int(logprobs[-1].argmax()))  # a stop token
        assert tokens == logprobs.argmax(-1).tolist() and tokens[-1] in stop
        found.append({"prompt_tokens": asked, "tokens": tokens, "logprobs": logprobs.max(-1)})
    tokens, ended = [], {row["tokens"][-1] for row in found}
    while len(tokens) < 8 and not ended & set(tokens):
        logprobs = reference_logprobs(reference, UNKNOWN_PROMPT, [*tokens, 0])
        tokens.append(int(logprobs[-1].argmax()))
    found.append({"tokens": tokens, "logprobs": logprobs.max(-1)})
    return [row | {"logprobs": [round(float(x), 6) for x in row["logprobs"]]} for row in found]


if __name__ == "__main__":
    from shared import folders

    golden = {folder: answers(folder) for folder in folders()}
    lines = [f'"{folder}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for folder, rows in golden.items()]
    (TESTS / "golden_tokens.json").write_text("{" + ",\n".join(lines) + "}\n")
