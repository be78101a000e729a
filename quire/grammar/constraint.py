"""One sequence's constraint: where it stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from quire.grammar.strings import StringMatcher, Words
from quire.params import ThinkingSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Stage(Enum):
    START = "start"  # a thought may begin, or the answer
    THINKING = "thinking"
    CLOSING = "closing"  # the budget is spent: the closing tokens are due
    ANSWER = "answer"


class Constraint:
    """Follows the tokens of one sequence: a thought, if it has one, and then its grammar, if it has one.

    Where the grammar leaves one continuation only, in its canonical tokens, those are `forced`: the mask allows the
    first of them alone. So the tokens are the same whether they are sampled one by one or verified as drafts.
    """

    __slots__ = ("_bytes_of", "_forced", "_matcher", "_num_thought", "_read", "_stage", "_strings", "_thinking")

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: ThinkingSpec | None = None,
        bytes_of: Callable[[list[int]], bytes] | None = None,
        strings: StringMatcher | None = None,
    ) -> None:
        """bytes_of: of tokens, where there is thinking. strings: at the same place as the matcher."""
        self._matcher = matcher
        self._strings = strings
        self._thinking = thinking
        self._bytes_of = bytes_of
        self._forced: list[int] | None = None  # None: not looked up yet
        self._read = b""  # of a thought that may begin, or the end of one
        self._num_thought = 0
        self._stage = Stage.ANSWER
        if thinking is not None:
            self._stage = Stage.THINKING if thinking.is_open else Stage.START
            self._close_if_spent()

    def copy(self, *, with_strings: bool = True) -> Constraint:
        strings = self._strings.copy() if self._strings is not None and with_strings else None
        other = Constraint(self._matcher and self._matcher.deep_copy(), strings=strings)
        other._thinking, other._bytes_of, other._stage = self._thinking, self._bytes_of, self._stage
        other._read, other._num_thought = self._read, self._num_thought
        other._forced = None if self._forced is None else list(self._forced)
        return other

    @property
    def is_over(self) -> bool:
        """Whether no token will be forbidden any more."""
        return self._stage is Stage.ANSWER and self._matcher is None

    def advance(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens now. What comes after its end is passed over."""
        for token in tokens:
            if self._stage is Stage.ANSWER:
                self._follow(token)
            elif self._stage is Stage.CLOSING:
                assert self._forced
                del self._forced[0]
                if not self._forced:
                    self._stage, self._forced = Stage.ANSWER, None
            else:
                self._think(token)

    def _follow(self, token: int) -> None:
        matcher = self._matcher
        if matcher is None:
            return
        if matcher.is_stopped() or not matcher.consume_token(token):
            self._forced, self._strings = [], None
            return
        if self._strings is not None and not self._strings.follow(token):
            self._strings = None
        if self._forced and self._forced[0] == token:
            del self._forced[0]
            self._forced = self._forced or None
        else:
            self._forced = None

    def _think(self, token: int) -> None:
        thinking = self._thinking
        assert thinking is not None and self._bytes_of is not None
        self._read += self._bytes_of([token])
        if self._stage is Stage.START:
            begin, text = thinking.begin.encode(), self._read.lstrip()
            if text.startswith(begin) or token == thinking.begin_id:
                self._stage, self._read = Stage.THINKING, b""
                self._close_if_spent()
            elif self._matcher is not None or not begin.startswith(text):
                self._stage = Stage.ANSWER
                self._follow(token)
            return
        end = thinking.end.encode()
        self._num_thought += 1
        if end in self._read or token == thinking.end_id:
            self._stage = Stage.ANSWER
            return
        self._read = self._read[-2 * len(end) :]
        self._close_if_spent()

    def _close_if_spent(self) -> None:
        thinking = self._thinking
        if thinking is None or thinking.budget is None or self._stage is not Stage.THINKING:
            return
        if self._num_thought >= thinking.budget:
            self._stage, self._forced = Stage.CLOSING, list(thinking.closing_ids)

    def forced(self) -> list[int]:
        """The tokens that must come next; empty where there is a choice."""
        if self._stage is Stage.START or self._stage is Stage.THINKING:
            return []
        if self._forced is None:
            matcher = self._matcher
            self._forced = [] if matcher is None or matcher.is_stopped() else list(matcher.compute_ff_tokens())
        return self._forced

    def why_stuck(self) -> str:
        """For a sequence that found no token to sample."""
        if self._matcher is not None and (error := self._matcher.get_error()):
            return f"structured_outputs cannot go on: {' '.join(error.split())[:300]}"
        return (
            "structured_outputs leaves no token to sample: allowed_token_ids, bad_words, logit_bias or min_tokens ban "
            "all that it allows here"
        )

    @property
    def is_answering(self) -> bool:
        """Whether nothing but the grammar says what comes next."""
        return self._stage is Stage.ANSWER

    @property
    def matcher(self) -> LLMatcher | None:
        """What the next mask is worked out by; None where none need be."""
        is_due = self._stage in (Stage.START, Stage.ANSWER) and not self._forced
        return self._matcher if is_due and self._matcher is not None and not self._matcher.is_error() else None

    @property
    def strings(self) -> StringMatcher | None:
        """What may tell the next mask sooner than `matcher`, where that is asked at all."""
        return self._strings

    def fill(self, into: Words, *, is_filled: bool = False) -> None:
        """Set the bits of the tokens that may come next. into: [words]; is_filled: what `matcher` says is in it."""
        forced = self.forced()
        if forced:
            into[:] = 0
            _allow(forced[0], into)
            return
        if self._matcher is None or self._stage is Stage.THINKING:
            into[:] = -1
            return
        if not is_filled:
            self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        if self._matcher.is_error():
            into[:] = 0
        if self._stage is Stage.START and self._thinking is not None and self._thinking.begin_id is not None:
            _allow(self._thinking.begin_id, into)

    def fill_along(self, drafts: Sequence[int], into: Words, *, is_filled: bool = False) -> None:
        """The same for the next token and for each that follows a draft. into: [1 + drafts, words].

        Behind a draft that the grammar does not allow anything may stand: it will not be come to.
        """
        self.fill(into[0], is_filled=is_filled)
        into[1:] = -1
        ahead = self.copy(with_strings=False)
        for depth, token in enumerate(drafts, start=1):
            if not into[depth - 1].view(np.uint32)[token >> 5] >> np.uint32(token & 31) & 1:
                return
            ahead.advance((token,))
            ahead.fill(into[depth])


def _allow(token: int, words: Words) -> None:
    words.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
