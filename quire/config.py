"""EngineConfig: what a user asked of the engine, checked once. Frozen; a derived config is a new one.

`None` means "choose for me": the executor's start-up turns it into a number, from the device and the model, and the
ledger shows what was chosen.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import refusals
from quire.errors import ConfigError
from quire.params import plain, plain_list
from quire.pooling import PoolerConfig
from quire.refusals import reads_arguments, sift
from quire.sizes import read_size
from quire.speculation import SpeculativeConfig

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
GIB = 1 << 30

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
_KV_DTYPES = _DTYPES | {"fp8": "fp8", "fp8_e4m3": "fp8"}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
# Formats that a checkpoint brings: vLLM's users name them, and nothing has to be chosen.
_OF_CHECKPOINTS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")
_POLICIES = ("fcfs", "priority")
_PREEMPTIONS = ("auto", "recompute", "swap")
# vLLM's names of what kv_transfer_config calls kv_role -> ours.
_ROLES = {
    "prefill": "prefill",
    "decode": "decode",
    "both": "both",
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}

# vLLM's spelling -> ours.
_SPELLINGS = {
    "swap_space": "swap_space_gb",
    "max_seq_len": "max_model_len",
    "preemption_mode": "preemption",
    "override_pooler_config": "pooler_config",
}
_RUNNERS = ("auto", "generate", "pooling")
_CONVERSIONS = ("auto", "none", "embed", "classify")
# vLLM's older `task` -> runner and convert.
_TASKS = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
}


def _understood(given: dict[str, Any]) -> dict[str, Any]:
    """What a user wrote under the names of EngineConfig's fields. None is left to the field's default."""
    known = set(EngineConfig.__dataclass_fields__)
    values = dict(given)
    for theirs, ours in _SPELLINGS.items():
        if theirs in values:
            if ours in values:
                raise ConfigError(f"{theirs} and {ours} are the same thing: give one of them")
            values[ours] = values.pop(theirs)
    if values.get("batch_invariant") is None and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        values["batch_invariant"] = True
    values = _with_speculation(_with_task(values))
    values = sift(values, refusals.ENGINE, known, error=lambda _, message: ConfigError(message))
    written = frozenset(values) - {"given"}
    values = {name: _plain(value) for name, value in values.items() if value is not None}
    if values.get("max_model_len") in (-1, "auto"):
        del values["max_model_len"]
    if values.get("long_prefill_token_threshold") == 0:  # vLLM's "no limit"
        del values["long_prefill_token_threshold"]
    if "logits_processors" in values:
        values["logits_processors"] = _processors(values["logits_processors"])
    if "pinned_prefixes" in values:
        values["pinned_prefixes"] = _prefixes(values["pinned_prefixes"])
    return {"given": written, **values}


def _processors(given: Any) -> tuple[Any, ...]:
    """Classes, or their names: in a row, or with commas between."""
    found = given.split(",") if isinstance(given, str) else [given] if isinstance(given, type) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, (str, type)) and one for one in found):
        raise ConfigError(f"logits_processors must be classes or texts such as module:Class, got {given!r}")
    return tuple(one.strip() if isinstance(one, str) else one for one in found)


# vLLM's short spellings -> keys of speculative_config.
_SPECULATION = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def _with_speculation(values: dict[str, Any]) -> dict[str, Any]:
    """Merge speculative_config and its short spellings into one."""
    short = {name: values.pop(name) for name in _SPECULATION if values.get(name) is not None}
    values = {name: value for name, value in values.items() if name not in _SPECULATION}
    given = values.get("speculative_config")
    if not short and (given is None or given == {}):
        return {name: value for name, value in values.items() if name != "speculative_config"}
    if short and given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{', '.join(short)} and speculative_config are the same thing: give one of them")
    keys = dict(given) if isinstance(given, Mapping) else given
    for name, value in short.items():
        assert isinstance(keys, dict) or keys is None
        keys = keys or {}
        if keys.get(_SPECULATION[name]) is not None:
            raise ConfigError(f"{name} and {_SPECULATION[name]} in speculative_config are the same thing: give one")
        keys[_SPECULATION[name]] = value
    return {**values, "speculative_config": SpeculativeConfig.read(keys)}


def _with_task(values: dict[str, Any]) -> dict[str, Any]:
    task = values.get("task")
    values = {name: value for name, value in values.items() if name != "task"}
    if task is None:
        return values
    if task not in _TASKS:
        raise ConfigError(f"task must be one of {', '.join(_TASKS)}, got {task!r}")
    for name, value in _TASKS[task].items():
        if values.get(name) not in (None, "auto", value):
            raise ConfigError(f"task={task!r} and {name}={values[name]!r} contradict each other: give one")
        values[name] = value
    return values


@reads_arguments(_understood)
@dataclass(slots=True, frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told. Also takes vLLM's other spellings, and what of its arguments changes nothing;
    the rest is refused by name, with the reason."""

    # The model
    model: str = "smollm2"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    download_dir: str | None = None  # None: the hub's own cache, and QUIRE_HOME for aliases
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None  # None: as the chat template has it; likewise the next
    reasoning_parser: str | None = None
    allow_special_tokens_in_content: bool = False  # in messages of chats
    runner: str = "auto"  # generate, or pooling: embeddings, scores and classes; auto: as the model is made for
    convert: str = "auto"  # what a pooling model gives: embed or classify
    pooler_config: PoolerConfig | None = None  # or a mapping with vLLM's keys
    max_model_len: int | None = None  # None: the longest that model and cache serve
    seed: int = 0
    # Where and how it runs
    device: str = "auto"
    num_threads: int | None = None  # threads that each replica has
    data_parallel_size: int = 1  # engines behind one server
    roles: tuple[str, ...] = ()  # the role of each engine: prefill, decode or both; empty: all do both
    enforce_eager: bool = False
    enable_sleep_mode: bool = False  # on a GPU weights and cache can be given back for a while; a CPU always can
    batch_invariant: bool = False  # logits depend on nothing but the request; or VLLM_BATCH_INVARIANT=1
    # Among how many devices the model is split
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None  # mp: processes of this machine; ray: where Ray puts them
    # Adapters
    enable_lora: bool = False
    max_loras: int = 1  # adapters in one step
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # kept in host memory; None: as many as max_loras
    # The cache
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False  # measure the scales of an 8-bit cache on the first requests
    quantization_param_path: str | None = None  # a JSON file with the scales of an 8-bit cache
    kv_cache_memory_bytes: int | None = None  # or text such as 4GiB
    num_gpu_blocks_override: int | None = None  # the blocks of the KV cache, on any device
    gpu_memory_utilization: float = 0.92
    memory_share: float | None = None  # the part for this model of what Quire may use; None: all that is free
    swap_space_gb: float = 0.0
    kv_offloading_size: float = 0.0  # GiB of host memory for cached blocks, of all ranks together; on a GPU
    kv_disk_path: str | None = None  # a directory for cached blocks
    kv_disk_size: int | None = None  # bytes that they may take there, or text such as 50GiB; None: by its free space
    kv_transfer_config: Mapping[str, Any] | None = None  # a store of the user's own: docs/tiers.md
    kv_listen: str | None = None  # host:port or a Unix socket's path, where other engines of the model send blocks
    pinned_prefixes: tuple[str | tuple[int, ...], ...] = ()
    watermark: float = 0.01
    # The scheduler
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int | None = None
    target_step_ms: float | None = None
    smooth_prefill_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    priority_ageing_s: float = 10.0
    preemption: str = "auto"
    speculative_config: SpeculativeConfig | None = None  # or a mapping with vLLM's keys
    logits_processors: tuple[Any, ...] = ()  # classes, or texts such as module:Class

    # What the user wrote, for messages; not part of the meaning.
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the model is split among."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_split(self) -> bool:
        """Whether the model runs in ranks, processes of their own, be it in one."""
        return self.num_ranks > 1 or self.distributed_executor_backend == "ray"

    @property
    def kv_size_flag(self) -> str | None:
        """The argument that fixes the size of the KV cache; None: it is what memory allows."""
        names = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def has_kv_stores(self) -> bool:
        return self.kv_disk_path is not None or bool(self.kv_transfer_config) or self.kv_listen is not None

    def __post_init__(self) -> None:
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(f"hf_overrides must map names of config.json to values, got {self.hf_overrides!r}")
        if isinstance(self.kv_cache_memory_bytes, str):
            self._set("kv_cache_memory_bytes", _size(self.kv_cache_memory_bytes, "kv_cache_memory_bytes"))
        if isinstance(self.kv_disk_size, str):
            self._set("kv_disk_size", _size(self.kv_disk_size, "kv_disk_size"))
        for name in ("swap_space_gb", "kv_offloading_size"):
            if isinstance(getattr(self, name), str):
                self._set(name, _gib(getattr(self, name), name))
        self._set("dtype", _choice(_dtype_name(self.dtype), "dtype", _DTYPES))
        self._set("kv_cache_dtype", _choice(_dtype_name(self.kv_cache_dtype), "kv_cache_dtype", _KV_DTYPES))
        _one_of(self.load_format, "load_format", LOAD_FORMATS)
        _one_of(self.scheduling_policy, "scheduling_policy", _POLICIES)
        _one_of(self.preemption, "preemption", _PREEMPTIONS)
        _one_of(self.runner, "runner", _RUNNERS)
        _one_of(self.convert, "convert", _CONVERSIONS)
        if self.pooler_config is not None:
            self._set("pooler_config", PoolerConfig.read(_mapping(self.pooler_config, "pooler_config")))
        if self.quantization is not None:
            if self.quantization in _OF_CHECKPOINTS:
                raise ConfigError(
                    f"quantization must be one of fp8, gguf, int8, got {self.quantization!r}: a checkpoint in that "
                    "format is known by its config.json and read as it is, so leave this out"
                )
            _one_of(self.quantization, "quantization", ("fp8", "gguf", "int8"))
            fitting = ("auto", "float32") if self.quantization == "int8" else ("auto", "bfloat16", "float16")
            if self.dtype not in fitting:
                raise ConfigError(
                    f"quantization={self.quantization!r} and dtype={self.dtype!r} contradict each other: give one"
                )
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size!r}")
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be an alias, a path or a hub id, got {self.model!r}")
        if self.download_dir is not None and (not isinstance(self.download_dir, str) or not self.download_dir):
            raise ConfigError(f"download_dir must be a folder, got {self.download_dir!r}")
        self._check_numbers()
        if self.distributed_executor_backend is not None:
            _one_of(self.distributed_executor_backend, "distributed_executor_backend", ("mp", "ray", "uni"))
            if self.distributed_executor_backend == "uni" and self.num_ranks > 1:
                raise ConfigError(
                    "distributed_executor_backend='uni' is one process, and tensor_parallel_size and "
                    f"pipeline_parallel_size ask for {self.num_ranks}: use 'mp' or 'ray'"
                )
        if self.preemption == "swap" and not self.swap_space_gb:
            raise ConfigError("preemption='swap' needs a host pool: set swap_space_gb to its size, e.g. 4")
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError("kv_cache_memory_bytes and num_gpu_blocks_override both size the KV cache: give one")
        if self.logits_processors and self.speculative_config is not None:
            raise ConfigError("logits_processors see one token at a time: leave out speculative_config")
        for name in ("batch_invariant", "enable_sleep_mode", "calculate_kv_scales"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.enable_sleep_mode and self.num_ranks > 1:
            raise ConfigError("enable_sleep_mode is for a model on one device: leave it out, or the splitting")
        if self.batch_invariant and self.num_ranks > 1:
            raise ConfigError("batch_invariant is for a model on one device so far: leave tensor_parallel_size at 1")
        if self.logits_processors and self.num_ranks > 1:
            raise ConfigError("logits_processors are code, which does not travel to ranks: leave them out")
        if self.pinned_prefixes and not self.enable_prefix_caching:
            raise ConfigError("pinned_prefixes need enable_prefix_caching=True")
        self._check_tiers()
        self._check_kv_scales()
        self._check_adapters()

    def _check_kv_scales(self) -> None:
        names = [name for name in ("calculate_kv_scales", "quantization_param_path") if getattr(self, name)]
        if names and self.kv_cache_dtype != "fp8":
            raise ConfigError(f"{names[0]} has no effect without an 8-bit cache: set kv_cache_dtype='fp8'")
        if len(names) > 1:
            raise ConfigError("calculate_kv_scales and quantization_param_path contradict each other: give one")
        if self.calculate_kv_scales and (self.num_ranks > 1 or self.data_parallel_size > 1 or self.has_kv_stores):
            raise ConfigError(
                "calculate_kv_scales is for one engine on one device without KV stores, because others would measure "
                "other scales: give them in a file with quantization_param_path, or leave it out"
            )

    def _check_adapters(self) -> None:
        if not isinstance(self.enable_lora, bool):
            raise ConfigError(f"enable_lora must be True or False, got {self.enable_lora!r}")
        if not self.enable_lora:
            for name, default in (("max_loras", 1), ("max_lora_rank", 16), ("max_cpu_loras", None)):
                if getattr(self, name) != default:
                    raise ConfigError(f"{name} has no effect without adapters: set enable_lora=True, or leave it out")
            return
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: an adapter of a step is "
                "kept in host memory too"
            )
        if self.batch_invariant:
            raise ConfigError("batch_invariant and enable_lora contradict each other: adapters' products are torch's")

    def _check_tiers(self) -> None:
        if self.kv_transfer_config is not None:
            self._set("kv_transfer_config", _mapping(self.kv_transfer_config, "kv_transfer_config"))
        if self.kv_disk_path is not None and (not isinstance(self.kv_disk_path, str) or not self.kv_disk_path):
            raise ConfigError(f"kv_disk_path must be a directory, got {self.kv_disk_path!r}")
        if self.kv_disk_size is not None and self.kv_disk_path is None:
            raise ConfigError("kv_disk_size has no effect without kv_disk_path: name a directory, or leave it out")
        if (self.kv_offloading_size or self.has_kv_stores) and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size, kv_disk_path, kv_transfer_config and kv_listen are about the prefix cache's "
                "blocks: they need enable_prefix_caching=True"
            )
        if self.roles:
            self._check_roles()
        if self.speculative_config is not None and self.speculative_config.model is not None and self.num_ranks > 1:
            raise ConfigError(
                "speculative_config: a model that is split among ranks has no draft model yet: use method suffix or "
                "ngram, or leave tensor_parallel_size and pipeline_parallel_size out"
            )
        if self.kv_listen is not None and self.is_split:
            raise ConfigError(
                "kv_listen is about the blocks of one process: leave tensor_parallel_size, pipeline_parallel_size and "
                "distributed_executor_backend out"
            )

    def _check_roles(self) -> None:
        """Check that each engine has a role, and that the roles work together."""
        given = self.roles.replace(",", " ").split() if isinstance(self.roles, str) else self.roles
        if not isinstance(given, (list, tuple)) or not all(isinstance(role, str) for role in given):
            raise ConfigError(f"roles are names such as prefill and decode, got {self.roles!r}")
        self._set("roles", tuple(_choice(role, "roles", _ROLES) for role in given))
        if len(self.roles) != self.data_parallel_size:
            raise ConfigError(
                f"{len(self.roles)} roles are given, and data_parallel_size={self.data_parallel_size} engines take "
                "them: give one for each, e.g. -dp 2 --roles prefill decode"
            )
        if "prefill" in self.roles and not {"decode", "both"} & set(self.roles):
            raise ConfigError("roles: nobody goes on with the prompts that are computed: give an engine decode or both")
        if "decode" in self.roles and not {"prefill", "both"} & set(self.roles):
            raise ConfigError("roles: nobody computes prompts: give an engine prefill or both")
        if len(set(self.roles)) > 1 and (not self.enable_prefix_caching or self.is_split):
            raise ConfigError(
                "roles: blocks go from engine to engine by the prefix cache's hashes, and from one process: they need "
                "enable_prefix_caching=True and tensor_parallel_size=1"
            )

    def _check_numbers(self) -> None:
        for name in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_threads", "data_parallel_size"),
            *("long_prefill_token_threshold", "kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_disk_size"),
            *("tensor_parallel_size", "pipeline_parallel_size", "max_loras", "max_lora_rank", "max_cpu_loras"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
        smooth = self.smooth_prefill_tokens
        if smooth is not None and (not isinstance(smooth, int) or isinstance(smooth, bool) or smooth < 0):
            raise ConfigError(f"smooth_prefill_tokens must be a whole number >= 1, or 0 for no limit, got {smooth!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        _between(self.gpu_memory_utilization, "gpu_memory_utilization", 0.0, 1.0, open_low=True)
        if self.memory_share is not None:
            _between(self.memory_share, "memory_share", 0.0, 1.0, open_low=True)
        _between(self.swap_space_gb, "swap_space_gb", 0.0, 1 << 20)
        _between(self.kv_offloading_size, "kv_offloading_size", 0.0, 1 << 20)
        _between(self.watermark, "watermark", 0.0, 0.5)
        _between(self.priority_ageing_s, "priority_ageing_s", 0.0, 1e9, open_low=True)
        if self.target_step_ms is not None:
            _between(self.target_step_ms, "target_step_ms", 0.0, 1e9, open_low=True)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # only from __post_init__: canonical spellings

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else plain(value)


def _prefixes(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        value = [value]
    prefixes: list[str | tuple[int, ...]] = []
    for entry in value:
        if isinstance(entry, str) and entry:
            prefixes.append(entry)
        elif (ids := plain_list(entry)) and all(isinstance(t, int) for t in ids):
            prefixes.append(tuple(ids))
        else:
            raise ConfigError("pinned_prefixes must be texts or lists of token ids, none of them empty")
    return tuple(prefixes)


def _size(value: str, name: str) -> int:
    try:
        return read_size(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be {error}, got {value!r}") from None


def _gib(value: str, name: str) -> float:
    """A number alone is GiB, as vLLM has it; 512M is a size."""
    try:
        return float(value)
    except ValueError:
        return _size(value, name) / GIB


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    """A mapping, or its JSON as command lines have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping, or one as JSON")
    return value


def _dtype_name(value: Any) -> str:
    """Accepts torch.float16 as well as "float16", without importing torch."""
    return str(value).removeprefix("torch.")


def _choice(value: str, name: str, table: Mapping[str, str]) -> str:
    if value not in table:
        raise ConfigError(f"{name} must be one of {', '.join(sorted(set(table.values())))}, got {value!r}")
    return table[value]


def _one_of(value: Any, name: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _between(value: Any, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value!r}")
    if open_low and value == low:
        raise ConfigError(f"{name} must be more than {low:g}")
