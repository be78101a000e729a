"""The executor of an encoder: each span is a whole sequence, and nothing of it outlives its step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.base import BuiltExecutor
from quire.executor.clock import StepClock
from quire.executor.device import choose_backend, memory_in_use
from quire.executor.local import torch_threads
from quire.executor.memory import MemoryLedger, check_max_model_len
from quire.executor.pooling import PooledBatch, RowPools, pooled_spans
from quire.executor.sizing import batch_limits, layers_bytes
from quire.executor.timeline import Timeline
from quire.kernels.interface import PackedBatch
from quire.models.encoder import Encoder
from quire.models.spec import ModelSpec
from quire.plan import Admission, StepPlan, StepResult
from quire.sampling.transfer import to_device
from quire.tiers.sealed import SealedStore
from quire.weights import Checkpoint, ProgressFn


@dataclass(slots=True)
class _Submitted:
    plan: StepPlan
    pooled: PooledBatch | None
    clock: StepClock


class EncoderExecutor:
    """Runs plans on an encoder, as the executor's contract says. Rows hold their tokens until they are computed."""

    def __init__(self, encoder: Encoder, device: torch.device, *, single_threaded_torch: bool) -> None:
        self._encoder = encoder
        self._device = device
        self._single_threaded_torch = single_threaded_torch
        self._rows: dict[int, Admission] = {}
        self._pools = RowPools(encoder.classifier)
        self._submitted: deque[_Submitted] = deque()
        self.stores: list[SealedStore] = []  # it has no blocks to keep there

    @property
    def depth(self) -> int:
        return 2 if self._device.type == "cuda" else 1

    def submit(self, plan: StepPlan) -> int:
        with torch.inference_mode(), torch_threads(single=self._single_threaded_torch):
            clock = StepClock(on_gpu=self._device.type == "cuda")
            for row in plan.released:
                self._rows.pop(row, None)
                self._pools.release(row)
            for new in plan.admitted:
                self._rows[new.row] = new
                self._pools.admit(new)
            pooled = self._run(plan, clock) if plan.spans.rows else None
            clock.mark("sample")
        self._submitted.append(_Submitted(plan, pooled, clock))
        return plan.step

    def _run(self, plan: StepPlan, clock: StepClock) -> PooledBatch | None:
        sequences = [self._rows[row] for row in plan.spans.rows]
        lengths = plan.spans.num_tokens
        assert all(len(each.token_ids) == count for each, count in zip(sequences, lengths, strict=True)), (
            "a part of one"
        )
        starts = np.cumsum([0, *lengths])
        token_ids = np.concatenate([np.array(each.token_ids, dtype=np.int64) for each in sequences])
        positions = np.arange(len(token_ids)) - np.repeat(starts[:-1], lengths)
        columns = [token_ids, positions]
        pairs = [each.pooling.num_first_tokens if each.pooling is not None else None for each in sequences]
        if self._encoder.spec.num_token_types > 1 and any(count is not None for count in pairs):
            firsts = [length if count is None else count for count, length in zip(pairs, lengths, strict=True)]
            columns.append((positions >= np.repeat(firsts, lengths)).astype(np.int64))
        on_device = to_device(np.stack(columns), self._device)
        batch = PackedBatch(lengths, to_device(starts.astype(np.int32), self._device))
        clock.mark("prepare")
        hidden = self._encoder.forward(on_device[0], on_device[1], on_device[2] if len(columns) > 2 else None, batch)
        clock.mark("forward")
        return self._pools.take(hidden, pooled_spans(plan))

    def collect(self, ticket: int) -> StepResult:
        step = self._submitted.popleft()
        assert step.plan.step == ticket, f"step {ticket} collected out of order, {step.plan.step} is next"
        result = StepResult(step=ticket)
        if not step.clock.is_over():
            step.clock.wait()
            result.ended_s = time.perf_counter()
        if step.pooled is not None:
            pooled = step.pooled.to_list()
            result.tokens, result.pooled = [[] for _ in pooled], dict(enumerate(pooled))
        result.timings = step.clock.read()
        return result

    def is_idle(self) -> bool:
        return not self._submitted or self._submitted[-1].clock.is_over()

    def has_time(self) -> bool:
        return False  # nothing is prepared ahead

    def prepare_more(self) -> bool:
        return False

    def device_memory_bytes(self) -> tuple[int, int] | None:
        return memory_in_use(self._device)

    def reset(self) -> None:
        """Forget every row and every step: the next plan may be another scheduler's first."""
        self._rows.clear()
        self._pools.clear()
        self.close()

    def close(self) -> None:
        self._submitted.clear()


def build_encoder(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    progress: ProgressFn | None,
    *,
    timeline: Timeline | None,
) -> BuiltExecutor:
    """Load the weights. There is no cache to size: what else a step takes is given back after it."""
    check_encoder(config, spec)
    backend = choose_backend(config, spec)
    timeline = timeline or Timeline()
    max_num_seqs, max_num_batched_tokens = batch_limits(config, spec, backend.device.type)
    encoder = Encoder(spec, backend.ops, device=backend.device, dtype=backend.activation_dtype)
    checkpoint.load_into(encoder.weight_slots(), encoder.is_ignored_weight, progress=progress, seed=config.seed)
    timeline.mark("weights")
    dtype = str(backend.activation_dtype).removeprefix("torch.")
    ledger = MemoryLedger(
        device=backend.device.type,
        weight_bytes=encoder.weight_bytes,
        activation_bytes=layers_bytes(spec, dtype, max_num_batched_tokens),
        graph_bytes=0,
        batch_bytes=0,
        kv_bytes=0,
        swap_bytes=0,
        block_bytes=0,
        num_blocks=1,
        num_host_blocks=0,
        block_size=config.block_size,
        max_model_len=config.max_model_len or spec.max_position,
        windows=(),
    )
    return BuiltExecutor(
        executor=EncoderExecutor(encoder, backend.device, single_threaded_torch=backend.is_native_cpu),
        backend=backend,
        ledger=ledger,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        swap_bytes_per_s=None,
        timeline_s=timeline.seconds,
    )


def check_encoder(config: EngineConfig, spec: ModelSpec) -> None:
    """Refuse what an encoder has no use for, or cannot do."""
    check_max_model_len(config, spec)
    for name in (
        *("kv_cache_memory_bytes", "num_gpu_blocks_override", "swap_space_gb", "kv_offloading_size", "kv_disk_path"),
        *("kv_transfer_config", "pinned_prefixes", "long_prefill_token_threshold"),
    ):
        if getattr(config, name):
            raise ConfigError(f"{name}: {spec.architecture} is an encoder, which keeps no KV blocks: leave it out")
