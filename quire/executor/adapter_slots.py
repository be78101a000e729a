"""Which adapters are on the device, and which are kept on the host for when they are wanted. No torch here.

An adapter goes by its key: its name, and a digest of its files, so that another one of the same name is another
adapter. It is read, checked and laid out as a slot is on a thread; the steps wait for nothing but one copy.

What is where is decided here, once. A store does it: the memory of one device (adapter_store.py), or of every rank of a
model that is split (rank_adapters.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.errors import WeightsError


@dataclass(slots=True, frozen=True)
class AdapterInfo:
    """An adapter that was read and fits the model."""

    key: str
    name: str
    path: str
    rank: int


class AdapterStore(Protocol):
    """Where adapters are. `read` may be called by any thread, by one at a time."""

    def read(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter and keep it on the host. WeightsError says what is wrong with it."""

    def keep(self, keys: Sequence[str]) -> None:
        """Keep these of the adapters that were read on the host, and no others. Not called while one is read."""

    def place(self, key: str, slot: int) -> None:
        """Copy one that is kept into a slot, for steps that are submitted from now on."""


class AdapterSlots:
    """The slots of a model, and its store of adapters on the host, both with the least recently used leaving first.

    `read` may be called by any thread, all else by the one that runs the steps.
    """

    def __init__(self, store: AdapterStore, *, num_slots: int, max_kept: int) -> None:
        """max_kept: adapters on the host."""
        self.max_kept = max_kept
        self._store = store
        self._kept: OrderedDict[str, None] = OrderedDict()  # by key, the least recently used first
        self._lock = threading.Lock()  # of what is kept
        self._reading = threading.Lock()  # until what was read is kept, and others are dropped for it
        self._slots: OrderedDict[str, int] = OrderedDict()  # by key, likewise
        self._free = list(range(num_slots))

    @classmethod
    def of(cls, config: EngineConfig, store: AdapterStore) -> AdapterSlots:
        return cls(store, num_slots=config.max_loras, max_kept=config.max_cpu_loras or config.max_loras)

    @property
    def resident(self) -> list[str]:
        """Keys of those in a slot, the least recently used first."""
        return list(self._slots)

    @property
    def kept(self) -> list[str]:
        """Keys of those on the host, likewise."""
        with self._lock:
            return list(self._kept)

    def read(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter and keep it. WeightsError says what is wrong with it, and no other is touched."""
        with self._reading:
            try:
                info = self._store.read(name, path)
            except Exception:
                with self._lock:
                    self._store.keep(list(self._kept))  # of several ranks, some may have read it
                raise
            with self._lock:
                self._kept[info.key] = None
                self._kept.move_to_end(info.key)
                while len(self._kept) > self.max_kept:
                    self._kept.popitem(last=False)
                self._store.keep(list(self._kept))
            return info

    def start_reading(self, name: str, path: str) -> Future[dict[str, Any]]:
        """Read an adapter on a thread; the future has its AdapterInfo as builtins."""
        return self._reader.submit(lambda: asdict(self.read(name, path)))

    def start_reading_again(self, key: str, path: str) -> Future[AdapterInfo]:
        """One that was read before, and dropped."""
        return self._reader.submit(self._read_again, key, path)

    def _read_again(self, key: str, path: str) -> AdapterInfo:
        info = self.read(key.rpartition("@")[0], path)
        if info.key != key:
            raise WeightsError(f"{path}: the adapter {info.name!r} has changed since it was loaded: load it again")
        return info

    def is_at_hand(self, key: str) -> bool:
        """Whether it is in a slot, or could be copied to one at once."""
        return key in self._slots or key in self._kept

    def place(self, key: str, in_use: set[str]) -> bool:
        """Put an adapter into a slot, in place of one that is not in use. False where all are, or where it is not on
        the host any more: another may have been read since it was looked for."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return True
        with self._lock:
            slot = self._take_slot(in_use) if key in self._kept else None
            if slot is None:
                return False
            self._kept.move_to_end(key)
            self._store.place(key, slot)
        self._slots[key] = slot
        return True

    def _take_slot(self, in_use: set[str]) -> int | None:
        if self._free:
            return self._free.pop(0)
        oldest = next((key for key in self._slots if key not in in_use), None)
        return None if oldest is None else self._slots.pop(oldest)

    @cached_property
    def _reader(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")
