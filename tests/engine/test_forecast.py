"""Planning the next step when it is needed: the estimates, and what a late request gains."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live_harness import make_request
from sim_engine import make_core
from sim_executor import SimExecutor

from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.messages import Add, Command, EngineMessage, StepOutputs, Stop
from quire.kv import KVManager
from quire.plan import StepResult
from quire.scheduler import Scheduler, SchedulerConfig
from quire.sim.cost import CostModel, SimClock
from quire.step_costs import StepKind

STEP_S = 0.1


class RealClock(SimClock):
    """Simulated steps that take real time, beside the host as on a GPU."""

    def __call__(self) -> float:
        return time.perf_counter()

    def advance_to(self, then_s: float) -> None:
        time.sleep(max(0.0, then_s - time.perf_counter()))


class Preparing(SimExecutor):
    """Has so many pieces of work that may be done beforehand."""

    num_pieces = 10

    def prepare_more(self) -> bool:
        if not self.num_pieces:
            return False
        self.num_pieces -= 1
        time.sleep(0.02)
        return True


def test_the_host_prepares_while_long_steps_run_and_only_then() -> None:
    kv = KVManager(num_blocks=600, block_size=4)
    cost = CostModel(overhead_s=1e-3, weights_s=0, token_s=0.3 / 1000, kv_token_s=0, pair_s=0)
    executor = Preparing(num_blocks=600, block_size=4, max_num_seqs=4, depth=2, cost=cost, clock=RealClock())
    config = SchedulerConfig(max_in_flight=2, max_num_seqs=4, max_num_batched_tokens=1000, max_model_len=1200)
    core = EngineCore(Scheduler(config, kv), executor, kv)
    sizes = []
    for i, length in enumerate((1000, 1000, 20, 1000)):
        core.add(make_request(str(i), [i + 1] * length, max_tokens=12))
        while core.has_work:
            before, tokens_before = executor.num_pieces, core.stats.step_tokens
            core.step()
            sizes += [core.stats.step_tokens - tokens_before] * (before - executor.num_pieces)
    assert set(sizes) == {1000}  # not while steps of a token or twenty ran


def test_a_step_that_is_over_sooner_than_thought_is_not_kept_waiting() -> None:
    """The rate of short prompts says nothing of a long one's, which may be far faster."""
    kv = KVManager(num_blocks=600, block_size=4)
    cost = CostModel(overhead_s=0.03, weights_s=0, token_s=0, kv_token_s=0, pair_s=0)
    executor = Preparing(num_blocks=600, block_size=4, max_num_seqs=4, depth=2, cost=cost, clock=RealClock())
    executor.num_pieces = 100
    config = SchedulerConfig(max_in_flight=2, max_num_seqs=4, max_num_batched_tokens=1000, max_model_len=1200)
    core = EngineCore(Scheduler(config, kv), executor, kv)
    for i, length in enumerate((64, 1000)):  # the first foretells half a second for the second, which takes 0.03 s
        core.add(make_request(str(i), [i + 1] * length, max_tokens=1))
        while core.has_work:
            core.step()
    assert executor.num_pieces >= 97  # of the twenty that half a second would have had room for


def make_gpu_core(step_s: float = STEP_S, **config: Any) -> EngineCore:
    kv = KVManager(num_blocks=64, block_size=4)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 200} | config
    cost = CostModel(overhead_s=step_s, weights_s=0, token_s=0, kv_token_s=0, pair_s=0)
    executor = SimExecutor(
        num_blocks=64, block_size=4, max_num_seqs=settings["max_num_seqs"], depth=2, cost=cost, clock=RealClock()
    )
    return EngineCore(Scheduler(SchedulerConfig(max_in_flight=2, **settings), kv), executor, kv)


class Steps:
    """A loop in a thread; commands are put into it while it runs."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.commands = core, deque[Command]()
        self.outputs: list[tuple[float, StepOutputs]] = []
        self.loop = EngineLoop(core, self._receive, self._send)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def _receive(self, wait_s: float | None) -> Command | None:
        until_s = time.perf_counter() + (10.0 if wait_s is None else wait_s)
        while not self.commands and time.perf_counter() < until_s:
            time.sleep(0.001)
        return self.commands.popleft() if self.commands else None

    def _send(self, message: EngineMessage) -> None:
        if isinstance(message, StepOutputs):
            self.outputs.append((time.perf_counter(), message))

    def put(self, command: Any) -> None:
        self.commands.append(command)

    def wait_for(self, num_steps: int) -> None:
        until_s = time.perf_counter() + 60
        while len(self.outputs) < num_steps:
            assert time.perf_counter() < until_s and self.thread.is_alive()
            time.sleep(0.002)

    def index_of_first(self, key: int) -> int:
        return next(i for i, (_, outputs) in enumerate(self.outputs) if key in outputs.keys)


def add(key: int) -> Add:
    return Add(key, make_request(f"r{key}", [7, 8, 9], max_tokens=100))


@contextmanager
def serving(core: EngineCore) -> Iterator[Steps]:
    steps = Steps(core)
    try:
        yield steps
    finally:
        steps.put(Stop())
        steps.thread.join(20)


def step_s_of(steps: Steps, first: int = 4) -> float:
    times = [when for when, _ in steps.outputs[first:]]
    return (times[-1] - times[0]) / (len(times) - 1)


def holds_once(attempt: Callable[[], bool], tries: int = 6) -> bool:
    """A machine that does something else for a moment makes any of these late; without what is tested none holds."""
    return any(attempt() for _ in range(tries))


def test_who_comes_while_a_step_runs_is_in_the_next_one() -> None:
    def attempt() -> bool:
        with serving(make_gpu_core()) as steps:
            steps.put(add(0))
            steps.wait_for(8)  # enough to know how long a step takes
            before = len(steps.outputs)
            time.sleep(STEP_S / 3)  # step `before` runs; a third of it is over
            steps.put(add(1))
            steps.wait_for(before + 5)
        # And the executor never waited for a plan: its steps followed each other.
        return steps.index_of_first(1) == before + 1 and step_s_of(steps) < 1.25 * STEP_S

    assert holds_once(attempt)


def test_a_host_that_is_late_is_not_taken_for_a_slow_device() -> None:
    """What the host does with a result (logprobs, say) must not delay the next plan."""
    step_s = 0.04

    class Late(SimExecutor):
        def collect(self, ticket: int) -> StepResult:
            result = super().collect(ticket)
            time.sleep(0.6 * step_s)
            return result

    def attempt() -> bool:
        core = make_gpu_core(step_s)
        core.executor.__class__ = Late
        with serving(core) as steps:
            steps.put(add(0))
            steps.wait_for(40)
        return step_s_of(steps, first=20) < 1.05 * step_s  # when the estimates have settled

    assert holds_once(attempt)


def test_a_burst_is_in_one_step() -> None:
    def attempt() -> bool:
        with serving(make_gpu_core()) as steps:
            steps.put(add(0))
            steps.wait_for(8)
            before = len(steps.outputs)
            for key in (1, 2, 3):
                time.sleep(STEP_S / 8)
                steps.put(add(key))
            steps.wait_for(before + 5)
        return {steps.index_of_first(key) for key in (1, 2, 3)} == {before + 1}

    assert holds_once(attempt)


def test_a_step_that_ends_sooner_than_thought_is_followed_at_once() -> None:
    """Whatever the estimate says: it is looked at, again and again, whether the executor still runs."""
    core = make_gpu_core(0.01)
    for kind in (StepKind(1, 0), StepKind(1, 1), StepKind(0, 1)):
        for _ in range(50):
            core.scheduler.costs.observe_step(kind, device_s=5.0, total_s=5.0)
    with serving(core) as steps:
        steps.put(add(0))
        steps.wait_for(20)
    times = [when for when, _ in steps.outputs[:20]]
    assert max(after - before for before, after in itertools.pairwise(times)) < 2.5


def test_a_step_is_not_put_off_for_requests_that_it_could_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_gpu_core(max_num_seqs=1)
    core.add(make_request("a", [1, 2, 3], max_tokens=50))
    for _ in range(6):
        core.step()
    assert core.spare_s() == 0  # no row is free
    core = make_gpu_core()
    core.add(make_request("a", [1, 2, 3], max_tokens=50))
    for _ in range(6):
        core.step()
    assert holds_once(lambda: bool(core.step()) and 0 < core.spare_s() < STEP_S)
    monkeypatch.setattr("quire.engine.core._MORE_MAY_COME_S", 0.0)
    assert core.spare_s() == 0  # nobody has come for a while


def test_an_executor_that_runs_one_step_at_a_time_is_never_kept_waiting() -> None:
    core = make_core()
    core.add(make_request("a", [1, 2, 3], max_tokens=20))
    while core.has_work:
        assert core.spare_s() == 0
        core.step()
