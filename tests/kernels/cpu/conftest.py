"""One CpuOps for each instruction set of this machine, in turn with one and two threads; outputs start as NaN."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.cpu.library import available_isas

ISAS = available_isas()
# The best of them with both: how work is split depends little on the instructions that it is done with.
VARIANTS = [*((isa, 1 + i % 2) for i, isa in enumerate(ISAS)), *((isa, 2) for isa in ISAS[:1])]


def pytest_collection_modifyitems(items):
    reason = unavailable_reason()
    if reason is None:
        return
    for item in items:
        if "ops" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=VARIANTS or [("none", 1)], ids=lambda variant: f"{variant[0]}-{variant[1]}t")
def ops(request, monkeypatch):
    isa, num_threads = request.param
    ops = CpuOps(num_threads=num_threads, isa=isa)
    # What a kernel leaves unwritten must show.
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: _poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: _poison(empty_like(*args, **kwargs)))
    return ops


def _poison(tensor):
    return (
        tensor.fill_(float("nan"))
        if tensor.is_floating_point()
        else tensor.fill_(-1 if tensor.dtype.is_signed else 255)
    )
