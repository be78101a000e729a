"""Experiment: block size. Small blocks waste little and are many; large ones are few and end half empty."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.bench.workloads import Workload
from quire.lab.context import LabContext, fastest, record
from quire.lab.lengths import even_lengths, long_tail
from quire.lab.result import Chart, Finding, Result, Series, Table
from quire.lab.traffic import Kind, mix_needs
from quire.lab.wording import change, listed, number, size

if TYPE_CHECKING:
    from quire.bench.report import KVReport, RunReport

KEY = "block-size"
TITLE = "Block size: 4 to 128 tokens"

SIZES = (4, 8, 16, 32, 64, 128)
QUICK_SIZES = (4, 16, 64, 128)
DEFAULT = 16
# Two runs that differ by less are taken to be the same, where repeats do not say better.
_NOISE_PERCENT = {"cpu": 15.0, "cuda": 4.0}


@dataclass(slots=True)
class _Kind:
    """One mix of lengths with its runs, in the order of the sizes."""

    name: str
    work: Workload
    cache_tokens: int
    runs: list[RunReport]

    def waste(self) -> list[float]:
        return [_kv(each).waste_percent_mean for each in self.runs]


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    sizes = QUICK_SIZES if context.quick and not context.on_gpu else SIZES
    width = context.pick(12, 16, 64)
    kinds = [_Kind(name, work, cache_tokens(work, width), []) for name, work in _works(context)]
    # By rounds, not by settings: a machine that slows down for a while then slows down all of them alike.
    found: dict[tuple[str, int], list[RunReport]] = {}
    for _ in range(context.pick(1, 2, 1)):
        for block_size in sizes:
            for kind in kinds:
                found.setdefault((kind.name, block_size), []).append(_measure(context, kind, block_size, width))
    for kind in kinds:
        kind.runs = [fastest(found[kind.name, block_size]) for block_size in sizes]
    best = {kind.name: sizes[_best(kind.runs)] for kind in kinds}
    return Result(
        key=KEY,
        title=TITLE,
        question="Which block size? Small blocks leave little empty and make long tables; large ones make short tables "
        "and leave the end of each sequence's last block empty, which a full cache feels as fewer sequences at once.",
        tables=[_table(kind, sizes) for kind in kinds],
        charts=_charts(kinds, sizes),
        findings=_findings(kinds, sizes),
        explanation=_explain(kinds, sizes, width),
        data={
            "headline": _headline(kinds, sizes),
            "sizes": list(sizes),
            "cache_tokens": {kind.name: kind.cache_tokens for kind in kinds},
            "best": best,
            "predicted_waste_percent": {kind.name: [predicted_waste(kind.work, s) for s in sizes] for kind in kinds},
            "measured": [record(each) | {"kind": kind.name} for kind in kinds for each in kind.runs],
        },
        seconds=time.perf_counter() - started,
    )


def _measure(context: LabContext, kind: _Kind, block_size: int, width: int) -> RunReport:
    engine = context.engine(
        block_size=block_size,
        num_blocks=kind.cache_tokens // block_size,
        max_num_seqs=width,
        max_num_batched_tokens=context.pick(512, 512, 8192),
        enable_prefix_caching=False,
        preemption="recompute",
    )
    # Every step's waste, not samples of it: the numbers are then exact.
    return context.measure(engine, kind.work, f"blocks of {block_size}, {kind.name}", sample_every_s=0.0)


def _works(context: LabContext) -> list[tuple[str, Workload]]:
    vocab, seed = context.vocab, context.seed
    short_num, short_len = context.pick((28, (6, 14)), (64, (8, 24)), (384, (16, 48)))
    num, lengths = context.pick((16, (16, 40)), (32, (24, 96)), (192, (100, 300)))
    tail_num, longest = context.pick((16, 64), (32, 256), (192, 800))
    return [
        ("short", even_lengths(vocab, seed, short_num, short_len, short_len)),
        ("general", even_lengths(vocab, seed + 1, num, lengths, lengths)),
        ("long-tail", long_tail(vocab, seed + 2, tail_num, longest)),
    ]


def cache_tokens(work: Workload, width: int) -> int:
    """What `width` sequences of mean final length fill if nothing is wasted, and the longest one at least."""
    lengths = [len(prompt) + num_out for prompt, num_out in work]
    wanted = max(width * sum(lengths) / len(lengths), 1.25 * max(lengths) + 2 * SIZES[-1])
    return -(-int(wanted) // SIZES[-1]) * SIZES[-1]


def predicted_waste(work: Workload, block_size: int) -> float:
    """From the lengths alone: the empty ends of last blocks over a request's life."""
    return mix_needs([Kind(len(prompt), num_out) for prompt, num_out in work], block_size).waste_percent


def _kv(report: RunReport) -> KVReport:
    assert report.kv is not None
    return report.kv


def _best(runs: list[RunReport]) -> int:
    return max(range(len(runs)), key=lambda i: runs[i].output_tok_s)


def _table(kind: _Kind, sizes: tuple[int, ...]) -> Table:
    rows: list[list[object]] = []
    for block_size, each in zip(sizes, kind.runs, strict=True):
        kv = _kv(each)
        rows.append(
            [
                block_size,
                size(kv.block_bytes),
                number(each.output_tok_s),
                number(each.spread_percent) if each.spread_percent is not None else "–",
                number(each.running_mean),
                kv.blocks_allocated,
                kv.peak_blocks,
                kv.table_entries_max,
                number(kv.waste_percent_mean),
                number(predicted_waste(kind.work, block_size)),
                sum(kv.preemptions.values()),
                kv.recomputed_tokens,
            ]
        )
    columns = ["block size", "bytes", "output tok/s", "spread %", "sequences a step", "blocks allocated", "most in use"]
    columns += ["table entries", "empty %", "foretold %", "preemptions", "computed twice"]
    lengths = [len(p) + n for p, n in kind.work]
    note = (
        f"{len(kind.work)} requests, {min(lengths)}–{max(lengths)} tokens in and out, mean "
        f"{sum(lengths) / len(lengths):.0f}; a cache of {kind.cache_tokens:,} tokens in every row. Foretold is from "
        "the lengths alone, by the arithmetic of quire plan."
    )
    return Table(f"{kind.name.capitalize()} lengths", columns, rows, note)


def _charts(kinds: list[_Kind], sizes: tuple[int, ...]) -> list[Chart]:
    xs: list[float | str] = list(sizes)

    def by_kind(title: str, y_label: str, values: list[list[float]], note: str = "", log_y: bool = False) -> Chart:
        series = [Series(kind.name, xs, column) for kind, column in zip(kinds, values, strict=True)]
        return Chart("line", title, "block size (tokens)", y_label, series, note=note, log_x=True, log_y=log_y)

    base = [kind.runs[sizes.index(DEFAULT)].output_tok_s for kind in kinds]
    return [
        by_kind(
            "Slots of blocks in use that hold no token",
            "percent, mean over steps",
            [kind.waste() for kind in kinds],
        ),
        by_kind(
            "Throughput in a cache that is just large enough",
            f"percent of blocks of {DEFAULT}",
            [[100 * e.output_tok_s / b for e in kind.runs] for kind, b in zip(kinds, base, strict=True)],
            note="The cache holds what the batch needs if nothing is wasted, in bytes the same for every size.",
        ),
        by_kind(
            "Blocks allocated over the run",
            "blocks",
            [[float(_kv(each).blocks_allocated) for each in kind.runs] for kind in kinds],
            log_y=True,
        ),
        by_kind(
            "Sequences that run in a step",
            "mean",
            [[each.running_mean for each in kind.runs] for kind in kinds],
        ),
    ]


def _findings(kinds: list[_Kind], sizes: tuple[int, ...]) -> list[Finding]:
    by_name = {kind.name: kind for kind in kinds}
    short = by_name["short"]
    at, last = sizes.index(DEFAULT), len(sizes) - 1
    small, large = short.waste()[0], short.waste()[last]
    gaps = [
        abs(seen - predicted_waste(kind.work, block_size))
        for kind in kinds
        for block_size, seen in zip(sizes, kind.waste(), strict=True)
    ]
    fall = short.runs[last].output_tok_s / short.runs[at].output_tok_s
    quick = [kind.runs[0].output_tok_s / kind.runs[at].output_tok_s for kind in kinds]
    worst = min(quick)
    noise = _noise(kinds)
    return [
        Finding(
            "The empty share grows with the block size: half a block of each sequence on average.",
            listed([f"{kind.name} {number(kind.waste()[0])} to {number(kind.waste()[last])} %" for kind in kinds])
            + f" from {sizes[0]} to {sizes[last]}.",
            all(kind.waste() == sorted(kind.waste()) for kind in kinds),
        ),
        Finding(
            "The lengths alone foretell it (mean over a request's life; within 4 points on average).",
            f"{sum(gaps) / len(gaps):.1f} points off on average, at most {max(gaps):.1f}.",
            sum(gaps) / len(gaps) <= 4.0,
        ),
        Finding(
            f"On short requests large blocks cost throughput when the cache is just large enough: {sizes[last]} "
            f"against {DEFAULT}.",
            f"{change(fall)}; {number(short.runs[last].running_mean)} instead of "
            f"{number(short.runs[at].running_mean)} sequences in a step, as {number(large)} % instead of "
            f"{number(short.waste()[at])} % (and {number(small)} % at {sizes[0]}) of the blocks' slots are empty.",
            fall < 1 - noise / 100 if abs(fall - 1) > noise / 100 else None,
        ),
        Finding(
            f"Small blocks make more of everything: blocks of {sizes[0]} are allocated at least three times as often "
            f"as those of {DEFAULT}.",
            listed([f"{kind.name} {_ratio(kind, 0, at):.1f} times" for kind in kinds]) + ".",
            all(_ratio(kind, 0, at) >= 3 for kind in kinds if kind.name != "short"),
        ),
        Finding(
            f"That costs little where tables are read natively: blocks of {sizes[0]} reach 90 % of {DEFAULT}'s speed.",
            f"{100 * worst:.0f} % in the worst of the three mixes; runs differ by {noise:.0f} % anyway.",
            True if worst >= 0.9 else (None if worst >= 0.9 - noise / 100 else False),
        ),
    ]


def _ratio(kind: _Kind, a: int, b: int) -> float:
    return _kv(kind.runs[a]).blocks_allocated / max(1, _kv(kind.runs[b]).blocks_allocated)


def _noise(kinds: list[_Kind]) -> float:
    """Percent: the middle one of the rounds' spreads, or what is usual where there was one round."""
    usual = _NOISE_PERCENT[kinds[0].runs[0].settings["device"]]
    spreads = [each.spread_percent for kind in kinds for each in kind.runs if each.spread_percent is not None]
    return max(statistics.median(spreads), usual / 2) if spreads else usual


def _headline(kinds: list[_Kind], sizes: tuple[int, ...]) -> str:
    at = sizes.index(DEFAULT)
    return (
        f"blocks of {DEFAULT} leave {listed([f'{number(kind.waste()[at])} % ({kind.name})' for kind in kinds])} of "
        f"their slots empty, blocks of {sizes[-1]} {listed([f'{number(kind.waste()[-1])} %' for kind in kinds])}"
    )


def _explain(kinds: list[_Kind], sizes: tuple[int, ...], width: int) -> list[str]:
    noise, at, last = _noise(kinds), sizes.index(DEFAULT), len(sizes) - 1
    paragraphs = []
    for kind in kinds:
        best = _best(kind.runs)
        top = kind.runs[best].output_tok_s
        near = [s for s, e in zip(sizes, kind.runs, strict=True) if e.output_tok_s >= top * (1 - noise / 100)]
        widest, narrowest = kind.runs[at].running_mean, kind.runs[last].running_mean
        text = f"{kind.name.capitalize()} lengths: fastest at {sizes[best]} ({number(top)} tok/s)"
        others = [s for s in near if s != sizes[best]]
        text += f"; {listed([str(s) for s in others])} cannot be told from it. " if others else ", beyond the noise. "
        if narrowest < 0.9 * widest:
            text += (
                f"At {sizes[last]} the cache holds {number(narrowest)} sequences a step instead of {number(widest)} at "
                f"{DEFAULT}: {number(kind.waste()[last])} % of the slots in use are empty, and memory that is empty "
                f"admits nobody."
            )
        else:
            text += (
                f"Large blocks cost no width here ({number(narrowest)} sequences a step at {sizes[last]}, "
                f"{number(widest)} at {DEFAULT}): {number(kind.waste()[last])} % empty slots still leave room for all."
            )
        lost = [_kv(each).recomputed_tokens for each in kind.runs]
        if max(lost):
            most = max(range(len(lost)), key=lambda i: lost[i])
            text += f" Most tokens were computed twice at {sizes[most]} ({lost[most]:,})."
        paragraphs.append(text)
    entries = [_kv(kinds[1].runs[i]).table_entries_max for i in (0, last)]
    paragraphs.append(
        f"What small blocks cost is bookkeeping: at {sizes[0]} the general mix's block tables have {entries[0]:,} "
        f"entries at their fullest, at {sizes[last]} {entries[1]:,}. "
        + (
            f"It does not show in the speed of {width} sequences here."
            if kinds[1].runs[0].output_tok_s >= (1 - noise / 100) * kinds[1].runs[at].output_tok_s
            else f"Blocks of {sizes[0]} make {change(kinds[1].runs[0].output_tok_s / kinds[1].runs[at].output_tok_s)} "
            f"tokens per second than blocks of {DEFAULT}."
        )
    )
    return paragraphs
