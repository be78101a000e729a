"""Charts are drawn of whatever a run has, in every kind of file, and refused early where they cannot be."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.bench.charts import Chart
from quire.bench.compare import compare_runs
from quire.bench.plots import check_plot, comparison_chart, part_chart, run_charts, sweep_charts, write_charts
from quire.bench.report import KVReport, Percentiles, RunReport, Sample
from quire.errors import ConfigError


def run(name: str, tok_s: float, *, bare: bool = False, **point: str) -> RunReport:
    report = RunReport(workload=name, output_tok_s=tok_s, seconds=1.0, point=point)
    if not bare:
        report.ttft_s = report.itl_s = Percentiles.of([0.1, 0.2])
        report.kv = KVReport(num_blocks=8, block_size=16, block_bytes=1, waste_percent_mean=4.0)
        report.repeats = [tok_s * 0.9, tok_s, tok_s * 1.1]
        report.repeat_values = {"output_tok_s": report.repeats}
        report.samples = [Sample(0.1 * i, i, 0, 0.1 * i, 5.0, 100, 0, i, 50.0, 90.0) for i in range(10)]
    return report


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


ALL: dict[str, list[Chart]] = {
    "runs": run_charts([run("a", 10), run("b", 20, bare=True)]),
    "bare": run_charts([run("b", 20, bare=True)]),
    "sweep": sweep_charts([run("a", 10, **{"block-size": "8"}), run("a", 20, **{"block-size": "16"})]),
    "switch": sweep_charts([run("a", 10, **{"enforce-eager": "on"}), run("a", 20, **{"enforce-eager": "off"})]),
    "parts": [part_chart("t", {"x": {"a": 1.0, "b": 2.0}, "y": {"b": 1.0}}, "ms", as_shares=True)],
    "compare": [comparison_chart([compare_runs(run("a", 10), run("a", 110))])],
}


@pytest.mark.parametrize("name", ALL)
def test_charts_are_written(name: str, tmp_path: Path) -> None:
    charts = ALL[name]
    for suffix in (".png", ".svg", ".html"):
        write_charts(tmp_path / "new" / f"{name}{suffix}", charts, "<title>")
    assert is_png(tmp_path / "new" / f"{name}.png")
    picture = ElementTree.fromstring((tmp_path / "new" / f"{name}.svg").read_text())
    assert len([each for each in picture.iter() if each.get("class") == "title"]) == 1 + len(charts)
    page = (tmp_path / "new" / f"{name}.html").read_text()
    assert page.count("<figure") == len(charts) and "&lt;title&gt;" in page


def test_a_sweep_over_numbers_is_lines_and_over_words_bars() -> None:
    assert {chart.kind for chart in ALL["sweep"]} == {"line"} and {chart.kind for chart in ALL["switch"]} == {"bar"}
    assert ALL["sweep"][0].series[0].x == [8.0, 16.0]
    assert ALL["sweep"][0].series[0].ranges == [(9.0, 11.0), (18.0, 22.0)]


def test_shares_add_up_and_a_comparison_has_the_colour_of_its_verdict() -> None:
    (parts,) = ALL["parts"]
    assert [sum(values) for values in zip(*(series.y for series in parts.series), strict=True)] == [100.0, 100.0]
    (change,) = ALL["compare"]
    better = next(series for series in change.series if series.name == "better")
    assert dict(zip(better.x, better.y, strict=True))["output_tok_s ↑"] == 1000.0


def test_a_name_that_is_no_picture() -> None:
    with pytest.raises(ConfigError, match=r"\.svg, \.html, \.png or \.pdf"):
        check_plot("chart.txt")


def test_without_matplotlib_svg_and_html_work_and_png_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_plot("chart.svg")
    check_plot("chart.html")
    with pytest.raises(ConfigError, match="quire-llm\\[bench\\]"):
        check_plot("chart.png")
