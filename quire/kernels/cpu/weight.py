"""A weight matrix in the native library's layout: panels of outputs, interleaved along the inputs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.cpu.library import NativeFunctions
from quire.kernels.cpu.memory import Arena
from quire.kernels.cpu.threads import ThreadPool

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}  # enum kind of native/simd.h
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_LOAD_FLOATS = 16 << 20  # converted at a time: a checkpoint tensor never has a second copy of its size


class _NativeWeight(ctypes.Structure):
    """struct weight of native/linear.c."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class CpuLinear:
    """One LinearWeight. int8 is symmetric with one scale an output row, chosen from the row's largest weight."""

    __slots__ = (
        "_bias",
        "_data",
        "_functions",
        "_has_bias",
        "_native",
        "_scale",
        "_threads",
        "address",
        "in_features",
        "out_features",
    )

    def __init__(
        self,
        functions: NativeFunctions,
        threads: ThreadPool,
        arena: Arena,
        out_features: int,
        in_features: int,
        weight_dtype: str,
        bias: bool,
    ) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self._functions = functions
        self._threads = threads
        columns = functions.panel_columns
        padded = -(-out_features // columns) * columns
        self._data = arena.allocate(padded * in_features * _ITEM_BYTES[weight_dtype])
        # Rows past the last output are never loaded, yet multiplied along: they must be zero.
        self._data[(out_features // columns) * columns * in_features * _ITEM_BYTES[weight_dtype] :].zero_()
        self._has_bias = bias
        self._scale = torch.zeros(padded, dtype=torch.float32) if weight_dtype == "int8" else None
        self._bias = torch.zeros(padded, dtype=torch.float32) if bias or weight_dtype == "int8" else None
        self._native = _NativeWeight(
            self._data.data_ptr(),
            None if self._scale is None else self._scale.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out_features,
            in_features,
            KINDS[weight_dtype],
        )
        self.address = ctypes.addressof(self._native)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._data, self._scale, self._bias) if tensor is not None)

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        assert rows.dim() == 2 and rows.shape[1] == self.in_features, (tuple(rows.shape), self.in_features)
        assert first_row >= 0 and first_row + len(rows) <= self.out_features
        step = max(1, _LOAD_FLOATS // self.in_features)
        for at in range(0, len(rows), step):
            piece = rows[at : at + step].to("cpu", torch.float32).contiguous()
            self._functions.pack(self._threads.address, self.address, piece.data_ptr(), first_row + at, len(piece))

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        assert self._has_bias and self._bias is not None, "new_linear was not asked for a bias"
        assert bias.dim() == 1 and first_row + len(bias) <= self.out_features
        self._bias[first_row : first_row + len(bias)].copy_(bias)

    def randomize(self, std: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        step = max(1, _LOAD_FLOATS // self.in_features)
        for at in range(0, self.out_features, step):
            rows = torch.empty(min(step, self.out_features - at), self.in_features)
            self.load_rows(at, rows.normal_(0.0, std, generator=generator))
