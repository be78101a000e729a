# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Where the tokens of a step that only decodes stand, out of the persistent batch: one launch instead of nine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import PlacedDecodes


@triton.jit(do_not_specialize=["step_stride", "tokens_stride", "tables_stride"])
def place_kernel(step_ptr, tokens_ptr, tables_ptr, token_ids_ptr, slots_ptr, kv_lens_ptr, placed_ptr, step_stride,
                 tokens_stride, tables_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    seq = tl.program_id(0)
    row = tl.load(step_ptr + seq)
    position = tl.load(step_ptr + step_stride + seq)
    kv_len = tl.load(step_ptr + 2 * step_stride + seq)
    table_ptr = tables_ptr + row * tables_stride
    tl.store(token_ids_ptr + seq, tl.load(tokens_ptr + row * tokens_stride + position))
    block = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
    tl.store(slots_ptr + seq, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(kv_lens_ptr + seq, kv_len.to(tl.int32))
    num_blocks = (kv_len + BLOCK_SIZE - 1) // BLOCK_SIZE  # nobody follows the others
    to_ptr = placed_ptr + seq.to(tl.int64) * tables_stride
    for first in tl.range(0, num_blocks, TILE):
        blocks = first + tl.arange(0, TILE)
        tl.store(to_ptr + blocks, tl.load(table_ptr + blocks, mask=blocks < num_blocks), mask=blocks < num_blocks)


def place_decodes(step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
    """See Ops.place_decodes."""
    assert step.stride(1) == tokens.stride(1) == 1 and block_tables.is_contiguous()
    num_seqs, device = step.shape[1], step.device
    token_ids, slots = (torch.empty(num_seqs, dtype=torch.int64, device=device) for _ in range(2))
    kv_lens = torch.empty(num_seqs, dtype=torch.int32, device=device)
    tables = torch.empty((num_seqs, block_tables.shape[1]), dtype=torch.int32, device=device)
    place_kernel[(num_seqs,)](
        step, tokens, block_tables, token_ids, slots, kv_lens, tables, step.stride(0), tokens.stride(0),
        block_tables.stride(0), BLOCK_SIZE=block_size, TILE=256, num_warps=2,
    )  # fmt: skip
    return PlacedDecodes(token_ids, slots, kv_lens, tables)
