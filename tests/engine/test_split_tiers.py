"""Levels below the device on a model that is split among ranks: the tokens are those of one process without levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.test_tiers import conversations, damage, loaded, serve
from executor.test_rank_failures import wait_for
from executor.test_ranks import config_of
from rank_models import write_lively_model
from scheduler.harness import Rig, make_request

from quire.engine import calls
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.tiers.split import SplitStore

PROMPTS = conversations(1, 24)
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("lively"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[Any]]:
    engine = LLMEngine.from_config(config_of(model))
    found = serve(engine, PROMPTS)
    engine.close()
    return found


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all degrees, which do not see each other's blocks."""
    return tmp_path_factory.mktemp("disk")


def make(model: Path, degrees: tuple[int, int], disk: Path, **settings: Any) -> LLMEngine:
    config = config_of(
        model,
        tensor_parallel_size=degrees[0],
        pipeline_parallel_size=degrees[1],
        kv_disk_path=str(disk),
        kv_disk_size=8 << 20,
        num_gpu_blocks_override=48,
        **settings,
    )
    return LLMEngine.from_config(config)


def store_of(engine: LLMEngine) -> SplitStore:
    store = engine.core.executor.stores[0]  # type: ignore[attr-defined]
    assert isinstance(store, SplitStore) and store.name == "disk"
    store.check()
    return store


def serve_with_host_blocks(engine: LLMEngine) -> None:
    """The host level is for GPUs. Its code is the same here, with host blocks that are no other memory."""
    executor, windows = engine.core.executor, engine.ledger.windows
    limits = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 120}
    limits["num_stages"] = engine.core.scheduler.config.num_stages

    def run(num_blocks: int, **settings: Any) -> tuple[list[Any], Rig]:
        executor.reset()  # type: ignore[attr-defined]
        rig = Rig(executor=executor, num_blocks=num_blocks, windows=windows, **limits, **settings)
        requests = [make_request(prompt, max_tokens=5) for prompt in PROMPTS]
        for request in requests:
            rig.add(request)
            rig.step()
        rig.run()
        rig.check_idle()
        return [rig.outputs(request) for request in requests], rig

    plain, _ = run(48, enable_prefix_caching=False)
    num_host_blocks = min(200, engine.ledger.num_host_blocks)
    outputs, rig = run(34, num_host_blocks=num_host_blocks, host_block_s=1e-9, preemption="swap")
    assert outputs == plain
    assert rig.kv.tiers is not None and rig.kv.tiers.counters.levels["host"].num_loaded > 0


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["tp 2", "pp 2"])
def test_the_same_tokens_over_a_restart_with_one_ranks_files_damaged(
    model: Path, disk: Path, expected: list[list[Any]], degrees: tuple[int, int]
) -> None:
    others = set(disk.iterdir())
    engine = make(model, degrees, disk)
    assert store_of(engine).usage()["num_blocks"] == 0
    assert serve(engine, PROMPTS) == expected and loaded(engine) > 0
    num_blocks = store_of(engine).usage()["num_blocks"]
    assert num_blocks > 48
    engine.close()
    folders = sorted(set(disk.iterdir()) - others)
    assert len(folders) == 2
    damage(folders[0])
    engine = make(model, degrees, disk)
    before = store_of(engine).usage()
    assert 0 < before["num_blocks"] < num_blocks and before["num_rejected"] > 0  # of entries: one rank has seen it
    assert before["max_bytes"] <= 8 << 20 < before["max_bytes"] + 8
    assert serve(engine, PROMPTS) == expected
    tiers = engine.core.kv.tiers
    assert tiers is not None and tiers.counters.levels["disk"].num_missing > 0 and loaded(engine) > 0
    wait_for(lambda: store_of(engine).usage()["num_rejected"] > before["num_rejected"])  # and of records
    wait_for(lambda: store_of(engine).usage()["num_blocks"] > before["num_blocks"])  # computed and stored again
    serve_with_host_blocks(engine)
    engine.close()


def test_four_ranks_with_two_stores_and_what_operators_do(model: Path, disk: Path, expected: list[list[Any]]) -> None:
    """The second store is the user's own, of which each rank has an instance, and tells nothing of its keys."""
    own = {"kv_connector": "MemoryStore", "kv_connector_extra_config": {"max_bytes": 1 << 20}}
    engine = make(model, (2, 2), disk, kv_transfer_config=own)
    assert serve(engine, PROMPTS) == expected and loaded(engine) > 0
    wait_for(lambda: store_of(engine).usage()["num_bytes"] > 0)
    levels = {level["level"]: level for level in calls.kv_levels(engine.core)["levels"]}
    assert list(levels) == ["device", "disk", "MemoryStore"]
    for name in ("disk", "MemoryStore"):
        assert levels[name]["num_blocks"] == levels[name]["num_stored"] and levels[name]["num_partial_blocks"] == 0

    engine.core.kv.reset_prefix_cache()
    before = loaded(engine)
    assert serve(engine, PROMPTS[:4]) == expected[:4] and loaded(engine) > before
    num_blocks = store_of(engine).usage()["num_blocks"]
    assert calls.CALLS["expire_prefix"](engine.core, token_ids=PROMPTS[0]) > 0
    wait_for(lambda: store_of(engine).usage()["num_blocks"] < num_blocks)
    assert serve(engine, PROMPTS[:1]) == expected[:1]
    assert calls.expire_unused(engine.core, older_than_s=3600.0).result(LIMIT_S) == 0
    engine.close()


@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"distributed_executor_backend": "ray"}], ids=str)
def test_blocks_of_other_engines_are_refused(model: Path, split: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_listen"):
        config_of(model, kv_listen="/tmp/socket", **split)
