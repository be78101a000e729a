"""Experiment: static against continuous batching on the same arrivals (`sim/batching.py` simulates both)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict

from quire.bench.charts import Chart, Span, bar_chart, line_chart
from quire.bench.report import Percentiles
from quire.bench.units import duration, number, times_the
from quire.lab.context import LabContext
from quire.lab.experiment import Data, Experiment, Finding, Record, Result, Table
from quire.sim import SimRequest, poisson_arrivals
from quire.sim.batching import BatchRun, run_continuous, run_static

NUM_SLOTS = 32
PICTURE_SLOTS = 8
PICTURE_REQUESTS = 28
QUICK_REQUESTS, FULL_REQUESTS = 192, 1024


def chat_lengths(num: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output): outputs spread widely, as those of chats do, which is what a batch that ends together suffers
    from."""
    rng = random.Random(seed)
    return [
        (max(8, min(1024, round(rng.lognormvariate(4.6, 0.9)))), max(4, min(1024, round(rng.lognormvariate(5.0, 0.8)))))
        for _ in range(num)
    ]


def picture_lengths(seed: int) -> list[tuple[int, int]]:
    """Lengths so short that single steps can be seen in the picture."""
    rng = random.Random(seed + 7)
    return [(rng.randint(8, 64), max(2, min(40, round(rng.lognormvariate(2.3, 0.8))))) for _ in range(PICTURE_REQUESTS)]


def predicted_static_utilisation(arrivals: Sequence[SimRequest], num_slots: int) -> float:
    """The useful share of full batches in order: the sum of outputs over slots times each batch's longest one."""
    outputs = [a.output_len for a in arrivals]
    batches = [outputs[i : i + num_slots] for i in range(0, len(outputs), num_slots)]
    return sum(outputs) / (num_slots * sum(max(batch) for batch in batches))


def measure(context: LabContext) -> Data:
    num_requests = QUICK_REQUESTS if context.quick else FULL_REQUESTS
    lengths = chat_lengths(num_requests, context.seed)
    context.report(f"{num_requests} requests that are all there, {NUM_SLOTS} slots")
    backlog = [SimRequest(0.0, prompt, output) for prompt, output in lengths]
    full = [run_static(backlog, NUM_SLOTS), run_continuous(backlog, NUM_SLOTS)]
    # Three quarters of what static batching manages: a load that both can serve.
    rate_per_s = 0.75 * num_requests / full[0].seconds
    context.report(f"the same, arriving at {rate_per_s:.1f} a second")
    arrivals = poisson_arrivals(lengths, rate_per_s=rate_per_s, seed=context.seed + 1)
    loaded = [run_static(arrivals, NUM_SLOTS), run_continuous(arrivals, NUM_SLOTS)]
    context.report("the picture")
    small = [SimRequest(0.0, *each) for each in picture_lengths(context.seed)]
    pictures = [run_static(small, PICTURE_SLOTS), run_continuous(small, PICTURE_SLOTS)]
    return {
        "lengths": lengths,
        "rate_per_s": rate_per_s,
        "all_at_once": [_data(each) | {"width": each.width[:: max(1, len(each.width) // 400)]} for each in full],
        "arriving": [_data(each) for each in loaded],
        "picture": [_data(each) | {"occupations": [asdict(o) for o in each.occupations]} for each in pictures],
        "predicted_static_utilisation": predicted_static_utilisation(backlog, NUM_SLOTS),
    }


def _data(run: BatchRun) -> Record:
    latency, first = Percentiles.of(run.latencies_s), Percentiles.of(run.first_tokens_s)
    assert latency is not None and first is not None
    names = ("name", "num_slots", "num_steps", "seconds", "output_tokens", "output_tok_s", "utilisation")
    return {name: getattr(run, name) for name in (*names, "queued_utilisation")} | {
        "latency_p50_s": latency.p50,
        "latency_p99_s": latency.p99,
        "first_token_p50_s": first.p50,
        "first_token_p99_s": first.p99,
    }


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    groups = (data["all_at_once"], data["arriving"], data["picture"])
    (static, continuous), loaded, predicted = groups[0], groups[1], data["predicted_static_utilisation"]
    speedup = continuous["output_tok_s"] / static["output_tok_s"]
    share, other = continuous["queued_utilisation"], static["queued_utilisation"]
    outputs = [output for _, output in data["lengths"]]
    mean, batches = sum(outputs) / len(outputs), range(0, len(outputs), NUM_SLOTS)
    mean_longest = sum(max(outputs[i : i + NUM_SLOTS]) for i in batches) / len(batches)
    kinds, cases = ("static", "continuous"), ("all at once", "arriving", "the picture")
    useful = {kind: [100 * group[i]["utilisation"] for group in groups] for i, kind in enumerate(kinds)}
    widths = {run["name"]: ([p[0] for p in run["width"]], [p[1] for p in run["width"]]) for run in groups[0]}
    note = "All requests there from the start. Static batching runs down to its longest request each time."
    over_time = "Requests in the batch that are not done, over time"
    return Result(
        question="How much of a batch's slots does useful work when the batch ends together, and when every slot is "
        "given on as soon as its request is done?",
        headline=f"{100 * static['utilisation']:.0f} % of the slots do useful work in static batches, "
        f"{100 * continuous['utilisation']:.0f} % in continuous ones: {times_the(speedup, 'throughput')}",
        charts=[
            *(_timeline(each) for each in data["picture"]),
            bar_chart("Slots that do useful work", "percent of slots x steps", cases, useful),
            line_chart(over_time, "simulated seconds", "requests", widths, note=note),
        ],
        tables=[
            _table("All requests there from the start", groups[0], len(outputs)),
            _table(f"Arriving at {data['rate_per_s']:.1f} requests a second", loaded, len(outputs)),
        ],
        findings=[
            Finding(
                "With all requests there, static batching's useful share is the sum of outputs over slots x each "
                f"batch's longest: {100 * predicted:.1f} %.",
                f"{100 * static['utilisation']:.1f} %.",
                abs(static["utilisation"] - predicted) < 1e-9,
            ),
            Finding(
                "While anybody waits, continuous batching leaves no slot empty (at least 99 % do useful work).",
                "Nobody ever waited: there are more slots than requests."
                if share is None
                else f"{100 * share:.1f} %, against {100 * (other or 0):.1f} % under static batching.",
                None if share is None else share >= 0.99,
            ),
            Finding(
                "The same work takes fewer steps, and so less time.",
                f"{continuous['num_steps']:,} against {static['num_steps']:,} steps; {speedup:.2f} times the tokens "
                "per second.",
                continuous["num_steps"] < static["num_steps"] and speedup > 1,
            ),
            Finding(
                "When requests arrive one by one, nobody waits for a batch to end: the median request is faster.",
                f"{loaded[1]['latency_p50_s']:.2f} s against {loaded[0]['latency_p50_s']:.2f} s end to end.",
                loaded[1]["latency_p50_s"] < loaded[0]["latency_p50_s"],
            ),
        ],
        explanation=[
            f"An output has {mean:.0f} tokens on average, but the longest of {NUM_SLOTS} has {mean_longest:.0f}: a "
            f"batch that ends together runs {mean_longest / mean:.1f} times as long as its mean request needs. "
            "Throughput gains less than the steps do: the weights are read once a step however full it is, but a "
            "fuller step reads more keys and values, and static batches also compute their padding.",
            f"At {data['rate_per_s']:.1f} requests a second, three quarters of what static batching serves, the median "
            f"first token comes after {duration(loaded[1]['first_token_p50_s'])} instead of "
            f"{duration(loaded[0]['first_token_p50_s'])}: a new request joins the next step. The slots need not be "
            "full there: full slots are a sign of a queue, not a goal.",
        ],
    )


def _timeline(run: Record) -> Chart:
    spans = []
    for o in run["occupations"]:
        label, decode = str(o["index"] + 1), o["start"] + o["num_prompt_steps"]
        spans.append(Span(o["slot"], o["start"], min(decode, o["done"]), label, "prompt"))
        if o["done"] > decode:
            spans.append(Span(o["slot"], decode, o["done"], label, "decode"))
        if o["end"] > o["done"]:
            spans.append(Span(o["slot"], o["done"], o["end"], "", "wasted"))
    title = f"{run['name'].capitalize()} batching: {len(run['occupations'])} requests in {run['num_slots']} slots"
    note = f"{100 * run['utilisation']:.0f} % of the slots do useful work. Numbers are requests in order of arrival."
    return Chart("timeline", f"{title}, {run['num_steps']} steps", "step", "slot", spans=spans, note=note)


def _table(title: str, runs: Sequence[Record], num_requests: int) -> Table:
    rows: list[list[object]] = [
        [
            *(each["name"], each["num_steps"], f"{100 * each['utilisation']:.1f}", f"{each['seconds']:.2f}"),
            *(f"{each['output_tok_s']:,.0f}", number(each["first_token_p50_s"])),
            *(number(each["latency_p50_s"]), number(each["latency_p99_s"])),
        ]
        for each in runs
    ]
    columns = ["batching", "steps", "useful slots %", "seconds", "output tok/s"]
    columns += ["first token p50 s", "end to end p50 s", "p99 s"]
    note = "Simulated time: the cost model's defaults, near Llama-3.1-8B on one H200."
    return Table(f"{title}: {runs[0]['num_slots']} slots, {num_requests:,} requests", columns, rows, note)


EXPERIMENT = Experiment("batching", "Static against continuous batching", measure, tell)
