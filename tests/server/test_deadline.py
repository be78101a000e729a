from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from quire.errors import BadRequestError
from quire.server.deadline import Deadline, DeadlineError, timeout_s
from quire.server.errors import ApiError
from quire.server.life import LifeState, ServerLife, not_serving
from quire.server.settings import ServerSettings


class Source:
    """Counts up, an item every `item_s`; notes that it was closed."""

    def __init__(self, item_s: float, num_items: int = 1000) -> None:
        self.item_s = item_s
        self.num_items = num_items
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for i in range(self.num_items):
                await asyncio.sleep(self.item_s)
                yield i
        finally:
            self.is_closed = True


async def test_a_stream_that_is_done_in_time_is_as_without_a_deadline() -> None:
    source = Source(0.0, 5)
    assert [i async for i in Deadline(10.0, ServerLife()).watch(source.stream())] == [0, 1, 2, 3, 4]
    assert [i async for i in Deadline(None, ServerLife()).watch(Source(0.0, 2).stream())] == [0, 1]
    assert source.is_closed


@pytest.mark.parametrize("item_s", [60.0, 0.005])
async def test_the_deadline_ends_and_frees_the_stream(item_s: float) -> None:
    source = Source(item_s)
    with pytest.raises(DeadlineError, match=r"0\.05 s") as refused:
        async for _ in Deadline(0.05, ServerLife()).watch(source.stream()):
            pass
    assert refused.value.status == 504
    assert refused.value.code == "timeout"
    assert refused.value.headers == {"x-should-retry": "false"}
    assert source.is_closed
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_reader_that_is_busy_is_not_cancelled_but_the_stream_is_freed_meanwhile() -> None:
    source = Source(0.0)
    stream = Deadline(0.02, ServerLife()).watch(source.stream())
    assert await anext(stream) == 0
    await asyncio.sleep(0.1)  # sends, to a client that hardly reads
    assert source.is_closed
    with pytest.raises(DeadlineError):
        await anext(stream)


async def test_a_cancelled_reader_stays_cancelled() -> None:
    source = Source(60.0)

    async def read() -> None:
        async for _ in Deadline(10.0, ServerLife()).watch(source.stream()):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.is_closed


async def test_closing_it_closes_the_stream() -> None:
    source, life = Source(0.0), ServerLife()
    stream = Deadline(10.0, life).watch(source.stream())
    await anext(stream)
    await stream.aclose()
    assert source.is_closed
    assert life.cut(not_serving(LifeState.DRAINING)) == 0


async def test_the_server_can_cut_it_off() -> None:
    source, life = Source(60.0), ServerLife()
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, life.cut, not_serving(LifeState.DRAINING))
    with pytest.raises(ApiError) as cut:
        await anext(Deadline(None, life).watch(source.stream()))
    assert cut.value.code == "draining"
    assert source.is_closed


async def test_the_streams_own_error_passes() -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        async for _ in Deadline(1.0, ServerLife()).watch(broken()):
            pass


@pytest.mark.parametrize(
    ("settings", "field", "header", "seconds"),
    [
        ({}, None, None, None),
        ({}, 3, None, 3.0),
        ({}, None, "2.5", 2.5),
        ({}, 3, "2.5", 3.0),
        ({"default_timeout_s": 9.0}, None, None, 9.0),
        ({"default_timeout_s": 9.0}, 20, None, 20.0),
        ({"max_timeout_s": 30.0}, None, None, 30.0),
        ({"max_timeout_s": 30.0}, 30, None, 30.0),
    ],
)
def test_field_before_header_before_default(
    settings: dict[str, Any], field: Any, header: str | None, seconds: float | None
) -> None:
    assert timeout_s(ServerSettings(**settings), field=field, header=header) == seconds


@pytest.mark.parametrize("value", [0, -1, "3", True, float("nan"), float("inf"), [], 1e300])
def test_a_field_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(BadRequestError) as refused:
        timeout_s(ServerSettings(), field=value)
    assert refused.value.param == "timeout"


def test_a_bad_header_and_one_over_the_ceiling_are_refused() -> None:
    for header in ("soon", "", "-1", "nan"):
        with pytest.raises(BadRequestError) as refused:
            timeout_s(ServerSettings(), header=header)
        assert refused.value.param == "x-request-timeout"
    with pytest.raises(BadRequestError, match="at most 30 s"):
        timeout_s(ServerSettings(max_timeout_s=30.0), header="31")
