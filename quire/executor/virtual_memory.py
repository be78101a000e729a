"""Device memory that can be given back and had again at the same addresses, so that captured graphs stay valid.

A torch memory pool takes its segments from here. Each is a range of reserved addresses with physical memory mapped to
it by the CUDA driver's virtual memory calls. To sleep is to unmap and release the physical memory; to wake is to map
new memory to the same addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import MemoryBudgetError
from quire.executor.pinned_memory import PinnedMemory

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3  # of the driver's enumerations
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Driver:
    """The few calls of libcuda that this takes, for one device."""

    def __init__(self, device: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        where = _Location(_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=where)
        self._access = _Access(where, _READ_AND_WRITE)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value

    def _call(self, name: str, *arguments: Any) -> None:
        status: int = getattr(self._cuda, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: out of memory")
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        size, zero = ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, zero, ctypes.c_uint64(0), ctypes.c_uint64(0))
        return address.value

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int) -> int:
        """New physical memory at these addresses; returns its handle."""
        handle, size, at = ctypes.c_uint64(), ctypes.c_size_t(num_bytes), ctypes.c_uint64(address)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        return handle.value

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def copy_out(self, host: int, address: int, num_bytes: int) -> None:
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def copy_in(self, address: int, host: int, num_bytes: int) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(num_bytes))

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))


@dataclass(slots=True)
class Segment:
    """Addresses that stay, and what is mapped to them."""

    address: int
    num_bytes: int
    is_kept: bool  # whether its content survives a sleep
    handle: int | None  # of the physical memory; None while there is none
    host_offset: int = 0  # of its copy, where it has one


class SleepingMemory:
    """The segments of one device. Not thread-safe beyond what torch's allocator ensures.

    The host's copy of what is kept is made by the first sleep and stays. Weights never change, so that later sleeps
    copy nothing, unless adapters come and go among them.
    """

    def __init__(self, device: torch.device, *, changes: bool = False) -> None:
        """changes: what is kept may be another one at the next sleep."""
        self._device = device
        self._changes = changes
        torch.cuda.current_stream(device).synchronize()  # so that the driver's calls find a context
        self._driver = Driver(device.index or 0)
        self.segments: dict[int, Segment] = {}  # by address
        self._keeps = False  # for segments that are made now
        self._host: PinnedMemory | None = None
        self._callbacks = _Allocate(self._allocate), _Free(self._free)  # torch holds their addresses only
        allocate, free = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks)
        self._allocator = torch._C._cuda_customAllocator(allocate, free)
        self._pools: list[torch.cuda.MemPool] = []
        # Never collected: torch would take the pools apart while the interpreter ends, when the callbacks are gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    @contextmanager
    def holding(self, *, is_kept: bool) -> Iterator[None]:
        """Have what torch allocates meanwhile lie in here. is_kept: its content survives a sleep."""
        pool = torch.cuda.MemPool(self._allocator)
        self._pools.append(pool)
        self._keeps = is_kept
        with torch.cuda.use_mem_pool(pool, self._device):
            yield
        torch.cuda.synchronize(self._device)
        for each in pool.snapshot():  # type: ignore[no-untyped-call]  # what was freed meanwhile would stay in the pool, and nothing is taken from it
            segment = self.segments.get(each["address"])
            if each["allocated_size"] == 0 and segment is not None:
                self._unmap(segment)
                del self.segments[segment.address]

    @property
    def num_bytes(self) -> int:
        """How much physical memory is held now."""
        return sum(segment.num_bytes for segment in self.segments.values() if segment.handle is not None)

    def copy_to_host(self) -> None:
        """Copy what is kept, where the host has no copy yet. Raises a MemoryBudgetError where it has no room."""
        kept = [segment for segment in self.segments.values() if segment.is_kept]
        if not kept or (self._host is not None and not self._changes):
            return
        if self._host is None:
            num_bytes = sum(segment.num_bytes for segment in kept)
            self._host = PinnedMemory(num_bytes, purpose="a copy of the weights", instead="sleep at level 2")
        offset = 0
        for segment in kept:
            segment.host_offset = offset
            self._driver.copy_out(self._host.address + offset, segment.address, segment.num_bytes)
            offset += segment.num_bytes

    def sleep(self) -> None:
        """Give the physical memory back, after `copy_to_host`. The device must be idle."""
        for segment in self.segments.values():
            self._unmap(segment)

    def wake(self) -> None:
        """Everything at its addresses again: what is kept with its content, the rest as zeros."""
        try:
            for segment in self.segments.values():
                if segment.handle is None:
                    segment.handle = self._driver.map(segment.address, segment.num_bytes)
        except torch.OutOfMemoryError:
            needed = sum(segment.num_bytes for segment in self.segments.values())
            for segment in self.segments.values():
                self._unmap(segment)
            free, _ = torch.cuda.mem_get_info(self._device)
            raise MemoryBudgetError(
                f"waking up takes {needed / 2**30:.2f} GiB on the device, and {free / 2**30:.2f} GiB are free: put "
                "another model to sleep first"
            ) from None
        for segment in self.segments.values():
            if segment.is_kept:
                assert self._host is not None
                self._driver.copy_in(segment.address, self._host.address + segment.host_offset, segment.num_bytes)
            else:
                self._driver.zero(segment.address, segment.num_bytes)
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give everything back. Nothing in here may be touched afterwards."""
        for segment in self.segments.values():
            self._unmap(segment)
        if self._host is not None:
            self._host.release()
            self._host = None

    def _unmap(self, segment: Segment) -> None:
        if segment.handle is not None:
            self._driver.unmap(segment.address, segment.num_bytes, segment.handle)
            segment.handle = None

    # -- torch's allocator calls these. An exception would get lost in there, so no memory is None.

    def _allocate(self, num_bytes: int, device: int, stream: int | None) -> int | None:
        num_bytes = -(-num_bytes // self._driver.granularity) * self._driver.granularity
        try:
            address = self._driver.reserve(num_bytes)
            handle = self._driver.map(address, num_bytes)
        except (RuntimeError, torch.OutOfMemoryError):
            return None
        self.segments[address] = Segment(address, num_bytes, self._keeps, handle)
        return address

    def _free(self, address: int, num_bytes: int, device: int, stream: int | None) -> None:
        segment = self.segments.pop(address, None)
        if segment is not None:
            self._unmap(segment)
            self._driver.free_addresses(address, segment.num_bytes)
