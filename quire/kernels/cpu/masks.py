"""Masks of tokens, applied to logits on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.cpu.library import NativeFunctions, load_functions, load_library


@functools.cache
def _functions() -> NativeFunctions | None:
    return None if isinstance(load_library(), str) else load_functions()


def ban_tokens(logits: Tensor, lines: Sequence[int], packed: npt.NDArray[np.int32]) -> list[int]:
    """Ban every token of these lines whose bit is not set; how many are left of each. logits: [rows, vocab], changed
    in place; packed: [lines, words]."""
    functions = _functions()
    if functions is None or logits.dtype != torch.float32 or logits.stride(1) != 1 or not packed.flags.c_contiguous:
        return [_ban_in_line(logits[line], words) for line, words in zip(lines, packed, strict=True)]
    assert packed.dtype == np.int32 and packed.shape == (len(lines), -(-logits.shape[1] // 32))
    assert all(0 <= line < len(logits) for line in lines)
    places, counts = np.array(lines, dtype=np.int64), np.empty(len(lines), dtype=np.int64)
    functions.ban_tokens(
        logits.data_ptr(), logits.stride(0), places.ctypes.data, len(lines), packed.ctypes.data, packed.shape[1],
        logits.shape[1], counts.ctypes.data,
    )  # fmt: skip
    return [int(count) for count in counts]


def _ban_in_line(of_line: Tensor, words: npt.NDArray[np.int32]) -> int:
    allowed = allowed_tokens(words, len(of_line))
    of_line.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
    return int(np.count_nonzero(allowed))


def allowed_tokens(words: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """For each token whether its bit is set."""
    return np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
