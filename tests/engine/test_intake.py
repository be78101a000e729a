"""A batch taken in slices, alone and in an LLM whose executor runs beside the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.intake import Intake
from quire.errors import BadRequestError
from quire.executor.local import LocalExecutor


def fake_engine(step_tokens: int, depth: int = 2) -> Any:
    """With room for a step a call."""
    core = SimpleNamespace(
        executor=SimpleNamespace(depth=depth),
        scheduler=SimpleNamespace(config=SimpleNamespace(max_num_batched_tokens=step_tokens)),
    )
    return SimpleNamespace(core=core, has_room=True, begin_step=lambda: False)


def slices_of(lengths: list[int], step_tokens: int = 10, *, depth: int = 2, in_order: bool = True) -> list[int]:
    def add(i: int) -> Any:
        return SimpleNamespace(num_prompt_tokens=lengths[i])

    intake = Intake(fake_engine(step_tokens, depth), add, len(lengths), in_order=in_order)
    slices = []
    while taken := len(list(intake.begin_steps())):
        slices.append(taken)
    return slices


def test_the_first_slice_fills_a_step_and_later_ones_eight() -> None:
    assert slices_of([5] * 100) == [2, 16, 16, 16, 16, 16, 16, 2]
    assert slices_of([3, 300, 3, 3]) == [2, 2]
    assert slices_of([1] * 9) == [9]
    assert slices_of([]) == []


def test_all_are_one_slice_where_nothing_runs_beside_the_host_or_out_of_order() -> None:
    assert slices_of([500] * 50, depth=1) == [50]
    assert slices_of([500] * 50, in_order=False) == [50]


def test_a_slice_is_taken_before_each_step_that_begins() -> None:
    engine, begun = fake_engine(10), []

    def begin_step() -> bool:
        begun.append(len(added))
        engine.has_room = len(begun) < 2
        return True

    added: list[int] = []

    def add(i: int) -> Any:
        added.append(i)
        return SimpleNamespace(num_prompt_tokens=5)

    engine.begin_step = begin_step
    list(Intake(engine, add, 100).begin_steps())
    assert begun == [2, 18]


def test_a_request_is_added_when_it_is_asked_for() -> None:
    added: list[int] = []

    def add(i: int) -> Any:
        if i == 3:
            raise BadRequestError("no")
        added.append(i)
        return SimpleNamespace(num_prompt_tokens=1)

    taken = Intake(fake_engine(10), add, 9).begin_steps()
    next(taken)
    assert added == [0]
    with pytest.raises(BadRequestError):
        list(taken)
    assert added == [0, 1, 2]


@pytest.fixture
def deep_llm(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Two steps in flight, as on a GPU."""
    monkeypatch.setattr(LocalExecutor, "depth", property(lambda self: 2))
    return new_llm(tiny_model, max_num_batched_tokens=64, max_num_seqs=8, scheduling_policy="priority")


def new_llm(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20, **settings)


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


def test_a_refused_prompt_far_back_ends_the_call_and_nothing_else(deep_llm: LLM) -> None:
    engine = deep_llm.llm_engine
    with pytest.raises(BadRequestError, match="prompt 50: the prompt has 400 tokens"):
        deep_llm.generate([*PROMPTS[:50], [1] * 400, *PROMPTS[50:]], PARAMS, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    while engine.core.has_work:  # what was in flight
        engine.step()
    assert engine.core.kv.num_used_blocks == 0
    assert len(tokens(deep_llm)) == len(PROMPTS)
