"""The experiments, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import ConfigError
from quire.lab import (
    accuracy,
    baseline,
    batch_width,
    batching,
    beam_sharing,
    block_size,
    fragmentation,
    memory_over_time,
    prefix_sharing,
    pressure,
    step_budget,
    tiers,
)
from quire.lab.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    baseline.EXPERIMENT,
    batch_width.EXPERIMENT,
    block_size.EXPERIMENT,
    memory_over_time.EXPERIMENT,
    fragmentation.EXPERIMENT,
    batching.EXPERIMENT,
    prefix_sharing.EXPERIMENT,
    pressure.EXPERIMENT,
    step_budget.EXPERIMENT,
    accuracy.KV_EXPERIMENT,
    beam_sharing.EXPERIMENT,
    tiers.EXPERIMENT,
    accuracy.WEIGHTS_EXPERIMENT,
)


def choose(keys: Sequence[str] | None) -> list[Experiment]:
    """The experiments that are named by key or by number, or all of them; in the report's order."""
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
