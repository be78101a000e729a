"""The tables of tuning.md: what the reports say, by the rules of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs import tuning_tables
from quire.lab.context import LabSettings
from quire.lab.result import Result
from quire.lab.store import Entry, LabReport


def run(output_tok_s: float, p50_s: float, **kv: Any) -> dict[str, Any]:
    defaults = {"peak_blocks": 10, "block_bytes": 1 << 20, "waste_percent_mean": 5.0}
    return {"output_tok_s": output_tok_s, "itl_s": {"p50": p50_s, "p99": 2 * p50_s}, "kv": defaults | kv}


@pytest.fixture
def report() -> LabReport:
    width_runs = [run(40.0, 0.025), run(120.0, 0.03), run(300.0, 0.06), run(310.0, 0.2)]
    points = [
        {"budget": budget, "chunked": chunked, "refusal": "too long" if not chunked and budget < 1000 else ""}
        | {"itl_p99_s": wait, "total_tok_s": rate}
        for budget, wait, rate in ((256, 0.3, 880.0), (512, 0.6, 930.0), (1024, 1.2, 1000.0), (2048, 2.4, 990.0))
        for chunked in (True, False)
    ]
    sizes = [run(rate, 0.1) | {"kind": "short"} for rate in (290.0, 300.0, 200.0)]
    data: dict[str, dict[str, Any]] = {
        "batch-width": {"widths": [1, 4, 16, 64], "measured": width_runs},
        "step-budget": {"points": points},
        "block-size": {"sizes": [8, 16, 64], "cache_tokens": {"short": 1024}, "measured": sizes},
    }
    entries = {key: Entry("done", 1.0, Result(key, "", "", data=value)) for key, value in data.items()}
    return LabReport(LabSettings(), entries, {"cpu": "chip", "cpus": 2}, "today", "1")


def test_the_rules(report: LabReport) -> None:
    assert tuning_tables.chat_width(report) == 16  # the widest within 100 ms
    assert tuning_tables.best_width(report) == 16  # 300 is 95 % of 310
    assert tuning_tables.small_budget(report) == 512  # the first with 90 %
    assert tuning_tables.best_budget(report) == 1024
    assert tuning_tables.best_block_size(report, "short") == 16  # 8 is as good, and farther


def test_tables_have_the_numbers(report: LabReport) -> None:
    assert "| 16 | 300 | 60.0 ms | 120 ms | 10.0 MiB |" in tuning_tables.widths(report)
    assert "| 256 | 880 | 300 ms | refused |" in tuning_tables.budgets(report)
    assert "| 64 | 5.00 % empty, 67 % |" in tuning_tables.block_sizes(report)
    with pytest.raises(tuning_tables.NotMeasuredError, match="pressure"):
        tuning_tables.cache(report)


def test_places_are_filled_and_filled_again(report: LabReport, tmp_path: Path) -> None:
    text = "a\n<!-- lab: cpu widths -->\nold\n<!-- end -->\nb\n<!-- lab: h200 cache -->\n<!-- end -->\n"
    report.write(tmp_path / "cpu")
    filled = tuning_tables.fill(text, tmp_path)
    assert "old" not in filled and "| 64 | 310 |" in filled
    assert "Not measured yet: `quire lab --gpu-8b" in filled
    assert tuning_tables.fill(filled, tmp_path) == filled


def test_the_page_is_what_the_reports_say() -> None:
    """If this fails: python -m docs.tuning_tables."""
    page = tuning_tables.DOCS / "tuning.md"
    text = page.read_text(encoding="utf-8")
    assert tuning_tables.fill(text, tuning_tables.DOCS / "lab") == text
    marks = tuning_tables._MARKED.findall(text)
    assert {mark[1] for mark in marks} == set(tuning_tables.MACHINES)
    assert {mark[2] for mark in marks} <= set(tuning_tables.TABLES)
