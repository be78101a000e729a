"""Order and ageing."""

from __future__ import annotations

import math

from scheduler.harness import Rig, make_request

from quire.request import Sequence
from quire.scheduler import SchedulerConfig
from quire.scheduler.queue import OrderedSequences, place


def config(**fields: object) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=100, **fields)


def served(rig: Rig) -> list[str]:
    """Request ids in the order in which they got their first token."""
    rig.run()
    return [
        u.seq.request.request_id
        for u in sorted((us[0] for us in rig.updates.values()), key=lambda u: u.seq.first_token_s)
    ]


def test_first_come_first_served_by_arrival_then_by_addition() -> None:
    rig = Rig(max_num_seqs=1)
    for name, arrival_s in (("late", 2.0), ("a", 1.0), ("b", 1.0), ("early", 0.5)):
        rig.add(make_request(4, request_id=name, arrival_s=arrival_s, priority=-9 if name == "late" else 0))
    assert served(rig) == ["early", "a", "b", "late"]


def test_priority_goes_first_and_arrival_breaks_ties() -> None:
    rig = Rig(max_num_seqs=1, policy="priority")
    for name, priority, arrival_s in (("c", 1, 0.0), ("b", 0, 2.0), ("a", 0, 1.0), ("d", 3, 0.0)):
        rig.add(make_request(4, request_id=name, priority=priority, arrival_s=arrival_s))
    assert served(rig) == ["a", "b", "c", "d"]


def test_waiting_is_worth_a_priority_each_ageing_period() -> None:
    ageing = config(policy="priority", priority_ageing_s=10.0)
    old = place(ageing, make_request(priority=2, arrival_s=0.0), 0)
    assert (
        place(ageing, make_request(priority=0, arrival_s=19.0), 1)
        < old
        < place(ageing, make_request(priority=0, arrival_s=21.0), 2)
    )
    strict = config(policy="priority", priority_ageing_s=math.inf)
    assert place(strict, make_request(priority=0, arrival_s=1e9), 1) < place(strict, make_request(priority=1), 0)


def test_a_low_priority_does_not_starve_under_a_stream_of_high_ones() -> None:
    waits = {}
    for ageing_s in (0.05, math.inf):
        rig = Rig(max_num_seqs=1, policy="priority", priority_ageing_s=ageing_s)
        rig.add(low := make_request(4, max_tokens=2, priority=3))
        rig.add(make_request(4, max_tokens=2))
        for _ in range(100):
            rig.step()
            if rig.scheduler.num_waiting < 3:
                rig.add(make_request(4, max_tokens=2, arrival_s=rig.clock()))
        waits[ageing_s] = low.sequences[0].first_token_s
    assert waits[math.inf] is None
    assert waits[0.05] is not None and 0.15 < waits[0.05] < 0.2  # three priorities, then the one that runs


def test_ordered_sequences() -> None:
    ordered = OrderedSequences()
    seqs = [Sequence(make_request(), 0, []) for _ in range(5)]
    for at, seq in zip((3, 1, 4, 0, 2), seqs, strict=True):
        seq.order = (float(at),)
        ordered.add(seq)
    assert [seq.order[0] for seq in ordered] == [0, 1, 2, 3, 4]
    ordered.drop(seqs[0])
    ordered.drop(seqs[3])
    assert [seq.order[0] for seq in ordered] == [1, 2, 4]
