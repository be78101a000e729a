"""Experiment: the step budget. Streams that decode, and long prompts that come in between: how long do they stall?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.bench.charts import Chart, Series
from quire.bench.units import change, duration, listed, ms, number, times
from quire.bench.workloads import Workload
from quire.errors import BadRequestError
from quire.lab.context import LabContext, record, run_of
from quire.lab.lengths import even_lengths
from quire.lab.result import Finding, Result, Table

if TYPE_CHECKING:
    from quire.bench.report import RunReport

KEY = "step-budget"
TITLE = "Step budget: max_num_batched_tokens, chunked prefill on and off"

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
        return self.run.itl_s.p99 if self.run and self.run.itl_s else None


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    budgets = QUICK_BUDGETS if context.quick and not context.on_gpu else BUDGETS
    num_streams, num_out, num_prompts, prompt_len = streams_and_prompts(context)
    streams = even_lengths(context.vocab, context.seed + 5, num_streams, (16, 16), (num_out, num_out))
    prompts = even_lengths(context.vocab, context.seed + 6, num_prompts, (prompt_len,) * 2, (4, 4))
    # The streams decode already when the prompts come, all of them together.
    arrivals = [0.0] * num_streams + [context.pick(0.4, 0.5, 0.3)] * num_prompts
    points = []
    for is_chunked in (True, False):
        for budget in budgets:
            points.append(_measure(context, streams + prompts, arrivals, budget, is_chunked))
    result = Result(
        key=KEY,
        title=TITLE,
        question=f"{num_streams} streams decode when {num_prompts} prompts of {prompt_len:,} tokens come in. How long "
        "do the streams wait for their next token, and what does it cost to make that wait short?",
        data={
            "budgets": list(budgets),
            "points": [
                {"budget": p.budget, "chunked": p.is_chunked, "refusal": p.refusal, "itl_p99_s": p.p99_s}
                | ({} if p.run is None else {"total_tok_s": p.run.total_tok_s, "output_tok_s": p.run.output_tok_s})
                for p in points
            ],
            "measured": [record(p.run) for p in points if p.run is not None],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def tell(result: Result, context: LabContext) -> None:
    """Table, charts and words, from the data."""
    num_streams, _, num_prompts, prompt_len = streams_and_prompts(context)
    runs = iter(result.data["measured"])
    points = [
        _Point(p["budget"], p["chunked"], None if p["refusal"] else run_of(next(runs)), p["refusal"])
        for p in result.data["points"]
    ]
    chunked, whole = _by_kind(points)
    result.tables, result.charts = [_table(points)], _charts(chunked, whole)
    result.findings = _findings(chunked, whole, prompt_len)
    result.explanation = _explain(chunked, whole, num_streams, num_prompts * prompt_len, prompt_len)
    result.data["headline"] = _headline(chunked)


def streams_and_prompts(context: LabContext) -> tuple[int, int, int, int]:
    """Streams and the length of their answers, long prompts and their length."""
    return context.pick((8, 28, 3, 384), (16, 64, 6, 1000), (64, 256, 16, 4000))


def _by_kind(points: list[_Point]) -> tuple[list[_Point], list[_Point]]:
    """Those in chunks, and those with whole prompts."""
    return [p for p in points if p.is_chunked], [p for p in points if not p.is_chunked]


def _measure(context: LabContext, work: Workload, arrivals: list[float], budget: int, is_chunked: bool) -> _Point:
    name = f"budget {budget:,}, chunked prefill {'on' if is_chunked else 'off'}"
    longest = max(len(prompt) for prompt, _ in work)
    engine = context.engine(
        max_num_seqs=min(128, budget), max_num_batched_tokens=budget, enable_chunked_prefill=is_chunked
    )
    if not is_chunked and longest > budget:
        try:
            engine.add_request("refused", work[-1][0])  # for the engine's own word, before anything runs for nothing
        except BadRequestError as error:
            return _Point(budget, is_chunked, None, str(error))
    return _Point(budget, is_chunked, context.measure(engine, work, name, arrivals=arrivals))


def _table(points: list[_Point]) -> Table:
    rows: list[list[object]] = []
    for point in points:
        each, head = point.run, [point.budget, "on" if point.is_chunked else "off"]
        if each is None:
            rows.append([*head, "refused", "–", "–", "–", "–", "–"])
            continue
        rows.append(
            [
                *head,
                number(each.total_tok_s),
                number(each.output_tok_s),
                ms(each.itl_s.p50) if each.itl_s else "–",
                ms(point.p99_s),
                ms(each.itl_s.max) if each.itl_s else "–",
                number(each.ttft_s.p99) if each.ttft_s else "–",
            ]
        )
    columns = ["budget", "chunked", "in and out tok/s", "output tok/s", "between tokens p50 ms", "p99 ms", "longest ms"]
    columns.append("slowest first token s")
    return Table("By budget", columns, rows, "The slowest first token is that of the last long prompt (p99).")


def _series(name: str, points: list[_Point], value: str) -> Series:
    there = [p for p in points if p.run is not None]
    if value == "p99":
        return Series(name, [p.budget for p in there], [1e3 * (p.p99_s or 0.0) for p in there])
    return Series(name, [p.budget for p in there], [p.run.total_tok_s for p in there if p.run is not None])


def _charts(chunked: list[_Point], whole: list[_Point]) -> list[Chart]:
    curves = []
    for name, points in (("chunked", chunked), ("whole prompts", whole)):
        there = [p for p in points if p.run is not None]
        if there:
            waits: list[float | str] = [1e3 * (p.p99_s or 0.0) for p in there]
            curves.append(Series(name, waits, [p.run.total_tok_s for p in there if p.run is not None]))
    return [
        Chart(
            "line",
            "The wait between two tokens, slowest percent",
            "max_num_batched_tokens",
            "ms, p99",
            [_series("chunked", chunked, "p99"), _series("whole prompts", whole, "p99")],
            log_x=True,
            log_y=True,
        ),
        Chart(
            "line",
            "Throughput, prompt and output tokens",
            "max_num_batched_tokens",
            "tokens/s",
            [_series("chunked", chunked, "rate"), _series("whole prompts", whole, "rate")],
            log_x=True,
        ),
        Chart(
            "line",
            "The trade: throughput against wait",
            "ms between tokens, p99",
            "prompt and output tokens/s",
            curves,
            note=f"A dot for each budget, {chunked[0].budget:,} on the left and {chunked[-1].budget:,} on the right; "
            "up and to the left is better.",
            log_x=True,
        ),
    ]


def _present(points: list[_Point]) -> list[tuple[int, RunReport, float]]:
    return [(p.budget, p.run, p.p99_s) for p in points if p.run is not None and p.p99_s is not None]


def _headline(chunked: list[_Point]) -> str:
    there = _present(chunked)
    (small, first, p99_small), (large, last, p99_large) = there[0], there[-1]
    return (
        f"a budget of {small} keeps the slowest percent of tokens within {duration(p99_small)}, {large:,} lets them "
        f"wait {duration(p99_large)}, for {change(last.total_tok_s / first.total_tok_s)} throughput"
    )


def _findings(chunked: list[_Point], whole: list[_Point], prompt_len: int) -> list[Finding]:
    there = _present(chunked)
    (small, first, p99_small), (large, last, p99_large) = there[0], there[-1]
    pairs = [
        (budget, on, p99)
        for (budget, _, on) in there
        for (other, _, p99) in _present(whole)
        if budget == other and budget < 2 * prompt_len
    ]
    refused = [p for p in whole if p.run is None]
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
            all(p.budget < prompt_len for p in refused) and len(refused) == sum(p.budget < prompt_len for p in whole),
        ),
    ]
    if pairs:
        budget, on, off = pairs[0]
        findings.append(
            Finding(
                "Whole prompts make the wait longer than chunks do at the same budget, or as long where it holds "
                "few of them.",
                f"At {budget:,}: {duration(off)} against {duration(on)}.",
                off >= 0.85 * on,
            )
        )
    return findings


def _explain(
    chunked: list[_Point], whole: list[_Point], num_streams: int, prompt_tokens: int, prompt_len: int
) -> list[str]:
    there = _present(chunked)
    paragraphs = []
    if told := _foretold(there, num_streams, prompt_tokens):
        paragraphs.append(told)
    (small, first, _), (_, last, _) = there[0], there[-1]
    gain = last.total_tok_s / first.total_tok_s
    if gain > 1.1:
        text = (
            f"The larger budget is worth {change(gain)} throughput: prompts run at {number(last.prefill_tok_s)} tok/s "
            f"in it and at {number(first.prefill_tok_s)} in steps of {small}, which read the weights for fewer tokens."
        )
        enough = next((budget, each) for budget, each, _ in there if each.total_tok_s >= 0.98 * last.total_tok_s)
        if enough[1] is not last:
            text += f" At {enough[0]:,} all of that is reached ({number(enough[1].total_tok_s)} tok/s in and out)."
        paragraphs.append(text)
    elif gain < 0.9:
        paragraphs.append(
            f"The larger budget even costs throughput ({change(gain)}): while the streams stand still the batch makes "
            "no output, and steps beyond some hundred tokens multiply no faster."
        )
    else:
        paragraphs.append(
            f"The larger budget buys nothing here ({change(gain)} throughput): a step of {small} tokens already "
            f"multiplies at full speed on this machine. Then the smallest budget that does is the right one."
        )
    refused = [p for p in whole if p.run is None]
    if refused:
        paragraphs.append(
            f"Off, budgets below {prompt_len:,} cannot serve these prompts at all; the engine says: "
            f"“{refused[0].refusal}”"
        )
    if off := _present(whole):
        # Each at its best: the longest wait of one against the shortest of the other would compare budgets.
        budget, _, wait = min(off, key=lambda point: point[2])
        other, _, best = min(there, key=lambda point: point[2])
        paragraphs.append(
            f"Where whole prompts run, the streams wait at least {duration(wait)} (p99, at {budget:,}); with chunks it "
            f"can be {duration(best)} (at {other:,}), shorter by a factor of {wait / best:.1f}."
        )
    return paragraphs


def _foretold(there: list[tuple[int, RunReport, float]], num_streams: int, prompt_tokens: int) -> str:
    """What a step of each budget should take: its decodes, and its prompt tokens at the usual speed."""
    rates = sorted(each.prefill_tok_s for _, each, _ in there if each.prefill_tok_s)
    decodes = sorted(each.decode_tok_s for _, each, _ in there if each.decode_tok_s)
    if not rates or not decodes:
        return ""
    rate, decode_s = rates[len(rates) // 2], num_streams / decodes[len(decodes) // 2]
    steps_s = [decode_s + min(budget - num_streams, prompt_tokens) / rate for budget, _, _ in there]
    told = [
        f"{budget:,}: {duration(step_s)} foretold, {duration(p99)} seen"
        for (budget, _, p99), step_s in zip(there, steps_s, strict=True)
    ]
    text = (
        f"A stream gets one token a step, so its wait is the step's length: {duration(decode_s)} for the "
        f"{num_streams} streams themselves, and what the budget leaves for prompts over their speed, {number(rate)} "
        f"tok/s here, up to all {prompt_tokens:,} prompt tokens. By budget: {'; '.join(told)}."
    )
    (small, run, p99), (larger, _, other) = there[0], there[1 if len(there) > 1 else 0]
    if larger > small and p99 > 0.85 * other and run.itl_s:
        text += (
            f" From {larger:,} down to {small:,} the wait no longer falls: half of the tokens come within "
            f"{duration(run.itl_s.p50)} there, but the slowest steps take longer than their tokens explain, and a "
            "smaller budget is no help against those."
        )
    return text
