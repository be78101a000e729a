"""What counts as a change."""

from __future__ import annotations

import pytest

from quire.bench.compare import Change, Comparison, Verdict, compare_files, compare_runs
from quire.bench.report import BenchFile, KVReport, RunReport
from quire.bench.text import comparison
from quire.errors import ConfigError


def run(
    *tok_s: float, workload: str = "lab16", settings: dict[str, object] | None = None, **repeats: list[float]
) -> RunReport:
    values = {"output_tok_s": list(tok_s)} | repeats
    report = RunReport(workload=workload, settings=dict(settings or {}), output_tok_s=tok_s[0], repeats=list(tok_s))
    report.repeat_values = values
    report.values = {name: numbers[0] for name, numbers in repeats.items()}
    return report


def change(found: Comparison, metric: str = "output_tok_s") -> Change:
    return next(c for c in found.changes if c.metric == metric)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((100, 101, 99), (120, 121, 119), Verdict.BETTER),
        ((100, 101, 99), (80, 81, 79), Verdict.WORSE),
        ((100, 101, 99), (100.5, 101.5, 99.5), Verdict.SAME),
        ((100, 140, 60), (120, 160, 80), Verdict.SAME),  # further apart than before, but not than the repeats
        ((100, 100), (100, 100), Verdict.SAME),
        ((100, 100), (101, 101), Verdict.BETTER),  # no noise at all
        ((100,), (200,), Verdict.CANNOT_TELL),
        ((100, 101, 99), (200,), Verdict.CANNOT_TELL),
    ],
)
def test_verdicts(before: tuple[float, ...], after: tuple[float, ...], verdict: Verdict) -> None:
    assert change(compare_runs(run(*before), run(*after))).verdict is verdict


def test_the_noise_is_welchs() -> None:
    # Means 100 and 106, each with a variance of 4 over 3 repeats: 4 degrees of freedom, t = 2.776.
    found = change(compare_runs(run(98, 100, 102), run(104, 106, 108)))
    assert found.noise == pytest.approx(2.776 * (4 / 3 + 4 / 3) ** 0.5)
    assert found.percent == pytest.approx(6.0)
    assert found.verdict is Verdict.BETTER
    assert change(compare_runs(run(98, 100, 102), run(102, 104, 106))).verdict is Verdict.SAME


def test_less_time_and_less_waste_is_better() -> None:
    slow = run(100, 100, itl_p99_s=[0.2, 0.2], kv_waste_percent=[9.0, 9.0], kv_occupancy_mean=[0.5, 0.5])
    fast = run(100, 100, itl_p99_s=[0.1, 0.1], kv_waste_percent=[3.0, 3.0], kv_occupancy_mean=[0.4, 0.4])
    found = compare_runs(slow, fast)
    assert change(found, "itl_p99_s").verdict is Verdict.BETTER
    assert change(found, "kv_waste_percent").verdict is Verdict.BETTER
    assert change(found, "kv_occupancy_mean").verdict is Verdict.CHANGED
    assert change(compare_runs(fast, slow), "itl_p99_s").verdict is Verdict.WORSE


def test_settings_that_differ_are_named() -> None:
    found = compare_runs(
        run(1, settings={"block_size": 16, "dtype": "x"}), run(1, settings={"block_size": 32, "dtype": "x"})
    )
    assert found.differences == ["block_size: 16 -> 32"]


def test_pairs_by_label() -> None:
    before = BenchFile("throughput", [run(1, workload="a"), run(2, workload="b")])
    after = BenchFile("throughput", [run(3, workload="b"), run(4, workload="c")])
    found, alone = compare_files(before, after)
    assert [one.label for one in found] == ["b"]
    assert alone == ["a", "c"]
    with pytest.raises(ConfigError, match="no run in common: there are a, b, c, d"):
        compare_files(before, BenchFile("x", [run(1, workload="c"), run(1, workload="d")]))


def test_two_single_runs_are_compared_whatever_they_are() -> None:
    [found], alone = compare_files(BenchFile("x", [run(1, workload="a")]), BenchFile("x", [run(2, workload="b")]))
    assert (found.label, alone) == ("a -> b", [])


def test_the_table_says_what_it_cannot_say() -> None:
    text = comparison(compare_runs(run(100.0), run(120.0)))
    assert "cannot tell" in text and "--repeats" in text
    text = comparison(compare_runs(run(100, 101, 99), run(120, 121, 119)))
    assert "+20.0 %" in text and "better" in text and "cannot tell" not in text
    assert "nothing changed beyond the noise" in comparison(compare_runs(run(5, 6), run(5, 6)))


def test_metrics_of_the_cache_are_compared() -> None:
    report = run(1)
    report.kv = KVReport(num_blocks=8, block_size=16, block_bytes=1, waste_percent_mean=5.0, preemptions={"swap": 2})
    assert {"kv_waste_percent": 5.0, "preemptions": 2.0}.items() <= report.metrics().items()
