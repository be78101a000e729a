"""Requests that wait for their adapter: until it is read, and until one of the device's slots can be had for it.

A request enters the scheduler once its adapter is in a slot, and the slot is its adapter's until the request ends. So a
step never has more adapters than there are slots, and requests of others, or of none, do not wait behind one that does.
When someone has waited for long because all slots are in use, the adapter with the fewest requests takes no new ones.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from quire.request import Request

if TYPE_CHECKING:
    from quire.executor.adapter_slots import AdapterInfo, AdapterSlots

_PATIENCE_S = 1.0


class AdapterGate:
    """Belongs to the thread that runs the steps."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self._waiting: dict[str, tuple[Request, float]] = {}  # by request_id, with the time; the earliest first
        self._entered: dict[str, list[Request]] = {}  # by key: those that may still run
        self._reading: dict[str, Future[AdapterInfo]] = {}  # by key
        self._closed: str | None = None  # the key of the adapter that takes no new requests

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request) -> bool:
        """Whether it may run. If not, it waits here."""
        assert request.adapter is not None
        if self._open(request.adapter, self._in_use()):
            self._entered.setdefault(request.adapter, []).append(request)
            return True
        self._waiting[request.request_id] = (request, time.monotonic())
        return False

    def leave(self, request_id: str) -> Request:
        """Take back a request that waits."""
        return self._waiting.pop(request_id)[0]

    def take_ready(self) -> list[tuple[Request, str | None]]:
        """The requests that may run by now, and those that never will, with the reason."""
        wanted: dict[str, list[Request]] = {}
        for request, _ in self._waiting.values():
            wanted.setdefault(request.adapter or "", []).append(request)
        in_use = self._in_use()
        if self._closed not in self.slots.resident or set(wanted) <= {self._closed}:
            self._closed = None
        ready: list[tuple[Request, str | None]] = []
        # No more at a time than are kept: they would drop each other.
        for key, requests in list(wanted.items())[: self.slots.max_kept]:
            failure = self._read(key, requests[0].adapter_path)
            if failure is None and not self._open(key, in_use):
                continue
            if failure is None:
                in_use.add(key)
                self._entered.setdefault(key, []).extend(requests)
            for request in requests:
                del self._waiting[request.request_id]
                ready.append((request, failure))
        since_s = next((since_s for _, since_s in self._waiting.values()), None)
        if since_s is not None and self._closed is None and time.monotonic() - since_s > _PATIENCE_S:
            self._closed = min(in_use, key=lambda key: len(self._entered[key]), default=None)
        return ready

    def _read(self, key: str, path: str) -> str | None:
        """See to it that an adapter is at hand. Returns why it cannot be."""
        reading = self._reading.get(key)
        if reading is not None and reading.done():
            del self._reading[key]
            if (error := reading.exception()) is not None:
                return str(error)
        elif reading is None and not self.slots.is_at_hand(key):
            self._reading[key] = self.slots.start_reading_again(key, path)
        return None

    def _open(self, key: str, in_use: set[str]) -> bool:
        """Whether requests of this adapter may run; it is in a slot then."""
        return key != self._closed and self.slots.is_at_hand(key) and self.slots.place(key, in_use)

    def _in_use(self) -> set[str]:
        running = {key: [one for one in requests if not one.is_finished] for key, requests in self._entered.items()}
        self._entered = {key: requests for key, requests in running.items() if requests}
        return set(self._entered)
