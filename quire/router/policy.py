"""Which replica a request goes to: the one where first tokens will come soonest, its own and those behind it.

    expected time = wait for a slot + a step + (prompt tokens queued before it + its own uncached ones) / prefill rate

Every token that is computed makes others wait, and what it leaves in a cache puts something else out. So a request's
own uncached tokens count once for itself and twice for those who come next, who are more at a replica that had much to
compute lately and fewer at one that had little (`rates.py`):

    cost = expected time + 2 × (its share of the work lately: 1 is the average) × its uncached tokens / rate

So a prefix is computed again at another replica only where the queue at the one that has it costs more than that; new
prefixes go where caches have room for them; and one that everybody asks for gets a second home where least is done.

`Router` is the whole decision and does no IO: servers, the proxy and the simulator drive the same class, each with its
own clock. A caller tells it what replicas report (`on_load`, `on_cache`), asks for a `Ticket` with `route`, and says
how that went on (`on_first_token`, `on_end`).

What a request finds cached is counted in blocks by their hashes (`quire.kv.hashing`), so a conversation returns to
where its blocks are with no header to say so, and leaves when the queue there costs more than computing them again.
Where a router sees texts and the hashes are not known yet, what was routed to a replica counts as being there.

Between keys (tenants) the replicas share fairly, and the estimate knows it: while a tenant's own tokens are computed,
every other tenant gets at most as many. So a flood of one key's requests does not keep another key's from the replica
that has its cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from quire.router.index import BlockHash, BlockIndex, TextIndex
from quire.router.rates import Rates, RecentWork

_SMOOTHING = 0.2  # weight of the newest observation
_MIN_TOKENS_FOR_RATE = 64  # a shorter prompt's time is mostly the step's, not the tokens'
# Who come next, at a replica as busy as the average. From 1.5 to 3 the simulated bench finds the same prefixes and as
# early first tokens; with 1 it finds a hundredth less of bursts, with 0.5 three hundredths.
_FOLLOWERS = 2.0
_TIE = 0.1  # of the best expected time: the estimate is no finer than that
_REMEMBERED_PIECES = 32_768  # of the texts that were routed to a replica: some 250,000 tokens of English
_TOLD_S = 1.0  # by then a replica has told which blocks a request left: servers are asked twice a second
_FIRST_RATE = 1_000.0  # tokens/s, until something was measured


@dataclass(slots=True, frozen=True, kw_only=True)
class ReplicaLoad:
    """What a replica reports of itself. What is None is not known."""

    num_queued_tokens: int = 0  # of prompts that wait there, whoever sent them, with what the cache has of them
    num_running: int = 0  # sequences that decode
    prefill_tokens_per_s: float | None = None  # tells of it until prompts were timed
    step_s: float | None = None  # a step that only decodes: about what a newcomer waits before its own begins


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheChanges:
    """Blocks that a replica filled and evicted since it last told. `is_snapshot`: `filled` is all that it has."""

    filled: Sequence[BlockHash] = ()
    evicted: Sequence[BlockHash] = ()
    is_snapshot: bool = False


@dataclass(slots=True, frozen=True)
class Prompt:
    """What the choice depends on."""

    num_tokens: int
    # Of its leading full blocks, except one that ends with the last token: that token has to run.
    hashes: Sequence[BlockHash] = ()
    tenant: str = ""
    num_sequences: int = 1
    # Where a router sees its text and not all of its tokens: equal beginnings have equal pieces.
    pieces: Sequence[bytes] = ()
    piece_ends: Sequence[int] = ()  # of each piece: about how many tokens the prompt has up to its end


@dataclass(slots=True, eq=False)
class Replica:
    """What is known of a replica now."""

    name: str
    bit: int
    max_num_seqs: int | None  # sequences that run at once; None: not known
    is_exact: bool  # it publishes its cache
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    is_open: bool = True  # takes new requests
    tokens_by_tenant: dict[str, int] = field(default_factory=dict)  # of own tickets: uncached, without a first token
    num_queued_tokens: int = 0  # the sum of these
    num_sent_tokens: int = 0  # of the prompts of all own tickets ever, with what was cached of them
    num_begun_tokens: int = 0  # of those that had a first token or ended without one
    waiting: dict[Ticket, None] = field(default_factory=dict)  # own tickets without a first token, in order
    num_foreign_tokens: int = 0  # queued there by others, as it told last
    told_s: float = 0.0  # when that was
    num_sequences: int = 0  # of own tickets
    progress_s: float = 0.0  # since when the head of the queue is being computed
    held_s: float | None = None  # how long a request holds its slot


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way at a replica."""

    at: Replica
    prompt: Prompt
    num_cached_tokens: int
    expected_s: float  # to the first token
    routed_s: float
    first_token_s: float | None = None
    is_over: bool = False

    @property
    def replica(self) -> str:
        return self.at.name

    @property
    def num_uncached_tokens(self) -> int:
        return self.prompt.num_tokens - self.num_cached_tokens


class Router:
    """Every replica, and every request that is under way. Belongs to one thread."""

    def __init__(self, block_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.block_size = block_size
        self.replicas: dict[str, Replica] = {}
        self._clock = clock
        self._index = BlockIndex()
        self._texts = TextIndex(_REMEMBERED_PIECES)
        self._by_bit: dict[int, Replica] = {}
        self._num_routed = 0
        self._ended: deque[tuple[float, Replica, Sequence[BlockHash]]] = deque()  # whose promises still stand
        self._rates = Rates()
        self._recent = RecentWork()

    # -- the replicas

    def add(self, name: str, *, max_num_seqs: int | None = None, is_exact: bool = True) -> Replica:
        assert name not in self.replicas, f"replica {name} is there already"
        bit = next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)
        replica = Replica(name, bit, max_num_seqs, is_exact)
        self.replicas[name] = self._by_bit[bit] = replica
        self._index.add(bit)
        self._texts.add(bit)
        return replica

    def remove(self, name: str) -> None:
        """Its cache and its tickets are forgotten; to `on_end` those is still allowed."""
        replica = self.replicas.pop(name)
        del self._by_bit[replica.bit]
        self._index.remove(replica.bit)
        self._texts.remove(replica.bit)
        self._rates.forget(replica.bit)
        self._recent.forget(replica.bit)

    def set_open(self, name: str, is_open: bool) -> None:
        """Whether it takes new requests. One that drains keeps its cache and its tickets."""
        self.replicas[name].is_open = is_open

    def on_load(self, name: str, load: ReplicaLoad, *, num_begun_tokens: int | None = None) -> None:
        """num_begun_tokens: the replica's when it was asked, if it was not asked just now."""
        replica = self.replicas[name]
        replica.load, replica.told_s = load, self._clock()
        # Each own prompt that waited at some time between question and answer may be among those that it tells of.
        begun = replica.num_begun_tokens if num_begun_tokens is None else num_begun_tokens
        replica.num_foreign_tokens = max(0, load.num_queued_tokens - (replica.num_sent_tokens - begun))

    def on_cache(self, name: str, changes: CacheChanges) -> None:
        bit = self.replicas[name].bit
        if changes.is_snapshot:
            self._index.replace(bit, changes.filled)
        else:
            # In this order: a block that was evicted and filled again in one report is there.
            self._index.evict(bit, changes.evicted)
            self._index.fill(bit, changes.filled)

    def tokens_per_s(self, replica: Replica) -> float:
        """The prefill rate of a replica."""
        return self._prefill_rates()[replica.bit]

    def num_blocks_of(self, name: str) -> int:
        """Blocks that the replica told it has; 0 of one that tells nothing."""
        return self._index.num_cached(self.replicas[name].bit)

    def num_leading_blocks(self, name: str, hashes: Sequence[BlockHash]) -> int:
        """How many blocks of a prefix a replica has, from the first on."""
        bit = self.replicas[name].bit
        return self._index.leading(hashes, 1 << bit).get(bit, 0)

    def num_sent_tokens(self, prompt: Prompt) -> int:
        """About how many of a prompt's tokens some replica was sent before, by its text."""
        num_pieces = max(self._texts.leading(prompt.pieces, sum(1 << bit for bit in self._by_bit)).values(), default=0)
        return prompt.piece_ends[num_pieces - 1] if num_pieces else 0

    # -- the choice

    def route(self, prompt: Prompt, *, excluding: Iterable[str] = ()) -> Ticket | None:
        """Choose, and count the request there from now on. None: no replica takes requests."""
        ticket = self.choose(prompt, excluding=excluding)
        if ticket is not None:
            self._enter(ticket)
        return ticket

    def route_to(self, name: str, prompt: Prompt) -> Ticket:
        """Count a request at a replica that somebody else chose."""
        replica = self.replicas[name]
        num_cached = self._num_cached(prompt, 1 << replica.bit).get(replica.bit, 0)
        now_s, rate = self._clock(), self.tokens_per_s(replica)
        ticket = Ticket(replica, prompt, num_cached, self._expected_s(replica, prompt, num_cached, rate, now_s), now_s)
        self._enter(ticket)
        return ticket

    def choose(self, prompt: Prompt, *, excluding: Iterable[str] = ()) -> Ticket | None:
        """The replica with the least expected time to the first token; of those that are as good, the one that has most
        of the prompt, then the least loaded."""
        among = self._open(excluding)
        if not among:
            return None
        now_s = self._clock()
        while self._ended and now_s - self._ended[0][0] > _TOLD_S:
            _, replica, hashes = self._ended.popleft()
            if self.replicas.get(replica.name) is replica:
                self._index.withdraw(replica.bit, hashes)
        cached = self._num_cached(prompt, sum(1 << one.bit for one in among))
        rates = self._prefill_rates()
        shares = self._recent.shares(rates)
        found = []
        for replica in among:
            num_cached = cached.get(replica.bit, 0)
            expected_s = self._expected_s(replica, prompt, num_cached, rates[replica.bit], now_s)
            own_s = (prompt.num_tokens - num_cached) / rates[replica.bit]
            others_s = _FOLLOWERS * shares[replica.bit] * own_s
            found.append((expected_s + others_s, expected_s, num_cached, replica))
        best_s, best_expected_s = min(one[:2] for one in found)
        # A newcomer meets a step anywhere between its begin and its end: half of one is what nobody can foresee.
        tie_s = best_s + _TIE * best_expected_s + min(self._step_s(replica) for _, _, _, replica in found) / 2
        ties = [one for one in found if one[0] <= tie_s]
        # Equal loads take turns, so that replicas which differ in nothing share what comes.
        first = self._num_routed % len(ties)
        _, expected_s, num_cached, replica = min(
            ties[first:] + ties[:first], key=lambda one: (-one[2], _load(one[3]), one[0])
        )
        return Ticket(replica, prompt, num_cached, expected_s, now_s)

    # -- how it went on

    def on_first_token(self, ticket: Ticket, *, is_timed: bool = True) -> None:
        """Its prompt is computed. is_timed: just now, so that the time tells the prefill rate."""
        if ticket.is_over or ticket.first_token_s is not None:
            return
        ticket.first_token_s = now_s = self._clock()
        replica = self._replica_of(ticket)
        if replica is None:
            return
        num_tokens = ticket.num_uncached_tokens
        if is_timed and num_tokens >= _MIN_TOKENS_FOR_RATE:
            took_s = now_s - max(ticket.routed_s, replica.progress_s)
            own_s = max(took_s - self._step_s(replica), took_s / 4)  # it may have waited for the step before its own
            self._rates.observe(replica.bit, num_tokens, own_s)
        replica.progress_s = now_s
        self._unqueue(replica, ticket)

    def on_hashes(self, ticket: Ticket, num_tokens: int, hashes: Sequence[BlockHash]) -> None:
        """Its prompt's length and blocks are known only now: the blocks will be where it runs."""
        replica = self._replica_of(ticket)
        if ticket.is_over or replica is None:
            return
        if replica.is_exact:
            self._index.promise(replica.bit, hashes)
            self._index.withdraw(replica.bit, ticket.prompt.hashes)
        is_waiting = ticket in replica.waiting
        if is_waiting:
            self._count_queued(replica, ticket, -1)
            replica.num_sent_tokens += num_tokens - ticket.prompt.num_tokens
        ticket.num_cached_tokens = min(ticket.num_cached_tokens, num_tokens - 1)
        ticket.prompt = replace(ticket.prompt, num_tokens=num_tokens, hashes=hashes)
        if is_waiting:
            self._count_queued(replica, ticket, 1)

    def on_end(self, ticket: Ticket) -> None:
        """It has ended, or goes on elsewhere under another ticket."""
        if ticket.is_over:
            return
        ticket.is_over = True
        replica = self._replica_of(ticket)
        if replica is None:
            return
        hashes = ticket.prompt.hashes if replica.is_exact else ()
        if ticket.first_token_s is None:
            self._unqueue(replica, ticket)
            self._index.withdraw(replica.bit, hashes)
        else:
            replica.held_s = _smooth(replica.held_s, self._clock() - ticket.routed_s)
            self._ended.append((self._clock(), replica, hashes))  # the blocks are there, and the replica tells it later
        replica.num_sequences -= ticket.prompt.num_sequences

    def check(self) -> None:
        """Prove that what is counted adds up."""
        self._index.check(self._by_bit)
        self._texts.check(self._by_bit)
        for replica in self.replicas.values():
            assert replica.num_queued_tokens == sum(replica.tokens_by_tenant.values()) >= 0
            assert all(count > 0 for count in replica.tokens_by_tenant.values())
            assert replica.num_sequences >= 0
            num_waiting = sum(ticket.prompt.num_tokens for ticket in replica.waiting)
            assert replica.num_sent_tokens - replica.num_begun_tokens == num_waiting
            assert self._by_bit[replica.bit] is replica

    # -- inside

    def _open(self, excluding: Iterable[str]) -> list[Replica]:
        excluded = set(excluding)
        return [one for one in self.replicas.values() if one.is_open and one.name not in excluded]

    def _enter(self, ticket: Ticket) -> None:
        self._num_routed += 1
        replica, prompt = ticket.at, ticket.prompt
        if not replica.num_queued_tokens:
            replica.progress_s = ticket.routed_s
        replica.waiting[ticket] = None
        replica.num_sent_tokens += prompt.num_tokens
        self._count_queued(replica, ticket, 1)
        self._recent.add(replica.bit, ticket.num_uncached_tokens, len(self.replicas))
        replica.num_sequences += prompt.num_sequences
        if replica.is_exact:
            # Whoever has the same prefix and comes before it is computed will find it computed all the same.
            self._index.promise(replica.bit, prompt.hashes)
        self._texts.route(replica.bit, prompt.pieces)

    def _unqueue(self, replica: Replica, ticket: Ticket) -> None:
        del replica.waiting[ticket]
        replica.num_begun_tokens += ticket.prompt.num_tokens
        self._count_queued(replica, ticket, -1)

    def _count_queued(self, replica: Replica, ticket: Ticket, sign: int) -> None:
        """Add a ticket's uncached tokens to the queue's (1), or take them out (-1)."""
        queued, tenant, num_tokens = replica.tokens_by_tenant, ticket.prompt.tenant, sign * ticket.num_uncached_tokens
        queued[tenant] = queued.get(tenant, 0) + num_tokens
        if not queued[tenant]:
            del queued[tenant]
        replica.num_queued_tokens += num_tokens

    def _replica_of(self, ticket: Ticket) -> Replica | None:
        """None: it was removed meanwhile, even where another one has its name now."""
        return ticket.at if self.replicas.get(ticket.replica) is ticket.at else None

    def _num_cached(self, prompt: Prompt, mask: int) -> dict[int, int]:
        """How many of a prompt's tokens each replica has, by the bits of those that have some."""
        size, most = self.block_size, max(0, prompt.num_tokens - 1)
        by_text = self._texts.leading(prompt.pieces, mask)
        by_block = self._index.leading(prompt.hashes, mask)
        found = {bit: min(most, num_blocks * size) for bit, num_blocks in by_block.items()}
        for bit, num_pieces in by_text.items():
            # What was routed there is there, unless a block that is known is not.
            if by_block.get(bit, 0) == len(prompt.hashes) or not self._by_bit[bit].is_exact:
                num_tokens = prompt.piece_ends[num_pieces - 1] // size * size
                found[bit] = max(found.get(bit, 0), min(most, num_tokens))
        return found

    def _prefill_rates(self) -> dict[int, float]:
        """The prefill rate of each replica, by its bit."""
        return self._rates.of({bit: one.load.prefill_tokens_per_s for bit, one in self._by_bit.items()}, _FIRST_RATE)

    def _step_s(self, replica: Replica) -> float:
        return (replica.load.step_s or 0.0) if replica.load.num_running or replica.num_sequences else 0.0

    def _expected_s(self, replica: Replica, prompt: Prompt, num_cached: int, rate: float, now_s: float) -> float:
        num_own = prompt.num_tokens - num_cached
        num_ahead = max(0, replica.num_foreign_tokens - int((now_s - replica.told_s) * rate))
        if replica.num_queued_tokens:
            queued = replica.tokens_by_tenant
            share = queued.get(prompt.tenant, 0) + num_own
            num_ahead += share - num_own
            num_ahead += sum(min(count, share) for tenant, count in queued.items() if tenant != prompt.tenant)
            # Some of the first one's is computed already, which only its first token will tell.
            head = next(iter(replica.waiting))
            num_ahead -= min(num_ahead, head.num_uncached_tokens, int((now_s - replica.progress_s) * rate))
        return self._slot_wait_s(replica, prompt) + self._step_s(replica) + (num_ahead + num_own) / rate

    def _slot_wait_s(self, replica: Replica, prompt: Prompt) -> float:
        """Where all sequences that may run at once do, the next begins when one ends."""
        slots, held_s = replica.max_num_seqs, replica.held_s
        if slots is None or held_s is None:
            return 0.0
        num_over = max(replica.num_sequences, replica.load.num_running) + prompt.num_sequences - slots
        return max(0, num_over) * held_s / slots


def _load(replica: Replica) -> int:
    return max(replica.num_sequences, replica.load.num_running)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
