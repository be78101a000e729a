"""Weights kept as a quantized file holds them multiply exactly as the numbers that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import WeightsError
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
    packed.load_rows(0, rows)
    plain.load_rows(0, unpacked(rows))
    x = torch.randn(num_rows, k, generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed.multiply(x), plain.multiply(x))
    assert packed.nbytes < plain.nbytes / 3


def test_a_row_does_not_depend_on_its_neighbours(ops):
    packed = ops.new_linear(80, 640)
    packed.load_rows(0, random_rows(80, 640, has_minima=True))
    x = torch.randn(40, 640, generator=torch.Generator().manual_seed(2))
    together = packed.multiply(x)
    for row in (0, 17, 39):
        assert torch.equal(packed.multiply(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(("has_minima", "has_4_bits"), [(False, False), (True, False), (True, True)])
def test_embedding_and_bias(ops, has_minima, has_4_bits):
    rows = random_rows(70, 96, has_minima=has_minima, has_4_bits=has_4_bits)
    packed = ops.new_linear(70, 96, bias=True)
    packed.load_rows(0, rows)
    bias = torch.linspace(-1, 1, 70)
    packed.load_bias(0, bias)
    ids = torch.tensor([0, 69, 33, 5])
    assert torch.equal(packed.embed(ids), unpacked(rows)[ids])
    assert torch.equal(packed.embed(ids, 3.0), unpacked(rows)[ids] * 3.0)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(packed.multiply(x), x @ unpacked(rows).T + bias, atol=1e-4)


def test_parts_of_a_fused_matrix_may_differ(ops):
    """Two tensors of one kind, then one without minima, then plain numbers: each is found as it was given."""
    parts = [random_rows(40, 64, has_minima=has, seed=i) for i, has in enumerate((True, True, False))]
    fused = ops.new_linear(130, 64)
    for i, part in enumerate(parts):
        fused.load_rows(40 * i, part)
    everything = [unpacked(part) for part in parts]
    ids = torch.arange(120)
    assert torch.equal(fused.embed(ids), torch.cat(everything))
    plain = torch.randn(10, 64, generator=torch.Generator().manual_seed(4))
    fused.load_rows(120, plain)
    assert torch.equal(fused.embed(torch.arange(130)), torch.cat([*everything, plain]))


@pytest.mark.parametrize(
    ("first", "second"),
    [({"has_minima": False}, {"has_minima": True}), ({"has_minima": True, "has_4_bits": True}, {"has_minima": True})],
)
def test_parts_that_do_not_go_together_are_unpacked(ops, first, second):
    """Minima after none, and more than four bits after four."""
    parts = [random_rows(32, 64, **kind, seed=seed) for seed, kind in enumerate((first, second))]
    fused = ops.new_linear(64, 64)
    fused.load_rows(0, parts[0])
    assert fused.kind != "float32"
    fused.load_rows(32, parts[1])
    assert fused.kind == "float32"
    assert torch.equal(fused.embed(torch.arange(64)), torch.cat([unpacked(part) for part in parts]))


@pytest.mark.parametrize(("has_minima", "has_4_bits"), [(False, False), (True, False), (True, True)])
def test_a_part_of_a_packed_matrix_stays_packed(ops, has_minima, has_4_bits):
    """Rows where a product's outputs are split, columns where its inputs are."""
    rows = random_rows(50, 160, has_minima=has_minima, has_4_bits=has_4_bits)
    part = ops.new_linear(20, 96)
    part.load_rows(0, rows, rows=slice(30, 50), columns=slice(64, 160))
    assert part.kind == ("nibbles" if has_4_bits else "blocks_min" if has_minima else "blocks")
    assert torch.equal(part.embed(torch.arange(20)), unpacked(rows)[30:50, 64:160])


def test_columns_that_cut_a_block_are_refused(ops):
    rows = random_rows(8, 96, has_minima=False)
    with pytest.raises(WeightsError, match=r"columns 48 to 96 .* block of 32 .* 3 blocks among another number"):
        ops.new_linear(8, 48).load_rows(0, rows, columns=slice(48, 96))


def test_narrow_weights_are_never_kept_so(ops):
    from quire.kernels.cpu import CpuOps

    narrow, rows = CpuOps("bfloat16", isa=ops.isa).new_linear(32, 32), random_rows(32, 32, has_minima=True)
    assert ops.new_linear(32, 32).keeps_quantized and not narrow.keeps_quantized
    narrow.load_rows(0, rows)
    assert torch.equal(narrow.embed(torch.arange(32)), unpacked(rows).bfloat16().float())
