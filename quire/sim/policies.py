"""Which of a fleet's replicas a request goes to: the product's own router, and simpler ones to compare it with.

An alternative is a function of the replicas, the prompt, and how many requests were routed before. The prompt's
`hashes` are whatever chain stands for its beginnings: block hashes, or pieces of its text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from quire.request import Request
from quire.router import policy
from quire.router.hashes import prompt_hashes
from quire.router.policy import CacheChanges, Prompt, ReplicaLoad, Router, Ticket
from quire.sim.replica import Replica

_REPORT_EVERY_S = 0.1  # as engine/loop.py has it

# -- the alternatives

Pick = Callable[[Sequence[policy.Replica], Prompt, int], policy.Replica]


def round_robin(among: Sequence[policy.Replica], prompt: Prompt, nth: int) -> policy.Replica:
    return among[nth % len(among)]


def pick_random(among: Sequence[policy.Replica], prompt: Prompt, nth: int) -> policy.Replica:
    return random.Random(nth).choice(among)


def least_loaded(among: Sequence[policy.Replica], prompt: Prompt, nth: int) -> policy.Replica:
    first = nth % len(among)
    return min([*among[first:], *among[:first]], key=_load)


def power_of_two(among: Sequence[policy.Replica], prompt: Prompt, nth: int) -> policy.Replica:
    """The less loaded of two that are drawn by lot."""
    return min(random.Random(nth).sample(among, min(2, len(among))), key=_load)


def consistent_hash(among: Sequence[policy.Replica], prompt: Prompt, nth: int) -> policy.Replica:
    """Choose by how the prompt begins: the same beginning, the same replica, however busy that is."""
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

    def __call__(self, among: Sequence[policy.Replica], prompt: Prompt, nth: int) -> policy.Replica:
        for replica in among:
            self._sent.setdefault(replica.name, set())
        chosen = self._choose(among, prompt)
        self._sent[chosen.name].update(prompt.hashes)
        return chosen

    def _choose(self, among: Sequence[policy.Replica], prompt: Prompt) -> policy.Replica:
        least, most = min(map(_load, among)), max(map(_load, among))
        if most - least > self.most_apart and most > self.most_times * least:
            return min(among, key=_load)
        best = max(among, key=lambda replica: self._num_sent(replica, prompt))
        if self._num_sent(best, prompt) > self.least_match * len(prompt.hashes):
            return best
        return min(among, key=lambda replica: len(self._sent[replica.name]))

    def _num_sent(self, replica: policy.Replica, prompt: Prompt) -> int:
        sent = self._sent[replica.name]
        return next((count for count, link in enumerate(prompt.hashes) if link not in sent), len(prompt.hashes))


def _load(replica: policy.Replica) -> int:
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
    """Counts requests as `Router` does, and chooses by one of ALTERNATIVES."""

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


# -- in a fleet


class Policy:
    """A router that chooses by what it sees from outside."""

    def __init__(self, router: Router, replicas: Sequence[Replica]) -> None:
        self._router = router
        self._config = replicas[0].config
        self._tickets: dict[str, Ticket] = {}

    def choose(self, request: Request) -> int:
        """The index of a replica, which is given the request at once."""
        tokens, hashes = request.prompt_token_ids, []
        if self._config.enable_prefix_caching:
            hashes = prompt_hashes(tokens, self._config.block_size, request.salt, request.adapter)
        ticket = self._router.route(Prompt(len(tokens), hashes, request.tenant))
        assert ticket is not None, "every replica is open"
        self._tickets[request.request_id] = ticket
        return int(ticket.replica)

    def on_first_token(self, request: Request) -> None:
        """The request's prompt is computed where it was sent."""
        self._router.on_first_token(self._tickets[request.request_id])

    def on_end(self, request: Request) -> None:
        """The request has ended there, or left. Of one that this policy did not choose for, nothing is known."""
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is not None:
            self._router.on_end(ticket)


class FirstToken(Policy):
    """The product's own router: the replica that is expected to give the first token soonest, by what replicas tell of
    their caches and their steps, as often as engines do."""

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        super().__init__(Router(replicas[0].config.block_size, clock=clock), replicas)
        self._clock = clock
        self._replicas = replicas
        self._logs = [replica.kv.log_cache() for replica in replicas]
        self._told = [0] * len(replicas)
        for name in _names(replicas):
            self._router.add(name, max_num_seqs=self._config.scheduler.max_num_seqs)
        self._next_report_s = -1.0

    def choose(self, request: Request) -> int:
        if self._clock() >= self._next_report_s:
            self._report()
        return super().choose(request)

    def _report(self) -> None:
        self._next_report_s = self._clock() + _REPORT_EVERY_S
        for index, (replica, log) in enumerate(zip(self._replicas, self._logs, strict=True)):
            costs = replica.scheduler.costs
            load = ReplicaLoad(prefill_tokens_per_s=costs.mixed_tokens_per_s, step_s=costs.decodes_s)
            self._router.on_load(str(index), load)
            if log.at != self._told[index]:
                change = log.read(self._told[index])
                self._told[index] = change.at
                self._router.on_cache(
                    str(index),
                    CacheChanges(filled=change.filled, evicted=change.evicted, is_snapshot=change.is_snapshot),
                )


def _alternative(name: str, replicas: Sequence[Replica], clock: Callable[[], float]) -> Policy:
    return Policy(AlternativeRouter(name, _names(replicas), replicas[0].config.block_size, clock=clock), replicas)


def _names(replicas: Sequence[Replica]) -> list[str]:
    return [str(index) for index in range(len(replicas))]


POLICIES: dict[str, Callable[[Sequence[Replica], Callable[[], float]], Policy]] = {
    "first-token": FirstToken,
    **{name.replace(" ", "-"): partial(_alternative, name) for name in ALTERNATIVES},
}
