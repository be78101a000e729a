"""Which of a fleet's replicas a request goes to: the product's own router, and simpler ones to compare it with."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from quire.kv.hashing import block_hasher, root_hash
from quire.request import Request
from quire.router.policy import CacheChanges, Prompt, ReplicaLoad, Router, Ticket
from quire.sim.replica import Replica

_REPORT_EVERY_S = 0.1  # as engine/loop.py has it


class Policy(ABC):
    """Which replica a request goes to."""

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        self.replicas = replicas

    @abstractmethod
    def choose(self, request: Request) -> int:
        """The index of a replica, which is given the request at once."""

    def on_first_token(self, index: int, request: Request) -> None:  # noqa: B027 - most do not care
        """The request's prompt is computed there."""

    def on_end(self, index: int, request: Request) -> None:  # noqa: B027
        """The request has ended there."""


class RoundRobin(Policy):
    _last = -1

    def choose(self, request: Request) -> int:
        self._last = (self._last + 1) % len(self.replicas)
        return self._last


class Random(Policy):
    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        super().__init__(replicas, clock)
        self._rng = random.Random(0)

    def choose(self, request: Request) -> int:
        return self._rng.randrange(len(self.replicas))


class LeastLoaded(Policy):
    """The fewest requests under way; of equals, the one that was chosen or done longest ago."""

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        super().__init__(replicas, clock)
        self._counts = [0] * len(replicas)
        self._turn = len(replicas)
        self._heap = [(0, index, index) for index in range(len(replicas))]  # with entries that are out of date

    def choose(self, request: Request) -> int:
        while True:
            count, _, index = heapq.heappop(self._heap)
            if count == self._counts[index]:
                self._count(index, 1)
                return index

    def on_end(self, index: int, request: Request) -> None:
        self._count(index, -1)

    def _count(self, index: int, change: int) -> None:
        self._counts[index] += change
        self._turn += 1
        heapq.heappush(self._heap, (self._counts[index], self._turn, index))


class FirstToken(Policy):
    """The product's own router: the replica that is expected to give the first token soonest, by what replicas tell of
    their caches and their steps, as often as engines do."""

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        super().__init__(replicas, clock)
        config = replicas[0].config
        self._clock = clock
        self._router = Router(config.block_size, clock=clock)
        self._hash_block = block_hasher(config.block_size) if config.enable_prefix_caching else None
        self._logs = [replica.kv.log_cache() for replica in replicas]
        self._told = [0] * len(replicas)
        self._names = [str(index) for index in range(len(replicas))]
        self._indices = {name: index for index, name in enumerate(self._names)}
        for name in self._names:
            self._router.add(name, max_num_seqs=config.scheduler.max_num_seqs)
        self._tickets: dict[str, Ticket] = {}
        self._next_report_s = -1.0

    def choose(self, request: Request) -> int:
        if self._clock() >= self._next_report_s:
            self._report()
        ticket = self._router.route(Prompt(request.num_prompt_tokens, self._hashes(request), request.tenant))
        assert ticket is not None, "every replica is open"
        self._tickets[request.request_id] = ticket
        return self._indices[ticket.replica]

    def on_first_token(self, index: int, request: Request) -> None:
        self._router.on_first_token(self._tickets[request.request_id])

    def on_end(self, index: int, request: Request) -> None:
        self._router.on_end(self._tickets.pop(request.request_id))

    def _report(self) -> None:
        self._next_report_s = self._clock() + _REPORT_EVERY_S
        for index, (name, replica, log) in enumerate(zip(self._names, self.replicas, self._logs, strict=True)):
            costs = replica.scheduler.costs
            load = ReplicaLoad(prefill_tokens_per_s=costs.mixed_tokens_per_s, step_s=costs.decodes_s)
            self._router.on_load(name, load)
            if log.at != self._told[index]:
                change = log.read(self._told[index])
                self._told[index] = change.at
                self._router.on_cache(
                    name, CacheChanges(filled=change.filled, evicted=change.evicted, is_snapshot=change.is_snapshot)
                )

    def _hashes(self, request: Request) -> list[bytes]:
        """The hashes of the full blocks before the prompt's last token."""
        if self._hash_block is None:
            return []
        tokens, size = request.prompt_token_ids, self._router.block_size
        parent, hashes = root_hash(request.salt, request.adapter), []
        for first in range(0, len(tokens) - size, size):
            parent = self._hash_block(parent, tokens[first : first + size])
            hashes.append(parent)
        return hashes


POLICIES: dict[str, type[Policy]] = {
    "first-token": FirstToken,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": Random,
}
