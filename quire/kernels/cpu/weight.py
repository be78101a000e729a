"""A weight matrix in the native library's layout: panels of outputs, interleaved along the inputs."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.kernels.composed import ComposedLinear
from quire.kernels.cpu.library import NativeFunctions
from quire.kernels.interface import QUANTIZED_BLOCK, AttentionBatch, AttentionSpec, Norm, Normed, QuantizedRows, Rotary

if TYPE_CHECKING:
    from quire.kernels.cpu.ops import CpuOps

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


class CpuLinear(ComposedLinear):
    """One LinearWeight. int8 is symmetric with one scale an output row, chosen from the row's largest weight.

    A float32 matrix whose rows come out of a quantized file keeps the file's integers and scales: the same numbers, a
    third of the bytes. How it is kept is settled by the first rows that it is given.
    """

    __slots__ = (
        "_data",
        "_functions",
        "_loaded",
        "_native",
        "_padded_bias",
        "_pool",
        "_scale",
        "address",
        "dtype",
        "kind",
    )

    ops: CpuOps

    def __init__(self, ops: CpuOps, out_features: int, in_features: int, *, bias: bool) -> None:
        super().__init__(ops, out_features, in_features)
        self.kind: str | None = None  # a key of KINDS
        self._functions: NativeFunctions = ops.functions
        self._pool = ops.pool
        self.dtype = ops.weight_dtype
        self._data: Tensor | None = None
        self._loaded: list[range] = []  # rows that are held as blocks
        self._scale = torch.zeros(self._padded_rows) if self.dtype == "int8" else None
        self._padded_bias = torch.zeros(self._padded_rows) if bias or self.dtype == "int8" else None
        self.bias = self._padded_bias[:out_features] if bias and self._padded_bias is not None else None
        addresses = (None if part is None else part.data_ptr() for part in (self._scale, self._padded_bias))
        # No data until the first rows come.
        self._native = _NativeWeight(None, *addresses, out_features, in_features, KINDS[self.dtype])
        self.address = ctypes.addressof(self._native)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._data, self._scale, self._padded_bias) if tensor is not None)

    @property
    def keeps_quantized(self) -> bool:
        return self.dtype == "float32"

    def _load(self, first_row: int, rows: Tensor) -> None:
        if self.kind is None:
            self._allocate(self.dtype)
        elif self.kind in _BLOCK_KINDS:
            self._unpack()
        step = max(1, _LOAD_FLOATS // self.in_features)
        for at in range(0, len(rows), step):
            piece = rows[at : at + step].to("cpu", torch.float32).contiguous()
            self._functions.pack(self._pool, self.address, piece.data_ptr(), first_row + at, len(piece))

    def _load_packed(self, first_row: int, rows: QuantizedRows) -> bool:
        if not self.keeps_quantized:
            return False
        if self.kind is None:
            self._allocate("nibbles" if rows.has_4_bits else "blocks" if rows.minima is None else "blocks_min")
        if self.kind == "nibbles":
            fits = rows.has_4_bits
        else:
            fits = self.kind == "blocks_min" or (self.kind == "blocks" and rows.minima is None)
        if not fits:
            return False
        codes, scales = np.ascontiguousarray(rows.codes), np.ascontiguousarray(rows.scales)
        minima = None if rows.minima is None else np.ascontiguousarray(rows.minima)
        self._functions.pack_blocks(
            self._pool, self.address, codes.ctypes.data, scales.ctypes.data,
            None if minima is None else minima.ctypes.data, first_row, len(codes),
        )  # fmt: skip
        self._loaded.append(range(first_row, first_row + len(codes)))
        return True

    def randomize(self, std: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        step = max(1, _LOAD_FLOATS // self.in_features)
        for at in range(0, self.out_features, step):
            rows = torch.empty(min(step, self.out_features - at), self.in_features)
            self.load_rows(at, rows.normal_(0.0, std, generator=generator))
        if self.bias is not None:
            self.bias.normal_(0.0, std, generator=generator)

    def multiply(self, x: Normed) -> Tensor:
        assert isinstance(x, Tensor) and x.dtype is torch.float32 and x.shape[1] == self.in_features
        x, rows = x.contiguous(), x.shape[0]
        out = torch.empty((rows, self.out_features))
        self._functions.linear(self._pool, self.address, x.data_ptr(), out.data_ptr(), rows)
        return out

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        assert token_ids.dtype is torch.int64 and token_ids.is_contiguous()
        count = token_ids.shape[0]
        out = torch.empty((count, self.in_features))
        factor = 1.0 if scale is None else scale
        self._functions.embed(self.address, token_ids.data_ptr(), out.data_ptr(), count, factor)
        return out

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        logits = self.multiply(hidden)
        if softcap is not None:
            self._functions.softcap(self._pool, logits.data_ptr(), logits.numel(), softcap)
        return logits if out is None else out.copy_(logits)

    # -- a product and what follows it, in one call each

    def multiply_add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if norm is None or branch_norm is not None:
            return super().multiply_add_norm(x, residual, norm, branch_norm)
        assert x.dtype is torch.float32 and x.is_contiguous()
        assert residual.dtype is torch.float32 and residual.is_contiguous() and norm.weight.dtype is torch.float32
        rows, width = residual.shape
        out = torch.empty((rows, width))
        self._functions.linear_add_norm(
            self._pool, self.address, x.data_ptr(), self.ops.scratch(rows * width), residual.data_ptr(),
            norm.weight.data_ptr(), out.data_ptr(), rows, width, norm.eps,
        )  # fmt: skip
        return out

    def multiply_act(self, x: Normed, activation: str) -> Tensor:
        assert isinstance(x, Tensor) and x.dtype is torch.float32 and x.is_contiguous()
        assert activation in ("silu", "gelu_tanh")
        rows, width = x.shape[0], self.out_features // 2
        out = torch.empty((rows, width))
        scratch = self.ops.scratch(rows * self.out_features)
        self._functions.linear_act(
            self._pool, self.address, x.data_ptr(), scratch, out.data_ptr(), rows, width, activation == "gelu_tanh"
        )
        return out

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        assert isinstance(x, Tensor) and x.dtype is torch.float32 and x.is_contiguous()
        tokens = x.shape[0]
        q = torch.empty((tokens, spec.num_heads * spec.head_dim))
        self._functions.linear_rope_write(
            self._pool, self.address, x.data_ptr(), self.ops.scratch(tokens * self.out_features),
            self.ops.native_spec(spec, kv), *self.ops.rope_arguments(rotary, kv, batch, q), tokens,
        )  # fmt: skip
        return q

    @property
    def _padded_rows(self) -> int:
        columns = self._functions.panel_columns
        return -(-self.out_features // columns) * columns

    def _allocate(self, kind: str) -> None:
        self.kind = kind
        columns = self._functions.panel_columns
        row_bytes = int(self.in_features * _ITEM_BYTES[kind])
        self._data = self.ops.arena.allocate(self._padded_rows * row_bytes)
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
