"""Preemption: who gives its blocks up for a sequence that runs and finds none, and how they come back."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING

from quire.kv import UNCHANGED, Allocation, KVManager
from quire.plan import StepPlan
from quire.request import Sequence
from quire.scheduler.beams import is_ranked
from quire.scheduler.config import SchedulerConfig
from quire.scheduler.step import StepBuilder
from quire.step_costs import StepCosts

if TYPE_CHECKING:
    from quire.scheduler.admission import BlockedHead
    from quire.scheduler.lifecycle import Lifecycle


class PreemptionKind(StrEnum):
    RECOMPUTE = "recompute"  # drop the KV, compute it again later
    SWAP = "swap"  # copy the KV to the host, copy it back later


def pick_victim(running: list[Sequence], is_scheduled: Callable[[Sequence], bool]) -> Sequence | None:
    """The lowest priority, then the latest arrival, of those that this step does not run. `running` is in order."""
    return next((seq for seq in reversed(running) if not is_scheduled(seq) and not is_ranked(seq)), None)


def pick_victim_between_tenants(
    running: list[Sequence], asking: Sequence, scheduled: set[Sequence], counter_of: Callable[[Sequence], float]
) -> Sequence:
    """Like `pick_victim`, but from the tenant that has had most. Nobody before the one that asks gives way."""
    victim, most = asking, counter_of(asking)
    for seq in reversed(running):
        if seq is asking:
            break
        counter = counter_of(seq)
        # Of one tenant the last; between tenants with equal counters the last as well.
        is_more = counter > most or (counter == most and victim is asking)
        if is_more and seq not in scheduled and not is_ranked(seq):
            victim, most = seq, counter
    return victim


def choose_kind(seq: Sequence, config: SchedulerConfig, block_size: int, prefill_tokens_per_s: float) -> PreemptionKind:
    """The cheaper of copying the blocks out and back, and of computing their tokens again; or as the operator says."""
    if config.preemption == "recompute" or not seq.num_computed_tokens:
        return PreemptionKind.RECOMPUTE
    if config.preemption == "swap":
        return PreemptionKind.SWAP
    num_blocks = -(-seq.num_computed_tokens // block_size)
    swap_s = 2 * num_blocks * config.kv_bytes_per_block / config.swap_bytes_per_s
    # What it found in the prefix cache when it came, it will likely find there again: heads are evicted last.
    num_lost = seq.num_computed_tokens - min(seq.num_cached_tokens, seq.num_computed_tokens)
    recompute_s = num_lost / prefill_tokens_per_s
    return PreemptionKind.SWAP if swap_s < recompute_s else PreemptionKind.RECOMPUTE


def pick_victim_for_fairness(
    life: Lifecycle, kv: KVManager, blocked: BlockedHead | None, step: StepBuilder
) -> Sequence | None:
    """Whom to preempt, one a step, for a queue's head that lacks rows or blocks and whose tenant runs nothing: it does
    not wait out another tenant's long answers.

    It is the last sequence of the tenant that has had most, which keeps at least one; and only where the head asks for
    no more than an equal share. So tenants that all run something are left alone, however unequal they are: the queue
    evens them out as sequences end.
    """
    queue = life.queue
    if not queue or step.num_coming_blocks:
        return None  # what comes may be enough
    head = queue.head
    own = queue.tenants[head.request.tenant]
    if own.num_running or head.num_pending_tokens:
        return None
    num_rows = life.num_rows_for(head)
    if num_rows > life.rows.num_free:
        fits_share = num_rows <= life.config.max_num_seqs // queue.num_active_tenants
    elif blocked is not None and blocked.lacks_blocks(head, kv):
        num_blocks = kv.num_blocks_for(len(head.token_ids)) - blocked.num_matched_blocks
        fits_share = num_blocks <= kv.num_blocks // queue.num_active_tenants
    else:
        return None
    others = [tenant for tenant in queue.tenants.values() if tenant.num_running > 1 and tenant.counter >= own.counter]
    if not others or not fits_share:
        return None
    most_served = max(others, key=attrgetter("counter")).name
    # None where all of its sequences wait for their blocks to come back, or for a ranking.
    return next(
        (seq for seq in reversed(life.running) if seq.request.tenant == most_served and not is_ranked(seq)), None
    )


class Room:
    """Blocks for sequences that run. Where none is free, a later sequence is preempted for them."""

    def __init__(self, life: Lifecycle, kv: KVManager, costs: StepCosts) -> None:
        self._life = life
        self._kv = kv
        self._costs = costs

    def take(self, seq: Sequence, num_tokens: int, allocation: Allocation | None, step: StepBuilder) -> bool:
        """Enter what `grow` changed into the plan; where it found no room, make some at the cost of later sequences."""
        while allocation is None:
            step.short_of_blocks = True
            if step.num_coming_blocks > step.num_sitting_out:
                step.num_sitting_out += 1
                return False
            victim = self.pick_victim(seq, step)
            self.preempt(victim, step)
            if victim is seq:
                return False
            allocation = self._kv.grow(seq.seq_id, num_tokens, seq.num_computed_tokens, seq.num_unverified_drafts)
        self.enter(seq, allocation, step.plan)
        return True

    def enter(self, seq: Sequence, allocation: Allocation, plan: StepPlan) -> None:
        """Tell the executor what changed in a sequence's table."""
        if allocation is UNCHANGED:
            return
        assert seq.row is not None
        for group, block_ids in allocation.appended:
            plan.appended.append((seq.row, group, block_ids))
        plan.copies.extend(allocation.copies)
        for group, index, block in allocation.remapped:
            plan.remapped.append((seq.row, group, index, block))
        # It moves on to a new block, so the one before is full.
        self._kv.commit(seq.seq_id, seq.token_ids, seq.num_computed_tokens)

    def pick_victim(self, asking: Sequence, step: StepBuilder) -> Sequence:
        queue, running = self._life.queue, self._life.running
        if queue.is_shared:
            return pick_victim_between_tenants(running, asking, step.scheduled(), queue.counter_of)
        victim = pick_victim(running, step.has_scheduled)
        assert victim is not None, "the caller is itself running, so there is always at least one victim"
        return victim

    def preempt(self, victim: Sequence, step: StepBuilder) -> None:
        if self._life.is_beam(victim):
            self._life.preempt_beams(self._life.beams[victim.request.request_id], step.plan)
            return
        kind = choose_kind(victim, self._life.config, self._kv.block_size, self._costs.prefill_tokens_per_s)
        if victim.request.pooling is not None:
            kind = PreemptionKind.RECOMPUTE  # what its row has pooled so far is not among the blocks
        step.num_coming_blocks += self._life.preempt(victim, kind, step.plan)
