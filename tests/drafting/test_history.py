"""Looking tokens up in what was there before."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from quire.drafting.history import AnswerCache, History, Match

A, B = ("a", None), ("b", None)


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
    grown: list[int] = []
    history = History(grown, gram)
    while len(grown) < len(tokens):
        grown.extend(tokens[len(grown) : len(grown) + rng.randint(1, 9)])
        history.extend()
        match = history.find(grown, gram + more)
        best = longest(grown, grown, gram, gram + more, range(gram, len(grown)))
        assert (match is None) == (best == 0)
        if match is not None:
            assert gram <= match.length <= best
            assert match.position < len(grown)  # there is a token to follow
            assert grown[match.position - match.length : match.position] == grown[-match.length :]
            if len(grown) <= 9:  # few enough places that all of them are compared
                assert match.length == best


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 3, 4, 70, 1, 2, 3, 4]
    history = History(tokens, 2)
    history.extend()
    assert history.find(tokens, 2) == Match(tokens, 12, 2, is_unanimous=False)
    assert history.find(tokens, 8) == Match(tokens, 4, 4, is_unanimous=False)
    assert history.find([7, 8, 3, 4], 8) == Match(tokens, 12, 3, is_unanimous=False)
    assert history.find([6, 6], 8) is None and history.find([6], 8) is None


def test_a_long_prompt_is_entered_in_pieces() -> None:
    tokens = [*range(30_000), 5, 6]
    history = History(tokens, 2)
    history.extend()
    assert 0 < history.num_indexed < len(tokens)
    while history.num_indexed < len(tokens) - 1:
        before = history.num_indexed
        history.extend()
        assert history.num_indexed > before
    assert history.find(tokens, 8) == Match(tokens, 7, 2, is_unanimous=True)
    assert history.num_bytes < 20 * len(tokens)


def test_answers_of_one_scope_are_never_found_in_another() -> None:
    cache = AnswerCache(gram=2, max_answers=10)
    cache.add(A, [1, 2, 3, 4, 5])
    assert cache.find(A, [1, 2], 8) is not None
    assert cache.find(B, [1, 2], 8) is None and cache.find((None, None), [1, 2], 8) is None
    assert cache.find(("a", "adapter"), [1, 2], 8) is None
    assert cache.find(A, [4, 5], 8) is None  # the answer ended there


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=80), st.integers(1, 6))
def test_memory_is_bounded_and_the_newest_answer_is_always_there(answers: list[tuple[str, int]], most: int) -> None:
    cache = AnswerCache(gram=2, max_answers=most, max_tokens=200)
    for i, (name, size) in enumerate(answers):
        answer = [1000 * i + t for t in range(size + 2)]
        cache.add((name, None), answer)
        assert cache.find((name, None), answer[-3:-1], 4) is not None
        assert cache.num_answers <= most and cache.num_tokens <= cache.max_tokens
        kept = cache._scopes.values()
        assert cache.num_answers == sum(each.num_young + each.num_old for each in kept)
        assert cache.num_tokens == sum(each.num_tokens for each in kept)


def test_no_answers_are_kept_where_none_are_wanted() -> None:
    cache = AnswerCache(gram=2, max_answers=0)
    cache.add(A, [1, 2, 3])
    assert cache.num_tokens == 0
