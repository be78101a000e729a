"""What every LinearWeight keeps to, and what one that can only load and multiply gets from `kernels/composed.py`."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.composed import ComposedLinear
from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary
from quire.kernels.reference import ReferenceOps

SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=32, scale=0.2)
HIDDEN, INNER = 64, 96
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class SummedLinear(ComposedLinear):
    """A matrix whose inputs are split, as many devices hold it: each multiplies its columns, and the products are
    summed before anything is added to the residual stream."""

    __slots__ = ("shards",)

    def __init__(self, ops, out_features, in_features, num_shards):
        super().__init__(ops, out_features, in_features)
        self.bias = None
        self.shards = [ops.new_linear(out_features, in_features // num_shards) for _ in range(num_shards)]

    def load_rows(self, first_row, matrix, **part):
        width = self.shards[0].in_features
        for index, shard in enumerate(self.shards):
            shard.load_rows(first_row, matrix, columns=slice(index * width, (index + 1) * width))

    def _load(self, first_row, rows):
        raise AssertionError("its shards are loaded")

    def multiply(self, x):
        parts = x.chunk(len(self.shards), dim=1)
        return sum(shard.multiply(part) for shard, part in zip(self.shards, parts, strict=True))


@pytest.fixture(params=["reference", "int8 weights", "cpu"])
def ops(request):
    if request.param == "reference":
        return ReferenceOps("cpu", torch.float32)
    if reason := unavailable_reason():
        pytest.skip(reason)
    return CpuOps("int8" if request.param == "int8 weights" else "float32", num_threads=1)


def whole_and_summed(ops, out_features, in_features):
    matrix = torch.randn(out_features, in_features).clamp(-3, 3)
    matrix[:, :: in_features // 3] = 4.0  # each shard's largest: what an int8 row is scaled by
    whole, summed = ops.new_linear(out_features, in_features), SummedLinear(ops, out_features, in_features, 3)
    for weight in (whole, summed):
        weight.load_rows(0, matrix)
    return whole, summed


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_branch_norm", [True, False])
def test_products_summed_before_they_are_added(ops, has_norm, has_branch_norm):
    torch.manual_seed(0)
    norms = [Norm(torch.rand(HIDDEN) + 0.5, 1e-5) if has else None for has in (has_norm, has_branch_norm)]
    x, residual, found = torch.randn(3, INNER), torch.randn(3, HIDDEN), []
    for weight in whole_and_summed(ops, HIDDEN, INNER):
        added = residual.clone()
        normed = weight.multiply_add_norm(x, added, *norms)
        assert (normed is added) == (not has_norm)
        found.append((added, normed))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_the_caller_may_add(ops):
    """multiply, then Ops.add_norm, is multiply_add_norm."""
    weight, norm = whole_and_summed(ops, HIDDEN, INNER)[0], Norm(torch.rand(HIDDEN) + 0.5, 1e-5)
    x, residual = torch.randn(3, INNER), torch.randn(3, HIDDEN)
    added, apart = residual.clone(), residual.clone()
    torch.testing.assert_close(weight.multiply_add_norm(x, added, norm), ops.add_norm(weight.multiply(x), apart, norm))
    torch.testing.assert_close(added, apart)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation_after_a_product(ops, activation):
    torch.manual_seed(1)
    x = torch.randn(3, INNER)
    gated = [weight.multiply_act(x, activation) for weight in whole_and_summed(ops, 2 * HIDDEN, INNER)]
    torch.testing.assert_close(gated[1], gated[0], **CLOSE)


def test_rotation_and_writing_after_a_product(ops):
    torch.manual_seed(2)
    batch = AttentionBatch(
        positions=torch.tensor([4, 5, 6]),
        slots=torch.tensor([3, 0, 6]),
        query_starts=torch.tensor([0, 3], dtype=torch.int32),
        kv_lens=torch.tensor([7], dtype=torch.int32),
        block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
        max_query_len=3,
        max_kv_len=7,
        num_decodes=0,
    )
    x, rotary, found = torch.randn(3, INNER), Rotary(torch.randn(8, 32)), []
    for weight in whole_and_summed(ops, 4 * 32, INNER):
        kv = torch.zeros(2, 2, 1, 4, 32)
        found.append((weight.multiply_rope_write(x, rotary, kv, batch, SPEC), kv))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_a_part_of_a_matrix(ops):
    matrix = torch.randn(10, 40)
    part = ops.new_linear(6, 8)
    part.load_rows(0, matrix, rows=slice(7, 10), columns=slice(32, 40))
    part.load_rows(3, matrix, rows=slice(0, 3), columns=slice(0, 8))
    expected = torch.cat([matrix[7:, 32:], matrix[:3, :8]])
    torch.testing.assert_close(part.embed(torch.arange(6)), expected, rtol=0.01, atol=0.02)


def test_what_does_not_fit_is_a_bug(ops):
    weight = ops.new_linear(4, 2)
    with pytest.raises(AssertionError, match="rows 3 to 5 of 4"):
        weight.load_rows(3, torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="3 columns for 2"):
        weight.load_rows(0, torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="bias"):
        weight.load_bias(0, torch.zeros(4))


def test_a_variant_that_folds_nothing_returns_the_norm(ops):
    weight, norm = ops.new_linear(4, 8), Norm(torch.rand(8), 1e-5)
    weight.load_rows(0, torch.ones(4, 8))
    assert weight.fold_norm(norm) is norm
    assert torch.equal(weight.embed(torch.arange(4)), torch.ones(4, 8))
