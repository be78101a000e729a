"""Experiment: how many sequences at once. Throughput, latency and occupancy by max_num_seqs, where it ends, and why."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.bench.charts import Chart, Series
from quire.bench.units import about, counted, duration, listed, ms, number, times
from quire.lab.context import LabContext, record, run_of
from quire.lab.lengths import even_lengths
from quire.lab.result import Finding, Result, Table

if TYPE_CHECKING:
    from quire.bench.report import RunReport

KEY = "batch-width"
TITLE = "Batch width: max_num_seqs from 1 to 256"

WIDTHS = (1, 4, 16, 64, 256)
# A doubling that brings less than this is not worth its latency.
SATURATED_PERCENT = 15.0


@dataclass(slots=True, frozen=True)
class Line:
    """A decode step's time by its width: start_s + slope_s for each sequence."""

    start_s: float
    slope_s: float

    @property
    def half_width(self) -> float:
        """Where the sequences' own part is as large as what they share."""
        return self.start_s / self.slope_s if self.slope_s > 0 else math.inf


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    num_requests = context.pick((6, 16, 40, 80, 256), (8, 24, 64, 192, 512), (6, 24, 96, 256, 512))
    prompt, output = _lengths(context)
    runs = []
    for width, num in zip(WIDTHS, num_requests, strict=True):
        work = even_lengths(context.vocab, context.seed, num, prompt, output)
        engine = context.engine(max_num_seqs=width, max_num_batched_tokens=context.pick(512, 512, 8192))
        runs.append(context.measure(engine, work, f"max_num_seqs {width}"))
    gains = gains_per_doubling([each.output_tok_s for each in runs], WIDTHS)
    at = saturation(gains)
    line = fit_line([each.running_mean for each in runs], [_step_s(each) for each in runs])
    result = Result(
        key=KEY,
        title=TITLE,
        question="What do more sequences at once bring, what do they cost each user, and where does it end?",
        charts=_charts(runs),
        data={
            "widths": list(WIDTHS),
            "gain_per_doubling_percent": gains,
            "saturates_at": None if at is None else WIDTHS[at],
            "step_line_s": None if line is None else [line.start_s, line.slope_s],
            "measured": [record(each) for each in runs],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def tell(result: Result, context: LabContext) -> None:
    """Table and words, from the data."""
    data = result.data
    runs, gains = [run_of(each) for each in data["measured"]], data["gain_per_doubling_percent"]
    at = None if data["saturates_at"] is None else WIDTHS.index(data["saturates_at"])
    line = None if data["step_line_s"] is None else Line(*data["step_line_s"])
    best = max(range(len(runs)), key=lambda i: runs[i].output_tok_s)
    result.tables = [_table(runs, gains, *_lengths(context))]
    result.findings, result.explanation = _findings(runs, gains, at), _explain(runs, gains, at, line)
    data["headline"] = (
        f"{number(runs[best].output_tok_s)} tok/s at {WIDTHS[best]}, "
        f"{times(runs[best].output_tok_s / runs[0].output_tok_s)} a single stream's"
        + ("" if at is None else f"; saturates at {WIDTHS[at]}")
    )


def _lengths(context: LabContext) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of prompts and of answers: from, to."""
    return context.pick(((4, 12), (8, 20)), ((16, 48), (32, 64)), ((128, 384), (128, 384)))


def gains_per_doubling(rates: list[float], widths: tuple[int, ...]) -> list[float]:
    """Percent that each doubling between one width and the next brought."""
    found = []
    for i in range(1, len(rates)):
        doublings = math.log2(widths[i] / widths[i - 1])
        found.append(100 * ((rates[i] / rates[i - 1]) ** (1 / doublings) - 1))
    return found


def saturation(gains: list[float]) -> int | None:
    """Index of the first width after which no doubling is worth it; None if the last still was."""
    for i in range(len(gains)):
        if all(gain < SATURATED_PERCENT for gain in gains[i:]):
            return i
    return None


def fit_line(widths: list[float], steps_s: list[float | None]) -> Line | None:
    """Least squares of relative errors, so that the narrow steps count as much as the wide ones."""
    points = [(w, s) for w, s in zip(widths, steps_s, strict=True) if s]
    if len(points) < 2:
        return None
    # Minimise the sum of ((a + b w) / s - 1)^2: two linear equations.
    s11 = sum(1 / s**2 for _, s in points)
    s12 = sum(w / s**2 for w, s in points)
    s22 = sum(w**2 / s**2 for w, s in points)
    t1, t2 = sum(1 / s for _, s in points), sum(w / s for w, s in points)
    determinant = s11 * s22 - s12 * s12
    if determinant <= 0:
        return None
    start, slope = (t1 * s22 - t2 * s12) / determinant, (t2 * s11 - t1 * s12) / determinant
    return Line(max(start, 0.0), max(slope, 0.0))


def _step_s(report: RunReport) -> float | None:
    """Of a decode step at the run's mean width."""
    return report.running_mean / report.decode_tok_s if report.decode_tok_s else None


def _prompt_share(report: RunReport) -> float:
    """Of the run's time."""
    return report.prompt_tokens / report.prefill_tok_s / report.seconds if report.prefill_tok_s else 0.0


def _table(runs: list[RunReport], gains: list[float], prompt: tuple[int, int], output: tuple[int, int]) -> Table:
    rows: list[list[object]] = []
    for i, (width, each) in enumerate(zip(WIDTHS, runs, strict=True)):
        assert each.kv is not None
        rows.append(
            [
                width,
                each.requests,
                number(each.output_tok_s),
                f"{gains[i - 1]:+.0f}" if i else "",
                ms(_step_s(each)),
                ms(each.itl_s.p50) if each.itl_s else "–",
                ms(each.itl_s.p99) if each.itl_s else "–",
                number(each.ttft_s.p50) if each.ttft_s else "–",
                number(each.e2e_s.p50) if each.e2e_s else "–",
                number(each.running_mean),
                number(100 * each.kv.occupancy_mean),
                number(100 * each.kv.occupancy_max),
                sum(each.kv.preemptions.values()),
            ]
        )
    columns = ["max_num_seqs", "requests", "output tok/s", "% per doubling", "decode step ms", "between tokens p50 ms"]
    columns += ["p99 ms", "first token p50 s", "end to end p50 s", "sequences a step", "blocks in use %", "most %"]
    columns.append("preemptions")
    note = (
        f"Prompts of {prompt[0]}–{prompt[1]} tokens and answers of {output[0]}–{output[1]}, all there from the start; "
        "narrow batches get fewer of them, as they take longer for each. First token and end to end include the wait "
        "for a place in the batch."
    )
    return Table("By width", columns, rows, note)


def _charts(runs: list[RunReport]) -> list[Chart]:
    widths: list[float | str] = list(WIDTHS)
    rates = [each.output_tok_s for each in runs]
    ideal = [rates[0] * width for width in WIDTHS]
    shown = [(w, y) for w, y in zip(WIDTHS, ideal, strict=True) if y <= 1.6 * max(rates)]
    return [
        Chart(
            "line",
            "Throughput",
            "max_num_seqs",
            "output tokens/s",
            [
                Series("measured", widths, rates),
                Series("if every sequence were free", [w for w, _ in shown], [y for _, y in shown]),
            ],
            log_x=True,
            log_y=True,
        ),
        Chart(
            "line",
            "What each user sees",
            "max_num_seqs",
            "ms between tokens",
            [
                Series(name, widths, [1e3 * getattr(each.itl_s, p) if each.itl_s else math.nan for each in runs])
                for name, p in (("median", "p50"), ("slowest percent", "p99"))
            ],
            log_x=True,
            log_y=True,
        ),
        Chart(
            "grouped_bar",
            "Blocks of the KV cache in use",
            "max_num_seqs",
            "percent of blocks",
            [
                Series("mean", [str(w) for w in WIDTHS], [100 * e.kv.occupancy_mean if e.kv else 0.0 for e in runs]),
                Series("most", [str(w) for w in WIDTHS], [100 * e.kv.occupancy_max if e.kv else 0.0 for e in runs]),
            ],
        ),
    ]


def _findings(runs: list[RunReport], gains: list[float], at: int | None) -> list[Finding]:
    rates = [each.output_tok_s for each in runs]
    p50 = [each.itl_s.p50 if each.itl_s else math.nan for each in runs]
    return [
        Finding(
            "Up to 16 sequences nearly come for free: each doubling brings at least half again as much.",
            f"{gains[0]:+.0f} % a doubling from 1 to 4, {gains[1]:+.0f} % from 4 to 16.",
            min(gains[:2]) >= 50,
        ),
        Finding(
            f"Throughput saturates: from some width on no doubling brings {SATURATED_PERCENT:.0f} %.",
            f"At {WIDTHS[at]}: beyond it {listed([f'{g:+.1f} %' for g in gains[at:]])} a doubling."
            if at is not None
            else f"Not within these widths: the last doubling still brought {gains[-1]:+.0f} %.",
            at is not None,
        ),
        Finding(
            "Throughput is paid for in latency: the time between two tokens grows with the width.",
            f"Median {duration(p50[0])} at 1, {duration(p50[-1])} at {WIDTHS[-1]}: {times(p50[-1] / p50[0])}, for "
            f"{times(rates[-1] / rates[0])} the throughput.",
            p50[-1] > p50[0],
        ),
    ]


def _explain(runs: list[RunReport], gains: list[float], at: int | None, line: Line | None) -> list[str]:
    paragraphs = []
    if line is not None and line.slope_s > 0:
        paragraphs.append(
            f"A decode step takes about {duration(line.start_s)} whatever its width (the weights are read once for all "
            f"its sequences) and {duration(line.slope_s)} more for each sequence. Up to "
            f"{line.half_width:.0f} sequences the shared part is the larger one; far beyond that every further "
            f"sequence makes the step as much longer as it makes it wider, and by this line decoding alone approaches "
            f"one token per {duration(line.slope_s)}, about {about(1 / line.slope_s)} tok/s."
        )
    if at is None:
        paragraphs.append(_explain_no_end(runs, gains))
        return paragraphs
    here, wider = runs[at], runs[min(at + 1, len(runs) - 1)]
    assert wider.kv is not None
    reason = f"From {WIDTHS[at]} on a doubling brings less than {SATURATED_PERCENT:.0f} %. "
    lost = sum(wider.kv.preemptions.values())
    before, after = _step_s(here), _step_s(wider)
    if lost:
        reason += (
            f"The cache is the limit: at {WIDTHS[at + 1]} there were {counted(lost, 'preemption')}, and "
            f"{wider.kv.recomputed_tokens:,} tokens were computed twice. A larger cache would move the end further out."
        )
    elif wider.kv.occupancy_max > 0.97:
        reason += (
            f"The cache is the limit: at {WIDTHS[at + 1]} it is {100 * wider.kv.occupancy_max:.0f} % full, and only "
            f"{number(wider.running_mean)} sequences run in a step on average."
        )
    elif _prompt_share(wider) > 0.35:
        reason += (
            f"Prompts are the limit: they take {100 * _prompt_share(wider):.0f} % of the run at {WIDTHS[at + 1]} and "
            f"run at {number(wider.prefill_tok_s)} tok/s whatever the width; decoding alone still went from "
            f"{number(here.decode_tok_s)} to {number(wider.decode_tok_s)} tok/s. Longer answers would move the end out."
        )
    elif before and after and after / before > 1.3 * wider.running_mean / here.running_mean:
        reason += (
            f"{times(wider.running_mean / here.running_mean)} the sequences make the step {times(after / before)} as "
            f"long ({duration(before)} to {duration(after)}): a token costs more in the wider batch. Either its "
            "working set no longer fits the processor's caches, or something else ran on the machine meanwhile."
        )
    elif before and after and after / before > 0.6 * wider.running_mean / here.running_mean:
        reason += (
            f"Arithmetic is the limit: {times(wider.running_mean / here.running_mean)} the sequences make the step "
            f"{times(after / before)} as long ({duration(before)} to {duration(after)}), so a token costs nearly what "
            f"it did. The cache is not the limit: at most {100 * wider.kv.occupancy_max:.0f} % of its blocks are in "
            "use, and nothing was preempted."
        )
    elif wider.running_mean < 0.6 * WIDTHS[at + 1]:
        reason += (
            f"The work is the limit: at {WIDTHS[at + 1]} only {number(wider.running_mean)} sequences run in a step on "
            f"average, because prompts enter a step's budget at a time and the batch thins out at its end."
        )
    else:
        share = wider.time_s.get("forward", 0.0) / wider.seconds
        reason += (
            f"At {WIDTHS[at + 1]} the model itself runs for {100 * share:.0f} % of the time and prompts take "
            f"{100 * _prompt_share(wider):.0f} %; no single limit stands out."
        )
    paragraphs.append(reason)
    first, last = runs[at].itl_s, runs[-1].itl_s
    if first and last and at < len(runs) - 1:
        paragraphs.append(
            f"Going on to {WIDTHS[-1]} all the same changes throughput to "
            f"{100 * runs[-1].output_tok_s / here.output_tok_s:.0f} % and the time between a user's tokens from "
            f"{duration(first.p50)} to {duration(last.p50)} (p99 {duration(first.p99)} to {duration(last.p99)})."
        )
    return paragraphs


def _explain_no_end(runs: list[RunReport], gains: list[float]) -> str:
    before, last = runs[-2], runs[-1]
    text = f"It has not ended at {WIDTHS[-1]}: from {WIDTHS[-2]} on each doubling still brings {gains[-1]:.0f} %"
    if last.running_mean < 0.8 * WIDTHS[-1]:
        text += (
            f", though only {number(last.running_mean)} sequences run in a step there on average, because prompts "
            "enter a step's budget at a time and the batch thins out at its end"
        )
    if before.decode_tok_s and last.decode_tok_s:
        text += (
            f". Decoding alone went from {number(before.decode_tok_s)} to {number(last.decode_tok_s)} tok/s; prompts, "
            f"which a wider batch does not make faster, take {100 * _prompt_share(last):.0f} % of the run at "
            f"{WIDTHS[-1]}"
        )
    return text + "."
