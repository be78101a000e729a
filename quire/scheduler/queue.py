"""Who waits, in which order: by policy within a tenant, and between tenants by what each has had, counted in tokens.

Each tenant has a virtual token counter, as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024):
what is computed for it is added, output tokens weighing more than prompt tokens, and of the tenants that wait the one
with the lowest counter goes first. Two rules keep it honest:

- Nobody saves up. A tenant that begins to wait is lifted to the lowest counter of those that wait; where none does, to
  a step's worth of tokens below the highest counter of all. Having used little yesterday is no claim on today.
- Nobody is forgiven. An idle tenant is forgotten only where its counter would be lifted past what it was anyway; where
  too many would have to be remembered, whoever is new starts no lower than the highest that was forgotten.

Counters only grow. That is what allows the heap of waiting tenants to be stale: an old entry is a lower bound.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from quire.request import Request, Sequence
from quire.scheduler.config import SchedulerConfig

_MAX_IDLE_TENANTS = 1024
_tenant_of = attrgetter("request.tenant")
_by_order = attrgetter("order")


def place(config: SchedulerConfig, request: Request, nth: int) -> tuple[float, ...]:
    """A request's place among all others, given once for its whole life: the smaller runs first.

    First come, first served: by arrival, then by the order in which they were added. With priorities, each
    `priority_ageing_s` of waiting is worth one priority. All requests age at the same pace, so who is ahead of whom
    never changes: priority - (now - arrival) / ageing compares like priority + arrival / ageing. That is why a place
    is a constant, the queue needs no re-sorting, and a request that was preempted finds its old place again.
    """
    if config.policy == "fcfs":
        return (request.arrival_s, nth)
    aged = 0.0 if math.isinf(config.priority_ageing_s) else request.arrival_s / config.priority_ageing_s
    return (request.priority + aged, request.arrival_s, nth)


class OrderedSequences(list[Sequence]):
    """Sequences sorted by `order`, which is unique and never changes.

    The queue is one: new sequences and those that lost their blocks wait together. What was preempted arrived earlier,
    so it stands before the new ones of its priority. The running ones are another. A sorted list rather than a heap
    because aborts take out of the middle; moving pointers is cheap next to a step.
    """

    def add(self, seq: Sequence) -> None:
        insort(self, seq, key=_by_order)

    def drop(self, seq: Sequence) -> None:
        at = bisect_left(self, seq.order, key=_by_order)
        assert self[at] is seq, f"sequence {seq.seq_id} is not here"
        del self[at]


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's counter and sequences. `waiting` is in the order of the configured policy."""

    name: str
    counter: float  # virtual tokens
    turn: int = 0  # among equal counters the smaller goes first: who has waited longer
    waiting: OrderedSequences = field(default_factory=OrderedSequences)
    num_waiting_tokens: int = 0  # prompt tokens of those
    num_running: int = 0
    is_listed: bool = False  # the heap has an entry for it

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.num_running)


class FairQueue:
    """Every sequence that waits, by tenant, and every tenant's counter.

    Scheduling is strict: `head` is the only one to be admitted next. With one tenant it is the first by policy, and a
    step costs one addition more than without tenants.
    """

    def __init__(self, *, prompt_token_weight: float, output_token_weight: float, max_credit: float) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.num_active_tenants = 0  # with sequences that wait or run
        self.num_waiting_tokens = 0
        self._prompt_token_weight = prompt_token_weight
        self._output_token_weight = output_token_weight
        self._max_credit = max_credit
        self._num_waiting = 0
        self._num_running_tenants = 0
        self._heap: list[tuple[float, int, Tenant]] = []  # one entry for each tenant that waits, and some that did
        self._next_turn = 0
        self._top = 0.0  # the highest counter there ever was
        self._forgotten = 0.0  # the highest counter that was forgotten too early
        self._sweep_at = _MAX_IDLE_TENANTS

    # -- who waits

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant, each in its order: for looking at, not for scheduling."""
        return (seq for tenant in self.tenants.values() for seq in tenant.waiting)

    @property
    def is_shared(self) -> bool:
        return self.num_active_tenants > 1

    @property
    def head(self) -> Sequence:
        """The next to be admitted. Only for a queue that is not empty."""
        tenant = self._first()
        assert tenant is not None, "nobody waits"
        return tenant.waiting[0]

    def add(self, seq: Sequence) -> None:
        name = seq.request.tenant
        tenant = self.tenants.get(name) or self._new_tenant(name)
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self._floor())
            tenant.turn = self._take_turn()
            if not tenant.is_listed:
                tenant.is_listed = True
                heapq.heappush(self._heap, (tenant.counter, tenant.turn, tenant))
            self.num_active_tenants += not tenant.num_running
        tenant.waiting.add(seq)
        num_tokens = seq.num_prompt_tokens
        tenant.num_waiting_tokens += num_tokens
        self.num_waiting_tokens += num_tokens
        self._num_waiting += 1

    def drop(self, seq: Sequence) -> None:
        tenant = self.tenants[seq.request.tenant]
        tenant.waiting.drop(seq)
        num_tokens = seq.num_prompt_tokens
        tenant.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens
        self._num_waiting -= 1
        if tenant.is_idle:
            self._on_idle(tenant)

    # -- who runs

    def on_run(self, seq: Sequence) -> None:
        """It has a row now. From the queue: before `drop`, so that its tenant is never idle in between."""
        tenant = self.tenants[seq.request.tenant]
        if not tenant.num_running:
            self._num_running_tenants += 1
            self.num_active_tenants += not tenant.waiting
        tenant.num_running += 1
        tenant.turn = self._take_turn()

    def on_leave(self, seq: Sequence) -> None:
        """It has lost its row. Into the queue: after `add`."""
        tenant = self.tenants[seq.request.tenant]
        tenant.num_running -= 1
        if not tenant.num_running:
            self._num_running_tenants -= 1
            if not tenant.waiting:
                self._on_idle(tenant)

    # -- what they have had

    def counter_of(self, seq: Sequence) -> float:
        return self.tenants[seq.request.tenant].counter

    def charge(self, seq: Sequence, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        self._charge(seq.request.tenant, num_prompt_tokens, num_output_tokens)

    def charge_decodes(self, decodes: list[Sequence], running: list[Sequence], catching_up: list[Sequence]) -> None:
        """Charge one output token for each of `decodes`, which like `catching_up` are some of the running ones."""
        if not decodes:
            return
        if self._num_running_tenants == 1:
            self._charge(decodes[0].request.tenant, 0, len(decodes))
        elif len(decodes) + len(catching_up) == len(running):  # nearly always, and then they need not be counted
            num_catching_up = Counter(map(_tenant_of, catching_up))
            for tenant in self.tenants.values():
                if tenant.num_running:
                    self._charge(tenant.name, 0, tenant.num_running - num_catching_up[tenant.name])
        else:
            for name, count in Counter(map(_tenant_of, decodes)).items():
                self._charge(name, 0, count)

    def _charge(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        tenant = self.tenants[name]
        tenant.counter += num_prompt_tokens * self._prompt_token_weight + num_output_tokens * self._output_token_weight
        if tenant.counter > self._top:
            self._top = tenant.counter

    def check(self) -> None:
        """Prove that what is counted is what there is."""
        tenants = self.tenants.values()
        assert self._num_waiting == sum(len(t.waiting) for t in tenants), "waiting sequences do not add up"
        assert self.num_waiting_tokens == sum(t.num_waiting_tokens for t in tenants), "waiting tokens do not add up"
        assert self.num_active_tenants == sum(not t.is_idle for t in tenants), "active tenants do not add up"
        assert self._num_running_tenants == sum(t.num_running > 0 for t in tenants), "running tenants do not add up"
        listed = Counter(tenant for _, _, tenant in self._heap)
        assert all(count == 1 for count in listed.values()), "a tenant is in the heap twice"
        for tenant in tenants:
            assert tenant.waiting == sorted(tenant.waiting, key=lambda seq: seq.order), f"{tenant.name} is not in order"
            assert tenant.num_waiting_tokens == sum(seq.num_prompt_tokens for seq in tenant.waiting)
            assert tenant.is_listed == (tenant in listed) and (tenant.is_listed or not tenant.waiting)
            assert tenant.counter <= self._top, f"{tenant.name} was lifted past all others"

    # -- inside

    def _first(self) -> Tenant | None:
        """The tenant that goes first, once the heap's top is known to be up to date."""
        heap = self._heap
        while heap:
            counter, turn, tenant = heap[0]
            if not tenant.waiting:
                heapq.heappop(heap)
                tenant.is_listed = False
            elif (counter, turn) != (tenant.counter, tenant.turn):
                heapq.heapreplace(heap, (tenant.counter, tenant.turn, tenant))
            else:
                return tenant
        return None

    def _floor(self) -> float:
        """The least counter that a tenant has when it begins to wait."""
        first = self._first()
        return first.counter if first is not None else self._top - self._max_credit

    def _take_turn(self) -> int:
        self._next_turn += 1
        return self._next_turn

    def _new_tenant(self, name: str) -> Tenant:
        if len(self.tenants) >= self._sweep_at:
            self._forget_idle()
            self._sweep_at = len(self.tenants) + _MAX_IDLE_TENANTS
        tenant = self.tenants[name] = Tenant(name, self._forgotten)
        return tenant

    def _on_idle(self, tenant: Tenant) -> None:
        self.num_active_tenants -= 1
        if tenant.counter <= self._floor():
            del self.tenants[tenant.name]  # it would be lifted to here

    def _forget_idle(self) -> None:
        """Keep the few that had most; those after them lose nothing by having been forgotten, nor do they gain."""
        idle = sorted((t for t in self.tenants.values() if t.is_idle), key=attrgetter("counter"))
        dropped = idle[: len(idle) // 2]
        for tenant in dropped:
            del self.tenants[tenant.name]
        if dropped:
            self._forgotten = max(self._forgotten, dropped[-1].counter)
