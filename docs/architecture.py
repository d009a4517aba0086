"""Draws one layer of each model, with the shapes of a released size and the collectives: FOLDER/architecture.svg.

    python3 docs/architecture.py

The shapes, and how devices split them, come from the folder's own weights_of; the order of the steps is written below.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT, GAP, LEFT = 250, 40, 16, 60  # of a box in pixels; between boxes; for the residual stream

# Each step is a box: a weight's name in weights_of, a line of text, or a list of columns, which are lists of steps.
PSUM, ADD = "psum over ep x tp", "+ residual"
HEADS = ["attention_norm", "qkv", "rope on q and k", "attention over the cache", "o", PSUM, ADD]
MLP = ["gate_up", "silu(gate) * up", "down"]
LATENT = [
    "attention_norm", "qkv_a", "all_gather over ep x tp", "q_norm, kv_norm; rope on the shared key", "q",
    "attention over latents, with k_b and v_b", "o", PSUM, ADD,
]  # fmt: skip
EXPERTS = [
    "mlp_norm",
    [["shared_gate_up", "silu(gate) * up", "shared_down"],
     ["router", "experts_gate_up", "silu(gate) * up * score", "experts_down"]],
    "sum of both", PSUM, ADD,
]  # fmt: skip
DRAWN = {  # folder: the released size, the layer, its steps
    "llama3": ("llama-3.1-8b", 0, [*HEADS, "mlp_norm", *MLP, PSUM, ADD]),
    "glm4": (
        "glm-4-9b-0414", 0,
        [*HEADS[:-1], "attention_end_norm", ADD, "mlp_norm", *MLP, PSUM, "mlp_end_norm", ADD],
    ),
    "llama4": ("llama-4-scout-17b-16e", 0, [*HEADS, *EXPERTS]),
    "deepseek": ("deepseek-r1", 3, [*LATENT, *EXPERTS]),
    "glm4_flash": ("glm-4.7-flash", 1, [*LATENT, *EXPERTS]),
}  # fmt: skip
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.shape { font-size: 11px; fill: #59636e }
rect { fill: #f6f8fa; stroke: #8c959f; rx: 6 }
.weight { fill: #ddf4ff; stroke: #54aeff }
.collective { fill: #fff1e5; stroke: #fb8f44 }
path { stroke: #8c959f; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .shape { fill: #9198a1 }
  rect { fill: #161b22; stroke: #6e7681 }
  .weight { fill: #121d2f; stroke: #388bfd }
  .collective { fill: #2b1d0e; stroke: #db6d28 }
  path { stroke: #6e7681 }
}
"""


def import_model(folder: str) -> ModuleType:
    """model.py of a folder. The name is the same in all, so it is not left in sys.modules."""
    spec = importlib.util.spec_from_file_location("model", ROOT / folder / "model.py")
    module = sys.modules["model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.modules["model"]
    return module


def described(weight) -> str:
    """A weight's shape on all devices together, and how they split it."""
    rows = sum(part.rows_per_device(1) for part in weight.parts)
    shape = weight.shape(rows)
    shape = (weight.experts, *shape) if weight.experts else shape
    text = f"[{', '.join(map(str, shape))}]"
    if weight.split is not None:
        side = ("rows", "columns")[weight.split]
        text += f", {side} split over {' x '.join(weight.axes())}" + ", experts over ep" * bool(weight.experts)
    return text


class Drawing:
    """Boxes from top to bottom. Coordinates are pixels."""

    def __init__(self, weights: dict):
        self.weights, self.lines, self.left = weights, [], LEFT

    def box(self, step: str, x: float, y: float, width: float) -> None:
        """One step as a box whose upper left corner is at (x, y)."""
        weight = self.weights.get(step)
        kind = "weight" if weight else "collective" if " over ep x tp" in step else ""
        self.lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{HEIGHT}"/>')
        middle = x + width / 2
        if weight:
            self.text(step, middle, y + 17)
            self.text(described(weight), middle, y + 32, "shape")
        else:
            self.text(step, middle, y + 25)

    def text(self, text: str, x: float, y: float, kind: str = "") -> None:
        self.lines.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(self, x: float, y: float) -> None:
        """Into the top of a box at (x, y)."""
        self.lines.append(f'<path d="M {x} {y - GAP} V {y} m -4 -5 l 4 5 l 4 -5"/>')

    def column(self, steps: list, x: float, y: float, width: float) -> float:
        """Steps below each other from (x, y) on. Returns where the next one would begin."""
        middle, start = x + width / 2, None
        for step in steps:
            self.arrow(middle, y)
            if isinstance(step, list):
                y = max(self.column(each, x + i * (width + GAP), y, width) for i, each in enumerate(step))
                continue
            if step in ("attention_norm", "mlp_norm"):
                start = y - GAP / 2  # where the residual stream leaves
            self.box(step, x, y, width)
            if step == ADD:
                self.lines.append(f'<path d="M {middle} {start} H {x - 30} V {y + HEIGHT / 2} H {x} m -5 -4 l 5 4 l -5 4"/>')
            y += HEIGHT + GAP
        return y


def draw(folder: str) -> str:
    """The SVG of a folder's layer."""
    name, layer, steps = DRAWN[folder]
    model = import_model(folder)
    config = model.Config.from_dict(json.loads((ROOT / folder / "configs" / f"{name}.json").read_text()))
    drawing, width = Drawing(model.weights_of(config)["layers"][layer]), WIDTH + 60
    columns = max(len(step) if isinstance(step, list) else 1 for step in steps)
    drawing.text(f"{name}, layer {layer}: x [B, T, {config.hidden_size}]", LEFT + width / 2, 24)
    bottom = drawing.column(steps, LEFT, 52, width)
    total = LEFT + columns * (width + GAP) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {bottom}" width="{total}" height="{bottom}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *drawing.lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    for folder in DRAWN:
        (ROOT / folder / "architecture.svg").write_text(draw(folder))
