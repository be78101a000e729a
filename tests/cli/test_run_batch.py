"""quire run-batch: a file in, a file out, and again after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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


def test_it_says_when_there_is_nothing_to_do(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    assert run(tmp_path, tiny_model) == 0
    assert "nothing to do" in (words := capfd.readouterr().err) and "in.jsonl has no line" in words
    write_lines(tmp_path, "a")
    assert run(tmp_path, tiny_model) == 0 and run(tmp_path, tiny_model) == 0
    assert "out.jsonl has all 1 answers" in capfd.readouterr().err


def test_errors_of_lines_have_their_names(tiny_model: Path, tmp_path: Path) -> None:
    lines = ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', '{"custom_id": "b"}', "[]")
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert run(tmp_path, tiny_model) == 1
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {(one["custom_id"], one["id"][-1]) for one in told} == {("a", "1"), ("b", "2"), (None, "3")}
    assert told[0]["error"]["message"] == "line 1: method must be POST, got 'GET'"


def test_a_second_interrupt_ends_it_without_a_traceback() -> None:
    program = """
import asyncio, sys
from quire.interrupt import run_until_interrupted

async def busy():
    while True:
        await asyncio.sleep(0)

async def work():
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(busy())
            print("begun", flush=True)
    finally:
        await asyncio.sleep(0.5)
        print("closed", flush=True)

try:
    run_until_interrupted(work())
except KeyboardInterrupt:
    sys.exit(130)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    for _ in range(5):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.02)
    assert (child.communicate(timeout=60), child.returncode) == (("closed\n", ""), 130)
