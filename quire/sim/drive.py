"""Arrivals through the real scheduler and no model, step by step, with somebody looking on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.kv import KVManager
from quire.plan import StepPlan, StepResult, StepTimings
from quire.request import Sequence as TokenSequence
from quire.scheduler import Scheduler, SchedulerConfig
from quire.sim.cost import CostModel, SimClock
from quire.sim.traffic import SimRequest
from quire.step_costs import PlanLoads


def poisson_arrivals(lengths: Sequence[tuple[int, int]], *, rate_per_s: float, seed: int) -> list[SimRequest]:
    """(prompt, output) lengths, arriving at random moments, so many a second on average."""
    rng = random.Random(seed)
    now_s, arrivals = 0.0, []
    for prompt_len, output_len in lengths:
        now_s += rng.expovariate(rate_per_s)
        arrivals.append(SimRequest(now_s, prompt_len, output_len))
    return arrivals


@dataclass(slots=True)
class StepView:
    """One step as it was submitted: what an observer may read, and only during the call."""

    plan: StepPlan
    start_s: float
    running: list[TokenSequence]  # those that hold KV memory
    num_waiting: int


@dataclass(slots=True)
class Served:
    """One request's times, in seconds of the simulation."""

    arrival: SimRequest
    first_token_s: float | None = None
    finished_s: float | None = None


Execute = Callable[[StepPlan], StepResult]  # runs a step, and moves the clock to its end


@dataclass(slots=True)
class SimRun:
    """One run. `served[i]` belongs to `arrivals[i]`."""

    scheduler: Scheduler
    kv: KVManager
    execute: Execute
    clock: SimClock
    served: list[Served] = field(default_factory=list)
    num_steps: int = 0

    @classmethod
    def build(
        cls,
        kv: KVManager,
        config: SchedulerConfig,
        *,
        cost: CostModel,
        make_executor: Callable[[KVManager, SchedulerConfig, SimClock], Execute] | None = None,
    ) -> SimRun:
        """Without make_executor a step only takes its time, and every token is 0."""
        clock, loads = SimClock(), PlanLoads()

        def execute(plan: StepPlan) -> StepResult:
            seconds = cost.load_s(loads.read(plan))
            clock.advance_to(clock.now_s + seconds)
            timings = StepTimings(forward_s=seconds, total_s=seconds)
            return StepResult(step=plan.step, tokens=[[0]] * len(plan.sampled_rows()), timings=timings)

        own = execute if make_executor is None else make_executor(kv, config, clock)
        return cls(Scheduler(config, kv, clock=clock), kv, own, clock)

    def run(
        self,
        arrivals: Sequence[SimRequest],
        *,
        on_add: Callable[[TokenSequence, SimRequest], None] | None = None,
        on_step: Callable[[StepView], None] | None = None,
    ) -> None:
        """Serve the arrivals in their order."""
        assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(arrivals)), "not in order"
        by_id: dict[int, tuple[TokenSequence, Served]] = {}
        num_added = 0
        while num_added < len(arrivals) or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.clock.advance_to(arrivals[num_added].arrival_s)
            while num_added < len(arrivals) and arrivals[num_added].arrival_s <= self.clock.now_s:
                seq = self._add(arrivals[num_added], num_added)
                by_id[seq.seq_id] = (seq, self.served[-1])
                if on_add is not None:
                    on_add(seq, arrivals[num_added])
                num_added += 1
            start_s = self.clock.now_s
            plan = self.scheduler.schedule()
            assert plan is not None, "there is work and nothing can run"
            self.num_steps += 1
            if on_step is not None:
                running = [by_id[seq_id][0] for seq_id in self.kv.tables]
                on_step(StepView(plan, start_s, running, self.scheduler.num_waiting))
            for update in self.scheduler.update(self.execute(plan)):
                assert update.error is None, update.error
                if update.finished:
                    seq, served = by_id.pop(update.seq.seq_id)
                    served.first_token_s = seq.first_token_s
                    served.finished_s = self.clock.now_s

    def _add(self, arrival: SimRequest, index: int) -> TokenSequence:
        request = arrival.for_engine(index)
        self.scheduler.add(request)
        self.served.append(Served(arrival))
        return request.sequences[0]
