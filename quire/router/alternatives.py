"""Simpler routing policies: `quire router --policy NAME`, and what `quire bench router` and `quire sim` compare with.

Each is a function of the replicas, the prompt, and the number of requests routed before. None of them knows what a
replica has cached: a prompt's beginnings are told by the pieces of its text or, where there is no text, by its hashes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from quire.errors import ConfigError
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
    chain = _chain(prompt)
    key = chain[min(3, len(chain) - 1)] if chain else b""
    return max(among, key=lambda replica: random.Random(key + replica.name.encode()).random())


class CacheAware:
    """sglang-router's `cache_aware` as its documentation describes it, with the defaults of version 0.3.2: the replica
    that was sent the longest beginning of the prompt, if that is more than three tenths of it, and else the one that
    was sent the least text; but the least loaded one where the loads are far apart."""

    least_match = 0.3
    most_apart, most_times = 64, 1.5
    most_pieces = 32_768  # remembered of what a replica was sent; the oldest are forgotten

    def __init__(self) -> None:
        self._sent: dict[str, dict[bytes, None]] = {}  # by replica, in order

    def __call__(self, among: Sequence[Replica], prompt: Prompt, nth: int) -> Replica:
        for replica in among:
            self._sent.setdefault(replica.name, {})
        chosen = self._choose(among, prompt)
        sent = self._sent[chosen.name]
        for piece in _chain(prompt):
            sent.pop(piece, None)
            sent[piece] = None
        while len(sent) > self.most_pieces:
            del sent[next(iter(sent))]
        return chosen

    def _choose(self, among: Sequence[Replica], prompt: Prompt) -> Replica:
        least, most = min(map(_load, among)), max(map(_load, among))
        if most - least > self.most_apart and most > self.most_times * least:
            return min(among, key=_load)
        best = max(among, key=lambda replica: self._num_sent(replica, prompt))
        if self._num_sent(best, prompt) > self.least_match * len(_chain(prompt)):
            return best
        return min(among, key=lambda replica: len(self._sent[replica.name]))

    def _num_sent(self, replica: Replica, prompt: Prompt) -> int:
        sent, chain = self._sent[replica.name], _chain(prompt)
        return next((count for count, link in enumerate(chain) if link not in sent), len(chain))


def _chain(prompt: Prompt) -> Sequence[bytes]:
    return prompt.pieces or prompt.hashes


def _load(replica: Replica) -> int:
    return replica.num_sequences


ALTERNATIVES: dict[str, Callable[[], Pick]] = {
    "cache-aware": CacheAware,
    "consistent-hash": lambda: consistent_hash,
    "least-loaded": lambda: least_loaded,
    "power-of-two": lambda: power_of_two,
    "random": lambda: pick_random,
    "round-robin": lambda: round_robin,
}


class AlternativeRouter(Router):
    """The books of `Router`, with another choice."""

    def __init__(self, name: str, block_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(block_size, clock=clock)
        self._pick = ALTERNATIVES[name]()

    def choose(self, prompt: Prompt, *, excluding: Iterable[str] = ()) -> Ticket | None:
        among = self._open(excluding)
        if not among:
            return None
        return Ticket(self._pick(among, prompt, self._num_routed), prompt, 0, 0.0, self._clock())


FIRST_TOKEN = "first-token"
POLICIES = (FIRST_TOKEN, *ALTERNATIVES)


def new_router(policy: str, block_size: int, *, clock: Callable[[], float] = time.monotonic) -> Router:
    """The product's own, or one of the simpler ones."""
    if policy == FIRST_TOKEN:
        return Router(block_size, clock=clock)
    if policy not in ALTERNATIVES:
        raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}, got {policy}")
    return AlternativeRouter(policy, block_size, clock=clock)
