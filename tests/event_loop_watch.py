"""Whether anything holds an event loop up, by its thread's processor time: a busy machine proves nothing."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CALLBACK_S = 0.1  # twice what is meant to be: a neighbour's memory traffic costs processor time here too

_run_callback = asyncio.Handle._run
_watches: dict[asyncio.AbstractEventLoop, _Watch] = {}


class _Watch:
    """One loop's callbacks. A second thread looks where the loop's is when a callback takes long."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._thread_id = threading.get_ident()
        self._started_s: float | None = None  # of the callback that runs
        self._where = ""
        # Collections count: a body of very many parts costs more by them than by its decoding. They walk over what has
        # come since, as in a server's process, and not over everything that the tests have.
        gc.freeze()
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()

    def run(self, handle: asyncio.Handle) -> None:
        self._where = ""
        self._started_s = time.monotonic()
        cpu_s = time.thread_time()
        _run_callback(handle)
        cpu_s = time.thread_time() - cpu_s
        self._started_s = None
        if cpu_s > MAX_CALLBACK_S:
            task = getattr(handle._callback, "__self__", handle)
            self.found.append(f"{cpu_s * 1e3:.0f} ms in {task!r:.300}\n{self._where}")

    def _look(self) -> None:
        while not self._is_over.wait(MAX_CALLBACK_S / 2):
            started_s = self._started_s
            if started_s is not None and time.monotonic() - started_s > MAX_CALLBACK_S / 2:
                frame = sys._current_frames().get(self._thread_id)
                self._where = "".join(traceback.format_stack(frame)[-6:])

    def close(self) -> None:
        gc.unfreeze()
        self._is_over.set()
        self._looking.join()


def _timed_run(handle: asyncio.Handle) -> None:
    watch = _watches.get(handle._loop)
    if watch is None:
        _run_callback(handle)
    else:
        watch.run(handle)


asyncio.Handle._run = _timed_run  # type: ignore[method-assign]


@contextmanager
def watched() -> Iterator[list[str]]:
    """Gathers, for the running loop, every callback of more than MAX_CALLBACK_S: others have waited for it."""
    loop = asyncio.get_running_loop()
    _watches[loop] = watch = _Watch()
    try:
        yield watch.found
    finally:
        del _watches[loop]
        watch.close()
