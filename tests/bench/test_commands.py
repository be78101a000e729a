"""Ctrl-C before anything is measured, through the commands."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from bench_server import FakeServer, serving_in_a_thread

from quire.bench import measure, profile
from quire.bench.report import BenchFile
from quire.cli.main import main

_LENGTHS = ["--input-len", "6", "--output-len", "20"]


def interrupting(real: Any, *, at_call: int = 1) -> Any:
    """The function, and Ctrl-C at that call of it."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at_call:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("command", "where", "function"),
    [
        (["throughput", "--num-prompts", "3"], measure._Run, "_look_at_tokens"),
        (["latency", "--batch-size", "3"], measure._Run, "_look_at_tokens"),
        (["profile", "--num-prompts", "3"], profile, "_add"),
    ],
)
def test_an_interrupted_warm_up_is_no_measurement(
    command: list[str],
    where: Any,
    function: str,
    tiny_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, function, interrupting(getattr(where, function)))
    out = tmp_path / "a.json"
    assert main(["bench", *command, *_LENGTHS, *tiny_flags, "--output-json", str(out)]) == 130
    text, err = capsys.readouterr()
    assert text == "" and not out.exists()
    assert "interrupted in the warm-up, nothing was measured yet" in err
    assert "is above" not in err


@pytest.mark.parametrize("command", [["throughput", "--num-prompts", "3"], ["latency", "--batch-size", "3"]])
def test_the_same_with_transformers(
    command: list[str], tiny_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from quire.bench import hf

    monkeypatch.setattr(hf._StaticRun, "on_token", interrupting(hf._StaticRun.on_token))
    assert main(["bench", *command, *_LENGTHS, *tiny_flags, "--engine", "hf"]) == 130
    text, err = capsys.readouterr()
    assert text == "" and "nothing was measured yet" in err


def test_a_servers_repeats_before_an_interrupted_warm_up_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(FakeServer):
        async def answer(self, request):  # type: ignore[no-untyped-def]
            if len(self.bodies) == 3:  # one to warm up with and two that count: the second repeat begins
                os.kill(os.getpid(), signal.SIGINT)
            return await super().answer(request)

    out = tmp_path / "a.json"
    flags = ["--num-prompts", "2", "--num-warmups", "1", "--repeats", "3", "--goodput", "ttft:60000", "tpot:60000"]
    with serving_in_a_thread(Interrupting(token_s=0.01)) as server:
        arguments = ["bench", "serve", "--base-url", server.url, *_LENGTHS, *flags, "--output-json", str(out)]
        assert main(arguments) == 130
    [run] = BenchFile.read(out).runs
    assert (run.completed, len(run.repeats), run.interrupted) == (2, 1, True)
    text, err = capsys.readouterr()
    assert "2 of 2 requests in time (ttft:60000 tpot:60000)" in text
    assert "what was measured until then is above" in err
