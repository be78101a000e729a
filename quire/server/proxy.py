"""`quire router`: one address in front of several servers. Each request goes where its first token comes soonest.

A request whose server fails before the first byte of its answer is sent to another. After that, another Quire server
goes on with a stream after the tokens that its client has (`resuming.py`). Other servers do not tell the tokens, and a
second one would word the answer anew: their streams end with an error event that names the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.log import get_logger
from quire.router.http_client import Headers, Reply
from quire.router.policy import Prompt, Ticket
from quire.router.servers import Question, Servers
from quire.server.endpoint import REQUEST_ID_HEADER, ClientGone, new_request_id, on_gone, read_body
from quire.server.errors import RETRY_SOON, ApiError, UnavailableError, any_error, bad_request, shown, to_api_error
from quire.server.guards import BodyLimits, Hosts, after_body, allowed_hosts
from quire.server.http_server import HttpServer
from quire.server.messages import error_body as messages_error_body
from quire.server.resuming import RESUMABLE_HEADER, RESUMABLE_PATHS, SEED_HEADER
from quire.server.settings import ServerSettings
from quire.server.sse import DONE

_ANSWER_S = 5.0  # for a GET
_ELSEWHERE = (429, 502, 503)  # statuses after which another server is tried
_GONE = (b"engine_dead", b"aborted", b"model_unavailable")  # error events of a server that cannot go on
_TOKENS = re.compile(rb": tokens ([0-9 ]*)\n\n")
_REQUEST_ID, _RESUMABLE, _SEED = (one.encode() for one in (REQUEST_ID_HEADER, RESUMABLE_HEADER, SEED_HEADER))
# Headers that belong to one connection, not to the message.
_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailers", b"upgrade"}
_HOP |= {b"transfer-encoding", b"host", b"content-length", b"accept-encoding", b"expect", b"date", b"server"}
_HOP |= {_RESUMABLE, _SEED}
_COUNTS = {"retries": "Sent to another server.", "resumed": "Went on elsewhere.", "broken": "Answers cut off midway."}
# Kept by the server that took them: another one does not know them.
_STATEFUL = ("/v1/files", "/v1/batches", "/v1/responses/")
# By path, the handler: a method of Proxy.
_GETS = {"/health": "health", "/metrics": "metrics", "/v1/models": "get", "/version": "get"}
_MESSAGES = "/v1/messages"  # Anthropic's clients read errors in a shape of their own


@dataclass(slots=True)
class _Asked:
    """A client's request, and what it has had of its answer."""

    path: bytes
    headers: Headers  # for the server
    body: dict[str, Any]
    raw: bytes
    prompt: Prompt
    tried: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    is_stream: bool = False


@dataclass(slots=True)
class _Refusal:
    """How a server that could not do it said so."""

    status: int
    headers: Headers
    body: bytes


@dataclass(slots=True)
class _Answer:
    """A server's answer that has begun. seed: of a stream that another server can go on with; None of any other."""

    ticket: Ticket
    reply: Reply
    first: bytes
    seed: int | None

    async def pass_on(self, token_ids: list[int], send: Send) -> None:
        """Hand the pieces to the client. `token_ids` is extended by the tokens that the stream tells of them. The last
        piece ends the answer if it comes with the end, as it does from a Quire server."""
        reply = self.reply
        if self.seed is None:
            piece = self.first
            while not reply.is_complete:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await reply.read_some()
            await send({"type": "http.response.body", "body": piece})
            return
        pending = self.first
        while True:
            while (found := _TOKENS.search(pending)) is not None:
                events, pending = pending[: found.start()], pending[found.end() :]
                token_ids += map(int, found[1].split())
                if events.endswith(DONE):
                    await send({"type": "http.response.body", "body": events})
                    await reply.read()  # the rest of its framing, if that is not here yet
                    return
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            if not (piece := await reply.read_some()):
                break
            pending += piece
        if any(b'"code":"%b"' % code in pending for code in _GONE) or not pending.endswith(DONE):
            raise ConnectionError("its stream ended before the answer did")
        await send({"type": "http.response.body", "body": pending})  # an error of the request's own


class _WhileConnected:
    """Cancels what is within when the client hangs up, and ends it quietly."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope, self._receive = scope, receive
        self._is_gone = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._stop_watching = on_gone(self._scope, self._receive, self._on_gone)

    def _on_gone(self) -> None:
        if self._task is not None:
            self._is_gone = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> bool:
        self._stop_watching()
        del self._stop_watching  # it holds us
        if not self._is_gone or self._task is None:
            return False
        self._task.uncancel()
        return kind is asyncio.CancelledError


class UnderWay:
    """The requests that a router has in hand, for its end: they may finish, or are told that they did not."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_draining = False
        self.is_stopped = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> None:
        """Wait for them, then end what is left. New requests are refused from now on."""
        self.is_draining = True
        if self._tasks:
            get_logger().info("draining: %d requests under way, at most %g s", len(self._tasks), timeout_s)
            hurried = asyncio.create_task(at_once.wait())
            ended = asyncio.create_task(self._ended())
            await asyncio.wait((hurried, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            ended.cancel()
        self.is_stopped = True
        for task in tuple(self._tasks):
            task.cancel()

    async def _ended(self) -> None:
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))


class Proxy(Collector):
    """The application's handlers, and what they count."""

    def __init__(self, servers: Servers, under_way: UnderWay) -> None:
        self._servers = servers
        self._under_way = under_way
        self._router = servers.router
        self._answers: Counter[tuple[str, str]] = Counter()  # by server and status
        self._tokens: Counter[tuple[str]] = Counter({("cached",): 0, ("uncached",): 0})  # of prompts
        self._counts: Counter[str] = Counter()  # by the names of _COUNTS

    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A plain ASGI application: a framework's work around a request and each piece of its answer would cost more
        than the rest."""
        with self._under_way.counted():
            await self._post(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = None
        try:
            if self._under_way.is_draining:
                raise UnavailableError("the router is shutting down", "draining")
            raw = await read_body(receive)
            asked, question = self._asked(scope, raw)
            receive, send = after_body(scope, receive, send)
            with _WhileConnected(scope, receive):
                found = await self._ask(asked, question)
                if isinstance(found, _Refusal):
                    await send({"type": "http.response.start", "status": found.status, "headers": found.headers})
                    await send({"type": "http.response.body", "body": found.body})
                    return
                await self._pass_on(asked, found, send)
        except ClientGone:
            return
        except asyncio.CancelledError:
            if not self._under_way.is_stopped:
                raise
            problem = UnavailableError("the router was stopped before this request finished: send it again", "stopped")
            if asked is None or not asked.has_begun:
                await problem.respond(send, _error_body(scope["path"], problem))
            elif asked.is_stream:
                await _end_stream(asked, problem, send)
        except Exception as error:
            if asked is not None and asked.has_begun:
                raise
            failure = to_api_error(error)
            await failure.respond(send, _error_body(scope["path"], failure))

    def _asked(self, scope: Scope, raw: bytes) -> tuple[_Asked, Question | None]:
        path = scope["path"]
        if path.startswith(_STATEFUL):
            raise _kept_by_one(path)
        try:
            body = msgspec.json.decode(raw or b"{}")
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise bad_request("the body must be a JSON object")
        servers = self._servers
        if not servers.num_up:
            raise _none_left()
        model = body.get("model")
        if isinstance(model, str) and model not in servers.models:
            known = " or ".join(map(repr, servers.models))
            raise ApiError(404, f"no server has the model {model[:200]!r}: they have {known}", code="model_not_found")
        given = dict(scope["headers"])
        key = given.get(b"authorization")
        prompt, question = servers.prompt_of(body, None if key is None else key.decode("latin-1"))
        headers = _kept(scope["headers"])
        if _REQUEST_ID not in given:
            headers.append((_REQUEST_ID, new_request_id().encode()))  # one id wherever the request goes on
        if path in RESUMABLE_PATHS:
            headers.append((_RESUMABLE, b"1"))
        return _Asked(scope["raw_path"], headers, body, raw, prompt), question

    async def _ask(self, asked: _Asked, question: Question | None = None) -> _Answer | _Refusal:
        """The first server that answers, or how the last one refused."""
        servers = self._servers
        refused: _Refusal | None = None
        while (ticket := self._router.route(asked.prompt, excluding=asked.tried)) is not None:
            asked.tried.add(ticket.replica)
            if question is not None:
                servers.learn(question, ticket)
                question = None
            reply = None
            try:
                # No limit on the whole: answers take what they take. A client that waits no longer hangs up.
                reply = await servers.http.ask("POST", ticket.replica, asked.path, asked.headers, asked.raw)
                first = await reply.read_some()
                if reply.status in _ELSEWHERE:
                    first += await reply.read()
            except OSError as error:
                self._give_up(ticket, reply)
                servers.mark_down(ticket.replica, str(error) or type(error).__name__)
                self._counts["retries"] += 1
                continue
            except BaseException:
                self._give_up(ticket, reply)
                raise
            if reply.status in _ELSEWHERE:
                refused = _Refusal(reply.status, _kept(reply.headers), first)
                self._give_up(ticket, reply)
                self._counts["retries"] += 1
                continue
            self._tokens["cached",] += ticket.num_cached_tokens
            self._tokens["uncached",] += ticket.num_uncached_tokens
            self._answers[ticket.replica, str(reply.status)] += 1
            # An answer in one piece comes when all of it is made.
            self._router.on_first_token(ticket, is_timed=reply.content_type == b"text/event-stream")
            seed = reply.header(_SEED)
            return _Answer(ticket, reply, first, None if seed is None else int(seed))
        if refused is not None:
            return refused
        raise _none_left()

    def _give_up(self, ticket: Ticket, reply: Reply | None) -> None:
        self._router.on_end(ticket)
        if reply is not None:
            reply.close()

    async def get(self, request: HttpRequest) -> Response:
        """Ask any server that is up: all of them answer this alike."""
        for upstream in self._servers.all.values():
            if not upstream.is_up:
                continue
            headers = [(name, value) for name, value in request.headers.raw if name == b"authorization"]
            try:
                async with asyncio.timeout(_ANSWER_S):
                    reply = await self._servers.http.ask("GET", upstream.url, request.scope["raw_path"], headers)
                    with contextlib.closing(reply):
                        found = Response(await reply.read(), reply.status)
            except OSError as error:
                self._servers.mark_down(upstream.url, str(error) or type(error).__name__)
                continue
            found.raw_headers += _kept(reply.headers)
            return found
        raise _none_left()

    async def health(self, _: HttpRequest) -> Response:
        found = [
            {"server": one.url, "up": one.is_up, "exact_cache": one.is_exact, "reason": one.reason}
            for one in self._servers.all.values()
        ]
        num_up = 0 if self._under_way.is_draining else self._servers.num_up
        status = "draining" if self._under_way.is_draining else "ok" if num_up else "no server is up"
        headers = {"cache-control": "no-store"} | ({} if num_up else RETRY_SOON)
        body = {"status": status, "servers": found}
        return JSONResponse(body, 200 if num_up else 503, headers)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(generate_latest(self), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    def collect(self) -> Iterator[Family]:
        yield _family("requests_total", "Answers passed on.", ("server", "status"), self._answers)
        yield _family("tokens_total", "Prompt tokens routed.", ("kind",), self._tokens)
        for name, words in _COUNTS.items():
            yield _family(f"{name}_total", words, (), {(): self._counts[name]})
        known = self._router.replicas.items()
        is_up = {(one.url,): float(one.is_up) for one in self._servers.all.values()}
        sequences = {(name,): one.num_sequences for name, one in known}
        queued = {(name,): one.num_queued_tokens for name, one in known}
        cached = {(name,): self._router.num_blocks_of(name) for name, _ in known}
        yield _family("server_up", "Whether it takes requests.", ("server",), is_up)
        yield _family("server_sequences", "Under way there.", ("server",), sequences)
        yield _family("server_queued_tokens", "Before their first.", ("server",), queued)
        yield _family("server_cached_blocks", "As it told.", ("server",), cached)

    async def _pass_on(self, asked: _Asked, answer: _Answer, send: Send) -> None:
        """A piece is read when the one before it is sent: what a slow client does not take stays at the server."""
        headers = _kept(answer.reply.headers)
        asked.has_begun = True
        asked.is_stream = answer.reply.content_type == b"text/event-stream"
        await send({"type": "http.response.start", "status": answer.reply.status, "headers": headers})
        while True:
            ticket = answer.ticket
            try:
                await answer.pass_on(asked.token_ids, send)
                return
            except OSError as error:
                reason = str(error) or type(error).__name__
                self._servers.mark_down(ticket.replica, reason)
                if answer.reply.content_type != b"text/event-stream":
                    self._counts["broken"] += 1
                    raise  # the connection closes before the end of the answer
            finally:
                self._give_up(ticket, answer.reply)
            found = await self._resume(asked, answer)
            if found is None:
                break
            answer = found
        self._counts["broken"] += 1
        get_logger().error("server %s failed in mid-answer: %s", ticket.replica, reason)
        message = f"the server {ticket.replica} failed in mid-answer: send the request again"
        await _end_stream(asked, UnavailableError(message, "server_lost"), send)

    async def _resume(self, asked: _Asked, lost: _Answer) -> _Answer | None:
        """Another server that goes on with a stream; None where none can."""
        if lost.seed is None:
            return None
        asked.lost.add(lost.ticket.replica)
        asked.tried = set(asked.lost)
        more = {"seed": lost.seed, "continued_token_ids": asked.token_ids}
        asked.raw = msgspec.json.encode(asked.body | more) if asked.token_ids else asked.raw
        try:
            found = await self._ask(asked)
        except ApiError:
            return None
        if isinstance(found, _Refusal):
            return None
        if found.reply.status != 200 or found.seed is None:
            self._give_up(found.ticket, found.reply)
            return None
        self._counts["resumed"] += 1
        get_logger().warning("a stream of server %s goes on at %s", lost.ticket.replica, found.ticket.replica)
        return found


def _family(name: str, words: str, labels: Sequence[str], samples: Mapping[Any, float]) -> Family:
    """samples: by the labels' values."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(f"quire:router_{name}", words, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def _none_left() -> ApiError:
    return UnavailableError("no server is up: /health says why", "no_server")


def _kept_by_one(path: str) -> ApiError:
    return ApiError(404, f"{shown(path)} is kept by one server: ask that one itself", code="not_routed")


def _error_body(path: str, error: ApiError) -> bytes:
    """An error as the path's clients read it."""
    return msgspec.json.encode(messages_error_body(error)) if path.startswith(_MESSAGES) else error.encode()


async def _end_stream(asked: _Asked, problem: ApiError, send: Send) -> None:
    path = asked.path.decode("latin-1")
    event = b"event: error\n" if path.startswith(_MESSAGES) else b""  # without its name their clients skip it
    body = _error_body(path, problem)
    await send({"type": "http.response.body", "body": b"\n\n%bdata: %b\n\n" % (event, body)})


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    """For Starlette's own errors: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path, gets = shown(request.url.path), ", ".join(_GETS)
    if path.startswith(_STATEFUL):
        return _kept_by_one(path).response()
    message = f"the router has no {request.method} {path}: it passes POST requests on, and answers GET {gets}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


def _kept(headers: Headers) -> Headers:
    return [header for header in headers if header[0] not in _HOP]


def create_proxy_app(servers: Servers, settings: ServerSettings, under_way: UnderWay) -> ASGIApp:
    proxy = Proxy(servers, under_way)
    rest = Starlette(
        routes=[Route(path, getattr(proxy, name), methods=["GET"]) for path, name in _GETS.items()],
        exception_handlers={HTTPException: _no_route, ApiError: any_error, Exception: any_error},
    )

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        return (proxy.post if is_post else rest)(scope, receive, send)

    limited = BodyLimits(app, max_body_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    names = allowed_hosts(settings)
    return limited if names is None else Hosts(limited, names)


async def run_proxy(
    servers: Servers,
    listener: socket.socket,
    settings: ServerSettings,
    stop: asyncio.Event,
    at_once: asyncio.Event,
) -> None:
    """Serve until `stop`. What is under way then may finish, until `at_once` or the settings' time to drain."""
    under_way = UnderWay()
    server = HttpServer(create_proxy_app(servers, settings, under_way), settings, None)
    await servers.start()
    serving = asyncio.create_task(server.run_on(listener))
    await stop.wait()
    await under_way.drain(settings.drain_timeout_s, at_once)
    server.stop()
    await serving
    await servers.close()
