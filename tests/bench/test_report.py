"""Reports: percentiles, JSON there and back, files that are not ours."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from quire.bench.report import BenchFile, KVReport, Percentiles, RunReport, Sample
from quire.errors import ConfigError


@pytest.mark.parametrize("count", [1, 2, 3, 10, 997])
def test_percentiles_are_numpys(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(3.0) for _ in range(count)]
    found = Percentiles.of(values)
    assert found is not None
    assert [found.p50, found.p95, found.p99] == pytest.approx([np.percentile(values, q) for q in (50, 95, 99)])
    assert found.count == count
    assert found.mean == pytest.approx(np.mean(values))
    assert found.max == max(values)


def test_percentiles_of_nothing() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of(x for x in (3.0, 1.0, 2.0)) == Percentiles(3, 2.0, 2.0, 2.9, 2.98, 3.0)


def a_report() -> RunReport:
    return RunReport(
        workload="lab16",
        parameters={"seed": 3},
        requests=2,
        output_tok_s=10.0,
        ttft_s=Percentiles.of([1.0, 2.0]),
        kv=KVReport(num_blocks=4, block_size=16, block_bytes=100, preemptions={"recompute": 1, "swap": 0}),
        repeats=[9.0, 10.0, 11.0],
        repeat_values={"output_tok_s": [9.0, 10.0, 11.0]},
        samples=[Sample(0.1 * i, i, 0, 0.5, 1.0, 100, 5, i, 50.0, 99.0) for i in range(3)],
    )


def test_json_there_and_back(tmp_path: Path) -> None:
    report = a_report()
    assert RunReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    path = tmp_path / "new" / "runs.json"
    BenchFile("throughput", [report, report]).write(path)
    assert BenchFile.read(path) == BenchFile("throughput", [report, report])
    assert [p.name for p in path.parent.iterdir()] == ["runs.json"]


def test_spread_and_hit_rate() -> None:
    report = a_report()
    assert report.spread_percent == pytest.approx(20.0)
    assert RunReport(workload="x", repeats=[5.0]).spread_percent is None
    assert KVReport(num_blocks=1, block_size=1, block_bytes=1).prefix_hit_rate == 0.0
    assert KVReport(
        num_blocks=1, block_size=1, block_bytes=1, prefix_query_tokens=40, prefix_hit_tokens=10
    ).prefix_hit_rate == pytest.approx(0.25)


def test_labels_tell_runs_apart() -> None:
    assert RunReport(workload="lab16").label == "lab16"
    swept = RunReport(workload="lab16", engine="hf", point={"workload": "lab16", "block-size": "8"})
    assert swept.label == "lab16 block-size=8 (hf)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "was not written by quire bench"),
        ('{"format": "quire-bench-1", "runs": [{"nonsense": 1}]}', "not a run of quire bench"),
        ('{"format": "quire-bench-1", "runs": [5]}', "not a run of quire bench"),
    ],
)
def test_files_that_are_not_ours(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        BenchFile.read(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        BenchFile.read(tmp_path / "missing.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        BenchFile("x", []).write(tmp_path / "file" / "below.json")
