"""Ctrl-C between two steps instead of in the middle of one, so that a run can be closed and its results kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set by the first Ctrl-C. A second one interrupts at once, as usual."""

    def __init__(self) -> None:
        self.is_set = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def stop_on_interrupt() -> Iterator[StopFlag]:
    """Take Ctrl-C as a flag. Only the main thread may take signals; elsewhere the flag is never set."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.signal(signal.SIGINT, flag.handle)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
