"""A product and what follows it in one call give what the two calls give, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.composed import ComposedOps
from quire.kernels.cpu import CpuOps
from quire.kernels.cpu.library import available_isas
from quire.kernels.interface import AttentionBatch, AttentionSpec

HIDDEN, INNER = 96, 160
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)


def make(ops: CpuOps, num_out: int, num_in: int, *, bias: bool = False) -> Any:
    weight = ops.new_linear(num_out, num_in, bias=bias)
    weight.load_rows(0, torch.randn(num_out, num_in))
    if bias:
        weight.load_bias(0, torch.randn(num_out))
    return weight


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("isa", available_isas())
def test_linear_add_norm(isa: str, rows: int) -> None:
    ops = CpuOps(num_threads=2, isa=isa)
    weight, norm = make(ops, HIDDEN, INNER, bias=True), torch.randn(HIDDEN)
    x, residual = torch.randn(rows, INNER), torch.randn(rows, HIDDEN)
    apart = residual.clone()
    expected = ComposedOps.linear_add_norm(ops, x, weight, apart, norm, 1e-5)
    assert torch.equal(ops.linear_add_norm(x, weight, residual, norm, 1e-5), expected)
    assert torch.equal(residual, apart)


def test_linear_add_norm_with_sandwich_norms_and_at_the_end() -> None:
    ops = CpuOps(num_threads=1)
    weight, norm = make(ops, HIDDEN, INNER), torch.randn(HIDDEN)
    x, residual = torch.randn(2, INNER), torch.randn(2, HIDDEN)
    for last_norm, branch_norm in ((norm, torch.randn(HIDDEN)), (None, None)):
        apart, together = residual.clone(), residual.clone()
        expected = ComposedOps.linear_add_norm(ops, x, weight, apart, last_norm, 1e-5, branch_norm)
        assert torch.equal(ops.linear_add_norm(x, weight, together, last_norm, 1e-5, branch_norm), expected)
        assert torch.equal(together, apart)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("isa", available_isas())
def test_linear_act(isa: str, rows: int, activation: str) -> None:
    ops = CpuOps(num_threads=2, isa=isa)
    weight, x = make(ops, 2 * INNER, HIDDEN), torch.randn(rows, HIDDEN)
    assert torch.equal(ops.linear_act(x, weight, activation), ComposedOps.linear_act(ops, x, weight, activation))


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("isa", available_isas())
def test_linear_rope_write(isa: str, with_norms: bool) -> None:
    ops = CpuOps(num_threads=2, isa=isa)
    weight = make(ops, (4 + 2 * 2) * 32, HIDDEN, bias=True)
    x, cos_sin = torch.randn(5, HIDDEN), torch.randn(64, 32)
    norms = (torch.randn(32), torch.randn(32)) if with_norms else (None, None)
    batch = AttentionBatch(
        positions=torch.tensor([7, 0, 1, 2, 3]),
        slots=torch.tensor([4 * 3 + 3, 8, 9, 10, 11]),
        query_starts=torch.tensor([0, 1, 5], dtype=torch.int32),
        kv_lens=torch.tensor([8, 4], dtype=torch.int32),
        block_tables=torch.tensor([[1, 3], [2, 0]], dtype=torch.int32),
        max_query_len=4,
        max_kv_len=8,
        num_decodes=1,
    )
    kv, apart = torch.zeros(4, 2, 2, 4, 32), torch.zeros(4, 2, 2, 4, 32)
    expected = ComposedOps.linear_rope_write(ops, x, weight, cos_sin, apart, batch, SPEC, *norms, 1e-6)
    assert torch.equal(ops.linear_rope_write(x, weight, cos_sin, kv, batch, SPEC, *norms, 1e-6), expected)
    assert torch.equal(kv, apart)
    assert kv.any()
