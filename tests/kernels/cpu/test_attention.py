"""Rotary embedding with the KV write, and attention, against the reference."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec, Rotary
from quire.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps("cpu", torch.float32)
GARBAGE_BLOCK = 1_000_000_007
# (tokens with KV, new tokens)
DECODES = [(1, 1), (33, 1), (255, 1), (256, 1), (257, 1), (700, 1), (16, 1)]
MIXED = [(33, 1), (300, 1), (5, 1), (200, 100), (70, 70), (66, 2), (2, 2), (1, 1), (130, 3)]
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _batch(sequences, block_size, num_kv_heads, head_dim, kv_dtype=torch.float32, seed=0):
    """Random K and V where sequences have them, NaN everywhere else."""
    torch.manual_seed(seed)
    counts = [-(-kv_len // block_size) for kv_len, _ in sequences]
    free = random.Random(seed).sample(range(sum(counts) + 2), sum(counts) + 2)
    kv = torch.full((len(free), 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=kv_dtype)
    tables = torch.full((len(sequences), max(counts) + 1), GARBAGE_BLOCK, dtype=torch.int32)
    starts, positions, slots = [0], [], []
    for i, (kv_len, query_len) in enumerate(sequences):
        blocks = torch.tensor([free.pop() for _ in range(counts[i])])
        tables[i, : counts[i]] = blocks
        at = torch.arange(kv_len)
        where = blocks[at // block_size]
        kv[where, :, :, at % block_size] = torch.randn(kv_len, 2, num_kv_heads, head_dim).to(kv_dtype)
        starts.append(starts[-1] + query_len)
        positions.append(at[kv_len - query_len :])
        slots.append((where * block_size + at % block_size)[kv_len - query_len :])
    query_lens = [query_len for _, query_len in sequences]
    batch = AttentionBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor([kv_len for kv_len, _ in sequences], dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(query_lens),
        max_kv_len=max(kv_len for kv_len, _ in sequences),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
    )
    return batch, kv


def _as_written(kv):
    """The same keys and values as the native kernels lay them out (native/kv.h): keys in panels of up to 16."""
    blocks, _, heads, block_size, head_dim = kv.shape
    keys = kv[:, 0].reshape(blocks, heads, -1, min(block_size, 16), head_dim).transpose(-1, -2)
    return torch.stack((keys.reshape(kv[:, 0].shape), kv[:, 1]), dim=1)


def _check(ops, sequences, spec, block_size=16, kv_dtype=torch.float32, atol=5e-6):
    batch, kv = _batch(sequences, block_size, spec.num_kv_heads, spec.head_dim, kv_dtype)
    q = torch.randn(int(batch.query_starts[-1]), spec.num_heads * spec.head_dim)
    for (kv_len, query_len), table in zip(sequences, batch.block_tables.tolist(), strict=True):
        num_behind = max(0, kv_len - query_len - (spec.window or kv_len) + 1) // block_size
        kv[table[:num_behind]] = float("nan")  # another sequence's by now
    torch.testing.assert_close(
        ops.attention(q, _as_written(kv), batch, spec), REFERENCE.attention(q, kv, batch, spec), rtol=1e-5, atol=atol
    )


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_block_sizes_and_kv_dtypes(ops, block_size, kv_dtype):
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    _check(ops, DECODES, spec, block_size, kv_dtype)
    _check(ops, MIXED, spec, block_size, kv_dtype)


@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 112, 128, 144, 240, 256])
def test_head_dims(ops, head_dim):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
    for kv_dtype in KV_DTYPES:
        _check(ops, MIXED, spec, kv_dtype=kv_dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 2), (5, 1), (7, 1), (32, 1), (200, 2)])
def test_groups(ops, num_heads, num_kv_heads):
    spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=32, scale=0.2)
    _check(ops, MIXED, spec)


@pytest.mark.parametrize("window", [1, 3, 17, 64, 250, 10_000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_softcap(ops, window, softcap):
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125, window=window, softcap=softcap)
    _check(ops, DECODES, spec)
    _check(ops, MIXED, spec)


def test_softcap_alone_and_large_scores(ops):
    _check(ops, MIXED, AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125, softcap=1.0))
    # Scores of hundreds: float32 holds them to 1e-5, and the exponential passes that on.
    _check(ops, MIXED, AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=20.0), atol=1e-3)


@pytest.mark.parametrize("window", [None, 17])
def test_slopes_and_sinks(ops, window):
    """A sink above all logits, one below, and one beside them."""
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125, window=window)
    sloped = replace(spec, slopes=torch.tensor([2.0**-i for i in range(6)]))
    sunk = replace(spec, sinks=torch.tensor([-90.0, 0.0, 90.0, 1.0, -1.0, 3.0]))
    for each in (sloped, sunk):
        for sequences in (DECODES, MIXED):
            _check(ops, sequences, each)


# Everything that attention does beside the plain case, once.
PLAIN = AttentionSpec(num_heads=14, num_kv_heads=2, head_dim=32, scale=0.2)
SPECS = [
    (AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125), 16, torch.bfloat16),
    (AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=80, scale=0.1, window=300), 16, torch.float32),
    (AttentionSpec(num_heads=5, num_kv_heads=1, head_dim=128, scale=0.1, window=20, softcap=2.0), 4, torch.float16),
    (
        AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=48, scale=0.1, slopes=torch.tensor([0.5, 0.01])),
        8,
        torch.float16,
    ),
    (
        AttentionSpec(num_heads=14, num_kv_heads=2, head_dim=32, scale=0.2, sinks=torch.linspace(-3, 3, 14)),
        128,
        torch.float32,
    ),
]


@pytest.mark.parametrize(
    ("spec", "block_size", "kv_dtype"), SPECS, ids=["plain", "window", "softcap", "slopes", "sinks"]
)
def test_a_token_does_not_depend_on_its_step(ops, spec, block_size, kv_dtype):
    """Bit for bit the same decoded, at any place of a chunk of a prompt, and beside any others."""
    lengths = [1, 40, 257, 700]
    batch, kv = _batch([(n, n) for n in lengths], block_size, spec.num_kv_heads, spec.head_dim, kv_dtype)
    kv = _as_written(kv)
    starts = batch.query_starts.tolist()
    q = torch.randn(starts[-1], spec.num_heads * spec.head_dim)
    together = ops.attention(q, kv, batch, spec)
    rng = random.Random(0)
    for i, length in enumerate(lengths):
        of_seq = slice(starts[i], starts[i + 1])
        cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(6)), *range(max(0, length - 20), length)})
        for begin, end in pairwise(cuts):
            alone = AttentionBatch(
                positions=batch.positions[of_seq][begin:end],
                slots=batch.slots[of_seq][begin:end],
                query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
                kv_lens=torch.tensor([end], dtype=torch.int32),
                block_tables=batch.block_tables[i : i + 1],
                max_query_len=end - begin,
                max_kv_len=end,
                num_decodes=int(end - begin == 1),
            )
            assert torch.equal(ops.attention(q[of_seq][begin:end], kv, alone, spec), together[of_seq][begin:end])


def test_layers_interleaved_in_one_tensor(ops):
    """Blocks of one layer that are not neighbours, and tables that are part of a wider one."""
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=64, scale=0.125)
    batch, kv = _batch(MIXED, 16, 1, 64)
    layers = torch.full((kv.shape[0], 3, *kv.shape[1:]), float("nan"))
    kv = _as_written(kv)
    layers[:, 1] = kv
    wider = torch.full((len(MIXED), 100), GARBAGE_BLOCK, dtype=torch.int32)
    wider[:, : batch.block_tables.shape[1]] = batch.block_tables
    q = torch.randn(int(batch.query_starts[-1]), 3 * 64)
    expected = ops.attention(q, kv, batch, spec)
    batch.block_tables = wider[:, :90]
    assert torch.equal(ops.attention(q, layers[:, 1], batch, spec), expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [48, 64, 256])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_write(ops, kv_dtype, head_dim, norm):
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=head_dim, scale=1.0)
    batch, kv = _batch(MIXED, 64 if norm else 8, 2, head_dim, kv_dtype)
    qkv = torch.randn(int(batch.query_starts[-1]), 10 * head_dim)
    angles = torch.rand(301, head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norm else (None, None)
    expected_kv, kv = kv, _as_written(kv)
    expected = REFERENCE.rope_and_write(qkv, Rotary(cos_sin, *norms, 1e-5), expected_kv, batch, spec)
    actual = ops.rope_and_write(qkv, Rotary(cos_sin, *norms, 1e-5), kv, batch, spec)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    # One unit of a narrow type where the float32 values fell on either side of a tie; unwritten slots untouched.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[kv_dtype]
    torch.testing.assert_close(kv, _as_written(expected_kv), rtol=rtol, atol=1e-6, equal_nan=True)


def test_supported_block_sizes(ops):
    assert ops.supported_block_sizes(64) == (4, 8, 16, 32, 64, 128)
    assert ops.supported_block_sizes(256) == (4, 8, 16, 32, 64, 128)
    assert ops.supported_block_sizes(72) == ops.supported_block_sizes(16) == ops.supported_block_sizes(512) == ()
