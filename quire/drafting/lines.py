"""What is guessed of every sequence, in plain Python.

This is the specification of `native/drafting.c`, which has the same functions (`drafting/native.py` calls them) and
chooses the same drafts in a hundredth of the time; and it runs where that is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.drafting.acceptance import Candidate, Chances, Record, choose
from quire.drafting.history import END_OF_ANSWER, Text
from quire.step_costs import DraftCosts


@dataclass(slots=True, frozen=True)
class Rules:
    """What is looked up, and how much of it is drafted at most."""

    gram: int  # the shortest match
    depth: int  # tokens of a match that are compared
    most: int  # drafts of one sequence
    factor: float  # drafts for each token that agreed
    min_chance: float  # of a draft


@dataclass(slots=True)
class Step:
    """The lines of a step in columns, and the tokens that are new in them, one line's after the other's."""

    num_decodes: int
    most: int  # drafts
    trust: float = 1.0  # of what chances promise
    keys: list[int] = field(default_factory=list)  # by which the drafts are given out
    slots: list[int] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    # Tokens that steps in flight will bring, were all their drafts right. The guess is taken to be right so far: only
    # what comes after it can still be drafted.
    num_unknown: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    expected: float = 0.0  # the answer: how many of the drafts should be right


@dataclass(slots=True)
class _Line:
    """One sequence's guess: it goes on as `source` does from `position` on, with which `num_agreed` tokens agreed."""

    text: Text
    scope: int | None
    record: Record = field(default_factory=Record)
    source: Text | None = None
    position: int = 0
    num_agreed: int = 0
    is_unanimous: bool = True

    def guess(self, most: int) -> list[int]:
        """The next tokens. Where the sequence repeats itself, the guess comes to its end and goes round."""
        assert self.source is not None
        tokens = self.source.tokens[self.position : self.position + most]
        while len(tokens) < most and self.source is self.text:
            tokens += tokens[: most - len(tokens)]
        return tokens


@dataclass(slots=True)
class _Answers:
    """Earlier answers of one scope, in two generations."""

    young: Text | None = None
    old: Text | None = None


class Lines:
    """The lines of running sequences, by slot, and the earlier answers that they may look at, by scope."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._chances = Chances()
        self._lines: dict[int, _Line] = {}
        self._answers: dict[int, _Answers] = {}

    def remember(self, scope: int, tokens: Sequence[int]) -> None:
        """Add to a scope's younger answers."""
        answers = self._answers.setdefault(scope, _Answers())
        if answers.young is None:
            answers.young = Text(self._rules.gram)
        answers.young.append(tokens)

    def age(self, scope: int) -> None:
        """A scope's younger answers become its older ones, and those are forgotten."""
        answers = self._answers.setdefault(scope, _Answers())
        answers.young, answers.old = None, answers.young

    def open(self, slot: int, scope: int | None) -> None:
        self._lines[slot] = _Line(Text(self._rules.gram), scope)

    def close(self, slot: int) -> None:
        del self._lines[slot]

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        """Take in tokens that nothing was guessed of: a prompt, or what came while nobody looked."""
        line = self._lines[slot]
        line.source = None
        line.text.append(tokens)

    def step(self, step: Step, costs: DraftCosts) -> dict[int, list[int]]:
        """Compare what is new with what was guessed, look again where it was wrong, and choose the step's drafts."""
        first = 0
        lines = [self._lines[slot] for slot in step.slots]
        for line, count in zip(lines, step.num_new, strict=True):
            new = step.new_tokens[first : first + count]
            first += count
            for token in new:
                self._compare(line, token)
            line.text.append(new)
            # Where nothing has come, it was looked up before.
            if line.source is None or (new and line.num_agreed < self._rules.gram):
                self._look_up(line)
        reached = (self._reach(line, unknown) for line, unknown in zip(lines, step.num_unknown, strict=True))
        candidates = [Candidate(i, chances) for i, chances in enumerate(reached)]
        drafts = {}
        numbers, step.expected = choose(costs, step.num_decodes, candidates, step.most, step.trust)
        for i, number in sorted(numbers.items()):
            unknown = step.num_unknown[i]
            drafts[step.keys[i]] = lines[i].guess(unknown + number)[unknown:]
        return drafts

    def _compare(self, line: _Line, token: int) -> None:
        """A guess that was wrong goes on behind the token that was: often only that one was replaced."""
        if line.source is None:
            return
        tokens = line.source.tokens
        guess = tokens[line.position] if line.position < len(tokens) else END_OF_ANSWER
        if guess == END_OF_ANSWER:
            line.source = None
            return
        is_right = guess == token
        line.record.learn(self._chances.learn(line.num_agreed, line.is_unanimous, is_right), is_right)
        line.position += 1
        line.num_agreed = line.num_agreed + 1 if is_right else 0
        line.is_unanimous &= is_right

    def _look_up(self, line: _Line) -> None:
        """The longest match wins: of equal ones the line's own, then that of a younger answer."""
        tokens, depth = line.text.tokens, self._rules.depth
        best = line.text.find(tokens, depth)
        if line.scope is not None and (answers := self._answers.get(line.scope)) is not None:
            other = answers.young.find(tokens, depth) if answers.young is not None else None
            older = answers.old.find(tokens, depth) if answers.old is not None else None
            if older is not None and (other is None or older.length > other.length):
                other = older
            is_better = other is not None and (best is None or other.length > best.length)
            if other is not None and is_better and other.text.tokens[other.position] != END_OF_ANSWER:
                best = other
        if best is not None:
            line.source, line.position, line.num_agreed, line.is_unanimous = best

    def _reach(self, line: _Line, num_unknown: int) -> list[float]:
        """The chance that each token after those in flight is reached and right. As long as adaptive length allows."""
        if line.source is None:
            return []
        rules = self._rules
        most = num_unknown + min(rules.most, max(1, int(rules.factor * line.num_agreed)))
        if line.source is not line.text:  # an earlier answer, which may end before that
            guess = line.source.tokens[line.position : line.position + most]
            most = guess.index(END_OF_ANSWER) if END_OF_ANSWER in guess else len(guess)
        ratio = line.record.ratio
        return self._chances.reach(line.num_agreed, line.is_unanimous, ratio, most, rules.min_chance)[num_unknown:]
