"""Words come from the data alone: a report's can be written again, and those in docs are as the code writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.lab.experiments import EXPERIMENTS
from quire.lab.report import render_report
from quire.lab.store import HTML_NAME, JSON_NAME, read_report

REPORTS = Path(__file__).parents[2] / "docs" / "lab"
FOLDERS = sorted(path.parent for path in REPORTS.glob(f"*/{JSON_NAME}"))
MOST_BYTES = 600_000  # of a file that lies in the repository


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_reports_in_docs_are_in_todays_words(folder: Path) -> None:
    """If this fails: quire lab --retell --output-dir docs/lab/cpu, and so on."""
    report = read_report(folder / JSON_NAME)
    assert report.to_json() == json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    assert render_report(report) == (folder / HTML_NAME).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_reports_in_docs_are_whole_and_small(folder: Path) -> None:
    report = read_report(folder / JSON_NAME)
    # Experiments that came later have folders of their own.
    later = {"beams": "beam-sharing", "tiers": "tiers", "tiers-h200": "tiers", "weights": "weights"}
    others = {each.key for each in EXPERIMENTS} - set(later.values())
    expected = {later[folder.name]} if folder.name in later else others
    assert list(report.entries) == [each.key for each in EXPERIMENTS if each.key in expected]
    assert {entry.status for entry in report.entries.values()} == {"done"}
    assert max((folder / name).stat().st_size for name in (JSON_NAME, HTML_NAME)) < MOST_BYTES


def test_words_change_and_the_date_does_not(tmp_path: Path) -> None:
    report = read_report(FOLDERS[0] / JSON_NAME)
    for entry in report.entries.values():
        assert entry.result is not None
        entry.result.explanation = ["old words"]
    report.write(tmp_path)
    assert main(["lab", "--retell", "--output-dir", str(tmp_path)]) == 0
    again = read_report(tmp_path / JSON_NAME)
    assert (again.written, again.version, again.machine) == (report.written, report.version, report.machine)
    assert "old words" not in (tmp_path / JSON_NAME).read_text() + (tmp_path / HTML_NAME).read_text()
    assert again.data() == report.data()


def test_a_folder_without_a_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--retell", "--output-dir", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
