"""What SchedulerConfig refuses."""

from __future__ import annotations

import dataclasses

import pytest

from quire.errors import ConfigError
from quire.scheduler import SchedulerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1"),
        ({"max_num_batched_tokens": 7}, r"\(7\) must be >= max_num_seqs \(8\)"),
        ({"max_model_len": 1}, "max_model_len must be >= 2"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold"),
        ({"target_step_ms": 0.0}, "target_step_ms"),
        ({"target_step_ms": float("nan")}, "target_step_ms"),
        ({"policy": "lifo"}, "policy must be one of fcfs, priority, got 'lifo'"),
        ({"preemption": "never"}, "preemption must be one of auto, recompute, swap"),
        ({"priority_ageing_s": 0.0}, "priority_ageing_s"),
        ({"swap_bytes_per_s": float("inf")}, "swap_bytes_per_s"),
        ({"prefill_tokens_per_s": -1.0}, "prefill_tokens_per_s"),
        ({"kv_bytes_per_block": 0}, "kv_bytes_per_block"),
        ({"prompt_token_weight": 0.0}, "prompt_token_weight"),
        ({"output_token_weight": float("inf")}, "output_token_weight"),
        ({"enable_chunked_prefill": False, "target_step_ms": 5.0}, "target_step_ms splits prompts"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 5}, "long_prefill_token_threshold splits"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    good = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100}
    SchedulerConfig(**good)
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{**good, **fields})


def test_it_is_frozen() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 9  # type: ignore[misc]
