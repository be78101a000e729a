"""A weight matrix in the native library's layout: panels of outputs, interleaved along the inputs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.cpu.library import NativeFunctions
from quire.kernels.cpu.memory import Arena
from quire.kernels.cpu.threads import ThreadPool
from quire.kernels.interface import QUANTIZED_BLOCK, QuantizedRows

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "int8")
# enum kind of native/simd.h
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "blocks": 4, "blocks_min": 5, "nibbles": 6}
_BLOCK_KINDS = ("blocks", "blocks_min", "nibbles")
# Bytes a weight; those of blocks have their shares of a scale, and of a minimum.
_ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "blocks": 1 + 4 / QUANTIZED_BLOCK,
    "blocks_min": 1 + 8 / QUANTIZED_BLOCK,
    "nibbles": 0.5 + 8 / QUANTIZED_BLOCK,
}
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
    """One LinearWeight. int8 is symmetric with one scale an output row, chosen from the row's largest weight.

    A float32 matrix whose rows come out of a quantized file keeps the file's integers and scales: the same numbers, a
    third of the bytes. How it is kept is settled by the first rows that it is given.
    """

    __slots__ = (
        "_arena",
        "_bias",
        "_data",
        "_functions",
        "_has_bias",
        "_loaded",
        "_native",
        "_scale",
        "_threads",
        "_weight_dtype",
        "address",
        "in_features",
        "kind",
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
        self.kind: str | None = None  # a key of KINDS
        self._functions = functions
        self._threads = threads
        self._arena = arena
        self._weight_dtype = weight_dtype
        self._has_bias = bias
        self._data: Tensor | None = None
        self._loaded: list[range] = []  # rows that are held as blocks
        self._scale = torch.zeros(self._padded_rows, dtype=torch.float32) if weight_dtype == "int8" else None
        self._bias = torch.zeros(self._padded_rows, dtype=torch.float32) if bias or weight_dtype == "int8" else None
        self._native = _NativeWeight(
            None,  # until the first rows come
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

    @property
    def keeps_quantized(self) -> bool:
        return self._weight_dtype == "float32" and self.in_features % QUANTIZED_BLOCK == 0

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        assert rows.dim() == 2 and rows.shape[1] == self.in_features, (tuple(rows.shape), self.in_features)
        assert first_row >= 0 and first_row + len(rows) <= self.out_features
        if self.kind is None:
            self._allocate(self._weight_dtype)
        elif self.kind in _BLOCK_KINDS:
            self._unpack()
        step = max(1, _LOAD_FLOATS // self.in_features)
        for at in range(0, len(rows), step):
            piece = rows[at : at + step].to("cpu", torch.float32).contiguous()
            self._functions.pack(self._threads.address, self.address, piece.data_ptr(), first_row + at, len(piece))

    def load_quantized(self, first_row: int, rows: QuantizedRows) -> bool:
        assert self.keeps_quantized
        if self.kind is None:
            self._allocate("nibbles" if rows.has_4_bits else "blocks" if rows.minima is None else "blocks_min")
        if self.kind == "nibbles":
            fits = rows.has_4_bits
        else:
            fits = self.kind == "blocks_min" or (self.kind == "blocks" and rows.minima is None)
        if not fits:
            return False
        count = len(rows.codes)
        assert rows.codes.shape == (count, self.in_features) and first_row + count <= self.out_features
        assert all(part is None or part.flags.c_contiguous for part in (rows.codes, rows.scales, rows.minima))
        minima = None if rows.minima is None else rows.minima.ctypes.data
        self._functions.pack_blocks(
            self._threads.address,
            self.address,
            rows.codes.ctypes.data,
            rows.scales.ctypes.data,
            minima,
            first_row,
            count,
        )
        self._loaded.append(range(first_row, first_row + count))
        return True

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

    @property
    def _padded_rows(self) -> int:
        columns = self._functions.panel_columns
        return -(-self.out_features // columns) * columns

    def _allocate(self, kind: str) -> None:
        self.kind = kind
        columns = self._functions.panel_columns
        row_bytes = int(self.in_features * _ITEM_BYTES[kind])
        self._data = self._arena.allocate(self._padded_rows * row_bytes)
        # Rows past the last output are never loaded, yet multiplied along: they must be zero.
        self._data[self.out_features // columns * columns * row_bytes :].zero_()
        self._native.data = self._data.data_ptr()
        self._native.kind = KINDS[kind]

    def _unpack(self) -> None:
        """Other rows come as plain numbers: those held as blocks become such too."""
        blocks, loaded = self._data, self._loaded
        assert blocks is not None and self.kind is not None
        was = _NativeWeight(blocks.data_ptr(), None, None, self.out_features, self.in_features, KINDS[self.kind])
        self._allocate("float32")
        self._loaded = []
        for part in loaded:
            ids = torch.arange(part.start, part.stop)
            rows = torch.empty((len(part), self.in_features))
            self._functions.embed(ctypes.addressof(was), ids.data_ptr(), rows.data_ptr(), len(part), 1.0)
            self.load_rows(part.start, rows)
