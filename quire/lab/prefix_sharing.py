"""Experiment: sharing. A repeated system prompt with the prefix cache on and off; n = 4 answers to one prompt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.bench.charts import Chart, Series
from quire.bench.units import counted, duration, number, size, times
from quire.bench.workloads import Workload, shared_prefix
from quire.lab.context import LabContext, record, run_of
from quire.lab.lengths import even_lengths
from quire.lab.result import Finding, Result, Table

if TYPE_CHECKING:
    from quire.bench.report import KVReport, RunReport

KEY = "prefix-sharing"
TITLE = "Sharing: a repeated system prompt, and n = 4"

N = 4


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    num, prefix, suffix, num_out = _system_prompt(context)
    width, budget = context.pick(16, 32, 256), context.pick(512, 512, 8192)
    limits = {"max_num_seqs": width, "max_num_batched_tokens": budget}
    work = shared_prefix(context.vocab, context.seed + 2, num, prefix, suffix, num_out)
    pair = [
        context.measure(context.engine(enable_prefix_caching=on, **limits), work, name)
        for on, name in ((False, "prefix cache off"), (True, "prefix cache on"))
    ]
    num_prompts, prompt_len, answer_len = _forks(context)
    prompts = even_lengths(context.vocab, context.seed + 3, num_prompts, (prompt_len,) * 2, (answer_len,) * 2)
    apart = [request for request in prompts for _ in range(N)]
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": context.seed}
    forked = [
        context.measure(
            context.engine(enable_prefix_caching=False, **limits),
            apart,
            f"{N} requests each, nothing shared",
            sampling=sampling,
        ),
        context.measure(
            context.engine(enable_prefix_caching=False, **limits),
            prompts,
            f"one request each, n = {N}",
            sampling={**sampling, "n": N},
        ),
    ]
    block_size = _kv(pair[0]).block_size
    result = Result(
        key=KEY,
        title=TITLE,
        question="What is it worth to keep the keys and values of a system prompt that every request repeats, and of a "
        f"prompt that is answered {N} times?",
        charts=_charts(pair, forked),
        data={
            "expected_copies": expected_copies(prompts, block_size),
            "measured": [record(each) for each in (*pair, *forked)],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def tell(result: Result, context: LabContext) -> None:
    """Tables and words, from the data."""
    runs, copies = [run_of(each) for each in result.data["measured"]], result.data["expected_copies"]
    pair, forked = runs[:2], runs[2:]
    num, prefix, suffix, num_out = _system_prompt(context)
    _, prompt_len, answer_len = _forks(context)
    title = f"{num} requests that share {prefix:,} of their {prefix + suffix:,} prompt tokens, {num_out} out"
    result.tables = [_table(title, pair, ["off", "on"]), _fork_table(forked, prompt_len, answer_len)]
    result.findings = _findings(pair, forked, prefix, suffix, num, copies)
    result.explanation = _explain(pair, forked, prompt_len, copies)
    gain = pair[1].output_tok_s / pair[0].output_tok_s
    result.data["headline"] = (
        f"the prefix cache brings {times(gain)} the throughput and "
        f"{100 * (1 - _peak(pair[1]) / _peak(pair[0])):.0f} % fewer blocks; with n = {N} there are "
        f"{100 * (1 - _peak(forked[1]) / _peak(forked[0])):.0f} % fewer"
    )


def _system_prompt(context: LabContext) -> tuple[int, int, int, int]:
    """Requests, tokens that all of them share, tokens of their own, tokens out."""
    return context.pick((12, 192, 16, 16), (32, 448, 32, 48), (256, 2048, 64, 64))


def _forks(context: LabContext) -> tuple[int, int, int]:
    """Prompts, their length, and that of each of their n answers."""
    return context.pick((4, 72, 20), (8, 136, 64), (48, 520, 128))


def expected_copies(prompts: Workload, block_size: int) -> int:
    """All n write on where the prompt ends. Where that is inside a block, all but the last writer copy it first."""
    return sum((N - 1) * (len(prompt) % block_size != 0) for prompt, _ in prompts)


def _kv(report: RunReport) -> KVReport:
    assert report.kv is not None
    return report.kv


def _peak(report: RunReport) -> int:
    return max(1, _kv(report).peak_blocks)


def _is_full(report: RunReport) -> bool:
    return _kv(report).peak_blocks > 0.98 * _kv(report).num_blocks


def _computed(report: RunReport) -> int:
    return report.prompt_tokens - _kv(report).prefix_hit_tokens


def _table(title: str, runs: list[RunReport], names: list[str]) -> Table:
    rows: list[list[object]] = []
    for name, each in zip(names, runs, strict=True):
        kv = _kv(each)
        rows.append(
            [
                name,
                number(each.output_tok_s),
                number(each.total_tok_s),
                number(each.running_mean),
                number(each.ttft_s.p50) if each.ttft_s else "–",
                number(each.ttft_s.p99) if each.ttft_s else "–",
                _computed(each),
                f"{100 * kv.prefix_hit_rate:.1f}",
                kv.peak_blocks,
                size(kv.peak_blocks * kv.block_bytes),
                kv.table_entries_max,
            ]
        )
    columns = ["prefix cache", "output tok/s", "in and out tok/s", "sequences a step", "first token p50 s", "p99 s"]
    columns += ["prompt tokens run", "hits %", "most blocks", "as memory", "table entries"]
    note = (
        "In and out counts prompt tokens that were found as well. More table entries than blocks: several tables name "
        "the same block."
    )
    return Table(title, columns, rows, note)


def _fork_table(runs: list[RunReport], prompt_len: int, answer_len: int) -> Table:
    rows: list[list[object]] = []
    for each in runs:
        kv = _kv(each)
        first = number(each.ttft_s.p50) if each.ttft_s else "–"
        rows.append([each.workload, number(each.output_tok_s), first, each.prompt_tokens, kv.peak_blocks])
        rows[-1] += [kv.forks, kv.copies]
    columns = ["", "output tok/s", "first token p50 s", "prompt tokens run", "most blocks", "forks", "copies on write"]
    title = f"{counted(runs[1].requests, 'prompt')} of {prompt_len} tokens, {N} answers of {answer_len} each"
    return Table(title, columns, rows, "The prefix cache is off in both, so that only forking shares.")


def _charts(pair: list[RunReport], forked: list[RunReport]) -> list[Chart]:
    def curve(name: str, report: RunReport) -> Series:
        kv = _kv(report)
        blocks = [s.kv_usage * kv.num_blocks for s in report.samples]
        return Series(name, [s.t_s for s in report.samples], blocks)

    names: list[float | str] = ["system prompt", f"n = {N}"]
    return [
        Chart(
            "grouped_bar",
            "Most blocks in use",
            "",
            "blocks",
            [
                Series("nothing shared", names, [float(_peak(pair[0])), float(_peak(forked[0]))]),
                Series("shared", names, [float(_peak(pair[1])), float(_peak(forked[1]))]),
            ],
        ),
        Chart(
            "area",
            "The system prompt's run: blocks in use over time",
            "seconds",
            "blocks",
            [curve("prefix cache off", pair[0]), curve("prefix cache on", pair[1])],
        ),
        Chart(
            "grouped_bar",
            "Output tokens per second",
            "",
            "tokens/s",
            [
                Series("nothing shared", names, [pair[0].output_tok_s, forked[0].output_tok_s]),
                Series("shared", names, [pair[1].output_tok_s, forked[1].output_tok_s]),
            ],
        ),
    ]


def _findings(
    pair: list[RunReport], forked: list[RunReport], prefix: int, suffix: int, num: int, copies: int
) -> list[Finding]:
    off, on = pair
    kv = _kv(on)
    # All but the first requests find the prefix's whole blocks.
    best = (num - 1) * (prefix // kv.block_size * kv.block_size) / (num * (prefix + suffix))
    rate = kv.prefix_hit_rate
    found = _kv(forked[1])
    return [
        Finding(
            "The prefix cache raises throughput and brings the first token sooner.",
            f"{number(on.output_tok_s)} against {number(off.output_tok_s)} tok/s"
            + (f", first token {duration(_p50(on))} against {duration(_p50(off))}." if _ttft(pair) else "."),
            on.output_tok_s > off.output_tok_s and (not _ttft(pair) or _p50(on) < _p50(off)),
        ),
        Finding(
            f"At best {100 * best:.1f} % of the prompt tokens are found: whole blocks, none for who comes first.",
            f"{100 * rate:.1f} %."
            + ("" if rate > best - 0.02 else " Requests of the first step came before there was anything to find."),
            rate <= best + 1e-9 and rate > 0.5 * best,
        ),
        Finding(
            "Sharing saves blocks: the most in use falls by more than a third.",
            f"{_peak(on):,} instead of {_peak(off):,} with the system prompt, {_peak(forked[1]):,} instead of "
            f"{_peak(forked[0]):,} with n = {N}."
            + (" Unshared, the cache is full: with more of it more would be in use." if _is_full(off) else ""),
            _peak(on) < 0.67 * _peak(off) and _peak(forked[1]) < _peak(forked[0]),
        ),
        Finding(
            f"With n = {N} exactly {copies} blocks are copied: all answers but one copy the partly filled block in "
            "which their prompt ends, when they write to it.",
            f"{counted(found.copies, 'block')} copied, {counted(found.forks, 'fork')}.",
            found.copies == copies,
        ),
    ]


def _ttft(reports: list[RunReport]) -> bool:
    return all(each.ttft_s is not None for each in reports)


def _p50(report: RunReport) -> float:
    return report.ttft_s.p50 if report.ttft_s else 0.0


def _explain(
    pair: list[RunReport],
    forked: list[RunReport],
    prompt_len: int,
    copies: int,
) -> list[str]:
    off, on = pair
    saved = _computed(off) - _computed(on)
    rate = off.prefill_tok_s or 0.0
    gain = on.output_tok_s / off.output_tok_s
    paragraphs = [
        f"Off, all {off.prompt_tokens:,} prompt tokens are computed; on, {_computed(on):,}. The {saved:,} that are "
        f"found instead would take {duration(saved / rate) if rate else 'their time'} at this machine's "
        f"{number(rate)} prompt tokens a second, and the run is {duration(max(0.0, off.seconds - on.seconds))} shorter "
        f"({times(gain)} the throughput). "
        + (
            "Prompts were most of the work, so most of the work is gone."
            if gain > 2
            else "The decode steps, which no cache spares, are the larger part of the rest."
        )
    ]
    shared, entries = _peak(on), _kv(on).table_entries_max
    if entries > shared:
        text = (
            f"On, {entries:,} table entries name {shared:,} blocks at the fullest: a block of the system prompt is "
            f"stored once and named by every request that runs. Without sharing each entry would be a block: the same "
            f"requests at once would take {times(entries / shared)} as many."
        )
        if _is_full(off):
            text += (
                f" Off, they do not fit: the cache is full, {number(off.running_mean)} sequences run in a step on "
                f"average instead of {number(on.running_mean)}, and the rest wait; that is part of the difference in "
                "throughput."
            )
        paragraphs.append(text)
    fewer = 1 - _peak(forked[1]) / _peak(forked[0])
    faster = forked[1].output_tok_s / forked[0].output_tok_s
    inside = prompt_len % _kv(on).block_size
    paragraphs.append(
        f"n = {N} runs each prompt once and forks it: {forked[1].prompt_tokens:,} prompt tokens instead of "
        f"{forked[0].prompt_tokens:,}, {100 * fewer:.0f} % fewer blocks at the fullest, {times(faster)} the "
        "throughput. "
        + (
            f"A prompt of {prompt_len} tokens ends {inside} tokens into a block that all {N} then want to write to: "
            f"{N - 1} of them take a copy, the last keeps the original. {copies} copies in all, where {N} separate "
            f"prompts would have stored {_peak(forked[0]) - _peak(forked[1]):,} more blocks."
            if inside
            else "The prompts end where a block ends, so nobody has to copy anything."
        )
    )
    return paragraphs
