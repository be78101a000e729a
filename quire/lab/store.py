"""The lab's results on disk: one JSON file, written anew after each experiment, from which a later run goes on."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import quire
from quire.errors import ConfigError
from quire.lab.context import LabSettings
from quire.lab.result import Result

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
    details: str = ""  # a traceback, for whoever looks for the reason
    probe_tok_s: float | None = None  # the speed of the same short run, right after the experiment


@dataclass(slots=True)
class LabReport:
    """All that the report shows."""

    settings: LabSettings
    entries: dict[str, Entry] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    written: str = ""  # the date and time of the last measurement
    version: str = ""

    def results(self) -> dict[str, Result]:
        return {key: entry.result for key, entry in self.entries.items() if entry.result is not None}

    def is_done(self, key: str) -> bool:
        return key in self.entries and self.entries[key].status == "done"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "written": self.written,
            "settings": self.settings.to_json(),
            "machine": self.machine,
            "experiments": {
                key: {
                    "status": entry.status,
                    "seconds": round(entry.seconds, 2),
                    "error": entry.error,
                    "details": entry.details,
                    "probe_tok_s": entry.probe_tok_s,
                    "result": None if entry.result is None else json.loads(entry.result.to_json()),
                }
                for key, entry in self.entries.items()
            },
        }

    def write(self, folder: Path) -> None:
        """The JSON file, dated; all or nothing."""
        self.written, self.version = time.strftime("%Y-%m-%d %H:%M"), quire.__version__
        self.write_undated(folder)

    def write_undated(self, folder: Path) -> None:
        """With the date and version of its measurements, which are as they were."""
        write_text(folder / JSON_NAME, json.dumps(self.to_json(), separators=(",", ":")) + "\n")


def write_text(path: Path, text: str) -> None:
    """All or nothing: a full disk or an interruption leaves what stood there before."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def read_report(path: Path) -> LabReport:
    """Raises ConfigError where the file is not what LabReport.write made."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): remove it, or start over with --fresh") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path} was not written by quire lab: choose another --output-dir")
    try:
        entries = {}
        for key, each in record["experiments"].items():
            result = None if each["result"] is None else Result.from_json(json.dumps(each["result"]))
            entries[key] = Entry(
                each["status"], each["seconds"], result, each["error"], each["details"], each["probe_tok_s"]
            )
        settings = LabSettings(**record["settings"])
        return LabReport(settings, entries, record["machine"], record["written"], record["version"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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
        old, new = found.settings.to_json(), settings.to_json()
        different = ", ".join(f"{name}={old[name]}" for name in old if old[name] != new[name])
        raise ConfigError(
            f"{path} was made with other settings ({different}): choose another "
            "--output-dir, or start over with --fresh"
        )
    return found
