"""Breaks runs of main.py at many moments: what is left must end within a minute, and print no row by halves.

    python3 tests/stress/hosts.py llama3 [--moments 14] [--seconds 12] [--processes 2]

At each moment, spread from the start over that many seconds, one process alone gets Ctrl-C (SIGINT); then, in a run of
several on this machine, process 0 does, all do, and processes 0 and 1 get SIGKILL and SIGTERM in turn. The prompts are
300 sentences for the folder's demo. Prints a line of JSON for each run and at the end one that counts; what fails is
in it, and makes the exit status 1.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from folders import ROOT, run

LIMIT_S = 60  # in which all must end
WORDS = "What is the capital of France plus 3 and 4 Hello how many days are there in a week Peru tell me"


def break_at(folder: str, prompts: Path, processes: int, seconds: float, number: signal.Signals, victims: list) -> dict:
    """One run, of which `victims` get the signal after so many seconds: what became of each process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    started = []
    for i in range(processes):
        # A shell has its background jobs ignore SIGINT, and so what they start.
        command = ["env", "--default-signal=INT", sys.executable, ROOT / folder / "main.py", "--output", "json"]
        command += ["--prompts_file", prompts, "--max_new_tokens", "128", "--no_compilation_cache"]
        if processes > 1:
            command += ["--coordinator", address, "--num_processes", str(processes), "--process_id", str(i)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    with ThreadPoolExecutor(processes) as readers:  # or a full pipe would stop them
        outputs = [readers.submit(process.communicate) for process in started]
        time.sleep(seconds)
        begin, early = time.perf_counter(), [process.poll() for process in started]
        for i in victims:
            started[i].send_signal(number)
        while time.perf_counter() < begin + LIMIT_S and any(process.poll() is None for process in started):
            time.sleep(0.01)
        took = time.perf_counter() - begin
        for process in started:
            process.kill()
    problems, rows = [], []
    for i, (process, output) in enumerate(zip(started, outputs, strict=True)):
        out, err = (text.decode() for text in output.result())
        try:
            rows += [json.loads(line).get("prompt_tokens") for line in out.splitlines()]
        except ValueError:
            problems.append(f"process {i} prints {out[-80:]!r}")
        is_cut_off = i == 0 and process.returncode == 0 and "stats" not in out
        if is_cut_off or early[i] or took > LIMIT_S or "Traceback" in err:
            problems.append(f"process {i} ends with {process.returncode}: {err[-300:]!r}")
    report = {"seconds": round(seconds, 1), "signal": number.name, "victims": victims, "rows": len(rows)}
    statuses = [process.returncode for process in started]
    return report | {"statuses": statuses, "took_s": round(took, 2), "problems": problems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--moments", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if not (ROOT / args.folder / "main.py").is_file():
        raise ValueError(f"{args.folder}: no such model folder")
    if args.processes < 2 or args.moments < 1:
        raise ValueError("--processes from 2, --moments from 1")
    chance, reports = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts"
        prompts.write_text(
            "\n".join(" ".join(chance.choices(WORDS.split(), k=chance.randint(1, 40))) for _ in range(300))
        )
        everyone = list(range(args.processes))
        for moment in range(args.moments):
            seconds = 0.3 + moment * args.seconds / args.moments
            deadly = [signal.SIGKILL, signal.SIGTERM][moment % 2]
            cases = [(1, signal.SIGINT, [0]), (args.processes, signal.SIGINT, [0])]
            cases += [(args.processes, signal.SIGINT, everyone)]
            cases += [(args.processes, deadly, [0]), (args.processes, deadly, [1])]
            for processes, number, victims in cases:
                reports.append(break_at(args.folder, prompts, processes, seconds, number, victims))
                print(json.dumps(reports[-1]), flush=True)
    failed = sum(bool(report["problems"]) for report in reports)
    longest = max(report["took_s"] for report in reports)
    print(json.dumps({"folder": args.folder, "runs": len(reports), "failed": failed, "longest_s": longest}))
    sys.exit(failed > 0)


if __name__ == "__main__":
    run(main)
