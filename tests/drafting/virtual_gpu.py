"""An engine on a GPU in virtual time: the real core, scheduler and drafter, steps that take what arithmetic says an
H200 takes, and a host whose work is hidden beside a running step or not, as on a real one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from quire.drafting import LookupDrafter
from quire.engine import core as core_module
from quire.engine.core import EngineCore
from quire.kv import KVManager
from quire.plan import StepPlan, StepResult, StepTimings
from quire.request import Request
from quire.scheduler import Scheduler, SchedulerConfig
from quire.sim.cost import SimClock, StepCost
from quire.speculation import SpeculativeConfig
from quire.step_costs import StepLoad

# The host's work, in seconds: of a step, of each of its sequences, and of each that has drafts.
_PLANNING_S = (100e-6, 0.4e-6, 3e-6)
_SUBMITTING_S = (200e-6, 0.2e-6, 1e-6)
_UPDATING_S = (50e-6, 0.5e-6, 2e-6)
_DELIVERING_S = (50e-6, 5e-6, 0.0)  # texts: beside the next step, which has begun
_LOOKING_S = 1e-6  # a sequence


@dataclass(slots=True)
class Job:
    """A request, the answer that its model gives, and when it comes."""

    prompt: list[int]
    answer: list[int]
    arrival_s: float = 0.0


@dataclass(slots=True)
class Ran:
    """What came of a run."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    first_s: list[float] = field(default_factory=list)  # until a request's first token
    whole_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class _Executor:
    """Two steps deep. Drafts run as decodes of their own, as on a GPU."""

    depth = 2

    def __init__(self, clock: SimClock, cost: StepCost, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._clock, self._cost, self._answers = clock, cost, answers
        self._rows: dict[int, tuple[list[int], int]] = {}  # answer, and the tokens before it
        self._lengths: dict[int, int] = {}  # with KV
        self._submitted: deque[tuple[StepResult, float]] = deque()
        self._free_s = 0.0

    def submit(self, plan: StepPlan) -> int:
        began_s = self._clock()
        spend(self._clock, _SUBMITTING_S, len(plan.spans), len(plan.spans.drafts))
        for new in plan.admitted:
            prompt = tuple(new.token_ids[: new.num_prompt_tokens])
            self._rows[new.row] = (self._answers[prompt], new.num_prompt_tokens)
            self._lengths[new.row] = new.num_computed_tokens
        load, result = StepLoad(), StepResult(plan.step)
        spans = plan.spans
        for row, count, samples in zip(spans.rows, spans.num_tokens, spans.samples, strict=True):
            start, drafts = self._lengths[row], spans.drafts.get(row, [])
            assert isinstance(drafts, list)
            for place in range(start, start + count) if drafts else [start]:
                load.add(place, 1 if drafts else count)
            num_right = 0
            if samples:
                answer, num_prompt_tokens = self._rows[row]
                coming = answer[start + (1 if drafts else count) - num_prompt_tokens :]
                while num_right < len(drafts) and drafts[num_right] == coming[num_right]:
                    num_right += 1
                result.tokens.append(coming[: num_right + 1])
            self._lengths[row] = start + (1 + num_right if drafts else count)
        seconds = self._cost.load_s(load)
        # The device's clock runs from when the step could have begun: what the host does on its own counts as its part.
        idle_s = self._clock() - max(began_s, self._free_s) if self._clock() > self._free_s else 0.0
        self._free_s = max(self._clock(), self._free_s) + seconds
        result.timings = StepTimings(prepare_s=idle_s, forward_s=seconds, total_s=idle_s + seconds)
        self._submitted.append((result, self._free_s))
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        result, ended_s = self._submitted.popleft()
        assert result.step == ticket
        if ended_s > self._clock():
            self._clock.advance_to(ended_s)
            result.ended_s = ended_s
        return result

    def is_idle(self) -> bool:
        return self._free_s <= self._clock()

    def has_time(self) -> bool:
        return False

    def prepare_more(self) -> bool:
        return False


def spend(clock: SimClock, costs_s: tuple[float, float, float], num_seqs: int, num_drafted: int = 0) -> None:
    clock.advance_to(clock() + costs_s[0] + costs_s[1] * num_seqs + costs_s[2] * num_drafted)


def run(jobs: list[Job], cost: StepCost, monkeypatch: pytest.MonkeyPatch, method: str | None, **scheduling: Any) -> Ran:
    """Serve the jobs, those that wait as soon as there is room; with drafts by `method`, or without."""
    clock = SimClock()
    monkeypatch.setattr(core_module, "time", SimpleNamespace(perf_counter=clock, sleep=lambda seconds: None))
    kv = KVManager(num_blocks=50_000, block_size=16, clock=clock, max_span_tokens=8192)
    config = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "max_model_len": 8192, **scheduling}
    scheduler = Scheduler(SchedulerConfig(max_in_flight=2, prefill_tokens_per_s=30_000.0, **config), kv, clock=clock)
    core = EngineCore(scheduler, _Executor(clock, cost, {tuple(j.prompt): j.answer for j in jobs}), kv)  # type: ignore[arg-type]
    if method is not None:
        drafter = LookupDrafter(SpeculativeConfig.read({"method": method}), scheduler.costs, clock=clock)
        step = drafter._lines.step

        def look(each: Any, costs: Any) -> Any:
            clock.advance_to(clock() + _LOOKING_S * len(each.slots))
            return step(each, costs)

        drafter._lines.step = look  # type: ignore[method-assign]
        scheduler.drafter = drafter
    schedule, update = scheduler.schedule, scheduler.update

    def plan() -> StepPlan | None:
        made = schedule()
        if made is not None:
            spend(clock, _PLANNING_S, len(made.spans), len(made.spans.drafts))
        return made

    def take_in(result: StepResult) -> Any:
        spend(clock, _UPDATING_S, len(result.tokens), sum(len(each) > 1 for each in result.tokens))
        return update(result)

    scheduler.schedule, scheduler.update = plan, take_in  # type: ignore[method-assign]
    waiting = deque(sorted(jobs, key=lambda job: job.arrival_s))
    ran = Ran()
    while waiting or core.has_work:
        if not core.has_work:
            clock.advance_to(waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= clock():
            job = waiting.popleft()
            core.add(
                Request(
                    request_id=str(len(waiting)),
                    prompt_token_ids=job.prompt,
                    max_tokens=len(job.answer),
                    end_token_ids=frozenset(),
                    arrival_s=job.arrival_s,
                )
            )
        updates = core.step()
        if core.device_waits:
            core.begin_step()
        for each in updates:
            ran.num_tokens += len(each.new_token_ids)
            if each.finished:
                seq, arrival_s = each.seq, each.seq.request.arrival_s
                assert seq.first_token_s is not None
                ran.first_s.append(seq.first_token_s - arrival_s)
                ran.whole_s.append(clock() - arrival_s)
        spend(clock, _DELIVERING_S, len(updates))
    ran.seconds = clock()
    ran.num_drafts, ran.num_accepted = scheduler.stats.num_draft_tokens, scheduler.stats.num_accepted_tokens
    assert kv.num_used_blocks == 0
    return ran
