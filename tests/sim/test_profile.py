"""Costs learned from recorded steps: the fit finds what made them, and files that cannot be fitted are refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.bench.report import BenchFile, RunReport
from quire.errors import ConfigError
from quire.sim.profile import fit_steps, read_profile
from quire.step_costs import StepLoad

SETTINGS = {"model": "m", "num_blocks": 9, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512,
            "max_model_len": 99}  # fmt: skip


def recorded(num: int, noise: float = 0.0) -> RunReport:
    """Steps that take 10 ms, 1 ms a row above 8, 0.2 ms a row of logits, 1 µs a token of context, 10 ns a pair."""
    rng, run = random.Random(0), RunReport(workload="w", settings=dict(SETTINGS))
    columns = ("seconds", "num_decodes", "num_decode_kv_tokens", "num_prompts", "num_prompt_tokens", "num_causal_pairs")
    run.steps = {name: [] for name in columns}
    for _ in range(num):
        load = StepLoad()
        for _ in range(rng.choice([0, 1, 4, 16, 40, 64])):
            load.add(rng.randint(0, 2000), 1)
        if not load.num_tokens or rng.random() < 0.3:
            load.add(rng.randint(0, 500), rng.randint(2, 400))
        seconds = true_s(load) * rng.lognormvariate(0, noise)
        for name in columns:
            run.steps[name].append(seconds if name == "seconds" else float(getattr(load, name)))
    return run


def true_s(load: StepLoad) -> float:
    rows = max(0, load.num_tokens - 8)
    logits = load.num_decodes + load.num_prompts
    return 1e-2 + 1e-3 * rows + 2e-4 * logits + 1e-6 * load.num_decode_kv_tokens + 1e-8 * load.num_causal_pairs


LOADS = (([1], [100]), ([1] * 24, [900] * 24), ([1] * 50 + [100], [300] * 50 + [64]), ([384], [0]))


@pytest.mark.parametrize(("counts", "starts"), LOADS)
def test_the_fit_finds_what_made_the_steps(counts: list[int], starts: list[int]) -> None:
    cost = fit_steps([recorded(300)])
    load = StepLoad.of(counts, starts)
    assert cost.fitted_s(load) == pytest.approx(true_s(load), rel=0.1)
    assert cost.mean_error < 0.03


def test_a_slower_machine_takes_as_many_times_as_long_for_everything() -> None:
    cost = fit_steps([recorded(300)])
    for counts, starts in LOADS:
        load = StepLoad.of(counts, starts)
        assert cost.slower(2.5).fitted_s(load) == pytest.approx(2.5 * cost.fitted_s(load))


def test_noise_is_kept_and_drawn_from_and_the_total_stays() -> None:
    run = recorded(800, noise=0.3)
    cost = fit_steps([run])
    load = StepLoad.of([1] * 16, [500] * 16)
    drawn = [cost.load_s(load) for _ in range(4000)]
    assert 0.2 < cost.mean_error < 0.35
    assert max(drawn) > 1.5 * cost.fitted_s(load) > 2 * min(drawn)
    assert sum(drawn) / 4000 == pytest.approx(true_s(load) * 1.046, rel=0.15)  # the mean of that noise


def test_files_that_cannot_be_fitted_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    few, none, other = recorded(3), RunReport(workload="w"), recorded(100)
    other.settings["block_size"] = 32
    for runs, words in (([few], "50 are needed"), ([none], "no steps"), ([recorded(100), other], "one engine")):
        BenchFile("profile", runs).write(path)
        with pytest.raises(ConfigError, match=words):
            read_profile(str(path))
    BenchFile("profile", [recorded(100)]).write(path)
    assert read_profile(str(path)).settings["num_blocks"] == 9
