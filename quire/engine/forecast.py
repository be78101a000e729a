"""How long steps take, learnt from those that ran: so that the next one is planned when it is needed, not before.

A plan that is made early waits for the step before it, and who arrives meanwhile misses it. On a GPU that costs a new
request up to a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.plan import StepPlan

_MARGIN_S = 0.2e-3  # what neither estimate knows of: the host's clock is not the device's
_FIRST_PREPARING_S = 0.1  # before one was seen
_PREPARING = "preparing"
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
    """What a step's time depends on, rounded up. That contexts grow is slow enough to be followed."""

    num_decodes: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepKind:
        counts = plan.spans.num_tokens
        num_decodes = counts.count(1)
        num_tokens = sum(counts) - num_decodes
        return cls(-(-num_decodes // _ROWS) * _ROWS, -(-num_tokens // _TOKENS) * _TOKENS)


class StepForecast:
    """Belongs to one core."""

    def __init__(self) -> None:
        self._steps: dict[StepKind, Estimate] = {}
        self._host: dict[str, Estimate] = {}

    def observe_step(self, kind: StepKind, seconds: float) -> None:
        """Of the device alone: were the host's delays learnt too, a late plan would make the next one later."""
        if known := self._steps.get(kind):
            known.observe(seconds)
        else:
            self._steps[kind] = Estimate.first(seconds)

    def observe_planning(self, seconds: float, *, has_prompts: bool) -> None:
        """What the host does between deciding to plan a step and having submitted it."""
        self._observe_host(_planning(has_prompts), seconds)

    def observe_preparing(self, seconds: float) -> None:
        """What the host does once, so that later steps are spared it."""
        self._observe_host(_PREPARING, seconds)

    def _observe_host(self, work: str, seconds: float) -> None:
        if known := self._host.get(work):
            # Now and then a step has no graph, or captures one. That says nothing of the next, which probably has.
            known.observe(min(seconds, 3 * known.mean_s))
        else:
            self._host[work] = Estimate.first(seconds)

    def free_s(self, kind: StepKind, *, has_prompts: bool) -> float:
        """How long after a step's begin the next must be planned, so that the device does not wait. 0: at once.

        has_prompts: the next.
        """
        # A step with prompts takes no less than one of its decodes alone.
        known = self._steps.get(kind) or self._steps.get(StepKind(kind.num_decodes, 0))
        planning = self._host.get(_planning(has_prompts))
        if known is None or planning is None:
            return 0.0
        return max(0.0, known.at_least_s - planning.at_most_s - _MARGIN_S)

    def step_s(self, kind: StepKind) -> float | None:
        """How long a step of this kind takes; None where none was seen."""
        known = self._steps.get(kind)
        return None if known is None else known.mean_s

    @property
    def preparing_s(self) -> float:
        """How long a piece of preparation takes at most."""
        known = self._host.get(_PREPARING)
        return _FIRST_PREPARING_S if known is None else known.at_most_s


def _planning(has_prompts: bool) -> str:
    """A step with prompts takes longer to plan."""
    return "planning prompts" if has_prompts else "planning decodes"
