"""Experiment: static against continuous batching on the same arrivals (see `batch_runs.py` for the two)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quire.bench.charts import Chart, Series, Span
from quire.bench.units import duration, number
from quire.lab.batch_runs import BatchRun, run_continuous, run_static
from quire.lab.result import Context, Finding, Result, Table
from quire.sim import Arrival, poisson_arrivals

KEY = "batching"
TITLE = "Static against continuous batching"

Run = dict[str, Any]  # a BatchRun as data: see _data

NUM_SLOTS = 32
PICTURE_SLOTS = 8
PICTURE_REQUESTS = 28
QUICK_REQUESTS, FULL_REQUESTS = 192, 1024


def chat_lengths(num: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output): outputs spread widely, as chat's do, which is what a batch that ends together suffers from."""
    rng = random.Random(seed)
    return [
        (max(8, min(1024, round(rng.lognormvariate(4.6, 0.9)))), max(4, min(1024, round(rng.lognormvariate(5.0, 0.8)))))
        for _ in range(num)
    ]


def predicted_static_utilisation(arrivals: Sequence[Arrival], num_slots: int) -> float:
    """Full batches in order: the sum of outputs over slots times each batch's longest one."""
    outputs = [a.output_len for a in arrivals]
    batches = [outputs[i : i + num_slots] for i in range(0, len(outputs), num_slots)]
    return sum(outputs) / (num_slots * sum(max(batch) for batch in batches))


def run(context: Context) -> Result:
    started = time.perf_counter()
    num_requests = QUICK_REQUESTS if context.quick else FULL_REQUESTS
    lengths = chat_lengths(num_requests, context.seed)
    context.report(f"{num_requests} requests that are all there, {NUM_SLOTS} slots")
    backlog = [Arrival(0.0, prompt, output) for prompt, output in lengths]
    full = [run_static(backlog, NUM_SLOTS), run_continuous(backlog, NUM_SLOTS)]
    # Three quarters of what static batching manages: a load that both can serve.
    rate_per_s = 0.75 * num_requests / full[0].seconds
    context.report(f"the same, arriving at {rate_per_s:.1f} a second")
    arrivals = poisson_arrivals(lengths, rate_per_s=rate_per_s, seed=context.seed + 1)
    loaded = [run_static(arrivals, NUM_SLOTS), run_continuous(arrivals, NUM_SLOTS)]
    context.report("the picture")
    small = [Arrival(0.0, *each) for each in picture_lengths(context.seed)]
    pictures = [run_static(small, PICTURE_SLOTS), run_continuous(small, PICTURE_SLOTS)]
    predicted = predicted_static_utilisation(backlog, NUM_SLOTS)
    result = Result(
        key=KEY,
        title=TITLE,
        question="How much of a batch's slots does useful work when the batch ends together, and when every slot is "
        "given on as soon as its request is done?",
        charts=[
            *(_timeline(each) for each in pictures),
            Chart(
                "grouped_bar",
                "Slots that do useful work",
                "",
                "percent of slots x steps",
                [
                    Series(each.name, ["all at once", "arriving", "the picture"], [100 * r.utilisation for r in column])
                    for each, *column in zip(full, full, loaded, pictures, strict=True)
                ],
            ),
            Chart(
                "line",
                "Requests in the batch that are not done, over time",
                "simulated seconds",
                "requests",
                [_width_series(each) for each in full],
                note="All requests there from the start. Static batching runs down to its longest request each time.",
            ),
        ],
        data={
            "lengths": lengths,
            "rate_per_s": rate_per_s,
            "all_at_once": [_data(each) for each in full],
            "arriving": [_data(each) for each in loaded],
            "picture": [_data(each) | {"occupations": [asdict(o) for o in each.occupations]} for each in pictures],
            "predicted_static_utilisation": predicted,
        },
        seconds=time.perf_counter() - started,
    )
    tell(result)
    return result


def tell(result: Result) -> None:
    """Tables and words, from the data."""
    data = result.data
    full, loaded, rate_per_s = data["all_at_once"], data["arriving"], data["rate_per_s"]
    num_requests = len(data["lengths"])
    result.tables = [
        _table("All requests there from the start", full, num_requests),
        _table(f"Arriving at {rate_per_s:.1f} requests a second", loaded, num_requests),
    ]
    result.findings = _findings(full, loaded, data["predicted_static_utilisation"])
    result.explanation = _explain(full, loaded, data["lengths"], rate_per_s)


def picture_lengths(seed: int) -> list[tuple[int, int]]:
    """Short ones, so that single steps can be seen."""
    rng = random.Random(seed + 7)
    return [(rng.randint(8, 64), max(2, min(40, round(rng.lognormvariate(2.3, 0.8))))) for _ in range(PICTURE_REQUESTS)]


# -- tables and charts


def _percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation, as numpy's."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _data(run: BatchRun) -> Run:
    return {
        "name": run.name,
        "num_slots": run.num_slots,
        "num_steps": run.num_steps,
        "seconds": run.seconds,
        "output_tokens": run.output_tokens,
        "output_tok_s": run.output_tok_s,
        "utilisation": run.utilisation,
        "queued_utilisation": run.queued_utilisation,
        "latency_p50_s": _percentile(run.latencies_s, 50),
        "latency_p99_s": _percentile(run.latencies_s, 99),
        "first_token_p50_s": _percentile(run.first_tokens_s, 50),
        "first_token_p99_s": _percentile(run.first_tokens_s, 99),
    }


def _table(title: str, runs: Sequence[Run], num_requests: int) -> Table:
    rows: list[list[object]] = []
    for each in runs:
        rows.append(
            [
                each["name"],
                each["num_steps"],
                f"{100 * each['utilisation']:.1f}",
                f"{each['seconds']:.2f}",
                f"{each['output_tok_s']:,.0f}",
                number(each["first_token_p50_s"]),
                number(each["latency_p50_s"]),
                number(each["latency_p99_s"]),
            ]
        )
    columns = ["batching", "steps", "useful slots %", "seconds", "output tok/s"]
    columns += ["first token p50 s", "end to end p50 s", "p99 s"]
    note = "Simulated time: the cost model's defaults, near Llama-3.1-8B on one H200."
    return Table(f"{title}: {runs[0]['num_slots']} slots, {num_requests:,} requests", columns, rows, note)


def _timeline(run: BatchRun) -> Chart:
    spans = []
    for o in run.occupations:
        label = str(o.index + 1)
        decode = o.start + o.num_prompt_steps
        spans.append(Span(o.slot, o.start, min(decode, o.done), label, "prompt"))
        if o.done > decode:
            spans.append(Span(o.slot, decode, o.done, label, "decode"))
        if o.end > o.done:
            spans.append(Span(o.slot, o.done, o.end, "", "wasted"))
    return Chart(
        "timeline",
        f"{run.name.capitalize()} batching: {len(run.occupations)} requests in {run.num_slots} slots, "
        f"{run.num_steps} steps",
        "step",
        "slot",
        spans=spans,
        note=f"{100 * run.utilisation:.0f} % of the slots do useful work. Numbers are requests in order of arrival.",
    )


def _width_series(run: BatchRun) -> Series:
    every = max(1, len(run.width) // 400)
    points = run.width[::every]
    return Series(run.name, [p[0] for p in points], [float(p[1]) for p in points])


# -- what it means


def _findings(full: Sequence[Run], loaded: Sequence[Run], predicted: float) -> list[Finding]:
    static, continuous = full
    speedup = continuous["output_tok_s"] / static["output_tok_s"]
    p50 = [each["latency_p50_s"] for each in loaded]
    return [
        Finding(
            "With all requests there, static batching's useful share is the sum of outputs over slots x each batch's "
            f"longest: {100 * predicted:.1f} %.",
            f"{100 * static['utilisation']:.1f} %.",
            abs(static["utilisation"] - predicted) < 1e-9,
        ),
        _queue_finding(static, continuous),
        Finding(
            "The same work takes fewer steps, and so less time.",
            f"{continuous['num_steps']:,} against {static['num_steps']:,} steps; {speedup:.2f} times the tokens per "
            "second.",
            continuous["num_steps"] < static["num_steps"] and speedup > 1,
        ),
        Finding(
            "When requests arrive one by one, nobody waits for a batch to end: the median request is faster.",
            f"{p50[1]:.2f} s against {p50[0]:.2f} s end to end.",
            p50[1] < p50[0],
        ),
    ]


def _queue_finding(static: Run, continuous: Run) -> Finding:
    expected = "While anybody waits, continuous batching leaves no slot empty (at least 99 % do useful work)."
    share, other = continuous["queued_utilisation"], static["queued_utilisation"]
    if share is None or other is None:
        return Finding(expected, "Nobody ever waited: there are more slots than requests.", None)
    return Finding(expected, f"{100 * share:.1f} %, against {100 * other:.1f} % under static batching.", share >= 0.99)


def _explain(
    full: Sequence[Run], loaded: Sequence[Run], lengths: Sequence[Sequence[int]], rate_per_s: float
) -> list[str]:
    static, continuous = full
    outputs = [output for _, output in lengths]
    mean = sum(outputs) / len(outputs)
    batches = [outputs[i : i + NUM_SLOTS] for i in range(0, len(outputs), NUM_SLOTS)]
    mean_longest = sum(max(batch) for batch in batches) / len(batches)
    speedup = continuous["output_tok_s"] / static["output_tok_s"]
    step_ratio = static["num_steps"] / continuous["num_steps"]
    paragraphs = [
        f"An output has {mean:.0f} tokens on average, but the longest of {NUM_SLOTS} has {mean_longest:.0f}: a batch "
        f"that ends together runs {mean_longest / mean:.1f} times as long as its mean request needs, and only "
        f"{100 * static['utilisation']:.0f} % of its slots do useful work. Continuous batching reaches "
        f"{100 * continuous['utilisation']:.0f} %, and needs {step_ratio:.1f} times fewer steps.",
    ]
    if speedup < step_ratio:
        paragraphs.append(
            f"Throughput rises by {speedup:.1f} times, less than the steps fall, because a fuller step costs more: it "
            f"reads the keys and values of more requests, and prompts share steps with decodes. A decode step's "
            "weights are read once however full it is, which is why filling it pays at all."
        )
    else:
        paragraphs.append(
            f"Throughput rises by {speedup:.1f} times, more than the steps fall: static batches also compute their "
            f"padding, as prompts are padded to the longest and rows that are done run on."
        )
    first = [each["first_token_p50_s"] for each in loaded]
    tail = [each["latency_p99_s"] for each in loaded]
    paragraphs.append(
        f"At {rate_per_s:.1f} requests a second, three quarters of what static batching serves, the median first token "
        f"comes after {duration(first[1])} instead of {duration(first[0])}: a new request joins the next step "
        f"instead of waiting for the batch to end. End to end the slowest percent takes {tail[1]:.1f} s against "
        f"{tail[0]:.1f} s."
    )
    shares = [100 * each["utilisation"] for each in loaded]
    if shares[1] < shares[0]:
        paragraphs.append(
            f"At that load its slots are no fuller than static batching's ({shares[1]:.1f} against {shares[0]:.1f} %): "
            "there are more slots than requests, and a step begins for whoever is there instead of for whoever has "
            "gathered. Full slots are a sign of a queue, not a goal."
        )
    return paragraphs
