"""Replicas that Ray puts on machines of their own: a machine that is lost takes no request with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from executor.test_ranks import config_of
from rank_models import write_lively_model
from router.test_replicas import collect, disturb_midway, tokens_of, until

from quire.engine.launch import EngineProcessOptions
from quire.params import OutputKind, SamplingParams
from quire.router.replicas import ReplicaSet

ray = pytest.importorskip("ray", reason="the extra quire[ray] is not installed")

SAMPLED = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.8, seed=3, output_kind=OutputKind.DELTA)
WAIT_S = 100.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that computes nothing, and three machines with room for one replica each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.machines = [made.add_node(num_cpus=1) for _ in range(3)]
    made.wait_for_nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
    ray.shutdown()
    made.shutdown()


def nodes_in_use() -> dict[str, str]:
    """By placement group that is up, its node."""
    table = ray.util.placement_group_table()
    return {
        group: node
        for group, about in table.items()
        if about["state"] == "CREATED"
        for node in about["bundles_to_node_id"].values()
    }


def test_a_machine_is_lost_in_mid_stream(cluster: Any, tmp_path: Path) -> None:
    config = config_of(write_lively_model(tmp_path), distributed_executor_backend="ray")

    async def whole() -> None:
        ray.init(address=cluster.address, log_to_driver=False)
        group = ReplicaSet(config, 2, EngineProcessOptions())
        try:
            await group.start()
            await group.ready()
            places = nodes_in_use()
            assert len(set(places.values())) == 2
            prompts = [f"{letter} is what it begins with" for letter in "abcd"]
            expected = [tokens_of(await collect(group, f"e{i}", p, SAMPLED)) for i, p in enumerate(prompts)]
            lost = next(machine for machine in cluster.machines if machine.node_id in places.values())
            streams = [group.stream(group.prepare(f"s{i}", p, SAMPLED)) for i, p in enumerate(prompts)]
            outputs = await disturb_midway(
                group, streams, lambda: asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
            )
            assert [tokens_of(each) for each in outputs] == expected
            assert group.num_moved > 0
            # The lost one is started again on the machine that was free.
            await until(lambda: len(set(nodes_in_use().values())) == 2 and lost.node_id not in nodes_in_use().values())
            await until(lambda: all(one.is_ready for one in group._members.values()))
        finally:
            await group.close()

    asyncio.run(asyncio.wait_for(whole(), WAIT_S))
