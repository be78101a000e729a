"""The reference operations against formulas written out naively in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary
from quire.kernels.reference import ReferenceOps

GARBAGE_BLOCK = 1_000_000_007


def _ops(dtype=torch.float32, **options):
    return ReferenceOps("cpu", dtype, **options)


def _paged(sequences, block_size, num_kv_heads, head_dim, seed=0):
    """A batch of (kv_len, query_len), with random K and V: batch, kv, and each sequence's k and v in order."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-kv_len // block_size) for kv_len, _ in sequences) + 2
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    kv = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"))
    width = max(-(-kv_len // block_size) for kv_len, _ in sequences) + 1
    tables = torch.full((len(sequences), width), GARBAGE_BLOCK, dtype=torch.int32)
    keys, values, starts, positions, slots = [], [], [0], [], []
    for i, (kv_len, query_len) in enumerate(sequences):
        k, v = torch.randn(2, kv_len, num_kv_heads, head_dim, generator=generator)
        blocks = [free.pop() for _ in range(-(-kv_len // block_size))]
        tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(kv_len):
            kv[blocks[position // block_size], 0, :, position % block_size] = k[position]
            kv[blocks[position // block_size], 1, :, position % block_size] = v[position]
        keys.append(k)
        values.append(v)
        starts.append(starts[-1] + query_len)
        for position in range(kv_len - query_len, kv_len):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    query_lens = [query_len for _, query_len in sequences]
    batch = AttentionBatch(
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor([kv_len for kv_len, _ in sequences], dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(query_lens),
        max_kv_len=max(kv_len for kv_len, _ in sequences),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
    )
    return batch, kv, keys, values


def _naive_attention(q, batch, keys, values, spec):
    """One query and one head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = spec.num_heads // spec.num_kv_heads
    starts = batch.query_starts.tolist()
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        for row in range(starts[i], starts[i + 1]):
            position = len(k) - starts[i + 1] + row
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            for head in range(spec.num_heads):
                part = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
                query = q[row, part].double()
                scores = k[first : position + 1, head // group].double() @ query * spec.scale
                if spec.softcap is not None:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                out[row, part] = torch.softmax(scores, 0) @ v[first : position + 1, head // group].double()
    return out


SEQUENCES = [(33, 1), (1, 1), (16, 1), (40, 17), (9, 9), (5, 1), (30, 2)]


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 1.5), (1, 2.0), (1000, None)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_attention(num_heads, num_kv_heads, window, softcap, block_size):
    batch, kv, keys, values = _paged(SEQUENCES, block_size, num_kv_heads, 8)
    assert batch.num_decodes == 3
    spec = AttentionSpec(num_heads, num_kv_heads, 8, scale=0.4, window=window, softcap=softcap)
    q = torch.randn(len(batch.positions), num_heads * 8, generator=torch.Generator().manual_seed(1))
    expected = _naive_attention(q, batch, keys, values, spec)
    for (kv_len, query_len), table in zip(SEQUENCES, batch.block_tables.tolist(), strict=True):
        num_behind = max(0, kv_len - query_len - (window or kv_len) + 1) // block_size
        kv[table[:num_behind]] = float("nan")  # another sequence's by now
    got = _ops().attention(q, kv, batch, spec)
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    exact = _ops(torch.float64).attention(q.double(), kv.double(), batch, spec)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)


def test_attention_in_several_passes(monkeypatch):
    """Long batches run in parts: the result is the same."""
    sequences = [(33, 1), (7, 1), (16, 1), (50, 50), (40, 17)]
    batch, kv, _, _ = _paged(sequences, 4, 2, 8)
    q = torch.randn(len(batch.positions), 32)
    for window in (None, 6):
        spec = AttentionSpec(4, 2, 8, scale=0.4, window=window)
        at_once = _ops().attention(q, kv, batch, spec)
        with monkeypatch.context() as patch:
            patch.setattr("quire.kernels.reference.attention.GATHERED_TOKENS", 40)
            patch.setattr("quire.kernels.reference.attention.QUERY_ROWS", 8)
            torch.testing.assert_close(_ops().attention(q, kv, batch, spec), at_once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_rounds_once(dtype):
    batch, kv, keys, values = _paged(SEQUENCES, 16, 2, 8)
    spec = AttentionSpec(4, 2, 8, scale=0.4)
    q = torch.randn(len(batch.positions), 32).to(dtype)
    rounded = [[tensor.to(dtype) for tensor in tensors] for tensors in (keys, values)]
    expected = _naive_attention(q, batch, *rounded, spec)
    got = _ops(dtype).attention(q, kv.to(dtype), batch, spec)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_an_8_bit_cache_with_scales():
    batch, kv, keys, values = _paged([(9, 9)], 16, 2, 8)
    spec = AttentionSpec(4, 2, 8, scale=0.4, k_scale=0.02, v_scale=0.05)
    heads = torch.cat([torch.randn(9, 4, 8), keys[0], values[0]], dim=1)
    table = _plain_rotation(16)
    small = torch.zeros(kv.shape).to(torch.float8_e4m3fn)
    q = _ops().rope_and_write(heads.view(9, -1), Rotary(table), small, batch, spec)
    expected = _naive_attention(q, batch, keys, values, spec)
    got = _ops().attention(q, small, batch, spec)
    assert (got - expected).abs().max() < 0.15
    blocks, offset = batch.block_tables[0, 0], 3
    torch.testing.assert_close(small[blocks, 0, :, offset].float() * 0.02, keys[0][3], rtol=0.07, atol=1e-3)
    torch.testing.assert_close(small[blocks, 1, :, offset].float() * 0.05, values[0][3], rtol=0.07, atol=1e-3)


def _plain_rotation(max_position):
    """A table that turns nothing."""
    return torch.cat([torch.ones(max_position, 4), torch.zeros(max_position, 4)], dim=1)


@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_write(norms):
    batch, kv, _, _ = _paged([(5, 1), (12, 7)], 4, 2, 8)
    before = kv.clone()
    spec = AttentionSpec(4, 2, 8, scale=1.0)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(8, 8 * 8, generator=generator)
    angles = torch.rand(16, 4, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    q_norm, k_norm = (torch.rand(2, 8, generator=generator) + 0.5).unbind() if norms else (None, None)
    q = _ops().rope_and_write(qkv, Rotary(cos_sin, q_norm, k_norm, 0.01), kv, batch, spec)
    assert q.shape == (8, 32) and q.is_contiguous()

    written = torch.zeros(kv.shape, dtype=torch.bool)
    for row in range(8):
        heads = qkv[row].view(8, 8)
        position, slot = batch.positions[row].item(), batch.slots[row].item()
        block, offset = slot // 4, slot % 4
        for head in range(6):
            x = heads[head].double()
            norm = q_norm if head < 4 else k_norm
            if norm is not None:
                x = x / math.sqrt(x.square().mean() + 0.01) * norm.double()
            cos, sin = angles[position].double().cos(), angles[position].double().sin()
            turned = torch.cat([x[:4] * cos - x[4:] * sin, x[4:] * cos + x[:4] * sin])
            got = q[row].view(4, 8)[head] if head < 4 else kv[block, 0, head - 4, offset]
            torch.testing.assert_close(got.double(), turned, rtol=0, atol=1e-5)
        assert torch.equal(kv[block, 1, :, offset], heads[6:])
        written[block, :, :, offset] = True
    unchanged = ~written
    assert torch.equal(kv[unchanged].nan_to_num(7.0), before[unchanged].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms(dtype):
    x, residual, weight = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype), torch.rand(8)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    got = _ops(dtype).normalize(x, Norm(weight, 1e-3))
    assert got.dtype == dtype
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(got, expected.to(dtype), **tolerance)

    total = residual + x
    got = _ops(dtype).add_norm(x, residual, Norm(weight, 1e-3))
    assert torch.equal(residual, total)
    torch.testing.assert_close(got, _ops(dtype).normalize(total, Norm(weight, 1e-3)))


def test_act_mul():
    gate_up = torch.randn(3, 10)
    gate, up = gate_up.double()[:, :5], gate_up.double()[:, 5:]
    silu = gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    gelu = 0.5 * gate * (1 + torch.tanh(inner)) * up
    torch.testing.assert_close(_ops().act_mul(gate_up, "silu").double(), silu, rtol=0, atol=1e-6)
    torch.testing.assert_close(_ops().act_mul(gate_up, "gelu_tanh").double(), gelu, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
def test_linear_embed_and_logits(dtype, weight_dtype):
    ops = _ops(dtype, weight_dtype=weight_dtype)
    matrix, bias = torch.randn(6, 4), torch.randn(6)
    weight = ops.new_linear(6, 4, bias=True)
    weight.load_rows(2, matrix[2:])
    weight.load_rows(0, matrix[:2])
    weight.load_bias(3, bias[3:])
    weight.load_bias(0, bias[:3])
    assert (weight.out_features, weight.in_features) == (6, 4)
    held = weight_dtype or dtype
    assert weight.nbytes == 30 * held.itemsize
    matrix, bias = matrix.to(held), bias.to(held)

    x = torch.randn(3, 4).to(dtype)
    expected = x.double() @ matrix.double().T + bias.double()
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    got = weight.multiply(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected.to(dtype), **tolerance)

    logits = weight.logits(x, softcap=0.5)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), 0.5 * torch.tanh(expected / 0.5), rtol=0, atol=1e-5)

    rows = weight.embed(torch.tensor([5, 0]))
    assert rows.dtype == dtype and torch.equal(rows, matrix[[5, 0]].to(dtype))
    torch.testing.assert_close(weight.embed(torch.tensor([5, 0]), 3.0), rows * 3)
    rows.zero_()  # the decoder adds to it in place
    assert torch.equal(weight.weight, matrix)


def test_randomize():
    weight, twin = (_ops().new_linear(200, 100, bias=True) for _ in range(2))
    weight.randomize(0.02, seed=3)
    twin.randomize(0.02, seed=3)
    assert torch.equal(weight.weight, twin.weight)
    assert abs(weight.weight.std().item() - 0.02) < 0.001
    twin.randomize(0.02, seed=4)
    assert not torch.equal(weight.weight, twin.weight)


def test_block_sizes():
    assert _ops().supported_block_sizes(64) == (4, 8, 16, 32, 64, 128)


def test_a_dense_matrix_refuses_what_does_not_fit():
    weight = _ops().new_linear(4, 2)
    with pytest.raises(AssertionError, match="rows 3 to 5 of 4"):
        weight.load_rows(3, torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="without a bias"):
        weight.load_bias(0, torch.zeros(4))
