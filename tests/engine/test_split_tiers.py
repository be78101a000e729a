"""Levels below the device on a model that is split among ranks: the tokens are those of one process without levels."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.test_tiers import PARAMS, conversations, loaded, serve
from executor.test_ranks import config_of
from rank_models import write_lively_model
from scheduler.harness import Rig, make_request

from quire.engine import calls
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.tiers.split import SplitStore

PROMPTS = conversations(1, 30)
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


def make(model: Path, degrees: tuple[int, int], disk: Path | None = None, **settings: Any) -> LLMEngine:
    if disk is not None:
        settings |= {"kv_disk_path": str(disk), "kv_disk_size": 8 << 20}
    settings = {"num_gpu_blocks_override": 48} | settings
    tensor_size, num_stages = degrees
    return LLMEngine.from_config(
        config_of(model, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages, **settings)
    )


def store_of(engine: LLMEngine) -> SplitStore:
    [store] = engine.core.executor.stores  # type: ignore[attr-defined]
    assert isinstance(store, SplitStore)
    store.check()
    return store


def wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        time.sleep(0.02)


def damage(folder: Path) -> None:
    rng = random.Random(4)
    for path in folder.glob("*.kv"):
        data = bytearray(path.read_bytes())
        for at in rng.sample(range(4096, len(data)), 300):
            data[at] ^= 0x41
        path.write_bytes(data)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["tp 2", "pp 2"])
def test_the_same_tokens_over_a_restart_with_one_ranks_files_damaged(
    model: Path, tmp_path: Path, expected: list[list[Any]], degrees: tuple[int, int]
) -> None:
    engine = make(model, degrees, tmp_path)
    assert serve(engine, PROMPTS) == expected and loaded(engine) > 0
    num_blocks = store_of(engine).usage()["num_blocks"]
    assert num_blocks > 48
    engine.close()
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    damage(folders[0])
    engine = make(model, degrees, tmp_path)
    before = store_of(engine).usage()
    assert 0 < before["num_blocks"] < num_blocks and before["num_rejected"] > 0  # of entries: one rank has seen it
    assert before["max_bytes"] <= 8 << 20 < before["max_bytes"] + 8
    assert serve(engine, PROMPTS) == expected
    tiers = engine.core.kv.tiers
    assert tiers is not None and tiers.counters.levels["disk"].num_missing > 0 and loaded(engine) > 0
    wait(lambda: store_of(engine).usage()["num_rejected"] > before["num_rejected"])  # and of records
    wait(lambda: store_of(engine).usage()["num_blocks"] == num_blocks)  # computed and stored again
    engine.close()


def test_four_ranks_what_operators_do_and_what_they_are_told(
    model: Path, tmp_path: Path, expected: list[list[Any]]
) -> None:
    """With other degrees before them in the same directory, which nobody sees."""
    [prompt] = conversations(2, 1)
    engine = make(model, (2, 1), tmp_path)
    engine.add_request("a", {"prompt_token_ids": prompt}, PARAMS[0])
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    engine = make(model, (2, 2), tmp_path)
    assert store_of(engine).usage()["num_blocks"] == 0
    assert serve(engine, PROMPTS) == expected and loaded(engine) > 0
    wait(lambda: store_of(engine).usage()["num_bytes"] > 0)
    levels = calls.kv_levels(engine.core)["levels"]
    assert [level["level"] for level in levels] == ["device", "disk"]
    disk = levels[1]
    assert disk["num_blocks"] == disk["num_stored"] and disk["num_partial_blocks"] == 0

    engine.core.kv.reset_prefix_cache()
    before = loaded(engine)
    assert serve(engine, PROMPTS[:4]) == expected[:4] and loaded(engine) > before
    num_blocks = store_of(engine).usage()["num_blocks"]
    assert calls.expire_prefix(engine.core, token_ids=PROMPTS[0]) > 0
    wait(lambda: store_of(engine).usage()["num_blocks"] < num_blocks)
    assert serve(engine, PROMPTS[:1]) == expected[:1]
    engine.core.executor.reset()  # type: ignore[attr-defined]
    assert calls.expire_unused(engine.core, older_than_s=3600.0).result(LIMIT_S) == 0
    engine.close()


def test_a_store_of_the_users_own_and_host_blocks(model: Path, expected: list[list[Any]]) -> None:
    """Each rank has an instance of the store, which tells nothing of its keys. The host level is for GPUs; its code is
    the same here, with host blocks that are no other memory."""
    engine = make(model, (2, 1), kv_transfer_config={"kv_connector": "MemoryStore"}, swap_space_gb=0.004)
    assert serve(engine, PROMPTS) == expected and loaded(engine) > 0
    executor, windows = engine.core.executor, engine.ledger.windows
    limits = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 120}

    def rig(num_blocks: int, **settings: Any) -> Rig:
        executor.reset()  # type: ignore[attr-defined]
        return Rig(executor=executor, num_blocks=num_blocks, windows=windows, **limits, **settings)

    def run(crowd: Rig, count: int) -> list[Any]:
        requests = [make_request(prompt, max_tokens=5) for prompt in PROMPTS[:count]]
        for request in requests:
            crowd.add(request)
            crowd.step()
        crowd.run()
        crowd.check_idle()
        return [crowd.outputs(request) for request in requests]

    plain = run(rig(48, enable_prefix_caching=False), 20)
    crowd = rig(40, num_host_blocks=min(200, engine.ledger.num_host_blocks), host_block_s=1e-9, preemption="swap")
    assert run(crowd, 20) == plain
    assert crowd.kv.tiers is not None and crowd.kv.tiers.counters.levels["host"].num_loaded > 0
    engine.close()


def test_what_cannot_be_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_listen"):
        config_of(model, tensor_parallel_size=2, kv_listen=str(tmp_path / "socket"))
    with pytest.raises(ConfigError, match="kv_listen"):
        config_of(model, distributed_executor_backend="ray", kv_listen=str(tmp_path / "socket"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"rank \d on .*cannot be written"):
        make(model, (2, 1), tmp_path / "file")
