"""The readers of a remote engine's requests: tokens wait here as numbers until their reader comes for them.

So a reader that is slow, or an event loop that is busy, gets fewer and longer pieces instead of a growing heap of
small ones, and what nobody wants to see before its end costs nothing until then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.messages import Abort, Ended, Finish, Started, StepNews
from quire.engine.outputs import OutputProcessor
from quire.engine.stats import RequestStats
from quire.errors import BadRequestError, QuireError
from quire.outputs import RequestOutput
from quire.params import OutputKind
from quire.plan import TokenLogprobs
from quire.request import CacheOutcome, FinishReason, Request, Sequence, SequenceState
from quire.scheduler import SequenceUpdate


@dataclass(slots=True, eq=False)
class _Line:
    """What one sequence brought and nobody has read. `seq` mirrors the engine's: times and counts, no tokens."""

    stream: Stream
    seq: Sequence
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    ended: Ended | None = None
    num_taken: int = 0  # tokens

    def take(self) -> SequenceUpdate | None:
        """Everything as one update; None where there is nothing."""
        ended = self.ended
        if not self.tokens and ended is None and self.prompt_logprobs is None:
            return None
        update = SequenceUpdate(self.seq, self.tokens, self.logprobs, self.prompt_logprobs)
        if ended is not None:
            update.finished, update.error = True, ended.error
            self.ended = None
        self.num_taken += len(self.tokens)
        self.tokens, self.logprobs, self.prompt_logprobs = [], None, None
        return update


class Stream:
    """One request's reader."""

    __slots__ = (
        *("_loop", "_waiter", "error", "is_eager", "is_finished", "is_gone", "is_patient", "key", "lines", "made"),
        "request",
    )

    def __init__(self, request: Request, key: int) -> None:
        self.request = request
        self.key = key
        self.lines: dict[int, _Line] = {}  # by index; forks come when they are first heard of
        self.made: deque[RequestOutput] = deque()  # outputs made before their reader came
        self.error: BaseException | None = None
        self.is_finished = False  # its reader has had the last output
        self.is_gone = False  # the engine has it no more
        # Stop strings must be found when they come, whether or not anyone reads.
        self.is_eager = bool(request.params.stop)
        self.is_patient = request.params.output_kind is OutputKind.FINAL_ONLY  # wants to hear of the end only
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.lines[0].seq.num_cached_tokens

    @property
    def num_made_tokens(self) -> list[int]:
        """By sequence: all that have come, whether or not they were read."""
        lines = (self.lines.get(index) for index in range(self.request.params.n))
        return [0 if line is None else line.num_taken + len(line.tokens) for line in lines]

    async def wait(self) -> None:
        """Until `wake`. Only the reader waits, and only when there is nothing to take."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class Streams:
    """Every request that is with the engine, by the keys of its sequences."""

    def __init__(self, outputs: OutputProcessor, send: Callable[[Abort | Finish], None]) -> None:
        self.stats = RequestStats()
        self._outputs = outputs
        self._send = send
        self._streams: dict[int, Stream] = {}
        self._lines: dict[int, _Line] = {}
        self._keys = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    # -- for readers

    def open(self, request: Request, prompt: str | None) -> Stream:
        if request.request_id in self._outputs:
            raise BadRequestError(f"request id {request.request_id!r} is in use: choose another", param="request_id")
        key = next(self._keys)
        for _ in range(request.params.n - 1):
            next(self._keys)
        stream = Stream(request, key)
        self._add_line(stream, 0)
        self._streams[key] = stream
        self._outputs.add(request, prompt)
        return stream

    def take(self, stream: Stream) -> RequestOutput | None:
        """The next output, or None: wait for one. Raises what ended the stream."""
        if not stream.made and not stream.is_eager:
            self._make(stream)
        if stream.made:
            output = stream.made.popleft()
            stream.is_finished = output.finished
            return output
        if stream.error is not None:
            raise stream.error
        return None

    def close(self, stream: Stream) -> None:
        """Its reader goes: after the last output, or before."""
        if self._streams.pop(stream.key, None) is None:
            return
        for index in stream.lines:
            self._lines.pop(stream.key + index, None)
        if stream.request.request_id in self._outputs:
            self._outputs.discard(stream.request.request_id)
            if not stream.is_gone:
                self._send(Abort(stream.key))
                self.stats.on_left(stream.request, [line.seq for line in stream.lines.values()])
        # Both lead back here: without this, only the garbage collector would free a request that has ended.
        stream.lines, stream.error = {}, None

    # -- from the engine

    def on_step(self, news: StepNews) -> None:
        """The one place that runs for every token."""
        lines, now_s = self._lines, news.now_s
        eager: list[Stream] = []
        for started in news.started:
            stream = self._streams.get(started.key - started.index)
            if stream is not None:
                self._start(stream, started)
        for key, token in zip(news.keys, news.tokens, strict=True):
            line = lines.get(key)
            if line is None:
                continue  # it was aborted, and this was on its way
            line.tokens.append(token)
            seq, stream = line.seq, line.stream
            seq.last_token_s = now_s
            if seq.first_token_s is None:
                seq.first_token_s = now_s
            if stream.is_eager:
                eager.append(stream)
            elif not stream.is_patient:
                stream.wake()
        for part in news.logprobs:
            if (line := lines.get(part.key)) is not None:
                line.logprobs = _joined(line.logprobs, part.of_tokens)
                line.prompt_logprobs = _joined(line.prompt_logprobs, part.of_prompt)
        for preempted in news.preempted:
            if (line := lines.get(preempted.key)) is not None:
                line.seq.num_preemptions = preempted.num_preemptions
                line.seq.num_recomputed_tokens = preempted.num_recomputed_tokens
        for ended in news.ended:
            if (line := lines.pop(ended.key, None)) is not None:
                self._end(line, ended, now_s)
                eager.append(line.stream)
        for stream in eager:
            self._pump(stream)

    def on_refused(self, key: int, error: QuireError) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            stream.error, stream.is_gone = error, True
            stream.wake()

    def fail_all(self, error: QuireError) -> None:
        for stream in self._streams.values():
            stream.is_gone = True
            if stream.error is None:
                stream.error = error
            stream.wake()

    def _start(self, stream: Stream, started: Started) -> None:
        line = stream.lines.get(started.index) or self._add_line(stream, started.index)
        line.seq.first_scheduled_s = started.first_scheduled_s
        line.seq.num_cached_tokens = started.num_cached_tokens
        line.seq.cache_outcome = None if started.cache_outcome is None else CacheOutcome(started.cache_outcome)

    def _add_line(self, stream: Stream, index: int) -> _Line:
        stream.lines[index] = line = _Line(stream, Sequence(stream.request, index, []))
        self._lines[stream.key + index] = line
        return line

    def _end(self, line: _Line, ended: Ended, now_s: float) -> None:
        seq = line.seq
        seq.state, seq.finish_reason = SequenceState.FINISHED, FinishReason(ended.reason)
        seq.stop_reason, seq.finished_s = ended.stop_reason, now_s
        line.ended = ended
        stream = line.stream
        stream.request.is_finished = all(one.seq.state is SequenceState.FINISHED for one in stream.lines.values())

    def _pump(self, stream: Stream) -> None:
        if stream.is_eager:
            self._make(stream)
        stream.wake()

    def _make(self, stream: Stream) -> None:
        """Turn what has come into an output, where there is one to be seen."""
        updates = [update for line in stream.lines.values() if (update := line.take()) is not None]
        if not updates:
            return
        try:
            outputs, stopped = self._outputs.process(updates)
        except Exception as error:  # a bug of ours ends this request, not the server
            stream.error = error
            return
        for seq, stop in stopped:
            if self._lines.pop(stream.key + seq.index, None) is not None:
                self._send(Finish(stream.key, seq.index, stop))
        for output in outputs:
            if output.finished:
                self.stats.on_finished(output)
            stream.made.append(output)


def _joined(before: list[TokenLogprobs] | None, new: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    if new is None:
        return before
    return new if before is None else before + new
