"""Matrices of AWQ, GPTQ and compressed-tensors in the blocks of GGUF that mean exactly the same numbers.

    4 bits without zeros    Q4_0: (code - 8) * scale
    4 bits with zeros       Q5_0: (code - zero) is in -15 .. 15, for which five bits are enough
    8 bits                  Q8_0: (code - zero) where that is in -128 .. 127

A block has 32 columns and a scale in float16. What does not fit so is unpacked to float32 when it is loaded.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.log import get_logger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.kernels.stored_rows import IntegerRows

_BLOCK = 32


def integer_blocks(rows: IntegerRows) -> tuple[str | None, NDArray[np.uint8]]:
    """-> a type of GGUF and its blocks [rows, blocks, block_bytes]; None and no blocks where no type fits."""
    reason = None
    halves = rows.scales.to(torch.float16)
    zeros = (1 << (rows.bits - 1)) if rows.zeros is None else rows.zeros.repeat_interleave(rows.group, 1)
    if rows.groups is not None:
        reason = "their columns have an order of their own (desc_act, actorder)"
    elif rows.group % _BLOCK:
        reason = f"their groups of {rows.group} columns are no multiple of {_BLOCK}"
    elif not torch.equal(halves.float(), rows.scales.float()):
        reason = "float16 does not hold their scales"
    else:
        centred = rows.codes.to(torch.int16) - zeros
        if rows.bits == 8 and (centred.min() < -128 or centred.max() > 127):
            reason = "they have 8 bits and zeros far from the middle"
    if reason is not None:
        _tell(reason)
        return None, np.empty((0, 0, 0), np.uint8)
    num_rows = rows.shape[0]
    scales = halves.repeat_interleave(rows.group // _BLOCK, 1).unsqueeze(-1).contiguous().view(torch.uint8)
    blocks = centred.reshape(num_rows, -1, _BLOCK)
    if rows.bits == 8:
        return "Q8_0", torch.cat((scales, blocks.to(torch.int8).view(torch.uint8)), -1).numpy()
    if rows.zeros is None:
        return "Q4_0", torch.cat((scales, _nibbles(blocks + 8)), -1).numpy()
    codes = blocks + 16
    fifth = (codes >> 4).reshape(num_rows, -1, 4, 8) << torch.arange(8)
    return "Q5_0", torch.cat((scales, fifth.sum(-1).to(torch.uint8), _nibbles(codes & 15)), -1).numpy()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., 32] -> [..., 16]: the first half of a block in the low bits."""
    return (codes[..., :16] | codes[..., 16:] << 4).to(torch.uint8)


@cache
def _tell(reason: str) -> None:
    """Once for each reason, not for each matrix."""
    get_logger().info("quantized matrices are unpacked to float32, because %s", reason)
