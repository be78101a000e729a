"""The connector protocol's example: blocks in a dict, the least recently used dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence


class MemoryStore:
    """Keeps blocks in the engine's memory. For tests, and to copy from."""

    def __init__(self, *, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def contains(self, key: bytes) -> bool:
        return key in self._blocks

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            for key in keys:
                if key in self._blocks:
                    self._blocks.move_to_end(key)
            return [self._blocks.get(key) for key in keys]

    def store(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        with self._lock:
            for key, block in zip(keys, blocks, strict=True):
                self._drop(key)
                self._blocks[key] = bytes(block)
                self._num_bytes += len(block)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._blocks)))

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= len(self._blocks.pop(key, b""))

    def usage(self) -> dict[str, float]:
        return {"num_blocks": len(self._blocks), "num_bytes": self._num_bytes, "max_bytes": self._max_bytes}

    def close(self) -> None:
        self._blocks.clear()
