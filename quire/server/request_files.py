"""Files of requests, in OpenAI's batch format: one JSON object a line, each for the endpoint that it names.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

A line goes the way of an HTTP request: through the same endpoint, with the same checks and the same answers. A line
that is no request is answered with an `error`. Lines are read as there is room for them and answers are written as they
come, so that neither file is ever held in memory. Answers are numbered as their lines are: a run that was interrupted
goes on with the lines that have none yet.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import msgspec
from starlette.types import Message, Scope

from quire.errors import ConfigError, EngineDeadError
from quire.server.endpoint import REQUEST_ID_HEADER, JsonEndpoint
from quire.server.errors import INVALID_JSON, ApiError, bad_request, from_decode_error, shown

_MAX_RETRY_S = 5.0
_MAX_ERRORS = 100  # of a file without a request; a client wants the first ones
_ID = "batch_req_"


class _Named(msgspec.Struct):
    custom_id: str


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


class _AnsweredLine(msgspec.Struct):
    id: str
    custom_id: str | None


@dataclass(slots=True, frozen=True)
class Answer:
    """An endpoint's answer to one line."""

    status: int
    request_id: str
    retry_after_s: float
    body: bytes


class FileError(msgspec.Struct):
    """Why a file cannot be answered, in the shape and with the codes of OpenAI's batches."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class RequestCounts(msgspec.Struct):
    """How a file's lines ended so far."""

    total: int = 0
    completed: int = 0
    failed: int = 0


Write = Callable[[bytes, bool], None]  # one line, and whether it is an answer with a 200


class EndpointCaller:
    """Calls endpoints within the process, on behalf of one tenant. `defaults` are fields for bodies without them."""

    def __init__(
        self, endpoints: Mapping[str, JsonEndpoint], *, tenant: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.endpoints = endpoints
        self._tenant = tenant
        self._defaults = defaults or {}

    async def __call__(self, path: str, body: Mapping[str, Any]) -> Answer:
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "state": {"tenant": self._tenant, "sees": self._tenant or None},
        }
        unread = [msgspec.json.encode({**self._defaults, **body})]
        sent: list[Message] = []

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # this client never hangs up: it is cancelled
            return {"type": "http.request", "body": unread.pop()}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.endpoints[path](scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(
            status=sent[0]["status"],
            request_id=headers.get(REQUEST_ID_HEADER, ""),
            retry_after_s=min(_MAX_RETRY_S, float(headers.get("retry-after", 1.0))),
            body=b"".join(message.get("body", b"") for message in sent[1:]),
        )


async def run_lines(
    lines: Iterable[tuple[int, bytes]],
    caller: EndpointCaller,
    write: Write,
    counts: RequestCounts,
    *,
    answered: Mapping[int, int],
    max_line_bytes: int,
    num_at_once: int,
) -> None:
    """Answer numbered lines, a bounded number of them at a time; those that `answered` has are passed over.

    Raises EngineDeadError if the engine ends. Answers that are written by then stay, and another run goes on from them.
    """
    room = asyncio.Semaphore(num_at_once)

    async def answer(number: int, line: _Line) -> None:
        try:
            reply = await _ask(caller, line)
            response = {"status_code": reply.status, "request_id": reply.request_id, "body": msgspec.Raw(reply.body)}
            is_good = reply.status < 400
            counts.completed += is_good
            counts.failed += not is_good
            write(_answer_line(number, line.custom_id, response=response), is_good)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for number, raw in lines:
                await room.acquire()
                line, problem = _read_line(raw, caller.endpoints, max_line_bytes)
                custom_id = _name_of(raw) if line is None else line.custom_id
                if line is not None and problem is None and number not in answered:
                    tasks.create_task(answer(number, line))
                    continue
                room.release()
                if problem is not None and number not in answered:
                    counts.failed += 1
                    told = {"code": "invalid_line", "message": f"line {number}: {problem.message}"}
                    write(_answer_line(number, custom_id, error=told), False)
                elif answered[number] != hash(custom_id):
                    raise ConfigError(
                        f"the output file has the answers to another file: line {number} differs. Name another output "
                        "file, or delete it"
                    )
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # when the engine fails, every line fails with the same words


async def _ask(caller: EndpointCaller, line: _Line) -> Answer:
    while True:
        reply = await caller(line.url, line.body)
        if reply.status == 429:
            await asyncio.sleep(reply.retry_after_s)
        elif reply.status == 503:
            raise EngineDeadError("the engine stopped before the file was done: run the same command again to go on")
        else:
            return reply


def _read_line(raw: bytes, endpoints: Mapping[str, Any], max_line_bytes: int) -> tuple[_Line | None, ApiError | None]:
    """The line's request, and what is wrong with it; at least one of them."""
    if len(raw) > max_line_bytes:
        return None, bad_request(f"longer than {max_line_bytes} bytes")
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return None, from_decode_error(error, _Line.__struct_fields__)
    if line.method != "POST":
        return line, bad_request(f"method must be POST, got {shown(line.method)!r}", "method", "invalid_method")
    if line.url not in endpoints:
        wanted = ", ".join(sorted(endpoints))
        return line, bad_request(f"url must be one of {wanted}, got {shown(line.url)!r}", "url", "invalid_url")
    if line.body.get("stream"):
        return line, bad_request("body.stream must be false: an answer in a file is whole", "body.stream")
    return line, None


def _name_of(raw: bytes) -> str | None:
    """What the answer to a line that is no request is called, if the line tells."""
    try:
        return msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def errors_of_file(path: Path, endpoints: Mapping[str, Any], max_line_bytes: int) -> list[FileError]:
    """Why no line of a file is a request; nothing where one is. Reads no further than that line."""
    found: list[FileError] = []
    with path.open("rb") as file:
        for number, raw in numbered_lines(file, max_line_bytes):
            _, problem = _read_line(raw, endpoints, max_line_bytes)
            if problem is None:
                return []
            if len(found) < _MAX_ERRORS:
                code = "invalid_json_line" if problem.code == INVALID_JSON else problem.code or "invalid_line"
                found.append(FileError(code, problem.message, number, problem.param))
    return found or [FileError("empty_file", "the file has no line: it must be JSONL, a request a line")]


def _answer_line(number: int, custom_id: str | None, *, response: Any = None, error: Any = None) -> bytes:
    line = {"id": f"{_ID}{number}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def numbered_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1 on. A line that is too long is not read to its end."""
    number = 0
    while line := file.readline(max_line_bytes + 2):
        number += 1
        is_whole = line.endswith(b"\n")
        while not is_whole and (rest := file.readline(1 << 20)):
            is_whole = rest.endswith(b"\n")
        if line.strip():
            yield number, line.strip() if len(line) <= max_line_bytes else line


def count_lines(path: Path, max_line_bytes: int) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in numbered_lines(file, max_line_bytes))


def read_answered(path: Path) -> dict[int, int]:
    """Which lines an output file has answers to, by number, each with the hash of its custom_id. Half an answer at its
    end, which a process that was killed leaves, is cut off."""
    answered: dict[int, int] = {}
    if not path.exists():
        return answered
    with path.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                found = msgspec.json.decode(line, type=_AnsweredLine)
                answered[int(found.id.removeprefix(_ID))] = hash(found.custom_id)
            except (msgspec.DecodeError, ValueError):
                raise ConfigError(
                    f"{path} is there already and holds something else than answers: name another output file"
                ) from None
            end += len(line)
        file.truncate(end)
    return answered


class AnswerFile:
    """Appends answers to a file, whole lines at a time. A context manager."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._descriptor, line) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
