"""Prompt in, text out: the same program on a laptop, on one GPU, and on every host of a TPU pod.

    python3 main.py                                         # the demo
    python3 main.py --model_path PATH --prompt "..." "..."  # a Hugging Face checkpoint folder or hub id
    python3 main.py --help                                  # all flags

Results go to standard output, from process 0 alone; progress and statistics to standard error.
"""

import argparse
import atexit
import contextlib
import ctypes
import errno
import hashlib
import json
import math
import os
import queue
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would advise against running without torch
is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored


def end_interrupted(*_):
    """Ends this process with one line, as Ctrl-C does while libraries are imported."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


if __name__ == "__main__" and is_interruptible:  # the libraries take seconds to come; later Hosts takes over
    signal.signal(signal.SIGINT, end_interrupted)

import jax
import jinja2
from convert import (
    DTYPES,
    ArgumentParser,
    Checkpoint,
    find_checkpoint,
    find_devices,
    fingerprint,
    load,
    one_line,
    open_checkpoint,
    read_json,
    run,
    users_line,
)
from model import InputError, Sampling, check_mesh, check_prompts, generate_in_batches, make_mesh, mesh_shape
from tokenizers import Regex, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    SentencePieceBackend,
)

DEMO = Path(__file__).resolve().parent / "demo"
ROLL_CALL_S = 30  # how long processes wait for each other at the beginning
PROMPTS_CHARACTERS = 2**28  # of a file of prompts: more is no file of prompts
TEMPLATE_S = 20  # a chat template is a program, and could run for ever
TEMPLATE_CHARACTERS = 2**20  # that it may add to a prompt
LONG_PROMPT = 2**15  # tokens; a shorter one is taken whatever max_position_embeddings says, as transformers does
MOST_PROCESSES = 2**16
SILENCE_S = 20  # after which a process counts as dead; it is heard of every second
ALIKE = (  # flags that all hosts must give alike
    "raw", "max_new_tokens", "max_seq_len", "dtype", "quantize", "quantize_cache", "dp", "ep", "tp", "temperature",
    "top_k", "top_p", "seed",
)  # fmt: skip

# How text is split before a tiktoken vocabulary is applied, which its file does not say. Sources: the tokenizer.py of
# llama3 and of llama4 in Meta's package llama-models; tokenization_kimi.py of Moonshot's releases, with the pattern of
# Llama 4 but for runs of Chinese characters, which stand apart, and for the slash after punctuation.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA4_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = r"[\p{Han}]+|" + LLAMA4_PATTERN.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"\n/]", r"\n]")
TIKTOKEN_PATTERNS = {  # by model_type; Moonlight is a deepseek_v3
    "llama": LLAMA3_PATTERN,
    "llama4": LLAMA4_PATTERN,
    "llama4_text": LLAMA4_PATTERN,
    "deepseek_v3": KIMI_PATTERN,
    "kimi_k2": KIMI_PATTERN,
}

# Published peak memory bandwidth in GB/s of a device, by the beginning of jax's device_kind: the data sheets of
# Google Cloud's TPU versions and of NVIDIA's accelerators.
PEAK_GB_PER_S = {
    "TPU v4": 1228,
    "TPU v5 lite": 819,
    "TPU v5": 2765,
    "TPU v6 lite": 1640,
    "TPU7x": 7380,
    "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA A100 80GB PCIe": 1935,
    "NVIDIA L4": 300,
    "NVIDIA L40S": 864,
    "NVIDIA H100 PCIe": 2039,
    "NVIDIA H100 80GB HBM3": 3352,
    "NVIDIA H200": 4800,
    "NVIDIA B200": 8000,
    "NVIDIA GeForce RTX 4090": 1008,
}


def parse_arguments():
    """The command line, each value checked for its range."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument

    def number(kind, low, high):
        def parse(text):
            try:
                value = kind(text)
            except ValueError:
                value = math.nan
            if not low <= value <= high:
                raise argparse.ArgumentTypeError(f"{text!r} is not a number ({kind.__name__}) from {low} to {high}")
            return value

        return parse

    def path(text):
        if not text:
            raise argparse.ArgumentTypeError("is empty")
        return text

    count = number(int, 1, 2**30)
    add("--model_path", type=path, help="a Hugging Face checkpoint folder, one that convert.py wrote, or a hub id")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", nargs="+", help="prompts, decoded as one batch")
    prompts.add_argument("--prompts_file", type=path, help="one prompt a line, - for standard input")
    add("--raw", action="store_true", help="continue the prompt as it is, no chat template")
    add("--max_new_tokens", type=count, default=128, help="default 128")
    add("--max_seq_len", type=count, help="cache slots for a sequence, default what prompts and max_new_tokens need")
    add("--dtype", choices=[d for d in DTYPES if d != "int8"], default="bfloat16", help="default bfloat16")
    add("--quantize", choices=["int8"], help="weights in int8, one scale for each output channel")
    add("--quantize_cache", choices=["int8"], help="KV cache in int8, one scale for each token and head")
    for axis, split in {"dp": "the batch", "ep": "experts", "tp": "heads and columns"}.items():
        default = {"dp": "1", "ep": "1, on TPUs what tp cannot split", "tp": "all devices that are left"}[axis]
        add(f"--{axis}", type=count, help=f"split {split} into this many parts, default {default}")
    add("--temperature", type=number(float, 0, 1e6), default=0.0, help="0, the default, takes the most probable token")
    add("--top_k", type=number(int, 0, math.inf), default=0, help="sample from the K most probable tokens, 0: from all")
    add("--top_p", type=number(float, 1e-6, 1), default=1.0, help="sample from the top P probability, default 1")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of the sampling, default 0")
    add("--output", choices=["text", "json"], default="text", help="default text")
    add("--logprobs", action="store_true", help="JSON rows carry the log-probability of every generated token")
    add(
        "--coordinator", metavar="HOST:PORT", help="several hosts, where the cluster does not tell: process 0's address"
    )
    add("--num_processes", type=number(int, 1, MOST_PROCESSES), help="how many there are")
    add("--process_id", type=number(int, 0, MOST_PROCESSES), help="which of them this is, from 0")
    add("--no_compilation_cache", action="store_true", help="do not keep compiled programs for the next run")
    add("--profile", type=path, metavar="DIR", help="write a jax.profiler trace of the decode loop")
    args = parser.parse_args()
    if 0 < args.temperature < 1e-6:
        raise InputError(f"--temperature {args.temperature} is neither 0 nor at least 1e-6")
    distributed = (args.coordinator, args.num_processes, args.process_id)
    if any(value is not None for value in distributed) and None in distributed:
        raise InputError("--coordinator, --num_processes and --process_id go together")
    if args.coordinator:
        if not is_address(args.coordinator):
            raise InputError(f"--coordinator {args.coordinator!r} is not HOST:PORT")
        if args.process_id >= args.num_processes:
            raise InputError(f"--process_id {args.process_id} is not below --num_processes {args.num_processes}")
    return args


def enable_compilation_cache() -> None:
    """Keeps up to 4 GiB of compiled programs for the next run, in the user's cache folder. If that cannot be written,
    jax says so and goes on. Where JAX_COMPILATION_CACHE_DIR is set, jax's own variables decide."""
    if not jax.config.jax_compilation_cache_dir:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "open-llms-in-jax")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", 4 * 2**30)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def read_prompts(args) -> list[str]:
    """The prompts of the command line, of the file, or of the demo."""
    if args.prompt:
        return args.prompt
    file = args.prompts_file or DEMO / "prompts.txt"
    try:
        with open(0 if file == "-" else file, encoding="utf-8-sig", closefd=file != "-") as f:
            text = f.read(PROMPTS_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
    if len(text) > PROMPTS_CHARACTERS:
        raise InputError(f"{file}: has more than {PROMPTS_CHARACTERS} characters; split it")
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InputError(f"{file}: has no prompt; write one a line")
    return prompts


def read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer: tokenizer.json, else the vocabulary of tiktoken, sentencepiece or tekken.

    Of config.json transformers learns only what it chooses a class by: its own check of the rest refuses releases that
    model.py reads. A tokenizer that is a program of the checkpoint (`auto_map`) is never run.
    """
    folder, model_type = checkpoint.folder, checkpoint.raw_config["model_type"]
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    try:
        if (folder / "tokenizer.json").is_file():
            auto_map = settings.get("auto_map")
            if auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map:
                return PreTrainedTokenizerFast.from_pretrained(folder)
            config = CONFIG_MAPPING[model_type]() if model_type in CONFIG_MAPPING else PreTrainedConfig()
            config.tokenizer_class = checkpoint.raw_config.get("tokenizer_class")
            return AutoTokenizer.from_pretrained(folder, config=config, mistral_format=False, trust_remote_code=False)
        for name in ("tiktoken.model", "tokenizer.model"):
            if (folder / name).is_file():
                with open(folder / name, "rb") as file:
                    is_tiktoken = re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(1000))
                if is_tiktoken:
                    return tiktoken_tokenizer(checkpoint, settings)
                return SentencePieceTokenizer.from_pretrained(folder)
        if (folder / "tekken.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<s>", add_bos_token=True)
    except InputError:
        raise
    except Exception as error:  # a damaged file shows as almost any exception
        raise InputError(f"{folder}: the tokenizer cannot be loaded: {one_line(error)}") from error
    raise InputError(f"{folder}: no tokenizer.json, tokenizer.model, tiktoken.model or tekken.json; download them too")


def tiktoken_tokenizer(checkpoint: Checkpoint, settings: dict) -> PreTrainedTokenizerBase:
    """From a tiktoken vocabulary, which holds neither the special tokens nor the pattern that splits text."""
    folder, model_type = checkpoint.folder, checkpoint.raw_config["model_type"]
    if model_type not in TIKTOKEN_PATTERNS:
        raise InputError(f"{folder}: how a {model_type} splits text for tiktoken is not known; give its tokenizer.json")
    if not settings.get("added_tokens_decoder"):
        raise InputError(f"{folder}: tokenizer_config.json has no added_tokens_decoder, the special tokens of tiktoken")
    if max(map(int, settings["added_tokens_decoder"])) >= checkpoint.config.vocab_size:
        raise InputError(f"{folder}: added_tokens_decoder of tokenizer_config.json has an id beyond vocab_size")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    split = pre_tokenizers.Split(Regex(TIKTOKEN_PATTERNS[model_type]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return tokenizer


class SentencePieceTokenizer(SentencePieceBackend):
    """A model of sentencepiece, run by sentencepiece itself.

    What transformers 5.23 converts it to merges runs of spaces in another order, and loses accents where the model
    normalizes text.
    """

    def __init__(self, add_bos_token=True, add_eos_token=False, add_prefix_space=None, legacy=True, **settings):
        from sentencepiece import SentencePieceProcessor  # here, since most checkpoints do without

        model = SentencePieceProcessor(model_file=settings["vocab_file"])
        for name, index in {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id()}.items():
            settings.setdefault(f"{name}_token", model.id_to_piece(index) if index >= 0 else None)
        added = [name for name, is_added in (("bos", add_bos_token), ("eos", add_eos_token)) if is_added]
        pattern = "_".join(name for name in added if settings[f"{name}_token"]) or "none"
        # The model's prefix, a space, stands behind every special token if `legacy`, else at the beginning alone.
        self.has_prefix = add_prefix_space is not False and model.encode("a", out_type=str)[0].startswith("▁")
        legacy = legacy is not False and self.has_prefix
        super().__init__(legacy=legacy, special_tokens_pattern=pattern, **settings)
        self.add_tokens([model.id_to_piece(i) for i in range(len(model)) if model.is_control(i)], special_tokens=True)

    def tokenize(self, text, **options):
        if self.legacy or not self.has_prefix or not text:
            return super().tokenize(text, **options)
        tokens = super().tokenize("▁" + text.replace("▁", " "), **options)
        is_before_special = len(tokens) > 1 and tokens[0] == "▁" and tokens[1] in self.added_tokens_encoder
        return tokens[1:] if is_before_special else tokens

    def _convert_id_to_token(self, index):
        return super()._convert_id_to_token(index) if index < self.vocab_size else ""

    def convert_tokens_to_string(self, tokens):
        text, pieces = "", []
        for token in [*filter(None, tokens), ""]:
            if token and token not in self.added_tokens_encoder:
                pieces.append(token)
            else:
                text, pieces = text + self.sp_model.decode(pieces) + token, []
        return text if self.legacy or not self.has_prefix else text.removeprefix(" ")


def encode(tokenizer, prompts: list[str], raw: bool) -> list[list[int]]:
    """Token ids of each prompt: as the one message of a user, or `raw` as it stands.

    As in transformers, a special token that is written out in a prompt becomes that token.
    """

    def give_up(*_):
        raise TimeoutError(f"the chat template runs for more than {TEMPLATE_S} s")

    def from_template(prompt):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        if len(text) > len(prompt) + TEMPLATE_CHARACTERS:
            raise ValueError(f"the chat template makes {len(text)} characters of it")
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for row, prompt in enumerate(prompts, 1):
        if any("\ud800" <= c <= "\udfff" for c in prompt):  # which is how Python has bytes that are no text
            raise InputError(f"prompt {row} cannot be encoded: it is not in UTF-8")
    found = []
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        if not raw and takes_powers(tokenizer.get_chat_template()):
            raise ValueError("the chat template takes powers, which may not end")
        for prompt in prompts:
            signal.alarm(0 if raw else TEMPLATE_S)
            found.append(tokenizer(prompt)["input_ids"] if raw else from_template(prompt))
    except BaseException as error:  # jinja's, the template's own, or a panic of the tokenizer, which is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        remedy = "" if raw else "; --raw leaves the template out"
        raise InputError(f"prompt {len(found) + 1} cannot be encoded: {one_line(error)}{remedy}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return found


def takes_powers(template: str) -> bool:
    """Whether a chat template has the operator **, of which Python computes any size in one go that no alarm ends."""
    return any(token[1:] == ("operator", "**") for token in jinja2.Environment().lex(template))


def check_context(prompt_tokens: list[list[int]], raw_config: dict) -> None:
    """Raises InputError for a prompt of more tokens than LONG_PROMPT and max_position_embeddings: for hours it would
    compute what the model was not made for."""
    places = [raw_config, raw_config.get("text_config")]
    given = [place.get("max_position_embeddings") for place in places if isinstance(place, dict)]
    context = max([LONG_PROMPT, *(value for value in given if isinstance(value, int))])
    for row, prompt in enumerate(prompt_tokens, 1):
        if len(prompt) > context:
            raise InputError(f"prompt {row} has {len(prompt)} tokens, and the model takes {context}; shorten it")


def read_stop_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json or the text model in it: one id or a list."""
    file, config = checkpoint.folder / "generation_config.json", checkpoint.raw_config
    places = [read_json(file) if file.is_file() else {}, config, config.get("text_config")]
    given = [place.get("eos_token_id") for place in places if isinstance(place, dict)]
    stop = next((value for value in given if value is not None), None)
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(type(token) is int and token >= 0 for token in stop):
        raise InputError(f"{checkpoint.folder}: eos_token_id {stop!r} is neither a token id nor a list of them")
    return tuple(stop)


class Results:
    """Collects generated tokens and prints the rows in order: text as it comes, JSON when a row is finished.

    Whatever ends the run calls break_off, from a thread perhaps: a step's tokens are taken and printed under a lock.
    """

    def __init__(self, args, tokenizer, prompts, prompt_tokens):
        self.args, self.tokenizer, self.prompts, self.prompt_tokens = args, tokenizer, prompts, prompt_tokens
        self.rows = [[] for _ in prompts]
        self.hidden = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.lock = threading.Lock()
        self.current = -1  # the row being printed

    def next_row(self) -> None:
        self.current += 1
        self.taken = 0  # tokens of it
        self.visible = []  # those of them that decoding does not leave out
        self.printed = 0  # of the visible ones
        self.context = 0  # the first of those that were printed last
        if self.args.output == "text" and 1 < len(self.rows) > self.current:
            write(f"> {self.prompts[self.current]}\n")

    def add(self, tokens) -> None:
        """Takes the tokens of one step, prints what can be printed."""
        with self.lock:
            for token in tokens:
                if not math.isfinite(token.logprob):
                    raise InputError("the model's numbers are not finite: damaged weights, or try --dtype float32")
                self.rows[token.row].append(token)
            if self.current < 0:
                self.next_row()
            while self.current < len(self.rows) and self.print_row():
                self.next_row()

    def break_off(self) -> None:
        """Prints the finished rows that waited for one that will not be finished. Nothing is printed after it."""
        if not self.lock.acquire(timeout=5) or self.current < 0:  # who reads the output has stopped, perhaps
            return
        if self.args.output == "text" and self.printed:
            write("\n")
        for i in range(self.current + 1, len(self.rows)):
            if self.rows[i] and self.rows[i][-1].finish_reason:
                self.current = i - 1
                self.next_row()
                self.print_row()

    def print_row(self) -> bool:
        """Prints of the current row what can be printed; whether it is finished."""
        row = self.rows[self.current]
        if not row:  # it is of a later batch
            return False
        is_finished = row[-1].finish_reason is not None
        if self.args.output == "text":
            self.print_text([token.id for token in row], is_finished)
        elif is_finished:
            self.print_json(row)
        return is_finished

    def print_text(self, ids, is_finished) -> None:
        """What the new tokens add to the text. They are decoded together with those printed last, on which their
        spaces may depend; an incomplete character waits for its other tokens."""
        new, self.taken = ids[self.taken :], len(ids)
        names = self.tokenizer.convert_ids_to_tokens(new)
        self.visible += [i for i, name in zip(new, names, strict=True) if name and i not in self.hidden]
        ids = self.visible
        before = self.tokenizer.decode(ids[self.context : self.printed], skip_special_tokens=True)
        text = self.tokenizer.decode(ids[self.context :], skip_special_tokens=True)
        is_byte = bool(ids) and re.fullmatch("<0x[0-9A-F]{2}>", self.tokenizer.convert_ids_to_tokens(ids[-1]))
        if is_finished or not (is_byte or text.endswith("\ufffd")):
            write(text[len(before) :] + "\n" * is_finished)
            if len(ids) > self.printed:
                self.context, self.printed = self.printed, len(ids)

    def print_json(self, tokens) -> None:
        """A finished row."""
        ids = [token.id for token in tokens]
        row = {
            "prompt": self.prompts[self.current],
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "prompt_tokens": self.prompt_tokens[self.current],
            "tokens": ids,
            "logprobs": [token.logprob for token in tokens],
            "finish_reason": tokens[-1].finish_reason,
        }
        if not self.args.logprobs:
            del row["logprobs"]
        write(json.dumps(row) + "\n")


def write(text: str) -> None:
    """To standard output at once."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing it would fail once more
        raise InputError(f"standard output cannot be written: {one_line(error)}") from error


def statistics(raw_config: dict, mesh, load_s: float, measured: dict) -> dict:
    """The line of statistics; null where nothing was decoded or a peak is unknown.

    Rates leave compilation out. (`load_s` with --quantize has that of the rounding to int8, some tenths of a second.)
    """
    device = mesh.devices.flat[0]
    steps_per_s = measured["decode_steps"] / measured["decode_s"] if measured["decode_steps"] else None
    bandwidth = steps_per_s and measured["step_bytes"] * steps_per_s / 1e9
    kinds = [kind for kind in PEAK_GB_PER_S if device.device_kind.startswith(kind)]
    peak = PEAK_GB_PER_S[max(kinds, key=len)] * mesh.size if kinds else None
    memory = [d.memory_stats() or {} for d in jax.local_devices()]
    peak_bytes = max(m.get("peak_bytes_in_use", 0) for m in memory)
    if not peak_bytes:  # a CPU: of the process, which getrusage gives in KiB, on macOS in bytes
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "model_type": raw_config["model_type"],
        "devices": mesh.size,
        "platform": device.platform,
        "mesh": dict(mesh.shape),
        "load_s": load_s,
        "compile_s": measured["compile_s"],
        "prefill_s": measured["prefill_s"],
        "prefill_tokens_per_s": measured["prefill_tokens"] / measured["prefill_s"],
        "decode_steps_per_s": steps_per_s,
        "decode_tokens_per_s": steps_per_s and measured["decode_tokens"] / measured["decode_s"],
        "step_bytes": measured["step_bytes"],
        "bandwidth_gb_per_s": bandwidth,
        "bandwidth_utilization": bandwidth and peak and bandwidth / peak,
        "peak_memory_gb": peak_bytes / 1e9,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Several hosts
#
# One process on each, and all run the same program: each drives the devices of its host, and jax's collectives join
# them. A process that is alone is a run of one, of which Hosts only watches for Ctrl-C.


class Hosts:
    """The processes of a run and a watch over them: one that is missing, was started twice, differs from process 0 or
    dies ends all of them, each with one line that says which and why.

    Of a dead process jax's own connections tell late, in pages, or never. So each process has one more to process 0,
    until the end. On it lie JSON objects, one a line: `error` ends the receiver, `bye` ends the watch, an empty one
    says that the sender lives, all else is for whoever waits. A context manager: what breaks off its block ends all.
    """

    def __init__(
        self, address: str | None = None, count: int = 1, index: int = 0, local_device_ids: list | None = None
    ):
        """Calls the roll: `count` processes, of which this is number `index`, meet at HOST:PORT `address`."""
        self.count, self.index, self.local_device_ids = count, index, local_device_ids
        self.names = {index: f"process {index} ({socket.gethostname()}, pid {os.getpid()})"}
        self.connections: dict[int, socket.socket] = {}  # by the other's number: on process 0 to all, else to process 0
        self.inbox: queue.Queue = queue.Queue()  # of messages, each with its sender's number
        self.sending = threading.Lock()  # one line at a time
        self.ending = threading.Lock()  # of several reasons to end the first one counts
        self.reason = None  # of the end, as the others are told
        self.last_words = lambda: None  # called at an end that is not the regular one
        self.is_listening = False
        self.jax_address = None  # where jax's own connections meet
        self.interrupts, self.wakeup = socket.socketpair()
        if is_interruptible:
            self.watch_interrupts()
        if count > 1:
            self.call_roll(*address.rsplit(":", 1))

    def watch_interrupts(self) -> None:
        """Has a thread wait for Ctrl-C, while the main thread compiles, writes or waits for a collective. An exception,
        which is what Python makes of it, would come after that, and may be lost in a library's callback."""

        def wait():
            while (number := self.interrupts.recv(1)) and number[0] != signal.SIGINT:
                pass
            if number:
                self.end("interrupted", 130, told=f"{self.names[self.index]} was interrupted")

        self.before = signal.signal(signal.SIGINT, lambda *_: None)
        self.wakeup.setblocking(False)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=wait, daemon=True).start()

    def call_roll(self, host: str, port: str) -> None:
        self.deadline = time.monotonic() + ROLL_CALL_S
        if self.index == 0:
            self.listen(int(port))
        threading.Thread(target=self.beat, daemon=True).start()
        if not self.is_listening:
            self.connect(host.strip("[]"), int(port))
            _, roll = self.inbox.get()
            self.names, self.jax_address = dict(enumerate(roll["names"])), f"{host}:{roll['jax_port']}"
            return
        for _ in range(self.count - 1):
            try:
                self.inbox.get(timeout=max(0, self.deadline - time.monotonic()))
            except queue.Empty:
                missing = [str(i) for i in range(self.count) if i not in self.names]
                missing = ", ".join(missing[:10]) + f" and {len(missing) - 10} more" * (len(missing) > 10)
                self.end(
                    f"process {missing} of {self.count} did not come within {ROLL_CALL_S} s: start it on every host"
                )
        jax_port = free_port()
        self.jax_address = f"{host}:{jax_port}"
        self.names = {i: self.names[i] for i in range(self.count)}
        self.tell({"names": list(self.names.values()), "jax_port": jax_port})

    def listen(self, port: int) -> None:
        """Lets the others in, until the end. Not where the port is taken: by another process 0 perhaps, to which this
        one then presents itself, so that all hear of it."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            server = socket.create_server(("", port), family=family, backlog=self.count, dualstack_ipv6=both)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise InputError(f"--coordinator: port {port} cannot be opened: {one_line(error)}") from error

        def accept():
            while True:
                try:
                    threading.Thread(target=self.greet, args=[server.accept()[0]], daemon=True).start()
                except OSError:  # too many open files, of strangers perhaps
                    time.sleep(0.1)

        self.is_listening = True
        threading.Thread(target=accept, daemon=True).start()

    def greet(self, connection: socket.socket) -> None:
        """Takes a process into the roll; one that is there already ends all."""
        connection.settimeout(SILENCE_S)
        lines = connection.makefile("rb")
        try:
            hello = json.loads(lines.readline(2**16))
            i, name, count = int(hello["process"]), str(hello["name"]), int(hello["count"])
        except Exception:  # another program, that tries all ports perhaps
            return connection.close()
        line = None
        if count != self.count or not 0 <= i < count:
            line = f"{name} was started as one of {count} processes, process 0 of {self.count}"
        elif (known := self.names.setdefault(i, name)) is not name:  # in one step: two may come at the same time
            line = f"process {i} was started twice, as {known} and as {name}"
        else:
            self.connections[i] = connection
        if line or self.reason:  # or it comes to a run that is ending
            self.send(connection, {"error": self.reason or line})
        if line:
            self.end(line)
        self.inbox.put((i, hello))
        self.read(i, lines)

    def connect(self, host: str, port: int) -> None:
        """Presents this process to process 0."""
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=5)
                break
            except (OSError, UnicodeError) as error:  # the second of a name that cannot be one
                if time.monotonic() > self.deadline:
                    where = f"process 0 is not at {host}:{port} after {ROLL_CALL_S} s ({one_line(error)})"
                    self.end(f"{where}: start it on every host, with the same --coordinator")
                time.sleep(0.2)
        connection.settimeout(SILENCE_S)
        self.send(connection, {"process": self.index, "count": self.count, "name": self.names[self.index]})
        self.names[0] = f"process 0 at {host}:{port}"  # until the roll tells more
        self.connections[0] = connection
        threading.Thread(target=self.read, args=[0, connection.makefile("rb")], daemon=True).start()

    def read(self, i: int, lines) -> None:
        """Takes what number i says, until it says goodbye."""
        try:
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError(f"it says {message!r:.40}")
                if "bye" in message:
                    return
                if "error" in message:  # in a thread: this one has to see the connection close, for which `end` waits
                    threading.Thread(target=self.end, args=[message["error"]], daemon=True).start()
                elif message:
                    self.inbox.put((i, message))
            cause = "died: its connection is closed"
        except TimeoutError:
            cause = f"has not been heard of for {SILENCE_S} s"
        except (OSError, ValueError) as error:
            cause = f"died: {one_line(error)}"
        self.connections.pop(i, None)
        self.end(f"{self.names[i]} {cause}")

    def tell(self, message: dict) -> None:
        for connection in list(self.connections.values()):
            self.send(connection, message)

    def send(self, connection: socket.socket, message: dict) -> None:
        # Of a connection that is lost, the thread that reads knows.
        with self.sending, contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")

    def beat(self) -> None:
        while True:
            time.sleep(1)
            self.tell({})

    def agree(self, facts: dict) -> None:
        """Waits for all processes, and ends them where one has other facts, JSON values by name, than process 0."""
        if self.index != 0:
            self.tell({"facts": facts})
            self.inbox.get()
            return
        for _ in range(self.count - 1):
            i, message = self.inbox.get()
            for name, ours in facts.items():
                theirs = message["facts"].get(name)
                if theirs != ours:
                    self.end(f"{self.names[i]} has {name} {theirs}, process 0 has {ours}: give all of them the same")
        self.tell({"facts": "agreed"})

    def end(self, line: str, status: int = 2, told: str | None = None) -> None:
        """Ends this process with `line`, and the others, which are `told` something else where that is given."""
        self.ending.acquire()  # and never released
        limit = threading.Timer(ROLL_CALL_S + 10, os._exit, [status])  # whatever of this should hang
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(OSError):
                print(f"error: {line}", file=sys.stderr, flush=True)
            self.reason = told or line
            self.tell({"error": self.reason})
            self.last_words()
            if self.is_listening:  # until all have heard it, at the beginning also those that are still to come
                deadline = max(time.monotonic() + 5, self.deadline if len(self.names) < self.count else 0)
                while (self.connections or len(self.names) < self.count) and time.monotonic() < deadline:
                    time.sleep(0.01)
        finally:
            os._exit(status)  # at once: what jax does at the regular end needs the others

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, kind, error, trace) -> None:
        name = self.names[self.index]
        if self.count == 1 or error is None:
            self.tell({"bye": True})
            if is_interruptible:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGINT, self.before)
            self.wakeup.close()
        elif line := users_line(error):
            self.end(line, told=f"{name}: {line}")
        else:
            time.sleep(3)  # if another one has died, jax fails first and the line is under way
            traceback.print_exception(error)
            self.end(f"{name} failed: {one_line(error)}", 1)


def find_hosts(args) -> Hosts:
    """The processes of this run: as the flags say, or as jax finds them in a TPU pod, under Slurm or Open MPI."""
    if args.coordinator:
        return Hosts(args.coordinator, args.num_processes, args.process_id)
    # Of Slurm a job step: sbatch and salloc set the variables too, and start one process.
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1")
    is_launched = "SLURM_STEP_NODELIST" in os.environ and tasks != "1"
    is_launched |= os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
    has_tpus = os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    if not is_launched and not has_tpus:
        return Hosts()
    remedy = "give --coordinator, --num_processes and --process_id"
    try:
        from jax._src.clusters import ClusterEnv  # what initialize() detects, before it joins; it has no public name

        unknown = [None] * 5
        address, count, index, local_device_ids = ClusterEnv.auto_detect_unset_distributed_params(*unknown, ROLL_CALL_S)
    except Exception as error:  # of what it asks, or a jax that has this elsewhere
        raise InputError(f"jax does not find the other hosts ({one_line(error)}): {remedy}") from error
    if count is None and is_launched:  # Open MPI 5
        raise InputError(f"jax does not know this cluster: {remedy}")
    if count is None:
        return Hosts()
    if not 0 <= index < count <= MOST_PROCESSES or not is_address(address):
        raise InputError(f"this cluster has a process {index} of {count}, with process 0 at {address}: {remedy}")
    # jax expects a process for each GPU. One that is alone on its host has all of them.
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if local.partition("(")[0] == "1":  # Slurm writes 1(x2) for two hosts of one
        local_device_ids = None
    return Hosts(address, count, index, local_device_ids)


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    port = re.fullmatch(r".+:(\d{1,5})", text)
    return port is not None and 0 < int(port[1]) < 2**16


def join(hosts: Hosts) -> None:
    """jax.distributed.initialize, which ends this process with one line where it does not come to an end."""
    hush()
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and do nothing with it
    # Where process 0 dies, jax aborts the others, perhaps before the watch has told them. So SIGABRT first calls C's
    # sleep, which takes the signal's number, 6, for its seconds.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    line = f"jax does not join {hosts.jax_address} within {ROLL_CALL_S} s: hosts must reach each other at all ports"
    timer = threading.Timer(ROLL_CALL_S, hosts.end, [line])
    timer.start()
    try:
        jax.distributed.initialize(
            hosts.jax_address,
            hosts.count,
            hosts.index,
            hosts.local_device_ids,
            cluster_detection_method="deactivate",  # or inside of a Slurm job jax would take one GPU alone
            shutdown_timeout_seconds=SILENCE_S,
        )
    finally:
        timer.cancel()


def hush() -> None:
    """Sends what jax's libraries print to a file: standard output is for results, and where another process dies they
    print pages on standard error, where Hosts says it in a line."""
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="backslashreplace") for number in (1, 2)
    )
    log, path = tempfile.mkstemp(prefix="open-llms-in-jax-", suffix=".log")
    atexit.register(os.unlink, path)  # of a process that does not come to its regular end, it stays
    for number in (1, 2):
        os.dup2(log, number)


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------------------------------------------
# The program


def main() -> None:
    args = parse_arguments()
    if sys.stdout is None:
        raise InputError("standard output is closed")
    if not args.no_compilation_cache:
        enable_compilation_cache()
    with find_hosts(args) as hosts:
        if hosts.count > 1:
            join(hosts)
        if hosts.index != 0:
            # Process 0 alone prints results.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        decode(args, hosts)
        hosts.agree({})  # jax's own end allows the last one some seconds, which is too few for a slow printer


def decode(args, hosts: Hosts) -> None:
    """Loads the checkpoint, decodes the prompts, prints results and statistics. All processes do the same."""
    devices = find_devices()  # of all processes: here each learns of the others'
    if hosts.count > 1 and hosts.index == 0:
        print(f"{len(devices)} devices of {', '.join(hosts.names.values())}", file=sys.stderr)
    # Whatever is wrong is said before anything takes long.
    prompts = read_prompts(args)
    path = args.model_path or str(DEMO)
    if hosts.index == 0:
        folder = find_checkpoint(path)
    hosts.agree({"jax": jax.__version__} | {f"--{name}": value for name, value in vars(args).items() if name in ALIKE})
    if hosts.index != 0:  # process 0 has downloaded it
        folder = find_checkpoint(path, local_files_only=True)
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    stop_tokens = read_stop_tokens(checkpoint)
    tokenizer = read_tokenizer(checkpoint)
    has_template = bool(tokenizer.chat_template)
    prompt_tokens = encode(tokenizer, prompts, args.raw or not has_template)
    check_prompts(prompt_tokens, config, args.max_seq_len)
    check_context(prompt_tokens, checkpoint.raw_config)
    if hosts.count > 1:
        digest = hashlib.sha256(json.dumps(prompt_tokens).encode()).hexdigest()
        hosts.agree({"another checkpoint, SHA-256": fingerprint(checkpoint), "other prompts, SHA-256": digest})
    mesh = make_mesh(*mesh_shape(config, devices, args.dp, args.ep, args.tp))
    check_mesh(config, mesh)
    if args.profile:
        try:
            Path(args.profile).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.profile).close()
        except OSError as error:
            raise InputError(f"--profile {args.profile}: cannot be written: {one_line(error)}") from error

    if not has_template and not args.raw:
        print("note: this tokenizer has no chat template; the prompts are continued as they are", file=sys.stderr)
    begin = time.perf_counter()
    weights = jax.block_until_ready(load(checkpoint, mesh, args.dtype, args.quantize == "int8"))
    load_s = time.perf_counter() - begin

    measured = {}
    steps = generate_in_batches(
        weights,
        prompt_tokens,
        config,
        mesh,
        max_new_tokens=args.max_new_tokens,
        max_seq_len=args.max_seq_len,
        stop_tokens=stop_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p),
        seed=args.seed,
        int8_cache=args.quantize_cache == "int8",
        stats=measured,
    )
    results = Results(args, tokenizer, prompts, prompt_tokens)
    hosts.last_words = results.break_off
    results.add(next(steps))  # the first token is prefill's, what follows is the decode loop
    with jax.profiler.trace(args.profile) if args.profile else contextlib.nullcontext():
        for tokens in steps:
            results.add(tokens)

    stats = statistics(checkpoint.raw_config, mesh, load_s, measured)
    if args.output == "json":
        write(json.dumps({"stats": stats}) + "\n")
    elif hosts.index == 0:
        rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in stats.items()}
        print(f"stats: {json.dumps(rounded)}", file=sys.stderr)


if __name__ == "__main__":
    if sys.stdout is not None:  # closed by the shell
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the terminal's encoding, an answer appears
    run(main)
