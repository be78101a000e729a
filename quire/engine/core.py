"""The loop: schedule, submit, collect, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.engine.adapters import AdapterGate
from quire.engine.stats import StepStats
from quire.errors import BadRequestError, EngineDeadError, MemoryBudgetError
from quire.executor.base import Executor, SleepingExecutor
from quire.grammar import NO_GRAMMAR, GrammarCompiler
from quire.kv import KVManager
from quire.plan import Spans, StepPlan
from quire.request import FinishReason, Request, Sequence
from quire.scheduler import Scheduler, SequenceUpdate
from quire.step_costs import StepKind


@dataclass(slots=True)
class HostSeconds:
    """Where the loop's own time went, in all. collect is mostly waiting for the executor."""

    schedule_s: float = 0.0
    submit_s: float = 0.0
    collect_s: float = 0.0
    update_s: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A step that is submitted and not collected."""

    ticket: int
    kind: StepKind
    num_tokens: int  # that it computes
    leaves_prompts: bool  # whether prompts remain to be computed after it
    began_s: float  # when the executor began it, or earlier

    @property
    def has_drafts(self) -> bool:
        """With drafts, only its result tells where the next step begins."""
        return self.kind.num_draft_tokens > 0


# How long a loop without other work sleeps while a grammar is compiled or an adapter is read: a command may come.
_COMPILING_S, _READING_S = 0.005, 0.001
_SETTLE_S = 5.0  # at the end of an engine
_SETTLE_ASLEEP_S = 0.5  # before a sleep: another model may wait for the memory
_MORE_MAY_COME_S = 10.0  # after a request; later, planning early is safer than waiting for another one


def _kind_of(spans: Spans) -> StepKind:
    """As the scheduler tells what such a step took."""
    num_decodes = spans.num_tokens.count(1)
    num_others = sum(spans.num_tokens) - num_decodes
    if not spans.drafts:
        return StepKind(num_decodes, num_others)
    counts = zip(spans.rows, spans.num_tokens, strict=True)
    num_drafts = sum(count - 1 for row, count in counts if row in spans.drafts)
    return StepKind(num_decodes + len(spans.drafts), num_others - num_drafts - len(spans.drafts), num_drafts)


class EngineCore:
    """One scheduler driving one executor. Knows tokens, not text."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        kv: KVManager,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterGate | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.kv = kv
        self._grammars = grammars
        self.adapters = adapters
        # By request_id: the scheduler gets them when their grammars are compiled, so that no request waits behind them.
        self._compiling: dict[str, tuple[Request, Future[Any]]] = {}
        self._flights: deque[_Flight] = deque()
        self._costs = scheduler.costs
        self.can_prepare = True  # until there is nothing left of it
        self.is_asleep = False
        self._has_prepared_grammars = False
        self._last_added_s = 0.0
        # Whether the device has nothing to run: the step that has ended had drafts, so the next could not be planned
        # beside it. A caller with other work to do begins the next step first.
        self.device_waits = False
        self.interval_clock: Callable[[], float] = time.perf_counter  # times steps with the host's part
        self._last_result_s: float | None = None  # by that clock; None if nothing was left to run after it
        self._unusual_s = 0.0  # what the host has done since then, and does not do in most steps
        self._failure: BaseException | None = None
        self.host = HostSeconds()
        self.stats = StepStats()
        self.last_plan: StepPlan | None = None  # submitted last, to tell why a step hangs

    def add(self, request: Request) -> None:
        self._raise_if_dead()
        if self.is_asleep:
            raise BadRequestError("the engine sleeps: wake it up first (wake_up)")
        if request.request_id in self._compiling or (self.adapters and request.request_id in self.adapters):
            raise BadRequestError(f"request id {request.request_id!r} is in use: choose another", param="request_id")
        if request.adapter is not None and self.adapters is None:
            raise BadRequestError("this engine has no adapters: make it with enable_lora=True", param="lora_request")
        if request.spec.is_constrained:
            if self._grammars is None:
                raise BadRequestError(
                    "structured_outputs are not served by this engine: run it on one device", param="structured_outputs"
                )
            compiled = self._grammars.start(request.spec.grammar or NO_GRAMMAR)
            if not compiled.done():
                self.scheduler.check_new(request)
                self._compiling[request.request_id] = (request, compiled)
                return
        self._enter(request)
        self._last_added_s = time.perf_counter()

    def _enter(self, request: Request) -> None:
        """Hand a request to the scheduler, once its adapter is there."""
        if request.adapter is not None:
            assert self.adapters is not None
            self.scheduler.check_new(request)
            if not self.adapters.enter(request):
                return
        self.scheduler.add(request)

    def _add_adapted(self) -> None:
        """Queue the requests whose adapters are there. One whose adapter cannot be read ends like any other."""
        assert self.adapters is not None
        for request, failure in self.adapters.take_ready():
            self.scheduler.add(request)
            if failure is not None:
                self.scheduler.give_up(request, FinishReason.ERROR, failure)

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars are ready. One whose grammar turns out bad ends like any other."""
        for request, compiled in list(self._compiling.values()):
            if not compiled.done():
                continue
            del self._compiling[request.request_id]
            if error := compiled.exception():
                self.scheduler.add(request)
                self.scheduler.give_up(request, FinishReason.BANNED, str(error))
            else:
                self._enter(request)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """Ends a request wherever it is; its blocks are back before the next step. Unknown ids give nothing."""
        if request_id in self._compiling:
            self.scheduler.add(self._compiling.pop(request_id)[0])
        elif self.adapters and request_id in self.adapters:
            self.scheduler.add(self.adapters.leave(request_id))
        return self.scheduler.abort(request_id)

    def finish(self, seq: Sequence, stop_reason: str) -> None:
        """A stop string was found in the sequence's text, which only its reader could see."""
        self.scheduler.finish(seq, FinishReason.STOP, stop_reason)

    @property
    def has_work(self) -> bool:
        return bool(self._flights or self._compiling or self.adapters) or self.scheduler.has_work

    @property
    def has_room(self) -> bool:
        """For another step beside those that run."""
        return len(self._flights) < self.executor.depth

    def begin_step(self) -> bool:
        """Plan and submit one step. False where there is no room for it, or nothing to plan yet."""
        with self._dying_of_failures():
            return self._submit_next()

    def step(self) -> list[SequenceUpdate]:
        """Keep the executor as deep in work as it takes, then give out what the oldest step brought."""
        with self._dying_of_failures():
            if self._compiling:
                self._add_compiled()
            if self.adapters:
                self._add_adapted()
            while self._submit_next():
                pass
            if not self._flights:
                if self.adapters and not self.scheduler.has_work:
                    time.sleep(_READING_S)
                elif self._compiling and not self.scheduler.has_work:
                    wait([compiled for _, compiled in self._compiling.values()], _COMPILING_S, FIRST_COMPLETED)
                return self.scheduler.take_failures()
            self._prepare_meanwhile()
            started = time.perf_counter()
            flight = self._flights.popleft()
            result = self.executor.collect(flight.ticket)
            collected = time.perf_counter()
            self.device_waits = result.next_is_unsampled or (flight.has_drafts and self.executor.depth > 1)
            if self._flights and result.ended_s is not None:
                self._flights[0].began_s = result.ended_s  # it had to wait for this one
            updates = self.scheduler.update(result, self._take_interval_s())
            if not self.scheduler.num_running:
                self._last_result_s = None
            self.stats.on_step(result, flight.num_tokens, updates)
            self.host.collect_s += collected - started
            self.host.update_s += time.perf_counter() - collected
            return updates

    def _submit_next(self) -> bool:
        if not self.has_room:
            return False
        if self._flights and self._flights[-1].has_drafts and self.scheduler.config.num_stages == 1:
            # Planned now, its own drafts would be wrong unless all of those are right; and it would wait for them.
            return False
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        self.host.schedule_s += planned - started
        if plan is None:
            return False
        self.last_plan = plan
        ticket = self.executor.submit(plan)
        submitted = time.perf_counter()
        kind, num_tokens = _kind_of(plan.spans), sum(plan.spans.num_tokens)
        self.device_waits = False
        self._flights.append(
            _Flight(ticket, kind, num_tokens, leaves_prompts=not all(plan.spans.samples), began_s=planned)
        )
        unusual_s = self._costs.observe_planning(
            submitted - started, has_prompts=kind.num_prompt_tokens > 0, num_drafts=kind.num_draft_tokens
        )
        if self.executor.depth > 1:  # else the step itself has run meanwhile
            self._unusual_s += unusual_s
        self.host.submit_s += submitted - planned
        return True

    def _take_interval_s(self) -> float | None:
        """A result is there: how long after the one before, where sequences ran on then."""
        now_s, last_s, unusual_s = self.interval_clock(), self._last_result_s, self._unusual_s
        self._last_result_s, self._unusual_s = now_s, 0.0
        return None if last_s is None else max(0.0, now_s - last_s - unusual_s)

    @contextmanager
    def _dying_of_failures(self) -> Iterator[None]:
        self._raise_if_dead()
        try:
            yield
        except Exception as failure:
            # Scheduler and executor may disagree now about which sequence holds which blocks: no later step is safe.
            self._failure = failure
            raise EngineDeadError(f"the engine failed in a step and stopped: {failure!r}") from failure
        except BaseException as failure:  # Ctrl-C in the middle: likewise, but it is no error of the engine
            self._failure = failure
            raise

    def _prepare_meanwhile(self) -> None:
        """While a long step runs, the host does what would otherwise keep everybody waiting some time later."""
        if not self.can_prepare:
            return
        flight = self._flights[0]
        ends_s = flight.began_s + self._costs.step_s(flight.kind)
        while self.can_prepare and ends_s - time.perf_counter() >= self._costs.preparing_s:
            if not self.executor.has_time():
                return
            self.prepare_more()

    def spare_s(self) -> float:
        """How long `step` may be put off at no cost, because the executor is busy and will be. A request that is added
        before then is in the next step, not in the one after it."""
        if not self._flights or len(self._flights) < self.executor.depth - 1 or not self.scheduler.takes_newcomers:
            return 0.0
        now_s = time.perf_counter()
        if now_s - self._last_added_s > _MORE_MAY_COME_S:
            return 0.0
        if self.executor.is_idle():
            return 0.0  # sooner than it was thought
        flight = self._flights[-1]
        has_prompts = flight.leaves_prompts or self.scheduler.num_waiting > 0
        free_s = self._costs.free_s(flight.kind, has_prompts=has_prompts)
        return max(0.0, flight.began_s + free_s - now_s)

    def prepare_more(self) -> bool:
        """Something useful for an engine with nothing else to do; False when there is nothing left of it."""
        self._raise_if_dead()
        started = time.perf_counter()
        self.can_prepare = self.executor.prepare_more()
        if not self.can_prepare and self._grammars is not None and not self._has_prepared_grammars:
            self._has_prepared_grammars = True
            self._grammars.prepare()
        self._costs.observe_preparing(time.perf_counter() - started)
        return self.can_prepare

    def fall_asleep(self, *, keep_kv: bool) -> None:
        """Give memory back until `wake_up`: the cache, whose prefixes are forgotten unless `keep_kv`, and on a GPU the
        weights, which the host keeps. Raises where requests are under way, and nothing has changed then."""
        self._raise_if_dead()
        if self.is_asleep:
            return
        if not isinstance(self.executor, SleepingExecutor):
            raise BadRequestError(
                "this engine cannot sleep: its model is split among ranks, or an encoder, which has no cache"
            )
        if self.scheduler.requests or self._compiling or self.adapters:
            raise BadRequestError("requests are under way: an engine falls asleep when they have ended")
        self.settle(_SETTLE_ASLEEP_S)
        if self.kv.tiers is not None:
            self.kv.tiers.give_up_stores()
        while self.has_work:
            self.step()  # what is on its way has to arrive
        self.executor.prepare_sleep()
        if not keep_kv:
            self.kv.reset_prefix_cache()
        with self._dying_of_failures():
            self.executor.fall_asleep([block.block_id for block in self.kv.cache.blocks()])
        self.is_asleep, self.can_prepare = True, False

    def wake_up(self) -> None:
        """Raises a MemoryBudgetError, and sleeps on, where others have taken the memory."""
        self._raise_if_dead()
        if not self.is_asleep:
            return
        assert isinstance(self.executor, SleepingExecutor)
        try:
            self.executor.wake_up()
        except MemoryBudgetError:
            raise
        except Exception as failure:
            self._failure = failure
            raise EngineDeadError(f"the engine failed to wake up and stopped: {failure!r}") from failure
        self.is_asleep, self.can_prepare = False, True

    @property
    def can_die_idle(self) -> bool:
        """Whether the executor has processes of its own, which may end while nothing runs: `check` tells."""
        return hasattr(self.executor, "check")

    def check(self) -> None:
        """Raises where the executor has ended while nothing ran."""
        if self.can_die_idle:
            with self._dying_of_failures():
                self.executor.check()  # type: ignore[attr-defined]

    @property
    def is_dead(self) -> bool:
        return self._failure is not None

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed earlier and stopped: {self._failure!r}") from self._failure

    def settle(self, within_s: float) -> None:
        """Write what waits to the levels below, while no request is left, for `within_s` at most."""
        until_s = time.perf_counter() + within_s
        while self.has_work and not self.scheduler.requests and not self.is_dead and time.perf_counter() < until_s:
            self.step()

    def close(self) -> None:
        self.settle(_SETTLE_S)
        self.executor.close()
