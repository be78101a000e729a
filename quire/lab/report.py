"""The report: one HTML file that needs nothing else, in light and dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from quire.bench.svg import CHART_STYLE, figures
from quire.bench.units import counted, duration, listed, number, size
from quire.lab.experiments import EXPERIMENTS
from quire.lab.result import Finding, Result, Table
from quire.lab.store import Entry, LabReport

# Tables with more rows than this begin folded.
_MOST_ROWS = 16
_NOISY_PERCENT = 15.0  # more change than that in the machine's own speed is worth a warning
_NUMBER = re.compile(r"[-+−]?[\d,]*\.?\d+( ?(%|[KMG]iB|B|ms|s|µs))?|–|")


# The page around the charts, whose colours are in CHART_STYLE.
_STYLE = """
:root {
  --accent: #1f5fbf; --good: #1c7c48; --good-ground: #e4f3ea; --bad: #b3372c; --bad-ground: #fae7e4;
  --open: #8a6100; --open-ground: #fbf0d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --accent: #7fb0ff; --good: #6fd39b; --good-ground: #173524; --bad: #ff9a8f; --bad-ground: #40201d;
    --open: #f0c466; --open-ground: #3a2f14;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 40px 24px 96px; }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.02em; }
h2 { font-size: 25px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -0.01em; }
h3 { font-size: 13px; margin: 28px 0 8px; color: var(--soft); font-weight: 600; letter-spacing: 0.02em; }
p { margin: 0 0 12px; max-width: 76ch; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.lead { color: var(--soft); font-size: 17px; max-width: 84ch; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 18px 0 34px; padding: 0; list-style: none; }
.facts li { font-size: 14px; }
.facts b { display: block; color: var(--soft); font-weight: 500; font-size: 12px; }
.summary { width: 100%; border-collapse: collapse; background: var(--card); border: 1px solid var(--faint);
  border-radius: 12px; border-spacing: 0; overflow: hidden; border-collapse: separate; }
.summary td { padding: 12px 16px; border-top: 1px solid var(--faint); vertical-align: top; }
.summary tr:first-child td { border-top: 0; }
.summary .number { color: var(--soft); width: 1%; font-variant-numeric: tabular-nums; }
.summary .name { font-weight: 600; width: 30%; }
.summary .score { white-space: nowrap; width: 1%; text-align: right; }
section { margin-top: 72px; padding-top: 28px; border-top: 1px solid var(--faint); }
.question { font-size: 17px; color: var(--soft); margin-bottom: 20px; max-width: 84ch; }
.findings { border-collapse: separate; border-spacing: 0; width: 100%; background: var(--card);
  border: 1px solid var(--faint); border-radius: 12px; overflow: hidden; }
.findings th { text-align: left; font-size: 12.5px; color: var(--soft); font-weight: 600; padding: 10px 16px 4px; }
.findings td { padding: 10px 16px; vertical-align: top; border-top: 1px solid var(--faint); font-size: 15px; }
.findings tr:nth-child(2) td { border-top: 0; }
.findings td:first-child { width: 1%; }
.findings td:nth-child(2) { width: 46%; }
.badge { display: inline-block; padding: 2px 10px; border-radius: 99px; font-size: 12.5px; font-weight: 600;
  white-space: nowrap; }
.badge.good { color: var(--good); background: var(--good-ground); }
.badge.bad { color: var(--bad); background: var(--bad-ground); }
.badge.open { color: var(--open); background: var(--open-ground); }
.scroll { overflow-x: auto; border: 1px solid var(--faint); border-radius: 12px; background: var(--card); }
table.data { border-collapse: collapse; font-size: 13.5px; width: 100%; font-variant-numeric: tabular-nums; }
table.data th { text-align: left; vertical-align: bottom; font-weight: 600; color: var(--soft); font-size: 12.5px;
  line-height: 1.3; padding: 10px 12px; border-bottom: 1px solid var(--faint); }
table.data td { padding: 7px 12px; border-top: 1px solid var(--grid); white-space: nowrap; }
table.data tr:first-child td { border-top: 0; }
table.data td.text { white-space: normal; min-width: 9em; }
table.data td.long { white-space: normal; min-width: 22em; font-size: 12.5px; }
table.data th.num, table.data td.num { text-align: right; }
.tabletitle { font-weight: 600; font-size: 15px; margin: 26px 0 8px; }
.tablenote { font-size: 13px; color: var(--soft); margin: 8px 0 0; max-width: 100ch; }
.error { background: var(--bad-ground); color: var(--bad); padding: 14px 18px; border-radius: 12px; }
.error.soft { background: var(--open-ground); color: var(--open); }
pre { font-size: 12px; overflow-x: auto; color: var(--soft); }
details summary { cursor: pointer; color: var(--soft); font-size: 14px; margin-top: 22px; }
footer { margin-top: 72px; color: var(--soft); font-size: 14px; }
code { font: 0.9em ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--grid); padding: 1px 5px;
  border-radius: 4px; }
@media (max-width: 720px) {
  main { padding: 24px 14px 64px; }
  h1 { font-size: 28px; }
  .summary td, .findings td { display: block; width: auto !important; border-top: 0; padding: 2px 14px; }
  .summary tr, .findings tr { display: block; padding: 10px 0; border-top: 1px solid var(--faint); }
  .summary, .findings, .summary tbody, .findings tbody { display: block; }
  .summary .score { text-align: left; }
  .findings tr:first-child { display: none; }
}
@media print { section { break-before: page; } .scroll { overflow: visible; } }
"""


def render_report(report: LabReport) -> str:
    title = f"Quire lab: {report.settings.model_name}"
    parts = [_header(report), _summary(report)]
    parts += [_section(at, key, entry) for at, key, entry in _numbered(report)]
    parts.append(_footer(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CHART_STYLE}{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _numbered(report: LabReport) -> list[tuple[int, str, Entry]]:
    """Experiments keep their numbers, whichever of them were run."""
    return [
        (at, each.key, report.entries[each.key]) for at, each in enumerate(EXPERIMENTS, 1) if each.key in report.entries
    ]


# -- the top


def _header(report: LabReport) -> str:
    settings, machine = report.settings, report.machine
    where = machine.get("gpu") if settings.gpu_8b and machine.get("gpu") else machine.get("cpu")
    cores = machine.get("cpus")
    facts = [
        ("machine", f"{where}" + (f", {counted(int(cores), 'core')}" if cores and not settings.gpu_8b else "")),
        ("model", settings.model_name),
        ("made", report.written),
        ("took", duration(sum(entry.seconds for entry in report.entries.values()))),
        ("seed", str(settings.seed)),
        ("quire", report.version),
        ("torch", str(machine.get("torch"))),
        ("python", str(machine.get("python"))),
    ]
    if settings.gpu_8b and machine.get("gpu_bytes"):
        facts.insert(1, ("GPU memory", size(float(machine["gpu_bytes"]))))
        facts.insert(2, ("host", f"{machine.get('cpu')}, {counted(int(cores or 0), 'core')}"))
    if machine.get("memory_bytes"):
        memory = "host memory" if settings.gpu_8b else "memory"
        facts.insert(len(facts) - 7, (memory, size(float(machine["memory_bytes"]))))
    items = "".join(f"<li><b>{escape(name)}</b>{escape(value)}</li>" for name, value in facts)
    kind = (
        "This is the quick run: few requests, each setting measured once. It shows the shapes; for numbers to rely on, "
        "run it without <code>--quick</code>."
        if settings.quick
        else "Timings vary between runs; where a difference is too small to tell, the report says so."
    )
    return (
        "<header><h1>Paged attention, measured</h1>"
        '<p class="lead">What paging, continuous batching and sharing do for a language model on this machine: ten '
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
    for at, key, entry in _numbered(report):
        title = next(each.title for each in EXPERIMENTS if each.key == key)
        if entry.result is not None:
            text = escape(_sentence(str(entry.result.data.get("headline", ""))))
            score = _score(entry.result.findings)
        else:
            text, score = escape(entry.error), _badge("bad" if entry.status == "failed" else "open", entry.status)
        rows.append(
            f'<tr><td class="number">{at}</td><td class="name"><a href="#{key}">{escape(title)}</a></td>'
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


def _section(at: int, key: str, entry: Entry) -> str:
    title = next(each.title for each in EXPERIMENTS if each.key == key)
    head = f'<section id="{key}"><h2>{at}. {escape(title)}</h2>'
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
