"""Levels below the device, on a tiny real model: the tokens are those of an engine without them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fakes
import pytest
from scheduler.harness import Rig, make_request

from quire import LLMEngine, SamplingParams
from quire.beams import BeamSearchParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from quire.structured import StructuredOutputsParams

BLOCK_SIZE = 4
MODELS = {
    "full": {},
    "window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
}


@pytest.fixture(scope="module", params=MODELS)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_tiny_model(tmp_path_factory.mktemp(f"tiers-{request.param}"), **MODELS[request.param])


def make(weights: Path, disk: Path | None = None, **settings: Any) -> LLMEngine:
    if disk is not None:
        settings |= {"kv_disk_path": str(disk), "kv_disk_size": 8 << 20}
    config = EngineConfig(
        model=str(weights),
        device="cpu",
        load_format="dummy",
        num_threads=1,
        block_size=BLOCK_SIZE,
        max_model_len=120,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        **({"num_gpu_blocks_override": 48, "dtype": "float32"} | settings),
    )
    return LLMEngine.from_config(config)


def conversations(seed: int, count: int) -> list[list[int]]:
    """The prompts of chats that take turns: each is a head that all share, its own past, and something new."""
    rng = random.Random(seed)
    head = [rng.randrange(256) for _ in range(21)]
    chats = [list(head) for _ in range(5)]
    prompts = []
    for _ in range(count):
        chat = rng.choice(chats)
        chat += [rng.randrange(256) for _ in range(rng.randrange(1, 12))]
        if len(chat) > 90:
            del chat[21:]
        prompts.append(list(chat))
    return prompts


def test_float32_by_name_loads_no_blocks_of_float32_by_default(weights: Path, tmp_path: Path) -> None:
    """Only the first multiplies a quantized file's weights exactly, so that its blocks have other bytes."""
    prompts = conversations(3, 2)
    for num_identities, dtype in ((1, "auto"), (2, "float32"), (2, "auto")):
        engine = make(weights, tmp_path, dtype=dtype)
        assert engine.built.executor.backend.weight_dtype == "float32"
        serve(engine, prompts, PARAMS[:1])
        engine.close()
        assert len(list(tmp_path.iterdir())) == num_identities


def test_a_slow_store_keeps_no_engine_from_its_sleep(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be written in time is computed again."""
    engine = make(weights, tmp_path)
    monkeypatch.setattr(engine.core, "settle", lambda within_s: None)  # it has come to the end of its patience
    disk = engine.built.executor.executor.stores[0].connector
    monkeypatch.setattr(disk, "store", lambda keys, blocks: time.sleep(0.05))
    prompts = conversations(9, 4)
    before = serve(engine, prompts, PARAMS[:1])
    tiers = engine.core.kv.tiers
    assert tiers is not None and tiers.has_stores_waiting
    engine.sleep()
    assert engine.is_sleeping() and not engine.core.has_work and tiers.counters.num_lost > 0
    engine.wake_up()
    assert serve(engine, prompts, PARAMS[:1]) == before
    engine.core.kv.check()
    engine.close()


PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=0.9, seed=7, max_tokens=5, n=2, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=3, max_tokens=6, repetition_penalty=1.2, presence_penalty=0.3),
)


def serve(engine: LLMEngine, prompts: list[list[int]], kinds: Sequence[Any] = PARAMS) -> list[list[Any]]:
    """In order, several at once; whatever comes of each."""
    done: dict[str, RequestOutput] = {}
    waiting = [(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and engine.get_num_unfinished_requests() < 3:
            request_id, prompt = waiting.pop(0)
            engine.add_request(request_id, {"prompt_token_ids": prompt}, kinds[int(request_id[1:]) % len(kinds)])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        num_steps += 1
        if num_steps % 5 == 0:
            engine.core.kv.check()
    engine.core.settle(60.0)
    engine.core.kv.check()
    return [
        [(c.token_ids, c.finish_reason) for c in done[f"r{i}"].outputs] + [len(done[f"r{i}"].prompt_logprobs or ())]
        for i in range(len(prompts))
    ]


def loaded(engine: LLMEngine) -> int:
    assert engine.core.kv.tiers is not None
    return sum(counters.num_loaded for counters in engine.core.kv.tiers.counters.levels.values())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"swap_space_gb": 0.001, "preemption": "swap"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_the_same_tokens_with_disk_and_over_a_restart(weights: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    prompts = conversations(1, 40)
    plain = make(weights, **settings)
    expected = serve(plain, prompts)
    plain.close()
    for _ in range(2):
        engine = make(weights, tmp_path, **settings)
        assert serve(engine, prompts) == expected
        assert loaded(engine) > 0
        engine.close()


def test_beams_grammars_and_stop_strings_beside_loads(weights: Path, tmp_path: Path) -> None:
    prompts = conversations(8, 24)
    kinds: list[Any] = [
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
        SamplingParams(temperature=0.0, max_tokens=12, stop=["e", "a"]),
        SamplingParams(temperature=0.0, max_tokens=3),
    ]
    plain = make(weights)
    expected = serve(plain, prompts, kinds)
    plain.close()
    for _ in range(2):
        engine = make(weights, tmp_path)
        assert serve(engine, prompts, kinds) == expected
        engine.close()


def test_a_prompt_is_warm_at_the_first_request_of_the_next_start(weights: Path, tmp_path: Path) -> None:
    [prompt] = conversations(2, 1)
    for num_cached in (0, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE):
        engine = make(weights, tmp_path)
        engine.add_request("a", {"prompt_token_ids": prompt}, PARAMS[0])
        outputs: list[RequestOutput] = []
        while not outputs or not outputs[-1].finished:
            outputs += engine.step()
        assert outputs[-1].num_cached_tokens == num_cached
        engine.close()


def damage(folder: Path) -> None:
    rng = random.Random(4)
    for path in folder.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        for at in rng.sample(range(4096, len(data)), 300):
            data[at] ^= 0x41
        path.write_bytes(data)


def test_two_engines_on_one_directory_and_damage_between(weights: Path, tmp_path: Path) -> None:
    prompts = conversations(3, 25)
    one, two = make(weights, tmp_path), make(weights, tmp_path)
    expected = serve(one, prompts)
    disk = two.core.kv.tiers.levels[0].store.connector  # type: ignore[union-attr]
    disk.look()
    assert serve(two, prompts) == expected and loaded(two) > 0
    one.close()
    two.close()
    damage(tmp_path)
    engine = make(weights, tmp_path)
    assert serve(engine, prompts) == expected
    store = engine.core.kv.tiers.levels[0].store  # type: ignore[union-attr]
    assert store.counters.num_rejected + store.usage()["num_rejected"] > 0
    engine.close()


def test_a_store_of_the_users_own(weights: Path) -> None:
    prompts = conversations(5, 25)
    plain = make(weights)
    expected = serve(plain, prompts)
    engine = make(weights, kv_transfer_config={"kv_connector": "MemoryStore"}, num_gpu_blocks_override=45)
    assert serve(engine, prompts) == expected and loaded(engine) > 0
    engine.close()


def test_host_blocks_on_a_real_executor(weights: Path) -> None:
    """The host level is for GPUs. Its code is the same here, with host blocks that are no other memory."""
    engine = make(weights, swap_space_gb=0.002, num_gpu_blocks_override=80)
    executor, windows = engine.core.executor, engine.ledger.windows
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 120}

    def rig(num_blocks: int, **settings: Any) -> Rig:
        executor.reset()  # type: ignore[attr-defined]
        return Rig(
            executor=executor, num_blocks=num_blocks, block_size=BLOCK_SIZE, windows=windows, **limits, **settings
        )

    prompts = conversations(6, 30)
    lines = []
    for prompt in prompts:
        alone = rig(80)
        request = make_request(prompt, max_tokens=5)
        alone.add(request)
        alone.run()
        lines.append(alone.outputs(request))
    num_host_blocks = min(200, engine.ledger.num_host_blocks)
    crowd = rig(40, num_host_blocks=num_host_blocks, host_block_s=1e-9, preemption="swap")
    requests = [make_request(prompt, max_tokens=5) for prompt in prompts]
    for request in requests:
        crowd.add(request)
        crowd.step()
    crowd.run()
    crowd.check_idle()
    assert [crowd.outputs(request) for request in requests] == lines
    assert crowd.kv.tiers is not None and crowd.kv.tiers.counters.levels["host"].num_loaded > 0
    engine.close()


def test_what_makes_other_bytes_has_other_blocks(weights: Path, tmp_path: Path) -> None:
    prompts = conversations(1, 5)
    engine = make(weights, tmp_path)
    serve(engine, prompts)
    engine.close()
    for settings in ({"seed": 1}, {"kv_cache_dtype": "bfloat16"}, {"hf_overrides": {"rope_theta": 500.0}}):
        engine = make(weights, tmp_path, **settings)
        assert engine.core.kv.tiers is not None and engine.core.kv.tiers.levels[0].store.usage()["num_blocks"] == 0  # type: ignore[attr-defined]
        engine.close()
    assert len(list(tmp_path.iterdir())) == 4


def test_without_a_size_the_disk_level_takes_one_by_itself(weights: Path, tmp_path: Path) -> None:
    engine = make(weights, kv_disk_path=str(tmp_path))
    assert engine.core.kv.tiers is not None
    usage = engine.core.kv.tiers.levels[0].store.usage()  # type: ignore[attr-defined]
    assert 0 < usage["max_bytes"] <= 100 << 30
    engine.close()


def test_what_cannot_be_is_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        make(weights, kv_offloading_size=1)
    with pytest.raises(ConfigError, match="without kv_disk_path"):
        make(weights, kv_disk_size=1 << 20)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make(weights, tmp_path, enable_prefix_caching=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make(weights, tmp_path / "file")
