"""Writes the measured tables of tuning.md out of the lab's reports, so that the advice stands on this code's numbers.

    quire lab --output-dir docs/lab/cpu             makes the first of them
    quire lab --gpu-8b --output-dir docs/lab/h200   makes the second
    quire lab --retell --output-dir docs/lab/h200   words one anew after a change to the lab
    python -m docs.tuning_tables                    rewrites what stands between <!-- lab: NAME --> and <!-- end -->

A report that is not there leaves a line in its place that says which command makes it. A test fails when a table is not
what the reports say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench.units import duration, number, size
from quire.errors import ConfigError
from quire.lab.accuracy import RANDOM
from quire.lab.context import LabContext
from quire.lab.step_budget import streams_and_prompts
from quire.lab.store import JSON_NAME, LabReport, read_report

DOCS = Path(__file__).parent
MACHINES = {"cpu": "quire lab --output-dir docs/lab/cpu", "h200": "quire lab --gpu-8b --output-dir docs/lab/h200"}
_MARKED = re.compile(r"(<!-- lab: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.S)

# What the rules of tuning.md call fast enough. People read about ten tokens a second.
READING_S = 0.1
NEARLY = 0.95
# A document and its answer, in tokens, as the page's own example has them.
DOCUMENT, ANSWER = 6000, 200

Run = dict[str, Any]


class NotMeasuredError(Exception):
    """The report lacks the experiment that a table needs."""


def data_of(report: LabReport, key: str) -> dict[str, Any]:
    entry = report.entries.get(key)
    if entry is None or entry.result is None:
        raise NotMeasuredError(key)
    return entry.result.data


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def machine(report: LabReport) -> str:
    facts = report.machine
    where = facts.get("gpu") if report.settings.gpu_8b else f"{facts.get('cpu')}, {facts.get('cpus')} cores"
    hurry = " The quick run: few requests, measured once." if report.settings.quick else ""
    rates = probes(report)
    wander = (
        f" The same short run, repeated meanwhile, made {number(min(rates))} to {number(max(rates))} tok/s."
        if rates
        else ""
    )
    return f"{where}; {report.settings.model_name}; torch {facts.get('torch')}; {report.written}.{wander}{hurry}\n"


def probes(report: LabReport) -> list[float]:
    """The spread of the same short run after each experiment: how much the machine's own speed changed."""
    return [entry.probe_tok_s for entry in report.entries.values() if entry.probe_tok_s]


# -- what was measured


def widths(report: LabReport) -> str:
    rows = [
        [
            str(width),
            number(run["output_tok_s"]),
            duration(run["itl_s"]["p50"]),
            duration(run["itl_s"]["p99"]),
            size(run["kv"]["peak_blocks"] * run["kv"]["block_bytes"]),
        ]
        for width, run in by_width(report)
    ]
    return table(["`max_num_seqs`", "output tok/s", "between tokens p50", "p99", "KV at its fullest"], rows)


def block_sizes(report: LabReport) -> str:
    data = data_of(report, "block-size")
    kinds = list(data["cache_tokens"])
    rows = []
    for at, block_size in enumerate(data["sizes"]):
        row = [str(block_size)]
        for kind in kinds:
            runs = [run for run in data["measured"] if run["kind"] == kind]
            base = runs[data["sizes"].index(16)]["output_tok_s"]
            percent = 100 * runs[at]["output_tok_s"] / base
            width = number(runs[at]["running_mean"])
            row.append(f"{number(runs[at]['kv']['waste_percent_mean'])} % empty, {width} a step, {percent:.0f} %")
        rows.append(row)
    return table(["`block_size`", *(f"{kind}: slots, sequences, speed" for kind in kinds)], rows)


def budgets(report: LabReport) -> str:
    rows = []
    points = data_of(report, "step-budget")["points"]
    off = {point["budget"]: point for point in points if not point["chunked"]}
    for point in points:
        if point["chunked"]:
            whole = off[point["budget"]]
            rows.append(
                [
                    f"{point['budget']:,}",
                    number(point["total_tok_s"]),
                    duration(point["itl_p99_s"]),
                    "refused"
                    if whole["refusal"]
                    else f"{number(whole['total_tok_s'])}, {duration(whole['itl_p99_s'])}",
                ]
            )
    return table(["`max_num_batched_tokens`", "in and out tok/s", "between tokens p99", "whole prompts"], rows)


def cache(report: LabReport) -> str:
    data = data_of(report, "pressure")
    runs = data["measured"]
    names = ["enough", "half, recompute", "half, swap", "half, auto"]
    rows = [
        [
            name,
            size(run["kv"]["num_blocks"] * run["kv"]["block_bytes"]) if at else size(peak_bytes(run)),
            number(run["output_tok_s"]),
            f"{100 * run['output_tok_s'] / runs[0]['output_tok_s']:.0f} %",
            str(sum(run["kv"]["preemptions"].values())),
            f"{run['kv']['recomputed_tokens']:,}",
        ]
        for at, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    made = table(["cache", "bytes", "output tok/s", "of enough", "preemptions", "tokens run twice"], rows)
    moved_s = 2 * runs[0]["kv"]["block_bytes"] / runs[0]["kv"]["block_size"] / data["swap_bytes_per_s"]
    return made + (
        f"\nA token's KV goes to the host and back in {duration(moved_s)}; computing it again takes "
        f"{duration(1 / runs[1]['prefill_tok_s'])}.\n"
    )


def sharing(report: LabReport) -> str:
    runs = data_of(report, "prefix-sharing")["measured"]
    names = ["system prompt, cache off", "system prompt, cache on", "4 requests each", "n = 4"]
    rows = [
        [
            name,
            number(run["output_tok_s"]),
            duration(run["ttft_s"]["p50"]),
            f"{run['kv']['peak_blocks']:,} of {run['kv']['num_blocks']:,}",
        ]
        for name, run in zip(names, runs, strict=True)
    ]
    return table(["", "output tok/s", "first token p50", "most blocks in use"], rows)


def accuracy(report: LabReport) -> str:
    data = data_of(report, "kv-accuracy")
    is_random = data["model"] == RANDOM
    rows = []
    for each in data["readings"]:
        seen = f"{each['perplexity']:.4f}" if "perplexity" in each else "refused"
        held = size(each["kv_bytes_per_token"]) if "perplexity" in each else "–"
        rows.append([each["kv_dtype"], each["dtype"], held, "not measured" if is_random else seen])
    note = (
        "\nThat run had random weights, whose perplexity says nothing about a trained model: `quire pull smollm2` on "
        "the machine first, and it is measured.\n"
        if is_random
        else ""
    )
    return table(["`kv_cache_dtype`", "weights", "a token", "perplexity"], rows) + note


# -- what follows from it: the rules of tuning.md, applied


def by_width(report: LabReport) -> list[tuple[int, Run]]:
    data = data_of(report, "batch-width")
    return list(zip(data["widths"], data["measured"], strict=True))


def peak_bytes(run: Run) -> float:
    return float(run["kv"]["peak_blocks"] * run["kv"]["block_bytes"])


def chat_width(report: LabReport) -> int:
    """The widest batch in which a median token comes as fast as people read; one, if none does."""
    return max((width for width, run in by_width(report) if run["itl_s"]["p50"] <= READING_S), default=1)


def best_width(report: LabReport) -> int:
    """The narrowest batch with nearly the best throughput."""
    runs = by_width(report)
    best = max(run["output_tok_s"] for _, run in runs)
    return next(width for width, run in runs if run["output_tok_s"] >= NEARLY * best)


def full_speed(report: LabReport) -> float:
    """What share of the best throughput counts as all of it: less where the machine itself wandered."""
    rates = probes(report)
    return 0.98 if not rates or min(rates) > 0.9 * max(rates) else 0.9


def chunked_points(report: LabReport) -> list[Run]:
    return [point for point in data_of(report, "step-budget")["points"] if point["chunked"]]


def smallest_budget(report: LabReport, share: float) -> int:
    """The smallest budget with that share of the best throughput: nobody waits longer than that needs."""
    points = chunked_points(report)
    best = max(point["total_tok_s"] for point in points)
    return int(next(point["budget"] for point in points if point["total_tok_s"] >= share * best))


def budget_at(report: LabReport, share: float, width: int) -> int:
    """The same for a batch of another width than it was measured with: running sequences take theirs first, and
    prompts should be left as much. One of those that were measured, the largest if none is enough."""
    num_streams = streams_and_prompts(LabContext(report.settings, lambda text: None))[0]
    wanted = smallest_budget(report, share) - num_streams + width
    budgets = [int(point["budget"]) for point in chunked_points(report)]
    return next((budget for budget in budgets if budget >= wanted), budgets[-1])


def documents_width(report: LabReport) -> int:
    """A step takes in budget / document prompts, and each then stays for as many steps as its answer has tokens: more
    than the product never run at once. The narrowest that was measured and holds them, and no wider than chat's."""
    running = smallest_budget(report, full_speed(report)) * ANSWER / DOCUMENT
    enough = [width for width, _ in by_width(report) if width >= running]
    return min([*enough, chat_width(report)])


def best_block_size(report: LabReport, kind: str) -> int:
    """The size nearest to 16 among those at which the cache runs nearly the most sequences. By sequences, which are
    counted, and not by speed: where as many run, a difference in speed is the machine's."""
    data = data_of(report, "block-size")
    widths = [run["running_mean"] for run in data["measured"] if run["kind"] == kind]
    near = [s for s, width in zip(data["sizes"], widths, strict=True) if width >= NEARLY * max(widths)]
    return min(near, key=lambda s: (abs(s.bit_length() - (16).bit_length()), s))


def recommended(report: LabReport) -> str:
    """The flags that the rules give on this machine. `quire plan` gives the bytes for lengths of your own."""
    runs = dict(by_width(report))
    waits = {point["budget"]: point for point in chunked_points(report)}
    rows = []
    for traffic, width, share, kind in (
        ("chat", chat_width(report), 0.9, "short"),
        ("long documents", documents_width(report), full_speed(report), "general"),
        ("offline batch", best_width(report), full_speed(report), "long-tail"),
    ):
        run, budget = runs[width], budget_at(report, share, width)
        held, seen = (
            peak_bytes(run),
            f"{number(run['output_tok_s'])} tok/s out, {duration(run['itl_s']['p50'])} a token",
        )
        if traffic == "long documents":
            held = width * (DOCUMENT + ANSWER) * run["kv"]["block_bytes"] / run["kv"]["block_size"]
            point = waits[budget]
            seen = f"{number(point['total_tok_s'])} tok/s in and out, {duration(point['itl_p99_s'])} a token (p99)"
        rows.append(
            [
                traffic,
                f"`--block-size {best_block_size(report, kind)}`",
                f"`--max-num-seqs {width}`",
                f"`--max-num-batched-tokens {budget}`",
                size(held),
                seen,
            ]
        )
    return table(["traffic", "block size", "batch width", "step budget", "cache it fills", "seen there"], rows)


TABLES: dict[str, Callable[[LabReport], str]] = {
    "machine": machine,
    "widths": widths,
    "block_sizes": block_sizes,
    "budgets": budgets,
    "cache": cache,
    "sharing": sharing,
    "accuracy": accuracy,
    "recommended": recommended,
}


def fill(text: str, folder: Path) -> str:
    """The page with every table as the reports under `folder` have it."""
    reports: dict[str, LabReport | None] = {}
    for name in MACHINES:
        path = folder / name / JSON_NAME
        reports[name] = read_report(path) if path.exists() else None

    def one(match: re.Match[str]) -> str:
        report, command = reports[match[2]], MACHINES[match[2]]
        if report is None:
            body = f"*Not measured yet: `{command}`, then `python -m docs.tuning_tables`.*\n"
        else:
            try:
                body = TABLES[match[3]](report)
            except NotMeasuredError as missing:
                body = f"*Not measured yet: `{command} --only {missing}`, then `python -m docs.tuning_tables`.*\n"
        return match[1] + body + match[4]

    return _MARKED.sub(one, text)


def main() -> None:
    path = DOCS / "tuning.md"
    try:
        path.write_text(fill(path.read_text(encoding="utf-8"), DOCS / "lab"), encoding="utf-8")
    except ConfigError as error:
        raise SystemExit(f"docs.tuning_tables: {error}") from None


if __name__ == "__main__":
    main()
