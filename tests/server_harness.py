"""A real HTTP server on a free port, over an engine whose tokens a test writes. Tokenizer, checks and the making of
text are the real ones; only the model is missing."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
from event_loop_watch import watched
from observing_fakes import ToldEngine

from quire.config import EngineConfig
from quire.engine.api import EngineLoad, PreparedRequest, ServingEngine
from quire.engine.client import EngineClient
from quire.engine.outputs import Job
from quire.engine.text_side import TextSide, open_model
from quire.errors import EngineDeadError
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.plan import TokenLogprobs
from quire.request import FinishReason
from quire.request import Sequence as Line
from quire.router.replicas import ReplicaSet
from quire.scheduler import SequenceUpdate
from quire.server.app import create_app
from quire.server.batches import Batches
from quire.server.context import ServedModel, ServerContext
from quire.server.http_server import HttpServer
from quire.server.life import ServerLife
from quire.server.listen import open_socket
from quire.server.logs import RequestLog
from quire.server.settings import ServerSettings
from quire.server.tracing import Tracer

MODEL = "tiny"
TEXT = "Grüße, 世界! One token is one byte here. "  # so that characters come in parts
_ALPHABET_END = 256


class ScriptedEngine(ToldEngine):
    """A ServingEngine that answers every prompt with the same endless text, from a place that depends on the choice."""

    def __init__(self, model_path: Path, *, max_model_len: int = 256) -> None:
        super().__init__()
        config = EngineConfig(model=str(model_path), load_format="dummy", max_model_len=max_model_len)
        self._text = TextSide(config, open_model(config))
        self._inputs = self._text.make_inputs(max_model_len)
        self._outputs = self._text.make_outputs()
        self.tokenizer = self._text.tokenizer
        assert self.tokenizer is not None
        self.script = self.tokenizer.encode(TEXT, add_special_tokens=False)
        self.dialect = self._text.dialect
        self.info = fakes.engine_info(model=MODEL, max_model_len=max_model_len, max_num_seqs=64)
        self.step_s = 0.0
        self.dies_after: int | None = None  # tokens
        self.fails_after: int | None = None
        self.hangs_after: int | None = None
        self.running: set[str] = set()
        self.left: list[str] = []  # requests whose reader went before the end
        self.prepared: list[PreparedRequest] = []

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=len(self.running))

    def prepare(self, request_id: str, prompt: Any, params: SamplingParams, **others: Any) -> PreparedRequest:
        prepared = self._inputs.make_request(request_id, prompt, params, arrival_s=time.monotonic(), **others)
        self.prepared.append(prepared)
        return prepared

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> dict[str, Any]:
        return self._text.render_chat(messages, **kwargs)

    async def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        request = prepared.request
        lines = [Line(request, index, []) for index in range(request.n)]
        self._outputs.add(Job(prepared))
        self.running.add(request.request_id)
        finished = False
        try:
            for step in range(request.max_tokens):
                await asyncio.sleep(self.step_s)
                while self.hangs_after == step:
                    await asyncio.sleep(0.005)
                if self.dies_after == step:
                    raise EngineDeadError("killed at /some/path")
                updates = [self._update(line, step) for line in lines if line.finish_reason is None]
                outputs, stopped = self._outputs.process(updates)
                for line, stop in stopped:
                    line.finish_reason, line.stop_reason = FinishReason.STOP, stop
                for output in outputs:
                    finished = output.finished
                    yield output
                if finished:
                    return
        finally:
            self.running.discard(request.request_id)
            self._outputs.discard(request.request_id)
            if not finished:
                self.left.append(request.request_id)

    def _update(self, line: Line, step: int) -> SequenceUpdate:
        request = line.request
        token = self.script[(step + 3 * line.index) % len(self.script)]
        line.num_cached_tokens = request.num_prompt_tokens // 16 * 16
        update = SequenceUpdate(line, [token])
        if request.spec.logprobs is not None:
            update.logprobs = [_logprobs(token, request.spec.logprobs)]
        if request.spec.prompt_logprobs is not None and step == 0 and line.index == 0:
            update.prompt_logprobs = [
                _logprobs(one, request.spec.prompt_logprobs) for one in request.prompt_token_ids[1:]
            ]
        if self.fails_after == step:
            update.finished, update.error, line.finish_reason = True, "secret", FinishReason.ERROR
        elif token in request.end_token_ids - request.eos_token_ids:
            update.finished, line.finish_reason, line.stop_reason = True, FinishReason.STOP, token
        elif step + 1 == request.max_tokens:
            update.finished, line.finish_reason = True, FinishReason.LENGTH
        return update

    async def call(self, name: str, **arguments: Any) -> Any:
        assert name in ("expire_unused", "expire_prefix", "unpin_prefix", "pin_cached"), f"nobody calls {name} here"
        return 0


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """The token itself is the second likeliest."""
    top = [(token + 1) % _ALPHABET_END, token, *((token + 2 + i) % _ALPHABET_END for i in range(num_top))][:num_top]
    return TokenLogprobs(token, -1.5, 2, top, [-0.5, -1.5, *(-2.0 - i for i in range(num_top))][:num_top])


def make_context(
    engine: ServingEngine, others: Mapping[str, ServingEngine] | None = None, **settings: Any
) -> ServerContext:
    """others: more models by their names."""
    chosen = ServerSettings(**settings)
    life = ServerLife()
    life.ready()
    return ServerContext(
        models=[
            ServedModel.of(names, served, chosen, life)
            for names, served in [
                (chosen.served_model_names or (MODEL,), engine),
                *(((name,), other) for name, other in (others or {}).items()),
            ]
        ],
        settings=chosen,
        logs=RequestLog(),
        life=life,
        batches=Batches.of(chosen),
        tracer=Tracer(chosen.otlp_traces_endpoint) if chosen.otlp_traces_endpoint else None,
    )


@dataclass(slots=True, frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[dict[str, Any]]:
        """The chunks of a stream that ended well."""
        assert self.status == 200, self.text
        assert self.headers["content-type"].startswith("text/event-stream")
        *chunks, last, empty = self.text.split("\n\n")
        assert (last, empty) == ("data: [DONE]", ""), self.text
        return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


class Address:
    """What answers at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
            response = connection.getresponse()
            lines = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, lines, response.read().decode())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)

    def get(self, path: str) -> Reply:
        return self.request("GET", path)


class Server(Address):
    """A server that runs in a thread of its own."""

    def __init__(self, context: ServerContext, port: int, loop: asyncio.AbstractEventLoop, slow: list[str]) -> None:
        super().__init__(port)
        self.context = context
        self.engine: Any = context.first.engine
        self.loop = loop
        self.slow = slow  # what held the event loop up


def real_engine(model: Path, **changes: Any) -> EngineClient:
    """A model with random weights in an engine process of its own."""
    values = {"load_format": "dummy", "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20}
    return EngineClient(EngineConfig(model=str(model), **values | changes))


@contextmanager
def running(engine: ServingEngine, **settings: Any) -> Iterator[Server]:
    """The real application behind the real connections. Fails where a handler held the event loop up: see
    `event_loop_watch`."""
    listener = open_socket(ServerSettings(port=0))
    port = listener.getsockname()[1]
    started = threading.Event()
    made: list[Any] = []

    async def serve() -> None:
        if isinstance(engine, EngineClient | ReplicaSet):
            await engine.start()
            await engine.ready()
        context = make_context(engine, **settings)
        server = HttpServer(create_app(context), context.settings, None, context.refused)
        made.extend((context, asyncio.get_running_loop(), server))
        with watched() as slow:
            made.append(slow)
            started.set()
            await server.run_on(listener)
            if context.batches is not None:
                await context.batches.stop()
        if isinstance(engine, EngineClient | ReplicaSet):
            await engine.close(5.0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    context, loop, server, slow = made
    try:
        yield Server(context, port, loop, slow)
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
    assert not slow, f"other clients had to wait meanwhile: {'; '.join(slow)}"
