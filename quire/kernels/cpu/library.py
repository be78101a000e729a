"""The native library: found, checked against its sources, and its functions for one instruction set."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError

STALE = "the native CPU kernels are older than their sources"
ISAS = ("avx512vnni", "avx512", "avx2", "generic")  # best first

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "linear": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
    "linear_activate": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "pack": (c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "pack_gguf": (c_void_p, c_void_p, c_int64, c_void_p, c_int64),
    "embed": (c_void_p, c_void_p, c_void_p, c_int64, c_float),
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "act_mul": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "packed_attention": (*(c_void_p,) * 4, *(c_int64,) * 3, c_float),
    "layer_norm": (*(c_void_p,) * 6, c_int64, c_int64, c_float),
    "softcap": (c_void_p, c_void_p, c_int64, c_float),
    "rope_and_write": (*(c_void_p,) * 10, c_float, c_int64),
    "attention": (*(c_void_p,) * 8, c_int64, c_int64),
    "linear_add_norm": (*(c_void_p,) * 7, c_int64, c_int64, c_float),
    "linear_act": (*(c_void_p,) * 5, c_int64, c_int64, c_int64),
    "linear_rope_write": (*(c_void_p,) * 12, c_float, c_int64),
    "ban_tokens": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p),
    "layers": (c_void_p, c_void_p, c_int64, *(c_void_p,) * 5, c_int64, c_int64),
}

# Of exchange.c, which is for Linux.
_EXCHANGE_SIGNATURES: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("sums_bytes", (c_int,), c_int64),
    ("sums_join", (c_void_p, c_int), None),
    ("sums_add", (c_void_p, c_int, c_int, c_void_p, c_int64), c_int),
    ("stream_bytes", (), c_int64),
    ("stream_join", (c_void_p, c_int), None),
    ("stream_send", (c_void_p, c_void_p, c_int64), c_int),
    ("stream_receive", (c_void_p, c_void_p, c_int64), c_int),
)


class NativeFunctions:
    """One instruction set's functions, as attributes; they release the GIL while they run."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self.panel_columns: int = getattr(library, f"quire_{isa}_panel_columns")()
        self.packed_panel_bytes: Callable[[int, int], int] = getattr(library, f"quire_{isa}_packed_panel_bytes")
        self.packed_panel_bytes.argtypes, self.packed_panel_bytes.restype = (c_int64, c_int64), c_int64
        for name, argtypes in _SIGNATURES.items():
            function = getattr(library, f"quire_{isa}_{name}")
            function.argtypes, function.restype = argtypes, None
            setattr(self, name, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    from quire.kernels.cpu import build  # not above: `python -m quire.kernels.cpu.build` wants to be its first import

    path = Path(__file__).parent / build.LIBRARY_NAME
    how = "run `python -m quire.kernels.cpu.build`, which needs gcc or clang"
    if not path.exists():
        return f"the native CPU kernels are not built: {how}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native CPU kernels do not load ({error}): {how}"
    library.quire_source_hash.restype = c_char_p
    if library.quire_source_hash().decode() != build.source_hash():
        return f"{STALE}: {how}"
    library.quire_isa_runs.argtypes, library.quire_isa_runs.restype = (c_char_p,), c_int
    library.quire_pool_new.argtypes, library.quire_pool_new.restype = (c_int,), c_void_p
    library.quire_pool_free.argtypes, library.quire_pool_free.restype = (c_void_p,), None
    library.quire_advise_large_pages.argtypes, library.quire_advise_large_pages.restype = (c_void_p, c_int64), None
    for name, argtypes, result in _EXCHANGE_SIGNATURES if sys.platform == "linux" else ():
        function = getattr(library, f"quire_{name}")
        function.argtypes, function.restype = argtypes, result
    return library


def available_isas() -> tuple[str, ...]:
    """What this processor runs of what the library holds, best first."""
    library = load_library()
    if isinstance(library, str):
        return ()
    return tuple(isa for isa in ISAS if library.quire_isa_runs(isa.encode()))


def load_functions(isa: str | None = None) -> NativeFunctions:
    """The functions for `isa`, else for the environment's QUIRE_CPU_ISA, else for the best set this CPU has."""
    library = load_library()
    if isinstance(library, str):
        raise ConfigError(library)
    isas = available_isas()
    wanted = isa or os.environ.get("QUIRE_CPU_ISA") or isas[0]
    if wanted not in isas:
        raise ConfigError(f"QUIRE_CPU_ISA={wanted!r}: this machine has {', '.join(isas)}")
    return NativeFunctions(library, wanted)
