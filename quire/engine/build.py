"""Start-up: model name -> checkpoint -> tokenizer, executor, scheduler -> an engine, and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.inputs import InputProcessor
from quire.engine.outputs import OutputProcessor
from quire.errors import BadRequestError
from quire.executor.build import BuiltExecutor, build_executor
from quire.executor.clock import Timeline
from quire.executor.memory import MemoryLedger
from quire.kv import KVManager
from quire.models.architectures import spec_from_config
from quire.models.spec import ModelSpec
from quire.params import SamplingParams
from quire.scheduler import Scheduler, SchedulerConfig
from quire.text import Tokenizer, read_chat_template
from quire.weights import Checkpoint, ProgressBar, open_checkpoint, resolve_model

# Before anything is measured. The scheduler refines the prefill rate with every step.
_FIRST_PREFILL_TOKENS_PER_S = {"cpu": 500.0, "cuda": 30_000.0}
_FIRST_SWAP_BYTES_PER_S = 4e9

# Fields of generation_config.json that set a model's own sampling defaults, as vLLM takes them.
_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(slots=True)
class BuiltEngine:
    """The parts of an engine, ready to run."""

    config: EngineConfig
    spec: ModelSpec
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    chat_template: str | None  # the user's own; without it the tokenizer's
    executor: BuiltExecutor
    core: EngineCore
    inputs: InputProcessor
    outputs: OutputProcessor
    default_sampling: SamplingParams
    timeline_s: dict[str, float] = field(default_factory=dict)

    @property
    def ledger(self) -> MemoryLedger:
        return self.executor.ledger


def build_engine(config: EngineConfig, *, show_progress: bool = False) -> BuiltEngine:
    """Everything up to the first request. Raises a QuireError that says what to change."""
    timeline = Timeline()
    path = resolve_model(config.model, revision=config.revision, load_format=config.load_format)
    checkpoint = open_checkpoint(path, load_format=config.load_format, hf_overrides=config.hf_overrides)
    spec = spec_from_config(checkpoint.config, source=str(path))
    timeline.mark("open")
    tokenizer = _tokenizer(config, checkpoint, spec)
    chat_template = config.chat_template and read_chat_template(config.chat_template)
    timeline.mark("tokenizer")
    with ProgressBar("loading weights") as bar:
        executor = build_executor(config, spec, checkpoint, bar if show_progress else None)
    limit = executor.ledger.max_model_len
    kv = KVManager(
        num_blocks=executor.ledger.num_blocks,
        block_size=config.block_size,
        num_host_blocks=executor.ledger.num_host_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        watermark=config.watermark,
    )
    scheduler = Scheduler(scheduler_config(config, executor), kv)
    return BuiltEngine(
        config=config,
        spec=spec,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        chat_template=chat_template,
        executor=executor,
        core=EngineCore(scheduler, executor.executor, kv),
        inputs=InputProcessor(
            tokenizer,
            vocab_size=spec.vocab_size,
            max_model_len=limit,
            eos_token_ids=_eos_ids(spec, checkpoint, tokenizer),
            seed=config.seed,
        ),
        outputs=OutputProcessor(
            tokenizer, cached_block_size=config.block_size if config.enable_prefix_caching else None
        ),
        default_sampling=_default_sampling(checkpoint.generation_config),
        timeline_s=timeline.seconds | executor.timeline_s,
    )


def scheduler_config(config: EngineConfig, executor: BuiltExecutor) -> SchedulerConfig:
    device = executor.backend.device.type
    return SchedulerConfig(
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        max_model_len=executor.ledger.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        target_step_ms=config.target_step_ms,
        policy=config.scheduling_policy,
        priority_ageing_s=config.priority_ageing_s,
        preemption=config.preemption,
        kv_bytes_per_block=executor.ledger.block_bytes,
        swap_bytes_per_s=executor.swap_bytes_per_s or _FIRST_SWAP_BYTES_PER_S,
        prefill_tokens_per_s=_FIRST_PREFILL_TOKENS_PER_S[device],
        max_in_flight=executor.executor.depth,
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        other = resolve_model(config.tokenizer, load_format="dummy")  # its weights are not needed
        if other.suffix == ".gguf":
            tokenizer = Tokenizer.from_gguf(open_checkpoint(other).gguf_metadata or {}, source=str(other))
        else:
            tokenizer = Tokenizer.from_directory(other)
    elif checkpoint.gguf_metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata, source=str(checkpoint.path))
    else:
        tokenizer = Tokenizer.from_directory(checkpoint.path)
    tokenizer.check_fits(spec.vocab_size, source=str(checkpoint.path))
    return tokenizer


def _eos_ids(spec: ModelSpec, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> set[int]:
    """Models name their end tokens in up to three places; any of them ends a sequence."""
    ids = set(spec.eos_token_ids)
    told: Any = checkpoint.generation_config.get("eos_token_id")
    if isinstance(told, int):
        ids.add(told)
    elif isinstance(told, list):
        ids.update(told)
    if tokenizer is not None:
        ids.update(tokenizer.end_token_ids)
    return ids


def _default_sampling(generation_config: dict[str, Any]) -> SamplingParams:
    """The model's own defaults where it brings any; what cannot be used is left out."""
    values = {k: generation_config[k] for k in _GENERATION_DEFAULTS if generation_config.get(k) is not None}
    if generation_config.get("do_sample") is False:
        values = {"temperature": 0.0}
    try:
        return SamplingParams(**values)
    except BadRequestError:
        return SamplingParams()
