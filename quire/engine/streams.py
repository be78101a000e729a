"""An event loop's side of an engine in another thread or process: readers of requests, and calls with their answers.

Tokens wait here as numbers until their reader comes for them. So a reader that is slow, or an event loop that is busy,
gets fewer and longer pieces instead of a growing heap of small ones, and an answer that is wanted at its end only costs
nothing until then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from quire.engine import messages
from quire.engine.api import PreparedRequest
from quire.engine.outputs import Job, Line, OutputProcessor
from quire.engine.stats import RequestStats
from quire.errors import QuireError
from quire.outputs import RequestOutput
from quire.params import OutputKind
from quire.plan import TokenLogprobs
from quire.request import CacheOutcome, FinishReason, Request, Sequence, SequenceState

T = TypeVar("T")


class Stream(Job):
    """One request, and the reader that waits for its outputs."""

    __slots__ = (
        *("_loop", "_waiter", "error", "home", "is_eager", "is_finished", "is_gone", "is_patient", "key", "made"),
        *("on_sent", "on_start"),
    )

    def __init__(self, prepared: PreparedRequest, key: int, home: Streams) -> None:
        super().__init__(prepared)
        self.key = key
        self.home = home  # where it is now: it may go on with another engine
        self.on_start: Callable[[], None] | None = None  # called once it has its first token
        self.on_sent: Callable[[messages.Sent], None] | None = None  # told of its blocks that have arrived elsewhere
        self.made: deque[RequestOutput] = deque()  # outputs made before their reader came
        self.error: BaseException | None = None
        self.is_finished = False  # its reader has had the last output
        self.is_gone = False  # the engine has it no more
        # Stop strings must be found when they come, whether or not anyone reads.
        self.is_eager = bool(self.params.stop)
        self.is_patient = self.params.output_kind is OutputKind.FINAL_ONLY  # wants to hear of the end only
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.lines[0].seq.num_cached_tokens

    @property
    def num_made_tokens(self) -> list[int]:
        """How many tokens of each sequence have come, whether or not they were read."""
        lines = (self.lines.get(index) for index in range(self.request.n))
        return [0 if line is None else len(line.token_ids) + len(line.waiting.new_token_ids) for line in lines]

    def continuation(self, open_indices: Collection[int]) -> Request:
        """The request for another engine, to go on after the tokens that have come. `open_indices`: the sequences that
        have not ended."""
        tokens = {i: line.token_ids + line.waiting.new_token_ids for i, line in self.lines.items() if i in open_indices}
        request = replace(self.request, sequences=[], is_finished=False, continued={})
        if any(tokens.values()):
            # The first token of any came after all logprobs of the prompt.
            request.spec = replace(request.spec, prompt_logprobs=None)
            request.continued = tokens
        return request

    async def wait(self) -> None:
        """Wait until `wake`. Only the reader waits, and only when there is nothing to take."""
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
    """Every request and call that one event loop has with an engine. `send` takes a command there and never waits."""

    def __init__(
        self,
        outputs: OutputProcessor,
        send: Callable[[messages.Command], None],
        check: Callable[[], None],
        *,
        stats: RequestStats | None = None,
        keys: Iterator[int] | None = None,
    ) -> None:
        """check: raises where the engine takes no requests.

        stats, keys: several event loops of one engine share these.
        """
        self.stats = stats or RequestStats()
        self._outputs = outputs
        self._send = send
        self._check = check
        self._streams: dict[int, Stream] = {}  # by the requests' keys
        self._lines: dict[int, tuple[Line, Stream]] = {}  # by the sequences' keys
        self._keys = keys or itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._fetches: dict[int, asyncio.Future[int]] = {}
        self._token_waiters: dict[int, asyncio.Future[None]] = {}  # by the sequences' keys

    def __len__(self) -> int:
        return len(self._streams) + len(self._calls)

    # -- for readers

    async def read(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. Leaving early aborts it. Outputs that its reader was too slow for are joined into one."""
        self._check()
        stream = self.start(prepared)
        try:
            while not stream.is_finished:
                output = stream.home.take(stream)
                if output is None:
                    await stream.wait()
                    continue
                yield output
        finally:
            prepared.num_made_tokens, prepared.num_cached_tokens = stream.num_made_tokens, stream.num_cached_tokens
            stream.home.close(stream)

    def start(self, prepared: PreparedRequest, blocks_to: tuple[str, int] | None = None) -> Stream:
        """Hand a request to the engine. The caller closes its stream. The first output of a continued request holds the
        tokens that it goes on after. blocks_to: see `messages.Add`."""
        stream = self.open(prepared)
        self._send(messages.Add(stream.key, prepared.request, blocks_to))
        for index, token_ids in prepared.request.continued.items():
            stream.lines[index].waiting.new_token_ids += token_ids
        self._make(stream)
        return stream

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run one of `quire.engine.calls.CALLS`, or "metrics", between two steps."""
        call_id = next(self._keys)
        return await self._wait(self._calls, call_id, messages.Call(call_id, name, arguments))

    def abort(self, request_id: str) -> None:
        """End a request by its id; its reader gets a last output that says so. An unknown id is passed over."""
        for stream in list(self._streams.values()):  # at once: any thread may call this
            if stream.request.request_id == request_id:
                self._send(messages.Abort(stream.key))

    def abort_all(self) -> None:
        """Abort every request, because their event loop is gone."""
        for key in self._streams:
            self._send(messages.Abort(key))

    def open(self, prepared: PreparedRequest) -> Stream:
        key = self._take_keys(prepared.request.n)
        stream = Stream(prepared, key, self)
        self._outputs.add(stream)
        self._add_line(stream, 0)
        self._streams[key] = stream
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
        """Close a stream whose reader leaves, after the last output or before."""
        if self._streams.pop(stream.key, None) is None:
            return
        for index in stream.lines:
            self._lines.pop(stream.key + index, None)
        if stream.request.request_id in self._outputs:
            self._outputs.discard(stream.request.request_id)
            if not stream.is_gone:
                self._send(messages.Abort(stream.key))
                self.stats.on_left(stream.request, [line.seq for line in stream.lines.values()])
        # Both lead back here: without this, only the garbage collector would free a request that has ended.
        stream.lines, stream.error = {}, None

    # -- from one engine to another

    def release(self, *, abort: bool) -> list[tuple[Stream, list[int]]]:
        """Let go of every request that has not ended, each with its sequences that have not, for another engine to go
        on with. abort: this engine lives and shall forget them."""
        released = ((stream, self.release_one(stream, abort=abort)) for stream in list(self._streams.values()))
        return [(stream, open_indices) for stream, open_indices in released if open_indices]

    def release_one(self, stream: Stream, *, abort: bool) -> list[int]:
        """The same for one of them: its sequences that have not ended. Empty where there are none, and nothing is let
        go."""
        key, open_indices = stream.key, self.open_indices(stream)
        if open_indices:
            del self._streams[key]
            for index in open_indices:
                del self._lines[key + index]
            if abort:
                self._send(messages.Abort(key))
        return open_indices

    def open_indices(self, stream: Stream) -> list[int]:
        """The sequences of a request that have not ended. None where it is not here, or only its reader has not come
        for its end yet."""
        key = stream.key
        if self._streams.get(key) is not stream or stream.is_gone:
            return []
        return [index for index in stream.lines if key + index in self._lines]

    def adopt(self, stream: Stream, open_indices: list[int]) -> None:
        """Go on with a request that another one released. Under new keys: the old engine may still send tokens."""
        stream.home, stream.key = self, self._take_keys(stream.request.n)
        self._streams[stream.key] = stream
        for index in open_indices:
            self._lines[stream.key + index] = stream.lines[index], stream
        request = stream.continuation(open_indices)
        if not request.continued:
            stream.lines[0].waiting.prompt_logprobs = None
            self._outputs.begin_prompt_logprobs(stream)
        self._send(messages.Add(stream.key, request))

    def send_blocks(self, stream: Stream, to: str | None, num_known: int = 0) -> None:
        """Have the engine give a request's blocks to another one; `stream.on_sent` is told. None: no longer."""
        self._send(messages.Send(stream.key, to, num_known))

    async def fetch(self, token_ids: list[int], salt: str | None, adapter: str | None) -> int:
        """Have the engine load a prefix from below its device; returns how many of the tokens are there then."""
        fetch_id = next(self._keys)
        command = messages.Fetch(fetch_id, token_ids, salt, adapter)
        return await self._wait(self._fetches, fetch_id, command)

    async def next_token(self, stream: Stream, index: int) -> None:
        """Wait until a token of one of a request's sequences has come."""
        await self._wait(self._token_waiters, stream.key + index)

    async def _wait(
        self, waiters: dict[int, asyncio.Future[T]], key: int, command: messages.Command | None = None
    ) -> T:
        """Wait under a key for what the engine answers to a command, or tells by itself."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiters[key] = future
        try:
            if command is not None:
                self._send(command)
            return await future
        finally:
            waiters.pop(key, None)

    def _take_keys(self, count: int) -> int:
        """The first of so many in a row."""
        key = next(self._keys)
        for _ in range(count - 1):
            next(self._keys)
        return key

    # -- from the engine

    def on_message(self, message: messages.EngineMessage) -> None:
        match message:
            case messages.StepOutputs():
                self.on_step(message)
            case messages.Refused():
                if (stream := self._streams.get(message.key)) is not None:
                    stream.error, stream.is_gone = message.error.to_error(), True
                    stream.wake()
            case messages.Sent():
                stream = self._streams.get(message.key)
                if stream is not None and stream.on_sent is not None:
                    stream.on_sent(message)
            case messages.Fetched():
                fetched = self._fetches.get(message.fetch_id)
                if fetched is not None and not fetched.done():
                    fetched.set_result(message.num_tokens)
            case messages.CallDone() | messages.CallFailed():
                future = self._calls.get(message.call_id)
                if future is None or future.done():
                    return  # the caller has gone
                if isinstance(message, messages.CallDone):
                    future.set_result(message.value)
                else:
                    future.set_exception(message.error.to_error())

    def on_step(self, outputs: messages.StepOutputs) -> None:
        """The one place that runs for every token."""
        lines, now_s = self._lines, outputs.now_s
        eager: list[Stream] = []
        for started in outputs.started:
            stream = self._streams.get(started.key - started.index)
            if stream is not None:
                self._start(stream, started)
        before = None
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            found = lines.get(key)
            if found is None:
                continue  # it was aborted, and this was on its way
            line, stream = found
            line.waiting.new_token_ids.append(token)
            seq = line.seq
            if key == before:
                seq.num_accepted_tokens += 1  # several tokens of a step: all but one were drafted
            before = key
            seq.last_token_s = now_s
            if seq.first_token_s is None:
                seq.first_token_s = now_s
            if stream.is_eager:
                eager.append(stream)
            elif not stream.is_patient:
                stream.wake()
        for part in outputs.logprobs:
            if (found := lines.get(part.key)) is not None:
                update = found[0].waiting
                update.logprobs = _joined(update.logprobs, part.of_tokens)
                update.prompt_logprobs = _joined(update.prompt_logprobs, part.of_prompt)
        for preempted in outputs.preempted:
            if (found := lines.get(preempted.key)) is not None:
                seq = found[0].seq
                seq.num_preemptions, seq.num_recomputed_tokens = (
                    preempted.num_preemptions,
                    preempted.num_recomputed_tokens,
                )
        for result in outputs.pooled:
            if (found := lines.get(result.key)) is not None:
                found[0].waiting.pooled = result.pooled
        for ended in outputs.ended:
            if (found := lines.pop(ended.key, None)) is not None:
                _end(found[0], ended, now_s)
                eager.append(found[1])
        for stream in eager:
            if stream.is_eager:
                self._make(stream)
            stream.wake()
        if self._token_waiters:
            for key in self._token_waiters.keys() & outputs.keys:
                if not self._token_waiters[key].done():
                    self._token_waiters[key].set_result(None)

    def fail_all(self, error: QuireError) -> None:
        for future in (*self._calls.values(), *self._fetches.values()):
            if not future.done():
                future.set_exception(error)
        for stream in self._streams.values():
            stream.is_gone = True
            if stream.error is None:
                stream.error = error
            stream.wake()

    def _start(self, stream: Stream, started: messages.Started) -> None:
        line = stream.lines.get(started.index) or self._add_line(stream, started.index)
        if stream.on_start is not None:
            stream.on_start()
            stream.on_start = None
        if line.seq.first_token_s is not None:
            return  # it began elsewhere
        line.seq.first_scheduled_s = started.first_scheduled_s
        line.seq.num_cached_tokens = started.num_cached_tokens
        line.seq.cache_outcome = None if started.cache_outcome is None else CacheOutcome(started.cache_outcome)

    def _add_line(self, stream: Stream, index: int) -> Line:
        line = self._outputs.add_line(stream, Sequence(stream.request, index, []))
        self._lines[stream.key + index] = line, stream
        return line

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
                self._send(messages.Finish(stream.key, seq.index, stop))
        for output in outputs:
            if output.finished:
                self.stats.on_finished(output)
            stream.made.append(output)


def _end(line: Line, ended: messages.Ended, now_s: float) -> None:
    seq = line.seq
    seq.state, seq.finish_reason = SequenceState.FINISHED, FinishReason(ended.reason)
    seq.stop_reason, seq.finished_s = ended.stop_reason, now_s
    seq.num_draft_tokens, seq.num_accepted_tokens = ended.num_draft_tokens, ended.num_accepted_tokens
    line.waiting.finished, line.waiting.error = True, ended.error


def _joined(before: list[TokenLogprobs] | None, new: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    if before is None or new is None:
        return before if new is None else list(new)
    before += new
    return before
