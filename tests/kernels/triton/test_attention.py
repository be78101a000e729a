"""Attention over block tables against float64, on ragged batches with wild table ends and NaN in unwritten slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import decode
from quire.kernels.triton.attention import attention
from quire.kernels.triton.configs import DecodeConfig, PrefillConfig
from quire.kernels.triton.decode import AttentionScratch

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SPLIT = DecodeConfig(tile_tokens=16, programs_per_sm=1, busy_programs_per_sm=1, min_tiles_per_split=1)
SMALL = PrefillConfig(tile_rows=32, tile_tokens=16, num_warps=4, num_stages=2)


def make_inputs(lens, query_lens, spec, block_size, device, dtype=torch.bfloat16, kv_dtype=None):
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + 3
    kv = torch.full((num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim), float("nan"))
    tables = torch.full((len(lens), max(counts) + 1), 2**30, dtype=torch.int32)
    order = torch.randperm(num_blocks).tolist()
    for i, length in enumerate(lens):
        for j in range(counts[i]):
            tables[i, j] = block = order.pop()
            written = min(block_size, length - j * block_size)
            kv[block, :, :, :written] = torch.randn(2, spec.num_kv_heads, written, spec.head_dim)
    starts = [0]
    for n in query_lens:
        starts.append(starts[-1] + n)
    batch = AttentionBatch(
        positions=torch.cat([torch.arange(n - q, n) for n, q in zip(lens, query_lens, strict=True)]).to(device),
        slots=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        max_query_len=max(query_lens),
        max_kv_len=max(lens),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
    )
    q = torch.randn(starts[-1], spec.num_heads * spec.head_dim, device=device).to(dtype)
    return q, kv.to(device=device, dtype=kv_dtype or dtype), batch


def check(lens, query_lens, spec, block_size, device, *, decode=SPLIT, prefill=SMALL, runs=1, tolerance=1e-2, **dtypes):
    q, kv, batch = make_inputs(lens, query_lens, spec, block_size, device, **dtypes)
    scratch = AttentionScratch.allocate(max(1, batch.num_decodes), spec.num_kv_heads, device)
    expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, spec)
    for _ in range(runs):
        out = attention(q, kv, batch, spec, scratch, decode=decode, prefill=prefill)
        assert out.dtype == q.dtype and torch.isfinite(out).all()
        assert (out.double() - expected).norm() <= tolerance * expected.norm()
        assert not scratch.arrivals.any() and not scratch.next_item.any()  # as the next launch needs them


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128])
def test_every_block_size_in_a_mixed_batch(block_size, device):
    check([1, 15, 16, 17, 70, 9, 40], [1] * 5 + [9, 21], SPEC, block_size, device)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(64, 3, 1), (80, 2, 2), (96, 4, 2), (256, 2, 1), (64, 17, 1)]
)
def test_head_widths_and_groups(head_dim, heads, kv_heads, device):
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    check([33, 5, 30], [1, 1, 7], spec, 16, device)


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_a_window_hides_older_tokens(window, device):
    check([1, 40, 41, 60, 55], [1] * 3 + [50, 20], replace(SPEC, window=window), 8, device)


def test_blocks_before_the_window_are_never_read(device):
    """Their memory may belong to another sequence by then: NaN there must not show."""
    spec = replace(SPEC, window=20)
    q, kv, batch = make_inputs([105, 125], [1, 3], spec, 4, device)
    expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, spec)
    for seq, first_seen in enumerate((105 - 20, 123 - 20)):
        batch.block_tables[seq, : first_seen // 16 * 4] = 2**30  # not even looked up, before the first tile
        kv[batch.block_tables[seq, first_seen // 16 * 4 : first_seen // 4].long()] = float("nan")
    scratch = AttentionScratch.allocate(1, spec.num_kv_heads, device)
    out = attention(q, kv, batch, spec, scratch, decode=SPLIT, prefill=SMALL)
    assert (out.double() - expected).norm() <= 1e-2 * expected.norm()


def test_softcap(device):
    check([50, 3, 40], [1, 1, 30], replace(SPEC, softcap=0.7, scale=1.0), 16, device)


@pytest.mark.parametrize("window", [None, 17])
def test_slopes_and_sinks(window, device):
    """A sink above all logits, one below, one beside them; sequences in several pieces have it once."""
    spec = replace(SPEC, window=window)
    slopes, sinks = torch.tensor([0.5, 0.25, 2.0, 1 / 64]), torch.tensor([-90.0, 0.0, 12.0, 3.0])
    for each in (
        replace(spec, slopes=slopes.to(device)),
        replace(spec, sinks=sinks.to(device)),
        replace(spec, slopes=slopes.to(device), sinks=sinks.to(device), softcap=2.0),
    ):
        check([1, 50, 70, 5, 40, 37], [1] * 4 + [30, 37], each, 16, device)
    check([50, 3, 40], [1, 1, 30], each, 16, device, kv_dtype=torch.float8_e4m3fn)


def test_a_row_that_only_pads_the_batch_gives_zeros_beside_a_sink(device):
    q, kv, batch = make_inputs([20, 20], [1, 1], SPEC, 16, device)
    batch.kv_lens[1] = 0
    spec = replace(SPEC, sinks=torch.tensor([-90.0, 0.0, 90.0, 1.0], device=device))
    out = attention(q, kv, batch, spec, AttentionScratch.allocate(2, 2, device), decode=SPLIT)
    assert torch.isfinite(out[0]).all() and not out[1].any()


def test_large_scores_do_not_overflow(device):
    check([50, 3, 40], [1, 1, 30], replace(SPEC, scale=40.0), 16, device)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [
    (torch.float16, torch.float16), (torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float32),
])  # fmt: skip
def test_cache_dtypes(dtype, kv_dtype, device):
    scales = {"k_scale": 0.5, "v_scale": 3.0} if kv_dtype == torch.float8_e4m3fn else {}
    check([50, 3, 40], [1, 1, 30], replace(SPEC, **scales), 16, device, dtype=dtype, kv_dtype=kv_dtype)


def test_float32_keeps_its_digits(device):
    dtypes = {"dtype": torch.float32, "kv_dtype": torch.float32}
    check([50, 3, 40], [1, 1, 30], SPEC, 16, device, decode=None, prefill=None, tolerance=1e-6, **dtypes)


def test_one_long_sequence_is_split_and_short_ones_are_not(device):
    check([400] + [3] * 16, [1] * 17, replace(SPEC, num_heads=2, num_kv_heads=1), 16, device, runs=2)


@pytest.mark.parametrize("pieces_per_seq", [0.5, 3.0])
def test_pieces_of_few_and_of_many_sequences(pieces_per_seq, monkeypatch, device):
    """A chip of four: two sequences are cut for it, three times as finely where they are long; five fill it."""
    monkeypatch.setattr(decode, "NUM_SMS", 4)
    config = replace(SPLIT, long_programs_per_sm=3, long_tiles=4, busy_pieces_per_seq=pieces_per_seq)
    one_head = replace(SPEC, num_heads=2, num_kv_heads=1)
    for lens in ([100, 150], [300, 20], [200, 1], [90, 300, 17, 16, 5]):
        check(lens, [1] * len(lens), one_head, 16, device, decode=config, runs=2)


def test_a_row_that_only_pads_the_batch_gives_zeros(device):
    q, kv, batch = make_inputs([20, 20], [1, 1], SPEC, 16, device)
    batch.kv_lens[1] = 0
    out = attention(q, kv, batch, SPEC, AttentionScratch.allocate(2, 2, device), decode=SPLIT)
    assert torch.isfinite(out[0]).all() and not out[1].any()


def test_configurations_of_the_table(device):
    check([70, 5, 150, 40], [1, 1, 140, 3], SPEC, 16, device, decode=None, prefill=None)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_size", "dtype"), [
    (128, 32, 8, 16, torch.bfloat16), (128, 8, 8, 32, torch.float16), (128, 14, 2, 64, torch.bfloat16),
    (64, 9, 3, 128, torch.bfloat16),
])  # fmt: skip
def test_long_prompts_by_the_kernel_for_the_device(head_dim, heads, kv_heads, block_size, dtype, device):
    """On a Hopper that is prefill_hopper, which no interpreter runs: every length modulo 16, whole and after a context,
    more items than multiprocessors, more prompts than 16."""
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    kernels = {"decode": None, "prefill": None, "runs": 2, "dtype": dtype}
    for rest in range(16):
        check([240 + rest], [240 + rest], spec, block_size, device, **kernels)
        check([9, 384 + rest, 700, 130 - rest], [1, 100, 300 + rest, 130 - rest], spec, block_size, device, **kernels)
    check([3000, 2048, 1], [2999, 2048, 1], spec, block_size, device, **kernels)
    check([5 * n for n in range(1, 90)], [4 * n for n in range(1, 90)], spec, block_size, device, **kernels)
