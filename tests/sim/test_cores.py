"""When steps end: on devices of their own, and on cores that replicas share."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from quire.errors import ConfigError
from quire.params import SamplingSpec
from quire.request import Request
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel
from quire.sim.cores import OwnDevices, SharedCores, StepEnds
from quire.sim.fleet import Fleet
from quire.sim.replica import Replica, ReplicaConfig, TokenTimes
from quire.sim.traffic import SimRequest

CONFIG = ReplicaConfig(
    num_blocks=64,
    block_size=16,
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512),
    can_leap=False,
)
TURN_S = 4e-3


def steps_of(seconds: float) -> CostModel:
    return CostModel(overhead_s=seconds, weights_s=0.0, token_s=0.0, kv_token_s=0.0, pair_s=0.0)


SECOND = steps_of(1.0)


def ends_of(
    ends: StepEnds, replicas: list[Replica], adds: dict[float, int], num_steps: int = 1
) -> list[tuple[float, int]]:
    """When steps end, and whose. Each addition is one request of so many tokens, so of as many steps."""
    found, waiting = [], sorted(adds.items())
    while waiting or ends.next_s < math.inf:
        if waiting and waiting[0][0] <= ends.next_s:
            now_s, index = waiting.pop(0)
            request = Request(
                request_id=f"{now_s}",
                prompt_token_ids=[1, 2, 3],
                max_tokens=num_steps,
                end_token_ids=frozenset(),
                spec=SamplingSpec(temperature=0.0),
                arrival_s=now_s,
            )
            replicas[index].add(request, now_s)
        else:
            now_s, popped = ends.next_s, ends.pop()
            if popped is None:
                continue
            index = popped
            before_s = replicas[index].busy_s
            replicas[index].advance()
            if replicas[index].busy_s > before_s:  # else it has only woken up
                found.append((now_s, index))
        ends.note([index], now_s)
    return found


def lengths_of(found: list[tuple[float, int]], replica: int) -> list[float]:
    """Of each step but the first."""
    return [after_s - before_s for before_s, after_s in pairwise([at_s for at_s, index in found if index == replica])]


@pytest.mark.parametrize(
    ("num_cores", "expected"),
    [
        (None, [(1.0, 0), (1.5, 1), (1.75, 2)]),
        (3, [(1.0, 0), (1.5, 1), (1.75, 2)]),
        # One for half a second, then two at half speed until 0.75, then three at a third.
        (1, [(1.875, 0), (2.875, 1), (3.0, 2)]),
    ],
)
def test_steps_take_longer_where_cores_are_short(num_cores: int | None, expected: list[tuple[float, int]]) -> None:
    replicas = [Replica(CONFIG, SECOND, TokenTimes()) for _ in range(3)]
    ends = OwnDevices(replicas) if num_cores is None else SharedCores(replicas, num_cores)
    found = ends_of(ends, replicas, {0.0: 0, 0.5: 1, 0.75: 2})
    assert [index for _, index in found] == [index for _, index in expected]
    assert [now_s for now_s, _ in found] == pytest.approx([now_s for now_s, _ in expected], abs=2 * TURN_S)


def test_short_steps_beside_a_long_one_wait_for_whole_turns() -> None:
    replicas = [Replica(CONFIG, cost, TokenTimes()) for cost in (steps_of(0.3), steps_of(0.005))]
    found = ends_of(SharedCores(replicas, 1), replicas, {0.0: 0, 0.001: 1}, num_steps=40)
    beside = lengths_of(found, 1)
    assert {round(seconds, 6) for seconds in beside} == {0.009, 0.013}
    assert sum(beside) / len(beside) == pytest.approx(0.01, rel=0.05)


def test_of_three_on_two_cores_each_has_one_of_its_own_for_a_while() -> None:
    replicas = [Replica(CONFIG, steps_of(0.02), TokenTimes()) for _ in range(3)]
    found = ends_of(SharedCores(replicas, 2), replicas, {0.0: 0, 0.001: 1, 0.002: 2}, num_steps=200)
    ended_s = [max(at_s for at_s, index in found if index == replica) for replica in range(3)]
    assert max(ended_s) == pytest.approx(3 * 200 * 0.02 / 2, rel=0.05)  # no core was idle
    assert min(ended_s) > 0.9 * max(ended_s)  # nobody had a core of its own much longer
    for replica in range(3):
        lengths = lengths_of(found, replica)
        num_alone = sum(seconds < 0.021 for seconds in lengths)
        assert 0.4 < num_alone / len(lengths) < 0.6
        assert sum(seconds > 0.035 for seconds in lengths) / len(lengths) > 0.3


def test_a_core_with_nothing_to_do_takes_over_one_that_waits() -> None:
    replicas = [Replica(CONFIG, steps_of(seconds), TokenTimes()) for seconds in (0.02, 0.1, 0.1)]
    found = ends_of(SharedCores(replicas, 2), replicas, {0.0: 0, 0.001: 1, 0.002: 2})
    assert {index: at_s for at_s, index in found} == pytest.approx({0: 0.04, 1: 0.101, 2: 0.12}, abs=TURN_S)


def test_a_fleet_on_half_as_many_cores_takes_twice_as_long() -> None:
    seconds = {}
    for num_cores in (None, 4, 2):
        fleet = Fleet(config=CONFIG, cost=SECOND, num_replicas=4, policy="round-robin", num_cores=num_cores)
        fleet.run([SimRequest(0.0, 20, 5) for _ in range(4)])
        seconds[num_cores] = fleet.now_s
        assert fleet.num_done == 4
    assert seconds == pytest.approx({None: 5.0, 4: 5.0, 2: 10.0})
    with pytest.raises(ConfigError, match="at least 1"):
        Fleet(config=CONFIG, cost=SECOND, num_cores=0)
