"""Random blocks of GGUF's quantized types, whose scales are numbers, and what the gguf package makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from quire.kernels.stored_rows import QuantizedRows
from quire.weights.dequantize import PACKED_TYPES as PACKED
from quire.weights.gguf_file import TENSOR_TYPES

QUANTIZED = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.block_values > 1}
# Where each type keeps its float16 scales: random bytes there would be NaN or huge.
_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_HALVES |= {"Q4_1": (0, 2), "Q5_1": (0, 2), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_M": ()}


def random_blocks(name: str, num_blocks: int, seed: int = 3) -> np.ndarray:
    kind = QUANTIZED[name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    for start in _HALVES.get(name, (0,)):
        raw[:, start : start + 2] = rng.normal(size=(num_blocks, 1)).astype(np.float16).view(np.uint8)
    if name == "IQ1_M":  # its scale is in the top four bits of four 16-bit words: keep the exponent small
        raw[:, 55] = raw[:, 55] & 0x0F | 0x30
    if name == "MXFP4":  # an exponent alone
        raw[:, 0] = rng.integers(120, 130, num_blocks)
    return raw


def by_package(raw: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def random_rows(name: str, num_rows: int, width: int, seed: int = 3) -> QuantizedRows:
    kind = QUANTIZED[name]
    num_blocks = width // kind.block_values
    raw = random_blocks(name, num_rows * num_blocks, seed).reshape(num_rows, num_blocks, -1)
    return QuantizedRows(name, raw, kind.block_values, lambda blocks: by_package(blocks, name))


def unpacked(rows: QuantizedRows) -> torch.Tensor:
    return torch.from_numpy(rows.unpacked())


__all__ = ["PACKED", "QUANTIZED", "by_package", "random_blocks", "random_rows", "unpacked"]
