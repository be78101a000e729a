"""Experiment: sharing. A repeated system prompt with the prefix cache on and off; n = 4 answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence

from quire.bench.charts import bar_chart, line_chart
from quire.bench.report import RunReport
from quire.bench.units import counted, duration, number, times_the
from quire.bench.workloads import Workload, even_lengths, shared_prefix
from quire.lab.context import LabContext, record, run_of
from quire.lab.experiment import Data, Experiment, Finding, Result, curve, kv_of, percentile, run_table

N = 4


def measure(context: LabContext) -> Data:
    limits = {"max_num_seqs": context.pick(16, 32, 256), "max_num_batched_tokens": context.pick(512, 512, 8192)}
    work = shared_prefix(context.vocab, context.seed + 2, *_system_prompt(context))
    runs = [
        context.measure(context.engine(enable_prefix_caching=on, **limits), work, name)
        for on, name in ((False, "prefix cache off"), (True, "prefix cache on"))
    ]
    num_prompts, prompt_len, answer_len = _forks(context)
    prompts = even_lengths(context.vocab, context.seed + 3, num_prompts, (prompt_len,) * 2, (answer_len,) * 2)
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": context.seed}
    for own_work, own_sampling, name in (
        ([request for request in prompts for _ in range(N)], sampling, f"{N} requests each, nothing shared"),
        (prompts, sampling | {"n": N}, f"one request each, n = {N}"),
    ):
        engine = context.engine(enable_prefix_caching=False, **limits)
        runs.append(context.measure(engine, own_work, name, sampling=own_sampling))
    return {
        "expected_copies": expected_copies(prompts, kv_of(runs[0]).block_size),
        "measured": [record(each) for each in runs],
    }


def _system_prompt(context: LabContext) -> tuple[int, int, int, int]:
    """Requests, tokens that all of them share, tokens of their own, tokens out."""
    return context.pick((12, 192, 16, 16), (32, 448, 32, 48), (256, 2048, 64, 64))


def _forks(context: LabContext) -> tuple[int, int, int]:
    """Prompts, their length, and that of each of their n answers."""
    return context.pick((4, 72, 20), (8, 136, 64), (48, 520, 128))


def expected_copies(prompts: Workload, block_size: int) -> int:
    """All n write on where the prompt ends. Where that is inside a block, all but the last writer copy it first."""
    return sum((N - 1) * (len(prompt) % block_size != 0) for prompt, _ in prompts)


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    runs, copies = [run_of(each) for each in data["measured"]], data["expected_copies"]
    off, on, apart, forked = runs
    num, prefix, suffix, num_out = _system_prompt(context)
    _, prompt_len, answer_len = _forks(context)
    peaks = [max(1, kv_of(each).peak_blocks) for each in runs]
    kv = kv_of(on)
    # All but the first requests find the prefix's whole blocks.
    best = (num - 1) * (prefix // kv.block_size * kv.block_size) / (num * (prefix + suffix))
    rate, waits = kv.prefix_hit_rate, [percentile(each.ttft_s, "p50") or 0.0 for each in (off, on)]
    names, speeds = ("system prompt", f"n = {N}"), _apart_and_shared([each.output_tok_s for each in runs])
    in_use = {each["workload"]: curve(each, "kv_usage", each["kv"]["num_blocks"]) for each in data["measured"][:2]}
    return Result(
        question="What is it worth to keep the keys and values of a system prompt that every request repeats, and of a "
        f"prompt that is answered {N} times?",
        headline=f"the prefix cache brings {times_the(on.output_tok_s / off.output_tok_s, 'throughput')} and "
        f"{100 * (1 - peaks[1] / peaks[0]):.0f} % fewer blocks; with n = {N} there are "
        f"{100 * (1 - peaks[3] / peaks[2]):.0f} % fewer",
        charts=[
            bar_chart("Most blocks in use", "blocks", names, _apart_and_shared(peaks)),
            line_chart("The system prompt's run: blocks in use over time", "seconds", "blocks", in_use, is_area=True),
            bar_chart("Output tokens per second", "tokens/s", names, speeds),
        ],
        tables=[
            run_table(
                f"{num} requests that share {prefix:,} of their {prefix + suffix:,} prompt tokens, {num_out} out",
                [off, on],
                [
                    ("prefix cache", ["off", "on"]),
                    *("output tok/s", "in and out tok/s", "sequences a step", "first token p50 s"),
                    *("first token p99 s", "prompt tokens run", "prefix hits %", "most blocks", "as memory"),
                    "table entries",
                ],
                "In and out counts prompt tokens that were found as well. More table entries than blocks: several "
                "tables name the same block.",
            ),
            run_table(
                f"{counted(forked.requests, 'prompt')} of {prompt_len} tokens, {N} answers of {answer_len} each",
                [apart, forked],
                [
                    ("", [apart.workload, forked.workload]),
                    *("output tok/s", "first token p50 s", "prompt tokens run", "most blocks", "forks"),
                    "copies on write",
                ],
                "The prefix cache is off in both, so that only forking shares.",
            ),
        ],
        findings=[
            Finding(
                "The prefix cache raises throughput and brings the first token sooner.",
                f"{number(on.output_tok_s)} against {number(off.output_tok_s)} tok/s, first token {duration(waits[1])} "
                f"against {duration(waits[0])}.",
                on.output_tok_s > off.output_tok_s and waits[1] < waits[0],
            ),
            Finding(
                f"At best {100 * best:.1f} % of the prompt tokens are found: whole blocks, none for who comes first.",
                f"{100 * rate:.1f} %."
                + ("" if rate > best - 0.02 else " Requests of the first step came before there was anything to find."),
                rate <= best + 1e-9 and rate > 0.5 * best,
            ),
            Finding(
                "Sharing saves blocks: the most in use falls by more than a third.",
                f"{peaks[1]:,} instead of {peaks[0]:,} with the system prompt, {peaks[3]:,} instead of {peaks[2]:,} "
                f"with n = {N}."
                + (" Unshared, the cache is full: with more of it more would be in use." if _is_full(off) else ""),
                peaks[1] < 0.67 * peaks[0] and peaks[3] < peaks[2],
            ),
            Finding(
                f"With n = {N} exactly {copies} blocks are copied: all answers but one copy the partly filled block in "
                "which their prompt ends, when they write to it.",
                f"{counted(kv_of(forked).copies, 'block')} copied, {counted(kv_of(forked).forks, 'fork')}.",
                kv_of(forked).copies == copies,
            ),
        ],
        explanation=_explain(runs),
    )


def _apart_and_shared(values: Sequence[float]) -> dict[str, list[float | None]]:
    return {"nothing shared": [values[0], values[2]], "shared": [values[1], values[3]]}


def _is_full(report: RunReport) -> bool:
    return kv_of(report).peak_blocks > 0.98 * kv_of(report).num_blocks


def _explain(runs: list[RunReport]) -> list[str]:
    off, on, apart, forked = runs
    return [
        f"On, {kv_of(on).prefix_hit_tokens:,} of {on.prompt_tokens:,} prompt tokens are found instead of computed. The "
        "decode steps, which no cache spares, remain. A block of the system prompt is stored once and named by every "
        "request that runs."
        + (
            f" Off, they do not fit: {number(off.running_mean)} sequences run in a step instead of "
            f"{number(on.running_mean)} and the rest wait, which is part of the difference in throughput."
            if _is_full(off)
            else ""
        ),
        f"n = {N} runs each prompt once and forks it: {forked.prompt_tokens:,} prompt tokens instead of "
        f"{apart.prompt_tokens:,}, {times_the(forked.output_tok_s / apart.output_tok_s, 'throughput')}. All {N} write "
        f"on in the block in which the prompt ends: {N - 1} of them take a copy, the last keeps the original.",
    ]


EXPERIMENT = Experiment("prefix-sharing", "Sharing: a repeated system prompt, and n = 4", measure, tell)
