"""How many prompt tokens a step may take, learnt from what steps cost."""

from __future__ import annotations

_SMOOTHING = 0.3  # weight of the newest observation
_MIN_TOKENS_FOR_RATE = 64  # steps with fewer prompt tokens say little about the prefill rate
_MIN_COST_RATIO = 0.05  # of the old cost: one lucky step must not open the gate entirely


class StepCosts:
    """Learns from each step's time and tokens what a prompt token costs, alone and on top of decodes.

    A step with decodes takes about baseline + prompt tokens * cost. The baseline is the average of decode-only steps.
    The cost is what mixed steps took above it, per prompt token. The estimate corrects itself: whatever the error of
    the baseline, a step that took the target gives the same allowance again, a longer one a smaller, a shorter one a
    larger. So it also follows costs that the formula leaves out, such as longer contexts.
    """

    def __init__(self, *, target_step_s: float | None, prefill_tokens_per_s: float, block_size: int) -> None:
        self.target_s = target_step_s  # None: prompts take what the step's budget has
        self._block_size = block_size
        self._baseline_s: float | None = None
        self._cost_s = 1.0 / prefill_tokens_per_s
        self._rate_is_a_guess = True
        self.prefill_tokens_per_s = prefill_tokens_per_s

    def observe(self, num_decodes: int, num_prefill_tokens: int, total_s: float) -> None:
        """One finished step."""
        if total_s <= 0:
            return
        if not num_prefill_tokens:
            self._baseline_s = _smooth(self._baseline_s, total_s)
            return
        if num_prefill_tokens >= _MIN_TOKENS_FOR_RATE:
            # Beside decodes, prompts have only what these leave of the step; of a wrong baseline's worth at most 3/4.
            own_s = max(total_s - (self._baseline_s or 0.0), total_s / 4) if num_decodes else total_s
            rate = num_prefill_tokens / own_s
            # The first measurement replaces the guess, which may be wrong by orders of magnitude.
            self.prefill_tokens_per_s = rate if self._rate_is_a_guess else _smooth(self.prefill_tokens_per_s, rate)
            if self._rate_is_a_guess and not num_decodes:
                self._cost_s = 1.0 / rate
            self._rate_is_a_guess = False
        if num_decodes:
            if self._baseline_s is not None and total_s < self._baseline_s:
                self._baseline_s = total_s  # fewer decodes, or shorter ones, than when it was measured
            cost = (total_s - (self._baseline_s or 0.0)) / num_prefill_tokens
            self._cost_s = _smooth(self._cost_s, max(cost, self._cost_s * _MIN_COST_RATIO))

    def prompts_s(self, num_tokens: int) -> float:
        """About how long so many prompt tokens take; 0 while nothing is known."""
        return 0.0 if self._rate_is_a_guess else num_tokens / self.prefill_tokens_per_s

    def allowance(self, num_decodes: int) -> int | None:
        """Prompt tokens for a step with so many decodes; None: no limit. One block at least: prompts never starve."""
        if self.target_s is None or not num_decodes:
            return None
        spare_s = self.target_s - (self._baseline_s or 0.0)
        return max(self._block_size, int(spare_s / self._cost_s))


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
