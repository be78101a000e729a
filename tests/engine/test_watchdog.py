"""The watch over the loop: heartbeats that tell whether it gets on, and one dump about each step that does not."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest
from sim_engine import make_core

from quire.engine.messages import Heartbeat
from quire.engine.watchdog import Progress, Watchdog, write_dump
from quire.request import Request

PROMPT_TOKEN = 987_654_321  # no part of a process id, a time or an address


def watchdog(progress: Progress, dumps: list[tuple[int, float]], sent: list[Heartbeat] | None = None) -> Watchdog:
    def dump(num_steps: int, for_s: float) -> str:
        dumps.append((num_steps, for_s))
        return f"/dump-{num_steps}"

    send = sent.append if sent is not None else lambda beat: None
    return Watchdog(progress, send, dump, step_timeout_s=10.0, heartbeat_s=0.01)


def test_each_stuck_step_is_dumped_once() -> None:
    progress, dumps = Progress(num_steps=7), []  # type: ignore[var-annotated]
    dog = watchdog(progress, dumps)
    assert dog.beat(100.0) == Heartbeat(100.0, 7, None, None)
    progress.step_started_s = 100.0
    assert dog.beat(109.0).dump_path is None
    assert dog.beat(111.0) == Heartbeat(111.0, 7, 100.0, "/dump-7")
    assert dog.beat(112.0).dump_path == "/dump-7"
    assert dumps == [(7, 11.0)]
    progress.num_steps, progress.step_started_s = 8, 112.0
    assert dog.beat(113.0).dump_path is None
    assert dog.beat(130.0).dump_path == "/dump-8"
    assert len(dumps) == 2


def test_it_beats_until_it_is_stopped() -> None:
    sent: list[Heartbeat] = []
    dog = watchdog(Progress(), [], sent)
    dog.start()
    deadline = time.monotonic() + 5
    while len(sent) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    dog.stop()
    count = len(sent)
    assert count >= 3
    time.sleep(0.05)
    assert len(sent) == count
    assert "quire-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_the_dump_names_everything_but_the_prompts(tmp_path: Path) -> None:
    core = make_core()
    request = Request(
        request_id="mine",
        prompt_token_ids=[PROMPT_TOKEN, 232, 233],
        max_tokens=5,
        end_token_ids=frozenset(),
    )
    core.add(request)
    core.step()
    path = write_dump(core, lambda: [request], str(tmp_path), 41, 12.5)
    text = Path(path).read_text()
    assert "step 42 has run for 12.5 s" in text
    assert "mine [0] running row 0 prompt 3 output 1 of 5" in text
    assert "1 sequences, 3 tokens, 1 sample" in text
    assert "test_the_dump_names_everything" in text  # the stack of this thread
    assert str(PROMPT_TOKEN) not in text


def test_a_dump_is_a_new_file_for_its_user_alone(tmp_path: Path) -> None:
    """Others may write to the folder too: what they put there under a name like this one's is neither followed nor
    overwritten, and they cannot read what is written."""
    target = tmp_path / "victim"
    target.write_text("as it was")
    foreseen = tmp_path / f"quire-stuck-{os.getpid()}-42.txt"
    foreseen.symlink_to(target)
    paths = [Path(write_dump(make_core(), list, str(tmp_path), 41, 12.5)) for _ in range(2)]
    assert target.read_text() == "as it was" and foreseen.is_symlink()
    assert len({*paths, foreseen}) == 3
    for path in paths:
        assert path.parent == tmp_path and path.name.startswith(f"quire-stuck-{os.getpid()}-42-")
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600 and stat.S_ISREG(path.lstat().st_mode)


def test_a_dump_that_fails_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[Request]:
        raise RuntimeError("changed while read")

    core = make_core()
    assert "changed while read" in Path(write_dump(core, broken, str(tmp_path), 0, 1.0)).read_text()
    assert write_dump(core, list, str(tmp_path / "missing"), 0, 1.0) == ""
    assert "could not be written" in caplog.text
