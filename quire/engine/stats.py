"""What the engine counts, always: cheap enough never to be off.

Steps and tokens are counted by the core, requests where their text is made. Offline both are in one process;
behind a server they are in two, and each number is counted in one of them only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from quire.outputs import RequestOutput
from quire.plan import StepResult
from quire.request import FinishReason, Request, Sequence
from quire.scheduler import SequenceUpdate

# Tokens of a step, as vLLM buckets them.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True, frozen=True)
class Metric:
    """One number by its Prometheus name. `kind` is counter, gauge or histogram.

    A histogram is several metrics of one name: its cumulative counts, each with its upper bound in the label `le`
    (the last is "+Inf"), and its sum, without that label.
    """

    name: str
    kind: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class StepStats:
    """Counters since start, and the last steps for rates. Belongs to the core."""

    num_steps: int = 0
    generation_tokens: int = 0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    processors_s: float = 0.0
    busy_s: float = 0.0
    step_tokens: int = 0  # computed in all steps: prompts' and generated ones
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    # (when, tokens) of recent steps
    _recent_tokens: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))

    def on_step(self, result: StepResult, num_computed_tokens: int, updates: list[SequenceUpdate]) -> None:
        timings = result.timings
        self.num_steps += 1
        self.prepare_s += timings.prepare_s
        self.forward_s += timings.forward_s
        self.sample_s += timings.sample_s
        self.processors_s += timings.processors_s
        self.busy_s += timings.total_s
        self.step_tokens += num_computed_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_computed_tokens)] += 1
        tokens = sum([len(update.new_token_ids) for update in updates])
        self.generation_tokens += tokens
        self._recent_tokens.append((time.monotonic(), tokens))

    def tokens_per_s(self, window_s: float = 10.0) -> float:
        """Output tokens per second over the last seconds."""
        now = time.monotonic()
        recent = [(when, tokens) for when, tokens in self._recent_tokens if now - when <= window_s]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], 1e-3)


@dataclass(slots=True)
class RequestStats:
    """Counters since start. Belongs to the side that makes the text."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # sequences, by why

    def on_finished(self, output: RequestOutput) -> None:
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_prompt_tokens += output.num_cached_tokens
        for completion in output.outputs:
            self.finished[completion.finish_reason or FinishReason.ABORT.value] += 1

    def on_left(self, request: Request, seqs: list[Sequence]) -> None:
        """Count a request whose reader went away before the end."""
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_prompt_tokens += seqs[0].num_cached_tokens
        for seq in seqs:
            self.finished[(seq.finish_reason or FinishReason.ABORT).value] += 1
