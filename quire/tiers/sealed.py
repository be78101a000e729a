"""A connector as the engine uses it: keys with the engine's identity in front, sealed blocks, threads, and numbers.

A sealed block is the payload and a digest of key and payload. It is made when the block goes out and checked when it
comes back, so that no store can make the engine read bytes that are not this block's. Blocks between engines are sealed
on their way (`peers.py`), and lie in this process when they have come.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from quire.log import get_logger
from quire.tiers.connector import Bytes, Connector, Expires, HasUsage, TellsKeys
from quire.tiers.peers import Peers, Piece

SEAL_BYTES = 16
_READERS = 2
# Threads that send to other engines, and that load what these sent. Sealing takes a core longer than a socket takes to
# pass the bytes on; half of the cores are left for steps.
_SENDERS = max(2, min(8, (os.cpu_count() or 2) // 2))
_FIRST_BYTES_PER_S = 500e6  # before a load was measured
LATENCY_S = 1e-3  # a step has to end before a load is noticed
_SMOOTHING = 0.3
_TELL_EVERY_S = 60.0


def seal_of(key: bytes, payload: Bytes) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(payload)
    return digest.digest()[:SEAL_BYTES]


def _numbers(usage: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that can be sent to another process, out of what a store says of itself, which may be anything."""
    return {
        name: int(value) if isinstance(value, int) else float(value)
        for name, value in usage.items()
        if isinstance(name, str) and isinstance(value, int | float) and abs(value) < 2**63
    }


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start, in blocks."""

    num_loaded: int = 0
    num_stored: int = 0
    num_missing: int = 0  # were said to be there, and were not
    num_rejected: int = 0  # came, and were not what they should be
    num_errors: int = 0  # calls that raised
    # Bytes of blocks that went to other engines with the step that filled them: those that had arrived when the step
    # ended, and those that had not.
    num_bytes_beside: int = 0
    num_bytes_behind: int = 0


class SealedStore:
    """One store level. `contains`, `load_s` and `forget` are the scheduler's, `load` and `store` the executor's."""

    def __init__(self, name: str, connector: Connector, *, identity: bytes, block_bytes: int) -> None:
        self.name = name
        self.connector = connector
        self.block_bytes = block_bytes
        self.counters = StoreCounters()
        self._identity = identity
        self._block_s = block_bytes / _FIRST_BYTES_PER_S
        self._num_queued = 0  # blocks whose loads have begun and are not over
        self._lock = threading.Lock()
        self._forgotten: set[bytes] = set()  # until the writer has told the connector
        self.takes_all = not isinstance(connector, Peers)
        self._writer = ThreadPoolExecutor(1 if self.takes_all else _SENDERS, f"kv-{name}-store")
        self._readers = ThreadPoolExecutor(_READERS if self.takes_all else _SENDERS, f"kv-{name}-load")
        self._told_s = -_TELL_EVERY_S

    # -- the scheduler's side: nothing here waits

    def contains(self, key: bytes) -> bool:
        if key in self._forgotten:
            return False
        try:
            return self.connector.contains(self._identity + key)
        except Exception as error:
            self._note_error("contains", error)
            return False

    def load_s(self, num_blocks: int) -> float:
        if not self.takes_all:
            return 0.0  # what another engine sent is here so that this one need not compute it
        return LATENCY_S + (self._num_queued + num_blocks) * self._block_s

    @property
    def block_s(self) -> float:
        """Seconds that a block takes to load, as measured."""
        return self._block_s

    def forget(self, keys: Sequence[bytes], done: Callable[[], None] = lambda: None) -> None:
        """Forget these blocks, also those whose stores are queued. `done` is called on another thread."""
        if keys:
            self._forgotten.update(keys)
            self._writer.submit(self._forget, list(keys), done)

    def _forget(self, keys: list[bytes], done: Callable[[], None]) -> None:
        with self._noting_errors("forget"):
            self.connector.forget([self._identity + key for key in keys])
        self._forgotten.difference_update(keys)
        done()

    # -- the executor's side

    def start_load(self, keys: Sequence[bytes], use: Callable[[int, memoryview], None], done: Done) -> None:
        """Calls `use` with the place and the payload of each block that came and is right, then `done` with the places
        of the others; both on another thread."""
        with self._lock:
            self._num_queued += len(keys)
        self._readers.submit(self._load, [self._identity + key for key in keys], use, done)

    def start_store(self, keys: Sequence[bytes], read: Callable[[], Sequence[memoryview]], done: Done) -> None:
        """`read` gives the blocks, each with room for the seal behind its payload. It is called on another thread."""
        self._writer.submit(self._store, [self._identity + key for key in keys], read, done)

    def start_send(self, to: str, piece: Piece, read: Callable[[], Bytes], done: Callable[[bool], None]) -> None:
        """Send a piece of blocks to another engine. `read` gives its bytes; `done` hears whether it was taken. Both are
        called on another thread, `done` at once where there is none any more."""
        try:
            self._writer.submit(self._send, to, piece, read, done)
        except RuntimeError:  # this store is closed
            done(False)

    def _load(self, keys: list[bytes], use: Callable[[int, memoryview], None], done: Done) -> None:
        missing = list(range(len(keys)))
        rejected = []
        started = time.perf_counter()
        with self._noting_errors("load"):
            for i, (key, block) in enumerate(zip(keys, self.connector.load(keys), strict=True)):
                if block is None:
                    continue
                if (payload := self._open(key, block)) is None:
                    rejected.append(key)
                    continue
                use(i, payload)
                missing.remove(i)
            if rejected:
                self.connector.forget(rejected)
        with self._lock:
            self._num_queued -= len(keys)
            self.counters.num_loaded += len(keys) - len(missing)
            self.counters.num_missing += len(missing) - len(rejected)
            self.counters.num_rejected += len(rejected)
            if not missing:
                block_s = (time.perf_counter() - started) / len(keys)
                self._block_s += _SMOOTHING * (block_s - self._block_s)
        done(missing)

    def _open(self, key: bytes, block: Bytes) -> memoryview | None:
        """The payload, if the block is what was stored under this key."""
        view = memoryview(block).cast("B")
        if not self.takes_all:
            return view  # it was checked when it came
        if len(view) != self.block_bytes + SEAL_BYTES:
            return None
        payload = view[: self.block_bytes]
        return payload if seal_of(key, payload) == view[self.block_bytes :] else None

    def _store(self, keys: list[bytes], read: Callable[[], Sequence[memoryview]], done: Done) -> None:
        missing = list(range(len(keys)))
        with self._noting_errors("store"):
            blocks = read()
            for key, block in zip(keys, blocks, strict=True):
                block[self.block_bytes :] = seal_of(key, block[: self.block_bytes])
            self.connector.store(keys, blocks)
            self.counters.num_stored += len(keys)
            missing = []
        done(missing)

    def _send(self, to: str, piece: Piece, read: Callable[[], Bytes], done: Callable[[bool], None]) -> None:
        assert isinstance(self.connector, Peers)
        is_taken = False
        with self._noting_errors("send"):
            keys = [self._identity + key for key in piece.keys]
            self.connector.send(to, replace(piece, keys=keys), read())
            is_taken = True
        with self._lock:
            is_last = piece.end == self.block_bytes
            self.counters.num_stored += len(piece.keys) if is_taken and is_last else 0
        done(is_taken)

    @contextmanager
    def _noting_errors(self, call: str) -> Iterator[None]:
        """A call of the connector may fail in any way: the engine computes what it does not get. What follows the call
        has to happen all the same, also where it was cancelled or wanted to end the process."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note_error(call, error)

    def _note_error(self, call: str, error: BaseException) -> None:
        self.counters.num_errors += 1
        now = time.monotonic()
        if now - self._told_s >= _TELL_EVERY_S:
            self._told_s = now
            get_logger().warning(
                "the KV store %s failed in %s: %s (counted; blocks are computed)", self.name, call, error
            )

    def tell_keys(self, tell: Callable[[bytes, bool], None]) -> None:
        """Have it told of each key whether it is there, now and whenever that changes, if the store can tell."""

        def tell_own(key: bytes, is_held: bool) -> None:
            if key.startswith(self._identity):
                tell(key.removeprefix(self._identity), is_held)

        with self._noting_errors("tell_keys"):
            if isinstance(self.connector, TellsKeys):
                self.connector.tell_keys(tell_own)

    def usage(self) -> dict[str, float]:
        held: dict[str, float] = {}
        with self._noting_errors("usage"):
            if isinstance(self.connector, HasUsage):
                held.update(_numbers(self.connector.usage()))
        counters = self.counters
        moved = (counters.num_loaded + counters.num_stored) * self.block_bytes
        if not self.takes_all:
            held |= {"num_bytes_beside": counters.num_bytes_beside, "num_bytes_behind": counters.num_bytes_behind}
        return held | {
            "num_rejected": held.get("num_rejected", 0) + counters.num_rejected,
            "num_errors": counters.num_errors,
            "moved_bytes": moved,
            "load_block_s": self._block_s,
        }

    def expire(self, older_than_s: float, done: Callable[[int], None]) -> None:
        """Drop what was not used for so long, where the store can. `done` hears how many blocks went, on another
        thread."""
        self._writer.submit(self._expire, older_than_s, done)

    def _expire(self, older_than_s: float, done: Callable[[int], None]) -> None:
        num_dropped = 0
        with self._noting_errors("expire"):
            if isinstance(self.connector, Expires):
                num_dropped = self.connector.expire(older_than_s)
        done(num_dropped)

    def close(self) -> None:
        """Finishes the stores that are under way; what goes to a peer is not waited for."""
        if not self.takes_all:
            self.connector.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)
        self.connector.close()


Done = Callable[[list[int]], None]
