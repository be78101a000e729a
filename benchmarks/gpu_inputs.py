"""Random inputs for attention kernels on a GPU, with every trap that the interface allows; and the truth about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_measure import error
from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.reference import ReferenceOps
from quire.kernels.shared_prefix import find_shared_prefixes, pack_shared_prefixes, unpack_shared_prefixes

LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
BLOCK_SIZE = 16


@dataclass(slots=True, frozen=True)
class Shape:
    """A step's sequences."""

    lens: Sequence[int]  # KV tokens
    queries: Sequence[int]  # new tokens
    anchor_us: float = math.nan  # FlashAttention-3 on the same machine
    prefix_groups: int = 0  # sequences i, i + groups, i + 2 * groups ... begin with the same blocks
    prefix_len: int = 0

    @property
    def num_kv_tokens(self) -> int:
        """Each block counted once."""
        shared = self.prefix_len * (len(self.lens) - self.prefix_groups) if self.prefix_groups else 0
        return sum(self.lens) - shared

    @property
    def kv_bytes(self) -> int:
        return self.num_kv_tokens * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 2


def decodes(lens: Sequence[int], anchor_us: float = math.nan) -> Shape:
    return Shape(lens, [1] * len(lens), anchor_us)


def spread(count: int, low: int, high: int) -> list[int]:
    """Evenly spread lengths, shuffled by a fixed stride so that neighbours differ."""
    lens = [low + (high - low) * i // max(count - 1, 1) for i in range(count)]
    stride = next(s for s in range(count // 3 + 1, count + 2) if math.gcd(s, count) == 1)
    return [lens[i * stride % count] for i in range(count)]


def attention_inputs(
    shape: Shape,
    spec: AttentionSpec = LLAMA,
    block_size: int = BLOCK_SIZE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Random q and KV with blocks scattered over the cache; what no sequence holds is NaN, table ends are wild."""
    device, lens, queries = "cuda", shape.lens, shape.queries
    counts = [-(-n // block_size) for n in lens]
    shared = shape.prefix_len // block_size if shape.prefix_groups else 0
    num_blocks = sum(counts) - shared * (len(lens) - shape.prefix_groups) + 4
    kv = torch.empty(num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim, dtype=dtype, device=device)
    kv.normal_()
    order = np.random.default_rng().permutation(num_blocks).astype(np.int32)
    tables = np.full((len(lens), max(counts) + 1), 2**30, dtype=np.int32)
    first = shape.prefix_groups * shared
    for i, (count, length) in enumerate(zip(counts, lens, strict=True)):
        if shared:
            group = i % shape.prefix_groups
            tables[i, :shared] = order[group * shared : (group + 1) * shared]
        tables[i, shared:count] = order[first : first + count - shared]
        first += count - shared
        if length % block_size:
            kv[int(tables[i, count - 1]), :, :, length % block_size :] = math.nan
    kv[torch.from_numpy(order[first:]).to(device).long()] = math.nan
    starts = torch.tensor([0, *np.cumsum(queries).tolist()], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lens, queries, strict=True)])
    num_decodes = next((i for i, n in enumerate(queries) if n != 1), len(queries))
    batch = AttentionBatch(
        positions=positions.to(device),
        slots=torch.zeros(sum(queries), dtype=torch.int64, device=device),
        query_starts=starts,
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(tables).to(device),
        max_query_len=max(queries),
        max_kv_len=max(lens),
        num_decodes=num_decodes,
    )
    if shape.prefix_groups:
        full = (np.array(lens) - 1) // block_size
        groups = find_shared_prefixes(tables[:num_decodes], full[:num_decodes], block_size)
        assert len(groups) == shape.prefix_groups and all(g.num_tokens == shape.prefix_len for g in groups)
        packed = torch.from_numpy(pack_shared_prefixes(groups, num_decodes, 16)).to(device)
        batch.shared = unpack_shared_prefixes(packed, num_decodes, 16)
    q = torch.randn(sum(queries), spec.num_heads * spec.head_dim, device=device).to(dtype)
    return q, kv.to(kv_dtype or dtype), batch


def attention_error(out: Tensor, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> float:
    """Against plain torch in float32, for a few of the sequences."""
    num_seqs = batch.kv_lens.shape[0]
    chosen = sorted({0, num_seqs // 3, max(batch.num_decodes - 1, 0), num_seqs - 1})
    starts = batch.query_starts.tolist()
    worst = 0.0 if torch.isfinite(out).all() else math.inf
    for i in chosen:
        rows = slice(starts[i], starts[i + 1])
        length = starts[i + 1] - starts[i]
        one = replace(
            batch,
            positions=batch.positions[rows],
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=q.device),
            kv_lens=batch.kv_lens[i : i + 1],
            block_tables=batch.block_tables[i : i + 1],
            max_query_len=length,
            max_kv_len=int(batch.kv_lens[i]),
            num_decodes=int(length == 1),
            shared=None,
        )
        expected = ReferenceOps(q.device, torch.float32).attention(q[rows].float(), kv, one, spec)
        worst = max(worst, error(out[rows], expected))
    return worst
