"""A request that goes on from another engine: its tokens so far are computed again, and no other is sampled twice."""

from __future__ import annotations

from typing import Any

import pytest
from sim_engine import SimSettings, make_core

from quire.engine.core import EngineCore
from quire.params import SamplingSpec
from quire.request import Request

PROMPT = [5, 9, 2, 7, 1, 3, 3, 8, 4]


def request_of(name: str, **changes: Any) -> Request:
    spec = SamplingSpec(temperature=0.0)
    values: dict[str, Any] = {"max_tokens": 12, "end_token_ids": frozenset(), "spec": spec, **changes}
    return Request(request_id=name, prompt_token_ids=list(PROMPT), **values)


def finish(core: EngineCore, request: Request) -> dict[int, list[int]]:
    """Output tokens that came, by sequence."""
    core.add(request)
    found: dict[int, list[int]] = {}
    while core.has_work:
        for update in core.step():
            found.setdefault(update.seq.index, []).extend(update.new_token_ids)
        core.scheduler.check()
        core.kv.check()
    return found


@pytest.mark.parametrize("num_had", [1, 5, 11])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_sequence_goes_on_where_it_was(num_had: int, depth: int) -> None:
    whole = finish(make_core(SimSettings(depth=depth)), request_of("a"))[0]
    assert len(whole) == 12
    core = make_core(SimSettings(depth=depth))
    rest = finish(core, request_of("b", continued={0: whole[:num_had]}))[0]
    assert whole[:num_had] + rest == whole
    assert core.scheduler.stats.num_recomputed_tokens == len(PROMPT) + num_had - 1


def test_those_of_several_sequences_that_have_not_ended_go_on() -> None:
    whole = finish(make_core(), request_of("a", n=3))
    assert set(whole) == {0, 1, 2}
    rest = finish(make_core(), request_of("b", n=3, continued={index: whole[index][:4] for index in (0, 2)}))
    assert {index: whole[index][:4] + tokens for index, tokens in rest.items()} == {i: whole[i] for i in (0, 2)}
    alone = finish(make_core(), request_of("c", n=3, continued={1: whole[1][:7]}))
    assert {1: whole[1][:7] + alone[1]} == {1: whole[1]}


def test_it_finds_its_prefix_in_the_cache() -> None:
    core = make_core()
    whole = finish(core, request_of("a"))[0]
    rest = finish(core, request_of("b", continued={0: whole[:8]}))[0]
    assert whole[:8] + rest == whole
    assert core.scheduler.stats.num_recomputed_tokens < 8
