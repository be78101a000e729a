"""Which earlier answers are kept, and who finds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.drafting.answers import AnswerCache, Scope
from quire.drafting.lines import Lines, Rules, Step
from quire.step_costs import DraftCosts

A, B = ("a", None), ("b", None)
RULES = Rules(gram=2, depth=8, most=8, factor=8.0, min_chance=0.0)
FREE = DraftCosts(plain_s=1.0, more_s=0.0)


def cache_of(max_answers: int, **fields: int) -> AnswerCache:
    return AnswerCache(Lines(RULES), RULES.gram, max_answers, **fields)


def found(cache: AnswerCache, scope: Scope, context: list[int]) -> list[int]:
    """What a sequence of that scope would be drafted."""
    cache.lines.open(0, cache.enter(scope))
    cache.lines.enter(0, context)
    drafts = cache.lines.step(Step(1, 8, keys=[7], slots=[0], num_new=[0], num_unknown=[0]), FREE)
    cache.lines.close(0)
    cache.leave(scope)
    return drafts.get(7, [])


def test_answers_of_one_scope_are_never_found_in_another() -> None:
    cache = cache_of(10)
    cache.add(A, [1, 2, 3, 4, 5])
    assert found(cache, A, [1, 2]) == [3, 4, 5]
    assert not found(cache, B, [1, 2]) and not found(cache, (None, None), [1, 2])
    assert not found(cache, ("a", "adapter"), [1, 2])
    assert not found(cache, A, [4, 5])  # the answer ended there
    assert list(cache._scopes) == [A]  # who has neither answers nor readers is forgotten


def test_an_answer_that_comes_while_a_line_runs_is_found_by_it() -> None:
    cache = cache_of(10)
    cache.lines.open(0, cache.enter(A))
    cache.lines.enter(0, [8, 1, 2])
    cache.add(B, [1, 2, 9, 9])
    cache.add(A, [1, 2, 3, 4])
    step = Step(1, 8, keys=[7], slots=[0], num_new=[0], num_unknown=[0])
    assert cache.lines.step(step, FREE) == {7: [3, 4]}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=80), st.integers(1, 6))
def test_memory_is_bounded_and_the_newest_answer_is_always_there(answers: list[tuple[str, int]], most: int) -> None:
    cache = cache_of(most, max_tokens=200)
    for i, (name, size) in enumerate(answers):
        answer = [1000 * i + t for t in range(size + 2)]
        cache.add((name, None), answer)
        assert found(cache, (name, None), answer[-3:-1]) == answer[-1:]
        assert cache.num_answers <= most and cache.num_tokens <= cache.max_tokens
        kept = [each for scope in cache._scopes.values() for each in (scope.young, scope.old)]
        assert cache.num_answers == sum(each.num_answers for each in kept)
        assert cache.num_tokens == sum(each.num_tokens for each in kept)


def test_the_scope_that_was_not_used_for_longest_is_forgotten_first() -> None:
    cache = cache_of(3)
    for scope in (A, B, ("c", None)):
        cache.add(scope, [1, 2, 3, 4])
    assert found(cache, A, [1, 2])  # used
    cache.add(("d", None), [1, 2, 3, 4])
    assert found(cache, A, [1, 2]) and not found(cache, B, [1, 2])


@pytest.mark.parametrize("answer", [[], [1, 2]])
def test_too_short_to_be_found_is_not_kept(answer: list[int]) -> None:
    cache = cache_of(3)
    cache.add(A, answer)
    assert cache.num_tokens == 0 and not cache._scopes


def test_no_answers_are_kept_where_none_are_wanted() -> None:
    cache = cache_of(0)
    cache.add(A, [1, 2, 3])
    assert cache.num_tokens == 0
