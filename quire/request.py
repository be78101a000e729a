"""A request and its sequences, as scheduler and engine see them.

A request is what a user sent. It has one or, with n > 1, several sequences: each is one line of tokens, and the unit
that is scheduled. The first sequence computes the prompt; the others are forked from it when the prompt is done.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from hashlib import blake2b
from typing import NamedTuple

from quire.errors import BadRequestError, ContextLengthError
from quire.params import SamplingSpec
from quire.pooling import PoolingSpec


class FinishReason(StrEnum):
    """Why a sequence ended. Every sequence ends exactly once, with one of these."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"
    ERROR = "error"
    BANNED = "banned"  # its own parameters left no token to sample


class SequenceState(IntEnum):
    WAITING = 0  # no row, no blocks
    RUNNING = 1  # has a row and blocks
    PREEMPTED = 2  # lost both; its tokens will be computed again
    SWAPPED = 3  # lost both; its blocks are on the host
    LOADING = 4  # has a row and blocks, whose bytes are on their way back from the host
    FINISHED = 5


class CacheOutcome(StrEnum):
    """Why a prompt found as many cached tokens as it did."""

    HIT = "hit"  # every block that could match did
    PARTIAL = "partial"  # the first blocks matched, a later one did not
    COLD = "cold"  # the first block has not been seen, or not under this salt
    EVICTED = "evicted"  # the first block that did not match had been cached once and was evicted
    TOO_SHORT = "too_short"  # no full block before the last token
    SKIPPED = "skipped"  # the request asked not to read the cache, or wants prompt logprobs
    DISABLED = "disabled"  # prefix caching is off


_next_seq_id = itertools.count(1)


def cache_scope(cache_salt: str | None, tenant: str = "") -> str | None:
    """The salt of a request's block hashes: a digest, so that nothing keeps what a client sent, however long it was.

    `tenant`: whose cached prefixes the request may find; empty where everybody shares them.
    """
    if cache_salt is None and not tenant:
        return None
    # The tenant's length comes first, so that no salt of one tenant can spell another's name.
    text = f"{len(tenant)}:{tenant}" + ("" if cache_salt is None else f"+{cache_salt}")
    # surrogatepass: a salt comes from a user's JSON, which may hold a lone surrogate.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class AdapterRef(NamedTuple):
    """An adapter that the engine has read."""

    key: str  # its name, and a digest of its files
    path: str


@dataclass(slots=True, frozen=True, kw_only=True)
class BeamSpec:
    """How the continuations of a beam search are compared. See BeamSearchParams."""

    length_penalty: float = 1.0
    early_stopping: bool | str = False  # or "never"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What a user asked for. Made by the engine, which has already checked it."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int  # resolved: never None
    end_token_ids: frozenset[int]  # the model's eos ids, empty with ignore_eos, plus stop_token_ids
    eos_token_ids: frozenset[int] = frozenset()  # those of end_token_ids that have no stop_reason of their own
    spec: SamplingSpec = field(default_factory=SamplingSpec)  # of the first sequence
    n: int = 1  # sequences
    beams: BeamSpec | None = None  # its sequences are beams: ranked together, not sampled
    pooling: PoolingSpec | None = None  # it is pooled when its prompt is computed, and ends
    priority: int = 0  # lower runs first
    arrival_s: float = 0.0
    salt: str | None = None  # of `cache_scope`; enters the hash of every cached block: other salts never match
    adapter: str | None = None  # its key: enters the hashes too
    adapter_path: str = ""  # where it can be read, should it have been dropped
    tenant: str = ""  # whose it is: tenants share the engine fairly
    skip_prefix_cache_read: bool = False
    # Where it goes on from another engine: the output tokens that its sequences have already, by index. A sequence that
    # is missing here has ended there. Empty: it begins.
    continued: dict[int, list[int]] = field(default_factory=dict)
    # Each of these points back: whoever keeps a finished request for long empties the list, so that its memory is free
    # at once and not when the garbage collector finds the circle.
    sequences: list[Sequence] = field(default_factory=list)
    is_finished: bool = False  # all of them have ended

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def check_limits(self, max_model_len: int, max_num_seqs: int | None) -> None:
        """Refuse what could not run even alone. Asked where the request is made, and again by the scheduler."""
        if self.pooling is not None:
            if self.num_prompt_tokens > max_model_len:
                raise ContextLengthError.of(
                    max_model_len,
                    f"the prompt has {self.num_prompt_tokens}. Shorten it, or set truncate_prompt_tokens=-1",
                    param="prompt",
                )
        elif self.num_prompt_tokens >= max_model_len:
            raise ContextLengthError.of(
                max_model_len,
                f"the prompt has {self.num_prompt_tokens}, and at least one is for the answer. Shorten the prompt or "
                "raise max_model_len",
                param="prompt",
            )
        if max_num_seqs is not None and self.n > max_num_seqs:
            name = "n" if self.beams is None else "beam_width"
            raise BadRequestError(
                f"{name} is {self.n}, but at most max_num_seqs={max_num_seqs} sequences run at once", param=name
            )

    def spec_of(self, index: int) -> SamplingSpec:
        """How one of its sequences samples. The prompt's logprobs are those of the first."""
        return replace(self.spec, index=index, prompt_logprobs=None) if index else self.spec


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens of a request. The scheduler owns every field but the request's.

    `num_computed_tokens` counts what has KV once all submitted steps have run; `num_pending_tokens` counts tokens that
    submitted steps will sample and the host has not seen yet. A sequence decodes when
    num_computed_tokens == len(token_ids) + num_pending_tokens - 1. Both are lower bounds while drafts are verified:
    `num_unverified_drafts` is how many more tokens there may be of each.
    """

    request: Request
    index: int
    token_ids: list[int]
    seq_id: int = field(default_factory=lambda: next(_next_seq_id))
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_unverified_drafts: int = 0
    row: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # The scheduler's own, resolved once so that a step reads them in one look.
    order: tuple[float, ...] = ()  # its place: the smaller runs first
    max_len: int = 0  # tokens, prompt included, at which it ends
    # For RequestOutput and the statistics.
    num_cached_tokens: int = 0
    cache_outcome: CacheOutcome | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]
