"""Who stands where: the order of all sequences, waiting and running."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from operator import attrgetter

from quire.request import Request, Sequence
from quire.scheduler.config import SchedulerConfig

_by_order = attrgetter("order")


def place(config: SchedulerConfig, request: Request, nth: int) -> tuple[float, ...]:
    """A request's place among all others, given once for its whole life: the smaller runs first.

    First come, first served: by arrival, then by the order in which they were added. With priorities, each
    `priority_ageing_s` of waiting is worth one priority. All requests age at the same pace, so who is ahead of whom
    never changes: priority - (now - arrival) / ageing compares like priority + arrival / ageing. That is why a place
    is a constant, the queue needs no re-sorting, and a request that was preempted finds its old place again.
    """
    if config.policy == "fcfs":
        return (request.arrival_s, nth)
    aged = 0.0 if math.isinf(config.priority_ageing_s) else request.arrival_s / config.priority_ageing_s
    return (request.priority + aged, request.arrival_s, nth)


class OrderedSequences(list[Sequence]):
    """Sequences sorted by `order`, which is unique and never changes.

    The queue is one: new sequences and those that lost their blocks wait together. What was preempted arrived earlier,
    so it stands before the new ones of its priority. The running ones are another. A sorted list rather than a heap
    because aborts take out of the middle; moving pointers is cheap next to a step.
    """

    def add(self, seq: Sequence) -> None:
        insort(self, seq, key=_by_order)

    def drop(self, seq: Sequence) -> None:
        at = bisect_left(self, seq.order, key=_by_order)
        assert self[at] is seq, f"sequence {seq.seq_id} is not here"
        del self[at]
