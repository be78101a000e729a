"""Experiment: memory pressure. Half the blocks that the work needs; preemption by recompute, by swap, and chosen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.bench.charts import Chart, Series
from quire.bench.units import change, counted, duration, number, size, times
from quire.lab.context import LabContext, fastest, record, run_of
from quire.lab.lengths import even_lengths
from quire.lab.result import Finding, Result, Table

if TYPE_CHECKING:
    from quire.bench.report import KVReport, RunReport

KEY = "pressure"
TITLE = "Memory pressure: half the blocks"

_MODES = ("recompute", "swap", "auto")
_NAMES = ("enough blocks", "recompute", "swap", "chosen (auto)")


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    num, prompt, output = _work(context)
    work = even_lengths(context.vocab, context.seed + 4, num, prompt, output)
    limits = {"max_num_seqs": num, "max_num_batched_tokens": context.pick(512, 512, 8192)}
    first = context.measure(context.engine(preemption="recompute", **limits), work, _NAMES[0])
    half = max(_kv(first).peak_blocks // 2, -(-(prompt[1] + output[1]) // _kv(first).block_size) + 2)
    found: list[list[RunReport]] = [[first], [], [], []]
    swap_rate = None
    for number_of in range(context.pick(1, 2, 1)):
        if number_of:
            found[0].append(context.measure(context.engine(preemption="recompute", **limits), work, _NAMES[0]))
        for mode, name, runs in zip(_MODES, _NAMES[1:], found[1:], strict=True):
            engine = context.engine(num_blocks=half, preemption=mode, **limits)
            swap_rate = engine.built.executor.swap_bytes_per_s
            runs.append(context.measure(engine, work, f"{half} blocks, {name}"))
    runs = [fastest(rounds) for rounds in found]
    result = Result(
        key=KEY,
        title=TITLE,
        question="When the sequences that were let in no longer fit as they grow, somebody must give blocks back. What "
        "does it cost to compute them again, to keep them in host memory meanwhile, or to let the engine choose?",
        charts=_charts(runs),
        data={
            "num_blocks": half,
            "swap_bytes_per_s": swap_rate,
            "measured": [record(each) for each in runs],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def tell(result: Result, context: LabContext) -> None:
    """Table and words, from the data."""
    data, (_, prompt, output) = result.data, _work(context)
    runs = [run_of(each) for each in data["measured"]]
    best = max(runs[1:], key=lambda each: each.output_tok_s)
    result.tables = [_table(runs, prompt, output)]
    result.findings = _findings(runs)
    result.explanation = _explain(runs, data["num_blocks"], data["swap_bytes_per_s"])
    only = [mode for mode, count in _kv(runs[3]).preemptions.items() if count]
    if len(only) == 1 and result.charts:
        mode = only[0]
        result.charts[-1].note = f"Left to choose, the engine took {mode} every time: one line may hide the other."
    data["headline"] = (
        f"with half the blocks {_NAMES[runs.index(best)]} keeps {_kept(best, runs[0])} of the throughput; recompute "
        f"ran {_kv(runs[1]).recomputed_tokens:,} tokens twice"
    )


def _work(context: LabContext) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Requests, and the lengths of prompts and answers: from, to."""
    return context.pick((16, (12, 24), (32, 56)), (32, (32, 64), (96, 160)), (64, (256, 512), (384, 640)))


def _kept(run: RunReport, enough: RunReport) -> str:
    """Of the throughput. Fewer blocks make nothing faster: more than all of it is the machine's wandering."""
    ratio = run.output_tok_s / enough.output_tok_s
    return f"{100 * ratio:.0f} %" if ratio < 1.005 else "all"


def _kv(report: RunReport) -> KVReport:
    assert report.kv is not None
    return report.kv


def _preemptions(report: RunReport) -> int:
    return sum(_kv(report).preemptions.values())


def _table(runs: list[RunReport], prompt: tuple[int, int], output: tuple[int, int]) -> Table:
    rows: list[list[object]] = []
    for name, each in zip(_NAMES, runs, strict=True):
        kv = _kv(each)
        rows.append(
            [
                name,
                kv.num_blocks,
                number(each.output_tok_s),
                f"{100 * each.output_tok_s / runs[0].output_tok_s:.0f}",
                number(each.running_mean),
                kv.preemptions.get("recompute", 0),
                kv.preemptions.get("swap", 0),
                kv.recomputed_tokens,
                size(kv.swapped_out_blocks * kv.block_bytes),
                number(each.e2e_s.p50) if each.e2e_s else "–",
                number(each.e2e_s.p99) if each.e2e_s else "–",
                ms_p99(each),
            ]
        )
    columns = ["preemption", "blocks", "output tok/s", "% of enough", "sequences a step", "recomputes", "swaps"]
    columns += ["tokens run twice", "swapped out", "end to end p50 s", "p99 s", "between tokens p99 ms"]
    note = (
        f"{counted(runs[0].requests, 'request')}, prompts of {prompt[0]}–{prompt[1]} tokens, answers of "
        f"{output[0]}–{output[1]}, all at once. Half the blocks is half of what they took at the fullest."
    )
    return Table("The same requests", columns, rows, note)


def ms_p99(report: RunReport) -> str:
    return number(1e3 * report.itl_s.p99) if report.itl_s else "–"


def _charts(runs: list[RunReport]) -> list[Chart]:
    names: list[float | str] = list(_NAMES)

    def curve(name: str, report: RunReport) -> Series:
        return Series(name, [s.t_s for s in report.samples], [float(s.running) for s in report.samples])

    return [
        Chart("bar", "Throughput", "", "output tokens/s", [Series("tok/s", names, [e.output_tok_s for e in runs])]),
        Chart(
            "stacked_bar",
            "Tokens that were computed",
            "",
            "tokens",
            [
                Series("once", names, [float(each.prompt_tokens + each.output_tokens) for each in runs]),
                Series("again, after a preemption", names, [float(_kv(each).recomputed_tokens) for each in runs]),
            ],
        ),
        Chart(
            "line",
            "Sequences running over time",
            "seconds",
            "sequences",
            [curve(name, each) for name, each in zip(_NAMES, runs, strict=True)],
        ),
    ]


def _findings(runs: list[RunReport]) -> list[Finding]:
    enough, recompute, swap, auto = runs
    fixed = max(recompute.output_tok_s, swap.output_tok_s)
    worse = min(recompute.output_tok_s, swap.output_tok_s)
    chosen = _kv(auto).preemptions
    return [
        Finding(
            "With enough blocks nobody is preempted; with half of them somebody is, and everybody is served.",
            f"{_preemptions(enough)} against {', '.join(str(_preemptions(each)) for each in runs[1:])} preemptions; "
            f"{', '.join(str(each.completed) for each in runs)} of {enough.requests} requests done.",
            not _preemptions(enough)
            and all(_preemptions(each) for each in runs[1:])
            and all(each.completed == enough.requests for each in runs),
        ),
        Finding(
            "Recompute runs tokens again and moves nothing; swap moves blocks and runs nothing again.",
            f"Recompute: {_kv(recompute).recomputed_tokens:,} tokens run twice, {_kv(recompute).swapped_out_blocks} "
            f"blocks moved. Swap: {_kv(swap).recomputed_tokens:,} tokens, {_kv(swap).swapped_out_blocks} blocks out, "
            f"{_kv(swap).swapped_in_blocks} back.",
            _kv(recompute).recomputed_tokens > 0
            and not _kv(recompute).swapped_out_blocks
            and not _kv(swap).recomputed_tokens
            and _kv(swap).swapped_out_blocks > 0,
        ),
        Finding(
            "Left to choose, the engine is near the better of the two (within 7 %).",
            f"{number(auto.output_tok_s)} tok/s; {number(fixed)} and {number(worse)} by fixed choice. It chose "
            f"recompute {chosen.get('recompute', 0)} and swap {chosen.get('swap', 0)} times.",
            auto.output_tok_s >= 0.93 * fixed,
        ),
        Finding(
            "Half the memory costs less than half the throughput.",
            f"At best {_kept(max(runs[1:], key=lambda each: each.output_tok_s), enough)} of it remains.",
            max(fixed, auto.output_tok_s) > 0.5 * enough.output_tok_s,
        ),
    ]


def _explain(runs: list[RunReport], half: int, swap_rate: float | None) -> list[str]:
    enough, recompute, swap, auto = runs
    kv = _kv(swap)
    narrow = swap.running_mean / enough.running_mean
    width_text = (
        f"Half the blocks ({half:,}) hold {number(swap.running_mean)} sequences a step instead of "
        f"{number(enough.running_mean)}, and a narrower step shares its weights among fewer"
    )
    kept = swap.output_tok_s / enough.output_tok_s
    paragraphs = [
        f"{width_text}: with swap, which computes nothing twice, {100 * kept:.0f} % of the throughput is left at "
        f"{100 * narrow:.0f} % of the width. "
        + (
            "What is lost cannot be told from the noise: this machine does not need the width."
            if kept > 0.97
            else "Most of the loss is width, not preemption."
            if kept > narrow * 0.9
            else "That is less than the width alone explains: moving blocks and waiting for them costs the rest."
        )
    ]
    again = _kv(recompute).recomputed_tokens
    total = recompute.prompt_tokens + recompute.output_tokens
    lost_s = recompute.seconds - swap.seconds
    rate = recompute.prefill_tok_s or enough.prefill_tok_s
    owed = f", which at {number(rate)} prompt tok/s is {duration(again / rate)}" if rate else ""
    paragraphs.append(
        f"Recompute preempts {counted(_preemptions(recompute), 'time')} and runs {again:,} tokens again, "
        f"{100 * again / total:.0f} % on top of the work{owed}; it takes {duration(abs(lost_s))} "
        f"{'longer' if lost_s > 0 else 'less'} than swap ({change(recompute.output_tok_s / swap.output_tok_s)} "
        "throughput)."
    )
    token_bytes = kv.block_bytes / kv.block_size
    if swap_rate and rate:
        there_and_back, computed = 2 * token_bytes / swap_rate, 1 / rate
        cheaper = "swap" if there_and_back < computed else "recompute"
        paragraphs.append(
            f"The arithmetic behind the choice: a token's {size(token_bytes)} go out and back in "
            f"{duration(there_and_back)} at {size(swap_rate)}/s; computing it again takes {duration(computed)} at "
            f"{number(rate)} tok/s. {cheaper.capitalize()} is cheaper by "
            f"{times(max(there_and_back, computed) / min(there_and_back, computed))}, and auto chose it in "
            f"{_kv(auto).preemptions.get(cheaper, 0)} of {_preemptions(auto)} cases"
            + (
                "."
                if _kv(auto).preemptions.get(cheaper, 0) >= 0.5 * _preemptions(auto)
                else ": it also counts what waits behind, and prompts whose blocks are cached."
            )
        )
    return paragraphs
