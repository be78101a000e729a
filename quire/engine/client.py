"""EngineClient: an engine in another process, as a server uses it. Text is made here, tokens there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import msgspec

from quire.child import describe_exit
from quire.config import EngineConfig
from quire.engine.api import EngineHealth, EngineInfo, EngineLoad, EngineState, PreparedRequest
from quire.engine.launch import EngineProcess, EngineProcessOptions
from quire.engine.link import EngineLink, encode_launch
from quire.engine.messages import CacheReport, EngineMessage, Failed, Heartbeat, Launch, LoadReport, Ready, Stop
from quire.engine.metrics import request_metrics
from quire.engine.stats import Metric
from quire.engine.streams import Stream, Streams
from quire.engine.text_front import SharedText, TextFront
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.log import get_logger
from quire.outputs import RequestOutput
from quire.request import cache_scope

_TICK_S = 1.0
_LAST_WORDS_S = 2.0  # what has failed may hang while it cleans up
_SHUT_DOWN = "the engine was shut down"


class EngineClient(TextFront):
    """Implements `quire.engine.api.ServingEngine`. Belongs to one event loop."""

    info: EngineInfo  # once it is ready, as are its streams
    streams: Streams  # of its requests

    def __init__(
        self,
        config: EngineConfig,
        options: EngineProcessOptions | None = None,
        *,
        text: SharedText | None = None,
        on_report: Callable[[LoadReport | CacheReport], None] | None = None,
        on_lost: Callable[[list[tuple[Stream, list[int]]]], None] | None = None,
    ) -> None:
        """text: what several engines of one model share. on_lost: gets the requests that were running when the engine
        died, for another one to go on with; without it they end with an error."""
        super().__init__(config, options, text)
        self._on_report = on_report
        self._on_lost = on_lost
        self._state = EngineState.STARTING
        self._stuck_reason = ""
        self._death_reason = ""
        self._on_death: list[Callable[[str], None]] = []
        self._child: EngineProcess | None = None
        self._failure: QuireError | None = None  # what the engine said before it ended
        self._is_closing = False
        self._load = EngineLoad()
        self._heartbeat_s = 0.0
        self._tick: asyncio.TimerHandle | None = None

    # -- life

    async def start(self) -> None:
        """Start the engine's process; returns at once."""
        assert self._child is None, "an EngineClient starts once"
        self._loop = loop = asyncio.get_running_loop()
        self._started_s = time.perf_counter()
        self._info: asyncio.Future[EngineInfo] = loop.create_future()
        self._exited = asyncio.Event()
        self._link = EngineLink(loop, self._on_message, self._on_bug)
        launch = Launch(
            config=self.config,
            link=self._link.engines_end.fileno(),
            parent_pid=os.getpid(),
            dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
            log_level=get_logger().getEffectiveLevel(),
            options=self.options,
        )
        try:
            self._child = EngineProcess(self.options, encode_launch(launch), self._on_exit, (launch.link,))
        except OSError as error:
            self._link.close()
            self._state, self._death_reason = EngineState.DEAD, f"the engine's process could not be started: {error}"
            raise EngineDeadError(self._death_reason) from error
        self._link.engines_end.close()  # or its end here would outlive the engine
        self._readying = asyncio.create_task(self._become_ready())
        # A caller of ready() gets the error; there need not be one.
        self._readying.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ready(self) -> None:
        """Wait until it can serve. Raises the QuireError that the same config would raise offline."""
        await asyncio.shield(self._readying)

    async def _become_ready(self) -> None:
        try:
            # Here and in the child at once; faults of a model are found here first, as they would be offline.
            text = await self._text.open()
            if text.tokenizer is not None:
                text.grammars.prepare()
            info = await self._info
            inputs = self._take_limits(info)
            self.streams = Streams(self._text.outputs, self._link.send, self.raise_if_dead)
            for token_ids in inputs.encode_pinned(self.config.pinned_prefixes, info.block_size):
                await self._pin(token_ids, info.block_size)
            if self._state is EngineState.DEAD or self._is_closing:  # meanwhile
                raise EngineDeadError(self._death_reason or _SHUT_DOWN)
        except Exception as error:
            self._state, self._death_reason = EngineState.DEAD, str(error)
            self.kill()
            raise
        self.info = replace(info, ready_s=time.perf_counter() - self._started_s)
        self._heartbeat_s = time.monotonic()
        self._state = EngineState.READY
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)

    async def _pin(self, token_ids: list[int], block_size: int) -> None:
        """Pin the configured prefixes, once for each tenant that would not find another's."""
        tenants = self.options.isolated_tenants or ("",)
        for tenant in tenants:
            if self._is_closing:
                raise EngineDeadError(_SHUT_DOWN)
            num_pinned = await self.streams.call("pin_prefix", token_ids=token_ids, salt=cache_scope(None, tenant))
            if num_pinned < len(token_ids) // block_size * block_size:
                each = f" for each of {len(tenants)} keys" if len(tenants) > 1 else ""
                raise ConfigError(
                    f"the KV cache has no room to pin a prefix of {len(token_ids)} tokens{each}: pin less, raise "
                    "kv_cache_memory_bytes" + (", or set share_prefixes_across_keys" if each else "")
                )

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Called once, with the reason, if an engine that was ready dies. A failed start is `ready()`'s to tell."""
        self._on_death.append(callback)

    async def close(self, grace_s: float = 10.0) -> None:
        """Ask the engine to stop; after `grace_s` make it. Requests still running get an error. Safe to call twice."""
        self._is_closing = True
        if self._child is None:
            return
        child, self._child = self._child, None
        if not self._exited.is_set():
            if self._state is EngineState.READY:
                self._link.send(Stop())
            else:
                child.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._exited.wait(), grace_s)
            except TimeoutError:
                child.signal(signal.SIGKILL)
                await self._exited.wait()
        shut_down = EngineDeadError(_SHUT_DOWN)
        if not self._info.done():
            self._info.set_exception(shut_down)
            self._info.exception()  # marks it as read: ready() raises it for its callers
        self._fail_all(shut_down)
        if self._state is not EngineState.DEAD:
            self._state, self._death_reason = EngineState.DEAD, str(shut_down)
        if self._tick is not None:
            self._tick.cancel()
        self._link.close()
        await asyncio.to_thread(child.release)

    # -- what there is

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return None if self._child is None else self._child.pid

    def kill(self) -> None:
        """End the process as it is; its end is told as that of one that died."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def health(self) -> EngineHealth:
        if self._state is EngineState.DEAD:
            return EngineHealth(EngineState.DEAD, self._death_reason)
        if self._state is EngineState.STARTING:
            return EngineHealth(EngineState.STARTING, "the model is being loaded")
        if self._stuck_reason:
            return EngineHealth(EngineState.STUCK, self._stuck_reason)
        return EngineHealth(EngineState.READY)

    def load(self) -> EngineLoad:
        return self._load

    # -- requests

    def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. Outputs that its reader was too slow for are joined into one."""
        return self.streams.read(prepared)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run one of `quire.engine.calls.CALLS` between two steps."""
        self.raise_if_dead()
        return await self.streams.call(name, **arguments)

    async def metrics(self) -> list[Metric]:
        """The engine's counters, and those of the requests that were read here."""
        found = msgspec.convert(await self.call("metrics"), list[Metric])
        return found + request_metrics(self.streams.stats)

    def raise_if_dead(self) -> None:
        if self._state is EngineState.DEAD or self._is_closing:
            raise EngineDeadError(self._death_reason or _SHUT_DOWN)
        if self._state is EngineState.STARTING:
            raise EngineDeadError("the engine is still starting")

    # -- what the engine says

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case Heartbeat():
                self._on_heartbeat(message)
            case LoadReport():
                self._load = message.load
                if self._on_report is not None:
                    self._on_report(message)
            case CacheReport():
                if self._on_report is not None:
                    self._on_report(message)
            case Ready():
                if not self._info.done():
                    self._info.set_result(message.info)
            case Failed():
                self._failure = message.error.to_error()
                if self._child is not None:
                    self._loop.call_later(_LAST_WORDS_S, self._child.signal, signal.SIGKILL)
            case _:
                self.streams.on_message(message)

    def _on_bug(self, error: Exception) -> None:
        """A message could not be taken: readers may have missed outputs from now on, so the engine is ended."""
        get_logger().error("a message of the engine could not be taken", exc_info=error)
        self._failure = EngineDeadError(f"a message of the engine could not be taken: {error!r}")
        self.kill()

    # -- is it well?

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        self._heartbeat_s = time.monotonic()
        for_s = 0.0 if beat.step_started_s is None else beat.now_s - beat.step_started_s
        if for_s <= self.options.step_timeout_s:
            self._set_stuck("")
            return
        where = f"; what it was doing is in {beat.dump_path}" if beat.dump_path else ""
        self._set_stuck(f"step {beat.num_steps + 1} has run for {for_s:.0f} s{where}")

    def _on_tick(self) -> None:
        self._link.read()  # what came while this loop was busy counts
        if self._state is not EngineState.READY:
            return
        silent_s = time.monotonic() - self._heartbeat_s
        if silent_s > self.options.step_timeout_s + self.options.heartbeat_s:
            if not self._stuck_reason and self._child is not None:
                self._child.signal(signal.SIGUSR1)  # its stacks, on stderr
            self._set_stuck(f"the engine process has given no sign of life for {silent_s:.0f} s")
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)

    def _set_stuck(self, reason: str) -> None:
        if bool(reason) != bool(self._stuck_reason):
            if reason:
                get_logger().error("the engine is stuck: %s", reason)
            else:
                get_logger().warning("the engine goes on")
        self._stuck_reason = reason

    # -- its end

    def _on_exit(self, status: int) -> None:
        """From the thread that waits for the process."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no reader is left
            self._loop.call_soon_threadsafe(self._end, status)

    def _end(self, status: int) -> None:
        self._link.read_all()  # its last words
        self._exited.set()
        if self._is_closing or self._state is EngineState.DEAD:
            return
        error = self._failure
        if error is None:
            tail = self._child.stderr_tail() if self._child is not None else ""
            error = EngineDeadError(describe_exit(status) + (f"; its last words:\n{tail}" if tail else ""))
        was_ready = self._state is EngineState.READY
        self._state, self._death_reason = EngineState.DEAD, str(error)
        if not self._info.done():
            self._info.set_exception(error)
            return
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        if self._on_lost is not None and hasattr(self, "streams"):
            self._on_lost(self.streams.release(abort=False))
        self._fail_all(dead)
        if was_ready:
            get_logger().error("the engine died: %s", error)
            for callback in self._on_death:
                callback(str(error))

    def _fail_all(self, error: QuireError) -> None:
        if hasattr(self, "streams"):
            self.streams.fail_all(error)
