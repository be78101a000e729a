from __future__ import annotations

import pytest
import torch

from quire.plan import TokenLogprobs
from quire.sampling import compute_logprobs, prompt_logprobs, reference


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (found.token_id, found.rank, found.top_token_ids) == (
        expected.token_id,
        expected.rank,
        expected.top_token_ids,
    )
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [11, 1000, 9000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 64, -1])
def test_logprobs_are_those_of_log_softmax(vocab_size: int, num_top: int) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.randint(0, vocab_size, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    full = torch.log_softmax(logits.double(), dim=1)
    entries = prompt_logprobs(logits, targets, num_top)
    assert len(entries) == 9
    for row, (entry, target) in enumerate(zip(entries, targets, strict=True)):
        assert_close(entry, reference.token_logprobs(logits[row].tolist(), target, num_top))
        assert entry.logprob == pytest.approx(full[row, target].item(), abs=1e-5)
        assert len(entry.top_token_ids) == (vocab_size if num_top == -1 else min(num_top, vocab_size))
        assert entry.top_logprobs == pytest.approx(full[row, entry.top_token_ids].tolist(), abs=1e-5)


def test_equal_logits_rank_alike_and_are_listed_by_id() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, 5] = 1.0
    [entry] = prompt_logprobs(logits, [1999], 4)
    assert entry.rank == 2
    assert entry.top_token_ids == [5, 0, 1, 2]


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[300.0, 100.0, -400.0]])
    [entry] = prompt_logprobs(logits, [1], 1)
    assert entry == TokenLogprobs(1, -200.0, 2, [0], [0.0])


def test_rows_take_as_many_top_tokens_as_each_asked_for() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    pending = compute_logprobs(logits, torch.tensor([1, 2, 3]), 7)
    assert [len(entry.top_token_ids) for entry in pending.to_list([7, 0, 3])] == [7, 0, 3]


def test_logits_are_left_alone() -> None:
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    prompt_logprobs(logits, [0, 1, 2, 3], 5)
    assert torch.equal(logits, before)


def test_no_tokens_give_no_logprobs() -> None:
    assert prompt_logprobs(torch.empty(0, 10), [], 3) == []
