"""A request's way through the server, the same for completions and chats:

    prepare  tokenized and checked (`text_work.py`), already under the deadline
    admit    refused with a 429 while too much waits
    run      one engine stream per prompt, under the deadline, until the end or until the client hangs up
    tell     metrics and one line in the log, however it ended

One prompt's stream is read by the connection's own task: while that sends, new tokens gather with the engine's client
and come as one output. Several prompts have a task each, which put their outputs into one mailbox.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import quire
from quire.engine.api import EngineInfo, PreparedRequest
from quire.errors import BadRequestError
from quire.outputs import RequestOutput
from quire.request import FinishReason
from quire.server.admission import Ticket
from quire.server.deadline import Deadline
from quire.server.endpoint import ClientGone, Exchange
from quire.server.errors import ApiError, to_api_error
from quire.server.pooled_bodies import PooledBody
from quire.server.protocol import GenerationBody
from quire.server.resuming import RESUMABLE_HEADER, RESUMABLE_PATHS, SEED_HEADER, continue_after, seed_of, why_not

if TYPE_CHECKING:
    from quire.server.context import ServedModel

T = TypeVar("T")

_CHOICE_PARTS = 10  # writing an answer without logprobs costs as much as writing so many logprobs
_TOLD_AT_ONCE = 256  # ends of prompts, in some 10 ms
_CLIENT_GONE = 499  # for the log alone: the client reads no status

_next_number = itertools.count(1)


def engine_ids(exchange: Exchange, kind: str, num_prompts: int) -> list[str]:
    """Ids that the engine has not seen: clients send the same x-request-id again, for a retry or a whole trace."""
    name = f"{kind}-{exchange.request_id}-{next(_next_number):x}"
    return [name] if num_prompts == 1 else [f"{name}-{i}" for i in range(num_prompts)]


def answer_head(exchange: Exchange, kind: str, model: str, info: EngineInfo) -> dict[str, Any]:
    """The fields that every answer, and every chunk of one, begins with."""
    return {
        "id": f"{kind}-{exchange.request_id}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(info),
    }


def fingerprint(info: EngineInfo) -> str:
    """Changes with whatever may change an answer to the same request."""
    return _fingerprint(info.model, info.architecture, info.device, info.dtype, info.kv_dtype, info.kernels)


@functools.cache  # a server has few models
def _fingerprint(*parts: str) -> str:
    return f"quire-{quire.__version__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


class Generation:
    """An admitted request while it runs. `async with` ends what is left of it.

    After `take` has given an output with `finished` for every prompt, nothing more comes.
    """

    def __init__(
        self,
        exchange: Exchange,
        body: GenerationBody | PooledBody,
        prepared: list[PreparedRequest],
        served: ServedModel,
        model: str,
        deadline: Deadline,
    ) -> None:
        self._exchange = exchange
        self._context = exchange.context
        self._engine, self._admission, self._metrics = served.engine, served.admission, served.metrics
        self._prepared = prepared
        self._model = model
        self._is_stream = bool(body.stream)
        self._deadline = deadline
        self._tickets: list[Ticket] = []
        self._last: list[RequestOutput | None] = [None] * len(prepared)
        self._tasks: list[asyncio.Task[None]] = []
        self._reader = asyncio.current_task()
        self._only: AsyncGenerator[RequestOutput, None] | None = None  # the stream, where there is one
        self._is_reading = False
        self._mailbox = Mailbox()  # where there are several
        self.headers: dict[str, str] = {}  # for the response
        self.tells_tokens = False
        if isinstance(body, GenerationBody):
            continue_after(body, prepared, served.engine.info)
            asked = exchange.header(RESUMABLE_HEADER) is not None and exchange.endpoint in RESUMABLE_PATHS
            if asked and why_not(body, prepared) is None:
                self.tells_tokens = True
                self.headers[SEED_HEADER] = seed_of(prepared[0])
        self.is_continued = self._comes_known = bool(prepared[0].request.continued)  # its client has the first output

    async def __aenter__(self) -> Generation:
        self._tickets = self._admission.admit(self._prepared, self._exchange.tenant)
        for ticket in self._tickets:
            self.headers |= ticket.headers
        self._exchange.is_admitted = True
        streams = [self._deadline.watch(self._engine.stream(prepared)) for prepared in self._prepared]
        if len(streams) == 1:
            self._only = streams[0]
        else:
            self._tasks = [asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(streams)]
        self._stop_watching = self._exchange.on_gone(self._on_gone)
        return self

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """Outputs that have come, each with its prompt's number; waits for the first. Raises what ended it."""
        if self._only is None:
            return await self._mailbox.take()
        if self._mailbox.failure is not None:
            raise self._mailbox.failure
        self._is_reading = True
        try:
            output = await self._only.__anext__()
            if not self._comes_known:  # else it was made elsewhere, and counted there
                self._note(0, output)
            self._comes_known = False
        except asyncio.CancelledError:
            # Our own cancel, unless other code cancelled the task too: that one goes first.
            if self._mailbox.failure is None or self._reader is None or self._reader.uncancel() > 0:
                raise
            raise self._mailbox.failure from None
        except Exception as failure:
            raise to_api_error(failure) from None
        finally:
            self._is_reading = False
        return [(0, output)]

    async def take_all(self) -> list[RequestOutput]:
        """The one output of each prompt, in their order, of a request that is not streamed."""
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(self._prepared):
            outputs |= dict(await self.take())
        return [outputs[i] for i in range(len(outputs))]

    async def write(self, make: Callable[[], T], outputs: Iterable[RequestOutput]) -> T:
        """Run `make` on these outputs: on a thread if they are many or have many logprobs, else here."""
        params = self._prepared[0].params
        of_token, of_prompt = (1 + (number or 0) for number in (params.logprobs, params.prompt_logprobs))
        num_parts = 0
        for output in outputs:
            num_parts += len(output.prompt_logprobs or ()) * of_prompt
            num_parts += sum(_CHOICE_PARTS + len(one.logprobs or ()) * of_token for one in output.outputs)
        return await self._context.text_work.run(self._exchange, self._deadline, make, num_parts)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stop_watching()
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._only is not None:
                await self._only.aclose()
        finally:
            for ticket in self._tickets:
                ticket.stop_waiting(was_served=False)
            telling = self._tell(error)  # only with many prompts does it let others run meanwhile
            await (telling if len(self._prepared) <= _TOLD_AT_ONCE else asyncio.shield(telling))
            # All of these lead back here: only the garbage collector would free all that the request holds.
            self._tasks, self._mailbox.failure = [], None
            del self._stop_watching

    async def _read(self, index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in stream:
                self._note(index, output)
                self._mailbox.put(index, output)
        except Exception as failure:
            self._mailbox.fail(to_api_error(failure))

    def _note(self, index: int, output: RequestOutput) -> None:
        if self._last[index] is None:
            self._tickets[index].started()
        self._last[index] = output
        self._metrics.on_output(self._prepared[index], output, time.monotonic())
        if output.finished:
            _check_ends(output)

    def _on_gone(self) -> None:
        self._mailbox.fail(ClientGone())
        # Never while it sends: that ends by itself on a closed connection.
        if self._is_reading and self._reader is not None:
            self._reader.cancel()

    async def _tell(self, error: BaseException | None) -> None:
        status, code, reason = 200, None, FinishReason.ABORT
        if isinstance(error, ApiError):
            status, code = error.status, error.code
            reason = FinishReason.ERROR if status >= 500 else FinishReason.ABORT  # only a failure of ours raises alarm
        elif isinstance(error, Exception) and not isinstance(error, ClientGone):
            status, code, reason = 500, "internal_error", FinishReason.ERROR
        elif error is not None:
            status, code = _CLIENT_GONE, "client_gone"
        for number, (prepared, last) in enumerate(zip(self._prepared, self._last, strict=True), 1):
            if number % _TOLD_AT_ONCE == 0 and number < len(self._prepared):
                await asyncio.sleep(0)
            summary = self._metrics.on_finished(prepared, last, reason.value)
            summary = dataclasses.replace(summary, request_id=self._exchange.request_id)
            if self._context.tracer is not None:
                self._context.tracer.finished(self._exchange, prepared, summary, model=self._model, status=status)
            self._context.logs.finished(
                summary,
                endpoint=self._exchange.endpoint,
                model=self._model,
                status=status,
                stream=self._is_stream,
                error_code=code,
            )


class Mailbox:
    """Outputs of several streams for one reader, and what ended them."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._mail: list[tuple[int, RequestOutput]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, output: RequestOutput) -> None:
        self._mail.append((index, output))
        self._wake()

    def fail(self, failure: Exception) -> None:
        """The first failure is told, after the outputs that came before it."""
        if self.failure is None:
            self.failure = failure
        self._wake()

    async def take(self) -> list[tuple[int, RequestOutput]]:
        if not self._mail and self.failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if not self._mail:
            assert self.failure is not None
            raise self.failure
        mail, self._mail = self._mail, []
        return mail

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _check_ends(output: RequestOutput) -> None:
    """An end that is no answer is an error. A client's own abort never gets here: its stream is closed."""
    for completion in output.outputs:
        if completion.finish_reason == FinishReason.ABORT:
            raise ApiError(503, "the server ended this request", code="aborted")
        if completion.finish_reason == FinishReason.BANNED:
            raise BadRequestError(completion.error or "no token is left to sample")
        if completion.finish_reason == FinishReason.ERROR:
            raise RuntimeError(f"request {output.request_id} failed: {completion.error}")
