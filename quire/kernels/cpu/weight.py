"""A weight matrix in the native library's layout: panels of outputs, interleaved along the inputs."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.composed import ComposedLinear
from quire.kernels.cpu.integer_blocks import integer_blocks
from quire.kernels.cpu.library import NativeFunctions
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Normed, Rotary
from quire.kernels.stored_rows import Float8Rows, IntegerRows, StoredRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.kernels.cpu.ops import CpuOps

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "int8")
_PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
KINDS = {name: number for number, name in enumerate((*WEIGHT_DTYPES, *_PACKED))}  # enum kind of native/simd.h
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "clamped_silu")  # enum activation of native/simd.h
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_LOAD_FLOATS = 16 << 20  # converted at a time: a checkpoint tensor never has a second copy of its size


class _NativePart(ctypes.Structure):
    """struct part of native/weight.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class _NativeWeight(ctypes.Structure):
    """struct weight of native/weight.h."""

    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("exact", ctypes.c_int64),
    )


class CpuLinear(ComposedLinear):
    """One LinearWeight. int8 is symmetric with one scale an output row, chosen from the row's largest weight.

    A float32 matrix whose rows come out of a quantized file keeps them packed, each tensor of the file as a part of its
    own: a fused matrix may have parts of several types. Unless `ops.exact`, packed weights are multiplied by
    activations that are rounded to 8 bits, 32 of them with a scale of their own.
    """

    __slots__ = ("_data", "_functions", "_native", "_padded_bias", "_parts", "_pool", "_scale", "address", "dtype")

    ops: CpuOps

    def __init__(self, ops: CpuOps, out_features: int, in_features: int, *, bias: bool) -> None:
        super().__init__(ops, out_features, in_features)
        self._functions: NativeFunctions = ops.functions
        self._pool = ops.pool
        self.dtype = ops.weight_dtype
        self._data: list[Tensor] = []  # of each part
        self._parts: ctypes.Array[_NativePart] = (_NativePart * 0)()
        # A panel at the end of a part reads past the last output.
        padded_rows = out_features + self._functions.panel_columns
        self._scale = torch.zeros(padded_rows) if self.dtype == "int8" else None
        self._padded_bias = torch.zeros(padded_rows) if bias or self.dtype == "int8" else None
        self.bias = self._padded_bias[:out_features] if bias and self._padded_bias is not None else None
        addresses = (None if part is None else part.data_ptr() for part in (self._scale, self._padded_bias))
        # No parts until the first rows come.
        self._native = _NativeWeight(None, 0, *addresses, out_features, in_features, ops.exact)
        self.address = ctypes.addressof(self._native)

    @property
    def nbytes(self) -> int:
        held = (*self._data, self._scale, self._padded_bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """How its parts are held: the dtype, or types as GGUF names them."""
        names = tuple(KINDS)
        return tuple(names[part.kind] for part in self._parts)

    @property
    def keeps_quantized(self) -> bool:
        return self.dtype == "float32"

    def _load(self, first_row: int, rows: Tensor) -> None:
        if not self._parts:
            self._allocate_plain()
        elif self.kinds[0] not in WEIGHT_DTYPES:
            self._unpack()
        step = max(1, _LOAD_FLOATS // self.in_features)
        for at in range(0, len(rows), step):
            piece = rows[at : at + step].to("cpu", torch.float32).contiguous()
            self._functions.pack(self._pool, self.address, piece.data_ptr(), first_row + at, len(piece))

    def _load_packed(self, first_row: int, rows: StoredRows) -> bool:
        if isinstance(rows, Float8Rows) or not self.keeps_quantized:
            return False
        if isinstance(rows, IntegerRows):
            return self._load_blocks(first_row, *integer_blocks(rows))
        return self._load_blocks(first_row, rows.kind, rows.blocks)

    def _load_blocks(self, first_row: int, kind: str | None, blocks: NDArray[np.uint8]) -> bool:
        if kind not in _PACKED or (self._parts and self.kinds[0] in WEIGHT_DTYPES):
            return False
        if blocks.strides[1:] != (blocks.shape[2], 1):
            blocks = blocks.copy()
        where = (KINDS[kind], first_row, len(blocks))
        held = [(part.kind, part.first_row, part.num_rows) for part in self._parts]
        if where in held:  # loaded again
            number = held.index(where)
        elif any(first < first_row + len(blocks) and first_row < first + num for _, first, num in held):
            return False
        else:
            columns = self._functions.panel_columns
            panel_bytes = self._functions.packed_panel_bytes(where[0], self.in_features)
            number = self._add_part(*where, -(-len(blocks) // columns) * panel_bytes)
        self.ops.packed_kinds.add(kind)
        self._functions.pack_gguf(self._pool, self.address, number, blocks.ctypes.data, blocks.strides[0])
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
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if norm is None or norm.bias is not None or branch_norm is not None:
            return super().multiply_add_norm(x, residual, norm, branch_norm)
        assert isinstance(x, Tensor) and x.dtype is torch.float32 and x.is_contiguous()
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
        rows, width = x.shape[0], self.out_features // 2
        out = torch.empty((rows, width))
        scratch = self.ops.scratch(rows * self.out_features)
        self._functions.linear_act(
            self._pool, self.address, x.data_ptr(), scratch, out.data_ptr(), rows, width, ACTIVATIONS.index(activation)
        )
        return out

    def multiply_activate(self, x: Normed, activation: str) -> Tensor:
        assert isinstance(x, Tensor) and x.dtype is torch.float32 and x.is_contiguous()
        out = torch.empty((x.shape[0], self.out_features))
        self._functions.linear_activate(
            self._pool, self.address, x.data_ptr(), out.data_ptr(), x.shape[0], ACTIVATIONS.index(activation)
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

    def _allocate_plain(self) -> None:
        columns = self._functions.panel_columns
        row_bytes = self.in_features * _ITEM_BYTES[self.dtype]
        padded_rows = -(-self.out_features // columns) * columns
        self._add_part(KINDS[self.dtype], 0, self.out_features, padded_rows * row_bytes)
        # Rows past the last output are never loaded, yet multiplied along: they must be zero.
        self._data[0][self.out_features // columns * columns * row_bytes :].zero_()

    def _add_part(self, kind: int, first_row: int, num_rows: int, num_bytes: int) -> int:
        data = self.ops.arena.allocate(num_bytes)
        self._data.append(data)
        added = _NativePart(data.data_ptr(), kind, first_row, num_rows)
        self._set_parts([*self._parts, added])
        return len(self._data) - 1

    def _set_parts(self, parts: list[_NativePart]) -> None:
        self._parts = (_NativePart * len(parts))(*parts)
        self._native.parts = ctypes.addressof(self._parts)
        self._native.num_parts = len(parts)

    def _unpack(self) -> None:
        """Other rows come as plain numbers: those that are packed become such too."""
        packed, data = list(self._parts), self._data
        was = _NativeWeight(None, 0, None, None, self.out_features, self.in_features, 1)
        held = (_NativePart * len(packed))(*packed)
        was.parts, was.num_parts = ctypes.addressof(held), len(packed)
        self._data = []
        self._set_parts([])
        self._allocate_plain()
        for part in packed:
            ids = torch.arange(part.first_row, part.first_row + part.num_rows)
            rows = torch.empty((part.num_rows, self.in_features))
            self._functions.embed(ctypes.addressof(was), ids.data_ptr(), rows.data_ptr(), len(ids), 1.0)
            self._load(part.first_row, rows)
        del data  # lived until here, since `was` points into it
