"""Attention of a mixed batch: the decodes first (a prefix that they share before them), then the prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.triton.configs import (
    DecodeConfig,
    PrefillConfig,
    PrefixConfig,
    decode_config,
    prefill_config,
    prefix_config,
)
from quire.kernels.triton.decode import DecodeScratch, decode_attention
from quire.kernels.triton.prefill import prefill_attention
from quire.kernels.triton.prefix import prefix_attention


def attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    scratch: DecodeScratch,
    *,
    decode: DecodeConfig | None = None,
    prefill: PrefillConfig | None = None,
    prefix: PrefixConfig | None = None,
) -> Tensor:
    """q: [tokens, heads * head_dim] -> the same shape. The configurations are the table's unless given."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = spec.num_heads // spec.num_kv_heads
    num_seqs = batch.kv_lens.shape[0]
    if batch.num_decodes:
        found = None
        if batch.shared is not None and spec.window is None:
            found = prefix_attention(
                q, kv, batch.block_tables, batch.shared, spec,
                prefix or prefix_config(spec.head_dim, group, kv.element_size()), num_seqs=batch.num_decodes,
            )  # fmt: skip
        decode_attention(
            q, kv, batch.block_tables, batch.kv_lens, out, spec,
            decode or decode_config(spec.head_dim, group, kv.element_size()), scratch,
            num_seqs=batch.num_decodes, max_kv_len=batch.max_kv_len, prefix=found,
        )  # fmt: skip
    if num_seqs > batch.num_decodes:
        prefill_attention(
            q, kv, batch.block_tables, batch.query_starts, batch.kv_lens, out, spec,
            prefill or prefill_config(spec.head_dim, group, kv.element_size(), batch.max_query_len),
            first_seq=batch.num_decodes, num_seqs=num_seqs - batch.num_decodes,
            num_tokens=q.shape[0] - batch.num_decodes,
        )  # fmt: skip
    return out
