"""The offline benchmark: seeded work, counted exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.offline import main
from quire.bench.workloads import WORKLOADS


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_repeat_and_stay_in_the_vocabulary(name: str) -> None:
    work = WORKLOADS[name](1000)
    assert work == WORKLOADS[name](1000)
    assert work != WORKLOADS[name](1000, seed=99)
    assert all(10 <= token < 1000 for prompt, _ in work for token in prompt)
    assert all(num_out >= 1 for _, num_out in work)


def test_lengths_are_what_they_say() -> None:
    mixed = WORKLOADS["mixed64"](1000)
    assert len(mixed) == 64
    assert all(16 <= len(p) <= 256 and 16 <= n <= 256 for p, n in mixed)
    shared = WORKLOADS["shared_prefix"](1000)
    assert len({tuple(p[:2048]) for p, _ in shared}) == 1
    assert [(len(p), n) for p, n in WORKLOADS["lab16"](1000)] == [(8, 128)] * 16


def test_a_run_counts_tokens(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--device", "cpu", "--num-threads", "1"]
    assert main(["lab16", *flags, "--json", "--kv-cache-memory-bytes", str(8 << 20)]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert record["workload"] == "lab16"
    assert record["output_tok_s"] == pytest.approx(16 * 128 / record["seconds"], rel=0.01)
    assert record["peak_blocks"] == 16 * 9  # 8 + 127 tokens with KV each


def test_unknown_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "single64" in capsys.readouterr().err
