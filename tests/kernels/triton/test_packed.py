"""Products with matrices in 4 and 8 bits, in every layout, against the same in float64."""

from __future__ import annotations

import pytest
import torch
from integer_checkpoints import FORMATS

from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary, Unscaled
from quire.kernels.reference import ReferenceOps
from quire.kernels.stored_rows import IntegerRows, PackedLayout
from quire.kernels.triton import TritonOps, packed_linear
from tests.gguf_blocks import random_rows, unpacked

LAYOUT = PackedLayout(4, 32, has_offsets=True, has_order=False)
FEW, MANY = 3, 70  # rows multiplied by an own kernel; and by a library, from a copy in 16 bits


@pytest.fixture
def ops(device):
    return TritonOps(device, torch.bfloat16, packed=LAYOUT)


@pytest.fixture
def oracle(device):
    return ReferenceOps(device, torch.float64)


def stored(kind, rows, columns):
    quantized = FORMATS[kind].quantized(torch.randn(rows, columns) * 0.1)
    zeros = None if FORMATS[kind].symmetric else quantized.zeros.short()
    groups = quantized.groups if FORMATS[kind].shuffled else None
    codes = quantized.codes.to(torch.uint8)
    return IntegerRows(codes, quantized.scales, zeros, quantized.bits, FORMATS[kind].group or columns, groups)


def twins(ops, oracle, rows, columns, kind="awq", *, bias=False):
    weight, twin = (each.new_linear(rows, columns, bias=bias) for each in (ops, oracle))
    matrix = stored(kind, rows, columns)
    weight.load_rows(0, matrix)
    twin.load_rows(0, matrix.unpacked())
    if bias:
        noise = torch.randn(rows)
        weight.load_bias(0, noise)
        twin.load_bias(0, noise)
    return weight, twin


def normal(*shape, device):
    return torch.randn(*shape, device=device).bfloat16()


def close(out, expected, tolerance=0.01):
    return torch.isfinite(out).all() and (out.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 20, MANY])
def test_products_of_every_format(ops, oracle, device, kind, num_rows):
    weight, twin = twins(ops, oracle, 72, 256, kind, bias=True)
    assert weight.nbytes < 72 * 256 * 2
    x = normal(num_rows, 256, device=device)
    assert close(weight.multiply(x), twin.multiply(x.double()))


def test_products_divided_along_the_columns(ops, oracle, device, monkeypatch):
    config = packed_linear.PackedConfig(tile_n=64, num_warps=4, num_stages=2, split_k=3)
    monkeypatch.setattr(packed_linear, "packed_config", lambda rows, n, k: config)
    weight, twin = twins(ops, oracle, 100, 640, "gptq desc_act")
    for _ in range(2):  # arrivals are zero again after the first
        x = normal(5, 640, device=device)
        assert close(weight.multiply(x), twin.multiply(x.double()))


def test_no_weight_is_rounded_where_rows_are_few(ops, device):
    weight = ops.new_linear(64, 64)
    matrix = stored("gptq zeros", 64, 64)
    weight.load_rows(0, matrix)
    out = torch.empty(64, 64, device=device)
    config = packed_linear.packed_config(64, 64, 64)
    weight._launch(torch.eye(64, device=device).bfloat16(), out, None, config, mode=0)
    assert torch.allclose(out.T.cpu(), matrix.unpacked(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_rows", [1, FEW, 40, MANY])
def test_what_follows_a_product(ops, oracle, device, num_rows):
    weight, twin = twins(ops, oracle, 128, 192)
    x, norm = normal(num_rows, 192, device=device), Norm(torch.rand(128, device=device) + 0.5, 1e-5)
    wide_norm = Norm(norm.weight.double(), 1e-5)
    residual = normal(num_rows, 128, device=device)
    wide_residual = residual.double()
    normed = weight.multiply_add_norm(x, residual, norm)
    expected = twin.multiply_add_norm(x.double(), wide_residual, wide_norm)
    assert close(residual, wide_residual)
    assert isinstance(normed, Unscaled) == (1 < num_rows <= 32)
    following, following_twin = twins(ops, oracle, 96, 128, "gptq 8")
    gated = following.multiply_act(normed, "silu")
    assert close(gated, following_twin.multiply_act(expected, "silu"), 0.02)


@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_rotation_and_the_cache(ops, oracle, device, num_rows):
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, scale=0.125)
    weight, twin = twins(ops, oracle, 4 * 64, 128, "packed")
    x = normal(num_rows, 128, device=device)
    positions = torch.arange(num_rows, device=device)
    starts = torch.tensor([0, num_rows], dtype=torch.int32, device=device)
    lengths, tables = starts[1:], torch.zeros(1, 1, dtype=torch.int32, device=device)
    batch = AttentionBatch(positions, positions, starts, lengths, tables, num_rows, num_rows, 0)
    rotary = Rotary(torch.randn(128, 64, device=device))
    caches = [torch.zeros(8, 2, 1, 16, 64, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    q = weight.multiply_rope_write(x, rotary, caches[0], batch, spec)
    expected = twin.multiply_rope_write(x.double(), rotary, caches[1], batch, spec)
    assert close(q, expected) and close(caches[0], caches[1])


def test_parts_of_a_fused_matrix_come_to_one_layout(ops, oracle, device):
    weight, twin = (each.new_linear(160, 128) for each in (ops, oracle))
    for first_row, kind in ((0, "gptq"), (64, "gptq zeros"), (128, "gptq 8")):
        matrix = stored(kind, 32 if kind == "gptq 8" else 64, 128)
        weight.load_rows(first_row, matrix)
        twin.load_rows(first_row, matrix.unpacked())
    assert weight._matrix.layout == PackedLayout(8, 32, has_offsets=True, has_order=False)
    for num_rows in (FEW, MANY):
        x = normal(num_rows, 128, device=device)
        assert close(weight.multiply(x), twin.multiply(x.double()))


@pytest.mark.parametrize(
    "kinds", [("Q4_0",), ("Q8_0",), ("Q4_K",), ("Q6_K",), ("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q5_K")]
)
def test_blocks_of_a_gguf_file(ops, oracle, device, kinds):
    weight, twin = (each.new_linear(64 * len(kinds), 512) for each in (ops, oracle))
    for number, kind in enumerate(kinds):
        rows = random_rows(kind, 64, 512)
        weight.load_rows(64 * number, rows)
        twin.load_rows(64 * number, unpacked(rows))
    assert (weight._matrix is None) == ("Q5_K" in kinds)
    for num_rows in (FEW, MANY):
        x = normal(num_rows, 512, device=device)
        assert close(weight.multiply(x), twin.multiply(x.double()))


def test_a_matrix_some_of_whose_rows_have_16_bits_is_dense(ops, oracle, device):
    weight, twin = (each.new_linear(96, 128) for each in (ops, oracle))
    matrix, plain = stored("awq", 64, 128), torch.randn(32, 128)
    for each, rows in ((weight, matrix), (twin, matrix.unpacked())):
        each.load_rows(0, rows)
        each.load_rows(64, plain)
    norm = Norm(torch.rand(128, device=device) + 0.5, 1e-5)
    assert weight.fold_norm(norm).is_folded
    x = normal(MANY, 128, device=device)
    assert weight.nbytes == 96 * 128 * 2 and weight.multiply(x).shape == (MANY, 96)


def test_dummy_weights(ops):
    weight = ops.new_linear(64, 128, bias=True)
    weight.randomize(0.02, 7)
    wide = packed_linear.widen_matrix(weight._matrix, torch.empty(64, 128, dtype=torch.bfloat16, device=ops.device))
    assert 0.015 < wide.float().std() < 0.025
