"""Server-sent events, written as bytes. The constant parts of a stream's chunks are encoded once; a token then
costs the encoding of its text and one join."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.endpoint import ClientGone, Exchange
from quire.server.errors import to_api_error
from quire.server.generation import Generation
from quire.server.protocol import StreamOptions
from quire.server.replies import CachedTokens, Usage
from quire.server.resuming import check_goes_on, tokens_comment

DONE = b"data: [DONE]\n\n"
_CONTENT_TYPE = b"text/event-stream; charset=utf-8"
# For proxies: pass every chunk on at once, as it is.
_HEADERS = ((b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no"))

_encode = msgspec.json.Encoder().encode


class StreamWriter:
    """Makes the events of one stream. A subclass knows its API's shape.

    A choice's text stands between `start(index, is_first)` and `TAIL`; everything that is not just text, such as a
    choice's end or logprobs, comes as a whole from `choice`.
    """

    OBJECT = ""
    TAIL = b""

    def __init__(
        self, head: dict[str, Any], *, num_prompts: int, n: int, options: StreamOptions | None, is_plain: bool
    ) -> None:
        """`head` is what every chunk begins with; `is_plain`: chunks hold text and nothing else."""
        self._n = n
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self.is_plain = is_plain and not self._continuous_usage
        self._head = b"data: " + _encode({**head, "object": self.OBJECT})[:-1] + b',"choices":['
        # OpenAI's own has a null here in every chunk but the last, if that one will have the numbers.
        self._end = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        num_choices = num_prompts * n
        self._starts = [self._head + self.start(i, is_first=True) for i in range(num_choices)]
        self._later_starts = [self._head + self.start(i, is_first=False) for i in range(num_choices)]
        self._tail = self.TAIL + self._end
        self._open = set(range(num_choices))
        self._is_fresh = [True] * num_choices
        self._is_new_prompt = [True] * num_prompts
        self.usage = Usage(0, 0, 0, CachedTokens(0))

    def start(self, index: int, *, is_first: bool) -> bytes:
        raise AssertionError("a subclass has it")

    def choice(
        self, index: int, prompt: int, completion: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> dict[str, Any] | msgspec.Struct | None:
        """The next piece of a choice; None where there is nothing to tell yet."""
        raise AssertionError("a subclass has it")

    def extra(self, output: RequestOutput) -> dict[str, Any]:
        """Fields of a prompt's first chunk beside its choices."""
        return {}

    def num_counted(self, completion: CompletionOutput) -> int:
        """Tokens of an output that its reader gets."""
        return len(completion.token_ids)

    @property
    def is_done(self) -> bool:
        return not self._open

    def write_all(self, outputs: list[tuple[int, RequestOutput]]) -> list[bytes]:
        pieces: list[bytes] = []
        for prompt, output in outputs:
            self.write(prompt, output, pieces)
        return pieces

    def write(self, prompt: int, output: RequestOutput, into: list[bytes]) -> None:
        """Append the events of an output. One that brings nothing new of a choice makes none for it."""
        if self._is_new_prompt[prompt]:
            self._is_new_prompt[prompt] = False
            self.usage.prompt_tokens += len(output.prompt_token_ids)
            self.usage.prompt_tokens_details.cached_tokens += output.num_cached_tokens
        for completion in output.outputs:
            index = prompt * self._n + completion.index
            if index not in self._open:
                continue
            if completion.finish_reason is None:
                if not completion.token_ids and not completion.text:
                    continue
                if self.is_plain:
                    self.usage.completion_tokens += len(completion.token_ids)
                    into += (self._starts[index], _encode(completion.text), self._tail)
                    self._starts[index] = self._later_starts[index]
                    self._is_fresh[index] = False
                    continue
            else:
                self._open.discard(index)
            into.append(self._whole_event(index, prompt, completion, output))

    def _whole_event(self, index: int, prompt: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        self.usage.completion_tokens += self.num_counted(completion)
        is_first, self._is_fresh[index] = self._is_fresh[index], False
        self._starts[index] = self._later_starts[index]
        told = self.choice(index, prompt, completion, output, is_first=is_first)
        if told is None:
            self._is_fresh[index] = is_first
            return b""
        choice = _encode(told)
        end = self._end
        extra = self.extra(output) if is_first and completion.index == 0 else {}
        if self._continuous_usage:
            extra["usage"] = self._counted()
        elif extra and self._include_usage:
            extra["usage"] = None
        if extra:
            end = b"]," + _encode(extra)[1:] + b"\n\n"
        return self._head + choice + end

    def _counted(self) -> Usage:
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens
        return self.usage

    def ending(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(self._counted()) + b"}\n\n" + DONE


async def stream_reply(exchange: Exchange, generation: Generation, writer: StreamWriter) -> None:
    """Send a generation's outputs as they come, all that are there in one write.

    The response begins with the first output, so that whatever goes wrong before it still has a status of its own.
    """
    send, take, write_all = exchange.send, generation.take, writer.write_all
    is_known = generation.is_continued
    try:
        while not writer.is_done:
            outputs = await take()
            if writer.is_plain:
                pieces = write_all(outputs)
            else:
                pieces = await generation.write(partial(write_all, outputs), (output for _, output in outputs))
            if is_known:  # the client has it
                check_goes_on(ended=writer.is_done)
                is_known = False
                continue
            if writer.is_done:
                pieces.append(writer.ending())
            if generation.tells_tokens:
                pieces.append(tokens_comment(outputs))
            if not pieces:
                continue
            if not exchange.has_begun:
                await exchange.begin(200, _CONTENT_TYPE, generation.headers, *_HEADERS)
            await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": not writer.is_done})
    except ClientGone:
        raise
    except Exception as failure:
        # Under the clause's own name, which ends with it: the error's traceback has this frame and all that it holds.
        failure = to_api_error(failure)
        if exchange.has_begun:
            body = b"data: " + failure.encode() + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": body, "more_body": False})
        raise failure from None
