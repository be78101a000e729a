"""quire bench router --simulate: the product's router beside its alternatives, on servers that are not there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from quire.bench.router import OURS, FrontRun
from quire.errors import ConfigError
from quire.router.alternatives import ALTERNATIVES
from quire.sim.router_bench import simulate


def runs_of(traffics: Sequence[str], **changes: Any) -> list[FrontRun]:
    options: dict[str, Any] = {
        "num_servers": 4,
        "repeats": 2,
        "scale": 1.0,
        "concurrency": 12,
        "num_out": 8,
        "num_cores": 2,
        "slow": 1.0,
        **changes,
    }
    return simulate(traffics=traffics, tell=lambda text: None, **options)


def mean(runs: list[FrontRun], traffic: str, front: str, value: Any) -> float:
    return statistics.mean(value(run) for run in runs if (run.traffic, run.front) == (traffic, front))


def hit_rate(run: FrontRun) -> float:
    return run.hit_rate


def slowest_s(run: FrontRun) -> float:
    return run.ttft_s("p99")


def test_runs_repeat_exactly_and_nothing_is_lost() -> None:
    first, again = (runs_of(["turns", "bursty"], scale=0.5, repeats=1) for _ in "ab")
    assert first == again
    assert [run.front for run in first] == [front for front in (OURS, *ALTERNATIVES) for _ in "ab"]
    for run in first:
        assert run.num_requests == len(run.first_token_s) == {"turns": 40, "bursty": 56}[run.traffic]
        assert run.output_tokens == 8 * run.num_requests and min(run.first_token_s) > 0


def test_ours_finds_as_much_as_the_best_on_every_traffic() -> None:
    traffics = ("prefix", "turns", "skewed", "bursty")
    runs = runs_of(traffics)
    for traffic in traffics:
        best = max(mean(runs, traffic, front, hit_rate) for front in ALTERNATIVES)
        blind = mean(runs, traffic, "round-robin", hit_rate)
        assert mean(runs, traffic, OURS, hit_rate) > max(best - 0.01, blind + 0.1)


def test_a_slow_server_is_found_out() -> None:
    runs = runs_of(["skewed", "unshared"], slow=3.0, repeats=4)  # the first are also those in which it is found out
    for traffic in ("skewed", "unshared"):
        ours = mean(runs, traffic, OURS, slowest_s)
        assert ours < 0.8 * min(mean(runs, traffic, front, slowest_s) for front in ("cache-aware", "least-loaded"))


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="--traffic"):
        runs_of(["none"])
    with pytest.raises(ConfigError, match="--cores"):
        runs_of(["turns"], num_cores=0)
    with pytest.raises(ConfigError, match="--slow-server"):
        runs_of(["turns"], slow=0.5)
