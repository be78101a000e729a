"""Two real engines: a prompt's blocks arrive at the other while the steps that compute them run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch

from quire import LLMEngine, SamplingParams
from quire.config import EngineConfig
from quire.executor.stores import address_of
from quire.outputs import RequestOutput
from quire.request import FinishReason
from quire.scheduler.traffic import SendReport
from quire.tiers.peers import Peers

BLOCK_SIZE = 4
NUM_LAYERS = 6
MODELS = {
    "full": {},
    "windows": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
}
PROMPT = [(i * 31) % 251 for i in range(211)]
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True),
}


@pytest.fixture(scope="module", params=MODELS)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"sends-{request.param}")
    return fakes.write_tiny_model(folder, num_hidden_layers=NUM_LAYERS, **MODELS[request.param])


@pytest.fixture
def make(weights: Path, tmp_path: Path) -> Iterator[Callable[..., LLMEngine]]:
    engines: list[LLMEngine] = []

    def make(**settings: Any) -> LLMEngine:
        values = {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 80} | settings
        engines.append(
            LLMEngine.from_config(
                EngineConfig(
                    model=str(weights),
                    device="cpu",
                    load_format="dummy",
                    num_threads=1,
                    dtype="float32",
                    block_size=BLOCK_SIZE,
                    max_num_seqs=4,
                    kv_listen=str(tmp_path / str(len(engines))),
                    **values,
                )
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.core.kv.check()
        engine.close()


def peers_of(engine: LLMEngine) -> Peers:
    [store] = engine.core.executor.stores  # type: ignore[attr-defined]
    return store.connector


def send(engine: LLMEngine, request_id: str, to: LLMEngine) -> None:
    scheduler = engine.core.scheduler
    address = address_of(to.core.executor.stores)  # type: ignore[attr-defined]
    assert address is not None
    scheduler.traffic.send(scheduler.requests[request_id], address)


def run(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request("again", prompt, params)
    while True:
        for output in engine.step():
            if output.finished:
                return output


def step_until(engine: LLMEngine, is_so: Callable[[SendReport], bool]) -> SendReport:
    """Nothing is reported of a request that has ended, so its tokens come slowly enough for a busy machine."""
    while True:
        time.sleep(0.005)
        engine.step()
        assert engine.core.scheduler.requests, "the request ended before its blocks had arrived"
        for report in engine.core.scheduler.traffic.take_reports():
            assert isinstance(report, SendReport)
            if is_so(report):
                return report


class Watched:
    """An engine's sends. After each layer its steps wait until all that has left has arrived, so that the counts do not
    depend on who is faster; at the end of each step that sends what it fills, what the other engine has is noted."""

    def __init__(self, engine: LLMEngine, inbox: Peers) -> None:
        self.moves = engine.core.executor.worker.stores  # type: ignore[attr-defined]
        self.counters = self.moves.stores[0].counters
        self.usages: list[dict[str, float]] = []
        self.num_behind: list[int] = []  # bytes that each of those steps left to be sent
        self._inbox = inbox
        self._on_step, self._layer_hook = self.moves.on_step, self.moves.layer_hook
        self.moves.on_step, self.moves.layer_hook = self.on_step, self.layer_hook

    def layer_hook(self, step: int) -> Callable[[int], None] | None:
        if (hook := self._layer_hook(step)) is None:
            return None

        def on_written(layer: int) -> None:
            hook(layer)
            self._wait(step)

        return on_written

    def _wait(self, step: int) -> None:
        end = time.monotonic() + 30.0
        while any(send._num_under_way for send in self.moves._filled[step]):
            assert time.monotonic() < end
            time.sleep(0.0005)

    def on_step(self, step: int, *, is_good: bool) -> None:
        if step not in self.moves._filled:
            return
        self._wait(step)
        self.usages.append(self._inbox.usage())
        before = self.counters.num_bytes_behind
        self._on_step(step, is_good=is_good)
        self.num_behind.append(self.counters.num_bytes_behind - before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_arrives_while_it_is_computed_and_goes_on_with_the_same_tokens(
    make: Callable[..., LLMEngine], kind: str
) -> None:
    here, there = make(), make()
    inbox = peers_of(there)
    watched = Watched(here, inbox)
    here.add_request("0", PROMPT, replace(KINDS[kind], max_tokens=150))
    send(here, "0", there)
    num_full = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    report = step_until(here, lambda report: report.has_failed or report.num_tokens >= num_full)
    assert not report.has_failed
    # Of the blocks that chunks of 80, 80 and 51 tokens fill, one layer in each KV group lacks when its step ends. The
    # last chunk's layers run in one call, and leave behind it: those have arrived here because the test waits for them.
    slot_bytes = 2 * 2 * BLOCK_SIZE * 32 * 4  # keys and values, heads, tokens, elements, bytes
    num_groups = len(here.core.kv.windows)
    assert watched.num_behind == [num_groups * num_tokens // BLOCK_SIZE * slot_bytes for num_tokens in (80, 80, 48)]
    total = num_full // BLOCK_SIZE * NUM_LAYERS * slot_bytes
    assert watched.counters.num_bytes_beside == total - sum(watched.num_behind)
    assert watched.usages[0]["num_blocks"] == 0  # pieces, of which nothing counts yet
    assert watched.usages[0]["incomplete_bytes"] == 80 // BLOCK_SIZE * (NUM_LAYERS - num_groups) * slot_bytes
    output = run(there, PROMPT, KINDS[kind])
    assert output.num_cached_tokens == num_full
    expected = run(make(), PROMPT, KINDS[kind])
    assert expected.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert inbox.usage()["num_incomplete"] == inbox.usage()["num_rejected"] == 0


def test_what_a_failing_step_computed_never_counts_there(make: Callable[..., LLMEngine]) -> None:
    """Its prompt's last chunk leaves no finite logits; earlier ones were good, as far as anybody knows."""
    here, there = make(), make()
    Watched(here, peers_of(there))
    decoder = here.core.executor.worker.decoder  # type: ignore[attr-defined]
    logits = decoder.gathered_logits
    decoder.gathered_logits = lambda *args: torch.full_like(logits(*args), torch.nan)
    here.add_request("0", PROMPT[:150], KINDS["greedy"])
    send(here, "0", there)
    output = None
    while output is None:
        output = next((each for each in here.step() if each.finished), None)
    assert output.outputs[0].finish_reason == FinishReason.ERROR
    here.core.settle(30.0)
    usage = peers_of(there).usage()
    assert usage["num_blocks"] == len(here.core.kv.windows) * 80 // BLOCK_SIZE  # the first chunk's
    assert usage["incomplete_bytes"] > 0  # layers of the second are there, and of no use
    output = run(there, PROMPT[:150], KINDS["greedy"])
    assert output.num_cached_tokens == 80
    assert output.outputs[0].token_ids == run(make(), PROMPT[:150], KINDS["greedy"]).outputs[0].token_ids


def test_an_aborted_prompt_leaves_whole_blocks_or_none(make: Callable[..., LLMEngine]) -> None:
    here, there = make(), make()
    for number in range(6):
        prompt = [(number * 7 + token) % 251 for token in PROMPT]
        here.add_request(str(number), prompt, KINDS["greedy"])
        send(here, str(number), there)
        for _ in range(number % 4):
            here.step()
        here.abort_request(str(number))
        output = run(there, prompt, KINDS["greedy"])
        assert output.outputs[0].token_ids == run(make(), prompt, KINDS["greedy"]).outputs[0].token_ids
    here.core.settle(30.0)
