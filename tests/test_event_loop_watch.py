from __future__ import annotations

import asyncio
import gc
import time

from event_loop_watch import MAX_CALLBACK_S, watched


def busy(cpu_s: float) -> None:
    ends_s = time.thread_time() + cpu_s
    while time.thread_time() < ends_s:
        pass


def test_what_computes_for_long_is_found_and_what_waits_is_not() -> None:
    async def run() -> list[str]:
        with watched() as found:
            await asyncio.sleep(0)
            time.sleep(3 * MAX_CALLBACK_S)  # as on a machine that has other things to do
            await asyncio.sleep(0)
            assert not found
            busy(3 * MAX_CALLBACK_S)
            await asyncio.sleep(0)
            return found

    (found,) = asyncio.run(run())
    assert "ms in <Task" in found
    assert "busy" in found


def test_collections_count() -> None:
    def slow_collection(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            busy(3 * MAX_CALLBACK_S)

    async def run() -> list[str]:
        with watched() as found:
            await asyncio.sleep(0)
            gc.callbacks.append(slow_collection)
            gc.collect()
            gc.callbacks.remove(slow_collection)
            await asyncio.sleep(0)
            return found

    assert len(asyncio.run(run())) == 1


async def test_other_loops_are_left_alone() -> None:
    busy(2 * MAX_CALLBACK_S)
