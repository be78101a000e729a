"""`quire lab` on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import write_tiny_model

from quire.cli.main import main
from quire.lab.experiments import EXPERIMENTS


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("lab") / "model", max_position_embeddings=1024)
    return ["lab", "--quick", "--model", str(model), "--load-format", "dummy"]


def test_some_experiments_and_then_the_rest(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*flags, "--output-dir", str(tmp_path)]
    assert main([*command, "prefix-sharing"]) == 0
    assert main([*command, "--only", "7,memory"]) == 0
    out, err = capsys.readouterr()
    assert "prefix-sharing: done before" in err
    assert f"report: {tmp_path / 'report.html'}" in out
    record = json.loads((tmp_path / "report.json").read_text())
    assert {key: each["status"] for key, each in record["experiments"].items()} == {
        "prefix-sharing": "done",
        "memory": "done",
    }
    rows = record["experiments"]["memory"]["result"]["tables"][0]["rows"]
    assert {row[0] for row in rows} == {"prefix-sharing"}  # it looked at the other's runs
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_memory_alone_runs_something_itself(flags: list[str], tmp_path: Path) -> None:
    assert main([*flags, "--output-dir", str(tmp_path), "--only", "memory"]) == 0
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["experiments"]["memory"]["result"]["data"]["measured"]


def test_a_failed_experiment_is_in_the_report(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Its 256 positions are too few for this experiment's prompts.
    command = ["lab", "--quick", "--model", str(tiny_model), "--load-format", "dummy", "--output-dir", str(tmp_path)]
    assert main([*command, "--only", "step-budget,prefix-sharing"]) == 1
    assert "failed: step-budget" in capsys.readouterr().err
    page = (tmp_path / "report.html").read_text()
    assert "max_model_len is 256" in page
    assert "The prefix cache brings" in page


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # such an interrupt, see below
def test_ctrl_c_keeps_what_is_done(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.lab import pressure

    def press_ctrl_c(context: object) -> None:
        # As a user would: while an engine is being measured, and again when nothing came of it. Python drops an
        # interrupt that arrives while a finalizer runs.
        is_over = threading.Event()

        def press() -> None:
            delay_s = 0.05
            while not is_over.wait(delay_s):
                os.kill(os.getpid(), signal.SIGINT)
                delay_s = 20.0

        presser = threading.Thread(target=press)
        presser.start()
        try:
            while True:
                real(context)  # type: ignore[arg-type]
        finally:
            is_over.set()
            presser.join()

    real = pressure.measure
    from quire.lab import experiments

    changed = tuple(
        replace(each, measure=press_ctrl_c) if each.key == "pressure" else each  # type: ignore[arg-type]
        for each in experiments.EXPERIMENTS
    )
    monkeypatch.setattr(experiments, "EXPERIMENTS", changed)
    command = [*flags, "--output-dir", str(tmp_path), "--only", "prefix-sharing,pressure,step-budget"]
    assert main(command) == 130
    record = json.loads((tmp_path / "report.json").read_text())
    assert {key: each["status"] for key, each in record["experiments"].items()} == {
        "prefix-sharing": "done",
        "pressure": "interrupted",
    }
    monkeypatch.undo()
    assert main(command) == 0
    record = json.loads((tmp_path / "report.json").read_text())
    assert {each["status"] for each in record["experiments"].values()} == {"done"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--only", "nope"], "no experiment is called nope"),
        (["--only", ","], "there are baseline"),
        (["nope"], "no experiment is called nope"),
        (["memory", "99"], "no experiment is called 99"),
        (["memory", "--only", "nope"], "no experiment is called nope"),
        (["--gpu-8b", "--model", "x"], "--gpu-8b brings its own model"),
        (["--load-format", "nope"], "load_format must be one of"),
        (["--model", "./not/there", "--only", "batching"], "not/there"),
    ],
)
def test_mistakes_are_told_at_once(
    wrong: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "--quick", "--output-dir", str(tmp_path / "out"), *wrong]) != 0
    assert message in capsys.readouterr().err


def test_gpu_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["lab", "--gpu-8b", "--output-dir", str(tmp_path)]) == 2
    assert "--gpu-8b needs a CUDA GPU" in capsys.readouterr().err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--list"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(EXPERIMENTS) and "fragmentation" in out


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ([], None),
        (["block-size"], ["block-size"]),
        (["block-size", "7,memory"], ["block-size", "7", "memory"]),
        (["--only", "pressure, memory"], ["pressure", "memory"]),
        (["block-size", "--only", "pressure"], ["block-size", "pressure"]),
    ],
)
def test_experiments_are_named_with_or_without_only(
    words: list[str], keys: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.errors import ConfigError
    from quire.lab import experiments

    asked: list[list[str] | None] = []

    def choose(given: list[str] | None) -> None:
        asked.append(given)
        raise ConfigError("that is enough")

    monkeypatch.setattr(experiments, "choose", choose)
    assert main(["lab", *words, "--output-dir", str(tmp_path)]) == 2
    assert asked == [keys]
