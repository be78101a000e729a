"""The operations of kernels/interface.py on the native CPU library.

Activations are float32; weights and KV may be narrower.
An operation does little besides passing addresses, since a step has many of them: the native side owns the threads.
In a step of few tokens, most layers are one call (stack.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.composed import ComposedOps
from quire.kernels.cpu.library import load_functions, load_library
from quire.kernels.cpu.memory import Arena
from quire.kernels.cpu.stack import CpuStack
from quire.kernels.cpu.threads import ThreadPool, default_num_threads
from quire.kernels.cpu.weight import ACTIVATIONS, WEIGHT_DTYPES, CpuLinear
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Normed, PackedBatch, PlainLayer, Rotary

_KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum kind of native/simd.h
_MAX_HEAD_DIM = 256
_MAX_GROUP = 192  # query heads a KV head: PREFILL_ROWS of native/attention.c


class _NativeSpec(ctypes.Structure):
    """struct attention_spec of native/attention.c; its integers are struct rope_shape of native/elementwise.c."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kv_kind", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("slopes", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
    )
    held: object  # what the pointers point to


class CpuOps(ComposedOps):
    """One engine's kernels and threads. `isa` is for tests and benchmarks; the default is the best of this machine.

    `exact`: weights packed in 8 bits or fewer are multiplied by float32 activations, not by activations in 8 bits.

    Every operation sums a row in one order, whatever rows are beside it, and attention a token's keys in one order,
    whether it is decoded or part of a prompt: so a request's bits do not depend on the steps that it ran in.
    """

    name = "cpu"

    def __init__(
        self,
        weight_dtype: str = "float32",
        num_threads: int | None = None,
        *,
        exact: bool = False,
        isa: str | None = None,
    ) -> None:
        if weight_dtype not in WEIGHT_DTYPES:
            raise ConfigError(f"weight_dtype {weight_dtype!r} on a CPU: choose one of {', '.join(WEIGHT_DTYPES)}")
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, not {num_threads}")
        self.functions = load_functions(isa)
        library = load_library()
        assert isinstance(library, ctypes.CDLL)
        self.isa = self.functions.isa
        self.weight_dtype = weight_dtype
        self.exact = exact
        self.packed_kinds: set[str] = set()  # GGUF's types of the matrices that are held in them
        self.num_threads = num_threads or default_num_threads()
        self._threads = ThreadPool(library, self.num_threads)
        self.pool = self._threads.address
        self.arena = Arena(library)
        self._specs: dict[object, _NativeSpec] = {}
        self._scratch_buffer = torch.empty(0)

    def supported_block_sizes(self, head_dim: int) -> tuple[int, ...]:
        if head_dim % 16 != 0 or not 32 <= head_dim <= _MAX_HEAD_DIM:
            return ()
        return (4, 8, 16, 32, 64, 128)

    def new_linear(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> CpuLinear:
        return CpuLinear(self, out_features, in_features, bias=bias)

    def new_stack(self, layers: Sequence[PlainLayer]) -> CpuStack | None:
        return CpuStack.of(self, layers)

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        assert x.dtype is torch.float32 and norm.weight.dtype is torch.float32 and norm.weight.is_contiguous()
        x = x.contiguous()
        rows, width = x.shape
        if norm.bias is not None:
            return self._layer_norm(x, None, norm)
        out = torch.empty((rows, width))
        self.functions.rms_norm(self.pool, x.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), rows, width, norm.eps)
        return out

    def add_norm(self, branch: Tensor, residual: Tensor, norm: Norm | None) -> Normed:
        if norm is None:
            return super().add_norm(branch, residual, norm)
        assert branch.dtype is torch.float32 and branch.is_contiguous()
        assert residual.dtype is torch.float32 and residual.is_contiguous() and norm.weight.dtype is torch.float32
        if norm.bias is not None:
            return self._layer_norm(branch, residual, norm)
        rows, width = residual.shape
        out = torch.empty((rows, width))
        self.functions.add_rms_norm(
            self.pool, branch.data_ptr(), residual.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), rows, width,
            norm.eps,
        )  # fmt: skip
        return out

    def _layer_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
        assert norm.bias is not None and norm.bias.dtype is torch.float32
        out = torch.empty_like(x)
        self.functions.layer_norm(
            self.pool, x.data_ptr(), None if residual is None else residual.data_ptr(), norm.weight.data_ptr(),
            norm.bias.data_ptr(), out.data_ptr(), *x.shape, norm.eps,
        )  # fmt: skip
        return out

    def packed_attention(self, qkv: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
        if spec.head_dim > _MAX_HEAD_DIM:
            return super().packed_attention(qkv, batch, spec)
        assert qkv.dtype is torch.float32 and qkv.is_contiguous() and spec.num_heads == spec.num_kv_heads
        assert batch.starts.dtype is torch.int32 and batch.starts.is_contiguous()
        out = torch.empty((len(qkv), spec.num_heads * spec.head_dim))
        self.functions.packed_attention(
            self.pool, qkv.data_ptr(), out.data_ptr(), batch.starts.data_ptr(), len(batch.lengths), spec.num_heads,
            spec.head_dim, spec.scale,
        )  # fmt: skip
        return out

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        assert gate_up.dtype is torch.float32
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width))
        number = ACTIVATIONS.index(activation)
        self.functions.act_mul(self.pool, gate_up.data_ptr(), out.data_ptr(), rows, width, number)
        return out

    def rope_and_write(
        self, qkv: Tensor, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        assert qkv.dtype is torch.float32
        qkv = qkv.contiguous()
        tokens = qkv.shape[0]
        q = torch.empty((tokens, spec.num_heads * spec.head_dim))
        self.functions.rope_and_write(
            self.pool, self.native_spec(spec, kv), qkv.data_ptr(), *self.rope_arguments(rotary, kv, batch, q), tokens,
        )  # fmt: skip
        return q

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        assert q.dtype is torch.float32 and q.is_contiguous()
        self.check_batch(batch)
        tables, out = batch.block_tables, torch.empty_like(q)
        self.functions.attention(
            self.pool, self.native_spec(spec, kv), kv.data_ptr(), q.data_ptr(), out.data_ptr(),
            batch.query_starts.data_ptr(), batch.kv_lens.data_ptr(), tables.data_ptr(), tables.stride(0),
            len(batch.kv_lens),
        )  # fmt: skip
        return out

    @staticmethod
    def check_batch(batch: AttentionBatch) -> None:
        assert batch.positions.dtype is batch.slots.dtype is torch.int64
        assert batch.query_starts.dtype is batch.kv_lens.dtype is batch.block_tables.dtype is torch.int32
        contiguous = (batch.positions, batch.slots, batch.query_starts, batch.kv_lens)
        assert all(each.is_contiguous() for each in contiguous) and batch.block_tables.stride(1) == 1

    @staticmethod
    def rope_arguments(rotary: Rotary, kv: Tensor, batch: AttentionBatch, q: Tensor) -> tuple[int | float | None, ...]:
        """What rotary takes after its input, with or without a product before it. Checked here for both."""
        assert rotary.cos_sin.dtype is torch.float32 and rotary.cos_sin.is_contiguous()
        assert batch.positions.dtype is torch.int64 and batch.positions.is_contiguous()
        assert batch.slots.dtype is torch.int64 and batch.slots.is_contiguous()
        return (
            rotary.cos_sin.data_ptr(),
            kv.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            q.data_ptr(),
            None if rotary.q_norm is None else rotary.q_norm.data_ptr(),
            None if rotary.k_norm is None else rotary.k_norm.data_ptr(),
            rotary.eps,
        )

    def scratch(self, num_floats: int) -> int:
        """The address of memory that lasts until the next call: one buffer, kept, so that its pages stay mapped."""
        if self._scratch_buffer.numel() < num_floats:
            self._scratch_buffer = torch.empty(num_floats)
        return self._scratch_buffer.data_ptr()

    def native_spec(self, spec: AttentionSpec, kv: Tensor) -> int:
        """The address of what does not change from step to step, made once for each kind of layer and cache."""
        of_heads = tuple(None if each is None else each.data_ptr() for each in (spec.slopes, spec.sinks))
        key = (spec, of_heads, kv.dtype, kv.stride())
        native = self._specs.get(key)
        if native is None:
            native = self._specs[key] = _make_native_spec(spec, kv)
        return ctypes.addressof(native)


def _make_native_spec(spec: AttentionSpec, kv: Tensor) -> _NativeSpec:
    _, two, num_kv_heads, block_size, head_dim = kv.shape
    tile = block_size * head_dim
    assert kv.stride()[1:] == (num_kv_heads * tile, tile, head_dim, 1), "a block of one layer must be contiguous"
    assert (two, num_kv_heads, head_dim) == (2, spec.num_kv_heads, spec.head_dim)
    if kv.dtype not in _KV_KINDS:
        raise ConfigError(f"KV dtype {kv.dtype} on a CPU: choose float32, bfloat16 or float16")
    assert spec.k_scale == spec.v_scale == 1.0 and spec.k_offset is None, "scales and offsets are for 8-bit caches"
    if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
        raise ConfigError(f"more than {_MAX_GROUP} query heads a KV head")
    native = _NativeSpec(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        block_size,
        _KV_KINDS[kv.dtype],
        kv.stride(0),
        spec.window or 0,
        spec.scale,
        spec.softcap or 0.0,
        None if spec.slopes is None else spec.slopes.data_ptr(),
        None if spec.sinks is None else spec.sinks.data_ptr(),
    )
    native.held = (spec.slopes, spec.sinks)
    return native
