"""Hub ids, against a hub that runs on this machine: what is fetched, and what is said where nothing can be."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from helpers import ROOT, save_random
from safetensors.torch import load_file, save_file
from test_parity import llama

SHA = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
import sys
from convert import InputError, find_checkpoint, open_checkpoint
for path in sys.argv[1:]:
    try:
        folder = find_checkpoint(path)
        print(sorted(file.name for file in folder.iterdir()), len(open_checkpoint(folder).tensors))
    except InputError as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves folders by repository; those of revision v2 stand in its folder of this name."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name, kind, rest = re.fullmatch(r"/(?:api/models/)?(.+?)/(revision|resolve|tree)/([^?]*).*", self.path).groups()
        revision, _, file = rest.partition("/")
        folder = self.server.root / name
        if not folder.is_dir():
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        if kind == "resolve" and name == "org/gated":
            return self.answer(403, headers={"X-Error-Code": "GatedRepo"})
        sha = "2" * 40 if revision in ("v2", "2" * 40) else SHA
        folder = folder / "v2" if sha != SHA else folder
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in names]
            return self.answer(200, json.dumps({"id": name, "sha": sha, "siblings": siblings}).encode())
        if kind == "tree":
            sizes = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0" * 40} for n in names]
            return self.answer(200, json.dumps(sizes).encode())
        if file not in names:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        self.answer(200, (folder / file).read_bytes(), {"X-Repo-Commit": sha, "ETag": f'"{sha}-{file}"'})

    do_HEAD = do_GET

    def answer(self, status, content=b"", headers=None):
        self.send_response(status)
        for key, value in ({"Content-Length": len(content)} | (headers or {})).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    """Runs find_checkpoint and open_checkpoint on hub ids, in a process with an empty cache: a line for each."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root = tmp_path / "hub"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(*paths, **environment):
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}
        own |= {"HF_HUB_OFFLINE": "0", "JAX_PLATFORMS": "cpu", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", PROGRAM, *paths]
        environment = os.environ | own | environment
        done = subprocess.run(
            command, cwd=ROOT / "llama3", env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    yield server.root, ask
    server.shutdown()


def test_hub_ids(hub):
    root, ask = hub
    _, *reference = llama()
    save_random(root / "tiny", *reference)  # an id without a name of its owner
    tensors = load_file(root / "tiny" / "model.safetensors")
    (root / "tiny" / "pytorch_model.bin").write_bytes(b"never read")
    (root / "tiny" / "consolidated.safetensors").write_bytes(b"never read")
    # Two shards, a file with nothing that is needed, and in another revision one file alone.
    sharded = root / "org" / "sharded"
    save_random(sharded / "v2", *reference)
    save_random(sharded, *reference)
    (sharded / "model.safetensors").unlink()
    where = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: x for name, x in tensors.items() if where[name] == shard}, sharded / shard)
    where["model.layers.0.self_attn.rotary_emb.inv_freq"] = "extra.safetensors"
    (sharded / "extra.safetensors").write_bytes(b"never read")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for name, files in {"gated": ["config.json"], "gguf": ["model.Q4_K_M.gguf"], "bin": ["pytorch_model.bin"]}.items():
        (root / "org" / name).mkdir()
        for file in files:
            (root / "org" / name / file).write_text("{}")
    (root / "org" / "qwen").mkdir()  # of another folder: said before the weights come
    shutil.copy(sharded / "model.safetensors.index.json", root / "org" / "qwen")
    (root / "org" / "qwen" / "config.json").write_text('{"model_type": "qwen3"}')
    (root / "org" / "adapter").mkdir()
    (root / "org" / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')

    ids = ["tiny", "org/sharded", "org/sharded@v2", "org/gated", "org/gguf", "org/bin", "org/adapter", "org/none"]
    tiny, sharded, v2, gated, gguf, pickled, adapter, none, qwen = ask(*ids, "org/qwen")
    files = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert tiny == f"{sorted([*files, 'model.safetensors'])} {len(tensors)}"
    assert (
        sharded
        == f"{sorted(['a.safetensors', 'b.safetensors', *files, 'model.safetensors.index.json'])} {len(tensors)}"
    )
    assert v2 == tiny
    assert "org/gated: is gated; accept its license on http://127.0.0.1" in gated and "hf auth login" in gated
    assert "GGUF, which llama.cpp reads" in gguf
    assert "hf download org/bin --local-dir DIR && python3 -c" in pickled
    assert "a PEFT adapter of 'org/base'; merge" in adapter
    assert "org/none: no such folder, and the hub did not give it" in none
    assert qwen.endswith("'qwen3' is not supported, only llama, mistral, ministral; use the folder qwen3")
    # What is in the cache needs no hub; what is there in part is not downloaded.
    tiny, none = ask("tiny", "org/none", HF_HUB_OFFLINE="1")
    assert tiny.endswith(f" {len(tensors)}") and "not downloaded" in none
    # A file that others who filled the cache did not ask for.
    next((root.parent / "cache").rglob("generation_config.json")).unlink()
    assert ask("tiny", HF_HUB_OFFLINE="1") == [tiny.replace("'generation_config.json', ", "")]
