"""Start-up: model name -> checkpoint -> text side and token side -> an engine, and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.drafting import LookupDrafter, ModelDrafter
from quire.engine.adapters import AdapterGate
from quire.engine.core import EngineCore
from quire.engine.inputs import InputProcessor
from quire.engine.launch import keep_what_is_built
from quire.engine.outputs import OutputProcessor
from quire.engine.text_side import OpenedModel, TextSide, open_model
from quire.errors import ConfigError, install_hint
from quire.executor.precompile import Precompile
from quire.executor.sizing import smooth_prompt_tokens
from quire.executor.timeline import Timeline
from quire.grammar import GrammarCompiler
from quire.kv import KVManager
from quire.models.spec import ModelSpec
from quire.params import SamplingParams
from quire.scheduler import Scheduler, SchedulerConfig
from quire.speculation import SpeculativeConfig
from quire.weights import Checkpoint, ProgressBar

if TYPE_CHECKING:
    from quire.executor.base import BuiltExecutor
    from quire.executor.memory import MemoryLedger

# Before anything is measured. The scheduler refines the prefill rate with every step.
_FIRST_PREFILL_TOKENS_PER_S = {"cpu": 500.0, "cuda": 30_000.0}
_FIRST_SWAP_BYTES_PER_S = 4e9
CPU_READERS_STEP_S = 0.12  # faster than people read, and long enough for chunks that multiply at nearly full speed


@dataclass(slots=True)
class TokenSide:
    """The part of an engine that knows tokens only, ready to run."""

    executor: BuiltExecutor
    core: EngineCore

    @property
    def ledger(self) -> MemoryLedger:
        return self.executor.ledger

    def smooth_for_readers(self, config: EngineConfig) -> None:
        """For engines whose tokens are read as they come: prompts must not hold up the tokens of others.

        What a GPU computes beside decodes without much delay depends on little but its shapes, so there the prompts'
        share of a step is a number of tokens. CPUs and the models on them differ by orders of magnitude: there it is
        what measured steps say fits into a time.
        """
        if config.smooth_prefill_tokens is not None:
            return
        if self.executor.backend.device.type == "cuda":
            self.core.scheduler.smooth_steps(smooth_prompt_tokens)
        elif config.target_step_ms is None:
            self.core.scheduler.set_target_step(CPU_READERS_STEP_S)


@dataclass(slots=True)
class BuiltEngine:
    """Both sides of an engine in one process."""

    config: EngineConfig
    spec: ModelSpec
    checkpoint: Checkpoint
    text: TextSide
    tokens: TokenSide
    inputs: InputProcessor
    outputs: OutputProcessor
    timeline_s: dict[str, float] = field(default_factory=dict)

    @property
    def default_sampling(self) -> SamplingParams:
        return self.text.default_sampling

    @property
    def executor(self) -> BuiltExecutor:
        return self.tokens.executor


def build_engine(config: EngineConfig, *, show_progress: bool = False) -> BuiltEngine:
    """Everything up to the first request. Raises a QuireError that says what to change."""
    timeline = Timeline()
    opened = open_model(config)
    timeline.mark("open")
    precompile = Precompile.start(config, opened.spec) if config.num_ranks == 1 and not opened.spec.pooler else None
    text = TextSide(config, opened)
    timeline.mark("tokenizer")
    tokens = build_token_side(
        config, opened, show_progress=show_progress, precompile=precompile, grammars=text.grammars
    )
    keep_what_is_built()
    return BuiltEngine(
        config=config,
        spec=opened.spec,
        checkpoint=opened.checkpoint,
        text=text,
        tokens=tokens,
        inputs=text.make_inputs(
            tokens.ledger.max_model_len, tokens.executor.max_num_seqs, tokens.executor.backend.serves_determinism
        ),
        outputs=text.make_outputs(),
        timeline_s=timeline.seconds | tokens.executor.timeline_s,
    )


def build_token_side(
    config: EngineConfig,
    opened: OpenedModel,
    *,
    show_progress: bool = False,
    precompile: Precompile | None = None,
    grammars: GrammarCompiler | None = None,
) -> TokenSide:
    """Weights, KV cache, scheduler and loop."""
    if config.is_split:
        return assemble_token_side(config, _build_ranks(config, opened, grammars))
    precompile = precompile or Precompile.start(config, opened.spec)
    timeline = Timeline()
    # Only now: torch takes seconds to import, and the helper works meanwhile.
    from quire.executor.build import build_executor

    timeline.mark("imports")
    with ProgressBar("loading weights") as bar:
        executor = build_executor(
            config,
            opened.spec,
            opened.checkpoint,
            bar if show_progress else None,
            precompile=precompile,
            timeline=timeline,
            grammars=grammars,
        )
    return assemble_token_side(config, executor)


def _build_ranks(config: EngineConfig, opened: OpenedModel, grammars: GrammarCompiler | None) -> BuiltExecutor:
    """Build ranks in processes of their own, so that torch is not imported here."""
    try:
        from quire.executor.rank_executor import build_rank_executor
    except ImportError as error:
        raise ConfigError(f"ranks need pyzmq and msgspec to talk to each other: {install_hint('server')}") from error
    return build_rank_executor(config, opened, grammars)


def assemble_token_side(config: EngineConfig, executor: BuiltExecutor) -> TokenSide:
    """A block manager and a scheduler around an executor."""
    kv = KVManager(
        num_blocks=executor.ledger.num_blocks,
        block_size=config.block_size,
        num_host_blocks=executor.ledger.num_host_blocks,
        host_block_s=executor.ledger.block_bytes / _swap_bytes_per_s(executor) if config.kv_offloading_size else None,
        stores=executor.executor.stores,
        windows=executor.ledger.windows,
        max_span_tokens=executor.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching and bool(executor.ledger.windows),
        watermark=config.watermark,
    )
    scheduler = Scheduler(scheduler_config(config, executor), kv)
    if smooth_tokens := config.smooth_prefill_tokens:
        scheduler.smooth_steps(lambda num_decodes: smooth_tokens)
    if config.speculative_config is not None:
        scheduler.drafter = make_drafter(config.speculative_config, scheduler, executor.max_draft_position)
    worker = getattr(executor.executor, "worker", None)
    if executor.executor.depth == 1 and worker is not None and worker.constraints is not None:
        # Deeper, a step's tokens are not known yet when the next is planned; elsewhere, the constraints are not here.
        scheduler.forced_tokens = worker.constraints.forced_tokens
    gate = None if executor.adapters is None else AdapterGate(executor.adapters)
    return TokenSide(executor, EngineCore(scheduler, executor.executor, kv, executor.grammars, gate))


def make_drafter(
    config: SpeculativeConfig, scheduler: Scheduler, max_draft_position: int | None = None
) -> LookupDrafter | ModelDrafter:
    """max_draft_position: how far the executor's own draft model reaches; None where it has none."""
    if config.method != "draft_model":
        return LookupDrafter(config, scheduler.costs)
    assert max_draft_position is not None, "a draft model is asked for, and the executor has none"
    return ModelDrafter(config, scheduler.costs, max_position=max_draft_position)


def _swap_bytes_per_s(executor: BuiltExecutor) -> float:
    return executor.swap_bytes_per_s or _FIRST_SWAP_BYTES_PER_S


def scheduler_config(config: EngineConfig, executor: BuiltExecutor) -> SchedulerConfig:
    device = executor.backend.device.type
    return SchedulerConfig(
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        max_model_len=executor.ledger.max_model_len,
        # Every token of an encoder sees all of its text.
        enable_chunked_prefill=config.enable_chunked_prefill and bool(executor.ledger.windows),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        target_step_ms=config.target_step_ms if executor.ledger.windows else None,
        policy=config.scheduling_policy,
        priority_ageing_s=config.priority_ageing_s,
        preemption=config.preemption,
        kv_bytes_per_block=max(1, executor.ledger.block_bytes),
        swap_bytes_per_s=_swap_bytes_per_s(executor),
        prefill_tokens_per_s=_FIRST_PREFILL_TOKENS_PER_S[device],
        max_in_flight=executor.executor.depth,
        num_stages=config.pipeline_parallel_size,
    )
