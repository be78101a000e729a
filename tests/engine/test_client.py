"""A server's view of an engine in another process: the real processes and messages, a simulated model."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sim_engine import BREAK, CRASH, HANG, SimSettings, sim_options

from quire import LLMEngine
from quire.config import EngineConfig
from quire.engine.api import EngineState, ServingEngine
from quire.engine.client import EngineClient
from quire.engine.launch import EngineProcessOptions
from quire.errors import BadRequestError, ConfigError, EngineDeadError, MemoryBudgetError, ModelError, QuireError
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams

LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
DELTA = LONG.clone(output_kind=OutputKind.DELTA)
ENDLESS = DELTA.clone(max_tokens=190)
Run = Callable[..., AbstractAsyncContextManager[EngineClient]]


def config(tiny_model: Path, **kwargs: Any) -> EngineConfig:
    return EngineConfig(model=str(tiny_model), load_format="dummy", device="cpu", num_threads=1, **kwargs)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner, tiny_model: Path) -> Iterator[EngineClient]:
    """One engine for the tests that do it no harm."""
    client = EngineClient(config(tiny_model), sim_options())
    runner.run(start(client))
    yield client
    runner.run(client.close())


async def start(client: EngineClient) -> None:
    await client.start()
    await client.ready()


@pytest.fixture
def run(tiny_model: Path) -> Run:
    """An engine of a test's own."""

    @asynccontextmanager
    async def running(
        settings: SimSettings | None = None, config_changes: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[EngineClient]:
        client = EngineClient(config(tiny_model, **(config_changes or {})), sim_options(settings, **options))
        try:
            await start(client)
            yield client
        finally:
            pid = client.pid
            await client.close()
            assert pid is None or not psutil.pid_exists(pid)

    return running


async def collect(engine: ServingEngine, name: str, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.stream(engine.prepare(name, prompt, params))]


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.005)


async def used_blocks(client: EngineClient) -> int:
    return int((await client.call("kv_overview"))["num_used"])


def test_it_is_what_a_server_needs(shared: EngineClient) -> None:
    engine: ServingEngine = shared
    assert engine.health().state is EngineState.READY
    assert engine.info.max_model_len == 200
    assert engine.info.ready_s > 0
    assert engine.tokenizer is not None
    assert engine.default_sampling.temperature == 1.0
    assert engine.render_chat([{"role": "user", "content": "hi"}])["prompt"].startswith("<|start|>user")


async def num_cached(client: EngineClient, tenant: str, prompt: Any) -> int:
    prepared = client.prepare(f"of-{tenant}-{time.monotonic_ns()}", prompt, LONG.clone(max_tokens=1), tenant=tenant)
    return [output async for output in client.stream(prepared)][-1].num_cached_tokens


async def test_isolated_tenants_find_their_own_prefixes_and_pinned_ones(run: Run) -> None:
    secret = "The door's code is 4711, and nobody else shall know."

    changes = {"pinned_prefixes": ("You are a librarian.",)}
    async with run(config_changes=changes, isolated_tenants=("a", "b")) as client:
        assert await num_cached(client, "a", secret) == 0
        assert await num_cached(client, "b", secret) == 0  # a right guess looks like a wrong one
        assert await num_cached(client, "a", secret) > 40
        # No salt of one tenant leads into another's blocks.
        for salt in ("a", "1:a", "+", "1:a+"):
            assert await num_cached(client, "b", {"prompt": secret, "cache_salt": salt}) == 0
        for tenant in ("a", "b"):  # each has its own copy of what the operator pins
            assert await num_cached(client, tenant, "You are a librarian. What is a quire?") == 20


async def test_tenants_that_share_find_each_others_prefixes(run: Run) -> None:
    async with run() as client:
        assert await num_cached(client, "a", "a text that both of them send") == 0
        assert await num_cached(client, "b", "a text that both of them send") == 28


async def test_pinned_prefixes_that_do_not_fit_for_every_tenant_end_the_start(run: Run) -> None:
    changes = {"pinned_prefixes": ("x" * 40,)}
    with pytest.raises(ConfigError, match="no room to pin a prefix of 40 tokens for each of 3 keys: pin less"):
        async with run(SimSettings(num_blocks=25), config_changes=changes, isolated_tenants=("a", "b", "c")):
            raise AssertionError("it started")


async def test_who_leaves_before_the_end_learns_what_was_made(run: Run) -> None:
    async with run(SimSettings(step_s=0.01)) as client:
        prepared = client.prepare("a", "hello", ENDLESS.clone(output_kind=OutputKind.FINAL_ONLY))
        stream = client.stream(prepared)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        await stream.aclose()
        assert 5 < prepared.num_made_tokens[0] < 190


def test_deltas_join_to_the_whole(runner: asyncio.Runner, shared: EngineClient) -> None:
    async def body() -> None:
        whole = (await collect(shared, "a", "hello", LONG))[-1]
        deltas = await collect(shared, "b", "hello", DELTA)
        assert "".join(o.outputs[0].text for o in deltas) == whole.outputs[0].text
        assert [t for o in deltas for t in o.outputs[0].token_ids] == whole.outputs[0].token_ids
        assert len(whole.outputs[0].token_ids) == 60
        final = await collect(shared, "c", "hello", LONG.clone(output_kind=OutputKind.FINAL_ONLY))
        assert [o.outputs[0].text for o in final] == [whole.outputs[0].text]
        assert deltas[-1].prompt == "hello"
        metrics = final[0].metrics
        assert metrics is not None
        assert metrics.queue_s is not None and metrics.first_token_s is not None and metrics.total_s is not None
        assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.total_s < 10

    runner.run(body())


def test_many_at_once_are_as_alone(runner: asyncio.Runner, shared: EngineClient) -> None:
    async def body() -> None:
        alone = [(await collect(shared, f"a{i}", f"prompt {i}", LONG))[-1].outputs[0].token_ids for i in range(5)]
        together = await asyncio.gather(*(collect(shared, f"b{i}", f"prompt {i}", LONG) for i in range(5)))
        assert [outputs[-1].outputs[0].token_ids for outputs in together] == alone

    runner.run(body())


def test_forks_stops_and_logprobs(runner: asyncio.Runner, shared: EngineClient) -> None:
    async def body() -> None:
        params = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
        [free] = await collect(shared, "free", "hello", params)
        assert len({c.text for c in free.outputs}) == 3
        stop = free.outputs[1].text[10:13]
        [stopped] = await collect(shared, "stop", "hello", params.clone(stop=[stop]))
        assert stopped.outputs[1].stop_reason == stop
        assert stopped.outputs[1].text == free.outputs[1].text[: free.outputs[1].text.index(stop)]
        assert await used_blocks(shared) == 0
        asked = params.clone(n=1, logprobs=2, prompt_logprobs=1)
        [output] = await collect(shared, "logprobs", "hello", asked)
        assert output.outputs[0].logprobs is not None and len(output.outputs[0].logprobs) == 40
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 5

    runner.run(body())


def test_refusals_reach_their_own_stream(runner: asyncio.Runner, shared: EngineClient) -> None:
    async def body() -> None:
        with pytest.raises(BadRequestError, match="length is 200 tokens"):
            shared.prepare("x", [1] * 200, LONG)
        with pytest.raises(BadRequestError, match="max_num_seqs=16"):
            shared.prepare("x", "hello", SamplingParams(n=10**9))
        huge = SamplingParams(max_tokens=10**30, min_tokens=10**29, top_k=10**30, seed=2**64 - 1)
        shared.prepare("x", "hello", huge)
        with pytest.raises(BadRequestError, match="priority"):
            shared.prepare("x", "hello", LONG, priority=10**30)
        first = shared.stream(shared.prepare("same", "hello", DELTA))
        await anext(first)
        with pytest.raises(BadRequestError, match="in use"):
            await collect(shared, "same", "hello", DELTA)
        assert [output async for output in first][-1].finished
        assert await collect(shared, "same", "hello", DELTA)

    runner.run(body())


async def test_what_can_never_fit_is_refused_by_the_scheduler(run: Run) -> None:
    async with run(SimSettings(num_blocks=20)) as client:
        good = asyncio.create_task(collect(client, "good", "hello", LONG))
        with pytest.raises(BadRequestError, match="the KV cache has 20: lower max_tokens") as caught:
            await collect(client, "large", "hello", ENDLESS)
        assert caught.value.param == "max_tokens"
        assert (await good)[-1].finished
        assert await collect(client, "large", "hello", DELTA)  # its id is free again


async def test_a_message_that_cannot_be_taken_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run(SimSettings(step_s=0.02)) as client:
        stream = client.stream(client.prepare("a", "hello", ENDLESS))
        await anext(stream)
        monkeypatch.setattr(client.streams, "on_step", lambda outputs: 1 / 0)
        with pytest.raises(EngineDeadError, match="could not be taken"):
            async for _ in stream:
                pass


async def test_nothing_is_taken_before_it_is_ready(tiny_model: Path) -> None:
    client = EngineClient(config(tiny_model), sim_options())
    await client.start()
    with pytest.raises(EngineDeadError, match="still starting"):
        client.prepare("a", "hello", DELTA)
    with pytest.raises(EngineDeadError, match="still starting"):
        await client.metrics()
    await client.close()


def test_calls_and_metrics(runner: asyncio.Runner, shared: EngineClient) -> None:
    async def body() -> None:
        before = {(m.name, *m.labels.values()): m.value for m in await shared.metrics()}
        await collect(shared, "m", [9] * 40, LONG.clone(max_tokens=5))
        stream = shared.stream(shared.prepare("left", [8] * 40, ENDLESS))
        await anext(stream)
        await stream.aclose()
        after = {(m.name, *m.labels.values()): m.value for m in await shared.metrics()}
        names = {"vllm:prompt_tokens_total": 80}
        assert {n: after[(n,)] - before.get((n,), 0) for n in names} == names
        reasons = [("vllm:request_success_total", r) for r in ("length", "abort")]
        assert [after[r] - before.get(r, 0) for r in reasons] == [1, 1]
        assert after[("vllm:num_requests_running",)] == 0
        with pytest.raises(BadRequestError, match="no_such"):
            await shared.call("no_such")
        with pytest.raises(QuireError, match="TypeError"):
            await shared.call("kv_block", nonsense=1)
        assert await shared.call("reset_prefix_cache") is True

    runner.run(body())


async def test_leaving_frees_the_blocks_within_a_step(run: Run) -> None:
    async with run(SimSettings(step_s=0.02)) as client:
        other = asyncio.create_task(collect(client, "other", "other", DELTA))
        for leave in ("close", "cancel"):
            if leave == "close":
                stream = client.stream(client.prepare(leave, [1] * 100, ENDLESS))
                await anext(stream)
                await stream.aclose()
            else:
                task = asyncio.create_task(collect(client, leave, [2] * 100, ENDLESS))
                await until(lambda: client.load().num_running == 2)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await client.call("kv_overview"))["num_running"] == 1
        assert (await other)[-1].finished
        assert await used_blocks(client) == 0


async def test_a_slow_reader_slows_nobody(run: Run) -> None:
    async with run(SimSettings(step_s=0.002)) as client:
        slow = client.stream(client.prepare("slow", "hello", ENDLESS))
        first = await anext(slow)
        quick = await collect(client, "quick", "hello", ENDLESS)
        await until(lambda: client.load().num_running == 0)
        rest = [output async for output in slow]
        assert len(rest) <= 3  # what had piled up came at once
        text = "".join(o.outputs[0].text for o in [first, *rest])
        assert text == "".join(o.outputs[0].text for o in quick)
        assert len(quick) > 20


async def test_preemptions_are_counted_per_request(run: Run) -> None:
    async with run(SimSettings(num_blocks=40)) as client:
        done = await asyncio.gather(*(collect(client, str(i), [i] * 8, LONG) for i in range(4)))
        metrics = [outputs[-1].metrics for outputs in done]
        told = sum(m.num_preemptions for m in metrics if m is not None)
        values = {m.name: m.value for m in await client.metrics()}
        assert told == values["vllm:num_preemptions_total"] > 0


async def test_pinned_prefixes_are_warm_at_the_start(run: Run) -> None:
    async with run(config_changes={"pinned_prefixes": ["long head", tuple(range(12))]}) as client:
        assert (await client.call("kv_overview"))["num_pinned"] == 2 + 3
        values = {m.name: m.value for m in await client.metrics()}
        assert values["vllm:generation_tokens_total"] == 0  # nobody's request
        outputs = await collect(client, "a", "long head and more", DELTA)
        assert outputs[-1].num_cached_tokens == 8


async def test_readers_that_come_and_go_leave_nothing_behind(run: Run) -> None:
    async with run(SimSettings(num_blocks=80, depth=2)) as client:
        rng = random.Random(7)

        async def reader(i: int) -> None:
            params = ENDLESS.clone(n=rng.choice([1, 1, 3]), temperature=1.0, max_tokens=rng.randint(1, 40))
            stop = [chr(rng.randrange(97, 123))] if rng.random() < 0.3 else None
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
            await asyncio.sleep(rng.random() * 0.3)
            stream = client.stream(client.prepare(f"r{i}", prompt, params.clone(stop=stop)))
            left = rng.choice([0, 1, 5, 1000])
            async for _ in stream:
                left -= 1
                if left <= 0:
                    break
            await stream.aclose()

        await asyncio.gather(*(reader(i) for i in range(120)))
        overview = await client.call("kv_overview")
        assert (overview["num_used"], overview["num_running"], overview["num_waiting"]) == (0, 0, 0)
        assert len(client.streams) == 0
        assert not client.streams._lines and not client.streams._outputs._jobs


# -- ends


async def test_kill_9(run: Run) -> None:
    async with run(SimSettings(step_s=0.02)) as client:
        reasons: list[str] = []
        client.on_death(reasons.append)
        tasks = [asyncio.create_task(collect(client, str(i), "hello", ENDLESS)) for i in range(8)]
        await until(lambda: client.load().num_running == 8)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert all(isinstance(r, EngineDeadError) and "SIGKILL" in str(r) for r in results)
        assert len(reasons) == 1 and "SIGKILL" in reasons[0]
        assert client.health().state is EngineState.DEAD
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(client, "late", "hello", DELTA)
        with pytest.raises(EngineDeadError):
            await client.metrics()


async def test_a_failed_step_and_a_crash_say_why(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async with run() as client:
        pending = asyncio.create_task(collect(client, "other", "hello", ENDLESS))
        with pytest.raises(EngineDeadError, match="boom"):
            await collect(client, "bad", [BREAK], DELTA)
        with pytest.raises(EngineDeadError, match="boom"):
            await pending
    async with run() as client:
        with pytest.raises(EngineDeadError, match=r"(?s)SIGSEGV.*submit"):  # with the stack that it left behind
            await collect(client, "bad", [CRASH], DELTA)
    assert "submit" in caplog.text


async def test_a_stuck_step_is_seen_and_written_down(run: Run, tmp_path: Path) -> None:
    async with run(SimSettings(hang_s=1.5), step_timeout_s=0.3, dump_dir=str(tmp_path)) as client:
        task = asyncio.create_task(collect(client, "stuck-one", [HANG, 17, 18, 19], LONG.clone(max_tokens=2)))
        await until(lambda: client.health().state is EngineState.STUCK)
        reason = client.health().reason
        [dump] = tmp_path.glob("*.txt")
        assert str(dump) in reason
        text = dump.read_text()
        assert "stuck-one [0] running row 0 prompt 4" in text
        assert "step 0: 1 sequences, 4 tokens" in text
        assert "time.sleep(self.settings.hang_s)" in text  # the stack
        assert "17, 18, 19" not in text  # no prompt
        assert (await task)[-1].finished
        await until(lambda: client.health().state is EngineState.READY)
        assert len(list(tmp_path.glob("*.txt"))) == 1


async def test_a_stopped_process_is_stuck_too(run: Run, tmp_path: Path) -> None:
    async with run(step_timeout_s=0.3, dump_dir=str(tmp_path)) as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: client.health().state is EngineState.STUCK)
        assert "no sign of life" in client.health().reason
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: client.health().state is EngineState.READY)
        assert (await collect(client, "a", "hello", DELTA))[-1].finished


async def test_close_ends_what_runs_and_hurries_what_hangs(tiny_model: Path) -> None:
    client = EngineClient(config(tiny_model), sim_options(SimSettings(hang_s=3600)))
    await start(client)
    pid = client.pid
    task = asyncio.create_task(collect(client, "a", [HANG], DELTA))
    await asyncio.sleep(0.2)
    await asyncio.wait_for(client.close(grace_s=0.3), 60)
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    with pytest.raises(EngineDeadError):
        await collect(client, "b", "hello", DELTA)
    await client.close()
    assert client.health().state is EngineState.DEAD


@pytest.mark.parametrize(
    ("start_error", "kind", "words"),
    [
        ("MemoryBudgetError", MemoryBudgetError, "^no start: lower something$"),
        ("ModelError", ModelError, "^no start"),
        ("Bug", QuireError, "ZeroDivisionError: no start"),
        ("SIGABRT", EngineDeadError, "(?s)SIGABRT.*about to fall"),
        ("exit", EngineDeadError, "status 3"),
    ],
)
async def test_a_failed_start_says_what_offline_would(
    tiny_model: Path, start_error: str, kind: type[QuireError], words: str
) -> None:
    client = EngineClient(config(tiny_model), sim_options(SimSettings(start_error=start_error)))
    died: list[str] = []
    client.on_death(died.append)
    await client.start()
    assert client.health().state is EngineState.STARTING
    with pytest.raises(kind, match=words):
        await client.ready()
    assert client.health().state is EngineState.DEAD
    assert died == []  # ready() told it
    await client.close()


async def test_what_is_wrong_with_a_model_is_said_in_this_process(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path / "nothing"), sim_options())
    await client.start()
    with pytest.raises(ModelError, match="nothing"):
        await client.ready()
    with pytest.raises(ModelError, match="nothing"):
        await client.ready()
    await client.close()


async def test_a_process_that_cannot_be_started_leaves_no_descriptors(tiny_model: Path) -> None:
    before = psutil.Process().num_fds()
    client = EngineClient(EngineConfig(model=str(tiny_model)), EngineProcessOptions(command=("/nowhere/python",)))
    with pytest.raises(EngineDeadError, match=r"could not be started: .*/nowhere/python"):
        await client.start()
    assert client.health().state is EngineState.DEAD
    await client.close()
    assert psutil.Process().num_fds() == before


async def test_close_while_starting(tiny_model: Path) -> None:
    client = EngineClient(config(tiny_model), sim_options())
    await client.close()  # before the start
    client = EngineClient(config(tiny_model), sim_options())
    await client.start()
    await client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await client.ready()


def test_log_lines_come_out_of_this_process(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        options = sim_options(SimSettings(hang_s=0.8), step_timeout_s=0.2, dump_dir=str(tmp_path))
        client = EngineClient(config(tiny_model), options)
        await start(client)
        await collect(client, "a", [HANG], LONG.clone(max_tokens=1))
        await client.close()

    with caplog.at_level(logging.INFO, logger="quire"):
        asyncio.run(body())
    assert any(r.levelno == logging.ERROR and "has run for" in r.getMessage() for r in caplog.records)


def test_on_uvloop(tiny_model: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def body() -> None:
        client = EngineClient(config(tiny_model), sim_options())
        await start(client)
        done = await asyncio.gather(*(collect(client, str(i), [i] * 9, DELTA) for i in range(30)))
        assert all(len([t for o in outputs for t in o.outputs[0].token_ids]) == 60 for outputs in done)
        await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="step_timeout_s"):
        EngineProcessOptions(step_timeout_s=0)


def test_the_real_engine_gives_what_it_gives_offline(tiny_model: Path) -> None:
    """The one test with a model in the other process."""
    params = [
        SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, seed=3, n=2, logprobs=2, stop=["e"], bad_words=["x"]),
        SamplingParams(max_tokens=10, seed=4, prompt_logprobs=1, logit_bias={65: 5.0}, top_p=0.9),
    ]
    settings = config(tiny_model, kv_cache_memory_bytes=4 << 20)
    offline = LLMEngine.from_config(settings)
    wanted = []
    for i, own in enumerate(params):
        offline.add_request(str(i), "hello there", own.clone(output_kind=OutputKind.FINAL_ONLY))
        while offline.has_unfinished_requests():
            wanted += offline.step()

    async def body() -> list[RequestOutput]:
        client = EngineClient(settings, EngineProcessOptions())
        await start(client)
        found = []
        for i, own in enumerate(params):
            final = own.clone(output_kind=OutputKind.FINAL_ONLY)
            found += await collect(client, str(i), "hello there", final)
        assert client.info.num_blocks == offline.ledger.num_blocks
        assert client.info.ledger_summary == offline.ledger.summary()
        await client.close()
        return found

    found = asyncio.run(body())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert (ours.num_cached_tokens, ours.num_cache_creation_tokens) == (
            theirs.num_cached_tokens,
            theirs.num_cache_creation_tokens,
        )
