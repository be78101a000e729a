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
from quire.lab.store import Entry, LabReport

Say = Callable[[str, str], None]  # which experiment, and how far it is


def run_lab(report: LabReport, folder: Path, chosen: Sequence[Experiment], say: Say, *, fresh: bool = False) -> bool:
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
            context.results = report.data()
            entry = report.entries[each.key] = _run_one(each, context)
            report.machine = describe_machine()
            report.date()
            report.write(folder)
            if entry.status == "interrupted":
                return False
            say(each.key, _ending(entry))
            if entry.status == "failed":
                context.close()  # its engine may be beyond use
    finally:
        context.close()
    return True


def _run_one(experiment: Experiment, context: LabContext) -> Entry:
    started = time.perf_counter()
    entry = Entry("failed")
    try:
        entry.result = experiment.run(context)
        entry.status = "done"
    except KeyboardInterrupt:
        entry.status, entry.error = "interrupted", "stopped by the user before it was done"
    except SkippedError as reason:
        entry.status, entry.error = "skipped", str(reason)
    except Exception as error:  # whatever it was, the other experiments are still worth having
        entry.error = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        entry.details = traceback.format_exc()
    entry.seconds = round(time.perf_counter() - started, 2)
    if entry.result is not None:
        entry.probe_tok_s = context.probe_tok_s()
    return entry


def _ending(entry: Entry) -> str:
    if entry.result is not None:
        return f"done in {entry.seconds:.0f} s: {entry.result.headline}"
    return f"{entry.status}: {entry.error}"
