"""Log lines on their way to stderr, written by a thread of their own.

Whoever reads them may stop: a supervisor that forgot its pipe, a terminal after Ctrl-S, a disk that hangs. Requests
must not wait for that, so lines wait here instead, as many as there is room for; later ones are counted and left out.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque

_MAX_LINES = 10_000
_FLUSH_S = 1.0  # in which the last lines of a program that ends must be out


class LogWriter(logging.Handler):
    """Writes to a file descriptor; never blocks who logs."""

    def __init__(self, descriptor: int | None = None, max_lines: int = _MAX_LINES) -> None:
        super().__init__()
        # Not through sys.stderr: a thread that is stuck in it would keep the interpreter from ending.
        self._descriptor = sys.stderr.fileno() if descriptor is None else descriptor
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._is_writing = False
        threading.Thread(target=self._run, name="quire-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) < self._max_lines:
                self._lines.append(line)
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
                    self._lines.append(self.format(_dropped(self._num_dropped)))
                text = "\n".join(self._lines) + "\n"
                self._lines.clear()
                self._num_dropped = 0
            self._write(text.encode(errors="replace"))

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(0.05)  # somebody set the pipe so; it is full
            except OSError:
                return  # closed: there is nobody to tell


def _dropped(num_lines: int) -> logging.LogRecord:
    text = f"{num_lines} log lines were left out here: nobody read this log for a while"
    return logging.makeLogRecord({"name": "quire", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text})
