"""The part of decode graphs that needs no GPU: the sizes that they are captured for."""

from __future__ import annotations

import pytest

from quire.executor.graphs import common_sizes, other_sizes
from quire.executor.sizing import MAX_GRAPH_SEQS, padded_size


def test_padding_is_enough_and_little() -> None:
    sizes = [padded_size(n) for n in range(1, MAX_GRAPH_SEQS + 1)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert all(size - n < max(n / 4, 8) for n, size in enumerate(sizes, start=1))
    assert all(padded_size(size) == size for size in sizes)
    assert len(set(sizes)) <= 64  # each costs a capture


@pytest.mark.parametrize("max_num_seqs", [1, 6, 24, 100, 256, 512])
def test_every_size_is_captured_at_start_or_later(max_num_seqs: int) -> None:
    common, other = common_sizes(max_num_seqs), other_sizes(max_num_seqs)
    assert not set(common) & set(other) and other[1:] == sorted(other[1:])
    assert max(other, default=0) == (other or [0])[0]  # the others fit into its memory
    assert {padded_size(num) for num in range(1, max_num_seqs + 1)} <= set(common) | set(other)
