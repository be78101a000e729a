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


@dataclass(slots=True, frozen=True)
class Work:
    """The host's work, in seconds: of a step, of each of its sequences, of each that has drafts, and of each draft."""

    step_s: float
    seq_s: float
    drafted_s: float = 0.0
    draft_s: float = 0.0

    def seconds(self, num_seqs: int, num_drafted: int, num_drafts: int) -> float:
        return self.step_s + self.seq_s * num_seqs + self.drafted_s * num_drafted + self.draft_s * num_drafts


@dataclass(slots=True, frozen=True)
class Host:
    """The host's work of each kind."""

    planning: Work
    submitting: Work
    updating: Work
    delivering: Work  # texts: beside the next step, which has begun
    looking: Work


HOST = Host(
    planning=Work(100e-6, 0.4e-6, 3e-6),
    submitting=Work(200e-6, 0.2e-6, 1e-6),
    updating=Work(50e-6, 0.5e-6, 2e-6),
    delivering=Work(50e-6, 5e-6),
    looking=Work(0.0, 1e-6),
)
# Of a small model's engine, whose host takes longer than the device, and most of all for drafts.
SLOW_HOST = Host(
    planning=Work(150e-6, 1e-6, 6e-6, 1e-6),
    submitting=Work(350e-6, 4e-6, 4e-6, 8e-6),
    updating=Work(60e-6, 1.5e-6, 4e-6, 0.5e-6),
    delivering=Work(100e-6, 6e-6),
    looking=Work(20e-6, 1e-6),
)
# As measured of SmolLM2 on an H200: a plain step takes 1.06 ms for one sequence and 1.55 for 64, and most of it is the
# host's.
SMOLLM2_HOST = Host(
    planning=Work(100e-6, 1e-6, 6e-6, 0.5e-6),
    submitting=Work(550e-6, 2e-6, 40e-6, 1e-6),
    updating=Work(90e-6, 1.5e-6, 4e-6, 0.5e-6),
    delivering=Work(300e-6, 3e-6),
    looking=Work(20e-6, 1e-6),
)


class SmallModel(StepCost):
    """A captured step whose hundreds of kernels are so small that tokens hardly matter."""

    def load_s(self, load: StepLoad) -> float:
        return 0.55e-3 + 1e-6 * load.num_tokens


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
    num_steps: int = 0
    num_steps_with_drafts: int = 0
    first_s: list[float] = field(default_factory=list)  # until a request's first token
    whole_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class _Executor:
    """Two steps deep. Drafts run as decodes of their own, as on a GPU."""

    depth = 2

    def __init__(
        self, clock: SimClock, cost: StepCost, submitting: Work, answers: dict[tuple[int, ...], list[int]]
    ) -> None:
        self._clock, self._cost, self._submitting, self._answers = clock, cost, submitting, answers
        self._rows: dict[int, tuple[list[int], int]] = {}  # answer, and the tokens before it
        self._lengths: dict[int, int] = {}  # with KV
        self._submitted: deque[tuple[StepResult, float]] = deque()
        self._free_s = 0.0

    def submit(self, plan: StepPlan) -> int:
        began_s = self._clock()
        spend(self._clock, self._submitting, *counts(plan))
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


def spend(clock: SimClock, work: Work, num_seqs: int, num_drafted: int = 0, num_drafts: int = 0) -> None:
    clock.advance_to(clock() + work.seconds(num_seqs, num_drafted, num_drafts))


def counts(plan: StepPlan) -> tuple[int, int, int]:
    """A step's sequences, those of them that have drafts, and the drafts."""
    drafts = plan.spans.drafts.values()
    return len(plan.spans), len(drafts), sum(len(each) for each in drafts if isinstance(each, list))


def run(
    jobs: list[Job],
    cost: StepCost,
    monkeypatch: pytest.MonkeyPatch,
    method: str | None,
    *,
    host: Host = HOST,
    together: bool = False,
    **scheduling: Any,
) -> Ran:
    """Serve the jobs, those that wait as soon as there is room; with drafts by `method`, or without. together: as one
    batch that is waited for as a whole."""
    clock = SimClock()
    monkeypatch.setattr(core_module, "time", SimpleNamespace(perf_counter=clock, sleep=lambda seconds: None))
    kv = KVManager(num_blocks=50_000, block_size=16, clock=clock, max_span_tokens=8192)
    config = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "max_model_len": 8192, **scheduling}
    scheduler = Scheduler(SchedulerConfig(max_in_flight=2, prefill_tokens_per_s=30_000.0, **config), kv, clock=clock)
    executor = _Executor(clock, cost, host.submitting, {tuple(job.prompt): job.answer for job in jobs})
    core = EngineCore(scheduler, executor, kv)  # type: ignore[arg-type]
    if method is not None:
        drafter = LookupDrafter(SpeculativeConfig.read({"method": method}), scheduler.costs, clock=clock)
        step = drafter._lines.step

        def look(each: Any, costs: Any) -> Any:
            spend(clock, host.looking, len(each.slots))
            return step(each, costs)

        drafter._lines.step = look  # type: ignore[method-assign]
        scheduler.drafter = drafter
    schedule, update = scheduler.schedule, scheduler.update

    ran = Ran()

    def plan() -> StepPlan | None:
        made = schedule()
        if made is not None:
            spend(clock, host.planning, *counts(made))
            ran.num_steps += 1
            ran.num_steps_with_drafts += bool(made.spans.drafts)
        return made

    def take_in(result: StepResult, interval_s: float | None) -> Any:
        num_accepted = [len(each) - 1 for each in result.tokens]
        spend(clock, host.updating, len(num_accepted), sum(each > 0 for each in num_accepted), sum(num_accepted))
        return update(result, interval_s)

    scheduler.schedule, scheduler.update = plan, take_in  # type: ignore[method-assign]
    waiting = deque(sorted(jobs, key=lambda job: job.arrival_s))
    while waiting or core.has_work:
        scheduler.is_whole_batch = together and not waiting
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
        spend(clock, host.delivering, len(updates))
    ran.seconds = clock()
    ran.num_drafts, ran.num_accepted = scheduler.stats.num_draft_tokens, scheduler.stats.num_accepted_tokens
    assert kv.num_used_blocks == 0
    return ran
