"""Histograms that cost a bisection per observation, and what of them and of other totals happened in the last seconds.
Prometheus sees the histograms when it asks."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    bounds = (digit * 10.0**exponent for exponent in itertools.count() for digit in (1, 2, 5))
    return tuple(itertools.takewhile(lambda bound: bound <= limit, bounds))


# Each holds every bound that vLLM has, so that its dashboards' heat maps and quantiles read the same; the ones added
# resolve what a GPU does in milliseconds and what a small model answers at once.
FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = one_two_five(1_000_000)
SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)
# Seconds that rates, latencies and hit rates are of.
RATE_S, LATENCY_S, HITS_S = 3.0, 15.0, 60.0


class Histogram:
    """Counts by bucket, not cumulative until asked. `bounds` are inclusive upper ends, rising."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(labels, list(zip(names, itertools.accumulate(self.counts), strict=True)), self.total)


def quantile(bounds: Sequence[float], counts: Iterable[int], share: float) -> float | None:
    """A quantile as Prometheus estimates it: linear inside the bucket, and the last bound for what lies above it.

    None where nothing was observed. `counts` may be a difference of two readings.
    """
    counts = list(counts)
    rank = share * sum(counts)
    if not sum(counts):
        return None
    below, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return bounds[-1]


@dataclass(slots=True, frozen=True)
class _Sample:
    now_s: float
    totals: dict[str, int]
    counts: dict[str, list[int]]  # of each histogram


_TOTALS = ("num_decode_tokens", "num_prefill_tokens", "num_query_tokens", "num_hit_tokens")


class Rolling:
    """Remembers readings of the last minute. A number is None while nothing happened in its window."""

    def __init__(self, first_token: Histogram, inter_token: Histogram) -> None:
        self._histograms = {"first_token": first_token, "inter_token": inter_token}
        self._samples: deque[_Sample] = deque()

    def read(self, now_s: float, gauges: dict[str, Any]) -> dict[str, float | None]:
        counts = {name: list(histogram.counts) for name, histogram in self._histograms.items()}
        sample = _Sample(now_s, {name: gauges[name] for name in _TOTALS}, counts)
        samples = self._samples
        samples.append(sample)
        while len(samples) > 2 and now_s - samples[1].now_s >= HITS_S:
            samples.popleft()
        rate, latency, hits = self._since(RATE_S), self._since(LATENCY_S), self._since(HITS_S)
        elapsed_s = now_s - rate.now_s

        def change(name: str, since: _Sample) -> int:
            return sample.totals[name] - since.totals[name]

        num_queried = change("num_query_tokens", hits)
        found: dict[str, float | None] = {
            "tokens_per_s": change("num_decode_tokens", rate) / elapsed_s if elapsed_s > 0 else 0.0,
            "prefill_per_s": change("num_prefill_tokens", rate) / elapsed_s if elapsed_s > 0 else 0.0,
            "hit_rate": change("num_hit_tokens", hits) / num_queried if num_queried else None,
        }
        for name, histogram in self._histograms.items():
            of_late = [new - old for new, old in zip(sample.counts[name], latency.counts[name], strict=True)]
            found[f"{name}_p50_s"] = quantile(histogram.bounds, of_late, 0.5)
            found[f"{name}_p99_s"] = quantile(histogram.bounds, of_late, 0.99)
        return found

    def _since(self, window_s: float) -> _Sample:
        """The youngest sample that is at least that old, or the oldest there is."""
        newest = self._samples[-1]
        found = self._samples[0]
        for sample in self._samples:
            if newest.now_s - sample.now_s < window_s:
                break
            found = sample
        return found
