"""Ways of choosing a replica that the product's router is compared with, in front of servers and in the simulator.

Each is a function of the replicas, the prompt, and how many requests were routed before. The prompt's `hashes` are
whatever chain stands for its beginnings: block hashes, or pieces of its text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from quire.router.policy import Prompt, Replica, Router, Ticket

Pick = Callable[[Sequence[Replica], Prompt, int], Replica]


def round_robin(among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
    return among[nth % len(among)]


def pick_random(among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
    return random.Random(nth).choice(among)


def least_loaded(among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
    first = nth % len(among)
    return min([*among[first:], *among[:first]], key=_load)


def power_of_two(among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
    """The less loaded of two that are drawn by lot."""
    return min(random.Random(nth).sample(among, min(2, len(among))), key=_load)


def consistent_hash(among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
    """By how the prompt begins: the same beginning, the same replica, however busy that is."""
    key = prompt.hashes[min(3, len(prompt.hashes) - 1)] if prompt.hashes else b""
    return max(among, key=lambda replica: random.Random(key + replica.name.encode()).random())


class CacheAware:
    """sglang-router's `cache_aware` as its documentation describes it, with the defaults of version 0.3.2: the replica
    that was sent the longest beginning of the prompt, if that is more than three tenths of it, and else the one that
    was sent the least text; but the least loaded one where the loads are far apart. Nothing is ever forgotten: these
    runs are far from the size where it would be."""

    least_match = 0.3
    most_apart, most_times = 64, 1.5

    def __init__(self) -> None:
        self._sent: dict[str, set[bytes]] = {}  # by replica

    def __call__(self, among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
        for replica in among:
            self._sent.setdefault(replica.name, set())
        chosen = self._choose(among, prompt)
        self._sent[chosen.name].update(prompt.hashes)
        return chosen

    def _choose(self, among: Sequence[Replica], prompt: Prompt) -> Replica:
        least, most = min(map(_load, among)), max(map(_load, among))
        if most - least > self.most_apart and most > self.most_times * least:
            return min(among, key=_load)
        best = max(among, key=lambda replica: self._num_sent(replica, prompt))
        if self._num_sent(best, prompt) > self.least_match * len(prompt.hashes):
            return best
        return min(among, key=lambda replica: len(self._sent[replica.name]))

    def _num_sent(self, replica: Replica, prompt: Prompt) -> int:
        sent = self._sent[replica.name]
        return next((count for count, link in enumerate(prompt.hashes) if link not in sent), len(prompt.hashes))


def _load(replica: Replica) -> int:
    return replica.num_sequences


ALTERNATIVES: dict[str, Callable[[], Pick]] = {
    "cache aware": CacheAware,
    "consistent hash": lambda: consistent_hash,
    "least loaded": lambda: least_loaded,
    "power of two": lambda: power_of_two,
    "random": lambda: pick_random,
    "round robin": lambda: round_robin,
}


class AlternativeRouter(Router):
    """The books of `Router`, with another choice."""

    def __init__(
        self, name: str, replicas: Iterable[str], block_size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(block_size, clock=clock)
        self._pick = ALTERNATIVES[name]()
        for replica in replicas:
            self.add(replica, is_exact=False)

    def choose(self, prompt: Prompt, *, excluding: Iterable[str] = ()) -> Ticket | None:
        excluded = set(excluding)
        among = [one for one in self.replicas.values() if one.is_open and one.name not in excluded]
        if not among:
            return None
        return Ticket(self._pick(among, prompt, self._num_routed), prompt, 0, 0.0, self._clock())
