"""`quire sim` as a command: tables, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.report import BenchFile
from quire.cli.main import main

BASE = ["sim", "--model", "llama-3.1-8b", "--gpu", "h200", "--num-prompts", "30"]


def test_a_workload_at_a_rate_on_ranks_and_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, chart = tmp_path / "out.json", tmp_path / "out.svg"
    flags = ["-tp", "2", "-pp", "2", "-dp", "3", "--policy", "round-robin", "--request-rate", "50"]
    assert main([*BASE, "sharegpt", *flags, "--output-json", str(path), "--plot", str(chart)]) == 0
    (report,) = BenchFile.read(path).runs
    assert (report.engine, report.requests, report.completed, report.values["replicas"]) == ("sim", 30, 30, 3)
    assert report.ttft_s and report.itl_s and report.kv and report.kv.occupancy_mean > 0
    told = capsys.readouterr().out
    assert "sharegpt" in told and "predicted for llama-3.1-8b on 3 × 4 h200" in told
    assert chart.read_text().startswith("<svg")


def test_a_trace_and_its_prefixes(tmp_path: Path) -> None:
    trace, path = tmp_path / "day.jsonl", tmp_path / "out.json"
    entries = [
        {"arrival": i / 10, "prompt_len": 700, "output_len": 5, "prefix_id": "s", "prefix_len": 640} for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, entries)))
    assert main([*BASE, "--trace", str(trace), "--output-json", str(path)]) == 0
    (report,) = BenchFile.read(path).runs
    assert report.kv is not None and report.kv.prefix_hit_tokens == 19 * 640
    assert main([*BASE, "--trace", str(trace), "--request-rate", "2", "--burstiness", "inf"]) == 0


def test_more_ranks_are_faster_for_one_stream_and_replicas_are_not(tmp_path: Path) -> None:
    speeds = {}
    for flags in ((), ("-tp", "8"), ("-dp", "8")):
        path = tmp_path / "out.json"
        assert (
            main(["sim", "single", "--model", "llama-3.1-70b", "--gpu", "b200", *flags, "--output-json", str(path)])
            == 0
        )
        speeds[flags] = BenchFile.read(path).runs[0].output_tok_s
    assert speeds["-tp", "8"] > 3 * speeds[()] == pytest.approx(3 * speeds["-dp", "8"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h900"], "h900"),
        (["-tp", "16"], "per_machine|one machine"),
        (["-pp", "33"], "33"),
        (["--replicas", "0"], "at least 1"),
        (["--policy", "psychic"], "round-robin"),
        (["--gpu", "t4"], "do not fit|does not fit|t4"),
        (["--trace", "none.jsonl"], "none.jsonl"),
        (["--duration", "5"], "request-rate"),
        (["--front-ms", "-1"], "front-ms"),
        (["--profile", "none.json"], "none.json"),
        (["--validate", "h900"], "h200"),
        (["--swap-space-gb", "4"], "not simulated"),
        (["--profile", "none.json", "--block-size", "32"], "recorded"),
        (["--cores", "2"], "--profile"),
    ],
)
def test_bad_input_says_what_to_change(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *flags]) != 0
    told = capsys.readouterr().err
    assert any(word in told for word in words.split("|")), told
