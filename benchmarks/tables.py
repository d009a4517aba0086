"""Writes the tables of the pages from the files of benchmarks/results, so that no figure is typed twice.

    python3 benchmarks/tables.py    # rewrites what the markers enclose in PAGES

A table stands between the markers `<!-- KIND NAME [NAME ...] -->` and `<!-- end -->`. KIND is a function below; a NAME
is a file of benchmarks/results without .json, and for `sizes` and `weights` a model. Below most tables of results stand
the commands and the versions that the files hold.
"""

import argparse
import json
import math
import re
from types import SimpleNamespace

import jax
from folders import RESULTS, ROOT, import_model, read_config, run, shape_of, split_of

FOLDERS = sorted(file.parent.name for file in ROOT.glob("*/model.py"))
PAGES = ("README.md", "docs/performance.md", *(f"{folder}/README.md" for folder in FOLDERS))
MARKED = re.compile(
    r"(<!-- (plans|prefills|speeds|formats|summary|sizes|weights) (\S[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL
)
MEMORY_SHARE = 0.85  # of a device's memory, as in main.py
MACHINES = [  # in the order of their memory: name, bytes of all devices, platform, number of devices
    *((name, gb * 1e9, "gpu", 1) for name, gb in {"RTX 4090": 24, "L40S": 48, "H100": 80, "H200": 141}.items()),
    ("8 x H100", 640e9, "gpu", 8),
    ("8 x H200", 1128e9, "gpu", 8),
    *((f"v5e:{shape}", 16 * 2**30 * n, "tpu", n) for shape, n in {"1x1": 1, "2x2": 4, "2x4": 8, "4x4": 16}.items()),
    *(
        (f"v5e:{shape}", 16 * 2**30 * n, "tpu", n)
        for shape, n in {"4x8": 32, "8x8": 64, "8x16": 128, "16x16": 256}.items()
    ),
]


def table(header: list[str], rows: list[list]) -> list[str]:
    """The lines of a Markdown table; an empty cell for None."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines]


def plans(reports: list[dict]) -> list[str]:
    """Files of plan.py: each a table of estimates, with published measurements of jax-llm-examples if there are any."""
    lines = []
    for report in reports:
        has_published = any(row["published_ms"] for row in report["plans"])
        header = ["target", "dp, ep, tp", "batch", "slots", "GB a chip", "core ms", "collective ms", "estimate ms"]
        header += ["floor ms", "steps/s", "of the floor", *["measured elsewhere, ms"] * has_published]
        rows = []
        for row in report["plans"]:
            mesh = ", ".join(str(row["mesh"][axis]) for axis in ("dp", "ep", "tp"))
            cells = [row["target"], mesh, row["batch"], f"{row['max_seq_len']:,}"]
            if row["fits"]:
                steps_per_s, ratio = 1e3 / row["estimated_ms"], row["floor_ms"] / row["estimated_ms"]
                cells += [f"{row['hbm_bytes'] / 1e9:.2f}"]
                cells += [f"{row[key]:.2f}" for key in ("core_ms", "collective_ms", "estimated_ms", "floor_ms")]
                cells += [f"{steps_per_s:.0f}", f"{ratio:.0%}"]
            else:
                cells += ["does not fit", None, None, None, f"{row['floor_ms']:.2f}", None, None]
            published = row["published_ms"]
            rows.append(cells + [f"{published:.2f}" if published else None] * has_published)
        lines += [f"{formats_of(report)}:", "", *table(header, rows), "", source(report), ""]
    return lines


def prefills(reports: list[dict]) -> list[str]:
    """Files of plan.py --prefill, in one table: whole prompts."""
    header = ["model", "target", "dp, ep, tp", "prompt", "core ms", "collective ms", "estimate ms", "floor ms"]
    rows = []
    for report in reports:
        for row in report["plans"]:
            mesh = ", ".join(str(row["mesh"][axis]) for axis in ("dp", "ep", "tp"))
            cells = [f"{row[key]:,.1f}" for key in ("core_ms", "collective_ms", "estimated_ms", "floor_ms")]
            share = f"{row['floor_ms'] / row['estimated_ms']:.0%}"
            speed = f"{1e3 * row['batch'] * row['prefill'] / row['estimated_ms']:,.0f}"
            rows.append([formats_of(report), row["target"], mesh, f"{row['prefill']:,}", *cells, share, speed])
    return [*table([*header, "of the floor", "tokens/s"], rows), "", *map(source, reports), ""]


def formats_of(report: dict) -> str:
    """The model of a file of plan.py, and its number formats."""
    arguments = report["arguments"]
    kinds = [arguments["dtype"], arguments["quantize"] and "int8 weights"]
    kinds.append(arguments["quantize_cache"] and "int8 cache")
    return f"{arguments['config']}, {', '.join(filter(None, kinds))}"


def speeds(reports: list[dict]) -> list[str]:
    """Files of bench.py, in one table: decode and prefill, and how many times as fast as the reference class."""
    header = ["model", "weights", "batch", "prompt", "decode steps/s", "over transformers", "GB/s", "prefill tokens/s"]
    rows = []
    for report in reports:
        arguments = report["arguments"]
        name = arguments["config"].removeprefix("benchmarks/").removesuffix(".json")
        if layers := arguments["layers"]:
            name += f", {layers} layer{'s' * (layers > 1)}"
        for row in report["results"]:
            theirs = row.get("transformers", {})
            rows.append([
                name, arguments["quantize"] or arguments["dtype"], row["batch"], row["prompt_len"],
                f"{row['decode_steps_per_s']:.1f}", ratio_of(theirs, "decode_steps_per_s"),
                f"{row['bandwidth_gb_per_s']:.1f}", f"{row['prefill_tokens_per_s']:.0f}",
                ratio_of(theirs, "prefill_tokens_per_s"),
            ])  # fmt: skip
    return [*table([*header, "over transformers"], rows), "", *(source(report) for report in reports)]


def ratio_of(theirs: dict, key: str) -> str | None:
    """How many times as fast as transformers, if that was measured."""
    return f"{theirs[f'{key}_ratio']:.2f}" if theirs else None


def formats(reports: list[dict]) -> list[str]:
    """Files of precision.py: what each number format costs."""
    header = ["format", "mean KL divergence", "99th percentile", "other most probable token", "perplexity"]
    lines = []
    for report in reports:
        rows = [
            [
                name,
                f"{row['mean_kl']:.2g}",
                f"{row['p99_kl']:.2g}",
                f"{row['other_token']:.1%}",
                f"{row['perplexity']:.5g}",
            ]
            for name, row in report["results"].items()
        ]
        lines += [*table(header, rows), "", source(report), ""]
    return lines


def summary(names: list[str]) -> list[str]:
    """NAME of a file of bench.py, or NAME/TARGET of one of plan.py: decode steps/s at batch 1 and 8, 2,048 slots."""
    rows = []
    for name in names:
        name, _, target = name.partition("/")
        report = json.loads((RESULTS / f"{name}.json").read_text())
        arguments, found = report["arguments"], {}
        for row in report.get("plans", report.get("results")):
            if not target:
                ratio = ratio_of(row["transformers"], "decode_steps_per_s")
                found[row["batch"]] = f"{row['decode_steps_per_s']:.1f}, {ratio} times transformers"
            elif row["target"] == target and row["max_seq_len"] == 2048 and row["batch"] not in found:
                published = row["published_ms"]
                elsewhere = f" (measured by jax-llm-examples: {1e3 / published:.0f})" if published else ""
                found[row["batch"]] = f"{1e3 / row['estimated_ms']:.0f}{elsewhere}"
        model = arguments["config"].removeprefix("benchmarks/").removesuffix(".json")
        weights = arguments["quantize"] or arguments["dtype"]
        machine, kind = (target, "estimated") if target else (f"{report['host']['cores']} CPU cores", "**measured**")
        rows.append([f"{model}, {weights}", machine, found.get(1), found.get(8), kind])
    return table(["model", "machine", "steps/s at batch 1", "at batch 8", ""], rows)


def sizes(names: list[str]) -> list[str]:
    """FOLDER/CONFIG each: the parameters, and the smallest GPUs and TPU slice whose memory holds the weights."""
    rows = []
    for name in names:
        folder, config = name.split("/")
        model = import_model(folder)
        config = model.Config.from_dict(read_config(folder, config))
        weights, cells = jax.tree.leaves(model.weights_of(config)), []
        count = sum(math.prod(shape_of(weight)) for weight in weights)
        for int8 in (False, True):
            nbytes = sum(bytes_of(weight, int8) for weight in weights)
            fitting = [m for m in MACHINES if nbytes <= MEMORY_SHARE * m[1] and divides(model, config, *m[2:])]
            beyond = {"gpu": "more than 8 GPUs", "tpu": "more than 256 chips"}
            smallest = [next((m[0] for m in fitting if m[2] == kind), more) for kind, more in beyond.items()]
            cells.append(f"{billions(nbytes)} GB: {', '.join(smallest)}")
        rows.append([name.split("/")[1], f"{billions(count)} B", *cells])
    return table(["model", "parameters", "bfloat16", "int8"], rows)


def weights(names: list[str]) -> list[str]:
    """FOLDER/CONFIG/LAYER: the weights of a layer and around the layers, their shapes, and how devices split them."""
    rows = []
    for name in names:
        folder, config, layer = name.split("/")
        model = import_model(folder)
        declared = model.weights_of(model.Config.from_dict(read_config(folder, config)))
        layers = declared.pop("layers")
        for weight_name, weight in (layers[int(layer)] | declared).items():
            tensors = dict.fromkeys(tensor.split(".")[-1] for part in weight.parts for tensor in part.tensors)
            tensors = ", ".join(tensor for tensor in tensors if tensor != "weight") or None
            rows.append([f"`{weight_name}`", list(shape_of(weight)), split_of(weight), tensors])
    return table(["weight", "shape", "split", "made of"], rows)


def billions(n: float) -> str:
    """n in billions, with three digits or as a whole number."""
    return f"{n / 1e9:.3g}" if n < 1e11 else f"{n / 1e9:,.0f}"


def bytes_of(weight, int8: bool) -> int:
    """Its bytes in memory, in bfloat16 or, with a float32 scale for each row, in int8."""
    shape = shape_of(weight)
    if int8 and weight.is_matrix():
        return math.prod(shape) + 4 * math.prod(shape[:-1])
    return math.prod(shape) * (4 if weight.dtype == "float32" else 2)


def divides(model, config, platform: str, count: int) -> bool:
    """Whether the mesh that main.py takes on so many devices divides the model."""
    dp, ep, tp = model.mesh_shape(config, [SimpleNamespace(platform=platform)] * count)
    try:
        model.check_mesh(config, SimpleNamespace(shape={"dp": dp, "ep": ep, "tp": tp}))
    except model.InputError:
        return False
    return True


def source(report: dict) -> str:
    """Where the figures are from, as an item of a list."""
    host, versions = report["host"], ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"- `{report['command']}` on {host['cores']} cores ({host['processor']}), {versions}, {report['date']}"


def filled(text: str) -> str:
    """A page with its tables written anew."""

    def replaced(match: re.Match) -> str:
        names = match[3].split()
        if match[2] in ("plans", "prefills", "speeds", "formats"):
            names = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]
        return match[1] + "\n".join(globals()[match[2]](names)) + "\n" + match[4]

    return MARKED.sub(replaced, text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        (ROOT / page).write_text(filled((ROOT / page).read_text()))


if __name__ == "__main__":
    run(main)
