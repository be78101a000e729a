"""One device's memory, drawn up with the engine's own arithmetic (`executor/sizing.py`, `executor/memory.py`).

Block counts agree with the engine's to the block wherever the size of the KV cache is known: with
kv_cache_memory_bytes or num_gpu_blocks_override, on a CPU, and for what a GPU's last start here served. Else a GPU's
largest step is reckoned from shapes, which the engine measures, and what the driver takes is a figure of one H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.bench import units
from quire.config import GIB, EngineConfig
from quire.errors import MemoryBudgetError
from quire.executor import sizing
from quire.executor.gpu_record import GpuRecord
from quire.executor.memory import (
    MemoryLedger,
    available_host_bytes,
    cpu_kv_budget,
    cuda_kv_budget,
    longest_sequence,
    plan_memory,
    with_kv_bytes,
)
from quire.lab.traffic import Fit, MixNeeds, fit_mix
from quire.models.kv_layout import KVLayout, kv_layout
from quire.models.share import largest_share
from quire.models.spec import ModelSpec

# CUDA's context, the kernels' code and the libraries' workspaces: no shape tells them.
DRIVER_BYTES = int(0.72 * GIB)


@dataclass(slots=True, frozen=True)
class DevicePlan:
    """One device's memory under one choice of KV dtype and tensor-parallel degree."""

    kv_dtype: str
    tensor_parallel: int
    num_stages: int
    weight_bytes: int
    adapter_bytes: int
    step_bytes: int
    graph_bytes: int
    batch_bytes: int
    driver_bytes: int
    token_bytes: int  # bytes of K and V for a token, on this device
    block_bytes: int
    layout: KVLayout
    kv_budget_bytes: int | None  # None: nothing is left
    ledger: MemoryLedger | None  # None: it does not fit
    problem: str | None  # then: why
    fit: Fit | None = None  # how many of the mix fit, where one was given

    @property
    def running_bytes(self) -> int:
        """What steps take beside weights and KV."""
        return self.step_bytes + self.graph_bytes + self.batch_bytes

    @property
    def num_tokens(self) -> int:
        return self.ledger.num_tokens if self.ledger else 0


def plan_device(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    device: str,
    memory_bytes: int | None,
    needs: MixNeeds | None = None,
    record: GpuRecord | None = None,
) -> DevicePlan:
    """One device's ledger, as the engine would draw it up: of a split model, that of the rank with the largest share.
    `record`: of a GPU that one has started on."""
    share = largest_share(spec, config.tensor_parallel_size, config.pipeline_parallel_size)
    shard = share.spec(spec)
    dtype = sizing.activation_dtype(config, spec, device)
    max_num_seqs, max_tokens = sizing.batch_limits(config, spec, device)
    kv_value_bytes = sizing.DTYPE_BYTES[sizing.kv_dtype(config, dtype)]
    layout = share.layout(kv_layout(spec, config.max_model_len))
    block_bytes = layout.block_bytes(shard, config.block_size, kv_value_bytes)
    kv_size_flag = config.kv_size_flag
    config = with_kv_bytes(config, block_bytes)
    device_bytes = memory_bytes if device == "cuda" else None
    max_len = longest_sequence(
        config, spec, layout, block_bytes=block_bytes, max_span_tokens=max_tokens, device_bytes=device_bytes
    )
    weight_bytes = sizing.weight_bytes(shard, sizing.weight_quantization(config, spec, device) or dtype, max_len)
    adapter_bytes = sizing.adapter_bytes(config, shard, dtype)
    held_bytes = weight_bytes + adapter_bytes
    whole_logits = replace(shard, vocab_size=spec.vocab_size)  # the rank that samples gathers them
    graph_bytes = batch_bytes = 0
    if device == "cpu":
        step_bytes = sizing.cpu_step_bytes(whole_logits, max_num_seqs, max_tokens)
    else:
        lengths = (max_len, config.block_size, len(layout.windows))
        step_bytes = sizing.cuda_step_bytes(whole_logits, dtype, max_num_seqs, max_tokens, *lengths)
        step_bytes += sizing.adapter_step_bytes(config, max_tokens)
        if not config.enforce_eager:
            graph_bytes = sizing.graph_bytes(whole_logits, dtype, max_num_seqs, *lengths, adapted=config.enable_lora)
        batch_bytes = sizing.batch_bytes(max_num_seqs, *lengths)
    running_bytes = step_bytes + graph_bytes + batch_bytes
    driver_bytes = 0
    if device == "cuda":
        driver_bytes = DRIVER_BYTES if record is None else record.rest_bytes
    budget: int | None = None
    ledger: MemoryLedger | None = None
    problem: str | None = None
    fit: Fit | None = None
    try:
        if device == "cuda":
            assert memory_bytes is not None
            if config.kv_cache_memory_bytes is not None:
                _check_cuda_room(config, memory_bytes, held_bytes + driver_bytes + running_bytes)
            elif held_bytes + driver_bytes + running_bytes >= memory_bytes:
                raise MemoryBudgetError(
                    f"weights of {size(held_bytes)} and a step of {size(running_bytes)} do not fit in "
                    f"{size(memory_bytes)}: use a larger GPU, a smaller model, or lower max_num_batched_tokens"
                )
            budget = cuda_kv_budget(
                config,
                free_bytes=memory_bytes - held_bytes - driver_bytes,
                total_bytes=memory_bytes,
                activation_bytes=running_bytes,
            )
            flag = "gpu_memory_utilization"
        else:
            free = memory_bytes if memory_bytes is not None else available_host_bytes()
            if free is not None:
                free //= config.num_ranks  # which are all on this machine
            if free is not None and held_bytes + step_bytes >= free:
                raise MemoryBudgetError(
                    f"weights of {size(held_bytes)} and a step of {size(step_bytes)} do not fit in {size(free)}: use a "
                    f"machine with more memory, a smaller model, or a smaller weight dtype"
                )
            budget = cpu_kv_budget(config, step_bytes, free_bytes=None if free is None else free - held_bytes)
            flag = "kv_cache_memory_bytes"
        ledger = plan_memory(
            config,
            shard,
            device=device,
            weight_bytes=weight_bytes,
            adapter_bytes=adapter_bytes,
            activation_bytes=step_bytes,
            graph_bytes=graph_bytes,
            batch_bytes=batch_bytes,
            block_bytes=block_bytes,
            layout=layout,
            max_span_tokens=max_tokens,
            kv_budget_bytes=budget,
            kv_budget_flag=kv_size_flag or flag,
        )
        if needs is not None:
            fit = fit_mix(needs, ledger.num_blocks, int(config.watermark * ledger.num_blocks))
    except MemoryBudgetError as error:
        problem = str(error)
    return DevicePlan(
        kv_dtype=sizing.kv_dtype(config, dtype),
        tensor_parallel=config.tensor_parallel_size,
        num_stages=config.pipeline_parallel_size,
        weight_bytes=weight_bytes,
        adapter_bytes=adapter_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        batch_bytes=batch_bytes,
        driver_bytes=driver_bytes,
        token_bytes=shard.kv_values_per_token * kv_value_bytes,
        block_bytes=block_bytes,
        layout=layout,
        kv_budget_bytes=budget,
        ledger=ledger,
        problem=problem,
        fit=fit,
    )


def _check_cuda_room(config: EngineConfig, memory_bytes: int, taken_bytes: int) -> None:
    """The engine takes kv_cache_memory_bytes at its word; a plan can still say that it will not go in."""
    assert config.kv_cache_memory_bytes is not None
    room = memory_bytes - taken_bytes
    if config.kv_cache_memory_bytes > room:
        raise MemoryBudgetError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} is more than the {size(max(room, 0))} that weights "
            f"and the largest step leave of {size(memory_bytes)}: lower it to {max(room, 0)} or less"
        )


def size(num_bytes: float) -> str:
    """Bytes with two places, as all of a plan's numbers have them."""
    return units.size(num_bytes, places=2)
