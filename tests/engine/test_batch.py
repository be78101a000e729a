"""A batch taken in slices, alone and in an LLM whose executor runs beside the host."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.batch import Intake
from quire.errors import BadRequestError
from quire.executor.local import LocalExecutor


def fake_core(step_tokens: int, num_waiting: int = 1, num_steps: int = 1) -> Any:
    """With room for so many steps."""
    scheduler = SimpleNamespace(config=SimpleNamespace(max_num_batched_tokens=step_tokens), num_waiting=num_waiting)
    core = SimpleNamespace(scheduler=scheduler, has_room=True, num_begun=0)

    def begin_step() -> bool:
        core.num_begun += 1
        core.has_room = core.num_begun % num_steps > 0
        return True

    core.begin_step = begin_step
    return core


def slices_of(lengths: list[int], *, in_slices: bool = True, num_waiting: int = 1) -> list[int]:
    core, slices = fake_core(10, num_waiting), [0]

    def add(i: int) -> int:
        slices[-1] += 1
        return lengths[i]

    intake = Intake(core, add, len(lengths), in_slices=in_slices)
    while not intake.is_done:
        core.has_room = True
        intake.begin_steps()
        slices.append(0)
    intake.begin_steps()
    assert slices.pop() == 0
    return slices


def test_the_first_slice_fills_a_step_and_later_ones_eight() -> None:
    assert slices_of([5] * 100) == [2, 16, 16, 16, 16, 16, 16, 2]
    assert slices_of([3, 300, 3, 3]) == [2, 2]
    assert slices_of([1] * 9) == [9]
    assert slices_of([]) == []


def test_slices_grow_while_steps_could_be_larger() -> None:
    assert slices_of([5] * 150, num_waiting=0) == [2, 16, 32, 64, 36]


def test_not_in_slices_all_are_there_before_the_first_step() -> None:
    assert slices_of([500] * 50, in_slices=False) == [50]


def test_a_slice_is_taken_before_each_step_that_begins() -> None:
    core, added = fake_core(10, num_steps=2), []

    def add(i: int) -> int:
        added.append(core.num_begun)
        return 5

    Intake(core, add, 100, in_slices=True).begin_steps()
    assert added == [0] * 2 + [1] * 16


@pytest.fixture
def deep_llm(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Two steps in flight, as on a GPU."""
    monkeypatch.setattr(LocalExecutor, "depth", property(lambda self: 2))
    return new_llm(tiny_model, max_num_batched_tokens=64, max_num_seqs=8, scheduling_policy="priority")


def new_llm(model: Path, **settings: Any) -> LLM:
    common: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 4 << 20}
    return LLM(str(model), load_format="dummy", **common | settings)


PROMPTS = [[1 + i % 7] * (5 + 3 * i % 40) for i in range(60)]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS, use_tqdm=False, **options)]


def test_the_first_step_runs_before_the_last_prompt_is_looked_at(
    deep_llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, submit = deep_llm.llm_engine.prepare, deep_llm.llm_engine.core.executor.submit
    events: list[Any] = []

    def prepared(*args: Any, **kwargs: Any) -> Any:
        events.append("prompt")
        return prepare(*args, **kwargs)

    def submitted(plan: Any) -> int:
        events.append(sum(plan.spans.num_tokens))
        return submit(plan)

    monkeypatch.setattr(deep_llm.llm_engine, "prepare", prepared)
    monkeypatch.setattr(deep_llm.llm_engine.core.executor, "submit", submitted)
    found = tokens(deep_llm)
    first = events.index(64)  # a full step
    assert events[:first] == ["prompt"] * first and first < 10
    assert events.count("prompt") == len(PROMPTS)
    once = list(events)
    events.clear()
    deep_llm.reset_prefix_cache()
    assert tokens(deep_llm) == found and events == once, "the same batch is cut into the same steps"

    monkeypatch.undo()
    assert tokens(new_llm(tiny_model)) == found


def test_with_priorities_the_last_prompt_may_go_first(deep_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    submit = deep_llm.llm_engine.core.executor.submit

    def submitted(plan: Any) -> int:
        plans.append(plan)
        return submit(plan)

    monkeypatch.setattr(deep_llm.llm_engine.core.executor, "submit", submitted)
    tokens(deep_llm, [[1] * 64, *PROMPTS, [2] * 64], priority=[1] * (len(PROMPTS) + 1) + [0])
    assert list(plans[0].admitted[0].token_ids) == [2] * 64


def test_an_error_in_the_middle_leaves_nothing_behind(deep_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and wherever in adding a request it comes."""
    engine, wanted = deep_llm.llm_engine, tokens(deep_llm)
    for name, error in [("prepare", ValueError), ("add_prepared", KeyboardInterrupt), ("add_prepared", MemoryError)]:
        original, num_calls = getattr(engine, name), 0

        def failing(*args: Any, original: Any = original, error: Any = error, **kwargs: Any) -> Any:
            nonlocal num_calls
            done = original(*args, **kwargs)
            num_calls += 1
            if num_calls == 30:
                raise error
            return done

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(engine, name, failing)
            tokens(deep_llm)
        assert not engine.has_unfinished_requests() and not engine.core.scheduler.requests
        assert tokens(deep_llm) == wanted


def test_a_request_given_up_before_the_call_ended_is_not_the_next_calls(tiny_model: Path, deep_llm: LLM) -> None:
    """Pinned blocks are in one prompt's way, and a later one is refused before anybody heard of it."""
    llm = new_llm(tiny_model, max_num_batched_tokens=256, max_model_len=256, kv_cache_memory_bytes=1 << 20)
    engine = llm.llm_engine
    kv, token = engine.core.kv, itertools.count(1)
    while kv.num_free_blocks > 6:
        engine.pin_prefix([next(token) % 250 for _ in range(min(12, kv.num_free_blocks - 4) * kv.block_size)])
    large, small = [5] * 180, [[7 + i] * 20 for i in range(8)]
    [given_up, *_] = llm.generate([large, *small], PARAMS, use_tqdm=False)
    assert given_up.outputs[0].finish_reason == "error"
    with pytest.raises(BadRequestError, match="prompt 9"):
        llm.generate([large, *small, [1] * 400], PARAMS, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    for _ in range(2):
        assert len(tokens(llm, [[3] * 10])[0]) == 5


def test_ctrl_c_while_requests_are_taken_in(deep_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, add_prepared, added = deep_llm.llm_engine, deep_llm.llm_engine.add_prepared, []

    def interrupted(prepared: Any) -> None:
        added.append(prepared)
        if len(added) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        add_prepared(prepared)

    monkeypatch.setattr(engine, "add_prepared", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(deep_llm)
    assert len(added) == 5 and not engine.has_unfinished_requests()


def test_somebody_elses_request_in_the_engine_is_not_taken_for_ones_own(deep_llm: LLM) -> None:
    deep_llm.llm_engine.add_request("mine", [1, 2, 3], SamplingParams(max_tokens=1))
    assert len(tokens(deep_llm)) == len(PROMPTS)


def test_a_refused_batch_counts_nowhere_where_nothing_runs_beside_the_host(tiny_model: Path) -> None:
    llm = new_llm(tiny_model)
    before = [(metric.name, metric.value) for metric in llm.get_metrics() if hasattr(metric, "value")]
    with pytest.raises(BadRequestError, match="prompt 60"):
        tokens(llm, [*PROMPTS, [1] * 400])
    assert before == [(metric.name, metric.value) for metric in llm.get_metrics() if hasattr(metric, "value")]


def test_a_refused_prompt_far_back_ends_the_call_and_nothing_else(deep_llm: LLM) -> None:
    engine = deep_llm.llm_engine
    with pytest.raises(BadRequestError, match=r"prompt 50: .*the prompt has 400"):
        deep_llm.generate([*PROMPTS[:50], [1] * 400, *PROMPTS[50:]], PARAMS, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    while engine.core.has_work:  # what was in flight
        engine.step()
    assert engine.core.kv.num_used_blocks == 0
    assert len(tokens(deep_llm)) == len(PROMPTS)
