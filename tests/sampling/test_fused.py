"""Which devices have a kernel of their own."""

from __future__ import annotations

import sys

import pytest
import torch

from quire.sampling.fused import find_kernel


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_draw_in_torch(device: str) -> None:
    assert find_kernel(1000, torch.device(device)) is None


def test_without_triton_a_gpu_draws_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "quire.kernels.triton.sampling_filter", raising=False)
    assert find_kernel(1000, torch.device("cuda")) is None
    assert "quire.kernels.triton.sampling_filter" not in sys.modules


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_has_a_kernel() -> None:
    assert find_kernel(1000, torch.device("cuda")) is not None
