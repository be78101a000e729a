from __future__ import annotations

import asyncio
from typing import Any

from quire.server.endpoint import on_gone
from quire.server.hang_up import HANG_UP, HangUp


def test_everybody_who_still_watches_is_told_once() -> None:
    hang_up, told = HangUp(), []
    hang_up.watch(lambda: told.append("a"))
    end = hang_up.watch(lambda: told.append("b"))
    hang_up.watch(lambda: told.append("c"))
    end()
    hang_up.happened()
    hang_up.happened()
    end()
    assert told == ["a", "c"]


def test_who_comes_late_is_told_at_once() -> None:
    hang_up, told = HangUp(), []
    hang_up.happened()
    hang_up.watch(lambda: told.append("late"))()
    assert told == ["late"]


async def test_without_our_server_it_is_heard_in_asgis_way() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: list[str] = []
    on_gone({"type": "http"}, messages.get, lambda: told.append("a"))
    on_gone({"type": "http"}, messages.get, lambda: told.append("b"))()  # ended before it began
    messages.put_nowait({"type": "http.request"})
    messages.put_nowait({"type": "http.disconnect"})
    await asyncio.sleep(0.01)
    assert told == ["a"]


async def test_with_our_server_nothing_waits() -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("nobody asks")

    hang_up, told = HangUp(), []
    on_gone({"type": "http", "state": {HANG_UP: hang_up}}, receive, lambda: told.append("a"))
    assert len(asyncio.all_tasks()) == 1
    hang_up.happened()
    assert told == ["a"]
