"""Writes the tables of the pages from the files of benchmarks/results, so that no figure is typed twice.

    python3 benchmarks/tables.py    # rewrites, in README.md and docs/performance.md, what the markers enclose

A table stands between the markers `<!-- KIND NAME [NAME ...] -->` and `<!-- end -->`. KIND is a function below; a NAME is
a file of benchmarks/results without .json. Below each table stand the command and the versions that the file holds.
"""

import argparse
import json
import re

from folders import RESULTS, ROOT, run

PAGES = ("README.md", "docs/performance.md")
MARKED = re.compile(r"(<!-- (plans|speeds|formats) ([\w. -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: list[str], rows: list[list]) -> list[str]:
    """The lines of a Markdown table; an empty cell for None."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines]


def plans(reports: list[dict]) -> list[str]:
    """Files of plan.py: each a table of estimates, with published measurements of jax-llm-examples if there are any."""
    lines = []
    for report in reports:
        arguments = report["arguments"]
        kinds = [arguments["dtype"], arguments["quantize"] and "int8 weights"]
        kinds.append(arguments["quantize_cache"] and "int8 cache")
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
        lines += [f"{arguments['config']}, {', '.join(filter(None, kinds))}:", "", *table(header, rows), "", source(report)]
    return lines


def speeds(reports: list[dict]) -> list[str]:
    """Files of bench.py, in one table: decode and prefill, and how many times as fast as the reference class."""
    header = ["model", "weights", "batch", "prompt", "decode steps/s", "over transformers", "GB/s", "prefill tokens/s"]
    rows = []
    for report in reports:
        arguments = report["arguments"]
        name = arguments["config"].removeprefix("benchmarks/").removesuffix(".json")
        name += f", {arguments['layers']} layers" * bool(arguments["layers"])
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
            [name, f"{row['mean_kl']:.1e}", f"{row['p99_kl']:.1e}", f"{row['other_token']:.1%}", f"{row['perplexity']:.3f}"]
            for name, row in report["results"].items()
        ]
        lines += [*table(header, rows), "", source(report)]
    return lines


def source(report: dict) -> str:
    """Where the figures are from, as an item of a list."""
    host, versions = report["host"], ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"- `{report['command']}` on {host['cores']} cores ({host['processor']}), {versions}, {report['date']}"


def filled(text: str) -> str:
    """A page with its tables written anew."""

    def replaced(match: re.Match) -> str:
        reports = [json.loads((RESULTS / f"{name}.json").read_text()) for name in match[3].split()]
        return match[1] + "\n".join(globals()[match[2]](reports)) + "\n" + match[4]

    return MARKED.sub(replaced, text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        (ROOT / page).write_text(filled((ROOT / page).read_text()))


if __name__ == "__main__":
    run(main)
