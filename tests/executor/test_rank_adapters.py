"""Adapters on a model that is split among ranks: the tokens of one process, whatever else is in the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter_files
import pytest
import zmq
from executor.test_conformance import RightOrWrong
from executor.test_ranks import HEAD, config_of
from rank_models import write_lively_model

from quire.engine.llm_engine import LLMEngine
from quire.engine.variants import EngineVariants
from quire.errors import BadRequestError, ErrorInfo, RankError, WeightsError
from quire.executor.adapter_slots import AdapterInfo
from quire.executor.rank_adapters import AdapterReader, RankAdapters
from quire.executor.rank_messages import AdapterRead, KeepAdapters, PlaceAdapter, ReadAdapter, ToRank
from quire.executor.rank_watch import Cause, RankWatch
from quire.executor.sizing import adapter_bytes
from quire.lora.request import LoRARequest
from quire.models.share import share_of
from quire.params import SamplingParams
from quire.structured import StructuredOutputsParams

# Three adapters, of which two have slots and two are kept: they take turns, and are read again.
SETTINGS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 24}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
DEGREES = {"tp 2": (2, 1, {}), "tp 3, drafts": (3, 1, NGRAM), "pp 2": (1, 2, {}), "tp 2, pp 2": (2, 2, NGRAM)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two ranks heads and columns are split unevenly."""
    root = tmp_path_factory.mktemp("adapters")
    model = write_lively_model(root / "model")
    adapter_files.write_adapter(root / "a", model, rank=4, seed=1)
    adapter_files.write_adapter(root / "b", model, rank=20, seed=2, use_rslora=True, lora_alpha=3)
    adapter_files.write_adapter(root / "c", model, rank=1, seed=3, modules=("v_proj", "down_proj"))
    return root


@pytest.fixture(scope="module")
def whole(files: Path) -> Iterator[EngineVariants]:
    variants = EngineVariants(config_of(files / "model", **SETTINGS))
    yield variants
    variants.clear()


@pytest.fixture(scope="module", params=DEGREES)
def split(files: Path, request: pytest.FixtureRequest) -> Iterator[EngineVariants]:
    tensor_size, num_stages, more = DEGREES[request.param]
    degrees = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages}
    variants = EngineVariants(config_of(files / "model", **SETTINGS, **degrees, **more))
    variants.base()
    yield variants
    variants.clear()


def requests(files: Path) -> list[LoRARequest | None]:
    return [None, *(LoRARequest(name, number, str(files / name)) for number, name in enumerate("abc", 1))]


def run(engine: LLMEngine, files: Path) -> dict[str, Any]:
    """Greedy and sampled answers with each adapter and with none, all in one batch."""
    asks: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "allowed_token_ids": [5, 6, 7], "max_tokens": 24},  # which repeat: n-grams are found
        {"temperature": 1.0, "n": 2},
        {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[0-9]{4,9}x"), "ignore_eos": False},
    ]
    for i in range(16):
        own = [(i * 37 + j * 11) % 250 for j in range(3 + 5 * (i % 3))]
        params = SamplingParams(**{"max_tokens": 16, "seed": 50 + i, "ignore_eos": True} | asks[i // 4])
        engine.add_request(f"r{i}", HEAD + own, params, lora_request=requests(files)[i % 4])
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {one.request_id: [list(o.token_ids) for o in one.outputs] for one in engine.step() if one.finished}
    engine.core.kv.check()
    return found


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 48, "preemption": "swap"}], ids=str)
def test_tokens_are_those_of_the_whole_model(
    files: Path, whole: EngineVariants, split: EngineVariants, changes: dict[str, Any]
) -> None:
    expected, engine = run(whole.engine(**changes), files), split.engine(**changes)
    scheduler, has_drafts = engine.core.scheduler, split.config.speculative_config is not None
    if has_drafts:  # what n-grams are worth depends on how long steps take; the other tests leave it to them
        lines = {(name, i): line for name, answers in expected.items() for i, line in enumerate(answers)}
        scheduler.drafter = RightOrWrong(lines, 0.7)
    assert run(engine, files) == expected
    assert len({str(answers) for answers in expected.values()}) == 16
    assert bool(changes) == (scheduler.stats.num_preemptions > 0)
    assert has_drafts == (0 < scheduler.stats.num_accepted_tokens < scheduler.stats.num_draft_tokens)


def test_prefixes_are_found_by_their_own_adapter(files: Path, split: EngineVariants, tmp_path: Path) -> None:
    engine, where = split.engine(), tmp_path / "x"

    def ask(adapter: LoRARequest | None) -> tuple[list[int], int]:
        engine.add_request(
            "r", HEAD, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), lora_request=adapter
        )
        while engine.has_unfinished_requests():
            outputs = [one for one in engine.step() if one.finished]
        return list(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens or 0

    adapter_files.write_adapter(where, files / "model", seed=1)
    first, again = ask(LoRARequest("x", 7, str(where))), ask(LoRARequest("x", 7, str(where)))
    assert not first[1] and again[1] and again[0] == first[0]
    adapter_files.write_adapter(where, files / "model", seed=9)
    other = ask(LoRARequest("x", 7, str(where), load_inplace=True))
    assert not other[1] and other[0] != first[0] and not ask(None)[1]


def test_one_is_read_while_steps_go_on(files: Path, whole: EngineVariants, split: EngineVariants) -> None:
    engine = split.engine()
    assert engine.core.adapters is not None
    reading = engine.core.adapters.slots.start_reading("late", str(files / "b"))
    assert run(engine, files) == run(whole.engine(), files)
    assert reading.result(10.0)["rank"] == 20


def test_the_ledger_counts_one_ranks_slots(split: EngineVariants) -> None:
    spec, config = split.base().spec, split.config
    degrees = (config.tensor_parallel_size, config.pipeline_parallel_size)
    shares = [share_of(spec, rank, *degrees).spec(spec) for rank in range(config.num_ranks)]
    assert split.base().ledger.adapter_bytes == max(adapter_bytes(config, share, "float32") for share in shares)


def test_a_bad_adapter_is_one_process_error_and_the_ranks_go_on(
    files: Path, whole: EngineVariants, split: EngineVariants, tmp_path: Path
) -> None:
    adapter_files.write_adapter(tmp_path / "wide", files / "model", rank=25)
    adapter_files.write_adapter(tmp_path / "other", write_lively_model(tmp_path / "model", intermediate_size=96))
    broken = adapter_files.write_adapter(tmp_path / "broken", files / "model") / "adapter_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-5])
    engines = [whole.engine(), split.engine()]
    for name, words in {"wide": "raise it", "other": "another model", "broken": "fetch", "none": "no such"}.items():
        messages = []
        for engine in engines:
            with pytest.raises(BadRequestError, match=words) as error:
                engine.find_adapter(LoRARequest("bad", 9, str(tmp_path / name)))
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    assert run(engines[1], files) == run(engines[0], files)


def test_one_that_has_changed_fails_its_own_requests_only(files: Path, split: EngineVariants, tmp_path: Path) -> None:
    engine, where = split.engine(), tmp_path / "x"
    adapter_files.write_adapter(where, files / "model", seed=1)
    engine.find_adapter(changed := LoRARequest("x", 8, str(where)))
    run(engine, files)  # three others, so that it has to be read again
    adapter_files.write_adapter(where, files / "model", seed=2)
    ended: dict[str, str | None] = {}
    for name, adapter in (("changed", changed), ("plain", None), ("a", requests(files)[1])):
        engine.add_request(name, HEAD, SamplingParams(max_tokens=4, ignore_eos=True), lora_request=adapter)
    while engine.has_unfinished_requests():
        ended |= {one.request_id: one.outputs[0].finish_reason for one in engine.step() if one.finished}
    assert ended == {"changed": "error", "plain": "length", "a": "length"}


# -- the two ends by themselves


class FakeWatch:
    """Of ranks that answer at once."""

    def answer_to(self, on_adapter: Callable[[AdapterRead], None]) -> None:
        self.answer = on_adapter

    def place_of(self, rank: int) -> str:
        return f"rank {rank} on host{rank}"


def answered(*answers: AdapterInfo | ErrorInfo) -> AdapterInfo:
    """What is read where the ranks answer this."""
    watch: Any = FakeWatch()

    def tell(message: ToRank) -> None:
        assert isinstance(message, ReadAdapter)
        watch.answer(AdapterRead(0, message.number - 1, None))  # of an earlier one, which was given up
        for rank, answer in reversed(list(enumerate(answers))):
            info, error = (answer, None) if isinstance(answer, AdapterInfo) else (None, answer)
            watch.answer(AdapterRead(rank, message.number, info, error))

    return RankAdapters(2, tell, watch).read("a", "/a")


def test_ranks_that_do_not_agree_are_named() -> None:
    info, bad = AdapterInfo("a@1", "a", "/a", 4), ErrorInfo("WeightsError", "/a: no such folder")
    assert answered(info, info) == info
    with pytest.raises(WeightsError, match=r"^/a: no such folder$"):
        answered(bad, bad)
    with pytest.raises(WeightsError, match=r"^rank 1 on host1: /a: no such folder$"):
        answered(info, bad)
    with pytest.raises(WeightsError, match="rank 1 on host1 has other files in /a than rank 0 on host0"):
        answered(info, replace(info, key="a@2"))


def test_a_rank_answers_whatever_goes_wrong() -> None:
    class Store:
        def read(self, name: str, path: str) -> AdapterInfo:
            raise {"/a": WeightsError("bad"), "/b": OSError("torn")}[path]

        def keep(self, keys: Any) -> None:
            done.append(list(keys))

        def place(self, key: str, slot: int) -> None:
            done.append((key, slot))

    done: list[Any] = []
    answers: list[AdapterRead] = []
    has_answered = threading.Semaphore(0)
    reader = AdapterReader(1, Store(), lambda answer: (answers.append(answer), has_answered.release())[0])
    for number, path in enumerate(("/a", "/b")):
        reader.handle(ReadAdapter(number, "a", path))
        assert has_answered.acquire(timeout=10.0)
    reader.handle(PlaceAdapter("a@1", 1))
    reader.handle(KeepAdapters([]))
    assert [(one.rank, one.number, one.error) for one in answers] == [
        (1, 0, ErrorInfo("WeightsError", "bad")),
        (1, 1, ErrorInfo("", "OSError: torn")),
    ]
    assert done == [("a@1", 1), []]


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_waits_for_ranks_that_have_ended_is_told(is_killed: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as beats:
        watch = RankWatch(2, beats, lambda: None, lambda told: None)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(RankAdapters(2, lambda message: None, watch).read, "a", "/a")
            if is_killed:
                watch.report(1, Cause.KILLED, "was killed")
            else:
                watch.close()
            error = reading.exception(30.0)
        watch.close()
    assert isinstance(error, RankError) and ("was killed" if is_killed else "has been closed") in str(error)
