"""Readers of a remote engine's tokens: joined where they are late, woken where there is something to see."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.inputs import InputProcessor
from quire.engine.messages import Abort, Ended, ErrorInfo, Finish, Logprobs, Preempted, Refused, Started, StepOutputs
from quire.engine.outputs import OutputProcessor
from quire.engine.streams import Stream, Streams
from quire.errors import BadRequestError, EngineDeadError
from quire.params import OutputKind, SamplingParams
from quire.plan import TokenLogprobs
from quire.server.replies import CachedTokens, Usage
from quire.text import Tokenizer

DELTA = SamplingParams(max_tokens=50, output_kind=OutputKind.DELTA)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model)


class Side:
    """The text side of a server, with an engine that only exists as messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.sent: list[Any] = []
        self.tokenizer = tokenizer
        self.streams = Streams(OutputProcessor(tokenizer, cached_block_size=4), self.sent.append, lambda: None)
        self.inputs = InputProcessor(tokenizer, vocab_size=320, max_model_len=200, eos_token_ids=frozenset(), seed=0)

    def open(self, params: SamplingParams = DELTA, name: str = "a") -> Stream:
        stream = self.streams.open(self.inputs.make_request(name, "hello", params, arrival_s=1.0))
        self.step(started=[Started(stream.key, 0, 1.25, 4, "partial")])
        return stream

    def step(self, text: str = "", key: int = 1, now_s: float = 2.0, **parts: Any) -> None:
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        outputs = StepOutputs(now_s, [key] * len(tokens), tokens)
        for name, value in parts.items():
            setattr(outputs, name, value)
        self.streams.on_step(outputs)

    def text(self, stream: Stream) -> str | None:
        output = self.streams.take(stream)
        return None if output is None else output.outputs[0].text


async def test_tokens_wait_and_are_joined(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open()
    assert side.streams.take(stream) is None
    side.step("ab")
    side.step("c", now_s=3.0)
    assert side.text(stream) == "abc"  # one piece: its reader was late
    assert side.text(stream) is None
    side.step("d", now_s=4.0, ended=[Ended(1, "stop", 7, None)])
    output = side.streams.take(stream)
    assert output is not None
    assert (output.finished, output.outputs[0].text, len(output.outputs[0].token_ids)) == (True, "", 1)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 7)
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.queue_s, metrics.first_token_s, metrics.inter_token_s) == (0.25, 1.0, pytest.approx(2 / 3))
    assert (metrics.total_s, metrics.cache_outcome, output.num_cached_tokens) == (3.0, "partial", 4)
    assert stream.is_finished
    side.streams.close(stream)
    assert side.sent == []  # it had ended by itself
    assert len(side.streams) == 0
    assert side.streams.stats.finished == {"stop": 1}
    assert side.streams.stats.cached_prompt_tokens == 4


async def test_a_steps_tokens_but_one_were_drafted_and_usage_tells_it(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open()
    usage, found = Usage(0, 0, 0, CachedTokens(0)), []
    for text in ("a", "bcd", "e"):
        side.step(text)
        output = side.streams.take(stream)
        assert output is not None
        usage.count_drafts(output.metrics)
        found.append(msgspec.to_builtins(usage).get("completion_tokens_details"))
    so_far = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 0}
    assert found == [None, so_far, so_far]
    side.step("", ended=[Ended(1, "stop", 7, None, 6, 2)])
    output = side.streams.take(stream)
    assert output is not None
    usage.count_drafts(output.metrics)
    details = msgspec.to_builtins(usage)["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4}


async def test_leaving_early_aborts(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open()
    side.step("ab")
    with pytest.raises(BadRequestError, match="in use"):
        side.open()
    side.streams.close(stream)
    side.streams.close(stream)
    assert side.sent == [Abort(1)]
    side.step("late")  # on its way when the abort was sent
    assert side.streams.stats.finished == {"abort": 1}
    again = side.open()  # the id is free again
    assert again.key != stream.key


async def test_a_stop_string_is_found_though_nobody_reads(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open(DELTA.clone(stop=["cd"]))
    for letter in "abcdef":
        side.step(letter)
    assert side.sent == [Finish(1, 0, "cd")]
    texts = []
    while (output := side.streams.take(stream)) is not None and not texts.append(output.outputs[0].text):
        last = output
    assert "".join(texts) == "ab"
    assert last.finished
    assert last.outputs[0].stop_reason == "cd"
    assert last.metrics is not None
    assert last.metrics.total_s == 1.0
    side.streams.close(stream)
    assert len(side.sent) == 1


async def test_who_wants_the_end_is_woken_at_the_end(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open(DELTA.clone(output_kind=OutputKind.FINAL_ONLY))
    reader = asyncio.create_task(stream.wait())
    for _ in range(5):
        side.step("x")
        await asyncio.sleep(0)
    assert not reader.done()
    side.step("y", ended=[Ended(1, "length", None, None)])
    await reader
    assert side.text(stream) == "xxxxxy"


async def test_what_was_made_is_counted_whether_or_not_it_was_read(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open(DELTA.clone(output_kind=OutputKind.FINAL_ONLY, n=2))
    assert stream.num_made_tokens == [0, 0]
    side.step("abc")
    assert side.text(stream) is None  # it looked, and there was no end yet
    side.step("de")
    assert stream.num_made_tokens == [5, 0]
    side.step("x", key=2, started=[Started(2, 1, 1.25, 4, "partial")])
    assert stream.num_made_tokens == [5, 1]


async def test_a_reader_is_woken_by_a_token(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open()
    reader = asyncio.create_task(stream.wait())
    await asyncio.sleep(0)
    side.step("x")
    side.step("x")
    await reader
    cancelled = asyncio.create_task(stream.wait())
    await asyncio.sleep(0)
    cancelled.cancel()
    side.step("x")
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_several_sequences(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open(DELTA.clone(n=3, output_kind=OutputKind.FINAL_ONLY))
    side.step("a", started=[Started(2, 1, 1.5, 4, "hit"), Started(3, 2, 1.5, 4, "hit")])
    side.step("b", key=2)
    side.step("c", key=3, ended=[Ended(3, "stop", None, None), Ended(1, "length", None, None)])
    assert side.streams.take(stream) is None
    side.step("d", key=2, ended=[Ended(2, "length", None, None)])
    output = side.streams.take(stream)
    assert output is not None
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [
        (0, "a", "length"),
        (1, "bd", "length"),
        (2, "", "stop"),  # the token that stops a text is no part of it
    ]
    assert side.open(name="b").key == 4


async def test_a_request_that_fails_before_its_forks_ends(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open(DELTA.clone(n=3))
    side.step(ended=[Ended(1, "error", None, "no room")])
    output = side.streams.take(stream)
    assert output is not None
    assert output.finished
    assert [(c.finish_reason, c.error) for c in output.outputs] == [("error", "no room")]


async def test_logprobs_and_preemptions(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    stream = side.open(DELTA.clone(logprobs=1, prompt_logprobs=0))
    side.step(logprobs=[Logprobs(1, None, [TokenLogprobs(64, -1.0, 1, [], [])] * 4)])
    token = tokenizer.encode("a", add_special_tokens=False)[0]
    own = TokenLogprobs(token, -0.5, 1, [token], [-0.5])
    side.step("a", logprobs=[Logprobs(1, [own], None)], preempted=[Preempted(1, 2, 30)])
    side.step("a", logprobs=[Logprobs(1, [own], None)])
    output = side.streams.take(stream)
    assert output is not None
    assert output.outputs[0].logprobs is not None
    assert [list(entry) for entry in output.outputs[0].logprobs] == [[token], [token]]
    assert output.outputs[0].cumulative_logprob == -1.0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 5
    assert output.metrics is not None
    assert (output.metrics.num_preemptions, output.metrics.num_recomputed_tokens) == (2, 30)


async def test_refusal_and_death(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    refused, dying, ended = side.open(name="a"), side.open(name="b"), side.open(name="c")
    side.streams.on_message(Refused(1, ErrorInfo.of(BadRequestError("too long", param="prompt"))))
    side.step("bc", key=2)
    side.step("e", key=3, ended=[Ended(3, "length", None, None)])
    side.streams.fail_all(EngineDeadError("gone"))
    with pytest.raises(BadRequestError, match="too long"):
        side.streams.take(refused)
    assert side.text(dying) == "bc"  # what had come is still theirs
    with pytest.raises(EngineDeadError, match="gone"):
        side.streams.take(dying)
    assert side.text(ended) == "e"
    assert ended.is_finished
    for stream in (refused, dying, ended):
        side.streams.close(stream)
    assert side.sent == []
