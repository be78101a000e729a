"""How fast replicas are, as they show and as they tell, and how much they had to do."""

from __future__ import annotations

import pytest

from quire.router.rates import Rates, RecentWork

NOTHING_TOLD = dict.fromkeys(range(4))


def time_prompts(rates: Rates, bit: int, tokens_per_s: float, count: int = 12) -> None:
    for _ in range(count):
        rates.observe(bit, 100, 100 / tokens_per_s)


def test_where_nothing_is_known_all_have_the_first_rate() -> None:
    assert Rates().of(NOTHING_TOLD, 1_000.0) == dict.fromkeys(range(4), 1_000.0)


def test_until_prompts_were_timed_what_is_told_counts_and_who_tells_nothing_is_as_the_others() -> None:
    rates = Rates().of({0: 900.0, 1: 1_100.0, 2: 300.0, 3: None}, 5.0)
    assert rates == {0: 1_000.0, 1: 1_000.0, 2: 300.0, 3: 1_000.0}
    assert Rates().of({0: 4_000.0, 1: 1_000.0}, 5.0) == {0: 4_000.0, 1: 1_000.0}
    assert Rates().of({0: 700.0}, 5.0) == {0: 700.0}


def test_replicas_that_differ_by_chance_share_the_rate_of_all() -> None:
    rates = Rates()
    for bit, rate in enumerate((800.0, 1_000.0, 1_000.0, 1_300.0)):
        time_prompts(rates, bit, rate)
    found = rates.of(NOTHING_TOLD, 5.0)
    assert len(set(found.values())) == 1 and found[0] == pytest.approx(1_000.0, rel=0.05)


def test_one_that_is_slower_than_chance_explains_has_its_own_and_does_not_slow_the_others() -> None:
    rates = Rates()
    for bit in range(3):
        time_prompts(rates, bit, 900.0)
    time_prompts(rates, 3, 300.0, count=6)
    assert rates.of(NOTHING_TOLD, 5.0)[3] > 600.0  # not enough of them yet
    told_so = rates.of({0: 90.0, 1: 90.0, 2: 90.0, 3: 30.0}, 5.0)
    assert told_so == pytest.approx({0: 900.0, 1: 900.0, 2: 900.0, 3: 300.0})
    time_prompts(rates, 3, 300.0, count=6)
    assert rates.of(NOTHING_TOLD, 5.0) == pytest.approx({0: 900.0, 1: 900.0, 2: 900.0, 3: 300.0})
    # What shows counts, whatever the last step told.
    assert rates.of({0: 1.0, 1: 1.0, 2: 1.0, 3: 50.0}, 5.0)[3] == pytest.approx(300.0)
    rates.forget(3)
    assert rates.of(NOTHING_TOLD, 5.0) == pytest.approx(dict.fromkeys(range(4), 900.0))


def test_prompts_that_end_with_one_before_them_bring_tokens_and_no_time() -> None:
    rates = Rates()
    rates.observe(0, 100, 0.0)
    assert rates.of({0: None}, 5.0) == {0: 5.0}
    rates.observe(0, 100, 1.0)
    assert rates.of({0: None}, 5.0)[0] == pytest.approx(200.0, rel=0.05)


def test_shares_of_the_work_are_those_of_its_time_and_one_at_first() -> None:
    work, alike = RecentWork(), {0: 1_000.0, 1: 1_000.0}
    assert work.shares(alike) == {0: 1.0, 1: 1.0}
    work.add(0, 500, 2)
    first = work.shares(alike)
    assert 1.0 < first[0] < 1.1 and first[0] + first[1] == pytest.approx(2.0)  # one prompt says little
    for _ in range(200):
        work.add(0, 300, 2)
        work.add(1, 100, 2)
    later = work.shares(alike)
    assert later[0] == pytest.approx(1.4, abs=0.05)  # it had one and a half times the average, and a few count for all
    assert work.shares({0: 3_000.0, 1: 1_000.0}) == pytest.approx({0: 1.0, 1: 1.0}, abs=0.05)
    work.forget(0)
    assert work.shares(alike)[1] > 1.5
