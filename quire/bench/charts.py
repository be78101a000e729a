"""Charts of runs, as PNG or SVG files (matplotlib, without a display)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.compare import Comparison, Verdict, higher_is_better, is_neutral
from quire.bench.report import RunReport
from quire.errors import ConfigError, install_hint

_COLOURS = (
    "#2563a8",
    "#d9772b",
    "#2f8f5b",
    "#b03a48",
    "#7a57a8",
    "#8a6d3b",
    "#4a9fb5",
    "#6b7280",
    "#c9a227",
    "#1f3b57",
)
_MAX_LINES = 8


def plot_runs(path: str | Path, runs: Sequence[RunReport], title: str) -> None:
    """Throughput and latency of every run, and the first few runs over time."""
    plt = _pyplot(path)
    shown = [run for run in runs if run.seconds > 0]
    with_time = [run for run in shown if len(run.samples) > 1][:_MAX_LINES]
    num_rows = 2 if with_time else 1
    figure, axes = plt.subplots(num_rows, 3, figsize=(14, 3.9 * num_rows), squeeze=False)
    _throughput(axes[0][0], shown)
    _latency(axes[0][1], shown, "ttft_s", "First token, ms")
    _latency(axes[0][2], shown, "itl_s", "Inter-token, ms")
    if with_time:
        _over_time(axes[1][0], with_time, "kv_usage", "KV blocks in use, %", 100)
        _over_time(axes[1][1], with_time, "running", "Sequences: running (line), waiting (dots)", 1, also="waiting")
        _rate_over_time(axes[1][2], with_time)
    _finish(plt, figure, path, title)


def plot_sweep(path: str | Path, runs: Sequence[RunReport], title: str) -> None:
    """Throughput, inter-token p99, waste and peak memory against the swept value, a line for each other setting."""
    plt = _pyplot(path)
    flag = next(iter(runs[0].point))
    lines: dict[str, list[tuple[str, RunReport]]] = {}
    for run in runs:
        others = [run.workload if run.engine == "quire" else f"{run.workload} ({run.engine})"]
        others += [f"{name}={value}" for name, value in run.point.items() if name not in (flag, "workload")]
        lines.setdefault(" ".join(others), []).append((run.point[flag], run))
    x_names = list(dict.fromkeys(run.point[flag] for run in runs))
    panels: list[tuple[str, Any]] = [
        ("Output, tokens per s", lambda r: r.output_tok_s),
        ("First token p50, ms", lambda r: r.ttft_s and r.ttft_s.p50 * 1e3),
        ("Inter-token p99, ms", lambda r: r.itl_s and r.itl_s.p99 * 1e3),
        ("Empty slots of blocks in use, %", lambda r: r.kv and r.kv.waste_percent_mean),
    ]
    panels = [(name, of) for name, of in panels if any(of(run) is not None for run in runs)]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.7 * len(panels), 4.2), squeeze=False)
    for axis, (name, of) in zip(axes[0], panels, strict=True):
        for i, (label, points) in enumerate(lines.items()):
            known = [(x_names.index(x), of(run), run) for x, run in points if of(run) is not None]
            if not known:
                continue
            colour = _COLOURS[i % len(_COLOURS)]
            axis.plot([x for x, _, _ in known], [y for _, y, _ in known], "o-", color=colour, label=label)
            if name.startswith("Output"):
                for x, _, run in known:
                    if len(run.repeats) > 1:
                        axis.plot([x, x], [min(run.repeats), max(run.repeats)], color=colour, lw=3, alpha=0.35)
        axis.set_xticks(range(len(x_names)), x_names)
        axis.set_xlabel(flag)
        axis.set_title(name, fontsize=10)
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    _finish(plt, figure, path, title)


def plot_parts(
    path: str | Path, parts: dict[str, dict[str, float]], title: str, unit: str, *, as_shares: bool = False
) -> None:
    """Stacked bars: for each thing, what its time is made of; as shares where the things differ too much in size."""
    plt = _pyplot(path)
    names = list(dict.fromkeys(part for split in parts.values() for part in split))
    totals = [sum(split.values()) for split in parts.values()]
    labels = [f"{key}\n{total:,.1f} {unit}" if as_shares else key for key, total in zip(parts, totals, strict=True)]
    figure, axis = plt.subplots(figsize=(10, 1.6 + 0.6 * len(parts)))
    lefts = [0.0] * len(parts)
    for i, name in enumerate(names):
        widths = [
            split.get(name, 0.0) * (100 / total if as_shares and total else 1)
            for split, total in zip(parts.values(), totals, strict=True)
        ]
        axis.barh(labels, widths, left=lefts, color=_COLOURS[i % len(_COLOURS)], label=name, height=0.6)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("% of the time" if as_shares else unit)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    _finish(plt, figure, path, title)


def plot_comparison(path: str | Path, found: Sequence[Comparison], title: str) -> None:
    """Change of each metric in percent, with its noise, coloured by verdict."""
    plt = _pyplot(path)
    colours = {Verdict.BETTER: "#2f8f5b", Verdict.WORSE: "#b03a48", Verdict.CHANGED: "#d9772b"}
    bars = [
        (f"{c.metric}" if len(found) == 1 else f"{one.label}: {c.metric}", c)
        for one in found
        for c in one.changes
        if c.percent is not None
    ]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.3 * len(bars)))
    for i, (_, change) in enumerate(bars):
        colour = colours.get(change.verdict, "#9aa0a6")
        axis.barh(i, change.percent, xerr=change.noise_percent, color=colour, ecolor="#555", capsize=2, height=0.65)
    arrows = [
        name if is_neutral(c.metric) else f"{name} {'↑' if higher_is_better(c.metric) else '↓'}" for name, c in bars
    ]
    axis.set_yticks(range(len(bars)), arrows, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(0, color="#333", lw=0.8)
    axis.set_xlabel("change, % (the arrow points to the better side; grey: within the noise, or cannot tell)")
    _finish(plt, figure, path, title)


def _throughput(axis: Any, runs: Sequence[RunReport]) -> None:
    places = range(len(runs))
    axis.bar(places, [run.output_tok_s for run in runs], color=_COLOURS[0], width=0.6)
    for place, run in zip(places, runs, strict=True):
        if len(run.repeats) > 1:
            axis.plot([place] * len(run.repeats), run.repeats, "_", color="#111", ms=14, mew=1.2)
        top = max([run.output_tok_s, *run.repeats])
        axis.annotate(f"{run.output_tok_s:,.0f}", (place, top), (0, 5), textcoords="offset points", ha="center")
    _name_places(axis, runs)
    axis.set_title("Output, tokens per s (marks: repeats)", fontsize=10)


def _latency(axis: Any, runs: Sequence[RunReport], field: str, title: str) -> None:
    known = [run for run in runs if getattr(run, field) is not None]
    for i, percentile in enumerate(("p50", "p95", "p99")):
        heights = [getattr(getattr(run, field), percentile) * 1e3 for run in known]
        axis.bar([p + (i - 1) * 0.27 for p in range(len(known))], heights, 0.25, color=_COLOURS[i], label=percentile)
    _name_places(axis, known)
    axis.set_title(title, fontsize=10)
    if known:
        axis.legend(fontsize=8)


def _name_places(axis: Any, runs: Sequence[RunReport]) -> None:
    long = max((len(run.label) for run in runs), default=0) * len(runs) > 40
    names = [run.label for run in runs]
    axis.set_xticks(range(len(runs)), names, rotation=25 if long else 0, ha="right" if long else "center", fontsize=8)
    axis.set_xlim(-0.7 if len(runs) > 1 else -1.2, len(runs) - 0.3 if len(runs) > 1 else 1.2)
    axis.margins(y=0.12)


def _over_time(
    axis: Any, runs: Sequence[RunReport], field: str, title: str, factor: float, also: str | None = None
) -> None:
    for i, run in enumerate(runs):
        times = [sample.t_s for sample in run.samples]
        colour = _COLOURS[i % len(_COLOURS)]
        axis.plot(times, [getattr(s, field) * factor for s in run.samples], color=colour, label=run.label, lw=1.4)
        if also is not None:
            axis.plot(times, [getattr(s, also) for s in run.samples], ":", color=colour, lw=1.4)
    axis.set_xlabel("seconds")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    if len(runs) > 1 and also is None:  # once is enough: colours mean the same in every panel
        axis.legend(fontsize=8)


def _rate_over_time(axis: Any, runs: Sequence[RunReport]) -> None:
    """Output tokens per second over windows of a twentieth of the run: single steps would only show noise."""
    for i, run in enumerate(runs):
        window_s = max(run.seconds / 20, 0.05)
        times, rates = [0.0], [0.0]
        last_s, last_tokens = 0.0, 0
        for sample in run.samples:
            if sample.t_s - last_s >= window_s:
                times.append(sample.t_s)
                rates.append((sample.output_tokens - last_tokens) / (sample.t_s - last_s))
                last_s, last_tokens = sample.t_s, sample.output_tokens
        axis.plot(times, rates, color=_COLOURS[i % len(_COLOURS)], label=run.label, lw=1.4, drawstyle="steps-pre")
    axis.set_xlabel("seconds")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.set_title("Output tokens per s over time", fontsize=10)


def _pyplot(path: str | Path) -> Any:
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_plot(path: str | Path) -> None:
    """Whether a chart can be drawn: asked before a long run, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {install_hint('bench')}")
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: a chart's name ends in .png, .svg or .pdf")


def _finish(plt: Any, figure: Any, path: str | Path, title: str) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        plt.close(figure)
