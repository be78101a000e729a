from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary, Unscaled
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton.configs import SkinnyConfig, skinny_config
from quire.kernels.triton.skinny import (
    SkinnyScratch,
    can_rope,
    skinny_act,
    skinny_add_norm,
    skinny_linear,
    skinny_rope_write,
)

VECTOR = SkinnyConfig(False, tile_n=8, tile_k=64, num_warps=4, num_stages=1, unroll=2)
TILE = SkinnyConfig(True, tile_n=16, tile_k=64, num_warps=4, num_stages=3)
SPLIT = SkinnyConfig(True, tile_n=16, tile_k=64, num_warps=4, num_stages=3, split_k=3)
CASES = [(TILE, 1), (TILE, 3), (TILE, 16), (SPLIT, 2), (SPLIT, 8)]
cases = pytest.mark.parametrize(
    ("config", "rows"), CASES, ids=lambda v: v if isinstance(v, int) else f"split{v.split_k}"
)
cases_and_one_row = pytest.mark.parametrize(
    ("config", "rows", "is_scaled"),
    [(VECTOR, 1, True), *((*case, is_scaled) for case in CASES for is_scaled in (0, 1))],
)


def close(out, expected, tolerance=1e-2):
    return torch.isfinite(out.float()).all() and (out.double() - expected).norm() <= tolerance * expected.norm()


def normal(*shape, device, dtype=torch.bfloat16):
    return torch.randn(*shape, device=device).to(dtype)


def unscaled(rows, width, device, parts=5):
    """A residual stream, the same as a product gets it, and normalised by the reference."""
    residual = normal(rows, width, device=device)
    norm = torch.randn(width, device=device)
    cuts = [part.square().sum(1) for part in residual.float().tensor_split(parts, dim=1)]
    x = Unscaled((residual.float() * norm).bfloat16(), torch.stack(cuts), 1e-5)
    return x, ReferenceOps(device, torch.float64).normalize(residual.double(), Norm(norm, 1e-5))


@cases
@pytest.mark.parametrize(("n", "k"), [(64, 256), (50, 176)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_products(rows, config, n, k, has_bias, is_scaled, device):
    x = expected_x = normal(rows, k, device=device)
    if not is_scaled:
        x, expected_x = unscaled(rows, k, device)
    weight = normal(n, k, device=device)
    bias = normal(n, device=device) if has_bias else None
    expected = expected_x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scratch = SkinnyScratch.allocate(64, device)
    for _ in range(2):  # the second run finds the arrival counters as the first one left them
        out = skinny_linear(x, weight, bias, config, scratch)
        assert out.dtype == torch.bfloat16
        assert close(out, expected)
        assert not scratch.arrivals.any()
    out = torch.full((rows, n), float("nan"), device=device)
    wide = skinny_linear(x, weight, bias, config, scratch, out=out)
    assert close(wide, expected, 1e-5 if is_scaled else 5e-3)


@pytest.mark.parametrize(("n", "k"), [(64, 256), (50, 176)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_row(n, k, has_bias, device):
    x, weight = normal(1, k, device=device), normal(n, k, device=device)
    bias = normal(n, device=device) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scratch = SkinnyScratch.allocate(8, device)
    assert close(skinny_linear(x, weight, bias, VECTOR, scratch), expected)
    out = torch.full((1, n), float("nan"), device=device)
    assert close(skinny_linear(x, weight, bias, VECTOR, scratch, out=out), expected, 1e-5)


def test_plain_multiplication_is_for_one_plain_row(device):
    scratch = SkinnyScratch.allocate(8, device)
    with pytest.raises(AssertionError, match="one plain row"):
        skinny_linear(normal(2, 64, device=device), normal(8, 64, device=device), None, VECTOR, scratch)
    with pytest.raises(AssertionError, match="one plain row"):
        skinny_act(unscaled(1, 64, device)[0], normal(8, 64, device=device), None, "silu", VECTOR, scratch)


def test_float32_of_one_row_keeps_its_digits(device):
    x, weight = normal(1, 176, device=device, dtype=torch.float32), normal(50, 176, device=device, dtype=torch.float32)
    out = skinny_linear(x, weight, None, VECTOR, SkinnyScratch.allocate(8, device))
    assert close(out, x.double() @ weight.double().T, 1e-6)


@cases
@pytest.mark.parametrize("n", [64, 52])
@pytest.mark.parametrize("has_bias", [False, True])
def test_residual_and_norm(rows, config, n, has_bias, device):
    x, weight = normal(rows, 176, device=device), normal(n, 176, device=device)
    bias = normal(n, device=device) if has_bias else None
    residual, norm = normal(rows, n, device=device), torch.randn(n, device=device)
    total = residual.double() + x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scratch = SkinnyScratch.allocate(64, device)
    out = skinny_add_norm(x, weight, bias, residual, Norm(norm, 1e-5), config, scratch)
    assert close(residual, total)
    rms = torch.rsqrt(out.square_sums.double().sum(0) / n + out.eps)
    assert close(
        out.x.double() * rms[:, None],
        ReferenceOps(device, torch.float64).normalize(residual.double(), Norm(norm, 1e-5)),
    )

    before = residual.clone()
    assert skinny_add_norm(x, weight, bias, residual, None, config, scratch) is residual
    assert close(residual, before.double() + x.double() @ weight.double().T
                 + (0 if bias is None else bias.double()))  # fmt: skip


@cases_and_one_row
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("half", [64, 44])
def test_gating(rows, config, is_scaled, activation, half, device):
    x = expected_x = normal(rows, 176, device=device)
    if not is_scaled:
        x, expected_x = unscaled(rows, 176, device)
    weight, bias = normal(2 * half, 176, device=device) * 0.2, normal(2 * half, device=device)
    out = skinny_act(x, weight, bias, activation, config, SkinnyScratch.allocate(64, device))
    gate, up = nn.functional.linear(expected_x.double(), weight.double(), bias.double()).chunk(2, dim=1)
    gate = nn.functional.silu(gate) if activation == "silu" else nn.functional.gelu(gate, approximate="tanh")
    assert out.shape == (rows, half)
    assert close(out, gate * up)


@cases_and_one_row
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rotation_and_kv_write(rows, config, is_scaled, kv_dtype, device):
    scales = {}
    if kv_dtype.itemsize == 1:
        scales = {"k_scale": 0.125, "v_scale": 0.25, "k_offset": torch.randn(2, 32, device=device)}
    spec = AttentionSpec(num_heads=3, num_kv_heads=2, head_dim=32, scale=1.0, **scales)
    slots = torch.randperm(24, device=device)[:rows]
    if rows > 2:
        slots[1] = -1  # only pads the batch
    batch = AttentionBatch(
        positions=torch.randint(0, 100, (rows,), device=device),
        slots=slots,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(rows, 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_kv_len=1,
        num_decodes=rows,
    )
    x = expected_x = normal(rows, 176, device=device)
    if not is_scaled:
        x, expected_x = unscaled(rows, 176, device)
    weight, bias = normal(7 * 32, 176, device=device) * 0.1, normal(7 * 32, device=device)
    cos_sin = torch.randn(100, 32, device=device)
    kv = torch.full((6, 2, 2, 4, 32), 7.0, device=device).to(kv_dtype)
    expected_kv = torch.full((6, 2, 2, 4, 32), 7.0, device=device, dtype=torch.float64)
    q = skinny_rope_write(x, weight, bias, Rotary(cos_sin), kv, batch, spec, config, SkinnyScratch.allocate(64, device))
    qkv = nn.functional.linear(expected_x.double(), weight.double(), bias.double())
    oracle = ReferenceOps(device, torch.float64)
    spare = torch.cat((expected_kv, expected_kv[:1]))  # the reference writes padding rows too: here
    batch.slots = torch.where(slots < 0, 24, slots)
    expected = oracle.rope_and_write(qkv, Rotary(cos_sin.double()), spare, batch, spec)
    assert close(q, expected)
    assert close(kv, spare[:6], 1e-2 if kv_dtype == torch.bfloat16 else 4e-2)
    assert (kv.float()[spare[:6] == 7.0] == 7.0).all()


def test_a_strip_lies_within_half_a_head():
    assert can_rope(AttentionSpec(4, 2, 128, 1.0), SkinnyConfig(True, 64, 128, 4, 4))
    assert not can_rope(AttentionSpec(4, 2, 96, 1.0), SkinnyConfig(True, 64, 128, 4, 4))


def test_the_table_leaves_many_rows_and_wide_products_to_cublas():
    assert skinny_config(33, 4096, 4096) is None
    assert skinny_config(2, 4096, 4096, 4) is None
    assert not skinny_config(1, 4096, 4096, 4).use_tensor_cores
    assert skinny_config(16, 4096, 4096).split_k == 4
    assert skinny_config(16, 6144, 4096).split_k == 1
