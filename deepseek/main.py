"""Prompt in, text out: the same program on a laptop, on one GPU, and on every host of a TPU pod.

    python3 main.py                                         # the demo
    python3 main.py --model_path PATH --prompt "..." "..."  # a Hugging Face checkpoint folder or hub id
    python3 main.py --help                                  # all flags

Results go to standard output, from process 0 alone; progress and statistics to standard error.
"""

import argparse
import contextlib
import json
import math
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would advise against running without torch

import jax
from convert import DTYPES, ArgumentParser, Checkpoint, find_checkpoint, load, one_line, open_checkpoint, read_json, run
from model import InputError, Sampling, check_mesh, check_prompts, generate, make_mesh, mesh_shape
from transformers import AutoTokenizer

DEMO = Path(__file__).resolve().parent / "demo"

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
    add("--num_processes", type=count, help="how many there are")
    add("--process_id", type=number(int, 0, 2**30), help="which of them this is, from 0")
    add("--no_compilation_cache", action="store_true", help="do not keep compiled programs for the next run")
    add("--profile", type=path, metavar="DIR", help="write a jax.profiler trace of the decode loop")
    args = parser.parse_args()
    if 0 < args.temperature < 1e-6:
        raise InputError(f"--temperature {args.temperature} is neither 0 nor at least 1e-6")
    distributed = (args.coordinator, args.num_processes, args.process_id)
    if any(value is not None for value in distributed) and None in distributed:
        raise InputError("--coordinator, --num_processes and --process_id go together")
    if args.coordinator:
        if not re.fullmatch(r".+:\d+", args.coordinator):
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


def start_distributed(args) -> None:
    """Joins the other hosts: as the flags say, or as a TPU pod, Slurm or Open MPI tells jax."""
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    elif any(os.environ.get(name, "1") != "1" for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")):
        jax.distributed.initialize()
    elif os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0"):  # a TPU host, of a pod perhaps
        with contextlib.suppress(ValueError):  # not in a cluster that jax knows: this host is alone
            jax.distributed.initialize()
    if jax.distributed.is_initialized():
        # Libraries of jax print their connections on the process's standard output, which is for results.
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
        os.dup2(2, 1)


def read_prompts(args) -> list[str]:
    """The prompts of the command line, of the file, or of the demo."""
    if args.prompt:
        return args.prompt
    file = args.prompts_file or DEMO / "prompts.txt"
    try:
        with open(0 if file == "-" else file, encoding="utf-8-sig", closefd=file != "-") as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InputError(f"{file}: has no prompt; write one a line")
    return prompts


def read_tokenizer(folder: Path):
    """The checkpoint's own tokenizer; transformers reads config.json for it too. Runs no code of the checkpoint."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged file shows as almost any exception
        raise InputError(f"{folder}: the tokenizer and config.json cannot be loaded: {one_line(error)}") from error


def encode(tokenizer, prompts: list[str], raw: bool) -> list[list[int]]:
    """Token ids of each prompt: as the one message of a user, or `raw` as it stands."""
    try:
        if raw:
            return [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            for prompt in prompts
        ]
    except Exception as error:  # jinja's, or the template's own
        remedy = "" if raw else "; --raw leaves the template out"
        raise InputError(f"the prompt cannot be encoded: {one_line(error)}{remedy}") from error


def read_stop_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json or the text model in it: one id or a list."""
    file, config = checkpoint.folder / "generation_config.json", checkpoint.raw_config
    places = [read_json(file) if file.exists() else {}, config, config.get("text_config")]
    given = [place.get("eos_token_id") for place in places if isinstance(place, dict)]
    stop = next((value for value in given if value is not None), None)
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(type(token) is int and token >= 0 for token in stop):
        raise InputError(f"{checkpoint.folder}: eos_token_id {stop!r} is neither a token id nor a list of them")
    return tuple(stop)


class Results:
    """Collects generated tokens and prints the rows in order: text as it comes, JSON when a row is finished."""

    def __init__(self, args, tokenizer, prompts, prompt_tokens):
        self.args, self.tokenizer, self.prompts, self.prompt_tokens = args, tokenizer, prompts, prompt_tokens
        self.rows = [[] for _ in prompts]
        self.current = -1  # the row being printed
        self.next_row()

    def next_row(self) -> None:
        self.current += 1
        self.printed = 0  # tokens of it
        self.context = 0  # the first of those that were printed last
        if self.args.output == "text" and 1 < len(self.rows) > self.current:
            write(f"> {self.prompts[self.current]}\n")

    def add(self, tokens) -> None:
        """Takes the tokens of one step, prints what can be printed."""
        for token in tokens:
            if not math.isfinite(token.logprob):
                raise InputError("the model's numbers are not finite: damaged weights, or try --dtype float32")
            self.rows[token.row].append(token)
        is_finished = True
        while is_finished and self.current < len(self.rows):
            row = self.rows[self.current]
            is_finished = row[-1].finish_reason is not None
            if self.args.output == "text":
                self.print_text([token.id for token in row], is_finished)
            elif is_finished:
                self.print_json(row)
            if is_finished:
                self.next_row()

    def print_text(self, ids, is_finished) -> None:
        """What the new tokens add to the text. They are decoded together with those printed last, on which their
        spaces may depend; an incomplete character waits for its other tokens."""
        before = self.tokenizer.decode(ids[self.context : self.printed], skip_special_tokens=True)
        text = self.tokenizer.decode(ids[self.context :], skip_special_tokens=True)
        if is_finished or not text.endswith("\ufffd"):
            write(text[len(before) :] + "\n" * is_finished)
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
    """To standard output at once, from process 0 alone."""
    if jax.process_index() != 0:
        return
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


def main() -> None:
    args = parse_arguments()
    if sys.stdout is None:
        raise InputError("standard output is closed")
    if not args.no_compilation_cache:
        enable_compilation_cache()
    start_distributed(args)
    prompts = read_prompts(args)
    # Whatever is wrong is said before anything takes long.
    checkpoint = open_checkpoint(find_checkpoint(args.model_path or str(DEMO)))
    config = checkpoint.config
    stop_tokens = read_stop_tokens(checkpoint)
    tokenizer = read_tokenizer(checkpoint.folder)
    has_template = bool(tokenizer.chat_template)
    prompt_tokens = encode(tokenizer, prompts, args.raw or not has_template)
    check_prompts(prompt_tokens, config, args.max_seq_len)
    mesh = make_mesh(*mesh_shape(config, jax.devices(), args.dp, args.ep, args.tp))
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
    steps = generate(
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
    results.add(next(steps))  # the first token is prefill's, what follows is the decode loop
    with jax.profiler.trace(args.profile) if args.profile else contextlib.nullcontext():
        for tokens in steps:
            results.add(tokens)

    stats = statistics(checkpoint.raw_config, mesh, load_s, measured)
    if args.output == "json":
        write(json.dumps({"stats": stats}) + "\n")
    elif jax.process_index() == 0:
        rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in stats.items()}
        print(f"stats: {json.dumps(rounded)}", file=sys.stderr)


if __name__ == "__main__":
    if sys.stdout is not None:  # closed by the shell
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the terminal's encoding, an answer appears
    run(main)
