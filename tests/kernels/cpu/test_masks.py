from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.cpu import masks
from quire.kernels.cpu.library import available_isas, load_functions


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("vocab_size", [64, 1000, 33])
def test_tokens_without_a_bit_become_impossible(isa: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits past the vocabulary are not looked at, and neither are lines without a mask."""
    chance = np.random.default_rng(vocab_size)
    packed = chance.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int32)
    packed[1] = 0
    packed[2] = -1
    logits = torch.randn(5, vocab_size)
    expected = logits.clone()
    monkeypatch.setattr(masks, "_functions", lambda: None)
    counts = masks.ban_tokens(expected, [4, 0, 2], packed)
    monkeypatch.setattr(masks, "_functions", lambda: load_functions(isa))
    assert masks.ban_tokens(logits, [4, 0, 2], packed) == counts
    assert torch.equal(logits, expected)
    assert counts[1:] == [0, vocab_size] and torch.isinf(logits[0]).all()
    assert counts[0] == torch.isfinite(logits[4]).sum()
