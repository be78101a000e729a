"""ShareGPT-style files: good ones, odd ones, broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.dataset import Exchange, dataset_workload, read_exchanges
from quire.errors import ConfigError


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_the_first_question_and_its_answer(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        [
            talk(("human", "What?"), ("gpt", "That."), ("human", "Why?"), ("gpt", "So.")),
            talk(("system", "Be kind."), ("user", "Who?"), ("assistant", "Me.")),
            talk(("gpt", "An answer first")),
            talk(("human", "No answer")),
            talk(),
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ],
    )
    assert read_exchanges(path) == [Exchange("What?", "That."), Exchange("Who?", "Me."), Exchange("a", "b")]


def test_one_object_a_line(tmp_path: Path) -> None:
    lines = [json.dumps(talk(("human", q), ("gpt", "yes"))) for q in ("a", "b")]
    path = write(tmp_path / "a.jsonl", "\n\n".join(lines) + "\n")
    assert [e.prompt for e in read_exchanges(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{not json", "is not JSON"),
        ("", "is not JSON"),
        ({"conversations": []}, "must be a list of conversations, not an object"),
        ([], "has 0 entries"),
        ([talk(("human", "alone"))], "none of them starts with a question"),
        (["text"], "entry 0 .* must be an object with conversations, not a text"),
        ([talk(("human", "a"), ("gpt", "b")), {"id": 1}], "entry 1 .* has no list of conversations"),
        ([{"conversations": ["a"]}], "holds a turn that is a text"),
        ([{"conversations": [{"from": "human", "value": 5}]}], "without from and value"),
        ([{"conversations": [{"value": "x"}]}], "without from and value"),
    ],
)
def test_malformed(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_exchanges(write(tmp_path / "a.json", value))


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_exchanges(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot read"):
        read_exchanges(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_exchanges(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="line 2"):
        read_exchanges(write(tmp_path / "c.jsonl", "{}\n{"))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_lengths_come_from_the_answers() -> None:
    exchanges = [Exchange("q" * n, "a" * (n + 1)) for n in range(1, 30)]
    work = dataset_workload(exchanges, letters, num=100, max_len=40, seed=1)
    # 4 tokens on each side at least, 40 in all at most: n from 4 to 19, gone through again and again.
    assert {len(p) for p, _ in work} == set(range(4, 20))
    assert all(num_out == len(p) + 1 for p, num_out in work)
    assert len(work) == 100 and work[16:32] == work[:16]
    assert work != dataset_workload(exchanges, letters, num=100, max_len=40, seed=2)
    assert all(n == 5 for _, n in dataset_workload(exchanges, letters, num=5, max_len=40, num_out=5))


def test_what_is_skipped_is_not_run_again_while_there_is_other() -> None:
    exchanges = [Exchange("q" * n, "aaaa") for n in range(4, 24)]
    first = dataset_workload(exchanges, letters, num=8, max_len=99)
    other = dataset_workload(exchanges, letters, num=8, max_len=99, skip=8)
    assert not {len(p) for p, _ in first} & {len(p) for p, _ in other}


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="at most 6 in all"):
        dataset_workload([Exchange("long enough", "and more")], letters, num=1, max_len=6)
