"""From a config and an opened checkpoint to a running executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from quire.config import GIB, EngineConfig
from quire.errors import ConfigError, MemoryBudgetError
from quire.executor import sizing
from quire.executor.adapter_slots import AdapterSlots
from quire.executor.adapter_store import DeviceAdapters
from quire.executor.base import BuiltExecutor
from quire.executor.batch import PersistentBatch
from quire.executor.captured import GraphMemory, StepParts, is_out_of_memory
from quire.executor.decode_graphs import DecodeGraphs
from quire.executor.device import Backend, choose_backend, ranks_per_gpu
from quire.executor.draft_model import DraftModel, open_draft
from quire.executor.encoder import build_encoder
from quire.executor.gpu_record import GpuRecord, record_key, remember_gpu
from quire.executor.kv_cache import KVCache
from quire.executor.kv_scales import fit_cache, known_kv_scales
from quire.executor.local import LocalExecutor
from quire.executor.memory import (
    MemoryLedger,
    available_host_bytes,
    check_cpu_weights,
    check_max_model_len,
    cpu_kv_budget,
    cuda_kv_budget,
    longest_sequence,
    plan_memory,
    with_kv_bytes,
)
from quire.executor.mixed_graphs import MixedGraphs
from quire.executor.precompile import PROMPTS, START, Precompile
from quire.executor.profile import hold_activation_memory, let_go_of_held_memory, measure_activation_bytes
from quire.executor.sizing import batch_limits
from quire.executor.stores import build_stores, describe_blocks
from quire.executor.timeline import Timeline
from quire.executor.virtual_memory import SleepingMemory
from quire.executor.worker import ElsewhereSampled, Worker
from quire.grammar import GrammarCompiler
from quire.grammar.rows import RowConstraints, mask_threads
from quire.kernels.adapters import AdapterBank
from quire.models.architectures import stored_names
from quire.models.decoder import Decoder
from quire.models.kv_layout import kv_layout
from quire.models.share import ModelShare
from quire.models.spec import ModelSpec
from quire.sampling import Sampler, load_plugins
from quire.tiers.sealed import SealedStore
from quire.weights import Checkpoint, ProgressFn

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks


@dataclass(slots=True)
class LoadedModel:
    """A model on its device, or a rank's share of one, and the memory that is left. The cache is yet to be made."""

    config: EngineConfig
    spec: ModelSpec  # of the whole model
    backend: Backend
    decoder: Decoder
    ledger: MemoryLedger
    max_num_seqs: int
    max_num_batched_tokens: int
    precompile: Precompile | None
    timeline: Timeline
    draft: Decoder | None = None
    memory: SleepingMemory | None = None  # where weights and cache are, on a GPU that may give them back


def build_executor(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    progress: ProgressFn | None = None,
    *,
    precompile: Precompile | None = None,
    timeline: Timeline | None = None,
    grammars: GrammarCompiler | None = None,
) -> BuiltExecutor:
    """Load the weights, size the cache to what is left, and put the parts together."""
    if spec.is_encoder:
        if config.enable_lora:
            raise ConfigError("enable_lora: adapters are for models that generate, not for encoders: leave it out")
        return build_encoder(config, spec, checkpoint, progress, timeline=timeline)
    grammars = grammars or GrammarCompiler.of_model(config, checkpoint, spec)
    loaded = load_model(config, spec, checkpoint, progress, precompile=precompile, timeline=timeline)
    constraints = row_constraints(grammars, beside_gpu=loaded.backend.device.type == "cuda")
    executor = build_local(loaded, checkpoint, loaded.ledger, constraints=constraints)
    adapters = executor.worker.adapters
    return BuiltExecutor(
        executor=executor,
        backend=loaded.backend,
        ledger=loaded.ledger,
        max_num_seqs=loaded.max_num_seqs,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        swap_bytes_per_s=executor.worker.cache.measure_swap_rate(),
        timeline_s=loaded.timeline.seconds,
        max_draft_position=None if loaded.draft is None else loaded.draft.max_position,
        grammars=grammars,
        adapters=None if adapters is None else AdapterSlots.of(config, adapters),
    )


def build_local(
    loaded: LoadedModel,
    checkpoint: Checkpoint,
    ledger: MemoryLedger,
    *,
    constraints: RowConstraints | None = None,
    whole_block_bytes: int | None = None,
    num_ranks_on_host: int = 1,
) -> LocalExecutor:
    """Make the cache, the stores below it and the sampler, and put the parts together. The last two: of a rank, whose
    blocks are parts of those that all ranks have."""
    config, decoder, backend, timeline = loaded.config, loaded.decoder, loaded.backend, loaded.timeline
    cache = make_cache(loaded, ledger)
    draft = None if loaded.draft is None else (loaded.draft, make_cache(loaded, ledger, loaded.draft))
    stores = build_stores(
        config,
        describe_blocks(config, checkpoint, backend, decoder) if config.has_kv_stores else "",
        cache.block_bytes,
        whole_block_bytes=whole_block_bytes,
        num_ranks_on_host=num_ranks_on_host,
    )
    timeline.mark("cache")
    if loaded.precompile is not None:
        loaded.precompile.wait(START)
        timeline.mark("more kernels")
    sampler = make_sampler(loaded, ledger)
    timeline.mark("sampler")
    executor = assemble_executor(
        decoder,
        cache,
        sampler,
        backend,
        ledger,
        block_size=ledger.block_size,
        max_num_seqs=loaded.max_num_seqs,
        with_graphs=has_graphs(config, backend, pools=loaded.spec.pooler is not None),
        precompile=loaded.precompile,
        constraints=constraints,
        stores=stores,
        draft=draft,
        memory=loaded.memory,
        captures_now=not config.calculate_kv_scales,
    )
    if config.calculate_kv_scales:
        executor.worker.measure_scales = lambda token_ids: fit_cache(
            decoder, backend, block_size=config.block_size, token_ids=token_ids
        )
    if executor.worker.graphs is not None:
        timeline.mark("graphs")
    if decoder.adapters is not None:
        names, max_rank = stored_names(checkpoint.config), config.max_lora_rank
        executor.worker.adapters = DeviceAdapters(decoder.adapters, loaded.spec, names, max_rank=max_rank)
    return executor


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    progress: ProgressFn | None = None,
    *,
    share: ModelShare | None = None,
    ranks: Ranks | None = None,
    num_ranks_on_host: int = 1,
    precompile: Precompile | None = None,
    timeline: Timeline | None = None,
) -> LoadedModel:
    """Load the weights, and draw up the ledger. `share`: what this rank holds, where the model is split; ranks on one
    host share its memory."""
    check_max_model_len(config, spec)
    backend = choose_backend(config, spec)
    timeline = timeline or Timeline()
    share = share or ModelShare.whole(spec)
    held = share.spec(spec)
    max_num_seqs, max_num_batched_tokens = batch_limits(config, spec, backend.device.type)
    device_bytes, others_bytes = None, 0
    if backend.device.type == "cuda":
        free_bytes, device_bytes = torch.cuda.mem_get_info(backend.device)
        others_bytes = device_bytes - free_bytes
    elif ranks is None:
        check_cpu_weights(checkpoint)
    layout = share.layout(kv_layout(spec, config.max_model_len))
    per_block = layout.block_bytes(held, config.block_size, backend.kv_dtype.itemsize)
    opened = open_draft(config, spec, backend) if ranks is None else None
    if opened is not None:
        per_block += opened.block_bytes(config.block_size, backend.kv_dtype.itemsize)
    max_position = longest_sequence(
        config, spec, layout, block_bytes=per_block, max_span_tokens=max_num_batched_tokens, device_bytes=device_bytes
    )
    memory = None
    if config.enable_sleep_mode and backend.device.type == "cuda":
        memory = SleepingMemory(backend.device, changes=config.enable_lora)
    with _naming_the_weights(held, backend.weight_dtype, max_position), _lying_in(memory, is_kept=True):
        decoder = Decoder(
            spec,
            backend.ops,
            device=backend.device,
            dtype=backend.activation_dtype,
            max_position=max_position,
            layout=layout,
            share=share,
            ranks=ranks,
            adapters=make_bank(config, backend),
        )
        checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight, progress=progress, seed=config.seed)
        with torch.inference_mode():
            decoder.finish_loading()
    draft = None
    if opened is not None:
        with _naming_the_weights(opened.spec, backend.weight_dtype, max_position), _lying_in(memory, is_kept=True):
            draft = opened.load(backend, max_position, config.seed)
    timeline.mark("weights")
    if backend.device.type != "cuda":
        precompile = None  # it prepares what will not be needed
    if precompile is not None:
        with torch.inference_mode():
            decoder.multiply_once(max_num_batched_tokens)  # the library loads its kernels while ours are compiled
        precompile.wait(PROMPTS)
        timeline.mark("kernels")
    if ranks is not None:
        ranks.barrier()  # nobody counts what is free before all of them have their weights
    with torch.inference_mode():
        if backend.kv_dtype.itemsize == 1:
            known = known_kv_scales(config, checkpoint, spec.num_layers)
            mine = None if known is None else known[share.layers.slice]
            fit_cache(decoder, backend, block_size=config.block_size, known=mine, ranks=ranks)
            if draft is not None:
                fit_cache(draft, backend, block_size=config.block_size)
        ledger = _plan(
            config,
            held,
            backend,
            decoder,
            draft,
            max_num_seqs,
            max_num_batched_tokens,
            num_ranks_on_host=num_ranks_on_host,
            others_bytes=others_bytes,
            ranks=ranks,
        )
    timeline.mark("memory")
    return LoadedModel(
        config,
        spec,
        backend,
        decoder,
        ledger,
        max_num_seqs,
        max_num_batched_tokens,
        precompile,
        timeline,
        draft,
        memory,
    )


def make_bank(config: EngineConfig, backend: Backend) -> AdapterBank | None:
    if not config.enable_lora:
        return None
    return AdapterBank(
        config.max_loras,
        config.max_lora_rank,
        device=backend.device,
        dtype=backend.activation_dtype,
        tile=backend.ops.adapter_tile,
    )


def _lying_in(memory: SleepingMemory | None, *, is_kept: bool) -> AbstractContextManager[None]:
    return nullcontext() if memory is None else memory.holding(is_kept=is_kept)


def make_cache(loaded: LoadedModel, ledger: MemoryLedger, draft: Decoder | None = None) -> KVCache:
    """The KV cache of the model, or of its draft model, whose blocks have the same ids."""
    decoder = draft or loaded.decoder
    with _lying_in(loaded.memory, is_kept=False):
        return KVCache(
            decoder.share.spec(decoder.spec),
            decoder.layout,
            num_blocks=ledger.num_blocks,
            num_host_blocks=ledger.num_host_blocks,
            block_size=ledger.block_size,
            dtype=loaded.backend.kv_dtype,
            device=loaded.backend.device,
        )


def make_sampler(loaded: LoadedModel, ledger: MemoryLedger) -> Sampler | ElsewhereSampled:
    if loaded.spec.pooler is not None or not loaded.decoder.samples:
        return ElsewhereSampled()
    with torch.inference_mode():
        return Sampler(
            num_rows=loaded.max_num_seqs,
            vocab_size=loaded.spec.vocab_size,
            device=loaded.backend.device,
            max_model_len=ledger.max_model_len,
            plugins=load_plugins(loaded.config.logits_processors, loaded.config, loaded.backend.device),
        )


def row_constraints(grammars: GrammarCompiler, *, beside_gpu: bool) -> RowConstraints:
    """A GPU leaves the host time for threads that fill masks, and copies them out of pinned memory. Had torch to copy
    them there first, its own threads would, which then spin for milliseconds on the cores that fill the next ones."""
    if not beside_gpu:
        return RowConstraints(grammars)
    return RowConstraints(
        grammars,
        num_threads=mask_threads(),
        new_words=lambda *shape: torch.empty(shape, dtype=torch.int32, pin_memory=True).numpy(),
    )


@contextmanager
def _naming_the_weights(spec: ModelSpec, dtype: str, max_position: int) -> Iterator[None]:
    """Where memory for weights cannot be had, say how much they take instead of what the allocator says."""
    try:
        yield
    except RuntimeError as error:
        # torch has no class of its own for a CPU's; a size past 64 bits overflows instead.
        if not is_out_of_memory(error) and not any(words in str(error) for words in ("allocate memory", "overflow")):
            raise
        needed = sizing.weight_bytes(spec, dtype, max_position)
        raise MemoryBudgetError(
            f"the model's weights take about {needed / GIB:,.1f} GiB in {dtype}, and that much memory cannot be had: "
            "use a smaller model or dtype, or a machine with more memory"
        ) from error


def has_graphs(config: EngineConfig, backend: Backend, *, pools: bool) -> bool:
    """Plain torch kernels look at tensors from the host, which a graph cannot hold; nor does one hold what goes from
    stage to stage. Captured steps end in logits."""
    is_one_stage = config.pipeline_parallel_size == 1
    return backend.ops.name == "triton" and not config.enforce_eager and is_one_stage and not pools


def assemble_executor(
    decoder: Decoder,
    cache: KVCache,
    sampler: Sampler | ElsewhereSampled,
    backend: Backend,
    ledger: MemoryLedger,
    *,
    block_size: int,
    max_num_seqs: int,
    with_graphs: bool,
    precompile: Precompile | None,
    constraints: RowConstraints | None = None,
    stores: Sequence[SealedStore] = (),
    draft: tuple[Decoder, KVCache] | None = None,
    memory: SleepingMemory | None = None,
    captures_now: bool = True,
) -> LocalExecutor:
    """Everything that depends on how the cache is cut into blocks; with graphs, the common ones captured, or to be
    captured when there is time."""
    batch = PersistentBatch(
        num_rows=max_num_seqs,
        max_model_len=ledger.max_model_len,
        block_size=block_size,
        device=backend.device,
        num_groups=len(decoder.layout.windows),
        spare_block=cache.spare_block,
        bank=decoder.adapters,
    )
    graphs = mixed = draft_graphs = None
    if with_graphs:
        num_words = decoder.spec.vocab_size if decoder.samples else 0
        graph_memory = GraphMemory(max_num_seqs, num_words, batch.device)
        parts = StepParts(decoder, cache.layers, batch, graph_memory, ledger.max_model_len)
        graphs, mixed = DecodeGraphs(parts, max_num_seqs), MixedGraphs(parts)
        with torch.inference_mode():
            if captures_now:
                graphs.capture_common()
            else:
                graphs.capture_common_later()
            if draft is not None:
                parts = StepParts(
                    draft[0], draft[1].layers, batch, graph_memory, min(ledger.max_model_len, draft[0].max_position)
                )
                draft_graphs = DecodeGraphs(parts, max_num_seqs)
                draft_graphs.capture_common()
        graph_memory.held_bytes = ledger.activation_bytes  # from now on, also after captures that failed
    let_go_of_held_memory(backend.device)  # by captures
    hold_activation_memory(ledger.activation_bytes, backend.device)
    worker = Worker(
        decoder,
        cache,
        batch,
        sampler,
        graphs=graphs,
        mixed=mixed,
        constraints=constraints,
        stores=stores,
        draft=None if draft is None else DraftModel(*draft, batch, draft_graphs),
    )
    return LocalExecutor(
        worker,
        single_threaded_torch=backend.is_native_cpu,
        precompile=precompile,
        memory=memory,
        activation_bytes=ledger.activation_bytes,
    )


def _plan(
    config: EngineConfig,
    spec: ModelSpec,
    backend: Backend,
    decoder: Decoder,
    draft: Decoder | None,
    max_num_seqs: int,
    max_tokens: int,
    *,
    num_ranks_on_host: int,
    others_bytes: int,
    ranks: Ranks | None,
) -> MemoryLedger:
    device = backend.device.type
    kv_size_flag = config.kv_size_flag
    layout = decoder.layout
    kv_block_bytes = layout.block_bytes(spec, config.block_size, backend.kv_dtype.itemsize)
    if draft is not None:
        kv_block_bytes += draft.layout.block_bytes(draft.spec, config.block_size, backend.kv_dtype.itemsize)
    config = with_kv_bytes(config, kv_block_bytes)
    graph_bytes = batch_bytes = 0
    if device == "cuda":
        activation_bytes = measure_activation_bytes(
            decoder,
            spec,
            device=backend.device,
            kv_dtype=backend.kv_dtype,
            block_size=config.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_seq_len=decoder.max_position,
        )
        dtype = sizing.activation_dtype(config, spec, device)
        lengths = (decoder.max_position, config.block_size, len(layout.windows))
        largest = (max_num_seqs, max_tokens, *lengths)
        if has_graphs(config, backend, pools=spec.pooler is not None):
            graph_bytes = sizing.graph_bytes(spec, dtype, max_num_seqs, *lengths, adapted=config.enable_lora)
            if draft is not None:
                graph_bytes += sizing.graph_bytes(draft.spec, dtype, max_num_seqs, *lengths)
        activation_bytes = sizing.adapted_step_bytes(config, spec, dtype, activation_bytes, *largest)
        batch_bytes = sizing.batch_bytes(max_num_seqs, *lengths)
        if ranks is not None:
            ranks.barrier()  # they may share a GPU, and all have measured now
        free, total = torch.cuda.mem_get_info(backend.device)
        if ranks is None and config.memory_share is None:
            reckoned = sizing.weight_bytes(spec, backend.weight_dtype, decoder.max_position)
            reckoned += sizing.adapter_bytes(config, spec, dtype)
            step_bytes = sizing.cuda_step_bytes(spec, dtype, *largest)
            reckoned += sizing.adapted_step_bytes(config, spec, dtype, step_bytes, *largest)
            rest = total - free + activation_bytes - reckoned
            remember_gpu(torch.cuda.get_device_name(backend.device), GpuRecord(total, rest, record_key(config, spec)))
        num_sharers = ranks_per_gpu() if ranks is not None and config.kv_cache_memory_bytes is None else 1
        budget = cuda_kv_budget(
            config,
            free_bytes=free,
            total_bytes=total,
            activation_bytes=num_sharers * (activation_bytes + graph_bytes + batch_bytes),
            others_bytes=others_bytes,
        )
        budget //= num_sharers
        flag = "gpu_memory_utilization" if config.memory_share is None else "memory_share"
    else:
        whole_logits = replace(spec, vocab_size=decoder.spec.vocab_size)  # the rank that samples gathers them
        activation_bytes = sizing.cpu_step_bytes(whole_logits, max_num_seqs, max_tokens)
        free_bytes = available_host_bytes()
        if free_bytes is not None:
            free_bytes //= num_ranks_on_host
        budget = cpu_kv_budget(config, activation_bytes, free_bytes=free_bytes)
        flag = "kv_cache_memory_bytes"
    return plan_memory(
        config,
        spec,
        device=device,
        adapter_bytes=0 if decoder.adapters is None else decoder.adapters.nbytes,
        weight_bytes=decoder.weight_bytes + (draft.weight_bytes if draft is not None else 0),
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        batch_bytes=batch_bytes,
        block_bytes=kv_block_bytes,
        layout=layout,
        max_span_tokens=max_tokens,
        kv_budget_bytes=budget,
        kv_budget_flag=kv_size_flag or flag,
    )
