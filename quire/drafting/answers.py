"""Which earlier answers are kept: bounded in number and in tokens, and apart by scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.drafting.history import END_OF_ANSWER
from quire.drafting.lines import Lines
from quire.drafting.native import NativeLines

_MAX_CACHED_TOKENS = 1 << 20

Scope = tuple[str | None, str | None]  # salt and adapter


@dataclass(slots=True)
class _Generation:
    num_tokens: int = 0
    num_answers: int = 0


@dataclass(slots=True)
class _Kept:
    """What is kept of one scope, in two generations: when the younger is full, the older is forgotten."""

    number: int
    num_readers: int = 0  # lines that may look here
    young: _Generation = field(default_factory=_Generation)
    old: _Generation = field(default_factory=_Generation)


@dataclass(slots=True)
class AnswerCache:
    """Counts the answers that `lines` remembers, by scope: the salt and adapter that also keep cached prefixes apart,
    so that no tenant's drafts, and no tenant's timing, tell of another's answers. Where there are too many, those of
    the scope that was least recently used are forgotten."""

    lines: Lines | NativeLines
    gram: int
    max_answers: int
    max_tokens: int = _MAX_CACHED_TOKENS
    num_tokens: int = 0
    num_answers: int = 0
    _scopes: OrderedDict[Scope, _Kept] = field(default_factory=OrderedDict)  # with answers or readers
    _free_numbers: list[int] = field(default_factory=list)

    def enter(self, scope: Scope) -> int:
        """A line begins that may look at a scope's answers; returns the scope's number until it leaves."""
        kept = self._kept(scope)
        kept.num_readers += 1
        return kept.number

    def leave(self, scope: Scope) -> None:
        self._scopes[scope].num_readers -= 1
        self._drop_if_unused(scope)

    def add(self, scope: Scope, token_ids: Sequence[int]) -> None:
        """The end of a longer answer is kept where it alone would fill a generation."""
        token_ids = token_ids[-(self.max_tokens // 4) :]
        if len(token_ids) <= self.gram or not self.max_answers:
            return
        kept = self._kept(scope)
        is_full = kept.young.num_tokens + len(token_ids) >= self.max_tokens // 2
        if is_full or kept.young.num_answers >= max(1, self.max_answers // 2):
            self._age(kept)
            if self.max_answers == 1:
                self._age(kept)
        self.lines.remember(kept.number, [*token_ids, END_OF_ANSWER])
        for count in (kept.young, self):
            count.num_tokens += len(token_ids) + 1
            count.num_answers += 1
        while self.num_tokens > self.max_tokens or self.num_answers > self.max_answers:
            oldest = next(name for name, each in self._scopes.items() if each.young.num_answers or each.old.num_answers)
            if oldest == scope:
                break
            self._age(self._scopes[oldest])
            self._age(self._scopes[oldest])
            self._drop_if_unused(oldest)

    def _kept(self, scope: Scope) -> _Kept:
        kept = self._scopes.get(scope)
        if kept is None:
            number = self._free_numbers.pop() if self._free_numbers else len(self._scopes)
            kept = self._scopes[scope] = _Kept(number)
        self._scopes.move_to_end(scope)
        return kept

    def _age(self, kept: _Kept) -> None:
        self.lines.age(kept.number)
        self.num_tokens -= kept.old.num_tokens
        self.num_answers -= kept.old.num_answers
        kept.young, kept.old = _Generation(), kept.young

    def _drop_if_unused(self, scope: Scope) -> None:
        kept = self._scopes[scope]
        if not (kept.num_readers or kept.young.num_answers or kept.old.num_answers):
            del self._scopes[scope]
            self._free_numbers.append(kept.number)
