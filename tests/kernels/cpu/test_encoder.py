"""Encoders' kernels against plain torch: packed attention, LayerNorm and exact gelu."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.interface import AttentionSpec, Norm, PackedBatch
from quire.kernels.packed import packed_attention


@pytest.mark.parametrize(("heads", "dim"), [(3, 32), (2, 64), (1, 16), (2, 40)])
def test_packed_attention(ops, heads, dim):
    lengths = [1, 5, 64, 65, 193, 400]  # around the tiles of keys and of queries
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    batch = PackedBatch(lengths, starts)
    spec = AttentionSpec(heads, heads, dim, dim**-0.5)
    qkv = torch.randn(sum(lengths), 3 * heads * dim) * 2
    expected = packed_attention(qkv.double(), batch, spec).float()
    torch.testing.assert_close(ops.packed_attention(qkv, batch, spec), expected, rtol=1e-4, atol=1e-5)
    # A sequence sees nothing of those beside it.
    first, last = lengths[0] + lengths[1], sum(lengths[:3])
    alone = PackedBatch(lengths[2:3], torch.tensor([0, lengths[2]], dtype=torch.int32))
    found = ops.packed_attention(qkv[first:last].contiguous(), alone, spec)
    assert torch.equal(found, ops.packed_attention(qkv, batch, spec)[first:last])


@pytest.mark.parametrize("shape", [(1, 384), (3, 1), (5, 33), (100, 576)], ids=str)
def test_layer_norm(ops, shape):
    x, residual = torch.randn(shape) + 3, torch.randn(shape)
    norm = Norm(torch.randn(shape[1]), 1e-12, bias=torch.randn(shape[1]))

    def exact(rows):
        return F.layer_norm(rows, shape[1:], norm.weight, norm.bias, norm.eps)

    torch.testing.assert_close(ops.normalize(x, norm), exact(x), rtol=1e-4, atol=1e-5)
    expected = residual + x
    torch.testing.assert_close(ops.add_norm(x, residual, norm), exact(expected), rtol=1e-4, atol=1e-5)
    assert torch.equal(residual, expected)


def test_gelu(ops):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -88.0, 88.0, 1e4])])
    expected = F.gelu(x.double()).float()
    as_products = ops.new_linear(len(x), 1)  # of 1: the numbers themselves
    as_products.load_rows(0, x[:, None])
    got = as_products.multiply_activate(torch.ones(1, 1), "gelu")[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
