"""Charts are drawn of whatever a run has, and refused early where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench.charts import check_plot, plot_comparison, plot_parts, plot_runs, plot_sweep
from quire.bench.compare import compare_runs
from quire.bench.report import KVReport, Percentiles, RunReport, Sample
from quire.errors import ConfigError


def run(name: str, tok_s: float, *, bare: bool = False, **point: str) -> RunReport:
    report = RunReport(workload=name, output_tok_s=tok_s, seconds=1.0, point=point)
    if not bare:
        report.ttft_s = report.itl_s = Percentiles.of([0.1, 0.2])
        report.kv = KVReport(num_blocks=8, block_size=16, block_bytes=1, waste_percent_mean=4.0)
        report.repeats = [tok_s * 0.9, tok_s, tok_s * 1.1]
        report.samples = [Sample(0.1 * i, i, 0, 0.1 * i, 5.0, 100, 0, i, 50.0, 90.0) for i in range(10)]
    return report


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_charts_are_written(tmp_path: Path) -> None:
    plot_runs(tmp_path / "runs.png", [run("a", 10), run("b", 20, bare=True)], "t")
    swept = [run("a", 10, **{"block-size": "8"}), run("a", 20, **{"block-size": "16"})]
    plot_sweep(tmp_path / "new" / "sweep.png", swept, "t")
    plot_parts(tmp_path / "parts.png", {"x": {"a": 1.0, "b": 2.0}, "y": {"b": 1.0}}, "t", "ms", as_shares=True)
    plot_comparison(tmp_path / "compare.png", [compare_runs(run("a", 10), run("a", 20))], "t")
    plot_runs(tmp_path / "bare.svg", [run("b", 20, bare=True)], "t")
    assert all(is_png(tmp_path / name) for name in ("runs.png", "new/sweep.png", "parts.png", "compare.png"))
    assert "<svg" in (tmp_path / "bare.svg").read_text()


def test_a_name_that_is_no_picture() -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg or \.pdf"):
        check_plot("chart.txt")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="quire-llm\\[bench\\]"):
        check_plot("chart.png")
