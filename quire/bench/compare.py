"""What changed between two files of runs, beyond the noise of their repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from quire.bench.report import BenchFile, RunReport
from quire.errors import ConfigError

# Two-sided 95 % points of Student's t by degrees of freedom; past the table, the normal's.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# Neither direction is better; they explain other numbers.
NEUTRAL = {"kv_occupancy_mean", "kv_blocks_allocated"}
_HIGHER = {"prefix_hit_rate", "goodput_req_s", "goodput_requests", "req_s"}


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"  # beyond the noise, of a number that has no good side
    SAME = "same within noise"
    CANNOT_TELL = "cannot tell"


@dataclass(slots=True, frozen=True)
class Change:
    """One metric of one pair of runs. `noise` is how far apart means this far may lie by chance, in its unit."""

    metric: str
    before: float
    after: float
    noise: float | None
    verdict: Verdict

    @property
    def percent(self) -> float | None:
        return 100 * (self.after - self.before) / abs(self.before) if self.before else None

    @property
    def noise_percent(self) -> float | None:
        return None if self.noise is None or not self.before else 100 * self.noise / abs(self.before)


@dataclass(slots=True)
class Comparison:
    """One pair of runs of the same workload."""

    label: str
    changes: list[Change]
    differences: list[str]  # settings, workload and machine that are not the same in both
    num_repeats: tuple[int, int]


def compare_files(before: BenchFile, after: BenchFile) -> tuple[list[Comparison], list[str]]:
    """Pairs by workload, engine and point of a sweep; the labels of runs without a partner are returned too.

    Two files of one run each are compared whatever they ran: a change of workload is then among the differences.
    """
    if len(before.runs) == len(after.runs) == 1:
        return [compare_runs(before.runs[0], after.runs[0])], []
    partners = {run.label: run for run in after.runs}
    pairs = [(run, partners.pop(run.label)) for run in before.runs if run.label in partners]
    paired = {run.label for run, _ in pairs}
    alone = [run.label for run in before.runs if run.label not in paired] + list(partners)
    if not pairs:
        raise ConfigError(f"the two files have no run in common: there are {', '.join(alone) or 'none'}")
    return [compare_runs(a, b) for a, b in pairs], alone


def compare_runs(before: RunReport, after: RunReport) -> Comparison:
    old, new = before.metrics(), after.metrics()
    changes = [
        _compare(
            metric, before.repeat_values.get(metric) or [old[metric]], after.repeat_values.get(metric) or [new[metric]]
        )
        for metric in old
        if metric in new and (old[metric] or new[metric])
    ]
    label = before.label if before.label == after.label else f"{before.label} -> {after.label}"
    counts = (max(1, len(before.repeats)), max(1, len(after.repeats)))
    return Comparison(label, changes, _differences(before, after), counts)


def _compare(metric: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Welch's test: means further apart than their noise would be so by chance once in twenty times."""
    old, new = statistics.fmean(before), statistics.fmean(after)
    if len(before) < 2 or len(after) < 2:
        return Change(metric, old, new, None, Verdict.CANNOT_TELL)
    a, b = statistics.variance(before) / len(before), statistics.variance(after) / len(after)
    noise = 0.0
    if a + b > 0:
        freedom = (a + b) ** 2 / (a**2 / (len(before) - 1) + b**2 / (len(after) - 1))
        index = max(0, math.floor(freedom) - 1)
        noise = (_T95[index] if index < len(_T95) else 1.96) * math.sqrt(a + b)
    difference = new - old
    if abs(difference) <= noise:
        verdict = Verdict.SAME
    elif metric in NEUTRAL:
        verdict = Verdict.CHANGED
    else:
        verdict = Verdict.BETTER if (difference > 0) == higher_is_better(metric) else Verdict.WORSE
    return Change(metric, old, new, noise, verdict)


def higher_is_better(metric: str) -> bool:
    """Rates and hit rates; everything else that is counted is time, memory or waste."""
    return metric.endswith("tok_s") or metric in _HIGHER


def _differences(before: RunReport, after: RunReport) -> list[str]:
    found = []
    for what in ("settings", "parameters", "machine"):
        old, new = getattr(before, what), getattr(after, what)
        for key in [*old, *(k for k in new if k not in old)]:
            if old.get(key) != new.get(key):
                found.append(f"{key}: {old.get(key, '-')} -> {new.get(key, '-')}")
    return found
