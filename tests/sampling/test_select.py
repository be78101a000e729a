from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.sampling.select import chunks, max_top_k, row_max, tokens_from, top_bound

VOCAB_SIZES = (1, 7, 513, 1000, 4096, 5001)


def values_with_ties(num_rows: int, vocab_size: int, seed: int, num_levels: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_levels, (num_rows, vocab_size), generator=generator).float() - num_levels / 2


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_row_max_finds_the_first_of_the_largest(vocab_size: int) -> None:
    for values in (
        values_with_ties(5, vocab_size, 1),
        torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(2)),
    ):
        largest, token_ids = row_max(values)
        assert torch.equal(largest, values.amax(1))
        for row, token_id in zip(values, token_ids, strict=True):
            assert token_id == (row == row.max()).nonzero()[0, 0]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("place", ["first", "last"])
def test_row_max_reports_nan_and_banned_rows(vocab_size: int, place: str) -> None:
    values = torch.zeros(3, vocab_size)
    values[0, 0 if place == "first" else -1] = torch.nan
    values[1] = -torch.inf
    largest, token_ids = row_max(values)
    assert largest[0].isnan() and largest[1] == -torch.inf and largest[2] == 0
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    vocab_size=st.sampled_from([640, 1000, 4096, 5001]),
    num_levels=st.sampled_from([2, 5, 50, 100_000]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_tokens_from_a_top_bound_start_with_the_top_k(
    vocab_size: int, num_levels: int, seed: int, data: st.DataObject
) -> None:
    values = values_with_ties(4, vocab_size, seed, num_levels)
    ks = data.draw(st.lists(st.integers(1, max_top_k(vocab_size)), min_size=4, max_size=4))
    found, token_ids = tokens_from(values, top_bound(values, torch.tensor(ks)[:, None], max(ks)))
    expected, expected_ids = torch.sort(values, dim=1, descending=True, stable=True)
    for row, k in enumerate(ks):
        assert torch.equal(found[row, :k], expected[row, :k])
        assert torch.equal(token_ids[row, :k], expected_ids[row, :k])


def test_tokens_from_leaves_out_what_is_banned() -> None:
    values = torch.full((2, 5001), -torch.inf)
    values[0, 5000] = 1.0
    values[0, 17] = 2.0
    found, token_ids = tokens_from(values, top_bound(values, torch.full((2, 1), 20), 20))
    assert found.tolist() == [[2.0, 1.0], [-torch.inf, -torch.inf]]
    assert token_ids[0].tolist() == [17, 5000]


def test_tokens_from_holds_exactly_those_that_reach_the_bound() -> None:
    values = torch.randn(6, 9001, generator=torch.Generator().manual_seed(0))
    bound = values.sort(dim=1, descending=True).values[:, 99:100]
    found, token_ids = tokens_from(values, bound)
    assert found.shape == (6, 100)
    assert torch.equal(found, values.gather(1, token_ids))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64])
def test_chunks_cover_all_rows_once(num_rows: int) -> None:
    for vocab_size in (10, 49_152, 10_000_000):
        rows = [row for piece in chunks(num_rows, vocab_size, torch.device("cpu")) for row in range(num_rows)[piece]]
        assert rows == list(range(num_rows))
