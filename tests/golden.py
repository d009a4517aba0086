"""Writes golden_tokens.json: what transformers' class answers to the prompts of golden_demo.json in float32.

    python3 tests/golden.py

test_device.py compares other machines with these tokens and natural log-probabilities, without torch.
"""

import json
from pathlib import Path

from helpers import ROOT, reference_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).resolve().parent


def answers(folder: str) -> list[dict]:
    """Of each prompt of a folder's demo: its token ids, those of the greedy answer, and their log-probabilities."""
    demo = ROOT / folder / "demo"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    reference = AutoModelForCausalLM.from_pretrained(demo, dtype="float32").eval()
    found = []
    for prompt, text in json.loads((TESTS / "golden_demo.json").read_text())[folder].items():
        messages = [{"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        stop = reference.generation_config.eos_token_id
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        logprobs = reference_logprobs(reference, asked, [*tokens, 0])
        tokens.append(int(logprobs[-1].argmax()))  # a stop token
        assert tokens == logprobs.argmax(-1).tolist() and tokens[-1] in (stop if isinstance(stop, list) else [stop])
        rounded = [round(float(x), 6) for x in logprobs.max(-1)]
        found.append({"prompt_tokens": asked, "tokens": tokens, "logprobs": rounded})
    return found


if __name__ == "__main__":
    from shared import folders

    golden = {folder: answers(folder) for folder in folders()}
    lines = [f'"{folder}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for folder, rows in golden.items()]
    (TESTS / "golden_tokens.json").write_text("{" + ",\n".join(lines) + "}\n")
