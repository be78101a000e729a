"""Which models are awake, and which make room for others: with engines that a test writes, and no process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import INFO, output_of

from quire.config import EngineConfig
from quire.engine.api import EngineHealth, EngineLoad, EngineState, PreparedRequest
from quire.engine.launch import EngineProcessOptions
from quire.errors import BadRequestError, EngineDeadError, MemoryBudgetError
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.server import residents as module
from quire.server.errors import ApiError, UnavailableError
from quire.server.residents import ResidentEngine, Residents, divide


class FakeClient:
    """In an EngineClient's place: counts its calls, and answers after `hold` is set."""

    made: list[FakeClient]

    def __init__(self, config: EngineConfig, options: Any, *, text: Any) -> None:
        self.config, self.text = config, text
        self.info, self.pid = INFO, 1
        self.calls: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.dead = asyncio.Event()
        self.is_closed = False
        self.start_error: Exception | None = None
        self._on_death: list[Callable[[str], None]] = []
        self.made.append(self)

    async def start(self) -> None:
        await self.text.open()

    async def ready(self) -> None:
        if self.config.seed == 13:
            raise MemoryBudgetError("needs 9 GiB, and 2 GiB are free")

    def on_death(self, callback: Callable[[str], None]) -> None:
        self._on_death.append(callback)

    def die(self) -> None:
        self.dead.set()
        self.hold.set()
        for callback in self._on_death:
            callback("killed")

    async def close(self, grace_s: float) -> None:
        self.is_closed = True

    def health(self) -> EngineHealth:
        return EngineHealth(EngineState.READY)

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def call(self, name: str, **arguments: Any) -> None:
        self.calls.append(name)
        if self.config.seed == 7:
            raise BadRequestError("this engine cannot sleep")

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        await self.hold.wait()
        if self.dead.is_set():
            raise EngineDeadError("killed")
        yield output_of(prepared, "x", [120], "length")


class Setting:
    """Models with shares of the memory, all started."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.residents = Residents(restarts=True, **options)
        self._model = model

    async def add(self, share: float, seed: int = 0) -> ResidentEngine:
        config = EngineConfig(model=str(self._model), load_format="dummy", memory_share=share, seed=seed)
        engine = ResidentEngine(config, EngineProcessOptions(), self.residents, make_client=FakeClient)  # type: ignore[arg-type]
        await engine.ready()
        return engine


Run = Callable[..., AbstractAsyncContextManager[Setting]]


async def ask(engine: ResidentEngine) -> str:
    prepared = engine.prepare("r", [1, 2], SamplingParams(max_tokens=1))
    return "".join([output.outputs[0].text async for output in engine.stream(prepared)])


@pytest.fixture
def run(tiny_model: Path) -> Run:
    @asynccontextmanager
    async def running(**options: Any) -> AsyncIterator[Setting]:
        FakeClient.made = []
        setting = Setting(tiny_model, **options)
        try:
            yield setting
        finally:
            for member in list(setting.residents.members):
                await member.close(0.0)

    return running


def client_of(engine: ResidentEngine) -> FakeClient:
    assert isinstance(engine._client, FakeClient)
    return engine._client


async def test_models_that_fit_are_all_awake(run: Run) -> None:
    async with run() as setting:
        a, b = await setting.add(0.6), await setting.add(0.4)
        assert await ask(a) == await ask(b) == "x"
        assert a.is_awake and b.is_awake
        assert not client_of(a).calls and not client_of(b).calls


async def test_the_least_recently_used_makes_room(run: Run) -> None:
    async with run() as setting:
        a, b, c = await setting.add(0.5), await setting.add(0.5), await setting.add(0.5)
        assert (a.is_awake, b.is_awake, c.is_awake) == (False, True, True)
        assert a.health().state is EngineState.SLEEPING
        await ask(b)
        await ask(a)
        assert (a.is_awake, b.is_awake, c.is_awake) == (True, True, False)
        assert client_of(a).calls == ["sleep", "wake_up"] and len(FakeClient.made) == 3


async def test_one_that_cannot_sleep_makes_room_by_ending(run: Run) -> None:
    async with run() as setting:
        a = await setting.add(1.0, seed=7)
        await setting.add(1.0)
        assert a.sleep_level == 2 and FakeClient.made[0].is_closed
        assert await ask(a) == "x"


async def test_a_busy_model_is_not_disturbed_while_another_is_idle(run: Run) -> None:
    async with run() as setting:
        a, b, c = await setting.add(0.5), await setting.add(0.5), await setting.add(0.5)
        client_of(b).hold.clear()
        held = asyncio.create_task(ask(b))
        await ask(c)  # b was used longer ago, but it is busy
        assert await ask(a) == "x"
        assert (b.is_awake, c.is_awake) == (True, False)
        client_of(b).hold.set()
        assert await held == "x"


async def test_under_load_models_take_turns_and_nothing_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)

    async with run() as setting:
        a, b = await setting.add(1.0), await setting.add(1.0)
        for client in FakeClient.made:
            client.hold.clear()
        running = asyncio.create_task(ask(b))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(ask(a)) for _ in range(3)]
        await asyncio.sleep(0.05)  # longer than its patience: the other is asked to leave, and new requests wait
        late = asyncio.create_task(ask(b))
        await asyncio.sleep(0.01)
        assert b.is_leaving and b.num_in_use == 1
        for client in FakeClient.made:
            client.hold.set()
        assert await asyncio.gather(running, *waiting, late) == ["x"] * 5
        assert b.is_awake and not a.is_awake


async def test_a_request_waits_with_a_limit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)

    async with run(wait_s=0.05) as setting:
        a, b = await setting.add(1.0), await setting.add(1.0)
        client_of(b).hold.clear()
        held = asyncio.create_task(ask(b))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match=r"did not become free in 0\.05 s"):
            await ask(a)
        client_of(b).hold.set()
        assert await held == "x"


async def test_one_that_dies_is_started_again_and_the_other_serves_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BACKOFF_S", 0.05)

    async with run() as setting:
        a, b = await setting.add(0.5), await setting.add(0.5)
        client_of(a).hold.clear()
        lost = asyncio.create_task(ask(a))
        await asyncio.sleep(0.01)
        client_of(a).die()
        with pytest.raises(UnavailableError, match="send the request again"):
            await lost
        with pytest.raises(UnavailableError, match="started again"):
            await ask(a)
        assert await ask(b) == "x"
        while not a.is_awake:
            await asyncio.sleep(0.01)
        assert await ask(a) == "x" and len(FakeClient.made) == 3


async def test_one_that_keeps_failing_is_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BACKOFF_S", 0.001)

    async with run() as setting:
        a = await setting.add(0.5)
        given_up: list[str] = []
        a.on_death(given_up.append)
        a.config = a.config.replace(seed=13)  # which does not start any more
        client_of(a).die()
        while not given_up:
            await asyncio.sleep(0.01)
        assert "needs 9 GiB" in given_up[0] and a.health().state is EngineState.DEAD
        with pytest.raises(UnavailableError, match="loaded again"):
            await ask(a)


async def test_levels_of_sleep(run: Run) -> None:
    async with run() as setting:
        a = await setting.add(1.0)
        first = client_of(a)
        await setting.residents.sleep(a, 1, keep_kv=True, within_s=1.0)
        assert a.sleep_level == 1 and not first.is_closed
        await setting.residents.sleep(a, 2, keep_kv=False, within_s=1.0)
        assert a.sleep_level == 2 and first.is_closed
        assert await ask(a) == "x"
        assert client_of(a) is not first and a.sleep_level is None
        client_of(a).hold.clear()
        held = asyncio.create_task(ask(a))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="did not end"):
            await setting.residents.sleep(a, 1, keep_kv=False, within_s=0.01)
        client_of(a).hold.set()
        assert await held == "x" and a.is_awake


async def test_one_that_dies_in_its_sleep_starts_when_it_is_wanted(run: Run) -> None:
    async with run() as setting:
        a = await setting.add(1.0)
        await setting.residents.sleep(a, 1, keep_kv=False, within_s=1.0)
        client_of(a).die()
        assert a.health().state is EngineState.SLEEPING
        assert await ask(a) == "x" and len(FakeClient.made) == 2


async def test_who_does_not_fit_is_refused_with_the_numbers(run: Run) -> None:
    async with run() as setting:
        with pytest.raises(MemoryBudgetError, match="needs 9 GiB, and 2 GiB are free"):
            await setting.add(0.5, seed=13)
        assert FakeClient.made[0].is_closed


def test_memory_is_divided_by_shares_or_by_weights() -> None:
    assert divide([1, 1], [0.6, 0.4]) == [0.6, 0.4]
    large, small = divide([16 << 30, 1 << 30], [None, None])
    assert large + small == pytest.approx(1.0) and 0.8 < large < 0.95
    assert divide([5, 5], [0.7, None]) == pytest.approx([0.7, 0.3])
    assert divide([1, 1], [1.0, 1.0]) == [1.0, 1.0]
    with pytest.raises(BadRequestError, match="leave none"):
        divide([1, 1], [1.0, None])
