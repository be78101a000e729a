"""The contract between `server` and an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from quire.agents import Dialect
from quire.beams import BeamSearchParams
from quire.engine.stats import Metric
from quire.inputs import Prompt
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.pooling import PoolingParams
from quire.request import AdapterRef, Request
from quire.text import Tokenizer


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"  # idle, or its steps make progress
    STUCK = "stuck"  # a step has run longer than the watchdog allows
    SLEEPING = "sleeping"  # its memory is given back; a request wakes it
    DEAD = "dead"


@dataclass(slots=True, frozen=True)
class EngineHealth:
    state: EngineState
    reason: str = ""  # for people; empty when ready

    @property
    def is_up(self) -> bool:
        """Whether the engine has started and its process runs, or can be woken."""
        return self.state in (EngineState.READY, EngineState.STUCK, EngineState.SLEEPING)


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineInfo:
    """Facts about an engine that has started; they do not change. The lines are those that the offline engine logs."""

    model: str  # as the operator named it
    architecture: str
    device: str
    dtype: str
    kv_dtype: str
    kernels: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    enable_prefix_caching: bool
    scheduling_policy: str = "priority"
    pooling_labels: tuple[str, ...] | None = None  # the classes of a model that pools; empty where it embeds
    ledger_summary: str
    blocks_line: str
    ready_s: float
    timeline_s: dict[str, float] = field(default_factory=dict)
    fingerprint: str = ""  # hash of its config and tensors: servers of other models have others
    kv_address: str | None = None  # where other engines of this model send it blocks
    serves_determinism: bool = False  # whether single requests can be deterministic


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineLoad:
    """How busy the engine is, as of its last report (at most a step and a quarter of a second old)."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0  # share of blocks that requests hold
    num_steps: int = 0
    tokens_per_s: float = 0.0
    # Measured rates for the router; None: not measured yet.
    prefill_tokens_per_s: float | None = None  # beside the decodes that run
    decode_step_s: float | None = None
    brownout_level: int = 0  # 0: none, 1: smaller prefills, 2: shorter answers for new requests, 3: none are taken


@dataclass(slots=True)
class PreparedRequest:
    """Tokenized and checked, not yet with the engine."""

    request: Request
    params: SamplingParams  # as its text is to be shown; what the engine needs of them is in the request
    prompt: str | None  # where its text is known
    # Set when its stream is closed. By sequence: more than were read if the reader left before the end.
    num_made_tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens


def is_replicated(engine: ServingEngine) -> bool:
    return hasattr(engine, "replicas")


def replicas_of(engine: ServingEngine) -> Mapping[str, ServingEngine]:
    """The engines that stand behind one, by the name that metrics and pages show; or itself, as "0"."""
    replicas: Mapping[str, ServingEngine] = getattr(engine, "replicas", None) or {"0": engine}
    return replicas


class ServingEngine(Protocol):
    """One engine that many connections share. Every method belongs to the event loop's thread, except `prepare`
    and `render_chat`, which any thread may call."""

    @property
    def info(self) -> EngineInfo: ...  # once ready

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def dialect(self) -> Dialect:
        """How the model calls tools and thinks."""
        ...

    @property
    def default_sampling(self) -> SamplingParams: ...

    def health(self) -> EngineHealth: ...

    def load(self) -> EngineLoad: ...

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter: AdapterRef | None = None,
    ) -> PreparedRequest:
        """Raises BadRequestError; the engine has not heard of the request yet."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **kwargs: Any
    ) -> dict[str, Any]: ...

    def stream(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run it. Closing the generator early aborts the request; its blocks are free within a step.

        Raises BadRequestError where the scheduler refuses it, EngineDeadError where the engine dies meanwhile.
        """
        ...

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run one of the engine's named inspections between two steps (`quire.engine.calls`)."""
        ...

    async def metrics(self) -> list[Metric]:
        """A reading of the engine's own counters and gauges."""
        ...
