"""The experiment end to end, on fewer requests: the numbers that do not depend on luck, and a text made of them."""

from __future__ import annotations

import pytest

from quire.lab import fragmentation
from quire.lab.context import LabContext, LabSettings
from quire.lab.experiment import Result


@pytest.fixture(scope="module")
def result() -> Result:
    patch = pytest.MonkeyPatch()
    patch.setattr(fragmentation, "QUICK_REQUESTS", 130)
    said: list[str] = []
    made = fragmentation.EXPERIMENT.run(LabContext(LabSettings(quick=True), said.append))
    patch.undo()
    assert len(said) == 4 + 3  # with a buddy allocator, and without blocks with first fit
    return made


def test_the_papers_pool() -> None:
    assert fragmentation.KV_TOKEN_BYTES == 819_200
    assert fragmentation.NUM_SLOTS == 15_728  # the paper says 15.7 K


def test_shares_add_up_and_the_maximum_allows_seven(result: Result) -> None:
    runs = {run["key"]: run for run in result.data["runs"]}
    for run in runs.values():
        assert sum(run["usage"].values()) == pytest.approx(100.0)
    assert runs["max"]["width"] == 7.0
    assert runs["max"]["usage"]["free"] == pytest.approx(100 * (1 - 7 * 2048 / 15_728))
    assert runs["oracle"]["usage"]["internal"] == 0.0
    assert runs["paged"]["usage"]["tokens"] > 90
    assert runs["paged"]["width"] > runs["oracle"]["width"] > runs["pow2"]["width"] > 7.0


def test_findings_come_from_the_numbers(result: Result) -> None:
    assert [finding.holds for finding in result.findings] == [True] * 5
    # Theirs stand beside ours.
    assert result.charts[0].series[0].x[:2] == ["Orca (Max)", "Orca (Max), paper"]
    assert result.charts[0].series[0].y[1] == 20.4
    assert "(96.3)" in result.tables[0].rows[3][1]


def test_a_result_that_contradicts_is_not_talked_away(result: Result) -> None:
    runs = [fragmentation.Run(**run | {"usage": fragmentation.Usage(**run["usage"])}) for run in result.data["runs"]]
    runs[3].usage, runs[0].usage = runs[0].usage, runs[3].usage
    runs[3].width = 5.0
    holds = [finding.holds for finding in fragmentation._findings({run.key: run for run in runs})]
    assert holds[1:4] == [False, False, False]


def test_lengths_have_the_papers_means() -> None:
    lengths = fragmentation.sharegpt_lengths(20_000, 1)
    assert sum(p for p, _ in lengths) / 20_000 == pytest.approx(161.31, rel=0.05)
    assert sum(o for _, o in lengths) / 20_000 == pytest.approx(337.99, rel=0.05)
    assert all(p + o <= 2048 for p, o in lengths)
