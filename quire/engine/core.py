"""The loop: schedule, submit, collect, update."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.kv import KVManager
from quire.plan import StepPlan, StepResult
from quire.request import FinishReason, Request, Sequence
from quire.scheduler import Scheduler, SequenceUpdate


@dataclass(slots=True)
class HostSeconds:
    """Where the loop's own time went, in all. collect is mostly waiting for the executor."""

    schedule_s: float = 0.0
    submit_s: float = 0.0
    collect_s: float = 0.0
    update_s: float = 0.0


class EngineCore:
    """One scheduler driving one executor. Knows tokens, not text."""

    def __init__(self, scheduler: Scheduler, executor: Executor, kv: KVManager) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.kv = kv
        self._tickets: deque[tuple[int, int]] = deque()  # and how many tokens each step computes
        self._failure: BaseException | None = None
        self.host = HostSeconds()
        self.last_plan: StepPlan | None = None  # submitted last, for who asks why a step hangs
        self.last_result: StepResult | None = None  # collected last, for the statistics
        self.last_num_tokens = 0  # that the step collected last computed

    def add(self, request: Request) -> None:
        self._raise_if_dead()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """Ends a request wherever it is; its blocks are back before the next step. Unknown ids give nothing."""
        return self.scheduler.abort(request_id)

    def finish(self, seq: Sequence, stop_reason: str) -> None:
        """A stop string was found in the sequence's text, which only its reader could see."""
        self.scheduler.finish(seq, FinishReason.STOP, stop_reason)

    @property
    def has_work(self) -> bool:
        return bool(self._tickets) or self.scheduler.has_work

    def step(self) -> list[SequenceUpdate]:
        """Keep the executor as deep in work as it takes, then give out what the oldest step brought."""
        self._raise_if_dead()
        try:
            self._fill()
            if not self._tickets:
                return self.scheduler.take_failures()
            started = time.perf_counter()
            ticket, self.last_num_tokens = self._tickets.popleft()
            self.last_result = result = self.executor.collect(ticket)
            collected = time.perf_counter()
            updates = self.scheduler.update(result)
            self.host.collect_s += collected - started
            self.host.update_s += time.perf_counter() - collected
            return updates
        except Exception as failure:
            # Scheduler and executor may disagree now about who holds what: nothing after this could be trusted.
            self._failure = failure
            raise EngineDeadError(f"the engine failed in a step and stopped: {failure!r}") from failure

    def _fill(self) -> None:
        """Submit until the executor has as much as it takes, or there is nothing more to plan yet."""
        while len(self._tickets) < self.executor.depth:
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            planned = time.perf_counter()
            self.host.schedule_s += planned - started
            if plan is None:
                return
            self.last_plan = plan
            self._tickets.append((self.executor.submit(plan), sum(plan.spans.num_tokens)))
            self.host.submit_s += time.perf_counter() - planned

    def prepare_more(self) -> bool:
        """Something useful for an engine without work to do; False when there is nothing left of it."""
        self._raise_if_dead()
        return self.executor.prepare_more()

    @property
    def is_dead(self) -> bool:
        return self._failure is not None

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed earlier and stopped: {self._failure!r}") from self._failure

    def close(self) -> None:
        self.executor.close()
