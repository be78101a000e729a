"""Coroutines for which no time passes."""

from __future__ import annotations

import asyncio

import pytest

from quire.sim import virtual_time


def test_an_hour_passes_at_once_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, *naps_s: float) -> None:
        for nap_s in naps_s:
            await asyncio.sleep(nap_s)
            seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> str:
        await asyncio.gather(sleeper("a", 3_600.0, 1.0), sleeper("b", 1_800.0, 1_800.5))
        return "done"

    assert virtual_time.run(main()) == "done"
    assert seen == [("b", 1_800.0), ("a", 3_600.0), ("b", 3_600.5), ("a", 3_601.0)]


def test_coroutines_that_all_wait_for_nothing_are_a_mistake() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="nothing is due"):
        virtual_time.run(main())
