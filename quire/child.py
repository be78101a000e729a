"""A child process of our own: started with what it is to do on its standard input, heard of when it ends.

Its log lines become ours, and it dies with us, whatever way we end. Both halves are here: the parent's first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import quire
from quire.log import get_logger

# Begins a line on a child's stderr that is a log record in JSON: [level, text].
LOG_MARK = "\x1e"
_NUM_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A running child. `on_exit` is called once, from a thread of its own, with the exit status."""

    def __init__(
        self,
        command: Sequence[str],
        launch: bytes,
        on_exit: Callable[[int], None],
        *,
        name: str = "engine",
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """launch: what it reads first; environment: what it has beside ours; descriptors: open files of ours that it
        has too, under the same numbers."""
        self._name = name
        # A process group of its own: Ctrl-C in a terminal goes to the parent alone.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment() | dict(environment or {}),
            process_group=0,
            pass_fds=descriptors,
        )
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._reader = threading.Thread(target=self._read_stderr, name=f"quire-{name}-stderr", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"quire-{name}-wait", daemon=True)
        self._reader.start()
        self._waiter.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # then it has died already, and on_exit says so
            self._process.stdin.write(struct.pack("<Q", len(launch)) + launch)
            self._process.stdin.flush()  # and it stays open: its end tells the child that we are gone

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stderr_tail(self) -> str:
        """The last lines that were no log lines: a traceback, or what a library had to say."""
        return "\n".join(self._tail)

    def release(self) -> None:
        """Close what is left open after the exit."""
        self._waiter.join()
        self._reader.join(timeout=1.0)  # a grandchild may still hold it open
        self._close_pipes()

    def _wait(self) -> None:
        status = self._process.wait()
        self._reader.join(timeout=0.5)  # its last words
        self._close_pipes()  # whether or not somebody releases us
        self._on_exit(status)

    def _close_pipes(self) -> None:
        assert self._process.stdin is not None and self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._reader.is_alive():
            self._process.stderr.close()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            # Whatever is wrong with a line or with our log: a child whose words nobody takes stops at a full pipe.
            with contextlib.suppress(Exception):
                self._take_line(raw.decode("utf-8", "replace").rstrip("\r\n"))

    def _take_line(self, line: str) -> None:
        if not line.startswith(LOG_MARK):
            self._tail.append(line)
            get_logger().warning("%s: %s", self._name, line)
            return
        try:
            level, text = json.loads(line.removeprefix(LOG_MARK))
        except ValueError:
            level, text = logging.INFO, line
        get_logger().log(level, "%s", text)


def describe_exit(status: int, who: str = "the engine process") -> str:
    """An exit status for people."""
    if status >= 0:
        return f"{who} exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the kernel does that when memory runs out)" if -status == signal.SIGKILL else ""
    return f"{who} was killed by {name}{hint}"


def child_environment() -> dict[str, str]:
    """Ours, with the way to the same quire: with -P an interpreter does not look into the working directory, in which
    others may have put modules."""
    root = str(Path(quire.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, others] if others else [root])}


# -- in the child


def read_launch(stream: BinaryIO) -> bytes:
    """What the parent has written for it."""
    (size,) = struct.unpack("<Q", stream.read(8))
    return stream.read(size)


class _ParentHandler(logging.Handler):
    """Log lines go to the parent as what they are, and it formats them like its own."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        sys.stderr.write(f"{LOG_MARK}{json.dumps([record.levelno, text])}\n")
        sys.stderr.flush()


def log_to_parent(level: int) -> None:
    logger = logging.getLogger("quire")
    logger.addHandler(_ParentHandler())
    logger.setLevel(level)
    logger.propagate = False


def die_with_parent(parent_pid: int, *, with_its_thread: bool) -> None:
    """Twice: the kernel's own way where there is one, and the end of standard input, which works everywhere.

    with_its_thread: the thread that started this process is there as long as the parent is."""
    if with_its_thread and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it was gone before the kernel was asked
            os._exit(1)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent-watch", daemon=True).start()
