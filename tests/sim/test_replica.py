"""A replica in virtual time: leaps are exact, arrivals cut them short, nothing is lost when blocks run out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.request import Request
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel
from quire.sim.fleet import Fleet
from quire.sim.replica import Replica, ReplicaConfig, TokenTimes
from quire.sim.traffic import SimRequest

SECOND = CostModel(overhead_s=1.0, weights_s=0.0, token_s=0.0, kv_token_s=0.0, pair_s=0.0)
CONFIG = ReplicaConfig(
    num_blocks=400,
    block_size=16,
    scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, max_model_len=1024),
)


def traffic(num: int, rate: float, seed: int) -> list[SimRequest]:
    rng, now_s, found = random.Random(seed), 0.0, []
    for _ in range(num):
        now_s += rng.expovariate(rate)
        found.append(SimRequest(now_s, rng.randint(1, 400), rng.randint(1, 200)))
    return found


def run(requests: list[SimRequest], config: ReplicaConfig, cost: CostModel = CostModel()) -> Fleet:  # noqa: B008
    fleet = Fleet(config=config, cost=cost, front_s=0.001)
    fleet.run(requests)
    replica = fleet.replicas[0]
    replica.kv.check()
    replica.scheduler.check()
    assert replica.kv.num_used_blocks == 0 and not replica.num_requests and replica.due_s is None
    return fleet


@pytest.mark.parametrize("num_blocks", [60, 400], ids=["short of blocks", "blocks enough"])
@pytest.mark.parametrize("lead_s", [0.0, 0.002])
def test_leaps_change_nothing_but_the_time_it_takes(num_blocks: int, lead_s: float) -> None:
    config = replace(CONFIG, num_blocks=num_blocks, lead_s=lead_s)
    requests = traffic(120, 12.0, seed=num_blocks)
    leaping, stepping = run(requests, config), run(requests, replace(config, can_leap=False))
    assert leaping.now_s == pytest.approx(stepping.now_s)
    assert sorted(leaping.times.first_s) == pytest.approx(sorted(stepping.times.first_s))
    assert sorted(leaping.times.whole_s) == pytest.approx(sorted(stepping.times.whole_s))
    assert leaping.times.num_output_tokens == sum(one.output_len for one in requests)
    pairs = [fleet.replicas[0].scheduler.stats for fleet in (leaping, stepping)]
    for name in ("num_steps", "num_decode_tokens", "num_prefill_tokens", "num_preemptions"):
        assert getattr(pairs[0], name) == getattr(pairs[1], name), name
    assert (pairs[0].num_preemptions > 0) == (num_blocks == 60)
    assert leaping.replicas[0].num_events < stepping.replicas[0].num_events
    first, second = (fleet.report("", 120) for fleet in (leaping, stepping))
    assert first.itl_s and second.itl_s and first.itl_s.count == second.itl_s.count
    for name in ("mean", "p50", "p95", "p99"):  # a leap keeps a few of its times between tokens
        assert getattr(first.itl_s, name) == pytest.approx(getattr(second.itl_s, name), rel=0.02)


def test_a_prompts_last_token_that_was_left_alone_is_no_leap() -> None:
    config = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=1024))
    fleet = run([SimRequest(0.0, 33, 5)], config, SECOND)
    assert list(fleet.times.first_s) == [pytest.approx(3.001)]
    assert fleet.now_s == pytest.approx(7.001)


def add(replica: Replica, name: str, num_in: int, num_out: int, now_s: float) -> None:
    replica.add(
        Request(request_id=name, prompt_token_ids=[1] * num_in, max_tokens=num_out, end_token_ids=frozenset(),
                arrival_s=now_s),
        now_s,
    )  # fmt: skip


def test_a_request_cuts_a_leap_short_at_the_end_of_a_step_and_is_in_the_next() -> None:
    times = TokenTimes()
    replica = Replica(replace(CONFIG, lead_s=0.25), SECOND, times)
    add(replica, "long", 4, 100, now_s=0.0)
    replica.advance()  # it wakes up
    assert replica.due_s == 1.25
    replica.advance()
    assert replica.due_s == pytest.approx(99.25)  # all but the last of its steps in one
    add(replica, "early", 4, 1, now_s=10.5)
    assert replica.due_s == pytest.approx(11.25)
    add(replica, "late", 4, 1, now_s=11.1)  # the next step is planned already
    replica.advance()
    replica.advance()
    assert list(times.first_s) == pytest.approx([1.25, 12.25 - 10.5])
    replica.advance()
    assert times.first_s[-1] == pytest.approx(13.25 - 11.1)


def test_what_comes_at_one_moment_is_in_one_step() -> None:
    fleet = run([SimRequest(2.0, 10, 1) for _ in range(5)] + [SimRequest(2.5, 10, 1)], CONFIG, SECOND)
    assert list(fleet.times.first_s) == pytest.approx([1.001] * 5 + [1.501])


def test_a_first_token_keeps_the_others_of_its_step_waiting() -> None:
    config = replace(CONFIG, first_token_s=0.25, can_leap=False)
    fleet = run([SimRequest(0.0, 4, 5), SimRequest(1.5, 4, 1)], config, SECOND)
    assert list(fleet.times.between_s) == pytest.approx([0.75, 1.25, 0.75, 1.0])
    assert list(fleet.times.first_s) == pytest.approx([1.001, 1.501])


def test_what_never_fits_is_counted_and_the_rest_is_served() -> None:
    fleet = run([SimRequest(0.0, 2000, 5), SimRequest(0.0, 10, 5)], CONFIG)
    report = fleet.report("", 2)
    assert (report.requests, report.completed, sum(report.errors.values())) == (2, 1, 1)
