# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""8-bit K and V of a step's prompts as 16-bit blocks, for an attention kernel that multiplies those.

A prompt's keys are read by every tile of its queries, so that reading them once more and writing them costs little
beside what a faster kernel saves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionSpec


@triton.jit(do_not_specialize=["first_seq", "table_stride", "max_blocks"])
def widen_kernel(kv_ptr, out_ptr, tables_ptr, out_tables_ptr, kv_lens_ptr, first_seq, table_stride, max_blocks, v_scale,
                 HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """One program, one block. HALF: numbers of its K; its V are as many."""
    block = tl.program_id(0)
    seq = first_seq + tl.program_id(1)
    target = tl.program_id(1) * max_blocks + block
    if block * BLOCK_SIZE < tl.load(kv_lens_ptr + seq):
        tl.store(out_tables_ptr + seq * max_blocks + block, target)
        source = tl.load(tables_ptr + seq.to(tl.int64) * table_stride + block).to(tl.int64)
        index = tl.arange(0, HALF_PAD)
        mask = index < HALF
        k = tl.load(kv_ptr + source * (2 * HALF) + index, mask=mask, other=0.0)
        v = tl.load(kv_ptr + source * (2 * HALF) + HALF + index, mask=mask, other=0.0)
        out = out_ptr + target.to(tl.int64) * (2 * HALF) + index
        tl.store(out, k.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + HALF, (v.to(tl.float32) * v_scale).to(out_ptr.dtype.element_ty), mask=mask)


def widen_prompts(
    kv: Tensor,  # 8-bit
    block_tables: Tensor,
    kv_lens: Tensor,
    spec: AttentionSpec,
    dtype: torch.dtype,
    *,
    first_seq: int,
    num_seqs: int,
    max_kv_len: int,
) -> tuple[Tensor, Tensor]:
    """The blocks of sequences first_seq .. first_seq + num_seqs - 1 -> (blocks, block tables).

    V is multiplied by its scale, K is not: scores are.
    """
    _, _, kv_heads, block_size, head_dim = kv.shape
    max_blocks = -(-max_kv_len // block_size)
    wide = torch.empty((num_seqs * max_blocks, 2, kv_heads, block_size, head_dim), dtype=dtype, device=kv.device)
    tables = torch.empty((first_seq + num_seqs, max_blocks), dtype=torch.int32, device=kv.device)
    half = kv_heads * block_size * head_dim
    half_pad = 1 << (half - 1).bit_length()
    widen_kernel[(max_blocks, num_seqs)](
        kv, wide, block_tables, tables, kv_lens, first_seq, block_tables.stride(0), max_blocks, spec.v_scale,
        HALF=half, HALF_PAD=half_pad, BLOCK_SIZE=block_size, num_warps=max(1, min(16, half_pad // 1024)),
    )  # fmt: skip
    return wide, tables
