"""Files of requests over HTTP, with OpenAI's own client, and what a restart finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from observing_fakes import eventually
from server_harness import ScriptedEngine, Server, running

from quire.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.file_store import FileStore, read_upload
from quire.server.request_files import numbered_lines, read_answered
from quire.server.settings import ApiKey

KEYS = (ApiKey("ann", "key-a"), ApiKey("bob", "key-b"))


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    body = {"prompt": "a", "max_tokens": 2} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


@pytest.fixture
def engine(tiny_model: Path) -> ScriptedEngine:
    return ScriptedEngine(tiny_model)


@pytest.fixture
def server(engine: ScriptedEngine, tmp_path: Path) -> Iterator[Server]:
    with running(engine, batch_dir=str(tmp_path / "kept"), api_keys=KEYS) as server:
        yield server


def client(server: Server, key: str = "key-a") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)


def ended(ann: openai.OpenAI, batch_id: str) -> Any:
    eventually(lambda: ann.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"))
    return ann.batches.retrieve(batch_id)


def make(ann: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> Any:
    file = ann.files.create(file=("requests.jsonl", content), purpose="batch")
    return ann.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def answers(ann: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(each) for each in ann.files.content(file_id).content.splitlines()]
    return {each["custom_id"]: each for each in lines}


def test_a_batch_is_answered_and_what_is_wrong_is_told_apart(server: Server) -> None:
    ann = client(server)
    content = b"".join(line(f"r{i}", max_tokens=1 + i) for i in range(5))
    content += line("bad", max_tokens=-1) + b"no json\n" + line("stream", stream=True)
    content += line("chat", "/v1/chat/completions")
    batch = ended(ann, make(ann, content).id)
    assert batch.status == "completed" and batch.request_counts.total == 9
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 4)
    good = answers(ann, batch.output_file_id)
    assert {name: reply["response"]["body"]["usage"]["completion_tokens"] for name, reply in good.items()} == {
        f"r{i}": 1 + i for i in range(5)
    }
    wrong = answers(ann, batch.error_file_id)
    assert wrong["bad"]["response"]["status_code"] == 400 and wrong["bad"]["error"] is None
    assert {name: wrong[name]["error"]["code"] for name in (None, "stream", "chat")} == dict.fromkeys(
        (None, "stream", "chat"), "invalid_line"
    )


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", [("empty_file", None, None)]),
        (b"\n  \n", [("empty_file", None, None)]),
        (b"no json\n\n[1]\n", [("invalid_json_line", 1, None), ("invalid_value", 3, None)]),
        (
            b'{"custom_id": "a"}\n' + line("b", "/v1/chat/completions"),
            [("missing_field", 1, "url"), ("invalid_url", 2, "url")],
        ),
        (b"x\n" * 101, [("invalid_json_line", i + 1, None) for i in range(100)]),
    ],
)
def test_a_file_without_a_request_fails_its_batch(
    server: Server, content: bytes, wrong: list[tuple[str, int | None, str | None]]
) -> None:
    ann = client(server)
    batch = ended(ann, make(ann, content).id)
    assert batch.status == "failed" and batch.failed_at and batch.completed_at is None
    assert batch.output_file_id is None and batch.error_file_id is None and batch.request_counts.total == 0
    assert batch.errors.object == "list" and all(error.message for error in batch.errors.data)
    assert [(error.code, error.line, error.param) for error in batch.errors.data] == wrong
    assert [file.id for file in ann.files.list()] == [batch.input_file_id]


def test_requests_of_a_batch_give_way_to_others(server: Server, engine: ScriptedEngine) -> None:
    ann = client(server)
    ended(ann, make(ann, line("a") + line("b", priority=3)).id)
    assert sorted(one.request.priority for one in engine.prepared) == [3, 2**31 - 1]
    assert {one.request.tenant for one in engine.prepared} == {"ann"}


def test_nobody_sees_anothers_files(server: Server) -> None:
    ann, bob = client(server), client(server, "key-b")
    file = ann.files.create(file=("requests.jsonl", line("a")), purpose="batch")
    batch = ann.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    for ask in (
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.delete(file.id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not bob.files.list().data and not bob.batches.list().data
    assert [one.id for one in ann.batches.list()] == [batch.id]
    ended(ann, batch.id)
    ann.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(file.id)


def test_a_batch_is_cancelled_and_keeps_the_answers_that_it_has(server: Server, engine: ScriptedEngine) -> None:
    ann = client(server)
    engine.hangs_after = 3
    batch = make(ann, line("short", max_tokens=2) + line("long", max_tokens=9))
    eventually(lambda: ann.batches.retrieve(batch.id).request_counts.completed)
    with pytest.raises(openai.ConflictError):
        ann.files.delete(batch.input_file_id)
    ann.batches.cancel(batch.id)
    batch = ended(ann, batch.id)
    engine.hangs_after = None
    assert batch.status == "cancelled" and list(answers(ann, batch.output_file_id)) == ["short"]
    assert not engine.running
    with pytest.raises(openai.ConflictError):
        ann.batches.cancel(batch.id)


def test_after_a_restart_it_goes_on_with_what_has_no_answer(tiny_model: Path, tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_model)
    engine.hangs_after = 3
    with running(engine, batch_dir=str(tmp_path)) as server:
        batch = make(client(server), line("short", max_tokens=2) + line("long", max_tokens=5))
        eventually(lambda: client(server).batches.retrieve(batch.id).request_counts.completed)
    (output,) = (path for path in tmp_path.glob("file-*.bin") if b"batch_req" in path.read_bytes())
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_2","custom_')  # what a process that is killed leaves
    engine = ScriptedEngine(tiny_model)
    with running(engine, batch_dir=str(tmp_path)) as server:
        ann = client(server)
        make(ann, line("another"))  # wakes it, as a start does
        batch = ended(ann, batch.id)
        assert batch.status == "completed" and set(answers(ann, batch.output_file_id)) == {"short", "long"}
        assert [one.request.max_tokens for one in engine.prepared][:1] == [5]


def test_without_a_folder_the_paths_say_how_to_get_one(engine: ScriptedEngine) -> None:
    with running(engine) as server, pytest.raises(openai.InternalServerError, match="--batch-dir"):
        client(server).files.list()


@pytest.mark.parametrize(
    ("endpoint", "file_id"), [("/v1/nothing", None), ("/tokenize", None), ("/v1/completions", "file-0")]
)
def test_a_batch_of_nothing_is_refused(server: Server, endpoint: str, file_id: str | None) -> None:
    ann = client(server)
    file = ann.files.create(file=("requests.jsonl", line("a")), purpose="batch")
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        ann.batches.create(input_file_id=file_id or file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


def test_a_form_is_read_however_it_is_cut(tmp_path: Path) -> None:
    content = b"line\r\n--almost\r\n--bound" * 9
    form = b"\r\n".join(
        (
            b"--bound1",
            b'Content-Disposition: form-data; name="purpose"',
            b"",
            b"batch",
            b"--bound1",
            b'Content-Disposition: form-data; name="file"; filename="a.jsonl"',
            b"Content-Type: application/octet-stream",
            b"",
            content,
            b"--bound1--",
            b"",
        )
    )
    store = FileStore(tmp_path, 10_000)
    for size in (1, 2, 3, 7, 50, len(form)):

        async def chunks(size: int = size):
            for at in range(0, len(form), size):
                yield form[at : at + size]

        info = asyncio.run(read_upload(store, "ann", "multipart/form-data; boundary=bound1", chunks()))
        assert store.path(info).read_bytes() == content and info.filename == "a.jsonl" and info.bytes == len(content)


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"--b\r\n",
        b"--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf',
        b"--b\r\nNo: name\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="other"\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 9999,
        b"--b\r\n" + b"x" * 9999,
    ],
)
def test_a_form_that_is_none_is_refused_and_leaves_nothing(form: bytes, tmp_path: Path) -> None:
    async def chunks():
        yield form

    store = FileStore(tmp_path, 10_000)
    with pytest.raises(ApiError):
        asyncio.run(read_upload(store, "", "multipart/form-data; boundary=b", chunks()))
    assert not list(tmp_path.glob("file-*")) and not store.num_bytes


def test_the_folder_has_a_limit(tmp_path: Path) -> None:
    async def chunks():
        yield b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        for _ in range(9):
            yield b"x" * 65_536

    store = FileStore(tmp_path, 200_000)
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_upload(store, "", "multipart/form-data; boundary=b", chunks()))
    assert refused.value.status == 413 and not list(tmp_path.glob("file-*"))


def test_a_file_that_was_never_finished_is_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1000)
    kept, lost = store.create("", "kept", "batch"), store.create("", "lost", "batch")
    store.path(kept).write_bytes(b"123")
    store.save(kept)
    again = FileStore(tmp_path, 1000)
    assert [info.id for info in again.list_files("")] == [kept.id] and again.num_bytes == 3
    assert not again.path(lost).exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="batch_dir"):
        FileStore(tmp_path / "file" / "folder", 1)


def test_lines_are_numbered_and_long_ones_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\n  \n" + b"x" * 5_000_000 + b"\nlast")
    with path.open("rb") as file:
        lines = list(numbered_lines(file, 100))
    assert [(number, len(text)) for number, text in lines] == [(1, 3), (4, 102), (5, 4)]


def test_an_output_of_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"my novel\n")
    with pytest.raises(ConfigError):
        read_answered(path)
    assert path.read_bytes() == b"my novel\n"
