"""What is typed at the prompt of `quire chat`: on a terminal of its own, since that is where it happens."""

from __future__ import annotations

import pytest

from quire.cli import chat


def reader(monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> list[str]:
    """Lines, or what a key raises. Returns the prompts that were shown."""
    waiting, shown = list(typed), []

    def read(prompt: str) -> str:
        shown.append(prompt)
        line = waiting.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    return shown


@pytest.mark.parametrize(
    ("typed", "text", "prompts"),
    [
        (["one"], "one", ["> "]),
        (["one \\", "two \\", "three"], "one \ntwo \nthree", ["> ", ". ", ". "]),
        (['"""one', "", 'two"""'], "one\n\ntwo", ["> ", ". ", ". "]),
        (['"""one"""'], "one", ["> "]),
        (["pasted\nlines"], "pasted\nlines", ["> "]),
        ([EOFError], None, ["> "]),
        ([KeyboardInterrupt, "again"], "again", ["> ", "> "]),
        ([KeyboardInterrupt, KeyboardInterrupt], None, ["> ", "> "]),
        (['"""half', KeyboardInterrupt, "again"], "again", ["> ", ". ", "> "]),
        (['"""half', EOFError], None, ["> ", ". "]),
    ],
)
def test_a_turn(monkeypatch, typed, text, prompts):
    shown = reader(monkeypatch, *typed)
    assert chat._read_turn() == text
    assert shown == prompts


def test_a_line_between_two_interrupts_counts(monkeypatch):
    reader(monkeypatch, KeyboardInterrupt, "one", KeyboardInterrupt, "two")
    assert [chat._read_turn(), chat._read_turn()] == ["one", "two"]


def test_the_history_is_kept_for_its_owner_alone(monkeypatch, tmp_path):
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    readline.clear_history()
    with chat._history():
        readline.add_history("a question")
    readline.clear_history()
    assert (tmp_path / "home" / "chat_history").stat().st_mode & 0o777 == 0o600
    with chat._history():
        assert readline.get_history_item(1) == "a question"
    readline.clear_history()


def test_a_home_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "file" / "home"))
    with chat._history():
        pass
