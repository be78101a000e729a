"""Logprobs in the API's shapes: completions' four lists, chat's list of tokens, vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Raw

from quire.outputs import Logprob
from quire.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from quire.text import Tokenizer

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_LOWEST = -9999.0  # JSON has no -inf, which is what a token that was ruled out has


class TokenNames:
    """How a token is shown: as its text, or as "token_id:7" where that was asked for or there is no vocabulary.

    A token that is a part of a character is written "bytes:\\xc3", as OpenAI's completions do: many such tokens have no
    text, and top_logprobs needs names that differ.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        # The same few thousand tokens come again and again in an answer with many logprobs.
        self.text = cache(self._text)
        self.bytes = cache(self._bytes)

    def _text(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Where in the text each token begins. Tokens that share a character begin where it does."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool, num_spaces_stripped: int = 0) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = -num_spaces_stripped

    def next(self, token_id: int) -> int:
        offset = max(self._num_chars, 0)
        if self._tokenizer is not None and token_id not in self._hidden:
            self._num_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob] | None],
    *,
    num_top: int,
    names: TokenNames,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """`entries` has None where nothing predicts the token: at the start of an echoed prompt."""
    shown = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        shown.text_offset.append(offsets.next(token_id))
        shown.tokens.append(names.text(token_id))
        if entry is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        own = entry[token_id]
        shown.token_logprobs.append(_finite(own.logprob))
        top = {names.text(other): _finite(p.logprob) for other, p in reversed(_top(entry, num_top))}
        top.setdefault(names.text(token_id), _finite(own.logprob))
        shown.top_logprobs.append(_encoded(dict(sorted(top.items(), key=lambda item: -item[1]))))
    return shown


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], *, num_top: int, names: TokenNames
) -> ChatLogprobs:
    return ChatLogprobs(
        [
            _encoded(
                TokenLogprob(
                    names.text(token_id),
                    _finite(entry[token_id].logprob),
                    names.bytes(token_id),
                    [
                        TopLogprob(names.text(other), _finite(p.logprob), names.bytes(other))
                        for other, p in _top(entry, num_top)
                    ],
                )
            )
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
    )


def prompt_logprobs(entries: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else _encoded(
            {
                str(token_id): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
                for token_id, p in entry.items()
            }
        )
        for entry in entries
    ]


def _encoded(position: T) -> T:
    """Encode a position as the JSON that it will be. Objects for a million logprobs would take four times the memory,
    and encoding them or looking for garbage among them would stop every thread for a second."""
    return cast(T, Raw(_encode(position)))


def _top(entry: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens in order. An entry also holds the position's own token, whatever its rank."""
    ranked = [item for item in entry.items() if item[1].rank is not None and item[1].rank <= num_top]
    ranked.sort(key=lambda item: item[1].rank or 0)
    return ranked[:num_top]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
