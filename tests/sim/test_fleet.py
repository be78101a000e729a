"""Many replicas in one virtual time, and which of them a request goes to."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel
from quire.sim.fleet import Fleet, weighted_percentiles
from quire.sim.policies import POLICIES
from quire.sim.replica import ReplicaConfig
from quire.sim.traffic import SimRequest

CONFIG = ReplicaConfig(
    num_blocks=64,
    block_size=16,
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512),
)
COST = CostModel(overhead_s=0.0, weights_s=0.01, token_s=0.0, kv_token_s=0.0, pair_s=0.0)


def serve(requests: list[SimRequest], num_replicas: int, policy: str) -> Fleet:
    fleet = Fleet(config=CONFIG, cost=COST, num_replicas=num_replicas, policy=policy)
    fleet.run(requests)
    assert fleet.num_done == len(requests)
    return fleet


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_by_one_of_hundreds(policy: str) -> None:
    fleet = serve([SimRequest(0.001 * i, 20, 3) for i in range(600)], 200, policy)
    report = fleet.report("many", 600)
    assert report.completed == 600 and report.output_tokens == 1800
    assert sum(replica.num_events > 0 for replica in fleet.replicas) > 80


def test_the_least_loaded_gets_the_next_and_turns_are_taken() -> None:
    requests = [SimRequest(0.0, 20, 100), SimRequest(0.001, 20, 1), SimRequest(0.1, 20, 1), SimRequest(0.2, 20, 1)]
    loaded = serve(requests, 2, "least-loaded")
    assert [replica.scheduler.stats.num_finished for replica in loaded.replicas] == [1, 3]
    turns = serve(requests, 2, "round-robin")
    assert [replica.scheduler.stats.num_finished for replica in turns.replicas] == [2, 2]


def test_replicas_share_the_traffic_and_a_prefix_is_found_where_it_was() -> None:
    requests = [SimRequest(0.05 * i, 100, 2, (("system", 64),)) for i in range(40)]
    one, two = (serve(requests, count, "round-robin").report("", 40) for count in (1, 2))
    assert one.kv and two.kv
    assert one.kv.prefix_hit_tokens == 39 * 64 and two.kv.prefix_hit_tokens == 38 * 64


def test_the_products_router_finds_prefixes_that_no_single_cache_holds() -> None:
    """24 prefixes of 20 blocks, where each replica's cache holds about three of them."""
    order = [(7 * i) % 24 for i in range(240)]
    requests = [SimRequest(0.1 * i, 330, 4, ((f"prefix {one}", 320),)) for i, one in enumerate(order)]
    hits = {}
    for policy in POLICIES:
        kv = serve(requests, 10, policy).report("", 240).kv
        assert kv is not None
        hits[policy] = kv.prefix_hit_rate
    blind = ("least-loaded", "power-of-two", "random", "round-robin")
    assert hits["first-token"] > 0.8 > 0.3 > max(hits[name] for name in blind)


def test_what_cannot_be_a_fleet_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Fleet(config=CONFIG, cost=COST, num_replicas=0)
    with pytest.raises(ConfigError, match="round-robin"):
        Fleet(config=CONFIG, cost=COST, policy="psychic")


def test_weighted_percentiles_are_those_of_the_values_written_out() -> None:
    rng = np.random.default_rng(0)
    values, counts = rng.random(500), rng.integers(1, 9, 500)
    found = weighted_percentiles(values.tolist(), counts.tolist())
    whole = np.repeat(values, counts)
    assert found is not None and found.count == len(whole) and found.mean == pytest.approx(whole.mean())
    assert found.p99 == pytest.approx(np.percentile(whole, 99), abs=0.01)
    assert weighted_percentiles([], []) is None
