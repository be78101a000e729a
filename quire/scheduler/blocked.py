"""The head of the queue did not fit: when to look again."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv import KVManager, PrefixMatch
from quire.request import Sequence
from quire.scheduler.types import SchedulerStats


@dataclass(slots=True, frozen=True)
class BlockedHead:
    """Who did not fit, and what was so then. Kept so that a long prompt is not looked up in vain at every step."""

    seq_id: int
    match: PrefixMatch | None
    num_free_blocks: int
    num_prefill_tokens: int

    @property
    def num_matched_blocks(self) -> int:
        return len(self.match.block_ids) if self.match is not None else 0

    def lacks_blocks(self, seq: Sequence, kv: KVManager) -> bool:
        """True while it is this sequence that waits, and no more blocks are free than when it did not fit."""
        return self.seq_id == seq.seq_id and kv.num_free_blocks <= self.num_free_blocks

    def holds(self, seq: Sequence, kv: KVManager, stats: SchedulerStats) -> bool:
        """True while it lacks blocks and no prompt has filled any that it could share: no need to look again."""
        return (
            self.lacks_blocks(seq, kv)
            and bool(kv.tables)  # someone runs, whose end will change things
            and stats.num_prefill_tokens == self.num_prefill_tokens
        )
