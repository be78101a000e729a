"""The native CPU backend: a small C library behind the kernel interface. See native/ for the kernels themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.kernels.cpu.library import STALE, load_library

if TYPE_CHECKING:
    from quire.kernels.cpu.ops import CpuOps

__all__ = ["STALE", "CpuOps", "unavailable_reason"]


def __getattr__(name: str) -> Any:
    """CpuOps is imported when it is first asked for: the library also serves rooms that know no torch."""
    if name != "CpuOps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.kernels.cpu.ops import CpuOps

    return CpuOps


def unavailable_reason() -> str | None:
    """Why this machine cannot use CpuOps, with what to do about it; None where it can."""
    library = load_library()
    return library if isinstance(library, str) else None
