"""Prompt in, text out: the same program on a laptop, on one GPU, and on every host of a TPU pod.

    python3 main.py                                         # the demo
    python3 main.py --model_path PATH --prompt "..." "..."  # a Hugging Face checkpoint folder or hub id
    python3 main.py --model_path PATH --chat                # a conversation
    python3 main.py --help                                  # all flags

Results go to standard output, from process 0 alone; progress and notes go to standard error.
"""

import argparse
import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import math
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would advise against running without torch
if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # an older name; jax refuses to have both
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")  # of a GPU's memory; jax itself would take 0.75
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # for python3 -m llama3.main, and python3 -P
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # or it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's exception would wait until a library returns
    if sys.stderr is not None and sys.stderr.isatty():  # in a log file, errors stand alone
        print("importing jax and transformers ...", file=sys.stderr)

import convert
import jax
import model
import numpy as np
from convert import Checkpoint, find_checkpoint, load, mesh_shape, one_line, progress_bar, read_json, say, users_line
from generate import DRAFTS, Sampling, Token, check_prompts, generate
from jax.experimental import multihost_utils
from model import InputError
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

try:
    from transformers import PreTrainedTokenizerFast, SentencePieceBackend
except Exception as error:  # a package that it needs can raise anything
    remedy = "pip install -U transformers, or what the reason names"
    sys.exit(f"error: transformers 5.23 or newer cannot be imported ({one_line(error)}): {remedy}")

DEMO = Path(__file__).resolve().parent / "demo"
PROMPTS_CHARACTERS = 2**28  # a larger input, such as /dev/zero, is refused
LONG_PROMPT = 2**15  # tokens; a shorter prompt is taken whatever max_position_embeddings says, as in transformers
CHAT_SLOTS = 4096  # of the cache of a conversation at first
PATIENCE = 30  # seconds between the lines that say for whom a process waits
OWN = (  # what may differ between hosts: where things are, and texts, of which the tokens are compared
    "model_path", "prompt", "prompt_file", "prompts_file", "system", "template_args", "coordinator", "process_id",
)  # fmt: skip

# Peak memory bandwidth in GB/s, by the first words of jax's device_kind, from Google's and NVIDIA's data sheets.
PEAK_GB_PER_S = {
    "TPU v4": 1228, "TPU v5 lite": 819, "TPU v5e": 819, "TPU v5": 2765, "TPU v5p": 2765, "TPU v6 lite": 1640,
    "TPU v6e": 1640, "TPU7x": 7380,
    "NVIDIA A100-SXM4-40GB": 1555, "NVIDIA A100-SXM4-80GB": 2039, "NVIDIA A100 80GB PCIe": 1935, "NVIDIA L4": 300,
    "NVIDIA L40S": 864, "NVIDIA H100 PCIe": 2039, "NVIDIA H100 80GB HBM3": 3352, "NVIDIA H200": 4800,
    "NVIDIA B200": 8000, "NVIDIA GeForce RTX 4090": 1008,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def parse_arguments():
    """The command line, each value checked for its range."""
    parser = convert.ArgumentParser(description="Prompt in, text out.")
    add = parser.add_argument

    def checked(kind, is_right, what, text):
        with contextlib.suppress(ValueError, RecursionError):
            if is_right(kind(text)):
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r:.100} is not {what}")

    def is_address(text):
        port = re.fullmatch(r".+:(\d{1,5})", text)
        return port and 0 < int(port[1]) < 2**16

    def number(kind, low, high):
        what = f"a number ({kind.__name__}) from {low} to {high}"
        return functools.partial(checked, kind, lambda value: low <= value <= high, what)

    count = number(int, 1, 2**30)
    what = 'a JSON object such as {"enable_thinking": false}'
    json_object = functools.partial(checked, json.loads, lambda value: isinstance(value, dict), what)
    address = functools.partial(checked, str, is_address, "HOST:PORT")
    add("--model_path", help="a Hugging Face checkpoint folder, one that convert.py wrote, or a hub id")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", nargs="+", action="extend", help="prompts of one batch, - for standard input")
    prompts.add_argument("--prompt_file", help="a file that is one prompt, - for standard input")
    prompts.add_argument("--prompts_file", help="one prompt a line, - for standard input")
    prompts.add_argument("--chat", action="store_true", help="a conversation")
    add("--system", help="a system message before each prompt or conversation")
    add("--template_args", type=json_object, metavar="JSON", help=f"what else the chat template takes, {what}")
    add("--raw", action="store_true", help="continue the prompt as it is, no chat template")
    add("--max_new_tokens", type=count, default=128, help="default 128")
    add("--max_seq_len", type=count, help="cache slots for a sequence, default what prompts and max_new_tokens need")
    add("--batch_size", type=count, help="rows that decode at once, default as many as memory holds")
    add("--draft", choices=list(DRAFTS), help="verify guesses: what followed before, or of an extra layer (mtp)")
    add("--draft_tokens", type=number(int, 1, model.FEW - 1), default=3, help="guesses a step, default 3")
    add("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16", help="default bfloat16")
    add("--quantize", choices=["int8", "int4"], help="weights in int8, or in groups of 4 bits")
    add("--quantize_cache", choices=["int8"], help="KV cache in int8, one scale for each token and head")
    add("--dp", type=count, help="split the batch into this many parts, default 1")
    add("--ep", type=count, help="split experts into this many parts, default 1, on TPUs what tp cannot split")
    add("--tp", type=count, help="split heads and columns into this many parts, default all devices that are left")
    temperature = functools.partial(checked, float, lambda t: t == 0 or 1e-6 <= t <= 1e6, "0, or from 1e-6 to 1e6")
    add("--temperature", type=temperature, default=0.0, help="0, the default, takes the most probable token")
    add("--top_k", type=number(int, 0, math.inf), default=0, help="sample from the K most probable tokens, 0: from all")
    add("--top_p", type=number(float, 1e-6, 1), default=1.0, help="sample from the top P probability, default 1")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of the sampling, default 0")
    add("--output", choices=["text", "json"], default="text", help="default text")
    add("--logprobs", action="store_true", help="JSON rows carry the log-probability of every generated token")
    where = "several hosts, if the cluster does not tell: process 0's address"
    add("--coordinator", type=address, metavar="HOST:PORT", help=where)
    add("--num_processes", type=number(int, 1, 2**16), help="how many processes there are")
    add("--process_id", type=number(int, 0, 2**16), help="which of the processes this is, from 0")
    add("--no_compilation_cache", action="store_true", help="do not keep compiled programs for the next run")
    add("--profile", metavar="DIR", help="write a jax.profiler trace of the decode loop")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if value == "" and name != "system":  # an empty message takes the place of a template's own
            raise InputError(f"--{name} is empty")
    if args.chat and (args.raw or args.output == "json" or args.logprobs or args.profile):
        raise InputError("--chat prints text by the template: leave out --raw, --output json, --logprobs, --profile")
    if args.raw and (args.system is not None or args.template_args):
        raise InputError("--system and --template_args are for the chat template, which --raw leaves out")
    if args.prompt and "-" in args.prompt and len(args.prompt) > 1:
        raise InputError("--prompt - stands alone, since it is all of standard input")
    if args.logprobs and args.output == "text":
        raise InputError("--logprobs is for JSON rows: add --output json")
    if 0 < (args.coordinator, args.num_processes, args.process_id).count(None) < 3:
        raise InputError("--coordinator, --num_processes and --process_id go together")
    if args.coordinator and args.process_id >= args.num_processes:
        raise InputError(f"--process_id {args.process_id} is not below --num_processes {args.num_processes}")
    return args


def read_prompts(args) -> list[str]:
    """The prompts of the command line, of a file, or of the demo."""
    if args.prompt and args.prompt != ["-"]:
        return args.prompt
    whole = "-" if args.prompt else args.prompt_file  # the file that is one prompt
    file = whole or args.prompts_file or DEMO / "prompts.txt"
    try:
        with open(0 if file == "-" else file, encoding="utf-8-sig", newline="", closefd=file != "-") as f:
            text = f.read(PROMPTS_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
    if len(text) > PROMPTS_CHARACTERS:
        raise InputError(f"{file}: has more than {PROMPTS_CHARACTERS} characters; split it")
    prompts = [p for p in ([text.rstrip("\r\n")] if whole else re.split("\r\n?|\n", text)) if p.strip()]
    if not prompts:
        raise InputError(f"{file}: has no prompt")
    return prompts


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def encode(tokenizer, prompts, raw, history=(), template_args=None, remedy="") -> list[list[int]]:
    """Token ids of each prompt: as a user's message after those of `history`, by a template that takes `template_args`
    too, or `raw` as it stands. As in transformers, a special token that is written out in a message becomes that token.
    Without `raw`, errors end with the `remedy`."""
    found = []
    for row, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts, 1):
        messages = [*history, {"role": "user", "content": prompt}]
        if any("\ud800" <= c <= "\udfff" for m in messages for c in m["content"]):  # Python's stand-ins for other bytes
            raise InputError(f"prompt {row} cannot be encoded: it, or --system, is not in UTF-8")
        try:
            if not raw:
                prompt = render(tokenizer, messages, add_generation_prompt=True, **(template_args or {}))
            found.append(tokenizer(prompt, add_special_tokens=raw)["input_ids"])
        except BaseException as error:  # from jinja or the template; a tokenizer's panic is no Exception
            raise InputError(f"prompt {row} cannot be encoded: {one_line(error)}{'' if raw else remedy}") from error
    return found


def render(tokenizer, messages: list[dict], **options) -> str:
    """Messages by the chat template. Llama Guard's and SmolVLM's take content as a list alone, and silently leave out
    one that is text: if doubling the last message changes nothing, all get lists. (SmolVLM's refuses an empty one.)"""
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False, **options)
    text, last = template(messages), messages[-1]
    with contextlib.suppress(Exception):
        if last["content"].strip() and text == template([*messages[:-1], last | {"content": 2 * last["content"]}]):
            text = template([m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages])
    return text.removeprefix("\ufeff")  # the mark of its encoding, which editors on Windows put before a template


def check_context(prompt_tokens: list[list[int]], raw_config: dict) -> None:
    """Raises InputError for a prompt longer than both LONG_PROMPT and max_position_embeddings: it would take hours, and
    the model was not trained for it. Gemma 3 from 4B on does not say how many it takes, and is not limited."""
    context = (raw_config | (raw_config.get("text_config") or {})).get("max_position_embeddings")
    for row, prompt in enumerate(prompt_tokens, 1):
        if isinstance(context, int) and len(prompt) > (most := max(LONG_PROMPT, context)):
            raise InputError(f"prompt {row} has {len(prompt)} tokens, more than {most}; the model takes {context}")


def id_of(tokenizer, token: str | None) -> int | None:
    """The id of a token, or None. (get_vocab would take 0.3 s for 262,144 tokens.)"""
    i = tokenizer.convert_tokens_to_ids(token) if token else None
    return i if i is not None and tokenizer.convert_ids_to_tokens(i) == token else None  # or the unknown token's


def read_stop_tokens(checkpoint: Checkpoint, tokenizer) -> tuple[int, ...]:
    """What ends an answer: eos_token_id, one or a list, of generation_config.json, of config.json and of the text model
    in it, the tokenizer's own end, and what its chat template writes behind an answer."""
    config = checkpoint.raw_config
    places = checkpoint.generation_config, config, config.get("text_config") or {}
    given = [*(place.get("eos_token_id") for place in places), id_of(tokenizer, tokenizer.eos_token)]
    with contextlib.suppress(Exception):  # no template, or one that takes other messages alone
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "some answer"}]
        behind = render(tokenizer, messages).rpartition("some answer")[2].lstrip()  # Gemma has tokens of line ends
        end = tokenizer(behind, add_special_tokens=False)["input_ids"][0]
        given += [end] if end in tokenizer.added_tokens_decoder.keys() - read_markers(tokenizer) else []
    stop = [token for value in given for token in (value if isinstance(value, list) else [value]) if token is not None]
    if wrong := [token for token in stop if type(token) is not int or not 0 <= token < 2**31]:
        raise InputError(f"{checkpoint.folder}: eos_token_id {wrong[0]!r:.40} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(stop))


# What a token begins: reasoning, the answer, or a name, which a line end or <|message|> ends. A `turn` begins a name
# wherever it stands. A row is in use if the chat template has its last token.
MARKERS = (
    {"<think>": "reasoning", "</think>": "answer"},  # Qwen3, DeepSeek, GLM, Kimi
    {"[THINK]": "reasoning", "[/THINK]": "answer"},  # Magistral
    {"<|channel>": "turn", "<channel|>": "answer"},  # Gemma 4
    {"<|start|>": "name", "<|end|>": "turn", "<|message|>": "message", "<|channel|>": "name"},  # gpt-oss
)


def read_markers(tokenizer) -> dict[int | str, str]:
    """MARKERS that the chat template knows, by id, or by their names if <think> is no token, but text."""
    rows = [row for row in MARKERS if [*row][-1] in str(tokenizer.chat_template)]
    found = {id_of(tokenizer, name): kind for row in rows for name, kind in row.items()}
    found.pop(None, None)  # of names that are no tokens
    return found or (dict(MARKERS[0]) if MARKERS[0] in rows else {})


# Text is split by these patterns before a tiktoken vocabulary is applied; its file does not hold them. Sources: the
# tokenizer.py of llama4 in Meta's package llama-models; tokenization_kimi.py of Moonshot's releases, in which a run of
# Chinese characters stands apart, and no slash follows punctuation. transformers splits as Llama 3 does.
LLAMA4_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = r"[\p{Han}]+|" + LLAMA4_PATTERN.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"\n/]", r"\n]")
TIKTOKEN_PATTERNS = {  # by model_type; Moonlight is a deepseek_v3
    "llama": None, "llama4": LLAMA4_PATTERN, "llama4_text": LLAMA4_PATTERN, "deepseek_v3": KIMI_PATTERN,
    "kimi_k2": KIMI_PATTERN, "kimi_k25": KIMI_PATTERN,
}  # fmt: skip


def read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast | SentencePieceBackend:
    """The checkpoint's own tokenizer, of the first of the files below. Code beside it (`auto_map`) is never run."""
    folder, model_type = checkpoint.folder, checkpoint.raw_config["model_type"]
    names = ("tokenizer.json", "merges.txt", "tiktoken.model", "tokenizer.model", "tekken.json")
    name = next((name for name in names if (folder / name).is_file()), None)
    if not name:
        raise InputError(f"{folder}: no tokenizer.json, tokenizer.model, tiktoken.model or tekken.json; download them")
    try:
        if name == "tokenizer.json":
            tokenizer = json_tokenizer(folder)
        elif name == "merges.txt":
            from transformers import AutoConfig, AutoTokenizer  # here, since they import torch where that is installed

            # transformers' checks of the whole config.json would refuse releases that model.py reads.
            config = AutoConfig.for_model(model_type, tokenizer_class=checkpoint.raw_config.get("tokenizer_class"))
            options = {"mistral_format": False, "trust_remote_code": False}
            tokenizer = AutoTokenizer.from_pretrained(folder, config=config, **options)
        elif name == "tekken.json":
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<s>", add_bos_token=True)
        elif re.match(rb"[A-Za-z0-9+/]+=* \d+\s", (folder / name).read_bytes()):
            tokenizer = tiktoken_tokenizer(checkpoint)
        else:
            tokenizer = SentencePieceTokenizer.from_pretrained(folder)
        if not tokenizer.chat_template and (file := folder / "chat_template.json").is_file():
            tokenizer.chat_template = read_json(file)["chat_template"]  # transformers leaves it to its processors
        return tokenizer
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        what = f"{type(error).__name__}: {one_line(error)}"
        remedy = f"{convert.download_again(folder / name)}, or mend tokenizer_config.json, special_tokens_map.json"
        raise InputError(f"{folder}: the tokenizer cannot be loaded ({what}); {remedy} or the template") from error


def json_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """tokenizer.json as it stands, then tokens that a fine-tune added in other files. transformers reads the template,
    and the names of special tokens: its class and tokenizer_config.json would change what the file does to text."""
    options = {"clean_up_tokenization_spaces": False, "split_special_tokens": False}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, tokenizer_object=Tokenizer(models.BPE()), **options)
    file = tokenizer._tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    for i, token in sorted(tokenizer.init_kwargs["added_tokens_decoder"].items()):
        if file.token_to_id(token.content) is file.id_to_token(i) is None and i == len(tokenizer):
            file.add_tokens([token])
    return tokenizer


def tiktoken_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """A tokenizer from a tiktoken vocabulary, whose file has neither the special tokens nor the splitting pattern."""
    folder, model_type = checkpoint.folder, checkpoint.raw_config["model_type"]
    if model_type not in TIKTOKEN_PATTERNS:
        raise InputError(f"{folder}: how a {model_type} splits text for tiktoken is not known; give its tokenizer.json")
    special = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if not special:
        raise InputError(f"{folder}: tokenizer_config.json has no added_tokens_decoder, the special tokens of tiktoken")
    if max(map(int, special)) >= checkpoint.config.vocab_size:
        raise InputError(f"{folder}: added_tokens_decoder of tokenizer_config.json has an id beyond vocab_size")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if pattern := TIKTOKEN_PATTERNS[model_type]:
        tokenizer.backend_tokenizer.pre_tokenizer[0] = pre_tokenizers.Split(Regex(pattern), "isolated")
    return tokenizer


class SentencePieceTokenizer(SentencePieceBackend):
    """A sentencepiece model, run by sentencepiece itself: transformers 5.23 would convert it to a tokenizer that merges
    runs of spaces in another order and, if the model normalizes text, loses accents."""

    def __init__(self, add_bos_token=True, add_eos_token=False, add_prefix_space=None, legacy=True, **settings):
        from sentencepiece import SentencePieceProcessor  # here, since most checkpoints do without

        sp = SentencePieceProcessor(model_file=settings["vocab_file"])
        for name, index in {"bos": sp.bos_id(), "eos": sp.eos_id(), "unk": sp.unk_id()}.items():
            settings.setdefault(f"{name}_token", sp.id_to_piece(index) if index >= 0 else None)
        added = [name for name, is_added in (("bos", add_bos_token), ("eos", add_eos_token)) if is_added]
        pattern = "_".join(name for name in added if settings[f"{name}_token"]) or "none"
        # The model's prefix is a space. If `legacy`, it also follows each special token; else it only begins the text.
        self.has_prefix = add_prefix_space is not False and sp.encode("a", out_type=str)[0].startswith("▁")
        legacy = legacy is not False and self.has_prefix
        super().__init__(legacy=legacy, special_tokens_pattern=pattern, **settings)
        self.add_tokens([sp.id_to_piece(i) for i in range(len(sp)) if sp.is_control(i)], special_tokens=True)

    def tokenize(self, text, **options):
        """The pieces of a text, with the prefix that the base class leaves out if the tokenizer is not `legacy`."""
        if self.legacy or not self.has_prefix or not text:
            return super().tokenize(text, **options)
        tokens = super().tokenize("▁" + text.replace("▁", " "), **options)
        is_before_special = len(tokens) > 1 and tokens[0] == "▁" and tokens[1] in self.added_tokens_encoder
        return tokens[1:] if is_before_special else tokens

    def _convert_id_to_token(self, index):
        """The piece of an id. Empty for an id beyond the vocabulary, which a padded output head can yield."""
        return super()._convert_id_to_token(index) if index < self.vocab_size else ""

    def convert_tokens_to_string(self, tokens):
        """Text of pieces, bytes among them, and of added tokens, which sentencepiece does not know."""
        text = ""
        for is_added, some in itertools.groupby(filter(None, tokens), lambda token: token in self.added_tokens_encoder):
            text += "".join(some) if is_added else self.sp_model.decode(list(some))
        return text if self.legacy or not self.has_prefix else text.removeprefix(" ")


# ---------------------------------------------------------------------------------------------------------------------
# What people see


@functools.cache
def say_devices() -> None:
    """Says what the program runs on, at the first call alone. If jax leaves a device out, it has said why."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        why = ", as JAX_PLATFORMS=cpu says" if jax.config.jax_platforms == "cpu" else ": jax found no GPU or TPU"
        say(f"{os.cpu_count()} CPU cores{why}")
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit")
        say(f"{jax.device_count()} x {device.device_kind}" + (f", {memory / 2**30:.0f} GiB" if memory else ""))


class Progress:
    """Says what takes time before the first text: each compilation, and prefill as a bar. Calls `check` each time."""

    def __init__(self, check=lambda: None):
        self.check, self.bar = check, None

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.check()
        say_devices()
        if stage == "prefill":
            self.bar = self.bar or progress_bar(total=total, desc="prefill", unit=" tokens", delay=0)
            self.bar.total = total  # it falls when rows get what they share
            self.bar.update(done - self.bar.n)
            if done == total:
                self.bar.close()
        elif not self.bar or self.bar.n < self.bar.total:
            say(f"{stage} ...")


class Part:
    """Tokens of one kind in an answer, and their text as it comes. New tokens are decoded together with those given out
    last, on which their spaces may depend; an incomplete character waits for its other tokens."""

    def __init__(self, tokenizer, kind: str):
        self.tokenizer, self.kind, self.ids = tokenizer, kind, []
        self.context = self.given = 0  # where those given out last begin and end

    def text(self, first: int = 0, end: int | None = None) -> str:
        return self.tokenizer.decode(self.ids[first:end])

    def new_text(self, is_whole: bool) -> str:
        """What was not given out yet; all of it if the part `is_whole`."""
        if self.given == len(self.ids):
            return ""
        before, text = self.text(self.context, self.given), self.text(self.context)
        is_byte = re.fullmatch("<0x..>", self.tokenizer.convert_ids_to_tokens(self.ids[-1]))
        if not is_whole and (is_byte or text.endswith("\ufffd")):
            return ""
        self.context, self.given = self.given, len(self.ids)
        return text[len(before) :]


class Answer:
    """A row's tokens, and its parts one after another: reasoning, answer, or the name of a channel. `markers`, those of
    read_markers, begin them, also at the end of the prompt; `hidden` tokens have no text."""

    def __init__(self, tokenizer, markers: dict, hidden: set[int], heading: str, prompt_tokens: list[int]):
        self.tokenizer, self.markers, self.hidden, self.heading = tokenizer, markers, hidden, heading
        self.tokens, self.steps, self.finish_reason = [], 0, None  # steps: in which the row got tokens
        self.parts, self.printed = [Part(tokenizer, "answer")], None  # printed: the part that was printed last
        self.is_begun = tokenizer.decode(prompt_tokens[-8:]).rstrip().endswith("<think>")
        end = [i for i in prompt_tokens[-8:] if tokenizer.decode([i]).strip()]
        if end and end[-1] in markers:  # the prompt begins a part, and may name it
            names = [n for n, i in enumerate(end) if markers.get(i) in ("turn", "name")]
            for i in end[max(names, default=-1) :]:
                self.step(i)
            del self.parts[:-1]

    def add(self, token: Token) -> None:
        self.tokens.append(token)
        self.finish_reason = token.finish_reason
        if token.finish_reason != "stop":  # a stop token has no text, whether the tokenizer calls it special or not
            self.step(token.id)

    def step(self, i: int) -> None:
        """A token begins a part, or has text in the last one, or none."""
        part, begun = self.parts[-1], self.markers.get(i)
        is_within = begun and part.kind != "name" and begun != "turn" and (part.kind, begun) != ("reasoning", "answer")
        # These marks are plain words in a part that has text, or that a mark of the answer began.
        is_word = is_within and (part.text().strip() or len(self.parts) > 1)
        if begun and not is_word:
            if begun == "message":  # channels are analysis, commentary, final; a call names its tool by to=
                calls = [p for p in self.parts[-2:] if p.kind == "name" and " to=" in p.text()]
                begun = "answer" if calls or part.text().startswith("final") else "reasoning"
                for call in calls:
                    call.kind = "answer"
            self.parts.append(Part(self.tokenizer, "name" if begun == "turn" else begun))
        elif is_word or (i not in self.hidden and self.tokenizer.convert_ids_to_tokens(i)):
            part.ids.append(i)
            if part.kind == "name" and "\n" in part.text():
                self.parts.append(Part(self.tokenizer, "reasoning"))

    def new_text(self) -> str:
        """What was not given out yet, the reasoning under a heading."""
        new, self.heading = self.heading, ""
        for part in (part for part in self.parts if part.kind != "name"):
            text = part.new_text(part is not self.parts[-1] or self.finish_reason is not None)
            if self.markers and part is not self.printed:
                text = text.lstrip("\n")
            if text and part is not self.printed:
                is_other = part.kind != (self.printed.kind if self.printed else "answer")
                new += "\n" * bool(self.printed and (is_other or part.kind == "reasoning"))
                new += f"[{part.kind}]\n" * is_other
                self.printed = part
            new += text
        return new + "\n" * bool(self.finish_reason)

    def text(self, kind: str = "answer") -> str:
        """The whole answer, or the reasoning."""
        texts = [part.text() for part in self.parts if part.kind == kind]
        begin = self.parts[0].text().lstrip()
        if "<think>" in self.markers and (self.is_begun or begin.startswith("<think>")):  # all is one part
            thought, _, said = begin.removeprefix("<think>").partition("</think>")
            texts = [thought if kind == "reasoning" else said]
        if kind == "reasoning":
            return "\n".join(text.strip("\n") for text in texts).strip("\n")
        return "".join(texts).lstrip("\n") if self.markers else texts[0]

    def message(self) -> dict | None:
        """The answer as a message for the chat template, None if there is none. A template that knows of no
        reasoning_content takes thoughts out of the text itself."""
        said, template = self.text(), str(self.tokenizer.chat_template)
        if not said.strip():
            return None
        if "</think>" in template and "reasoning_content" not in template:
            ids = [token.id for token in self.tokens if token.finish_reason != "stop"]
            said = self.tokenizer.decode([i for i in ids if i in self.markers or i not in self.hidden])
        thoughts = dict.fromkeys(("reasoning_content", "thinking"), self.text("reasoning")) if self.markers else {}
        return {"role": "assistant", "content": said} | thoughts


class Results:
    """Collects generated tokens and prints the rows in order: text as it comes, JSON when a row is finished."""

    def __init__(self, args, tokenizer, prompts, prompt_tokens, markers):
        self.args, self.prompts, self.prompt_tokens = args, prompts, prompt_tokens
        special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        hidden = {*tokenizer.all_special_ids, *special}  # named in tokenizer_config.json, or flagged in the file
        headings = [f"> {prompt}\n" if len(prompts) > 1 else "" for prompt in prompts]
        self.answers = [Answer(tokenizer, markers, hidden, *row) for row in zip(headings, prompt_tokens)]
        self.current = 0  # the first row that is not printed whole

    def add(self, tokens: list[Token]) -> None:
        """Takes the tokens of one step and prints what can be printed."""
        for token in tokens:
            if not math.isfinite(token.logprob):
                raise InputError("the model's numbers are not finite: damaged weights, or try --dtype float32")
            self.answers[token.row].add(token)
        for row in {token.row for token in tokens}:
            self.answers[row].steps += 1
        while self.current < len(self.answers) and self.print_row(self.current):
            self.current += 1

    def print_row(self, row: int) -> str | None:
        """Prints what is new of a row. Returns its finish_reason."""
        answer = self.answers[row]
        if self.args.output == "text":
            write(answer.new_text())
        elif answer.finish_reason:
            line = {"prompt": self.prompts[row], "text": answer.text()}
            line |= {"reasoning": answer.text("reasoning")} if answer.markers else {}
            line |= {"prompt_tokens": self.prompt_tokens[row], "tokens": [token.id for token in answer.tokens]}
            if self.args.logprobs:
                line["logprobs"] = [token.logprob for token in answer.tokens]
            if self.args.draft:  # the first token is prefill's
                line["tokens_per_step"] = (len(answer.tokens) - 1) / (answer.steps - 1) if answer.steps > 1 else None
            write(json.dumps(line | {"finish_reason": answer.finish_reason}) + "\n")
        return answer.finish_reason

    def break_off(self) -> None:
        """Prints the finished rows that were waiting for an unfinished one."""
        if self.args.output == "text":
            write("\n")
        for row in range(self.current + 1, len(self.answers)):
            if self.answers[row].finish_reason:
                self.print_row(row)

    def note_cut(self) -> None:
        """Says on standard error which answers were cut, and by which flag."""
        cut = [len(answer.tokens) for answer in self.answers if answer.finish_reason == "length"]
        by_tokens = cut.count(self.args.max_new_tokens)
        for flag, count in {"max_new_tokens": by_tokens, "max_seq_len": len(cut) - by_tokens}.items():
            what = f"{count} of {len(self.answers)} answers" if len(self.answers) > 1 else "the answer"
            if count:
                say(f"note: {what} ended at --{flag} {getattr(self.args, flag)}")


def write(text: str) -> None:
    """To standard output at once."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing it would fail once more
        raise OSError(f"standard output cannot be written: {one_line(error)}") from error


def published(figures: dict[str, float], device_kind: str) -> float | None:
    """The figure of the longest name that begins `device_kind`; None if there is none, or for a part of a GPU."""
    kinds = [kind for kind in figures if re.match(rf"{kind}\b(?!.* MIG )", device_kind)]
    return figures[max(kinds, key=len)] if kinds else None


def statistics(raw_config: dict, mesh, load_s: float, measured: dict) -> dict:
    """The line of statistics; null where nothing was decoded or a peak is unknown. No rate includes compilation. (With
    --quantize, `load_s` includes compiling the rounding, 0.1 s a shape.)"""

    def ratio(part, whole):
        return measured[part] / measured[whole] if measured[whole] else None

    device, steps_per_s = mesh.devices.flat[0], ratio("decode_steps", "decode_s") or None
    bandwidth = steps_per_s and measured["step_bytes"] * steps_per_s / 1e9
    peak = published(PEAK_GB_PER_S, device.device_kind)
    peak_bytes = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())
    if not peak_bytes:  # on CPUs, that of the process; getrusage gives KiB, on macOS bytes
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "model_type": raw_config["model_type"],
        "devices": mesh.size, "platform": device.platform, "mesh": dict(mesh.shape),
        "load_s": load_s, "compile_s": measured["compile_s"],
        "prefill_s": measured["prefill_s"], "prefill_tokens_per_s": ratio("prefill_tokens", "prefill_s"),
        "decode_steps_per_s": steps_per_s,
        "decode_tokens_per_s": steps_per_s and ratio("decode_tokens", "decode_s"),
        "rows_busy": ratio("busy_row_steps", "row_steps"), "tokens_per_step": ratio("decode_tokens", "busy_row_steps"),
        "drafts_accepted": ratio("drafts_accepted", "drafts"),
        "step_bytes": measured["step_bytes"], "bandwidth_gb_per_s": bandwidth,
        "bandwidth_utilization": bandwidth and peak and bandwidth / (peak * mesh.size),
        "peak_memory_gb": peak_bytes / 1e9,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Several hosts
#
# Each runs one process of this program, which drives that host's devices. jax.distributed joins the processes, and if
# one is missing, is killed or hangs, ends the others with messages of its own.


def is_lone_tpu_host() -> bool:
    """Whether a TPU host is alone: by the variables of GKE, Kaggle and Colab or, without them, because no metadata
    server of Google Cloud answers, as one does on every host of a pod. jax itself would take Kaggle's `local` for
    another host, and wait a minute for each answer."""
    given = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if "TPU_PROCESS_ADDRESSES_PATH" in os.environ or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ:
        return False
    if given or "TPU_SKIP_MDS_QUERY" in os.environ:
        return "," not in (given or "")
    host, _, port = os.environ.get("GCE_METADATA_IP", "metadata.google.internal").partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port or 80)), timeout=6):
        return False
    return True


def join_hosts(args) -> None:
    """Joins the processes of this run: those that the flags name, or that jax finds in a TPU pod, Slurm or Open MPI."""
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and do nothing with it
    # For Slurm, a job step counts: sbatch and salloc set SLURM_NTASKS, too, but start one process.
    counts = [os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]
    is_launched = args.coordinator or counts != ["1", "1"]
    has_tpu = os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    if not is_launched and (not has_tpu or is_lone_tpu_host()):
        return
    # Under Slurm and Open MPI, jax gives each process one GPU. A process that is alone on its host gets all of them.
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    devices = [] if local.partition("(")[0] == "1" else None  # no restriction; Slurm writes 1(x2) for two hosts of one
    # jax gives up after 300 s, but its last try may wait forever: a rest of time that rounds to 0 ms means no limit.
    faulthandler.dump_traceback_later(360, exit=True, file=2)
    os.environ.setdefault("grpc_proxy", "")  # none between hosts, though jax warns of one in http_proxy or https_proxy
    try:
        with patience(f"all {args.num_processes} processes" if args.num_processes else "all hosts"):
            if args.process_id == 0:  # jax would crash if another program had the port
                socket.create_server(("", int(args.coordinator.rpartition(":")[2]))).close()
            for tries_left in (2, 1, 0):
                try:
                    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id, devices)
                    break
                except OSError:  # a lost connection to the metadata server of a TPU, which jax does not try again
                    if not tries_left:
                        raise
                    time.sleep(1)
    except Exception as error:  # each way of finding the hosts fails with exceptions of its own
        if isinstance(error, ValueError) and not is_launched:  # jax knows no cluster: a TPU host that is alone
            return
        remedy = "see --coordinator, --num_processes and --process_id"
        raise InputError(f"jax does not find the other hosts ({one_line(error)}): {remedy}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def patience(who: str):
    """Says every PATIENCE seconds for whom it waits and how long, so that nobody believes it hangs."""
    is_over, begin = threading.Event(), time.monotonic()

    def remind():
        while not is_over.wait(PATIENCE):
            print(f"waiting for {who}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


# ---------------------------------------------------------------------------------------------------------------------
# The program


class Inputs(NamedTuple):
    """Everything that is read before the weights are loaded."""

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerFast | SentencePieceBackend
    system: list[dict]  # what stands before each prompt or conversation
    prompts: list[str]
    prompt_tokens: list[list[int]]
    stop_tokens: tuple[int, ...]
    markers: dict[int | str, str]
    mesh: jax.sharding.Mesh


def read_inputs(args) -> Inputs:
    """Reads and checks everything but the weights, so that mistakes are reported before the long wait."""
    if args.chat and (processes := jax.process_count()) > 1:
        raise InputError(f"--chat needs one process alone, and there are {processes}")
    folder = find_checkpoint(args.model_path or str(DEMO), extra_layer=args.draft == "mtp")
    prompts = ["Hello", "?"] if args.chat else read_prompts(args)  # two of a chat show what its template begins with
    checkpoint = convert.open_checkpoint(folder, extra_layer=args.draft == "mtp")
    if args.draft == "mtp" and not checkpoint.config.uses_extra_layer:
        raise InputError(f"{folder}: no layer of multi-token prediction for --draft mtp; try --draft lookup")
    tokenizer = read_tokenizer(checkpoint)
    is_raw = args.raw or not tokenizer.chat_template
    if is_raw and (args.chat or args.system is not None or args.template_args):
        what = "--system, --template_args or --chat needs a chat template, and it has none"
        raise InputError(f"{folder}: {what}; a chat_template.jinja that is put there is read")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    remedy = "" if args.chat or args.template_args else "; --raw leaves the template out"
    remedy = "; the template may take no --system" if system else remedy
    prompt_tokens = encode(tokenizer, prompts, is_raw, system, args.template_args, remedy)
    bos, bos_id, eos = tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token
    asks_for_bos = is_raw and bos and read_json(folder / "tokenizer_config.json").get("add_bos_token")
    if asks_for_bos and any(ids[:1] != [bos_id] for ids in prompt_tokens):
        say(f"note: the tokenizer puts no {bos} before a prompt, and tokenizer_config.json wants it: write it yourself")
    for row, ids in enumerate(prompt_tokens, 1):
        if is_raw and ids[:2] == [bos_id] * 2:
            del ids[0]
            say(f"note: prompt {row} begins with {bos}, and gets no other")
        if is_raw and eos and ids[-1:] == [tokenizer.eos_token_id] and not prompts[row - 1].endswith(eos):
            del ids[-1]  # as training wants it; what follows would be another text
            say(f"note: prompt {row} is continued without the {eos} that the tokenizer puts behind it")
    settings = checkpoint.generation_config
    asked = {"temperature": 1.0} | {name: x for name, x in settings.items() if type(x) in (int, float)}
    if settings.get("do_sample") is True and args.temperature == 0:
        flags = [f"--{name} {asked[name]}" for name in ("temperature", "top_k", "top_p") if name in asked]
        say(f"note: generation_config.json asks for {' '.join(flags)}; without them, the most probable token is taken")
    elif args.temperature == 0 and (args.top_k or args.top_p < 1):
        say("note: --top_k and --top_p need a --temperature; without one, the most probable token is taken")
    for name in ("repetition_penalty", "no_repeat_ngram_size", "min_p"):
        if (value := asked.get(name, 0)) not in (0, 1):  # what they are if nobody asks
            say(f"note: generation_config.json asks for a {name} of {value}, which is not applied")
    check_prompts(prompt_tokens, checkpoint.config, args.max_seq_len, args.max_new_tokens)
    check_context(prompt_tokens, checkpoint.raw_config)
    weights = model.in_format(checkpoint.weights, args.quantize)
    mesh = model.make_mesh(*mesh_shape(weights, jax.devices(), args.dp, args.ep, args.tp))
    if args.profile:
        Path(args.profile, "plugins", "profile").mkdir(parents=True, exist_ok=True)  # as jax does, but at the end
    stop_tokens, markers = read_stop_tokens(checkpoint, tokenizer), {} if is_raw else read_markers(tokenizer)
    return Inputs(checkpoint, tokenizer, system, prompts, prompt_tokens, stop_tokens, markers, mesh)


def read_together(args) -> Inputs:
    """read_inputs(args), of all processes, which all call this. All raise the same InputError if one of them raises an
    error that the user can mend, or if their jax, flags, stop tokens, prompts or checkpoints differ."""
    if jax.process_count() == 1:
        return read_inputs(args)
    inputs, line, facts = None, None, {"jax": jax.__version__}
    try:
        inputs = read_inputs(args)
        facts |= {f"--{name}": value for name, value in vars(args).items() if name not in OWN}
        facts["another checkpoint, SHA-256"] = convert.fingerprint(inputs.checkpoint)
        facts["stop tokens"] = [*inputs.stop_tokens]  # of files that the fingerprint does not have
        facts["other prompts, SHA-256"] = hashlib.sha256(json.dumps(inputs.prompt_tokens).encode()).hexdigest()
    except Exception as error:
        if not (line := users_line(error)):
            raise
    name = f"process {jax.process_index()} ({socket.gethostname()}, pid {os.getpid()})"
    text = json.dumps({"name": name, "error": line, "facts": facts})
    sent = np.frombuffer(text.encode().ljust(2**16), np.uint8)  # as long as the others': JSON allows spaces
    with patience(f"all {jax.process_count()} processes"):
        said = [json.loads(bytes(row)) for row in multihost_utils.process_allgather(sent)]
    wanted = said[0]["facts"]
    for one in said:
        if one["error"]:
            raise InputError(f"{one['name']}: {one['error']}")
        for fact, value in one["facts"].items():
            if value != wanted[fact]:
                raise InputError(f"{one['name']} has {fact} {value}, process 0 has {wanted[fact]}: give all the same")
    return inputs


def main() -> None:
    """Loads the checkpoint and decodes the prompts. All processes do so; process 0 prints results and statistics."""
    args = parse_arguments()
    if sys.stdout is None or (args.chat and sys.stdin is None):
        raise InputError(f"standard {'output' if sys.stdout is None else 'input'} is closed")
    for name in ("jax_enable_x64", "jax_disable_jit"):  # what these variables ask for is for other programs
        jax.config.update(name, False)
    join_hosts(args)
    convert.check_devices()
    if args.dtype == "float16" and jax.devices()[0].platform == "tpu":
        raise InputError("--dtype float16: kernels for TPUs take bfloat16 or float32")
    if args.no_compilation_cache:  # JAX_COMPILATION_CACHE_DIR may name one
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.jax_compilation_cache_dir and jax.process_count() == 1:
        # Several processes need that variable, and a folder of all hosts: process 0 alone writes, and GPUs that compile
        # would wait for one that reads. If the user's cache folder cannot be written, jax says so and goes on.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "open-llms-in-jax")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", 4 * 2**30)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        with contextlib.suppress(OSError):  # what a full disk cut off: jax 0.10 stores nothing beside it (jax #39880)
            for file in folder.glob("*-cache"):
                if not file.with_name(file.name.removesuffix("cache") + "atime").exists():
                    file.unlink()
    if jax.distributed.is_initialized():  # process 0 alone prints results; what libraries print goes to standard error
        results = os.dup(1) if jax.process_index() == 0 else os.open(os.devnull, os.O_WRONLY)
        sys.stdout = os.fdopen(results, "w", encoding="utf-8", errors="backslashreplace")
        os.dup2(2, 1)
        say(f"{jax.device_count()} devices of {jax.process_count()} processes")
    inputs = read_together(args)
    if sum(file.stat().st_size for file in inputs.checkpoint.folder.glob("*.safetensors")) > 1e8:  # it takes a while
        say_devices()
    begin = time.perf_counter()
    weights = jax.block_until_ready(load(inputs.checkpoint, inputs.mesh, args.dtype, args.quantize))
    load_s = time.perf_counter() - begin
    if not inputs.tokenizer.chat_template and not args.raw:
        say("note: no chat template; the prompts are continued as they are (chat_template.jinja in its folder is read)")
    same = "max_new_tokens", "seed", "draft", "draft_tokens", "quantize_cache"  # the names that generate has for them
    options = {name: getattr(args, name) for name in same} | {"rows": args.batch_size, "progress": Progress()}
    options |= {"stop_tokens": inputs.stop_tokens, "sampling": Sampling(args.temperature, args.top_k, args.top_p)}
    generation = functools.partial(generate, weights, config=inputs.checkpoint.config, mesh=inputs.mesh, **options)
    measured = chat(args, inputs, generation) if args.chat else answer(args, inputs, generation)
    if not measured:
        return
    stats = statistics(inputs.checkpoint.raw_config, inputs.mesh, load_s, measured)
    if args.output == "json":
        write(json.dumps({"stats": stats}) + "\n")
    else:
        rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in stats.items()}
        say(f"stats: {json.dumps(rounded)}")


@contextlib.contextmanager
def interrupts_noted(at_once=False):
    """Within it Ctrl-C raises nothing, since jax turns an exception amid its own callbacks into another. What is
    yielded raises KeyboardInterrupt if there was one. If `at_once`, the first Ctrl-C raises it itself."""
    noted, before = [], signal.getsignal(signal.SIGINT)

    def check():
        if noted:
            raise KeyboardInterrupt

    def note(*_):
        noted.append(True)
        if at_once and len(noted) == 1:
            raise KeyboardInterrupt

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def answer(args, inputs: Inputs, generation) -> dict:
    """Decodes the prompts and prints the results. Returns what was measured."""
    measured = {}
    results = Results(args, inputs.tokenizer, inputs.prompts, inputs.prompt_tokens, inputs.markers)
    steps = generation(inputs.prompt_tokens, max_seq_len=args.max_seq_len, stats=measured)
    first = next(steps)  # the first token is prefill's, what follows is the decode loop
    # The bar is shown where no text comes in its way: JSON comes in lines, and a file is not the bar's terminal.
    is_shown = args.output == "json" and not sys.stdout.isatty()
    is_shown |= sys.stderr.isatty() and os.path.isfile("/dev/stdout")
    bar = progress_bar(is_shown=is_shown, total=len(results.answers), desc="decoding", unit=" rows", unit_scale=False)
    try:
        profiler = jax.profiler.trace(args.profile) if args.profile else contextlib.nullcontext()
        with interrupts_noted() as check, profiler, bar:
            for tokens in itertools.chain([first], steps):
                results.add(tokens)
                bar.update(sum(token.finish_reason is not None for token in tokens))
                check()
    except KeyboardInterrupt:
        results.break_off()
        raise
    results.note_cut()
    return measured


@interrupts_noted()  # between prompts and answers too: one that comes while another is handled would end the chat
def chat(args, inputs: Inputs, generation) -> dict:
    """A conversation: each line of input is a message, and the model answers it in the light of all before it. Returns
    what was measured of the last answer. A thought without an answer is forgotten, with its question.

    The cache is kept, and only what differs from it is read. A conversation that outgrows CHAT_SLOTS is read again into
    twice as many: programs are compiled for a number of slots.
    """
    # Any line end, a file's mark of its encoding; what is not in UTF-8 is refused by encode.
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    with contextlib.suppress(ImportError):
        import readline  # input() then edits lines of any length, and takes what is pasted as one message

        readline.parse_and_bind(f"set enable-bracketed-paste {'off' if os.environ.get('TERM') == 'dumb' else 'on'}")
        readline.parse_and_bind("tab: tab-insert")  # in the place of file names
        for setting in ("input-meta on", "output-meta on", "convert-meta off"):  # letters beyond ASCII, in any locale
            readline.parse_and_bind(f"set {setting}")
    say("chat: /reset starts anew, Ctrl-C stops an answer, /exit or end of file ends")
    history, measured, kept, results = inputs.system, {}, {}, None
    seeds = itertools.count(args.seed)  # one for each answer, so that a question asked again may get another
    is_shown = sys.stdin.isatty() and sys.stdout.isatty()
    # How many tokens every conversation begins with.
    preamble = next((i for i, pair in enumerate(zip(*inputs.prompt_tokens)) if len({*pair}) > 1), 0)
    while True:
        try:
            if results and (message := results.answers[0].message()):
                history = [*history, {"role": "user", "content": results.prompts[0]}, message]
            elif results:
                say("note: there is no answer, so the question is forgotten")
            results = None
            with interrupts_noted(at_once=True):
                text = input("> ") if is_shown else input()  # this writes nothing: standard output may be full
            if (typed := text.strip()) == "/exit":
                return measured
            if typed in ("", "/reset"):
                history = inputs.system if typed else history
                continue
            prompt_tokens = encode(inputs.tokenizer, [text], False, history, args.template_args)
            check_context(prompt_tokens, inputs.checkpoint.raw_config)
            results = Results(args, inputs.tokenizer, [text], prompt_tokens, inputs.markers)
            slots = max(CHAT_SLOTS, model.power_of_two(len(prompt_tokens[0]) + args.max_new_tokens - 1))
            slots, of_turn = min(slots, args.max_seq_len or slots), {}
            with interrupts_noted() as check:
                of_chat = {"max_seq_len": slots, "kept": kept, "preamble": preamble, "seed": next(seeds) % 2**32}
                for tokens in generation(prompt_tokens, **of_chat, stats=of_turn, progress=Progress(check)):
                    results.add(tokens)
                    check()
            measured = of_turn
            results.note_cut()
        except KeyboardInterrupt:
            write("\n")
        except EOFError:
            write("\n" * is_shown)
            return measured
        except InputError as error:
            results = None
            say(f"error: {users_line(error)}; /reset forgets the conversation")


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # it may be closed, or a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the terminal's encoding, an answer appears
    convert.run(main)
