"""When steps end: on devices of their own, and on cores that replicas share."""

from __future__ import annotations

import math

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
SECOND = CostModel(overhead_s=1.0, weights_s=0.0, token_s=0.0, kv_token_s=0.0, pair_s=0.0)


def ends_of(ends: StepEnds, replicas: list[Replica], adds: dict[float, int]) -> list[tuple[float, int]]:
    """Each addition is one request of one token, so one step of a second on a core of its own."""
    found, waiting = [], sorted(adds.items())
    while waiting or ends.next_s < math.inf:
        if waiting and waiting[0][0] <= ends.next_s:
            now_s, index = waiting.pop(0)
            request = Request(
                request_id=f"{now_s}",
                prompt_token_ids=[1, 2, 3],
                max_tokens=1,
                end_token_ids=frozenset(),
                spec=SamplingSpec(temperature=0.0),
                arrival_s=now_s,
            )
            replicas[index].add(request, now_s)
        else:
            now_s, index = ends.next_s, ends.pop()
            before_s = replicas[index].busy_s
            replicas[index].advance()
            if replicas[index].busy_s > before_s:  # else it has only woken up
                found.append((now_s, index))
        ends.note([index], now_s)
    return found


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
    assert [now_s for now_s, _ in found] == pytest.approx([now_s for now_s, _ in expected])


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
