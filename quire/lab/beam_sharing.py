"""Experiment: blocks that several answers to one prompt share, drawn and as beams, and what the PagedAttention paper
measured."""

from __future__ import annotations

from quire import BeamSearchParams, LLMEngine, SamplingParams
from quire.bench.charts import bar_chart
from quire.lab.context import PASSAGE, LabContext
from quire.lab.experiment import Data, Experiment, Finding, Result, Table

WIDTHS = (2, 4, 6)
KINDS = ("parallel sampling", "beam search")
# Figures 15a and 15b and their text: the lowest and the highest saving over 2 to 6 answers, in percent.
PAPER = {("parallel sampling", "short"): (6.1, 9.8), ("beam search", "short"): (37.6, 55.2)}
PAPER |= {("parallel sampling", "long"): (16.2, 30.5), ("beam search", "long"): (44.3, 66.3)}


def measure(context: LabContext) -> Data:
    found = []
    for name, prompt_len, answer_len in _lengths(context):
        prompts = _prompts(context, prompt_len)
        for kind in KINDS:
            for width in WIDTHS:
                context.report(f"{kind}, {width} answers to {name} prompts")
                engine = context.engine(enable_prefix_caching=False)
                used, named, copies = _run(engine, prompts, kind, width, answer_len, context.seed)
                counts = {"width": width, "blocks": used, "entries": named, "copies": copies}
                found.append({"kind": kind, "lengths": name} | counts)
    return {"measured": found}


def _lengths(context: LabContext) -> list[tuple[str, int, int]]:
    """Prompt and answer tokens: the means of the paper's Alpaca, and of its ShareGPT at a quarter."""
    return [("short", 19, context.pick(16, 58, 58)), ("long", context.pick(40, 40, 160), context.pick(24, 84, 336))]


def _prompts(context: LabContext, length: int) -> list[list[int]]:
    tokenizer = context.bench.base().tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(PASSAGE)
    count = context.pick(2, 4, 32)
    return [tokens[3 * i * length % len(tokens) :][:length] for i in range(count)]


def _run(
    engine: LLMEngine, prompts: list[list[int]], kind: str, width: int, answer_len: int, seed: int
) -> tuple[int, int, int]:
    """Blocks in use and entries of block tables, summed over all steps, and blocks copied."""
    params: SamplingParams | BeamSearchParams
    if kind == "beam search":
        params = BeamSearchParams(beam_width=width, max_tokens=answer_len, ignore_eos=True)
    else:
        params = SamplingParams(n=width, temperature=1.0, max_tokens=answer_len, ignore_eos=True, seed=seed)
    kv = engine.core.kv
    before = kv.counters.num_copies
    for i, prompt in enumerate(prompts):
        engine.add_request(f"sharing-{i}", {"prompt_token_ids": prompt}, params)
    used = named = 0
    while engine.has_unfinished_requests():
        engine.step()
        used += kv.num_used_blocks
        named += sum(len(table.block_ids) for table in kv.tables.values())
    return used, named, kv.counters.num_copies - before


# -- what it says


def saved_percent(row: Data) -> float:
    """The share of blocks that would be needed without sharing and is not."""
    saved: float = 1 - row["blocks"] / max(1, row["entries"])
    return 100 * saved


def tell(data: Data, context: LabContext) -> Result:
    rows = data["measured"]

    def of(kind: str, lengths: str) -> list[float]:
        return [saved_percent(row) for row in rows if (row["kind"], row["lengths"]) == (kind, lengths)]

    names = [f"{width} answers" for width in WIDTHS]
    lengths = {name: (prompt_len, answer_len) for name, prompt_len, answer_len in _lengths(context)}
    charts = [
        bar_chart(
            f"Blocks saved, {prompt_len} tokens in and {answer_len} out",
            "percent",
            [*names, "the paper, least", "the paper, most"],
            {kind: [*of(kind, name), *PAPER[kind, name]] for kind in KINDS},
            note=f"The paper: OPT-13B on {'Alpaca' if name == 'short' else 'ShareGPT'}, 2 to 6 answers.",
        )
        for name, (prompt_len, answer_len) in lengths.items()
    ]
    table = Table(
        "Blocks in use and entries of block tables, summed over all steps",
        ["", "lengths", "answers", "blocks", "table entries", "saved %", "the paper %", "blocks copied"],
        [
            [
                *(row[name] for name in ("kind", "lengths", "width", "blocks", "entries")),
                *(f"{saved_percent(row):.1f}", "{:.1f} to {:.1f}".format(*PAPER[row["kind"], row["lengths"]])),
                row["copies"],
            ]
            for row in rows
        ],
        "An entry names a block; without sharing each would be a block of its own.",
    )
    beams, samples = of("beam search", "short"), of("parallel sampling", "short")
    all_beams, all_samples = beams + of("beam search", "long"), samples + of("parallel sampling", "long")
    return Result(
        question="Several answers to one prompt share its blocks. How many blocks does that save when they are drawn, "
        "and how many when they are beams, which share what they have generated too?",
        headline=f"beams save {min(all_beams):.0f} to {max(all_beams):.0f} % of the blocks, answers that are drawn "
        f"{min(all_samples):.0f} to {max(all_samples):.0f} %",
        charts=charts,
        tables=[table],
        findings=[
            Finding(
                "Beams save more than answers that are drawn, at every width and length.",
                f"With 6 answers {beams[-1]:.1f} against {samples[-1]:.1f} % after short prompts.",
                all(beam > sample for beam, sample in zip(all_beams, all_samples, strict=True)),
            ),
            Finding(
                "More beams save more.",
                ", ".join(f"{saved:.1f} %" for saved in beams) + f" with {', '.join(map(str, WIDTHS))} beams.",
                beams == sorted(beams),
            ),
            Finding(
                "Beams save at least a third, as in the paper (37.6 to 66.3 %).",
                f"{min(all_beams):.1f} to {max(all_beams):.1f} %.",
                max(all_beams) >= 33.0,
            ),
        ],
        explanation=[
            "Answers that are drawn share the prompt's full blocks and nothing after them, so the saving shrinks as "
            "they grow. Beams descend from each other: those that run on at any time have a common ancestor a few "
            "tokens back, and all of its blocks are stored once. A beam takes a block of its own where two "
            "write to one.",
        ],
    )


EXPERIMENT = Experiment("beam-sharing", "Sharing: answers that are drawn, and beams", measure, tell)
