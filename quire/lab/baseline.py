"""Experiment: no paging. transformers' generate() in static batches against Quire with as many sequences at once."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.charts import bar_chart, line_chart
from quire.bench.report import RunReport
from quire.bench.units import duration, number, size, times, times_the
from quire.bench.workloads import Workload, even_lengths
from quire.lab.context import LabContext, SkippedError, record, run_of
from quire.lab.experiment import Data, Experiment, Finding, Result, curve, kv_of, run_table
from quire.lab.shapes import SHAPES

if TYPE_CHECKING:
    from quire.bench.hf import HFBaseline

BATCH = 16
_WORKS = ("equal lengths", "mixed lengths")


def measure(context: LabContext) -> Data:
    if importlib.util.find_spec("transformers") is None:
        raise SkippedError("transformers is not installed: pip install transformers, then run this experiment again")
    engine = context.engine(max_num_seqs=BATCH, max_num_batched_tokens=context.pick(512, 512, 8192))
    num_in, num_out = context.pick((16, 24), (16, 96), (128, 256))
    num, longest = context.pick((32, 28), (48, 128), (32, 384))
    lengths = (max(4, longest // 8), longest)
    works: list[Workload] = [
        even_lengths(context.vocab, context.seed, BATCH, (num_in, num_in), (num_out, num_out)),
        even_lengths(context.vocab, context.seed + 1, num, lengths, lengths),
    ]
    ours = [context.measure(engine, work, f"Quire, {name}") for work, name in zip(works, _WORKS, strict=True)]
    context.report("loading the model into transformers")
    baseline = _load_baseline(context)
    theirs = []
    for work, name in zip(works, _WORKS, strict=True):
        if context.on_gpu:
            # As before Quire's runs, for the first steps of a size cost more than later ones. Once for each work: rows
            # without padding take another path, on which cuDNN plans for every length that it has not met.
            _measure_baseline(context, baseline, longest_batch(work), f"transformers, {name}, untimed")
        theirs.append(_measure_baseline(context, baseline, work, f"transformers, {name}"))
    speedups = [mine.output_tok_s / other.output_tok_s for mine, other in zip(ours, theirs, strict=True)]
    return {
        "speedups": dict(zip(_WORKS, speedups, strict=True)),
        "static_shares": {name: static_share(work, BATCH) for name, work in zip(_WORKS, works, strict=True)},
        "measured": [record(each) for each in (*ours, *theirs)],
    }


def static_share(workload: Workload, batch_size: int) -> float:
    """The share of a static batch's rows by steps that makes a token somebody asked for."""
    outputs = [num_out for _, num_out in workload]
    batches = [outputs[i : i + batch_size] for i in range(0, len(outputs), batch_size)]
    return sum(outputs) / sum(len(batch) * max(batch) for batch in batches)


def longest_batch(work: Workload) -> Workload:
    """The static batch of this work with the longest rows: its steps have every size."""
    batches = [work[at : at + BATCH] for at in range(0, len(work), BATCH)]
    return max(batches, key=lambda batch: max(len(p) for p, _ in batch) + max(n for _, n in batch))


def _measure_baseline(context: LabContext, baseline: HFBaseline, work: Workload, name: str) -> RunReport:
    context.report(name)
    report = baseline.measure(work, name=name)
    if report.interrupted:
        raise KeyboardInterrupt
    return report


def _load_baseline(context: LabContext) -> HFBaseline:
    import torch

    from quire.bench.hf import HFBaseline

    config = context.bench.config
    if context.quick and config.model in SHAPES and config.load_format == "auto":
        # The same shape with random weights takes the same time, but not to load: transformers reads a GGUF file for
        # longer than this whole experiment takes.
        folder = Path(tempfile.mkdtemp(prefix="quire-lab-"))
        (folder / "config.json").write_text(json.dumps(SHAPES[config.model].config))
        try:
            return HFBaseline(config.replace(model=str(folder), load_format="dummy"), batch_size=BATCH)
        finally:
            shutil.rmtree(folder)
    if config.load_format != "dummy":
        return HFBaseline(config, batch_size=BATCH)
    with torch.device(config.device):  # random weights are made where they stay: a CPU would take minutes
        return HFBaseline(config, batch_size=BATCH)


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    runs = [run_of(each) for each in data["measured"]]
    ours, theirs = runs[:2], runs[2:]
    token_bytes = kv_of(ours[0]).block_bytes / kv_of(ours[0]).block_size
    (equal, mixed), (_, share) = data["speedups"].values(), data["static_shares"].values()
    lost = theirs[1].output_tok_s / theirs[0].output_tok_s
    waste = [_kv_waste(ours[1]), _kv_waste(theirs[1])]
    pace = _changed_pace(theirs)
    doubt = f" But {pace}, so the two runs cannot be compared." if pace else ""
    ordered = [theirs[0], ours[0], theirs[1], ours[1]]
    rates = {"transformers, static": [e.output_tok_s for e in theirs], "Quire": [e.output_tok_s for e in ours]}
    records = {"transformers": data["measured"][3], "Quire": data["measured"][1]}
    slowing = "A static batch slows down towards its end, when only its longest answers still need tokens."
    over_time = {name: curve(each, "output_tokens") for name, each in records.items()}
    return Result(
        question=f"How much faster is Quire than transformers' generate() in static batches of {BATCH}, with no more "
        f"than {BATCH} sequences at once on either side, and what of it is batching and paging?",
        headline=f"{times_the(mixed, 'useful tokens per second')} of static batches on mixed lengths, "
        f"{times(equal)} on equal ones" + (", but transformers' own pace changed between the two" if pace else ""),
        charts=[
            bar_chart("Useful output tokens per second", "tokens/s", _WORKS, rates),
            line_chart("Mixed lengths: useful tokens over time", "seconds", "output tokens", over_time, note=slowing),
        ],
        tables=[
            run_table(
                f"The same requests, {BATCH} at once",
                ordered,
                [
                    ("work", [name for name in _WORKS for _ in range(2)]),
                    ("engine", ["transformers", "Quire"] * 2),
                    *("output tok/s", "prefill tok/s", "decode tok/s", "first token p50 s", "between tokens p50 ms"),
                    "end to end p50 s",
                    ("KV at its fullest", [size(_kv_bytes(each, token_bytes)) for each in ordered]),
                    ("of it empty %", [number(_kv_waste(each)) for each in ordered]),
                ],
                "Only tokens that were asked for count. A static batch gives its answers when its longest is done, and "
                f"its KV is counted as the padded batch that it holds, at {size(token_bytes)} a token. All requests "
                "came at once, so first token and end to end include the wait for a place.",
            )
        ],
        findings=[
            Finding(
                "On mixed lengths Quire makes more useful tokens per second than static batches.",
                f"{number(ours[1].output_tok_s)} against {number(theirs[1].output_tok_s)}: {times(mixed)}.",
                mixed > 1,
            ),
            Finding(
                "Its lead is larger on mixed lengths than on equal ones: a slot is given on when its request is done.",
                f"{times(mixed)} against {times(equal)}.{doubt}",
                None if pace else mixed > equal,
            ),
            Finding(
                f"Static batches lose on mixed lengths at least what their arithmetic says: {100 * (1 - share):.0f} % "
                "of their rows by steps make tokens that nobody asked for.",
                f"They run at {100 * lost:.0f} % of their speed on equal lengths.{doubt}",
                None if pace else lost <= share + 0.05,
            ),
            Finding(
                "Blocks leave less of the KV memory in use empty than a padded batch does.",
                f"{number(waste[0])} % against {number(waste[1])} %.",
                waste[0] < waste[1],
            ),
        ],
        explanation=[
            f"With equal lengths a static batch wastes nothing, so the {times(equal)} there is the engine itself: its "
            f"kernels and the time between steps. On mixed lengths only {100 * share:.0f} % of what a static batch "
            f"decodes was asked for, which alone is worth a factor of {1 / share:.2f}, and its prompts are padded to "
            "the longest."
        ],
    )


def _changed_pace(theirs: list[RunReport]) -> str:
    """How the static batches' own speed changed between the two runs, where it did.

    Rows of mixed lengths are longer, so a step over them has no less to do. A faster one means that something else
    slowed the other run down, and that the two cannot be compared.
    """
    equal_s, mixed_s = (each.seconds / max(1, each.num_steps) for each in theirs)
    if mixed_s >= 0.85 * equal_s:
        return ""
    return f"a step of transformers took {duration(equal_s)} on equal lengths and {duration(mixed_s)} on longer ones"


def _kv_bytes(report: RunReport, token_bytes: float) -> float:
    if report.kv is not None:
        return report.kv.peak_blocks * report.kv.block_bytes
    return report.values["kv_slots_reserved_peak"] * token_bytes


def _kv_waste(report: RunReport) -> float:
    return report.kv.waste_percent_mean if report.kv is not None else report.values["padding_waste_percent"]


EXPERIMENT = Experiment("baseline", "No paging: static batches against Quire", measure, tell)
