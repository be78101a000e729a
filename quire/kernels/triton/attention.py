"""Attention of a mixed batch: the decodes first (a prefix that they share before them), then the prompts."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.runtime import driver

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.triton.common import HAS_GLUON, INTERPRETED
from quire.kernels.triton.configs import (
    DecodeConfig,
    HopperPrefillConfig,
    PrefillConfig,
    PrefixConfig,
    decode_config,
    prefill_config,
    prefix_config,
)
from quire.kernels.triton.decode import AttentionScratch, can_share, decode_attention
from quire.kernels.triton.prefill import prefill_attention
from quire.kernels.triton.prefix import prefix_attention
from quire.kernels.triton.widening import widen_prompts


def attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    scratch: AttentionScratch,
    *,
    decode: DecodeConfig | None = None,
    prefill: PrefillConfig | HopperPrefillConfig | None = None,
    prefix: PrefixConfig | None = None,
    out: Tensor | None = None,  # like q, of any float type
) -> Tensor:
    """q: [tokens, heads * head_dim] -> the same shape. The configurations are the table's unless given."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = spec.num_heads // spec.num_kv_heads
    num_seqs = batch.kv_lens.shape[0]
    if batch.num_decodes:
        found = None
        if batch.shared is not None and can_share(spec):
            found = prefix_attention(
                q, kv, batch.block_tables, batch.shared, spec,
                prefix or prefix_config(spec.head_dim, group, kv.element_size()), num_seqs=batch.num_decodes,
            )  # fmt: skip
        config = decode or decode_config(spec.head_dim, group, kv.element_size())
        decode_attention(q, kv, batch, out, spec, config, scratch, prefix=found)
    if num_seqs > batch.num_decodes:
        first_seq, num_prompts = batch.num_decodes, num_seqs - batch.num_decodes
        prompts = prefill or prompt_config(q, kv, spec, batch.max_query_len, num_prompts)
        num_tokens = q.shape[0] - batch.num_decodes
        tables = batch.block_tables
        if prefill is None and widens_prompts(q, kv, batch, spec):
            kv, tables = widen_prompts(
                kv, tables, batch.kv_lens, spec, q.dtype, first_seq=first_seq, num_seqs=num_prompts,
                max_kv_len=batch.max_kv_len,
            )  # fmt: skip
            prompts = HopperPrefillConfig()
        if isinstance(prompts, HopperPrefillConfig):
            from quire.kernels.triton.prefill_hopper import prefill_attention_hopper

            prefill_attention_hopper(
                q, kv, tables, batch.query_starts, batch.kv_lens, out, spec, prompts, scratch,
                first_seq=first_seq, num_seqs=num_prompts, num_tokens=num_tokens,
            )  # fmt: skip
        else:
            prefill_attention(
                q, kv, tables, batch.query_starts, batch.kv_lens, out, spec, prompts,
                first_seq=first_seq, num_seqs=num_prompts, num_tokens=num_tokens,
            )  # fmt: skip
    return out


def prompt_config(
    q: Tensor, kv: Tensor, spec: AttentionSpec, max_query_len: int, num_prompts: int
) -> PrefillConfig | HopperPrefillConfig:
    group = spec.num_heads // spec.num_kv_heads
    # Tiles of so few rows, or a list of so many prompts, are better off with the portable kernel's smaller programs.
    fits = max_query_len * group > 64 and num_prompts <= 128
    if fits and hopper_serves(spec, kv.shape[3], q.dtype, kv.dtype):
        return HopperPrefillConfig()
    return prefill_config(spec.head_dim, group, kv.element_size(), max_query_len)


def widens_prompts(q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> bool:
    """Whether a step's prompts are worth 16-bit copies of their 8-bit keys and values: many rows, and copies of at most
    twice the queries, less than the MLP's rows take. Not in captured steps, whose sequences may be as long as any."""
    num_prompts, num_tokens = len(batch.kv_lens) - batch.num_decodes, len(q) - batch.num_decodes
    copied = num_prompts * batch.max_kv_len * 2 * spec.num_kv_heads
    return (
        kv.dtype == torch.float8_e4m3fn
        and num_tokens >= 1024
        and copied <= 2 * num_tokens * spec.num_heads
        and num_prompts <= 128
        and hopper_serves(spec, kv.shape[3], q.dtype, q.dtype)
    )


def hopper_serves(spec: AttentionSpec, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether prefill_hopper takes the prompts of such a layer."""
    # Specs are compared without these two.
    return spec.slopes is None and spec.sinks is None and _hopper_serves(spec, block_size, dtype, kv_dtype)


@cache
def _hopper_serves(spec: AttentionSpec, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Asked once: neither layer nor device changes."""
    return (
        HAS_GLUON
        and not INTERPRETED
        and driver.active.get_current_target().arch == 90
        and dtype == kv_dtype
        and dtype in (torch.bfloat16, torch.float16)
        and spec.head_dim in (64, 128)
        and spec.num_heads // spec.num_kv_heads <= 64
        and block_size in (16, 32, 64, 128)
        and spec.window is None
        and spec.softcap is None
    )
