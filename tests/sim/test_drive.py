"""Arrivals through the real scheduler: in time, to the end, and seen at every step."""

from __future__ import annotations

import itertools

import pytest
from sim_executor import verified

from quire.kv import KVManager
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel, SimRequest, SimRun, StepView, poisson_arrivals

SECOND = CostModel(overhead_s=1.0, weights_s=0.0, token_s=0.0, kv_token_s=0.0, pair_s=0.0)
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, preemption="recompute")


def test_times_and_lengths() -> None:
    kv = KVManager(num_blocks=20, block_size=4)
    run = SimRun.build(kv, CONFIG, cost=SECOND, make_executor=verified(SECOND))
    views: list[tuple[float, int, int]] = []

    def look(view: StepView) -> None:
        views.append((view.start_s, len(view.running), view.num_waiting))

    run.run([SimRequest(0.0, 3, 2), SimRequest(0.5, 5, 3), SimRequest(10.0, 2, 1)], on_step=look)
    assert [served.finished_s for served in run.served] == [2.0, 4.0, 11.0]
    assert [served.first_token_s for served in run.served] == [1.0, 2.0, 11.0]
    assert views == [(0.0, 1, 0), (1.0, 2, 0), (2.0, 1, 0), (3.0, 1, 0), (10.0, 1, 0)]
    assert kv.num_used_blocks == 0


def test_a_pool_too_small_preempts_and_all_still_ends() -> None:
    run = SimRun.build(
        KVManager(num_blocks=10, block_size=4, watermark=0.0), CONFIG, cost=SECOND, make_executor=verified(SECOND)
    )
    run.run([SimRequest(0.0, 8, 12)] * 4)
    assert run.scheduler.stats.num_preemptions > 0
    assert all(served.finished_s is not None for served in run.served)


def test_poisson_arrivals() -> None:
    arrivals = poisson_arrivals([(1, 2)] * 5000, rate_per_s=4.0, seed=0)
    assert arrivals == poisson_arrivals([(1, 2)] * 5000, rate_per_s=4.0, seed=0)
    assert arrivals[-1].arrival_s == pytest.approx(5000 / 4, rel=0.05)
    assert all(a.arrival_s < b.arrival_s for a, b in itertools.pairwise(arrivals))
