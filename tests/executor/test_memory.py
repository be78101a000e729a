"""The ledger: blocks out of bytes, and errors that name the value that would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import pytest

from quire.config import GIB, EngineConfig
from quire.errors import ConfigError, MemoryBudgetError
from quire.executor import memory
from quire.executor.memory import check_cpu_weights, cpu_kv_budget, cuda_kv_budget, longest_sequence, plan_memory
from quire.models.architectures import spec_from_config
from quire.models.kv_layout import kv_layout

SPEC = spec_from_config(fakes.TINY_LLAMA, source="test")
BLOCK = 2 * 2 * 2 * 32 * 16 * 4  # K and V, layers, KV heads, head_dim, tokens, float32


def plan(budget: int, device: str = "cpu", **kwargs: Any) -> memory.MemoryLedger:
    return plan_memory(
        EngineConfig(**kwargs),
        SPEC,
        device=device,
        weight_bytes=1000,
        activation_bytes=500,
        block_bytes=BLOCK,
        layout=kv_layout(SPEC, None),
        max_span_tokens=64,
        kv_budget_bytes=budget,
        kv_budget_flag="kv_cache_memory_bytes",
    )


def test_blocks_fill_the_budget() -> None:
    ledger = plan(10 * BLOCK + BLOCK // 2, swap_space_gb=3 * BLOCK / GIB)
    assert (ledger.num_blocks, ledger.kv_bytes, ledger.num_host_blocks) == (10, 10 * BLOCK, 3)
    assert ledger.max_model_len == 160  # the model could 256, the cache cannot
    assert "10 blocks of 16 = 160 tokens" in ledger.summary()
    assert "3 blocks on the host" in ledger.summary()
    assert plan(100 * BLOCK).max_model_len == 256


def test_the_host_level_is_for_all_ranks_together_and_swap_for_each() -> None:
    sizes = {"kv_offloading_size": 12 * BLOCK / GIB, "swap_space_gb": 2 * BLOCK / GIB}
    assert plan(10 * BLOCK, "cuda", **sizes).num_host_blocks == 14
    assert plan(10 * BLOCK, "cuda", **sizes, tensor_parallel_size=2, pipeline_parallel_size=2).num_host_blocks == 5


@pytest.mark.parametrize(
    ("budget", "kwargs", "words"),
    [
        (BLOCK, {}, "raise kv_cache_memory_bytes"),
        (4 * BLOCK, {"max_model_len": 65}, "lower max_model_len to 64, or raise kv_cache_memory_bytes"),
        (4 * BLOCK, {"max_model_len": 65}, str(5 * BLOCK)),
        (4 * BLOCK, {"swap_space_gb": 1e-9}, "at least"),
    ],
)
def test_what_does_not_fit(budget: int, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(MemoryBudgetError, match=words):
        plan(budget, **kwargs)


def test_longer_than_the_model() -> None:
    with pytest.raises(ConfigError, match="256 positions"):
        plan(100 * BLOCK, max_model_len=257)


def test_tables_are_no_longer_than_any_cache() -> None:
    def length(max_position: int, device_bytes: int | None = None, **kwargs: Any) -> int:
        spec = replace(SPEC, max_position=max_position)
        config = EngineConfig(**kwargs)
        layout = kv_layout(spec, None)
        sizes = {"block_bytes": BLOCK, "max_span_tokens": 512, "device_bytes": device_bytes}
        return longest_sequence(config, spec, layout, **sizes)

    assert length(256) == 256
    assert length(2**31 - 1) == GIB // BLOCK * 16
    assert length(2**31 - 1, 80 * GIB) == 80 * GIB // BLOCK * 16
    assert length(2**31 - 1, 80 * GIB, kv_cache_memory_bytes=4 * BLOCK) == 64
    assert length(2**31 - 1, max_model_len=100) == 100
    assert length(2**31 - 1, kv_cache_memory_bytes=1) == 16  # what is too small for a block is refused by the ledger


@pytest.mark.parametrize("num_windowed", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [4, 40, 400])
def test_tables_are_as_long_as_the_sequences_that_the_ledger_allows(num_windowed: int, num_blocks: int) -> None:
    layers = tuple(replace(one, window=32 if i < num_windowed else None) for i, one in enumerate(SPEC.layers))
    spec = replace(SPEC, layers=layers, max_position=4096)
    layout = kv_layout(spec, None)
    block_bytes = layout.block_bytes(spec, 16, 4)
    config = EngineConfig(kv_cache_memory_bytes=num_blocks * block_bytes)
    ledger = plan_memory(
        config,
        spec,
        device="cpu",
        layout=layout,
        max_span_tokens=64,
        weight_bytes=0,
        activation_bytes=0,
        block_bytes=block_bytes,
        kv_budget_bytes=num_blocks * block_bytes,
        kv_budget_flag="kv_cache_memory_bytes",
    )
    sizes = {"block_bytes": block_bytes, "max_span_tokens": 64, "device_bytes": None}
    assert longest_sequence(config, spec, layout, **sizes) == ledger.max_model_len


def test_cpu_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 10 * GIB)
    assert cpu_kv_budget(EngineConfig(), 0) == GIB
    assert cpu_kv_budget(EngineConfig(kv_cache_memory_bytes=3 * GIB), 0) == 3 * GIB
    with pytest.raises(MemoryBudgetError, match=f"lower it to {9 * GIB}"):
        cpu_kv_budget(EngineConfig(kv_cache_memory_bytes=20 * GIB), GIB)
    with pytest.raises(MemoryBudgetError, match=r"\(20\.00 GiB\) is more than the 9\.00 GiB .* \(9216MiB\) or less"):
        cpu_kv_budget(EngineConfig(kv_cache_memory_bytes=20 * GIB), GIB)
    for config in (EngineConfig(), EngineConfig(kv_cache_memory_bytes=GIB)):
        with pytest.raises(
            MemoryBudgetError, match=r"a step may take 10\.00 GiB .* lower max_num_seqs or max_num_batch"
        ):
            cpu_kv_budget(config, 10 * GIB)  # not what the cache takes is too much
    monkeypatch.setattr(memory, "available_host_bytes", lambda: GIB)
    assert cpu_kv_budget(EngineConfig(), 0) == GIB // 2  # memory is short: less
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    assert cpu_kv_budget(EngineConfig(), 0) == GIB


def test_cuda_budget() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    assert cuda_kv_budget(config, free_bytes=80, total_bytes=100, activation_bytes=10) == 20
    with pytest.raises(MemoryBudgetError, match=r"raise it above 0\.60"):
        cuda_kv_budget(config, free_bytes=50, total_bytes=100, activation_bytes=10)


@pytest.mark.parametrize(("limit", "left"), [("1000", 1000 - 700 + 250), ("max", None)])
def test_files_that_nobody_uses_make_way_within_a_containers_limit(
    tmp_path: Path, limit: str, left: int | None
) -> None:
    assert memory._bytes_within_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\nactive_file 150\n")
    assert memory._bytes_within_limit(tmp_path) == left


def test_available_memory_is_known_here() -> None:
    available = memory.available_host_bytes()
    assert available is not None
    assert available > 0


def test_a_share_of_a_gpu_counts_what_the_model_itself_takes() -> None:
    config = EngineConfig(gpu_memory_utilization=0.9, memory_share=0.5)
    taken = {"total_bytes": 100 * GIB, "activation_bytes": GIB}
    # 30 GiB were taken before it came, 10 GiB are its own weights: of its 45 GiB, 34 are left for the cache.
    assert cuda_kv_budget(config, free_bytes=60 * GIB, others_bytes=30 * GIB, **taken) == 34 * GIB
    assert cuda_kv_budget(config, free_bytes=20 * GIB, others_bytes=70 * GIB, **taken) == 19 * GIB  # others have more
    with pytest.raises(
        MemoryBudgetError, match=r"is 45\.00 GiB, and weights and a step take 51\.00 GiB: raise it above 0\.57"
    ):
        cuda_kv_budget(config, free_bytes=50 * GIB, others_bytes=0, **taken)


def test_a_share_of_a_cpu_is_of_the_room_for_the_cache() -> None:
    assert cpu_kv_budget(EngineConfig(memory_share=0.25), 0, free_bytes=4 * GIB) == GIB // 2


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Files:
        def tensors(self) -> list[Any]:
            return [SimpleNamespace(num_bytes=3 * GIB, view=None)]

    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2 * GIB)
    with pytest.raises(MemoryBudgetError, match=r"take 3\.00 GiB, and 2\.00 GiB of memory are free"):
        check_cpu_weights(Files())  # type: ignore[arg-type]
