"""Experiment: how KV memory is used under contiguous reservation and under blocks.

It repeats by simulation the comparison of Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention" (SOSP 2023), figure 2: four policies, OPT-13B on an A100 with 40 GB, ShareGPT's lengths. The
scheduler is the real one in all four; with blocks the KV manager is too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict

from quire.bench.charts import Chart, bar_chart, line_chart
from quire.bench.units import times
from quire.config import GIB
from quire.lab.context import LabContext
from quire.lab.experiment import Data, Experiment, Finding, Record, Result, Table
from quire.sim import CostModel, poisson_arrivals
from quire.sim.memory_use import PAGED, Run, Usage, run_policy
from quire.sim.reservation import Buddy, FirstFit, Policy, reservation_policies

# OPT-13B: 40 layers, hidden size 5,120, K and V for all of it, 16-bit numbers.
KV_TOKEN_BYTES = 2 * 40 * 5120 * 2
KV_BYTES = 12 * GIB  # what the paper's table 1 leaves for it beside 26 GB of weights
NUM_SLOTS = KV_BYTES // KV_TOKEN_BYTES
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
# An A100 SXM with 40 GB at 60 % of its data sheet. A query against a key multiplies both K and V: two operations for
# each of their numbers.
_BYTES_PER_S, _FLOPS_PER_S = 0.6 * 1.555e12, 0.6 * 312e12
COST = CostModel(
    weights_s=13e9 * 2 / _BYTES_PER_S,
    token_s=2 * 13e9 / _FLOPS_PER_S,
    kv_token_s=KV_TOKEN_BYTES / _BYTES_PER_S,
    pair_s=KV_TOKEN_BYTES / _FLOPS_PER_S,
)

# Lengths. The means are the paper's (figure 11). It does not print the spread of outputs; its own bars imply one: under
# Orca (Max) a request's reserved slots are on average half of E[output^2] / E[output], and 13.3 % of the slots over 7
# requests make that 598 tokens, so a coefficient of variation of 0.88. A log-normal with that has sigma 0.755.
MEAN_PROMPT, SIGMA_PROMPT = 161.31, 1.0
MEAN_OUTPUT, SIGMA_OUTPUT = 337.99, 0.755
MAX_PROMPT = 1024
RATE_PER_S = 20.0  # above what any of the four can serve, so that memory is what limits them
QUICK_REQUESTS, FULL_REQUESTS = 240, 1500

# Figure 2 of the paper, percent: token states, reservation, internal, external and others.
PAPER_USAGE: dict[str, tuple[float, float, float, float]] = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    PAGED: (96.3, 0.0, 0.0, 3.7),
}
# Figure 13a: requests batched on average at 2 requests a second.
PAPER_WIDTH = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, PAGED: 30.42}


def sharegpt_lengths(num: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths, log-normal, cut to what the model takes."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    lengths = []
    for _ in range(num):
        prompt = draw(MEAN_PROMPT, SIGMA_PROMPT, 4, MAX_PROMPT)
        lengths.append((prompt, draw(MEAN_OUTPUT, SIGMA_OUTPUT, 2, MAX_MODEL_LEN - prompt)))
    return lengths


def measure(context: LabContext) -> Data:
    num_requests = QUICK_REQUESTS if context.quick else FULL_REQUESTS
    lengths = sharegpt_lengths(num_requests, context.seed)
    arrivals = poisson_arrivals(lengths, rate_per_s=RATE_PER_S, seed=context.seed + 1)
    policies: list[Policy | None] = [*reservation_policies(MAX_MODEL_LEN), None]
    found: dict[str, list[Record]] = {"runs": [], "first_fit": []}
    for key, allocator in (("runs", Buddy), ("first_fit", FirstFit)):
        for policy in policies if key == "runs" else policies[:-1]:
            context.report(f"{policy.name if policy else 'blocks'}, {key}: {num_requests} requests")
            run = run_policy(
                arrivals,
                policy,
                num_slots=NUM_SLOTS,
                max_model_len=MAX_MODEL_LEN,
                cost=COST,
                block_size=BLOCK_SIZE,
                allocator=allocator,
            )
            found[key].append(asdict(run) | ({} if key == "runs" else {"timeline": []}))
    return found | {
        "num_slots": NUM_SLOTS,
        "kv_token_bytes": KV_TOKEN_BYTES,
        "num_requests": num_requests,
        "paper_usage_percent": {key: list(bars) for key, bars in PAPER_USAGE.items()},
        "paper_width": PAPER_WIDTH,
    }


# -- what it says


def tell(data: Data, context: LabContext) -> Result:
    runs, first_fit = (
        [Run(**each | {"usage": Usage(**each["usage"])}) for each in data[name]] for name in ("runs", "first_fit")
    )
    by_key = {each.key: each for each in runs}
    blocks, largest, pow2, oracle = (by_key[key] for key in (PAGED, "max", "pow2", "oracle"))
    return Result(
        question="What share of KV memory holds tokens when each request reserves one contiguous region, and when "
        "memory is handed out in blocks; and how many requests then run at once?",
        headline=f"tokens fill {blocks.usage.tokens:.0f} % of memory with blocks, {largest.usage.tokens:.0f} % when "
        f"each request reserves the maximum; {times(blocks.width / largest.width)} as many run at once",
        charts=_charts(runs),
        tables=[
            _usage_table(runs),
            _width_table(runs),
            _allocator_table(runs, first_fit),
            _setting_table(data["num_requests"]),
        ],
        findings=_findings(by_key),
        explanation=[
            f"{largest.name} gives every request {MAX_MODEL_LEN:,} slots, most of which no token will ever reach. "
            f"{pow2.name} guesses outputs within a factor of two, but regions of different sizes no longer tile "
            f"memory: the allocator loses {pow2.usage.external:.1f} %. {oracle.name} knows every length, and still "
            f"{oracle.usage.reserved:.1f} % of memory waits for tokens that come later, as it must under any allocator "
            "that reserves.",
            "Blocks reserve nothing ahead. A decode step reads all weights however many requests share it, so width is "
            f"throughput: {blocks.output_tok_s / largest.output_tok_s:.1f} times {largest.name}'s tokens per second. "
            f"What was let in cannot always grow: {blocks.num_preemptions:,} preemptions, after which "
            f"{blocks.recomputed_percent:.1f} % of the tokens were computed again. A reservation never has that cost; "
            "it pays in width instead.",
            "The last table says in what the settings differ from the paper's. The spread of lengths is the only "
            f"number taken from its bars (from {largest.name}'s), so the other policies' are predictions.",
        ],
    )


def _bars(usage: Usage) -> tuple[float, float, float, float]:
    return usage.tokens, usage.reserved, usage.internal, usage.external


def _usage_table(runs: Sequence[Run]) -> Table:
    rows = []
    for each in runs:
        pairs = zip(_bars(each.usage), PAPER_USAGE[each.key], strict=True)
        rows.append([each.name, *(f"{mine:.1f} ({paper:.1f})" for mine, paper in pairs)])
    return Table(
        "KV memory in percent: this simulation, and in brackets the paper's figure 2",
        ["policy", "holds tokens", "reserved", "internal", "external and others"],
        rows,
        note="Reserved slots will hold a token before their request ends; internal ones never will. External and "
        "others is what the allocator rounds up, and what is free though somebody waits. With blocks, internal is the "
        "empty end of each last block, and free is the watermark and what the next prompt did not fit into; the paper "
        "gives one number for all of that.",
    )


def _width_table(runs: Sequence[Run]) -> Table:
    base = runs[0]
    columns = ["policy", "mean width", "largest", "paper (2 req/s)", "output tok/s", f"times {base.name}"]
    rows: list[list[object]] = []
    for each in runs:
        rows.append([each.name, f"{each.width:.2f}", each.max_width, f"{PAPER_WIDTH[each.key]:.2f}"])
        rows[-1] += [f"{each.output_tok_s:,.0f}", f"{each.output_tok_s / base.output_tok_s:.2f}", each.num_preemptions]
    return Table(
        "Requests that run at once, and what it is worth",
        [*columns, "preemptions"],
        rows,
        note="Tokens per second are of the simulated A100 (a roofline at 60 % of its peak rates). Widths and tokens "
        "count the steps in which somebody waits, but for the first fifth of them: at the start every request is "
        "short, and for a while more of them fit than the largest here.",
    )


def _allocator_table(runs: Sequence[Run], first_fit: Sequence[Run]) -> Table:
    rows = []
    for buddy, fit in zip(runs, first_fit, strict=False):
        shares = (buddy.usage.rounding, buddy.usage.free, fit.usage.free, fit.usage.tokens)
        rows.append([buddy.name, *(f"{share:.1f}" for share in shares), f"{buddy.width:.2f}", f"{fit.width:.2f}"])
    columns = ["policy", "buddy: rounded up", "buddy: free", "first fit: free", "first fit: holds tokens"]
    return Table(
        "The allocator's part: a buddy system, as the paper assumes, against first fit (percent of memory)",
        [*columns, "buddy: width", "first fit: width"],
        rows,
        note="First fit gives just what was asked, so that all it wastes are holes too small for the next request.",
    )


def _setting_table(num_requests: int) -> Table:
    load = f"Poisson at {RATE_PER_S:g}/s, {num_requests} requests: always a queue"
    lengths = "log-normal with those means; the outputs' spread inferred from their bars"
    rows = [
        ["model's KV", "OPT-13B, 16 bit", f"the same shape: {KV_TOKEN_BYTES:,} B a token"],
        ["memory for KV", "12 GB, 15.7 K slots", f"12 GiB, {NUM_SLOTS:,} slots"],
        ["lengths", "ShareGPT, means 161 and 338", lengths],
        ["load", "Poisson at one rate per point", load],
        ["execution", "an A100, and their own Orca", "a cost model; Quire's scheduler for all four"],
        ["allocator", "buddy", "buddy, and first fit beside it"],
        ["blocks", "vLLM of 2023, 16 tokens", f"Quire's KV manager, {BLOCK_SIZE} tokens, 1 % watermark"],
    ]
    return Table("What differs in the setting", ["", "the paper", "here"], rows)


def _charts(runs: Sequence[Run]) -> list[Chart]:
    labels = [label for each in runs for label in (each.name, f"{each.name}, paper")]
    columns = [bars for each in runs for bars in (_bars(each.usage), PAPER_USAGE[each.key])]
    parts = ("holds tokens", "reserved", "internal", "external and others")
    used = {part: [column[i] for column in columns] for i, part in enumerate(parts)}
    widths = {
        "here, always a queue": [each.width for each in runs],
        "paper, 2 requests/s": [PAPER_WIDTH[each.key] for each in runs],
    }
    over_time = {each.name: ([p[0] for p in each.timeline], [p[1] for p in each.timeline]) for each in runs}
    note = "Each pair: this simulation, then the paper's figure 2."
    return [
        bar_chart("How KV memory is used", "percent of KV memory", labels, used, note=note, is_stacked=True),
        bar_chart("Requests that run at once", "mean batch width", [each.name for each in runs], widths),
        line_chart("Batch width over time, the same arrivals", "simulated seconds", "requests running", over_time),
    ]


def _findings(by_key: dict[str, Run]) -> list[Finding]:
    blocks, largest, oracle = by_key[PAGED], by_key["max"], by_key["oracle"]
    order = sorted(by_key.values(), key=lambda each: each.usage.tokens)
    most = next(each for each in reversed(order) if each is not blocks)
    slots = NUM_SLOTS // MAX_MODEL_LEN
    ratio, paper_ratio = blocks.width / oracle.width, PAPER_WIDTH[PAGED] / PAPER_WIDTH["oracle"]
    return [
        Finding(
            f"Reserving the maximum length allows {NUM_SLOTS:,} / {MAX_MODEL_LEN:,} = {slots} requests at once (the "
            f"paper has {PAPER_WIDTH['max']:.2f}), and leaves {100 * (1 - slots * MAX_MODEL_LEN / NUM_SLOTS):.1f} % of "
            "memory over.",
            f"{largest.width:.2f} run on average, and {largest.usage.external:.1f} % is left over.",
            abs(largest.width - slots) < 0.1,
        ),
        Finding(
            "With blocks at least 90 % of memory holds tokens (the paper: 96.3 %).",
            f"{blocks.usage.tokens:.1f} % do; {blocks.usage.internal:.1f} % are ends of last blocks and "
            f"{blocks.usage.free:.1f} % are free.",
            blocks.usage.tokens >= 90.0,
        ),
        Finding(
            "The policies come in the paper's order: Max, Pow2, Oracle, blocks.",
            ", ".join(f"{each.name} {each.usage.tokens:.1f} %" for each in order) + ".",
            [each.key for each in order] == sorted(PAPER_USAGE, key=lambda key: PAPER_USAGE[key][0]),
        ),
        Finding(
            f"Blocks run about {paper_ratio:.1f} times as many requests as even an oracle's reservation (the paper's "
            "ratio), and at least half again as many.",
            f"{ratio:.2f} times: {blocks.width:.1f} against {oracle.width:.1f}.",
            ratio >= 1.5,
        ),
        Finding(
            "Even the best reservation leaves more than a third of memory without tokens, as in the paper.",
            f"{most.name}: {100 - most.usage.tokens:.1f} % hold none.",
            most.usage.tokens < 100 * 2 / 3,
        ),
    ]


EXPERIMENT = Experiment("fragmentation", "Where KV memory goes: reservation against blocks", measure, tell)
