"""quire run-batch: a file in, a file out, and again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main


def run(tmp_path: Path, model: Path, *flags: str) -> int:
    paths = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    return main(["run-batch", *paths, str(model), "--load-format", "dummy", "--max-model-len", "128", *flags])


def write_lines(tmp_path: Path, ids: str) -> None:
    lines = (
        {"custom_id": name, "url": "/v1/completions", "body": {"prompt": name, "max_tokens": 3, "temperature": 0}}
        for name in ids
    )
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_answers(tmp_path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


def test_it_answers_and_goes_on_where_it_stopped(tiny_model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path, "abcd")
    assert run(tmp_path, tiny_model) == 0
    whole = read_answers(tmp_path)
    assert set(whole) == set("abcd")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(lines[0] + lines[1][:30])
    assert run(tmp_path, tiny_model) == 0
    assert read_answers(tmp_path) == whole
    assert (tmp_path / "out.jsonl").read_bytes().startswith(lines[0])
    write_lines(tmp_path, "xbcde")
    assert run(tmp_path, tiny_model) == 2  # the answers are another file's
    assert read_answers(tmp_path) == whole


@pytest.mark.parametrize("name", ["in.jsonl", "no/folder.jsonl", "https://example.org/a.jsonl"])
def test_paths_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    write_lines(tmp_path, "a")
    output = name if "://" in name else str(tmp_path / name)
    assert main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", output]) == 2
    assert main(["run-batch", "-i", str(tmp_path / "missing"), "-o", str(tmp_path / "out")]) == 2
