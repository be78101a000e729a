"""Drafts out of text that was there before: in the request itself (ngram), and in earlier answers too (suffix)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.drafting.acceptance import Mean, Trust, can_pay, ends_sooner
from quire.drafting.answers import AnswerCache, Scope
from quire.drafting.lines import Lines, Rules, Step
from quire.drafting.native import NativeLines, is_built
from quire.request import Sequence
from quire.scheduler import Drafter
from quire.speculation import SpeculativeConfig
from quire.step_costs import DraftCosts, StepCosts

_SUFFIX_GRAM = 2  # the shortest match that suffix looks for
_MIN_CHANCE = 0.02  # of an ngram's draft: none so unlikely was ever worth its time
_MAX_FOLLOWED = 64  # new tokens of a line; of more, the guess is not compared with them
_MAX_ENTERED = 8192  # tokens that one step enters beside those, so that none waits for a long prompt, nor for many
# Drafts of one step where nobody knows yet what so many cost: at most so many; or for each decode; or times what was
# seen.
_MIN_TRIED, _TRIED_PER_DECODE, _TRIED_FACTOR = 16, 2, 2
_LOOK_SHARE = 0.005  # of a step's time that looking in vain may take
_GAIN_SHARE = 0.1  # of the time that drafts have spared: looking in vain may take that, too, but no more than a step's
_MAX_REST = 32  # steps without a look
_CAUTION = 1.2  # times what drafts cost, where others wait for a longer step


@dataclass(slots=True)
class _Opened:
    """A sequence whose tokens are looked at."""

    slot: int
    scope: Scope | None  # of the answers that it may read
    num_seen: int = 0  # of its tokens
    gain: Mean = field(default_factory=Mean)  # tokens that drafts bring in a step, were they run in each


class LookupDrafter(Drafter):
    """Guesses that a sequence goes on as it, or an earlier answer, went on where its last tokens stood before."""

    def __init__(
        self, config: SpeculativeConfig, costs: StepCosts, *, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """clock: in seconds, by which looking is kept cheap."""
        self._costs = costs
        self._clock = clock
        most = config.num_speculative_tokens
        if config.method == "suffix":
            factor, min_chance = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
            rules = Rules(_SUFFIX_GRAM, config.suffix_decoding_max_tree_depth, most, factor, min_chance)
        else:
            rules = Rules(config.prompt_lookup_min, config.prompt_lookup_max, most, float(most), _MIN_CHANCE)
        self._most = most
        self._lines = NativeLines(rules) if is_built() else Lines(rules)
        self._answers: AnswerCache | None = None
        if config.method == "suffix" and config.suffix_decoding_max_cached_requests:
            self._answers = AnswerCache(self._lines, rules.gram, config.suffix_decoding_max_cached_requests)
        self._opened: dict[int, _Opened] = {}  # by seq_id
        self._free_slots: list[int] = []
        self._num_rests = 0  # steps until the next look
        self._num_resting = 0  # sequences that ran at the last
        self._plain_s, self._token_s = 0.0, 0.0  # of the last look: a step without drafts, and each sequence's share
        self._credit_s = 0.0  # that looking in vain may take without a rest after it
        self._has_entered = False  # with the last look
        self._trust = Trust()
        self._added_s = Mean()  # by drafts, were they run in each step

    def draft(self, running: list[Sequence], most: int, *, ends_together: bool = False) -> dict[int, list[int]]:
        """Where there is nothing to draft, the next look is so many steps away that looking stays cheap; not while
        prompts are entered, which is done once, nor when half of those that ran have ended, nor while drafts have
        spared much more time than looking takes."""
        if self._num_rests and 2 * len(running) > self._num_resting:
            self._num_rests -= 1
            return {}
        started = self._clock()
        self._num_rests, self._num_resting = 0, len(running)
        decoding = [
            seq for seq in running if seq.num_computed_tokens == len(seq.token_ids) + seq.num_pending_tokens - 1
        ]
        if most <= 0 or not decoding:
            return {}
        costs = self._costs.draft_costs(len(decoding))
        if costs is None:
            return {}
        if len(decoding) > 1:
            costs = costs.dearer(_CAUTION)
        drafts: dict[int, list[int]] = {}
        self._plain_s, self._token_s = costs.plain_s, costs.plain_s / len(decoding)
        self._has_entered = False
        num_seen = costs.numbers[-1] if costs.numbers else 0
        most = min(most, max(_MIN_TRIED, _TRIED_PER_DECODE * len(decoding), _TRIED_FACTOR * num_seen))
        if can_pay(costs, len(decoding), min(most, len(decoding) * self._most)):
            drafts = self._look(decoding, most, costs, ends_together and len(decoding) > 1)
        if not drafts and not self._has_entered:
            looked_s = self._clock() - started
            if looked_s <= self._credit_s:
                self._credit_s -= looked_s
                return drafts
            self._num_rests = min(_MAX_REST, int(looked_s / (_LOOK_SHARE * costs.plain_s)))
        return drafts

    def _look(
        self, decoding: list[Sequence], most: int, costs: DraftCosts, ends_together: bool
    ) -> dict[int, list[int]]:
        opened = self._opened
        step = Step(len(decoding), most, self._trust.of(len(decoding)))
        keys, slots, num_new, num_unknown = step.keys, step.slots, step.num_new, step.num_unknown
        num_left = _MAX_ENTERED
        for seq in decoding:
            key, tokens = seq.seq_id, seq.token_ids
            own = opened.get(key)
            if own is None or len(tokens) - own.num_seen > _MAX_FOLLOWED:
                own = own or self._open(seq)
                num_left -= self._enter(own, tokens, num_left)
                if own.num_seen < len(tokens):
                    continue
            new = tokens[own.num_seen :]
            own.num_seen = len(tokens)
            step.new_tokens += new
            keys.append(key)
            slots.append(own.slot)
            num_new.append(len(new))
            num_unknown.append(seq.num_pending_tokens + seq.num_unverified_drafts)
        self._has_entered = num_left < _MAX_ENTERED
        drafts = self._lines.step(step, costs)
        if ends_together and not self._ends_sooner(step, drafts, costs):
            drafts, step.expected = {}, 0.0
        self._trust.chose(len(decoding), step.expected)
        return drafts

    def _ends_sooner(self, step: Step, drafts: dict[int, list[int]], costs: DraftCosts) -> bool:
        """Whether the batch ends sooner with drafts like these, on average over the last looks: in any one of them some
        sequences have none."""
        num_drafts = sum(map(len, drafts.values()))
        share = step.trust * step.expected / num_drafts if num_drafts else 0.0
        gains = [0.0] * (step.num_decodes - len(step.keys))  # of those that are still being entered nobody knows
        for key in step.keys:
            gain = self._opened[key].gain
            gain.learn(share * len(drafts.get(key, ())))
            gains.append(gain.value)
        self._added_s.learn(costs.extra_s(num_drafts) if num_drafts else 0.0)
        return ends_sooner(gains, self._added_s.value, costs.plain_s, self._costs.decode_s(step.num_decodes))

    def _open(self, seq: Sequence) -> _Opened:
        slot = self._free_slots.pop() if self._free_slots else len(self._opened)
        scope = None
        if self._answers is not None and not seq.request.skip_prefix_cache_read:
            scope = _scope(seq)
        self._lines.open(slot, None if scope is None or self._answers is None else self._answers.enter(scope))
        self._opened[seq.seq_id] = own = _Opened(slot, scope)
        return own

    def _enter(self, own: _Opened, tokens: list[int], most: int) -> int:
        """Enter `most` of a sequence's tokens at most; returns how many."""
        tokens = tokens[own.num_seen : own.num_seen + most]
        if tokens:
            self._lines.enter(own.slot, tokens)
            own.num_seen += len(tokens)
        return len(tokens)

    def judged(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._trust.judged(num_accepted)
        self._credit_s = min(self._plain_s, self._credit_s + _GAIN_SHARE * num_accepted * self._token_s)

    def ended(self, seq: Sequence) -> None:
        """Its answer is remembered, its guess forgotten."""
        own = self._opened.pop(seq.seq_id, None)
        if own is not None:
            self._lines.close(own.slot)
            self._free_slots.append(own.slot)
            if own.scope is not None and self._answers is not None:
                self._answers.leave(own.scope)
        if self._answers is not None:
            self._answers.add(_scope(seq), seq.output_token_ids)


def _scope(seq: Sequence) -> Scope:
    return seq.request.salt, seq.request.adapter
