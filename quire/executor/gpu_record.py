"""The memory that the last start on each kind of GPU found in use and that no shape tells: the planner, which runs
nothing, takes it from here. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.config import EngineConfig
from quire.executor.sizing import activation_dtype, batch_limits
from quire.models.spec import ModelSpec
from quire.weights.aliases import quire_home

_NAME = "gpu-memory.json"


@dataclass(slots=True, frozen=True)
class GpuRecord:
    """`rest_bytes`: the driver, the kernels' code, the libraries' workspaces, and whatever the reckoning missed."""

    total_bytes: int
    rest_bytes: int
    key: str  # of the model and the settings that it was found with: for the same ones a plan is exact


def record_key(config: EngineConfig, spec: ModelSpec) -> str:
    """A digest of what decides how much memory is taken before the cache is made."""
    settings = (
        activation_dtype(config, spec, "cuda"),
        batch_limits(config, spec, "cuda"),
        config.max_model_len,
        config.block_size,
        config.kv_cache_dtype,
        config.enforce_eager,
        config.quantization,
        config.enable_lora,  # a step without adapters may take less than is reckoned, and one with them as much
        config.batch_invariant,
    )
    return hashlib.sha256(repr((spec, settings)).encode()).hexdigest()[:16]


def remember_gpu(name: str, record: GpuRecord) -> None:
    """Replace what was known of GPUs of this name. A disk that cannot be written is no reason not to start."""
    with suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _read(path) | {name: asdict(record)}
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=1) + "\n")
        part.replace(path)


def recall_gpu(name: str) -> GpuRecord | None:
    entry = _read(_path()).get(name)
    try:
        record = GpuRecord(**entry) if isinstance(entry, dict) else None
    except TypeError:
        return None  # another version's
    if record is None or not (0 < record.rest_bytes < record.total_bytes):
        return None
    return record


def _path() -> Path:
    return quire_home() / _NAME


def _read(path: Path) -> dict[str, object]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
