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
from quire.executor import memory, sizing
from quire.executor.gpu_record import GpuRecord
from quire.lab.traffic import Fit, MixNeeds, fit_mix
from quire.models.kv_layout import KVLayout, kv_layout
from quire.models.share import largest_share
from quire.models.spec import ModelSpec

# CUDA's context, the kernels' code and the libraries' workspaces: no shape tells them.
DRIVER_BYTES = int(0.72 * GIB)


@dataclass(slots=True)
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
    kv_budget_bytes: int | None = None  # None: nothing is left
    ledger: memory.MemoryLedger | None = None  # None: it does not fit
    problem: str | None = None  # then: why
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
    config = memory.with_kv_bytes(config, block_bytes)
    device_bytes = memory_bytes if device == "cuda" else None
    max_len = memory.longest_sequence(
        config, spec, layout, block_bytes=block_bytes, max_span_tokens=max_tokens, device_bytes=device_bytes
    )
    whole_logits = replace(shard, vocab_size=spec.vocab_size)  # the rank that samples gathers them
    graph_bytes = batch_bytes = driver_bytes = 0
    if device == "cpu":
        step_bytes = sizing.cpu_step_bytes(whole_logits, max_num_seqs, max_tokens)
    else:
        lengths = (max_len, config.block_size, len(layout.windows))
        largest = (max_num_seqs, max_tokens, *lengths)
        step_bytes = sizing.cuda_step_bytes(whole_logits, dtype, *largest)
        step_bytes = sizing.adapted_step_bytes(config, whole_logits, dtype, step_bytes, *largest)
        if not config.enforce_eager:
            graph_bytes = sizing.graph_bytes(whole_logits, dtype, max_num_seqs, *lengths, adapted=config.enable_lora)
        batch_bytes = sizing.batch_bytes(max_num_seqs, *lengths)
        driver_bytes = DRIVER_BYTES if record is None else record.rest_bytes
    plan = DevicePlan(
        kv_dtype=sizing.kv_dtype(config, dtype),
        tensor_parallel=config.tensor_parallel_size,
        num_stages=config.pipeline_parallel_size,
        weight_bytes=sizing.weight_bytes(shard, sizing.weight_quantization(config, spec, device) or dtype, max_len),
        adapter_bytes=sizing.adapter_bytes(config, shard, dtype),
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        batch_bytes=batch_bytes,
        driver_bytes=driver_bytes,
        token_bytes=shard.kv_values_per_token * kv_value_bytes,
        block_bytes=block_bytes,
        layout=layout,
    )
    try:
        plan.kv_budget_bytes, flag = _kv_budget(plan, config, device, memory_bytes)
        plan.ledger = memory.plan_memory(
            config,
            shard,
            device=device,
            weight_bytes=plan.weight_bytes,
            adapter_bytes=plan.adapter_bytes,
            activation_bytes=step_bytes,
            graph_bytes=graph_bytes,
            batch_bytes=batch_bytes,
            block_bytes=block_bytes,
            layout=layout,
            max_span_tokens=max_tokens,
            kv_budget_bytes=plan.kv_budget_bytes,
            kv_budget_flag=kv_size_flag or flag,
        )
        if needs is not None:
            plan.fit = fit_mix(needs, plan.ledger.num_blocks, int(config.watermark * plan.ledger.num_blocks))
    except MemoryBudgetError as error:
        plan.problem = str(error)
    return plan


def _kv_budget(plan: DevicePlan, config: EngineConfig, device: str, memory_bytes: int | None) -> tuple[int, str]:
    """The bytes that are left for the cache, and the flag that sets them."""
    held_bytes, running_bytes = plan.weight_bytes + plan.adapter_bytes, plan.running_bytes
    if device == "cuda":
        assert memory_bytes is not None
        taken_bytes = held_bytes + plan.driver_bytes
        if config.kv_cache_memory_bytes is not None:
            _check_cuda_room(config, memory_bytes, taken_bytes + running_bytes)
        elif taken_bytes + running_bytes >= memory_bytes:
            raise MemoryBudgetError(
                f"weights of {size(held_bytes)} and a step of {size(running_bytes)} do not fit in "
                f"{size(memory_bytes)}: {_advice(taken_bytes, memory_bytes)}"
            )
        free = memory_bytes - taken_bytes
        budget = memory.cuda_kv_budget(
            config, free_bytes=free, total_bytes=memory_bytes, activation_bytes=running_bytes
        )
        return budget, "gpu_memory_utilization"
    room = memory_bytes if memory_bytes is not None else memory.available_host_bytes()
    if room is not None:
        room = room // config.num_ranks - held_bytes  # ranks are all on this machine
        if plan.step_bytes >= room:
            raise MemoryBudgetError(
                f"weights of {size(held_bytes)} and a step of {size(plan.step_bytes)} do not fit in "
                f"{size(room + held_bytes)}: use a machine with more memory, a smaller model, or a smaller weight dtype"
            )
    return memory.cpu_kv_budget(config, plan.step_bytes, free_bytes=room), "kv_cache_memory_bytes"


def _check_cuda_room(config: EngineConfig, memory_bytes: int, taken_bytes: int) -> None:
    """The engine takes kv_cache_memory_bytes at its word; a plan can still say that it will not go in."""
    assert config.kv_cache_memory_bytes is not None
    room = memory_bytes - taken_bytes
    if config.kv_cache_memory_bytes > room:
        raise MemoryBudgetError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} is more than the {size(max(room, 0))} that weights "
            f"and the largest step leave of {size(memory_bytes)}: lower it to {max(room, 0)} or less"
        )


def _advice(fixed_bytes: int, memory_bytes: int) -> str:
    """What to change where weights and a step do not fit: a smaller step is of no use where weights alone do not."""
    if fixed_bytes >= memory_bytes:
        return "use a larger GPU, several of them (-tp, -pp) or a smaller model"
    return "use a larger GPU, several of them (-tp, -pp), a smaller model, or lower max_num_batched_tokens"


def size(num_bytes: float) -> str:
    """Bytes with two places, as all of a plan's numbers have them."""
    return units.size(num_bytes, places=2)
