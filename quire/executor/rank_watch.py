"""Which ranks live, and what they tell beside steps. A rank that ends, fails or is silent ends all of them, with an
error that names it.

When one rank dies the others fail too, because they talk to it: so troubles are collected for a moment, and the one
that explains the rest is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import zmq

from quire.errors import ErrorInfo, QuireError, RankError
from quire.executor.rank_messages import AdapterRead, Beat, from_rank
from quire.log import get_logger
from quire.tiers.split import Told

SILENCE_S = 6.0  # without a heartbeat, of which there is one a second: it hangs
LOADING_S = 60.0  # the same before all ranks are ready: imports and large reads hold up the thread that sends them
START_S = 300.0  # until the first: an import from a cold disk takes its time
_GRACE_S = 0.7  # for other causes, once there is one
_LOOK_S = 0.2


class Cause(IntEnum):
    """Why a rank is in trouble. A cause that explains others comes before them."""

    KILLED = 0
    SILENT = 1
    REFUSED = 2  # it said why, in an error of ours
    FAILED = 3  # an exception, which may be that another rank is gone
    ENDED = 4


@dataclass(slots=True)
class RankUse:
    """What a rank has said of itself last."""

    seen_s: float
    has_beaten: bool = False
    num_steps: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(slots=True, order=True)
class _Trouble:
    cause: Cause
    at_s: float
    rank: int
    text: str = field(compare=False)
    error: QuireError | None = field(compare=False, default=None)


class RankWatch:
    """A thread that reads what ranks say beside their steps, and ends everything when one of them has ended."""

    def __init__(
        self, num_ranks: int, beats: zmq.Socket[bytes], on_failure: Callable[[], None], on_told: Callable[[Told], None]
    ) -> None:
        """`beats` belongs to the thread from now on. on_failure: called once, from the thread; on_told: likewise, with
        what a rank tells of its stores."""
        now_s = time.monotonic()
        self.uses = [RankUse(now_s) for _ in range(num_ranks)]
        self._beats = beats
        self._on_failure = on_failure
        self._on_told = on_told
        self._lock = threading.Lock()
        self._troubles: list[_Trouble] = []
        self._describe: Callable[[int], str] = lambda rank: "a host that has not answered"
        self._on_adapter: Callable[[AdapterRead], None] = lambda read: None
        self._failure: QuireError | None = None
        self._is_ready = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quire-rank-watch", daemon=True)
        self._thread.start()

    def describe_with(self, describe: Callable[[int], str]) -> None:
        self._describe = describe

    def place_of(self, rank: int) -> str:
        return f"rank {rank} on {self._describe(rank)}"

    def answer_to(self, on_adapter: Callable[[AdapterRead], None]) -> None:
        """Call this on the watch's thread with what each rank answers when it has read an adapter."""
        self._on_adapter = on_adapter

    def all_are_ready(self) -> None:
        """Take a rank that is silent for a few seconds to hang, from now on."""
        self._is_ready = True

    def report(self, rank: int, cause: Cause, text: str, error: QuireError | None = None) -> None:
        """Something is wrong with a rank. From any thread."""
        with self._lock:
            if not self._is_over.is_set():
                self._troubles.append(_Trouble(cause, time.monotonic(), rank, text, error))

    def report_error(self, rank: int, info: ErrorInfo) -> None:
        error = info.to_error() if info.kind else None
        self.report(rank, Cause.FAILED if error is None else Cause.REFUSED, info.message, error)

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def raise_if_over(self) -> None:
        """Also raise if the engine was closed: for callers that wait for ranks beside the steps."""
        is_over = self._is_over.is_set()
        self.raise_if_failed()
        if is_over:
            raise RankError("the engine has been closed")

    @property
    def is_failing(self) -> bool:
        return bool(self._troubles) or self._failure is not None

    def close(self) -> None:
        """Ranks may end from now on."""
        with self._lock:
            self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        try:
            self._look_until_over()
        except Exception as error:  # ours; but without a watch, waiting for a rank would never end
            get_logger().exception("the watch over the ranks failed")
            self._fail(RankError(f"what ranks tell cannot be heard any more: {error!r}"))
        self._beats.close(linger=0)

    def _fail(self, failure: QuireError) -> None:
        self._failure = failure
        self._is_over.set()
        self._on_failure()

    def _look_until_over(self) -> None:
        looked_s = time.monotonic()
        while not self._is_over.is_set():
            self._beats.poll(int(_LOOK_S * 1e3))
            now_s = time.monotonic()
            if now_s - looked_s > 2.0:  # we were stopped ourselves: nobody's fault
                for use in self.uses:
                    use.seen_s = now_s
            looked_s = now_s
            self._take_messages(now_s)
            for rank, use in enumerate(self.uses):
                limit_s = (SILENCE_S if self._is_ready else LOADING_S) if use.has_beaten else START_S
                if now_s - use.seen_s > limit_s and not self._troubles:
                    self.report(rank, Cause.SILENT, f"hangs: it has sent no heartbeat for {limit_s:g} s")
            with self._lock:
                trouble = min(self._troubles, default=None)
                is_told = trouble is not None and now_s - self._troubles[0].at_s > _GRACE_S
            if trouble is not None and is_told:
                self._fail(self._error(trouble))

    def _take_messages(self, now_s: float) -> None:
        while True:
            try:
                message = from_rank.decode(self._beats.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case Beat(rank, num_steps, busy_s, waiting_s):
                    self.uses[rank] = RankUse(now_s, True, num_steps, busy_s, waiting_s)
                case AdapterRead():
                    self._on_adapter(message)
                case Told():
                    self._on_told(message)
                case other:
                    raise AssertionError(f"{other} beside the steps")

    def _error(self, trouble: _Trouble) -> QuireError:
        where = self.place_of(trouble.rank)
        if trouble.error is not None:  # of the kind that one process would have raised
            return type(trouble.error)(f"{where}: {trouble.text}")
        return RankError(f"{where} {'failed: ' if trouble.cause is Cause.FAILED else ''}{trouble.text}")
