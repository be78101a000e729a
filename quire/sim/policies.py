"""Which of a fleet's replicas a request goes to: the product's own router, and simpler ones to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quire.request import Request
from quire.router.alternatives import ALTERNATIVES, FIRST_TOKEN, AlternativeRouter
from quire.router.hashes import prompt_hashes
from quire.router.policy import CacheChanges, Prompt, ReplicaLoad, Router, Ticket
from quire.sim.replica import Replica

_REPORT_EVERY_S = 0.1  # as engine/loop.py has it


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
        """The request has ended there, or left. It may be one that this policy did not choose a replica for."""
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
    router = AlternativeRouter(name, replicas[0].config.block_size, clock=clock)
    for replica in _names(replicas):
        router.add(replica, is_exact=False)
    return Policy(router, replicas)


def _names(replicas: Sequence[Replica]) -> list[str]:
    return [str(index) for index in range(len(replicas))]


POLICIES: dict[str, Callable[[Sequence[Replica], Callable[[], float]], Policy]] = {
    FIRST_TOKEN: FirstToken,
    **{name: partial(_alternative, name) for name in ALTERNATIVES},
}
