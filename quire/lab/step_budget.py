"""Experiment: the step budget. Streams that decode, and long prompts that come in between: how long do they stall?"""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.charts import line_chart
from quire.bench.report import RunReport
from quire.bench.units import change, duration, listed, ms, number, times
from quire.bench.workloads import Workload, even_lengths
from quire.errors import BadRequestError
from quire.lab.context import LabContext, record, run_of
from quire.lab.experiment import COLUMNS, Data, Experiment, Finding, Result, Table, percentile

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
QUICK_BUDGETS = (256, 1024, 8192)


@dataclass(slots=True)
class _Point:
    """One setting: its run, or why there is none."""

    budget: int
    is_chunked: bool
    run: RunReport | None
    refusal: str = ""

    @property
    def p99_s(self) -> float | None:
        return percentile(self.run.itl_s, "p99") if self.run else None


def measure(context: LabContext) -> Data:
    budgets = QUICK_BUDGETS if context.quick and not context.on_gpu else BUDGETS
    num_streams, num_out, num_prompts, prompt_len = streams_and_prompts(context)
    streams = even_lengths(context.vocab, context.seed + 5, num_streams, (16, 16), (num_out, num_out))
    prompts = even_lengths(context.vocab, context.seed + 6, num_prompts, (prompt_len,) * 2, (4, 4))
    # The streams decode already when the prompts come, all of them together.
    arrivals = [0.0] * num_streams + [context.pick(0.4, 0.5, 0.3)] * num_prompts
    points = [
        _measure_point(context, streams + prompts, arrivals, budget, is_chunked)
        for is_chunked in (True, False)
        for budget in budgets
    ]
    return {
        "budgets": list(budgets),
        "points": [
            {"budget": p.budget, "chunked": p.is_chunked, "refusal": p.refusal, "itl_p99_s": p.p99_s}
            | ({} if p.run is None else {"total_tok_s": p.run.total_tok_s, "output_tok_s": p.run.output_tok_s})
            for p in points
        ],
        "measured": [record(p.run) for p in points if p.run is not None],
    }


def streams_and_prompts(context: LabContext) -> tuple[int, int, int, int]:
    """Streams and the length of their answers, long prompts and their length."""
    return context.pick((8, 28, 3, 384), (16, 64, 6, 1000), (64, 256, 16, 4000))


def _measure_point(context: LabContext, work: Workload, arrivals: list[float], budget: int, is_chunked: bool) -> _Point:
    name = f"budget {budget:,}, chunked prefill {'on' if is_chunked else 'off'}"
    engine = context.engine(
        max_num_seqs=min(128, budget), max_num_batched_tokens=budget, enable_chunked_prefill=is_chunked
    )
    if not is_chunked and max(len(prompt) for prompt, _ in work) > budget:
        try:
            engine.add_request("refused", work[-1][0])  # for the engine's own words, before anything runs for nothing
        except BadRequestError as error:
            return _Point(budget, is_chunked, None, str(error))
    return _Point(budget, is_chunked, context.measure(engine, work, name, arrivals=arrivals))


# -- what it says

_Present = list[tuple[int, RunReport, float]]  # budget, run, p99 of the wait between two tokens


def tell(data: Data, context: LabContext) -> Result:
    num_streams, _, num_prompts, prompt_len = streams_and_prompts(context)
    runs = iter(data["measured"])
    points = [
        _Point(p["budget"], p["chunked"], None if p["refusal"] else run_of(next(runs)), p["refusal"])
        for p in data["points"]
    ]
    chunked, whole = (
        [(p.budget, p.run, p.p99_s) for p in points if p.is_chunked is kind and p.run is not None and p.p99_s]
        for kind in (True, False)
    )
    (small, first, p99_small), (large, last, p99_large) = chunked[0], chunked[-1]
    lines = {"chunked": chunked, "whole prompts": whole}
    waits = {n: ([p[0] for p in found], [1e3 * p[2] for p in found]) for n, found in lines.items()}
    rates = {n: ([p[0] for p in found], [p[1].total_tok_s for p in found]) for n, found in lines.items()}
    trade = {n: (waits[n][1], rates[n][1]) for n, found in lines.items() if found}
    cost = change(last.total_tok_s / first.total_tok_s)
    flag, both = "max_num_batched_tokens", "prompt and output tokens/s"
    dots = f"A dot for each budget, {small:,} on the left and {large:,} on the right; up and to the left is better."
    return Result(
        question=f"{num_streams} streams decode when {num_prompts} prompts of {prompt_len:,} tokens come in. How long "
        "do the streams wait for their next token, and what does it cost to make that wait short?",
        headline=(
            f"a budget of {small} keeps the slowest percent of tokens within {duration(p99_small)}, {large:,} lets "
            f"them wait {duration(p99_large)}, for {cost} throughput"
            if p99_small < p99_large
            else f"a budget of {small} shortened no wait here: the slowest percent of tokens took "
            f"{duration(p99_small)}, with {large:,} {duration(p99_large)}, for {cost} throughput"
        ),
        charts=[
            line_chart("The wait between two tokens, slowest percent", flag, "ms, p99", waits, log="xy"),
            line_chart("Throughput, prompt and output tokens", flag, "tokens/s", rates, log="x"),
            line_chart("The trade: throughput against wait", "ms between tokens, p99", both, trade, note=dots, log="x"),
        ],
        tables=[_table(points, _predicted_s(chunked, num_streams, num_prompts * prompt_len))],
        findings=_findings(points, chunked, whole, prompt_len),
        explanation=_explain(points, chunked, whole),
    )


def _predicted_s(chunked: _Present, num_streams: int, prompt_tokens: int) -> dict[int, float]:
    """What a step of each budget should take: its decodes, and its prompt tokens at the usual speed."""
    rates = sorted(run.prefill_tok_s for _, run, _ in chunked if run.prefill_tok_s)
    decodes = sorted(run.decode_tok_s for _, run, _ in chunked if run.decode_tok_s)
    if not rates or not decodes:
        return {}
    rate, decode_s = rates[len(rates) // 2], num_streams / decodes[len(decodes) // 2]
    return {budget: decode_s + min(budget - num_streams, prompt_tokens) / rate for budget, _, _ in chunked}


def _table(points: list[_Point], predicted_s: dict[int, float]) -> Table:
    columns = ["in and out tok/s", "output tok/s", "prefill tok/s", "between tokens p50 ms", "between tokens p99 ms"]
    columns += ["longest ms", "first token p99 s"]
    rows: list[list[object]] = []
    for point in points:
        cells = ["refused", *["–"] * 6] if point.run is None else [COLUMNS[name](point.run) for name in columns]
        told = ms(predicted_s.get(point.budget)) if point.is_chunked else "–"
        rows.append([point.budget, "on" if point.is_chunked else "off", *cells, told])
    note = (
        "A stream gets one token a step, so its wait is the step's length. Predicted is the streams' own decode time, "
        "and the prompt tokens that the budget leaves room for over their median speed. The slowest first token (p99) "
        "is that of the last long prompt."
    )
    return Table("By budget", ["budget", "chunked", *columns, "predicted step ms"], rows, note)


def _findings(points: list[_Point], chunked: _Present, whole: _Present, prompt_len: int) -> list[Finding]:
    (small, first, p99_small), (large, last, p99_large) = chunked[0], chunked[-1]
    refused = [p for p in points if p.run is None]
    too_small = [p for p in points if not p.is_chunked and p.budget < prompt_len]
    findings = [
        Finding(
            "A larger budget means longer waits between tokens: a step with more prompt in it takes longer.",
            f"p99 {duration(p99_small)} at {small}, {duration(p99_large)} at {large:,}: "
            f"{times(p99_large / p99_small)}.",
            p99_large > 1.5 * p99_small,
        ),
        Finding(
            "And it costs little throughput to keep it small (within 20 %).",
            f"{number(first.total_tok_s)} tok/s at {small}, {number(last.total_tok_s)} at {large:,}.",
            first.total_tok_s >= 0.8 * last.total_tok_s,
        ),
        Finding(
            "Without chunks a prompt that is longer than the budget cannot run, and is refused by name.",
            f"Refused at {listed([f'{p.budget:,}' for p in refused])}."
            if refused
            else "Every budget held the prompts.",
            refused == too_small,
        ),
    ]
    waits = {budget: p99 for budget, _, p99 in chunked}
    pairs = [(budget, waits[budget], off) for budget, _, off in whole if budget in waits and budget < 2 * prompt_len]
    if pairs:
        budget, on, off = pairs[0]
        findings.append(
            Finding(
                "Whole prompts make the wait longer than chunks do at the same budget, or as long where it holds few.",
                f"At {budget:,}: {duration(off)} against {duration(on)}.",
                off >= 0.85 * on,
            )
        )
    return findings


def _explain(points: list[_Point], chunked: _Present, whole: _Present) -> list[str]:
    last = chunked[-1][1]
    enough, near, _ = next(point for point in chunked if point[1].total_tok_s >= 0.98 * last.total_tok_s)
    paragraphs = [
        "Smaller steps read the weights for fewer prompt tokens. From "
        f"{enough:,} on a larger budget brings no more throughput ({number(near.total_tok_s)} tok/s in and out), so "
        "the smallest of those is the right one. The table has what a step of each budget should take beside the "
        "streams, and what was seen."
    ]
    if whole:
        # Each at its best: the longest wait of one against the shortest of the other would compare budgets.
        (budget, _, wait), (other, _, best) = (min(found, key=lambda p: p[2]) for found in (whole, chunked))
        paragraphs.append(
            f"Where whole prompts run, the streams wait at least {duration(wait)} (p99, at {budget:,}); with chunks it "
            f"can be {duration(best)} (at {other:,})."
        )
    refusal = next((p.refusal for p in points if p.refusal), "")
    return paragraphs + ([f"Where they cannot run, the engine says: “{refusal}”"] if refusal else [])


EXPERIMENT = Experiment("step-budget", "Step budget: max_num_batched_tokens, chunked prefill on and off", measure, tell)
