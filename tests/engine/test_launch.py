"""Starting a process and hearing of its end, with programs that are no engine."""

from __future__ import annotations

import logging
import signal
import struct
import subprocess
import sys
import threading

import pytest

from quire.child import LOG_MARK, describe_exit
from quire.engine.launch import EngineProcess, EngineProcessOptions


def launch(code: str, data: bytes = b"data") -> tuple[EngineProcess, int]:
    """Runs it to its end; its exit status too."""
    statuses: list[int] = []
    ended = threading.Event()

    def on_exit(status: int) -> None:
        statuses.append(status)
        ended.set()

    child = EngineProcess(EngineProcessOptions(command=(sys.executable, "-c", code)), data, on_exit)
    assert ended.wait(20)
    child.release()
    assert len(statuses) == 1
    assert not child.is_running
    child.signal(signal.SIGKILL)  # whom it cannot hurt any more
    return child, statuses[0]


def test_input_words_and_status(caplog: pytest.LogCaptureFixture) -> None:
    code = f"""
import sys, json
data = sys.stdin.buffer.read(12)
print(data, file=sys.stderr)
print({LOG_MARK!r} + json.dumps([30, "careful\\nnow"]), file=sys.stderr)
print({LOG_MARK!r} + "no json", file=sys.stderr)
sys.exit(5)
"""
    child, status = launch(code)
    assert status == 5
    words = str(struct.pack("<Q", 4) + b"data")
    assert words in child.stderr_tail()
    assert ("quire", logging.WARNING, f"engine: {words}") in caplog.record_tuples
    assert ("quire", logging.WARNING, "careful\nnow") in caplog.record_tuples
    assert "careful" not in child.stderr_tail()


def test_a_process_that_never_reads() -> None:
    _, status = launch("import os; os.close(0); os._exit(1)", b"x" * 1_000_000)
    assert status == 1


def test_no_log_that_fails_and_no_broken_line_keeps_the_engine_from_being_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: logging.LogRecord) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(caplog.handler, "handle", fail)
    lines = [f"{LOG_MARK}7", f'{LOG_MARK}["loud", "x"]', "plain words", f'{LOG_MARK}[20, "x"]']
    # Many times what its pipe holds: it can end only if all of it is read.
    child, status = launch(f"import sys\nfor i in range(20_000): print({lines!r}[i % 4], file=sys.stderr)")
    assert status == 0
    assert child.stderr_tail().splitlines() == ["plain words"] * 20


def test_without_a_server_its_words_are_shown_on_stderr() -> None:
    code = """
import sys, threading
from quire.engine.launch import EngineProcess, EngineProcessOptions
ended = threading.Event()
command = (sys.executable, "-c", "import sys; print('out of luck', file=sys.stderr)")
child = EngineProcess(EngineProcessOptions(command=command), b"", lambda status: ended.set())
ended.wait(20)
child.release()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "quire: engine: out of luck\n"


def test_the_tail_is_short() -> None:
    child, _ = launch("import sys\nfor i in range(1000): print(i, file=sys.stderr)")
    assert child.stderr_tail().splitlines() == [str(i) for i in range(980, 1000)]


def test_it_finds_the_same_quire_and_nothing_in_the_working_directory() -> None:
    import quire

    child, status = launch("import quire, sys; print(quire.__file__, file=sys.stderr)")
    assert status == 0
    assert quire.__file__ is not None
    assert quire.__file__ in child.stderr_tail()


def test_exits_for_people() -> None:
    assert describe_exit(2) == "the engine process exited with status 2"
    assert "SIGSEGV" in describe_exit(-signal.SIGSEGV)
    assert "memory" in describe_exit(-signal.SIGKILL)
    assert "signal 120" in describe_exit(-120)
