"""Whole engines that run their steps from captured graphs, on a CPU: a capture keeps the step, a replay runs it again.

So everything but CUDA itself is the real thing: which graph serves a step, what it reads, and what padding does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adapter_files
import fakes
import pytest
import torch
from scheduler.harness import Proposer

from quire import LLMEngine, SamplingParams
from quire.config import EngineConfig
from quire.executor import decode_graphs as decode_module
from quire.executor import mixed_graphs as mixed_module
from quire.executor.captured import StepParts, is_out_of_memory
from quire.executor.decode_graphs import DecodeGraphs, DecodeShape
from quire.executor.local import LocalExecutor
from quire.executor.mixed_graphs import MixedGraphs, MixedShape
from quire.executor.sizing import num_graph_rows, padded_size
from quire.lora.request import LoRARequest
from quire.outputs import RequestOutput
from quire.request import Sequence

MAX_NUM_SEQS = 40


class Playback:
    """Stands in for a CUDA graph."""

    def __init__(self, step: Callable[[], object], played: list[int]) -> None:
        self._step = step
        self._played = played

    def replay(self) -> None:
        self._played[0] += 1
        self._step()


class PlaybackMemory:
    """Stands in for GraphMemory."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = torch.full((num_graph_rows(MAX_NUM_SEQS), vocab_size), float("nan"))
        self.num_attempts = 0
        self.num_captures = 0
        self.num_played = [0]
        self.room: int | None = None  # captures that memory still suffices for
        self.error: RuntimeError = torch.OutOfMemoryError("none is left")
        self.num_holds = 0
        self.can_hold = True
        self.fails_once = False  # until what is held for steps was given back

    def capture(self, step: Callable[[], object]) -> Playback:
        if self.fails_once:
            self.fails_once = False
            raise self.error
        if self.room is not None:
            if not self.room:
                raise self.error
            self.room -= 1
        self.num_captures += 1
        return Playback(step, self.num_played)

    def hold_again(self) -> bool:
        self.num_holds += 1
        return self.can_hold


class PlainRing:
    """Stands in for pinned buffers."""

    def __init__(self, num_values: int) -> None:
        pass

    def copy_to(self, array: Any, target: torch.Tensor) -> None:
        target.copy_(torch.from_numpy(array))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_tiny_model(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (decode_module, mixed_module):
        monkeypatch.setattr(module, "StagingRing", PlainRing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    yield


def make_engine(weights: Path, **kwargs: Any) -> LLMEngine:
    values = {
        "kv_cache_memory_bytes": 4 << 20,
        "max_num_seqs": MAX_NUM_SEQS,
        "block_size": 4,
        "num_threads": 1,
        "load_format": "dummy",
    }
    return LLMEngine.from_config(EngineConfig(model=str(weights), device="cpu", **values | kwargs))


def with_graphs(engine: LLMEngine, room: int | None = None) -> tuple[LocalExecutor, PlaybackMemory]:
    executor = engine.core.executor
    assert isinstance(executor, LocalExecutor)
    memory: Any = PlaybackMemory(engine.spec.vocab_size)
    memory.room = room
    worker = executor.worker
    parts = StepParts(worker.decoder, worker.cache.layers, worker.batch, memory, engine.max_model_len)
    worker.graphs, worker.mixed = DecodeGraphs(parts, MAX_NUM_SEQS), MixedGraphs(parts)
    with torch.inference_mode():
        executor.worker.graphs.capture_common()
    return executor, memory


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Of many lengths; every third begins like the others of its kind, so that prefixes are shared."""
    rng = random.Random(seed)
    head = [rng.randrange(200) for _ in range(140)]
    found = []
    for i in range(count):
        prompt = [rng.randrange(200) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 50), ignore_eos=True)
        found.append((head + prompt if i % 3 == 0 else prompt, params))
    return found


def run(engine: LLMEngine, work: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """A few at a time, so that prompts come while others decode, and the batch grows and shrinks."""
    done: dict[str, RequestOutput] = {}
    waiting = [(str(i), *one) for i, one in enumerate(work)]
    while waiting or engine.has_unfinished_requests():
        for request_id, prompt, params in waiting[:1]:
            engine.add_request(request_id, prompt, params)
        waiting = waiting[1:]
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return [done[str(i)].outputs[0].token_ids for i in range(len(work))]


def test_layers_with_windows_have_tables_of_their_own_in_graphs(tmp_path: Path) -> None:
    weights = fakes.write_tiny_model(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )
    work = requests(2, 60)
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    _, memory = with_graphs(engine)
    while engine.core.prepare_more():
        pass
    assert len(engine.core.kv.windows) == 3
    assert run(engine, work) == expected
    assert memory.num_played[0] > 50


@pytest.mark.parametrize("when", ["captured while idle", "captured when it pays"])
def test_the_tokens_are_those_without_graphs(weights: Path, when: str) -> None:
    work = requests(1, 200)
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    executor, memory = with_graphs(engine)
    at_start = memory.num_captures
    if when == "captured while idle":
        while engine.core.prepare_more():
            pass
        assert memory.num_captures > at_start + 30
    assert run(engine, work) == expected
    assert memory.num_played[0] > 50
    assert executor.worker.graphs is not None
    if when == "captured when it pays":
        sizes = {padded_size(num) for num in range(1, MAX_NUM_SEQS + 1)}
        assert at_start < memory.num_captures < at_start + len(sizes)  # not every shape that was passed through


@pytest.mark.parametrize("num_left", [1, 2, 16])
def test_a_request_whose_prefix_was_found_joins_decodes_in_a_captured_step(weights: Path, num_left: int) -> None:
    """One that comes with a few tokens beside others stops nobody for a step without a graph."""
    engine = make_engine(weights)
    _, memory = with_graphs(engine)
    while engine.core.prepare_more():
        pass
    prompt = [token % 200 for token in range(40 + num_left)]
    run(engine, [(prompt[:41], SamplingParams(temperature=0.0, max_tokens=1))])
    for i in range(9):
        engine.add_request(f"decode-{i}", [i, 5], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.step()
    before = memory.num_played[0]
    engine.add_request("joining", prompt, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    outputs = [output for _ in range(5) for output in engine.step()]
    assert memory.num_played[0] == before + 5
    assert [output.num_cached_tokens for output in outputs if output.request_id == "joining"] == [40] * 3


class Oracle(Proposer):
    """Drafts what plain decoding brought, with a wrong token now and then."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self._texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        self._rng = random.Random(9)

    def propose(self, seq: Sequence) -> list[int]:
        text = next(text for text in self._texts if text[: len(seq.token_ids)] == seq.token_ids)
        drafts = text[len(seq.token_ids) :][: self._rng.choice((0, 1, 3, 7))]
        return [token if self._rng.random() < 0.9 else 1 for token in drafts]


def test_a_step_with_drafts_is_a_captured_step_of_so_many_decodes(weights: Path) -> None:
    work = requests(5, 60)
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    _, memory = with_graphs(engine)
    while engine.core.prepare_more():
        pass
    engine.core.scheduler.drafter = Oracle([prompt for prompt, _ in work], expected)
    assert run(engine, work) == expected
    stats = engine.core.scheduler.stats
    assert 0.5 < stats.num_accepted_tokens / stats.num_draft_tokens < 1
    assert memory.num_played[0] == stats.num_steps


def test_who_shares_a_prefix_is_looked_up_when_the_batch_changes_and_not_for_each_number_of_drafts(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    work = [(prompt, params) for prompt, _ in requests(5, 3)]
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    with_graphs(engine)
    while engine.core.prepare_more():
        pass
    engine.core.scheduler.drafter = Oracle([prompt for prompt, _ in work], expected)
    num_looks, find = itertools.count(), decode_module.find_shared_prefixes

    def counted(*args: Any, **options: Any) -> Any:
        next(num_looks)
        return find(*args, **options)

    monkeypatch.setattr(decode_module, "find_shared_prefixes", counted)
    assert run(engine, work) == expected
    assert engine.core.scheduler.stats.num_steps > 20
    assert next(num_looks) < 10


@pytest.mark.parametrize(
    ("room", "text"),
    [
        (0, None),
        (4, "CUDA error: out of memory"),  # the driver's, in a torch.AcceleratorError
        (0, "Triton Error [CUDA]: out of memory"),
        (0, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_capture_that_finds_no_memory_is_done_without(weights: Path, room: int, text: str | None) -> None:
    work = requests(2, 100)
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    _, memory = with_graphs(engine)
    memory.room = room
    if text is not None:
        memory.error = RuntimeError(text)
    if room == 4:
        while engine.core.prepare_more():
            pass
    assert run(engine, work) == expected
    assert memory.num_played[0] > 30 and memory.room == 0
    assert memory.num_holds == memory.num_attempts - memory.num_captures > 0  # after each that failed


@pytest.mark.parametrize("can_hold", [True, False])
def test_a_capture_may_take_what_is_held_for_steps(weights: Path, can_hold: bool) -> None:
    engine = make_engine(weights)
    _, memory = with_graphs(engine)
    before = memory.num_captures
    memory.fails_once, memory.can_hold = True, can_hold
    assert engine.core.prepare_more()
    assert memory.num_captures == before + 1 and memory.num_holds == 1
    while engine.core.prepare_more():
        pass
    # Without it, steps that have no graph are short of memory: mixed ones are captured no more.
    assert (memory.num_captures > before + 30) is can_hold


def test_an_error_at_a_captures_end_does_not_hide_why_it_failed() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise torch.OutOfMemoryError("none is left")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("operation failed"))


def test_another_error_of_a_capture_is_not_taken_for_a_lack_of_memory(weights: Path) -> None:
    engine = make_engine(weights)
    _, memory = with_graphs(engine)
    memory.room, memory.error = 0, RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        engine.core.prepare_more()


def test_a_start_without_memory_for_graphs_says_so_and_serves(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    work = requests(4, 20)
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    with caplog.at_level("WARNING", "quire"):
        executor, memory = with_graphs(engine, room=1)
    assert "captured steps of 16, 8, 4, 2, 1 sequences" in caplog.text
    assert executor.worker.graphs is not None and len(executor.worker.graphs._graphs) == 1
    assert run(engine, work) == expected
    assert memory.num_played[0] > 0


def test_no_graph_at_all_and_no_memory_for_one(weights: Path) -> None:
    work = requests(3, 20)
    expected = run(make_engine(weights), work)
    engine = make_engine(weights)
    executor, memory = with_graphs(engine)
    assert executor.worker.graphs is not None
    executor.worker.graphs._graphs.clear()
    memory.room = 0
    assert run(engine, work) == expected
    assert memory.num_played[0] == 0


def test_a_batch_that_outgrows_the_captured_ones_captures_the_largest_once(weights: Path) -> None:
    engine = make_engine(weights)
    executor, memory = with_graphs(engine)
    assert executor.worker.graphs is not None
    before = memory.num_captures
    work = [([i + 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)) for i in range(39)]
    assert max(shape.size for shape in executor.worker.graphs._graphs) == 32
    for i, (prompt, params) in enumerate(work):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    assert DecodeShape(40, shares=False) in executor.worker.graphs._graphs
    assert memory.num_captures == before + 1


def test_steps_with_adapters_have_graphs_of_their_own(tmp_path: Path) -> None:
    model = adapter_files.write_model(tmp_path / "model")
    adapters: list[LoRARequest | None] = [None]
    for number in (1, 2, 3):
        path = adapter_files.write_adapter(tmp_path / str(number), model, rank=3 * number, seed=number)
        adapters.append(LoRARequest(str(number), number, str(path)))
    work = requests(3, 40)

    def run_adapted(engine: LLMEngine) -> list[list[int]]:
        """The last quarter has none: its steps are those of an engine without."""
        chosen = [adapters[i % 4] if i < 30 else None for i in range(len(work))]
        plain = engine.add_request
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                engine,
                "add_request",
                lambda request_id, *rest: plain(request_id, *rest, lora_request=chosen[int(request_id)]),
            )
            return run(engine, work)

    kwargs = {"load_format": "auto", "dtype": "float32", "enable_lora": True, "max_loras": 3}
    expected = run_adapted(make_engine(model, **kwargs))
    engine = make_engine(model, **kwargs)
    executor, memory = with_graphs(engine)
    while engine.core.prepare_more():
        pass
    assert run_adapted(engine) == expected
    assert memory.num_played[0] > 50
    graphs = executor.worker.graphs
    assert graphs is not None and DecodeShape(8, shares=False, adapted=True) in graphs._graphs


def test_tokens_of_a_capture_have_no_adapter_and_are_in_a_tile(tmp_path: Path) -> None:
    """What is worked out tile by tile leaves out no token, or a trial pass would go on with whatever lay there."""
    model = adapter_files.write_model(tmp_path / "model")
    engine = make_engine(model, load_format="auto", enable_lora=True, max_loras=3)
    executor, _ = with_graphs(engine)
    bank, graphs, mixed = executor.worker.batch.bank, executor.worker.graphs, executor.worker.mixed
    assert bank is not None and graphs is not None and mixed is not None
    for captured, shape, num_tokens in (
        (graphs, DecodeShape(8, shares=False, adapted=True), 8),
        (graphs, DecodeShape(2, shares=False, adapted=True), 2),
        (mixed, MixedShape(8, 64, adapted=True), 72),
    ):
        captured._fill_for_capture(shape)  # type: ignore[arg-type]
        rows = bank.unpack_rows(captured._adapters, num_tokens)
        tiles = [tile for tile in rows.tiles.T.tolist() if tile[0] < tile[1]]
        tokens = [token for start, end, _ in tiles for token in rows.order[start:end].tolist()]
        assert sorted(tokens) == [*range(num_tokens)] and {slot for _, _, slot in tiles} == {-1}
