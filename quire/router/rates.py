"""What shows of replicas from outside: how fast they compute prompts, and how much they had to compute lately.

A prompt is timed from when its replica could begin with it to its first token.

Replicas of one model are alike until they show otherwise. A single time says little: it depends on what ran beside the
prompt, on other programs on the machine, on how many prompts shared a step. So a replica counts as being as fast as the
others unless it differs from them by more than such things explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Chosen in `quire bench router --simulate`, with two and four cores, four and eight servers, a slow one and none. Only
# _ALIKE matters much there: at 1.5 first tokens come as early as at 2, while at 3 a server three times as slow is found
# out too late. Half or twice the other numbers changes no mean by more than 3 %.
_NUM_TIMED = 32  # prompts that a replica's rate is about
_MIN_TIMED = 8  # before them it has no rate of its own
_ALIKE = 2.0  # times faster or slower than the others: as much as chance explains
_NUM_RECENT = 64  # prompts for each replica: those are meant by lately
_NUM_GRANTED = 16  # prompts that each replica counts as having had


@dataclass(slots=True)
class Timed:
    """Sums over prompts, of which older ones count less. Not a mean of rates: prompts that are computed in one step end
    together, the first after all of its time and the others after none."""

    num_tokens: float = 0.0
    seconds: float = 0.0
    num_prompts: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        keep = 1 - 1 / _NUM_TIMED
        self.num_tokens = keep * self.num_tokens + num_tokens
        self.seconds = keep * self.seconds + seconds
        self.num_prompts = keep * self.num_prompts + 1

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Rates:
    """Prefill rates, by the bits of replicas."""

    def __init__(self) -> None:
        self._timed: dict[int, Timed] = {}

    def observe(self, bit: int, num_tokens: int, seconds: float) -> None:
        self._timed.setdefault(bit, Timed()).add(num_tokens, seconds)

    def forget(self, bit: int) -> None:
        self._timed.pop(bit, None)

    def of(self, told: Mapping[int, float | None], first: float) -> dict[int, float]:
        """Tokens a second of these replicas, each of which tells a rate of its own or None: as they show, or, of one
        that has not shown enough yet, in the proportion that it tells. first: where nothing is known of any."""
        timed = {bit: one for bit, one in self._timed.items() if bit in told and one.seconds > 0}
        shown = {bit: one.tokens_per_s for bit, one in timed.items() if one.num_prompts >= _MIN_TIMED}
        said = {bit: rate for bit, rate in told.items() if rate}
        times = _times_the_others(said) | _times_the_others(shown)
        odd = {bit for bit, ratio in times.items() if not 1 / _ALIKE < ratio < _ALIKE}
        usual_said = _mean([rate for bit, rate in said.items() if bit not in odd] or list(said.values()) or [first])
        alike = [one for bit, one in timed.items() if bit not in odd] or list(timed.values())
        usual = sum(one.num_tokens for one in alike) / sum(one.seconds for one in alike) if alike else usual_said
        return {
            bit: usual if bit not in odd else shown[bit] if bit in shown else usual * said[bit] / usual_said
            for bit in told
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _times_the_others(rates: Mapping[int, float]) -> dict[int, float]:
    """How many times as fast as the others' mean each one is."""
    total, num_others = sum(rates.values()), len(rates) - 1
    return {bit: rate * num_others / max(total - rate, 1e-9) for bit, rate in rates.items()} if num_others > 0 else {}


class RecentWork:
    """Tokens that replicas were given to compute, of the last prompts, of which older ones count less."""

    def __init__(self) -> None:
        self._num_tokens: dict[int, float] = {}  # by the bit of a replica
        self._num_prompts = 0.0  # of all replicas together

    def add(self, bit: int, num_tokens: int, num_replicas: int) -> None:
        keep = 1 - 1 / (_NUM_RECENT * num_replicas)
        for one in self._num_tokens:
            self._num_tokens[one] *= keep
        self._num_tokens[bit] = self._num_tokens.get(bit, 0.0) + num_tokens
        self._num_prompts = keep * self._num_prompts + 1

    def forget(self, bit: int) -> None:
        self._num_tokens.pop(bit, None)

    def shares(self, rates: Mapping[int, float]) -> dict[int, float]:
        """How much of the work each replica had, whose prefill rates are given by their bits: 1 is the average. A few
        prompts of each are taken for granted, so that the first ones are not all that a replica is judged by."""
        busy_s = {bit: self._num_tokens.get(bit, 0.0) / rate for bit, rate in rates.items()}
        mean_s = _mean(list(busy_s.values()))
        if not mean_s:
            return dict.fromkeys(rates, 1.0)
        granted_s = _NUM_GRANTED * mean_s * len(rates) / self._num_prompts
        return {bit: (seconds + granted_s) / (mean_s + granted_s) for bit, seconds in busy_s.items()}
