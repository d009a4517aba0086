"""main.py on several hosts: real processes on loopback, each with its own devices, and what becomes of the others when
one is missing, differs or dies."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, decode, import_folder, save_random
from test_parity import llama

ENDLESS = ["--raw", "--prompt", "Hello!", "--max_new_tokens", "30000", "--temperature", "9", "--tp", "1", "--dp", "2"]


class Process:
    """A main.py with its own devices, whose output can be read while it runs."""

    def __init__(self, *arguments, folder="llama3", devices=1, environment=(), program=()):
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115, read later
        # A shell has its background jobs ignore SIGINT, and so what they start.
        program = program or [ROOT / folder / "main.py"]
        command = ["env", "--default-signal=INT", sys.executable, *program, *map(str, arguments)]
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)} | dict(environment)
        self.process = subprocess.Popen(command, env=environment, stdout=self.out, stderr=self.err)

    def wait(self, seconds):
        """Exit status, standard output and standard error."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"a process hangs: {self.written()}")
        return self.process.returncode, *self.written()

    def written(self):
        return [os.pread(file.fileno(), 2**20, 0).decode() for file in (self.out, self.err)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(count, *arguments, wanted=None, port=None, **options):
    """The processes numbered `wanted`, by default all, of a run of `count`."""
    coordinator = ["--coordinator", f"localhost:{port or free_port()}", "--num_processes", count]
    wanted = range(count) if wanted is None else wanted
    return [Process(*coordinator, "--process_id", i, *arguments, **options) for i in wanted]


def test_one_process_of_one():
    """What a script gives that was written for several: standard output has the results alone."""
    (process,) = start(1, "--prompt", "Hello!", "--output", "json")
    status, out, err = process.wait(120)
    row, stats = map(json.loads, out.splitlines())
    assert status == 0 and row["text"] and stats["stats"]["devices"] == 1, err


def start_endless(**options):
    """Two processes in the middle of a decode."""
    processes = start(2, *ENDLESS, **options)
    deadline = time.monotonic() + 90
    while len(processes[0].written()[0]) < 20:
        assert time.monotonic() < deadline and processes[0].process.poll() is None, processes[0].written()
        time.sleep(0.1)
    return processes


def assert_all_end(processes, *words, status=2):
    """Within a minute, each with one line of error that has these words. What is none are notes, and what gloo says."""
    for process in processes:
        code, out, err = process.wait(60)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == status and len(errors) == 1 and "Traceback" not in err and not out, (code, err)
        assert all(word in errors[0] for word in words), err


def assert_aborted(processes):
    """Within a minute, with messages of jax, gloo or faulthandler."""
    for process in processes:
        code, _, err = process.wait(90)  # imports are not inside the minute
        assert code not in (0, None) and err, (code, err)


def test_two_processes():
    """Print, from process 0 alone, what one process with all the devices prints; a proxy leads nowhere from them."""
    flags = ["--output", "json", "--logprobs", "--dtype", "float32", "--temperature", "0.7", "--seed", "5"]
    flags += ["--max_new_tokens", "16"]
    alone = Process(*flags, devices=4).wait(180)
    proxy = {"http_proxy": "http://127.0.0.1:9"}
    outputs = [process.wait(180) for process in start(2, *flags, devices=2, environment=proxy)]
    assert [status for status, *_ in (alone, *outputs)] == [0, 0, 0] and outputs[1][1] == "", outputs
    rows, wanted = ([json.loads(line) for line in out.splitlines()] for out in (outputs[0][1], alone[1]))
    assert rows[-1]["stats"]["mesh"] == wanted[-1]["stats"]["mesh"] and len(rows) == len(wanted) > 2
    for row, expected in zip(rows[:-1], wanted[:-1], strict=True):
        np.testing.assert_allclose(row.pop("logprobs"), expected.pop("logprobs"), atol=1e-4)
        assert row == expected


@pytest.mark.slow
def test_latents_and_experts():
    """The golden text of a model with both, from two processes, with drafts."""
    mesh = ["--dp", "1", "--ep", "2", "--quantize_cache", "int8", "--draft", "mtp"]
    outputs = [process.wait(180) for process in start(2, *mesh, folder="deepseek", devices=2)]
    golden = json.loads((ROOT / "tests" / "golden_demo.json").read_text())["deepseek"]
    text = "".join(f"> {prompt}\n{answer}\n" for prompt, answer in golden.items())
    assert [output[:2] for output in outputs] == [(0, text), (0, "")], outputs
    assert "4 devices of 2 processes" in outputs[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama3", "qwen3_5"])
def test_prompts_that_begin_alike(folder):
    """Two processes copy caches, or states, from row to row, and give the answers of one."""
    prompts = ["What are the days of the week? " * 25 + end for end in ("Hello!", "And of the year?", "", "Hello!")]
    flags = ["--raw", "--output", "json", "--dtype", "float32", "--max_new_tokens", "8", "--dp", "1"]
    alone = Process(*flags, "--prompt", *prompts, folder=folder, devices=4).wait(180)
    outputs = [each.wait(180) for each in start(2, *flags, "--prompt", *prompts, folder=folder, devices=2)]
    assert [status for status, *_ in (alone, *outputs)] == [0, 0, 0], outputs
    rows, wanted = ([json.loads(line) for line in out.splitlines()] for out in (outputs[0][1], alone[1]))
    assert [row["tokens"] for row in rows[:-1]] == [row["tokens"] for row in wanted[:-1]]
    stats, read_apart = rows[-1]["stats"], sum(len(row["prompt_tokens"]) for row in rows[:-1])
    assert stats["prefill_tokens_per_s"] * stats["prefill_s"] < read_apart / 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("nodes", "tasks", "local"), [("localhost", "2", "01"), ("127.0.0.[1-2]", "1(x2)", "00")], ids=["a host", "two"]
)
def test_slurm_tells(nodes, tasks, local):
    job = str((os.getpid() + len(nodes)) % 4096)  # of which jax makes its port
    step = {"SLURM_JOB_ID": job, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks}
    processes = [
        Process("--prompt", "Hello!", environment=step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": local[i]})
        for i in range(2)
    ]
    outputs = [process.wait(120) for process in processes]
    assert [output[:2] for output in outputs] == [(0, "Hello! How can I help you?\n"), (0, "")], outputs
    assert "2 devices of 2 processes" in outputs[0][2]


@pytest.mark.parametrize(("failures", "is_lost"), [(2, False), (3, True)])
def test_a_lost_connection_is_tried_again(monkeypatch, failures, is_lost):
    """To a TPU's metadata server: requests' errors are OSErrors."""
    main, left = import_folder("llama3").main, list(range(failures))
    args = SimpleNamespace(coordinator="localhost:1", num_processes=2, process_id=0)

    def initialize(*_):
        if left:
            left.pop()
            raise ConnectionError("lost")

    monkeypatch.setattr(main.jax.distributed, "initialize", initialize)
    monkeypatch.setattr(main.time, "sleep", lambda seconds: None)
    if is_lost:
        with pytest.raises(main.InputError, match=r"does not find the other hosts .*lost"):
            main.join_hosts(args)
    else:
        main.join_hosts(args)
    assert not left


@pytest.mark.slow
def test_compiled_programs_of_several(tmp_path):
    """None are kept in a host's own folder, where only process 0 would find them in the next run. In a folder that the
    user names they are, and the next run reads them."""
    shared = {"JAX_COMPILATION_CACHE_DIR": tmp_path / "shared", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0}
    kept = []
    for environment in ({"XDG_CACHE_HOME": tmp_path, "JAX_COMPILATION_CACHE_DIR": ""}, shared, shared):
        flags = {name: str(value) for name, value in environment.items()}
        outputs = [process.wait(120) for process in start(2, "--max_new_tokens", 2, environment=flags)]
        assert [status for status, _, _ in outputs] == [0, 0], outputs
        kept.append({file.name for file in tmp_path.glob("**/*-cache")})
    assert not kept[0] and kept[1] == kept[2] and any("jit_step" in name for name in kept[1])


def test_a_cluster_that_jax_does_not_find():
    """Open MPI 5 does not say where the first process is."""
    assert_all_end([Process(environment={"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})], "--coordinator")


@pytest.mark.parametrize(
    ("variables", "is_alone"),
    [
        ({"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "a,b"}, True),  # Kaggle
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True),
        ({"TPU_WORKER_HOSTNAMES": "t1k-0,t1k-1"}, False),  # GKE
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_COORDINATOR_ADDRESS": "slice-0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "", "GCE_METADATA_IP": "refused"}, True),  # a container
        ({"GCE_METADATA_IP": "silent.invalid"}, True),
        ({"GCE_METADATA_IP": "answers"}, False),
        ({"TPU_SKIP_MDS_QUERY": "1", "GCE_METADATA_IP": "answers"}, True),
    ],
)
def test_a_tpu_host_that_is_alone(monkeypatch, variables, is_alone):
    """Starts at once, without jax.distributed."""
    main = import_folder("llama3").main
    for name in [name for name in os.environ if name.startswith(("TPU_", "MEGASCALE_", "GCE_"))]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = {"refused": f"127.0.0.1:{free_port()}", "answers": f"127.0.0.1:{server.getsockname()[1]}"}
        for name, value in variables.items():
            monkeypatch.setenv(name, addresses.get(value, value))
        begin = time.monotonic()
        assert main.is_lone_tpu_host() == is_alone and time.monotonic() - begin < 7


@pytest.mark.sampled
@pytest.mark.parametrize(("number", "how"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_one_dies(number, how):
    """In the middle of a decode."""
    processes = start_endless()
    processes[number].process.send_signal(how)
    assert_aborted([processes[1 - number]])
    processes[number].process.kill()


IMPATIENT = f"""
import functools, sys, jax
sys.path.insert(0, {str(ROOT / "llama3")!r})
jax.distributed.initialize = functools.partial(
    jax.distributed.initialize, initialization_timeout=30, heartbeat_timeout_seconds=20
)
import convert, main
main.PATIENCE = 5
convert.run(main.main)
"""


@pytest.mark.slow
def test_one_is_missing_or_stopped():
    """Three runs at once, since they wait: process 1 of three is missing, process 0 of two, and one stops answering.
    With jax's own limits they would wait five minutes."""
    program = {"program": ["-c", IMPATIENT]}
    stopped = start_endless(**program)
    waiting = [*start(3, wanted=(0, 2), **program), *start(2, wanted=(1,), **program)]
    stopped[1].process.send_signal(signal.SIGSTOP)
    assert_aborted([stopped[0], *waiting])
    for process, count in zip(waiting, (3, 3, 2), strict=True):
        assert f"waiting for all {count} processes: 10 s" in process.written()[1]
    stopped[1].process.kill()


@pytest.mark.slow
def test_an_interrupt_of_all(tmp_path):
    """As a terminal or srun sends it. Process 0 prints what was finished, though a row before it never will be."""
    llama3 = import_folder("llama3")
    save_random(tmp_path, *llama()[1:])
    tokenizer = llama3.main.read_tokenizer(llama3.convert.open_checkpoint(tmp_path))
    prompts = llama3.main.encode(tokenizer, ["ab", "cde"], raw=True)
    ids, others = ([token.id for token in row] for row in decode(llama3, tmp_path, prompts, max_new_tokens=300))
    stop = next(token for token in ids[3:] if token not in others)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    flags = ["--model_path", tmp_path, "--dtype", "float32", "--raw", "--prompt", "ab", "cde", "ab"]
    processes = start(2, *flags, "--max_new_tokens", "100000")
    deadline = time.monotonic() + 90
    while "\n> cde\n" not in (out := processes[0].written()[0]):  # the first row ends in the same step as the last
        assert time.monotonic() < deadline and processes[0].process.poll() is None, processes[0].written()
        time.sleep(0.1)
    for process in processes:
        process.process.send_signal(signal.SIGINT)
    for process in processes:  # by its own signal, or because the other one is gone
        status, _, err = process.wait(60)
        assert status == 130 or (status != 0 and "interrupted" not in err), (status, err)
    assert processes[0].written()[0].endswith("\n" + out.partition("> cde\n")[0])


@pytest.mark.slow
def test_one_has_another_checkpoint(tmp_path):
    """In its config.json, in the numbers of a tensor, or one that cannot be read."""
    demo = ROOT / "llama3" / "demo"
    for name in ("config", "tensor", "damaged"):
        shutil.copytree(demo, tmp_path / name)
    config = json.loads((demo / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    weights = bytearray((demo / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "tensor" / "model.safetensors").write_bytes(weights)
    (tmp_path / "damaged" / "model.safetensors").write_bytes(weights[:-1])
    for name, words in {"config": "has another checkpoint", "tensor": "has another", "damaged": "truncated"}.items():
        port = free_port()
        processes = start(2, wanted=(0,), port=port) + start(2, "--model_path", tmp_path / name, wanted=(1,), port=port)
        assert_all_end(processes, "process 1 (", words)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seed", "1"], "has --seed 1, process 0 has 0"),
        (["--prompt", "Hello!"], "has other prompts"),
        (["--num_processes", "3"], "has --num_processes 3, process 0 has 2"),
    ],
)
def test_one_was_started_otherwise(flags, words):
    port = free_port()
    processes = start(2, wanted=(0,), port=port) + start(2, *flags, wanted=(1,), port=port)
    assert_all_end(processes, "error: process 1 (", words)


def test_one_has_other_stop_tokens(tmp_path):
    """As where a file is missing: one would end a row that the other goes on with, and both would wait for ever."""
    demo = shutil.copytree(ROOT / "llama3" / "demo", tmp_path / "demo")
    (demo / "generation_config.json").write_text('{"eos_token_id": 301}')
    port = free_port()
    processes = start(2, wanted=(0,), port=port) + start(2, "--model_path", demo, wanted=(1,), port=port)
    assert_all_end(processes, "error: process 1 (", "has stop tokens [301, ")


def test_a_chat_on_one_of_two():
    port = free_port()
    processes = start(2, wanted=(0,), port=port) + start(2, "--chat", wanted=(1,), port=port)
    assert_all_end(processes, "error: process 1 (", "--chat needs one process alone, and there are 2")


def test_a_port_that_another_program_has():
    """jax itself ends with a segmentation fault."""
    with socket.create_server(("", 0)) as other:
        assert_all_end(start(2, wanted=(0,), port=other.getsockname()[1]), "Address already in use", "--coordinator")


def test_the_same_error_on_all():
    assert_all_end(start(2, "--model_path", "/nowhere"), "/nowhere: no such folder")


def test_other_numbers_of_devices():
    port = free_port()
    processes = start(2, wanted=(0,), port=port, devices=2) + start(2, wanted=(1,), port=port, devices=3)
    assert_all_end(processes, "error: processes 0 to 1 have 2, 3 devices; give each as many as the others")
