"""Without a CUDA device the kernels run through Triton's interpreter; with one they run compiled.

TRITON_INTERPRET must be set before any module imports Triton, so tests/conftest.py sets it. Triton's interpreter gets
four things wrong that the kernels need; they are put right here, so that what is tested is what a GPU computes. And two
things that it does at every launch, or operation, for nothing are left out.
"""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

if not torch.cuda.is_available():
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    # It turns one-element arrays into ints by int(array), which NumPy 2.4 refuses.
    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope):
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index

    # It makes bfloat16 of integers by taking their bits: by way of float32, which is exact for those of 8 bits.
    def _integer_to_float(self, source, target):
        if target.scalar == tl.bfloat16:
            return self.cast_impl(self.cast_impl(source, tl.float32), target)
        return self.cast_impl(source, target)

    interpreter.InterpreterBuilder.create_si_to_fp = _integer_to_float

    # It keeps bfloat16 as 16-bit integers and multiplies those in dot. And it has a BLAS add in 32 bits, whose order
    # depends on the processor and on the tiles' sizes, where a tensor core's does not: in 64 bits no order shows.
    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _create_wide_dot(self, a, b, d, *rest):
        if not (a.dtype.is_floating() and b.dtype.is_floating()):
            return _create_dot(self, a, b, d, *rest)
        left, right = (self.cast_impl(x, tl.float32).data.astype(np.float64) for x in (a, b))
        return interpreter.TensorHandle((left @ right).astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _create_wide_dot

    # Its narrowing conversions truncate, or lose the carry into the exponent: torch rounds to nearest, as a GPU does.
    _FLOATS = {
        tl.float32: (torch.float32, torch.int32, np.uint32),
        tl.float16: (torch.float16, torch.int16, np.uint16),
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }

    def _convert_by_torch(data, source_type, target_type, rounding_mode):
        source, integers, words = _FLOATS[source_type]
        bits = np.ascontiguousarray(data).view(words).astype(words)
        bits = bits.view(np.uint8 if words is np.uint8 else f"i{bits.itemsize}")
        target, target_integers, target_words = _FLOATS[target_type]
        values = torch.from_numpy(bits).view(integers).view(source).to(torch.float32).to(target)
        return values.view(target_integers).numpy().view(target_words).reshape(data.shape)

    interpreter._convert_float = _convert_by_torch

    # It computes whether integers overflow, and without debug=True asserts nothing of it.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    # It looks for what to replace in Triton's modules at every launch: the names are always the same.
    @functools.cache
    def _builtins_of(pkg):
        return [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]

    def _patch_builtin(pkg, builder, scope):
        for name in _builtins_of(pkg):
            if tl.core.is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = _patch_builtin


def pytest_collection_modifyitems(items):
    """Integers wrap on purpose and exp2 overflows to inf on purpose; NumPy warns of both, a GPU does not."""
    for item in items:
        if "tests/kernels/triton" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"))


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def without_onednn():
    """Its 16-bit products die on virtual machines that report AMX and do not allow it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags sets everything else too, and warns of it
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty gives NaN, so that an element that no kernel writes fails its test. Seeds differ for every test."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor):
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))
    torch.seed()
