"""AsyncLLM: streams inside a program. The engine runs in a thread of its own; asyncio never waits for a step."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.stats import Metric
from quire.errors import EngineDeadError, QuireError
from quire.inputs import Prompt
from quire.llm import log_start
from quire.log import get_logger
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.refusals import CALL, has_refused_methods, sift
from quire.text import HFTokenizerFacade

T = TypeVar("T")


class _Stream:
    """What one reader has not read yet. Lives in the reader's event loop.

    A slow reader of cumulative outputs finds only the newest; deltas are kept, each is needed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, keep_all: bool) -> None:
        self.loop = loop
        self._keep_all = keep_all
        self._items: deque[RequestOutput | BaseException] = deque()
        self._filled = asyncio.Event()

    def put(self, item: RequestOutput | BaseException) -> None:
        if not self._keep_all and self._items and isinstance(item, RequestOutput):
            self._items.clear()
        self._items.append(item)
        self._filled.set()

    async def get(self) -> RequestOutput:
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item


@has_refused_methods
class AsyncLLM:
    """An engine that many coroutines share.

        engine = AsyncLLM("smollm2")
        async for output in engine.generate("Hello,", SamplingParams(max_tokens=32), "request-1"):
            print(output.outputs[0].text)

    Leaving the loop early, or cancelling the task, aborts the request: its blocks are free within a step.
    """

    def __init__(self, model: str = "smollm2", **kwargs: Any) -> None:
        self._start(EngineConfig.from_kwargs(model=model, **kwargs))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig | dict[str, Any]) -> AsyncLLM:
        config = engine_args if isinstance(engine_args, EngineConfig) else EngineConfig.from_kwargs(**engine_args)
        self = cls.__new__(cls)
        self._start(config)
        return self

    def _start(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        self.engine = LLMEngine.from_config(config, show_progress=True)
        self.engine.built.tokens.smooth_for_readers(config)
        log_start(self.engine, time.perf_counter() - started)
        self._streams: dict[str, _Stream] = {}  # the engine thread's alone
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._stopped = False  # no command is taken any more
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="quire-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs; what each holds is `sampling_params.output_kind`. `others` are arguments of
        vLLM's, refused with their reason."""
        sift(others, CALL)
        self.check_health()
        loop = asyncio.get_running_loop()
        params = sampling_params or self.engine.built.default_sampling
        request_id = request_id or f"async-{time.monotonic_ns()}-{id(prompt):x}"
        request, text = self.engine.prepare(request_id, prompt, params, priority=priority)
        stream = _Stream(loop, keep_all=params.output_kind is OutputKind.DELTA)

        def add() -> None:
            try:
                self.engine.add_prepared(request, text)
            except QuireError as error:
                loop.call_soon_threadsafe(stream.put, error)
            else:
                self._streams[request_id] = stream

        def abort() -> None:
            # Only this stream's own request: an id refused as a duplicate belongs to somebody else.
            if self._streams.get(request_id) is stream:
                self.engine.abort_request(request_id)
                del self._streams[request_id]
                request.sequences = []

        self._command(add)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if finished:
                request.sequences = []  # which point back: only the garbage collector would free the request
            else:
                with contextlib.suppress(EngineDeadError):  # then the request is gone anyway
                    self._command(abort)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output with finish_reason 'abort'."""

        def run() -> None:
            self._send(self.engine.abort_request(request_id))

        await self._call(run)

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        return await self._call(lambda: self.engine.reset_prefix_cache(force=force))

    async def get_metrics(self) -> list[Metric]:
        return await self._call(self.engine.get_metrics)

    async def get_tokenizer(self) -> HFTokenizerFacade:
        """The engine's tokenizer under the names that Hugging Face's have."""
        return self.engine.get_tokenizer()

    def check_health(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine stopped: {self._death}") from self._death
        if self._closing:
            raise EngineDeadError("the engine was shut down")

    def shutdown(self) -> None:
        """Stop the engine's thread; requests still running get an error. Safe to call twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- across the thread border

    def _command(self, run: Callable[[], None]) -> None:
        with self._wake:
            if self._stopped:
                raise EngineDeadError("the engine has stopped")
            self._commands.append(run)
            self._wake.notify()

    async def _call(self, run: Callable[[], T]) -> T:
        """Run something on the engine's thread, between two steps."""
        self.check_health()
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)

        self._command(command)
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_unfinished_requests():
                    self._send(self.engine.step())
        except BaseException as death:
            get_logger().error("the engine died: %s", death)
            self._death = death
            self._fail_all(death if isinstance(death, QuireError) else EngineDeadError(str(death)))
        else:
            self._fail_all(EngineDeadError("the engine was shut down"))
        finally:
            self.engine.close()

    def _take_commands(self) -> bool:
        """Run what was asked for; sleep while there is nothing to do. False when it is time to stop."""
        with self._wake:
            while not self._commands and not self._closing and not self.engine.has_unfinished_requests():
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            closing = self._closing
        for run in commands:
            run()
        return not closing

    def _send(self, outputs: list[RequestOutput]) -> None:
        """Hand outputs to their readers: one call per event loop and step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the reader's loop is closed: nobody will read, so nothing should run
                for stream, output in items:
                    if self._streams.get(output.request_id) is stream:
                        del self._streams[output.request_id]
                        self.engine.abort_request(output.request_id)

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            self._stopped = True
            commands = list(self._commands)
            self._commands.clear()
        for run in commands:  # whoever asked last still gets an answer
            with contextlib.suppress(QuireError):
                run()
        for stream in self._streams.values():
            try:
                stream.loop.call_soon_threadsafe(stream.put, error)
            except RuntimeError:
                continue  # that reader's loop is gone
        self._streams.clear()


def _put_all(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.put(output)
