"""Experiment: no paging. transformers' generate() in static batches against Quire with as many sequences at once."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.charts import Chart, Series
from quire.bench.units import duration, ms, number, size, times
from quire.bench.workloads import Workload
from quire.lab.context import LabContext, SkippedError, record, run_of
from quire.lab.lengths import even_lengths, static_share
from quire.lab.result import Finding, Result, Table
from quire.lab.shapes import SHAPES

if TYPE_CHECKING:
    from quire.bench.hf import HFBaseline
    from quire.bench.report import RunReport

KEY = "baseline"
TITLE = "No paging: static batches against Quire"

BATCH = 16
_WORKS = ("equal lengths", "mixed lengths")


def run(context: LabContext) -> Result:
    started = time.perf_counter()
    if importlib.util.find_spec("transformers") is None:
        raise SkippedError("transformers is not installed: pip install transformers, then run this experiment again")
    engine = context.engine(max_num_seqs=BATCH, max_num_batched_tokens=context.pick(512, 512, 8192))
    vocab, seed = context.vocab, context.seed
    num_in, num_out = context.pick((16, 24), (16, 96), (128, 256))
    num, longest = context.pick((32, 28), (48, 128), (32, 384))
    shortest = max(4, longest // 8)
    works: list[Workload] = [
        even_lengths(vocab, seed, BATCH, (num_in, num_in), (num_out, num_out)),
        even_lengths(vocab, seed + 1, num, (shortest, longest), (shortest, longest)),
    ]
    ours = [context.measure(engine, work, f"Quire, {name}") for work, name in zip(works, _WORKS, strict=True)]
    context.report("loading the model into transformers")
    baseline = _load_baseline(context)
    theirs = []
    for work, name in zip(works, _WORKS, strict=True):
        if context.on_gpu:
            # As for Quire's runs: the first steps of a size cost more than later ones. Of each work, since rows without
            # padding go another way, on which cuDNN plans for every length that it has not met.
            _measure(context, baseline, longest_batch(work), f"transformers, {name}, untimed")
        theirs.append(_measure(context, baseline, work, f"transformers, {name}"))
    shares = [static_share(work, BATCH) for work in works]
    speedups = [mine.output_tok_s / other.output_tok_s for mine, other in zip(ours, theirs, strict=True)]
    result = Result(
        key=KEY,
        title=TITLE,
        question=f"How much faster is Quire than transformers' generate() in static batches of {BATCH}, with no more "
        f"than {BATCH} sequences at once on either side, and what of it is batching and paging?",
        charts=_charts(ours, theirs),
        data={
            "speedups": dict(zip(_WORKS, speedups, strict=True)),
            "static_shares": dict(zip(_WORKS, shares, strict=True)),
            "is_warmed": context.on_gpu,
            "measured": [record(each) for each in (*ours, *theirs)],
        },
        seconds=time.perf_counter() - started,
    )
    tell(result, context)
    return result


def tell(result: Result, context: LabContext) -> None:
    """Table and words, from the data."""
    runs = [run_of(each) for each in result.data["measured"]]
    ours, theirs = runs[:2], runs[2:]
    speedups, shares = (list(result.data[name].values()) for name in ("speedups", "static_shares"))
    assert ours[0].kv is not None
    token_bytes = ours[0].kv.block_bytes / ours[0].kv.block_size
    result.tables = [_table(ours, theirs, token_bytes)]
    result.findings = _findings(ours, theirs, speedups, shares)
    result.explanation = _explain(ours, theirs, speedups, shares, token_bytes)
    if context.on_gpu and not result.data.get("is_warmed"):
        result.explanation.append(
            "The runs of transformers had no untimed one before them, as Quire's have on a GPU: what the first steps "
            "of each size cost is in their numbers."
        )
    result.data["headline"] = (
        f"{times(speedups[1])} the useful tokens per second of static batches on mixed lengths, {times(speedups[0])} "
        "on equal ones" + (", but transformers' own pace changed between the two" if _changed_pace(theirs) else "")
    )


def longest_batch(work: Workload) -> Workload:
    """Of the static batches that the work makes, the one with the longest rows: its steps have every size."""
    batches = [work[at : at + BATCH] for at in range(0, len(work), BATCH)]
    return max(batches, key=lambda batch: max(len(p) for p, _ in batch) + max(n for _, n in batch))


def _measure(context: LabContext, baseline: HFBaseline, work: Workload, name: str) -> RunReport:
    context.report(name)
    report = baseline.measure(work, name=name)
    if report.interrupted:
        raise KeyboardInterrupt
    return report


def _changed_pace(theirs: list[RunReport]) -> str:
    """Where the static batches' own speed was another in each of the two runs, how; else nothing.

    Rows of mixed lengths are longer, so a step over them has no less to do: one that is faster says that something
    else slowed the other run down, and the two cannot be compared.
    """
    equal_s, mixed_s = (each.seconds / max(1, each.num_steps) for each in theirs)
    if mixed_s >= 0.85 * equal_s:
        return ""
    return f"a step of transformers took {duration(equal_s)} on equal lengths and {duration(mixed_s)} on longer ones"


def _load_baseline(context: LabContext) -> HFBaseline:
    import torch

    from quire.bench.hf import HFBaseline

    config = context.bench.config
    if context.quick and config.model in SHAPES and config.load_format == "auto":
        # The same shape with other numbers in it takes the same time, but not to load: transformers reads a GGUF file
        # for longer than this whole experiment takes.
        folder = Path(tempfile.mkdtemp(prefix="quire-lab-"))
        (folder / "config.json").write_text(json.dumps(SHAPES[config.model].config))
        config = config.replace(model=str(folder), load_format="dummy")
        try:
            return HFBaseline(config, batch_size=BATCH)
        finally:
            shutil.rmtree(folder)
    if config.load_format != "dummy":
        return HFBaseline(config, batch_size=BATCH)
    with torch.device(config.device):  # random weights made where they stay: a CPU would take minutes
        return HFBaseline(config, batch_size=BATCH)


def _table(ours: list[RunReport], theirs: list[RunReport], token_bytes: float) -> Table:
    rows: list[list[object]] = []
    for index, name in enumerate(_WORKS):
        for engine, each in (("transformers", theirs[index]), ("Quire", ours[index])):
            rows.append(
                [
                    name,
                    engine,
                    number(each.output_tok_s),
                    number(each.prefill_tok_s),
                    number(each.decode_tok_s),
                    number(each.ttft_s.p50) if each.ttft_s else "–",
                    ms(each.itl_s.p50) if each.itl_s else "–",
                    number(each.e2e_s.p50) if each.e2e_s else "–",
                    size(_kv_bytes(each, token_bytes)),
                    number(_kv_waste(each)),
                ]
            )
    columns = ["work", "engine", "output tok/s", "prefill tok/s", "decode tok/s", "first token p50 s"]
    columns += ["between tokens p50 ms", "end to end p50 s", "KV at its fullest", "of it empty %"]
    note = (
        f"Only tokens that were asked for count. A static batch gives its answers when its longest is done; "
        f"transformers' KV is counted as the padded batch that it holds, at {size(token_bytes)} a token."
    )
    return Table(f"The same requests, {BATCH} at once", columns, rows, note)


def _kv_bytes(report: RunReport, token_bytes: float) -> float:
    if report.kv is not None:
        return report.kv.peak_blocks * report.kv.block_bytes
    return report.values["kv_slots_reserved_peak"] * token_bytes


def _kv_waste(report: RunReport) -> float:
    return report.kv.waste_percent_mean if report.kv is not None else report.values["padding_waste_percent"]


def _charts(ours: list[RunReport], theirs: list[RunReport]) -> list[Chart]:
    curves = []
    for name, each in (("transformers", theirs[1]), ("Quire", ours[1])):
        curves.append(Series(name, [s.t_s for s in each.samples], [float(s.output_tokens) for s in each.samples]))
    works: list[float | str] = list(_WORKS)
    return [
        Chart(
            "grouped_bar",
            "Useful output tokens per second",
            "",
            "tokens/s",
            [
                Series("transformers, static", works, [each.output_tok_s for each in theirs]),
                Series("Quire", works, [each.output_tok_s for each in ours]),
            ],
        ),
        Chart(
            "line",
            "Mixed lengths: useful tokens over time",
            "seconds",
            "output tokens",
            curves,
            note="A static batch slows down towards its end, when only its longest answers still need tokens.",
        ),
    ]


def _findings(
    ours: list[RunReport], theirs: list[RunReport], speedups: list[float], shares: list[float]
) -> list[Finding]:
    waste = [_kv_waste(ours[1]), _kv_waste(theirs[1])]
    lost = theirs[1].output_tok_s / theirs[0].output_tok_s
    pace = _changed_pace(theirs)
    doubt = f" But {pace}: its own speed changed between the two." if pace else ""
    return [
        Finding(
            "On mixed lengths Quire makes more useful tokens per second than static batches.",
            f"{number(ours[1].output_tok_s)} against {number(theirs[1].output_tok_s)}: {times(speedups[1])}.",
            speedups[1] > 1,
        ),
        Finding(
            "Its lead is larger on mixed lengths than on equal ones: a slot is given on when its request is done.",
            f"{times(speedups[1])} against {times(speedups[0])}.{doubt}",
            None if pace else speedups[1] > speedups[0],
        ),
        Finding(
            f"Static batches lose on mixed lengths at least what their arithmetic says: {100 * (1 - shares[1]):.0f} % "
            "of their rows by steps make tokens that nobody asked for.",
            f"They run at {100 * lost:.0f} % of their speed on equal lengths.{doubt}",
            None if pace else lost <= shares[1] + 0.05,
        ),
        Finding(
            "Blocks leave less of the KV memory in use empty than a padded batch does.",
            f"{number(waste[0])} % against {number(waste[1])} %.",
            waste[0] < waste[1],
        ),
    ]


def _explain(
    ours: list[RunReport],
    theirs: list[RunReport],
    speedups: list[float],
    shares: list[float],
    token_bytes: float,
) -> list[str]:
    batching = speedups[1] / speedups[0]
    pace = _changed_pace(theirs)
    first = (
        f"With equal lengths a static batch wastes nothing, so the {times(speedups[0])} there is the engine itself: "
        "its kernels and the time between steps."
        if speedups[0] > 1
        else f"With equal lengths, where a static batch wastes nothing, Quire reaches {times(speedups[0])} of "
        "transformers: its kernels gain nothing on this machine."
    )
    if pace:
        first += f" But {pace}, so something besides its work slowed it down in the first of the two runs."
        second = (
            f" How much of the {times(speedups[1])} on mixed lengths is batching and paging can therefore not be told "
            f"by comparing them. By arithmetic {100 * shares[1]:.0f} % of what a static batch decodes there was asked "
            f"for, which alone is worth {1 / shares[1]:.2f}; Quire's own batch was {number(ours[1].running_mean)} of "
            f"{BATCH} wide on average."
        )
    elif batching > 1.1:
        second = (
            f" With mixed lengths the lead grows to {times(speedups[1])}, by a factor of {batching:.2f}: that is "
            f"batching and paging. Only {100 * shares[1]:.0f} % of what a static batch decodes was asked for, which "
            f"alone would be worth {1 / shares[1]:.2f}; "
        )
        second += (
            "the rest is padded prompts and the wait for the batch before."
            if batching > 1 / shares[1]
            else f"Quire's own batch is not always full either ({number(ours[1].running_mean)} of {BATCH} on average)."
        )
    else:
        what = "change little here" if batching > 0.9 else "make the lead smaller"
        second = (
            f" Mixed lengths {what} ({times(speedups[1])}): Quire's own batch was {number(ours[1].running_mean)} of "
            f"{BATCH} wide on average, as it thins out when no request is left to take a slot."
        )
    paragraphs = [first + second]
    mine, other = _kv_bytes(ours[1], token_bytes), _kv_bytes(theirs[1], token_bytes)
    held = "less" if mine < other else "more"
    paragraphs.append(
        f"At its fullest Quire's cache holds {size(mine)} on mixed lengths, {held} than the {size(other)} of the "
        f"padded batch. Of the blocks in use {number(_kv_waste(ours[1]))} % is empty: the ends of last blocks."
    )
    if ours[1].e2e_s and theirs[1].e2e_s and ours[1].ttft_s and theirs[1].ttft_s:
        paragraphs.append(
            f"The median request is answered after {duration(ours[1].e2e_s.p50)} instead of "
            f"{duration(theirs[1].e2e_s.p50)}, and begins after {duration(ours[1].ttft_s.p50)} instead of "
            f"{duration(theirs[1].ttft_s.p50)}; all requests came at once, so both include the wait for a place."
        )
    return paragraphs
