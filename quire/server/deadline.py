"""A request's deadline: after it, the request is ended, its blocks are freed, and its client is told.

A client sets it with the field `timeout` or the header `x-request-timeout`, in seconds from when the server has read
the request. The operator sets a default and a ceiling.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from quire.errors import BadRequestError
from quire.server.errors import NO_RETRY, ApiError
from quire.server.life import ServerLife
from quire.server.settings import ServerSettings

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout"
_MAX_TIMEOUT_S = 1e9  # what a loop's timer takes for sure


class DeadlineError(ApiError):
    """The request took longer than it may. Sent again, it would take as long again."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            504,
            f"the request did not finish within its timeout of {timeout_s:g} s and was ended",
            type="timeout",
            code="timeout",
            headers=NO_RETRY,
        )


def timeout_s(settings: ServerSettings, *, field: Any = None, header: str | None = None) -> float | None:
    """The seconds that a request may take: its field, else its header, else the server's default; never over the
    server's ceiling. Raises BadRequestError for what is no time."""
    if field is not None:
        wanted = _seconds(field, "timeout")
    elif header is not None:
        wanted = _seconds(header, TIMEOUT_HEADER)
    else:
        return settings.default_timeout_s if settings.default_timeout_s is not None else settings.max_timeout_s
    if settings.max_timeout_s is not None and wanted > settings.max_timeout_s:
        raise BadRequestError(
            f"timeout must be at most {settings.max_timeout_s:g} s on this server, got {wanted:g}", param="timeout"
        )
    return wanted


def _seconds(value: Any, param: str) -> float:
    number = math.nan
    is_header = param == TIMEOUT_HEADER  # a header is text, a field is a number
    if not isinstance(value, bool) and isinstance(value, str if is_header else (int, float)):
        with contextlib.suppress(ValueError):
            number = float(value)
    if not 0 < number <= _MAX_TIMEOUT_S:  # also true of nan
        raise BadRequestError(f"{param} must be a number of seconds > 0, got {value!r}", param=param)
    return number


class Deadline:
    """Begins when the request has arrived. `watch` runs one or more of the request's streams under it."""

    __slots__ = ("_at_s", "_life", "_loop", "timeout_s")

    def __init__(self, timeout_s: float | None, life: ServerLife, *, arrived_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._life = life
        self._loop = asyncio.get_running_loop()
        begins_s = self._loop.time() if arrived_s is None else arrived_s
        self._at_s = None if timeout_s is None else begins_s + timeout_s

    async def wait_for(self, work: asyncio.Future[Any], gone: asyncio.Future[None]) -> bool:
        """Whether the work is done; not, if the client is gone first. Raises as `watch` does; the work goes on then."""
        cut: asyncio.Future[ApiError] = self._loop.create_future()

        def end(with_error: ApiError) -> None:
            if not cut.done():
                cut.set_result(with_error)

        left_s = None if self._at_s is None else max(self._at_s - self._loop.time(), 0.0)
        with self._life.ends_with(end):
            await asyncio.wait((work, gone, cut), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done() or gone.done():
            return work.done()
        if cut.done():
            raise cut.result()
        assert self.timeout_s is not None
        raise DeadlineError(self.timeout_s)

    async def watch(self, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The stream's items. Raises DeadlineError at the deadline, or the error with which the server cuts it off;
        the stream is closed by then.

        One timer for the whole stream, no task: an item costs no more than without a deadline. The timer must not
        cancel the task while our reader works between two items (it may be sending one), so it then closes the stream
        and the reader learns of it when it asks for the next item.
        """
        waiting: asyncio.Task[Any] | None = None
        closing: asyncio.Task[None] | None = None
        error: ApiError | None = None

        def end(with_error: ApiError) -> None:
            nonlocal error, closing
            if error is not None:
                return
            error = with_error
            if waiting is not None:
                waiting.cancel()
            else:
                closing = self._loop.create_task(stream.aclose())

        timer: asyncio.TimerHandle | None = None
        if self._at_s is not None:
            assert self.timeout_s is not None
            timer = self._loop.call_at(self._at_s, end, DeadlineError(self.timeout_s))
        try:
            with self._life.ends_with(end):
                while error is None:
                    waiting = asyncio.current_task()
                    try:
                        item = await stream.__anext__()
                    except StopAsyncIteration:
                        return
                    except asyncio.CancelledError:
                        # Our own cancel, unless other code cancelled the task too: that one goes first.
                        if error is None or waiting is None or waiting.uncancel() > 0:
                            raise
                        break
                    finally:
                        waiting = None
                    yield item
                raise error
        finally:
            if timer is not None:
                timer.cancel()
            if closing is not None:
                await closing
            else:
                await stream.aclose()
            error = None  # its traceback has this frame: only the garbage collector would free the request
