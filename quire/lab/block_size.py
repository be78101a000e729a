"""Experiment: block size. Small blocks waste little and are many; large ones are few and end half empty."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.bench.charts import Chart, Series
from quire.bench.units import change, counted, listed, number, size
from quire.bench.workloads import Workload
from quire.lab.context import LabContext, fastest, record, run_of
from quire.lab.lengths import even_lengths, long_tail
from quire.lab.result import Finding, Result, Table
from quire.lab.traffic import Kind, mix_needs

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
    runs: list[RunReport]
    foretold: list[float]  # percent of slots empty, from the lengths alone

    def waste(self) -> list[float]:
        return [_kv(each).waste_percent_mean for each in self.runs]


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    sizes = QUICK_SIZES if context.quick and not context.on_gpu else SIZES
    width = _width(context)
    works = dict(_works(context))
    tokens = {name: cache_tokens(work, width) for name, work in works.items()}
    # By rounds, not by settings: a machine that slows down for a while then slows down all of them alike.
    found: dict[tuple[str, int], list[RunReport]] = {}
    for _ in range(context.pick(1, 2, 1)):
        for block_size in sizes:
            for name, work in works.items():
                one = _measure(context, name, work, tokens[name], block_size, width)
                found.setdefault((name, block_size), []).append(one)
    kinds = [
        _Kind(name, [fastest(found[name, s]) for s in sizes], [predicted_waste(work, s) for s in sizes])
        for name, work in works.items()
    ]
    result = Result(
        key=KEY,
        title=TITLE,
        question="Which block size? Small blocks leave little empty and make long tables; large ones make short tables "
        "and leave the end of each sequence's last block empty, which a full cache feels as fewer sequences at once.",
        tables=[_table(kind, sizes, works[kind.name], tokens[kind.name]) for kind in kinds],
        charts=_charts(kinds, sizes),
        data={
            "sizes": list(sizes),
            "cache_tokens": tokens,
            "best": {kind.name: sizes[_best(kind.runs)] for kind in kinds},
            "predicted_waste_percent": {kind.name: kind.foretold for kind in kinds},
            "measured": [record(each) | {"kind": kind.name} for kind in kinds for each in kind.runs],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def tell(result: Result, context: LabContext) -> None:
    """The words, from the data."""
    data = result.data
    sizes = tuple(data["sizes"])
    kinds = [
        _Kind(name, [run_of(each) for each in data["measured"] if each["kind"] == name], foretold)
        for name, foretold in data["predicted_waste_percent"].items()
    ]
    result.findings, result.explanation = _findings(kinds, sizes), _explain(kinds, sizes, _width(context))
    data["headline"] = _headline(kinds, sizes)


def _width(context: LabContext) -> int:
    return context.pick(12, 16, 64)


def _measure(context: LabContext, name: str, work: Workload, num_tokens: int, block_size: int, width: int) -> RunReport:
    engine = context.engine(
        block_size=block_size,
        num_blocks=num_tokens // block_size,
        max_num_seqs=width,
        max_num_batched_tokens=context.pick(512, 512, 8192),
        enable_prefix_caching=False,
        preemption="recompute",
    )
    # Every step's waste, not samples of it: the numbers are then exact.
    return context.measure(engine, work, f"blocks of {block_size}, {name}", sample_every_s=0.0)


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


def _table(kind: _Kind, sizes: tuple[int, ...], work: Workload, num_tokens: int) -> Table:
    rows: list[list[object]] = []
    for block_size, each, foretold in zip(sizes, kind.runs, kind.foretold, strict=True):
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
                number(foretold),
                sum(kv.preemptions.values()),
                kv.recomputed_tokens,
            ]
        )
    columns = ["block size", "bytes", "output tok/s", "spread %", "sequences a step", "blocks allocated", "most in use"]
    columns += ["table entries", "empty %", "foretold %", "preemptions", "computed twice"]
    lengths = [len(p) + n for p, n in work]
    note = (
        f"{len(work)} requests, {min(lengths)}–{max(lengths)} tokens in and out, mean "
        f"{sum(lengths) / len(lengths):.0f}; a cache of {num_tokens:,} tokens in every row. Foretold is from "
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
    gaps = [abs(seen - foretold) for kind in kinds for foretold, seen in zip(kind.foretold, kind.waste(), strict=True)]
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
            f"{change(fall)} throughput; {number(short.runs[last].running_mean)} instead of "
            f"{number(short.runs[at].running_mean)} sequences in a step, as {number(large)} % instead of "
            f"{number(short.waste()[at])} % (and {number(small)} % at {sizes[0]}) of the blocks' slots are empty.",
            fall < 1 - noise / 100 if abs(fall - 1) > noise / 100 else None,
        ),
        Finding(
            f"Small blocks make more of everything: blocks of {sizes[0]} are allocated at least three times as often "
            f"as those of {DEFAULT} (short requests aside, which end within few of either).",
            listed([f"{kind.name} {_ratio(kind, 0, at):.1f} times" for kind in kinds]) + ".",
            all(_ratio(kind, 0, at) >= 3 for kind in kinds if kind.name != "short"),
        ),
        Finding(
            f"That costs little where kernels read the tables: blocks of {sizes[0]} reach 90 % of {DEFAULT}'s speed.",
            f"{100 * worst:.0f} % in the worst of the three mixes; {_noise_text(kinds)}.",
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


def _noise_text(kinds: list[_Kind]) -> str:
    is_measured = any(each.spread_percent is not None for kind in kinds for each in kind.runs)
    noise = _noise(kinds)
    return (
        f"runs differ by {noise:.0f} % anyway" if is_measured else f"single runs are taken to differ by {noise:.0f} %"
    )


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
        text = _explain_fastest(kind, sizes, noise)
        widest, narrowest = kind.runs[at].running_mean, kind.runs[last].running_mean
        waste, lost = kind.waste()[last], sum(_kv(kind.runs[last]).preemptions.values())
        if narrowest < 0.9 * widest:
            text += (
                f" At {sizes[last]} the cache holds {number(narrowest)} sequences a step instead of {number(widest)} "
                f"at {DEFAULT}: {number(waste)} % of the slots in use are empty, and empty memory admits nobody."
            )
        else:
            text += (
                f" Large blocks cost hardly any width here ({number(narrowest)} sequences a step at {sizes[last]}, "
                f"{number(widest)} at {DEFAULT}): {number(waste)} % empty slots leave room for "
                + (f"nearly all ({counted(lost, 'preemption')})." if lost else "all.")
            )
        text += _explain_slower(kind, sizes, noise)
        again = [_kv(each).recomputed_tokens for each in kind.runs]
        if max(again) > 0.01 * (kind.runs[0].prompt_tokens + kind.runs[0].output_tokens):
            most = max(range(len(again)), key=lambda i: again[i])
            text += (
                f" Preemptions made it compute {again[most]:,} tokens twice at {sizes[most]}, the most of all sizes."
            )
        paragraphs.append(text)
    entries = [_kv(kinds[1].runs[i]).table_entries_max for i in (0, last)]
    paragraphs.append(
        f"What small blocks cost is bookkeeping: at {sizes[0]} the general mix's block tables have {entries[0]:,} "
        f"entries at their fullest, against {entries[1]:,} at {sizes[last]}. "
        + (
            f"It does not show in the speed of {width} sequences here."
            if kinds[1].runs[0].output_tok_s >= (1 - noise / 100) * kinds[1].runs[at].output_tok_s
            else f"Blocks of {sizes[0]} make {change(kinds[1].runs[0].output_tok_s / kinds[1].runs[at].output_tok_s)} "
            f"tokens per second than blocks of {DEFAULT}."
        )
    )
    return paragraphs


def _explain_fastest(kind: _Kind, sizes: tuple[int, ...], noise: float) -> str:
    best, at = _best(kind.runs), sizes.index(DEFAULT)
    fast, usual = kind.runs[best], kind.runs[at]
    near = [s for s, e in zip(sizes, kind.runs, strict=True) if e.output_tok_s >= fast.output_tok_s * (1 - noise / 100)]
    text = f"{kind.name.capitalize()} lengths: fastest at {sizes[best]} ({number(fast.output_tok_s)} tok/s)"
    if others := [str(s) for s in near if s != sizes[best]]:
        return f"{text}; {listed(others)} cannot be told from it."
    if best == at:
        return f"{text}, beyond the noise."
    lead, owed = fast.output_tok_s / usual.output_tok_s, _owed_to_cache(fast, usual)
    text += f", {change(lead)} than at {DEFAULT}"
    counts = (
        f"{number(fast.running_mean)} sequences a step against {number(usual.running_mean)}, "
        f"{_kv(fast).recomputed_tokens:,} tokens computed twice against {_kv(usual).recomputed_tokens:,}"
    )
    if lead <= owed * (1 + noise / 100):
        return f"{text}, as the cache explains: {counts}."
    share = "none of that" if owed < 1.005 else f"{100 * (owed - 1):.0f} of these percent"
    return (
        f"{text}. The cache explains {share} ({counts}); the rest comes and goes with the steps' own speed, so do not "
        "choose by it."
    )


def _owed_to_cache(run: RunReport, other: RunReport) -> float:
    """How many times as fast one may be as the other for what the cache did: sequences at once, and work done twice.
    These are counts, which do not wander as times do."""
    again = [_kv(each).recomputed_tokens / (each.prompt_tokens + each.output_tokens) for each in (run, other)]
    return run.running_mean / other.running_mean * (1 + again[1]) / (1 + again[0])


def _explain_slower(kind: _Kind, sizes: tuple[int, ...], noise: float) -> str:
    """Sizes that lose speed and no width: then it is not the cache that costs it."""
    usual = kind.runs[sizes.index(DEFAULT)]
    found = [
        (block_size, each)
        for block_size, each in zip(sizes, kind.runs, strict=True)
        if each.output_tok_s < (1 - noise / 100) * _owed_to_cache(each, usual) * usual.output_tok_s
        and each.running_mean >= 0.9 * usual.running_mean
    ]
    if not found:
        return ""
    named = [f"{s} ({change(e.output_tok_s / usual.output_tok_s)} than {DEFAULT})" for s, e in found]
    worst = min((each for _, each in found), key=lambda each: each.output_tok_s)
    text = f" Slower than the cache explains: {listed(named)}"
    if worst.prefill_tok_s and usual.prefill_tok_s and worst.decode_tok_s and usual.decode_tok_s:
        where = "there" if len(found) == 1 else f"at {sizes[kind.runs.index(worst)]}"
        text += (
            f"; prompts ran {where} at {number(worst.prefill_tok_s)} instead of {number(usual.prefill_tok_s)} tok/s, "
            f"and decoding at {number(worst.decode_tok_s)} instead of {number(usual.decode_tok_s)}"
        )
    return text + "."
