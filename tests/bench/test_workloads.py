"""Seeded work: the same tokens for everybody, for ever."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics

import pytest

from quire.bench.workloads import WORKLOADS, Workload, arrival_times, burst_times, make_workload, usable_vocab
from quire.errors import ConfigError

# Of the workloads that other engines are measured on too. A change here makes old numbers worthless.
PINNED = {
    ("lab16", 49_152): "83c0cadb837dfca9",
    ("lab16", 128_000): "0341abc352ea46f1",
    ("mixed256", 49_152): "1f89f26d38a1e17d",
    ("mixed256", 128_000): "25a7c5dec3d39342",
    ("mixed64", 49_152): "e6b155747abe7b18",
    ("mixed64", 128_000): "b3272c54efdb60c3",
    ("prefill", 49_152): "52043dbc76ae7abe",
    ("prefill", 128_000): "c7e520285853048c",
    ("shared_prefix", 49_152): "ee48bae0649cce2d",
    ("shared_prefix", 128_000): "6d9944bf8411cd3c",
    ("sharegpt", 49_152): "74a4ac0e13c8639d",
    ("sharegpt", 128_000): "9d4c10690956e0f0",
    ("single", 49_152): "3d67dda7d8510530",
    ("single", 128_000): "45b0cde8aebb4699",
    ("single64", 49_152): "6e7abeaa547aba5b",
    ("single64", 128_000): "5bf9385c0a4a1f10",
}


def fingerprint(work: Workload) -> str:
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "vocab"), sorted(PINNED))
def test_the_tokens_never_change(name: str, vocab: int) -> None:
    assert fingerprint(WORKLOADS[name](vocab)) == PINNED[name, vocab]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_repeat_and_stay_in_the_vocabulary(name: str) -> None:
    work = WORKLOADS[name](1000)
    assert work == WORKLOADS[name](1000)
    assert work != WORKLOADS[name](1000, seed=99)
    assert all(10 <= token < 1000 for prompt, _ in work for token in prompt)
    assert all(prompt and num_out >= 1 for prompt, num_out in work)


def test_lengths_are_what_they_say() -> None:
    mixed = WORKLOADS["mixed64"](1000)
    assert len(mixed) == 64
    assert all(16 <= len(p) <= 256 and 16 <= n <= 256 for p, n in mixed)
    shared = WORKLOADS["shared_prefix"](1000)
    assert len({tuple(p[:2048]) for p, _ in shared}) == 1
    assert len({tuple(p[2048:]) for p, _ in shared}) == 256
    assert [(len(p), n) for p, n in WORKLOADS["lab16"](1000)] == [(8, 128)] * 16
    assert [(len(p), n) for p, n in make_workload("fixed", 1000, num=3, num_in=7, num_out=9)] == [(7, 9)] * 3


def test_random_lengths_stay_in_their_range() -> None:
    work = make_workload("random", 1000, num=200, num_in=100, num_out=10, range_ratio=0.2)
    assert {len(p) for p, _ in work} <= set(range(80, 121)) and len({len(p) for p, _ in work}) > 20
    assert {n for _, n in work} == set(range(8, 13))


def test_a_long_tail_is_short_in_the_middle_and_long_at_the_end() -> None:
    lengths = sorted(len(p) + n for p, n in make_workload("longtail", 1000, num=200))
    assert lengths[100] < 80 and lengths[-1] > 400


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nonsense", {}, "there are burst, fixed"),
        ("lab16", {"num_in": 5}, "the input length of workload lab16 is fixed"),
        ("fixed", {"num": 0}, "must be at least 1"),
        ("random", {"range_ratio": 1.5}, "range ratio"),
    ],
)
def test_refusals(name: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_workload(name, 1000, **options)


def test_large_vocabularies_leave_their_special_tokens_out() -> None:
    assert usable_vocab(49_152) == 49_152
    assert usable_vocab(128_256) == 128_000


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    times = arrival_times(4000, 8.0, seed=1)
    assert times[0] == 0 and times == sorted(times)
    found = gaps(times)
    assert statistics.fmean(found) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(found) == pytest.approx(1 / 8, rel=0.05)  # an exponential's spread is its mean
    assert times == arrival_times(4000, 8.0, seed=1) != arrival_times(4000, 8.0, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness: float) -> None:
    found = gaps(arrival_times(8000, 5.0, burstiness=burstiness, seed=3))
    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.08)
    assert statistics.stdev(found) == pytest.approx(1 / 5 / math.sqrt(burstiness), rel=0.1)


def test_at_once_and_in_groups() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
    assert burst_times(5, size=2, every_s=1.5) == [0.0, 0.0, 1.5, 1.5, 3.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ConfigError, match="request rate"):
        arrival_times(3, rate)
    with pytest.raises(ConfigError, match="burstiness"):
        arrival_times(3, 1.0, burstiness=0.0)
