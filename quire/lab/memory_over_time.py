"""Experiment: memory over time, in every run of the others: what the cache holds, and what the process takes."""

from __future__ import annotations

import time
from typing import Any

from quire.bench.charts import Chart, Series
from quire.bench.units import counted, listed, number, size
from quire.lab.context import LabContext, record, run_records
from quire.lab.lengths import even_lengths
from quire.lab.result import Finding, Result, Table

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
    "baseline": ("16 at once", ("Quire, equal lengths", "Quire, mixed lengths")),
    KEY: ("mixed lengths", None),
}


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    own: list[dict[str, Any]] = []
    if not _runs(context, own):
        lengths = context.pick((8, 48), (16, 128), (100, 500))
        work = even_lengths(context.vocab, context.seed, context.pick(24, 64, 256), lengths, lengths)
        engine = context.engine(max_num_seqs=context.pick(16, 32, 128))
        own = [record(context.measure(engine, work, "mixed lengths"))]
    result = Result(
        key=KEY,
        title=TITLE,
        question="How much memory does each run hold at each moment, and does it follow the work?",
        data={"measured": own},
    )
    tell(result, context)
    result.seconds = time.perf_counter() - started
    return result


def tell(result: Result, context: LabContext) -> None:
    """All of it: the data are the other experiments'."""
    runs = _runs(context, result.data["measured"])
    most = max(max(kv_bytes_over_time(each)) for _, each in runs)
    result.tables, result.charts = [_table(runs)], _charts(runs)
    result.findings, result.explanation = _findings(runs), _explain(runs)
    result.data["headline"] = (
        f"{counted(len(runs), 'run')}: the cache holds at most {size(most)}, and every block comes back"
    )


def _runs(context: LabContext, own: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(experiment, run) of every run with a cache; its own, if it had to make one, instead of one before."""
    others = {key: each for key, each in context.results.items() if key != KEY}
    return [(key, each) for key, each in [*run_records(others), *((KEY, each) for each in own)] if each["kv"]]


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
    fastest = max((each for _, each in runs), key=lambda e: e["kv"]["churn_per_s"])
    return [
        f"Memory follows the work: a sequence takes a block when its last one is full and gives all of them back when "
        f"it is done, up to {number(fastest['kv']['churn_per_s'])} blocks in and out a second ({fastest['workload']}). "
        f"At the fullest moment of a run between {min(shares):.0f} and {max(shares):.0f} % of the slots in use hold a "
        "token.",
        _explain_full(runs),
        _explain_gpu(runs) if any(each["peak_gpu_bytes"] for _, each in runs) else _explain_process(runs),
    ]


def _explain_full(runs: list[tuple[str, dict[str, Any]]]) -> str:
    full = [key for key, each in runs if each["kv"]["min_available"] < 0.02 * each["kv"]["num_blocks"]]
    if not full:
        fullest = max((each for _, each in runs), key=lambda e: e["kv"]["occupancy_max"])
        return (
            f"No cache was ever full: the fullest, that of “{fullest['workload']}”, had "
            f"{100 * fullest['kv']['occupancy_max']:.0f} % of its blocks in use."
        )
    where = listed([f"{full.count(key)} of {key}" for key in dict.fromkeys(full)])
    return (
        f"In {counted(len(full), 'run')} ({where}) the cache was full at some moment, with less than 2 % of its blocks "
        "free or evictable, so that somebody had to wait or be preempted."
    )


def _explain_process(runs: list[tuple[str, dict[str, Any]]]) -> str:
    """Of a CPU, whose cache is the process's own memory."""
    growth = [each["samples"]["rss_bytes"][-1] - each["samples"]["rss_bytes"][0] for _, each in runs]
    most = max(range(len(growth)), key=lambda i: growth[i])
    return f"The process itself takes {_span([e['peak_rss_bytes'] for _, e in runs])} of memory. " + (
        f"It grew most in “{runs[most][1]['workload']}”, by {size(growth[most])}: blocks take real memory when they "
        "are first written, and keep it for the next sequence."
        if growth[most] > max(8 << 20, 0.02 * runs[most][1]["peak_rss_bytes"])
        else "It hardly grows within a run: blocks that were written once are used again."
    )


def _explain_gpu(runs: list[tuple[str, dict[str, Any]]]) -> str:
    """Of a GPU, where the cache is taken whole at the start, whatever is in it."""
    sizes = [each["kv"]["block_size"] for _, each in runs]
    usual = max(set(sizes), key=sizes.count)
    same = [each["peak_gpu_bytes"] for _, each in runs if each["kv"]["block_size"] == usual]
    other = [each["peak_gpu_bytes"] for _, each in runs if each["kv"]["block_size"] != usual]
    whole = max(each["kv"]["num_blocks"] * each["kv"]["block_bytes"] for _, each in runs)
    text = (
        f"The GPU's memory does not follow: the cache of {size(whole)} is taken whole at the start, and the runs "
        f"differ by the size of their steps alone, {_span(same)} with weights and all."
    )
    if other:
        text += (
            f" Those with another block size than {usual} take {_span(other)}: the lab keeps the first cache beside "
            "theirs, which an engine of its own would not."
        )
    return text + (
        f" The process takes {_span([each['peak_rss_bytes'] for _, each in runs])} of the host's memory, in which "
        "of the cache there is only the pool for swapping."
    )


def _span(values: list[float]) -> str:
    low, high = size(min(values)), size(max(values))
    return low if low == high else f"{low} to {high}"
