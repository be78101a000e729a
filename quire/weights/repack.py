"""Types that no kernel multiplies, in the blocks of one that a kernel does: the same numbers in a few more bits.

A number in MXFP4 is one of fifteen whole ones times a power of two, which Q5_0 holds with that power as its scale; one
in IQ4_NL is one of sixteen whole ones times a scale, which Q8_0 holds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_Q5_0_OFFSET = 16
# Twice the numbers that four bits stand for, as they are whole; the other eight are their negatives.
_FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_SMALLEST, _LARGEST = -24, 15  # exponents of the powers of two that a float16 holds


def mxfp4_as_q5_0(blocks: Bytes) -> Bytes | None:
    """blocks: [n, 17], an exponent and two numbers a byte, 16 apart -> [n, 22]; None: a scale does not fit."""
    packed = blocks[:, 1:]
    return fp4_as_q5_0(np.concatenate([packed & 15, packed >> 4], axis=1), blocks[:, 0])


def fp4_as_q5_0(numbers: Bytes, exponents: Bytes) -> Bytes | None:
    """numbers: [n, 32] of 4 bits; exponents: [n], plus 127 -> blocks of Q5_0, [n, 22]; None: a scale does not fit."""
    codes = (_FP4_DOUBLED[numbers] + _Q5_0_OFFSET).view(np.uint8)
    powers = exponents.astype(np.int32) - 128  # one less, since the numbers are doubled
    is_zero = (codes == _Q5_0_OFFSET).all(axis=1)
    if bool((((powers < _SMALLEST) | (powers > _LARGEST)) & ~is_zero).any()):
        return None
    scales = np.ldexp(np.float32(1.0), np.clip(powers, _SMALLEST, _LARGEST)).astype(np.float16)
    out = np.empty((len(codes), 22), np.uint8)
    out[:, :2] = scales[:, None].view(np.uint8)
    out[:, 2:6] = np.packbits(codes >> 4, axis=1, bitorder="little")
    out[:, 6:] = (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4
    return out


def _iq4_nl_as_q8_0(blocks: Bytes) -> Bytes:
    """[n, 18], a scale and two numbers a byte, 16 apart -> [n, 34]"""
    packed = blocks[:, 2:]
    numbers = _IQ4_NL[np.concatenate([packed & 15, packed >> 4], axis=1)]
    return np.concatenate([blocks[:, :2], numbers.view(np.uint8)], axis=1)


# A type -> the one whose blocks hold its numbers, and how they are made.
REPACKED: dict[str, tuple[str, Callable[[Bytes], Bytes | None]]] = {
    "MXFP4": ("Q5_0", mxfp4_as_q5_0),
    "IQ4_NL": ("Q8_0", _iq4_nl_as_q8_0),
}
