"""The part of graphs that needs no GPU: the sizes that they are captured for, and which serves a step."""

from __future__ import annotations

import operator

import pytest

from quire.executor.captured import CAPTURE_COST, COST_WITHOUT_GRAPH, Fallbacks
from quire.executor.decode_graphs import DecodeShape, common_sizes, other_sizes
from quire.executor.mixed_graphs import MixedShape, all_shapes
from quire.executor.sizing import MAX_GRAPH_SEQS, MAX_MIXED_DECODES, is_slow, padded_size, smooth_prompt_tokens


def test_padding_is_enough_and_little() -> None:
    sizes = [padded_size(n) for n in range(1, MAX_GRAPH_SEQS + 1)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert all(size - n < max(n / 4, 8) for n, size in enumerate(sizes, start=1))
    assert all(padded_size(size) == size for size in sizes)
    assert len(set(sizes)) <= 64  # each costs a capture


def test_no_step_is_padded_to_rows_that_multiply_slower_than_more_would() -> None:
    assert is_slow(448)
    assert [padded_size(n) for n in (416, 417, 440, 448, 457, 512)] == [416, 432, 456, 456, 512, 512]
    assert not any(is_slow(padded_size(n)) for n in range(1, MAX_GRAPH_SEQS + 1))
    assert not any(is_slow(shape.total_tokens) for shape in all_shapes(1000))


def test_a_smooth_step_fills_a_shape_of_384_tokens_and_no_more() -> None:
    for num_decodes in range(1, MAX_MIXED_DECODES + 1):
        tokens = smooth_prompt_tokens(num_decodes)
        shape = next(s for s in sorted(all_shapes(1000), key=lambda s: s.total_tokens)
                     if s.holds(MixedShape(num_decodes, tokens)))  # fmt: skip
        assert shape.total_tokens <= 384 and shape.num_tokens == tokens >= 128
    assert smooth_prompt_tokens(1000) == smooth_prompt_tokens(MAX_MIXED_DECODES)


@pytest.mark.parametrize("max_num_seqs", [1, 6, 24, 100, 256, 512])
def test_every_size_is_captured_at_start_or_later(max_num_seqs: int) -> None:
    common, other = common_sizes(max_num_seqs), other_sizes(max_num_seqs)
    assert not set(common) & set(other) and other[1:] == sorted(other[1:])
    assert max(other, default=0) == (other or [0])[0]  # the others fit into its memory
    assert {padded_size(num) for num in range(1, max_num_seqs + 1)} <= set(common) | set(other)


def test_a_larger_graph_stands_in_until_the_own_one_pays() -> None:
    fallbacks = Fallbacks[int](holds=operator.ge, size=int)
    uses = CAPTURE_COST // 24
    assert [fallbacks.pays(40, 64) for _ in range(uses + 2)] == [False] * uses + [True] * 2
    assert not fallbacks.pays(24, 64)  # each shape counts for itself
    without = CAPTURE_COST // COST_WITHOUT_GRAPH
    assert [fallbacks.pays(300, None) for _ in range(without)] == [False] * (without - 1) + [True]
    assert [fallbacks.find(size, [256, 8, 64]) for size in (40, 64, 65, 300)] == [64, 64, 256, None]


def test_a_step_that_shares_a_prefix_may_do_without_reading_it_once() -> None:
    plain, shared = DecodeShape(64, shares=False), DecodeShape(64, shares=True)
    assert plain.holds(shared) and DecodeShape(128, shares=False).holds(shared) and not shared.holds(plain)
    assert not DecodeShape(128, shares=True).holds(shared)  # groups are packed for one size
    assert not DecodeShape(32, shares=False).holds(plain)


def test_a_mixed_step_needs_room_for_its_decodes_and_its_tokens() -> None:
    fallbacks = Fallbacks[MixedShape](holds=MixedShape.holds, size=lambda shape: shape.total_tokens)
    captured = [MixedShape(0, 512), MixedShape(64, 64), MixedShape(64, 320), MixedShape(128, 128)]
    assert fallbacks.find(MixedShape(32, 128), captured) == MixedShape(128, 128)
    assert fallbacks.find(MixedShape(32, 192), captured) == MixedShape(64, 320)
    assert fallbacks.find(MixedShape(256, 64), captured) is None
