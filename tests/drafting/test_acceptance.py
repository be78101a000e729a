"""How many drafts are worth a step's time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.drafting.acceptance import Candidate, Chances, Record, Trust, can_pay, choose
from quire.step_costs import DraftCosts, StepCosts, StepKind


def draft_costs(num_decodes: int, plain_s: float, extra_s: dict[int, float]) -> DraftCosts:
    costs = costs_of(num_decodes, plain_s, extra_s).draft_costs(num_decodes)
    assert costs is not None
    return costs


def costs_of(num_decodes: int, plain_s: float, extra_s: dict[int, float]) -> StepCosts:
    costs = StepCosts(prefill_tokens_per_s=1000.0)
    for _ in range(30):
        observe(costs, StepKind(num_decodes, 0), plain_s)
        for drafts, seconds in extra_s.items():
            observe(costs, StepKind(num_decodes, 0, drafts), plain_s + seconds)
        observe(costs, StepKind(num_decodes, 0), plain_s)
    return costs


def observe(costs: StepCosts, kind: StepKind, *seconds: float) -> None:
    """Steps of a kind, one after the other, on a host that takes no time."""
    for each in seconds:
        costs.observe_step(kind, device_s=each, total_s=each)


def plain_s(costs: StepCosts, num_decodes: int) -> float:
    known = costs.draft_costs(num_decodes)
    assert known is not None
    return known.plain_s


def test_a_chance_follows_what_is_seen_where_it_is_seen() -> None:
    chances = Chances()
    long, short, disputed = chances.of(20, True), chances.of(2, True), chances.of(2, False)
    for _ in range(400):
        chances.learn(2, True, is_right=False)
        chances.learn(20, True, is_right=True)
    assert chances.of(2, True) < 0.05 < short and chances.of(20, True) > max(0.95, long)
    assert chances.of(2, False) == disputed  # not where it was not


def test_a_request_s_own_record_tells_of_its_next_guess_and_agreement_of_those_behind_it() -> None:
    usual, doubtful = (Chances().reach(8, True, ratio, 4, 0.0) for ratio in (1.0, 0.5))
    assert doubtful == pytest.approx([each / 2 for each in usual])


def test_a_request_whose_guesses_miss_is_trusted_less_and_trusted_again() -> None:
    record = Record()
    assert record.ratio == 1
    for _ in range(10):
        record.learn(0.6, is_right=False)
    assert record.ratio < 0.5
    for _ in range(30):
        record.learn(0.6, is_right=True)
    assert record.ratio > 1.1


def test_nothing_is_drafted_before_a_plain_step_was_seen() -> None:
    assert StepCosts(prefill_tokens_per_s=1000.0).draft_costs(1) is None


def test_drafts_that_miss_or_cost_too_much_are_not_verified() -> None:
    cheap = draft_costs(1, 10e-3, {1: 1e-3, 3: 2e-3, 7: 4e-3})
    assert choose(cheap, 1, [Candidate(1, [0.9, 0.8, 0.7, 0.6])], 8).numbers == {1: 4}
    assert choose(cheap, 1, [Candidate(1, [0.1, 0.01])], 8).numbers == {}
    wide = draft_costs(64, 10e-3, {1: 1e-3, 16: 9e-3, 64: 20e-3})
    assert not can_pay(wide, 64, 512)
    assert choose(wide, 64, [Candidate(i, [0.95]) for i in range(64)], 512).numbers == {}


def test_what_wide_steps_promise_in_vain_is_believed_less_there_and_in_time_again() -> None:
    trust = Trust()
    first = trust.of(200)
    assert 0.5 < first < 1
    for _ in range(10):
        trust.chose(200, expected=50.0)
        trust.judged(5)
        trust.judged(15)
    assert 0.35 < trust.of(200) < 0.5 and trust.of(3) == first
    cheap = draft_costs(200, 10e-3, {20: 1e-3, 60: 2e-3})
    candidates = [Candidate(i, [0.9]) for i in range(60)]
    assert (
        choose(cheap, 200, candidates, 100).numbers and not choose(cheap, 200, candidates, 100, trust.of(200)).numbers
    )
    for _ in range(3000):
        trust.chose(200, expected=0.0)
    assert trust.of(200) > 0.95 * first
    for _ in range(20):
        trust.chose(200, expected=50.0)
        trust.judged(50)
    assert trust.of(200) > 0.98  # what keeps its promises is believed in full


def test_costs_that_do_not_grow_evenly_are_followed() -> None:
    """As where 16 rows are one tile: 15 drafts cost less than 7."""
    tiles = draft_costs(1, 16e-3, {1: 6e-3, 3: 9e-3, 7: 40e-3, 11: 60e-3, 15: 16e-3})
    sure = [0.97**i for i in range(1, 16)]
    assert choose(tiles, 1, [Candidate(1, sure)], 100).numbers == {1: 15}
    assert choose(tiles, 1, [Candidate(1, sure[:7])], 100).numbers == {1: 3}  # where there are no 15


chances_of_one = st.lists(st.floats(0.2, 0.99), min_size=1, max_size=3).map(
    lambda ratios: list(itertools.accumulate(ratios, lambda a, b: a * b))
)


@given(st.lists(chances_of_one, min_size=1, max_size=3), st.floats(0.1, 1.5))
def test_no_other_choice_brings_more_tokens_a_second(lines: list[list[float]], slope: float) -> None:
    plain_s = 10e-3
    extra_s = {n: slope * 3e-3 * n for n in range(1, 10)}
    costs = draft_costs(len(lines), plain_s, extra_s)
    chosen, expected = choose(costs, len(lines), [Candidate(i, line) for i, line in enumerate(lines)], 100)
    assert expected == pytest.approx(sum(sum(lines[i][:number]) for i, number in chosen.items()))

    def rate(numbers: tuple[int, ...]) -> float:
        tokens = len(lines) + sum(sum(line[:n]) for line, n in zip(lines, numbers, strict=True))
        return tokens / (plain_s + extra_s.get(sum(numbers), 0.0))

    best = max(rate(numbers) for numbers in itertools.product(*(range(len(line) + 1) for line in lines)))
    ours = rate(tuple(chosen.get(i, 0) for i in range(len(lines))))
    assert ours >= best / 1.06 and ours >= len(lines) / plain_s * 0.999


def test_one_slow_step_neither_opens_nor_shuts_the_gate() -> None:
    costs = costs_of(1, 10e-3, {3: 4e-3})
    observe(costs, StepKind(1, 0, 3), 1.0)  # somebody else had the machine
    observe(costs, StepKind(1, 0), 10e-3)
    assert costs.drafts_s(1, 3) < 9e-3
    observe(costs, StepKind(1, 0), 1.0)
    assert plain_s(costs, 1) == pytest.approx(16e-3)


def test_what_drafts_cost_is_forgotten_in_time_so_that_it_is_tried_again() -> None:
    costs = costs_of(1, 10e-3, {3: 100e-3})
    assert costs.drafts_s(1, 3) > 50e-3
    observe(costs, StepKind(1, 0), *[10e-3] * 2001)
    assert costs.drafts_s(1, 3) == pytest.approx(3e-3)  # as long as a prompt's tokens would take


def test_drafts_do_not_teach_what_decodes_alone_cost() -> None:
    costs = costs_of(4, 10e-3, {})
    observe(costs, StepKind(4, 0, 20), *[50e-3] * 20)
    observe(costs, StepKind(4, 0), 10e-3)
    assert costs.decodes_s == pytest.approx(10e-3) and plain_s(costs, 4) == pytest.approx(10e-3)
    assert costs.drafts_s(4, 20) == pytest.approx(40e-3, rel=0.3)
    assert costs.drafts_s(4, 10) == pytest.approx(20e-3, rel=0.3)  # between what was seen it is a line
    assert costs.draft_costs(5) is None
    observe(costs, StepKind(5, 0), 10e-3)
    assert costs.drafts_s(5, 20) == costs.drafts_s(4, 20)  # the nearest that was seen


def test_a_step_that_drafts_beside_prompts_made_late_does_not_teach_what_decodes_cost() -> None:
    costs = StepCosts(prefill_tokens_per_s=1000.0, plans_ahead=True)
    observe(costs, StepKind(4, 0), *[10e-3] * 5)
    for _ in range(5):
        observe(costs, StepKind(4, 100, 20), 60e-3)
        observe(costs, StepKind(4, 0), 20e-3)  # planned when that one's result was there
    assert plain_s(costs, 4) == pytest.approx(10e-3)
