"""Matrices as checkpoints pack them. Each can be cut by rows and by columns, as a tensor can, before a backend takes it
in (`LinearWeight.load_rows`) or unpacks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from quire.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(slots=True, frozen=True)
class QuantizedRows:
    """A matrix as a quantized file packs it: rows of blocks, each of so many inputs and bytes."""

    kind: str  # as GGUF names it: Q4_K
    blocks: NDArray[np.uint8]  # [rows, blocks, block_bytes]
    block_values: int
    unpack: Callable[[NDArray[np.uint8]], NDArray[np.float32]]  # blocks [n, block_bytes] -> [n, block_values]

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] * self.block_values

    def __getitem__(self, part: tuple[slice, slice]) -> QuantizedRows:
        """rows[a:b, c:d], as a tensor does it. Columns are cut between blocks only."""
        rows, columns = part
        first, last, _ = columns.indices(self.shape[1])
        size, num_blocks = self.block_values, self.blocks.shape[1]
        if first % size or last % size:
            fitting = ", ".join(str(n) for n in range(1, num_blocks + 1) if num_blocks % n == 0 and n <= 64)
            raise WeightsError(
                f"columns {first} to {last} of a matrix in {self.kind} cut a block of {size}, which is packed as one: "
                f"its {num_blocks} blocks can be split among {fitting} devices"
            )
        return replace(self, blocks=self.blocks[rows, first // size : last // size])

    def with_rows(self, rows: Tensor) -> QuantizedRows:
        """Those rows, in that order."""
        return replace(self, blocks=self.blocks[rows.numpy()])

    def unpacked(self) -> NDArray[np.float32]:
        """The numbers themselves."""
        return self.unpack(self.blocks.reshape(-1, self.blocks.shape[2])).reshape(self.shape)


@dataclass(slots=True, frozen=True)
class Float8Rows:
    """A matrix as a checkpoint in 8-bit floats stores it: numbers, and a scale for each block of them."""

    values: Tensor  # [rows, columns] float8_e4m3fn
    scales: Tensor  # [row blocks, column blocks] float32: 1 x 1 for one scale, rows x 1 for one a row
    block: tuple[int, int]  # rows and columns that share a scale; the last of a matrix may be smaller

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def __getitem__(self, part: tuple[slice, slice]) -> Float8Rows:
        """rows[a:b, c:d], as a tensor does it. Where that cuts a block, each row or column gets a scale of its own."""
        cuts = [cut.indices(size)[:2] for cut, size in zip(part, self.shape, strict=True)]
        scales, block = self.scales, list(self.block)
        for dim, (first, last) in enumerate(cuts):
            if scales.shape[dim] == 1:
                block[dim] = last - first
                continue
            if first % block[dim] or (last % block[dim] and last != self.shape[dim]):
                scales = scales.repeat_interleave(block[dim], dim)
                block[dim] = 1
            scales = scales.narrow(dim, first // block[dim], -(-last // block[dim]) - first // block[dim])
        return Float8Rows(self.values[part], scales, (block[0], block[1]))

    def with_rows(self, rows: Tensor) -> Tensor:
        """Those rows, in that order."""
        return self.unpacked()[rows]

    @property
    def row_scales(self) -> Tensor:
        """[rows], where each row has one."""
        return self.scales[:, 0].repeat_interleave(self.block[0])[: self.shape[0]]

    def unpacked(self) -> Tensor:
        """The numbers themselves, in float32."""
        rows, columns = self.shape
        scales = self.scales.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return self.values.float() * scales


@dataclass(slots=True, frozen=True)
class IntegerRows:
    """A matrix in whole numbers of 4 or 8 bits, of which `group` neighbours in a row share a scale: what is meant is
    (code - zero) * scale. AWQ, GPTQ and compressed-tensors store the same in different orders."""

    codes: Tensor  # [rows, columns] uint8
    scales: Tensor  # [rows, groups], in the type that they are stored in
    zeros: Tensor | None  # [rows, groups] int16; None: the middle of the codes' range
    bits: int
    group: int
    groups: Tensor | None = None  # [columns] int64: each column's group, where neighbours do not share one
    rounds_inputs: bool = False  # made for inputs that are rounded to 8 bits, each row with a scale of its own

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def __getitem__(self, part: tuple[slice, slice]) -> IntegerRows:
        """rows[a:b, c:d], as a tensor does it. Where that cuts a group, the groups become smaller and their scales are
        repeated."""
        rows, columns = part
        first, last, _ = columns.indices(self.shape[1])
        scales, zeros, group = self.scales[rows], None if self.zeros is None else self.zeros[rows], self.group
        if last - first != self.shape[1]:
            if self.groups is not None:
                raise WeightsError(
                    f"columns {first} to {last} of a matrix whose columns are quantized in an order of their own "
                    "(desc_act, actorder) cut its groups: it is not split among devices, use a checkpoint without"
                )
            group = math.gcd(group, first, last)
            held = slice(first // group, last // group)
            scales = scales.repeat_interleave(self.group // group, 1)[:, held]
            zeros = None if zeros is None else zeros.repeat_interleave(self.group // group, 1)[:, held]
        return replace(self, codes=self.codes[rows, columns], scales=scales, zeros=zeros, group=group)

    def with_rows(self, rows: Tensor) -> IntegerRows:
        """Those rows, in that order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def unpacked(self) -> Tensor:
        """The numbers themselves, in float32."""
        centred = self.codes.short() - (1 << (self.bits - 1) if self.zeros is None else self._spread(self.zeros))
        return centred.float() * self._spread(self.scales.float())

    def _spread(self, of_groups: Tensor) -> Tensor:
        """One for each column."""
        if self.groups is not None:
            return of_groups[:, self.groups]
        return of_groups.repeat_interleave(self.group, 1)[:, : self.shape[1]]


@dataclass(slots=True, frozen=True)
class PackedLayout:
    """How a backend holds a matrix in whole numbers, as far as it shows before the matrix is loaded."""

    bits: int
    group: int  # columns that share a scale; 0: all of a row, where the matrix is not known yet
    has_offsets: bool  # whether groups have an offset beside their scale
    has_order: bool  # whether columns stand in the order of their groups


StoredRows: TypeAlias = "QuantizedRows | Float8Rows | IntegerRows"  # a matrix as a checkpoint packs it
