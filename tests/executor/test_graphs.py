"""The part of decode graphs that needs no GPU: the sizes that they are captured for."""

from __future__ import annotations

from quire.executor.graphs import MAX_GRAPH_SEQS, padded_size


def test_padding_is_enough_and_little() -> None:
    sizes = [padded_size(n) for n in range(1, MAX_GRAPH_SEQS + 1)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert all(size - n < max(n / 4, 8) for n, size in enumerate(sizes, start=1))
    assert all(padded_size(size) == size for size in sizes)
    assert len(set(sizes)) <= 64  # each costs a capture
