from __future__ import annotations

import pytest
from live_harness import CoreEngine, make_core
from prometheus_client.core import HistogramMetricFamily

from quire.server.histogram import (
    FIRST_TOKEN_S,
    HITS_S,
    INTER_TOKEN_S,
    LATENCY_S,
    REQUEST_S,
    TOKENS,
    Histogram,
    Rolling,
    one_two_five,
    quantile,
)
from quire.server.metrics import ServerMetrics


def test_bounds_are_inclusive_and_buckets_cumulative() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 9.0):
        histogram.observe(value)
    family = HistogramMetricFamily("x", "help", labels=("who",))
    histogram.add_to(family, ("me",))
    found = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert found == {
        ("x_bucket", "1.0"): 2,
        ("x_bucket", "2.0"): 3,
        ("x_bucket", "5.0"): 4,
        ("x_bucket", "+Inf"): 5,
        ("x_count", None): 5,
        ("x_sum", None): 17.0,
    }


def test_an_observation_may_stand_for_several() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, 4)
    assert (sum(histogram.counts), histogram.total) == (4, 2.0)


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S, TOKENS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_vllms_bounds_are_among_ours() -> None:
    """A dashboard's heat map or threshold at one of its bounds means the same."""
    assert {0.001, 0.02, 0.06, 0.25, 0.75, 7.5, 160.0, 2560.0} <= set(FIRST_TOKEN_S)
    assert {0.01, 0.025, 0.05, 0.075, 0.15, 0.3, 0.4, 2.5, 80.0} <= set(INTER_TOKEN_S)
    assert {0.3, 0.8, 1.5, 15.0, 50.0, 120.0, 7680.0} <= set(REQUEST_S)


def test_one_two_five() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)


def test_quantiles_are_linear_inside_a_bucket() -> None:
    bounds = (10.0, 20.0, 40.0)
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [4, 4, 0, 0], 0.5) == 10.0
    assert quantile(bounds, [0, 4, 0, 0], 0.25) == 12.5
    assert quantile(bounds, [0, 0, 0, 7], 0.99) == 40.0  # above every bound: as far as is known


def gauges(decode: int = 0, queried: int = 0, hit: int = 0) -> dict[str, int]:
    return {
        "num_decode_tokens": decode,
        "num_prefill_tokens": 10 * decode,
        "num_query_tokens": queried,
        "num_hit_tokens": hit,
    }


def make() -> tuple[Rolling, ServerMetrics]:
    metrics = ServerMetrics(CoreEngine(make_core()), "tiny")
    return Rolling(metrics.first_token, metrics.inter_token), metrics


def test_nothing_is_known_at_first() -> None:
    rolling, _ = make()
    found = rolling.read(100.0, gauges())
    assert found["tokens_per_s"] == 0.0
    assert found["hit_rate"] is None and found["first_token_p50_s"] is None and found["inter_token_p99_s"] is None


def test_rates_are_of_the_last_seconds() -> None:
    rolling, _ = make()
    for second in range(20):
        found = rolling.read(100.0 + second, gauges(decode=50 * min(second, 10)))
        if second == 10:
            assert found["tokens_per_s"] == pytest.approx(50) and found["prefill_per_s"] == pytest.approx(500)
    assert found["tokens_per_s"] == 0.0  # it stopped ten seconds ago


def test_hit_rate_forgets() -> None:
    rolling, _ = make()
    rolling.read(0.0, gauges())
    assert rolling.read(1.0, gauges(queried=100, hit=25))["hit_rate"] == pytest.approx(0.25)
    assert rolling.read(2.0, gauges(queried=200, hit=125))["hit_rate"] == pytest.approx(0.625)
    rolling.read(2.0 + HITS_S, gauges(queried=200, hit=125))
    assert rolling.read(3.0 + HITS_S, gauges(queried=200, hit=125))["hit_rate"] is None


def test_percentiles_are_of_what_came_in_the_window() -> None:
    rolling, metrics = make()
    metrics.inter_token.observe(5.0, 1000)  # long ago
    rolling.read(0.0, gauges())
    metrics.inter_token.observe(0.0095, 98)
    metrics.inter_token.observe(0.19, 2)
    found = rolling.read(1.0, gauges())
    assert found["inter_token_p50_s"] == pytest.approx(0.00875, rel=0.2)
    assert found["inter_token_p99_s"] == pytest.approx(0.175, rel=0.2)
    rolling.read(1.0 + LATENCY_S, gauges())
    assert rolling.read(2.0 + LATENCY_S, gauges())["inter_token_p50_s"] is None
