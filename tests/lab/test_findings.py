"""What the experiments find in their numbers: whether an expectation holds, and None where nothing can be told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.bench.report import KVReport, Percentiles, RunReport
from quire.lab import (
    accuracy,
    baseline,
    batch_width,
    batching,
    block_size,
    memory_over_time,
    prefix_sharing,
    pressure,
    step_budget,
)
from quire.lab.context import LabContext, LabSettings, record, run_of
from quire.lab.experiment import Finding, Result
from quire.lab.report import render_report
from quire.lab.store import Entry, LabReport

CPU = LabContext(LabSettings(), lambda text: None)
GPU = LabContext(LabSettings(gpu_8b=True), lambda text: None)
MIB = 1 << 20


def spread(p50_s: float, p99_s: float | None = None) -> Percentiles:
    return Percentiles(100, p50_s, p50_s, p50_s, p99_s or p50_s, p99_s or p50_s)


def kv(**changes: Any) -> KVReport:
    values = {"num_blocks": 100, "block_size": 16, "block_bytes": MIB, "peak_blocks": 50, "min_available": 50}
    return KVReport(**values | changes)


def run(name: str = "run", **changes: Any) -> RunReport:
    values: dict[str, Any] = {"kv": kv(), "settings": {"device": "cpu"}, "requests": 4, "completed": 4}
    values |= {"prompt_tokens": 1000, "output_tokens": 1000, "seconds": 10.0, "output_tok_s": 100.0, "num_steps": 100}
    values |= {"total_tok_s": 200.0, "prefill_tok_s": 1000.0, "decode_tok_s": 200.0, "running_mean": 10.0}
    values |= {"itl_s": spread(0.01), "ttft_s": spread(0.1), "e2e_s": spread(1.0), "peak_rss_bytes": 100 * MIB}
    return RunReport(workload=name, **values | changes)


def result(module: Any, runs: list[RunReport], context: LabContext, **data: Any) -> Result:
    return tell(module, data | {"measured": [record(each) for each in runs]}, context)


def tell(module: Any, data: dict[str, Any], context: LabContext) -> Result:
    return module.EXPERIMENT.result(data, context, 1.0)  # type: ignore[no-any-return]


def holds(told: Result) -> list[bool | None]:
    """Whether each finding holds; each must have words."""
    texts = [*told.explanation, *(finding.observed for finding in told.findings), told.headline]
    assert all(texts)
    return [finding.holds for finding in told.findings]


def test_a_record_is_a_run_again() -> None:
    before = run(kv=kv(preemptions={"swap": 2}))
    assert run_of(json.loads(json.dumps(record(before) | {"kind": "short"}))) == before


# -- 1, baseline


def told_baseline(context: LabContext, equal_s: float, mixed_s: float, **data: Any) -> Result:
    """A static step of so many seconds in each of the two runs; Quire's lead is 20 times, and then 15."""
    theirs = [
        run(engine="hf", kv=None, seconds=100 * s, output_tok_s=10.0, values={"padding_waste_percent": 40.0} | slots)
        for s, slots in ((equal_s, {"kv_slots_reserved_peak": 1e3}), (mixed_s, {"kv_slots_reserved_peak": 2e3}))
    ]
    works = ("equal lengths", "mixed lengths")
    data |= {"speedups": dict(zip(works, (20.0, 15.0), strict=True))}
    data |= {"static_shares": dict(zip(works, (1.0, 0.65), strict=True))}
    return result(baseline, [run(), run(), *theirs], context, **data)


def test_leads_over_a_baseline_that_changed_its_pace_are_not_compared() -> None:
    assert holds(told_baseline(CPU, 0.11, 0.077)) == [True, None, None, True]
    assert holds(told_baseline(CPU, 0.11, 0.12)) == [True, False, False, True]
    assert holds(told_baseline(GPU, 0.11, 0.12)) == [True, False, False, True]


def test_the_untimed_batch_has_the_longest_rows() -> None:
    work = [([1] * 8, 10)] * 16 + [([1] * 2, 30), *[([1] * 20, 2)] * 15] + [([1] * 9, 9)] * 3
    assert baseline.longest_batch(work) == work[16:32]  # 20 in by 30 out, though no request is both


# -- 2, batch width


def told_widths(rates: list[float], at: int | None, **last: Any) -> Result:
    runs = [run(output_tok_s=rate, running_mean=width) for rate, width in zip(rates, batch_width.WIDTHS, strict=True)]
    runs[-1] = replace(runs[-1], **last)
    data = {"gain_per_doubling_percent": batch_width.gains_per_doubling(rates, batch_width.WIDTHS)}
    data |= {"saturates_at": at, "step_line_s": [0.00432, 26.877e-6]}
    return result(batch_width, runs, GPU, **data)


def test_throughput_saturates_where_no_doubling_brings_much() -> None:
    assert holds(told_widths([227.0, 852.0, 2929.0, 7647.0, 12778.0], None, running_mean=177.0))[:2] == [True, False]
    assert holds(told_widths([100.0, 200.0, 300.0, 300.0 * 1.145**2, 300.0 * 1.145**4], 16))[:2] == [False, True]


# -- 3, block size


def sized(rate: float, width: float = 50.0, **changes: Any) -> RunReport:
    return run(output_tok_s=rate, running_mean=width, settings={"device": "cuda"}, **changes)


def told_sizes(short: list[RunReport]) -> Result:
    """With the other two mixes the same at every size."""
    even = [sized(1000.0) for _ in block_size.SIZES]
    kinds = {"short": short, "general": even, "long-tail": even}
    data = {"sizes": list(block_size.SIZES), "predicted_waste_percent": dict.fromkeys(kinds, [0.0] * 6)}
    data |= {"lengths": {kind: [10, 20] for kind in kinds}, "cache_tokens": dict.fromkeys(kinds, 100)}
    measured = [record(each) | {"kind": kind} for kind, runs in kinds.items() for each in runs]
    return tell(block_size, data | {"measured": measured}, GPU)


def test_large_blocks_cost_throughput_only_beyond_the_noise() -> None:
    costs, small_blocks_are_fine = 2, 4
    even = told_sizes([sized(r) for r in (980.0, 1063.0, 1000.0, 1000.0, 1000.0, 1000.0)])
    assert holds(even)[costs] is None and holds(even)[small_blocks_are_fine]
    slower = told_sizes([*(sized(1000.0) for _ in range(5)), sized(900.0, prefill_tok_s=800.0)])
    assert holds(slower)[costs] is True
    poor = told_sizes([sized(800.0), *(sized(1000.0) for _ in range(5))])
    assert holds(poor)[small_blocks_are_fine] is False
    few = kv(preemptions={"recompute": 1}, recomputed_tokens=15)
    assert holds(told_sizes([*(sized(1000.0) for _ in range(5)), sized(1000.0, kv=few)]))[costs] is None


# -- 4, memory


def sampled(name: str, rss: tuple[int, int] = (100 * MIB, 100 * MIB), **changes: Any) -> dict[str, Any]:
    data = record(run(name, **changes))
    names = ("running", "waiting", "kv_usage", "waste_percent", "output_tokens")
    data["samples"] = {"t_s": [0.1, 0.2], "rss_bytes": list(rss)} | {each: [1, 0] for each in names}
    return data


def told_memory(*runs: dict[str, Any]) -> Result:
    context = LabContext(LabSettings(), lambda text: None)
    context.results = {"batch-width": {"measured": list(runs)}}
    return tell(memory_over_time, {"measured": []}, context)


def test_blocks_must_all_be_given_back_and_never_be_more_than_there_are() -> None:
    grown = (10240 * MIB, 10260 * MIB)
    on_gpu = [
        sampled("wide", grown, peak_gpu_bytes=35 << 30, peak_rss_bytes=grown[1]),
        sampled("fours", grown, peak_gpu_bytes=55 << 30, peak_rss_bytes=grown[1], kv=kv(block_size=4)),
    ]
    full = sampled("full", kv=kv(min_available=0, occupancy_max=1.0))
    for runs in (on_gpu, [sampled("wide", (50 * MIB, 100 * MIB))], [full, sampled("not")]):
        told = told_memory(*runs)
        assert holds(told) == [True, True]
        assert len(told.tables[0].rows) == len(runs)
    leaky = sampled("leaky", kv=kv(peak_blocks=101))
    leaky["samples"]["kv_usage"] = [1.0, 0.5]
    assert holds(told_memory(leaky)) == [False, False]


# -- 6, batching


def simulated(name: str, share: float, first_s: float) -> dict[str, Any]:
    names = ("latency_p50_s", "latency_p99_s", "seconds", "output_tok_s", "num_steps")
    values = {
        "name": name,
        "num_slots": 32,
        "utilisation": share,
        "queued_utilisation": share,
    }
    values |= {"occupations": [], "width": [[0.0, 1]]}
    return values | dict.fromkeys(names, 1.0) | {"first_token_p50_s": first_s, "num_steps": 10}


def test_a_short_wait_keeps_its_digits() -> None:
    data: dict[str, Any] = {"lengths": [[1, 2]], "rate_per_s": 5.0, "predicted_static_utilisation": 1}
    data["all_at_once"] = data["picture"] = [simulated("static", 0.26, 1.0), simulated("continuous", 0.93, 1.0)]
    data["arriving"] = [simulated("static", 0.158, 2.0), simulated("continuous", 0.14, 0.0075)]
    told = tell(batching, data, CPU)
    assert told.tables[1].rows[1][5] == "0.0075"  # not 0.01


# -- 7, sharing


def test_sharing_must_save_blocks_in_both_ways() -> None:
    off = run(running_mean=61.0, kv=kv(num_blocks=10240, peak_blocks=10239, table_entries_max=10239))
    shared = kv(num_blocks=10240, peak_blocks=2176, table_entries_max=34816, prefix_query_tokens=100)
    told = result(prefix_sharing, [off, run(running_mean=248.0, kv=shared), run(), run()], GPU, expected_copies=0)
    assert holds(told) == [False, False, False, True]  # with n = 4 it saved none


# -- 8, pressure


def test_under_pressure_somebody_is_preempted_and_the_choice_is_near_the_better() -> None:
    some = kv(preemptions={"recompute": 0, "swap": 3}, swapped_out_blocks=5)
    runs = [run(), run(output_tok_s=80.0), run(output_tok_s=99.0, kv=some), run(output_tok_s=106.0, kv=some)]
    told = result(pressure, runs, CPU, num_blocks=50, swap_bytes_per_s=1e9)
    assert holds(told) == [False, False, True, True]


# -- 9, step budget


def told_budgets(waits_s: list[float], whole_s: list[float]) -> Result:
    """Decodes of 64 streams at 12,800 a second, prompts at 40,000."""
    points, runs = [], []
    for is_chunked, all_waits in ((True, waits_s), (False, whole_s)):
        for budget, wait_s in zip((256, 1024, 4096), all_waits, strict=True):
            refusal = "" if wait_s else "too long"
            points.append({"budget": budget, "chunked": is_chunked, "refusal": refusal})
            if wait_s:
                runs.append(run(itl_s=spread(0.005, wait_s), decode_tok_s=12800.0, prefill_tok_s=40000.0))
    return result(step_budget, runs, GPU, points=points)


def test_a_larger_budget_means_longer_waits_and_whole_prompts_are_refused_below_their_length() -> None:
    assert holds(told_budgets([0.01, 0.03, 0.106], [0, 0, 0.106])) == [True, True, True, True]
    assert holds(told_budgets([0.02, 0.05, 0.4], [0, 0.1, 0.4])) == [True, True, False, True]
    assert holds(told_budgets([0.1, 0.1, 0.1], [0, 0, 0.1]))[0] is False


def test_the_trade_does_not_magnify_a_few_percent() -> None:
    trade = told_budgets([0.01, 0.03, 0.106], [0, 0, 0.106]).charts[-1]
    assert trade.log_x and not trade.log_y  # throughput stands upright, where an axis begins at nothing
    assert trade.series[0].x == pytest.approx([10.0, 30.0, 106.0]) and trade.series[0].y == [200.0] * 3


# -- 10, accuracy


def reading(kv_dtype: str, dtype: str, percent: float, mean: float, same: float, token_bytes: int) -> dict[str, Any]:
    data: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "refusal": "", "kv_bytes_per_token": token_bytes}
    data |= {"perplexity": 280945.6, "shift": {"perplexity_percent": percent, "mean": mean, "largest": 2 * mean}}
    return data | {"shift_at_same_weights": {"perplexity_percent": percent, "mean": same, "largest": same}}


def told_accuracy(model: str, context: LabContext = GPU, same: float = 0.3) -> Result:
    readings = [
        reading("float32", "float32", 0.0, 0.0, 0.0, 4096),
        reading("bfloat16", "bfloat16", -0.35, 0.07, 0.0, 2048),
        reading("fp8", "bfloat16", -1.174, 0.321, same, 1024),
    ]
    return accuracy.tell_kv({"model": model, "tokens": 2044, "readings": readings}, context)


def test_random_weights_are_no_finding() -> None:
    assert holds(told_accuracy("random weights")) == holds(told_accuracy("random weights", CPU)) == [None, None]
    assert holds(told_accuracy("smollm2")) == holds(told_accuracy("smollm2", same=0.02)) == [True, True]


def told_formats(model: str, percent: float) -> Result:
    def one(name: str, percent: float, same: list[int]) -> dict[str, Any]:
        shift = {"perplexity_percent": percent, "mean": 0.01, "largest": 0.1}
        return {"name": name, "refusal": "", "weight_bytes": 9, "perplexity": 40.0, "shift": shift, "same_tokens": same}

    formats = [one("float32", 0.0, [64, 64]), one("bfloat16", -0.1, [64, 64]), one("int8", percent, [64, 3])]
    formats.append({"name": "fp8", "refusal": "fp8 needs a GPU", "weight_bytes": 0})
    return accuracy.tell_weights({"model": model, "tokens": 9, "answer_tokens": 64, "formats": formats}, CPU)


def test_a_format_may_cost_a_little_perplexity() -> None:
    assert holds(told_formats("smollm2", 0.9)) == [True, True, True]
    assert holds(told_formats("smollm2", 1.1)) == [True, False, True]
    assert holds(told_formats("random weights", 1.1)) == [None, None, True]
    assert told_formats("smollm2", 0.9).tables[0].rows[2][-2:] == ["33.5", "1 of 2"]


# -- the page


def test_the_page_of_a_gpu_tells_its_memory_from_the_hosts() -> None:
    machine = {"cpu": "chip", "cpus": 16, "gpu": "NVIDIA H200", "memory_bytes": 126 << 30, "gpu_bytes": 140 << 30}
    page = render_report(LabReport(LabSettings(gpu_8b=True), {}, machine, "today", "1"))
    assert "<b>GPU memory</b>140 GiB" in page and "<b>host memory</b>126 GiB" in page
    assert "<b>host</b>chip, 16 cores" in page
    page = render_report(LabReport(LabSettings(), {}, machine | {"gpu": None}, "today", "1"))
    assert "<b>memory</b>126 GiB" in page and "GPU memory" not in page


def test_nothing_that_can_be_told_is_no_failure() -> None:
    open_result = Result("", "", findings=[Finding("a", "b", None)] * 2)
    page = render_report(LabReport(LabSettings(), {"kv-accuracy": Entry("done", 1.0, open_result)}))
    assert '<span class="badge open">' in page
