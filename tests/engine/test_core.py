"""The core between scheduler and executor: how deep it submits, what it counts, and what is left after a failure."""

from __future__ import annotations

from typing import Any

import pytest
from live_harness import make_request
from scheduler.harness import Proposer
from sim_engine import BREAK, SimSettings, make_core

from quire.engine.core import EngineCore
from quire.errors import BadRequestError, EngineDeadError
from quire.plan import StepResult
from quire.request import FinishReason, Sequence


def watched(core: EngineCore) -> list[str]:
    """What the executor is asked for from now on."""
    events: list[str] = []
    submit, collect = core.executor.submit, core.executor.collect

    def submitted(plan: Any) -> int:
        events.append("submit")
        return submit(plan)

    def collected(ticket: int) -> Any:
        events.append("collect")
        return collect(ticket)

    core.executor.submit, core.executor.collect = submitted, collected  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_executor_has_as_many_steps_as_it_takes(depth: int) -> None:
    core = make_core(SimSettings(depth=depth))
    events = watched(core)
    assert core.step() == [] and events == [] and not core.has_work
    core.add(make_request("a", [1, 2, 3], max_tokens=10))
    assert core.has_work and core.has_room
    core.step()
    assert events == ["submit"] * depth + ["collect"]
    while core.has_work:
        core.step()
    assert events.count("submit") == events.count("collect") == core.stats.num_steps


def test_a_step_can_be_begun_without_waiting_for_one() -> None:
    core = make_core(SimSettings(depth=2))
    assert not core.begin_step()
    core.add(make_request("a", [1, 2, 3]))
    assert core.begin_step() and core.has_room
    assert core.begin_step() and not core.has_room
    assert not core.begin_step()


def test_steps_and_tokens_are_counted() -> None:
    core = make_core()
    core.add(make_request("a", [1, 2, 3], max_tokens=4))
    core.add(make_request("b", [4, 5], max_tokens=2))
    seen = 0
    while core.has_work:
        seen += sum(len(update.new_token_ids) for update in core.step())
    stats = core.stats
    assert (stats.generation_tokens, seen) == (6, 6)
    assert stats.step_tokens == 3 + 2 + 6 - 2  # the last token of each needs no step of its own
    assert sum(stats.steps_by_tokens) == stats.num_steps == 4
    core.step()
    assert core.stats.num_steps == 4  # nothing ran
    assert core.host.schedule_s > 0 and core.host.update_s > 0


def test_ended_from_outside_everything_is_free_at_once() -> None:
    core = make_core()
    request = make_request("a", [1, 2, 3], n=2, max_tokens=50)
    core.add(request)
    core.step()
    core.finish(request.sequences[1], "stop here")
    assert (request.sequences[1].finish_reason, request.sequences[1].stop_reason) == (FinishReason.STOP, "stop here")
    assert [update.seq.index for update in core.abort("a")] == [0]
    assert core.abort("a") == core.abort("nobody") == []
    assert core.kv.num_used_blocks == 0


def test_what_is_refused_leaves_nothing_behind() -> None:
    core = make_core()
    core.add(make_request("a", [1, 2, 3]))
    for refused in (make_request("a", [1]), make_request("b", [1] * 500), make_request("c", [1], n=17)):
        with pytest.raises(BadRequestError):
            core.add(refused)
    assert set(core.scheduler.requests) == {"a"}


def test_after_a_failed_step_nothing_is_trusted() -> None:
    core = make_core()
    core.add(make_request("a", [BREAK]))
    with pytest.raises(EngineDeadError, match="failed in a step"):
        core.step()
    assert core.is_dead
    for use in (core.step, core.begin_step, core.prepare_more, lambda: core.add(make_request("b", [1]))):
        with pytest.raises(EngineDeadError, match="failed earlier"):
            use()
    core.close()


def test_ctrl_c_in_the_middle_of_a_step_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    core.add(make_request("a", [1]))

    def interrupted(ticket: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(core.executor, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.is_dead


def test_preparing_ends_when_there_is_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    core, left = make_core(), [True, False]
    monkeypatch.setattr(core.executor, "prepare_more", lambda: left.pop(0))
    assert core.can_prepare
    assert core.prepare_more() and core.can_prepare
    assert not core.prepare_more() and not core.can_prepare


def test_a_step_is_timed_from_the_result_before_it_with_all_that_the_host_did_meanwhile() -> None:
    core, told = make_core(), []
    update = core.scheduler.update

    def updated(result: StepResult, interval_s: float | None) -> Any:
        told.append(interval_s)
        return update(result, interval_s)

    core.scheduler.update = updated  # type: ignore[method-assign]
    now_s = 0.0
    core.interval_clock = lambda: now_s
    for request_id in "ab":
        core.add(make_request(request_id, [1, 2, 3], max_tokens=3))
        while core.has_work:
            core.step()
            now_s += 2.0
    assert told == [None, 2.0, 2.0] * 2  # nothing ran between the two requests


class Always(Proposer):
    def propose(self, seq: Sequence) -> list[int] | int:
        return [1, 2]


def test_after_a_step_with_drafts_the_device_waits() -> None:
    core = make_core(SimSettings(depth=2))
    events = watched(core)
    core.scheduler.drafter = Always()
    core.add(make_request("a", [1, 2, 3], max_tokens=40))
    for _ in range(5):
        if not core.device_waits:
            core.step()
    num_submitted = events.count("submit")
    assert core.begin_step() and not core.device_waits
    assert not core.begin_step()  # it has drafts, so that the next is not planned beside it
    assert events.count("submit") == num_submitted + 1
