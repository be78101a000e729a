"""The memory ledger: what goes where, how many blocks the rest makes, and errors that say what would fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quire.config import GIB, EngineConfig
from quire.errors import ConfigError, MemoryBudgetError
from quire.models.kv_layout import KVLayout
from quire.models.spec import ModelSpec
from quire.plan import max_window_blocks
from quire.sizes import show_size as _size
from quire.weights import Checkpoint

DEFAULT_CPU_KV_BYTES = GIB


@dataclass(slots=True, frozen=True)
class MemoryLedger:
    """Bytes on the device (and, for swap, on the host), as planned at start."""

    device: str
    weight_bytes: int
    activation_bytes: int  # of the largest step
    graph_bytes: int  # what captured steps keep to themselves
    batch_bytes: int  # on a GPU: tokens and block tables of as many sequences as may run
    kv_bytes: int
    swap_bytes: int
    block_bytes: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_model_len: int
    windows: tuple[int | None, ...] = (None,)  # by KV group
    adapter_bytes: int = 0  # slots of adapters
    num_ranks: int = 1  # where the model is split, this is the ledger of the rank that holds most

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds; where layers have windows, in sequences of the greatest length."""
        if not self.windows:
            return 0
        if self.windows == (None,):
            return self.num_blocks * self.block_size
        return self.num_blocks * self.max_model_len // self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds while it decodes."""
        num, size = -(-num_tokens // self.block_size), self.block_size
        return sum(num if window is None else min(num, max_window_blocks(window, size)) for window in self.windows)

    def blocks_line(self) -> str:
        """The start-up line that vLLM's users look for."""
        if not self.windows:
            return "no blocks: an encoder keeps no KV"
        if self.device == "cpu":
            return f"# CPU blocks: {self.num_blocks}"
        return f"# GPU blocks: {self.num_blocks}, # CPU blocks: {self.num_host_blocks}"

    def summary(self) -> str:
        entries = [
            ("weights", self.weight_bytes, ""),
            ("adapters' slots", self.adapter_bytes, ""),
            ("activations", self.activation_bytes, ""),
            ("graphs", self.graph_bytes, ""),
            ("sequences' tables", self.batch_bytes, ""),
            (
                "KV cache",
                self.kv_bytes,
                f" ({self.num_blocks:,} blocks of {self.block_size} = {self.num_tokens:,} tokens)",
            ),
            ("host memory", self.swap_bytes, f" ({self.num_host_blocks:,} blocks on the host)"),
        ]
        whose = f"; on the largest of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return ", ".join(f"{name} {_size(size)}{text}" for name, size, text in entries if size) + whose


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    device: str,
    weight_bytes: int,
    activation_bytes: int,
    block_bytes: int,
    layout: KVLayout,
    max_span_tokens: int,
    adapter_bytes: int = 0,
    graph_bytes: int = 0,
    batch_bytes: int = 0,
    kv_budget_bytes: int,
    kv_budget_flag: str,
) -> MemoryLedger:
    """Turn a KV budget into blocks and a length. `kv_budget_flag` is the flag to raise when it is not enough."""
    check_max_model_len(config, spec)
    num_blocks = kv_budget_bytes // block_bytes
    if num_blocks < 2:
        raise MemoryBudgetError(
            f"the KV cache may take {_size(kv_budget_bytes)}, and one block of {config.block_size} tokens takes "
            f"{_size(block_bytes)}: raise {kv_budget_flag}"
        )
    longest = config.max_model_len or spec.max_position
    capacity = layout.capacity_tokens(num_blocks, config.block_size, max_span_tokens, longest)
    max_model_len = config.max_model_len or min(spec.max_position, capacity)
    if max_model_len > capacity:
        need = layout.blocks_for(max_model_len, config.block_size, max_span_tokens) * block_bytes
        raise MemoryBudgetError(
            f"max_model_len={max_model_len} needs a KV cache of {_size(need)} ({need} bytes), and "
            f"{_size(kv_budget_bytes)} are there for it: lower max_model_len to {capacity}, or raise {kv_budget_flag}"
        )
    if config.kv_offloading_size and device == "cpu":
        raise ConfigError(
            "kv_offloading_size: on a CPU host memory is the KV cache's own memory: raise kv_cache_memory_bytes "
            "instead, or keep blocks on disk with kv_disk_path"
        )
    host_gib = config.swap_space_gb + config.kv_offloading_size / config.num_ranks  # as vLLM counts both
    num_host_blocks = int(host_gib * GIB) // block_bytes
    if config.kv_offloading_size and not num_host_blocks:
        raise MemoryBudgetError(f"kv_offloading_size={config.kv_offloading_size} GiB holds no block: raise it")
    if config.swap_space_gb and not num_host_blocks:
        raise MemoryBudgetError(
            f"swap_space_gb={config.swap_space_gb} holds no block: one takes {_size(block_bytes)}, "
            f"so at least {block_bytes / GIB:.3f} is needed"
        )
    return MemoryLedger(
        device=device,
        weight_bytes=weight_bytes,
        adapter_bytes=adapter_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        batch_bytes=batch_bytes,
        kv_bytes=num_blocks * block_bytes,
        swap_bytes=num_host_blocks * block_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        windows=layout.windows,
    )


def with_kv_bytes(config: EngineConfig, block_bytes: int) -> EngineConfig:
    """num_gpu_blocks_override as bytes, since all that follows counts in them."""
    if config.num_gpu_blocks_override is None:
        return config
    wanted = config.num_gpu_blocks_override * block_bytes
    return config.replace(num_gpu_blocks_override=None, kv_cache_memory_bytes=wanted)


def check_max_model_len(config: EngineConfig, spec: ModelSpec) -> None:
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {spec.max_position} positions that this model "
            f"was made for: lower it"
        )


def longest_sequence(
    config: EngineConfig,
    spec: ModelSpec,
    layout: KVLayout,
    *,
    block_bytes: int,
    max_span_tokens: int,
    device_bytes: int | None,
) -> int:
    """The length that tables are made for. No sequence is longer than the largest cache that could be, whatever number
    of positions a model claims. `device_bytes`: a GPU's memory; None for a CPU."""
    if config.max_model_len is not None:
        return config.max_model_len
    kv_bytes = with_kv_bytes(config, block_bytes).kv_cache_memory_bytes or device_bytes or DEFAULT_CPU_KV_BYTES
    fits = layout.capacity_tokens(kv_bytes // block_bytes, config.block_size, max_span_tokens, spec.max_position)
    return min(spec.max_position, max(fits, config.block_size))


def cpu_kv_budget(config: EngineConfig, activation_bytes: int, *, free_bytes: int | None = None) -> int:
    """1 GiB unless told, and never more than half of what is free, which replicas divide: the machine has other work.

    `free_bytes`: what is free beside the weights; None asks the system, and knows that they are loaded.
    """
    free = available_host_bytes() if free_bytes is None else free_bytes
    if free is not None and activation_bytes >= free:
        raise MemoryBudgetError(
            f"a step may take {_size(activation_bytes)} beside weights and KV cache, and {_size(free)} of memory are "
            "free: lower max_num_seqs or max_num_batched_tokens, which set how large a step is, or use a smaller model"
        )
    if config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
        room = None if free is None else free - activation_bytes
        if room is not None and wanted > room:
            raise MemoryBudgetError(
                f"kv_cache_memory_bytes={wanted} ({_size(wanted)}) is more than the {_size(room)} of memory that are "
                f"free: lower it to {room} ({room >> 20}MiB) or less"
            )
        return wanted
    if free is None:
        return DEFAULT_CPU_KV_BYTES
    room = int(max(0, free - activation_bytes) * (config.memory_share or 1.0))
    return min(DEFAULT_CPU_KV_BYTES, room // (2 * config.data_parallel_size))


def check_cpu_weights(checkpoint: Checkpoint) -> None:
    """Check that there is memory for as many bytes as the files hold: where a system promises more than it has, loading
    them would end the process without a word."""
    needed = sum(entry.num_bytes for entry in checkpoint.tensors() or () if entry.view is None)
    free = available_host_bytes()
    if free is not None and needed > free:
        raise MemoryBudgetError(
            f"the model's weights take {_size(needed)}, and {_size(free)} of memory are free: use a smaller model, or "
            "unload another one first"
        )


def cuda_kv_budget(
    config: EngineConfig, *, free_bytes: int, total_bytes: int, activation_bytes: int, others_bytes: int = 0
) -> int:
    """What gpu_memory_utilization leaves beside everything that is already there and the largest step. A model with a
    share of the memory counts its own use alone: `others_bytes` were in use before it came."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    used = total_bytes - free_bytes
    if config.memory_share is not None:
        own = used - others_bytes + activation_bytes
        ours = int(total_bytes * config.gpu_memory_utilization * config.memory_share)
        if own >= ours:
            raise MemoryBudgetError(
                f"memory_share={config.memory_share:g} of {_size(total_bytes)} is {_size(ours)}, and weights and a "
                f"step take {_size(own)}: raise it above {own / (total_bytes * config.gpu_memory_utilization):.2f}"
            )
        return min(ours - own, max(0, free_bytes - activation_bytes))
    budget = int(total_bytes * config.gpu_memory_utilization) - used - activation_bytes
    if budget <= 0:
        fits = (used + activation_bytes) / total_bytes
        raise MemoryBudgetError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {_size(total_bytes)} leaves nothing for the KV "
            f"cache: {_size(used)} are taken and a step needs {_size(activation_bytes)}; raise it above {fits:.2f}"
        )
    return budget


def available_host_bytes() -> int | None:
    """Memory that can be had without swapping, within a container's limit too; None where nobody says."""
    candidates = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(int(line.split()[1]) * 1024)
    except OSError:
        try:
            candidates.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        except (ValueError, OSError):
            return None
    within = _bytes_within_limit(Path("/sys/fs/cgroup"))
    if within is not None:
        candidates.append(within)
    return min(candidates) if candidates else None


def _bytes_within_limit(cgroup: Path) -> int | None:
    """What a container's limit leaves, counting cached files that would make way. None: there is no limit."""
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None  # no cgroup v2
