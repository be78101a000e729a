"""Experiment: memory over time, in every run of the others: what the cache holds, and what the process takes."""

from __future__ import annotations

import time
from typing import Any

from quire.lab.context import LabContext, record, run_records
from quire.lab.lengths import even_lengths
from quire.lab.result import Chart, Finding, Result, Series, Table
from quire.lab.wording import counted, listed, number, size

KEY = "memory"
TITLE = "Memory over time"

# Experiment -> (what its picture is called, which of its runs are drawn; None: all). More lines than that hide others.
_PICTURES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "batch-width": ("by width", None),
    "block-size": (
        "by block size, general lengths",
        tuple(f"blocks of {n}, general" for n in (4, 16, 64, 128)),
    ),
    "prefix-sharing": ("sharing on and off", None),
    "pressure": ("under pressure", None),
    "step-budget": ("by step budget, chunked", tuple(f"budget {n:,}, chunked prefill on" for n in (256, 1024, 8192))),
    "baseline": ("against static batches", ("Quire, equal lengths", "Quire, mixed lengths")),
    KEY: ("mixed lengths", None),
}


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    runs = run_records(context.results)
    own: list[dict[str, Any]] = []
    if not any(each["kv"] for _, each in runs):
        lengths = context.pick((8, 48), (16, 128), (100, 500))
        work = even_lengths(context.vocab, context.seed, context.pick(24, 64, 256), lengths, lengths)
        engine = context.engine(max_num_seqs=context.pick(16, 32, 128))
        own = [record(context.measure(engine, work, "mixed lengths"))]
        runs = [(KEY, each) for each in own]
    runs = [(key, each) for key, each in runs if each["kv"]]
    paths = [kv_bytes_over_time(each) for _, each in runs]
    return Result(
        key=KEY,
        title=TITLE,
        question="How much memory does each run hold at each moment, and does it follow the work?",
        tables=[_table(runs)],
        charts=_charts(runs),
        findings=_findings(runs),
        explanation=_explain(runs),
        data={
            "headline": f"{counted(len(runs), 'run')}: the cache holds at most "
            f"{size(max(max(path) for path in paths))}, and every block comes back",
            "measured": own,
        },
        seconds=time.perf_counter() - started,
    )


def kv_bytes_over_time(run: dict[str, Any]) -> list[float]:
    kv = run["kv"]
    return [usage * kv["num_blocks"] * kv["block_bytes"] for usage in run["samples"]["kv_usage"]]


def held_at_peak_percent(run: dict[str, Any]) -> float:
    """Of the bytes in use when most blocks were: those that held a token."""
    return 100.0 - float(run["kv"]["waste_percent_at_peak"])


def _table(runs: list[tuple[str, dict[str, Any]]]) -> Table:
    rows: list[list[object]] = []
    for key, each in runs:
        kv = each["kv"]
        rows.append(
            [
                key,
                each["workload"],
                number(each["seconds"]),
                size(kv["num_blocks"] * kv["block_bytes"]),
                size(kv["peak_blocks"] * kv["block_bytes"]),
                number(100 * kv["occupancy_mean"]),
                number(held_at_peak_percent(each)),
                kv["min_available"],
                number(kv["churn_per_s"]),
                size(each["peak_rss_bytes"]),
                size(each["peak_gpu_bytes"]) if each["peak_gpu_bytes"] else "–",
            ]
        )
    columns = ["experiment", "run", "seconds", "cache", "most in use", "mean in use %", "of it tokens %", "fewest free"]
    columns += ["blocks in and out /s", "process", "GPU"]
    return Table("Every run", columns, rows, "Of it tokens: when most blocks were in use.")


def _charts(runs: list[tuple[str, dict[str, Any]]]) -> list[Chart]:
    charts = []
    for key, (title, names) in _PICTURES.items():
        own = [each for other, each in runs if other == key and (names is None or each["workload"] in names)]
        if not own:
            continue
        scale, unit = (1 << 30, "GiB") if max(max(kv_bytes_over_time(e)) for e in own) > 1 << 31 else (1 << 20, "MiB")
        series = [
            Series(e["workload"], list(e["samples"]["t_s"]), [b / scale for b in kv_bytes_over_time(e)]) for e in own
        ]
        charts.append(Chart("area" if len(own) < 4 else "line", f"KV memory in use, {title}", "seconds", unit, series))
    longest = max((each for _, each in runs), key=lambda each: float(each["seconds"]))
    samples = longest["samples"]
    charts.append(
        Chart(
            "line",
            f"The longest run, {longest['workload']}: sequences and their memory",
            "seconds",
            "percent of the most",
            [
                Series("sequences running", list(samples["t_s"]), _percent_of_most(samples["running"])),
                Series("KV memory in use", list(samples["t_s"]), _percent_of_most(samples["kv_usage"])),
            ],
        )
    )
    return charts


def _percent_of_most(values: list[float]) -> list[float]:
    most = max(values) or 1.0
    return [100 * value / most for value in values]


def _findings(runs: list[tuple[str, dict[str, Any]]]) -> list[Finding]:
    ends = [each["samples"]["kv_usage"][-1] for _, each in runs]
    over = [each for _, each in runs if each["kv"]["peak_blocks"] > each["kv"]["num_blocks"]]
    gaps = [each["kv"]["blocks_allocated"] - each["kv"]["blocks_freed"] for _, each in runs]
    return [
        Finding(
            "When a run ends, no block is in use any more: all that was allocated was given back.",
            f"{sum(end == 0 for end in ends)} of {len(ends)} runs end with none in use; allocated less freed is "
            + ("0 in all of them." if not any(gaps) else f"{min(gaps)} to {max(gaps)}."),
            not any(ends),
        ),
        Finding(
            "No run ever uses more blocks than there are.",
            "None did." if not over else listed([each["workload"] for each in over]) + " did.",
            not over,
        ),
    ]


def _explain(runs: list[tuple[str, dict[str, Any]]]) -> list[str]:
    shares = [held_at_peak_percent(each) for _, each in runs]
    fullest = max((each for _, each in runs), key=lambda e: e["kv"]["occupancy_max"])
    fastest = max((each for _, each in runs), key=lambda e: e["kv"]["churn_per_s"])
    paragraphs = [
        f"Memory follows the work: a block is taken when a sequence reaches its end and given back when the sequence "
        f"is done, at up to {number(fastest['kv']['churn_per_s'])} blocks a second ({fastest['workload']}). At the "
        f"fullest moment of a run between {min(shares):.0f} and {max(shares):.0f} % of the slots in use hold a token.",
        f"The fullest cache was that of “{fullest['workload']}”: {100 * fullest['kv']['occupancy_max']:.0f} % of its "
        f"blocks, with {fullest['kv']['min_available']:,} left free or evictable"
        + (
            ", so somebody had to wait or be preempted."
            if fullest["kv"]["min_available"] < 0.02 * fullest["kv"]["num_blocks"]
            else "."
        ),
    ]
    growth = [each["samples"]["rss_bytes"][-1] - each["samples"]["rss_bytes"][0] for _, each in runs]
    most = max(range(len(growth)), key=lambda i: growth[i])
    paragraphs.append(
        f"The process itself takes between {size(min(float(e['peak_rss_bytes']) for _, e in runs))} and "
        f"{size(max(float(e['peak_rss_bytes']) for _, e in runs))} of memory. "
        + (
            f"It grew most in “{runs[most][1]['workload']}”, by {size(growth[most])}: blocks take real memory when "
            "they are first written, and keep it for the next sequence."
            if growth[most] > 8 << 20
            else "It hardly grows within a run: blocks that were written once are used again."
        )
    )
    return paragraphs
