"""What every POST has in common: a JSON body in, an answer or an error in OpenAI's shape out, with the request's id."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.errors import ApiError, bad_request, shown, to_api_error
from quire.server.guards import after_body
from quire.server.hang_up import HANG_UP, HangUp
from quire.server.protocol import LONG_BODY_BYTES, BodyDecoder, check_shape

if TYPE_CHECKING:
    from quire.server.context import ServerContext

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # characters that are safe in a header and in a log


class ClientGone(Exception):
    """The client closed its connection: its request needs no answer."""


@dataclass(slots=True)
class Exchange:
    """One HTTP request and its answer, at the level of ASGI: a streamed token passes through nothing else."""

    context: ServerContext
    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    tenant: str
    endpoint: str
    arrived_s: float = 0.0  # when the body was read, by the loop's clock: deadlines begin there
    num_body_bytes: int = 0  # bounds every text in it
    is_abandoned: bool = False  # the client is gone: work for its answer stops where it can
    has_begun: bool = False  # the status is out: a later error can only be a part of the body
    is_admitted: bool = False  # the log's line is then written where the tokens were counted

    def header(self, name: str) -> str | None:
        return header_of(self.scope, name)

    async def read_body(self) -> bytes:
        check_json(self.header("content-type") or "")
        body = await read_body(self.receive)
        self.receive, self.send = after_body(self.scope, self.receive, self.send)
        return body

    def detached(self) -> Exchange:
        """The same request for work that outlives its answer: it drops all messages, and its client never hangs up."""

        async def send(_: Message) -> None:
            pass

        scope = {**self.scope, "state": {**self.scope.get("state", {}), HANG_UP: HangUp()}}
        return dataclasses.replace(self, scope=scope, send=send, has_begun=False)

    def take_request_id(self, given: str | None) -> None:
        """The body's own id, where no header named one."""
        if given is not None and self.header(REQUEST_ID_HEADER) is None:
            if not _REQUEST_ID.fullmatch(given):
                raise bad_request("request_id must be visible ASCII characters without spaces", "request_id")
            self.request_id = given

    def on_gone(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called when the client closes its connection; returns what ends that. For after the body."""
        return on_gone(self.scope, self.receive, callback)

    async def begin(
        self, status: int, content_type: bytes, headers: Mapping[str, str], *more: tuple[bytes, bytes]
    ) -> None:
        lines = [(b"content-type", content_type), (REQUEST_ID_HEADER.encode(), self.request_id.encode()), *more]
        lines += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": lines})

    async def reply(self, body: Any, headers: Mapping[str, str] | None = None, *, status: int = 200) -> None:
        """A whole answer, as JSON, or encoded already."""
        encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
        await self.begin(status, b"application/json", headers or {}, (b"content-length", b"%d" % len(encoded)))
        await self.send({"type": "http.response.body", "body": encoded})


Handler = Callable[[Exchange, Any], Awaitable[None]]


class JsonEndpoint:
    """An ASGI application for one path."""

    def __init__(
        self,
        context: ServerContext,
        body_type: type[msgspec.Struct],
        handler: Handler,
        error_body: Callable[[ApiError], Any] = ApiError.body,
    ) -> None:
        self._context = context
        self._decoder = BodyDecoder(body_type)
        self._handler = handler
        self._error_body = error_body  # how this path's clients read errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, arrived_s = self._context, time.monotonic()
        tenant = tenant_of(scope)
        exchange = Exchange(context, scope, receive, send, request_id_of(scope), tenant, scope["path"])
        context.first.metrics.on_request_start(exchange.endpoint)
        try:
            body = await exchange.read_body()
            exchange.num_body_bytes = len(body)
            exchange.arrived_s = asyncio.get_running_loop().time()
            if len(body) > LONG_BODY_BYTES:
                check_shape(body)
                await asyncio.sleep(0)  # neither that nor decoding holds up the others for long, but both might
            decoded = self._decoder.decode(body)
            del body
            exchange.take_request_id(getattr(decoded, "request_id", None))
            await self._handler(exchange, decoded)
        except ClientGone:
            return
        except Exception as failure:
            # No local variable may hold the error: its traceback has this frame, and the circle would keep the body.
            await self._refuse(exchange, to_api_error(failure), arrived_s)

    async def _refuse(self, exchange: Exchange, error: ApiError, arrived_s: float) -> None:
        if not exchange.is_admitted:
            self._context.first.metrics.on_refused(error.code or "invalid_request")
            self._context.logs.refused(
                exchange.request_id,
                endpoint=exchange.endpoint,
                status=error.status,
                error_code=error.code,
                param=error.param,
                tenant=exchange.tenant,
                total_s=time.monotonic() - arrived_s,
            )
        if not exchange.has_begun:
            await exchange.reply(self._error_body(error), error.headers, status=error.status)


async def read_body(receive: Receive) -> bytes:
    """A request's whole body. Raises ClientGone where the client hangs up before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def check_json(content_type: str) -> None:
    """Refuse bodies of other types: browsers let a page of any site send those without asking this server first."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        found = f"has the content type {shown(kind)}" if kind else "has no content type"
        raise ApiError(
            415,
            f"the body {found}: send it with the header Content-Type: application/json "
            "(curl -H 'Content-Type: application/json')",
            code="unsupported_media_type",
        )


def tenant_of(scope: Scope) -> str:
    """The tenant that a request belongs to, as `guards.Auth` noted it."""
    return str(scope.get("state", {}).get("tenant", ""))


def json_response(body: Any, **headers: str) -> Response:
    """A whole answer for a route that Starlette calls."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(msgspec.json.encode(body), headers=named, media_type="application/json")


def header_of(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return bytes(value).decode("latin-1")
    return None


def on_gone(scope: Scope, receive: Receive, callback: Callable[[], None]) -> Callable[[], None]:
    """Have it called when the client closes its connection; returns what ends that. For after the body."""
    hang_up: HangUp | None = scope.get("state", {}).get(HANG_UP)
    if hang_up is not None:
        return hang_up.watch(callback)

    async def wait() -> None:  # where a server tells it in ASGI's way alone
        while (await receive())["type"] != "http.disconnect":
            pass
        callback()

    waiting = asyncio.ensure_future(wait())

    def end() -> None:
        waiting.cancel()

    return end


def request_id_of(scope: Scope) -> str:
    """The client's own id where it can be shown as it is, else a new one."""
    given = header_of(scope, REQUEST_ID_HEADER)
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return new_request_id()


def new_request_id() -> str:
    return os.urandom(16).hex()
