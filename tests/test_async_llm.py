"""AsyncLLM: streams, cancellation, and an engine that sleeps when there is nothing to do."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.errors import BadRequestError, EngineDeadError
from quire.params import OutputKind
from quire.request import Request

LONG = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.0)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(tiny_model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20)
    yield engine
    engine.shutdown()


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str = "") -> list[Any]:
    return [output async for output in engine.generate(prompt, params, name)]


async def test_deltas_join_to_the_cumulative_text(engine: AsyncLLM) -> None:
    whole = (await collect(engine, "hello", LONG))[-1].outputs[0]
    deltas = await collect(engine, "hello", LONG.clone(output_kind=OutputKind.DELTA))
    assert len(deltas) > 10
    assert "".join(o.outputs[0].text for o in deltas) == whole.text
    assert [t for o in deltas for t in o.outputs[0].token_ids] == whole.token_ids
    final = await collect(engine, "hello", LONG.clone(output_kind=OutputKind.FINAL_ONLY))
    assert [o.outputs[0].text for o in final] == [whole.text]


async def test_a_request_that_ended_needs_no_garbage_collector(engine: AsyncLLM) -> None:
    def num_alive() -> int:
        return sum(type(one) is Request for one in gc.get_objects())

    async def leave() -> None:
        stream = engine.generate("hello", LONG)
        await anext(stream)
        await stream.aclose()

    gc.collect()
    gc.disable()
    num_before = num_alive()
    try:
        await collect(engine, "hello", LONG.clone(max_tokens=3, n=2, temperature=1.0))
        await collect(engine, "hello", LONG.clone(max_tokens=3))
        await leave()
        until_s = time.monotonic() + 10
        while num_alive() > num_before and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        assert num_alive() <= num_before
    finally:
        gc.enable()


async def test_vllms_other_arguments_are_refused_by_name(engine: AsyncLLM) -> None:
    with pytest.raises(BadRequestError, match="this engine has no adapters: make it with enable_lora=True"):
        await anext(engine.generate("hello", LONG, lora_request=object()))
    with pytest.raises(BadRequestError, match="trace_headers"):
        engine.engine.add_request("id", "hello", LONG, trace_headers={"a": "b"})


async def test_many_streams_at_once(engine: AsyncLLM) -> None:
    alone = [(await collect(engine, f"prompt {i}", LONG))[-1].outputs[0].token_ids for i in range(5)]
    together = await asyncio.gather(*(collect(engine, f"prompt {i}", LONG) for i in range(5)))
    assert [outputs[-1].outputs[0].token_ids for outputs in together] == alone


async def test_cancelling_frees_the_blocks_within_a_step(engine: AsyncLLM) -> None:
    task = asyncio.create_task(collect(engine, "hello", LONG))
    other = asyncio.create_task(collect(engine, "other", LONG))
    while engine.engine.core.kv.num_used_blocks == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await other)[-1].finished  # the neighbour never noticed
    assert not engine.engine.core.scheduler.requests
    assert engine.engine.core.kv.num_used_blocks == 0

    stream = engine.generate("hello", LONG)
    await anext(stream)
    await stream.aclose()
    await engine.get_metrics()  # runs on the engine's thread, after the abort
    assert engine.engine.core.kv.num_used_blocks == 0


async def test_abort_by_id(engine: AsyncLLM) -> None:
    stream = engine.generate("hello", LONG, "mine")
    await anext(stream)
    await engine.abort("mine")
    outputs = [output async for output in stream]
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await engine.abort("nobody")


async def test_bad_requests_raise_where_they_are_made(engine: AsyncLLM) -> None:
    with pytest.raises(BadRequestError):
        await collect(engine, [], LONG)
    first = engine.generate("hello", LONG, "same")
    await anext(first)
    with pytest.raises(BadRequestError, match="in use"):
        await collect(engine, "hello", LONG, "same")
    assert [output async for output in first][-1].outputs[0].finish_reason == "length"


def test_an_idle_engine_burns_nothing(engine: AsyncLLM) -> None:
    asyncio.run(collect(engine, "hello", LONG))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


async def test_an_idle_engine_prepares_what_later_steps_need(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    left, core = [True, True, False], engine.engine.core
    monkeypatch.setattr(core.executor, "prepare_more", lambda: left.pop(0))
    core.can_prepare = True
    await collect(engine, "hello", LONG.clone(max_tokens=2))
    async with asyncio.timeout(30):
        while left:
            await asyncio.sleep(0.01)
    assert (await collect(engine, "hello", LONG))[-1].finished


async def test_a_step_is_planned_when_it_is_needed(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives while the loop waits with a plan is in that plan."""
    core = engine.engine.core
    spare_s, num_waits = 60.0, 0

    def spare() -> float:
        nonlocal num_waits
        num_waits += 1
        return spare_s if len(core.scheduler.requests) == 1 else 0.0

    monkeypatch.setattr(core, "spare_s", spare)
    async with asyncio.timeout(30):
        first = asyncio.create_task(collect(engine, "hello", LONG))
        while num_waits < 3:
            await asyncio.sleep(0.001)
        assert core.stats.num_steps == 0
        second = asyncio.create_task(collect(engine, "other", LONG))
        while core.stats.num_steps == 0:
            await asyncio.sleep(0.001)
        spare_s = 0.0
        assert (await first)[-1].finished and (await second)[-1].finished
    assert core.stats.num_steps < 2 * LONG.max_tokens  # both were in the first step


def test_several_event_loops_share_an_engine(engine: AsyncLLM) -> None:
    wanted = asyncio.run(collect(engine, "hello", LONG))[-1].outputs[0].token_ids
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: asyncio.run(collect(engine, "hello", LONG)), range(8)))
    assert [outputs[-1].outputs[0].token_ids for outputs in found] == [wanted] * 8


def test_an_event_loop_that_is_gone_leaves_nothing_running(engine: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = engine.generate("hello", LONG.clone(max_tokens=250))
    loop.run_until_complete(anext(stream))
    loop.close()  # without closing what runs in it
    until_s = time.monotonic() + 10
    while engine.engine.core.scheduler.requests and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not engine.engine.core.scheduler.requests
    assert asyncio.run(collect(engine, "hello", LONG))[-1].finished


async def test_the_tokenizer(engine: AsyncLLM) -> None:
    tokenizer = await engine.get_tokenizer()
    assert await engine.get_tokenizer() is tokenizer
    [*_, last] = await collect(engine, {"prompt_token_ids": tokenizer.encode("hello")}, LONG)
    text = tokenizer.decode(last.outputs[0].token_ids, skip_special_tokens=True)
    assert text == last.outputs[0].text


async def test_death_reaches_every_reader(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = engine.generate("hello", LONG)
    await anext(stream)

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.engine.core.executor, "submit", broken)
    with pytest.raises(EngineDeadError, match="boom"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await collect(engine, "hello", LONG)


async def test_shutdown_ends_streams(engine: AsyncLLM) -> None:
    stream = engine.generate("hello", LONG)
    await anext(stream)
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass
    engine.shutdown()


async def test_it_can_be_put_to_sleep_between_requests(engine: AsyncLLM) -> None:
    before = (await collect(engine, "hello", LONG))[-1].outputs[0].token_ids
    stream = engine.generate("hello", LONG)
    await anext(stream)
    with pytest.raises(BadRequestError, match="under way"):
        await engine.sleep()
    await stream.aclose()
    await engine.sleep(keep_kv=True)
    assert await engine.is_sleeping()
    with pytest.raises(BadRequestError, match="wake it up first"):
        await collect(engine, "hello", LONG)
    await engine.wake_up()
    assert (await collect(engine, "hello", LONG))[-1].outputs[0].token_ids == before
