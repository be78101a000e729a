"""How decodes are cut into pieces: once for layers that are alike, and anew for whatever else is different."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import decode
from quire.kernels.triton.attention import attention
from quire.kernels.triton.configs import DecodeConfig
from quire.kernels.triton.decode import AttentionScratch, PrefixResults

TILE = 16
CONFIG = DecodeConfig(tile_tokens=TILE, min_tiles_per_split=2, long_tiles=4, busy_pieces_per_seq=1.5)
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.18)


def decodes(lens, device, *, block_size=16):
    """A batch of decodes whose blocks stand in order, with q and the cache."""
    counts = [-(-n // block_size) for n in lens]
    tables = torch.zeros((len(lens), max(counts) + 1), dtype=torch.int32)
    first = 0
    for i, count in enumerate(counts):
        tables[i, :count] = torch.arange(first, first + count)
        first += count
    kv = torch.randn(first + 1, 2, SPEC.num_kv_heads, block_size, SPEC.head_dim, device=device).bfloat16()
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    batch = AttentionBatch(
        positions=lengths.long() - 1,
        slots=torch.zeros(len(lens), dtype=torch.int64, device=device),
        query_starts=torch.arange(len(lens) + 1, dtype=torch.int32, device=device),
        kv_lens=lengths,
        block_tables=tables.to(device),
        max_query_len=1,
        max_kv_len=max(lens),
        num_decodes=len(lens),
    )
    return torch.randn(len(lens), 4 * SPEC.head_dim, device=device).bfloat16(), kv, batch


def expected_pieces(lens, prefix_lens, window, few, many, min_tiles, long_tiles):
    """Each piece: sequence, its length, first visible token, tiles, first piece of the sequence, and their number."""
    lows = [max(n - window, 0) if window else prefix for n, prefix in zip(lens, prefix_lens, strict=True)]
    tiles = [-(-n // TILE) - low // TILE for n, low in zip(lens, lows, strict=True)]
    wanted = many if sum(tiles) > long_tiles * few else few
    each = max(-(-sum(tiles) // wanted), min_tiles)
    pieces: list[list[int]] = []
    for seq, (length, low, num_tiles) in enumerate(zip(lens, lows, tiles, strict=True)):
        count, first, start = max(-(-num_tiles // each), 1), len(pieces), low // TILE
        ends = [start + i * num_tiles // count for i in range(count + 1)]
        pieces += [[seq, length, low, ends[i], ends[i + 1], first, count] for i in range(count)]
    return pieces


@pytest.mark.parametrize("num_seqs", [1, 15, 16, 17, 128, 130, 1030])
@pytest.mark.parametrize("kind", ["plain", "window", "prefix"])
def test_every_sequence_is_cut_and_every_row_is_written(num_seqs, kind, device):
    """Rows that only pad are sequences of one token, or of none; rows past the last piece say that there is none."""
    generator = torch.Generator().manual_seed(num_seqs)
    for longest, few, many in ((40, 8, 16), (700, 8, 24), (3000, 40, 40), (3000, 1, 1)):
        lens = torch.randint(1, longest, (num_seqs,), generator=generator).tolist()
        lens[-1] = 1
        prefixes = [n // 128 * 64 if kind == "prefix" and i % 3 else 0 for i, n in enumerate(lens)]
        if num_seqs > 1 and kind != "prefix":
            lens[num_seqs // 2] = 0
        spec = replace(SPEC, window=40 if kind == "window" else None)
        _, _, batch = decodes([max(n, 1) for n in lens], device)
        batch.kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        found = None
        if kind == "prefix":
            prefix_lens = torch.tensor(prefixes, dtype=torch.int32, device=device)
            found = PrefixResults(prefix_lens, prefix_lens, prefix_lens, prefix_lens)
        expected = expected_pieces(lens, prefixes, spec.window, few, many, 2, 4)
        most = num_seqs + max(few, many)  # what decode_attention has room for
        assert len(expected) <= most
        pieces = decode._cut(batch, spec, CONFIG, few, many, most, found).cpu()
        assert pieces[: len(expected), :7].tolist() == expected
        assert pieces.shape[0] == most and (pieces[len(expected) :, 0] == -1).all()


def test_layers_that_differ_are_cut_each_their_own_way(device, monkeypatch):
    """And those that are alike once in a pass."""
    monkeypatch.setattr(decode, "NUM_SMS", 4)
    launched = []
    kernel = decode.pieces_kernel

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(decode, "pieces_kernel", Counted())
    q, kv, batch = decodes([300, 20, 1, 77], device)
    scratch = AttentionScratch.allocate(4, 2, device)
    configs = (CONFIG, replace(CONFIG, tile_tokens=32), replace(CONFIG, min_tiles_per_split=1))
    layers = [(replace(SPEC, window=window), config) for window in (None, 20, 100) for config in configs]
    for _ in range(2):
        for spec, config in layers:
            out = attention(q, kv, batch, spec, scratch, decode=config)
            expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, spec)
            assert (out.double() - expected).norm() <= 1e-2 * expected.norm()
        assert len(launched) == len(layers)


def test_a_batch_made_of_another_is_cut_anew(device):
    q, kv, batch = decodes([300, 20, 200], device)
    scratch = AttentionScratch.allocate(3, 2, device)
    attention(q, kv, batch, SPEC, scratch, decode=CONFIG)
    lens = torch.tensor([30, 10, 190], dtype=torch.int32, device=device)
    for other in (
        replace(batch, kv_lens=lens),
        replace(batch, kv_lens=batch.kv_lens[:2], num_decodes=2),
        replace(batch, max_kv_len=4000),
    ):
        some = q[: other.num_decodes]
        out = attention(some, kv, other, SPEC, scratch, decode=CONFIG)
        expected = ReferenceOps(device, torch.float64).attention(some.double(), kv, other, SPEC)
        assert (out.double() - expected).norm() <= 1e-2 * expected.norm()


def test_pieces_are_as_many_as_the_launch_that_reads_them(device):
    """A batch that is told to hold longer sequences than before has more programs."""
    q, kv, batch = decodes([60, 20], device)
    scratch = AttentionScratch.allocate(2, 2, device)
    for longest in (60, 4000, 300):
        batch.max_kv_len = longest
        out = attention(q, kv, batch, SPEC, scratch, decode=CONFIG)
        expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, SPEC)
        assert (out.double() - expected).norm() <= 1e-2 * expected.norm()
    assert len({len(pieces) for pieces in batch.decode_pieces.values()}) > 1
