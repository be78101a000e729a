"""Weights kept as a quantized file holds them multiply exactly as the numbers that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.interface import QUANTIZED_BLOCK, QuantizedRows


def random_rows(num_rows, width, *, has_minima, has_4_bits=False, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128 if not has_minima else 0, 128 if not has_minima else 16, (num_rows, width), np.int8)
    shape = (num_rows, width // QUANTIZED_BLOCK)
    scales, minima = (rng.normal(0, 0.1, shape).astype(np.float16).astype(np.float32) for _ in range(2))
    return QuantizedRows(codes, scales, minima if has_minima else None, has_4_bits=has_minima and has_4_bits)


def unpacked(rows):
    """As unpacking the file does it: a product, then a sum, each rounded to float32."""
    values = rows.codes.astype(np.float32) * np.repeat(rows.scales, QUANTIZED_BLOCK, axis=1)
    if rows.minima is not None:
        values = values + np.repeat(rows.minima, QUANTIZED_BLOCK, axis=1)
    return torch.from_numpy(values)


@pytest.mark.parametrize(("has_minima", "has_4_bits"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("n", "k"), [(64, 32), (96, 576), (50, 1536), (7, 64)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 41])
def test_equals_the_unpacked_matrix_bit_for_bit(ops, has_minima, has_4_bits, n, k, num_rows):
    rows = random_rows(n, k, has_minima=has_minima, has_4_bits=has_4_bits)
    packed, plain = ops.new_linear(n, k), ops.new_linear(n, k)
    assert packed.load_quantized(0, rows)
    plain.load_rows(0, unpacked(rows))
    x = torch.randn(num_rows, k, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.linear(x, packed), ops.linear(x, plain))
    assert packed.nbytes < plain.nbytes / 3


def test_a_row_does_not_depend_on_its_neighbours(ops):
    packed = ops.new_linear(80, 640)
    packed.load_quantized(0, random_rows(80, 640, has_minima=True))
    x = torch.randn(40, 640, generator=torch.Generator().manual_seed(2))
    together = ops.linear(x, packed)
    for row in (0, 17, 39):
        assert torch.equal(ops.linear(x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize(("has_minima", "has_4_bits"), [(False, False), (True, False), (True, True)])
def test_embedding_and_bias(ops, has_minima, has_4_bits):
    rows = random_rows(70, 96, has_minima=has_minima, has_4_bits=has_4_bits)
    packed = ops.new_linear(70, 96, bias=True)
    packed.load_quantized(0, rows)
    bias = torch.linspace(-1, 1, 70)
    packed.load_bias(0, bias)
    ids = torch.tensor([0, 69, 33, 5])
    assert torch.equal(ops.embed(ids, packed), unpacked(rows)[ids])
    assert torch.equal(ops.embed(ids, packed, 3.0), unpacked(rows)[ids] * 3.0)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(ops.linear(x, packed), x @ unpacked(rows).T + bias, atol=1e-4)


def test_parts_of_a_fused_matrix_may_differ(ops):
    """Two tensors of one kind, then one without minima, then plain numbers: each is found as it was given."""
    parts = [random_rows(40, 64, has_minima=has, seed=i) for i, has in enumerate((True, True, False))]
    fused = ops.new_linear(130, 64)
    for i, part in enumerate(parts):
        assert fused.load_quantized(40 * i, part)
    everything = [unpacked(part) for part in parts]
    ids = torch.arange(120)
    assert torch.equal(ops.embed(ids, fused), torch.cat(everything))
    plain = torch.randn(10, 64, generator=torch.Generator().manual_seed(4))
    fused.load_rows(120, plain)
    assert torch.equal(ops.embed(torch.arange(130), fused), torch.cat([*everything, plain]))


def test_minima_after_none_ask_to_be_unpacked(ops):
    fused = ops.new_linear(64, 32)
    assert fused.load_quantized(0, random_rows(32, 32, has_minima=False))
    assert not fused.load_quantized(32, random_rows(32, 32, has_minima=True))


def test_more_bits_after_four_ask_to_be_unpacked(ops):
    fused = ops.new_linear(64, 32)
    assert fused.load_quantized(0, random_rows(32, 32, has_minima=True, has_4_bits=True))
    assert not fused.load_quantized(32, random_rows(32, 32, has_minima=True))


def test_narrow_weights_are_never_kept_so(ops):
    from quire.kernels.cpu import CpuOps

    assert not CpuOps("bfloat16", isa=ops.isa).new_linear(32, 32).keeps_quantized
    assert not ops.new_linear(32, 48).keeps_quantized
