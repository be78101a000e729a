from __future__ import annotations

import pytest
from live_harness import CoreEngine, make_core

from quire.server.histogram import HITS_S, LATENCY_S, Rolling
from quire.server.metrics import ServerMetrics


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
