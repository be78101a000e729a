"""The tables of tuning.md: what the reports say, by the rules of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs import tuning_tables
from quire.lab.context import LabSettings
from quire.lab.experiment import Result
from quire.lab.store import Entry, LabReport


def run(output_tok_s: float, p50_s: float, **kv: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"peak_blocks": 10, "num_blocks": 20, "block_bytes": 1 << 20, "block_size": 16}
    defaults |= {"waste_percent_mean": 5.0, "preemptions": {}, "recomputed_tokens": 0}
    rates = {"output_tok_s": output_tok_s, "running_mean": 10.0, "prefill_tok_s": 1000.0}
    return rates | {"itl_s": {"p50": p50_s, "p99": 2 * p50_s}, "kv": defaults | kv}


@pytest.fixture
def report() -> LabReport:
    width_runs = [run(40.0, 0.025), run(120.0, 0.03), run(300.0, 0.06), run(310.0, 0.2)]
    points = [
        {"budget": budget, "chunked": chunked, "refusal": "too long" if not chunked and budget < 1000 else ""}
        | {"itl_p99_s": wait, "total_tok_s": rate}
        for budget, wait, rate in ((256, 0.3, 880.0), (512, 0.6, 930.0), (1024, 1.2, 1000.0), (2048, 2.4, 990.0))
        for chunked in (True, False)
    ]
    kinds = ("short", "general", "long-tail")
    sizes = [run(rate, 0.1) | {"kind": kind} for kind in kinds for rate in (290.0, 300.0, 200.0)]
    data: dict[str, dict[str, Any]] = {
        "batch-width": {"widths": [1, 4, 16, 64], "measured": width_runs},
        "step-budget": {"points": points},
        "block-size": {"sizes": [8, 16, 64], "cache_tokens": {"short": 1024}, "measured": sizes},
    }
    entries = {key: Entry("done", 1.0, Result("", "", data=value)) for key, value in data.items()}
    return LabReport(LabSettings(), entries, {"cpu": "chip", "cpus": 2}, "today", "1")


def test_the_rules(report: LabReport) -> None:
    assert tuning_tables.chat_width(report) == 16  # the widest within 100 ms
    assert tuning_tables.best_width(report) == 16  # 300 is 95 % of 310
    assert tuning_tables.smallest_budget(report, 0.9) == 512  # the first with 90 %
    assert tuning_tables.smallest_budget(report, 0.98) == 1024
    assert tuning_tables.best_block_size(report, "short") == 16  # 8 is as good, and farther


def test_tables_have_the_numbers(report: LabReport) -> None:
    assert "| 16 | 300 | 60.0 ms | 120 ms | 10.0 MiB |" in tuning_tables.widths(report)
    assert "| 256 | 880 | 300 ms | refused |" in tuning_tables.budgets(report)
    assert "| 64 | 5.00 % empty, 10.0 a step, 67 % |" in tuning_tables.block_sizes(report)
    with pytest.raises(tuning_tables.NotMeasuredError, match="pressure"):
        tuning_tables.cache(report)


def test_a_block_size_is_chosen_by_counts_not_by_a_lucky_run(report: LabReport) -> None:
    data = report.data()["block-size"]
    data["measured"][0]["output_tok_s"] = 400.0  # a third faster at 8, with as many sequences a step
    assert tuning_tables.best_block_size(report, "short") == 16
    for at, width in enumerate((10.0, 8.0, 2.0)):
        data["measured"][at]["running_mean"] = width
    assert tuning_tables.best_block_size(report, "short") == 8


def test_a_budget_leaves_as_much_for_prompts_as_it_did_when_measured(report: LabReport) -> None:
    # Measured with 16 streams: 512 leaves 496, which beside 64 sequences makes 560.
    assert tuning_tables.budget_at(report, 0.9, 16) == 512
    assert tuning_tables.budget_at(report, 0.9, 64) == 1024
    assert tuning_tables.budget_at(report, 0.9, 4000) == 2048  # the largest there is


def test_a_machine_that_wanders_is_believed_less(report: LabReport) -> None:
    assert tuning_tables.full_speed(report) == 0.98
    report.entries["batch-width"].probe_tok_s, report.entries["step-budget"].probe_tok_s = 100.0, 97.0
    assert tuning_tables.full_speed(report) == 0.98
    report.entries["step-budget"].probe_tok_s = 60.0
    assert tuning_tables.full_speed(report) == 0.9
    assert "repeated meanwhile, made 60.0 to 100 tok/s" in tuning_tables.machine(report)


def test_documents_run_no_wider_than_prompts_come_in(report: LabReport) -> None:
    # A step of 1,024 takes in a sixth of a document, each of which stays for 200 steps: 34 at once.
    assert tuning_tables.documents_width(report) == 16  # 64 would hold them, but nobody would read along
    rows = tuning_tables.recommended(report).splitlines()
    assert rows[3].endswith(
        "| `--max-num-batched-tokens 1024` | 6.05 GiB | 1,000 tok/s in and out, 1.20 s a token (p99) |"
    )


def test_random_weights_have_no_perplexity_to_show(report: LabReport) -> None:
    reading = {"kv_dtype": "fp8", "dtype": "bfloat16", "kv_bytes_per_token": 65536, "perplexity": 277647.1449}
    data = {"model": "random weights", "readings": [reading]}
    report.entries["kv-accuracy"] = Entry("done", 1.0, Result("", "", data=data))
    made = tuning_tables.accuracy(report)
    assert "| fp8 | bfloat16 | 64.0 KiB | not measured |" in made and "277" not in made and "quire pull smollm2" in made
    data["model"] = "smollm2"
    assert "| 277647.1449 |" in tuning_tables.accuracy(report)


def test_what_moving_and_computing_cost(report: LabReport) -> None:
    data = {"measured": [run(100.0, 0.1) for _ in range(4)], "swap_bytes_per_s": 1e9}
    report.entries["pressure"] = Entry("done", 1.0, Result("", "", data=data))
    assert "back in 131 µs; computing it again takes 1.00 ms." in tuning_tables.cache(report)


def test_places_are_filled_and_filled_again(report: LabReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\n<!-- lab: cpu widths -->\nold\n<!-- end -->\nb\n<!-- lab: h200 cache -->\n<!-- end -->\n"
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "report.json").touch()
    monkeypatch.setattr(tuning_tables, "read_report", lambda path: report)
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
