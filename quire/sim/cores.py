"""When the steps of replicas end: each on a device of its own, or all of them on the cores of one machine."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from quire.sim.replica import Replica

# Of Linux 6.18 with 250 ticks a second: cores change hands at ticks. How often one of three moves is as it was seen: of
# three programs that compute on two cores without end one moved 6 to 8 times a second, of three replicas 5 times.
_TURN_S = 4e-3
_MOVE_EVERY_S = 0.15


class StepEnds(ABC):
    """The next end of a step among replicas, in the order of time."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    @abstractmethod
    def next_s(self) -> float:
        """When the next step ends, or a core goes to another replica; infinite while nothing runs."""

    @abstractmethod
    def note(self, indices: Collection[int], now_s: float) -> None:
        """These replicas may have begun a step, or cut one short."""

    @abstractmethod
    def pop(self) -> int | None:
        """The replica whose step ends at `next_s`: its `due_s` is that moment, for `advance`. None: no step ends, but
        a core goes to another replica."""


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
    """Replicas of one thread each on the cores of one machine, as Linux shares them.

    Each core has a queue. The first in it computes; if others wait, for a turn, and then goes to the queue's end. A
    replica that wakes up takes the core with the shortest queue, and no queue stays longer than another by two: the
    last in it moves. Longer by one stays for a while, until the one that has been there longest moves. So of three
    replicas on two cores one has a core of its own, now one and now another, and two share the other core.

    A step takes longer the more replicas are busy, and the rates that replicas measure of themselves say as much of the
    others as of them. Leaps over several steps are not for such replicas (`ReplicaConfig.can_leap`).
    """

    def __init__(self, replicas: Sequence[Replica], num_cores: int) -> None:
        super().__init__(replicas)
        assert not any(replica.config.can_leap for replica in replicas), "a leap's steps would all take equally long"
        self._queues: list[list[int]] = [[] for _ in range(num_cores)]  # replicas, the first of which computes
        self._turn_left_s = [0.0] * num_cores  # below zero: the first has had more than a turn, alone
        self._core_of: dict[int, int] = {}  # by replica, in the order in which they came to their cores
        self._left_s: dict[int, float] = {}  # by replica: what its step has left to compute
        self._move_s = math.inf  # when one moves although queues differ by one only
        self._now_s = 0.0

    @property
    def next_s(self) -> float:
        return min([self._move_s, *(self._now_s + self._stretch_s(core) for core in self._busy_cores())])

    def note(self, indices: Collection[int], now_s: float) -> None:
        self._pass(now_s)
        for index in indices:
            due_s = self._replicas[index].due_s
            if due_s is None:
                self._leave(index)
            elif index not in self._left_s:
                self._left_s[index] = due_s - now_s
                if index not in self._core_of:
                    self._enter(index, self._emptiest())
        self._level()

    def pop(self) -> int | None:
        now_s = self.next_s
        if now_s == self._move_s:
            self._pass(now_s)
            self._move_oldest()
            return None
        core = min(self._busy_cores(), key=self._stretch_s)
        queue = self._queues[core]
        index = queue[0]
        is_end = self._left_s[index] <= self._stretch_s(core)
        self._pass(now_s)
        if is_end:
            del self._left_s[index]
            self._replicas[index].due_s = now_s
            return index
        queue.append(queue.pop(0))
        self._turn_left_s[core] = _TURN_S
        return None

    # -- time

    def _busy_cores(self) -> list[int]:
        return [core for core, queue in enumerate(self._queues) if queue]

    def _stretch_s(self, core: int) -> float:
        """For how long the first of the queue goes on: to the end of its step, or of its turn."""
        queue = self._queues[core]
        left_s = self._left_s[queue[0]]
        return left_s if len(queue) == 1 else min(left_s, max(0.0, self._turn_left_s[core]))

    def _pass(self, now_s: float) -> None:
        passed_s = now_s - self._now_s
        if passed_s > 0:
            for core in self._busy_cores():
                first = self._queues[core][0]
                self._left_s[first] = max(0.0, self._left_s[first] - passed_s)
                self._turn_left_s[core] -= passed_s
        self._now_s = now_s

    # -- which core

    def _fullest(self) -> int:
        return max(range(len(self._queues)), key=lambda core: len(self._queues[core]))

    def _emptiest(self) -> int:
        return min(range(len(self._queues)), key=lambda core: len(self._queues[core]))

    def _enter(self, index: int, core: int) -> None:
        queue = self._queues[core]
        if not queue:
            self._turn_left_s[core] = _TURN_S
        queue.append(index)
        self._core_of[index] = core

    def _leave(self, index: int) -> None:
        core = self._core_of.pop(index, None)
        if core is None:
            return
        if self._queues[core][0] == index:
            self._turn_left_s[core] = _TURN_S
        self._queues[core].remove(index)

    def _move_oldest(self) -> None:
        fullest, emptiest = self._fullest(), self._emptiest()
        oldest = next(index for index, core in self._core_of.items() if core == fullest)
        self._leave(oldest)
        self._enter(oldest, emptiest)
        self._move_s = math.inf
        self._level()

    def _level(self) -> None:
        while True:
            fullest, emptiest = self._fullest(), self._emptiest()
            longest, difference = len(self._queues[fullest]), len(self._queues[fullest]) - len(self._queues[emptiest])
            if difference < 2:
                break
            last = self._queues[fullest][-1]
            self._leave(last)
            self._enter(last, emptiest)
        if difference == 0 or longest == 1:
            self._move_s = math.inf
        elif self._move_s == math.inf:
            self._move_s = self._now_s + _MOVE_EVERY_S
