"""One sequence's constraint: where it stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.int32]


class Constraint:
    """Follows the tokens of one sequence.

    Where the grammar leaves one continuation only, in its canonical tokens, those are `forced`: the mask allows the
    first of them alone. So the tokens are the same whether they are sampled one by one or verified as drafts.
    """

    __slots__ = ("_forced", "_matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._forced: list[int] | None = None  # None: not looked up yet

    def copy(self) -> Constraint:
        other = Constraint(self._matcher.deep_copy())
        other._forced = None if self._forced is None else list(self._forced)
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens now. What comes after its end is passed over."""
        for token in tokens:
            if self._matcher.is_stopped() or not self._matcher.consume_token(token):
                self._forced = []
                return
            if self._forced and self._forced[0] == token:
                del self._forced[0]
            else:
                self._forced = None
        self._forced = self._forced or None

    def forced(self) -> list[int]:
        """The tokens that must come next; empty where there is a choice."""
        if self._forced is None:
            self._forced = [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())
        return self._forced

    def why_stuck(self) -> str:
        """For a sequence that found no token to sample."""
        if error := self._matcher.get_error():
            return f"structured_outputs cannot go on: {' '.join(error.split())[:300]}"
        return (
            "structured_outputs leaves no token to sample: allowed_token_ids, bad_words, logit_bias or min_tokens ban "
            "all that it allows here"
        )

    def fill(self, into: Words) -> None:
        """Set the bits of the tokens that may come next. into: [words]."""
        forced = self.forced()
        if forced:
            into[:] = 0
            into.view(np.uint32)[forced[0] >> 5] = np.uint32(1 << (forced[0] & 31))
            return
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        if self._matcher.is_error():
            into[:] = 0

    def fill_along(self, drafts: Sequence[int], into: Words) -> None:
        """The same for the next token and for each that follows a draft. into: [1 + drafts, words].

        Behind a draft that the grammar does not allow anything may stand: it will not be come to.
        """
        self.fill(into[0])
        if not drafts:
            return
        into[1:] = -1
        ahead = self.copy()
        for depth, token in enumerate(drafts, start=1):
            if not into[depth - 1].view(np.uint32)[token >> 5] >> np.uint32(token & 31) & 1:
                return
            ahead.advance((token,))
            ahead.fill(into[depth])
