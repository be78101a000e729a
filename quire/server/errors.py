"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}.

    ApiError                 an answer with a status; whoever raises it words the message
    ├── (from a BadRequestError)   400, naming the field
    ├── (from an EngineDeadError)  503
    └── (from anything else)       500, without details: those go to the log

`to_api_error` makes one of any exception, so that every way out of a handler ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import BadRequestError, ContextLengthError, EngineDeadError, QuireError
from quire.log import get_logger
from quire.nearest import nearest

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import Send

# Error types of OpenAI's servers, by status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# OpenAI's clients send whatever got a 5xx again, twice, unless the answer has this.
NO_RETRY = {"x-should-retry": "false"}
# When a client that was turned away should ask again: a replacement is up in seconds.
RETRY_SOON = {"retry-after": "5"}
INVALID_JSON = "invalid_json"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's; the page's chat knows it too
# Text from a client is cut before anything reads it, sends it back or logs it.
MAX_NAME_CHARS = 100
_MAX_MESSAGE_CHARS = 1_000
_MAX_PATH_CHARS = 200  # msgspec's path to a field, which is made of our own names and of numbers
_NEAR = 0.8  # difflib's ratio of a typing error; other words with letters in common have less
_UNKNOWN, _MISSING = "Object contains unknown field `", "Object missing required field `"


def shown(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """A client's text as a message may repeat it."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


class ApiError(Exception):
    """Ends a request with a status and a message for the person who sent it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = shown(message, _MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
        self.param = None if param is None else shown(param, _MAX_PATH_CHARS)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())

    async def respond(self, send: Send, body: bytes | None = None) -> None:
        """Send it as a whole response, straight to an ASGI server; with `body` where a path's clients read errors in
        another shape."""
        body = self.encode() if body is None else body
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def response(self) -> Response:
        from starlette.responses import Response

        return Response(self.encode(), self.status, headers=self.headers, media_type="application/json")


class UnavailableError(ApiError):
    """A 503 after which a client should ask again. Its sentence is fixed: it tells no path and no traceback."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(503, message, type="service_unavailable", code=code, headers=RETRY_SOON)


OnRefused = Callable[[ApiError, tuple[str, int] | None], None]  # is told what was turned away, and whom


def unheard(*_: object) -> None:
    """An OnRefused that counts nothing."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: BaseException) -> ApiError:
    """The answer to any exception. Exceptions that are not ours are logged, and the client gets no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequestError):
        code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), param=error.param, code=code)
    if isinstance(error, EngineDeadError):
        get_logger().error("a request met a dead engine: %s", error)
        return ApiError(503, "the engine has stopped: the server needs a restart", code="engine_dead")
    if isinstance(error, QuireError):  # may name files, so its text stays here
        get_logger().error("a request failed: %s", error)
    else:
        get_logger().error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def from_decode_error(error: Exception, known_fields: Sequence[str] = ()) -> ApiError:
    """A 400 for a body that is not JSON, or not the JSON that was wanted; names the field."""
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the body is not valid JSON: {error}", code=INVALID_JSON)
    text, where = _message_and_path(str(error))
    for start in (_UNKNOWN, _MISSING):
        if text.startswith(start):
            name = shown(text[len(start) : len(start) + MAX_NAME_CHARS + 1].removesuffix("`"))
            param = f"{where}.{name}" if where else name
            if start is _MISSING:
                return bad_request(f"{param} is required", param, "missing_field")
            near = nearest(name, known_fields, cutoff=_NEAR) if not where else []
            hint = f"; did you mean {near[0]}?" if near else ""
            return bad_request(f"{param} is not a field of this request{hint}", param, "unknown_field")
    text = shown(text[0].lower() + text[1 : 2 * MAX_NAME_CHARS], 2 * MAX_NAME_CHARS)
    return bad_request(f"{where or 'the body'}: {text}", where or None, "invalid_value")


def _message_and_path(text: str) -> tuple[str, str]:
    """msgspec's message and the path that stands behind it, like messages[0].role. The message may quote the client
    at any length, so only its end is searched."""
    before, at, path = text[-_MAX_PATH_CHARS:].rpartition(" - at `")
    path = path.removeprefix("key in ")
    if not at or not path.startswith("$"):
        return text, ""
    return text[:-_MAX_PATH_CHARS] + before, path[1:].removesuffix("`").removeprefix(".")


async def http_error(request: HttpRequest, error: Exception) -> Response:
    """For Starlette's own errors: no such path, no such method."""
    from starlette.exceptions import HTTPException

    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {path} here: GET /openapi.json lists what there is"
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


async def any_error(request: HttpRequest, error: Exception) -> Response:
    return to_api_error(error).response()
