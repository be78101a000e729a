"""Running the experiments one after the other: each is saved when it is done, and none takes the others with it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.bench.machine import describe_machine
from quire.errors import QuireError
from quire.lab.context import LabContext, SkippedError
from quire.lab.experiment import Experiment
from quire.lab.experiments import EXPERIMENTS
from quire.lab.report import render_report
from quire.lab.store import HTML_NAME, Entry, LabReport, write_text

Say = Callable[[str, str], None]  # which experiment, and how far it is


def run_lab(
    report: LabReport,
    folder: Path,
    chosen: Sequence[Experiment],
    say: Say,
    *,
    fresh: bool = False,
) -> bool:
    """Run what is chosen and not done. False: the user stopped it; what was done until then is on disk."""
    if fresh:
        for each in chosen:
            report.entries.pop(each.key, None)
    missing = [each for each in chosen if not report.is_done(each.key)]
    for each in chosen:
        if each not in missing and not (each.is_last and missing):
            say(each.key, "done before")
    # Whoever looks at the others' runs looks again when there are new ones.
    planned = [each for each in missing if not each.is_last]
    planned += [each for each in chosen if each.is_last and missing]
    current = ""
    context = LabContext(report.settings, lambda text: say(current, text))
    try:
        for each in planned:
            current = each.key
            entry = _run_one(each, context, report)
            report.entries[each.key] = entry
            save(report, folder)
            if entry.status == "interrupted":
                return False
            say(each.key, _ending(entry))
            if entry.status == "failed":
                context.close()  # its engine may be beyond use
    finally:
        context.close()
    return True


def save(report: LabReport, folder: Path) -> None:
    """JSON and page, with the experiments in the report's order."""
    order = [each.key for each in EXPERIMENTS]
    report.entries = dict(sorted(report.entries.items(), key=lambda item: order.index(item[0])))
    report.machine = describe_machine()
    report.write(folder)
    write_text(folder / HTML_NAME, render_report(report))


def _run_one(experiment: Experiment, context: LabContext, report: LabReport) -> Entry:
    started = time.perf_counter()
    context.results = report.results()
    try:
        result = experiment.run(context)
        return Entry("done", time.perf_counter() - started, result, probe_tok_s=context.probe_tok_s())
    except KeyboardInterrupt:
        return Entry("interrupted", time.perf_counter() - started, error="stopped by the user before it was done")
    except SkippedError as reason:
        return Entry("skipped", time.perf_counter() - started, error=str(reason))
    except QuireError as error:
        return Entry("failed", time.perf_counter() - started, error=str(error), details=traceback.format_exc())
    except Exception as error:  # whatever it was, the other experiments are still worth having
        text = f"{type(error).__name__}: {error}"
        return Entry("failed", time.perf_counter() - started, error=text, details=traceback.format_exc())


def _ending(entry: Entry) -> str:
    if entry.result is not None:
        headline = entry.result.data.get("headline", "")
        return f"done in {entry.seconds:.0f} s" + (f": {headline}" if headline else "")
    return f"{entry.status}: {entry.error}"
