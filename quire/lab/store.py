"""The lab's results on disk, and running the experiments that they lack.

The results are one JSON file, written anew after each experiment, from which a later run goes on; and the page beside
it. Experiments run one after the other: each is saved when it is done, and none takes the others with it. A file is
read for its data alone: what they say is told anew by the code at hand.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import quire
from quire.bench.machine import describe_machine
from quire.bench.report import read_text, write_text
from quire.errors import ConfigError, QuireError
from quire.lab import experiments
from quire.lab.context import LabContext, LabSettings, SkippedError
from quire.lab.experiment import Data, Experiment, Result

FORMAT = "quire-lab-1"
JSON_NAME, HTML_NAME = "report.json", "report.html"

Status = Literal["done", "failed", "skipped", "interrupted"]


@dataclass(slots=True)
class Entry:
    """One experiment: its result, or why there is none."""

    status: Status
    seconds: float = 0.0
    result: Result | None = None
    error: str = ""
    details: str = ""  # a traceback
    probe_tok_s: float | None = None  # the speed of the same short run, right after the experiment


@dataclass(slots=True)
class LabReport:
    """All that the report shows."""

    settings: LabSettings
    entries: dict[str, Entry] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    written: str = ""  # the date and time of the last measurement
    version: str = ""

    def data(self) -> dict[str, Data]:
        """What the experiments that are done have measured."""
        return {key: entry.result.data for key, entry in self.entries.items() if entry.result is not None}

    def is_done(self, key: str) -> bool:
        return key in self.entries and self.entries[key].status == "done"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _finite(asdict(self))
        found["experiments"] = found.pop("entries")
        return {"format": FORMAT} | found

    def date(self) -> None:
        """Note that something was measured just now."""
        self.written, self.version = time.strftime("%Y-%m-%d %H:%M"), quire.__version__

    def write(self, folder: Path) -> None:
        """The data and the page, with the experiments in the report's order."""
        from quire.lab.report import render_report

        order = [each.key for each in experiments.EXPERIMENTS]
        self.entries = dict(sorted(self.entries.items(), key=lambda item: order.index(item[0])))
        write_text(folder / JSON_NAME, json.dumps(self.to_json(), separators=(",", ":")) + "\n")
        write_text(folder / HTML_NAME, render_report(self))


def _finite(value: Any) -> Any:
    """`value` with plain JSON types only: numpy's scalars and arrays as Python's, no NaN, keys as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_report(path: Path) -> LabReport:
    """Raises ConfigError where the file is not what LabReport.write made."""
    text = read_text(path)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): remove it, or start over with --fresh") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path} was not written by quire lab: choose another --output-dir")
    try:
        settings = LabSettings(**record["settings"])
        found = record["experiments"]
        data = {key: each["result"]["data"] for key, each in found.items() if each["result"] is not None}
        context = LabContext(settings, lambda text: None, data)
        by_key = {each.key: each for each in experiments.EXPERIMENTS}
        entries = {}
        for key, each in found.items():
            if each["result"] is not None:
                each["result"] = by_key[key].result(data[key], context, each["result"]["seconds"])
            entries[key] = Entry(**each)
        return LabReport(settings, entries, record["machine"], record["written"], record["version"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): remove it, or start over with --fresh") from None


def open_report(folder: Path, settings: LabSettings, *, fresh: bool) -> LabReport:
    """What is there already with the same settings, or an empty one. Finds out first whether it can be written."""
    path = folder / JSON_NAME
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output-dir {folder} is a file: name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / (JSON_NAME + ".part")
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
    if fresh or not path.exists():
        return LabReport(settings)
    found = read_report(path)
    if found.settings != settings:
        old, new = asdict(found.settings), asdict(settings)
        different = ", ".join(f"{name}={old[name]}" for name in old if old[name] != new[name])
        raise ConfigError(
            f"{path} was made with other settings ({different}): choose another "
            "--output-dir, or start over with --fresh"
        )
    return found


# -- running

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
    # An experiment that looks at the others' runs runs again when there are new ones.
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
