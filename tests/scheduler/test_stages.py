"""A pipeline's steps: no sequence is in two of them, they share the sequences, and tokens are what they were."""

from __future__ import annotations

import random

import pytest
from scheduler.harness import Rig, make_request


def rig(num_stages: int, **config: int) -> Rig:
    return Rig(num_stages=num_stages, depth=num_stages, num_blocks=60, max_num_batched_tokens=24, **config)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_tokens_are_those_of_one_stage(num_stages: int) -> None:
    rng = random.Random(num_stages)
    asks = [(rng.randint(1, 40), rng.randint(1, 20), rng.choice([1, 1, 2])) for _ in range(30)]

    def outputs(stages: int) -> list[list[list[int]]]:
        one = rig(stages)
        work = [
            make_request([(i * 31 + j) % 997 for j in range(length)], max_tokens=tokens, n=n, seed=i)
            for i, (length, tokens, n) in enumerate(asks)
        ]
        one.add(*work)
        one.run()
        one.check_idle()
        return [one.outputs(request) for request in work]

    assert outputs(num_stages) == outputs(1)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steps_in_flight_share_the_sequences(num_stages: int) -> None:
    one = rig(num_stages)
    one.add(*[make_request(4, max_tokens=30) for _ in range(6)])
    in_flight: list[set[int]] = []
    while one.scheduler.has_work:
        while len(one.tickets) < one.executor.depth and (plan := one.submit()) is not None:
            rows = set(plan.spans.rows)
            assert not any(rows & others for others in in_flight)
            in_flight.append(rows)
        if len(one.history) in range(12, 40):
            assert [len(rows) for rows in in_flight] == [6 // num_stages] * num_stages
        one.collect()
        in_flight.pop(0)
