"""Requests that move between real engines with their blocks: the same tokens, and a pause of a step or two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import write_tiny_model

from quire import StructuredOutputsParams
from quire.config import EngineConfig
from quire.engine.launch import EngineProcessOptions
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.router import moves
from quire.router.replicas import ReplicaSet

BLOCK = 16
NUM_OUT = 500
GREEDY = SamplingParams(max_tokens=NUM_OUT, ignore_eos=True, temperature=0.0, output_kind=OutputKind.DELTA)
SAMPLED = GREEDY.clone(temperature=1.0)
KINDS = {
    "greedy": GREEDY,
    "seeded": SAMPLED.clone(seed=7, top_p=0.9),
    "penalties": SAMPLED.clone(seed=9, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.1),
    "logprobs": SAMPLED.clone(seed=10, logprobs=2, prompt_logprobs=1),
    "several": SAMPLED.clone(seed=11, n=2),
    "structured": SamplingParams(
        max_tokens=NUM_OUT,
        temperature=1.0,
        seed=15,
        output_kind=OutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(regex="([a-z]{5} [0-9]{3},){46}"),
    ),
    "stop": SAMPLED.clone(seed=13, stop=["zzzzqqqq"]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("carry"), max_position_embeddings=4096)


def run(model: Path, body: Callable[[ReplicaSet], Coroutine[Any, Any, None]], **changes: Any) -> None:
    values: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks_override": 1000, **changes}
    config = EngineConfig(
        model=str(model), load_format="dummy", device="cpu", num_threads=1, block_size=BLOCK, dtype="float32", **values
    )

    async def whole() -> None:
        group = ReplicaSet(config, config.data_parallel_size, EngineProcessOptions())
        try:
            await group.start()
            await group.ready()
            await body(group)
        finally:
            await group.close()
            group.router.check()

    asyncio.run(asyncio.wait_for(whole(), 120))


def prompt(number: int, length: int = 400) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(number * 7919 + i * 31) % 199 for i in range(length)]}


async def read(group: ReplicaSet, name: str, what: Any, params: SamplingParams, after: Any = None) -> list[Any]:
    """(tokens by sequence, output) of each output; calls `after` when a few tokens have come."""
    found: list[Any] = []
    num_tokens = 0
    async for output in group.stream(group.prepare(name, what, params)):
        tokens = {one.index: list(one.token_ids) for one in output.outputs}
        found.append((tokens, output))
        num_tokens += sum(map(len, tokens.values()))
        if after is not None and num_tokens >= 10:
            after()
            after = None
    return found


def line(outputs: list[Any], index: int = 0) -> list[int]:
    return [token for tokens, _ in outputs for token in tokens.get(index, ())]


def ends(outputs: list[Any]) -> list[Any]:
    last: RequestOutput = outputs[-1][1]
    return [(one.index, one.finish_reason) for one in last.outputs]


def close(group: ReplicaSet, name: str) -> None:
    """The replica takes no requests until it is undrained. The router alone would be told otherwise by its next
    report."""
    group._find(name).is_draining = True
    group.router.set_open(name, False)


async def drain_one(group: ReplicaSet) -> None:
    """A drained replica gives its requests and their blocks away."""
    numbers = dict(enumerate(KINDS.items()))
    alone = await asyncio.gather(*(read(group, f"a-{k}", prompt(i), p) for i, (k, p) in numbers.items()))
    expected = dict(zip(KINDS, alone, strict=True))
    begun = [asyncio.Event() for _ in KINDS]
    close(group, "1")
    for name in group.replicas:
        await group.replicas[name].call("reset_prefix_cache", force=True)
    tasks = [asyncio.create_task(read(group, f"b-{k}", prompt(i), p, begun[i].set)) for i, (k, p) in numbers.items()]
    await asyncio.gather(*(event.wait() for event in begun))
    group.undrain("1")
    await group.drain("0")
    found = dict(zip(KINDS, await asyncio.gather(*tasks), strict=True))
    assert group.num_moved >= group.num_carried > 0  # some may have ended before their turn came
    for kind in KINDS:
        for index in range(2):
            assert line(found[kind], index) == line(expected[kind], index), kind
        assert ends(found[kind]) == ends(expected[kind]), kind
    entries = [entry for _, output in found["logprobs"] for entry in output.outputs[0].logprobs or ()]
    assert len(entries) == NUM_OUT
    loaded = [
        metric.value
        for client in group.replicas.values()
        for metric in await client.metrics()
        if metric.name == "quire:kv_level_loaded_blocks_total" and metric.labels["level"] == "peers"
    ]
    assert sum(loaded) >= 400 // BLOCK


async def even_out(group: ReplicaSet) -> None:
    """Requests leave the fuller replica, and stay where the other side is not reached."""
    close(group, "1")
    begun = [asyncio.Event() for _ in range(6)]
    # Longer than the others: on a busy machine the engine may be far ahead of those who look at how full it is.
    long = GREEDY.clone(max_tokens=4 * NUM_OUT)
    tasks = [asyncio.create_task(read(group, f"r{i}", prompt(i, 200), long, begun[i].set)) for i in range(6)]
    await asyncio.gather(*(event.wait() for event in begun))
    group.undrain("1")
    num_carried = group.num_carried
    while group.num_carried < num_carried + 2 and not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
    assert group.num_carried > num_carried
    assert all(len(line(outputs)) == 4 * NUM_OUT for outputs in await asyncio.gather(*tasks))
    num_moved = group.num_moved
    for client in group.replicas.values():
        client.info = replace(client.info, kv_address="/nowhere/kv")  # where nobody listens
    started = asyncio.Event()
    task = asyncio.create_task(read(group, "a", prompt(77), GREEDY, started.set))
    await started.wait()
    [(stream, flight)] = group._flights.items()
    carrying = group.moves.start(stream, flight)
    assert carrying is not None and not await carrying
    assert len(line(await task)) == NUM_OUT and group.num_moved == num_moved


def test_requests_leave_a_replica_that_drains_and_one_that_is_fuller(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "_BALANCE_S", 0.01)

    async def body(group: ReplicaSet) -> None:
        await drain_one(group)
        group.undrain("0")
        await even_out(group)

    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    run(model, body, data_parallel_size=2, speculative_config=drafts)


def test_prompts_are_computed_here_and_decoded_there(model: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        long = {f"long{i}": prompt(i, 600) for i in range(4)}
        kinds = [GREEDY, KINDS["seeded"]] * 2
        asked = zip(long.items(), kinds, strict=True)
        found = await asyncio.gather(*(read(group, name, what, params) for (name, what), params in asked))
        num_carried = group.num_carried
        assert 0 < num_carried <= 4  # one may have ended before its blocks were there
        metrics = {name: {m.name: m.value for m in await one.metrics()} for name, one in group.replicas.items()}
        assert all(one["vllm:generation_tokens_total"] > 0 for one in metrics.values())
        # Prompts' blocks left with the steps that filled them, all but those which nobody could be sent to.
        [levels, there] = [await group.replicas[name].call("kv_levels") for name in ("0", "1")]
        sent, received = levels["levels"][-1], there["levels"][-1]
        block_bytes = group.replicas["0"].info.block_bytes
        assert sent["num_bytes_beside"] + sent["num_bytes_behind"] == 4 * (600 // BLOCK) * block_bytes
        assert received["num_received"] >= 4 * (600 // BLOCK) and received["num_incomplete"] == 0
        # A prompt that comes back is cached where it was decoded, and a short one is computed there.
        again = await read(group, "again", long["long0"], GREEDY)
        assert line(again) == line(found[0])
        num_carried = group.num_carried
        await read(group, "short", prompt(9, 20), GREEDY.clone(max_tokens=5))
        assert group.num_carried == num_carried
        assert [one["role"] for one in group.describe()] == ["prefill", "decode"]
        # Without the other, each does both.
        await group.drain("1")
        for number in (2, 3):
            alone = await read(group, f"alone{number}", prompt(number, 600), kinds[number])
            assert line(alone) == line(found[number])

    run(model, body, data_parallel_size=2, roles=("kv_producer", "decode"))


def test_roles_that_cannot_be_are_refused(model: Path) -> None:
    for roles, words in (
        (("prefill",), "give one for each"),
        (("prefill", "prefill"), "nobody goes on"),
        (("decode", "decode"), "nobody computes prompts"),
        (("prefill", "sleep"), "must be one of"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(model=str(model), data_parallel_size=2, roles=roles)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(data_parallel_size=2, roles="prefill decode", enable_prefix_caching=False)
