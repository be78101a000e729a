"""Several models on one device: which of them are awake, and which make room for others.

Each model has a share of the memory, which it takes while it is awake. The shares of all that are awake never add up
to more than one. If the shares of all models do, models take turns: a request to a model that sleeps wakes it, and the
least recently used one falls asleep, once its requests have ended. Requests wait meanwhile; nothing is lost.

    starting ──▶ ready ──sleep──▶ sleeping      level 1: the process stays, with the weights in host memory
                  ▲  │              │           level 2: the process ends, and is started again
                  │  └──dies──▶ dead┤
                  └─────────────────┘  a model that died is started again, unless it keeps failing
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from quire.config import EngineConfig
from quire.engine.api import EngineHealth, EngineInfo, EngineLoad, EngineState, PreparedRequest
from quire.engine.client import EngineClient
from quire.engine.launch import EngineProcessOptions
from quire.engine.stats import Metric
from quire.engine.text_front import TextFront
from quire.engine.text_side import num_weight_bytes
from quire.errors import BadRequestError, EngineDeadError, MemoryBudgetError, QuireError
from quire.log import get_logger
from quire.outputs import RequestOutput
from quire.server.errors import ApiError, UnavailableError

_PATIENCE_S = 5.0  # for which a model that is busy is not asked to make room
_FIRST_BACKOFF_S = 0.5
_MAX_FAILURES = 5  # in a row; then a model is not started again by itself
_WELL_AFTER_S = 60.0  # an engine that has served so long had no fault of its own before
_CLOSE_S = 5.0
_LOOK_S = 1.0  # between two looks at whether an engine hangs
_ROUNDING = 1e-6


def _unavailable(message: str) -> UnavailableError:
    """A model takes no requests now; the others do."""
    return UnavailableError(message, "model_unavailable")


class ResidentEngine(TextFront):
    """Implements `quire.engine.api.ServingEngine` with an engine process that may end, and start again, meanwhile.
    Belongs to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        options: EngineProcessOptions,
        residents: Residents,
        *,
        make_client: Callable[..., EngineClient] = EngineClient,
    ) -> None:
        super().__init__(config, options, None)
        self.share = config.memory_share or 1.0
        self.num_in_use = 0  # requests that run
        self._num_waiting = 0  # requests that wait until it is awake
        self.last_used_s = 0.0
        self.is_leaving = False  # it shall sleep: new requests wait until it does, and wake it again
        self.sleep_level: int | None = None
        self._residents = residents
        self._make_client = make_client
        self._client: EngineClient | None = None
        self._info: EngineInfo | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._death = ""  # why it is dead
        self._num_failures = 0
        self._ready_s = 0.0
        self._restarting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._on_death: list[Callable[[str], None]] = []
        self._is_closing = False
        residents.members.append(self)

    def take_share(self, share: float) -> None:
        """Give the model this share of the memory, before it starts."""
        self.share = share
        self.config = self.config.replace(memory_share=share)

    # -- life

    async def start(self) -> None:
        """`ready` does it, as models start one after the other: each counts the memory that those before it left."""

    async def ready(self) -> None:
        await self._residents.wake(self)

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Called with the reason when it is dead and not started again."""
        self._on_death.append(callback)

    async def close(self, grace_s: float = 10.0) -> None:
        self._is_closing = True
        if self in self._residents.members:
            self._residents.members.remove(self)
        for task in (self._restarting, self._watching):
            if task is not None:
                task.cancel()
        await self._residents.stop_waking(self)
        if self._client is not None:
            await self._client.close(grace_s)

    @property
    def is_awake(self) -> bool:
        return self._client is not None and self.sleep_level is None

    @property
    def is_wanted(self) -> bool:
        return bool(self.num_in_use or self._num_waiting)

    async def until_idle(self) -> None:
        await self._is_idle.wait()

    async def fall_asleep(self, level: int, *, keep_kv: bool = False) -> None:
        """Give memory back; nothing may be under way. The residents call it, one at a time."""
        assert self._client is not None
        if level == 1:
            await self._client.call("sleep", keep_kv=keep_kv)
        else:
            client, self._client = self._client, None
            await client.close(_CLOSE_S)
        self.sleep_level = level

    async def wake_up(self) -> None:
        """Wake it out of its sleep, or start a new process. The residents call it, one at a time, when there is
        room."""
        if self._is_closing:
            raise _unavailable("this model is being unloaded")
        if self._client is not None:
            await self._client.call("wake_up")
        else:
            client = self._make_client(self.config, self.options, text=self._text)
            try:
                await client.start()
                await client.ready()
            except BaseException:
                await client.close(0.0)
                raise
            client.on_death(lambda reason: self._died(client, reason))
            self._client, self._info = client, client.info
            self._watching = asyncio.create_task(self._watch(client))
            self._take_limits(client.info)
        self.sleep_level, self._death = None, ""
        self.last_used_s = self._ready_s = time.monotonic()

    async def _watch(self, client: EngineClient) -> None:
        """End an engine that hangs, where it is started again afterwards."""
        while client is self._client:
            if self._residents.restarts and client.health().state is EngineState.STUCK:
                get_logger().error("%s hangs and is ended: %s", self.config.model, client.health().reason)
                client.kill()
            await asyncio.sleep(_LOOK_S)

    def _died(self, client: EngineClient, reason: str) -> None:
        if client is not self._client or self._is_closing:
            return
        self._client = None
        if self.sleep_level is not None:
            self.sleep_level = 2  # no request is lost: the process starts again when a request wants it
            return
        self._death = reason
        if time.monotonic() - self._ready_s > _WELL_AFTER_S:
            self._num_failures = 0
        self._residents.changed()
        if not self._residents.restarts:
            self._give_up(reason)
            return
        self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        name = self.config.model
        while self._num_failures < _MAX_FAILURES:
            backoff_s = _FIRST_BACKOFF_S * 2**self._num_failures
            self._num_failures += 1
            get_logger().warning("%s is started again in %g s", name, backoff_s)
            await asyncio.sleep(backoff_s)
            try:
                await self._residents.wake(self)
            except QuireError as error:
                self._death = str(error)
                get_logger().error("%s could not be started: %s", name, error)
            else:
                get_logger().warning("%s serves again", name)
                return
        get_logger().error("%s has failed %d times in a row and is left alone: load it again", name, _MAX_FAILURES)
        self._give_up(self._death)

    def _give_up(self, reason: str) -> None:
        for callback in self._on_death:
            callback(reason)

    # -- what there is

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started yet"
        return self._info

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return None if self._client is None else self._client.pid

    def health(self) -> EngineHealth:
        if self._death:
            return EngineHealth(EngineState.DEAD, self._death)
        if self.sleep_level is not None:
            return EngineHealth(EngineState.SLEEPING, "a request wakes it")
        return EngineHealth(EngineState.STARTING) if self._client is None else self._client.health()

    def load(self) -> EngineLoad:
        return EngineLoad() if self._client is None else self._client.load()

    # -- requests

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, once the engine is awake."""
        async with self.in_use() as client, aclosing(client.stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[EngineClient]:
        """Awake, and not to be put to sleep meanwhile. Waits for it, with a limit."""
        self._num_waiting += 1
        try:
            while not self.is_awake or self.is_leaving:
                self.raise_if_dead()
                await self._residents.wait_for(self)
        finally:
            self._num_waiting -= 1
        assert self._client is not None
        self.num_in_use += 1
        self._is_idle.clear()
        try:
            yield self._client
        except EngineDeadError:
            if not self._residents.restarts:
                raise
            raise _unavailable(f"the engine of {self.config.model} stopped: send the request again") from None
        finally:
            self.num_in_use -= 1
            self.last_used_s = time.monotonic()
            if not self.num_in_use:
                self._is_idle.set()
                self._residents.changed()

    async def call(self, name: str, **arguments: Any) -> Any:
        """An inspection wakes no engine: one at level 1 answers out of its sleep."""
        return await self._running().call(name, **arguments)

    async def metrics(self) -> list[Metric]:
        return await self._running().metrics()

    def _running(self) -> EngineClient:
        if self._client is None:
            raise EngineDeadError("the engine's process does not run")
        return self._client

    def raise_if_dead(self) -> None:
        if self._is_closing:
            raise _unavailable("this model is being unloaded")
        if self._death and not self._residents.restarts:
            raise EngineDeadError(self._death)
        if self._death:
            is_lost = self._restarting is None or self._restarting.done()
            tail = (
                "has failed: it has to be loaded again" if is_lost else "stopped and is started again: try again soon"
            )
            raise _unavailable(f"the engine of {self.config.model} {tail}")


class Residents:
    """The models that share a device. One of them at a time falls asleep or wakes.

    Invariant: the shares of those that are awake add up to at most one, on each device.
    """

    def __init__(self, *, restarts: bool = False, wait_s: float = 120.0) -> None:
        """restarts: a model that dies is started again; wait_s: how long requests wait for their model's turn."""
        self.members: list[ResidentEngine] = []
        self.restarts = restarts
        self.wait_s = wait_s
        self._lock = asyncio.Lock()
        self._waking: dict[ResidentEngine, asyncio.Task[None]] = {}
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Wake those that wait: an engine has become idle, or is gone."""
        self._change.set()

    async def divide_memory(self) -> None:
        """Give every model a share that has none, before the first of them starts. One alone takes what is free."""
        if len(self.members) < 2:
            return
        weights = [await asyncio.to_thread(num_weight_bytes, member.config) for member in self.members]
        shares = divide(weights, [member.config.memory_share for member in self.members])
        for member, share in zip(self.members, shares, strict=True):
            member.take_share(share)

    async def wake(self, engine: ResidentEngine) -> None:
        """Wait until an engine is awake. The caller may go away meanwhile; the waking goes on."""
        task = self._waking.get(engine)
        if task is None:
            task = self._waking[engine] = asyncio.create_task(self._wake(engine))
            task.add_done_callback(lambda done: (self._waking.pop(engine, None), done.cancelled() or done.exception()))
        await asyncio.shield(task)

    async def stop_waking(self, engine: ResidentEngine) -> None:
        if (task := self._waking.get(engine)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def wait_for(self, engine: ResidentEngine) -> None:
        """Wake an engine for a request, which waits for a limited time."""
        try:
            async with asyncio.timeout(self.wait_s):
                await self.wake(engine)
        except TimeoutError:
            raise _unavailable(
                f"{engine.config.model} sleeps, and the memory for it did not become free in {self.wait_s:g} s"
            ) from None
        except MemoryBudgetError as error:
            raise _unavailable(f"{engine.config.model} sleeps: {error}") from None

    async def _wake(self, engine: ResidentEngine) -> None:
        async with self._lock:
            if engine.is_awake:
                return
            while (room := self._room(engine)) < engine.share - _ROUNDING:
                awake = self._awake_beside(engine)
                if not awake:
                    raise MemoryBudgetError(f"a share of {engine.share:g} of the memory is more than {room:g}")
                victim = await self._least_recently_used(awake)
                try:
                    await self._put_to_sleep(victim)
                except (BadRequestError, MemoryBudgetError):
                    # Its kind of engine cannot, or the host cannot keep its weights: it ends, until it is wanted again.
                    await self._put_to_sleep(victim, level=2)
            await engine.wake_up()

    def _awake_beside(self, engine: ResidentEngine) -> list[ResidentEngine]:
        return [
            other
            for other in self.members
            if other is not engine and other.is_awake and other.config.device == engine.config.device
        ]

    def _room(self, engine: ResidentEngine) -> float:
        return 1.0 - sum(other.share for other in self._awake_beside(engine))

    async def _least_recently_used(self, awake: list[ResidentEngine]) -> ResidentEngine:
        """The engine to put to sleep: one that is idle, where there is one within a few seconds."""
        until_s = time.monotonic() + _PATIENCE_S
        while not (idle := [other for other in awake if not other.is_wanted or not other.is_awake]):
            self._change.clear()
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._change.wait()
            except TimeoutError:
                break
        return min(idle or awake, key=lambda other: other.last_used_s)

    async def _put_to_sleep(self, engine: ResidentEngine, level: int = 1, *, keep_kv: bool = False) -> None:
        """Put an engine to sleep once its requests have ended; new ones wait, and wake it again later."""
        engine.is_leaving = True
        try:
            await engine.until_idle()
            if engine.is_awake:  # else it died meanwhile, which frees its memory as well
                await engine.fall_asleep(level, keep_kv=keep_kv)
        finally:
            engine.is_leaving = False

    async def sleep(self, engine: ResidentEngine, level: int, *, keep_kv: bool, within_s: float) -> None:
        """Put an engine to sleep because an operator asks for it."""
        engine.raise_if_dead()
        async with self._alone_within(within_s):
            if engine.sleep_level == 1 and level == 2:
                await engine.fall_asleep(2)
            elif engine.is_awake:
                await self._put_to_sleep(engine, level, keep_kv=keep_kv)

    async def unload(self, engine: ResidentEngine, *, within_s: float) -> None:
        """Let its requests end, and then its process."""
        engine.is_leaving = True
        try:
            async with self._alone_within(within_s):
                await engine.until_idle()
                await engine.close(_CLOSE_S)
        finally:
            engine.is_leaving = False

    @asynccontextmanager
    async def _alone_within(self, seconds: float) -> AsyncIterator[None]:
        """For an operator: while no other engine falls asleep or wakes, with a limit on the time it takes."""
        try:
            async with asyncio.timeout(seconds), self._lock:
                yield
        except TimeoutError:
            raise ApiError(409, f"its requests did not end within {seconds:g} s", code="busy") from None

    def free_share(self) -> float:
        """The share of the memory that no model has been given."""
        return 1.0 - sum(member.share for member in self.members)


def divide(weights: Sequence[int], given: Sequence[float | None]) -> list[float]:
    """Shares of the memory for models with so many bytes of weights: those given, and the rest by demand, which is a
    model's weights and a tenth of the largest one's."""
    missing = [i for i, share in enumerate(given) if share is None]
    left = 1.0 - sum(share for share in given if share is not None)
    if missing and left <= _ROUNDING:
        raise BadRequestError("the shares of memory that are given leave none to the other models: give all of them")
    demands = {i: weights[i] + max(weights) / 10 + 1 for i in missing}
    return [share if share is not None else left * demands[i] / sum(demands.values()) for i, share in enumerate(given)]
