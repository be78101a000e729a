"""The KV manager's numbers. Operations add to plain integers; whatever needs arithmetic waits until someone asks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.request import CacheOutcome

if TYPE_CHECKING:
    from quire.kv.manager import KVManager


@dataclass(slots=True)
class PrefixCounters:
    """Prefix lookups of admitted sequences. Those that read no cache are only in `outcomes`."""

    num_queries: int = 0  # lookups
    num_hits: int = 0  # lookups that found at least one block
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    outcomes: dict[CacheOutcome, int] = field(default_factory=lambda: dict.fromkeys(CacheOutcome, 0))

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that were found."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0

    def count(self, outcome: CacheOutcome, num_tokens: int, num_hit_tokens: int) -> None:
        self.outcomes[outcome] += 1
        if outcome is CacheOutcome.SKIPPED or outcome is CacheOutcome.DISABLED:
            return
        self.num_queries += 1
        self.num_query_tokens += num_tokens
        if num_hit_tokens:
            self.num_hits += 1
            self.num_hit_tokens += num_hit_tokens

    def copy(self) -> PrefixCounters:
        return replace(self, outcomes=dict(self.outcomes))


@dataclass(slots=True)
class Counters:
    """Totals since the start that are not the pool's or the cache's own."""

    prefix: PrefixCounters = field(default_factory=PrefixCounters)
    recompute: PrefixCounters = field(default_factory=PrefixCounters)
    num_forks: int = 0
    num_copies: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_allocation_failures: int = 0


class RateMeter:
    """Rates of growing totals over about the last `window_s` seconds, at no cost to what is counted.

    Totals are sampled when the rates are read. A rate is the difference to the youngest sample that is at least
    `window_s` old, or to the oldest there is: read rarely, it is the rate since the reading before.
    """

    __slots__ = ("_samples", "_window_s")

    def __init__(self, now_s: float, num_totals: int, *, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque([(now_s, (0,) * num_totals)])

    def read(self, now_s: float, totals: tuple[int, ...]) -> tuple[float, ...]:
        """Per second, one for each total."""
        samples = self._samples
        while len(samples) > 1 and now_s - samples[1][0] >= self._window_s:
            samples.popleft()
        then_s, then = samples[0]
        # Ten samples a window are enough, however often the rates are read.
        if now_s - samples[-1][0] >= self._window_s / 10:
            samples.append((now_s, totals))
        elapsed_s = now_s - then_s
        if elapsed_s <= 0:
            return (0.0,) * len(totals)
        return tuple((total - before) / elapsed_s for total, before in zip(totals, then, strict=True))


@dataclass(slots=True, frozen=True)
class KVStats:
    """A reading of the KV manager. free + cached + used + in_transit == num_blocks."""

    num_blocks: int
    block_size: int
    num_free: int  # hold nothing
    num_cached: int  # hold a known prefix that nobody uses; reused when free ones run out, unless pinned
    num_used: int
    num_in_transit: int
    num_pinned: int  # a mark: also counted as cached, used or in transit
    num_available: int  # free, or cached and not pinned: what an allocation can take
    min_available: int  # the fewest there ever were
    occupancy: float  # share of blocks in use or in transit
    num_tokens: int  # that the blocks in use hold or have a slot for; a shared block's count once
    internal_waste_tokens: int  # slots of blocks in use without a token: ends of last blocks, and lookahead
    waste_percent: float  # of the slots of blocks in use
    num_sequences: int
    num_swapped_sequences: int
    num_host_blocks: int
    num_host_free: int
    num_allocated: int  # blocks that came into use since the start, by allocation or by a hit
    num_freed: int  # blocks that left use
    allocated_per_s: float = field(compare=False)
    freed_per_s: float = field(compare=False)
    prefix: PrefixCounters  # first lookups, one per sequence
    recompute: PrefixCounters  # lookups of sequences that come back from preemption: no part of the hit rate
    num_evictions: int  # cached blocks that were reused
    num_forks: int
    num_copies: int  # blocks copied on write
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_allocation_failures: int  # growths without room: each makes the scheduler preempt. A refused admission is none


def read_stats(kv: KVManager) -> KVStats:
    """Every number of a manager. Costs a look at the end of each table; nothing here is kept up to date before."""
    pool, counters = kv.pool, kv.counters
    num_used = pool.num_used_blocks
    num_slots = num_used * kv.block_size
    waste_tokens = _internal_waste_tokens(kv)
    totals = (pool.num_allocated_blocks, pool.num_freed_blocks)
    allocated_per_s, freed_per_s = kv.rates.read(kv.clock(), totals)
    return KVStats(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        num_free=kv.num_blocks - num_used - pool.num_cached_blocks - pool.num_in_transit_blocks,
        num_cached=pool.num_cached_blocks,
        num_used=num_used,
        num_in_transit=pool.num_in_transit_blocks,
        num_pinned=kv.cache.num_pinned_blocks,
        num_available=pool.num_free_blocks,
        min_available=pool.min_free_blocks,
        occupancy=(num_used + pool.num_in_transit_blocks) / kv.num_blocks,
        num_tokens=num_slots - waste_tokens,
        internal_waste_tokens=waste_tokens,
        waste_percent=100.0 * waste_tokens / num_slots if num_slots else 0.0,
        num_sequences=len(kv.tables),
        num_swapped_sequences=len(kv.swapped),
        num_host_blocks=kv.host.num_blocks,
        num_host_free=kv.host.num_free_blocks,
        num_allocated=pool.num_allocated_blocks,
        num_freed=pool.num_freed_blocks,
        allocated_per_s=allocated_per_s,
        freed_per_s=freed_per_s,
        prefix=counters.prefix.copy(),
        recompute=counters.recompute.copy(),
        num_evictions=kv.cache.num_evictions,
        num_forks=counters.num_forks,
        num_copies=counters.num_copies,
        num_swapped_out_blocks=counters.num_swapped_out_blocks,
        num_swapped_in_blocks=counters.num_swapped_in_blocks,
        num_allocation_failures=counters.num_allocation_failures,
    )


def _internal_waste_tokens(kv: KVManager) -> int:
    """Slots without a token, of blocks in use: those behind each table's last token."""
    block_size = kv.block_size
    # By block, so that one that forks share counts once. They agree on it: whoever writes it has its own.
    num_filled: dict[int, int] = {}
    for table in kv.tables.values():
        for group in table.groups:
            begin = max(table.num_tokens // block_size, group.first)
            for index, block_id in enumerate(group.block_ids[begin - group.first :], start=begin):
                num_filled[block_id] = max(0, table.num_tokens - index * block_size)
    return len(num_filled) * block_size - sum(num_filled.values())
