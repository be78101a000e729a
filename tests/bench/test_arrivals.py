from __future__ import annotations

import itertools
import math
import statistics

import pytest

from quire.bench.arrivals import arrival_times, burst_times
from quire.errors import ConfigError


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
