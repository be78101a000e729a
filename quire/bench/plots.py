"""The charts of `quire bench --plot`: which ones a benchmark has, and the file they are written to.

.svg and .html need nothing further; .png and .pdf need matplotlib (`canvas.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.bench.canvas import Canvas, text_px
from quire.bench.charts import Chart, Series, bar_chart, line_chart
from quire.bench.compare import NEUTRAL, Comparison, Verdict, higher_is_better
from quire.bench.report import RunReport
from quire.bench.svg import CHART_STYLE, WIDE, WIDTH, draw, figures, legend, page
from quire.bench.text import model_name, profile_parts, startup_parts
from quire.errors import ConfigError, install_hint

_BY_MATPLOTLIB = (".png", ".pdf")
_SUFFIXES = (".svg", ".html", *_BY_MATPLOTLIB)
_MAX_LINES = 8  # more runs than this hide each other over time


def plot(path: str | Path, benchmark: str, runs: Sequence[RunReport], *, is_sweep: bool = False) -> None:
    """Write the charts of a benchmark's runs to a file; nothing where every run failed."""
    good = [run for run in runs if run.workload != "failed"]
    if not good:
        return
    if benchmark == "startup":
        charts = [part_chart("From nothing to the first token", {r.label: startup_parts(r) for r in good}, "seconds")]
    elif benchmark == "profile":
        parts = {
            f"{run.label}: {kind}" if len(good) > 1 else kind: split
            for run in good
            for kind, split in profile_parts(run).items()
        }
        charts = [part_chart("Where a step's time goes", parts, "ms a step", as_shares=True)]
    elif benchmark == "speculate":
        charts = [speculation_chart(good)]
    else:
        charts = sweep_charts(good) if is_sweep else run_charts(good)
    write_charts(path, charts, f"quire bench {'sweep ' if is_sweep else ''}{benchmark}: {model_name(good[0])}")


# -- which charts


def run_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Throughput and latency of every run, and the first few runs over time."""
    shown = [run for run in runs if run.seconds > 0]
    throughput = Series("tokens/s", [run.label for run in shown], [run.output_tok_s for run in shown])
    throughput.ranges = [_range(run) for run in shown]
    note = "The thin line goes from the slowest repeat to the fastest." if any(throughput.ranges) else ""
    charts = [Chart("bar", "Output", "", "tokens/s", [throughput], note)]
    for field, title in (("ttft_s", "First token"), ("itl_s", "Between tokens")):
        known = [run for run in shown if getattr(run, field) is not None]
        columns = {p: [1e3 * getattr(getattr(run, field), p) for run in known] for p in ("p50", "p95", "p99")}
        if known:
            charts.append(bar_chart(title, "ms", [run.label for run in known], columns))
    over_time = [run for run in shown if len(run.samples) > 1][:_MAX_LINES]
    if over_time:
        charts += [
            _over_time(over_time, "KV blocks in use", "percent", lambda sample: 100 * sample.kv_usage),
            _over_time(over_time, "Sequences running", "sequences", lambda sample: sample.running),
            _over_time(over_time, "Requests waiting", "requests", lambda sample: sample.waiting),
            line_chart(
                "Output over time", "seconds", "tokens/s", {run.label: _rates_over_time(run) for run in over_time}
            ),
        ]
    return charts


def sweep_charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Throughput, latency and waste against the first swept flag, a series for each other setting."""
    flag = next(iter(runs[0].point))
    groups: dict[str, dict[str, RunReport]] = {}
    for run in runs:
        others = [run.workload if run.engine == "quire" else f"{run.workload} ({run.engine})"]
        others += [f"{name}={value}" for name, value in run.point.items() if name not in (flag, "workload")]
        groups.setdefault(" ".join(others), {})[run.point[flag]] = run
    names = list(dict.fromkeys(run.point[flag] for run in runs))
    panels: list[tuple[str, str, Callable[[RunReport], float | None]]] = [
        ("Output", "tokens/s", lambda run: run.output_tok_s),
        ("First token, median", "ms", lambda run: 1e3 * run.ttft_s.p50 if run.ttft_s else None),
        ("Between tokens, slowest percent", "ms, p99", lambda run: 1e3 * run.itl_s.p99 if run.itl_s else None),
        ("Empty slots of blocks in use", "percent", lambda run: run.kv.waste_percent_mean if run.kv else None),
    ]
    xs = _numbers(names)
    charts = []
    for title, unit, value in panels:
        series = []
        for group, points in groups.items():
            ys = [value(points[name]) if name in points else None for name in names]
            ranges = [_range(points[name]) if name in points else None for name in names] if title == "Output" else []
            series.append(Series(group, names if xs is None else xs, ys, ranges))
        if any(y is not None for one in series for y in one.y):
            kind = "line" if xs is not None else "bar" if len(series) == 1 else "grouped_bar"
            is_log = xs is not None and min(xs) > 0 and max(xs) >= 4 * min(xs)
            charts.append(Chart(kind, title, flag, unit, series, log_x=is_log))  # type: ignore[arg-type]
    return charts


def speculation_chart(runs: Sequence[RunReport]) -> Chart:
    """Speed against load, as a multiple of plain decoding."""
    lines: dict[str, tuple[list[float], list[float | None]]] = {}
    for run in runs:
        if "times_plain" in run.values:
            xs, ys = lines.setdefault(f"{run.workload}, {run.point['drafts']}", ([], []))
            xs.append(float(run.point["load"]))
            ys.append(run.values["times_plain"])
    return line_chart("Drafting against plain decoding", "sequences at once", "times the speed", lines, log="x")


def part_chart(title: str, parts: dict[str, dict[str, float]], unit: str, *, as_shares: bool = False) -> Chart:
    """What each thing's time is made of; as shares of it where the things differ too much in size."""
    names = list(dict.fromkeys(part for split in parts.values() for part in split))
    totals = {key: sum(split.values()) for key, split in parts.items()}
    scales = {key: 100 / total if as_shares and total else 1.0 for key, total in totals.items()}
    labels = [f"{key}: {totals[key]:,.1f} {unit}" if as_shares else key for key in parts]
    columns = {name: [split.get(name, 0.0) * scales[key] for key, split in parts.items()] for name in names}
    return bar_chart(title, "percent of the time" if as_shares else unit, labels, columns, is_stacked=True)


def comparison_chart(found: Sequence[Comparison]) -> Chart:
    """The change of each metric in percent, with its noise, coloured by verdict."""
    changes = [(one.label, change) for one in found for change in one.changes if change.percent is not None]
    names = []
    for label, change in changes:
        name = change.metric if len(found) == 1 else f"{label}: {change.metric}"
        arrow = "" if change.metric in NEUTRAL else " ↑" if higher_is_better(change.metric) else " ↓"
        names.append(name + arrow)
    series = []
    for title, verdicts in (
        ("changed", (Verdict.CHANGED,)),
        ("worse", (Verdict.WORSE,)),
        ("better", (Verdict.BETTER,)),
        ("within the noise, or cannot tell", (Verdict.SAME, Verdict.CANNOT_TELL)),
    ):
        own = [change if change.verdict in verdicts else None for _, change in changes]
        ranges = [
            (c.percent - c.noise_percent, c.percent + c.noise_percent)
            if c is not None and c.percent is not None and c.noise_percent is not None
            else None
            for c in own
        ]
        series.append(Series(title, names, [None if c is None else c.percent for c in own], ranges))
    note = "The arrow points to the better side; the thin line is the noise of the repeats."
    return Chart("stacked_bar", "Change of each metric", "", "percent", series, note)


def _range(run: RunReport) -> tuple[float, float] | None:
    return (min(run.repeats), max(run.repeats)) if len(run.repeats) > 1 else None


def _numbers(names: Sequence[str]) -> list[float] | None:
    """The values of a swept flag as ascending numbers; None where they are not."""
    try:
        values = [float(name) for name in names]
    except ValueError:
        return None
    return values if len(values) > 1 and all(a < b for a, b in pairwise(values)) else None


def _over_time(runs: Sequence[RunReport], title: str, unit: str, value: Callable[[Any], float]) -> Chart:
    lines = {run.label: ([s.t_s for s in run.samples], [value(s) for s in run.samples]) for run in runs}
    return line_chart(title, "seconds", unit, lines)


def _rates_over_time(run: RunReport) -> tuple[list[float], list[float]]:
    """Output tokens per second over windows of a twentieth of the run: single steps would only show noise."""
    window_s = max(run.seconds / 20, 0.05)
    times, rates = [0.0], [0.0]
    last_s, last_tokens = 0.0, 0
    for sample in run.samples:
        if sample.t_s - last_s >= window_s:
            times.append(sample.t_s)
            rates.append((sample.output_tokens - last_tokens) / (sample.t_s - last_s))
            last_s, last_tokens = sample.t_s, sample.output_tokens
    return times, rates


# -- files


def check_plot(path: str | Path) -> None:
    """Whether a chart can be drawn, asked before a long run and not after it."""
    suffix = Path(path).suffix
    if suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: a chart's name ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    if suffix in _BY_MATPLOTLIB and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib: {install_hint('bench')}, or name an .svg or .html file")


def write_charts(path: str | Path, charts: Sequence[Chart], title: str) -> None:
    """Write a page (.html), one picture of all charts (.svg), or matplotlib's (.png, .pdf), by the name's ending."""
    check_plot(path)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".html":
            target.write_text(page(title, f"<h1>{escape(title)}</h1>{figures(charts)}"), encoding="utf-8")
            return
        picture = _picture(charts, title)
        if target.suffix in _BY_MATPLOTLIB:
            picture.write_picture(target)
            return
        ground = f'<style>{CHART_STYLE}</style><rect width="100%" height="100%" fill="var(--card)"/>'
        size = f' xmlns="http://www.w3.org/2000/svg" width="{picture.width:g}" height="{picture.height:g}"'
        target.write_text(picture.to_svg(size, before=ground) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def _picture(charts: Sequence[Chart], title: str) -> Canvas:
    """All charts in one picture, two in a row."""
    width = WIDE + 40 if len(charts) > 1 else WIDTH + 260
    whole = Canvas(title, 0.0, width)
    whole.text(20, 32, title, "title", anchor="start")
    y = 50.0
    for at in range(0, len(charts), 2):
        row = charts[at : at + 2]
        cells = [_cell(chart, WIDTH if len(row) == 2 else width - 40) for chart in row]
        for index, cell in enumerate(cells):
            whole.place(cell, 20 + index * (WIDTH + 10), y)
        y += max(cell.height for cell in cells) + 24
    whole.height = y
    return whole


def _cell(chart: Chart, width: float) -> Canvas:
    """A chart with its title, legend and note."""
    inner, around = draw(chart, width), Canvas(chart.title, 0.0, width)
    around.text(0, 14, chart.title, "title", anchor="start")
    x, y = 0.0, 34.0
    for name, fill in legend(chart):
        if x + 34 + text_px(name) > width:
            x, y = 0.0, y + 20
        around.rect(x, y - 10, 11, 11, fill, name)
        around.text(x + 17, y, name, anchor="start")
        x += 34 + text_px(name)
    y += 12 if legend(chart) else -10
    around.place(inner, 0.0, y)
    y += inner.height
    if chart.note:
        around.text(0, y + 14, chart.note, anchor="start")
        y += 18
    around.height = y
    return around
