"""What a benchmark found, as data: one `RunReport` a run, several in a `BenchFile`. Both go to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

FORMAT = "quire-bench-1"


@dataclass(slots=True, frozen=True)
class Percentiles:
    """Percentiles of durations in seconds. Between two values they are interpolated, as numpy does it."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """The percentiles of some values; None where there are no values."""
        import numpy as np

        array = np.asarray(values if hasattr(values, "__len__") else list(values), dtype=np.float64)
        if not array.size:
            return None
        p50, p95, p99 = (float(p) for p in np.percentile(array, [50, 95, 99]))
        return cls(int(array.size), float(array.mean()), p50, p95, p99, float(array.max()))


@dataclass(slots=True, frozen=True)
class Sample:
    """One reading during a run. Rates belong to the time since the reading before."""

    t_s: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of blocks in use
    waste_percent: float = 0.0  # slots without a token, of the blocks in use
    rss_bytes: int = 0
    prompt_tokens: int = 0  # computed so far, by steps that are over
    output_tokens: int = 0
    cpu_percent: float = 0.0  # this process's, of all cores that it may use
    device_percent: float = 0.0  # time in which the device ran a step; on a GPU between its first and last kernel


@dataclass(slots=True, kw_only=True)
class KVReport:
    """What a run did to the KV cache. Counts are the run's own, not the engine's since its start."""

    num_blocks: int
    block_size: int
    block_bytes: int
    peak_blocks: int = 0  # most in use in any step
    occupancy_mean: float = 0.0  # share of blocks in use while a step runs, mean over the steps
    occupancy_max: float = 0.0
    waste_percent_mean: float = 0.0  # slots without a token, of the blocks in use; mean over the steps
    waste_percent_max: float = 0.0
    waste_percent_at_peak: float = 0.0  # when most blocks were in use
    table_entries_max: int = 0  # entries of all block tables together; more than peak_blocks where sequences share
    blocks_allocated: int = 0
    blocks_freed: int = 0
    churn_per_s: float = 0.0  # blocks that came into use or left it, per second
    preemptions: dict[str, int] = field(default_factory=dict)  # by kind: recompute, swap
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    min_available: int = 0  # the fewest free or evictable blocks in any step
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0
    forks: int = 0
    copies: int = 0  # blocks copied on write

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


@dataclass(slots=True, kw_only=True)
class RunReport:
    """One workload on one engine. Where it was repeated, the numbers are those of the median repeat."""

    workload: str
    parameters: dict[str, Any] = field(default_factory=dict)  # the workload's parameters
    engine: str = "quire"  # or hf, or server
    settings: dict[str, Any] = field(default_factory=dict)  # the engine's: what was asked for and what was chosen
    machine: dict[str, Any] = field(default_factory=dict)

    requests: int = 0
    completed: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # what went wrong -> how often
    interrupted: bool = False  # stopped by the user: what stands here is what was done until then

    prompt_tokens: int = 0  # prompts of the completed and started requests, cached tokens included
    output_tokens: int = 0
    seconds: float = 0.0
    output_tok_s: float = 0.0
    total_tok_s: float = 0.0
    prefill_tok_s: float | None = None  # computed prompt tokens over the step time spent on them: see steps.py
    decode_tok_s: float | None = None

    ttft_s: Percentiles | None = None  # arrival to first token
    itl_s: Percentiles | None = None  # from token to token
    tpot_s: Percentiles | None = None  # per request: mean time of a token after the first
    e2e_s: Percentiles | None = None  # arrival to last token

    num_steps: int = 0
    running_mean: float = 0.0  # sequences in a step
    # Where the run's time went, in all: schedule, prepare, forward, sample, update, idle, other.
    time_s: dict[str, float] = field(default_factory=dict)
    kv: KVReport | None = None
    peak_rss_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    cpu_percent: float | None = None  # mean, of all cores that the process may use
    device_percent: float | None = None

    repeats: list[float] = field(default_factory=list)  # output_tok_s of each repeat
    repeat_values: dict[str, list[float]] = field(default_factory=dict)  # metric -> its value in each repeat
    values: dict[str, float] = field(default_factory=dict)  # a command's own numbers; names carry units
    point: dict[str, str] = field(default_factory=dict)  # in a sweep: flag -> value
    # For a profile: the seconds of each step, and the numbers of StepLoad that they depend on.
    steps: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for people
    samples: list[Sample] = field(default_factory=list)

    @property
    def spread_percent(self) -> float | None:
        """Largest less smallest output_tok_s of the repeats, over their mean; None for a single run."""
        if len(self.repeats) < 2:
            return None
        mean = sum(self.repeats) / len(self.repeats)
        return 100 * (max(self.repeats) - min(self.repeats)) / mean if mean else 0.0

    @property
    def label(self) -> str:
        """Workload, point of a sweep and engine, as short as they tell runs apart."""
        parts = [self.workload, *(f"{flag}={value}" for flag, value in self.point.items() if flag != "workload")]
        return " ".join(parts if self.engine == "quire" else [*parts, f"({self.engine})"])

    def metrics(self) -> dict[str, float]:
        """Every number that two runs can be compared by, by name."""
        found: dict[str, float | None] = {
            "output_tok_s": self.output_tok_s,
            "total_tok_s": self.total_tok_s,
            "prefill_tok_s": self.prefill_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "seconds": self.seconds,
        }
        for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
            percentiles: Percentiles | None = getattr(self, name)
            if percentiles is not None:
                short = name.removesuffix("_s")
                found |= {f"{short}_{p}_s": getattr(percentiles, p) for p in ("p50", "p95", "p99")}
        if self.kv is not None:
            kv = self.kv
            found |= {
                "kv_occupancy_mean": kv.occupancy_mean,
                "kv_waste_percent": kv.waste_percent_mean,
                "kv_blocks_allocated": kv.blocks_allocated,
                "prefix_hit_rate": kv.prefix_hit_rate,
                "preemptions": sum(kv.preemptions.values()),
                "recomputed_tokens": kv.recomputed_tokens,
            }
        found |= {"peak_rss_bytes": self.peak_rss_bytes, "peak_gpu_bytes": self.peak_gpu_bytes}
        return {name: float(value) for name, value in (found | self.values).items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        # Columns: a tenth of the size of as many objects.
        names = [f.name for f in dataclasses.fields(Sample)]
        record["samples"] = {name: [getattr(sample, name) for sample in self.samples] for name in names}
        return record

    @classmethod
    def from_json(cls, record: Any) -> RunReport:
        """Raises ConfigError where it is not what to_json made."""
        try:
            values = dict(record)
            for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
                values[name] = Percentiles(**values[name]) if values.get(name) else None
            values["kv"] = KVReport(**values["kv"]) if values.get("kv") else None
            columns: dict[str, list[Any]] = values.pop("samples", {})
            rows = zip(*columns.values(), strict=True)
            values["samples"] = [Sample(**dict(zip(columns, row, strict=True))) for row in rows]
            return cls(**values)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ConfigError(f"not a run of quire bench: {error}") from None


@dataclass(slots=True)
class BenchFile:
    """What --output-json writes."""

    command: str
    runs: list[RunReport]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "command": self.command, "runs": [run.to_json() for run in self.runs]}

    def write(self, path: str | Path) -> None:
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> BenchFile:
        record = read_json(path)
        if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("runs"), list):
            raise ConfigError(f"{path} was not written by quire bench --output-json")
        try:
            return cls(str(record.get("command", "")), [RunReport.from_json(run) for run in record["runs"]])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write all or nothing: a full disk or an interruption leaves what stood there before."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def read_text(path: str | Path, what: str = "") -> str:
    """`what` names the kind of file in an error, with its article."""
    name = f"{what} {path}".strip()
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text") from None


def read_json(path: str | Path, what: str = "") -> Any:
    text = read_text(path, what)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{f'{what} {path}'.strip()} is not JSON: {error}") from None
