"""Making way: a tenant that runs nothing does not wait out another's long answers."""

from __future__ import annotations

from operator import attrgetter

from quire.kv import KVManager
from quire.request import Sequence
from quire.scheduler.blocked import BlockedHead
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.step import StepBuilder


def who_makes_way(life: Lifecycle, kv: KVManager, blocked: BlockedHead | None, step: StepBuilder) -> Sequence | None:
    """Whom to preempt, one a step, for a head that lacks rows or blocks and whose tenant runs nothing.

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
    # None where all of its sequences wait for their blocks to come back.
    return next((seq for seq in reversed(life.running) if seq.request.tenant == most_served), None)
