"""The loop: schedule, submit, collect, update."""

from __future__ import annotations

from collections import deque

from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.kv import KVManager
from quire.plan import StepResult
from quire.request import FinishReason, Request, Sequence
from quire.scheduler import Scheduler, SequenceUpdate


class EngineCore:
    """One scheduler driving one executor. Knows tokens, not text."""

    def __init__(self, scheduler: Scheduler, executor: Executor, kv: KVManager) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.kv = kv
        self._tickets: deque[int] = deque()
        self._failure: BaseException | None = None
        self.last_result: StepResult | None = None  # of the step that was collected last, for the statistics

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
            while len(self._tickets) < self.executor.depth and (plan := self.scheduler.schedule()) is not None:
                self._tickets.append(self.executor.submit(plan))
            if not self._tickets:
                return self.scheduler.take_failures()
            self.last_result = result = self.executor.collect(self._tickets.popleft())
            return self.scheduler.update(result)
        except Exception as failure:
            # Scheduler and executor may disagree now about who holds what: nothing after this could be trusted.
            self._failure = failure
            raise EngineDeadError(f"the engine failed in a step and stopped: {failure!r}") from failure

    @property
    def is_dead(self) -> bool:
        return self._failure is not None

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed earlier and stopped: {self._failure!r}") from self._failure

    def close(self) -> None:
        self.executor.close()
