"""Replicas in real processes: requests are spread, and go on elsewhere when a replica dies, hangs or is drained."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from sim_engine import CRASH, HANG, SimSettings, sim_options

from quire import StructuredOutputsParams
from quire.beams import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.api import EngineState
from quire.engine.launch import EngineProcessOptions
from quire.errors import BadRequestError, ConfigError, EngineDeadError
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.request import AdapterRef
from quire.router import members, replicas
from quire.router.replicas import ReplicaSet

GREEDY = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0, output_kind=OutputKind.DELTA)
SLOW = SimSettings(step_s=0.01)
WAIT_S = 60.0

Body = Callable[[ReplicaSet], Coroutine[Any, Any, None]]


def config(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(model), "load_format": "dummy", "device": "cpu", "block_size": 4, **changes})


def run(
    model: Path,
    body: Body,
    settings: SimSettings | None = None,
    *,
    options: EngineProcessOptions | None = None,
    **c: Any,
) -> None:
    async def whole() -> None:
        group = ReplicaSet(config(model, num_threads=1, **c), 2, options or sim_options(settings))
        pids: set[int | None] = set()
        try:
            await group.start()
            await group.ready()
            pids = {client.pid for client in group.replicas.values()}
            await body(group)
        finally:
            await group.close()
            assert not [pid for pid in pids if pid is not None and psutil.pid_exists(pid)]
            group.router.check()

    asyncio.run(asyncio.wait_for(whole(), WAIT_S * 2))


async def collect(group: ReplicaSet, name: str, prompt: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in group.stream(group.prepare(name, prompt, params))]


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    found: list[int] = []
    for output in outputs:
        for one in output.outputs:
            if one.index == index:
                found = found + one.token_ids
    return found


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(one.text for output in outputs for one in output.outputs if one.index == index)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def disturb_midway(
    group: ReplicaSet, streams: list[Any], disturb: Callable[[], Any]
) -> list[list[RequestOutput]]:
    """Reads all streams; calls `disturb` when each has given a little."""
    outputs: list[list[RequestOutput]] = [[] for _ in streams]
    begun = [asyncio.Event() for _ in streams]

    async def read(index: int) -> None:
        async for output in streams[index]:
            outputs[index].append(output)
            if len(tokens_of(outputs[index])) >= 3:
                begun[index].set()

    async def act() -> None:
        for event in begun:
            await event.wait()
        done = disturb()
        if asyncio.iscoroutine(done):
            await done

    await asyncio.gather(act(), *(read(i) for i in range(len(streams))))
    return outputs


def test_requests_spread_over_replicas_and_return_to_their_blocks(tiny_model: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        # How long anything takes on this machine decides nothing: the clock stands still, and rates are not told.
        now_s = group.router._clock()
        group.router._clock = lambda: now_s
        group.router.on_load = lambda name, load: None  # type: ignore[method-assign]
        prompts = [f"{letter} prompt of one conversation " * 5 for letter in "abcdef"]
        short = GREEDY.clone(max_tokens=20)
        first = await asyncio.gather(*(collect(group, f"a{i}", p, short) for i, p in enumerate(prompts)))
        assert all(len(tokens_of(outputs)) == 20 for outputs in first)
        blocks = [group.router.num_blocks_of(name) for name in ("0", "1")]
        assert min(blocks) > 0
        now_s += 60.0  # what the router itself expected to be there no longer counts: the replicas' word does
        again = await asyncio.gather(*(collect(group, f"b{i}", p, short) for i, p in enumerate(prompts)))
        for prompt, outputs in zip(prompts, again, strict=True):
            assert outputs[-1].num_cached_tokens == (len(prompt) - 1) // 4 * 4
        assert [tokens_of(o) for o in first] == [tokens_of(o) for o in again]

    run(tiny_model, body)


@pytest.mark.parametrize("how", ["kill", "drain"])
def test_streams_go_on_when_their_replica_is_killed_or_drained(tiny_model: Path, how: str) -> None:
    async def body(group: ReplicaSet) -> None:
        prompts = [f"{letter} question" for letter in "abcdefgh"]
        expected = await asyncio.gather(*(collect(group, f"a{i}", p) for i, p in enumerate(prompts)))
        undisturbed = [tokens_of(outputs) for outputs in expected]
        victim = group.replicas["0"]

        def disturb() -> Any:
            assert victim.pid is not None
            return os.kill(victim.pid, signal.SIGKILL) if how == "kill" else group.drain("0")

        streams = [group.stream(group.prepare(f"b{i}", p, GREEDY)) for i, p in enumerate(prompts)]
        outputs = await disturb_midway(group, streams, disturb)
        assert [tokens_of(o) for o in outputs] == undisturbed
        assert all(o[-1].finished for o in outputs)
        assert group.num_moved > 0
        if how == "kill":
            await until(lambda: len(group.router.replicas) == 2)
            assert group.replicas["0"].pid != victim.pid and group.describe()[0]["restarts"] == 1
        else:
            assert not group.router.replicas["0"].num_sequences and victim.health().state is EngineState.READY
            group.undrain("0")
        assert tokens_of(await collect(group, "c", prompts[0])) == undisturbed[0]

    run(tiny_model, body, SLOW)


def test_every_kind_of_request_is_the_same_after_a_kill_with_a_real_model(tmp_path: Path) -> None:
    """float32: text, tokens, logprobs and reasons equal those of the undisturbed run."""
    import adapter_files

    model = adapter_files.write_model(tmp_path / "model", max_position_embeddings=2048)
    adapter = adapter_files.write_adapter(tmp_path / "adapter", model)
    refs: dict[str, AdapterRef] = {}
    sampled = GREEDY.clone(max_tokens=400, temperature=1.0, seed=7)
    kinds: dict[str, Any] = {
        "greedy": GREEDY.clone(max_tokens=400),
        "seeded": sampled,
        "top-p": sampled.clone(top_p=0.9, top_k=40, min_p=0.01, seed=8),
        "penalties": sampled.clone(presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.1, seed=9),
        "logprobs": sampled.clone(logprobs=2, prompt_logprobs=1, seed=10),
        "several": sampled.clone(n=3, seed=11),
        "least": SamplingParams(max_tokens=400, min_tokens=399, temperature=1.0, seed=12, output_kind=OutputKind.DELTA),
        "structured": SamplingParams(
            max_tokens=400,
            temperature=1.0,
            seed=15,
            output_kind=OutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(regex="([a-z]{5} [0-9]{3},){40}"),
        ),
        "stop": sampled.clone(stop=["zzzzqqqq"], seed=13),
        "adapted": GREEDY.clone(max_tokens=400),
        # Nobody hears of these before their end.
        "end": sampled.clone(seed=14, output_kind=OutputKind.FINAL_ONLY),
        "beams": BeamSearchParams(beam_width=2, max_tokens=300, ignore_eos=True),
    }

    async def all_of(group: ReplicaSet, mark: str, disturb: Callable[[], Any] | None) -> list[list[RequestOutput]]:
        streams = [
            group.stream(group.prepare(f"{mark}-{kind}", f"Tell me of {kind}", params, adapter=refs.get(kind)))
            for kind, params in kinds.items()
        ]
        if disturb is None:

            async def drained(stream: Any) -> list[RequestOutput]:
                return [output async for output in stream]

            return list(await asyncio.gather(*(drained(stream) for stream in streams)))
        ends = [asyncio.create_task(stream.__anext__()) for stream in streams[-2:]]
        outputs = await disturb_midway(group, streams[:-2], disturb)
        return [*outputs, *[[await end] for end in ends]]

    async def body(group: ReplicaSet) -> None:
        read = await group.call("read_adapter", adapter="a", path=str(adapter))  # the other replica reads it by itself
        refs["adapted"] = AdapterRef(read["key"], str(adapter))
        expected = await all_of(group, "a", None)
        plain = await collect(group, "plain", "Tell me of adapted", kinds["adapted"])
        assert tokens_of(plain) != tokens_of(expected[list(kinds).index("adapted")])
        victim = max(group.replicas.values(), key=lambda client: client.load().num_steps)

        def kill() -> None:
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)

        found = await all_of(group, "b", kill)
        assert group.num_moved > 0
        for kind, one, other in zip(kinds, expected, found, strict=True):
            for index in range(3):
                assert tokens_of(other, index) == tokens_of(one, index), kind
                assert text_of(other, index) == text_of(one, index), kind
            ends = [[(c.finish_reason, c.stop_reason) for c in outputs[-1].outputs] for outputs in (one, other)]
            assert ends[0] == ends[1], kind
        for outputs in (expected, found):
            of_logprobs = outputs[list(kinds).index("logprobs")]
            entries = [entry for output in of_logprobs for entry in output.outputs[0].logprobs or ()]
            assert len(entries) == 400
            prompt_entries = of_logprobs[-1].prompt_logprobs
            assert prompt_entries is not None and len(prompt_entries) == len("Tell me of logprobs")

    settings = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16, "load_format": "auto", "enable_lora": True}
    run(model, body, options=EngineProcessOptions(), **settings)


def test_a_replica_that_hangs_is_ended_and_its_requests_go_on(tiny_model: Path, tmp_path: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        undisturbed = tokens_of(await collect(group, "a", "a prompt"))
        hung = asyncio.create_task(collect(group, "hang", {"prompt_token_ids": [HANG, 1, 2]}))
        await until(lambda: any(one.num_sequences for one in group.router.replicas.values()))
        name = next(name for name, one in group.router.replicas.items() if one.num_sequences)
        # The request that makes it hang does so at the next replica too, and is given up after some deaths.
        stream = group.stream(group.prepare("b", "a prompt", GREEDY))
        assert tokens_of([output async for output in stream]) == undisturbed
        with pytest.raises(EngineDeadError):
            await hung
        assert name in {one["engine"] for one in group.describe() if one["restarts"] or one["state"] != "ready"}

    options = sim_options(SimSettings(hang_s=1_000.0), step_timeout_s=0.5, dump_dir=str(tmp_path))
    run(tiny_model, body, options=options)


def test_a_request_that_kills_replicas_is_given_up_and_others_are_not(tiny_model: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        undisturbed = tokens_of(await collect(group, "a", "a prompt"))
        bad = asyncio.create_task(collect(group, "bad", {"prompt_token_ids": [CRASH, 1, 2]}))
        with pytest.raises(EngineDeadError):
            await bad
        assert tokens_of(await collect(group, "b", "a prompt")) == undisturbed

    run(tiny_model, body)


def test_requests_wait_while_no_replica_is_left(tiny_model: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        undisturbed = tokens_of(await collect(group, "a", "a prompt"))

        def kill_all() -> None:
            for client in group.replicas.values():
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)

        outputs = await disturb_midway(group, [group.stream(group.prepare("b", "a prompt", GREEDY))], kill_all)
        assert tokens_of(outputs[0]) == undisturbed

    run(tiny_model, body, SLOW)


def test_when_none_can_be_started_again_everybody_is_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(replicas, "_MAX_FAILURES", 2)

    async def body(group: ReplicaSet) -> None:
        told: list[str] = []
        group.on_death(told.append)
        group.options = sim_options(SimSettings(start_error="exit"))

        def kill_all() -> None:
            for client in group.replicas.values():
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)

        with pytest.raises(EngineDeadError):
            await disturb_midway(group, [group.stream(group.prepare("b", "a prompt", GREEDY))], kill_all)
        assert len(told) == 1 and group.health().state is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            group.prepare("c", "a prompt", GREEDY)

    run(tiny_model, body, SLOW)


def test_replicas_are_added_and_removed_while_serving(tiny_model: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        expected = await asyncio.gather(*(collect(group, f"a{i}", f"{i} prompt") for i in range(6)))
        undisturbed = [tokens_of(outputs) for outputs in expected]

        async def scale() -> None:
            assert await group.add() == "2"
            await group.remove("0")
            await group.remove("1")

        streams = [group.stream(group.prepare(f"b{i}", f"{i} prompt", GREEDY)) for i in range(6)]
        outputs = await disturb_midway(group, streams, scale)
        assert [tokens_of(o) for o in outputs] == undisturbed
        assert list(group.replicas) == ["2"]
        with pytest.raises(BadRequestError, match="last"):
            await group.remove("2")
        with pytest.raises(BadRequestError, match="no replica"):
            await group.drain("0")

    run(tiny_model, body, SLOW)


def test_a_reader_that_leaves_frees_everything(tiny_model: Path) -> None:
    async def body(group: ReplicaSet) -> None:
        stream = group.stream(group.prepare("a", "a prompt", GREEDY))
        await stream.__anext__()
        await stream.aclose()
        await until(lambda: group.load().num_running == 0)
        assert not group._flights and not any(one.num_sequences for one in group.router.replicas.values())
        assert len(tokens_of(await collect(group, "a", "a prompt"))) == 100

    run(tiny_model, body, SLOW)


def test_what_keeps_a_replica_from_starting_is_told(tiny_model: Path) -> None:
    async def start() -> None:
        group = ReplicaSet(config(tiny_model), 2, sim_options(SimSettings(start_error="ConfigError")))
        try:
            await group.start()
            with pytest.raises(ConfigError, match="lower something"):
                await group.ready()
        finally:
            await group.close()

    asyncio.run(start())


def test_replicas_take_gpus_of_their_own(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    auto = config(tiny_model, device="auto")
    assert [members.device_environment(auto, i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["3", "5"]
    with pytest.raises(ConfigError, match="3 replicas need 3 GPUs"):
        ReplicaSet(auto, 3)
    assert members.device_environment(config(tiny_model), 7) == {}


def test_one_engine_in_a_program_refuses_replicas(tiny_model: Path) -> None:
    from quire import LLM, AsyncLLM

    for kind in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match="serve -dp"):
            kind(str(tiny_model), load_format="dummy", data_parallel_size=2)
