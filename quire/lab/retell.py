"""Tells an older report again: charts, tables and words are made anew from the numbers that it holds.

    python -m quire.lab.retell docs/lab/cpu docs/lab/h200

Nothing is measured and no number changes; its date stays that of the measurements.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire.errors import ConfigError
from quire.lab.context import LabContext
from quire.lab.experiments import EXPERIMENTS
from quire.lab.report import render_report
from quire.lab.store import HTML_NAME, JSON_NAME, LabReport, read_report, write_text


def retell(report: LabReport) -> None:
    """Write charts, tables and words as the code at hand would have written them after these runs."""
    context = LabContext(report.settings, lambda text: None, report.results())
    for experiment in EXPERIMENTS:
        old = context.results.get(experiment.key)
        if old is not None:
            report.entries[experiment.key].result = experiment.result(old.data, context, old.seconds)


def main(folders: list[str]) -> None:
    if not folders:
        raise SystemExit("usage: python -m quire.lab.retell FOLDER...")
    for folder in map(Path, folders):
        try:
            report = read_report(folder / JSON_NAME)
            retell(report)
            report.write_undated(folder)
            write_text(folder / HTML_NAME, render_report(report))
        except ConfigError as error:
            raise SystemExit(f"quire.lab.retell: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
