"""Choosing device, precision and kernel backend: the one place that names devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.sizing import activation_dtype, packed_layout, weight_quantization
from quire.executor.sizing import kv_dtype as kv_dtype_name
from quire.kernels import cpu as native
from quire.kernels.cpu.threads import default_num_threads, usable_cpus
from quire.kernels.interface import Ops
from quire.kernels.reference import ReferenceOps
from quire.log import get_logger
from quire.models.spec import ModelSpec

_RANKS_PER_GPU = "QUIRE_RANKS_PER_GPU"
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True, frozen=True)
class Backend:
    """Where and with what a model runs."""

    device: torch.device
    ops: Ops
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    weight_dtype: str  # as shown to users: float32, bfloat16, float16, int8, fp8, w4a16, w8a16
    kernels: str  # likewise: which ones, and on how many threads
    note: str | None = None  # why a slower backend was chosen, where it was

    @property
    def shown_weights(self) -> str:
        """What a start tells of the weights, and of what multiplies packed ones."""
        kinds = sorted(getattr(self.ops, "packed_kinds", ()))
        if not kinds:
            return self.weight_dtype
        activations = "float32" if getattr(self.ops, "exact", False) else "8-bit"
        return f"{', '.join(kinds)} with {activations} activations"

    @property
    def is_native_cpu(self) -> bool:
        return self.ops.name == "cpu"

    @property
    def serves_determinism(self) -> bool:
        """Whether single requests can be computed in one order of summation, whatever runs beside them."""
        return self.is_native_cpu


def choose_backend(config: EngineConfig, spec: ModelSpec) -> Backend:
    """Raises ConfigError, naming what can be chosen instead, where device, dtypes and block size do not go together."""
    device = _device(config.device)
    dtype = activation_dtype(config, spec, device.type)
    kv_dtype = _kv_dtype(config, dtype, device)
    if spec.is_encoder and device.type == "cuda":  # its operations are torch's own, in half precision
        if config.batch_invariant:
            raise ConfigError(
                "batch_invariant on a GPU is for decoders: set device='cpu' for this encoder, or leave it out"
            )
        ops = ReferenceOps(device, _TORCH_DTYPES[dtype])
        return Backend(device, ops, _TORCH_DTYPES[dtype], kv_dtype, dtype, "torch kernels")
    backend = _cuda(config, spec, dtype, kv_dtype, device) if device.type == "cuda" else _cpu(config, dtype, kv_dtype)
    if spec.is_encoder:
        return backend
    sizes = backend.ops.supported_block_sizes(spec.head_dim)
    if not sizes:
        raise ConfigError(f"the {backend.ops.name} backend cannot serve a head dimension of {spec.head_dim}")
    if config.block_size not in sizes:
        raise ConfigError(
            f"block_size={config.block_size} cannot be served by the {backend.ops.name} backend with a head dimension "
            f"of {spec.head_dim}: choose one of {', '.join(map(str, sizes))}"
        )
    return backend


def ranks_per_gpu() -> int:
    """One, unless a test has several ranks share a GPU, which makes nothing faster."""
    return int(os.environ.get(_RANKS_PER_GPU, "1"))


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """(bytes in use by anyone, bytes there are) on a GPU; None on a CPU, whose memory is the process's."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def device_of_rank(config: EngineConfig, local_rank: int) -> torch.device:
    """local_rank: among the ranks of this machine that see the same GPUs."""
    device = _device(config.device)
    if device.type != "cuda":
        return device
    index, count = (device.index or 0) + local_rank // ranks_per_gpu(), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"tensor_parallel_size × pipeline_parallel_size = {config.num_ranks} ranks need a GPU each, and torch sees "
            f"{count} here: split the model among fewer, or set device='cpu'"
        )
    return torch.device("cuda", index)


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu or cuda, got {wanted!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {wanted!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' was asked for, and torch sees no CUDA GPU: use device='cpu' or 'auto'")
        return torch.device("cuda", device.index or 0)
    return device


def _kv_dtype(config: EngineConfig, dtype: str, device: torch.device) -> torch.dtype:
    name = kv_dtype_name(config, dtype)
    if name == "fp8":
        if device.type == "cpu":
            raise ConfigError("kv_cache_dtype='fp8' needs a GPU: on a CPU use float16 or bfloat16, which halve float32")
        return torch.float8_e4m3fn
    return _TORCH_DTYPES[name]


def _cpu(config: EngineConfig, dtype: str, kv_dtype: torch.dtype) -> Backend:
    device = torch.device("cpu")
    if "gpu_memory_utilization" in config.given:
        get_logger().warning(
            "gpu_memory_utilization has no effect on a CPU: kv_cache_memory_bytes sets the size of the KV cache"
        )
    if config.quantization == "fp8":
        raise ConfigError("quantization='fp8' needs a GPU: on a CPU use 'int8'")
    if config.quantization == "gguf":
        raise ConfigError("quantization='gguf' is for a GPU: on a CPU a GGUF file's weights stay packed without it")
    if config.num_threads is not None and config.num_threads > (num_cpus := len(usable_cpus())):
        get_logger().warning(
            f"num_threads={config.num_threads} is more than the {num_cpus} processors that this process has: "
            "threads that wait for a processor hold up the others"
        )
    reason = native.unavailable_reason()
    weight_dtype = config.quantization or dtype
    if reason is None:
        # float32 by name is exact; left to us, packed weights are multiplied by activations in 8 bits.
        exact = config.dtype == "float32"
        ops = native.CpuOps(weight_dtype=weight_dtype, num_threads=_num_threads(config), exact=exact)
        kernels = f"native {ops.isa} kernels on {ops.num_threads} threads"
        return Backend(device, ops, torch.float32, kv_dtype, weight_dtype, kernels)
    if reason.startswith(native.STALE):
        raise ConfigError(reason)  # somebody changed or updated a checkout: half the speed would pass unnoticed
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant needs the native CPU kernels, but {reason}")
    if config.quantization:
        raise ConfigError(f"quantization={config.quantization!r} needs the native CPU kernels, but {reason}")
    if config.num_threads is not None or config.data_parallel_size > 1:
        torch.set_num_threads(_num_threads(config) or torch.get_num_threads())
    if weight_dtype != "float32":
        # torch would widen every matrix again in every step: smaller, and far slower.
        raise ConfigError(f"dtype={weight_dtype!r} on a CPU needs the native kernels, but {reason}")
    kernels = f"plain torch kernels on {torch.get_num_threads()} threads"
    note = f"plain torch kernels are used, at about half the speed: {reason}"
    return Backend(device, ReferenceOps(device, torch.float32), torch.float32, kv_dtype, weight_dtype, kernels, note)


def _num_threads(config: EngineConfig) -> int | None:
    """How many threads the kernels use; None: as many as there are cores. Replicas on one machine divide them."""
    if config.num_threads is not None or config.data_parallel_size == 1:
        return config.num_threads
    return max(1, default_num_threads() // config.data_parallel_size)


def _cuda(config: EngineConfig, spec: ModelSpec, dtype: str, kv_dtype: torch.dtype, device: torch.device) -> Backend:
    if config.quantization == "int8":
        raise ConfigError(f"quantization={config.quantization!r} is for the CPU: remove it, or use device='cpu'")
    if config.num_threads is not None:
        raise ConfigError("num_threads is for the CPU: remove it, or use device='cpu'")
    torch_dtype = _TORCH_DTYPES[dtype]
    from quire.kernels import triton

    reason = triton.unavailable_reason()
    quantization = weight_quantization(config, spec, "cuda")
    if quantization == "gguf":
        for name, value in (("the Triton kernels", reason), ("enable_lora=False", config.enable_lora)):
            if value:
                raise ConfigError(f"quantization='gguf' needs {name}: leave one of the two out")
        if config.num_ranks > 1:
            raise ConfigError("quantization='gguf' is for one GPU: leave it out, or tensor_parallel_size")
    if quantization == "fp8":
        _check_fp8(spec, dtype, device, reason)
    if config.batch_invariant:
        _check_invariant(config, spec, dtype, kv_dtype, device, reason)
        from quire.kernels.triton.invariant import InvariantOps

        return Backend(device, InvariantOps(device, torch_dtype), torch_dtype, kv_dtype, dtype, "Triton kernels")
    if reason is None:
        ops = triton.TritonOps(device, torch_dtype, quantization=quantization, packed=packed_layout(config, spec))
        return Backend(device, ops, torch_dtype, kv_dtype, quantization or dtype, "Triton kernels")
    plain_ops = ReferenceOps(device, torch_dtype)
    note = f"plain torch kernels are used, far slower: {reason}"
    return Backend(device, plain_ops, torch_dtype, kv_dtype, dtype, "plain torch kernels", note)


def _check_invariant(
    config: EngineConfig, spec: ModelSpec, dtype: str, kv_dtype: torch.dtype, device: torch.device, reason: str | None
) -> None:
    """Check that a GPU computes every row of this model in an order that does not depend on other rows."""
    capability = torch.cuda.get_device_capability(device)
    obstacles = {
        "the Triton kernels": reason,
        "dtype='bfloat16' or 'float16'": dtype == "float32",
        "weights that are not quantized": weight_quantization(config, spec, "cuda"),
        "a KV cache in the activations' dtype": kv_dtype != _TORCH_DTYPES[dtype],
        "a model without experts": spec.experts is not None,
        "a model without attention biases (ALiBi) and sinks": spec.alibi_slopes is not None or spec.sinks,
        "a GPU of compute capability 9.0 (Hopper)": capability != (9, 0),
    }
    for needed, is_missing in obstacles.items():
        if is_missing:
            raise ConfigError(
                f"batch_invariant on a GPU needs {needed}: change that, set device='cpu', or leave it out "
                "(VLLM_BATCH_INVARIANT sets it too)"
            )


def _check_fp8(spec: ModelSpec, dtype: str, device: torch.device, reason: str | None) -> None:
    """Check that the layers' matrices can be held and multiplied in 8-bit floats."""
    if reason is not None:
        raise ConfigError(f"weights in FP8 need the Triton kernels, but {reason}")
    if dtype == "float32":
        raise ConfigError("weights in FP8 go with dtype='bfloat16' or 'float16'")
    if (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ConfigError(
            f"weights in FP8 need a GPU of compute capability 8.9 or newer, this one has {capability[0]}."
            f"{capability[1]}: use an unquantized checkpoint without quantization='fp8'"
        )
