"""Experiment: memory pressure. Half the blocks that the work needs; preemption by recompute, by swap, and chosen."""

from __future__ import annotations

from quire.bench.charts import bar_chart, line_chart
from quire.bench.report import RunReport
from quire.bench.units import counted, duration, number, size
from quire.bench.workloads import even_lengths
from quire.lab.context import LabContext, fastest, record, run_of
from quire.lab.experiment import Data, Experiment, Finding, Result, curve, kv_of, num_preemptions, run_table

_MODES = ("recompute", "swap", "auto")
_NAMES = ("enough blocks", "recompute", "swap", "chosen (auto)")


def measure(context: LabContext) -> Data:
    num, prompt, output = _work(context)
    work = even_lengths(context.vocab, context.seed + 4, num, prompt, output)
    limits = {"max_num_seqs": num, "max_num_batched_tokens": context.pick(512, 512, 8192)}
    first = context.measure(context.engine(preemption="recompute", **limits), work, _NAMES[0])
    half = max(kv_of(first).peak_blocks // 2, -(-(prompt[1] + output[1]) // kv_of(first).block_size) + 2)
    found: list[list[RunReport]] = [[first], [], [], []]
    swap_rate = None
    for round_index in range(context.pick(1, 2, 1)):
        if round_index:
            found[0].append(context.measure(context.engine(preemption="recompute", **limits), work, _NAMES[0]))
        for mode, name, runs in zip(_MODES, _NAMES[1:], found[1:], strict=True):
            engine = context.engine(num_blocks=half, preemption=mode, **limits)
            swap_rate = engine.built.executor.swap_bytes_per_s
            runs.append(context.measure(engine, work, f"{half} blocks, {name}"))
    measured = [record(fastest(rounds)) for rounds in found]
    return {"num_blocks": half, "swap_bytes_per_s": swap_rate, "measured": measured}


def _work(context: LabContext) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Requests, the shortest and longest prompt, and the shortest and longest answer."""
    return context.pick((16, (12, 24), (32, 56)), (32, (32, 64), (96, 160)), (64, (256, 512), (384, 640)))


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    runs, (_, prompt, output) = [run_of(each) for each in data["measured"]], _work(context)
    enough, recompute, swap, auto = runs
    best = max(runs[1:], key=lambda each: each.output_tok_s)
    fixed = sorted([recompute.output_tok_s, swap.output_tok_s])
    chosen = kv_of(auto).preemptions
    only = [mode for mode, count in chosen.items() if count]
    hidden = ""
    if len(only) == 1:
        hidden = f"Left to choose, the engine took {only[0]} every time: one line may hide the other."
    running = {name: curve(each, "running") for name, each in zip(_NAMES, data["measured"], strict=True)}
    # Fewer blocks make nothing faster: more than all of the throughput is the machine's own variation.
    ratio = best.output_tok_s / enough.output_tok_s
    kept = f"{100 * ratio:.0f} %" if ratio < 0.995 else "all"
    computed = {
        "once": [each.prompt_tokens + each.output_tokens for each in runs],
        "again, after a preemption": [kv_of(each).recomputed_tokens for each in runs],
    }
    return Result(
        question="When the sequences that were let in no longer fit as they grow, somebody must give blocks back. What "
        "does it cost to compute them again, to keep them in host memory meanwhile, or to let the engine choose?",
        headline=f"with half the blocks {_NAMES[runs.index(best)]} keeps {kept} of the throughput; recompute ran "
        f"{kv_of(recompute).recomputed_tokens:,} tokens twice",
        charts=[
            bar_chart("Throughput", "output tokens/s", _NAMES, {"tok/s": [each.output_tok_s for each in runs]}),
            bar_chart("Tokens that were computed", "tokens", _NAMES, computed, is_stacked=True),
            line_chart("Sequences running over time", "seconds", "sequences", running, note=hidden),
        ],
        tables=[
            run_table(
                "The same requests",
                runs,
                [
                    ("preemption", _NAMES),
                    *("blocks", "output tok/s"),
                    ("% of enough", [f"{100 * each.output_tok_s / enough.output_tok_s:.0f}" for each in runs]),
                    *("sequences a step", "recomputes", "swaps", "tokens computed twice", "swapped out"),
                    *("end to end p50 s", "end to end p99 s", "between tokens p99 ms"),
                ],
                f"{counted(enough.requests, 'request')}, prompts of {prompt[0]}–{prompt[1]} tokens, answers of "
                f"{output[0]}–{output[1]}, all at once. Half the blocks is half of what they took at the fullest.",
            )
        ],
        findings=[
            Finding(
                "With enough blocks nobody is preempted; with half of them somebody is, and everybody is served.",
                f"{num_preemptions(enough)} against {', '.join(str(num_preemptions(e)) for e in runs[1:])} "
                f"preemptions; {', '.join(str(e.completed) for e in runs)} of {enough.requests} requests done.",
                not num_preemptions(enough)
                and all(num_preemptions(each) for each in runs[1:])
                and all(each.completed == enough.requests for each in runs),
            ),
            Finding(
                "Recompute runs tokens again and moves nothing; swap moves blocks and runs nothing again.",
                f"Recompute: {kv_of(recompute).recomputed_tokens:,} tokens computed twice, "
                f"{kv_of(recompute).swapped_out_blocks} blocks moved. Swap: {kv_of(swap).recomputed_tokens:,} tokens, "
                f"{kv_of(swap).swapped_out_blocks} blocks out, {kv_of(swap).swapped_in_blocks} back.",
                kv_of(recompute).recomputed_tokens > 0
                and not kv_of(recompute).swapped_out_blocks
                and not kv_of(swap).recomputed_tokens
                and kv_of(swap).swapped_out_blocks > 0,
            ),
            Finding(
                "Left to choose, the engine is near the better of the two (within 7 %).",
                f"{number(auto.output_tok_s)} tok/s; {number(fixed[1])} and {number(fixed[0])} by fixed choice. It "
                f"chose recompute {chosen.get('recompute', 0)} and swap {chosen.get('swap', 0)} times.",
                auto.output_tok_s >= 0.93 * fixed[1],
            ),
            Finding(
                "Half the memory costs less than half the throughput.",
                f"At best {kept} of it remains.",
                best.output_tok_s > 0.5 * enough.output_tok_s,
            ),
        ],
        explanation=_explain(runs, data),
    )


def _explain(runs: list[RunReport], data: Data) -> list[str]:
    enough, recompute, swap, _ = runs
    rate = recompute.prefill_tok_s or enough.prefill_tok_s
    speed, width = swap.output_tok_s / enough.output_tok_s, swap.running_mean / enough.running_mean
    paragraphs = [
        f"Half the blocks ({data['num_blocks']:,}) hold fewer sequences a step, and a narrower step shares its weights "
        f"among fewer: with swap, which computes nothing twice, {100 * speed:.0f} % of the throughput is left at "
        f"{100 * width:.0f} % of the width."
    ]
    if data["swap_bytes_per_s"] and rate:
        token_bytes = kv_of(swap).block_bytes / kv_of(swap).block_size
        paragraphs.append(
            f"The arithmetic behind the choice: a token's {size(token_bytes)} go out and back in "
            f"{duration(2 * token_bytes / data['swap_bytes_per_s'])}; computing it again takes {duration(1 / rate)}. "
            "What waits behind counts too, and prompts whose blocks are cached."
        )
    return paragraphs


EXPERIMENT = Experiment("pressure", "Memory pressure: half the blocks", measure, tell)
