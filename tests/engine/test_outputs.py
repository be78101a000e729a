"""From sequence updates to outputs: text, stop strings, logprobs and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.inputs import InputProcessor
from quire.engine.outputs import Job, OutputProcessor
from quire.errors import BadRequestError
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.plan import TokenLogprobs
from quire.request import CacheOutcome, FinishReason, Sequence
from quire.scheduler import SequenceUpdate
from quire.text import Tokenizer

DELTA, FINAL = OutputKind.DELTA, OutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model)


class Side:
    """One request's text, with a scheduler that only exists as updates."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self.tokenizer = tokenizer
        self.outputs = OutputProcessor(tokenizer, cached_block_size=4)
        inputs = InputProcessor(tokenizer, vocab_size=320, max_model_len=200, eos_token_ids=frozenset([7]), seed=0)
        self.prepared = inputs.make_request("a", "hello", SamplingParams(max_tokens=50, **params), arrival_s=1.0)
        self.outputs.add(Job(self.prepared))
        self.seqs = [Sequence(self.prepared.request, i, []) for i in range(self.prepared.request.n)]
        self.stopped: list[tuple[int, str]] = []

    def update(self, text: str | list[int] = "", index: int = 0, end: FinishReason | None = None) -> SequenceUpdate:
        tokens = self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
        if end is not None:
            self.seqs[index].finish_reason = end
        return SequenceUpdate(self.seqs[index], tokens, finished=end is not None)

    def take(self, *updates: SequenceUpdate) -> RequestOutput | None:
        outputs, stopped = self.outputs.process(list(updates))
        self.stopped += [(seq.index, stop) for seq, stop in stopped]
        assert len(outputs) <= 1
        return outputs[0] if outputs else None

    def text(self, *args: Any, **kwargs: Any) -> str | None:
        output = self.take(self.update(*args, **kwargs))
        return None if output is None else output.outputs[0].text


def test_each_kind_of_output(tokenizer: Tokenizer) -> None:
    for kind, texts in [
        (OutputKind.CUMULATIVE, ["ab", "abc", "abcd"]),
        (DELTA, ["ab", "c", "d"]),
        (FINAL, [None, None, "abcd"]),
    ]:
        side = Side(tokenizer, output_kind=kind)
        got = [side.text("ab"), side.text("c"), side.text("d", end=FinishReason.LENGTH)]
        assert got == texts
        assert len(side.outputs) == 0


def test_no_half_character_is_shown(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer, output_kind=DELTA)
    tokens = tokenizer.encode("aü世", add_special_tokens=False)
    shown = [side.text([token]) for token in tokens]
    assert "".join(filter(None, shown)) == "aü世" and "\ufffd" not in "".join(filter(None, shown))
    cut = Side(tokenizer, output_kind=DELTA)
    assert cut.text([tokens[1]]) == ""
    assert cut.text(end=FinishReason.LENGTH) == "\ufffd"  # the end came in the middle of it


def test_a_stop_string_over_several_tokens(tokenizer: Tokenizer) -> None:
    for included, wanted in [(False, "ab"), (True, "abcd")]:
        side = Side(tokenizer, stop=["cd"], include_stop_str_in_output=included, output_kind=DELTA)
        shown = [side.text(letter) for letter in "abc"]
        assert included or shown == ["a", "b", ""]  # held back: it may become the stop string
        output = side.take(side.update("defg"))
        assert output is not None and output.finished
        completion = output.outputs[0]
        assert "".join(filter(None, shown)) + completion.text == wanted
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "cd")
        assert side.stopped == [(0, "cd")]
        assert side.take(side.update("late")) is None  # was on its way


def test_stops_count_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer, stop=["x"], min_tokens=3)
    assert side.text("xa") == "xa"
    assert side.text("bx") == "xab" and side.stopped == [(0, "x")]


def test_what_was_held_back_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer, stop=["cd"])
    assert side.text("abc") == "ab"
    assert side.text(end=FinishReason.LENGTH) == "abc"


def test_the_token_that_ends_a_text_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    for included, text in [(False, "ab"), (True, "abx")]:
        for kind in (FINAL, OutputKind.CUMULATIVE):
            side = Side(tokenizer, include_stop_str_in_output=included, output_kind=kind)
            output = side.take(side.update("abx", end=FinishReason.STOP))
            assert output is not None
            assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == (text, 3)


def test_several_sequences_end_with_the_last(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer, n=2)
    output = side.take(side.update("a", end=FinishReason.LENGTH))
    assert output is not None and not output.finished  # the other was preempted before its first token was read
    output = side.take(side.update("b", 1, end=FinishReason.LENGTH))
    assert output is not None and output.finished
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]


def test_ended_before_its_forks_it_has_one_sequence(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer, n=3)
    update = side.update(end=FinishReason.ERROR)
    update.error = "no room"
    output = side.take(update)
    assert output is not None and output.finished
    assert [(c.finish_reason, c.error) for c in output.outputs] == [("error", "no room")]


def test_logprobs(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer, logprobs=2, prompt_logprobs=0, output_kind=DELTA)
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    first = side.update([a])
    first.prompt_logprobs = [TokenLogprobs(b, -1.0, 3, [], [])] * 4
    first.logprobs = [TokenLogprobs(a, -2.0, 5, [b, c], [-0.1, -0.2])]
    output = side.take(first)
    assert output is not None and output.outputs[0].logprobs is not None
    (entry,) = output.outputs[0].logprobs
    assert [(token, one.rank, one.decoded_token) for token, one in entry.items()] == [
        (a, 5, "a"),  # its own first
        (b, 1, "b"),
        (c, 2, "c"),
    ]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 5
    second = side.update([b])
    second.logprobs = [TokenLogprobs(b, -0.5, 1, [b, c], [-0.5, -0.7])]
    output = side.take(second)
    assert output is not None and output.outputs[0].logprobs is not None
    assert [list(entry) for entry in output.outputs[0].logprobs] == [[b, c]]
    assert output.outputs[0].cumulative_logprob == -2.5


def test_times_and_counts(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    (seq,) = side.seqs
    seq.first_scheduled_s, seq.num_cached_tokens, seq.cache_outcome = 1.5, 4, CacheOutcome.PARTIAL
    seq.first_token_s, seq.last_token_s, seq.finished_s = 2.0, 4.0, 4.5
    seq.num_preemptions, seq.num_recomputed_tokens = 2, 30
    output = side.take(side.update("abc", end=FinishReason.LENGTH))
    assert output is not None and output.metrics is not None
    metrics = output.metrics
    assert (metrics.queue_s, metrics.first_token_s, metrics.inter_token_s, metrics.total_s) == (0.5, 1.0, 1.0, 3.5)
    assert (metrics.num_preemptions, metrics.num_recomputed_tokens, metrics.cache_outcome) == (2, 30, "partial")
    assert (output.num_cached_tokens, output.num_cache_creation_tokens) == (
        4,
        side.prepared.num_prompt_tokens // 4 * 4 - 4,
    )


def test_an_id_is_in_use_until_its_request_has_ended_or_is_forgotten(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    with pytest.raises(BadRequestError, match="in use"):
        side.outputs.add(Job(side.prepared))
    side.outputs.discard("a")
    side.outputs.discard("a")
    assert "a" not in side.outputs and side.take(side.update("x")) is None
    side.outputs.add(Job(side.prepared))
    side.take(side.update("x", end=FinishReason.LENGTH))
    assert "a" not in side.outputs


def test_what_waits_is_taken_once(tokenizer: Tokenizer) -> None:
    side = Side(tokenizer)
    line = side.outputs.add_line(Job(side.prepared), side.seqs[0])
    assert line.take() is None
    line.waiting.new_token_ids += [1, 2]
    update = line.take()
    assert update is not None and (update.seq, update.new_token_ids) == (side.seqs[0], [1, 2])
    assert line.take() is None
    line.waiting.finished = True
    update = line.take()
    assert update is not None and update.finished
