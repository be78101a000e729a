"""Starting the engine's process, hearing of its end, and what a process that serves does about garbage."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quire
from quire.engine.brownout import BrownoutSettings
from quire.errors import ConfigError
from quire.log import get_logger

# Begins a line on the engine's stderr that is a log record in JSON: [level, text].
LOG_MARK = "\x1e"
_NUM_TAIL_LINES = 20


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineProcessOptions:
    """What a server may set about the engine's process, beside what it runs."""

    step_timeout_s: float = 60.0  # a step that takes longer is stuck
    dump_dir: str = field(default_factory=tempfile.gettempdir)  # where the watchdog writes what it saw
    heartbeat_s: float = 1.0
    brownout: BrownoutSettings = field(default_factory=BrownoutSettings)
    publishes_cache: bool = False  # for a router: the engine tells which blocks its prefix cache gains and loses
    environment: Mapping[str, str] = field(default_factory=dict)  # added to ours
    isolated_tenants: tuple[str, ...] = ()  # who find no cached prefix but their own; empty: everybody shares them
    # What to run instead of this interpreter's quire.engine.process. It gets the same input.
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("step_timeout_s", "heartbeat_s"):
            if not 0 < getattr(self, name) <= 1e9:
                raise ConfigError(f"{name} must be more than 0 seconds, got {getattr(self, name):g}")


class ChildProcess:
    """A running engine process. `on_exit` is called once, from a thread of its own, with the exit status."""

    def __init__(self, options: EngineProcessOptions, launch: bytes, on_exit: Callable[[int], None]) -> None:
        command = options.command or (sys.executable, "-P", "-m", "quire.engine.process")
        # A process group of its own: Ctrl-C in a terminal goes to the server alone.
        grouping: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**child_environment(), **options.environment},
            **grouping,
        )
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._reader = threading.Thread(target=self._read_stderr, name="quire-engine-stderr", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="quire-engine-wait", daemon=True)
        self._reader.start()
        self._waiter.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it has died already, and on_exit says so
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

    def stderr_tail(self) -> str:
        """The last lines that were no log lines: a traceback, or what a library had to say."""
        return "\n".join(self._tail)

    def release(self) -> None:
        """After the exit: close what is left open."""
        self._waiter.join()
        self._reader.join(timeout=1.0)  # a grandchild may still hold it open
        assert self._process.stdin is not None and self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._reader.is_alive():
            self._process.stderr.close()

    def _wait(self) -> None:
        status = self._process.wait()
        self._reader.join(timeout=0.5)  # its last words
        self._on_exit(status)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            # Whatever is wrong with a line or with our log: an engine whose words nobody takes stops at a full pipe.
            with contextlib.suppress(Exception):
                self._take_line(raw.decode("utf-8", "replace").rstrip("\r\n"))

    def _take_line(self, line: str) -> None:
        if not line.startswith(LOG_MARK):
            self._tail.append(line)
            get_logger().warning("engine: %s", line)
            return
        try:
            level, text = json.loads(line.removeprefix(LOG_MARK))
        except ValueError:
            level, text = logging.INFO, line
        get_logger().log(level, "%s", text)


def describe_exit(status: int) -> str:
    """An exit status for people."""
    if status >= 0:
        return f"the engine process exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the kernel does that when memory runs out)" if -status == signal.SIGKILL else ""
    return f"the engine process was killed by {name}{hint}"


def child_environment() -> dict[str, str]:
    """Ours, with the way to the same quire: with -P an interpreter does not look into the working directory, in which
    others may have put modules."""
    root = str(Path(quire.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, others] if others else [root])}


def keep_what_is_built() -> None:
    """Model, kernels and modules stay: without this, each full collection would walk over all of them."""
    gc.collect()
    gc.freeze()


def settle_for_serving() -> None:
    """For a process that serves from now on: young garbage, too, need not be looked for at every step."""
    keep_what_is_built()
    gc.set_threshold(10_000, 10, 10)
