"""Experts in MXFP4 out of safetensors (gpt-oss): blocks of 32 numbers, and their exponents in a tensor of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quire.errors import WeightsError
from quire.weights.checkpoint import TensorEntry, read_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.stored_rows import QuantizedRows

DTYPE = "U8"
_BLOCKS, _SCALES = "_blocks", "_scales"
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the first eight codes; the others are their negatives


def is_mxfp4(entry: TensorEntry) -> bool:
    return entry.dtype == DTYPE and entry.stored_name.endswith(_BLOCKS)


class Mxfp4Scales:
    """The exponents of one checkpoint, found by the names of their blocks."""

    def __init__(self, entries: Iterable[TensorEntry]) -> None:
        self._entries = {entry.stored_name: entry for entry in entries}

    def check(self, blocks: TensorEntry) -> None:
        """Check that its exponents are there."""
        self._entry(blocks)

    def rows_of(self, blocks: TensorEntry, stored: Tensor) -> QuantizedRows:
        """The expert's matrix that `blocks` is, out of the tensor of all: as blocks of Q5_0, the same numbers."""
        import numpy as np

        from quire.kernels.stored_rows import QuantizedRows
        from quire.weights.dequantize import Dequantizer, fp4_as_q5_0

        exponents = self._exponents(blocks, stored)
        packed: Any = np.ascontiguousarray(blocks.of(stored).numpy())  # [rows, groups, 16]
        rows, groups = packed.shape[:2]
        numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 32)
        repacked = fp4_as_q5_0(numbers, np.ascontiguousarray(exponents.numpy()).reshape(-1))
        if repacked is None:
            raise WeightsError(
                f"{blocks.file}: tensor {blocks.stored_name} has an exponent that no float16 has: use a GGUF file"
            )

        def unpack(some: Any) -> Any:
            with Dequantizer(num_threads=1) as dequantizer:
                return dequantizer.tensor(some.reshape(-1), "Q5_0", (len(some), 32)).numpy()

        return QuantizedRows("Q5_0", repacked.reshape(rows, groups, -1), 32, unpack)

    def values_of(self, blocks: TensorEntry, stored: Tensor) -> Tensor:
        """The expert's matrix as a tensor in bfloat16, which holds every one of its numbers."""
        import torch

        numbers = torch.tensor((*_NUMBERS, *(-number for number in _NUMBERS)), dtype=torch.bfloat16)
        code = torch.arange(256)
        pairs = torch.stack((numbers[code & 15], numbers[code >> 4]), dim=1).view(torch.int32)[:, 0]  # of each byte
        # The exponents are those of bfloat16, where its own bits have them. (0 is 2 ** -127 here, and 0 there.)
        powers = (self._exponents(blocks, stored).short() << 7).view(torch.bfloat16)
        packed = blocks.of(stored)  # [rows, groups, 16]
        values = pairs[packed.int()].view(torch.bfloat16)
        return values.mul_(powers[..., None]).flatten(1)

    def _exponents(self, blocks: TensorEntry, stored: Tensor) -> Tensor:
        """[rows, groups], plus 127"""
        entry = self._entry(blocks)
        exponents = read_tensor(entry)
        if tuple(exponents.shape) != tuple(stored.shape[:-1]) or stored.shape[-1] != 16:
            raise WeightsError(
                f"{entry.file}: tensor {entry.stored_name} has shape {list(exponents.shape)}, which does not fit "
                f"{blocks.stored_name} of shape {list(stored.shape)}: fetch both again"
            )
        part: Tensor = blocks.of(exponents)
        return part

    def _entry(self, blocks: TensorEntry) -> TensorEntry:
        name = blocks.stored_name.removesuffix(_BLOCKS) + _SCALES
        entry = self._entries.get(name)
        if entry is None or entry.dtype != DTYPE:
            raise WeightsError(f"{blocks.file}: tensor {blocks.stored_name} has no {name} of bytes: fetch both again")
        return entry
