"""How long steps take, learnt from those that ran: so that the next one is planned when it is needed, not before.

A plan that is made early waits for the step before it, and who arrives meanwhile misses it. On a GPU that costs a new
request up to a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.plan import StepPlan

_MARGIN_S = 0.2e-3  # what neither estimate knows of: the host's clock is not the device's
_ROWS, _TOKENS = 8, 64  # steps whose sizes agree up to these count as one kind


@dataclass(slots=True)
class Estimate:
    """A mean and how far observations stray from it: the way in which TCP guesses a round trip."""

    mean_s: float
    spread_s: float

    @classmethod
    def first(cls, seconds: float) -> Estimate:
        return cls(seconds, seconds / 2)  # so that it is at least nothing: one observation proves little

    def observe(self, seconds: float) -> None:
        error = seconds - self.mean_s
        self.mean_s += error / 8
        self.spread_s += (abs(error) - self.spread_s) / 4

    @property
    def at_least_s(self) -> float:
        return self.mean_s - 2 * self.spread_s

    @property
    def at_most_s(self) -> float:
        return self.mean_s + 4 * self.spread_s


@dataclass(slots=True, frozen=True)
class StepKind:
    """What a step's time depends on, coarsely. That contexts grow is slow enough to be followed."""

    num_decodes: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepKind:
        counts = plan.spans.num_tokens
        num_decodes = counts.count(1)
        return cls(-(-num_decodes // _ROWS), -(-(sum(counts) - num_decodes) // _TOKENS))


class StepForecast:
    """Belongs to one core."""

    def __init__(self) -> None:
        self._steps: dict[StepKind, Estimate] = {}
        self._planning: Estimate | None = None

    def observe_step(self, kind: StepKind, seconds: float) -> None:
        """Of the device alone: were the host's delays learnt too, a late plan would make the next one later."""
        if known := self._steps.get(kind):
            known.observe(seconds)
        else:
            self._steps[kind] = Estimate.first(seconds)

    def observe_planning(self, seconds: float) -> None:
        """What the host does between deciding to plan a step and having submitted it."""
        if self._planning is None:
            self._planning = Estimate.first(seconds)
        else:
            # Now and then a step has no graph, or captures one. That says nothing of the next, which probably has.
            self._planning.observe(min(seconds, 3 * self._planning.mean_s))

    def free_s(self, kind: StepKind) -> float:
        """How long after a step's begin the next must be planned, so that the device does not wait. 0: at once."""
        # A step with prompts takes no less than one of its decodes alone.
        known = self._steps.get(kind) or self._steps.get(StepKind(kind.num_decodes, 0))
        if known is None or self._planning is None:
            return 0.0
        return max(0.0, known.at_least_s - self._planning.at_most_s - _MARGIN_S)
