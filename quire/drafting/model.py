"""How many tokens the executor's own draft model shall guess. Which they are, only the executor knows."""

from __future__ import annotations

from quire.drafting.acceptance import Candidate, can_pay, choose, ends_sooner
from quire.request import Sequence
from quire.scheduler import Drafter
from quire.speculation import SpeculativeConfig
from quire.step_costs import StepCosts

_FIRST_CHANCE = 0.7
_MEMORY = 0.9  # of a chance, at each draft that was judged
_RETURN = 0.002  # of the way back to the first chance, with each step without a draft: else a miss would be for ever
_MAX_PROMPT_SHARE = 4  # a draft model computes the prompt once more: not for an answer of a quarter of its length


class ModelDrafter(Drafter):
    """Lets the executor draft where it has paid so far."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts, *, max_position: int) -> None:
        self._costs = costs
        self._most = config.num_speculative_tokens
        self._max_position = max_position
        self._chance = _FIRST_CHANCE  # of all requests, with which a new one begins
        self._chances: dict[int, float] = {}  # by seq_id
        self._begun: set[int] = set()  # whose prompt the draft model has computed

    def draft(self, running: list[Sequence], most: int, *, ends_together: bool = False) -> dict[int, int]:
        decoding = [
            seq
            for seq in running
            if seq.num_computed_tokens == len(seq.token_ids) + seq.num_pending_tokens - 1
            and not seq.num_unverified_drafts  # its last token may be in flight: the executor has it
        ]
        self._chance += _RETURN * (_FIRST_CHANCE - self._chance)
        if most <= 0 or not decoding:
            return {}
        costs = self._costs.draft_costs(len(decoding))
        if costs is None or not can_pay(costs, len(decoding), min(most, len(decoding) * self._most)):
            return {}
        candidates = []
        for seq in decoding:
            if len(seq.token_ids) + self._most > self._max_position or not self._is_worth_a_prompt(seq):
                continue
            chance = self._chances.get(seq.seq_id, self._chance)
            chance += _RETURN * (_FIRST_CHANCE - chance)
            self._chances[seq.seq_id] = chance
            candidates.append(Candidate(seq.seq_id, [chance ** (depth + 1) for depth in range(self._most)]))
        chosen = choose(costs, len(decoding), candidates, most).numbers
        if ends_together and len(decoding) > 1:
            gains = [0.0] * (len(decoding) - len(candidates))
            gains += [sum(each.chances[: chosen.get(each.key, 0)]) for each in candidates]
            added_s = costs.extra_s(sum(chosen.values()))
            if not ends_sooner(gains, added_s, costs.plain_s, self._costs.decode_s(len(decoding))):
                return {}
        self._begun.update(chosen)
        return chosen

    def _is_worth_a_prompt(self, seq: Sequence) -> bool:
        return seq.seq_id in self._begun or len(seq.token_ids) <= _MAX_PROMPT_SHARE * (seq.max_len - len(seq.token_ids))

    def judged(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Drafts behind the first wrong one say nothing."""
        own = self._chances.get(seq.seq_id, self._chance)
        for is_right in [True] * num_accepted + [False] * (num_accepted < num_drafts):
            own = _MEMORY * own + (1 - _MEMORY) * is_right
            self._chance += (is_right - self._chance) / 100
        self._chances[seq.seq_id] = own

    def ended(self, seq: Sequence) -> None:
        self._chances.pop(seq.seq_id, None)
        self._begun.discard(seq.seq_id)
