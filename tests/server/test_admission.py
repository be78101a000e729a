from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from observing_fakes import prepared
from serve_fakes import INFO

from quire.engine.api import EngineLoad
from quire.server import admission
from quire.server.admission import MAX_TOKENS_HEADER, Admission, OverloadedError, Ticket
from quire.server.settings import ServerSettings


class Bench:
    """An Admission with a clock and an engine's report that a test sets."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.load = EngineLoad()
        engine: Any = SimpleNamespace(info=INFO, load=lambda: self.load)
        self.admission = Admission(engine, ServerSettings(**settings), clock=lambda: self.now_s)
        self.stack = AsyncExitStack()

    async def admit(self, num_tokens: int = 4, tenant: str = "", max_tokens: int = 16) -> Ticket:
        request = prepared(num_prompt_tokens=num_tokens, max_tokens=max_tokens)
        (ticket,) = self.admission.admit([request], tenant)
        self.stack.callback(ticket.stop_waiting, was_served=False)
        return ticket

    async def admit_many(self, count: int, num_tokens: int = 4) -> list[Ticket]:
        requests = [prepared(num_prompt_tokens=num_tokens) for _ in range(count)]
        tickets = self.admission.admit(requests)
        for ticket in tickets:
            self.stack.callback(ticket.stop_waiting, was_served=False)
        return tickets


async def test_over_the_cap_of_requests_is_a_429_and_a_first_output_makes_room() -> None:
    bench = Bench(max_waiting_requests=2)
    first, _ = await bench.admit(), await bench.admit()
    with pytest.raises(OverloadedError, match="more than the 2") as refused:
        await bench.admit()
    assert refused.value.status == 429
    assert refused.value.reason == refused.value.code == "waiting_requests"
    assert int(refused.value.headers["retry-after"]) == refused.value.retry_after_s >= 1
    first.started()
    first.started()
    assert bench.admission.num_waiting == 1
    await bench.admit()
    await bench.stack.aclose()
    assert (bench.admission.num_waiting, bench.admission.num_waiting_tokens) == (0, 0)


async def test_a_request_of_many_prompts_is_one_thing() -> None:
    bench = Bench(max_waiting_requests=10)
    tickets = await bench.admit_many(12)  # over the cap by itself: it would never be served otherwise
    assert bench.admission.num_waiting == 12
    with pytest.raises(OverloadedError, match="13 requests would wait"):
        await bench.admit()
    for ticket in tickets:
        ticket.started()
    await bench.admit()
    with pytest.raises(OverloadedError, match="13 requests would wait"):
        await bench.admit_many(12)
    assert bench.admission.num_waiting == 1  # none of the twelve
    await bench.admit_many(9)
    await bench.stack.aclose()
    assert (bench.admission.num_waiting, bench.admission.num_waiting_tokens) == (0, 0)


async def test_over_the_cap_of_tokens_is_a_429_but_one_that_is_alone_is_served() -> None:
    bench = Bench(max_waiting_tokens=100)
    await bench.admit(num_tokens=500)
    with pytest.raises(OverloadedError) as refused:
        await bench.admit(num_tokens=1)
    assert refused.value.reason == "waiting_tokens"
    await bench.stack.aclose()
    await bench.admit(num_tokens=60)
    await bench.admit(num_tokens=40)
    with pytest.raises(OverloadedError):
        await bench.admit(num_tokens=1)


async def test_one_keys_flood_leaves_room_for_another_up_to_its_share() -> None:
    bench = Bench(max_waiting_requests=10)
    for _ in range(10):
        await bench.admit(tenant="flood")
    with pytest.raises(OverloadedError):
        await bench.admit(tenant="flood")
    for _ in range(5):
        await bench.admit(tenant="other")
    with pytest.raises(OverloadedError):
        await bench.admit(tenant="other")
    third = [await bench.admit(tenant="third") for _ in range(3)]
    assert len(third) == 3  # a third of ten
    with pytest.raises(OverloadedError):
        await bench.admit(tenant="third")
    for name in "abcdefgh":
        try:
            await bench.admit(tenant=name)
        except OverloadedError:
            break
    assert bench.admission.num_waiting <= 20


async def test_retry_after_is_what_the_queue_takes_at_the_rate_seen() -> None:
    bench = Bench(max_waiting_requests=20)
    tickets = [await bench.admit() for _ in range(20)]
    for ticket in tickets[:10]:  # two a second
        bench.now_s += 0.5
        ticket.started()
    for _ in range(10):
        await bench.admit()
    with pytest.raises(OverloadedError) as refused:
        await bench.admit()
    assert 9 <= refused.value.retry_after_s <= 11  # 20 waiting, 2 a second
    await bench.stack.aclose()
    bench.now_s += 3600.0  # an idle hour says nothing about the rate
    for _ in range(20):
        await bench.admit()
    with pytest.raises(OverloadedError) as refused:
        await bench.admit()
    assert 9 <= refused.value.retry_after_s <= 11


async def test_quiet_traffic_says_nothing_about_how_fast_a_crowd_is_served() -> None:
    bench = Bench(max_waiting_requests=20)
    for _ in range(50):  # one by one, each after two seconds: not because the next ones wait for it
        ticket = await bench.admit()
        bench.now_s += 2.0
        ticket.started()
    tickets = [await bench.admit() for _ in range(20)]
    with pytest.raises(OverloadedError) as refused:
        await bench.admit()
    assert refused.value.retry_after_s == 5  # not 40
    for ticket in tickets[:10]:  # four a second, now that there are enough
        bench.now_s += 0.25
        ticket.started()
    for _ in range(10):
        await bench.admit()
    with pytest.raises(OverloadedError) as refused:
        await bench.admit()
    assert 4 <= refused.value.retry_after_s <= 6  # 20 waiting, 4 a second


def test_a_low_cap_or_long_prompts_make_a_crowd_too() -> None:
    async def run(num_tokens: int, **caps: int) -> int:
        bench = Bench(**caps)
        tickets = [await bench.admit(num_tokens) for _ in range(4)]
        for ticket in tickets[:2]:
            bench.now_s += 10.0
            ticket.started()
            await bench.admit(num_tokens)
        with pytest.raises(OverloadedError) as refused:
            await bench.admit(num_tokens)
        return refused.value.retry_after_s

    assert 30 <= asyncio.run(run(4, max_waiting_requests=4)) <= 50  # one in ten seconds
    assert 30 <= asyncio.run(run(25, max_waiting_tokens=100)) <= 50


async def test_what_the_engine_reports_as_running_does_not_wait() -> None:
    """An answer that is not streamed gives no output before its end."""

    bench = Bench(max_waiting_requests=4)
    for _ in range(4):
        await bench.admit()
    bench.now_s += 10.0
    with pytest.raises(OverloadedError):
        await bench.admit()  # no report since: a stuck engine's queue stays bounded
    bench.load = EngineLoad(num_running=4, num_waiting=0)
    for _ in range(4):
        await bench.admit()
    with pytest.raises(OverloadedError):
        await bench.admit()
    bench.load = EngineLoad(num_running=4, num_waiting=4, num_waiting_tokens=16)
    bench.now_s += 10.0
    with pytest.raises(OverloadedError):
        await bench.admit()


async def test_brownout_shortens_new_answers_visibly_and_then_takes_none() -> None:
    bench = Bench(brownout_max_tokens=64)
    request = prepared(max_tokens=500)
    bench.load = EngineLoad(brownout_level=1)
    assert (await bench.admit(max_tokens=500)).headers == {}
    bench.load = EngineLoad(brownout_level=2)
    tickets = bench.admission.admit([request])
    assert request.request.max_tokens == 64
    assert tickets[0].headers == {MAX_TOKENS_HEADER: "64"}
    assert (await bench.admit(max_tokens=64)).headers == {}
    bench.load = EngineLoad(brownout_level=3)
    with pytest.raises(OverloadedError, match="short of memory") as refused:
        await bench.admit()
    assert refused.value.reason == "brownout"
    assert "retry-after" in refused.value.headers


def test_a_thousand_prompts_at_once_all_wait_by_default() -> None:
    """vLLM's benchmark sends them so at an infinite rate."""

    async def run() -> int:
        bench = Bench()
        for _ in range(1_000):
            await bench.admit(num_tokens=1_024)
        await bench.stack.aclose()
        return bench.admission.num_waiting

    assert asyncio.run(run()) == 0


def test_caps_come_from_the_memory_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_memory_bytes", lambda: 8 << 30)
    assert Bench().admission.caps == (16_384, 8 << 20)
    assert Bench(max_waiting_requests=1000).admission.caps == (1000, 8 << 20)
    assert Bench(max_waiting_requests=3, max_waiting_tokens=7).admission.caps == (3, 7)
