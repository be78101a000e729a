"""Named inspections of a running engine: run between two steps, at a server's request.

Each takes the core and keyword arguments, and gives builtins that msgpack can carry. It holds up the next step, so it
should be quick; what takes longer gives a future, and is told when that is done. What it raises goes to who asked; the
engine goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.engine.core import EngineCore
from quire.engine.inspect import INSPECTIONS
from quire.engine.stats import StepStats
from quire.errors import BadRequestError
from quire.kv.tiers import StoreLevel
from quire.params import SamplingSpec
from quire.request import Request

_PINNING = "pinned-prefix"


def reset_prefix_cache(core: EngineCore, *, force: bool = False) -> bool:
    """Forget cached prefixes. False, and nothing changed, while requests hold blocks; spares pinned ones."""
    return core.kv.reset_prefix_cache(force=force)


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
    counted, core.stats = core.stats, StepStats()  # nobody's request: it does not count
    try:
        while core.has_work:
            core.step()
    finally:
        core.stats = counted
    return core.kv.pin(token_ids, salt=salt)


def unpin_prefix(core: EngineCore, *, token_ids: list[int], salt: str | None = None) -> int:
    """Let a pinned prefix be evicted again; returns the number of tokens unpinned."""
    return core.kv.unpin(token_ids, salt=salt)


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


def pin_cached(core: EngineCore, *, token_ids: list[int], salt: str | None = None) -> int:
    """Keep what the device has of a prefix from eviction; returns the number of tokens pinned."""
    return core.kv.pin(token_ids, salt=salt)


def expire_prefix(core: EngineCore, *, token_ids: list[int], salt: str | None = None) -> int:
    """Forget a prefix in every level; returns the number of tokens."""
    return core.kv.expire(token_ids, salt=salt)


def expire_unused(core: EngineCore, *, older_than_s: float) -> int:
    """Drop what stores have not used for so long; returns how many blocks went."""
    tiers = core.kv.tiers
    stores = [level.store for level in tiers.levels if isinstance(level, StoreLevel)] if tiers is not None else []
    return sum(store.expire(older_than_s) for store in stores)


def read_adapter(core: EngineCore, *, adapter: str, path: str) -> Future[Any]:
    """Read an adapter and see whether it fits the model; answers with its key and rank when that is done."""
    if core.adapters is None:
        raise BadRequestError("adapters are not served here: start with --enable-lora", param="lora_name")
    return core.adapters.slots.start_reading(adapter, path)


def sleep(core: EngineCore, *, keep_kv: bool = False) -> None:
    """Give memory back until `wake_up`."""
    core.fall_asleep(keep_kv=keep_kv)


def wake_up(core: EngineCore) -> None:
    core.wake_up()


_PREFIXES = (reset_prefix_cache, pin_prefix, unpin_prefix, pin_cached, expire_prefix, expire_unused, cache_changes)
_CALLS = (*_PREFIXES, read_adapter, sleep, wake_up)
CALLS: dict[str, Callable[..., Any]] = {one.__name__: one for one in _CALLS} | INSPECTIONS
