from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps


@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_decodes_are_placed_as_their_rows_stand(block_size, device):
    """Only what is within a sequence's length counts of its table; a padding row is one like the others."""
    num_rows, max_len = 7, 1100
    num_blocks = -(-max_len // block_size)
    tokens = torch.randint(0, 1000, (num_rows, max_len + 1), device=device)
    tables = torch.randperm(num_rows * num_blocks, device=device).view(num_rows, num_blocks).to(torch.int32)
    rows = [5, 0, 6, 2, 6]
    positions = [0, max_len - 1, 3, 517, 3]
    every = torch.zeros((3, 9), dtype=torch.int64, device=device)
    step = every[:, : len(rows)]
    for i, values in enumerate((rows, positions, [position + 1 for position in positions])):
        step[i] = torch.tensor(values, device=device)
    expected = ReferenceOps(device, torch.float32).place_decodes(step, tokens, tables, block_size)
    found = TritonOps(device, torch.float32).place_decodes(step, tokens, tables, block_size)
    for mine, other in zip(found[:3], expected[:3], strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    assert found.block_tables.shape == expected.block_tables.shape and found.block_tables.dtype == torch.int32
    for seq, position in enumerate(positions):
        used = position // block_size + 1
        assert torch.equal(found.block_tables[seq, :used], expected.block_tables[seq, :used])
