"""Writes the tables of the pages from the files of benchmarks/results, so that no figure is typed twice.

    python3 benchmarks/tables.py    # rewrites what the markers enclose in PAGES

A table stands between the markers `<!-- KIND NAME [NAME ...] -->` and `<!-- end -->`. KIND is a function below. A NAME
is a file of benchmarks/results without .json, a pattern like `*-prefill` stands for several, and for `sizes` and
`weights` it is a model. The index of benchmarks/results has the command of each file.
"""

import json
import math
import re

import jax
from folders import RESULTS, ROOT, ArgumentParser, import_apart, read_config, run, shape_of, split_of

FOLDERS = sorted(file.parent.name for file in ROOT.glob("*/model.py"))
PAGES = ("README.md", "docs/performance.md", "benchmarks/results/README.md", *(f"{name}/README.md" for name in FOLDERS))
KINDS = "decode|prefill|speeds|checks|divergences|summary|index|sizes|weights"
MARKED = re.compile(rf"(<!-- ({KINDS}) (\S[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
RATES = {"gb_per_s": "GB/s", "tflops": "TFLOP/s"}  # keys of check.py's rows
MEMORY_SHARE = 0.85  # of a device's memory, as in generate.py
V5E_SLICES = (1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)
MACHINES = [  # in the order of their memory: name, bytes of all devices, platform, number of devices
    *((name, gb * 1e9, "gpu", 1) for name, gb in {"RTX 4090": 24, "L40S": 48, "H100": 80, "H200": 141}.items()),
    ("8 x H100", 640e9, "gpu", 8),
    ("8 x H200", 1128e9, "gpu", 8),
    *((f"v5e:{x}x{y}", 16 * 2**30 * x * y, "tpu", x * y) for x, y in V5E_SLICES),
]


def table(header: list[str], rows: list[list]) -> list[str]:
    """The lines of a Markdown table; an empty cell for None."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines]


def read(name: str) -> dict:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def decode(names: list[str]) -> list[str]:
    """FILE/TARGET of plan.py: estimates of decode steps, in brackets what jax-llm-examples published of its own. Of
    several meshes and numbers of slots it takes the first."""
    rows = []
    for name in names:
        name, target = name.split("/")
        report, found = read(name), {}
        for row in report["plans"]:
            if row["target"] == target and row["fits"]:
                found.setdefault(row["batch"], row)
        last = list(found.values())[-1]
        cells = {}
        for batch, row in found.items():
            published = f" [{row['published_ms']:.2f}]" if row["published_ms"] else ""
            share = f"{row['floor_ms'] / row['estimated_ms']:.0%}"
            cells[batch] = f"{row['estimated_ms']:.2f} ms{published}, {share}"
        place = [target, ", ".join(map(str, last["mesh"].values())), f"{last['max_seq_len']:,}"]
        more = "; ".join(f"{batch}: {cell}" for batch, cell in cells.items() if batch not in (1, 8))
        memory = f"{last['hbm_bytes'] / 1e9:.1f}"
        rows.append([formats_of(report), *place, memory, cells.get(1), cells.get(8), more])
    return table(["model", "machine", "dp, ep, tp", "slots", "GB a chip", "batch 1", "batch 8", "other batches"], rows)


def prefill(names: list[str]) -> list[str]:
    """Files of plan.py --prefill: estimates of whole prompts."""
    header = ["model", "machine", "dp, ep, tp", "prompt", "core ms", "estimate ms", "floor ms", "of the floor"]
    rows = []
    for report in map(read, names):
        for row in report["plans"]:
            mesh = ", ".join(map(str, row["mesh"].values()))
            cells = [f"{row[key]:,.1f}" for key in ("core_ms", "estimated_ms", "floor_ms")]
            share = f"{row['floor_ms'] / row['estimated_ms']:.0%}"
            speed = f"{1e3 * row['batch'] * row['prefill'] / row['estimated_ms']:,.0f}"
            rows.append([formats_of(report), row["target"], mesh, f"{row['prefill']:,}", *cells, share, speed])
    return table([*header, "tokens/s"], rows)


def formats_of(report: dict) -> str:
    """The model of a file of plan.py, and its number formats."""
    arguments = report["arguments"]
    weights, cache = (arguments[key] or arguments["dtype"] for key in ("quantize", "quantize_cache"))
    return f"{arguments['config']}, {weights}" + (f", cache {cache}" if cache != weights else "")


def speeds(names: list[str]) -> list[str]:
    """Files of bench.py, at batch 1 and 8: decode and prefill, in brackets how many times as fast as transformers."""
    header = ["model", "weights", "prompt", "decode steps/s, batch 1", "batch 8"]
    header += ["prefill tokens/s, batch 1", "batch 8"]
    rows = []
    for report in map(read, names):
        arguments = report["arguments"]
        name = arguments["config"].removeprefix("benchmarks/").removesuffix(".json")
        if layers := arguments["layers"]:
            name += f", {layers} layer{'s' * (layers > 1)}"
        cells = []
        for key, digits in (("decode_steps_per_s", 1), ("prefill_tokens_per_s", 0)):
            by_batch = {row["batch"]: f"{row[key]:.{digits}f} ({ratio_of(row, key)})" for row in report["results"]}
            cells += [by_batch[batch] for batch in (1, 8)]
        (length,) = {row["prompt_len"] for row in report["results"]}
        rows.append([name, arguments["quantize"] or arguments["dtype"], f"{length:,}", *cells])
    return table(header, rows)


def checks(names: list[str]) -> list[str]:
    """Files of check.py: what was measured on each machine, beside the estimates."""
    return [line for report in map(read, names) for line in check(report)]


def check(report: dict) -> list[str]:
    """One of these files."""
    header = ["model", "weights", "step", "batch", "measured ms", "estimated ms", "floor ms", "measured / estimated"]
    rows, device = [], report["device"]
    for row in report["rows"]:
        measured, estimated, floor = (row.get(f"{key}_ms") for key in ("measured", "estimated", "floor"))
        times = [f"{ms:,.2f}" if ms else None for ms in (measured, estimated, floor)]
        rows.append([row["model"], row["weights"], row.get("step"), row.get("batch"), *times])
        rows[-1] += [f"{measured / estimated:.2f}" if estimated else row.get("error")]
        rows[-1] += [f"{row['share']:.0%}" if row.get("share") else None]
        rows[-1] += [f"{row[unit]:.3g} {name}" for unit, name in RATES.items() if unit in row]
    machine = f"{device['count']} x {device['kind']}, {device['driver']}, {report['host']['processor']}"
    return [
        f"{machine}, jax {report['versions']['jax']}, {report['date']}:",
        "",
        *table([*header, "of the peak", "rate"], rows),
    ]


def ratio_of(row: dict, key: str) -> str:
    """How many times as fast as transformers a row of bench.py is."""
    return f"{row['transformers'][f'{key}_ratio']:.2f}"


def divergences(names: list[str]) -> list[str]:
    """Files of precision.py: the mean divergence of each number format."""
    results = {name: read(name)["results"] for name in names}
    columns = list(dict.fromkeys(c for result in results.values() for c in result if c != "float32"))
    rows = [
        [name.removesuffix("-precision"), *(f"{result[c]['mean_kl']:.2g}" if c in result else None for c in columns)]
        for name, result in results.items()
    ]
    return table(["", *columns], rows)


def index(names: list[str]) -> list[str]:
    """The command of each file of benchmarks/results."""
    rows = []
    for name in names:
        report = read(name)
        command = re.sub(r" --save \S+", "", report["command"].removeprefix("python3 benchmarks/"))
        device = report.get("device", {}).get("kind", "cpu")
        measured = f"measured, {report['host']['processor'] if device == 'cpu' else device}"
        kind = "estimated" if "plans" in report else measured
        rows.append([f"[{name}]({name}.json)", f"`{command}`", kind, report["date"]])
    return table(["file", "command, after `python3 benchmarks/`", "", "date"], rows)


def summary(names: list[str]) -> list[str]:
    """NAME of a file of bench.py, or NAME/TARGET of one of plan.py: decode steps/s at batch 1 and 8, 2,048 slots."""
    rows = []
    for name in names:
        name, _, target = name.partition("/")
        report = read(name)
        arguments, found = report["arguments"], {}
        for row in report.get("plans", report.get("results")):
            if not target:
                ratio = ratio_of(row, "decode_steps_per_s")
                found[row["batch"]] = f"{row['decode_steps_per_s']:.1f}, {ratio} times transformers"
            elif row["target"] == target and row["max_seq_len"] == 2048 and row["batch"] not in found:
                published = row["published_ms"]
                elsewhere = (
                    f" (jax-llm-examples measured {1e3 / published:.0f} with its own program)" if published else ""
                )
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
        model = import_apart(folder)
        config = model.Config.from_dict(read_config(folder, config))
        weights, cells = jax.tree.leaves(model.weights_of(config)), []
        count = sum(math.prod(shape_of(weight)) for weight in weights)
        for int8 in (False, True):
            nbytes = sum(bytes_of(weight, int8) for weight in weights)
            fitting = [m for m in MACHINES if nbytes <= MEMORY_SHARE * m[1]]
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
        model = import_apart(folder)
        declared = model.weights_of(model.Config.from_dict(read_config(folder, config)))
        layers = declared.pop("layers")
        for weight_name, weight in (layers[int(layer)] | declared).items():
            tensors = (re.sub(r"\.(weight|bias)$", "", name) for part in weight.parts for name in part.tensors)
            tensors = ", ".join(dict.fromkeys(name.split(".")[-1] for name in tensors))
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


def filled(text: str) -> str:
    """A page with its tables written anew."""

    def files(name: str) -> list[str]:
        return sorted(file.stem for file in RESULTS.glob(f"{name}.json")) if "*" in name else [name]

    def replaced(match: re.Match) -> str:
        names = [file for name in match[3].split() for file in files(name)]
        return match[1] + "\n".join(globals()[match[2]](names)) + "\n" + match[4]

    return MARKED.sub(replaced, text)


def main() -> None:
    ArgumentParser(__doc__).parse_args()
    for page in PAGES:
        (ROOT / page).write_text(filled((ROOT / page).read_text()))


if __name__ == "__main__":
    run(main)
