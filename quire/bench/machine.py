"""What the numbers were measured on, and the readings of this process that a run takes while it goes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire

if TYPE_CHECKING:
    from quire import LLMEngine

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def describe_machine() -> dict[str, Any]:
    """This machine's names and versions. Asks for a GPU only where torch is loaded: a server's client needs none."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpus": num_usable_cpus(),
        "memory_bytes": _memory_bytes(),
        "gpu": None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "quire": quire.__version__,
        "torch": package_version("torch"),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_bytes"] = torch.cuda.mem_get_info()[1]
    return facts


def describe_engine(engine: LLMEngine) -> dict[str, Any]:
    """What runs, and with which settings: asked for, or chosen at start."""
    config, backend, ledger = engine.config, engine.built.executor.backend, engine.ledger
    settings: dict[str, Any] = {
        "model": config.model,
        "device": backend.device.type,
        "kernels": str(backend.kernels),
        "dtype": str(backend.weight_dtype).removeprefix("torch."),
        "kv_dtype": str(backend.kv_dtype).removeprefix("torch."),
        "max_model_len": ledger.max_model_len,
        "max_num_seqs": engine.built.executor.max_num_seqs,
        "max_num_batched_tokens": engine.built.executor.max_num_batched_tokens,
        "block_size": ledger.block_size,
        "num_blocks": ledger.num_blocks,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "preemption": config.preemption,
    }
    given = {key: getattr(config, key) for key in sorted(config.given - settings.keys() - {"pinned_prefixes"})}
    return settings | {key: value for key, value in given.items() if isinstance(value, (str, int, float, bool))}


def num_usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rss_bytes() -> int:
    """Memory of this process that is in RAM now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most memory that this process ever had in RAM."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    except (ValueError, OSError):
        return None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
