"""Predictions beside measurements: the recorded H200, and a live engine of a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.bench.report import RunReport
from quire.cli.main import main
from quire.config import EngineConfig
from quire.executor.kv_cache import KVCache
from quire.lab import validation
from quire.lab.validation import Row, Seen, as_text, measured_live, recorded_h200


def test_a_row_says_how_far_off_it_is() -> None:
    near, far = Row("a", "ms", 10.0, 10.9), Row("b", "ms", 10.0, 8.5)
    assert near.is_met and not far.is_met
    assert (near.error_percent, far.error_percent) == (pytest.approx(9.0), pytest.approx(-15.0))
    assert as_text([near, far]).splitlines()[-1].startswith("1 of 2")


def test_the_recorded_h200_is_met_where_steps_alone_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_OFFLINE", {"single": 238.0, "lab16": 3_608.0})
    monkeypatch.setattr(validation, "_SERVING", {8: (40, (13.2, 48.0, 4.6, 9.7))})
    monkeypatch.setattr(validation, "_AT_ENGINE", {8: (100.0, (11.66, 36.07, 4.55, 8.38))})
    monkeypatch.setattr(validation, "_NUM_LOADS", 1)
    monkeypatch.setattr(validation, "sharegpt", lambda vocab, seed, num=20: [([1] * 30, 10)] * num)
    rows = {(row.run, row.metric): row for row in recorded_h200()}
    assert len(rows) == 2 + 5 + 4 + 1
    for (run, metric), row in rows.items():
        if "offline" in run or metric == "inter-token p50, ms":
            assert row.is_met, row


def test_a_live_engine_is_profiled_measured_and_predicted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "ROUNDS", 2)
    monkeypatch.setattr(validation, "_NUM_EACH", 4)
    config = EngineConfig(
        model=str(tiny_model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20
    )
    runs: dict[str, list[RunReport]] = {}

    def rows_of_all(run: str, measured: RunReport, drawn: Sequence[Seen]) -> list[Row]:
        runs[run] = [measured, *(one.report() for one in drawn)]
        return original(run, measured, drawn)

    taken: list[KVCache] = []
    monkeypatch.setattr(KVCache, "take_pages", lambda self: taken.append(self))
    original = validation.rows_of_all
    monkeypatch.setattr(validation, "rows_of_all", rows_of_all)
    rows = measured_live(config)
    assert len(rows) == 10 and all(row.measured > 0 and row.predicted > 0 for row in rows)
    assert len(taken) == 1  # no step that was recorded waited for memory
    for reports in runs.values():  # percentiles are those of both rounds' requests together
        assert len(reports) == 1 + validation.NUM_DRAWS
        assert {report.ttft_s.count for report in reports if report.ttft_s} == {2 * 4}
        assert len({report.output_tokens for report in reports}) == 1
        assert len({report.itl_s.count for report in reports if report.itl_s}) == 1


def test_what_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--validate", "moon"]) == 2
    assert "h200" in capsys.readouterr().err
