"""Quantized GGUF blocks to float32, where no kernel multiplies them as they are packed.

The types of most files (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K) are unpacked here, two to four times faster than by the `gguf`
package, which does the rest. F32, F16 and BF16 are handed on as they lie in the file. Each function gets its blocks as
bytes, [blocks, block_bytes], and fills [blocks, block_values].

Numpy, because it works on the calling thread alone: torch's own threads meet after every operation, and loading by
thousands of small ones takes many times longer on a machine that is busy. Large tensors get threads of our own, which
meet once a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.stored_rows import QuantizedRows
from quire.weights.gguf_file import TENSOR_TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
UnpackFn = Callable[[Bytes, Floats], None]

_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
# The types that a kernel may multiply as they are packed; of the others, repack.py has two, and IQ and TQ are unpacked.
PACKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# So many values at a time: what one pass leaves in the cache, the next one finds there. A multiple of every block.
_CHUNK_VALUES = 1 << 17
_THREADED_VALUES = 1 << 23
_MAX_THREADS = 16


class Dequantizer:
    """Unpacks one tensor at a time, always into the same memory; large ones on as many threads as torch may use."""

    __slots__ = ("_pool", "_scratch")

    def __init__(self, num_threads: int | None = None) -> None:
        num_threads = num_threads or min(torch.get_num_threads(), _MAX_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, "dequantize") if num_threads > 1 else None  # starts none yet
        # Fresh memory for each tensor would cost more than the unpacking: every touch of a new page is a trap.
        self._scratch: Floats = np.empty(0, np.float32)

    def tensor(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor whose stored bytes are `raw`. Good until the next call; plain types share the bytes' memory."""
        if dtype in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[dtype]).view(shape)
        kind = _TYPES[dtype]
        blocks = raw.reshape(-1, kind.block_bytes)
        num_values = len(blocks) * kind.block_values
        if num_values > self._scratch.size:
            self._scratch = np.empty(num_values, np.float32)
        values = self._scratch[:num_values].reshape(-1, kind.block_values)
        unpack = _UNPACK.get(dtype) or _package_unpack(dtype)
        step = _CHUNK_VALUES // kind.block_values

        def unpack_chunk(start: int) -> None:
            unpack(blocks[start : start + step], values[start : start + step])

        starts = range(0, len(blocks), step)
        if self._pool is None or values.size < _THREADED_VALUES:
            for start in starts:
                unpack_chunk(start)
        else:
            list(self._pool.map(unpack_chunk, starts))  # numpy lets go of the interpreter while it works
        return torch.from_numpy(values).view(shape)

    def rows(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> QuantizedRows | None:
        """A matrix as it is stored, where its type is one that kernels may keep packed, or in the blocks of such a type
        that hold the same numbers; else None."""
        if len(shape) != 2:
            return None
        if dtype in REPACKED:
            packed, repack = REPACKED[dtype]
            repacked = repack(raw.reshape(-1, _TYPES[dtype].block_bytes))
            return None if repacked is None else self.rows(repacked.reshape(-1), packed, shape)
        if dtype not in PACKED_TYPES:
            return None
        kind = _TYPES[dtype]

        def unpack(blocks: Bytes) -> Floats:
            return self.tensor(blocks.reshape(-1), dtype, (len(blocks), kind.block_values)).numpy()

        return QuantizedRows(dtype, raw.reshape(shape[0], -1, kind.block_bytes), kind.block_values, unpack)

    def __enter__(self) -> Dequantizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 2:]
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 4:]
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the eight sub-blocks, 6 bits each, packed into bytes 4 to 15."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1) * _half(blocks, 0)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1) * _half(blocks, 2)
    return scales, minima


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """Eight sub-blocks of 32 values."""
    scales, minima = _q4_k_scales(blocks)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    pairs = out.reshape(-1, 4, 2, 32)  # a byte holds one value of each of two neighbouring sub-blocks
    pairs[:, :, 0] = packed & 15
    pairs[:, :, 1] = packed >> 4
    pairs *= scales.reshape(-1, 4, 2, 1)
    pairs -= minima.reshape(-1, 4, 2, 1)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """Two halves of 128 values, their four low and two high bits apart; then sixteen 8-bit scales."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    quarters = out.reshape(-1, 2, 4, 32)
    for i in range(4):
        nibble = low[:, :, i % 2] & 15 if i < 2 else low[:, :, i % 2] >> 4
        quarters[:, :, i] = nibble | ((high >> 2 * i & 3) << 4)
    out -= 32
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    sixteenths = out.reshape(-1, 16, 16)
    sixteenths *= scales[:, :, None]


_UNPACK: dict[str, UnpackFn] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


def _package_unpack(dtype: str) -> UnpackFn:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[dtype]

    def unpack(blocks: Bytes, out: Floats) -> None:
        blocks_per_row = math.gcd(len(blocks), 64)  # not one by one: the package loops over rows in Python
        rows = blocks.reshape(len(blocks) // blocks_per_row, -1)
        out[...] = dequantize(rows, kind).reshape(out.shape)

    return unpack


# -- types that no kernel multiplies, in the blocks of one that a kernel does: the same numbers in a few more bits
#
# A number in MXFP4 is one of fifteen whole ones times a power of two, which Q5_0 holds with that power as its scale.
# One in IQ4_NL is one of sixteen whole ones times a scale, which Q8_0 holds.

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
