"""Tokenizing and rendering for requests: off the event loop where it takes long, and never much of it at once.

A text's tokens take about 400 bytes each while they are made, and a processor that the engine may need too. So there
are lanes: long texts go one at a time, grammars that may have to be compiled have their own, and others never queue
behind them. A request waits under its deadline; work that has not begun when the deadline passes or the client leaves
is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.server.deadline import TIMEOUT_HEADER, Deadline, timeout_s
from quire.server.endpoint import ClientGone, Exchange

T = TypeVar("T")

# Tokenizing takes one to four microseconds per character. Up to the first, a thread costs more than the wait.
_INLINE_CHARS = 2_000
_LONG_CHARS = 65_536
_NUM_SHORT, _NUM_LONG, _NUM_COMPILING = 2, 1, 2


class TextWork:
    """The threads that prepare requests. They start when first needed."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_NUM_SHORT, thread_name_prefix="quire-text")
        self._long = ThreadPoolExecutor(_NUM_LONG, thread_name_prefix="quire-long-text")
        self._compiling = ThreadPoolExecutor(_NUM_COMPILING, thread_name_prefix="quire-compiling")

    async def run(
        self,
        exchange: Exchange,
        deadline: Deadline,
        make: Callable[[], T],
        num_chars: int,
        *,
        is_chat: bool = False,
        compiles: bool = False,
    ) -> T:
        """Run `make` and return its result. A long `make` should stop early once `exchange.is_abandoned`.

        A chat is never rendered on the event loop, however short: its template is a program that came with the model.
        Work that compiles a grammar has a lane of its own, so that no other waits behind it.
        """
        if num_chars <= _INLINE_CHARS and not is_chat and not compiles:
            return make()
        lane = self._short if num_chars <= _LONG_CHARS else self._long
        if compiles:
            lane = self._compiling
        job = lane.submit(make)
        work = asyncio.wrap_future(job)
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stop_watching = exchange.on_gone(lambda: gone.set_result(None))
        try:
            if not await deadline.wait_for(work, gone):
                raise ClientGone
            return work.result()
        finally:
            stop_watching()
            if not work.done():
                exchange.is_abandoned = True
                job.cancel()  # takes it out of the lane, if it has not begun
            # Their exceptions refer to this frame by the traceback: only the garbage collector would free the request.
            del work, job


def request_deadline(exchange: Exchange, field: float | None = None) -> Deadline:
    """The request's deadline, from when its body was read. `field` is the timeout that the body names."""
    context = exchange.context
    seconds = timeout_s(context.settings, field=field, header=exchange.header(TIMEOUT_HEADER))
    return Deadline(seconds, context.life, arrived_s=exchange.arrived_s)
