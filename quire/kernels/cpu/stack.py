"""Layers of a decoder in one native call.

In a step of one token, each call from Python costs as much as a small product: what the interpreter works with has left
the caches when the weights of a layer have passed through them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.cpu.weight import ACTIVATIONS, CpuLinear
from quire.kernels.interface import AttentionBatch, Normed, PlainLayer

if TYPE_CHECKING:
    from quire.kernels.cpu.ops import CpuOps


class _NativeLayer(ctypes.Structure):
    """struct layer of native/stack.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down", "spec", "kv")),
        *((name, c_void_p) for name in ("cos_sin", "q_norm", "k_norm", "mlp_norm", "next_norm")),
        *((name, c_int64) for name in ("activation", "group", "width", "q_width", "inner")),
        *((name, c_float) for name in ("head_eps", "mlp_eps", "next_eps")),
    )


class _NativeBatch(ctypes.Structure):
    """struct batch of native/stack.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "slots", "query_starts", "kv_lens", "tables")),
        ("table_width", c_int64),
    )


class CpuStack:
    """One LayerStack."""

    def __init__(self, ops: CpuOps, layers: Sequence[PlainLayer]) -> None:
        self._ops = ops
        self._layers = list(layers)  # whose tensors the native ones point to
        self._native = (_NativeLayer * len(layers))(*(_native(layer) for layer in layers))
        self._batches = (_NativeBatch * (1 + max(layer.group for layer in layers)))()
        self._kv: Sequence[Tensor] = ()  # where the native layers point to
        # Floats for each token: a product before what follows it; and q beside what attention makes of it, or what the
        # MLP's second product takes.
        matrices = [matrix for one in layers for matrix in (one.qkv, one.output, one.gate_up, one.down)]
        self._scratch_floats = max(matrix.out_features for matrix in matrices)
        self._buffer_floats = max(max(2 * one.output.in_features, one.down.in_features) for one in layers)

    @classmethod
    def of(cls, ops: CpuOps, layers: Sequence[PlainLayer]) -> CpuStack | None:
        """None where a layer has something that is no native operation."""
        for layer in layers:
            matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
            if not all(isinstance(matrix, CpuLinear) for matrix in matrices) or layer.activation not in ACTIVATIONS:
                return None
            if layer.mlp_norm.bias is not None or layer.next_norm.bias is not None:
                return None
        return cls(ops, layers)

    def run(self, x: Normed, residual: Tensor, kv: Sequence[Tensor], batches: Sequence[AttentionBatch]) -> Tensor:
        assert isinstance(x, Tensor) and x.dtype is residual.dtype is torch.float32 and x.shape == residual.shape
        assert x.is_contiguous() and residual.is_contiguous()
        if kv is not self._kv:
            self._point_to(kv)
        for native, batch in zip(self._batches, batches, strict=False):
            self._ops.check_batch(batch)
            native.positions, native.slots = batch.positions.data_ptr(), batch.slots.data_ptr()
            native.query_starts, native.kv_lens = batch.query_starts.data_ptr(), batch.kv_lens.data_ptr()
            native.tables, native.table_width = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        tokens = len(x)
        buffer = torch.empty(tokens * self._buffer_floats)
        self._ops.functions.layers(
            self._ops.pool, ctypes.addressof(self._native), len(self._layers), ctypes.addressof(self._batches),
            x.data_ptr(), residual.data_ptr(), buffer.data_ptr(), self._ops.scratch(tokens * self._scratch_floats),
            tokens, len(batches[0].kv_lens),
        )  # fmt: skip
        return x

    def _point_to(self, kv: Sequence[Tensor]) -> None:
        for native, layer, cache in zip(self._native, self._layers, kv, strict=False):
            native.spec, native.kv = self._ops.native_spec(layer.attention, cache), cache.data_ptr()
        self._kv = kv


def _native(layer: PlainLayer) -> _NativeLayer:
    matrices = []
    for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
        assert isinstance(matrix, CpuLinear)
        matrices.append(matrix.address)
    rotary, norms = layer.rotary, (layer.mlp_norm.weight, layer.next_norm.weight)
    vectors = (rotary.cos_sin, rotary.q_norm, rotary.k_norm, *norms)
    assert all(v is None or (v.dtype is torch.float32 and v.is_contiguous()) for v in vectors)
    return _NativeLayer(
        *matrices, None, None, *(None if vector is None else vector.data_ptr() for vector in vectors),
        ACTIVATIONS.index(layer.activation), layer.group, layer.output.out_features, layer.output.in_features,
        layer.down.in_features, rotary.eps, layer.mlp_norm.eps, layer.next_norm.eps,
    )  # fmt: skip
