"""Draws one layer of each model, with the shapes of a released size and the collectives: FOLDER/architecture.svg.

    python3 benchmarks/architecture.py

The shapes, and how devices split them, come from the folder's own weights_of; the order of the steps is written below.
"""

from xml.sax.saxutils import escape

from folders import ROOT, ArgumentParser, import_apart, read_config, run, shape_of, split_of

WIDTH, HEIGHT, GAP, LEFT = 330, 40, 16, 60  # of a box in pixels; between boxes; for the residual stream

# Each step is a box: a weight's name in weights_of, a line of text, or a list of columns, which are lists of steps.
PSUM, ADD = "psum over ep x tp", "+ residual"
MLP = ["gate_up", "silu(gate) * up", "down"]


def over_heads(rope: str, *end: str, what: str = "attention over the cache") -> list:
    """The steps of attention over heads."""
    attention = f"{what} (exchange over ep x tp if devices share a kv head)"
    return ["attention_norm", "qkv", rope, attention, "o", PSUM, *end, ADD]


def with_experts(product: str) -> list:
    """The steps of shared experts beside those that the router chooses, whose gate and up give `product`."""
    shared = ["shared_gate_up", "silu(gate) * up", "shared_down"]
    return ["mlp_norm", [shared, ["router", "experts_gate_up", product, "experts_down"]], "sum of both", PSUM, ADD]


LATENT_QKV = ["attention_norm", "qkv_a", "all_gather over ep x tp", "q_norm, kv_norm; rope on the shared key", "q"]
LATENT_QKV += ["rope on the last part of each query"]
INDEXER = [[["index_key", "index_key_norm", "rope"], ["index_q", "rope", "index_weights"]]]
INDEXER += ["scores of earlier keys; exchange over ep x tp", "the index_topk best"]
LATENT_OUT = ["exchange of queries over ep x tp (decoding)", "attention over latents, with k_b and v_b"]
LATENT_OUT += ["exchange of outputs over ep x tp (decoding)", "o", PSUM, ADD, *with_experts("silu(gate) * up * score")]
LATENT = [*LATENT_QKV, *LATENT_OUT]
GLM4 = over_heads("+ qkv_bias; rope on a part of q and k", "post_attention_norm")
GLM4_MOE = over_heads("+ qkv_bias; rope on half of each head of q and k") + with_experts("silu(gate) * up * score")
EXPERTS = ["mlp_norm", "router", "experts_gate_up", "silu(gate) * up * score", "experts_down", PSUM, ADD]
GPT_OSS = over_heads("+ qkv_bias; rope on q and k", "+ o_bias", what="attention with sinks")
GPT_OSS += ["mlp_norm", "router", "experts_gate_up", "+ bias; clamped SwiGLU * score", "experts_down"]
GPT_OSS += ["+ experts_down_bias * score", PSUM, ADD]
GEMMA = over_heads("q_norm, k_norm on each head; rope", "post_attention_norm", what="attention, in a window or not")
GEMMA += ["mlp_norm", "gate_up", "gelu(gate) * up", "down", PSUM, "post_mlp_norm", ADD]
GEMMA4 = over_heads("q_norm, k_norm, a norm of v; rope", "post_attention_norm", what="attention, in a window or not")
OF_EXPERTS = ["router_norm", "router", "* expert_scale", "experts_norm, of the same input", "experts_gate_up"]
OF_EXPERTS += ["gelu(gate) * up * score", "experts_down", PSUM, "post_experts_norm"]
GEMMA4 += [[["mlp_norm", "gate_up", "gelu(gate) * up", "down", PSUM, "post_mlp_norm"], OF_EXPERTS]]
GEMMA4 += ["sum of both", "post_feed_forward_norm", ADD, "* scalar"]
GPT2 = over_heads("+ qkv_bias; queries over sqrt(H)", "+ o_bias")
GPT2 += ["mlp_norm", "up", "gelu(up + up_bias)", "down", PSUM, "+ down_bias", ADD]
LLAMA4 = over_heads("rope, then a norm, on q and k") + with_experts("silu(gate * score) * up * score")
DELTA_NET = ["mixer_norm", "qkvz", "convolution over time, silu; unit length of q and k"]
DELTA_NET += ["gates", "gated delta rule on the state", "out_norm", "* silu(z)", "o", PSUM, ADD]
SHARED = [["shared_gate_up", "silu(gate) * up", "shared_down", "* sigmoid(shared_gate x)"]]
SHARED += [["router", "experts_gate_up", "silu(gate) * up * score", "experts_down"]]
DRAWN = {  # folder: the released size, the layer, its steps
    "llama3": ("llama-3.1-8b", 0, [*over_heads("rope on q and k"), "mlp_norm", *MLP, PSUM, ADD]),
    "glm4": ("glm-4-9b-0414", 0, [*GLM4, "mlp_norm", *MLP, PSUM, "post_mlp_norm", ADD]),
    "llama4": ("llama-4-scout-17b-16e", 0, LLAMA4),
    "deepseek": ("deepseek-r1", 3, LATENT),
    "glm4_flash": ("glm-4.7-flash", 1, LATENT),
    "glm4_moe": ("glm-4.5-air", 1, GLM4_MOE),
    "glm5": ("glm-5.2", 6, [*LATENT_QKV, *INDEXER, *LATENT_OUT]),
    "qwen3": ("qwen3-30b-a3b", 0, [*over_heads("q_norm, k_norm on each head; rope"), *EXPERTS]),
    "qwen3_5": ("qwen3.5-35b-a3b", 0, [*DELTA_NET, "mlp_norm", SHARED, "sum of both", PSUM, ADD]),
    "gpt_oss": ("gpt-oss-20b", 0, GPT_OSS),
    "mixtral": ("mixtral-8x7b", 0, [*over_heads("rope on q and k"), *EXPERTS]),
    "gemma": ("gemma-3-27b", 0, GEMMA),
    "gemma4": ("gemma-4-26b-a4b", 0, GEMMA4),
    "gpt2": ("gpt2-xl", 0, GPT2),
}
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


class Drawing:
    """Boxes from top to bottom. Coordinates are pixels."""

    def __init__(self, weights: dict):
        self.weights, self.lines = weights, []

    def box(self, step: str, x: float, y: float) -> None:
        """One step as a box whose upper left corner is at (x, y)."""
        weight = self.weights.get(step)
        kind = "weight" if weight else "collective" if " over ep x tp" in step else ""
        self.lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>')
        middle = x + WIDTH / 2
        if weight:
            self.text(step, middle, y + 17)
            shape = ", ".join(map(str, shape_of(weight)))
            self.text(f"[{shape}], {split_of(weight)}", middle, y + 32, "shape")
        else:
            self.text(step, middle, y + 25)

    def text(self, text: str, x: float, y: float, kind: str = "") -> None:
        self.lines.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def path(self, steps: str) -> None:
        self.lines.append(f'<path d="{steps}"/>')

    def arrow(self, x: float, y: float) -> None:
        """Into the top of a box at (x, y)."""
        self.path(f"M {x} {y - GAP} V {y} m -4 -5 l 4 5 l 4 -5")

    def column(self, steps: list, x: float, y: float) -> float:
        """Steps below each other from (x, y) on. Returns where the next one would begin."""
        middle, start = x + WIDTH / 2, None
        for step in steps:
            if isinstance(step, list):
                ends = [self.column(each, x + i * (WIDTH + GAP), y) for i, each in enumerate(step)]
                for i, end in enumerate(ends):  # the others leave the first, and come back to it
                    other = middle + i * (WIDTH + GAP)
                    self.path(f"M {middle} {y - GAP / 2} H {other}")
                    self.path(f"M {other} {end - GAP} V {max(ends) - GAP / 2} H {middle}")
                y = max(ends)
                continue
            self.arrow(middle, y)
            if step in ("attention_norm", "mixer_norm", "mlp_norm"):
                start = y - GAP / 2  # where the residual stream leaves
            self.box(step, x, y)
            if step == ADD:
                self.lines.append(
                    f'<path d="M {middle} {start} H {x - 30} V {y + HEIGHT / 2} H {x} m -5 -4 l 5 4 l -5 4"/>'
                )
            y += HEIGHT + GAP
        return y


def draw(folder: str) -> str:
    """The SVG of a folder's layer."""
    name, layer, steps = DRAWN[folder]
    model = import_apart(folder)
    config = model.Config.from_dict(read_config(folder, name))
    drawing = Drawing(model.weights_of(config)["layers"][layer])
    columns = max(len(step) if isinstance(step, list) else 1 for step in steps)
    drawing.text(f"{name}, layer {layer}: x [B, T, {config.hidden_size}]", LEFT + WIDTH / 2, 24)
    bottom = drawing.column(steps, LEFT, 52)
    total = LEFT + columns * (WIDTH + GAP) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {bottom}" width="{total}" height="{bottom}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *drawing.lines, "</svg>"]) + "\n"


def main() -> None:
    ArgumentParser(__doc__).parse_args()
    for folder in DRAWN:
        (ROOT / folder / "architecture.svg").write_text(draw(folder))


if __name__ == "__main__":
    run(main)
