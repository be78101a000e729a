"""Ranks and replicas on a real Ray cluster of three nodes: equal tokens across them, and actors and nodes that die."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adapter_files
import pytest
from executor.test_rank_failures import generate
from executor.test_ranks import config_of, run
from rank_models import write_lively_model
from router.test_replicas import collect, tokens_of

from quire.engine.launch import EngineProcessOptions
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, EngineDeadError, RankError
from quire.executor import ray_ranks
from quire.executor.rank_executor import RankExecutor
from quire.lora.request import LoRARequest
from quire.params import OutputKind, SamplingParams
from quire.router.replicas import ReplicaSet

ray = pytest.importorskip("ray", reason="the extra quire[ray] is not installed")
SAMPLED = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.8, seed=3, output_kind=OutputKind.DELTA)
WAIT_S = 240.0  # for what takes 20 s on a machine that has nothing else to do


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("lively"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
    ray.shutdown()
    made.shutdown()


def nodes_of(executor: RankExecutor) -> set[str]:
    hosts = executor._hosts
    assert isinstance(hosts, ray_ranks.RayRanks)
    table = ray.util.placement_group_table(hosts._group)
    return set(table["bundles_to_node_id"].values())


def generated(engine: LLMEngine, adapter: LoRARequest | None) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("adapted", list(range(30)), params, lora_request=adapter)
    while not (done := [output for output in engine.step() if output.finished]):
        pass
    return list(done[0].outputs[0].token_ids)


def test_tokens_across_nodes_and_an_actor_that_is_killed(cluster: Any, model: Path, tmp_path: Path) -> None:
    whole = LLMEngine.from_config(config_of(model, enable_lora=True))
    expected = run(whole)
    degrees = {"enable_lora": True, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    engine = LLMEngine.from_config(config_of(model, distributed_executor_backend="ray", **degrees))
    executor = engine.core.executor
    assert isinstance(executor, RankExecutor)
    assert len(nodes_of(executor)) == 2  # stages are spread over machines
    assert run(engine) == expected
    adapter = LoRARequest("a", 1, str(adapter_files.write_adapter(tmp_path / "a", model)))
    adapted = [generated(each, adapter) for each in (whole, engine)]
    assert adapted[0] == adapted[1] != generated(engine, None)

    victim = executor.members[1]

    def hit(num_steps: int) -> None:
        if num_steps == 3:
            os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(EngineDeadError) as caught:
        generate(engine, hit)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError) and "rank 1" in str(cause) and str(victim.pid) in str(cause)
    engine.close()


def test_a_node_that_is_lost_is_named(cluster: Any, model: Path) -> None:
    engine = LLMEngine.from_config(config_of(model, distributed_executor_backend="ray", pipeline_parallel_size=2))
    executor = engine.core.executor
    assert isinstance(executor, RankExecutor) and isinstance(executor._hosts, ray_ranks.RayRanks)
    ids = executor._hosts._node_of
    rank, node = next((ids.index(node.node_id), node) for node in cluster.worker_nodes if node.node_id in ids)
    generate(engine)
    lost_s = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(EngineDeadError) as caught:
        while time.monotonic() < lost_s + WAIT_S:  # its processes outlive a node, and go on for a while
            generate(engine)
    assert time.monotonic() - lost_s < 10
    cause = str(caught.value.__cause__)
    assert f"rank {rank} " in cause and f"Ray's node {node.node_id[:8]}" in cause and "lost with its node" in cause
    engine.close()
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()


def test_a_node_that_is_lost_takes_no_request_of_its_replica_with_it(cluster: Any, model: Path) -> None:
    config = config_of(model, distributed_executor_backend="ray", enable_prefix_caching=False)
    prompts = [f"{letter} is what it begins with" for letter in "abcd"]

    async def read(group: ReplicaSet, name: str) -> list[list[int]]:
        whole = await asyncio.gather(*(collect(group, f"{name}{i}", p, SAMPLED) for i, p in enumerate(prompts)))
        return [tokens_of(outputs) for outputs in whole]

    async def whole() -> None:
        group = ReplicaSet(config, 2, EngineProcessOptions())
        try:
            await group.start()
            await group.ready()
            expected = await read(group, "e")
            lost = next(node for node in cluster.worker_nodes if node.node_id in nodes_in_use())
            moving = asyncio.create_task(seconds_until(lambda: group.num_moved > 0))
            removal = asyncio.create_task(asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False))
            for count in itertools.count():
                assert await read(group, f"r{count}-") == expected  # nothing is lost, and nothing repeated
                if group.num_moved:
                    break
            assert await moving < 10
            await removal
            assert len(group.router.replicas) == 1
            assert await read(group, "s") == expected  # the other one serves
            while len(group.router.replicas) < 2:  # and the lost one is started again where there is room
                await asyncio.sleep(0.1)
            assert len(nodes_in_use()) == 2 and lost.node_id not in nodes_in_use()
        finally:
            await group.close()

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        asyncio.run(asyncio.wait_for(whole(), WAIT_S))
    finally:
        ray.shutdown()
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()


async def seconds_until(condition: Callable[[], bool]) -> float:
    since_s = time.monotonic()
    while not condition():
        await asyncio.sleep(0.01)
    return time.monotonic() - since_s


def nodes_in_use() -> set[str]:
    table = ray.util.placement_group_table().values()
    return {node for about in table if about["state"] == "CREATED" for node in about["bundles_to_node_id"].values()}


def test_tensor_parallel_across_nodes(cluster: Any, model: Path) -> None:
    expected = run(LLMEngine.from_config(config_of(model)))
    engine = LLMEngine.from_config(config_of(model, distributed_executor_backend="ray", tensor_parallel_size=2))
    assert run(engine) == expected
    engine.close()


def test_more_than_the_cluster_has_is_refused_with_what_it_has(cluster: Any, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster has 3 CPUs, and 2 ranks need 2 each"):
        LLMEngine.from_config(
            config_of(model, distributed_executor_backend="ray", tensor_parallel_size=2, num_threads=2)
        )


def test_ranks_ask_for_a_gpu_each_where_there_are_some(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Group:
        has_room = True

        def wait(self, seconds: float) -> bool:
            return self.has_room

    def placement_group(bundles: Any, strategy: str) -> Group:
        asked.append((bundles, strategy))
        return Group()

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0, "GPU": 4.0})
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(ray.util, "placement_group", placement_group)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda group: {"bundles_to_node_id": dict(enumerate("ab"))})
    degrees = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert ray_ranks.RayRanks(config_of(model, device="auto", **degrees))._place() == ["a", "b"]
    assert ray_ranks.RayRanks(config_of(model, **degrees))._place() == ["a", "b"]  # on CPUs, as it was told
    assert asked == [([{"CPU": 2, "GPU": 2}] * 2, "SPREAD"), ([{"CPU": 2}] * 2, "SPREAD")]
    with pytest.raises(ConfigError, match=r"cluster has 4 GPUs, and 5 ranks need 1 each"):
        ray_ranks.RayRanks(config_of(model, device="auto", tensor_parallel_size=5))._place()
    monkeypatch.setattr(Group, "has_room", False)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0, "GPU": 4.0})
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    with pytest.raises(RankError, match=r"no room for 2 × 1 CPUs in 60 s, 1 of 16 CPUs are free"):
        ray_ranks.RayRanks(config_of(model, tensor_parallel_size=2))._place()


def test_a_cluster_that_is_not_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("refused")

    def refuse_version(*_: Any, **__: Any) -> None:
        raise RuntimeError("Version mismatch: the cluster was started with Ray 2.50")

    with pytest.raises(RankError, match=r"the Ray cluster cannot be joined: Version mismatch"):
        monkeypatch.setattr(ray, "init", refuse_version)
        LLMEngine.from_config(config_of(model, distributed_executor_backend="ray", tensor_parallel_size=2))
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RankError, match=r"RAY_ADDRESS=127\.0\.0\.1:1"):
        LLMEngine.from_config(config_of(model, distributed_executor_backend="ray", tensor_parallel_size=2))
