"""What steps cost, learned from those that ran. One model for everyone who decides something by it.

The scheduler asks how many prompt tokens fit into a step's time, and whether swapping or computing again is cheaper.
The drafter asks what it costs to verify drafts beside a number of decodes.
The loop asks when the next step has to be planned, and whether a step leaves the host time for a capture.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.plan import StepPlan

_SMOOTHING = 0.3  # weight of the newest observation
_MIN_TOKENS_FOR_RATE = 64  # steps with fewer prompt tokens say little about the prefill rate
_MIN_COST_RATIO = 0.05  # of the old cost: one lucky step must not open the gate entirely
_MARGIN_S = 0.2e-3  # what no estimate knows of: the host's clock is not the device's
_FIRST_PREPARING_S = 0.1  # before a preparation was seen
_PREPARING = "preparing"
_ROWS, _TOKENS = 8, 64  # steps whose sizes agree up to these count as one kind
_OUTLIER = 3.0  # times what was expected: somebody else had the machine
_DRAFTS_LIKE_A_STEP = 8  # as many as cost no more than a plain step, when they are first seen
_DRAFTS_FORGOTTEN_AFTER = 2000  # steps: what drafts cost then may have changed, and costs that deter are not tried
_MAX_DRAFTED = 256  # steps in a row with drafts, before what a plain one takes is measured again


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
    """What a step's time depends on. That contexts grow is slow enough to be followed."""

    num_decodes: int
    num_prompt_tokens: int
    num_draft_tokens: int = 0

    def rounded(self) -> StepKind:
        """The kind that similar steps share."""
        return StepKind(
            -(-self.num_decodes // _ROWS) * _ROWS,
            -(-self.num_prompt_tokens // _TOKENS) * _TOKENS,
            -(-self.num_draft_tokens // _ROWS) * _ROWS,
        )


@dataclass(slots=True)
class StepLoad:
    """What a step computes, in the numbers that its time depends on."""

    num_decodes: int = 0  # sequences that run one token
    num_decode_kv_tokens: int = 0  # that those read
    num_prompts: int = 0  # sequences that run more than one
    num_prompt_tokens: int = 0
    num_prompt_kv_tokens: int = 0
    num_pairs: int = 0  # queries times keys of prompts, counted to the end of each chunk
    num_causal_pairs: int = 0  # those of them that a query sees
    num_moved_blocks: int = 0  # between device and host

    @classmethod
    def of(cls, counts: Sequence[int], starts: Sequence[int], num_moved_blocks: int = 0) -> StepLoad:
        """A step of spans with so many tokens each, after so many that have KV already."""
        load = cls(num_moved_blocks=num_moved_blocks)
        for start, count in zip(starts, counts, strict=True):
            load.add(start, count)
        return load

    def add(self, start: int, count: int) -> None:
        if count == 1:
            self.num_decodes += 1
            self.num_decode_kv_tokens += start + 1
        else:
            self.num_prompts += 1
            self.num_prompt_tokens += count
            self.num_prompt_kv_tokens += start + count
            self.num_pairs += count * (start + count)
            self.num_causal_pairs += count * start + count * (count + 1) // 2

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens


class PlanLoads:
    """Reads loads off plans, which say how many tokens a row runs and not after how many."""

    def __init__(self) -> None:
        self._computed: dict[int, int] = {}  # by row: tokens with KV once the plans so far have run

    def read(self, plan: StepPlan) -> StepLoad:
        """Plans come in the order in which they are submitted. Drafts count as if all were accepted."""
        computed, load = self._computed, StepLoad()
        for admission in plan.admitted:
            computed[admission.row] = admission.num_computed_tokens
        for row, count in zip(plan.spans.rows, plan.spans.num_tokens, strict=True):
            start = computed.get(row, 0)
            load.add(start, count)
            computed[row] = start + count
        for fork in plan.forks:
            computed[fork.row] = computed[fork.source_row]
        load.num_moved_blocks = sum(len(move.pairs) for move in plan.moves)
        return load

    def set_computed(self, row: int, num_tokens: int) -> None:
        self._computed[row] = num_tokens


@dataclass(slots=True)
class DraftCosts:
    """What drafts cost beside a number of decodes: a line with bends, since it need not grow evenly with their number,
    as where a kernel works in tiles."""

    plain_s: float  # the step without any
    more_s: float  # each draft beyond the last bend
    numbers: list[int] = field(default_factory=list)  # of drafts, at the bends, rising
    seconds: list[float] = field(default_factory=list)  # that so many add to the step, and to those around it

    def lengthen(self) -> None:
        """Beyond its ends the line goes on as steeply as it rises between them: much of what drafts cost may be the
        same for any number of them."""
        if len(self.numbers) < 2:
            return
        slope = max(0.0, (self.seconds[-1] - self.seconds[0]) / (self.numbers[-1] - self.numbers[0]))
        self.more_s = max(self.more_s, slope)
        if self.numbers[0] > 1:
            self.seconds.insert(0, max(0.0, self.seconds[0] - slope * (self.numbers[0] - 1)))
            self.numbers.insert(0, 1)

    def dearer(self, times: float) -> DraftCosts:
        """As if drafts cost so much more."""
        return DraftCosts(self.plain_s, times * self.more_s, self.numbers, [times * each for each in self.seconds])

    def extra_s(self, num_drafts: int) -> float:
        """How many seconds so many drafts add to the step, and to those around it."""
        number = rounded(num_drafts)
        at = bisect_right(self.numbers, number)
        below, below_s = (self.numbers[at - 1], self.seconds[at - 1]) if at else (0, 0.0)
        if at == len(self.numbers):
            return below_s + (number - below) * self.more_s
        above, above_s = self.numbers[at], self.seconds[at]
        return below_s + (above_s - below_s) * (number - below) / (above - below)


@dataclass(slots=True)
class _PlainCost:
    """What a step of so many decodes alone takes, with the host's part."""

    seconds: float
    num_drafted: int = 0  # steps of as many that had drafts, since


@dataclass(slots=True, frozen=True)
class _FirstDrafted:
    """The first of several steps in a row that have drafts."""

    kind: StepKind
    extra_s: float  # what is known so far


class StepCosts:
    """Learns two things from each step: how long steps of its kind take, and what a prompt token costs.

    A step with decodes takes about baseline + prompt tokens * cost. The baseline is the average of decode-only steps,
    and the cost is what mixed steps took above it, per prompt token. This corrects itself: whatever the error of the
    baseline, a step that took the time asked for gives the same number of tokens again, a longer one fewer, a shorter
    one more. So it also follows costs that the formula leaves out, such as longer contexts.
    """

    def __init__(self, *, prefill_tokens_per_s: float, plans_ahead: bool = False) -> None:
        """plans_ahead: whether a step is planned while the one before it runs."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._plans_ahead = plans_ahead
        self.mixed_tokens_per_s: float | None = None  # prompt tokens a second, decodes beside them included
        self._rate_is_a_guess = True
        self._baseline_s: float | None = None
        self._token_s = 1.0 / prefill_tokens_per_s
        self._steps: dict[StepKind, Estimate] = {}
        self._host: dict[str, Estimate] = {}
        self._num_steps = 0
        self._plain: dict[int, _PlainCost] = {}  # by number of decodes, rounded
        # By width, then by number of drafts, rounded: the seconds that these add, and the step when that was seen.
        self._drafts_s: dict[int, dict[int, tuple[float, int]]] = {}
        self._first_drafted: _FirstDrafted | None = None  # of the steps in a row that were observed last
        self._early_s = 0.0  # what the drafts that come next have cost already
        self._is_late = False  # whether the step that is observed next could not be planned ahead

    # -- learning

    def observe_step(
        self,
        kind: StepKind,
        *,
        device_s: float,
        total_s: float,
        interval_s: float | None = None,
        precedes_drafts: bool = False,
    ) -> None:
        """A step that has ended. device_s: without the host's delays; were they learned too, a late plan would make the
        next one later. interval_s: since the step before ended, with the host's part; None where nobody knows.
        precedes_drafts: whether the next step has drafts and was planned before this one ended."""
        if not (kind.num_decodes or kind.num_prompt_tokens):
            return  # it only waited for blocks to move
        rounded = kind.rounded()
        if known := self._steps.get(rounded):
            known.observe(device_s)
        else:
            self._steps[rounded] = Estimate.first(device_s)
        if total_s > 0:
            self._num_steps += 1
            self._learn_draft_cost(kind, interval_s or total_s, precedes_drafts)
            if kind.num_prompt_tokens or not kind.num_draft_tokens:
                self._learn_token_cost(kind.num_decodes, kind.num_prompt_tokens + kind.num_draft_tokens, total_s)

    def _learn_draft_cost(self, kind: StepKind, seconds: float, precedes_drafts: bool) -> None:
        """Where steps are planned ahead, one that follows drafts cannot be: it takes longer by the host's part. So a
        step with drafts costs what it takes itself if it follows another. The first of several in a row was planned
        beside the step before; in its stead the plain step after the last one takes longer."""
        first, early_s, is_late = self._first_drafted, self._early_s, self._is_late
        self._is_late = self._plans_ahead and kind.num_draft_tokens > 0
        plain = self._plain.get(rounded(kind.num_decodes))
        later_s = 0.0 if plain is None else seconds - plain.seconds
        self._early_s = 0.0
        if kind.num_prompt_tokens:
            self._first_drafted = None
        elif kind.num_draft_tokens:
            if self._plans_ahead and not is_late:
                self._first_drafted = _FirstDrafted(kind, later_s + early_s)
            else:
                self._learn_extra(kind, later_s)
        elif first is not None:
            self._learn_extra(first.kind, first.extra_s + later_s)
            self._first_drafted = None
        elif is_late:
            return  # behind drafts beside prompts, of which nobody knows what they cost
        elif precedes_drafts:
            self._early_s = later_s
        elif plain is None:
            self._plain[rounded(kind.num_decodes)] = _PlainCost(seconds)
        else:
            plain.seconds = _smooth(plain.seconds, min(seconds, _OUTLIER * plain.seconds))
            plain.num_drafted = 0

    def _learn_extra(self, kind: StepKind, extra_s: float) -> None:
        """Drafts have cost so much."""
        costs = self._known_costs(kind.num_decodes)
        if costs is None:
            return
        self._plain[rounded(kind.num_decodes)].num_drafted += 1
        drafts = rounded(kind.num_draft_tokens)
        table = self._drafts_s.setdefault(_width(kind.num_decodes), {})
        known_s = table[drafts][0] if drafts in table else None
        most_s = _OUTLIER * max(costs.extra_s(drafts), costs.plain_s / 4)
        if known_s is None:  # the more there are, the less is known of what they may cost
            most_s = max(most_s, costs.plain_s * drafts / _DRAFTS_LIKE_A_STEP)
        table[drafts] = (_smooth(known_s, min(max(0.0, extra_s), most_s)), self._num_steps)

    def observe_planning(self, seconds: float, *, has_prompts: bool, num_drafts: int = 0) -> float:
        """The host's time between deciding to plan a step and having submitted it. Returns what of it was unusual, as
        where a step was captured."""
        work = f"planning {_width(num_drafts)} digits of drafts" if num_drafts else _planning(has_prompts)
        known = self._host.get(work)
        unusual_s = 0.0 if known is None else max(0.0, seconds - _OUTLIER * known.mean_s)
        self._observe_host(work, seconds)
        return unusual_s

    def observe_preparing(self, seconds: float) -> None:
        """The host's time for something that spares later steps time, such as a capture."""
        self._observe_host(_PREPARING, seconds)

    def _observe_host(self, work: str, seconds: float) -> None:
        if known := self._host.get(work):
            # Now and then a step has no graph, or captures one. That says nothing of the next, which probably has.
            known.observe(min(seconds, _OUTLIER * known.mean_s))
        else:
            self._host[work] = Estimate.first(seconds)

    def _learn_token_cost(self, num_decodes: int, num_prompt_tokens: int, total_s: float) -> None:
        if not num_prompt_tokens:
            self._baseline_s = _smooth(self._baseline_s, total_s)
            return
        if num_prompt_tokens >= _MIN_TOKENS_FOR_RATE:
            # Beside decodes, prompts have only what these leave of the step; of a wrong baseline's worth at most 3/4.
            own_s = max(total_s - (self._baseline_s or 0.0), total_s / 4) if num_decodes else total_s
            rate = num_prompt_tokens / own_s
            self.mixed_tokens_per_s = _smooth(self.mixed_tokens_per_s, num_prompt_tokens / total_s)
            # The first measurement replaces the guess, which may be wrong by orders of magnitude.
            self.prefill_tokens_per_s = rate if self._rate_is_a_guess else _smooth(self.prefill_tokens_per_s, rate)
            if self._rate_is_a_guess and not num_decodes:
                self._token_s = 1.0 / rate
            self._rate_is_a_guess = False
        if num_decodes:
            if self._baseline_s is not None and total_s < self._baseline_s:
                self._baseline_s = total_s  # fewer decodes, or shorter ones, than when it was measured
            token_s = (total_s - (self._baseline_s or 0.0)) / num_prompt_tokens
            self._token_s = _smooth(self._token_s, max(token_s, self._token_s * _MIN_COST_RATIO))

    # -- asking

    def prompt_tokens_within(self, seconds: float) -> int:
        """How many prompt tokens a step that also decodes may take, to end within so many seconds."""
        return max(0, int((seconds - self.decodes_s) / self._token_s))

    @property
    def decodes_s(self) -> float:
        """About how long a step takes that only decodes; 0 while nothing is known."""
        return self._baseline_s or 0.0

    def draft_costs(self, num_decodes: int) -> DraftCosts | None:
        """What drafts would cost beside so many decodes; None while no step of these alone was seen, or for too long.
        Between numbers of drafts that were seen it is a line; beyond them, each draft costs as much as a prompt's
        token."""
        plain = self._plain.get(rounded(num_decodes))
        return None if plain is None or plain.num_drafted > _MAX_DRAFTED else self._known_costs(num_decodes)

    def _known_costs(self, num_decodes: int) -> DraftCosts | None:
        plain = self._plain.get(rounded(num_decodes))
        if plain is None:
            return None
        costs = DraftCosts(plain.seconds, 1.0 / self.prefill_tokens_per_s)
        if self._drafts_s:
            width = _width(num_decodes)
            table = self._drafts_s[min(self._drafts_s, key=lambda known: abs(known - width))]
            for number in sorted(table):
                seconds, seen = table[number]
                if self._num_steps - seen > _DRAFTS_FORGOTTEN_AFTER:
                    del table[number]
                else:
                    costs.numbers.append(number)
                    costs.seconds.append(seconds)
            costs.lengthen()
        return costs

    def decode_s(self, num_decodes: int) -> float:
        """About how much longer a step of so many decodes takes for each of them: as much as a prompt's token at least,
        else by what steps of half as many or fewer take. At most its share; 0 while nothing is known."""
        rows = rounded(num_decodes)
        if (plain := self._plain.get(rows)) is None:
            return 0.0
        decode_s = 1.0 / self.prefill_tokens_per_s
        if narrower := [known for known in self._plain if 2 * known <= rows]:
            known = max(narrower)
            decode_s = max(decode_s, (plain.seconds - self._plain[known].seconds) / (rows - known))
        return min(decode_s, plain.seconds / rows)

    def drafts_s(self, num_decodes: int, num_drafts: int) -> float:
        """About how many seconds so many drafts add to a step of so many decodes, and to the time until the next."""
        costs = self.draft_costs(num_decodes)
        return 0.0 if costs is None else costs.extra_s(num_drafts)

    def step_s(self, kind: StepKind) -> float:
        """About how long a step takes: as its kind did before, else by its prompt tokens; 0 while nothing is known."""
        if known := self._steps.get(kind.rounded()):
            return known.mean_s
        return 0.0 if self._rate_is_a_guess else kind.num_prompt_tokens / self.prefill_tokens_per_s

    def free_s(self, kind: StepKind, *, has_prompts: bool) -> float:
        """How long after a step of this kind began the next must be planned, so that the device does not wait. 0: at
        once. has_prompts: whether the next step contains prompt tokens."""
        # A step with prompts takes no less than one of its decodes alone.
        known = self._steps.get(kind.rounded()) or self._steps.get(StepKind(kind.num_decodes, 0).rounded())
        planning = self._host.get(_planning(has_prompts))
        if known is None or planning is None:
            return 0.0
        return max(0.0, known.at_least_s - planning.at_most_s - _MARGIN_S)

    @property
    def preparing_s(self) -> float:
        """How long a piece of preparation takes at most."""
        known = self._host.get(_PREPARING)
        return _FIRST_PREPARING_S if known is None else known.at_most_s


def _planning(has_prompts: bool) -> str:
    """A step with prompts takes longer to plan."""
    return "planning prompts" if has_prompts else "planning decodes"


def _width(count: int) -> int:
    """Steps of half or twice as many cost about the same beside what they compute."""
    return count.bit_length()


def rounded(count: int) -> int:
    """Up, to four binary digits: small counts, where a token more or less shows in a kernel's tiles, stay apart."""
    shift = max(0, (count - 1).bit_length() - 4) if count else 0
    return -(-count // (1 << shift)) << shift


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
