"""The constraints of an executor's rows, and the masks of a step."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from quire.grammar.compiler import GrammarCompiler
from quire.grammar.constraint import Constraint
from quire.grammar.strings import Words
from quire.params import SamplingSpec
from quire.plan import StepPlan
from quire.request import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# Fewer forced tokens are cheaper one by one: a step that verifies samples every position.
_WORTH_A_JUMP = 3
# Rows of one lexer wait for each other. With as many lexers as threads, a thread whose rows need long masks is waited
# for by all; with more, another takes some of them.
_LEXERS_PER_THREAD = 2
_MAX_FORCED_CHOICES = 256  # tokens that begin with each other: as many as the longest has bytes, and some


def _new_words(num_masks: int, num_words: int) -> Words:
    return np.empty((num_masks, num_words), dtype=np.int32)


def mask_threads() -> int:
    """How many fill masks while a GPU is at work: most of the machine's, but not those of loop and server."""
    return max(1, min(16, (os.cpu_count() or 1) - 2))


def _fill_beside(has_begun: threading.Event, fill: Callable[[], None]) -> None:
    has_begun.set()
    fill()


@dataclass(slots=True)
class ConstrainedLine:
    """A row of a step that samples and has a constraint. It is held itself: the row may be another's by the time that
    its token is known."""

    index: int  # among the rows that sample
    row: int
    constraint: Constraint


class PendingMasks:
    """A step's masks, which may be on their way."""

    def __init__(self, lines: Seq[ConstrainedLine], drafts: Seq[Seq[int]], firsts: Seq[int], packed: Words) -> None:
        """firsts: the first mask of each line; packed: [masks, words], where they will be."""
        self._lines, self._drafts, self._firsts, self._packed = lines, drafts, firsts, packed
        self._filling: list[Future[None]] = []
        self._filled: set[int] = set()

    def wait_for(self, filling: list[Future[None]], filled: set[int]) -> None:
        """filling: fill these of the masks."""
        self._filling, self._filled = filling, filled

    def finish(self) -> Words:
        """[masks, words], good until the next step's are begun."""
        packed, filled = self._packed, self._filled
        for part in self._filling:
            part.result()
        for line, of_line, first in zip(self._lines, self._drafts, self._firsts, strict=False):
            if of_line:
                line.constraint.fill_along(of_line, packed[first : first + 1 + len(of_line)], is_filled=first in filled)
            elif first not in filled:
                line.constraint.fill(packed[first])
        return packed


class RowConstraints:
    """The constraint of each row, from its admission or fork until its release."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        num_threads: int = 1,
        new_words: Callable[[int, int], Words] = _new_words,
    ) -> None:
        """num_threads: that fill masks, where the device leaves the host time for it; new_words: memory for so many
        masks of so many words, from which the device can copy by itself."""
        self.compiler = compiler
        self._new_words = new_words
        self._num_threads = num_threads
        self._num_lexers = 1
        if num_threads > 1:
            self._num_lexers = num_threads * _LEXERS_PER_THREAD
            compiler.follow_strings()
        self._rows: dict[int, Constraint] = {}
        self._lexers: dict[int, tuple[str, int]] = {}  # of each row with a grammar: the grammar, and which it uses
        self._num_users: dict[str, list[int]] = {}  # by grammar, of each lexer
        self._ordered_rows: list[int] = []  # what _order is about
        self._order: list[int] = []
        self._num_words = -(-compiler.vocab_size // 32)
        self._packed: Words = _new_words(0, self._num_words)
        self._of_strings: Words = _new_words(0, 0)  # masks of matchers for strings

    def admit(self, row: int, spec: SamplingSpec, output_token_ids: Seq[int]) -> None:
        """Waits for the compiler where nobody did before. Raises BadRequestError only where nobody checked either."""
        if not spec.is_constrained:
            return
        matcher = strings = None
        if spec.grammar is not None:
            users = self._num_users.get(spec.grammar) or [0] * self._num_lexers
            lexer = users.index(min(users))
            matcher, strings = self.compiler.matchers(spec.grammar, lexer)
            self._use(row, spec.grammar, lexer)
        decode = self.compiler.tokenizer.decode_bytes if spec.thinking is not None else None
        constraint = Constraint(matcher, spec.thinking, decode, strings)
        constraint.advance(output_token_ids)
        self._rows[row] = constraint

    def constraint(self, row: int) -> Constraint:
        return self._rows[row]

    def fork(self, source_row: int, row: int) -> None:
        if source_row in self._rows:
            self._rows[row] = self._rows[source_row].copy()
            if source_row in self._lexers:
                self._use(row, *self._lexers[source_row])

    def release(self, row: int) -> None:
        self._rows.pop(row, None)
        if row in self._lexers:
            grammar, lexer = self._lexers.pop(row)
            users = self._num_users[grammar]
            users[lexer] -= 1
            if not any(users):
                del self._num_users[grammar]

    def clear(self) -> None:
        self._rows.clear()
        self._lexers.clear()
        self._num_users.clear()

    def _use(self, row: int, grammar: str, lexer: int) -> None:
        self._lexers[row] = grammar, lexer
        self._num_users.setdefault(grammar, [0] * self._num_lexers)[lexer] += 1
        self._ordered_rows = []

    def forced_tokens(self, seq: Sequence) -> list[int]:
        """What must follow a running sequence's last token, where the constraint knows that one."""
        constraint = self._rows.get(seq.row) if seq.row is not None and not seq.num_pending_tokens else None
        forced = constraint.forced() if constraint is not None else []
        return forced if len(forced) >= _WORTH_A_JUMP else []

    def of_step(self, plan: StepPlan) -> list[ConstrainedLine]:
        """The plan's rows that sample under a constraint, its forks made."""
        if not self._rows:
            return []
        for fork in plan.forks:
            self.fork(fork.source_row, fork.row)
        found = []
        for i, row in enumerate(plan.sampled_rows()):
            constraint = self._rows.get(row)
            if constraint is not None and not constraint.is_over:
                found.append(ConstrainedLine(i, row, constraint))
        return found

    def advance(self, lines: Seq[ConstrainedLine], tokens: Seq[Seq[int]]) -> None:
        """Tell the constraints what their rows have sampled. tokens: of all rows that sampled, by the lines' index."""
        for line in lines:
            line.constraint.advance(tokens[line.index])

    def begin_masks(self, lines: Seq[ConstrainedLine], drafts: Seq[Seq[int]]) -> PendingMasks:
        """Which tokens the lines may sample next: for each of them a mask, and one more for each of its drafts.

        Where there are threads they work on it from now on, and the caller goes on with something else. One step's
        masks at a time: their memory is the last step's, which has sampled, and so has copied its own.
        """
        firsts = list(itertools.accumulate((1 + len(some) for some in drafts), initial=0))
        if len(self._packed) < firsts[-1]:  # new memory for each step would cost as much as a narrow grammar's masks
            self._packed = self._new_words(max(firsts[-1], 2 * len(self._packed)), self._num_words)
        packed = self._packed[: firsts[-1]]
        pending = PendingMasks(lines, drafts, firsts, packed)
        if self._num_threads > 1:
            order = self._in_order([line.row for line in lines])
            working = [(lines[i].constraint, firsts[i]) for i in order if lines[i].constraint.matcher is not None]
            if len(working) > 1:
                pending.wait_for(self._fill(working, packed), {first for _, first in working})
        return pending

    def _in_order(self, rows: list[int]) -> list[int]:
        """Places in a list of rows, by lexers. Threads take neighbours, and those that share one wait for each
        other."""
        if rows != self._ordered_rows:
            self._order = sorted(range(len(rows)), key=lambda i: self._lexers.get(rows[i], ("", 0)))
            self._ordered_rows = rows
        return self._order

    def _fill(self, working: list[tuple[Constraint, int]], packed: Words) -> list[Future[None]]:
        """Begin to fill masks, of rows in strings of bounded length and of others at the same time: with one after the
        other, threads that are done with the first would wait for the last of them."""
        in_strings: list[tuple[Constraint, int]] = []
        others: list[tuple[Constraint, int]] = []
        for each in working:
            (others if (strings := each[0].strings) is None or not strings.is_in_string() else in_strings).append(each)
        fills = [partial(self._fill_strings, in_strings, packed)] if in_strings else []
        if others:
            fills.append(partial(self._fill_others, others, packed))
        have_begun = [threading.Event() for _ in fills]
        filling = [self._beside.submit(_fill_beside, *each) for each in zip(have_begun, fills, strict=True)]
        # A thread that only wants the interpreter may have to wait 5 ms for it; who waits here gives it away.
        for has_begun in have_begun:
            has_begun.wait()
        return filling

    def _fill_strings(self, working: list[tuple[Constraint, int]], packed: Words) -> None:
        """Fill the masks of those that stand in strings of bounded length."""
        second = [strings for c, _ in working if (strings := c.strings) is not None]
        vocabulary = second[0].vocabulary
        if len(self._of_strings) < len(second):
            self._of_strings = _new_words(2 * len(second), vocabulary.num_words)
        masks = self._of_strings[: len(second)]
        self._compute([(strings.matcher, i) for i, strings in enumerate(second)], masks)
        are_made = vocabulary.complete(masks, [packed[first] for _, first in working])
        left = []
        for (constraint, first), is_made in zip(working, are_made, strict=True):
            if not is_made:
                left.append((constraint, first))
            elif not constraint.is_answering:
                constraint.fill(packed[first], is_filled=True)
        if left:
            self._fill_others(left, packed)

    def _fill_others(self, working: list[tuple[Constraint, int]], packed: Words) -> None:
        self._compute([(matcher, first) for c, first in working if (matcher := c.matcher) is not None], packed)
        # A forced continuation allows its own beginnings alone. Where more tokens than that are allowed, nothing is
        # forced and nothing failed: to ask each of 64 rows for both takes longer than many masks do.
        some = packed[:, :: max(1, self._num_words // (2 * _MAX_FORCED_CHOICES))]  # a mask of text shows in any of them
        are_wide = np.count_nonzero(some[[first for _, first in working]], axis=1) > _MAX_FORCED_CHOICES
        for (constraint, first), is_wide in zip(working, are_wide.tolist(), strict=True):
            if not (is_wide and constraint.is_answering):
                constraint.fill(packed[first], is_filled=True)

    def _compute(self, matchers: list[tuple[LLMatcher, int]], into: Words) -> None:
        """In threads of the library's own, and the interpreter is let go of once for all of them."""
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, into.ctypes.data, into.shape[1] * 4, len(into))

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, thread_name_prefix="quire-masks")

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(num_threads=self._num_threads)
