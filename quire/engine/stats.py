"""What the engine counts, always: cheap enough never to be off."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from quire.outputs import RequestOutput
from quire.plan import StepTimings
from quire.scheduler import SequenceUpdate


@dataclass(slots=True, frozen=True)
class Metric:
    """One number by its Prometheus name. `kind` is counter or gauge."""

    name: str
    kind: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EngineStats:
    """Counters since start, and the last steps for rates."""

    started_s: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    busy_s: float = 0.0
    # (when, tokens) of recent steps
    _recent_tokens: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))

    def on_step(self, timings: StepTimings, updates: list[SequenceUpdate]) -> None:
        self.num_steps += 1
        self.prepare_s += timings.prepare_s
        self.forward_s += timings.forward_s
        self.sample_s += timings.sample_s
        self.busy_s += timings.total_s
        tokens = sum(len(update.new_token_ids) for update in updates)
        self.generation_tokens += tokens
        self._recent_tokens.append((time.monotonic(), tokens))

    def on_finished(self, output: RequestOutput) -> None:
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_prompt_tokens += output.num_cached_tokens
        for completion in output.outputs:
            self.finished[completion.finish_reason or "abort"] += 1

    def tokens_per_s(self, window_s: float = 10.0) -> float:
        """Output tokens per second over the last seconds."""
        now = time.monotonic()
        recent = [(when, tokens) for when, tokens in self._recent_tokens if now - when <= window_s]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], 1e-3)
