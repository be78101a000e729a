"""Linear layers: packing, products, embedding and logits against the reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import ReferenceOps

SHAPES = [(96, 64), (1, 1), (33, 7), (50, 641), (130, 1537)]
ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 24, 97, 193)
# Of weights of about 1: what rounding to the type, or int8's step of a 127th of the row's largest, may cost.
WEIGHT_ERROR = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10, "int8": 0.02}


def _pair(ops, weight, bias=None):
    """The same matrix in both backends, its rows in three uneven pieces."""
    out_features, in_features = weight.shape
    reference = ReferenceOps("cpu", torch.float32)
    pair = []
    for backend in (ops, reference):
        linear = backend.new_linear(out_features, in_features, bias=bias is not None)
        first, second = out_features // 3, out_features // 3 * 2 + 1
        for start, stop in ((second, out_features), (0, first), (first, second)):
            if start < stop:
                linear.load_rows(start, weight[start:stop])
                if bias is not None:
                    linear.load_bias(start, bias[start:stop])
        pair.append(linear)
    return pair[0], pair[1]


def _close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_float32_linear_matches_the_reference(ops, shape, bias):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    ours, theirs = _pair(ops, weight, torch.randn(shape[0]) if bias else None)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        _close(ours.multiply(x), theirs.multiply(x))


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("bias", [False, True])
def test_narrow_weights_multiply_exactly_what_they_hold(ops, weight_dtype, bias):
    torch.manual_seed(1)
    ops.weight_dtype = weight_dtype
    for shape in SHAPES:
        weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
        ours, _ = _pair(ops, weight, offset)
        held = ours.embed(torch.arange(shape[0]))
        assert (held - weight).abs().max() <= WEIGHT_ERROR[weight_dtype] * weight.abs().max()
        _, theirs = _pair(ops, held, offset)
        for rows in ROWS:
            x = torch.randn(rows, shape[1])
            _close(ours.multiply(x), theirs.multiply(x))


@pytest.mark.parametrize("weight_dtype", list(WEIGHT_ERROR))
def test_a_row_does_not_depend_on_its_neighbours(ops, weight_dtype):
    torch.manual_seed(2)
    ops.weight_dtype = weight_dtype
    ours, _ = _pair(ops, torch.randn(100, 1300), torch.randn(100))
    x = torch.randn(200, 1300)
    together = ours.multiply(x)
    assert torch.equal(together[:1], ours.multiply(x[:1]))
    assert torch.equal(together[60:63], ours.multiply(x[60:63]))
    assert torch.equal(together[100:], ours.multiply(x[100:]))


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even(ops, weight_dtype):
    torch.manual_seed(3)
    ops.weight_dtype = weight_dtype
    dtype = getattr(torch, weight_dtype)
    weight = torch.randn(40, 64)
    weight[0, :8] = torch.tensor([0.0, -0.0, 1e-8, -6e-8, 3e-5, 65519.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9])
    ours, _ = _pair(ops, weight)
    assert torch.equal(ours.embed(torch.arange(40)), weight.to(dtype).float())


def test_embed_reads_rows_in_any_order_and_scales(ops):
    weight = torch.randn(70, 48)
    ours, theirs = _pair(ops, weight)
    ids = torch.tensor([69, 0, 31, 32, 31])
    assert torch.equal(ours.embed(ids), theirs.embed(ids))
    _close(ours.embed(ids, scale=3.5), theirs.embed(ids, scale=3.5))
    assert ours.embed(ids[:0]).shape == (0, 48)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logits(ops, softcap):
    weight, hidden = torch.randn(1000, 48), torch.randn(3, 48)
    hidden[1] *= 1e-3  # where a careless tanh loses its digits
    ours, theirs = _pair(ops, weight)
    actual, expected = ours.logits(hidden, softcap), theirs.logits(hidden, softcap)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-8)


def test_rows_of_any_dtype_and_stride_load_and_multiply(ops):
    weight = torch.randn(64, 40).bfloat16()
    linear = ops.new_linear(40, 64)
    linear.load_rows(0, weight.T)
    assert torch.equal(linear.embed(torch.arange(40)), weight.T.float())
    x = torch.randn(10, 128)[::2, ::2]
    _close(linear.multiply(x), x @ weight.float())


def test_no_rows_is_no_work(ops):
    linear = ops.new_linear(40, 64)
    assert linear.multiply(torch.empty(0, 64)).shape == (0, 40)


def test_randomize_is_normal_and_repeatable(ops):
    first, second, other = (ops.new_linear(300, 200) for _ in range(3))
    first.randomize(0.02, seed=1)
    second.randomize(0.02, seed=1)
    other.randomize(0.02, seed=2)
    rows = [linear.embed(torch.arange(300)) for linear in (first, second, other)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    assert abs(rows[0].std().item() - 0.02) < 1e-3 and abs(rows[0].mean().item()) < 1e-3


def test_nbytes_counts_what_is_held(ops):
    def nbytes(out_features, in_features):
        linear = ops.new_linear(out_features, in_features)
        linear.randomize(0.02, seed=1)
        return linear.nbytes

    columns = nbytes(1, 1) // 4
    assert columns > 1 and nbytes(2 * columns, 10) == 2 * columns * 10 * 4
    ops.weight_dtype = "bfloat16"
    assert nbytes(2 * columns, 10) == 2 * columns * 10 * 2


def test_int8_zero_row_stays_zero(ops):
    ops.weight_dtype = "int8"
    linear = ops.new_linear(3, 16)
    linear.load_rows(0, torch.zeros(3, 16))
    assert torch.equal(linear.multiply(torch.randn(2, 16)), torch.zeros(2, 3))
