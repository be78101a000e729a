"""Traces: what is read, what their prompts share, and what is refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.sim.traffic import SimRequest, from_workload, read_trace


def test_a_trace_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2.5, "prompt_len": 40, "output_len": 7, "prefix_id": "agent", "prefix_len": 32}\n\n'
        '{"arrival": 1, "prompt_token_ids": [5, 6, 7], "output_len": 1}\n'
        '{"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}\n'
    )
    first, second, third = read_trace(path)
    assert (first.arrival_s, first.token_ids(0), first.output_len) == (1.0, [5, 6, 7], 1)
    assert (second.prompt_len, second.prefixes) == (40, (("agent", 32),))
    assert (third.arrival_s, len(third.token_ids(2)), third.prefixes) == (3.0, 1100, (("hash 1", 512), ("hash 2", 512)))


def test_prompts_share_their_prefixes_and_nothing_else() -> None:
    one, other = (SimRequest(0.0, 50, 1, (("a", 20), ("b", 10))).token_ids(i) for i in (1, 2))
    assert one[:30] == other[:30] and not set(one[30:]) & set(other[30:]) and len(one) == 50
    assert SimRequest(0.0, 50, 1, (("c", 30),)).token_ids(1)[:20] != one[:20]


def test_a_workload_at_its_times() -> None:
    assert [one.arrival_s for one in from_workload([([1], 2), ([2], 3)], [0.5, 0.7])] == [0.5, 0.7]
    assert [one.arrival_s for one in from_workload([([1], 2), ([2], 3)], None)] == [0.0, 0.0]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"arrival": 0, "prompt_len": 3}',
        '{"arrival": -1, "prompt_len": 3, "output_len": 1}',
        '{"arrival": 0, "prompt_len": 0, "output_len": 1}',
        '{"arrival": 0, "prompt_len": 3, "output_len": 1.5}',
        '{"arrival": 0, "prompt_len": 3, "output_len": true}',
        '{"arrival": 0, "prompt_token_ids": ["a"], "output_len": 1}',
        '{"arrival": 0, "prompt_token_ids": [], "output_len": 1}',
        '{"arrival": 0, "prompt_len": 3, "output_len": 1, "prefix_id": "x", "prefix_len": 9}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_len": 3, "output_len": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")
