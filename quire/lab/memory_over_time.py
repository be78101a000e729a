"""Experiment: memory over time, in every run of the others: what the cache holds, and what the process takes."""

from __future__ import annotations

from quire.bench.charts import Chart, line_chart
from quire.bench.units import counted, listed, number, size
from quire.bench.workloads import even_lengths
from quire.lab.context import LabContext, record, run_records
from quire.lab.experiment import Data, Experiment, Finding, Record, Result, Table, curve

KEY = "memory"
Runs = list[tuple[str, Record]]  # the experiment's key, and the run

# Experiment -> (what its picture is called, which of its runs are drawn; None: all). More lines than that hide others.
_PICTURES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "batch-width": ("by width", None),
    "block-size": ("by block size, general lengths", tuple(f"blocks of {n}, general" for n in (4, 16, 64, 128))),
    "prefix-sharing": ("sharing on and off", None),
    "pressure": ("under pressure", None),
    "step-budget": ("by step budget, chunked", tuple(f"budget {n:,}, chunked prefill on" for n in (256, 1024, 8192))),
    "baseline": ("16 at once", ("Quire, equal lengths", "Quire, mixed lengths")),
    KEY: ("mixed lengths", None),
}


def measure(context: LabContext) -> Data:
    """A run of its own, only where no other experiment has one."""
    if _runs(context, []):
        return {"measured": []}
    lengths = context.pick((8, 48), (16, 128), (100, 500))
    work = even_lengths(context.vocab, context.seed, context.pick(24, 64, 256), lengths, lengths)
    engine = context.engine(max_num_seqs=context.pick(16, 32, 128))
    return {"measured": [record(context.measure(engine, work, "mixed lengths"))]}


def _runs(context: LabContext, own: list[Record]) -> Runs:
    """Every run that had a cache."""
    others = {key: each for key, each in context.results.items() if key != KEY}
    return [(key, each) for key, each in [*run_records(others), *((KEY, each) for each in own)] if each["kv"]]


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    runs = _runs(context, data["measured"])
    most = max(_cache_bytes(each) * max(each["samples"]["kv_usage"]) for _, each in runs)
    ends = [each["samples"]["kv_usage"][-1] for _, each in runs]
    over = [each["workload"] for _, each in runs if each["kv"]["peak_blocks"] > each["kv"]["num_blocks"]]
    gaps = [each["kv"]["blocks_allocated"] - each["kv"]["blocks_freed"] for _, each in runs]
    return Result(
        question="How much memory does each run hold at each moment, and does it follow the work?",
        headline=f"{counted(len(runs), 'run')}: the cache holds at most {size(most)}, and every block comes back",
        charts=_charts(runs),
        tables=[_table(runs)],
        findings=[
            Finding(
                "When a run ends, no block is in use any more: all that was allocated was given back.",
                f"{sum(end == 0 for end in ends)} of {len(ends)} runs end with none in use; allocated less freed is "
                + ("0 in all of them." if not any(gaps) else f"{min(gaps)} to {max(gaps)}."),
                not any(ends),
            ),
            Finding(
                "No run ever uses more blocks than there are.",
                f"{listed(over)} did." if over else "None did.",
                not over,
            ),
        ],
        explanation=_explain(runs),
    )


def _cache_bytes(run: Record) -> int:
    return int(run["kv"]["num_blocks"] * run["kv"]["block_bytes"])


def _table(runs: Runs) -> Table:
    columns = ["experiment", "run", "seconds", "cache", "most in use", "mean in use %", "of it tokens %", "fewest free"]
    columns += ["blocks in and out /s", "process", "GPU"]
    rows: list[list[object]] = []
    for key, each in runs:
        kv = each["kv"]
        held = size(kv["peak_blocks"] * kv["block_bytes"])
        rows.append([key, each["workload"], number(each["seconds"]), size(_cache_bytes(each)), held])
        rows[-1] += [number(100 * kv["occupancy_mean"]), number(100 - kv["waste_percent_at_peak"]), kv["min_available"]]
        rows[-1] += [number(kv["churn_per_s"]), size(each["peak_rss_bytes"]), size(each["peak_gpu_bytes"] or None)]
    return Table("Every run", columns, rows, "Of it tokens: when most blocks were in use.")


def _charts(runs: Runs) -> list[Chart]:
    charts = []
    for key, (title, names) in _PICTURES.items():
        own = [each for other, each in runs if other == key and (names is None or each["workload"] in names)]
        if own:
            most = max(_cache_bytes(each) * max(each["samples"]["kv_usage"]) for each in own)
            scale, unit = (1 << 30, "GiB") if most > 1 << 31 else (1 << 20, "MiB")
            lines = {each["workload"]: curve(each, "kv_usage", _cache_bytes(each) / scale) for each in own}
            charts.append(line_chart(f"KV memory in use, {title}", "seconds", unit, lines, is_area=len(own) < 4))
    longest = max((each for _, each in runs), key=lambda each: float(each["seconds"]))
    title = f"The longest run, {longest['workload']}: sequences and their memory"
    names_of = {"sequences running": "running", "KV memory in use": "kv_usage"}
    shares = {name: curve(longest, of, 100 / (max(longest["samples"][of]) or 1.0)) for name, of in names_of.items()}
    return [*charts, line_chart(title, "seconds", "percent of the most", shares)]


def _explain(runs: Runs) -> list[str]:
    full = [key for key, each in runs if each["kv"]["min_available"] < 0.02 * each["kv"]["num_blocks"]]
    where = listed([f"{full.count(key)} of {key}" for key in dict.fromkeys(full)])
    waited = "No cache was ever full."
    if full:
        waited = (
            f"In {counted(len(full), 'run')} ({where}) less than 2 % of the blocks were free or evictable at some "
            "moment, so that somebody had to wait or be preempted."
        )
    taken = (
        "The GPU's memory does not follow: the cache is taken whole at the start."
        if any(each["peak_gpu_bytes"] for _, each in runs)
        else "Blocks take real memory when they are first written, and keep it for the next sequence."
    )
    return [
        "Memory follows the work: a sequence takes a block when its last one is full and gives all of them back when "
        f"it is done. {waited}",
        f"What the process takes follows less. {taken}",
    ]


EXPERIMENT = Experiment(KEY, "Memory over time", measure, tell, is_last=True)
