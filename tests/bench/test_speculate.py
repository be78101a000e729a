"""quire bench speculate: every load and text with every drafter, against plain decoding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.bench.plots import plot
from quire.bench.speculate import TEXTS, conversation, make_workload, measure_speculation
from quire.bench.text import show
from quire.cli.main import main
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError


def test_prompts_are_all_different_and_copies_begin_with_what_they_copy() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    for text in TEXTS:
        prompts = [bytes(prompt).decode() for prompt, _ in make_workload(text, 64, 9, encode, encode)]
        assert len(set(prompts)) == 64
        asked = [conversation(text, i) for i in range(64)]
        assert prompts == [ask + begun for ask, begun in asked]
        if text in ("extraction", "quotes"):
            assert all(begun.removeprefix("```python\n").strip() in ask for ask, begun in asked)


def test_edits_ask_for_a_name_that_is_there_and_begin_with_the_other() -> None:
    for i in range(40):
        ask, begun = conversation("edits", i)
        name = ask.split("`")[1]
        begun = begun.removeprefix("```python\n")
        assert len(re.findall(rf"\b{name}\b", ask)) > 2 and not re.search(rf"\b{name}\b", begun)


def test_what_is_measured_and_drawn(engine: LLMEngine, tmp_path: Path) -> None:
    def measure(**fields: object) -> list:  # type: ignore[type-arg]
        asked = {"loads": [1, 2], "methods": ["ngram"], "texts": ["free"], "num_out": 6, "repeats": 2, **fields}
        return list(measure_speculation(engine, **asked))  # type: ignore[arg-type]

    runs = measure()
    assert [(run.point["load"], run.point["drafts"]) for run in runs] == [
        ("1", "none"),
        ("1", "ngram"),
        ("2", "none"),
        ("2", "ngram"),
    ]
    assert all(len(run.repeats) == 2 and run.output_tok_s > 0 for run in runs)
    assert [len(run.repeat_values.get("times_plain", [])) for run in runs] == [0, 2, 0, 2]
    assert engine.core.scheduler.drafter is None
    assert show("speculate", runs).count("ngram") == 2
    plot(tmp_path / "a.svg", "speculate", runs)
    assert "<svg" in (tmp_path / "a.svg").read_text()
    for wrong in ({"methods": ["eagle"]}, {"methods": ["draft_model"]}, {"texts": ["poems"]}, {"loads": [0]}):
        with pytest.raises(ConfigError):
            measure(**wrong)


def test_from_the_command_line(tiny_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--loads", "1", "--texts", "free", "--output-len", "4", "--repeats", "1", "--cpu-time", *tiny_flags]
    assert main(["bench", "speculate", *flags]) == 0
    assert "x plain" in capsys.readouterr().out
