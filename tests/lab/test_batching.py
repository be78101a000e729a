"""Static and continuous batching, by hand on three requests and end to end on a few."""

from __future__ import annotations

import pytest

from quire.lab import batching
from quire.lab.context import LabContext, LabSettings
from quire.sim import CostModel, SimRequest
from quire.sim.batching import Occupation, run_continuous, run_static

THREE = [SimRequest(0.0, 8, 4), SimRequest(0.0, 6, 1), SimRequest(0.0, 4, 2)]
FLAT = CostModel(overhead_s=1.0, weights_s=0.0, token_s=0.0, kv_token_s=0.0, pair_s=0.0)  # every step is a second


def test_static_by_hand() -> None:
    run = run_static(THREE, 2, FLAT)
    assert (run.num_steps, run.useful_slot_steps, run.seconds) == (4 + 2, 4 + 1 + 2, 6.0)
    assert run.utilisation == pytest.approx(7 / 12)
    assert run.latencies_s == [4.0, 1.0, 6.0]
    assert run.first_tokens_s == [1.0, 1.0, 5.0]
    assert run.occupations == [Occupation(0, 0, 0, 4, 4), Occupation(1, 1, 0, 1, 4), Occupation(2, 0, 4, 6, 6)]
    assert run.queued_utilisation == pytest.approx(5 / 8)  # the first batch, while the third waits
    assert batching.predicted_static_utilisation(THREE, 2) == pytest.approx(7 / 12)


def test_continuous_by_hand() -> None:
    run = run_continuous(THREE, 2, FLAT)
    assert (run.num_steps, run.useful_slot_steps, run.seconds) == (4, 7, 4.0)
    assert run.latencies_s == [4.0, 1.0, 3.0]
    assert run.first_tokens_s == [1.0, 1.0, 2.0]
    assert run.occupations == [Occupation(0, 0, 0, 4, 4), Occupation(1, 1, 0, 1, 1), Occupation(2, 1, 1, 3, 3)]
    assert run.queued_utilisation == 1.0


def test_static_pads_and_pays_for_it() -> None:
    per_token = CostModel(overhead_s=0.0, weights_s=0.0, token_s=1.0, kv_token_s=0.0, pair_s=0.0)
    # Both prompts as long as the longer, both rows as long as the longer output.
    assert run_static(THREE[:2], 2, per_token).seconds == 2 * 8 + 3 * 2
    assert run_continuous(THREE[:2], 2, per_token).seconds == 8 + 6 + 3


def test_late_arrivals_wait_for_the_batch_or_the_step() -> None:
    late = [SimRequest(0.0, 8, 10), SimRequest(2.5, 8, 1)]
    assert run_static(late, 2, FLAT).first_tokens_s == [1.0, 10 - 2.5 + 1]
    assert run_continuous(late, 2, FLAT).first_tokens_s == [1.0, 3 - 2.5 + 1]


def test_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "QUICK_REQUESTS", 96)
    result = batching.EXPERIMENT.run(LabContext(LabSettings(quick=True, seed=1), lambda text: None))
    assert [finding.holds for finding in result.findings] == [True] * 4
    static, continuous = result.data["all_at_once"]
    assert static["output_tokens"] == continuous["output_tokens"] == sum(o for _, o in result.data["lengths"])
    timelines = [chart for chart in result.charts if chart.kind == "timeline"]
    assert len(timelines) == 2
    for chart in timelines:
        taken: set[tuple[int, int]] = set()
        for span in chart.spans:
            steps = {(span.lane, step) for step in range(int(span.start), int(span.end))}
            assert steps
            assert not steps & taken, "two requests in one slot"
            taken |= steps
        assert {span.lane for span in chart.spans} == set(range(batching.PICTURE_SLOTS))
    assert "wasted" in {span.kind for span in timelines[0].spans}
    assert "wasted" not in {span.kind for span in timelines[1].spans}
