"""LLM.generate's bar: rates of all tokens as they are made, and a right last line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tqdm

from quire import LLM, SamplingParams
from quire import llm as llm_room
from quire.errors import BadRequestError


class RecordedBar:
    """Stands in for tqdm."""

    made: ClassVar[list[RecordedBar]] = []

    def __init__(self, total: int, **options: Any) -> None:
        self.total, self.n, self.is_closed = total, 0, False
        self.postfix = ""
        self.shown: list[tuple[int, str]] = []  # at each refresh: requests done, rates
        self.made.append(self)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def update(self, count: int) -> None:
        self.n += count

    def refresh(self) -> None:
        self.shown.append((self.n, self.postfix))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20)


@pytest.fixture(autouse=True)
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedBar]]:
    RecordedBar.made.clear()
    monkeypatch.setattr(tqdm, "tqdm", RecordedBar)
    yield RecordedBar.made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[float]:
    """An eighth of a second for each step, so that rates can be counted by hand."""
    now, step = [0.0], llm.llm_engine.step

    def stepped() -> Any:
        now[0] += 0.125
        return step()

    monkeypatch.setattr(llm_room.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(llm.llm_engine, "step", stepped)
    llm.reset_prefix_cache()
    return now


def rates(postfix: str) -> tuple[float, float]:
    found = re.fullmatch(r"in ([\d.]+) tok/s, out ([\d.]+) tok/s", postfix)
    assert found, postfix
    return float(found[1]), float(found[2])


def test_rates_are_of_tokens_made_not_of_finished_prompts(llm: LLM, clock: list[float], bars: list[Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.generate([[20 + i] * 10 for i in range(4)], params)
    [bar] = bars
    # Four steps a refresh; in each step four tokens. Nothing is finished before the end.
    assert len(bar.shown) == 7
    assert {done for done, _ in bar.shown} == {0}
    for i, (_, postfix) in enumerate(bar.shown, start=1):
        tokens_in, tokens_out = rates(postfix)
        assert tokens_in == pytest.approx(40 / (0.5 * i), rel=0.01)
        assert tokens_out == pytest.approx(32.0, rel=0.01)
    assert (bar.n, bar.is_closed) == (4, True)
    tokens_in, tokens_out = rates(bar.postfix)  # the last line: everything, over the whole time
    assert (tokens_in * clock[0], tokens_out * clock[0]) == pytest.approx((40, 120), rel=0.01)


def test_cached_prompt_tokens_and_an_earlier_call_are_told_apart(llm: LLM, clock: list[float], bars: list[Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([[20] * 64], params, use_tqdm=False)
    began = clock[0]
    llm.generate([[20] * 64], params)
    [bar] = bars
    tokens_in, tokens_out = rates(bar.shown[0][1])
    assert (tokens_in * 0.5, tokens_out * 0.5) == pytest.approx((64, 4), rel=0.01)
    tokens_in, tokens_out = rates(bar.postfix)
    assert tokens_out * (clock[0] - began) == pytest.approx(12, rel=0.01)


def test_an_interrupt_leaves_the_last_rates(
    llm: LLM, clock: list[float], bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.llm_engine.step

    def interrupted() -> Any:
        if clock[0] > 0.75:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[20] * 8], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    [bar] = bars
    assert bar.is_closed and rates(bar.postfix)[1] == pytest.approx(8.0, rel=0.01)


def test_nothing_is_drawn_where_nobody_asked_or_a_prompt_is_refused(llm: LLM, bars: list[Any]) -> None:
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(BadRequestError):
        llm.generate([[1, 2], [1] * 300], SamplingParams(max_tokens=1))
    assert llm.generate([]) == []
    assert bars == []


def test_a_bar_of_the_callers_own_is_used(llm: LLM, bars: list[Any]) -> None:
    class Own(RecordedBar):
        pass

    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=Own)
    [bar] = bars
    assert isinstance(bar, Own) and bar.n == 1
