"""Looking tokens up in what was there before."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from quire.drafting.history import MAX_CANDIDATES, MAX_WALKED, Match, Text


def text_of(tokens: list[int], gram: int) -> Text:
    text = Text(gram)
    text.append(tokens)
    return text


def longest(tokens: list[int], context: list[int], gram: int, depth: int, ends: range) -> int:
    """The plain way to find how long the best match is."""
    best = 0
    for end in ends:
        length = 0
        while length < min(depth, end, len(context)) and tokens[end - 1 - length] == context[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= gram else 0


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 4), st.integers(0, 4), st.randoms())
def test_a_match_is_a_real_one_and_the_longest_of_the_latest(
    tokens: list[int], gram: int, more: int, rng: random.Random
) -> None:
    text = Text(gram)
    while len(text.tokens) < len(tokens):
        text.append(tokens[len(text.tokens) : len(text.tokens) + rng.randint(1, 9)])
        grown = text.tokens
        match = text.find(grown, gram + more)
        best = longest(grown, grown, gram, gram + more, range(gram, len(grown)))
        if match is None:
            assert best == 0 or len(grown) > MAX_WALKED
            continue
        assert gram <= match.length <= best
        assert match.position < len(grown)  # there is a token to follow
        assert grown[match.position - match.length : match.position] == grown[-match.length :]
        if len(grown) <= MAX_CANDIDATES:  # few enough places that all of them are compared
            assert match.length == best


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    text = text_of([1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 3, 4, 70, 1, 2, 3, 4], 2)
    assert text.find(text.tokens, 2) == Match(text, 12, 2, is_unanimous=False)
    assert text.find(text.tokens, 8) == Match(text, 4, 4, is_unanimous=False)
    assert text.find([7, 8, 3, 4], 8) == Match(text, 12, 3, is_unanimous=False)
    assert text.find([6, 6], 8) is None and text.find([6], 8) is None


def test_chains_are_kept_when_their_heads_become_more() -> None:
    text = Text(2)
    for first in range(0, 3000, 7):
        text.append(range(first, first + 7))
    assert text.find([1000, 1001], 8) == Match(text, 1002, 2, is_unanimous=True)
    assert text.find([2, 3, 4], 8) == Match(text, 5, 3, is_unanimous=True)
