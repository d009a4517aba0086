"""Draws the files of benchmarks/results that are named: plans as estimates against floors, measurements as a roofline.

python3 benchmarks/draw.py 70b-int8-v5e-16 cpu-16x1024    # writes benchmarks/results/NAME.svg for each
"""

import json
from importlib import import_module

from folders import RESULTS, ArgumentParser, run

run(lambda: import_module("matplotlib"))  # without it, one line says what to install
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "results", "svg.fonttype": "none"}  # same numbers, same file; text as text
import matplotlib.pyplot as plt


def draw_plans(report: dict) -> plt.Figure:
    """Steps/s of each configuration: what is estimated, what the bandwidth allows, what others have measured."""
    rows = [row for row in report["plans"] if row["fits"]]
    labels = [
        "{target}, dp {mesh[dp]} tp {mesh[tp]}\nbatch {batch}, {max_seq_len:,} slots".format(**row) for row in rows
    ]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.5), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [1e3 / row["floor_ms"] for row in rows], color="#d8dee9", label="floor: every byte read once")
    axes.barh(places, [1e3 / row["estimated_ms"] for row in rows], height=0.5, color="#5e81ac", label="estimate")
    measured = [(place, row["published_ms"]) for place, row in enumerate(rows) if row["published_ms"]]
    if measured:
        axes.plot(
            [1e3 / ms for _, ms in measured], [place for place, _ in measured], "o", color="#bf616a",
            label="jax-llm-examples, measured on that mesh",
        )  # fmt: skip
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("decode steps/s")
    arguments = report["arguments"]
    kinds = [arguments["dtype"], arguments["quantize"] and f"{arguments['quantize']} weights"]
    kinds += [arguments["quantize_cache"] and "int8 cache"]
    axes.set_title(", ".join([arguments["config"], *filter(None, kinds)]), fontsize=9)
    axes.legend(fontsize=7)
    return figure


def draw_roofline(report: dict) -> plt.Figure:
    """Operations/s over operations a byte: where each prefill and decode loop stands under the device's roofs."""
    count = report["device"]["count"]
    bandwidth = report["device"]["read_bytes_per_s"] * count
    peak = report["device"]["product_flops_per_s"] * count
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    intensities = [0.3, peak / bandwidth, 3000]
    axes.loglog(
        intensities, [min(bandwidth * x, peak) for x in intensities], color="#4c566a",
        label=f"measured roofs: {bandwidth / 1e9:.0f} GB/s read, {peak / 1e12:.2g} TFLOP/s bfloat16",
    )  # fmt: skip
    for row in report["results"]:
        name = f"batch {row['batch']}, {row['prompt_len']} tokens"
        prefill_s = row["batch"] * row["prompt_len"] / row["prefill_tokens_per_s"]
        for kind, marker, work, seconds in (
            ("decode", "o", row["step_flops"], 1 / row["decode_steps_per_s"]),
            ("prefill", "^", row["prefill_flops"], prefill_s),  # its bytes: the weights once, as a step's
        ):
            axes.loglog(work / row["step_bytes"], work / seconds, marker, label=f"{kind}, {name}")
    axes.set_xlabel("operations a byte read")
    axes.set_ylabel("operations/s")
    arguments = report["arguments"]
    axes.set_title(f"{arguments['config']}, {arguments['quantize'] or arguments['dtype']}", fontsize=9)
    axes.legend(fontsize=7)
    return figure


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a file of benchmarks/results without .json")
    for name in parser.parse_args().names:
        report = json.loads((RESULTS / f"{name}.json").read_text())
        is_plan = "plans" in report and not report["arguments"]["prefill"]
        if not is_plan and "read_bytes_per_s" not in report.get("device", {}):
            raise ValueError(f"{name}: only plans of decode steps and what bench.py wrote are drawn")
        figure = draw_plans(report) if is_plan else draw_roofline(report)
        figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    run(main)
