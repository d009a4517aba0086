"""What the model folders share: the same text in each, so that a folder can be copied alone.

    python3 tests/shared.py llama3

takes llama3's main.py, and its shared definitions in model.py and convert.py, to every other folder that has them.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("model.py", "convert.py")

# The names that may differ from folder to folder, with the reason.
DIFFERENT = {
    "Config": "the keys of the model's config.json",
    "REQUIRED": "the keys of the model's config.json",
    "ROPE_PARAMETERS": "yarn",
    "rope_frequencies": "yarn",
    "neighbours": "a latent has no heads: all devices may share it",
    "local_heads": "a latent has no heads",
    "prefill_attention": "latents are expanded",
    "decode_attention": "latents are not expanded",
    "feed_forward": "the router",
    "activation": "what the score multiplies",
    "route": "softmaxes in DeepSeek V2",
    "FLOAT32": "names in the checkpoint",
    "mesh_shape": "experts, on TPUs",
    "check_mesh": "what the model splits",
    "abstract_weights": "the model's weights",
    "LayerCache": "chunks, latents",
    "abstract_cache": "chunked layers hold a chunk, latents have no heads",
    "capacity": "chunks have no end",
    "rope": "pairs lie half a head apart, or next to each other",
    "attention": "the model's biases, norms and rope",
    "mlp": "the model's biases and norms",
    "forward": "kinds of layers",
    "piece_length": "a piece lies within a chunk",
    "step_bytes": "windows, chunks and experts are read in part",
    "INPUT_FIRST": "names in the checkpoint",
    "sources": "names in the checkpoint",
    "expected_shapes": "shapes in the checkpoint",
    "left_out": "names in the checkpoint",
    "open_checkpoint": "FP8",
    "Stored": "FP8",
    "read_rows": "FP8",
}

# Of these folders, with the same architecture, no more names than the second tuple's may differ.
LATENT = ("deepseek", "glm4_flash"), ("Config", "abstract_weights", "feed_forward", "route", "sources")


def may_differ(name: str, folder: str, other: str) -> bool:
    """Whether a definition of this name may have another text in another folder."""
    alike, different = LATENT
    return name in (different if {folder, other} <= set(alike) else DIFFERENT)


def folders() -> list[str]:
    """The model folders."""
    return sorted(file.parent.name for file in ROOT.glob("*/model.py"))


def definitions(file: Path) -> dict[str, str]:
    """The text of every function, class and constant at a file's top level, by name."""
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = "".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def propagate(source: str) -> None:
    """Makes the shared definitions of every other folder those of `source`."""
    for folder in folders():
        if folder == source:
            continue
        (ROOT / folder / "main.py").write_bytes((ROOT / source / "main.py").read_bytes())
        for file in FILES:
            path = ROOT / folder / file
            wanted, text = definitions(ROOT / source / file), path.read_text()
            for name, definition in definitions(path).items():
                if name in wanted and not may_differ(name, source, folder) and definition != wanted[name]:
                    text = text.replace(definition, wanted[name])
                    print(f"{folder}/{file}: {name}")
            path.write_text(text)


if __name__ == "__main__":
    propagate(*sys.argv[1:])
