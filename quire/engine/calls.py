"""Named calls of a running engine: run between two steps, at a server's request.

Each takes the core and keyword arguments, and gives builtins that msgpack can carry. It holds up the next step, so it
should be quick; a longer call returns a future, and is answered when that is done. Its exceptions go to the caller; the
engine goes on.

Those that look inside (`kv_...`) are for what the live page and /debug/kv show. None of them looks at more than `limit`
blocks or tables, whatever the pool's size. They give ids of tokens, never text: this side knows none. It is the server
that decides who may see which request, and under which name a block's hash.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from quire.engine.core import EngineCore
from quire.engine.stats import StepStats
from quire.errors import BadRequestError
from quire.kv import BlockState
from quire.kv.blocks import Block
from quire.kv.hashing import unpack_tokens
from quire.kv.tiers import StoreLevel
from quire.kv.watch import as_runs
from quire.params import SamplingSpec
from quire.request import Request, Sequence, SequenceState

_PINNING = "pinned-prefix"


def pin_prefix(core: EngineCore, *, token_ids: list[int], salt: str | None = None) -> int:
    """Compute a prefix and keep its full blocks from eviction; returns the number of tokens pinned."""
    if core.has_work:
        raise BadRequestError("a prefix can be pinned while no request runs", param="prefix")
    core.add(
        Request(
            request_id=_PINNING,
            prompt_token_ids=token_ids,
            max_tokens=1,
            end_token_ids=frozenset(),
            spec=SamplingSpec(temperature=0.0),
            salt=salt,
        )
    )
    counted, core.stats = core.stats, StepStats()  # an internal request: it does not count
    try:
        while core.has_work:
            core.step()
    finally:
        core.stats = counted
    return core.kv.pin(token_ids, salt=salt)


def cache_changes(core: EngineCore, *, since: str | None = None) -> dict[str, Any]:
    """Hashes that the prefix cache gained and lost since an earlier answer's `since`; without it, all that it has."""
    log = core.kv.log_cache()
    epoch, _, at = (since or "").partition(":")
    change = log.read(int(at) if epoch == log.epoch and at.isdecimal() else None)
    return {
        "since": f"{log.epoch}:{change.at}",
        "is_snapshot": change.is_snapshot,
        "filled": b"".join(change.filled),
        "evicted": b"".join(change.evicted),
    }


def expire_unused(core: EngineCore, *, older_than_s: float) -> Future[int]:
    """Drop what stores have not used for so long; answers with how many blocks went when that is done."""
    tiers = core.kv.tiers
    stores = [level.store for level in tiers.levels if isinstance(level, StoreLevel)] if tiers is not None else []
    total: Future[int] = Future()
    counts: list[int] = []
    counting = threading.Lock()

    def done(num_dropped: int) -> None:
        with counting:
            counts.append(num_dropped)
            if len(counts) == len(stores):
                total.set_result(sum(counts))

    for store in stores:
        store.expire(older_than_s, done)
    if not stores:
        total.set_result(0)
    return total


def read_adapter(core: EngineCore, *, adapter: str, path: str) -> Future[Any]:
    """Read an adapter and see whether it fits the model; answers with its key and rank when that is done."""
    if core.adapters is None:
        raise BadRequestError("adapters are not served here: start with --enable-lora", param="lora_name")
    return core.adapters.slots.start_reading(adapter, path)


# -- looking inside


MAX_BLOCKS = 4_096  # blocks that one call looks at
MAX_TABLE_BLOCKS = 1_024  # blocks of tables in one answer of kv_changes
MAX_ROWS = 1_024
MAX_TOKENS_OF = 256  # blocks whose tokens one call gives


def kv_overview(core: EngineCore) -> dict[str, Any]:
    """Every count of the KV manager and the scheduler."""
    scheduler = core.scheduler
    overview = asdict(core.kv.stats)
    for name in ("prefix", "recompute"):
        counters = overview[name]
        counters["outcomes"] = {outcome.value: count for outcome, count in counters["outcomes"].items()}
        counters["hit_rate"] = getattr(core.kv.stats, name).hit_rate
    overview |= {
        "enable_prefix_caching": core.kv.enable_prefix_caching,
        "num_requests": len(core.scheduler.requests),
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "num_swapped": scheduler.num_swapped,
        "waiting_by_reason": scheduler.waiting_by_reason,
        **asdict(scheduler.stats),
        "num_preemptions": scheduler.stats.num_preemptions,
    }
    return overview


def kv_levels(core: EngineCore) -> dict[str, Any]:
    """The device and the levels below it: blocks, what moved, and what was found there."""
    stats = core.kv.stats
    device = {
        "level": "device",
        "num_blocks": stats.num_cached + stats.num_used + stats.num_in_transit,
        "max_blocks": stats.num_blocks,
        "num_hit_tokens": stats.prefix.num_hit_tokens,
    }
    tiers = core.kv.tiers
    if tiers is None:
        return {"levels": [device]}
    device["num_hit_tokens"] = max(0, stats.prefix.num_hit_tokens - tiers.counters.num_hits)  # without what was loaded
    counters = asdict(tiers.counters)
    del counters["levels"]
    return {"levels": [device, *tiers.usage()], "num_loading": core.scheduler.num_loading, **counters}


def kv_map(core: EngineCore, first: int = 0, limit: int = MAX_BLOCKS) -> dict[str, Any]:
    """Blocks [first, first + limit), in columns."""
    first = max(0, first)
    blocks = core.kv.pool.blocks[first : first + _bounded(limit, MAX_BLOCKS)]
    return {
        "first": first,
        "states": [block.state.value for block in blocks],
        "ref_counts": [block.ref_count for block in blocks],
        "is_pinned": [block.num_pins > 0 for block in blocks],
        "hashes": [block.block_hash for block in blocks],
        "num_hits": [block.num_hits for block in blocks],
    }


def kv_tables(core: EngineCore, offset: int = 0, limit: int = 128, tenant: str | None = None) -> dict[str, Any]:
    """Requests in order of arrival, each sequence with its block table as runs and why it hit or missed the cache.
    tenant: only its requests."""
    requests = [one for one in core.scheduler.requests.values() if tenant is None or one.tenant == tenant]
    kv = core.kv
    found = []
    num_blocks = 0
    num_requests = 0
    for request in itertools.islice(requests, max(0, offset), None):
        if num_requests == _bounded(limit, MAX_ROWS) or num_blocks >= 2 * MAX_BLOCKS:
            break
        num_requests += 1
        for seq in request.sequences:
            entry = _describe(seq)
            table, swapped = kv.tables.get(seq.seq_id), kv.swapped.get(seq.seq_id)
            if table is not None:
                num_blocks += len(table.block_ids)
                entry["blocks"] = as_runs(table.block_ids)
                entry["num_committed_blocks"] = len(table.hashes)
            if swapped is not None:
                num_blocks += len(swapped.host_ids)
                entry["host_blocks"] = as_runs(sorted(swapped.host_ids))
            found.append(entry)
    return {"offset": offset, "num_requests": num_requests, "num_requests_in_all": len(requests), "sequences": found}


def kv_tree(core: EngineCore, first: int = 0, limit: int = MAX_BLOCKS) -> dict[str, Any]:
    """The prefix cache's links, of blocks [first, first + limit) whose content is known. The reader puts them together:
    that takes a look at all of them, which is not the engine's work."""
    end = min(core.kv.num_blocks, max(0, first) + _bounded(limit, MAX_BLOCKS))
    blocks = [block for block in core.kv.pool.blocks[max(0, first) : end] if block.block_hash is not None]
    return {
        "end": end,
        "block_ids": [block.block_id for block in blocks],
        "hashes": [block.block_hash for block in blocks],
        "parents": [block.parent_hash for block in blocks],
        "chain_indices": [block.chain_index for block in blocks],
        "num_hits": [block.num_hits for block in blocks],
        "ref_counts": [block.ref_count for block in blocks],
        "is_pinned": [block.num_pins > 0 for block in blocks],
    }


def kv_tokens(core: EngineCore, block_ids: list[int]) -> list[list[int]]:
    """The tokens of these blocks, [] where they are not known."""
    blocks = core.kv.pool.blocks
    return [
        unpack_tokens(blocks[block_id].packed_tokens) if 0 <= block_id < len(blocks) else []
        for block_id in block_ids[:MAX_TOKENS_OF]
    ]


def kv_block(core: EngineCore, block_id: int) -> dict[str, Any]:
    """One block: its state, who uses it, and which tokens it holds."""
    kv = core.kv
    if not 0 <= block_id < kv.num_blocks:
        raise BadRequestError(f"block must be between 0 and {kv.num_blocks - 1}, got {block_id}", param="block")
    block = kv.pool.blocks[block_id]
    users = []
    token_ids: list[int] = unpack_tokens(block.packed_tokens)
    chain_index = block.chain_index if block.block_hash is not None else None
    for seq in _users(core, block):
        index = kv.tables[seq.seq_id].index_of(block_id)
        first = index * kv.block_size
        # Tokens that steps under way will write count: the host does not know more exactly.
        held = seq.token_ids[first : min(first + kv.block_size, seq.num_computed_tokens)]
        users.append(_describe(seq) | {"table_index": index})
        if chain_index is None:
            chain_index = index
        if len(held) > len(token_ids):
            token_ids = held
    return {
        "block_id": block_id,
        "state": block.state.value,
        "ref_count": block.ref_count,
        "num_pins": block.num_pins,
        "num_transfers": block.num_transfers,
        "hash": block.block_hash,
        "parent": block.parent_hash,
        "num_hits": block.num_hits,
        "chain_index": chain_index,
        "block_size": kv.block_size,
        "token_ids": token_ids,
        "users": users,
    }


def kv_changes(
    core: EngineCore,
    watch: int | None = None,
    limit: int = 2_048,
    max_rows: int = 200,
    with_gauges: bool = True,
    with_levels: bool = False,
    tenants: list[str] | None = None,
) -> dict[str, Any]:
    """What changed since this watch last asked; None, or a watch that is not known any more, begins a new one.

    A new watch first brings every block, `limit` at a time: `blocks.num_left` says how many more there are. Rows and
    block tables are of these tenants, or of all.
    """
    kv = core.kv
    is_new = watch is None or kv.watch is None or not kv.watch.has(watch)
    if watch is None or is_new:
        watch = kv.open_watch()
    assert kv.watch is not None
    changes = kv.watch.read_blocks(watch, _bounded(limit, MAX_BLOCKS))
    all_seqs = (seq for seq in _sequences(core) if tenants is None or seq.request.tenant in tenants)
    seqs = list(itertools.islice(all_seqs, _bounded(max_rows, MAX_ROWS) if max_rows else 0))
    tables = kv.watch.read_tables(watch, (seq.seq_id for seq in seqs), MAX_TABLE_BLOCKS)
    return {
        "watch": watch,
        "is_new": is_new,
        "blocks": asdict(changes),
        "rows": [_row(seq) for seq in seqs],
        "row_tenants": [seq.request.tenant for seq in seqs],
        "tables": [[seq_id, runs] for seq_id, runs in tables.items()],
        "host_tables": [[seq_id, as_runs(sorted(one.host_ids))] for seq_id, one in _few_swapped(core)],
        "gauges": _gauges(core) if with_gauges else None,
        "levels": kv_levels(core) if with_levels and kv.tiers is not None else None,
    }


# Fields of a row of kv_changes, in this order: names would be sent 200 times, five times a second.
ROW_FIELDS = (
    *("seq_id", "request_id", "index", "state", "num_prompt_tokens", "num_computed_tokens", "num_output_tokens"),
    *("num_cached_tokens", "cache_outcome", "num_preemptions", "priority"),
)


def _row(seq: Sequence) -> list[Any]:
    request = seq.request
    return [
        seq.seq_id,
        request.request_id,
        seq.index,
        _STATES[seq.state],
        request.num_prompt_tokens,
        seq.num_computed_tokens,
        seq.num_output_tokens,
        seq.num_cached_tokens,
        None if seq.cache_outcome is None else seq.cache_outcome.value,
        seq.num_preemptions,
        request.priority,
    ]


def _describe(seq: Sequence) -> dict[str, Any]:
    return dict(zip(ROW_FIELDS, _row(seq), strict=True)) | {"tenant": seq.request.tenant}


def _gauges(core: EngineCore) -> dict[str, Any]:
    """Numbers that charts follow. Totals stay totals: rates are the reader's to work out."""
    stats, scheduler = core.kv.stats, core.scheduler
    columns: tuple[tuple[object, tuple[str, ...]], ...] = (
        (stats, ("num_free", "num_cached", "num_used", "num_in_transit", "num_pinned", "occupancy", "waste_percent")),
        (stats, ("num_evictions", "num_copies")),
        (stats.prefix, ("num_query_tokens", "num_hit_tokens")),
        (scheduler, ("num_running", "num_waiting", "num_swapped")),
        (scheduler.stats, ("num_steps", "num_preemptions", "num_prefill_tokens", "num_decode_tokens")),
    )
    return {name: getattr(source, name) for source, names in columns for name in names} | {
        "num_host_used": stats.num_host_blocks - stats.num_host_free,
        "num_requests": len(scheduler.requests),
    }


def _sequences(core: EngineCore) -> Iterator[Sequence]:
    for request in core.scheduler.requests.values():
        for seq in request.sequences:
            if seq.state is not SequenceState.FINISHED:
                yield seq


def _few_swapped(core: EngineCore) -> list[tuple[int, Any]]:
    """Swapped sequences, as many as MAX_BLOCKS host blocks cover."""
    found, num_blocks = [], 0
    for seq_id, swapped in core.kv.swapped.items():
        if num_blocks >= MAX_BLOCKS:
            break
        found.append((seq_id, swapped))
        num_blocks += len(swapped.host_ids)
    return found


def _users(core: EngineCore, block: Block) -> list[Sequence]:
    """Sequences whose table holds the block; it says itself how many there are."""
    if block.state is not BlockState.IN_USE:
        return []
    found: list[Sequence] = []
    for seq in _sequences(core):
        table = core.kv.tables.get(seq.seq_id)
        if table is not None and block.block_id in table.block_ids:
            found.append(seq)
            if len(found) == block.ref_count:
                break
    return found


def _bounded(limit: int, most: int) -> int:
    return max(1, min(limit, most))


_STATES = {state: state.name.lower() for state in SequenceState}


_INSPECTIONS = (kv_overview, kv_levels, kv_map, kv_tables, kv_tree, kv_tokens, kv_block, kv_changes)
INSPECTIONS: dict[str, Callable[..., Any]] = {one.__name__: one for one in _INSPECTIONS}
CALLS: dict[str, Callable[..., Any]] = {
    **{one.__name__: one for one in (pin_prefix, expire_unused, cache_changes, read_adapter)},
    # Methods of the core and of its KV manager, with their arguments.
    "reset_prefix_cache": lambda core, **given: core.kv.reset_prefix_cache(**given),
    "pin_cached": lambda core, **given: core.kv.pin(**given),
    "unpin_prefix": lambda core, **given: core.kv.unpin(**given),
    "expire_prefix": lambda core, **given: core.kv.expire(**given),
    "sleep": EngineCore.fall_asleep,
    "wake_up": EngineCore.wake_up,
    **INSPECTIONS,
}
