"""What an experiment is: it measures data, and tells what the data say.

`measure` returns plain data that goes to JSON and back; `tell` makes charts, tables, findings and an explanation of
that data alone. So a report is told in today's words whenever it is read, and nothing has to be measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.bench.charts import Chart
from quire.bench.report import KVReport, Percentiles, RunReport
from quire.bench.units import ms, number, size

if TYPE_CHECKING:
    from quire.lab.context import LabContext

Data = dict[str, Any]
Record = dict[str, Any]  # a run as data: see `context.record`


@dataclass(slots=True)
class Table:
    """Rows of text and numbers under column heads; `note` says how to read it."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.title!r}: {len(row)} cells under {len(self.columns)} heads"


@dataclass(slots=True)
class Finding:
    """What was expected, what was seen, and whether they agree. `holds` is None where the run cannot tell: `observed`
    says why."""

    expected: str
    observed: str
    holds: bool | None


@dataclass(slots=True)
class Result:
    """One experiment's outcome: its data, and what they say."""

    question: str
    headline: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)  # paragraphs
    data: Data = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class Experiment:
    key: str
    title: str
    measure: Callable[[LabContext], Data]
    tell: Callable[[Data, LabContext], Result]
    is_last: bool = False  # looks at the runs of the others, so it runs after them

    def run(self, context: LabContext) -> Result:
        started = time.perf_counter()
        data = self.measure(context)
        return self.result(data, context, time.perf_counter() - started)

    def result(self, data: Data, context: LabContext, seconds: float) -> Result:
        result = self.tell(data, context)
        result.data, result.seconds = data, seconds
        return result


# -- tables of runs


def kv_of(run: RunReport) -> KVReport:
    assert run.kv is not None, f"{run.workload}: this run had no KV cache"
    return run.kv


def num_preemptions(run: RunReport) -> int:
    return sum(kv_of(run).preemptions.values())


def percentile(of: Percentiles | None, name: str) -> float | None:
    return None if of is None else float(getattr(of, name))


COLUMNS: dict[str, Callable[[RunReport], object]] = {
    "requests": lambda run: run.requests,
    "output tok/s": lambda run: number(run.output_tok_s),
    "in and out tok/s": lambda run: number(run.total_tok_s),
    "prefill tok/s": lambda run: number(run.prefill_tok_s),
    "decode tok/s": lambda run: number(run.decode_tok_s),
    "spread %": lambda run: number(run.spread_percent),
    "sequences a step": lambda run: number(run.running_mean),
    "first token p50 s": lambda run: number(percentile(run.ttft_s, "p50")),
    "first token p99 s": lambda run: number(percentile(run.ttft_s, "p99")),
    "between tokens p50 ms": lambda run: ms(percentile(run.itl_s, "p50")),
    "between tokens p99 ms": lambda run: ms(percentile(run.itl_s, "p99")),
    "longest ms": lambda run: ms(percentile(run.itl_s, "max")),
    "end to end p50 s": lambda run: number(percentile(run.e2e_s, "p50")),
    "end to end p99 s": lambda run: number(percentile(run.e2e_s, "p99")),
    "blocks": lambda run: kv_of(run).num_blocks,
    "block bytes": lambda run: size(kv_of(run).block_bytes),
    "blocks in use %": lambda run: number(100 * kv_of(run).occupancy_mean),
    "most in use %": lambda run: number(100 * kv_of(run).occupancy_max),
    "most blocks": lambda run: kv_of(run).peak_blocks,
    "as memory": lambda run: size(kv_of(run).peak_blocks * kv_of(run).block_bytes),
    "blocks allocated": lambda run: kv_of(run).blocks_allocated,
    "table entries": lambda run: kv_of(run).table_entries_max,
    "empty %": lambda run: number(kv_of(run).waste_percent_mean),
    "preemptions": num_preemptions,
    "recomputes": lambda run: kv_of(run).preemptions.get("recompute", 0),
    "swaps": lambda run: kv_of(run).preemptions.get("swap", 0),
    "tokens computed twice": lambda run: kv_of(run).recomputed_tokens,
    "swapped out": lambda run: size(kv_of(run).swapped_out_blocks * kv_of(run).block_bytes),
    "prompt tokens run": lambda run: run.prompt_tokens - kv_of(run).prefix_hit_tokens,
    "prefix hits %": lambda run: f"{100 * kv_of(run).prefix_hit_rate:.1f}",
    "forks": lambda run: kv_of(run).forks,
    "copies on write": lambda run: kv_of(run).copies,
}


def run_table(
    title: str, runs: Sequence[RunReport], columns: Sequence[str | tuple[str, Sequence[object]]], note: str = ""
) -> Table:
    """A row for each run. A column is one of COLUMNS, or a name with a value for each run."""
    cells = [[COLUMNS[c](run) for run in runs] if isinstance(c, str) else list(c[1]) for c in columns]
    names = [c if isinstance(c, str) else c[0] for c in columns]
    return Table(title, names, [list(row) for row in zip(*cells, strict=True)], note)


def curve(record: Record, name: str, scale: float = 1.0) -> tuple[list[float], list[float | None]]:
    """A run's samples over time, as a line of a chart."""
    return list(record["samples"]["t_s"]), [scale * value for value in record["samples"][name]]
