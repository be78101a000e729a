"""Products of 8-bit floats, and the kernels between them, against the same in float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec, Float8Rows, Norm, Quantized, Rotary
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps, fp8_linear

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
