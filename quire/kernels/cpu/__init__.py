"""The native CPU backend: a small C library behind the kernel interface. See native/ for the kernels themselves."""

from __future__ import annotations

from quire.kernels.cpu.library import STALE, load_library
from quire.kernels.cpu.ops import CpuOps

__all__ = ["STALE", "CpuOps", "unavailable_reason"]


def unavailable_reason() -> str | None:
    """Why this machine cannot use CpuOps, with what to do about it; None where it can."""
    library = load_library()
    return library if isinstance(library, str) else None
