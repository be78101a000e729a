"""What a long run says of itself, on a terminal and in a log."""

from __future__ import annotations

import io
import sys

import pytest

from quire.bench import progress as progress_room
from quire.bench.measure import measure_repeats
from quire.bench.progress import Progress, RunProgress, WarmUpInterrupted, run_progress
from quire.bench.workloads import Workload
from quire.engine.llm_engine import LLMEngine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one entry is the time."""
    now = [100.0]
    monkeypatch.setattr(progress_room.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with run_progress("mixed64") as progress:
        show = progress.stage("warming up", 64)
        for step in range(25):
            clock[0] = 100.0 + step
            show(50 * step, step // 4)
        show = progress.stage("run 1 of 3", 64)
        clock[0] += 9.9
        show(1, 1)
        clock[0] += 0.2
        show(2020, 5)
    assert capsys.readouterr().err.splitlines() == [
        "quire: mixed64, warming up: 2 of 64 requests, 500 tokens out, 50.0 tok/s",
        "quire: mixed64, warming up: 5 of 64 requests, 1,000 tokens out, 50.0 tok/s",
        "quire: mixed64, run 1 of 3: 5 of 64 requests, 2,020 tokens out, 200.0 tok/s",
    ]


def test_a_short_run_says_nothing_in_a_log(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with run_progress("lab16") as progress:
        progress.stage("", 16, 100)(50, 8)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = RunProgress("lab16")
    progress.stage("warming up", 16, 100)
    drawn = screen.getvalue()
    assert "lab16, warming up:   0%" in drawn and "0/100" in drawn
    show = progress.stage("run 2 of 3", 16, 100)
    show(40, 3)
    progress._bar.refresh()
    assert "lab16, run 2 of 3:  40%" in screen.getvalue() and "3 of 16 requests" in screen.getvalue()
    show = progress.stage("", 16)
    show(40, 4)
    progress._bar.refresh()
    assert "lab16:  25%" in screen.getvalue() and "4/16" in screen.getvalue() and "40 tokens" in screen.getvalue()
    progress.close()


def test_an_interrupted_warm_up_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), run_progress("lab16"):
        raise WarmUpInterrupted
    assert capsys.readouterr().err == "quire: lab16: interrupted in the warm-up, nothing was measured yet\n"


def test_the_stages_of_a_run_and_what_they_bring(engine: LLMEngine) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def stage(name: str, work: Workload) -> Progress:
        said = seen.setdefault(f"{name} {len(work)}", [])
        return lambda output_tokens, completed: said.append((output_tokens, completed))

    workload: Workload = [([30 + i] * 4, 1 + i) for i in range(3)]
    measure_repeats(engine, workload, warm=[([50] * 4, 2)], repeats=2, stage=stage)
    assert seen == {
        "warming up 1": [(1, 0), (2, 1)],
        "run 1 of 2 3": [(3, 1), (5, 2), (6, 3)],
        "run 2 of 2 3": [(3, 1), (5, 2), (6, 3)],
    }
