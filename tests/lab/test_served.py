"""Replicas on shared cores: served for real, their steps kept, and predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench.profile import STEP_COLUMNS
from quire.bench.replicas import TimedLoad, report_of_loads
from quire.cli.main import main
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.lab import served, validation
from quire.lab.served import serve_and_predict
from quire.lab.validation import measured_served
from quire.sim.profile import ProfileCost


def columns(*steps: tuple[float, float, float]) -> dict[str, list[float]]:
    """Steps that begin, end, and take so many seconds of a core."""
    began_s, ended_s, step_s = (list(column) for column in zip(*steps, strict=True))
    return {"began_s": began_s, "ended_s": ended_s, "step_s": step_s, "seconds": step_s}


def test_the_share_is_of_what_an_idle_machine_would_have_given() -> None:
    load = TimedLoad(began_s=0.0, ended_s=20.0)
    before = (-5.0, -1.0, 0.1)  # no step of this load
    # Alone a replica may have a whole core of two, and three together have both.
    assert served._core_share([columns(before, (1.0, 3.0, 1.5))], load, 2) == pytest.approx(0.75)
    three = [columns((10.0, 13.0, 1.0)) for _ in range(3)]
    assert served._core_share(three, load, 2) == pytest.approx(0.5)
    assert served._core_share([columns((1.0, 2.0, 1.0))], load, 2) == 1.0


def test_what_is_no_step_of_a_lone_prompt_is_before_or_behind_the_engine() -> None:
    load = TimedLoad(began_s=100.0, ended_s=110.0, first_s=[3.5])
    steps = columns((100.25, 102.25, 2.0), (102.5, 103.25, 0.7), (103.5, 104.0, 0.5))  # the last one is a decode
    assert served._front_s([steps], [load]) == pytest.approx(0.75)


def test_a_rounds_machine_is_as_much_slower_as_its_learned_steps_were() -> None:
    line = ProfileCost(corners=[1, 2], corner_s=[1.0, 2.0], sampled_s=0.0, kv_token_s=0.0, pair_s=0.0, mean_error=0.0)
    steps = columns((0.0, 1.0, 1.2), (1.0, 3.0, 2.4), (8.0, 9.0, 7.0))  # of one and of two rows; the last elsewhere
    steps |= {name: [0.0] * 3 for name in STEP_COLUMNS} | {"num_decodes": [1.0, 2.0, 1.0]}
    report = served._report([steps], [TimedLoad(began_s=0.0, ended_s=5.0)])
    assert served._mean_stray(line, report) == pytest.approx(1.2)


def test_replicas_are_served_recorded_and_predicted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ROUNDS", 2)
    monkeypatch.setattr(validation, "_NUM_EACH", 4)
    config = EngineConfig(model=str(tiny_model), load_format="dummy", kv_cache_memory_bytes=8 << 20)
    runs = serve_and_predict(config, 2)
    assert len(runs.core_shares) == 4 and all(0 < share <= 1 for share in runs.core_shares)
    for loads, drawn in ((runs.at_once, runs.at_once_predicted), (runs.timed, runs.timed_predicted)):
        assert len(loads) == 2
        measured = report_of_loads(loads)
        for predicted in (one.report() for one in drawn):
            assert measured.output_tokens == predicted.output_tokens
            assert measured.ttft_s and predicted.ttft_s and measured.ttft_s.count == predicted.ttft_s.count == 16
    monkeypatch.setattr("quire.lab.served.serve_and_predict", lambda config, num_replicas: runs)
    rows = measured_served(config, 2)
    assert len(rows) == 10 and all(row.measured > 0 and row.predicted > 0 for row in rows)


def test_what_is_not_of_one_thread_on_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="one thread"):
        serve_and_predict(EngineConfig(num_threads=2), 2)
    assert main(["sim", "--validate", "live", "--replicas", "4"]) == 2
    assert "--validate served" in capsys.readouterr().err
