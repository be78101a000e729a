from __future__ import annotations

import json
from typing import Any

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.protocol import StreamOptions
from quire.server.sse import StreamWriter


class Writer(StreamWriter):
    OBJECT = "thing"
    TAIL = b"}"

    def start(self, index: int, *, is_first: bool) -> bytes:
        return b'{"index":%d,"first":%s,"text":' % (index, b"true" if is_first else b"false")

    def choice(
        self, index: int, prompt: int, completion: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> dict[str, Any]:
        return {"index": index, "first": is_first, "text": completion.text, "end": completion.finish_reason}


def make(num_prompts: int = 1, n: int = 1, *, is_plain: bool = True, **options: bool) -> Writer:
    head = {"id": 'a"b', "model": "m"}
    return Writer(head, num_prompts=num_prompts, n=n, options=StreamOptions(**options), is_plain=is_plain)


def output(*completions: CompletionOutput, num_cached: int = 0) -> RequestOutput:
    done = all(completion.finish_reason for completion in completions)
    return RequestOutput("r", None, [1, 2, 3], list(completions), done, num_cached_tokens=num_cached)


def written(writer: Writer, prompt: int, given: RequestOutput) -> list[dict[str, Any]]:
    pieces: list[bytes] = []
    writer.write(prompt, given, pieces)
    text = b"".join(pieces).decode()
    assert not text or text.endswith("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]


def test_the_quick_way_and_the_whole_one_say_the_same() -> None:
    parts = [CompletionOutput(0, text, [1]) for text in ('"quoted"\n', "\u2028 é 世", "", "\\")]
    quick, whole = make(), make(is_plain=False)
    for part in parts:
        (event,), (other,) = written(quick, 0, output(part)), written(whole, 0, output(part))
        assert other["choices"][0].pop("end") is None
        assert event == other
        assert event["choices"][0]["text"] == part.text
    assert quick.usage == whole.usage


def test_only_a_choices_first_chunk_is_the_first() -> None:
    writer = make(n=2)
    events = [
        *written(writer, 0, output(CompletionOutput(0, "a", [1]), CompletionOutput(1, "", []))),
        *written(writer, 0, output(CompletionOutput(0, "b", [1]), CompletionOutput(1, "c", [1]))),
    ]
    shown = [(event["choices"][0]["index"], event["choices"][0]["first"]) for event in events]
    assert shown == [(0, True), (0, False), (1, True)]


def test_an_end_is_told_once() -> None:
    writer = make(n=2)
    ended = CompletionOutput(0, "a", [1], finish_reason="stop")
    assert len(written(writer, 0, output(ended, CompletionOutput(1, "x", [1])))) == 2
    assert not writer.is_done
    again = CompletionOutput(0, "", [], finish_reason="stop")
    (event,) = written(writer, 0, output(again, CompletionOutput(1, "", [], finish_reason="length")))
    assert event["choices"] == [{"index": 1, "first": False, "text": "", "end": "length"}]
    assert writer.is_done
    assert writer.ending() == b"data: [DONE]\n\n"


def test_usage_is_of_all_prompts() -> None:
    writer = make(num_prompts=2, include_usage=True)
    for prompt in (0, 1):
        written(writer, prompt, output(CompletionOutput(0, "a", [1, 2]), num_cached=2))
        (event,) = written(writer, prompt, output(CompletionOutput(0, "b", [3], finish_reason="stop"), num_cached=2))
        assert event["usage"] is None
    last, done, _ = writer.ending().decode().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: ")) == {
        "id": 'a"b',
        "model": "m",
        "object": "thing",
        "choices": [],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 6,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
