from __future__ import annotations

import pytest
import torch

from quire.kernels.interface import AttentionSpec
from quire.kernels.triton.widening import widen_prompts


@pytest.mark.parametrize("first_seq", [0, 2])
def test_the_prompts_blocks_come_in_their_order(first_seq, device):
    """Entries of the tables past a sequence's length are arbitrary, and are not followed."""
    spec = AttentionSpec(4, 2, 24, 1.0, k_scale=0.5, v_scale=3.0)
    kv = torch.randn(40, 2, 2, 4, 24, device=device).to(torch.float8_e4m3fn)
    lens = torch.tensor([9, 1, 8, 5, 13], dtype=torch.int32, device=device)
    tables = torch.full((5, 6), 1_000_000, dtype=torch.int32, device=device)
    ids = torch.randperm(40, dtype=torch.int32, device=device)
    for seq, length in enumerate(lens.tolist()):
        blocks = -(-length // 4)
        tables[seq, :blocks] = ids[:blocks]
        ids = ids[blocks:]
    wide, wide_tables = widen_prompts(
        kv, tables, lens, spec, torch.bfloat16, first_seq=first_seq, num_seqs=5 - first_seq, max_kv_len=15
    )
    for seq in range(first_seq, 5):
        blocks = -(-int(lens[seq]) // 4)
        found, expected = wide[wide_tables[seq, :blocks].long()], kv[tables[seq, :blocks].long()].float()
        assert torch.equal(found[:, 0].float(), expected[:, 0])
        assert torch.equal(found[:, 1], (expected[:, 1] * 3.0).bfloat16())
