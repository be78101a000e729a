from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.triton.masks import ban_tokens


@pytest.mark.parametrize("vocab_size", [31, 320, 4100, 9000])
def test_only_lines_with_a_mask_lose_tokens_and_only_those_it_bans(vocab_size, device):
    rng = np.random.default_rng(vocab_size)
    logits = torch.randn((5, vocab_size), device=device)
    lines = [3, 0]
    allowed = rng.random((len(lines), -(-vocab_size // 32) * 32)) < 0.3
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    expected = logits.clone()
    for line, bits in zip(lines, torch.from_numpy(allowed).to(device), strict=True):
        expected[line].masked_fill_(~bits[:vocab_size], -torch.inf)
    ban_tokens(logits, torch.tensor(lines, device=device), torch.from_numpy(words).to(device))
    assert torch.equal(logits, expected)
