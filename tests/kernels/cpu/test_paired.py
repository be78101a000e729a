"""A product and what follows it in one call give what the two calls give, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.composed import ComposedLinear
from quire.kernels.cpu import CpuOps
from quire.kernels.cpu.library import available_isas
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary

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
def test_multiply_add_norm(isa: str, rows: int) -> None:
    ops = CpuOps(num_threads=2, isa=isa)
    weight, norm = make(ops, HIDDEN, INNER, bias=True), Norm(torch.randn(HIDDEN), 1e-5)
    x, residual = torch.randn(rows, INNER), torch.randn(rows, HIDDEN)
    apart = residual.clone()
    expected = ComposedLinear.multiply_add_norm(weight, x, apart, norm)
    assert torch.equal(weight.multiply_add_norm(x, residual, norm), expected)
    assert torch.equal(residual, apart)


def test_multiply_add_norm_with_sandwich_norms_and_at_the_end() -> None:
    ops = CpuOps(num_threads=1)
    weight, norm = make(ops, HIDDEN, INNER), Norm(torch.randn(HIDDEN), 1e-5)
    x, residual = torch.randn(2, INNER), torch.randn(2, HIDDEN)
    for last_norm, branch_norm in ((norm, Norm(torch.randn(HIDDEN), 1e-5)), (None, None)):
        apart, together = residual.clone(), residual.clone()
        expected = ComposedLinear.multiply_add_norm(weight, x, apart, last_norm, branch_norm)
        assert torch.equal(weight.multiply_add_norm(x, together, last_norm, branch_norm), expected)
        assert torch.equal(together, apart)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("isa", available_isas())
def test_multiply_act(isa: str, rows: int, activation: str) -> None:
    ops = CpuOps(num_threads=2, isa=isa)
    weight, x = make(ops, 2 * INNER, HIDDEN), torch.randn(rows, HIDDEN)
    assert torch.equal(weight.multiply_act(x, activation), ComposedLinear.multiply_act(weight, x, activation))


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("isa", available_isas())
def test_multiply_rope_write(isa: str, with_norms: bool) -> None:
    ops = CpuOps(num_threads=2, isa=isa)
    weight = make(ops, (4 + 2 * 2) * 32, HIDDEN, bias=True)
    x = torch.randn(5, HIDDEN)
    norms = (torch.randn(32), torch.randn(32)) if with_norms else (None, None)
    rotary = Rotary(torch.randn(64, 32), *norms)
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
    expected = ComposedLinear.multiply_rope_write(weight, x, rotary, apart, batch, SPEC)
    assert torch.equal(weight.multiply_rope_write(x, rotary, kv, batch, SPEC), expected)
    assert torch.equal(kv, apart)
    assert kv.any()
