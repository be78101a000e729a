"""The native thread pool, and how many threads it has unless told."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path


class ThreadPool:
    """Threads of native/pool.c, stopped when the last user of this object is gone. A forked child starts its own."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.address: int = library.quire_pool_new(num_threads)
        weakref.finalize(self, library.quire_pool_free, self.address)


def default_num_threads() -> int:
    """The physical cores this process may use.

    With fewer than four, also their second hardware threads: there, what they hide of memory's latency outweighs what
    they take from each other.
    """
    cpus = usable_cpus()
    cores = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    num_threads = len(cores) if len(cores) >= 4 else len(cpus)
    return max(1, min(num_threads, _quota() or num_threads))


def usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota() -> int | None:
    """A container's share, in whole processors: threads beyond it would be stopped in the middle of a step."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return None
    return max(1, int(quota) // int(period))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
