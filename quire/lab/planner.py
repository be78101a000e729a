"""The planner: blocks, lengths and widths from a model's shape and a memory size, and which flags to set.

Nothing is loaded and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from quire import EngineConfig
from quire.executor import sizing
from quire.executor.gpu_record import GpuRecord, record_key
from quire.executor.memory import DEFAULT_CPU_KV_BYTES, check_max_model_len
from quire.lab.device_plan import DevicePlan, plan_device, size
from quire.lab.traffic import Kind, MixNeeds, mix_needs
from quire.models.kv_layout import kv_layout
from quire.models.share import check_degrees, largest_share, max_tensor_size
from quire.models.spec import ModelSpec

TENSOR_PARALLEL = (1, 2, 4, 8)
PlanWith = Callable[[EngineConfig], DevicePlan]  # the device as it is with these settings


@dataclass(slots=True, frozen=True)
class Flag:
    """A recommended flag and why."""

    name: str
    value: str
    reason: str


@dataclass(slots=True)
class Plan:
    """Everything `quire plan` says."""

    model: str
    spec: ModelSpec
    config: EngineConfig
    device: str  # cpu or cuda
    memory_bytes: int | None  # None: a CPU whose free memory nobody says
    dtype: str
    weight_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    chosen: DevicePlan
    choices: list[DevicePlan]
    skipped: list[str]  # tensor-parallel degrees that do not divide the model, and why
    mix: list[Kind]
    needs: MixNeeds | None
    concurrency: int | None
    flags: list[Flag] = field(default_factory=list)
    advised: DevicePlan | None = None  # the device with those flags
    # For the concurrency that was asked: KV bytes, and the device's memory for it.
    wanted_kv_bytes: int | None = None
    wanted_memory_bytes: int | None = None
    record: GpuRecord | None = None  # what the last start on this machine's GPU found
    file_bytes: int | None = None  # the size of a GGUF file, whose packed blocks a CPU keeps as they are

    @property
    def held_spec(self) -> ModelSpec:
        """What a device has of the model; of several, the one with the most."""
        config = self.config
        return largest_share(self.spec, config.tensor_parallel_size, config.pipeline_parallel_size).spec(self.spec)

    @property
    def keeps_file_packed(self) -> bool:
        """Whether the weights take about what the file does: then `weight_bytes` is what they would be unpacked."""
        return (
            self.device == "cpu"
            and self.config.quantization is None
            and self.file_bytes is not None
            and self.file_bytes < self.chosen.weight_bytes
        )

    @property
    def is_exact(self) -> bool:
        """Whether the engine will have this very number of blocks, not only about."""
        if self.config.kv_size_flag is not None:
            return True
        if self.record is not None:
            return self.record.key == record_key(self.config, self.spec)
        return self.device == "cpu" and self.chosen.kv_budget_bytes == DEFAULT_CPU_KV_BYTES

    def to_data(self) -> dict[str, Any]:
        """Plain data, for --json."""
        shape = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")
        data = asdict(self)
        for name in ("spec", "config", "record", "file_bytes"):
            del data[name]
        data["mix_needs"] = data.pop("needs")
        return data | {
            "shape": {name: getattr(self.spec, name) for name in (*shape, "max_position")},
            "block_size": self.config.block_size,
            "exact": self.is_exact,
            "packed_file_bytes": self.file_bytes if self.keeps_file_packed else None,
        }


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    device: str,
    memory_bytes: int | None = None,
    mix: Sequence[Kind] = (),
    concurrency: int | None = None,
    record: GpuRecord | None = None,
) -> Plan:
    """`memory_bytes`: of the GPU; or of the machine, where None asks the system what is free. `record`: of a GPU that
    an engine has started on."""
    check_max_model_len(config, spec)
    check_degrees(spec, config.tensor_parallel_size, config.pipeline_parallel_size)
    assert device == "cpu" or memory_bytes is not None, "a GPU's memory has to be told"
    dtype = sizing.activation_dtype(config, spec, device)
    max_num_seqs, max_tokens = sizing.batch_limits(config, spec, device)
    windows = kv_layout(spec, config.max_model_len).windows
    needs = mix_needs(mix, config.block_size, windows) if mix else None
    plan_with = partial(plan_device, spec=spec, device=device, memory_bytes=memory_bytes, needs=needs, record=record)
    choices, skipped = [], []
    degrees = {config.tensor_parallel_size, *(TENSOR_PARALLEL if device == "cuda" else ())}
    for degree in sorted(degrees):
        if degree > max_tensor_size(spec):
            skipped.append(f"TP {degree}: {spec.num_heads} heads are too few")
            continue
        for kv_dtype in _kv_dtypes(sizing.kv_dtype(config, dtype), device):
            choices.append(plan_with(config.replace(kv_cache_dtype=kv_dtype, tensor_parallel_size=degree)))
    plan = Plan(
        model=config.model,
        spec=spec,
        config=config,
        device=device,
        memory_bytes=memory_bytes,
        dtype=dtype,
        weight_dtype=sizing.weight_quantization(config, spec, device) or dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        chosen=plan_with(config),
        choices=choices,
        skipped=skipped,
        mix=list(mix),
        needs=needs,
        concurrency=concurrency,
        record=record,
    )
    _size_for_concurrency(plan)
    plan.flags, plan.advised = recommend(plan, plan_with)
    return plan


def _kv_dtypes(chosen: str, device: str) -> list[str]:
    """The dtypes to compare, one of each size; the chosen one stands for its size."""
    half = chosen if chosen in ("float16", "bfloat16") else "bfloat16"
    return ["fp8", half, "float32"] if device == "cuda" else [half, "float32"]


def _size_for_concurrency(plan: Plan) -> None:
    """KV bytes, and the device's memory, for as many sequences of the mix as were asked for."""
    if plan.needs is None or plan.concurrency is None:
        return
    blocks = plan.concurrency * plan.needs.mean_blocks / (1 - plan.config.watermark)
    num_blocks = max(plan.needs.max_blocks, int(blocks) + 1)
    device = plan.chosen
    plan.wanted_kv_bytes = num_blocks * device.block_bytes
    other = device.weight_bytes + device.running_bytes + device.driver_bytes
    if plan.device == "cuda":
        plan.wanted_memory_bytes = int((plan.wanted_kv_bytes + other) / plan.config.gpu_memory_utilization) + 1
    else:
        plan.wanted_memory_bytes = plan.wanted_kv_bytes + other


def recommend(plan: Plan, plan_with: PlanWith) -> tuple[list[Flag], DevicePlan]:
    """Which flags to set, each with its reason out of this plan's numbers, and the device as it is with them."""
    flags: list[Flag] = []
    config = plan.config
    longest = max((kind.prompt_len + kind.output_len for kind in plan.mix), default=None)
    if longest is not None and config.max_model_len is None and longest < plan.spec.max_position:
        length = min(plan.spec.max_position, -(-longest // 256) * 256)
        reason = f"your longest request has {longest:,} tokens; the model would take {plan.spec.max_position:,}"
        flags.append(Flag("--max-model-len", str(length), reason))
        config = config.replace(max_model_len=length)
    config = _recommend_more_room(plan, plan_with, config, flags)
    if config.max_num_seqs is None:
        config = _recommend_width(plan, plan_with, config, flags)
    # Not the size of a GPU's cache: the engine measures what is left, and this plan may only reckon it.
    return flags, plan_with(config)


def _recommend_width(plan: Plan, plan_with: PlanWith, config: EngineConfig, flags: list[Flag]) -> EngineConfig:
    """max_num_seqs: what fits, up to the default or to what was asked. A narrower batch needs smaller steps and leaves
    more for the cache, so that it is looked for in rounds."""
    limit = max(plan.max_num_seqs, plan.concurrency or 0)
    width, fits = plan.max_num_seqs, None
    for _ in range(4):
        fit = plan_with(config.replace(max_num_seqs=width)).fit
        if fit is None or not fit.typical:
            return config
        fits = fit.typical
        if width == min(fits, limit):
            break
        width = min(fits, limit)
    if width == plan.max_num_seqs:
        return config
    if width < plan.max_num_seqs:
        reason = f"about {width:,} fit; {plan.max_num_seqs:,} would preempt each other and leave the cache less"
    else:
        reason = f"you asked for {plan.concurrency:,} and {fits:,} fit; the default is {plan.max_num_seqs:,}"
    flags.append(Flag("--max-num-seqs", str(width), reason))
    return config.replace(max_num_seqs=width)


def _is_short(plan: Plan, device: DevicePlan) -> bool:
    if device.ledger is None:
        return True
    return plan.concurrency is not None and device.fit is not None and device.fit.typical < plan.concurrency


def _recommend_more_room(plan: Plan, plan_with: PlanWith, config: EngineConfig, flags: list[Flag]) -> EngineConfig:
    """What to change where the plan falls short: on a CPU a larger cache, if memory allows; else a smaller KV dtype."""
    device = plan_with(config)
    if not _is_short(plan, device):
        return config
    if plan.device == "cpu" and config.kv_size_flag is None and plan.wanted_kv_bytes is not None:
        larger = config.replace(kv_cache_memory_bytes=plan.wanted_kv_bytes)
        if not _is_short(plan, plan_with(larger)):
            reason = f"room for {plan.concurrency:,} at once; a CPU's default is {size(DEFAULT_CPU_KV_BYTES)}"
            flags.append(Flag("--kv-cache-memory-bytes", str(plan.wanted_kv_bytes), reason))
            return larger
    name = "fp8" if plan.device == "cuda" else "bfloat16"
    smaller = config.replace(kv_cache_dtype=name)
    after = plan_with(smaller)
    if after.ledger is None or after.token_bytes >= device.token_bytes:
        return config
    gain = f"{device.token_bytes / after.token_bytes:g} times as many tokens in the same bytes"
    flags.append(Flag("--kv-cache-dtype", name, gain))
    return smaller
