"""Brownout: what the server gives up, step by step, when KV memory thrashes. Pure logic: numbers in, a level out.

    level  what it does                                     what undoes it
    0      nothing
    1      smaller prefill budget in steps that decode      calm for fall_s: one level down
    2      and a cap on the output length of new requests   the same
    3      and no new requests are taken                    the same

The engine does what level 1 says (`prefill_limit`); the server, which reads the level from the engine's load, the rest.

Pressure is work that is undone: running sequences that lose their blocks to others (preemptions), or find none when
they grow (allocation failures), again and again within a few seconds, many of them for the sequences that run and for
those that finish, while requests hold nearly all blocks. A full batch, a long queue, a cache full of old prefixes, or a
preemption for every few answers is none: that is a busy server, and the queue has limits of its own. Refusal needs more
still: that what waits would by itself fill a good part of the cache, so that shorter answers alone cannot help.

It goes up one level after rise_s of pressure, for each level by what happened since the last, so that one burst is
worth one level; and down one for each fall_s of calm. Between pressure and calm lies a band in which the level stays,
so that it does not flutter. While requests hold little of the cache calm counts faster: an empty server does not go on
refusing.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.kv import KVManager
    from quire.scheduler import Scheduler

MAX_LEVEL = 3
_CALM_SPEEDUP = 5.0  # while the cache is mostly empty


@dataclass(slots=True, frozen=True, kw_only=True)
class BrownoutSettings:
    """When each level comes and goes, and what it does. Checked at construction."""

    enabled: bool = True
    window_s: float = 10.0  # preemptions and failures are counted over this time
    rise_s: float = 2.0  # pressure for so long is one level up
    fall_s: float = 10.0  # calm for so long is one level down
    min_kv_usage: float = 0.85  # pressure needs requests to hold this share of the blocks
    low_kv_usage: float = 0.5  # below this share, calm counts faster
    min_preemptions: int = 4  # fewer in a window are never pressure,
    preempted_share: float = 0.25  # nor fewer than this share of the running sequences,
    preempted_per_finished: float = 0.5  # nor fewer than this for each sequence that finished
    failures_per_preemption: float = 4.0  # growths without room that weigh like one preemption
    calm_ratio: float = 0.5  # less than this part of a pressure is calm
    refusal_backlog: float = 0.25  # level 3 needs waiting tokens of this share of the cache
    prefill_share: float = 0.25  # level 1: of max_num_batched_tokens

    def __post_init__(self) -> None:
        for name in (
            *("window_s", "rise_s", "fall_s", "preempted_share", "preempted_per_finished"),
            "failures_per_preemption",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"brownout {name} must be > 0, got {getattr(self, name)}")
        if self.min_preemptions < 1:
            raise ConfigError(f"brownout min_preemptions must be >= 1, got {self.min_preemptions}")
        for name in ("min_kv_usage", "low_kv_usage", "calm_ratio", "prefill_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"brownout {name} is a share: it must be > 0 and <= 1, got {getattr(self, name)}")
        if self.refusal_backlog < 0:
            raise ConfigError(f"brownout refusal_backlog must be >= 0, got {self.refusal_backlog}")


@dataclass(slots=True, frozen=True, kw_only=True)
class PressureReading:
    """The engine's memory at one moment. Counts are totals since the start."""

    kv_usage: float  # share of blocks that requests hold; cached prefixes that could be evicted are not in it
    num_preemptions: int  # for want of blocks; not those that made way for another tenant
    num_allocation_failures: int
    num_finished: int  # sequences
    num_running: int
    num_waiting_tokens: int
    capacity_tokens: int  # tokens that the whole cache holds

    @classmethod
    def of(cls, scheduler: Scheduler, kv: KVManager) -> PressureReading:
        """Costs nothing that grows with the number of sequences or blocks."""
        num_held = kv.num_used_blocks + kv.pool.num_in_transit_blocks
        stats = scheduler.stats
        return cls(
            kv_usage=num_held / kv.num_blocks,
            num_preemptions=stats.num_preemptions - stats.num_yields,
            num_allocation_failures=kv.counters.num_allocation_failures,
            num_finished=stats.num_finished,
            num_running=scheduler.num_running,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            # An encoder's sequences take no blocks, so that its cache is never short.
            capacity_tokens=kv.num_blocks * kv.block_size // len(kv.windows) if kv.windows else sys.maxsize,
        )


class Brownout:
    """The level, moved by readings. Call `update` a few times a second, also while nothing runs and level > 0: what
    refuses all requests gets none that would wake it."""

    def __init__(self, settings: BrownoutSettings | None = None) -> None:
        self.settings = settings or BrownoutSettings()
        self.level = 0
        self.pressure = 0.0  # as of the last reading: 1 and more is pressure
        self._readings: deque[tuple[float, PressureReading]] = deque()
        self._last_s: float | None = None
        self._pressed_s = 0.0  # towards the next level
        self._calm_s = 0.0  # towards the one before

    def prefill_limit(self, max_num_batched_tokens: int) -> int | None:
        """For Scheduler.set_prefill_limit."""
        return max(1, int(max_num_batched_tokens * self.settings.prefill_share)) if self.level else None

    def update(self, now_s: float, reading: PressureReading) -> int:
        """Take in a reading; returns the level from now on. Time only matters by its differences."""
        settings = self.settings
        if not settings.enabled:
            return 0
        elapsed_s = max(0.0, now_s - self._last_s) if self._last_s is not None else 0.0
        self._last_s = now_s
        self.pressure = self._measure(now_s, reading)
        if self.pressure >= 1:
            self._calm_s = 0.0
            # A gap between readings is no proof of pressure all the while: it moves one level at most.
            self._pressed_s += min(elapsed_s, settings.rise_s)
            if self._pressed_s >= settings.rise_s and self.level < self._highest(reading):
                self.level += 1
                self._pressed_s = 0.0
                self._readings.clear()  # the next level needs evidence of its own, from after this one took hold
        elif self.pressure < settings.calm_ratio:
            self._pressed_s = 0.0
            self._calm_s += elapsed_s * (_CALM_SPEEDUP if reading.kv_usage < settings.low_kv_usage else 1.0)
            while self.level and self._calm_s >= settings.fall_s:
                self.level -= 1
                self._calm_s -= settings.fall_s
            if not self.level:
                self._calm_s = 0.0
        else:
            self._pressed_s = self._calm_s = 0.0
        return self.level

    def _highest(self, reading: PressureReading) -> int:
        """Refusal is for when what waits is too much, too."""
        is_backlogged = reading.num_waiting_tokens >= self.settings.refusal_backlog * reading.capacity_tokens
        return MAX_LEVEL if is_backlogged else MAX_LEVEL - 1

    def _measure(self, now_s: float, reading: PressureReading) -> float:
        """How much of the running work was undone in the window, in units of what is too much."""
        settings, readings = self.settings, self._readings
        # Ten readings a window are enough, however often it is called. The oldest is the one to compare with.
        if not readings or now_s - readings[-1][0] >= settings.window_s / 10:
            readings.append((now_s, reading))
        while len(readings) > 1 and now_s - readings[1][0] >= settings.window_s:
            readings.popleft()
        # A preemption frees blocks, so the usage to judge by is the highest of the window.
        if max(reading.kv_usage, *(old.kv_usage for _, old in readings)) < settings.min_kv_usage:
            return 0.0
        oldest = readings[0][1]
        num_preemptions = reading.num_preemptions - oldest.num_preemptions
        num_failures = reading.num_allocation_failures - oldest.num_allocation_failures
        num_undone = max(num_preemptions, num_failures / settings.failures_per_preemption)
        num_finished = reading.num_finished - oldest.num_finished
        too_many = max(
            settings.min_preemptions,
            settings.preempted_share * reading.num_running,
            settings.preempted_per_finished * num_finished,
        )
        return num_undone / too_many
