"""Products of 8-bit floats, and the kernels between them, against the same in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.adapters import AdapterBank, AdapterSite, LowRankPair
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Quantized, Rotary
from quire.kernels.reference import ReferenceOps
from quire.kernels.stored_rows import Float8Rows
from quire.kernels.triton import TritonOps, fp8_linear
from quire.parallel.linear import SummedLinear

FP8 = torch.float8_e4m3fn
FEW, MANY, SCALED = 3, 17, 20  # rows multiplied as they are; rounded first; and scaled in their product


@pytest.fixture
def ops(device):
    return TritonOps(device, torch.bfloat16, quantization="fp8")


@pytest.fixture
def oracle(device):
    return ReferenceOps(device, torch.float64)


def twins(ops, oracle, out_features, in_features, *, bias=False):
    """A matrix in 8 bits, and what it holds in the oracle's."""
    weight = ops.new_linear(out_features, in_features, bias=bias)
    weight.randomize(0.05, torch.seed() % 2**31)
    twin = oracle.new_linear(out_features, in_features, bias=bias)
    twin.load_rows(0, weight.weight.double() * weight.scales.double()[:, None])
    if bias:
        twin.load_bias(0, weight.bias)
    return weight, twin


def wide(x):
    if not isinstance(x, Quantized):
        return x.double()
    scales = 1.0 if x.scales is None else x.scales.double()[:, None]
    return x.x.double() * scales * x.factor


def close(out, expected, tolerance):
    out = wide(out)
    return torch.isfinite(out).all() and (out - expected).norm() <= tolerance * expected.norm()


def normal(*shape, device, std=1.0):
    return (torch.randn(*shape, device=device) * std).bfloat16()


def test_weights_are_rounded_a_row_at_a_time(ops, device):
    matrix = torch.randn(48, 64, device=device) * torch.logspace(-6, 6, 48, device=device)[:, None]
    weight = ops.new_linear(48, 64)
    weight.load_rows(0, matrix.cpu())
    held = weight.weight.float() * weight.scales[:, None]
    assert ((held - matrix).norm(dim=1) <= 0.04 * matrix.norm(dim=1)).all()
    assert weight.nbytes == 48 * 64 + 48 * 4
    assert not isinstance(ops.new_linear(48, 64, is_sensitive=True), type(weight))


@pytest.mark.parametrize("rows", [1, FEW, MANY])
@pytest.mark.parametrize("bias", [False, True])
def test_products(ops, oracle, rows, bias, device):
    weight, twin = twins(ops, oracle, 80, 256, bias=bias)
    x = normal(rows, 256, device=device)
    assert close(weight.multiply(x), twin.multiply(x.double()), 0.01 if rows <= FEW else 0.04)


@pytest.mark.parametrize("rows", [1, FEW, MANY, SCALED])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(ops, oracle, rows, activation, device, monkeypatch):
    monkeypatch.setattr(fp8_linear, "_MANY_ROWS", SCALED)
    up, up_twin = twins(ops, oracle, 192, 64)
    down, down_twin = twins(ops, oracle, 64, 96, bias=True)
    norm, next_norm = (Norm(torch.rand(64, device=device) + 0.5, 1e-5) for _ in range(2))
    norm, next_norm = up.fold_norm(norm), up.fold_norm(next_norm)
    residual = normal(rows, 64, device=device, std=3.0)
    expected_residual = residual.double()
    x = ops.norm(residual, norm)
    assert isinstance(x, Quantized) == (rows > FEW)
    gated = up.multiply_act(x, activation)
    expected = up_twin.multiply_act(oracle.norm(expected_residual, norm), activation)
    assert close(gated, expected, 0.01 if rows <= FEW else 0.06)
    y = down.multiply_add_norm(gated, residual, next_norm)
    expected_y = down_twin.multiply_add_norm(expected, expected_residual, next_norm)
    assert close(residual, expected_residual, 0.01 if rows <= FEW else 0.04)
    if isinstance(y, Quantized):
        assert close(y, expected_y, 0.06)
    final = residual.clone()
    assert close(down.multiply_add_norm(gated, final, None), residual.double() + down_twin.multiply(wide(gated)), 0.04)


def test_a_branch_with_a_norm_of_its_own(ops, oracle, device):
    down, twin = twins(ops, oracle, 64, 96)
    norms = [Norm(torch.rand(64, device=device) + 0.5, 1e-5, quantizes=quantizes) for quantizes in (True, False)]
    x, residual = normal(MANY, 96, device=device), normal(MANY, 64, device=device)
    expected_residual = residual.double()
    out = down.multiply_add_norm(x, residual, *norms)
    expected = twin.multiply_add_norm(x.double(), expected_residual, *norms)
    assert isinstance(out, Quantized)
    assert close(residual, expected_residual, 0.04) and close(out, expected, 0.06)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("has_norms", [False, True])
def test_attention_block(ops, oracle, rows, has_norms, device):
    """Projection, rotation, the KV write, attention over an 8-bit cache and the output projection."""
    spec = AttentionSpec(4, 2, 32, 32**-0.5, k_scale=0.05, v_scale=0.02)
    qkv, qkv_twin = twins(ops, oracle, 256, 64, bias=True)
    out, out_twin = twins(ops, oracle, 64, 128)
    rotary = Rotary(
        torch.rand(64, 32, device=device),
        torch.rand(32, device=device) if has_norms else None,
        torch.rand(32, device=device) if has_norms else None,
    )
    norm = qkv.fold_norm(Norm(torch.rand(64, device=device) + 0.5, 1e-5))
    residual = normal(rows, 64, device=device)
    expected_residual = residual.double()
    kv = torch.zeros(rows + 1, 2, 2, 16, 32, dtype=FP8, device=device)
    batch = AttentionBatch(
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slots=torch.arange(rows, device=device) * 16,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_tables=torch.arange(rows, dtype=torch.int32, device=device)[:, None],
        max_query_len=1,
        max_kv_len=1,
        num_decodes=rows,
    )
    kv_twin = kv.double()
    q = qkv.multiply_rope_write(ops.norm(residual, norm), rotary, kv, batch, spec)
    q_twin = qkv_twin.multiply_rope_write(oracle.norm(expected_residual, norm), rotary, kv_twin, batch, spec)
    assert close(q, q_twin, 0.05) and close(kv[:rows], kv_twin[:rows], 0.06)
    attended = ops.attention(q, kv, batch, spec)
    assert isinstance(attended, Quantized) == (rows > FEW)
    expected = oracle.attention(q.double(), kv.double(), batch, spec)
    assert close(attended, expected, 0.04)
    out.multiply_add_norm(attended, residual, norm)
    out_twin.multiply_add_norm(expected, expected_residual, norm)
    assert close(residual, expected_residual, 0.04)


@pytest.mark.parametrize("rows", [FEW, MANY, 33])
def test_a_layer_half_of_which_is_in_8_bits(ops, oracle, rows, device):
    """Wide before narrow and narrow before wide: each leaves the next one's rows as it takes them."""
    narrow, narrow_twin = twins(ops, oracle, 64, 96)
    dense, dense_twin = ops.new_linear(64, 96, is_sensitive=True), oracle.new_linear(64, 96)
    dense.randomize(0.05, 1)
    dense_twin.load_rows(0, dense.weight)
    for first, first_twin, new in (
        (narrow, narrow_twin, lambda: ops.new_linear(64, 64, is_sensitive=True)),
        (dense, dense_twin, lambda: ops.new_linear(64, 64)),
    ):
        second, second_twin = new(), oracle.new_linear(64, 64)
        second.load_rows(0, torch.randn(64, 64, device=device) / 8)
        held = second.weight.double() * (1.0 if second.scales is None else second.scales.double()[:, None])
        second_twin.load_rows(0, held)
        plain = Norm(torch.rand(64, device=device) + 0.5, 1e-5)
        norm = second.fold_norm(Norm(plain.weight.clone(), 1e-5))
        x, residual = normal(rows, 96, device=device), normal(rows, 64, device=device)
        expected_residual = residual.double()
        expected = first_twin.multiply_add_norm(x.double(), expected_residual, plain)
        left = first.multiply_add_norm(x, residual, norm)
        assert close(residual, expected_residual, 0.04)
        assert close(second.multiply_act(left, "silu"), second_twin.multiply_act(expected, "silu"), 0.08)
    spec = AttentionSpec(2, 1, 16, 0.25, k_scale=0.05, v_scale=0.02, leaves_wide=True)
    q, kv = normal(MANY, 32, device=device), torch.zeros(1, 2, 1, 16, 16, dtype=FP8, device=device)
    assert not isinstance(ops.attention(q, kv, decodes(MANY, device), spec), Quantized)


def decodes(rows, device):
    return AttentionBatch(
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slots=torch.zeros(rows, dtype=torch.int64, device=device),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(rows, 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_kv_len=1,
        num_decodes=rows,
    )


@pytest.mark.parametrize("rows", [1, MANY])
def test_columns_split_among_ranks_sum_to_the_whole(ops, rows, device):
    """Each has some columns of a matrix whose scales are of blocks, and of its rows' values."""
    matrix = Float8Rows(torch.randn(32, 96).to(FP8), torch.rand(2, 3) + 0.5, (16, 32))
    x, norm = normal(rows, 96, device=device), Norm(torch.rand(32, device=device) + 0.5, 1e-5, quantizes=True)
    parts = []
    for columns in (slice(0, 64), slice(64, 96)):
        part = ops.new_linear(32, columns.stop - columns.start)
        part.load_rows(0, matrix, columns=columns)
        parts.append((part, x[:, columns].contiguous()))

    class Ranks:
        def sum(self, product):
            other, its_x = parts[1]
            return product + other.multiply(its_x)

    residual = torch.zeros(rows, 32, device=device).bfloat16()
    summed = SummedLinear(parts[0][0], ops, Ranks(), adds_bias=True)
    left = summed.multiply_add_norm(parts[0][1], residual, norm)
    assert isinstance(left, Quantized) == (rows > FEW)
    assert close(residual, x.double() @ matrix.unpacked().double().to(device).T, 0.06)


def test_a_matrix_that_tensor_cores_cannot_take_is_refused(ops):
    with pytest.raises(ConfigError, match="24 x 64 cannot be in FP8"):
        ops.new_linear(24, 64)


@pytest.mark.parametrize("rows", [1, 5, MANY])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_adapters_read_rows_as_they_are(ops, rows, has_adapters, device):
    bank = AdapterBank(2, 16, device=device, dtype=torch.bfloat16, tile=ops.adapter_tile)
    up, down = (ops.new_adapted(ops.new_linear(*shape), bank) for shape in ((192, 64), (64, 96)))
    pairs, merged = {}, []
    sites = [
        AdapterSite("gate", up, 0),
        AdapterSite("up", up, 96),
        AdapterSite("d", down, 0),
    ]
    bank.allocate(sites)
    for matrix in (up, down):
        matrix.load_rows(0, torch.randn(matrix.out_features, matrix.in_features) / 8)
        merged.append((matrix.base.weight.double() * matrix.base.scales.double()[:, None]).cpu())
    for site in sites:
        num_rows = 64 if site.module == "d" else 96
        pairs[site.module] = LowRankPair(torch.randn(8, site.matrix.in_features) / 8, torch.randn(num_rows, 8), 0.5)
        if has_adapters:
            a, b, scale = pairs[site.module]
            merged[site.module == "d"][site.first_row : site.first_row + len(b)] += scale * b.double() @ a.double()
    bank.write(1, bank.pack(pairs))
    norm = up.fold_norm(Norm(torch.rand(64, device=device) + 0.5, 1e-5))
    bank.rows = None
    if has_adapters:
        bank.rows = bank.unpack_rows(torch.from_numpy(bank.pack_rows(np.full(rows, 1))).to(device), rows)
    residual = normal(rows, 64, device=device)
    expected = residual.double().cpu()
    x = ops.norm(residual, norm)
    assert isinstance(x, Quantized) == (rows == MANY and not has_adapters)
    left = down.multiply_add_norm(up.multiply_act(x, "silu"), residual, norm)
    assert isinstance(left, Quantized) == (rows == MANY and not has_adapters)
    oracle = ReferenceOps("cpu", torch.float64)
    gated = oracle.act_mul(oracle.normalize(expected, Norm(norm.weight.cpu(), 1e-5)) @ merged[0].T, "silu")
    assert close(residual.cpu(), expected + gated @ merged[1].T, 0.05)


def test_a_checkpoints_own_rows_are_kept(ops, device):
    values = torch.randn(64, 48).to(FP8)
    for scales, block in (
        (torch.rand(1, 1), (64, 48)),
        (torch.rand(64, 1), (1, 48)),
        (torch.rand(4, 3), (16, 16)),
        (torch.rand(4, 1), (16, 48)),
    ):
        matrix = Float8Rows(values, scales, block)
        expected = values.float() * scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        assert torch.equal(matrix.unpacked(), expected)
        weight = ops.new_linear(16, 32)
        weight.load_rows(0, matrix, rows=slice(24, 40), columns=slice(16, 48))
        held = (weight.weight.float() * weight.scales[:, None]).cpu()
        if scales.shape[1] == 1:
            assert torch.equal(held, expected[24:40, 16:])
            assert torch.equal(weight.weight.cpu().view(torch.uint8), values[24:40, 16:].view(torch.uint8))
        else:
            assert (held - expected[24:40, 16:]).norm() <= 0.04 * expected[24:40, 16:].norm()
        dense = ReferenceOps("cpu", torch.float32).new_linear(16, 32)
        dense.load_rows(0, matrix, rows=slice(20, 36), columns=slice(8, 40))
        assert torch.equal(dense.weight, expected[20:36, 8:40])
