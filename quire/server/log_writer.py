"""Log lines on their way to stderr, written by a thread of their own.

Whoever reads them may stop: a supervisor that forgot its pipe, a terminal after Ctrl-S, a disk that hangs. Requests
must not wait for that, so lines wait here instead, as many as there is room for; later ones are counted and left out.
A line that is far longer than any of ours quotes somebody, and is cut.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

_MAX_WAITING_BYTES = 4 << 20  # of text: some ten thousand lines
_MAX_LINE_BYTES = 32 << 10  # a long traceback; a line that quotes what a client sent may be as long as that
_LINE_COST_BYTES = 64  # of a line in the queue, beside its text
_FLUSH_S = 1.0  # in which the last lines of a program that ends must be out


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
                time.sleep(0.05)  # somebody set the pipe so; it is full
            except OSError:
                return  # closed: there is nobody to tell


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
