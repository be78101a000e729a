"""What a request gives back, under the names that vLLM's users read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n continuations."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort, error or banned
    stop_reason: int | str | None = None  # the stop string or stop token that ended it; None for eos
    error: str | None = None  # what went wrong, where finish_reason is error or banned
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds, and counts, of one request so far. None: has not happened yet."""

    arrival_s: float  # on the engine's monotonic clock
    queue_s: float | None = None  # from arrival until it first ran
    first_token_s: float | None = None  # from arrival to its first token
    inter_token_s: float | None = None  # mean over the output tokens after the first
    total_s: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    cache_outcome: str | None = None  # why the prompt found as many cached tokens as it did


@dataclass(slots=True)
class RequestOutput:
    """A request's state as of now, or at its end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0  # prompt tokens that this request added to the prefix cache
    lora_request: None = None
    kv_transfer_params: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = field(default=None, repr=False)
