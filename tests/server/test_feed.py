from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from live_harness import CoreEngine, make_core, make_request, run_to_end
from observing_fakes import prepared

from quire.engine.api import EngineState
from quire.server import feed as feed_module
from quire.server.errors import ApiError
from quire.server.feed import MAX_LINES_BEHIND, LiveFeed
from quire.server.life import ServerLife
from quire.server.metrics import ServerMetrics

PROMPT = list(range(1, 11))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"TICK_S": 0.005, "IDLE_TICK_S": 0.01, "PIECE_GAP_S": 0.0, "CHART_S": 0.0}.items():
        monkeypatch.setattr(feed_module, name, seconds)


def make_feed(engine: CoreEngine) -> LiveFeed:
    life = ServerLife()
    life.ready()
    return LiveFeed(engine, ServerMetrics(engine, "tiny"), life, hello=lambda: {"num_blocks": engine.info.num_blocks})


class Viewer:
    """Reads lines, and keeps a copy of the blocks as the page does."""

    def __init__(self, lines: AsyncIterator[bytes]) -> None:
        self.lines = lines
        self.codes: dict[int, int] = {}
        self.rows: list[Any] = []
        self.tables: dict[int, list[int]] = {}
        self.gauges: dict[str, Any] | None = None
        self.states: list[str] = []

    async def read(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await asyncio.wait_for(anext(self.lines), 5))
        kind = message["type"]
        if kind == "blocks":
            codes = base64.b64decode(message["codes"])
            ids = base64.b64decode(message["block_ids"])
            first, num_scanned = message["first"], message["num_scanned"]
            blocks = [*range(first, first + num_scanned), *struct.unpack(f"<{len(ids) // 4}I", ids)]
            self.codes.update(zip(blocks, codes, strict=True))
        elif kind == "tick":
            self.rows = message["rows"]
            self.tables.update((seq_id, runs) for seq_id, runs in message["tables"])
            self.gauges = message["gauges"] or self.gauges
        elif kind == "tables":
            self.tables = dict(message["tables"])
        elif kind == "status":
            self.states.append(message["state"])
        return message

    async def until(self, condition: Any) -> None:
        for _ in range(500):
            if condition():
                return
            await self.read()
        raise AssertionError("it was never told")


@asynccontextmanager
async def viewing(feed: LiveFeed, sees: str | None = None) -> AsyncIterator[Viewer]:
    lines = feed.view(sees)
    try:
        yield Viewer(lines)
    finally:
        await lines.aclose()  # type: ignore[attr-defined]


def codes_of(engine: CoreEngine) -> dict[int, int]:
    names = {"free": 0, "cached": 1, "in_use": 2, "in_transit": 4}
    return {
        block.block_id: 3 if block.ref_count > 1 else names[block.state.value] for block in engine.core.kv.pool.blocks
    }


async def test_it_follows_the_engine() -> None:
    engine = CoreEngine(make_core())
    async with viewing(make_feed(engine)) as viewer:
        assert (await viewer.read())["type"] == "hello"
        await viewer.until(lambda: len(viewer.codes) == 64)
        assert viewer.states == ["ready"]
        engine.core.add(make_request("a", PROMPT, n=2))
        engine.core.step()
        await viewer.until(lambda: viewer.rows and viewer.codes == codes_of(engine))
        assert [row[1] for row in viewer.rows] == ["a", "a"]
        assert list(viewer.tables.values()) == [[0, 3], [0, 3]]
        await viewer.until(lambda: viewer.gauges is not None and viewer.gauges["num_running"] == 2)
        run_to_end(engine.core)
        await viewer.until(lambda: not viewer.rows and viewer.codes == codes_of(engine))


async def test_each_viewer_sees_its_own_requests() -> None:
    engine = CoreEngine(make_core())
    metrics = ServerMetrics(engine, "tiny")
    life = ServerLife()
    life.ready()
    feed = LiveFeed(engine, metrics, life, hello=dict)
    for tenant in ("a", "b"):
        engine.core.add(make_request(f"of-{tenant}", PROMPT, tenant=tenant, salt=tenant))
    engine.core.step()
    async with viewing(feed, "a") as first, viewing(feed) as admin, viewing(feed, "b") as late:
        await first.until(lambda: first.tables)
        for viewer, names in ((late, ["of-b"]), (admin, ["of-a", "of-b"]), (first, ["of-a"])):
            await viewer.until(lambda viewer=viewer, names=names: viewer.rows and len(viewer.tables) == len(names))
            assert [row[1] for row in viewer.rows] == names
            assert set(viewer.tables) == {row[0] for row in viewer.rows}
        for tenant in ("a", "b"):
            metrics.on_finished(prepared(f"of-{tenant}", tenant=tenant), None, "stop")
        for viewer, names in ((first, ["of-a"]), (late, ["of-b"]), (admin, ["of-b", "of-a"])):
            while not (ended := (await viewer.read()).get("ended")):
                pass
            assert [name for name, _ in ended] == names
    # Somebody who looks alone is told of nothing else, however many others there are.
    async with viewing(feed, "b") as alone:
        await alone.until(lambda: alone.tables)
    assert engine.calls[-1][1]["tenants"] == ["b"]


async def test_it_tells_where_a_request_ended() -> None:
    """A row is how far a request was at the last look."""

    engine = CoreEngine(make_core())
    metrics = ServerMetrics(engine, "tiny")
    metrics.on_finished(prepared("before"), None, "abort")
    life = ServerLife()
    life.ready()
    feed = LiveFeed(engine, metrics, life, hello=dict)
    async with viewing(feed) as viewer:
        ended: list[Any] = []
        await viewer.until(lambda: viewer.gauges is not None)
        for name, made in {"a": [7], "b": [9]}.items():
            request = prepared(name)
            request.num_made_tokens[:] = made
            metrics.on_finished(request, None, "abort")
        while len(ended) < 2:
            ended += (await viewer.read()).get("ended", ())
        for _ in range(4):
            ended += (await viewer.read()).get("ended", ())
        assert sorted(ended) == [["a", [7]], ["b", [9]]]  # once each, and nothing from before it looked


async def test_ten_viewers_cost_the_engine_as_one() -> None:
    engine = CoreEngine(make_core())
    feed = make_feed(engine)
    viewers = [Viewer(feed.view()) for _ in range(10)]
    await asyncio.gather(*(viewer.until(lambda v=viewer: len(v.codes) == 64) for viewer in viewers))
    assert len(feed._viewers) == 10
    engine.core.add(make_request("a", PROMPT))
    engine.core.step()
    await asyncio.gather(*(viewer.until(lambda v=viewer: v.codes == codes_of(engine)) for viewer in viewers))
    for viewer in viewers:
        await viewer.lines.aclose()  # type: ignore[attr-defined]
    assert len(feed._viewers) == 0
    assert [arguments["watch"] is None for _, arguments in engine.calls].count(True) == 1
    num_calls = len(engine.calls)
    await asyncio.sleep(0.05)
    assert len(engine.calls) == num_calls  # nobody looks, nothing is asked


async def test_who_comes_later_gets_what_is_known() -> None:
    engine = CoreEngine(make_core())
    feed = make_feed(engine)
    engine.core.add(make_request("a", PROMPT))
    engine.core.step()
    async with viewing(feed) as first:
        await first.until(lambda: first.codes == codes_of(engine) and first.tables)
        num_calls = len(engine.calls)
        async with viewing(feed) as second:
            for _ in range(5):  # hello, status, blocks, tables, tick: without another question
                await second.read()
            assert len(engine.calls) <= num_calls + 1
            assert second.codes == first.codes and second.tables == first.tables and second.rows == first.rows


async def test_a_slow_viewer_gets_the_present_not_the_past() -> None:
    engine = CoreEngine(make_core())
    feed = make_feed(engine)
    async with viewing(feed) as slow, viewing(feed) as quick:
        await slow.until(lambda: len(slow.codes) == 64)
        for number in range(3 * MAX_LINES_BEHIND):
            engine.core.add(make_request(f"r{number}", [number] * 9, max_tokens=2))
            engine.core.step()
            await quick.until(lambda: quick.codes == codes_of(engine))
        (behind,) = [one for one in feed._viewers if one.is_behind]
        assert not behind.lines  # it holds no memory while it is behind
        for _ in range(10):
            await slow.read()
        assert slow.codes == codes_of(engine)


async def test_a_large_pool_comes_in_pieces() -> None:
    engine = CoreEngine(make_core(num_blocks=20_000))
    async with viewing(make_feed(engine)) as viewer:
        await viewer.until(lambda: len(viewer.codes) == 20_000)
    assert all(arguments["limit"] <= 4_096 for _, arguments in engine.calls)


async def test_the_engines_death_is_told_without_its_reason_and_ends_the_feed() -> None:
    engine = CoreEngine(make_core())
    feed = make_feed(engine)
    async with viewing(feed) as viewer:
        await viewer.until(lambda: len(viewer.codes) == 64)
        engine.state = EngineState.DEAD
        last = {}
        with pytest.raises(StopAsyncIteration):
            while True:
                last = await viewer.read()
        assert last == {"type": "status", "state": "dead", "reason": "", "engines": ["0"], "models": {}}


async def test_viewers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)

    feed = make_feed(CoreEngine(make_core()))
    feed.check_room()
    async with viewing(feed) as viewer:
        await viewer.read()
        with pytest.raises(ApiError, match="pages are open") as refused:
            feed.check_room()
        assert refused.value.status == 429
    feed.check_room()


async def test_one_tenant_cannot_take_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 2)

    feed = make_feed(CoreEngine(make_core()))

    @asynccontextmanager
    async def page(tenant: str) -> AsyncIterator[None]:
        feed.check_room(tenant)
        lines = feed.view(tenant, tenant)
        await anext(lines)
        try:
            yield
        finally:
            await lines.aclose()  # type: ignore[attr-defined]

    async with page("a"), page("a"):
        with pytest.raises(ApiError, match="pages are open"):
            feed.check_room("a")
        async with page("b"):
            with pytest.raises(ApiError, match="pages are open"):
                feed.check_room("b")
            async with page("c"):  # twice as many as the limit: no name makes room for another
                with pytest.raises(ApiError, match="pages are open"):
                    feed.check_room("d")
