"""Ranks on CUDA: two share the one GPU that a test machine has, which proves sums, graphs and tokens, and no speed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter_files
import pytest
from rank_models import write_lively_model
from test_gpu import requests, run_all, same_until_a_tie, same_up_to_ties

from quire import LLMEngine
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.rank_executor import RankExecutor
from quire.lora.request import LoRARequest
from quire.outputs import RequestOutput

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("lively"))


@pytest.fixture(scope="module")
def whole(weights: Path) -> list[RequestOutput]:
    return run_all(make(weights), requests(24))


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_RANKS_PER_GPU", "8")
    yield


def make(weights: Path, **kwargs: Any) -> LLMEngine:
    values = {"kv_cache_memory_bytes": 4 << 20, "dtype": "float32", "device": "cuda"} | kwargs
    return LLMEngine.from_config(EngineConfig(model=str(weights), **values))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3, "max_num_seqs": 5, "max_num_batched_tokens": 32},
        {"tensor_parallel_size": 2, "enforce_eager": True, "kv_cache_memory_bytes": 24 * 16 * 1024,
         "preemption": "swap", "swap_space_gb": 0.01},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tp 2", "tp 3", "tp 2 without graphs", "pp 2"],
)  # fmt: skip
def test_the_tokens_of_one_rank(
    weights: Path, whole: list[RequestOutput], shared_gpu: None, kwargs: dict[str, Any]
) -> None:
    engine = make(weights, **kwargs)
    assert isinstance(engine.core.executor, RankExecutor) and engine.built.tokens.executor.backend.device.type == "cuda"
    same_up_to_ties(run_all(engine, requests(24)), whole)
    engine.close()


@pytest.mark.parametrize("level", ["disk", "host"])
def test_levels_below(weights: Path, whole: list[RequestOutput], shared_gpu: None, tmp_path: Path, level: str) -> None:
    """Every rank keeps its part of each block, and loads it when the others do."""
    below: dict[str, Any] = {"kv_offloading_size": 0.04}
    if level == "disk":
        below = {"kv_disk_path": str(tmp_path), "kv_disk_size": 32 << 20}
    engine = make(weights, tensor_parallel_size=2, **below)
    for store in engine.built.executor.executor.stores:
        store.load_s = lambda num_blocks: 0.0  # type: ignore[method-assign]  # else so small a model is computed
    for _ in range(2):
        same_up_to_ties(run_all(engine, requests(24)), whole)
        engine.core.settle(30.0)
        engine.core.kv.reset_prefix_cache()
        engine.core.kv.check()
    tiers = engine.core.kv.tiers
    assert tiers is not None and tiers.counters.levels[level].num_loaded > 0
    engine.close()


def test_experts_are_split(tmp_path: Path, shared_gpu: None) -> None:
    """Each rank has some columns of every expert."""
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    weights = write_lively_model(tmp_path, num_local_experts=4, num_experts_per_tok=2, **mixtral)
    expected = run_all(make(weights), requests(24))
    engine = make(weights, tensor_parallel_size=2)
    same_up_to_ties(run_all(engine, requests(24)), expected)
    engine.close()


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["tp 2", "pp 2"])
def test_adapters_are_split(tmp_path: Path, weights: Path, shared_gpu: None, degrees: tuple[int, int]) -> None:
    adapters: list[LoRARequest | None] = [None]
    for number, rank in enumerate((3, 20), 1):
        path = adapter_files.write_adapter(tmp_path / str(number), weights, rank=rank, seed=number)
        adapters.append(LoRARequest(str(number), number, str(path)))
    slots = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    whole = make(weights, **slots)
    engine = make(weights, **slots, tensor_parallel_size=degrees[0], pipeline_parallel_size=degrees[1])
    for count in (24, 1):  # one token at a time has kernels of its own
        work = requests(24)[-count:]
        found = [run_all(one, work, adapters[-count:]) for one in (whole, engine)]
        if count > 1:
            same_up_to_ties(found[1], found[0])
        else:
            assert same_until_a_tie(found[1][0], found[0][0]) > 0
    engine.close()


def test_more_ranks_than_gpus_are_refused(weights: Path) -> None:
    import torch

    count = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=f"{count} ranks need a GPU each"):
        make(weights, pipeline_parallel_size=count)


_ONE_RANK = """
import torch
import torch.distributed as dist
from quire.parallel.ranks import Ranks

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
ranks = Ranks(dist.HashStore(), 0, 1, 1, [96], device)
assert dist.get_backend_config() == "cpu:gloo,cuda:nccl", dist.get_backend_config()
x = torch.randn(33, 96, device=device)
expected = x.clone()
assert torch.equal(ranks.sum(x), expected)
graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(x)
with torch.cuda.graph(graph):
    out.copy_(ranks.sum(x * 2))
for _ in range(3):
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, x * 2)
gathered = ranks.gather(x)
assert gathered is not None and torch.equal(gathered, x)
ranks.close()
"""


def test_nccl_sums_in_a_captured_graph() -> None:
    """With the one rank that one GPU can have; in a process of its own, since torch has one group in each."""
    done = subprocess.run([sys.executable, "-c", _ONE_RANK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
