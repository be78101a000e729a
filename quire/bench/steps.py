"""Watching an engine: what ran in each step, how long it took, what the KV cache held, and what the counters say."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from quire.plan import StepPlan, StepResult, StepTimings
from quire.step_costs import PlanLoads, StepLoad

if TYPE_CHECKING:
    from quire import LLMEngine
    from quire.engine.core import EngineCore

Number = TypeVar("Number", int, float)

# Waste needs a look at every block table. The first steps are all read, so that short runs are exact; after that,
# readings may take this share of the run, and no more.
_NUM_READ_ALWAYS = 64
_MAX_READING_SHARE = 0.005


@dataclass(slots=True, frozen=True)
class Step:
    """One step that has run. A preempted sequence that is computed again counts as prefill."""

    num_decode_tokens: int
    num_prefill_tokens: int
    num_seqs: int
    timings: StepTimings
    load: StepLoad = field(default_factory=StepLoad)


@dataclass(slots=True)
class KVReadings:
    """The cache while steps run: read after each plan, before its step's sequences can end."""

    num_readings: int = 0
    sum_used: int = 0
    peak_blocks: int = 0
    min_available: int | None = None
    num_waste_readings: int = 0
    sum_waste_percent: float = 0.0
    max_waste_percent: float = 0.0
    last_waste_percent: float = 0.0
    waste_percent_at_peak: float = 0.0
    peak_read: int = 0  # blocks in use at the fullest of the waste readings
    table_entries_max: int = 0


class StepWatch:
    """Stands in for the engine's executor during a run: passes everything on and notes what passed."""

    def __init__(self, core: EngineCore, *, every_step: bool) -> None:
        self._core = core
        self._inner = core.executor
        self._every_step = every_step
        self._planned: deque[tuple[int, int, int, StepLoad]] = deque()
        self._loads = PlanLoads()
        stats = core.scheduler.stats
        self._num_decodes, self._num_prefill = stats.num_decode_tokens, stats.num_prefill_tokens
        self._started_s = time.perf_counter()
        self._reading_s = 0.0
        self.kv = KVReadings()
        self.steps: list[Step] = []
        self.num_prefill_tokens = 0  # prompt tokens of the steps that are over

    @property
    def depth(self) -> int:
        return self._inner.depth

    def submit(self, plan: StepPlan) -> int:
        ticket = self._inner.submit(plan)
        # The scheduler counts when it plans, and every plan comes here before the next is made.
        stats = self._core.scheduler.stats
        decodes, prefill = stats.num_decode_tokens - self._num_decodes, stats.num_prefill_tokens - self._num_prefill
        self._num_decodes, self._num_prefill = stats.num_decode_tokens, stats.num_prefill_tokens
        self._planned.append((decodes, prefill, len(plan.spans) + len(plan.forks), self._loads.read(plan)))
        self._read_kv()
        return ticket

    def collect(self, ticket: int) -> StepResult:
        result = self._inner.collect(ticket)
        decodes, prefill, num_seqs, load = self._planned.popleft()
        if decodes or prefill:  # a plan may also only wait for block transfers
            self.steps.append(Step(decodes, prefill, num_seqs, result.timings, load))
            self.num_prefill_tokens += prefill
        return result

    def is_idle(self) -> bool:
        return self._inner.is_idle()

    def has_time(self) -> bool:
        return self._inner.has_time()

    def prepare_more(self) -> bool:
        return self._inner.prepare_more()

    def close(self) -> None:
        self._inner.close()

    def _read_kv(self) -> None:
        kv, seen = self._core.kv, self.kv
        used, available = kv.num_used_blocks, kv.num_free_blocks
        seen.num_readings += 1
        seen.sum_used += used
        seen.peak_blocks = max(seen.peak_blocks, used)
        seen.min_available = available if seen.min_available is None else min(seen.min_available, available)
        now = time.perf_counter()
        is_dear = self._reading_s > _MAX_READING_SHARE * (now - self._started_s)
        if not used or (is_dear and not self._every_step and seen.num_readings > _NUM_READ_ALWAYS):
            return
        waste = kv.stats.waste_percent
        seen.num_waste_readings += 1
        seen.sum_waste_percent += waste
        seen.last_waste_percent = waste
        seen.max_waste_percent = max(seen.max_waste_percent, waste)
        if used >= seen.peak_read:
            seen.peak_read, seen.waste_percent_at_peak = used, waste
            entries = sum(len(table.block_ids) for table in kv.tables.values())
            seen.table_entries_max = max(seen.table_entries_max, entries)
        self._reading_s += time.perf_counter() - now


def take_cache_pages(core: EngineCore) -> None:
    """Before steps are recorded to learn from. On a CPU the system gives the cache's memory when it is first written,
    and a new engine takes blocks that were never used before others: until each was used once, prompts take longer, as
    they never will again. Ranks keep their caches in processes of their own, which are left as they are."""
    worker = getattr(core.executor, "worker", None)
    if worker is not None:
        worker.cache.take_pages()


@contextmanager
def watch_steps(core: EngineCore, *, every_step: bool) -> Iterator[StepWatch]:
    """Watch the steps of a run. Nothing may be in flight when it starts."""
    inner = core.executor
    watch = StepWatch(core, every_step=every_step)
    core.executor = watch
    try:
        yield watch
    finally:
        core.executor = inner


def prefill_and_decode_rates(steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Computed prompt tokens and decoded tokens per second, each over the step time spent on that kind.

    A step that does one kind belongs to it whole. In a mixed step the decodes are charged what a step of that many
    decodes alone takes in this run (a straight line through those steps: reading the weights, plus something for each
    sequence), and the prompts get the rest: it is what they added. Without any decode-only step, mixed steps are
    divided by tokens, which flatters decodes.
    """
    decode_alone = [s for s in steps if not s.num_prefill_tokens]
    line = _line([s.num_decode_tokens for s in decode_alone], [s.timings.total_s for s in decode_alone])
    prefill_s = decode_s = 0.0
    for step in steps:
        total_s, tokens = step.timings.total_s, step.num_decode_tokens
        if not step.num_prefill_tokens:
            share_s = total_s
        elif not tokens:
            share_s = 0.0
        elif line is None:
            share_s = total_s * tokens / (tokens + step.num_prefill_tokens)
        else:
            share_s = min(total_s, line[0] + line[1] * tokens)
        decode_s += share_s
        prefill_s += total_s - share_s
    num_prefill = sum(s.num_prefill_tokens for s in steps)
    num_decode = sum(s.num_decode_tokens for s in steps)
    return (
        num_prefill / prefill_s if num_prefill and prefill_s > 0 else None,
        num_decode / decode_s if num_decode and decode_s > 0 else None,
    )


def _line(xs: list[int], ys: list[float]) -> tuple[float, float] | None:
    """(start, slope) by least squares; neither below zero. None without points."""
    if not xs:
        return None
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if not spread:
        return mean_y, 0.0  # one width only: a wider step costs much the same, for the weights are read once
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread)
    start = mean_y - slope * mean_x
    if start < 0:
        return 0.0, mean_y / mean_x
    return start, slope


def kv_counts(engine: LLMEngine) -> dict[str, int]:
    """Totals since the engine's start, as KVReport calls them. Engines are measured more than once, so a run takes
    differences."""
    kv, scheduler = engine.core.kv, engine.core.scheduler.stats
    counters = kv.counters
    return {
        "blocks_allocated": kv.pool.num_allocated_blocks,
        "blocks_freed": kv.pool.num_freed_blocks,
        "evictions": kv.cache.num_evictions,
        "forks": counters.num_forks,
        "copies": counters.num_copies,
        "swapped_out_blocks": counters.num_swapped_out_blocks,
        "swapped_in_blocks": counters.num_swapped_in_blocks,
        "prefix_query_tokens": counters.prefix.num_query_tokens,
        "prefix_hit_tokens": counters.prefix.num_hit_tokens,
        "recomputed_tokens": scheduler.num_recomputed_tokens,
    }


def preemption_counts(engine: LLMEngine) -> dict[str, int]:
    stats = engine.core.scheduler.stats
    return {"recompute": stats.num_recompute_preemptions, "swap": stats.num_swap_preemptions}


def time_counts(engine: LLMEngine) -> dict[str, float]:
    """Seconds since the engine's start, by what they went into."""
    host, stats = engine.core.host, engine.stats
    return {
        "schedule": host.schedule_s,
        "prepare": stats.prepare_s,
        "forward": stats.forward_s,
        "sample": stats.sample_s,
        "update": host.update_s,
        "busy": stats.busy_s,
    }


def since(before: dict[str, Number], now: dict[str, Number]) -> dict[str, Number]:
    return {name: value - before[name] for name, value in now.items()}
