"""Matrices in 8-bit floats and their scales, which are tensors of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.errors import WeightsError
from quire.models.quantization import SCALE_SUFFIXES
from quire.models.spec import CheckpointFormat
from quire.weights.checkpoint import TensorEntry, read_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.stored_rows import Float8Rows

_SCALE_DTYPES = ("F32", "BF16", "F16")


# The names in compressed-tensors, in the fp8 format, and in older ones.
_KV_SCALE = re.compile(
    r"layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<of>k|v|kv)_scale|(?P<matrix>[kv])_proj\.(?:[kv]_scale|output_scale))$"
)


def read_kv_scales(entries: Iterable[TensorEntry], num_layers: int) -> list[tuple[float, float]] | None:
    """The scales of each layer; None where the checkpoint lacks some, or has a placeholder such as -1 instead."""
    found: dict[tuple[int, str], float] = {}
    for entry in entries:
        if (match := _KV_SCALE.search(entry.stored_name)) is None:
            continue
        if math.prod(entry.shape) != 1 or entry.dtype not in _SCALE_DTYPES:
            raise WeightsError(
                f"{entry.file}: tensor {entry.stored_name} has shape {list(entry.shape)} and type {entry.dtype}: one "
                "scale for all heads of a layer is served; set kv_cache_dtype to a wider one, or give "
                "quantization_param_path"
            )
        value = float(read_tensor(entry).float().item())
        for part in match["of"] or match["matrix"]:
            found[int(match["layer"]), part] = value
    scales = [(found.get((layer, "k"), 0.0), found.get((layer, "v"), 0.0)) for layer in range(num_layers)]
    return scales if all(0 < value < math.inf for pair in scales for value in pair) else None


class Float8Scales:
    """The scales of one checkpoint, found by the names of their weights."""

    def __init__(self, stored: CheckpointFormat | None, entries: Iterable[TensorEntry]) -> None:
        self._format = stored
        self._entries = {entry.stored_name: entry for entry in entries}

    def check(self, weight: TensorEntry) -> None:
        """Check that its scales are there, in a shape that fits."""
        self._layout(weight)

    def rows_of(self, weight: TensorEntry, values: Tensor) -> Float8Rows:
        import torch

        from quire.kernels.stored_rows import Float8Rows

        entry, shape, block = self._layout(weight)
        scales = read_tensor(entry).to(torch.float32).reshape(shape)
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise WeightsError(
                f"{entry.file}: tensor {entry.stored_name} holds a scale that is no positive number: fetch it again"
            )
        return Float8Rows(values, scales, block)

    def _layout(self, weight: TensorEntry) -> tuple[TensorEntry, tuple[int, int], tuple[int, int]]:
        """The entry of its scales, their shape as a matrix, and the rows and columns that share one."""
        name = weight.stored_name
        if self._format is None:
            raise WeightsError(
                f"{weight.file}: tensor {name} is in 8-bit floats, and config.json has no quantization_config that "
                "says so: fetch both again"
            )
        found = [self._entries[name + suffix] for suffix in SCALE_SUFFIXES if name + suffix in self._entries]
        if not found:
            raise WeightsError(
                f"{weight.file}: tensor {name} is in 8-bit floats, and its scales ({name}_scale) are missing: fetch "
                "the checkpoint again"
            )
        entry, (rows, columns) = found[0], weight.shape
        block = self._format.block
        if block is not None:
            shape = (-(-rows // block[0]), -(-columns // block[1]))
            fits = entry.shape == shape
        elif entry.shape in ((), (1,), (1, 1)):
            shape, block, fits = (1, 1), (rows, columns), True
        else:
            shape, block, fits = (rows, 1), (1, columns), entry.shape in ((rows,), (rows, 1))
        if not fits or entry.dtype not in _SCALE_DTYPES:
            raise WeightsError(
                f"{entry.file}: tensor {entry.stored_name} has shape {list(entry.shape)} and type {entry.dtype}, which "
                f"does not fit {name} of shape {[rows, columns]}: expected {list(shape)} in {', '.join(_SCALE_DTYPES)}"
            )
        return entry, shape, block
