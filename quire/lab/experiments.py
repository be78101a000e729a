"""The experiments, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.lab import (
    baseline,
    batch_width,
    batching,
    block_size,
    fragmentation,
    kv_accuracy,
    memory_over_time,
    prefix_sharing,
    pressure,
    simulated,
    step_budget,
)
from quire.lab.context import LabContext
from quire.lab.result import Result


@dataclass(slots=True, frozen=True)
class Experiment:
    key: str
    title: str
    run: Callable[[LabContext], Result]
    is_last: bool = False  # looks at what the others left, so it runs after them
    # Writes the result's words from its data. `run` calls it; so does whoever wants an older report in today's words.
    tell: Callable[[Result, LabContext], None] | None = None


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(baseline.KEY, baseline.TITLE, baseline.run, tell=baseline.tell),
    Experiment(batch_width.KEY, batch_width.TITLE, batch_width.run, tell=batch_width.tell),
    Experiment(block_size.KEY, block_size.TITLE, block_size.run, tell=block_size.tell),
    Experiment(
        memory_over_time.KEY,
        memory_over_time.TITLE,
        memory_over_time.run,
        is_last=True,
        tell=memory_over_time.tell,
    ),
    Experiment(fragmentation.KEY, fragmentation.TITLE, simulated.run_fragmentation, tell=simulated.tell_fragmentation),
    Experiment(batching.KEY, batching.TITLE, simulated.run_batching, tell=simulated.tell_batching),
    Experiment(prefix_sharing.KEY, prefix_sharing.TITLE, prefix_sharing.run, tell=prefix_sharing.tell),
    Experiment(pressure.KEY, pressure.TITLE, pressure.run, tell=pressure.tell),
    Experiment(step_budget.KEY, step_budget.TITLE, step_budget.run, tell=step_budget.tell),
    Experiment(kv_accuracy.KEY, kv_accuracy.TITLE, kv_accuracy.run, tell=kv_accuracy.tell),
)


def choose(keys: Sequence[str] | None) -> list[Experiment]:
    """Those named, by key or by number in the report, or all; in the report's order."""
    if keys is None:
        return list(EXPERIMENTS)
    wanted = set()
    for key in keys:
        if key.isdigit() and 1 <= int(key) <= len(EXPERIMENTS):
            key = EXPERIMENTS[int(key) - 1].key
        wanted.add(key)
    unknown = sorted(wanted - {each.key for each in EXPERIMENTS})
    if unknown or not wanted:
        known = ", ".join(each.key for each in EXPERIMENTS)
        raise ConfigError(f"no experiment is called {', '.join(unknown) or 'nothing'}: there are {known}")
    return [each for each in EXPERIMENTS if each.key in wanted]
