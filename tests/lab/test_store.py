"""The lab's run: saved as it goes, resumed, interrupted, failed; and the page it writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from quire.bench.charts import Chart, Series
from quire.errors import ConfigError
from quire.lab import experiments, store
from quire.lab.context import LabContext, LabSettings, SkippedError
from quire.lab.experiment import Experiment, Finding, Result, Table
from quire.lab.experiments import EXPERIMENTS
from quire.lab.report import render_report
from quire.lab.store import HTML_NAME, JSON_NAME, Entry, LabReport, open_report, read_report

SETTINGS = LabSettings(quick=True)


def result(key: str) -> Result:
    return Result(
        question="Why <this>?",
        headline=f"the headline of {key}",
        tables=[Table("Table", ["name", "value", "word"], [["a", 1.5, "refused"], ["b", 2000, "3"], ["c", 1, "4"]])],
        charts=[Chart("bar", "Chart", "", "y", [Series("s", ["a", "b"], [1.0, 2.0])])],
        findings=[Finding("up", "up", True), Finding("down", "up", False), Finding("left", "?", None)],
        explanation=["Because 5 < 6."],
    )


def experiment(key: str, run: Callable[[LabContext], object] | None = None, *, is_last: bool = False) -> Experiment:
    def measure(context: LabContext) -> dict[str, Any]:
        if run is not None:
            run(context)
        return {}

    return Experiment(key, f"Title of {key}", measure, lambda data, context: result(key), is_last)


@pytest.fixture(autouse=True)
def told_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from a file is told as these experiments tell it."""
    monkeypatch.setattr(experiments, "EXPERIMENTS", tuple(experiment(each.key) for each in EXPERIMENTS))


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, key: str, text: str) -> None:
        self.lines.append((key, text))


def test_results_are_saved_and_not_made_again(tmp_path: Path) -> None:
    num_runs = {"baseline": 0, "batching": 0}

    def counting(key: str) -> Experiment:
        def run(context: LabContext) -> Result:
            num_runs[key] += 1
            context.report("half way")
            return result(key)

        return experiment(key, run)

    chosen = [counting("baseline"), counting("batching")]
    log = Log()
    assert store.run_lab(open_report(tmp_path, SETTINGS, fresh=False), tmp_path, chosen[:1], log)
    assert ("baseline", "half way") in log.lines
    assert read_report(tmp_path / JSON_NAME).is_done("baseline")
    report = open_report(tmp_path, SETTINGS, fresh=False)
    assert store.run_lab(report, tmp_path, chosen, log)
    assert num_runs == {"baseline": 1, "batching": 1}
    assert ("baseline", "done before") in log.lines
    assert list(report.entries) == ["baseline", "batching"]
    assert store.run_lab(report, tmp_path, chosen[1:], log, fresh=True)
    assert num_runs == {"baseline": 1, "batching": 2}


def test_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def broken(context: LabContext) -> Result:
        raise ZeroDivisionError("by <nothing>")

    def refused(context: LabContext) -> Result:
        raise ConfigError("too little memory")

    def missing(context: LabContext) -> Result:
        raise SkippedError("pip install it")

    keys = [each.key for each in EXPERIMENTS]
    chosen = [experiment(k, r) for k, r in zip(keys, (broken, refused, missing, None), strict=False)]
    report = LabReport(SETTINGS)
    log = Log()
    assert store.run_lab(report, tmp_path, chosen, log)
    assert [entry.status for entry in report.entries.values()] == ["failed", "failed", "skipped", "done"]
    assert report.entries[keys[0]].error == "ZeroDivisionError: by <nothing>"
    assert "Traceback" in report.entries[keys[0]].details
    page = (tmp_path / HTML_NAME).read_text()
    for text in ("ZeroDivisionError: by &lt;nothing&gt;", "Too little memory.", "Pip install it."):
        assert text in page
    assert (keys[1], "failed: too little memory") in log.lines
    # What failed or was skipped is tried again.
    again = read_report(tmp_path / JSON_NAME)
    assert [again.is_done(key) for key in keys[:4]] == [False, False, False, True]


def test_an_interruption_keeps_what_is_there(tmp_path: Path) -> None:
    def stopped(context: LabContext) -> Result:
        raise KeyboardInterrupt

    chosen = [experiment("baseline"), experiment("batching", stopped), experiment("pressure")]
    report = LabReport(SETTINGS)
    assert not store.run_lab(report, tmp_path, chosen, Log())
    assert {key: entry.status for key, entry in report.entries.items()} == {
        "baseline": "done",
        "batching": "interrupted",
    }
    page = (tmp_path / HTML_NAME).read_text()
    assert "The headline of baseline." in page and "stopped by the user" in page
    report = open_report(tmp_path, SETTINGS, fresh=False)
    chosen[1] = experiment("batching")
    assert store.run_lab(report, tmp_path, chosen, Log())
    assert all(entry.status == "done" for entry in report.entries.values())


def test_who_looks_at_the_others_comes_last_and_again(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(context: LabContext) -> Result:
        seen.append(sorted(context.results))
        return result("memory")

    report = LabReport(SETTINGS)
    last = experiment("memory", look, is_last=True)
    assert store.run_lab(report, tmp_path, [last, experiment("batching")], Log())
    assert store.run_lab(report, tmp_path, [last, experiment("batching")], Log())  # nothing is missing
    assert store.run_lab(report, tmp_path, [last, experiment("batching"), experiment("pressure")], Log())
    assert seen == [["batching"], ["batching", "memory", "pressure"]]


def test_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    LabReport(SETTINGS, {"baseline": Entry("done", 1.0, result("baseline"))}).write(tmp_path)
    with pytest.raises(ConfigError, match=r"other settings \(quick=True\).*--fresh"):
        open_report(tmp_path, LabSettings(), fresh=False)
    assert not open_report(tmp_path, LabSettings(), fresh=True).entries


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("{}", "was not written by quire lab"), ('{"format": "quire-lab-1"}', "is damaged")],
)
def test_a_file_that_is_not_ours(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / JSON_NAME).write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_report(tmp_path, SETTINGS, fresh=False)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        open_report(tmp_path / "file", SETTINGS, fresh=False)
    with pytest.raises(ConfigError, match="cannot write to"):
        open_report(tmp_path / "file" / "below", SETTINGS, fresh=False)


# -- the page


def page_of(**entries: Entry) -> str:
    return render_report(LabReport(SETTINGS, dict(entries), {"cpu": "a <chip>", "cpus": 2}, "today", "1"))


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = page_of(baseline=Entry("done", 1.0, result("baseline"), probe_tok_s=100.0), batching=Entry("skipped"))
    assert not re.search(r"(src|href)=\"(?!#)", page) and "<script" not in page and "@import" not in page
    assert "a &lt;chip&gt;" in page and "Why &lt;this&gt;?" in page and "Because 5 &lt; 6." in page
    body = page[page.index("<body>") : page.index("</html>")]
    ElementTree.fromstring(body)  # every element is closed
    assert "1 of 3 as expected" in page
    for words in ("holds", "does not hold", "cannot tell"):
        assert f">{words}<" in page
    assert "Not run: batch-width" in page
    assert "prefers-color-scheme: dark" in page


def test_a_column_of_numbers_stands_right() -> None:
    page = page_of(baseline=Entry("done", 1.0, result("baseline")))
    assert '<td class="num">2,000</td>' in page
    assert '<td class="num">refused</td>' in page  # one word among numbers
    assert '<td class="text">a</td>' in page


def test_a_noisy_machine_is_told() -> None:
    def page(*probes: float) -> str:
        keys = [each.key for each in EXPERIMENTS]
        return page_of(**{k: Entry("done", 1.0, result(k), probe_tok_s=p) for k, p in zip(keys, probes, strict=False)})

    assert "speed changed by 50 %" in page(100.0, 200.0) and 'class="error soft"' in page(100.0, 200.0)
    assert 'class="error soft"' not in page(195.0, 200.0)
    assert "same short run" not in page(195.0)


def test_json_and_back(tmp_path: Path) -> None:
    report = LabReport(SETTINGS, {"baseline": Entry("done", 1.25, result("baseline"), probe_tok_s=3.0)})
    report.write(tmp_path)
    assert read_report(tmp_path / JSON_NAME) == report
    record = json.loads((tmp_path / JSON_NAME).read_text())
    assert record["experiments"]["baseline"]["result"]["headline"] == "the headline of baseline"


def test_numpy_and_what_is_not_finite_become_json(tmp_path: Path) -> None:
    told = result("baseline")
    told.data = {"array": np.arange(3), "nan": math.nan, 5: [np.float64(0.5), math.inf]}  # type: ignore[dict-item]
    record = LabReport(SETTINGS, {"baseline": Entry("done", 1.0, told)}).to_json()
    data = record["experiments"]["baseline"]["result"]["data"]
    assert data == {"array": [0, 1, 2], "nan": None, "5": [0.5, None]}


def test_ragged_tables_and_series_are_our_bugs() -> None:
    with pytest.raises(AssertionError):
        Table("a", ["x", "y"], [[1]])
    with pytest.raises(AssertionError):
        Series("s", [1.0], [])
