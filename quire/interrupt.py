"""Ctrl-C between two steps instead of in the middle of one, so that a run can be closed and its results kept."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_Result = TypeVar("_Result")


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


def run_until_interrupted(work: Coroutine[Any, Any, _Result]) -> _Result:
    """asyncio.run whose work is cancelled by the first Ctrl-C and left to end by any further one: asyncio itself would
    raise the second in whichever task runs, and print that task's traceback at exit."""
    is_interrupted = False

    async def watched() -> _Result:
        task = asyncio.current_task()
        assert task is not None

        def on_interrupt() -> None:
            nonlocal is_interrupted
            if not is_interrupted:
                is_interrupted = True
                task.cancel()

        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, on_interrupt)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if is_interrupted:
            raise KeyboardInterrupt from None
        raise
