"""AsyncLLM: streams inside a program. The engine runs in a thread of its own; asyncio never waits for a step."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from quire.beams import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.brownout import Brownout, BrownoutSettings
from quire.engine.llm_engine import LLMEngine, check_level, check_tags
from quire.engine.loop import EngineLoop
from quire.engine.messages import Command, EngineMessage, LoadReport, Stop
from quire.engine.metrics import request_metrics
from quire.engine.pooled import as_tensor, pooled_fields, pooled_of
from quire.engine.stats import Metric
from quire.engine.streams import Streams
from quire.errors import EngineDeadError
from quire.inputs import Prompt
from quire.llm import log_start
from quire.log import get_logger
from quire.lora.request import LoRARequest
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.params import SamplingParams
from quire.pooling import PoolingParams, PoolingTask
from quire.refusals import CALL, has_refused_methods, sift
from quire.text import HFTokenizerFacade


@has_refused_methods
class AsyncLLM:
    """An engine that many coroutines share.

        engine = AsyncLLM("smollm2")
        async for output in engine.generate("Hello,", SamplingParams(max_tokens=32), "request-1"):
            print(output.outputs[0].text)

    Leaving the loop early, or cancelling the task, aborts the request: its blocks are free within a step.
    """

    def __init__(self, model: str = "smollm2", **kwargs: Any) -> None:
        self._start(EngineConfig(model=model, **kwargs))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig | dict[str, Any]) -> AsyncLLM:
        config = engine_args if isinstance(engine_args, EngineConfig) else EngineConfig(**engine_args)
        self = cls.__new__(cls)
        self._start(config)
        return self

    def _start(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        self.engine = LLMEngine.from_config(config, show_progress=True)
        self.engine.built.tokens.smooth_for_readers(config)
        log_start(self.engine, time.perf_counter() - started)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[asyncio.AbstractEventLoop, Streams] = {}
        self._keys = itertools.count(1)
        self._closing = False
        self._death: BaseException | None = None
        no_brownout = Brownout(BrownoutSettings(enabled=False))  # whoever embeds an engine decides for themselves
        self._loop = EngineLoop(self.engine.core, self._receive, self._send, no_brownout)
        self._thread = threading.Thread(target=self._serve, name="quire-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request's outputs; what each holds is `sampling_params.output_kind`. `others` are arguments of
        vLLM's, refused with their reason."""
        sift(others, CALL)
        params = sampling_params or self.engine.built.default_sampling
        streams = self._streams_here()
        request_id = request_id or f"async-{time.monotonic_ns()}-{id(prompt):x}"
        if lora_request is not None:
            await asyncio.to_thread(self.engine.find_adapter, lora_request)  # it may have to be read
        prepared = self.engine.prepare(request_id, prompt, params, priority=priority, lora_request=lora_request)
        async with aclosing(streams.read(prepared)) as outputs:
            async for output in outputs:
                output.lora_request = lora_request
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool a prompt, as `LLM.encode`: one output, at its end. The parameters' task is embed unless they say."""
        params = pooling_params or PoolingParams()
        async with aclosing(self.generate(prompt, params, request_id, priority=priority, **others)) as outputs:
            async for output in outputs:
                tensor = as_tensor(pooled_of(output), PoolingTask(params.task or PoolingTask.EMBED))
                yield PoolingRequestOutput(outputs=PoolingOutput(tensor), **pooled_fields(output))

    async def beam_search(
        self, prompt: Prompt, request_id: str, params: BeamSearchParams, *, priority: int = 0, **others: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The one output of a beam search, at its end: the continuations, the best first."""
        async with aclosing(self.generate(prompt, params, request_id, priority=priority, **others)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output with finish_reason 'abort'."""
        self.check_health()
        for streams in list(self._streams.values()):
            streams.abort(request_id)

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        done: bool = await self._streams_here().call("reset_prefix_cache", force=force)
        return done

    async def sleep(self, level: int = 1, *, keep_kv: bool = False) -> None:
        """Sleep as `LLM.sleep` does. It is refused while requests are under way."""
        check_level(level)
        await self._streams_here().call("sleep", keep_kv=keep_kv)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        check_tags(tags)
        await self._streams_here().call("wake_up")

    async def is_sleeping(self) -> bool:
        return self.engine.is_sleeping()

    async def get_metrics(self) -> list[Metric]:
        found: list[Metric] = await self._streams_here().call("metrics")
        return found + request_metrics(self.engine.request_stats)

    async def get_tokenizer(self) -> HFTokenizerFacade:
        """The engine's tokenizer under the names that Hugging Face's have."""
        return self.engine.get_tokenizer()

    def check_health(self) -> None:
        if self._closing:
            raise EngineDeadError("the engine was shut down")
        if self._death is not None:
            raise EngineDeadError(f"the engine stopped: {self._death}") from self._death

    def shutdown(self) -> None:
        """Stop the engine's thread; requests still running get an error. Safe to call twice."""
        self._closing = True
        self._commands.put(Stop())
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _streams_here(self) -> Streams:
        """The streams of the event loop that runs here. Each loop has its own: a program may have several in turn."""
        loop = asyncio.get_running_loop()
        if loop not in self._streams:
            for old in [other for other in self._streams if other.is_closed()]:
                self._drop(old)
            self._streams[loop] = Streams(
                self.engine.built.text.make_outputs(),
                self._commands.put,
                self.check_health,
                stats=self.engine.request_stats,
                keys=self._keys,
            )
        self.check_health()  # only now: either the engine's thread finds this loop when it ends, or this finds the end
        return self._streams[loop]

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abort the requests of a loop that is closed: nobody will read them."""
        if (streams := self._streams.pop(loop, None)) is not None:
            streams.abort_all()

    # -- in the engine's thread

    def _serve(self) -> None:
        try:
            self._loop.run()
            error = EngineDeadError("the engine was shut down")
        except BaseException as death:
            get_logger().error("the engine died: %s", death)
            error = death if isinstance(death, EngineDeadError) else EngineDeadError(str(death))
        self._death = error
        for loop, streams in list(self._streams.items()):
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(streams.fail_all, error)
        self.engine.close()

    def _receive(self, wait_s: float | None) -> Command | None:
        try:
            return self._commands.get(wait_s != 0.0, wait_s)
        except queue.Empty:
            return None

    def _send(self, message: EngineMessage) -> None:
        if isinstance(message, LoadReport):
            return  # nobody balances load in here
        for loop, streams in list(self._streams.items()):
            if len(streams):
                try:
                    loop.call_soon_threadsafe(streams.on_message, message)
                except RuntimeError:
                    self._drop(loop)
