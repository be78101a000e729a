"""The report as a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from quire.bench.svg import figures, page
from quire.bench.units import counted, duration, listed, number, size
from quire.lab.experiment import Experiment, Finding, Result, Table
from quire.lab.experiments import EXPERIMENTS
from quire.lab.store import Entry, LabReport

# Tables with more rows than this begin folded.
_MOST_ROWS = 16
_NOISY_PERCENT = 15.0  # more change than that in the machine's own speed is worth a warning
_NUMBER = re.compile(r"[-+−]?[\d,]*\.?\d+( ?(%|[KMG]iB|B|ms|s|µs))?|–|")


def render_report(report: LabReport) -> str:
    parts = [_header(report), _summary(report)]
    parts += [_section(at, experiment, entry) for at, experiment, entry in _numbered(report)]
    parts.append(_footer(report))
    return page(f"Quire lab: {report.settings.model_name}", "".join(parts))


def _numbered(report: LabReport) -> list[tuple[int, Experiment, Entry]]:
    """Experiments keep their numbers, whichever of them were run."""
    entries = report.entries
    return [(at, each, entries[each.key]) for at, each in enumerate(EXPERIMENTS, 1) if each.key in entries]


# -- the top


def _header(report: LabReport) -> str:
    settings, machine = report.settings, report.machine
    where = machine.get("gpu") if settings.gpu_8b and machine.get("gpu") else machine.get("cpu")
    cores = counted(int(machine.get("cpus") or 0), "core")
    memory = size(machine.get("memory_bytes"))
    if settings.gpu_8b:
        facts = [("machine", str(where)), ("GPU memory", size(machine.get("gpu_bytes")))]
        facts += [("host", f"{machine.get('cpu')}, {cores}"), ("host memory", memory)]
    else:
        facts = [("machine", f"{where}, {cores}"), ("memory", memory)]
    facts += [
        ("model", settings.model_name),
        ("made", report.written),
        ("took", duration(sum(entry.seconds for entry in report.entries.values()))),
        ("seed", str(settings.seed)),
        ("quire", report.version),
        ("torch", str(machine.get("torch"))),
        ("python", str(machine.get("python"))),
    ]
    items = "".join(f"<li><b>{escape(name)}</b>{escape(value)}</li>" for name, value in facts)
    kind = (
        "This is the quick run: few requests, each setting measured once. It shows the shapes; for numbers to rely on, "
        "run it without <code>--quick</code>."
        if settings.quick
        else "Timings vary between runs; where a difference is too small to tell, the report says so."
    )
    return (
        "<header><h1>Paged attention, measured</h1>"
        '<p class="lead">What paging, continuous batching and sharing do for a language model on this machine: '
        "experiments with Quire's own engine, with what was expected, what was seen, and why. Every sentence with a "
        f"number in it was written from this run's numbers. {kind}</p>"
        f'<ul class="facts">{items}</ul>{_quiet(report)}</header>'
    )


def _quiet(report: LabReport) -> str:
    """Whether the machine had anything else to do: the same short run was repeated after every experiment."""
    probes = [entry.probe_tok_s for entry in report.entries.values() if entry.probe_tok_s]
    if len(probes) < 2:
        return ""
    low, high = min(probes), max(probes)
    spread = 100 * (high - low) / high
    text = f"The same short run after each experiment made {number(low)} to {number(high)} tok/s"
    if spread > _NOISY_PERCENT:
        return (
            f'<p class="error soft">{text}: the machine\'s own speed changed by {spread:.0f} % while this ran. '
            "Differences smaller than that, between settings that were not measured one right after the other, may be "
            "the machine's.</p>"
        )
    return f'<p class="tablenote">{text}: the machine\'s own speed changed by {spread:.0f} %.</p>'


def _summary(report: LabReport) -> str:
    rows = []
    for at, each, entry in _numbered(report):
        if entry.result is not None:
            text = escape(_sentence(entry.result.headline))
            score = _score(entry.result.findings)
        else:
            text, score = escape(entry.error), _badge("bad" if entry.status == "failed" else "open", entry.status)
        rows.append(
            f'<tr><td class="number">{at}</td><td class="name"><a href="#{each.key}">{escape(each.title)}</a></td>'
            f'<td>{text}</td><td class="score">{score}</td></tr>'
        )
    missing = [each.key for each in EXPERIMENTS if each.key not in report.entries]
    note = f'<p class="tablenote">Not run: {escape(listed(missing))}.</p>' if missing else ""
    return f'<table class="summary">{"".join(rows)}</table>{note}'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("." if text and not text.endswith(".") else "")


def _score(findings: Sequence[Finding]) -> str:
    held = sum(finding.holds is True for finding in findings)
    failed = sum(finding.holds is False for finding in findings)
    if findings and not held and not failed:
        return _badge("open", "cannot tell")
    kind = "bad" if failed else "good" if held == len(findings) else "open"
    return _badge(kind, f"{held} of {len(findings)} as expected")


def _badge(kind: str, text: str) -> str:
    return f'<span class="badge {kind}">{escape(text)}</span>'


# -- an experiment


def _section(at: int, experiment: Experiment, entry: Entry) -> str:
    head = f'<section id="{experiment.key}"><h2>{at}. {escape(experiment.title)}</h2>'
    if entry.result is None:
        soft = "" if entry.status == "failed" else " soft"
        details = f"<details><summary>details</summary><pre>{escape(entry.details)}</pre></details>"
        return (
            f'{head}<p class="error{soft}">{escape(_sentence(entry.status))} {escape(_sentence(entry.error))}</p>'
            f"{details if entry.details else ''}</section>"
        )
    return head + _body(entry.result) + "</section>"


def _body(result: Result) -> str:
    text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in result.explanation)
    return (
        f'<p class="question">{escape(result.question)}</p>'
        f"{figures(result.charts)}"
        f"<h3>Expected and seen</h3>{_findings(result.findings)}"
        f"<h3>Why</h3>{text}"
        f"{''.join(_table(table) for table in result.tables)}"
        f'<p class="tablenote">Took {duration(result.seconds)}.</p>'
    )


def _findings(findings: Sequence[Finding]) -> str:
    rows = []
    for finding in findings:
        badge = {True: ("good", "holds"), False: ("bad", "does not hold"), None: ("open", "cannot tell")}[finding.holds]
        rows.append(
            f"<tr><td>{_badge(*badge)}</td><td>{escape(finding.expected)}</td><td>{escape(finding.observed)}</td></tr>"
        )
    return (
        f'<table class="findings"><tr><th></th><th>expected</th><th>seen</th></tr>{"".join(rows)}</table>'
        if rows
        else ""
    )


def _table(table: Table) -> str:
    is_number = [_is_numeric([row[column] for row in table.rows]) for column in range(len(table.columns))]
    heads = "".join(
        f'<th class="{"num" if numeric else "text"}">{escape(name)}</th>'
        for name, numeric in zip(table.columns, is_number, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(_cell(value, numeric) for value, numeric in zip(row, is_number, strict=True)) + "</tr>"
        for row in table.rows
    )
    inner = (
        f'<div class="scroll"><table class="data"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    note = f'<p class="tablenote">{escape(table.note)}</p>' if table.note else ""
    if len(table.rows) > _MOST_ROWS:
        return f"<details><summary>{escape(table.title)}: {len(table.rows)} rows</summary>{inner}{note}</details>"
    return f'<p class="tabletitle">{escape(table.title)}</p>{inner}{note}'


def _is_numeric(cells: Sequence[Any]) -> bool:
    """Whether a column is one of numbers: a word in place of one of them does not make it text."""
    return sum(_is_number(cell) for cell in cells) >= 0.6 * len(cells)


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, (int, float)):
        return True
    return bool(_NUMBER.fullmatch(str(value)))


def _cell(value: Any, numeric: bool) -> str:
    if isinstance(value, bool) or value is None:
        text = "" if value is None else ("yes" if value else "no")
    elif isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = number(value)
    else:
        text = str(value)
    kind = "num" if numeric else "long" if len(text) > 60 else "text"
    return f'<td class="{kind}">{escape(text)}</td>'


def _footer(report: LabReport) -> str:
    settings = report.settings
    flags = ["quire lab"]
    flags += ["--quick"] * settings.quick + ["--gpu-8b"] * settings.gpu_8b
    if not settings.gpu_8b and settings.model != "smollm2":
        flags.append(f"--model {settings.model}")
    if settings.load_format != "auto":
        flags.append(f"--load-format {settings.load_format}")
    if settings.seed:
        flags.append(f"--seed {settings.seed}")
    return (
        f"<footer><p>Made by <code>{escape(' '.join(flags))}</code>. Every number behind it is in "
        "<code>report.json</code> beside this file. Experiments 5 and 6 are simulations: Quire's scheduler and block "
        "manager are real, the device is a cost model. All others ran the engine itself.</p></footer>"
    )
