"""Host memory that a GPU copies from and to by itself.

The driver takes such memory page by page on one thread, 15 GiB in 7 s, and torch rounds what it asks for up to a power
of two. Here the system's pages are touched on many threads, large ones where there are any, and registered with the
driver as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.config import GIB
from quire.errors import MemoryBudgetError
from quire.executor.memory import available_host_bytes

_MAX_THREADS = 16
_PIECE_BYTES = 256 << 20  # that a thread touches at a time


class PinnedMemory:
    """Zeros, in as many bytes as asked for."""

    def __init__(self, num_bytes: int, *, purpose: str, instead: str) -> None:
        """Raises a MemoryBudgetError where the host has not got so much: it says what for, and what to do instead."""
        free = available_host_bytes()
        # Without the look at what is free, the system would promise the pages, and end the process when they are used.
        if free is not None and num_bytes > free:
            raise MemoryBudgetError(
                f"{purpose} takes {num_bytes / GIB:.2f} GiB of host memory, and {free / GIB:.2f} GiB are free: "
                f"{instead}"
            )
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without large pages has small ones
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self._touch()
        # By the driver's call: the runtime would remember a failure, and tell it to the next kernel that is launched.
        status = _libcuda().cuMemHostRegister_v2(ctypes.c_void_p(self.address), ctypes.c_size_t(num_bytes), 0)
        if status:
            raise MemoryBudgetError(
                f"{purpose} takes {num_bytes / GIB:.2f} GiB of host memory, which cannot be pinned (CUDA error "
                f"{status}): {instead}"
            )
        # The pages outlive their registration, for tensors that still look at them.
        self.release = weakref.finalize(self, _unregister, self.address, pages)
        self.release.atexit = False  # the process's end does it

    def _touch(self) -> None:
        """Write to every page: the system gives it then, and not when the driver goes through them one by one."""
        array = self.bytes.numpy()

        def touch(first: int) -> None:
            array[first : first + _PIECE_BYTES : mmap.PAGESIZE] = 0

        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(touch, range(0, len(array), _PIECE_BYTES)))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as a tensor. This object must outlive every copy from or to that."""
        return self.bytes.view(dtype).view(shape)


def _unregister(address: int, pages: mmap.mmap) -> None:
    torch.cuda.synchronize()  # copies from or to it may be under way
    _libcuda().cuMemHostUnregister(ctypes.c_void_p(address))


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
