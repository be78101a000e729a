"""When the steps of replicas end: each on a device of its own, or all of them on the cores of one machine."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from quire.sim.replica import Replica


class StepEnds(ABC):
    """The next end of a step among replicas, in the order of time."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    @abstractmethod
    def next_s(self) -> float:
        """When the next step ends; infinite while nothing runs."""

    @abstractmethod
    def note(self, indices: Collection[int], now_s: float) -> None:
        """These replicas may have begun a step, or cut one short."""

    @abstractmethod
    def pop(self) -> int:
        """The replica whose step ends at `next_s`. Its `due_s` is that moment, for `advance`."""


class OwnDevices(StepEnds):
    """Steps take as long as the cost model says."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self._heap: list[tuple[float, int]] = []  # with entries that are out of date

    @property
    def next_s(self) -> float:
        heap, replicas = self._heap, self._replicas
        while heap and replicas[heap[0][1]].due_s != heap[0][0]:
            heapq.heappop(heap)  # a leap that a request cut short
        return heap[0][0] if heap else math.inf

    def note(self, indices: Collection[int], now_s: float) -> None:
        for index in indices:
            due_s = self._replicas[index].due_s
            if due_s is not None:
                heapq.heappush(self._heap, (due_s, index))

    def pop(self) -> int:
        return heapq.heappop(self._heap)[1]


class SharedCores(StepEnds):
    """Each replica computes on one core; where more compute than there are cores, all go on equally slowly.

    So a step takes longer the more replicas are busy, and the rates that replicas measure of themselves say as much of
    the others as of them. Leaps over several steps are not for such replicas (`ReplicaConfig.can_leap`).
    """

    def __init__(self, replicas: Sequence[Replica], num_cores: int) -> None:
        super().__init__(replicas)
        assert not any(replica.config.can_leap for replica in replicas), "a leap's steps would all take equally long"
        self._num_cores = num_cores
        self._left_s: dict[int, float] = {}  # by replica: what its step has left to compute, on a core of its own
        self._now_s = 0.0

    @property
    def _speed(self) -> float:
        return min(1.0, self._num_cores / len(self._left_s))

    @property
    def next_s(self) -> float:
        return self._now_s + min(self._left_s.values()) / self._speed if self._left_s else math.inf

    def note(self, indices: Collection[int], now_s: float) -> None:
        self._pass(now_s)
        for index in indices:
            due_s = self._replicas[index].due_s
            if due_s is not None and index not in self._left_s:
                self._left_s[index] = due_s - now_s

    def pop(self) -> int:
        now_s, index = self.next_s, min(self._left_s, key=self._left_s.__getitem__)
        self._pass(now_s)
        del self._left_s[index]
        self._replicas[index].due_s = now_s
        return index

    def _pass(self, now_s: float) -> None:
        if self._left_s:
            done_s = (now_s - self._now_s) * self._speed
            for index in self._left_s:
                self._left_s[index] -= done_s
        self._now_s = now_s
