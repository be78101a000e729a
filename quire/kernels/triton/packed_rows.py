"""From what checkpoints store to the matrices that packed.py multiplies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.stored_rows import IntegerRows, PackedLayout, QuantizedRows, StoredRows
from quire.kernels.triton.packed import PackedMatrix, fitting_run


@dataclass(slots=True, frozen=True)
class Numbers:
    """Rows of a matrix: number * scale + offset, columns in the order of their groups."""

    numbers: Tensor  # [rows, columns] int8
    scales: Tensor  # [rows, groups] float32
    offsets: Tensor | None  # likewise
    order: Tensor | None  # [columns] int32: where each column stood before
    bits: int

    @property
    def layout(self) -> PackedLayout:
        group = self.numbers.shape[1] // self.scales.shape[1]
        return PackedLayout(self.bits, group, self.offsets is not None, self.order is not None)

    def to(self, layout: PackedLayout) -> Numbers:
        """In a layout with no fewer bits, no larger groups, and offsets if there are any."""
        times = self.layout.group // layout.group
        scales, offsets = self.scales.repeat_interleave(times, 1), self.offsets
        if layout.has_offsets:
            offsets = torch.zeros_like(scales) if offsets is None else offsets.repeat_interleave(times, 1)
        return replace(self, scales=scales, offsets=offsets, bits=layout.bits)


def numbers_of(rows: StoredRows, device: torch.device) -> Numbers | None:
    """None where they have no such form."""
    if isinstance(rows, IntegerRows):
        return _of_integers(rows, device)
    return _of_gguf(rows, device) if isinstance(rows, QuantizedRows) else None


def _of_integers(rows: IntegerRows, device: torch.device) -> Numbers | None:
    columns = rows.shape[1]
    middle = 1 << (rows.bits - 1)
    codes, scales = rows.codes.to(device), rows.scales.to(device).float()
    order = None
    if rows.groups is not None:
        groups = rows.groups.to(device)
        if not bool((groups.bincount(minlength=scales.shape[1]) == rows.group).all()):
            return None
        order = groups.argsort(stable=True)
        codes = codes[:, order]
    offsets = None if rows.zeros is None else (middle - rows.zeros.to(device)).float() * scales
    numbers = (codes.short() - middle).to(torch.int8)
    if columns % rows.group or fitting_run(columns, rows.group, rows.bits) is None:
        return None
    return Numbers(numbers, scales, offsets, None if order is None else order.int(), rows.bits)


_Read = tuple[Tensor, Tensor, Tensor | None]  # numbers, scales and offsets of blocks: each [rows, blocks, ...]


def _of_gguf(rows: QuantizedRows, device: torch.device) -> Numbers | None:
    if rows.kind not in _GGUF:
        return None
    read, bits = _GGUF[rows.kind]
    numbers, scales, offsets = read(torch.from_numpy(np.ascontiguousarray(rows.blocks)).to(device))
    if fitting_run(rows.shape[1], numbers.shape[2] // scales.shape[2], bits) is None:
        return None
    return Numbers(numbers.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), None, bits)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> _Read:
    packed = blocks[..., 2:]
    return torch.cat((packed & 15, packed >> 4), -1).to(torch.int8) - 8, _half(blocks, 0), None


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> _Read:
    """Eight sub-blocks of 32, with scales and minima of 6 bits in bytes 4 to 15. Two neighbours share their bytes."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1) * _half(blocks, 0)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1) * _half(blocks, 2)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    return torch.cat((packed & 15, packed >> 4), 3).flatten(2).to(torch.int8) - 8, scales, 8 * scales - minima


def _q6_k(blocks: Tensor) -> _Read:
    """Two halves of 128, their four low and two high bits apart; then sixteen 8-bit scales."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    two = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    numbers = (torch.cat((low & 15, low >> 4), 3) | two << 4).flatten(2).to(torch.int8) - 32
    return numbers, blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks, 208), None


# Types that a GPU keeps packed, and in how many bits.
_GGUF: dict[str, tuple[Callable[[Tensor], _Read], int]] = {
    "Q4_0": (_q4_0, 4),
    "Q8_0": (_q8_0, 8),
    "Q4_K": (_q4_k, 4),
    "Q6_K": (_q6_k, 8),
}


def common_layout(one: PackedLayout, other: PackedLayout) -> PackedLayout:
    """That both can be brought to."""
    return PackedLayout(
        max(one.bits, other.bits), math.gcd(one.group, other.group), one.has_offsets or other.has_offsets, one.has_order
    )


def empty_matrix(n: int, k: int, layout: PackedLayout, device: torch.device) -> PackedMatrix | None:
    """None where no run of columns fits."""
    run = fitting_run(k, layout.group, layout.bits)
    if run is None:
        return None
    groups = k // layout.group
    return PackedMatrix(
        torch.empty((n, k * layout.bits // 8), dtype=torch.int8, device=device),
        torch.empty((groups, n), dtype=torch.float32, device=device),
        torch.empty((groups, n), dtype=torch.float32, device=device) if layout.has_offsets else None,
        torch.empty(k, dtype=torch.int32, device=device) if layout.has_order else None,
        layout.bits,
        layout.group,
        run,
    )


def store(matrix: PackedMatrix, first_row: int, rows: Numbers) -> None:
    """Rows from first_row on, in the matrix's layout already."""
    numbers = rows.numbers
    end = first_row + len(numbers)
    if matrix.bits == 4:
        pieces = numbers.reshape(len(numbers), -1, 2, matrix.run)
        numbers = ((pieces[:, :, 0] & 15) | (pieces[:, :, 1] << 4)).flatten(1)
    matrix.numbers[first_row:end] = numbers
    matrix.scales[:, first_row:end] = rows.scales.T
    if matrix.offsets is not None:
        assert rows.offsets is not None
        matrix.offsets[:, first_row:end] = rows.offsets.T
    if matrix.order is not None:
        assert rows.order is not None
        matrix.order.copy_(rows.order)


def stored_numbers(matrix: PackedMatrix) -> Numbers:
    """What `store` put there."""
    numbers = matrix.numbers
    if matrix.bits == 4:
        halves = numbers.reshape(len(numbers), -1, matrix.run)
        numbers = torch.stack(((halves << 4) >> 4, halves >> 4), 2).reshape(len(numbers), -1)
    offsets = None if matrix.offsets is None else matrix.offsets.T
    return Numbers(numbers, matrix.scales.T, offsets, matrix.order, matrix.bits)
