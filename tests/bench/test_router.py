"""quire bench router: its traffic, and what it makes of runs. The processes are the command's."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from quire.bench.plots import write_charts
from quire.bench.router import (
    MAX_LEN,
    OURS,
    TRAFFICS,
    FrontRun,
    as_table,
    charts,
    make_traffic,
    summarize,
    trace_rows,
    write_model,
)
from quire.errors import ConfigError
from quire.models.architectures import spec_from_config
from quire.router.hashes import prompt_hashes, text_of, text_pieces
from quire.text import Tokenizer


@pytest.mark.parametrize("kind", TRAFFICS)
def test_traffic_repeats_and_fits(kind: str) -> None:
    first, again = make_traffic(kind, 1.0, 3), make_traffic(kind, 1.0, 3)
    assert [one.turns for one in first] == [one.turns for one in again]
    assert [one.turns for one in first] != [one.turns for one in make_traffic(kind, 1.0, 4)]
    assert 64 <= sum(len(one.turns) for one in first) <= 128
    # With the mark of a run, and an answer of eight tokens to every turn.
    assert all(16 + sum(map(len, one.turns)) + 8 * len(one.turns) <= MAX_LEN for one in first)
    with pytest.raises(ConfigError, match="prefix"):
        make_traffic("other", 1.0, 0)


def test_skewed_traffic_has_a_favourite_and_bursts_come_at_once() -> None:
    counts = Counter(one.turns[0][:192] for one in make_traffic("skewed", 1.0, 0))
    assert counts.most_common(1)[0][1] > 2 * sum(counts.values()) / len(counts)
    times = Counter(one.at_s for one in make_traffic("bursty", 1.0, 0))
    assert len(times) == 8 and set(times.values()) == {14}
    rows = trace_rows("skewed", 500)
    assert len(rows) == 500 and rows == trace_rows("skewed", 500)
    assert all(a["arrival"] <= b["arrival"] for a, b in itertools.pairwise(rows))


def test_runs_become_a_table_and_charts(tmp_path: Path) -> None:
    def outcome(traffic: str, front: str, seconds: float) -> FrontRun:
        return FrontRun(traffic, front, seconds, 10, 900, 300, 100, [0.1 * i for i in range(1, 11)])

    found = [
        outcome(t, f, s) for t in ("turns", "prefix") for f, s in (("round-robin", 4.0), (OURS, 2.0)) for _ in "ab"
    ]
    rows = summarize(found)
    assert [(row["traffic"], row["front"]) for row in rows] == [
        ("prefix", OURS),
        ("prefix", "round-robin"),
        ("turns", OURS),
        ("turns", "round-robin"),
    ]
    assert (
        rows[0]["times_round_robin"] == 2.0
        and rows[0]["hit_rate"] == 1 / 3
        and rows[0]["ttft_p99_s"] == pytest.approx(0.991)
    )
    assert as_table(rows).count("\n") >= 5
    write_charts(tmp_path / "router.svg", charts(rows), "router")
    assert "<svg" in (tmp_path / "router.svg").read_text()


def test_the_model_has_about_15_million_parameters(tmp_path: Path) -> None:
    import json

    folder = write_model(tmp_path)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), source=str(folder))
    assert Tokenizer.from_directory(folder).encode("abc") and spec.vocab_size == 320
    attention = 2 * 384 * 384 + 2 * 384 * 192
    assert 12e6 < 320 * 384 + 8 * (attention + 3 * 384 * 1024) < 16e6


def test_equal_beginnings_have_equal_hashes() -> None:
    a, b = text_of({"model": "m", "prompt": "x" * 200}), text_of({"model": "m", "prompt": "x" * 150 + "y" * 50})
    left, right = text_pieces(a), text_pieces(b)
    assert left[:9] == right[:9] and left[-1] != right[-1]
    assert prompt_hashes(list(range(33)), 16) == prompt_hashes([*range(33), 1, 2], 16)
    assert len(prompt_hashes(list(range(32)), 16)) == 1  # the last token has to run
    assert prompt_hashes(list(range(33)), 16, salt="s") != prompt_hashes(list(range(33)), 16)
