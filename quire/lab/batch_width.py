"""Experiment: how many sequences at once. Throughput, latency and occupancy by max_num_seqs, where it ends, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.bench.charts import bar_chart, line_chart
from quire.bench.report import RunReport
from quire.bench.units import about, duration, listed, ms, number, times, times_the
from quire.bench.workloads import even_lengths
from quire.lab.context import LabContext, record, run_of
from quire.lab.experiment import Data, Experiment, Finding, Result, kv_of, num_preemptions, percentile, run_table

WIDTHS = (1, 4, 16, 64, 256)
# A doubling that brings less than this is not worth its latency.
SATURATED_PERCENT = 15.0


def measure(context: LabContext) -> Data:
    num_requests = context.pick((6, 16, 40, 80, 256), (8, 24, 64, 192, 512), (6, 24, 96, 256, 512))
    runs = []
    for width, num in zip(WIDTHS, num_requests, strict=True):
        work = even_lengths(context.vocab, context.seed, num, *_lengths(context))
        engine = context.engine(max_num_seqs=width, max_num_batched_tokens=context.pick(512, 512, 8192))
        runs.append(context.measure(engine, work, f"max_num_seqs {width}"))
    gains = gains_per_doubling([each.output_tok_s for each in runs], WIDTHS)
    at = saturation(gains)
    line = fit_line([each.running_mean for each in runs], [_step_s(each) for each in runs])
    return {
        "widths": list(WIDTHS),
        "gain_per_doubling_percent": gains,
        "saturates_at": None if at is None else WIDTHS[at],
        "step_line_s": None if line is None else [line.start_s, line.slope_s],
        "measured": [record(each) for each in runs],
    }


def _lengths(context: LabContext) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shortest and longest prompt, and the shortest and longest answer."""
    return context.pick(((4, 12), (8, 20)), ((16, 48), (32, 64)), ((128, 384), (128, 384)))


@dataclass(slots=True, frozen=True)
class Line:
    """A decode step's time by its width: start_s + slope_s for each sequence."""

    start_s: float
    slope_s: float

    @property
    def half_width(self) -> float:
        """The width at which the sequences' own part is as large as what they share."""
        return self.start_s / self.slope_s if self.slope_s > 0 else math.inf


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
    """The time of a decode step at the run's mean width."""
    return report.running_mean / report.decode_tok_s if report.decode_tok_s else None


def _prompt_percent(report: RunReport) -> float:
    """The part of the run's time that prompts took."""
    return 100 * report.prompt_tokens / report.prefill_tok_s / report.seconds if report.prefill_tok_s else 0.0


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    runs, gains = [run_of(each) for each in data["measured"]], data["gain_per_doubling_percent"]
    at = None if data["saturates_at"] is None else WIDTHS.index(data["saturates_at"])
    rates = [each.output_tok_s for each in runs]
    p50 = [percentile(each.itl_s, "p50") or math.nan for each in runs]
    best = max(range(len(runs)), key=lambda i: rates[i])
    free = [(width, rates[0] * width) for width in WIDTHS if rates[0] * width <= 1.6 * max(rates)]
    prompt, output = _lengths(context)
    flag, names = "max_num_seqs", list(map(str, WIDTHS))
    free_line = ([width for width, _ in free], [rate for _, rate in free])
    throughput = {"measured": (list(WIDTHS), rates), "if every sequence were free": free_line}
    waits = {
        name: (WIDTHS, [1e3 * (percentile(each.itl_s, p) or math.nan) for each in runs])
        for name, p in (("median", "p50"), ("slowest percent", "p99"))
    }
    in_use = {
        "mean": [100 * kv_of(each).occupancy_mean for each in runs],
        "most": [100 * kv_of(each).occupancy_max for each in runs],
    }
    return Result(
        question="What do more sequences at once bring, what do they cost each user, and where does it end?",
        headline=f"{number(rates[best])} tok/s at {WIDTHS[best]}, {times(rates[best] / rates[0])} a single stream's"
        + ("" if at is None else f"; saturates at {WIDTHS[at]}"),
        charts=[
            line_chart("Throughput", flag, "output tokens/s", throughput, log="xy"),
            line_chart("What each user sees", flag, "ms between tokens", waits, log="xy"),
            bar_chart("Blocks of the KV cache in use", "percent of blocks", names, in_use, x_label=flag),
        ],
        tables=[
            run_table(
                "By width",
                runs,
                [
                    ("max_num_seqs", WIDTHS),
                    *("requests", "output tok/s"),
                    ("% per doubling", ["", *(f"{gain:+.0f}" for gain in gains)]),
                    ("decode step ms", [ms(_step_s(each)) for each in runs]),
                    *("between tokens p50 ms", "between tokens p99 ms", "first token p50 s", "end to end p50 s"),
                    "sequences a step",
                    ("prompts, % of the time", [number(_prompt_percent(each)) for each in runs]),
                    *("most in use %", "preemptions"),
                ],
                f"Prompts of {prompt[0]}–{prompt[1]} tokens and answers of {output[0]}–{output[1]}, all there from the "
                "start; narrow batches get fewer of them, as they take longer for each. First token and end to end "
                "include the wait for a place in the batch.",
            )
        ],
        findings=[
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
                f"{times_the(rates[-1] / rates[0], 'throughput')}.",
                p50[-1] > p50[0],
            ),
        ],
        explanation=[*_explain_line(data["step_line_s"]), _explain_end(runs, at)],
    )


def _explain_line(line_s: list[float] | None) -> list[str]:
    if line_s is None or line_s[1] <= 0:
        return []
    line = Line(*line_s)
    return [
        f"A decode step takes about {duration(line.start_s)} whatever its width (the weights are read once for all its "
        f"sequences) and {duration(line.slope_s)} more for each sequence. Up to {line.half_width:.0f} sequences the "
        "shared part is the larger one; far beyond that every further sequence makes the step as much longer as it "
        f"makes it wider, and by this line decoding alone approaches one token per {duration(line.slope_s)}, about "
        f"{about(1 / line.slope_s)} tok/s."
    ]


def _explain_end(runs: list[RunReport], at: int | None) -> str:
    """What limits the batch beyond the width at which it saturates, or beyond the last but one."""
    here = runs[-2 if at is None else at]
    wider = runs[-1 if at is None else min(at + 1, len(runs) - 1)]
    before, after = _step_s(here), _step_s(wider)
    slower = after / before if before and after else 0.0
    if at is None:
        return f"It has not ended at {WIDTHS[-1]}: the last doubling was still worth it."
    start = f"From {WIDTHS[at]} on a doubling brings less than {SATURATED_PERCENT:.0f} %."
    if num_preemptions(wider) or kv_of(wider).occupancy_max > 0.97:
        return f"{start} The cache is the limit: a larger one would move the end further out."
    if _prompt_percent(wider) > 35:
        return f"{start} Prompts are the limit: a wider batch does not make them faster; longer answers move the end."
    if slower > 0.6 * wider.running_mean / here.running_mean:
        return f"{start} Arithmetic is the limit: a token costs nearly as much in the wider step, or more."
    if wider.running_mean < 0.6 * WIDTHS[runs.index(wider)]:
        return f"{start} The work is the limit: prompts enter a budget at a time, and the batch thins out at its end."
    return f"{start} No single limit stands out."


EXPERIMENT = Experiment("batch-width", "Batch width: max_num_seqs from 1 to 256", measure, tell)
