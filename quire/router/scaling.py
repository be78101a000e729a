"""How many replicas a load wants, from what waits and how long steps take. Pure, for autoscalers of any kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.api import EngineLoad

_TOLERANCE = 0.1  # a load this near to its target changes nothing: scaling back and forth costs caches


@dataclass(slots=True, frozen=True, kw_only=True)
class ScalingTargets:
    """What is wanted of each replica."""

    queue_s: float = 1.0  # prompt tokens that wait, over the measured prefill rate
    step_s: float = 0.1  # a step that only decodes: about the time between two tokens of a stream
    kv_usage: float = 0.85  # share of blocks that requests hold
    min_replicas: int = 1
    max_replicas: int = 64


def desired_replicas(loads: Sequence[EngineLoad], targets: ScalingTargets | None = None) -> int:
    """The number of replicas that would bring the worst of queue, step time and memory to its target, if what there is
    to do were shared equally among them. `loads` has one reading for each replica that serves."""
    targets = targets or ScalingTargets()
    if not loads:
        return targets.min_replicas
    rates = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s]
    num_waiting_tokens = sum(load.num_waiting_tokens for load in loads)
    queue_s = num_waiting_tokens / sum(rates) * len(rates) / len(loads) if rates else 0.0
    if not rates and num_waiting_tokens:
        queue_s = targets.queue_s * 2  # something waits, and nothing says for how long: one step up
    # Only those that decode say how long a step takes now.
    steps = [load.decode_step_s or 0.0 for load in loads if load.num_running]
    step_s = sum(steps) / len(loads)
    kv_usage = sum(load.kv_usage for load in loads) / len(loads)
    ratio = max(queue_s / targets.queue_s, step_s / targets.step_s, kv_usage / targets.kv_usage)
    wanted = len(loads) if abs(ratio - 1.0) <= _TOLERANCE else math.ceil(len(loads) * ratio)
    return min(max(wanted, targets.min_replicas), targets.max_replicas)
