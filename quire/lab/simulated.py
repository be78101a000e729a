"""From a model, a device and degrees to a simulated engine: blocks by the planner's ledger, costs by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.errors import ConfigError, MemoryBudgetError
from quire.executor import sizing
from quire.lab.device_plan import plan_device
from quire.models.share import check_degrees
from quire.models.spec import ModelSpec
from quire.scheduler import SchedulerConfig
from quire.sim.cost import StepCost
from quire.sim.devices import Device, Efficiency
from quire.sim.profile import RecordedProfile
from quire.sim.replica import ReplicaConfig
from quire.sim.roofline import RooflineCost

_CPU_READERS_STEP_S = 0.12  # as engine/build.py has it


@dataclass(slots=True, frozen=True)
class SimulatedEngine:
    """What a fleet is made of."""

    config: ReplicaConfig
    cost: StepCost
    front_s: float = 0.0  # HTTP and tokenizing before and behind the engine


def engine_by_arithmetic(
    config: EngineConfig,
    spec: ModelSpec,
    device: Device,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    is_read_along: bool = True,
) -> SimulatedEngine:
    """`is_read_along`: a server's steps, which do not let prompts hold up the tokens of others. Raises where it does
    not fit, with the numbers."""
    reached = Efficiency()
    check_degrees(spec, tensor_parallel, pipeline_parallel)
    if tensor_parallel > device.per_machine:
        raise ConfigError(
            f"tensor parallel {tensor_parallel} is more than the {device.per_machine} {device.name} of one machine: "
            f"its sums need their link"
        )
    split = config.replace(tensor_parallel_size=tensor_parallel, pipeline_parallel_size=pipeline_parallel)
    plan = plan_device(split, spec, device="cuda", memory_bytes=device.memory_bytes)
    if plan.ledger is None:
        raise MemoryBudgetError(
            f"{config.model} on {tensor_parallel * pipeline_parallel} × {device.name}: {plan.problem}"
        )
    max_num_seqs, max_tokens = sizing.batch_limits(config, spec, "cuda")
    dtype = sizing.activation_dtype(config, spec, "cuda")
    cost = RooflineCost(
        spec,
        device,
        weight_value_bytes=sizing.matrix_value_bytes(sizing.weight_quantization(config, spec, "cuda") or dtype),
        kv_value_bytes=sizing.DTYPE_BYTES[sizing.kv_dtype(config, dtype)],
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        efficiency=reached,
        has_graphs=not config.enforce_eager,
    )
    smooth_tokens = None
    if config.smooth_prefill_tokens:
        fixed = config.smooth_prefill_tokens
        smooth_tokens = lambda num_decodes: fixed  # noqa: E731
    elif is_read_along and config.smooth_prefill_tokens is None:
        smooth_tokens = sizing.smooth_prompt_tokens
    replica = ReplicaConfig(
        num_blocks=plan.ledger.num_blocks,
        block_size=config.block_size,
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=plan.ledger.max_model_len,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            target_step_ms=config.target_step_ms,
            preemption="recompute",
            kv_bytes_per_block=plan.block_bytes,
            prefill_tokens_per_s=30_000.0,
        ),
        enable_prefix_caching=config.enable_prefix_caching,
        watermark=config.watermark,
        windows=tuple(plan.layout.windows),
        smooth_tokens=smooth_tokens,
        lead_s=reached.lead_s if is_read_along else 0.0,
        first_token_s=reached.first_token_s if is_read_along else 0.0,
    )
    return SimulatedEngine(replica, cost, reached.front_s if is_read_along else 0.0)


def engine_by_profile(profile: RecordedProfile, *, is_read_along: bool = True) -> SimulatedEngine:
    """The engine that was profiled, with its settings."""
    settings = profile.settings
    is_cpu = settings["device"] == "cpu"
    smooth_tokens = sizing.smooth_prompt_tokens if is_read_along and not is_cpu else None
    replica = ReplicaConfig(
        num_blocks=settings["num_blocks"],
        block_size=settings["block_size"],
        scheduler=SchedulerConfig(
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"],
            enable_chunked_prefill=settings.get("enable_chunked_prefill", True),
            preemption="recompute",
            prefill_tokens_per_s=500.0 if is_cpu else 30_000.0,
        ),
        enable_prefix_caching=settings.get("enable_prefix_caching", True),
        smooth_tokens=smooth_tokens,
        target_step_s=_CPU_READERS_STEP_S if is_read_along and is_cpu else None,
        can_leap=not profile.cost.strays,  # every step has its own noise
    )
    return SimulatedEngine(replica, profile.cost)
