"""The ladder: what moves it, what does not, and that it comes down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler.harness import Rig, make_request

from quire.engine.brownout import Brownout, BrownoutSettings, PressureReading
from quire.errors import ConfigError

BUSY = PressureReading(
    kv_usage=0.99,
    num_preemptions=0,
    num_allocation_failures=0,
    num_finished=0,
    num_running=40,
    num_waiting_tokens=1_000_000,
    capacity_tokens=100_000,
)


class Machine:
    """Readings ten times a second, with so many events a second."""

    def __init__(self, settings: BrownoutSettings | None = None) -> None:
        self.brownout = Brownout(settings)
        self.now_s = 50.0
        self.num_preemptions = self.num_failures = self.num_finished = 0.0
        self.levels: list[int] = []

    def run(
        self,
        seconds: float,
        preemptions_per_s: float = 0.0,
        failures_per_s: float = 0.0,
        finished_per_s: float = 0.0,
        **fields: float,
    ) -> int:
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.num_preemptions += preemptions_per_s / 10
            self.num_failures += failures_per_s / 10
            self.num_finished += finished_per_s / 10
            reading = replace(
                BUSY,
                num_preemptions=int(self.num_preemptions),
                num_allocation_failures=int(self.num_failures),
                num_finished=int(self.num_finished),
                **fields,
            )
            self.levels.append(self.brownout.update(self.now_s, reading))
        return self.levels[-1]

    @property
    def steps(self) -> list[int]:
        """The levels, each once for as long as it stood."""
        return [level for i, level in enumerate(self.levels) if i == 0 or level != self.levels[i - 1]]


def test_up_one_level_at_a_time_and_down_again() -> None:
    machine = Machine()
    assert machine.run(2.0, preemptions_per_s=20) < 2
    assert machine.run(20.0, preemptions_per_s=20) == 3
    assert machine.run(60.0) == 0
    assert machine.steps == [0, 1, 2, 3, 2, 1, 0]
    assert machine.run(20.0, preemptions_per_s=20) == 3  # and up again


def test_a_full_batch_with_a_queue_is_no_pressure() -> None:
    machine = Machine()
    assert machine.run(300.0, kv_usage=1.0, num_waiting_tokens=10**9) == 0
    assert machine.steps == [0]


def test_a_rare_preemption_is_no_pressure() -> None:
    machine = Machine()
    assert machine.run(300.0, preemptions_per_s=0.3) == 0
    assert machine.run(300.0, preemptions_per_s=0.6, num_running=256) == 0  # few for so many
    assert machine.run(300.0, preemptions_per_s=5.0, finished_per_s=20.0) == 0  # one for four answers
    assert machine.steps == [0]


def test_preemptions_with_room_in_the_cache_are_no_pressure() -> None:
    machine = Machine()
    machine.run(60.0, preemptions_per_s=50, kv_usage=0.6)
    assert machine.steps == [0]


def test_growth_that_finds_no_room_counts_too() -> None:
    machine = Machine()
    assert machine.run(60.0, failures_per_s=200) == 3


def test_one_burst_is_one_level() -> None:
    machine = Machine()
    machine.run(0.5, preemptions_per_s=100)
    machine.run(60.0)
    assert machine.steps == [0, 1, 0]


def test_nothing_is_refused_without_a_backlog() -> None:
    machine = Machine()
    assert machine.run(60.0, preemptions_per_s=20, num_waiting_tokens=1_000) == 2
    assert machine.run(10.0, preemptions_per_s=20, num_waiting_tokens=90_000) == 3


def test_between_pressure_and_calm_the_level_stays() -> None:
    machine = Machine()
    machine.run(20.0, preemptions_per_s=20)
    machine.run(10.0, preemptions_per_s=0.75)  # too much is 1 a second: ten in the window for 40 that run
    level = machine.levels[-1]
    assert level
    machine.levels.clear()
    machine.run(300.0, preemptions_per_s=0.75)
    assert machine.steps == [level]


def test_steady_slow_thrashing_does_not_flutter() -> None:
    machine = Machine()
    machine.run(300.0, preemptions_per_s=1.2)
    assert machine.steps == [0, 1, 2, 3]


def test_an_empty_server_recovers_in_seconds_even_if_nobody_asked_meanwhile() -> None:
    machine = Machine()
    assert machine.run(60.0, preemptions_per_s=20) == 3
    idle = {"kv_usage": 0.0, "num_running": 0, "num_waiting_tokens": 0}
    assert machine.run(20.0, **idle) == 0
    machine.run(60.0, preemptions_per_s=20)
    for _ in range(3):  # few readings, far apart
        machine.now_s += 30.0
        machine.run(0.1, **idle)
    assert machine.levels[-1] == 0


def test_what_the_levels_mean() -> None:
    brownout = Brownout(BrownoutSettings(prefill_share=0.5))
    limits = []
    for brownout.level in range(4):
        limits.append(brownout.prefill_limit(2048))
    assert limits == [None, 1024, 1024, 1024]
    assert brownout.prefill_limit(1) == 1


def test_off_is_off() -> None:
    machine = Machine(BrownoutSettings(enabled=False))
    assert machine.run(60.0, preemptions_per_s=100) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_s", 0.0),
        ("rise_s", -1.0),
        ("fall_s", 0.0),
        ("min_preemptions", 0),
        ("min_kv_usage", 1.5),
        ("prefill_share", 0.0),
        ("refusal_backlog", -0.1),
    ],
)
def test_what_cannot_work_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        BrownoutSettings(**{field: value})


# -- on a scheduler


def drive(rig: Rig, brownout: Brownout, seconds: float) -> int:
    highest = 0
    end_s = rig.clock() + seconds
    while rig.clock() < end_s and rig.scheduler.has_work:
        rig.step()
        highest = max(highest, brownout.update(rig.clock(), PressureReading.of(rig.scheduler, rig.kv)))
    return highest


def test_thrashing_raises_it_and_its_end_lowers_it() -> None:
    """Short prompts, long answers, few blocks: everyone is let in and then thrown out."""
    rig = Rig(num_blocks=60, max_num_seqs=32, max_model_len=200, preemption="recompute")
    rig.checking = False
    rig.add(*(make_request(4, max_tokens=150) for _ in range(200)))
    brownout = Brownout(BrownoutSettings(rise_s=0.1, fall_s=0.5, window_s=0.5))
    assert drive(rig, brownout, 3.0) == 3
    assert rig.scheduler.stats.num_preemptions > 20
    while rig.scheduler.has_work:
        rig.step()
    for _ in range(10):
        brownout.update(rig.clock(), PressureReading.of(rig.scheduler, rig.kv))
        rig.clock.now_s += 0.2
    assert brownout.level == 0


def test_a_saturated_server_with_memory_enough_is_left_alone() -> None:
    rig = Rig(num_blocks=400, max_num_seqs=16, max_model_len=200)
    rig.checking = False
    rig.add(*(make_request(40, max_tokens=40) for _ in range(300)))
    assert drive(rig, Brownout(BrownoutSettings(rise_s=0.1, window_s=0.5)), 5.0) == 0
    assert rig.kv.stats.min_available < 200  # it was busy


def test_making_way_for_a_tenant_is_no_pressure() -> None:
    rig = Rig(num_blocks=400, max_num_seqs=2, max_model_len=200)
    rig.add(*(make_request(8, max_tokens=100, tenant="a") for _ in range(4)))
    for _ in range(5):
        rig.step()
    rig.add(make_request(8, tenant="b"))
    for _ in range(5):
        rig.step()
    assert rig.scheduler.stats.num_preemptions == rig.scheduler.stats.num_yields == 1
    assert PressureReading.of(rig.scheduler, rig.kv).num_preemptions == 0
