from __future__ import annotations

import asyncio

from quire.server.errors import ApiError
from quire.server.life import LifeState, ServerLife, not_serving


def test_states_follow_each_other_and_death_is_final() -> None:
    life = ServerLife()
    assert life.state is LifeState.STARTING
    assert life.state is LifeState.STARTING
    life.ready()
    assert life.state is LifeState.SERVING
    life.begin_drain()
    life.ready()  # an engine that becomes ready while draining changes nothing
    assert life.state is LifeState.DRAINING
    life.died("out of memory")
    life.begin_drain()
    assert life.state is LifeState.DEAD
    assert life.death_reason == "out of memory"


async def test_idle_waits_for_what_is_under_way() -> None:
    life = ServerLife()
    assert await life.idle(0.0)
    with life.request():
        with life.request():
            assert life.num_in_flight == 2
        assert not await life.idle(0.01)
        waiting = asyncio.create_task(life.idle(5.0))
        await asyncio.sleep(0)
    assert await waiting
    assert life.num_in_flight == 0


def test_cut_reaches_only_what_still_runs() -> None:
    life = ServerLife()
    told: list[str] = []

    def first(error: ApiError) -> None:
        told.append(f"first {error.code}")

    def second(error: ApiError) -> None:
        told.append("second")

    with life.ends_with(first):
        with life.ends_with(second):
            pass
        assert life.cut(not_serving(LifeState.DRAINING)) == 1
    assert told == ["first draining"]
    assert life.cut(not_serving(LifeState.DRAINING)) == 0


def test_the_refusal_says_when_to_come_back_and_nothing_of_the_inside() -> None:
    error = not_serving(LifeState.DEAD)
    assert error.status == 503
    assert int(error.headers["retry-after"]) > 0
    assert "/" not in error.message
