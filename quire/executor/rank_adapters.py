"""The adapters of a model that is split among ranks: every rank reads an adapter and keeps its own part. No torch here.

What ranks are told goes the way of the plans, in one order for all: so an adapter is in its slot on each of them before
a plan that uses it runs, and none is dropped that is yet to be copied. They answer beside the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire.errors import ErrorInfo, QuireError, WeightsError
from quire.executor.adapter_slots import AdapterInfo, AdapterStore
from quire.executor.rank_messages import AdapterRead, KeepAdapters, PlaceAdapter, ReadAdapter, ToRank
from quire.executor.rank_watch import RankWatch
from quire.log import get_logger

_LOOK_S = 0.1  # at whether the ranks live, while they read


@dataclass(slots=True)
class _Reading:
    """What the ranks answer to one ReadAdapter."""

    number: int
    answers: dict[int, AdapterRead] = field(default_factory=dict)  # by rank
    are_all_there: threading.Event = field(default_factory=threading.Event)


class RankAdapters:
    """An AdapterStore over all ranks."""

    def __init__(self, num_ranks: int, tell: Callable[[ToRank], None], watch: RankWatch) -> None:
        """tell: sends to all ranks, from any thread; watch: hears their answers."""
        self._num_ranks = num_ranks
        self._tell = tell
        self._watch = watch
        self._reading = _Reading(0)  # the one that is under way, or was last
        watch.answer_to(self._take)

    def read(self, name: str, path: str) -> AdapterInfo:
        self._reading = reading = _Reading(self._reading.number + 1)
        self._tell(ReadAdapter(reading.number, name, path))
        while not reading.are_all_there.wait(_LOOK_S):
            self._watch.raise_if_over()
        return self._agreed([reading.answers[rank] for rank in range(self._num_ranks)])

    def keep(self, keys: Sequence[str]) -> None:
        self._tell(KeepAdapters(list(keys)))

    def place(self, key: str, slot: int) -> None:
        self._tell(PlaceAdapter(key, slot))

    def _take(self, answer: AdapterRead) -> None:
        """Note a rank's answer. Called by the thread that watches the ranks."""
        reading = self._reading
        if answer.number == reading.number:  # else nobody waits for it any more
            reading.answers[answer.rank] = answer
            if len(reading.answers) == self._num_ranks:
                reading.are_all_there.set()

    def _agreed(self, answers: list[AdapterRead]) -> AdapterInfo:
        """What every rank found. An error that is the same on all of them is told as one process would tell it."""
        messages = {None if answer.error is None else answer.error.message for answer in answers}
        for answer in answers:
            if answer.error is not None:
                error = answer.error.to_error()
                raise error if len(messages) == 1 else type(error)(f"{self._watch.place_of(answer.rank)}: {error}")
        first, *others = [answer.info for answer in answers if answer.info is not None]
        for rank, info in enumerate(others, 1):
            if info.key != first.key:
                raise WeightsError(
                    f"{self._watch.place_of(rank)} has other files in {info.path} than {self._watch.place_of(0)}: give "
                    "every machine the same copy of the adapter"
                )
        return first


class AdapterReader:
    """A rank's end: adapters are read on a thread of its own, and all else is done between two steps."""

    def __init__(
        self,
        rank: int,
        store: AdapterStore,
        answer: Callable[[AdapterRead], None],
        begin_thread: Callable[[], None] | None = None,
    ) -> None:
        """store: of this rank; answer, begin_thread: called on the thread, the latter first."""
        self._rank = rank
        self._store = store
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-adapters", initializer=begin_thread)

    def handle(self, message: ReadAdapter | KeepAdapters | PlaceAdapter) -> None:
        match message:
            case ReadAdapter():
                self._thread.submit(self._read, message)
            case KeepAdapters(keys):
                self._store.keep(keys)
            case PlaceAdapter(key, slot):
                self._store.place(key, slot)

    def _read(self, asked: ReadAdapter) -> None:
        info = trouble = None
        try:
            info = self._store.read(asked.name, asked.path)
        except Exception as error:
            if not isinstance(error, QuireError):
                get_logger().exception("rank %d could not read the adapter in %s", self._rank, asked.path)
            trouble = ErrorInfo.of(error)
        self._answer(AdapterRead(self._rank, asked.number, info, trouble))
