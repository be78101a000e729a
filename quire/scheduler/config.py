"""What an operator may set about scheduling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.errors import ConfigError

_CHOICES = {"policy": ("fcfs", "priority"), "preemption": ("auto", "recompute", "swap")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits, order and preemption. Checked at construction."""

    max_num_seqs: int  # rows: sequences that run at once
    max_num_batched_tokens: int  # tokens that one step computes at most
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int | None = None  # most prompt tokens of one sequence in one step
    target_step_ms: float | None = None  # steps that hold decodes give prompts only what keeps them near this
    policy: str = "fcfs"  # or "priority": the smaller number first
    priority_ageing_s: float = 60.0  # each so many seconds of waiting raise a priority by one; inf: never
    # What tenants are charged for a token, each tenant's share of the engine being counted in these.
    prompt_token_weight: float = 1.0
    output_token_weight: float = 2.0
    preemption: str = "auto"  # the cheaper one; or "recompute" or "swap"
    # What "auto" weighs. The prefill rate is only where it starts: steps refine it.
    kv_bytes_per_block: int = 2 * 1024 * 1024
    swap_bytes_per_s: float = 10e9
    prefill_tokens_per_s: float = 10_000.0
    max_in_flight: int = 1  # plans submitted before the first result is in
    # Of a pipeline. The token that a step samples comes out of the last stage, so that a sequence waits for it, and
    # each step takes its share of the sequences: together the steps in flight have all of them.
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_in_flight", "num_stages", "kv_bytes_per_block"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be >= 2 (a prompt and a token), got {self.max_model_len}")
        for name in (
            "priority_ageing_s",
            "swap_bytes_per_s",
            "prefill_tokens_per_s",
            "prompt_token_weight",
            "output_token_weight",
        ):
            value = getattr(self, name)
            if not value > 0 or (math.isinf(value) and name != "priority_ageing_s"):
                raise ConfigError(f"{name} must be a number > 0, got {value}")
        self._check_limits()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def _check_limits(self) -> None:
        # Every running sequence must be able to decode in every step, or the last ones would never get a turn.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= max_num_seqs ({self.max_num_seqs})"
                f": raise the one or lower the other"
            )
        threshold, target = self.long_prefill_token_threshold, self.target_step_ms
        if threshold is not None and threshold < 1:
            raise ConfigError(f"long_prefill_token_threshold must be >= 1 or None, got {threshold}")
        if target is not None and not (0 < target < math.inf):
            raise ConfigError(f"target_step_ms must be > 0 or None, got {target}")
        if not self.enable_chunked_prefill:
            for name, value in (("long_prefill_token_threshold", threshold), ("target_step_ms", target)):
                if value is not None:
                    raise ConfigError(f"{name} splits prompts: it needs enable_chunked_prefill=True")
