"""What a request gives back, under the names that vLLM's users read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from quire.lora.request import LoRARequest
    from quire.plan import TokenLogprobs
    from quire.pooling import Pooled


@dataclass(slots=True, frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LogprobList(Sequence[Any]):
    """The logprobs of each position, from token id to Logprob; None where nothing predicts the token. A position's are
    made when they are read: twenty of each token of a long prompt, all at once, would take a second."""

    __slots__ = ("_entries", "_token_text")

    def __init__(self, token_text: Callable[[int], str | None], entries: Iterable[TokenLogprobs | None] = ()) -> None:
        self._token_text = token_text
        self._entries = list(entries)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        self._entries.extend(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LogprobList(self._token_text, self._entries[index])
        entry = self._entries[index]
        return None if entry is None else self._by_token(entry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _by_token(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The position's own token first, then the top ones, as vLLM orders them."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for rank, (token, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1):
            if token not in found:
                found[token] = Logprob(logprob, rank, self._token_text(token))
        return found


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n continuations."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort, error or banned
    stop_reason: int | str | None = None  # the stop string or stop token that ended it; None for eos
    error: str | None = None  # what went wrong, where finish_reason is error or banned
    lora_request: LoRARequest | None = None
    pooled: Pooled | None = (
        None  # of a request that pools, which has no text: the fronts show it as PoolingRequestOutput
    )

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
    num_draft_tokens: int = 0  # verified, and of those accepted; where a server runs the engine, known at the end
    num_accepted_tokens: int = 0
    cache_outcome: str | None = None  # why the prompt found as many cached tokens as it did


@dataclass(slots=True)
class RequestOutput:
    """A request's state as of now, or at its end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0  # prompt tokens that this request added to the prefix cache
    lora_request: LoRARequest | None = None
    kv_transfer_params: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = field(default=None, repr=False)


_Output = TypeVar("_Output")


@dataclass(slots=True)
class PoolingOutput:
    """What a prompt was pooled to: a tensor of one vector, or of one a token."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_Output]):
    """A pooled request."""

    request_id: str
    outputs: _Output
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """outputs.embedding"""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """outputs.probs"""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """outputs.score"""

    __slots__ = ()
