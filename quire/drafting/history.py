"""Where a run of tokens has stood before: hash chains over lists of tokens, as compressors of the LZ77 family have.

An index costs about 12 bytes a token. A token is entered once, when it comes, and nothing is ever scanned again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

_MIN_HEADS = 256
_MAX_CANDIDATES = 8  # places that one lookup compares; the latest come first
_MAX_INDEXED_AT_ONCE = 8192  # a very long prompt is entered over several steps, so that no step waits for it
END_OF_ANSWER = -1
_MAX_CACHED_TOKENS = 1 << 20


class Match(NamedTuple):
    """The last `length` tokens stood in `tokens` just before `position`."""

    tokens: list[int]
    position: int
    length: int
    is_unanimous: bool  # all the places that were compared go on with the same token


class History:
    """An index of a list that only grows. Its owner appends to the list; `extend` takes in what is new.

    Invariant: for every end e in (gram, num_indexed], the chain that starts at _heads[hash(tokens[e - gram : e])] and
    goes on through _previous passes e. Others of the same hash may stand in it: whoever reads compares tokens.
    """

    __slots__ = ("_heads", "_previous", "gram", "num_indexed", "tokens")

    def __init__(self, tokens: list[int], gram: int) -> None:
        self.tokens = tokens
        self.gram = gram
        self.num_indexed = 0  # ends up to here are in the chains
        self._previous = array("i")
        self._heads = array("i")

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self._previous) + len(self._heads))

    def extend(self) -> None:
        """Take in the ends that have a token after them: what follows the last one nobody knows yet."""
        tokens = self.tokens
        first = self.num_indexed + 1
        last = min(len(tokens) - 1, self.num_indexed + _MAX_INDEXED_AT_ONCE)
        if last < first:
            return
        if last >= len(self._heads):
            self._rehash(2 * max(last, _MIN_HEADS // 2))
        self._enter(first, last)
        self.num_indexed = last

    def _enter(self, first: int, last: int) -> None:
        gram, tokens, heads, previous = self.gram, self.tokens, self._heads, self._previous
        mask = len(heads) - 1
        if first < gram:  # too short to be a gram: they only keep _previous in line with the tokens
            previous.extend([0] * (min(gram - 1, last) - first + 1))
            first = gram
        if last < first:
            return
        if first == last:  # nearly always: one token more
            place = hash(tuple(tokens[last - gram : last])) & mask
            previous.append(heads[place])
            heads[place] = last
            return
        grams = zip(*(tokens[first - gram + i : last - gram + i + 1] for i in range(gram)), strict=True)
        for end, key in enumerate(grams, start=first):
            place = hash(key) & mask
            previous.append(heads[place])
            heads[place] = end

    def _rehash(self, num_heads: int) -> None:
        num_heads = 1 << (num_heads - 1).bit_length()
        self._heads = array("i", bytes(4 * num_heads))  # 0: no end, since an end has a gram before it
        self._previous = array("i")
        if self.num_indexed:
            self._enter(1, self.num_indexed)

    def find(self, context: list[int], depth: int) -> Match | None:
        """The longest run, of at most `depth` tokens, that ends `context` and stood here before; of equal ones the
        latest. None where not even a gram did."""
        gram, tokens, size = self.gram, self.tokens, len(context)
        if size < gram or not self._heads:
            return None
        key = context[-gram:]
        end = self._heads[hash(tuple(key)) & (len(self._heads) - 1)]
        best = best_length = 0
        following = None
        is_unanimous = True
        for _ in range(_MAX_CANDIDATES):
            if not end:
                break
            if tokens[end - gram : end] == key:
                length, most = gram, min(depth, end, size)
                while length < most and tokens[end - 1 - length] == context[-1 - length]:
                    length += 1
                if following is None:
                    following = tokens[end]
                elif tokens[end] != following:
                    is_unanimous = False
                if length > best_length:
                    best, best_length = end, length
            end = self._previous[end - 1]
        return Match(tokens, best, best_length, is_unanimous) if best else None


@dataclass(slots=True)
class _Answers:
    """Earlier answers of one scope, in two generations: when the younger is full, the older is forgotten."""

    young: History
    old: History | None = None
    num_young: int = 0  # answers
    num_old: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.young.tokens) + (len(self.old.tokens) if self.old else 0)


@dataclass(slots=True)
class AnswerCache:
    """Answers by scope: the salt and adapter that also keep cached prefixes apart, so that no tenant's drafts, and no
    tenant's timing, tell of another's answers. Bounded in answers and in tokens; the scope that was least recently
    used goes first."""

    gram: int
    max_answers: int
    max_tokens: int = _MAX_CACHED_TOKENS
    num_tokens: int = 0
    num_answers: int = 0
    _scopes: OrderedDict[tuple[str | None, str | None], _Answers] = field(default_factory=OrderedDict)

    def add(self, scope: tuple[str | None, str | None], token_ids: list[int]) -> None:
        """The end of a longer answer is kept where it alone would fill a generation."""
        token_ids = token_ids[-(self.max_tokens // 4) :]
        if len(token_ids) <= self.gram or not self.max_answers:
            return
        answers = self._scopes.get(scope)
        if answers is None:
            answers = self._scopes[scope] = _Answers(History([], self.gram))
        self._scopes.move_to_end(scope)
        is_full = len(answers.young.tokens) + len(token_ids) >= self.max_tokens // 2
        if is_full or answers.num_young >= max(1, self.max_answers // 2):
            self.num_tokens -= len(answers.old.tokens) if answers.old else 0
            self.num_answers -= answers.num_old
            answers.old, answers.num_old = answers.young, answers.num_young
            if self.max_answers == 1:
                self.num_tokens -= len(answers.old.tokens)
                self.num_answers -= answers.num_old
                answers.old, answers.num_old = None, 0
            answers.young, answers.num_young = History([], self.gram), 0
        answers.young.tokens.extend(token_ids)
        answers.young.tokens.append(END_OF_ANSWER)
        answers.young.extend()
        answers.num_young += 1
        self.num_tokens += len(token_ids) + 1
        self.num_answers += 1
        while len(self._scopes) > 1 and (self.num_tokens > self.max_tokens or self.num_answers > self.max_answers):
            _, gone = self._scopes.popitem(last=False)
            self.num_tokens -= gone.num_tokens
            self.num_answers -= gone.num_young + gone.num_old

    def find(self, scope: tuple[str | None, str | None], context: list[int], depth: int) -> Match | None:
        answers = self._scopes.get(scope)
        if answers is None:
            return None
        self._scopes.move_to_end(scope)
        answers.young.extend()  # what a long answer left to be entered
        best = answers.young.find(context, depth)
        older = answers.old.find(context, depth) if answers.old else None
        if best is None or (older is not None and older.length > best.length):
            best = older
        return best if best is not None and best.tokens[best.position] != END_OF_ANSWER else None
