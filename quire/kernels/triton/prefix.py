# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Attention of decodes to the prefix that they share: its keys and values are read once for many sequences.

One program takes one KV head, a tile of rows (sequences of one group times the query heads that share the KV head) and
a part of the group's prefix. Every row sees every key, so there is no mask. How prefixes are cut into parts is decided
on the device, as in decode.py, so that a captured step serves any grouping. What the parts find is where the
sequences' own first pieces start from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import PREFIX_ALIGN, AttentionSpec, SharedPrefixes
from quire.kernels.triton.common import compute_dtype, next_power_of_2
from quire.kernels.triton.configs import NUM_SMS, PrefixConfig, padded_head_dim
from quire.kernels.triton.decode import PrefixResults, can_share, qk_scale
from quire.kernels.triton.prefill import attend


@triton.jit(do_not_specialize=["num_groups", "table_stride", "wanted_items"])
def prefix_kernel(q_ptr, kv_ptr, tables_ptr, members_ptr, starts_ptr, lens_ptr, partial_ptr, lse_ptr, found_ptr,
                  num_groups, table_stride, wanted_items, scale, softcap,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
                  SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, GROUPS_PAD: tl.constexpr, MIN_TILES: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """ "Group" is a group of sequences here; GROUP is the number of query heads to a KV head."""
    SEQS: tl.constexpr = TILE_ROWS // GROUP  # of a tile
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    index = tl.arange(0, GROUPS_PAD)
    starts = tl.load(starts_ptr + index, mask=index < num_groups, other=0)
    sizes = tl.load(starts_ptr + index + 1, mask=index < num_groups, other=0) - starts
    tiles = tl.load(lens_ptr + index, mask=index < num_groups, other=0) // TILE_TOKENS
    row_tiles = (sizes + SEQS - 1) // SEQS
    work = tl.sum(row_tiles * tiles, axis=0)
    tiles_per_part = tl.maximum((work + wanted_items - 1) // wanted_items, MIN_TILES)
    parts = (tiles + tiles_per_part - 1) // tiles_per_part
    items = row_tiles * parts
    group = tl.sum(((tl.cumsum(items, axis=0) <= item) & (index < num_groups)).to(tl.int32), axis=0)
    if group >= num_groups:
        return
    num_parts = tl.sum(tl.where(index == group, parts, 0), axis=0)
    num_tiles = tl.sum(tl.where(index == group, tiles, 0), axis=0)
    num_seqs = tl.sum(tl.where(index == group, sizes, 0), axis=0)
    first_member = tl.sum(tl.where(index == group, starts, 0), axis=0)
    place = item - tl.sum(tl.where(index < group, items, 0), axis=0)
    row_tile = place // num_parts
    part = place % num_parts  # a tile's parts are neighbours: decode.py finds them by the first one and their number

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_PAD)
    rank = row_tile * SEQS + rows // GROUP
    exists = (rows < SEQS * GROUP) & (rank < num_seqs)
    seq = tl.load(members_ptr + first_member + rank, mask=exists, other=0)
    if (kv_head == 0) & (part == 0):
        tl.store(found_ptr + seq * 3, item, mask=exists)
        tl.store(found_ptr + seq * 3 + 1, num_parts, mask=exists)
        tl.store(found_ptr + seq * 3 + 2, rows // GROUP * GROUP, mask=exists)
    q_row = (seq * KV_HEADS + kv_head) * GROUP + rows % GROUP
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
    # All tables of the group begin alike: any of them will do.
    table_ptr = tables_ptr + tl.load(members_ptr + first_member).to(tl.int64) * table_stride

    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
    acc, top, weight_sum = attend(
        acc, top, weight_sum, q, kv_ptr, table_ptr, part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts,
        num_tiles * TILE_TOKENS, rows, kv_head, scale, softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS,
        0, SOFTCAP, COMPUTE, False, STAGES,
    )  # fmt: skip
    entry = (item * KV_HEADS + kv_head) * TILE_ROWS + rows
    acc = acc / weight_sum[:, None]
    tl.store(partial_ptr + entry[:, None] * DIM_PAD + dims[None, :], acc, mask=exists[:, None])
    tl.store(lse_ptr + entry, tl.log2(weight_sum) + top, mask=exists)


def prefix_attention(
    q: Tensor,  # [seqs, heads * head_dim]: the first rows of a step
    kv: Tensor,
    block_tables: Tensor,
    shared: SharedPrefixes,
    spec: AttentionSpec,
    config: PrefixConfig,
    *,
    num_seqs: int,
) -> PrefixResults:
    """Attention of the grouped sequences' rows to their groups' prefixes."""
    group = spec.num_heads // spec.num_kv_heads
    assert can_share(spec)
    assert PREFIX_ALIGN % config.tile_tokens == 0 and PREFIX_ALIGN % kv.shape[3] == 0
    assert group <= config.tile_rows, f"{group} query heads share a KV head, but a tile has {config.tile_rows} rows"
    num_groups = shared.group_lens.shape[0]
    dim_pad = padded_head_dim(spec.head_dim)
    wanted_items = max(1, config.programs_per_sm * NUM_SMS // spec.num_kv_heads)
    # Each tile of rows has whole parts, of which there are at most wanted_items, and at most one short one.
    max_items = wanted_items + num_seqs // (config.tile_rows // group) + num_groups
    entries = (max_items, spec.num_kv_heads, config.tile_rows)
    results = PrefixResults(
        seq_lens=shared.seq_lens,
        found=torch.empty((num_seqs, 3), dtype=torch.int32, device=q.device),
        partial=torch.empty((*entries, dim_pad), dtype=torch.float32, device=q.device),
        lse=torch.empty(entries, dtype=torch.float32, device=q.device),
    )
    prefix_kernel[(spec.num_kv_heads, max_items)](
        q, kv, block_tables, shared.members, shared.group_starts, shared.group_lens, results.partial, results.lse,
        results.found, num_groups, block_tables.stride(0), wanted_items, qk_scale(spec), spec.softcap or 0.0,
        KV_HEADS=spec.num_kv_heads, GROUP=group, HEAD_DIM=spec.head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=kv.shape[3],
        TILE_ROWS=config.tile_rows, TILE_TOKENS=config.tile_tokens, SOFTCAP=spec.softcap is not None,
        COMPUTE=compute_dtype(q.dtype, kv.dtype), GROUPS_PAD=max(16, next_power_of_2(num_groups)),
        MIN_TILES=config.min_tiles_per_split, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return results
