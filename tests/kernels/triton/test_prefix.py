"""Decodes that share a prefix, against the reference, which reads it for each of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.reference import ReferenceOps
from quire.kernels.shared_prefix import PrefixGroup, pack_shared_prefixes, unpack_shared_prefixes
from quire.kernels.triton.attention import attention
from quire.kernels.triton.configs import DecodeConfig, PrefixConfig
from quire.kernels.triton.decode import AttentionScratch

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.18)
DECODE = DecodeConfig(tile_tokens=32, programs_per_sm=1, busy_programs_per_sm=1, min_tiles_per_split=1)
PREFIX = PrefixConfig(tile_rows=16, tile_tokens=32, programs_per_sm=1, min_tiles_per_split=2)


def make_inputs(groups, own_lens, spec, block_size, device, dtype=torch.bfloat16, kv_dtype=None, chunk=0, max_groups=3):
    """groups: (members, tokens); own_lens: tokens of each sequence after its prefix. NaN where nothing was written."""
    num_seqs = len(own_lens)
    prefix_lens = [0] * num_seqs
    for members, tokens in groups:
        for member in members:
            prefix_lens[member] = tokens
    lens = [a + b for a, b in zip(prefix_lens, own_lens, strict=True)]
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + 2
    kv = torch.full((num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim), float("nan"))
    tables = torch.full((num_seqs, max(counts) + 1), 2**30, dtype=torch.int32)
    order = torch.randperm(num_blocks).tolist()
    for members, tokens in groups:
        for j in range(tokens // block_size):
            tables[members, j] = block = order.pop()
            kv[block] = torch.randn(kv.shape[1:])
    for i, length in enumerate(lens):
        for j in range(prefix_lens[i] // block_size, counts[i]):
            tables[i, j] = block = order.pop()
            written = min(block_size, length - j * block_size)
            kv[block, :, :, :written] = torch.randn(2, spec.num_kv_heads, written, spec.head_dim)
    queries = [1] * num_seqs
    if chunk:  # the last sequence is a prompt's chunk, not a decode
        queries[-1] = chunk
    starts = [0, *np.cumsum(queries).tolist()]
    num_decodes = num_seqs - bool(chunk)
    packed = pack_shared_prefixes([PrefixGroup(np.array(m), n) for m, n in groups], num_decodes, max_groups)
    batch = AttentionBatch(
        positions=torch.cat([torch.arange(n - q, n) for n, q in zip(lens, queries, strict=True)]).to(device),
        slots=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        max_query_len=max(queries),
        max_kv_len=max(lens),
        num_decodes=num_decodes,
        shared=unpack_shared_prefixes(torch.from_numpy(packed).to(device), num_decodes, max_groups),
    )
    q = torch.randn(starts[-1], spec.num_heads * spec.head_dim, device=device).to(dtype)
    return q, kv.to(device=device, dtype=kv_dtype or dtype), batch


def check(groups, own_lens, spec, block_size, device, *, decode=DECODE, prefix=PREFIX, tolerance=1e-2, **options):
    q, kv, batch = make_inputs(groups, own_lens, spec, block_size, device, **options)
    scratch = AttentionScratch.allocate(len(own_lens), spec.num_kv_heads, device)
    expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, spec)
    out = attention(q, kv, batch, spec, scratch, decode=decode, prefix=prefix)
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= tolerance * expected.norm()
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("block_size", [4, 16, 32, 128])
def test_groups_in_any_order_beside_strangers(block_size, device):
    check([([5, 0, 3, 7, 8], 256), ([1, 6, 4, 9], 128)], [1, 70, 33, 32, 5, 1, 90, 64, 2, 7], SPEC, block_size, device)


def test_more_members_than_a_tile_has_rows(device):
    check([(list(range(19)), 128)], [1 + 3 * i for i in range(20)], SPEC, 16, device)


def test_no_groups_at_all(device):
    check([], [40, 3, 70], SPEC, 16, device)


def test_a_mixed_batch(device):
    check([([0, 1, 2, 3], 128)], [5, 1, 64, 40, 30], SPEC, 16, device, chunk=20)


def test_the_prefix_is_read_through_one_table_only(device):
    """So what the other members' tables say about it cannot matter."""
    q, kv, batch = make_inputs([([2, 0, 1, 3], 256)], [9, 40, 2, 33], SPEC, 16, device)
    expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, SPEC)
    for other in (0, 1, 3):
        batch.block_tables[other, :16] = 2**30
    out = attention(q, kv, batch, SPEC, AttentionScratch.allocate(4, 2, device), decode=DECODE, prefix=PREFIX)
    assert (out.double() - expected).norm() <= 1e-2 * expected.norm()


def test_a_layer_with_a_window_reads_for_itself(device):
    check([([0, 1, 2, 3], 128)], [5, 1, 64, 40], replace(SPEC, window=50), 16, device)


def test_slopes_read_for_themselves_and_a_sink_counts_once(device):
    slopes, sinks = torch.tensor([0.5, 0.01, 2.0, 0.1]), torch.tensor([-90.0, 0.0, 9.0, 3.0])
    for of_heads in ({"slopes": slopes.to(device)}, {"sinks": sinks.to(device)}):
        check([([0, 1, 2, 3], 128)], [5, 1, 64, 40], replace(SPEC, **of_heads), 16, device)


@pytest.mark.parametrize(("dtype", "kv_dtype", "tolerance"), [
    (torch.float16, torch.float16, 1e-2), (torch.bfloat16, torch.float8_e4m3fn, 1e-2),
    (torch.float32, torch.float32, 1e-6),
])  # fmt: skip
def test_cache_dtypes_and_the_tables_configurations(dtype, kv_dtype, tolerance, device):
    scales = {"k_scale": 0.5, "v_scale": 3.0} if kv_dtype == torch.float8_e4m3fn else {}
    spec = replace(SPEC, softcap=2.0, **scales)
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "decode": None, "prefix": None}
    check([([0, 1, 2, 3], 128)], [5, 1, 64, 40], spec, 16, device, tolerance=tolerance, **options)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(80, 3, 1), (64, 17, 1)])
def test_head_widths_and_groups(head_dim, heads, kv_heads, device):
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    check([([0, 2, 3, 4], 128)], [5, 1, 64, 40, 3], spec, 16, device, prefix=replace(PREFIX, tile_rows=32))
