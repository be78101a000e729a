from __future__ import annotations

import io

import pytest

from quire.weights.progress import ProgressBar, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_stays_silent():
    stream = io.StringIO()
    with ProgressBar("pulling", stream=stream) as bar:
        bar(1, 2)
        bar(2, 2)
    assert stream.getvalue() == ""


def test_a_terminal_sees_the_share_and_is_left_clean():
    stream = Terminal()
    with ProgressBar("pulling", stream=stream) as bar:
        bar(25_000_000, 100_000_000)
        bar(26_000_000, 100_000_000)  # too soon to draw again
        bar(100_000_000, 100_000_000)
        bar(100_000_000, 100_000_000)  # drawn once
    frames = stream.getvalue().split("\r")
    assert frames[1].startswith("pulling █████░")
    assert " 25%  25 MB of 100 MB" in frames[1]
    assert "100%  100 MB of 100 MB" in frames[2]
    assert frames[3].strip() == ""
    assert frames[-1] == ""
    assert len(frames) == 5
    assert max(map(len, frames)) < 80


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (98_362_432, "98.4 MB"),
        (999_999, "1 MB"),
        (15 * 10**9, "15 GB"),
        (2 * 10**12, "2 TB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
