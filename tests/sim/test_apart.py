"""Prefill and decode apart, simulated: every request is served once, and decodes do not meet long prompts."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel
from quire.sim.apart import Link
from quire.sim.fleet import Fleet
from quire.sim.replica import ReplicaConfig
from quire.sim.traffic import SimRequest

CONFIG = ReplicaConfig(
    num_blocks=4000,
    block_size=16,
    scheduler=SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=8192, kv_bytes_per_block=1 << 20
    ),
)
COST = CostModel(overhead_s=0.0, weights_s=0.005, token_s=1e-4, kv_token_s=0.0, pair_s=0.0)
LONG = [SimRequest(0.27 * (i - i % 3), 2000 + 100 * (i % 5), 120) for i in range(30)]


def serve(requests: list[SimRequest], roles: tuple[str, ...] = (), gbs: float = 10.0, num_pieces: int = 1) -> Fleet:
    link = Link(bytes_per_s=gbs * 1e9, num_pieces=num_pieces)
    fleet = Fleet(config=CONFIG, cost=COST, num_replicas=2, roles=roles, link=link)
    fleet.run(requests)
    report = fleet.report("apart", len(requests))
    assert report.completed == len(requests)
    assert report.output_tokens == sum(request.output_len for request in requests)
    assert report.prompt_tokens == sum(request.prompt_len for request in requests)
    for replica in fleet.replicas:
        replica.kv.check()
        assert not replica.kv.num_used_blocks and not replica.scheduler.has_work
    return fleet


def test_decodes_do_not_meet_prompts_and_first_tokens_wait_for_fewer_replicas() -> None:
    together, apart = serve(LONG), serve(LONG, ("prefill", "decode"))
    assert apart.num_moved == len(LONG) and not together.num_moved
    p99 = [fleet.report("", 1).itl_s for fleet in (together, apart)]
    assert p99[0] is not None and p99[1] is not None and p99[1].p99 < p99[0].p99 / 3
    assert sum(apart.times.first_s) >= sum(together.times.first_s)
    decoding = apart.replicas[1].scheduler.stats
    assert decoding.num_recomputed_tokens <= 40 * len(LONG)  # a tail of each, not its prompt


def test_layers_that_leave_one_by_one_arrive_sooner() -> None:
    alone = [SimRequest(0.0, 2000, 120)]
    whole, layers = (serve(alone, ("prefill", "decode"), gbs=1.0, num_pieces=pieces) for pieces in (1, 32))
    decoded = [fleet.replicas[1].scheduler.stats.num_steps for fleet in (whole, layers)]
    assert decoded[0] < decoded[1]


def test_a_slow_link_leaves_requests_where_they_are() -> None:
    """They decode on while their blocks travel, and may end before that."""
    assert serve(LONG, ("prefill", "decode"), gbs=0.05).num_moved < len(LONG)


def test_short_and_known_prompts_go_where_they_are_decoded() -> None:
    short = [SimRequest(0.1 * i, 100, 20) for i in range(10)]
    assert serve(short, ("prefill", "decode")).num_moved == 0
    again = [SimRequest(2.0 * i, 1200, 100, (("chat", 1100),)) for i in range(4)]
    assert serve(again, ("prefill", "decode")).num_moved == 1


def test_as_many_roles_as_replicas() -> None:
    with pytest.raises(ConfigError, match="3 roles"):
        Fleet(config=CONFIG, cost=COST, num_replicas=2, roles=("prefill", "decode", "both"))
