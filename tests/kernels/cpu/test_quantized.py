"""Weights kept as a GGUF file packs them: exact on request, else off by no more than 8-bit activations explain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import WeightsError
from quire.kernels.cpu import CpuOps
from quire.kernels.stored_rows import QuantizedRows
from tests.gguf_blocks import PACKED, QUANTIZED, random_rows, unpacked


def new_linear(ops, rows, *, exact=False, bias=None):
    """A packed matrix of the fixture's instruction set and threads."""
    ops.exact = exact
    linear = ops.new_linear(*rows.shape, bias=bias is not None)
    linear.load_rows(0, rows)
    if bias is not None:
        linear.load_bias(0, bias)
    return linear


def plain_linear(ops, weight):
    linear = ops.new_linear(*weight.shape)
    linear.load_rows(0, weight)
    return linear


def activations(num_rows, width, seed=1):
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    x[:, width // 3] *= 40  # an outlier, as real activations have them
    return x


def eight_bits(x):
    """What a product takes for x: 127 steps to the largest of each 32."""
    runs = x.reshape(len(x), -1, 32)
    scale = runs.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scale > 0, runs / scale, 0).round() * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", PACKED)
def test_exact_products_are_those_of_the_unpacked_matrix_bit_for_bit(ops, kind):
    rows = random_rows(kind, 70, 512)
    packed, plain = new_linear(ops, rows, exact=True), plain_linear(ops, unpacked(rows))
    for num_rows in (1, 2, 7, 13, 41):
        x = activations(num_rows, 512)
        assert torch.equal(packed.multiply(x), plain.multiply(x))


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("n", "num_blocks"), [(64, 1), (39, 3)])
def test_products_by_8_bits_differ_by_the_rounding_alone(ops, kind, n, num_blocks):
    width = QUANTIZED[kind].block_values * num_blocks
    rows = random_rows(kind, n, width)
    packed, weight = new_linear(ops, rows, bias=torch.linspace(-1, 1, n)), unpacked(rows).double()
    for num_rows in (1, 2, 3, 5, 6, 7, 13, 41):
        x = activations(num_rows, width)
        expected = eight_bits(x).double() @ weight.T + torch.linspace(-1, 1, n)
        torch.testing.assert_close(
            packed.multiply(x).double(), expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item()
        )


@pytest.mark.parametrize("kind", PACKED)
def test_a_row_does_not_depend_on_its_neighbours(ops, kind):
    packed = new_linear(ops, random_rows(kind, 80, 768))
    x = activations(200, 768)
    together = packed.multiply(x)
    for first, last in ((0, 1), (17, 19), (60, 63), (70, 74), (39, 44), (90, 96), (150, 200)):
        assert torch.equal(packed.multiply(x[first:last]), together[first:last])


@pytest.mark.parametrize("kind", PACKED)
def test_embedding_is_the_packages_numbers(ops, kind):
    rows = random_rows(kind, 70, 256)
    packed, ids = new_linear(ops, rows), torch.tensor([0, 69, 33, 5])
    assert torch.equal(packed.embed(ids), unpacked(rows)[ids])
    assert torch.equal(packed.embed(ids, 3.0), unpacked(rows)[ids] * 3.0)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_take_about_what_the_file_does(ops, kind):
    rows = random_rows(kind, 96, 1024)
    assert new_linear(ops, rows).nbytes <= 1.2 * rows.blocks.nbytes
    if kind != "Q2_K":
        assert new_linear(ops, rows).nbytes <= 1.04 * rows.blocks.nbytes


@pytest.mark.parametrize("exact", [False, True])
def test_parts_of_a_fused_matrix_may_have_different_types(ops, exact):
    """As q, k and v of a Q4_K_M file do; 40 rows are no whole number of panels."""
    ops.exact = exact
    parts = [random_rows(kind, 40, 256, seed=i) for i, kind in enumerate(("Q4_K", "Q6_K", "Q8_0"))]
    fused = ops.new_linear(120, 256, bias=True)
    for i in (2, 0, 1):
        fused.load_rows(40 * i, parts[i])
    fused.load_bias(0, torch.linspace(-1, 1, 120))
    assert sorted(fused.kinds) == ["Q4_K", "Q6_K", "Q8_0"]
    assert torch.equal(fused.embed(torch.arange(120)), torch.cat([unpacked(part) for part in parts]))
    for num_rows in (1, 9):
        x = activations(num_rows, 256)
        apart = torch.cat([new_linear(ops, part, exact=exact).multiply(x) for part in parts], dim=1)
        torch.testing.assert_close(fused.multiply(x), apart + torch.linspace(-1, 1, 120), rtol=1e-6, atol=1e-4)


def test_parts_may_be_loaded_again(ops):
    first, second = (random_rows("Q5_K", 40, 256, seed=seed) for seed in range(2))
    packed = new_linear(ops, first)
    packed.load_rows(0, second)
    assert torch.equal(packed.embed(torch.arange(40)), unpacked(second))
    assert packed.kinds == ("Q5_K",)


def test_plain_rows_beside_packed_ones_unpack_these(ops):
    parts = [random_rows(kind, 40, 64, seed=i) for i, kind in enumerate(("Q5_0", "Q4_1"))]
    fused = ops.new_linear(90, 64)
    for i, part in enumerate(parts):
        fused.load_rows(40 * i, part)
    plain = torch.randn(10, 64, generator=torch.Generator().manual_seed(4))
    fused.load_rows(80, plain)
    everything = torch.cat([*(unpacked(part) for part in parts), plain])
    assert fused.kinds == ("float32",)
    assert torch.equal(fused.embed(torch.arange(90)), everything)
    fused.load_rows(0, parts[1])  # and those that come later
    assert torch.equal(fused.embed(torch.arange(40)), unpacked(parts[1]))


@pytest.mark.parametrize("kind", PACKED)
def test_a_part_of_a_packed_matrix_stays_packed(ops, kind):
    """Rows where a product's outputs are split, columns where its inputs are."""
    rows = random_rows(kind, 50, 768)
    part = ops.new_linear(20, 512)
    part.load_rows(0, rows, rows=slice(30, 50), columns=slice(256, 768))
    assert part.kinds == (kind,)
    assert torch.equal(part.embed(torch.arange(20)), unpacked(rows)[30:50, 256:768])


def test_columns_that_cut_a_block_are_refused_with_what_fits(ops):
    with pytest.raises(WeightsError, match=r"columns 0 to 384 .* Q4_K .* block of 256.* 6 blocks .* 1, 2, 3, 6 dev"):
        ops.new_linear(8, 384).load_rows(0, random_rows("Q4_K", 8, 1536), columns=slice(0, 384))


def test_narrow_weights_are_never_kept_so(ops):
    narrow, rows = CpuOps("bfloat16", isa=ops.isa).new_linear(32, 32), random_rows("Q4_1", 32, 32)
    assert ops.new_linear(32, 32).keeps_quantized and not narrow.keeps_quantized
    narrow.load_rows(0, rows)
    assert torch.equal(narrow.embed(torch.arange(32)), unpacked(rows).bfloat16().float())


def test_rows_of_a_type_without_a_kernel_are_unpacked(ops):
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    rows = QuantizedRows("IQ4_NL", np.zeros((2, 1, 18), np.uint8), 32, lambda blocks: values)
    linear = new_linear(ops, rows)
    assert linear.kinds == ("float32",)
    assert torch.equal(linear.embed(torch.arange(2)), torch.from_numpy(values))
