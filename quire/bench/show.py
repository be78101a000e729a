"""Each command's own way to show its runs: lines on the terminal, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.charts import plot_parts, plot_runs, plot_sweep
from quire.bench.profile import PARTS
from quire.bench.report import RunReport
from quire.bench.tables import details, ms, number, summary, table


def show(benchmark: str, runs: Sequence[RunReport], *, is_sweep: bool = False) -> str:
    """Tables for people."""
    good = [run for run in runs if run.workload != "failed"]
    failed = [f"failed at {_point(run)}: {next(iter(run.errors))}" for run in runs if run.workload == "failed"]
    if benchmark == "startup":
        blocks = [_startup(run) for run in good]
    elif benchmark == "profile":
        blocks = [_profile(run) for run in good]
    elif benchmark == "latency":
        blocks = [_latency(good), *([] if is_sweep else [details(run) for run in good])]
    elif is_sweep:
        blocks = [summary(good)]
    elif benchmark == "prefix":
        blocks = [summary(good), *_prefix(good)]
    else:
        blocks = [*([summary(good)] if len(good) > 1 else []), *(details(run) for run in good)]
    machine = good[0].machine if good else {}
    where = machine.get("gpu") or f"{machine.get('cpus')} cores of {machine.get('cpu')}"
    closing = [f"measured on {where}, {_model(good[0])}"] if good and good[0].engine != "server" else []
    return "\n\n".join(block for block in [*blocks, *failed, *closing] if block)


def draw(path: str | Path, benchmark: str, runs: Sequence[RunReport], *, is_sweep: bool = False) -> None:
    good = [run for run in runs if run.workload != "failed"]
    if not good:
        return
    title = f"quire bench {'sweep ' if is_sweep else ''}{benchmark}: {_model(good[0])}"
    if benchmark == "startup":
        plot_parts(path, {run.label: _startup_parts(run) for run in good}, title, "seconds")
    elif benchmark == "profile":
        parts = {
            f"{run.label}: {kind}" if len(good) > 1 else kind: split
            for run in good
            for kind, split in profile_parts(run).items()
        }
        plot_parts(path, parts, title, "ms a step", as_shares=True)
    elif is_sweep:
        plot_sweep(path, good, title)
    else:
        plot_runs(path, good, title)


def _model(run: RunReport) -> str:
    return (
        f"{run.settings.get('model', '?')} in {run.settings['dtype']}"
        if "dtype" in run.settings
        else str(run.settings.get("model", "?"))
    )


def _point(run: RunReport) -> str:
    return ", ".join(f"{flag}={value}" for flag, value in run.point.items())


def _latency(runs: Sequence[RunReport]) -> str:
    heads = ["batch latency, ms", "iterations", "p50", "p95", "p99", "mean", "max", "out tok/s"]
    rows = []
    for run in runs:
        values = [ms(run.values.get(f"batch_{p}_s")) for p in ("p50", "p95", "p99", "mean", "max")]
        rows.append([run.label, str(len(run.repeats)), *values, number(run.output_tok_s)])
    return table(heads, rows)


def _prefix(runs: Sequence[RunReport]) -> list[str]:
    """For each workload, what caching brought."""
    blocks = []
    pairs: dict[str, dict[str, RunReport]] = {}
    for run in runs:
        pairs.setdefault(run.workload, {})[run.point["prefix-caching"]] = run
    for name, pair in pairs.items():
        if len(pair) < 2 or not (pair["on"].kv and pair["off"].kv and pair["on"].ttft_s and pair["off"].ttft_s):
            continue
        on, off = pair["on"], pair["off"]
        assert on.kv and off.kv and on.ttft_s and off.ttft_s
        found, asked = on.kv.prefix_hit_tokens, on.kv.prefix_query_tokens
        blocks.append(
            f"{name}: caching found {found:,} of {asked:,} prompt tokens ({100 * on.kv.prefix_hit_rate:.0f} %).\n"
            f"  throughput   {number(off.output_tok_s)} -> {number(on.output_tok_s)} tok/s "
            f"(x {on.output_tok_s / off.output_tok_s:.2f})\n"
            f"  first token  {ms(off.ttft_s.p50)} -> {ms(on.ttft_s.p50)} ms at p50 "
            f"(x {on.ttft_s.p50 / off.ttft_s.p50:.2f})\n"
            f"  peak blocks  {off.kv.peak_blocks:,} -> {on.kv.peak_blocks:,} "
            f"({off.kv.peak_blocks - on.kv.peak_blocks:,} saved by sharing)"
        )
    return blocks


def _startup_parts(run: RunReport) -> dict[str, float]:
    """What adds up to the first token; what is left is written as such."""
    whole = ("ready_s", "first_token_s")
    parts = {name.removesuffix("_s").replace("_", " "): s for name, s in run.values.items() if name not in whole}
    if "ready_s" not in run.values:
        return parts
    parts["rest"] = max(0.0, run.values["ready_s"] - sum(parts.values()))
    parts["first token"] = run.values["first_token_s"] - run.values["ready_s"]
    return parts


def _startup(run: RunReport) -> str:
    if not run.values:
        return f"{run.label}: interrupted before the first process was ready"
    rows = [[part, f"{seconds:.2f}"] for part, seconds in _startup_parts(run).items()]
    rows += [["to ready", f"{run.values['ready_s']:.2f}"], ["to first token", f"{run.values['first_token_s']:.2f}"]]
    all_times = ", ".join(f"{value:.2f}" for value in run.repeat_values.get("first_token_s", []))
    lines = [f"{run.label}: {run.completed} fresh processes, to the first token in {all_times} s; the median's parts:"]
    return "\n".join([*lines, table(["part", "seconds"], rows)])


def profile_parts(run: RunReport) -> dict[str, dict[str, float]]:
    """Kind of step -> part -> milliseconds."""
    kinds: dict[str, dict[str, float]] = {}
    for name, value in run.values.items():
        kind, _, part = name.rpartition(": ")
        part = part.removesuffix("_ms")
        if part in PARTS:
            kinds.setdefault(kind, {})[part] = value
    return {kind: {part: ms for part, ms in split.items() if ms > 0} for kind, split in kinds.items()}


def _profile(run: RunReport) -> str:
    heads = ["kind of step", "steps", "ms", *PARTS]
    rows = []
    for kind, split in profile_parts(run).items():
        total = run.values[f"{kind}: step_ms"]
        cells = [f"{split[part]:.2f} ({100 * split[part] / total:.0f} %)" if part in split else "-" for part in PARTS]
        rows.append([kind, f"{run.values[f'{kind}: steps']:.0f}", f"{total:.2f}", *cells])
    notes = [f"note: {note}" for note in run.notes]
    return "\n".join([f"{run.label}: milliseconds of a step, by kind, those with most time first",
                      table(heads, rows), *notes])  # fmt: skip
