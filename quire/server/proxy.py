"""`quire router`: one address in front of several servers. Each request goes where its first token comes soonest.

A request whose server fails before the first byte of its answer is sent to another. After that, another Quire server
goes on with a stream after the tokens that its client has (`resuming.py`). Of other servers nobody knows the tokens,
and a second one would word the answer anew: their streams end with an error event that names the server.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.log import get_logger
from quire.router.policy import Prompt, Ticket
from quire.router.servers import Question, Servers
from quire.server.endpoint import REQUEST_ID_HEADER
from quire.server.errors import RETRY_SOON, ApiError, UnavailableError, any_error, bad_request
from quire.server.guards import BodyLimits, Hosts, allowed_hosts
from quire.server.http_server import HttpServer
from quire.server.resuming import RESUMABLE_HEADER, RESUMABLE_PATHS, SEED_HEADER
from quire.server.settings import ServerSettings
from quire.server.sse import DONE

_CONNECT_S = 5.0
_ELSEWHERE = (429, 502, 503)  # what another server may do better
_GONE = (b"engine_dead", b"aborted", b"model_unavailable")  # error events of a server that cannot go on
_TOKENS = re.compile(rb": tokens ([0-9 ]*)\n\n")
# What belongs to one connection, not to the message.
_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding"}
_HOP |= {"upgrade", "host", "content-length", "accept-encoding", "date", "server", RESUMABLE_HEADER, SEED_HEADER}
# Kept by the server that took them: another one does not know them.
_STATEFUL = ("/v1/files", "/v1/batches", "/v1/responses/")


@dataclass(slots=True)
class _Asked:
    """A client's request, and what it has had of its answer."""

    request: HttpRequest
    body: dict[str, Any]
    raw: bytes
    prompt: Prompt
    tried: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class _Answer:
    """A server's answer that has begun."""

    ticket: Ticket
    response: aiohttp.ClientResponse
    first: bytes

    @property
    def seed(self) -> int | None:
        """The seed of a stream that another server can go on with; None of any other."""
        seed = self.response.headers.get(SEED_HEADER)
        return None if seed is None else int(seed)

    async def pieces(self, token_ids: list[int]) -> AsyncIterator[bytes]:
        """The pieces to hand to the client. `token_ids` is extended by the tokens that the stream tells of them."""
        if self.seed is None:
            yield self.first
            async for piece in self.response.content.iter_any():
                yield piece
            return
        pending, is_done = self.first, False
        while not is_done:
            while (found := _TOKENS.search(pending)) is not None:
                events, pending = pending[: found.start()], pending[found.end() :]
                token_ids += map(int, found[1].split())
                is_done = events.endswith(DONE)
                if events:
                    yield events
            if not (piece := await self.response.content.readany()):
                break
            pending += piece
        if is_done:
            return
        if any(b'"code":"%b"' % code in pending for code in _GONE) or not pending.endswith(DONE):
            raise ConnectionError("its stream ended before the answer did")
        yield pending  # an error of the request's own


class Proxy(Collector):
    """The application's handlers, and what they count."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._router = servers.router
        self._answers: Counter[tuple[str, str]] = Counter()  # by server and status
        self._num_retries = 0
        self._num_resumed = 0
        self._num_broken = 0
        self._num_cached_tokens = 0
        self._num_uncached_tokens = 0

    async def post(self, request: HttpRequest) -> Response:
        path = request.url.path
        if path.startswith(_STATEFUL):
            raise ApiError(404, f"{path} is kept by one server: ask that one itself", code="not_routed")
        raw = await request.body()
        try:
            body = json.loads(raw or b"{}")
        except ValueError as error:
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
        prompt, question = servers.prompt_of(body, request.headers.get("authorization"))
        asked = _Asked(request, body, raw, prompt)
        found = await self._ask(asked, question)
        if isinstance(found, Response):
            return found
        headers = _kept(found.response)
        return StreamingResponse(self._pass_on(asked, found), status_code=found.response.status, headers=headers)

    async def _ask(self, asked: _Asked, question: Question | None = None) -> _Answer | Response:
        """The first server that answers, or how the last one refused."""
        servers = self._servers
        refused: Response | None = None
        while (ticket := self._router.route(asked.prompt, excluding=asked.tried)) is not None:
            asked.tried.add(ticket.replica)
            if question is not None:
                servers.learn(question, ticket)
                question = None
            try:
                response = await self._send(ticket, asked)
                first = await response.content.readany()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._router.on_end(ticket)
                servers.mark_down(ticket.replica, str(error) or type(error).__name__)
                self._num_retries += 1
                continue
            except BaseException:
                self._router.on_end(ticket)
                raise
            if response.status in _ELSEWHERE:
                refused = Response(first + await response.read(), response.status, _kept(response))
                response.close()
                self._router.on_end(ticket)
                self._num_retries += 1
                continue
            self._num_cached_tokens += ticket.num_cached_tokens
            self._num_uncached_tokens += ticket.num_uncached_tokens
            self._answers[ticket.replica, str(response.status)] += 1
            # An answer in one piece comes when all of it is made.
            self._router.on_first_token(ticket, is_timed=response.content_type == "text/event-stream")
            return _Answer(ticket, response, first)
        if refused is not None:
            return refused
        raise _none_left()

    async def get(self, request: HttpRequest) -> Response:
        """Ask any server that is up: all of them answer this alike."""
        for upstream in self._servers.all.values():
            if not upstream.is_up:
                continue
            headers = {"authorization": request.headers["authorization"]} if "authorization" in request.headers else {}
            timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
            try:
                url = upstream.url + request.url.path
                async with self._servers.session.get(url, headers=headers, timeout=timeout) as response:
                    return Response(await response.read(), response.status, _kept(response))
            except (aiohttp.ClientError, TimeoutError) as error:
                self._servers.mark_down(upstream.url, str(error) or type(error).__name__)
        raise _none_left()

    async def health(self, _: HttpRequest) -> Response:
        found = [
            {"server": one.url, "up": one.is_up, "exact_cache": one.is_exact, "reason": one.reason}
            for one in self._servers.all.values()
        ]
        num_up = self._servers.num_up
        headers = {"cache-control": "no-store"} | ({} if num_up else RETRY_SOON)
        body = {"status": "ok" if num_up else "no server is up", "servers": found}
        return JSONResponse(body, 200 if num_up else 503, headers)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(generate_latest(self), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    def collect(self) -> Iterator[Family]:
        answers = CounterMetricFamily("quire:router_requests_total", "Answers passed on.", labels=("server", "status"))
        for labels, count in self._answers.items():
            answers.add_metric(labels, count)
        yield answers
        tokens = CounterMetricFamily("quire:router_tokens_total", "Prompt tokens routed.", labels=("kind",))
        tokens.add_metric(("cached",), self._num_cached_tokens)
        tokens.add_metric(("uncached",), self._num_uncached_tokens)
        yield tokens
        yield CounterMetricFamily("quire:router_retries_total", "Sent to another server.", value=self._num_retries)
        yield CounterMetricFamily("quire:router_resumed_total", "Went on elsewhere.", value=self._num_resumed)
        yield CounterMetricFamily("quire:router_broken_total", "Answers cut off midway.", value=self._num_broken)
        known = self._router.replicas
        gauges: dict[str, tuple[str, dict[str, float]]] = {
            "server_up": ("Whether it takes requests.", {u.url: float(u.is_up) for u in self._servers.all.values()}),
            "server_sequences": ("Under way there.", {name: one.num_sequences for name, one in known.items()}),
            "server_queued_tokens": (
                "Before their first.",
                {name: one.num_queued_tokens for name, one in known.items()},
            ),
            "server_cached_blocks": ("As it told.", {name: self._router.num_blocks_of(name) for name in known}),
        }
        for name, (words, values) in gauges.items():
            gauge = GaugeMetricFamily(f"quire:router_{name}", words, labels=("server",))
            for server, value in values.items():
                gauge.add_metric((server,), value)
            yield gauge

    async def _send(self, ticket: Ticket, asked: _Asked) -> aiohttp.ClientResponse:
        path = asked.request.url.path
        headers = {name: value for name, value in asked.request.headers.items() if name not in _HOP}
        headers.setdefault(REQUEST_ID_HEADER, asked.request_id)  # whoever goes on with it tells the same
        if path in RESUMABLE_PATHS:
            headers[RESUMABLE_HEADER] = "1"
        # No limit on the whole: answers take what they take. A client that waits no longer hangs up.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        return await self._servers.session.post(
            ticket.replica + path, data=asked.raw, headers=headers, timeout=timeout, allow_redirects=False
        )

    async def _pass_on(self, asked: _Asked, answer: _Answer) -> AsyncIterator[bytes]:
        """A piece is read when the one before it is sent: what a slow client does not take stays at the server."""
        while True:
            ticket, response = answer.ticket, answer.response
            is_whole = False
            try:
                async for piece in answer.pieces(asked.token_ids):
                    yield piece
                is_whole = True
                return
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                self._servers.mark_down(ticket.replica, reason)
                if response.content_type != "text/event-stream":
                    self._num_broken += 1
                    raise  # the connection closes before the length that was promised
            finally:
                self._router.on_end(ticket)
                if is_whole:
                    response.release()
                else:
                    response.close()  # the server notices, and stops
            found = await self._resume(asked, answer)
            if found is None:
                break
            answer = found
        self._num_broken += 1
        get_logger().error("server %s failed in mid-answer: %s", ticket.replica, reason)
        message = f"the server {ticket.replica} failed in mid-answer: send the request again"
        problem = {"message": message, "type": "service_unavailable", "param": None, "code": "server_lost"}
        yield b"\n\ndata: " + json.dumps({"error": problem}).encode() + b"\n\n"

    async def _resume(self, asked: _Asked, lost: _Answer) -> _Answer | None:
        """Another server that goes on with a stream; None where none can."""
        if lost.seed is None:
            return None
        asked.lost.add(lost.ticket.replica)
        asked.tried = set(asked.lost)
        more = {"seed": lost.seed, "continued_token_ids": asked.token_ids}
        asked.raw = json.dumps(asked.body | more).encode() if asked.token_ids else asked.raw
        try:
            found = await self._ask(asked)
        except ApiError:
            return None
        if isinstance(found, Response):
            return None
        if found.response.status != 200 or found.seed is None:
            self._router.on_end(found.ticket)
            found.response.close()
            return None
        self._num_resumed += 1
        get_logger().warning("a stream of server %s goes on at %s", lost.ticket.replica, found.ticket.replica)
        return found


def _none_left() -> ApiError:
    return UnavailableError("no server is up: /health says why", "no_server")


def _kept(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.lower() not in _HOP}


def create_proxy_app(servers: Servers, settings: ServerSettings) -> Starlette:
    proxy = Proxy(servers)
    limits = Middleware(BodyLimits, max_body_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    names = allowed_hosts(settings)
    hosts = [] if names is None else [Middleware(Hosts, names=names, on_refused=lambda error, client: None)]
    return Starlette(
        routes=[
            Route("/health", proxy.health, methods=["GET"]),
            Route("/metrics", proxy.metrics, methods=["GET"]),
            Route("/v1/models", proxy.get, methods=["GET"]),
            Route("/version", proxy.get, methods=["GET"]),
            Route("/{path:path}", proxy.post, methods=["POST"]),
        ],
        middleware=[*hosts, limits],
        exception_handlers={ApiError: any_error, Exception: any_error},
    )


async def run_proxy(servers: Servers, listener: socket.socket, server: HttpServer, stop: asyncio.Event) -> None:
    """Serve until `stop`; what is under way then ends with its connections."""
    await servers.start()
    serving = asyncio.create_task(server.run_on(listener))
    await stop.wait()
    server.stop()
    await serving
    await servers.close()
