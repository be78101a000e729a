"""quire bench as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from bench_server import FakeServer, serving_in_a_thread

from quire.bench.report import BenchFile
from quire.cli.main import main
from quire.executor.kv_cache import KVCache


@pytest.fixture
def tiny(tiny_model: Path) -> list[str]:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--device", "cpu", "--num-threads", "1"]
    return [*flags, "--kv-cache-memory-bytes", str(8 << 20)]


def read(path: Path) -> BenchFile:
    return BenchFile.read(path)


def test_throughput_counts_keeps_and_draws(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, chart = tmp_path / "a.json", tmp_path / "a.png"
    code = main(
        ["bench", "throughput", "lab16", *tiny, "--repeats", "2", "--output-json", str(out), "--plot", str(chart)]
    )
    assert code == 0
    [run] = read(out).runs
    assert (run.workload, run.completed, run.output_tokens) == ("lab16", 16, 16 * 128)
    assert run.kv and run.kv.peak_blocks == 16 * 9  # 8 + 127 tokens with KV each
    assert len(run.repeats) == 2
    text = capsys.readouterr().out
    assert "16 of 16 requests" in text and "first token" in text and "144" in text
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_both_engines_do_the_same_work(tiny: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "a.json"
    flags = ["--input-len", "6", "--output-len", "4", "--num-prompts", "3", "--repeats", "1", "--engine", "both"]
    assert main(["bench", "throughput", *tiny, *flags, "--output-json", str(out)]) == 0
    ours, theirs = read(out).runs
    assert [run.engine for run in (ours, theirs)] == ["quire", "hf"]
    assert ours.workload == theirs.workload == "fixed"
    assert (ours.prompt_tokens, ours.output_tokens) == (theirs.prompt_tokens, theirs.output_tokens) == (18, 12)


def test_a_dataset_brings_its_lengths(tiny: list[str], tmp_path: Path) -> None:
    data, out = tmp_path / "talks.json", tmp_path / "a.json"
    turns = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer it is"}]
    data.write_text(json.dumps([{"conversations": turns}]))
    arguments = ["--dataset-name", "sharegpt", "--dataset-path", str(data), "--num-prompts", "2", "--repeats", "1"]
    assert main(["bench", "throughput", *tiny, *arguments, "--output-json", str(out)]) == 0
    [run] = read(out).runs
    # The tiny tokenizer has a token for each byte.
    assert (run.workload, run.prompt_tokens, run.output_tokens) == ("talks", 2 * 10, 2 * 15)


def test_latency(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    flags = ["--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-iters", "4"]
    assert main(["bench", "latency", *tiny, *flags, "--output-json", str(out)]) == 0
    [run] = read(out).runs
    seconds = run.repeat_values["seconds"]
    assert len(seconds) == 4 and min(seconds) <= run.values["batch_p50_s"] <= max(seconds) == run.values["batch_max_s"]
    assert "batch latency" in capsys.readouterr().out


def test_prefix_on_against_off(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    flags = ["--num-prompts", "4", "--prefix-len", "64", "--input-len", "4", "--output-len", "2", "--repeats", "1"]
    assert main(["bench", "prefix", *tiny, *flags, "--output-json", str(out)]) == 0
    on, off = read(out).runs
    assert [run.point["prefix-caching"] for run in (on, off)] == ["on", "off"]
    assert on.kv and off.kv
    assert (on.kv.prefix_hit_tokens, off.kv.prefix_hit_tokens) == (3 * 64, 0)
    # 68 or 69 tokens take 5 blocks, of which 4 are the shared prefix's.
    assert (off.kv.peak_blocks, on.kv.peak_blocks) == (4 * 5, 4 + 4)
    assert "12 saved by sharing" in capsys.readouterr().out


def test_startup_in_a_fresh_process(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    assert main(["bench", "startup", *tiny, "--repeats", "1", "--output-json", str(out)]) == 0
    [run] = read(out).runs
    assert 0 < run.values["ready_s"] < run.values["first_token_s"]
    assert "to first token" in capsys.readouterr().out


def test_profile(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[KVCache] = []
    monkeypatch.setattr(KVCache, "take_pages", lambda self: taken.append(self))
    chart = tmp_path / "a.svg"
    flags = ["--input-len", "6", "--output-len", "4", "--num-prompts", "3", "--plot", str(chart)]
    assert main(["bench", "profile", *tiny, *flags]) == 0
    assert "attention" in capsys.readouterr().out and "<svg" in chart.read_text()
    assert len(taken) == 1  # no step that was recorded waited for memory


def test_sweep_over_two_flags_goes_on_past_a_bad_value(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, chart = tmp_path / "a.json", tmp_path / "a.png"
    inner = ["throughput", *tiny, "--num-prompts", "2", "--input-len", "5", "--output-len", "12", "--repeats", "1"]
    vary = ["--vary", "block-size=4,24,16", "--vary", "workload=fixed,random"]
    assert main(["bench", "sweep", *vary, *inner, "--output-json", str(out), "--plot", str(chart)]) == 0
    runs = read(out).runs
    assert [tuple(run.point.values()) for run in runs] == [
        (size, work) for size in ("4", "24", "16") for work in ("fixed", "random")
    ]
    assert [bool(run.errors) for run in runs] == [False, False, True, True, False, False]
    small, large = runs[0], runs[4]
    assert small.kv and large.kv
    assert (small.kv.peak_blocks, large.kv.peak_blocks) == (2 * 4, 2 * 1)  # 5 + 11 tokens
    assert small.kv.waste_percent_mean < large.kv.waste_percent_mean
    captured = capsys.readouterr()
    assert "failed at block-size=24" in captured.out and "block_size must be one of" in captured.err
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_where_nothing_works_fails(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--vary", "block-size=7,24", "throughput", *tiny]) == 2
    assert "block_size must be one of" in capsys.readouterr().err


def test_serve_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    flags = ["--num-prompts", "4", "--input-len", "5", "--output-len", "3", "--request-rate", "200"]
    with serving_in_a_thread(FakeServer(faults=[None, 429])) as server:
        assert main(["bench", "serve", "--base-url", server.url, *flags, "--output-json", str(out)]) == 0
        assert main(["bench", "serve", "--base-url", server.url, "--backend", "openai-chat", *flags]) == 0
        server.faults = [500] * 4
        assert main(["bench", "serve", "--base-url", server.url, *flags]) == 1
    [run] = read(out).runs
    assert (run.completed, run.errors) == (3, {"HTTP 429": 1})
    text, err = capsys.readouterr()
    assert "1 x HTTP 429" in text and "slow down, please" in text and "4 x HTTP 500" in text
    assert err.splitlines()[-1] == "quire: error: 4 of 4 requests failed"


def test_serve_fails_with_any_request_that_fails_in_any_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    flags = ["--num-prompts", "4", "--input-len", "5", "--output-len", "3", "--output-json", str(out)]
    with serving_in_a_thread(FakeServer(faults=[429, 500])) as server:
        assert main(["bench", "serve", "--base-url", server.url, *flags, "--repeats", "3"]) == 1
        text, err = capsys.readouterr()
        assert "quire: error: 1 of 12 requests failed\n" in err  # what was refused is not counted
        assert "1 x HTTP 500" in text  # whichever repeat is the median
        assert sorted(read(out).runs[0].repeat_values["failed_requests"]) == [0, 0, 1]
        # A sweep looks for the point where this begins.
        server.faults = [500]
        sweep = ["bench", "sweep", "--vary", "max-concurrency=1,2", "serve", "--base-url", server.url]
        assert main([*sweep, *flags]) == 0


def test_interrupted_runs_are_kept(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.bench import measure

    real = measure._Run._look_at_tokens
    calls = []

    def interrupting(self: Any, outputs: Any) -> None:
        real(self, outputs)
        calls.append(self)
        if self.output_tokens > 500 and len(set(map(id, calls))) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(measure._Run, "_look_at_tokens", interrupting)
    out = tmp_path / "a.json"
    arguments = ["bench", "throughput", "single64", "lab16", "mixed64", *tiny, "--repeats", "1", "--num-warmups", "0"]
    assert main([*arguments, "--output-json", str(out)]) == 130
    first, second = read(out).runs
    assert (first.workload, first.completed, first.interrupted) == ("single64", 1, False)
    assert (second.workload, second.completed, second.interrupted) == ("lab16", 0, True)
    assert 500 < second.output_tokens < 2048
    captured = capsys.readouterr()
    assert "interrupted" in captured.err and "interrupted" in captured.out


def test_an_error_in_a_later_workload_keeps_the_earlier(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    arguments = ["bench", "throughput", "lab16", "prefill512", *tiny, "--repeats", "1", "--num-warmups", "0"]
    assert main([*arguments, "--output-json", str(out)]) == 2
    assert [run.workload for run in read(out).runs] == ["lab16"]
    assert "513 tokens, and max_model_len is 256" in capsys.readouterr().err


def test_compare(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    flags = ["--num-prompts", "2", "--input-len", "5", "--output-len", "12", "--repeats", "2", "--num-warmups", "0"]
    assert main(["bench", "throughput", *tiny, *flags, "--output-json", str(a)]) == 0
    assert main(["bench", "throughput", *tiny, *flags, "--output-json", str(b), "--block-size", "4"]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", str(a), str(b), "--plot", str(tmp_path / "c.png")]) == 0
    text = capsys.readouterr().out
    assert "block_size: 16 -> 4" in text
    row = next(line for line in text.splitlines() if "kv_waste_percent" in line)
    assert row.endswith("better")
    assert main(["bench", "compare", str(b), str(a), "--fail-on-worse"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["throughput", "nonsense"], 2, "there are burst"),
        (["throughput", "--dataset", "none.json"], 2, "cannot read the dataset none.json"),
        (["throughput", "--dataset", __file__], 2, "is not JSON"),
        (["throughput", "--repeats", "0"], 2, "--repeats must be at least 1"),
        (["throughput", "--request-rate", "0"], 2, "request rate"),
        (["throughput", "--burstiness", "0.5"], 2, "--request-rate"),
        (["throughput", "--plot", "chart.txt"], 2, ".png"),
        (["throughput", "--output-json", "."], 2, "is a folder"),
        (["throughput", "--output-json", "/proc/x.json"], 2, "cannot be written"),
        (["throughput", "--block-size", "24"], 2, "block_size"),
        (["throughput", "--model", "./nowhere"], 1, "nowhere"),
        (["throughput", "--num-prompts", "-3", "fixed"], 2, "at least 1"),
        (["latency", "--batch-size", "0"], 2, "--batch-size"),
        (["prefix", "--no-enable-prefix-caching"], 2, "turns prefix caching on and off itself"),
        (["startup", "--model", "./nowhere", "--repeats", "1"], 1, "nowhere"),
        (["sweep", "--vary", "block-size", "throughput"], 2, "block-size=8,16,32"),
        (["serve", "--base-url", "localhost:8000"], 2, "http://"),
        (["serve", "--goodput", "speed:1"], 2, "ttft:200"),
        (["serve", "--max-concurrency", "0"], 2, "--max-concurrency"),
        (["compare", "none.json", "none.json"], 2, "cannot read none.json"),
        (["compare", __file__, __file__], 2, "is not JSON"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == code
    err = capsys.readouterr().err
    assert words in err and err.startswith("quire: error: ") and err.count("\n") == 1


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "serve", "--base-url", base, "--num-prompts", "2"]) == 1
    assert f"no server answers at {base}" in capsys.readouterr().err


def test_no_memory(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *tiny, "--kv-cache-memory-bytes", "100"]) == 1
    assert "raise kv_cache_memory_bytes" in capsys.readouterr().err


def test_an_unknown_flag_in_a_sweep_is_found_before_anything_runs(tiny: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "sweep", "--vary", "blok-size=4,8", "throughput", *tiny])
    assert refused.value.code == 2


def test_a_dataset_for_other_engines(tiny: list[str], tiny_model: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "talks.json", tmp_path / "a.json"
    turns = [{"from": "human", "value": "a longer question"}, {"from": "gpt", "value": "an answer it is"}]
    data.write_text(json.dumps([{"conversations": turns}]))
    flags = ["--dataset", str(data), "--num-prompts", "2", "--repeats", "1", "--output-json", str(out)]
    with serving_in_a_thread(FakeServer()) as server:
        assert main(["bench", "serve", "--base-url", server.url, *flags, "--tokenizer", str(tiny_model)]) == 0
        assert main(["bench", "serve", "--base-url", server.url, *flags, "--backend", "openai-chat"]) == 0
    completion, chat = server.bodies[0], server.bodies[2]
    assert (completion["prompt"], completion["max_tokens"]) == ("a longer question", 15)
    # Without a tokenizer four bytes count as a token: 15 bytes are 4.
    assert (chat["messages"][0]["content"], chat["max_completion_tokens"]) == ("a longer question", 4)
    pytest.importorskip("transformers")
    assert main(["bench", "throughput", *tiny, *flags, "--engine", "hf"]) == 0
    [run] = read(out).runs
    assert (run.engine, run.prompt_tokens, run.output_tokens) == ("hf", 2 * 17, 30)
