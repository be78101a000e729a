"""As much of torch's meta device as a dry run touches: tensors that have a shape, a type and strides, and no memory.

The helper that compiles kernels beforehand has to know which ones there will be, and finds out by running the model's
own code. torch takes seconds to import, most of them on a machine that has just come up; this takes none. What is not
here raises an AttributeError, and the helper imports torch after all. docs/log.md has what else was weighed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_BASE = 1 << 20  # where every tensor's memory would begin: aligned, as an allocator's is


class dtype:
    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    @property
    def is_floating_point(self) -> bool:
        return self.name.startswith(("float", "bfloat"))


_DTYPES = {
    name: dtype(name, itemsize)
    for name, itemsize in {
        "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    }.items()
}  # fmt: skip


class device:
    def __init__(self, name: str | device) -> None:
        self.type: str = name.type if isinstance(name, device) else name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device) and other.type == self.type

    def __hash__(self) -> int:
        return hash(self.type)


class Tensor:
    """Where its elements would lie."""

    def __init__(
        self, shape: tuple[int, ...], kind: dtype, where: device, strides: tuple[int, ...] | None = None, start: int = 0
    ) -> None:
        self.shape, self.dtype, self.device = shape, kind, where
        self._strides = strides if strides is not None else _contiguous(shape)
        self._start = start  # in elements

    is_cuda = False
    is_meta = True

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return _BASE + self._start * self.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]

    def is_contiguous(self) -> bool:
        expected = _contiguous(self.shape)
        return all(n <= 1 or a == b for n, a, b in zip(self.shape, self._strides, expected, strict=True))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def __getitem__(self, index: Any) -> Tensor:
        shape: list[int] = []
        strides: list[int] = []
        start, dim = self._start, 0
        for part in index if isinstance(index, tuple) else (index,):
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            length, stride = self.shape[dim], self._strides[dim]
            dim += 1
            if isinstance(part, int):
                start += (part + length if part < 0 else part) * stride
            elif isinstance(part, slice):
                first, last, step = part.indices(length)
                start += first * stride
                shape.append(len(range(first, last, step)))
                strides.append(stride * step)
            else:
                raise AttributeError(f"tensors without memory are not indexed by {type(part).__name__}")
        shape += self.shape[dim:]
        strides += self._strides[dim:]
        return Tensor(tuple(shape), self.dtype, self.device, tuple(strides), start)

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        assert dim == 0
        return tuple(self[i] for i in range(self.shape[0]))

    def split(self, sizes: list[int]) -> tuple[Tensor, ...]:
        ends = list(itertools.accumulate(sizes))
        assert ends[-1] == self.shape[0]
        return tuple(self[end - size : end] for size, end in zip(sizes, ends, strict=True))

    def view(self, *shape: Any) -> Tensor:
        if len(shape) == 1 and isinstance(shape[0], dtype):
            assert shape[0].itemsize == self.dtype.itemsize
            return Tensor(self.shape, shape[0], self.device, self._strides, self._start)
        assert self.is_contiguous()
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        known = math.prod(n for n in sizes if n != -1)
        made = tuple(self.numel() // known if n == -1 else n for n in sizes)
        return Tensor(made, self.dtype, self.device, None, self._start)

    def t(self) -> Tensor:
        return Tensor(self.shape[::-1], self.dtype, self.device, self._strides[::-1], self._start)

    T = property(t)

    def float(self) -> Tensor:
        return Tensor(self.shape, _DTYPES["float32"], self.device)

    def bfloat16(self) -> Tensor:
        return Tensor(self.shape, _DTYPES["bfloat16"], self.device)

    def __matmul__(self, other: Tensor) -> Tensor:
        assert self.shape[-1] == other.shape[0]
        return Tensor((*self.shape[:-1], *other.shape[1:]), self.dtype, self.device)

    def __mul__(self, other: Any) -> Tensor:
        return Tensor(self.shape, self.dtype, self.device)  # by a number, or by something that is broadcast

    def _in_place(self, *_: Any) -> Tensor:
        return self

    zero_ = fill_ = copy_ = add_ = mul_ = div_ = tanh_ = addmm_ = _in_place


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _empty(*size: Any, dtype: dtype = _DTYPES["float32"], device: device | str = "cpu") -> Tensor:
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return Tensor(tuple(shape), dtype, globals()["device"](device))


def _mm(a: Tensor, b: Tensor, *, out: Tensor, **_: Any) -> Tensor:
    assert out.shape == (a @ b).shape
    return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight.t()


def _embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    return Tensor((*token_ids.shape, *weight.shape[1:]), weight.dtype, weight.device)


class _Scalar:
    """torch.tensor(number).item()."""

    def __init__(self, value: float, **_: Any) -> None:
        self._value = value

    def item(self) -> float:
        return self._value


def _promote_types(a: dtype, b: dtype) -> dtype:
    assert a.is_floating_point and b.is_floating_point
    return a if a.itemsize >= b.itemsize else b


def install() -> None:
    """Have `import torch` give this from now on, in this process."""
    assert "torch" not in sys.modules, "torch is there already"
    torch = ModuleType("torch")
    content = {
        "Tensor": Tensor,
        "dtype": dtype,
        "device": device,
        "empty": _empty,
        "zeros": _empty,
        "ones": _empty,
        "tensor": _Scalar,
        "promote_types": _promote_types,
        "mm": _mm,
        **_DTYPES,
    }
    for name, value in content.items():
        setattr(torch, name, value)
    nn, functional = ModuleType("torch.nn"), ModuleType("torch.nn.functional")
    functional.linear, functional.embedding = _linear, _embedding  # type: ignore[attr-defined]
    torch.nn, nn.functional = nn, functional  # type: ignore[attr-defined]
    sys.modules |= {"torch": torch, "torch.nn": nn, "torch.nn.functional": functional}
