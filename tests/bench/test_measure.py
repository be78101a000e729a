"""Numbers against workloads small enough to count by hand."""

from __future__ import annotations

import os
import signal
import time

import pytest

from quire.bench.measure import measure, measure_repeats
from quire.bench.progress import Progress, WarmUpInterrupted
from quire.bench.workloads import WORKLOADS, Workload
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError

BLOCK = 16
NUM_BLOCKS = 512


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def expected_by_step(workload: Workload) -> list[tuple[int, int]]:
    """(blocks in use, tokens in them) at each step, when every prompt fits into the first step: a request of p tokens
    in and n out has p, p + 1, … p + n - 1 tokens in the cache in its n steps."""
    found = []
    for i in range(max(n for _, n in workload)):
        lengths = [len(p) + i for p, n in workload if i < n]
        found.append((sum(blocks_for(length) for length in lengths), sum(lengths)))
    return found


def test_waste_and_occupancy_of_one_request_by_hand(engine: LLMEngine) -> None:
    # 10 in, 8 out: 10 … 16 tokens in 1 block for 7 steps, then 17 tokens in 2 blocks.
    report = measure(engine, [(list(range(20, 30)), 8)], sample_every_s=0)
    kv = report.kv
    assert kv is not None
    assert report.num_steps == 8
    assert kv.occupancy_mean == pytest.approx((7 * 1 + 2) / 8 / NUM_BLOCKS)
    assert kv.occupancy_max == 2 / NUM_BLOCKS
    assert (kv.peak_blocks, kv.min_available) == (2, NUM_BLOCKS - 2)
    empty = [6 / 16, 5 / 16, 4 / 16, 3 / 16, 2 / 16, 1 / 16, 0, 15 / 32]
    assert kv.waste_percent_mean == pytest.approx(100 * sum(empty) / 8)
    assert kv.waste_percent_max == pytest.approx(100 * 15 / 32)
    assert kv.waste_percent_at_peak == pytest.approx(100 * 15 / 32)
    assert (kv.blocks_allocated, kv.blocks_freed, kv.table_entries_max) == (2, 2, 2)
    assert kv.churn_per_s == pytest.approx(4 / report.seconds)


def test_waste_and_occupancy_of_several(engine: LLMEngine) -> None:
    workload: Workload = [([50 + i] * (5 + 7 * i), 3 + 11 * i) for i in range(5)]
    report = measure(engine, workload, sample_every_s=0)
    steps = expected_by_step(workload)
    kv = report.kv
    assert kv is not None
    assert report.num_steps == len(steps)
    assert kv.occupancy_mean == pytest.approx(sum(blocks for blocks, _ in steps) / len(steps) / NUM_BLOCKS)
    waste = [100 * (1 - tokens / (blocks * BLOCK)) for blocks, tokens in steps]
    assert kv.waste_percent_mean == pytest.approx(sum(waste) / len(waste))
    assert kv.waste_percent_max == pytest.approx(max(waste))
    assert kv.peak_blocks == max(blocks for blocks, _ in steps)
    assert kv.min_available == NUM_BLOCKS - kv.peak_blocks
    assert kv.blocks_allocated == sum(blocks_for(len(p) + n - 1) for p, n in workload)


def test_tokens_rates_and_latencies_agree(engine: LLMEngine) -> None:
    workload = [([30 + i] * 6, n) for i, n in enumerate((1, 5, 9))]
    started = time.monotonic()
    report = measure(engine, workload, name="three")
    took = time.monotonic() - started
    assert (report.workload, report.requests, report.completed) == ("three", 3, 3)
    assert (report.prompt_tokens, report.output_tokens) == (18, 15)
    assert 0 < report.seconds <= took
    assert report.output_tok_s == pytest.approx(15 / report.seconds)
    assert report.total_tok_s == pytest.approx(33 / report.seconds)
    assert report.ttft_s and report.itl_s and report.e2e_s and report.tpot_s
    assert (report.ttft_s.count, report.itl_s.count, report.e2e_s.count) == (3, 0 + 4 + 8, 3)
    assert report.tpot_s.count == 2  # the request with one token has no second
    assert report.ttft_s.max <= report.e2e_s.max <= report.seconds
    assert report.e2e_s.max == pytest.approx(report.ttft_s.max + 8 * report.tpot_s.max, rel=1.0)
    assert report.running_mean == pytest.approx(15 / 9)
    assert report.samples[-1].output_tokens == 15
    assert report.samples[-1].prompt_tokens == 18
    assert report.peak_rss_bytes and report.peak_rss_bytes > 50 << 20
    assert sum(report.time_s.values()) == pytest.approx(report.seconds, rel=0.02)
    assert report.settings["num_blocks"] == NUM_BLOCKS and report.machine["cpus"] >= 1


def test_a_second_run_counts_only_itself(engine: LLMEngine) -> None:
    workload: Workload = [(list(range(40, 60)), 4)]
    first = measure(engine, workload, sample_every_s=0)
    again = measure(engine, workload, sample_every_s=0)
    assert first.kv and again.kv
    assert first.kv.prefix_hit_tokens == 0
    assert (again.kv.prefix_hit_tokens, again.kv.prefix_query_tokens) == (16, 20)
    assert again.kv.prefix_hit_rate == pytest.approx(0.8)
    assert again.num_steps == first.num_steps == 4


def test_sharing_by_forks_is_seen(engine: LLMEngine) -> None:
    # 24 in: one full block shared by four, and a half-full one that three of four copy before they write.
    report = measure(engine, [(list(range(40, 64)), 4)], sampling={"n": 4, "temperature": 1.0}, sample_every_s=0)
    kv = report.kv
    assert kv is not None
    assert report.output_tokens == 16
    assert (kv.forks, kv.copies) == (3, 3)
    assert (kv.table_entries_max, kv.peak_blocks) == (8, 5)
    assert report.itl_s and report.itl_s.count == 4 * 3


def test_preemptions_are_told(tiny_model: object) -> None:
    from quire.config import EngineConfig

    config = EngineConfig(
        model=str(tiny_model),
        load_format="dummy",
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=16 * 16384,  # 16 blocks: four requests of 96 tokens need 24
        enable_prefix_caching=False,
        watermark=0.0,
        max_model_len=128,
    )
    report = measure(LLMEngine.from_config(config), [([20 + i] * 32, 64) for i in range(4)], sample_every_s=0)
    kv = report.kv
    assert kv is not None and kv.num_blocks == 16
    assert report.completed == 4
    assert kv.preemptions["recompute"] >= 1 and kv.preemptions["swap"] == 0
    assert kv.recomputed_tokens > 0
    assert kv.min_available == 0 and kv.occupancy_max == 1.0


def test_arrivals_are_waited_for(engine: LLMEngine) -> None:
    workload: Workload = [([30] * 4, 2), ([31] * 4, 2), ([32] * 4, 2)]
    report = measure(engine, workload, arrivals=[0.0, 0.15, 0.3])
    assert report.seconds >= 0.3
    assert report.time_s["idle"] > 0.1
    assert report.ttft_s and report.ttft_s.max < 0.15  # from each one's own arrival, not from the start
    assert max(sample.running for sample in report.samples) <= 1


def test_repeats_and_their_spread(engine: LLMEngine) -> None:
    workload = WORKLOADS["fixed"](320, num=2, num_in=20, num_out=3)
    report = measure_repeats(engine, workload, warm=WORKLOADS["fixed"](320, seed=9, num=2, num_in=20), repeats=3)
    assert len(report.repeats) == 3
    assert report.output_tok_s == sorted(report.repeats)[1]
    assert report.repeat_values["output_tok_s"] == report.repeats
    assert all(len(values) == 3 for values in report.repeat_values.values())
    assert report.kv and report.kv.prefix_hit_tokens == 0  # each from an empty cache
    assert report.spread_percent is not None


def test_ctrl_c_keeps_what_was_done(engine: LLMEngine) -> None:
    def interrupt(output_tokens: int, completed: int) -> None:
        if output_tokens >= 6:
            os.kill(os.getpid(), signal.SIGINT)

    workload: Workload = [([30 + i] * 4, 50) for i in range(2)]
    report = measure(engine, workload, progress=interrupt)
    assert report.interrupted
    assert 6 <= report.output_tokens < 100
    assert report.completed == 0
    assert report.output_tok_s == pytest.approx(report.output_tokens / report.seconds)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert measure(engine, workload).completed == 2  # the engine is fit for more


def test_ctrl_c_in_the_second_repeat_keeps_the_first(engine: LLMEngine) -> None:
    seen = []

    def interrupt(output_tokens: int, completed: int) -> None:
        seen.append(output_tokens)
        if seen.count(4) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    report = measure_repeats(engine, [([30] * 4, 9)], repeats=5, progress=interrupt)
    assert report.interrupted
    assert len(report.repeats) == 1 and report.completed == 1 and report.output_tokens == 9


def test_ctrl_c_counts_only_prompt_tokens_that_were_computed(engine: LLMEngine) -> None:
    def interrupt(output_tokens: int, completed: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    # A step takes 512 tokens: two prompts and a part of the third.
    report = measure(engine, [([30 + i] * 200, 50) for i in range(5)], progress=interrupt)
    assert (report.interrupted, report.num_steps, report.prompt_tokens) == (True, 1, 512)
    assert report.total_tok_s == pytest.approx((512 + report.output_tokens) / report.seconds)


def test_ctrl_c_in_the_warm_up_is_no_measurement(engine: LLMEngine) -> None:
    begun = []

    def stage(name: str, work: Workload) -> Progress:
        begun.append(name)
        return lambda output_tokens, completed: os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(WarmUpInterrupted):
        measure_repeats(engine, [([30] * 4, 9)], warm=[([31] * 4, 9)], stage=stage)
    assert begun == ["warming up"]
    assert not engine.has_unfinished_requests() and engine.core.kv.num_used_blocks == 0


@pytest.mark.parametrize(
    ("workload", "options", "words"),
    [
        ([], {}, "empty"),
        ([([20] * 300, 5)], {}, "305 tokens, and max_model_len is 256"),
        ([([20], 5)], {"arrivals": [0.0, 1.0]}, "one for each request"),
        ([([20], 5), ([21], 5)], {"arrivals": [1.0, 0.0]}, "ascending"),
        ([([20], 5), ([9999], 5)], {}, "request 1 of the workload"),
    ],
)
def test_refusals(engine: LLMEngine, workload: Workload, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(engine, workload, **options)  # type: ignore[arg-type]
