"""An engine's counters at one moment: engines are measured more than once, so a run takes differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine


@dataclass(slots=True, frozen=True)
class EngineCounts:
    """Totals since the engine's start."""

    allocated: int
    freed: int
    evictions: int
    forks: int
    copies: int
    swapped_out: int
    swapped_in: int
    query_tokens: int
    hit_tokens: int
    recompute: int
    swap: int
    recomputed: int
    schedule_s: float
    update_s: float
    prepare_s: float
    forward_s: float
    sample_s: float
    busy_s: float

    @classmethod
    def read(cls, engine: LLMEngine) -> EngineCounts:
        kv, scheduler, host, stats = engine.core.kv, engine.core.scheduler.stats, engine.core.host, engine.stats
        counters = kv.counters
        return cls(
            allocated=kv.pool.num_allocated_blocks,
            freed=kv.pool.num_freed_blocks,
            evictions=kv.cache.num_evictions,
            forks=counters.num_forks,
            copies=counters.num_copies,
            swapped_out=counters.num_swapped_out_blocks,
            swapped_in=counters.num_swapped_in_blocks,
            query_tokens=counters.prefix.num_query_tokens,
            hit_tokens=counters.prefix.num_hit_tokens,
            recompute=scheduler.num_recompute_preemptions,
            swap=scheduler.num_swap_preemptions,
            recomputed=scheduler.num_recomputed_tokens,
            schedule_s=host.schedule_s,
            update_s=host.update_s,
            prepare_s=stats.prepare_s,
            forward_s=stats.forward_s,
            sample_s=stats.sample_s,
            busy_s=stats.busy_s,
        )

    def since(self, earlier: EngineCounts) -> EngineCounts:
        return EngineCounts(*(getattr(self, name) - getattr(earlier, name) for name in self.__slots__))
