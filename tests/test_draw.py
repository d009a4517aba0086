"""benchmarks/draw.py: that what it draws are the numbers of the results."""

import json
import shutil
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import draw
from folders import RESULTS


def test_what_is_drawn(monkeypatch, tmp_path):
    """Plans of decode steps and measurements of bench.py, as the program is called; nothing else."""
    names = "70b-int8-v5e-16", "cpu-16x1024"
    for name in (*names, "8b-prefill", "check-cpu-1"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    monkeypatch.setattr(draw, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["draw.py", *names])
    draw.main()
    for name, label in zip(names, ("decode steps/s", "operations a byte read"), strict=True):
        assert label in (tmp_path / f"{name}.svg").read_text()  # its bytes depend on matplotlib's version
    for name in ("8b-prefill", "check-cpu-1"):
        monkeypatch.setattr(sys, "argv", ["draw.py", name])
        with pytest.raises(ValueError, match=f"{name}: only plans of decode steps"):
            draw.main()


def test_bars_are_the_plans_steps_per_second():
    report = json.loads((RESULTS / "70b-int8-v5e-16.json").read_text())
    rows = [row for row in report["plans"] if row["fits"]]
    assert 0 < len(rows) < len(report["plans"])  # one of them does not fit
    (axes,) = draw.draw_plans(report).axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([1e3 / row[key] for key in ("floor_ms", "estimated_ms") for row in rows])
    published = [1e3 / row["published_ms"] for row in rows if row["published_ms"]]
    assert list(axes.lines[0].get_xdata()) == pytest.approx(published) and published


def test_points_lie_where_the_measurements_do():
    report = json.loads((RESULTS / "cpu-16x1024.json").read_text())
    (axes,) = draw.draw_roofline(report).axes
    roofs, *points = axes.lines
    assert max(roofs.get_ydata()) == report["device"]["product_flops_per_s"]
    assert len(points) == 2 * len(report["results"])
    for row, decode in zip(report["results"], points[::2], strict=True):
        achieved = row["step_flops"] * row["decode_steps_per_s"]
        assert decode.get_ydata() == pytest.approx([achieved])
        # under the slanted roof: bytes/s that the point stands for, over those that the device reads
        assert achieved / decode.get_xdata()[0] == pytest.approx(row["bandwidth_gb_per_s"] * 1e9)
        assert achieved / decode.get_xdata()[0] < report["device"]["read_bytes_per_s"]
