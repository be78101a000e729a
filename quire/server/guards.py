"""What stands between a connection and the application, outermost first: the host's name, CORS, API keys, the gate, and
the limits of a body.

The host's name: a page of any site can make its own name point at 127.0.0.1 and then read what a server there says, as
if it were its own (DNS rebinding); the Host header still tells the name that the browser used. So on loopback only the
loopback's names are answered, and those of --allowed-hosts. Elsewhere any name may be right, and all are unless
--allowed-hosts says which. A Unix socket is out of a page's reach.

API keys: with at least one of them everything is guarded except `/health` and `/ping`, which a supervisor must reach,
and the live page's own files (`/`, `/static/…`), which hold no data. Where keys have several names, each sees its own
requests on the live page and under `/debug/kv`, and an admin's key sees all of them.

The gate: while the server starts, drains or has lost its engine, requests are turned away with a 503.

    starting, dead   only /health and the page's files are served
    draining         GETs still are, so that metrics and the page show the drain; new work is not taken

Work is whatever is not a GET: those requests are counted, and a drain waits for them.

A body that is too large is a 413, and one that trickles in is a 408. Both are enforced while the body arrives, so a
chunked one without a length is no way around them. `http_server.py` limits headers, below ASGI.

Whenever a token wakes a request's task, every coroutine that waits for another one is resumed on the way to the one
that reads it. So a guard that is done with a request hands back the next application's coroutine instead of waiting
for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from quire.server.admission import MAX_TOKENS_HEADER
from quire.server.errors import ApiError, OnRefused, shown, unheard
from quire.server.life import LifeState, ServerLife, not_serving
from quire.server.settings import ApiKey, ServerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from quire.server.context import ServerContext

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def guarded(app: ASGIApp, context: ServerContext) -> ASGIApp:
    """The application behind all of its guards."""
    settings = context.settings
    app = BodyLimits(
        app,
        max_body_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
        max_file_bytes=settings.batch_dir_bytes if settings.batch_dir else None,
    )
    app = Gate(app, context.life, on_refused=lambda reason: context.first.metrics.on_refused(reason))
    app = Auth(app, keys=settings.api_keys, on_refused=context.refused)
    if settings.cors_origins:
        # Before the keys: a browser asks beforehand without one, and must be able to read errors too.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", MAX_TOKENS_HEADER],
        )
    names = allowed_hosts(settings)
    return app if names is None else Hosts(app, names=names, on_refused=context.refused)


def allowed_hosts(settings: ServerSettings) -> frozenset[str] | None:
    """The names to answer under, in lower case and without ports; None for any."""
    if "*" in settings.allowed_hosts or settings.uds is not None:
        return None
    names = {name.lower() for name in settings.allowed_hosts}
    if settings.is_local:
        host = settings.host.lower()
        return frozenset({*names, *_LOOPBACK, f"[{host}]" if ":" in host else host})
    return frozenset(names) or None


class Hosts:
    """ASGI middleware. `on_refused` hears what was turned away, and whom."""

    def __init__(self, app: ASGIApp, names: frozenset[str], on_refused: OnRefused = unheard) -> None:
        self._app = app
        self._names = names
        self._on_refused = on_refused

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and (host := _name(bytes(value))) not in self._names:
                    error = ApiError(
                        403,
                        f"this server does not answer under the name {shown(host)!r}: use localhost, or start it with "
                        f"--allowed-hosts {shown(host)}",
                        code="host_not_allowed",
                    )
                    self._on_refused(error, scope.get("client"))
                    return error.respond(send)
        return self._app(scope, receive, send)


def _name(host: bytes) -> str:
    """The host's name without its port, and without the dot at the end that makes a name absolute."""
    text = host.decode("latin-1").strip().lower()
    end = text.find("]") + 1 if text.startswith("[") else text.find(":")
    return (text[:end] if end > 0 else text).removesuffix(".")


def is_open(path: str, method: str) -> bool:
    """Whether anyone may read this path."""
    if path == "/ping":
        return True
    return method in ("GET", "HEAD") and (path in ("/health", "/", "/favicon.ico") or path.startswith("/static/"))


class Auth:
    """ASGI middleware: refuses what carries no known key, and notes in scope["state"] the `tenant`, and whose requests
    it `sees`: that tenant's, or everybody's (None)."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], on_refused: OnRefused = unheard) -> None:
        self._app = app
        self._on_refused = on_refused
        # Digests have one length, so that comparing them does not tell a key's.
        self._digests = [(_digest(key.key.encode()), key) for key in keys]
        self._has_tenants = len({key.tenant for key in keys}) > 1

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        tenant, sees = "", None
        if self._digests and not is_open(scope["path"], scope["method"]):
            given = _given_key(scope)
            key = None if given is None else self.key_of(given)
            if key is None:
                missing = "no API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
                error = ApiError(
                    401,
                    "this API key is not known here" if given else missing,
                    code="invalid_api_key",
                    headers={"www-authenticate": 'Bearer realm="quire"'},
                )
                self._on_refused(error, scope.get("client"))
                return error.respond(send)
            tenant = key.tenant
            sees = tenant if self._has_tenants and not key.is_admin else None
        scope.setdefault("state", {}).update(tenant=tenant, sees=sees)
        return self._app(scope, receive, send)

    def key_of(self, key: bytes) -> ApiKey | None:
        """Which key it is. Every key is compared, whichever matches: the time taken tells nothing."""
        digest = _digest(key)
        found = None
        for known, one in self._digests:
            if hmac.compare_digest(known, digest):
                found = one
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given_key(scope: Scope) -> bytes | None:
    """The key of the Authorization header, or of Anthropic's x-api-key; None without one. Two of a kind are as good as
    none."""
    bearers = [bytes(value) for name, value in scope["headers"] if name == b"authorization"]
    keys = [bytes(value) for name, value in scope["headers"] if name == b"x-api-key"]
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        return key.strip() or None if scheme.lower() == b"bearer" else None
    return keys[0].strip() or None if len(keys) == 1 and not bearers else None


class Gate:
    """ASGI middleware. `on_refused` hears the state for which a request was turned away."""

    def __init__(self, app: ASGIApp, life: ServerLife, on_refused: Callable[[str], None] = unheard) -> None:
        self._app = app
        self._life = life
        self._on_refused = on_refused

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or is_open(scope["path"], scope["method"]):
            return self._app(scope, receive, send)
        state = self._life.state
        is_work = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if state is LifeState.SERVING or (state is LifeState.DRAINING and not is_work):
            return self._counted(scope, receive, send) if is_work else self._app(scope, receive, send)
        self._on_refused(state.value)
        error = not_serving(state)
        error.headers["connection"] = "close"  # its next request should reach another server
        return error.respond(send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._life.request():
            await self._app(scope, receive, send)


# After a 413 the rest is read and thrown away for a moment: closing at once would reset the connection, and most
# clients would then report a broken pipe instead of our answer.
_LINGER_S = 1.0
_LINGER_BYTES = 64 << 20
_CLOSE = {"connection": "close"}
_AFTER_BODY = "after_body"  # a key of scope["state"]


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, the most that this server takes (--max-body-bytes)"
    return ApiError(413, message, code="body_too_large", headers=_CLOSE)


class BodyLimits:
    """ASGI middleware: counts and times the body as the application reads it.

    A file that is uploaded may be larger (`max_file_bytes`), and then each piece of it has the time of a body. Once the
    body is there, an application that sends its answer in many pieces goes on with what `after_body` gives.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, timeout_s: float, max_file_bytes: int | None = None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = _HeldSend(send)
        length = content_length(scope)
        is_file = scope["path"] == "/v1/files" and self._max_file_bytes is not None
        max_bytes = self._max_file_bytes if is_file and self._max_file_bytes is not None else self._max_body_bytes
        if length is not None and length > max_bytes:
            await _too_large(max_bytes).respond(held.hold())
            await held.let_go(receive)
            return
        scope.setdefault("state", {})[_AFTER_BODY] = receive, send
        ends_s: float | None = None
        num_bytes = 0
        is_complete = False
        refusal: ApiError | None = None

        async def limited_receive() -> Message:
            nonlocal ends_s, num_bytes, is_complete, refusal
            if is_complete:
                return await receive()  # only a hang-up can follow
            if ends_s is None or is_file:
                ends_s = asyncio.get_running_loop().time() + self._timeout_s
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._timeout_s:g} s"
                refusal = ApiError(408, late, type="timeout", code="body_timeout", headers=_CLOSE)
                raise refusal from None
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if num_bytes > max_bytes:
                    refusal = _too_large(max_bytes)
                    held.hold()
                    raise refusal
            return message

        try:
            await self._app(scope, limited_receive, held)
        except ApiError as error:
            if error is not refusal or held.has_begun:
                raise
            await error.respond(held)
        finally:
            # Both lead back to the scope by their request: only the garbage collector would free it.
            scope["state"].pop(_AFTER_BODY, None)
        if refusal is not None and refusal.status == 413 and not is_complete:
            await held.let_go(receive)
        else:
            await held.let_go()


def after_body(scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """ASGI's receive and send without the limits of a body, for after its end."""
    plain: tuple[Receive, Send] = scope.get("state", {}).pop(_AFTER_BODY, (receive, send))
    return plain


def content_length(scope: Scope) -> int | None:
    """The length that the client announced; what is no number is the HTTP parser's to refuse."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return None


class _HeldSend:
    """ASGI's send, which can hold back the end of a response: the server closes the connection with it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._holds = False
        self._is_ended = False
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        if self._holds and message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_ended = True
            message = {**message, "more_body": True}
        await self._send(message)

    def hold(self) -> _HeldSend:
        self._holds = True
        return self

    async def let_go(self, receive: Receive | None = None) -> None:
        """End the response; with `receive`, after throwing away what the client still sends, for a moment."""
        if receive is not None:
            await _throw_away(receive)
        if self._is_ended:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while num_bytes < _LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        pass
