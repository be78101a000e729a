"""`serve`: a server's life from an open socket to its exit code.

    0    drained after SIGTERM, SIGINT, or SIGHUP from a terminal that goes away
    1    the engine died, or could not start
    130  SIGINT came twice

The socket opens first, so that `/health` can say "starting" while the engine loads the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.engine.api import EngineInfo, EngineState, ServingEngine, replicas_of
from quire.engine.brownout import BrownoutSettings
from quire.engine.client import EngineClient
from quire.engine.launch import EngineProcessOptions, settle_for_serving
from quire.errors import ConfigError, EngineDeadError
from quire.log import get_logger
from quire.server.admin import load_at_start
from quire.server.app import create_app
from quire.server.batches import Batches
from quire.server.context import ServedModel, ServerContext
from quire.server.http_server import HttpServer
from quire.server.life import LifeState, ServerLife, not_serving, stopped
from quire.server.listen import address_of, make_ssl_context, open_socket, socket_file
from quire.server.logs import ENGINE_READY, set_up_logs, watch_engines
from quire.server.residents import ResidentEngine, Residents
from quire.server.settings import ModelSettings, ServerSettings
from quire.server.tracing import Tracer

_DEATH_S = 3.0  # in which open requests are told that the engine died
_DEATH_SHOWN_S = 0.5  # /health says so at least this long
_CUT_S = 2.0  # in which requests that were cut off are told so
_CLOSE_S = 5.0  # for the engine's process to end by itself
_WATCH_S = 1.0
_MAX_FILES = 65_536
_MIN_FILES = 64  # about thirty before the first connection


class StartableEngine(ServingEngine, Protocol):
    """A ServingEngine whose process is ours to start and to end."""

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    def on_death(self, callback: Callable[[str], None]) -> None: ...

    async def close(self, grace_s: float) -> None: ...


MakeEngine = Callable[[EngineConfig, ServerSettings], StartableEngine]


def serve(models: Sequence[ModelSettings], settings: ServerSettings, *, make_engine: MakeEngine | None = None) -> int:
    """Serve until told to stop, and return the exit code. Raises a QuireError where it cannot start."""
    models = settle_models(models)
    _raise_file_limit()
    ssl_context = make_ssl_context(settings)
    listener = open_socket(settings)
    own_file = socket_file(settings)
    logs = set_up_logs(settings.log_format, settings.log_level)
    # Its lines about itself say nothing that ours do not.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    tracer = Tracer(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:

            async def run() -> int:
                life = ServerLife()
                residents = Residents(restarts=len(models) > 1, wait_s=settings.wake_timeout_s)
                context = ServerContext(
                    models=[],
                    settings=settings,
                    logs=logs,
                    life=life,
                    batches=Batches.of(settings),
                    tracer=tracer,
                    residents=residents,
                )
                make = make_engine or partial(resident_engine, residents=residents)
                engines = [make(model.config, settings) for model in models]
                for model, engine in zip(models, engines, strict=True):
                    names = model.names or settings.served_model_names or (model.config.model,)
                    context.add(ServedModel.of(names, engine, settings, life))
                loaded = [loaded_model(m.config.model, m.names or settings.served_model_names) for m in models]
                return await _Run(context, engines, loaded, listener, ssl_context).run()

            return runner.run(run())
    finally:
        if tracer is not None:
            tracer.close()
        for handler in get_logger().handlers:
            handler.flush()  # so that an error which is told next stands last
        listener.close()
        if own_file is not None:
            own_file.remove()


class _Run:
    """One server: HTTP, the engine, and the signals that end them."""

    def __init__(
        self,
        context: ServerContext,
        engines: Sequence[StartableEngine],
        loaded: Sequence[str],
        listener: socket.socket,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        """engines and loaded: of the context's models, in their order."""
        loop = asyncio.get_running_loop()
        self._context = context
        self._engines = engines
        self._loaded = loaded
        self._life = context.life
        self._settings = context.settings
        self._address = address_of(listener, context.settings)
        self._listener = listener
        self._http = HttpServer(create_app(context), context.settings, ssl_context, context.refused)
        self._log = get_logger()
        self._num_interrupts = 0
        self._drain_wanted: asyncio.Future[None] = loop.create_future()
        self._stop_wanted: asyncio.Future[None] = loop.create_future()
        self._death: asyncio.Future[str] = loop.create_future()

    async def run(self) -> int:
        self._take_signals()
        for engine in self._engines:
            engine.on_death(self._on_death)
        http = asyncio.create_task(self._http.run_on(self._listener))
        watch = asyncio.create_task(watch_engines(self._context.engines, self._context.logs, interval_s=_WATCH_S))
        grace_s = 0.0
        try:
            await self._start()
            code = await self._serve()
            grace_s = _CLOSE_S if code == 0 else 0.0
            return code
        finally:
            # Connections that are still open (a page's live feed, a client that does not read) are closed at once.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
            watch.cancel()
            self._http.stop()
            loaded_later = self._context.residents.members if self._context.residents is not None else ()
            engines = dict.fromkeys([*self._engines, *loaded_later])
            await asyncio.gather(http, *(engine.close(grace_s) for engine in engines))
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            self._log.info("stopped")

    async def _start(self) -> None:
        """Wait until all engines are ready, or a signal asks to stop. Raises the error of one that could not start."""
        self._log.info("listening at %s, loading %s", self._address, ", ".join(self._loaded))
        start = asyncio.create_task(self._start_engines())
        try:
            await _first_of(start, self._drain_wanted, self._death)
            if self._death.done():  # ready() knows better why, and says so in a moment
                await asyncio.wait({start}, timeout=_DEATH_S)
                if not start.done():
                    raise EngineDeadError(self._death.result())
            if start.done():
                start.result()
                settle_for_serving()
                self._life.ready()
                if self._context.batches is not None:
                    self._context.batches.begin(self._context)
                for served, name in zip(self._context.models, self._loaded, strict=True):
                    line = ready_line(self._address, name, served.engine.info)
                    if (num_replicas := len(replicas_of(served.engine))) > 1:
                        line += f"; {num_replicas} replicas, each of this size"
                    self._context.logs.event(ENGINE_READY, message=line)
                self._warn_if_open()
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    async def _start_engines(self) -> None:
        """Start the engines one after the other: each counts the memory that those before it have left."""
        if self._context.residents is not None:
            await self._context.residents.divide_memory()
        for engine in self._engines:
            await engine.start()
            await engine.ready()
        await load_at_start(self._context)

    async def _serve(self) -> int:
        await _first_of(self._drain_wanted, self._death)
        if self._death.done():
            return await self._die(self._death.result())
        return await self._drain()

    async def _drain(self) -> int:
        """No new requests; those under way may finish. Batches go on with the next start."""
        self._life.begin_drain()
        if self._context.batches is not None:
            await self._context.batches.stop()
        timeout_s = self._settings.drain_timeout_s
        if self._life.num_in_flight:
            self._log.info("draining: %d requests under way, at most %g s", self._life.num_in_flight, timeout_s)
        idle = asyncio.create_task(self._life.idle(timeout_s))
        await _first_of(idle, self._stop_wanted, self._death)
        if self._stop_wanted.done():
            idle.cancel()
            self._life.cut(stopped())
            await asyncio.sleep(0)  # so that those that can be told are
            return 130
        if self._death.done():
            idle.cancel()
            return await self._die(self._death.result())
        if not idle.result():
            num_cut = self._life.cut(stopped())
            self._log.warning("drain timeout of %g s is over: %d requests are cut off", timeout_s, num_cut)
            await self._life.idle(_CUT_S)
        return 0

    async def _die(self, reason: str) -> int:
        """Answer every client that waits, and exit so that a supervisor can start a new server."""
        self._life.died(reason)
        shown = asyncio.create_task(asyncio.sleep(_DEATH_SHOWN_S))
        if not await self._life.idle(_DEATH_S):
            self._life.cut(not_serving(LifeState.DEAD))
            await self._life.idle(1.0)
        await shown
        return 1

    def _on_death(self, reason: str) -> None:
        """A server with several models goes on while any of them may."""
        if any(engine.health().state is not EngineState.DEAD for engine in self._context.engines().values()):
            return
        if not self._death.done():
            self._life.died(reason)  # from this moment, not when our turn comes
            self._log.error("%d open requests get an error, then the server exits", self._life.num_in_flight)
            self._death.set_result(reason)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._want_drain)
        loop.add_signal_handler(signal.SIGINT, self._on_sigint)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, to outlive its terminal
            loop.add_signal_handler(signal.SIGHUP, self._want_drain)

    def _on_sigint(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._log.info("interrupted: running requests may finish; Ctrl+C again stops at once")
            self._want_drain()
        elif not self._stop_wanted.done():
            self._log.info("interrupted again: stopping at once")
            self._stop_wanted.set_result(None)

    def _want_drain(self) -> None:
        if not self._drain_wanted.done():
            self._drain_wanted.set_result(None)

    def _warn_if_open(self) -> None:
        if not self._settings.is_local and not self._settings.api_keys:
            self._log.warning(
                "anyone who reaches %s may use this server: --api-key or --api-key-file guard it", self._settings.host
            )


async def _first_of(*waited: asyncio.Future[Any]) -> None:
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)


def loaded_model(model: str, served_names: Sequence[str]) -> str:
    """The model that was loaded, with the names that clients use if they are others."""
    return model if tuple(served_names) in ((), (model,)) else f"{model} as {', '.join(served_names)}"


def ready_line(address: str, loaded: str, info: EngineInfo) -> str:
    """The line that people look for: the server's address, the model, and where the memory went."""
    kind = f"{info.architecture}, {info.dtype} on {info.device}"
    parts = [f"ready at {address} in {info.ready_s:.1f} s: {loaded} ({kind})", info.ledger_summary, info.blocks_line]
    return "; ".join(" ".join(part.split()) for part in parts if part)


def _raise_file_limit() -> None:
    """A connection is an open file, and many systems allow a process 1,024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # what there is must do, then
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        raise ConfigError(
            f"a process may open {soft} files here, and a server needs {_MIN_FILES} and one for each connection: "
            "raise the limit with ulimit -n 4096, or LimitNOFILE=4096 in a systemd unit"
        )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def settle_models(models: Sequence[ModelSettings]) -> list[ModelSettings]:
    """Settle what the models leave open. Raises a ConfigError for what does not go together."""
    names = [name for model in models for name in model.names or (model.config.model,)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two models are named {twice[0]!r}: give each a name of its own with --served-model-name")
    return [replace(model, config=settle_config(model.config, is_alone=len(models) == 1)) for model in models]


def settle_config(config: EngineConfig, *, is_alone: bool) -> EngineConfig:
    """is_alone: no other model is served beside it."""
    if "scheduling_policy" not in config.given:
        config = config.replace(scheduling_policy="priority")  # requests may bring one; equal ones keep their order
    if is_alone:
        return config
    if config.data_parallel_size > 1:
        raise ConfigError("data_parallel_size (-dp) is for a server with one model: leave it out, or use quire router")
    if config.num_ranks > 1:
        raise ConfigError(
            f"{config.model} is split among {config.num_ranks} processes, which cannot sleep: serve it alone, or leave "
            "out tensor_parallel_size and pipeline_parallel_size"
        )
    return config.replace(enable_sleep_mode=True)


def resident_engine(config: EngineConfig, settings: ServerSettings, residents: Residents) -> StartableEngine:
    """An engine that may sleep; replicas do not."""
    if config.data_parallel_size > 1:
        return process_engine(config, settings)
    return ResidentEngine(config, process_options(settings), residents)


def process_engine(config: EngineConfig, settings: ServerSettings) -> StartableEngine:
    options = process_options(settings)
    if config.data_parallel_size == 1:
        return EngineClient(config, options)
    from quire.router.replicas import ReplicaSet

    return ReplicaSet(config, config.data_parallel_size, options)


def process_options(settings: ServerSettings) -> EngineProcessOptions:
    return EngineProcessOptions(
        step_timeout_s=settings.step_timeout_s,
        dump_dir=settings.dump_dir,
        brownout=BrownoutSettings(enabled=settings.brownout),
        isolated_tenants=settings.isolated_tenants,
    )
