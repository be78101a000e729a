"""Rates and percentiles over the last seconds, from totals that others count anyway."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from quire.server.histogram import Histogram, quantile
from quire.server.metrics import ServerMetrics

RATE_S = 3.0
LATENCY_S = 15.0
HITS_S = 60.0


@dataclass(slots=True, frozen=True)
class _Sample:
    now_s: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_query_tokens: int
    num_hit_tokens: int
    first_token: tuple[int, ...]
    inter_token: tuple[int, ...]


class Rolling:
    """Remembers readings of the last minute. A number is None while nothing happened in its window."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._first_token = metrics.first_token
        self._inter_token = metrics.inter_token
        self._samples: deque[_Sample] = deque()

    def read(self, now_s: float, gauges: dict[str, Any]) -> dict[str, float | None]:
        sample = _Sample(
            now_s=now_s,
            num_decode_tokens=gauges["num_decode_tokens"],
            num_prefill_tokens=gauges["num_prefill_tokens"],
            num_query_tokens=gauges["num_query_tokens"],
            num_hit_tokens=gauges["num_hit_tokens"],
            first_token=tuple(self._first_token.counts),
            inter_token=tuple(self._inter_token.counts),
        )
        samples = self._samples
        samples.append(sample)
        while len(samples) > 2 and now_s - samples[1].now_s >= HITS_S:
            samples.popleft()
        rate, latency, hits = self._since(RATE_S), self._since(LATENCY_S), self._since(HITS_S)
        elapsed_s = now_s - rate.now_s
        num_queried = sample.num_query_tokens - hits.num_query_tokens
        first = [new - old for new, old in zip(sample.first_token, latency.first_token, strict=True)]
        inter = [new - old for new, old in zip(sample.inter_token, latency.inter_token, strict=True)]
        return {
            "tokens_per_s": (sample.num_decode_tokens - rate.num_decode_tokens) / elapsed_s if elapsed_s > 0 else 0.0,
            "prefill_per_s": (sample.num_prefill_tokens - rate.num_prefill_tokens) / elapsed_s
            if elapsed_s > 0
            else 0.0,
            "hit_rate": (sample.num_hit_tokens - hits.num_hit_tokens) / num_queried if num_queried else None,
            "first_token_p50_s": self._quantile(self._first_token, first, 0.5),
            "first_token_p99_s": self._quantile(self._first_token, first, 0.99),
            "inter_token_p50_s": self._quantile(self._inter_token, inter, 0.5),
            "inter_token_p99_s": self._quantile(self._inter_token, inter, 0.99),
        }

    def _since(self, window_s: float) -> _Sample:
        """The youngest sample that is at least that old, or the oldest there is."""
        newest = self._samples[-1]
        found = self._samples[0]
        for sample in self._samples:
            if newest.now_s - sample.now_s < window_s:
                break
            found = sample
        return found

    @staticmethod
    def _quantile(histogram: Histogram, counts: list[int], share: float) -> float | None:
        return quantile(histogram.bounds, counts, share)
