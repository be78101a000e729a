"""A running request from one engine to another, with its blocks.

    it runs here      its full blocks go there, as they are and as they become full
    it runs here      there, they are loaded into the device's cache
    a token comes     it leaves here, and goes on there: what is left to compute is less than a few blocks

Nothing of it is lost if any of this fails: until the last line the request runs where it is.
"""

from __future__ import annotations

import asyncio
import contextlib

from quire.engine.messages import Sent
from quire.engine.streams import Stream, Streams
from quire.errors import QuireError

_MOST_BEHIND = 2  # blocks that may lack before the bulk is loaded there
_LOOK_S = 0.25  # between two looks at whether the request is still there


async def bring_blocks(
    stream: Stream, source: Streams, target: Streams, to: str, *, block_size: int, num_known: int, within_s: float
) -> bool:
    """Whether all but a few tokens of what a running request has computed is on the other engine's device. It still
    runs where it was, and has just had a token."""
    try:
        async with asyncio.timeout(within_s):
            return await _Way(stream, source, target, block_size).go(to, num_known)
    except (TimeoutError, QuireError):
        return False
    finally:
        stream.on_sent = None
        if source.open_indices(stream):
            source.send_blocks(stream, None)


class _Way:
    """The way of one request from one engine to the other."""

    def __init__(self, stream: Stream, source: Streams, target: Streams, block_size: int) -> None:
        self._stream = stream
        self._source = source
        self._target = target
        self._block_size = block_size
        self._heard = asyncio.Event()
        self._latest = Sent(stream.key, 0, False)

    async def go(self, to: str, num_known: int) -> bool:
        stream, block_size = self._stream, self._block_size
        stream.on_sent = self._on_sent
        self._source.send_blocks(stream, to, num_known)
        num_there, most_behind = None, max(1, block_size // 4)
        while self._num_tokens() is not None and not self._latest.has_failed:
            if num_there is not None and self._num_behind(num_there) <= most_behind:
                [first, *_] = self._source.open_indices(stream)
                await self._source.next_token(stream, first)
                return bool(self._source.open_indices(stream))
            # The bulk first; after it, a block that has just become full is loaded at once: then fewest tokens lack.
            if self._num_behind(self._latest.num_tokens) <= _MOST_BEHIND * block_size:
                if num_there is not None:
                    most_behind *= 2  # steps may be so short that blocks cannot keep up
                if (num_there := await self._fetch()) is None:
                    return False
                if self._num_behind(num_there) <= most_behind:
                    continue
            self._heard.clear()
            with contextlib.suppress(TimeoutError):  # it may have had its first token meanwhile, or be gone
                await asyncio.wait_for(self._heard.wait(), _LOOK_S)
        return False

    def _on_sent(self, report: Sent) -> None:
        self._latest = report
        self._heard.set()

    def _num_tokens(self) -> int | None:
        """How many tokens each of its sequences has at least; None where the request is not here."""
        made = [self._stream.num_made_tokens[index] for index in self._source.open_indices(self._stream)]
        return self._stream.request.num_prompt_tokens + min(made) if made else None

    def _num_behind(self, num_tokens: int) -> int:
        """Tokens that lack where so many are. All of them while the prompt is computed."""
        num_all = self._num_tokens() or 0
        return num_all if num_all == self._stream.request.num_prompt_tokens else num_all - num_tokens

    async def _fetch(self) -> int | None:
        """Tokens that are on the other device of each sequence, at least. None where it has no room for them, or did
        not like what came."""
        request, found = self._stream.request, []
        for index in self._source.open_indices(self._stream):
            line, num_sent = self._stream.lines[index], self._latest.num_tokens
            tokens = [*request.prompt_token_ids, *line.token_ids, *line.waiting.new_token_ids]
            num_there = await self._target.fetch(tokens, request.salt, request.adapter)
            if num_there < num_sent - self._block_size:
                return None
            found.append(num_there)
        return min(found, default=None)
