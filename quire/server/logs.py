"""The server's log on stderr: one line per request at its end, one per event of the engine's life, as text or JSON.

    2026-01-31T12:00:00.123Z info request request_id=cmpl-1 endpoint=/v1/completions status=200 ... total_s=0.412
    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "event": "request", "request_id": "cmpl-1", ...}

A line has numbers, names and reasons; never a prompt, an answer, a key, or an error's text, which may quote them.

The reader of the lines may stop: a supervisor that forgot its pipe, a terminal after Ctrl-S, a disk that hangs.
Requests must not wait for that, so a thread of its own writes the lines, as many as there is room for; later ones are
counted and left out. A line that is far longer than any of ours quotes a client, and is cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from quire.engine.api import EngineState, ServingEngine
from quire.server.metrics import RequestSummary

_EVENT = "quire_event"  # the attribute of a LogRecord that holds (event, fields)
ENGINE_READY = "engine_ready"
OFTEN_S = 10.0
_LOGGERS = ("quire", "uvicorn")  # uvicorn's own lines look like ours
_MAX_WAITING_BYTES = 4 << 20  # some ten thousand lines
_MAX_LINE_BYTES = 32 << 10  # a long traceback; a line that quotes what a client sent may be as long as that
_LINE_COST_BYTES = 64  # what a line in the queue costs beside its text
_FLUSH_S = 1.0  # in which the last lines of a program that ends must be out

BROWNOUT_STEPS = (
    "none",
    "smaller prefills while others decode",
    "shorter answers for new requests",
    "new requests are refused",
)


class LineFormatter(logging.Formatter):
    """`time level event key=value ...`, or `time level message` for what is told in a sentence."""

    def format(self, record: logging.LogRecord) -> str:
        _, fields = _parts(record)
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}"
        line += "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _parts(record)
        line: dict[str, Any] = {"time": _time(record), "level": record.levelname.lower(), "event": event or "log"}
        if (message := record.getMessage()) != event:
            line["message"] = message
        line |= fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs(log_format: str, log_level: str, stream: TextIO | None = None) -> RequestLog:
    """Give Quire's and uvicorn's loggers one handler of this format; on stderr without ever waiting for it."""
    handler = LogWriter() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else LineFormatter())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(log_level.upper())
        logger.propagate = False
    return RequestLog()


class RequestLog:
    """Writes the lines. Cheap when the level leaves them out."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("quire.server")
        self._often: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}  # how often since it was last told
        self._telling: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def finished(
        self,
        summary: RequestSummary,
        *,
        endpoint: str,
        model: str,
        status: int,
        stream: bool = False,
        error_code: str | None = None,
    ) -> None:
        """A request that reached the engine has ended. `status` is what its client got; `error_code` is ours."""
        if not self._logger.isEnabledFor(_level(status)):
            return
        self._write(
            _level(status),
            "request",
            {
                "request_id": summary.request_id,
                "tenant": summary.tenant or None,
                "endpoint": endpoint,
                "model": model,
                "stream": stream,
                "status": status,
                "error": error_code,
                "finish_reason": summary.finish_reason,
                "prompt_tokens": summary.num_prompt_tokens,
                "cached_tokens": summary.num_cached_tokens,
                "output_tokens": summary.num_output_tokens,
                "cache": summary.cache_outcome,
                "preemptions": summary.num_preemptions,
                "drafted": summary.num_draft_tokens or None,
                "accepted": summary.num_accepted_tokens if summary.num_draft_tokens else None,
                "queue_s": summary.queue_s,
                "first_token_s": summary.first_token_s,
                "inter_token_s": summary.inter_token_s,
                "total_s": summary.total_s,
            },
        )

    def refused(
        self,
        request_id: str,
        *,
        endpoint: str,
        status: int,
        error_code: str | None = None,
        param: str | None = None,
        tenant: str = "",
        total_s: float | None = None,
    ) -> None:
        """A request that the engine never saw: malformed, over a limit, or at the wrong time."""
        if not self._logger.isEnabledFor(_level(status)):
            return
        fields = {"request_id": request_id, "tenant": tenant or None, "endpoint": endpoint, "status": status}
        self._write(_level(status), "request", fields | {"error": error_code, "param": param, "total_s": total_s})

    def event(self, event: str, severity: int = logging.INFO, *, message: str = "", **fields: Any) -> None:
        """Something in the life of server or engine. With a message, that is what a line of text says."""
        if self._logger.isEnabledFor(severity):
            self._write(severity, event, fields, message)

    def often(self, event: str, reason: str, **fields: Any) -> None:
        """Something that clients can cause at any rate: told at once, and then every `OFTEN_S` with the number of
        times, and the last one's fields. Belongs to the event loop's thread."""
        self._often[event, reason] = (self._often.get((event, reason), (0, {}))[0] + 1, fields)
        if (event, reason) not in self._telling:
            self._tell_often(event, reason)

    def _tell_often(self, event: str, reason: str) -> None:
        number, fields = self._often.pop((event, reason), (0, {}))
        if number:
            self.event(event, logging.WARNING, reason=reason, times=number, **fields)
            again = asyncio.get_running_loop().call_later(OFTEN_S, self._tell_often, event, reason)
            self._telling[event, reason] = again
        else:
            del self._telling[event, reason]

    def _write(self, level: int, event: str, fields: dict[str, Any], message: str = "") -> None:
        known = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }
        self._logger.log(level, "%s", message or event, extra={_EVENT: (event, known)})


async def watch_engines(
    engines: Callable[[], Mapping[str, ServingEngine]], log: RequestLog, *, interval_s: float = 0.5
) -> None:
    """Log each change of the engines' states and of their brownouts, until cancelled. engines: by model. That one has
    started is told by who waited for it, with what it serves."""
    watched: dict[str, _Watched] = {}
    while True:
        found = engines()
        for name, engine in found.items():
            watched.setdefault(name, _Watched()).look(engine, log, name if len(found) > 1 else None)
        await asyncio.sleep(interval_s)


class _Watched:
    """The state of an engine that was logged last."""

    def __init__(self) -> None:
        self.state = EngineState.STARTING
        self.brownout_level = 0

    def look(self, engine: ServingEngine, log: RequestLog, model: str | None) -> None:
        found, level = engine.health(), self.brownout_level
        has_started = self.state is EngineState.STARTING and found.state is EngineState.READY
        if found.state is not self.state and not has_started:
            bad = found.state in (EngineState.STUCK, EngineState.DEAD)
            log.event(
                f"engine_{found.state.value}",
                logging.ERROR if bad else logging.INFO,
                model=model,
                reason=found.reason or None,
            )
        self.state = found.state
        if found.state is not EngineState.READY:
            return
        load = engine.load()
        if load.brownout_level != level:
            log.event(
                "brownout",
                logging.WARNING if load.brownout_level > level else logging.INFO,
                model=model,
                brownout_level=load.brownout_level,
                was=level,
                means=BROWNOUT_STEPS[load.brownout_level],
                kv_usage=load.kv_usage,
                num_waiting=load.num_waiting,
            )
        self.brownout_level = load.brownout_level


def _level(status: int) -> int:
    return logging.WARNING if status >= 500 else logging.INFO


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    event, fields = getattr(record, _EVENT, ("", {}))
    return event, fields


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quoted(value: Any) -> str:
    """A value as it is where that reads back as one word, else as JSON: no value can forge a field or a line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    plain = text and text.isascii() and text.isprintable() and not any(c in text for c in ' "=\\')
    return text if plain else json.dumps(text)


class LogWriter(logging.Handler):
    """Writes to a file descriptor; never blocks who logs."""

    def __init__(self, descriptor: int | None = None, max_waiting_bytes: int = _MAX_WAITING_BYTES) -> None:
        super().__init__()
        # Not through sys.stderr: a thread that is stuck in it would keep the interpreter from ending.
        self._descriptor = sys.stderr.fileno() if descriptor is None else descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._lines: list[bytes] = []
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._is_writing = False
        threading.Thread(target=self._run, name="quire-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = _encoded(self.format(record))
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            num_bytes = self._num_waiting_bytes + len(line) + _LINE_COST_BYTES
            if num_bytes <= self._max_waiting_bytes:
                self._lines.append(line)
                self._num_waiting_bytes = num_bytes
            else:
                self._num_dropped += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, but not for ever. logging calls it when the program ends."""
        until_s = time.monotonic() + _FLUSH_S
        with self._changed:
            while self._lines or self._is_writing:
                if not self._changed.wait(until_s - time.monotonic()):
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                self._is_writing = True
                if self._num_dropped:
                    self._lines.append(_encoded(self.format(_dropped(self._num_dropped))))
                lines, self._lines = self._lines, []
                self._num_waiting_bytes = self._num_dropped = 0
            self._write(b"".join(lines))

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(0.05)  # the pipe does not block, and it is full
            except OSError:
                return  # closed


def _encoded(line: str) -> bytes:
    # Cut before it is encoded as well, for what a copy of a very long one would cost.
    data = line[:_MAX_LINE_BYTES].encode(errors="replace")
    if len(line) > _MAX_LINE_BYTES or len(data) > _MAX_LINE_BYTES:
        cut = data[:_MAX_LINE_BYTES].decode(errors="ignore")
        data = f"{cut}... ({len(line)} characters, cut here)".encode()
    return data + b"\n"


def _dropped(num_lines: int) -> logging.LogRecord:
    text = f"{num_lines} log lines were left out here: nobody read this log for a while"
    return logging.makeLogRecord({"name": "quire", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text})
