"""How likely drafts are accepted, and how many are worth verifying.

What a sequence samples is compared with what was guessed whether or not the guess was verified, so learning that drafts
miss costs no step anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from quire.step_costs import DraftCosts, rounded

# By place, the chance that a guess is right, before anything was seen: between those of a small model's free texts and
# of its edits, extractions and quotes. Uneven places are of guesses that all earlier places agree with.
_DISPUTED = (0.08, 0.3, 0.3, 0.42, 0.5, 0.6, 0.7, 0.7, 0.83, 0.92)
_UNANIMOUS = (0.08, 0.3, 0.4, 0.5, 0.6, 0.6, 0.65, 0.75, 0.85, 0.95)
FIRST_CHANCES = tuple(chance for both in zip(_DISPUTED, _UNANIMOUS, strict=True) for chance in both)
FIRST_WEIGHT, MAX_WEIGHT = 8, 200  # guesses that a first chance, and a learned one at most, counts as
MAX_CHANCE = 0.99
MIN_GAIN = 1.05  # of tokens a second: less than that, and noise would decide
_MIN_GAIN_OF_ALL = 1.1  # of the time that a batch takes: sequences that gain alike on average do not end at once
MAX_LOOKED_AT = 512  # drafts that one step considers
RECORD_MEMORY, RECORD_PRIOR = 0.9, 0.2  # of a request's own record, at each guess
_TRUST_MEMORY, _TRUST_PRIOR = 0.95, 8.0  # at each step with drafts; tokens
_FIRST_TRUST = 0.7  # before any were run: whoever copies gains enough all the same, and free text tries less in vain
_TRUST_RETURN = 0.998  # at each step without
_MEAN_FIRST_WEIGHT, _MEAN_MAX_WEIGHT = 4, 32  # observations


class Chances:
    """The chance that a guess is right, by how many tokens agreed before it and whether all earlier places agree."""

    __slots__ = ("_chances", "_weights")  # by place

    def __init__(self) -> None:
        self._chances = [*FIRST_CHANCES]
        self._weights = [FIRST_WEIGHT] * len(self._chances)

    def of(self, num_agreed: int, is_unanimous: bool) -> float:
        return self._chances[_place(num_agreed, is_unanimous)]

    def reach(self, num_agreed: int, is_unanimous: bool, ratio: float, most: int, at_least: float) -> list[float]:
        """The chances that the first guess is right, that the first two are, and so on, as long as they are worth
        looking at. ratio: how much more often than others this request's guesses are right. It tells of the first one
        only: if that is right, how many agree tells more than what the request did before."""
        found = []
        chance = 1.0
        for agreed in range(num_agreed, num_agreed + most):
            chance *= min(MAX_CHANCE, ratio * self._chances[_place(agreed, is_unanimous)])
            ratio = 1.0
            if chance < at_least:
                break
            found.append(chance)
        return found

    def learn(self, num_agreed: int, is_unanimous: bool, is_right: bool) -> float:
        """Returns the chance as it was before."""
        place = _place(num_agreed, is_unanimous)
        before = self._chances[place]
        if self._weights[place] < MAX_WEIGHT:
            self._weights[place] += 1
        self._chances[place] += (is_right - before) / self._weights[place]
        return before


def _place(num_agreed: int, is_unanimous: bool) -> int:
    """One place for each length up to 7, then for 8 to 15, and for more."""
    step = num_agreed if num_agreed < 8 else 8 if num_agreed < 16 else 9
    return 2 * step + is_unanimous


class Record:
    """One request's own part: whether its guesses are right more or less often than those of all requests. Fades."""

    __slots__ = ("_expected", "_observed")

    def __init__(self) -> None:
        self._observed = self._expected = RECORD_PRIOR / (1.0 - RECORD_MEMORY)

    def learn(self, chance: float, is_right: bool) -> None:
        self._observed = RECORD_MEMORY * self._observed + RECORD_PRIOR + is_right
        self._expected = RECORD_MEMORY * self._expected + RECORD_PRIOR + chance

    @property
    def ratio(self) -> float:
        """How much more often its guesses are right."""
        return self._observed / self._expected


class Trust:
    """Whether what was chosen is right as often as was expected, by the width of the step: of many chances, those that
    look best are often those that are overestimated."""

    def __init__(self) -> None:
        self._expected: dict[int, float] = {}  # by width
        self._accepted: dict[int, float] = {}
        self._width = 0  # of the last step with drafts

    def of(self, num_decodes: int) -> float:
        """The share of what is expected that will come."""
        width = num_decodes.bit_length()
        expected, accepted = self._expected.get(width, 0.0), self._accepted.get(width, 0.0)
        return min(1.0, (accepted + _FIRST_TRUST * _TRUST_PRIOR) / (expected + _TRUST_PRIOR))

    def chose(self, num_decodes: int, expected: float) -> None:
        """A step has drafts of which so many should be right; or none, and trust comes back, else it would be lost for
        ever."""
        width = num_decodes.bit_length()
        memory = _TRUST_MEMORY if expected else _TRUST_RETURN
        self._expected[width] = memory * self._expected.get(width, 0.0) + expected
        self._accepted[width] = memory * self._accepted.get(width, 0.0)
        self._width = width if expected else self._width

    def judged(self, num_accepted: int) -> None:
        self._accepted[self._width] = self._accepted.get(self._width, 0.0) + num_accepted


class Mean:
    """What a number was on average lately; counted as if it had been nothing a few times before."""

    __slots__ = ("_weight", "value")

    def __init__(self) -> None:
        self.value, self._weight = 0.0, _MEAN_FIRST_WEIGHT

    def learn(self, value: float) -> None:
        self._weight = min(self._weight + 1, _MEAN_MAX_WEIGHT)
        self.value += (value - self.value) / self._weight


def ends_sooner(gains: Sequence[float], added_s: float, plain_s: float, decode_s: float) -> bool:
    """Whether a batch that is waited for as a whole ends sooner with drafts. gains: the tokens that they bring to each
    sequence in a step; added_s: what they add to it; plain_s: what it takes without, and decode_s: each decode of it.

    There are as many steps as the slowest sequence needs. Of what the others gain, only their share of steps is saved
    in which they do not run any more.
    """
    fixed_s = plain_s - len(gains) * decode_s
    return plain_s + fixed_s * min(gains) + decode_s * sum(gains) >= _MIN_GAIN_OF_ALL * (plain_s + added_s)


class Candidate(NamedTuple):
    """A sequence that could have drafts: the chance that each of them is reached and right, in turn, falling."""

    key: int
    chances: list[float]


def can_pay(costs: DraftCosts, num_decodes: int, most: int) -> bool:
    """Whether any number of drafts would, were all of them right. Asked before anything is looked up."""
    drafts = 1
    while drafts <= most:
        if (num_decodes + drafts) * costs.plain_s >= MIN_GAIN * num_decodes * (costs.plain_s + costs.extra_s(drafts)):
            return True
        drafts = 2 * drafts + 1
    return False


class Choice(NamedTuple):
    """How many drafts to verify, by key, and how many of them should be right."""

    numbers: dict[int, int]
    expected: float


def choose(
    costs: DraftCosts, num_decodes: int, candidates: Iterable[Candidate], most: int, trust: float = 1.0
) -> Choice:
    """How many drafts of each candidate to verify, so that the step brings the most tokens a second.

    Drafts are taken in the order of their chances, which is the best choice for every number of them, and the number is
    the best of all: a step's cost need not grow evenly with it. trust: of what the chances promise.
    """
    best_rate, best_number, best_expected = MIN_GAIN * num_decodes / costs.plain_s, 0, 0.0
    taken: list[int] = []
    expected = 0.0
    extra_s: dict[int, float] = {}  # by number of drafts, as the costs tell numbers apart
    for chance, key in _by_chance(candidates):
        if len(taken) >= min(most, MAX_LOOKED_AT):
            break
        taken.append(key)
        expected += chance
        kind = rounded(len(taken))
        if kind not in extra_s:
            extra_s[kind] = costs.extra_s(kind)
        rate = (num_decodes + trust * expected) / (costs.plain_s + extra_s[kind])
        if rate > best_rate:
            best_rate, best_number, best_expected = rate, len(taken), expected
    numbers: dict[int, int] = {}
    for key in taken[:best_number]:
        numbers[key] = numbers.get(key, 0) + 1
    return Choice(numbers, best_expected)


def _by_chance(candidates: Iterable[Candidate]) -> Iterator[tuple[float, int]]:
    heap = [(-c.chances[0], c.key, 0, c.chances) for c in candidates if c.chances]
    heapq.heapify(heap)
    while heap:
        chance, key, depth, chances = heap[0]
        yield -chance, key
        if depth + 1 < len(chances):
            heapq.heapreplace(heap, (-chances[depth + 1], key, depth + 1, chances))
        else:
            heapq.heappop(heap)
