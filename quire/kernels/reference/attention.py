"""Causal attention over block tables: gather a sequence's blocks, then plain softmax attention in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec

# What one pass gathers or scores at most, so that long contexts cost time and not memory.
GATHERED_TOKENS = 1 << 17
QUERY_ROWS = 256


def attention(q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
    """See Ops.attention. Decodes run together, padded to the longest of them; prefills run one by one."""
    group = spec.num_heads // spec.num_kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.view(-1, spec.num_kv_heads, group, spec.head_dim).to(wide)
    out = torch.empty_like(heads)
    kv_lens = batch.kv_lens.tolist()
    starts = batch.query_starts.tolist()

    first = 0
    while first < batch.num_decodes:
        longest = max(kv_lens[first : batch.num_decodes])
        end = min(batch.num_decodes, first + max(1, GATHERED_TOKENS // longest))
        out[first:end] = _decode(heads[first:end], kv, batch, first, max(kv_lens[first:end]), spec)
        first = end
    for seq in range(batch.num_decodes, len(kv_lens)):
        rows = slice(starts[seq], starts[seq + 1])
        out[rows] = _prefill(heads[rows], kv, batch.block_tables[seq], kv_lens[seq], spec)
    return out.view(q.shape).to(q.dtype)


def _decode(q: Tensor, kv: Tensor, batch: AttentionBatch, first: int, longest: int, spec: AttentionSpec) -> Tensor:
    """One query for each of the sequences from `first` on. q: [seqs, kv_heads, group, head_dim]."""
    seqs, block_size = q.shape[0], kv.shape[3]
    num_blocks = -(-longest // block_size)
    lens = batch.kv_lens[first : first + seqs, None].long()  # [seqs, 1]
    block_starts = torch.arange(num_blocks, device=q.device) * block_size
    # Past a sequence's length its table holds anything: read block 0 there, and mask it.
    tables = batch.block_tables[first : first + seqs, :num_blocks].long().masked_fill(block_starts >= lens, 0)
    tiles = kv[tables].to(q.dtype)  # [seqs, blocks, 2, kv_heads, block_size, head_dim]
    k, v = tiles.permute(2, 0, 3, 1, 4, 5).reshape(2, seqs, spec.num_kv_heads, -1, spec.head_dim)
    positions = torch.arange(k.shape[2], device=q.device)  # [kv_tokens]
    visible = positions < lens  # [seqs, kv_tokens]
    if spec.window is not None:
        visible = visible & (positions >= lens - spec.window)
    # What was never written, or is another sequence's by now, may hold NaN, which a probability of 0 would not silence.
    v = v.masked_fill(~visible[:, None, :, None], 0.0)
    distances = (positions - lens + 1)[:, None, None, None]
    return _attend(q.unsqueeze(3), k, v, visible[:, None, None, None], distances, spec).squeeze(3)


def _prefill(q: Tensor, kv: Tensor, table: Tensor, kv_len: int, spec: AttentionSpec) -> Tensor:
    """The last q.shape[0] tokens of one sequence. q: [tokens, kv_heads, group, head_dim]."""
    num_blocks = -(-kv_len // kv.shape[3])
    tiles = kv[table[:num_blocks].long()].to(q.dtype)  # [blocks, 2, kv_heads, block_size, head_dim]
    k, v = tiles.permute(1, 2, 0, 3, 4).reshape(2, spec.num_kv_heads, -1, spec.head_dim)
    first_position = kv_len - q.shape[0]
    out = torch.empty_like(q)
    for row in range(0, q.shape[0], QUERY_ROWS):
        rows = slice(row, min(row + QUERY_ROWS, q.shape[0]))
        # These rows see nothing before `low` and nothing from `high` on.
        high = first_position + rows.stop
        low = 0 if spec.window is None else max(0, first_position + rows.start - spec.window + 1)
        query_positions = torch.arange(first_position + rows.start, high, device=q.device)[:, None]
        key_positions = torch.arange(low, high, device=q.device)
        visible = key_positions <= query_positions
        if spec.window is not None:
            visible &= key_positions > query_positions - spec.window
        distances = key_positions - query_positions
        part = _attend(q[rows].permute(1, 2, 0, 3), k[:, low:high], v[:, low:high], visible, distances, spec)
        out[rows] = part.permute(2, 0, 1, 3)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, distances: Tensor, spec: AttentionSpec) -> Tensor:
    """q: [..., kv_heads, group, rows, head_dim]; k, v: [..., kv_heads, kv_tokens, head_dim]; visible: a bool for
    [..., kv_heads, group, rows, kv_tokens], or what broadcasts to it; distances: likewise, of keys from queries."""
    *lead, group, rows, head_dim = q.shape
    folded = q.reshape(*lead, group * rows, head_dim)
    scores = (folded @ k.transpose(-1, -2)).view(*lead, group, rows, -1) * (spec.scale * spec.k_scale)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    by_head = (spec.num_kv_heads, group, 1, 1)
    if spec.slopes is not None:
        scores = scores + spec.slopes.to(q.dtype).view(by_head) * distances
    scores = scores.masked_fill(~visible, float("-inf"))
    if spec.sinks is None:
        probabilities = torch.softmax(scores, dim=-1)
    else:
        sinks = spec.sinks.to(q.dtype).view(by_head).expand(*scores.shape[:-1], 1)
        probabilities = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1].contiguous()
    return (probabilities.view(*lead, group * rows, -1) @ v).view(q.shape) * spec.v_scale
