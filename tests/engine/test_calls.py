"""Named inspections: what they do to a core, and that their results can travel."""

from __future__ import annotations

import pytest
from sim_engine import make_core

from quire.engine.calls import CALLS, pin_prefix, reset_prefix_cache, unpin_prefix
from quire.engine.inspect import INSPECTIONS
from quire.errors import BadRequestError
from quire.params import SamplingSpec
from quire.request import Request


def request(prompt: list[int]) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        max_tokens=2,
        end_token_ids=frozenset(),
        spec=SamplingSpec(temperature=0.0),
    )


def test_every_inspection_can_be_called() -> None:
    assert INSPECTIONS.keys() <= CALLS.keys()
    assert {"reset_prefix_cache", "pin_prefix", "unpin_prefix", "kv_overview", "kv_changes"} <= CALLS.keys()
    assert "metrics" not in CALLS  # the loop's own, which has the counters


def test_pin_and_unpin() -> None:
    core = make_core()
    prefix = list(range(10))
    assert pin_prefix(core, token_ids=prefix) == 8
    assert not core.has_work
    assert core.kv.num_pinned_blocks == 2
    assert reset_prefix_cache(core) is True  # which spares what is pinned
    core.add(request([*prefix, 99]))
    while core.has_work:
        updates = core.step()
    assert updates[0].seq.num_cached_tokens == 8
    assert unpin_prefix(core, token_ids=prefix) == 8
    assert core.kv.num_pinned_blocks == 0


def test_pinning_waits_for_nobody() -> None:
    core = make_core()
    core.add(request([1, 2, 3]))
    with pytest.raises(BadRequestError, match="no request runs"):
        pin_prefix(core, token_ids=[1] * 8)
    core.step()
    assert reset_prefix_cache(core) is False  # a request holds blocks
