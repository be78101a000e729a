"""Attention of encoders: every token over all of its own sequence, sequences packed one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.interface import AttentionSpec, PackedBatch


def packed_attention(qkv: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    """By torch: in one launch on a GPU in half precision, else a call for each length that sequences have."""
    assert spec.num_heads == spec.num_kv_heads, "an encoder's heads have keys of their own"
    assert spec.scale == spec.head_dim**-0.5, "which is what torch takes unless it is told"
    heads = qkv.view(len(qkv), 3, spec.num_heads, spec.head_dim)
    if qkv.is_cuda and qkv.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = batch.starts, batch.max_len
        q, k, v = heads.unbind(1)
        attended = varlen_attn(q, k, v, starts, starts, longest, longest)
        assert isinstance(attended, Tensor)
        return attended.reshape(len(qkv), -1)
    out = torch.empty_like(heads[:, 0])
    by_length: dict[int, list[int]] = {}
    at = 0
    for length in batch.lengths:
        by_length.setdefault(length, []).append(at)
        at += length
    for length, firsts in by_length.items():
        tokens = torch.tensor(firsts, device=qkv.device)[:, None] + torch.arange(length, device=qkv.device)
        q, k, v = heads[tokens].permute(2, 0, 3, 1, 4)  # each [sequences, heads, tokens, dim]
        out[tokens] = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return out.reshape(len(qkv), -1)
