"""`Lines` in native code: one call a step for all sequences."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any

from quire.drafting.acceptance import (
    FIRST_CHANCES,
    FIRST_WEIGHT,
    MAX_CHANCE,
    MAX_LOOKED_AT,
    MAX_WEIGHT,
    MIN_GAIN,
    RECORD_MEMORY,
    RECORD_PRIOR,
)
from quire.drafting.history import MAX_CANDIDATES, MAX_WALKED
from quire.drafting.lines import Rules, Step
from quire.kernels.cpu.library import load_library
from quire.step_costs import DraftCosts

_NO_SCOPE = -1


class _Rules(Structure):
    """As in native/drafting.c."""

    _fields_ = (
        ("first_chances", c_double * len(FIRST_CHANCES)),
        *((name, c_double) for name in ("factor", "min_chance", "max_chance", "min_gain")),
        *((name, c_double) for name in ("record_memory", "record_prior")),
        *((name, c_int32) for name in ("gram", "depth", "most", "max_candidates", "max_walked")),
        *((name, c_int32) for name in ("first_weight", "max_weight", "max_looked_at")),
    )


class _Costs(Structure):
    """As in native/drafting.c."""

    _fields_ = (
        *((name, c_double) for name in ("plain_s", "more_s")),
        ("seconds", c_void_p),
        ("numbers", c_void_p),
        ("num_bends", c_int32),
    )


_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "lookup_new": ((POINTER(_Rules),), c_void_p),
    "lookup_free": ((c_void_p,), None),
    "lookup_open": ((c_void_p, c_int32, c_int32), c_int),
    "lookup_close": ((c_void_p, c_int32), None),
    "lookup_remember": ((c_void_p, c_int32, c_void_p, c_int64), c_int),
    "lookup_age": ((c_void_p, c_int32), None),
    "lookup_bytes": ((c_void_p,), c_int64),
    "lookup_enter": ((c_void_p, c_int32, c_void_p, c_int64), c_int),
    "lookup_step": (
        (c_void_p, c_int32, *(c_void_p,) * 4, c_int32, c_int32, c_double, POINTER(_Costs), *(c_void_p,) * 4),
        c_int32,
    ),
}


@functools.cache
def functions() -> dict[str, Any] | None:
    """The library's functions; None where it is not built. They keep the GIL: they are over before another thread could
    have used it, and to get it back might take milliseconds."""
    library = load_library()
    if isinstance(library, str):
        return None
    keeping = ctypes.PyDLL(library._name, handle=library._handle)
    found = {}
    for name, (argtypes, result) in _SIGNATURES.items():
        function = getattr(keeping, f"quire_{name}")
        function.argtypes, function.restype = argtypes, result
        found[name] = function
    return found


def is_built() -> bool:
    return functions() is not None


def _call(name: str, *args: Any) -> Any:
    """What returns a number, returns a negative one where there is no memory left; what returns an address, none."""
    known = functions()
    assert known is not None
    result = known[name](*args)
    if (result is None and _SIGNATURES[name][1] is c_void_p) or (isinstance(result, int) and result < 0):
        raise MemoryError("no memory is left to look drafts up in")
    return result


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


class NativeLines:
    """As `Lines`, whose docstrings say what each function does."""

    def __init__(self, rules: Rules) -> None:
        self._handle: int = _call(
            "lookup_new",
            byref(
                _Rules(
                    first_chances=(c_double * len(FIRST_CHANCES))(*FIRST_CHANCES),
                    factor=rules.factor,
                    min_chance=rules.min_chance,
                    max_chance=MAX_CHANCE,
                    min_gain=MIN_GAIN,
                    record_memory=RECORD_MEMORY,
                    record_prior=RECORD_PRIOR,
                    gram=rules.gram,
                    depth=rules.depth,
                    most=rules.most,
                    max_candidates=MAX_CANDIDATES,
                    max_walked=MAX_WALKED,
                    first_weight=FIRST_WEIGHT,
                    max_weight=MAX_WEIGHT,
                    max_looked_at=MAX_LOOKED_AT,
                )
            ),
        )
        weakref.finalize(self, _call, "lookup_free", self._handle)
        self._drafts = array("i", bytes(4 * MAX_LOOKED_AT))
        self._drafted, self._numbers = array("i"), array("i")
        self._expected = array("d", [0.0])

    @property
    def num_bytes(self) -> int:
        """How many bytes its texts take, with their indexes."""
        return int(_call("lookup_bytes", self._handle))

    def remember(self, scope: int, tokens: Sequence[int]) -> None:
        numbers = array("i", tokens)
        _call("lookup_remember", self._handle, scope, _address(numbers), len(numbers))

    def age(self, scope: int) -> None:
        _call("lookup_age", self._handle, scope)

    def open(self, slot: int, scope: int | None) -> None:
        _call("lookup_open", self._handle, slot, _NO_SCOPE if scope is None else scope)

    def close(self, slot: int) -> None:
        _call("lookup_close", self._handle, slot)

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        numbers = array("i", tokens)
        _call("lookup_enter", self._handle, slot, _address(numbers), len(numbers))

    def step(self, step: Step, costs: DraftCosts) -> dict[int, list[int]]:
        size = len(step.slots)
        if len(self._drafted) < size:
            self._drafted, self._numbers = array("i", bytes(8 * size)), array("i", bytes(8 * size))
        columns = [array("i", column) for column in (step.slots, step.num_new, step.num_unknown, step.new_tokens)]
        seconds, numbers = array("d", costs.seconds), array("i", costs.numbers)
        count = _call(
            "lookup_step",
            self._handle,
            size,
            *map(_address, columns),
            step.num_decodes,
            step.most,
            step.trust,
            byref(_Costs(costs.plain_s, costs.more_s, _address(seconds), _address(numbers), len(numbers))),
            _address(self._drafted),
            _address(self._numbers),
            _address(self._drafts),
            _address(self._expected),
        )
        step.expected = self._expected[0]
        if not count:
            return {}
        drafted, sizes = self._drafted[:count].tolist(), self._numbers[:count].tolist()
        drafts, found, first = self._drafts[: sum(sizes)].tolist(), {}, 0
        for i, size in zip(drafted, sizes, strict=True):
            found[step.keys[i]] = drafts[first : first + size]
            first += size
        return found
