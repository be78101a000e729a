"""Experiment: block size. Small blocks waste little and are many; large ones are few and end half empty."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from quire.bench.charts import Chart, line_chart
from quire.bench.report import RunReport
from quire.bench.units import change, listed, number
from quire.bench.workloads import Workload, even_lengths, longtail
from quire.lab.context import LabContext, fastest, record, run_of
from quire.lab.experiment import Data, Experiment, Finding, Result, kv_of, run_table
from quire.lab.traffic import Kind, mix_needs

SIZES = (4, 8, 16, 32, 64, 128)
QUICK_SIZES = (4, 16, 64, 128)
DEFAULT = 16
# Two runs that differ by less are taken to be the same, where repeats do not say better.
_NOISE_PERCENT = {"cpu": 15.0, "cuda": 4.0}


def measure(context: LabContext) -> Data:
    sizes = QUICK_SIZES if context.quick and not context.on_gpu else SIZES
    width = context.pick(12, 16, 64)
    works = _works(context)
    tokens = {name: cache_tokens(work, width) for name, work in works.items()}
    # By rounds, not by settings: a machine that slows down for a while then slows down all of them alike.
    found: dict[tuple[str, int], list[RunReport]] = {}
    for _ in range(context.pick(1, 2, 1)):
        for block_size in sizes:
            for name, work in works.items():
                engine = context.engine(
                    block_size=block_size,
                    num_blocks=tokens[name] // block_size,
                    max_num_seqs=width,
                    max_num_batched_tokens=context.pick(512, 512, 8192),
                    enable_prefix_caching=False,
                    preemption="recompute",
                )
                # The waste of every step, not samples of it: the numbers are then exact.
                run = context.measure(engine, work, f"blocks of {block_size}, {name}", sample_every_s=0.0)
                found.setdefault((name, block_size), []).append(run)
    runs = {(name, size): fastest(rounds) for (name, size), rounds in found.items()}
    return {
        "sizes": list(sizes),
        "cache_tokens": tokens,
        "lengths": {name: [len(prompt) + num_out for prompt, num_out in work] for name, work in works.items()},
        "best": {name: max(sizes, key=lambda s: runs[name, s].output_tok_s) for name in works},
        "predicted_waste_percent": {name: [predicted_waste(work, s) for s in sizes] for name, work in works.items()},
        "measured": [record(runs[name, size]) | {"kind": name} for name in works for size in sizes],
    }


def _works(context: LabContext) -> dict[str, Workload]:
    vocab, seed = context.vocab, context.seed
    short_num, short_len = context.pick((28, (6, 14)), (64, (8, 24)), (384, (16, 48)))
    num, lengths = context.pick((16, (16, 40)), (32, (24, 96)), (192, (100, 300)))
    tail_num, longest = context.pick((16, 64), (32, 256), (192, 800))
    return {
        "short": even_lengths(vocab, seed, short_num, short_len, short_len),
        "general": even_lengths(vocab, seed + 1, num, lengths, lengths),
        "long-tail": longtail(vocab, seed=seed + 2, num=tail_num, longest=longest),
    }


def cache_tokens(work: Workload, width: int) -> int:
    """What `width` sequences of mean final length fill if nothing is wasted, and the longest one at least."""
    lengths = [len(prompt) + num_out for prompt, num_out in work]
    wanted = max(width * sum(lengths) / len(lengths), 1.25 * max(lengths) + 2 * SIZES[-1])
    return -(-int(wanted) // SIZES[-1]) * SIZES[-1]


def predicted_waste(work: Workload, block_size: int) -> float:
    """Percent of slots empty, from the lengths alone: the ends of last blocks over a request's life."""
    return mix_needs([Kind(len(prompt), num_out) for prompt, num_out in work], block_size).waste_percent


# -- what it says


@dataclass(slots=True)
class _Mix:
    """One mix of lengths with its runs, in the order of the sizes."""

    name: str
    runs: list[RunReport]
    predicted: list[float]  # percent of slots empty, from the lengths alone

    @property
    def waste(self) -> list[float]:
        return [kv_of(each).waste_percent_mean for each in self.runs]

    def speed(self, at: int) -> list[float]:
        """Throughput over that of the run at index `at`."""
        return [each.output_tok_s / self.runs[at].output_tok_s for each in self.runs]

    def allocated(self, at: int) -> float:
        """How many times as many blocks the smallest size allocates as the one at index `at`."""
        return kv_of(self.runs[0]).blocks_allocated / max(1, kv_of(self.runs[at]).blocks_allocated)


def tell(data: Data, context: LabContext) -> Result:
    sizes = data["sizes"]
    mixes = [
        _Mix(name, [run_of(each) for each in data["measured"] if each["kind"] == name], predicted)
        for name, predicted in data["predicted_waste_percent"].items()
    ]
    at = sizes.index(DEFAULT)
    empty = [listed([f"{number(mix.waste[i])} % ({mix.name})" for mix in mixes]) for i in (at, -1)]
    wastes = [mix.waste for mix in mixes]
    speeds = [[100 * ratio for ratio in mix.speed(at)] for mix in mixes]
    allocated = [[float(kv_of(each).blocks_allocated) for each in mix.runs] for mix in mixes]
    widths = [[each.running_mean for each in mix.runs] for mix in mixes]

    def by_size(title: str, unit: str, values: list[list[float]], note: str = "", log: str = "x") -> Chart:
        lines = {mix.name: (sizes, column) for mix, column in zip(mixes, values, strict=True)}
        return line_chart(title, "block size (tokens)", unit, lines, note=note, log=log)

    return Result(
        question="Which block size? Small blocks leave little empty and make long tables; large ones make short tables "
        "and leave the end of each sequence's last block empty, which a full cache feels as fewer sequences at once.",
        headline=f"blocks of {DEFAULT} leave {empty[0]} of their slots empty, blocks of {sizes[-1]} {empty[1]}",
        charts=[
            by_size("Slots of blocks in use that hold no token", "percent, mean over steps", wastes),
            by_size(
                "Throughput in a cache that is just large enough",
                f"percent of blocks of {DEFAULT}",
                speeds,
                "The cache holds what the batch needs if nothing is wasted, in bytes the same for every size.",
            ),
            by_size("Blocks allocated over the run", "blocks", allocated, log="xy"),
            by_size("Sequences that run in a step", "mean", widths),
        ],
        tables=[
            run_table(
                f"{mix.name.capitalize()} lengths",
                mix.runs,
                [
                    ("block size", sizes),
                    *("block bytes", "output tok/s"),
                    (f"% of {DEFAULT}", [f"{100 * ratio:.0f}" for ratio in mix.speed(at)]),
                    *("spread %", "sequences a step", "blocks allocated", "most blocks", "table entries", "empty %"),
                    ("predicted %", [number(percent) for percent in mix.predicted]),
                    *("preemptions", "tokens computed twice"),
                ],
                _note(data, mix.name),
            )
            for mix in mixes
        ],
        findings=_findings(mixes, sizes),
        explanation=[
            "What the cache does for speed are counts, which do not vary from run to run: empty memory admits nobody, "
            "so that fewer sequences share a step, and a preempted one is computed twice. A size that is faster than "
            f"{DEFAULT} without more sequences a step owes it to the steps' own speed: do not choose by it.",
            "What small blocks cost is bookkeeping: longer tables, and more blocks to take and give back.",
        ],
    )


def _note(data: Data, name: str) -> str:
    lengths = data["lengths"][name]
    return (
        f"{len(lengths)} requests, {min(lengths)}–{max(lengths)} tokens in and out, mean "
        f"{sum(lengths) / len(lengths):.0f}; a cache of {data['cache_tokens'][name]:,} tokens in every row. Predicted "
        "is from the lengths alone, by the arithmetic of quire plan."
    )


def _findings(mixes: list[_Mix], sizes: list[int]) -> list[Finding]:
    short = next(mix for mix in mixes if mix.name == "short")
    at = sizes.index(DEFAULT)
    gaps = [abs(seen - told) for mix in mixes for told, seen in zip(mix.predicted, mix.waste, strict=True)]
    noise, is_measured = _noise(mixes)
    fall, worst = short.speed(at)[-1], min(mix.speed(at)[0] for mix in mixes)
    how = f"runs differ by {noise:.0f} % anyway" if is_measured else f"single runs may differ by {noise:.0f} %"
    return [
        Finding(
            "The empty share grows with the block size: half a block of each sequence on average.",
            listed([f"{mix.name} {number(mix.waste[0])} to {number(mix.waste[-1])} %" for mix in mixes])
            + f" from {sizes[0]} to {sizes[-1]}.",
            all(mix.waste == sorted(mix.waste) for mix in mixes),
        ),
        Finding(
            "The lengths alone predict it (mean over a request's life; within 4 points on average).",
            f"{sum(gaps) / len(gaps):.1f} points off on average, at most {max(gaps):.1f}.",
            sum(gaps) / len(gaps) <= 4.0,
        ),
        Finding(
            f"On short requests large blocks cost throughput when the cache is just large enough: {sizes[-1]} "
            f"against {DEFAULT}.",
            f"{change(fall)} throughput; {number(short.runs[-1].running_mean)} instead of "
            f"{number(short.runs[at].running_mean)} sequences in a step, as {number(short.waste[-1])} % instead of "
            f"{number(short.waste[at])} % of the blocks' slots are empty.",
            fall < 1 - noise / 100 if abs(fall - 1) > noise / 100 else None,
        ),
        Finding(
            f"Small blocks make more of everything: blocks of {sizes[0]} are allocated at least three times as often "
            f"as those of {DEFAULT} (short requests aside, which end within few of either).",
            listed([f"{mix.name} {mix.allocated(at):.1f} times" for mix in mixes]) + ".",
            all(mix.allocated(at) >= 3 for mix in mixes if mix.name != "short"),
        ),
        Finding(
            f"That costs little where kernels read the tables: blocks of {sizes[0]} reach 90 % of {DEFAULT}'s speed.",
            f"{100 * worst:.0f} % in the worst of the three mixes; {how}.",
            True if worst >= 0.9 else (None if worst >= 0.9 - noise / 100 else False),
        ),
    ]


def _noise(mixes: list[_Mix]) -> tuple[float, bool]:
    """Percent by which two runs differ, and whether that was measured: the median of the rounds' spreads, or what is
    usual where there was one round."""
    usual = _NOISE_PERCENT[mixes[0].runs[0].settings["device"]]
    spreads = [each.spread_percent for mix in mixes for each in mix.runs if each.spread_percent is not None]
    return (max(statistics.median(spreads), usual / 2), True) if spreads else (usual, False)


EXPERIMENT = Experiment("block-size", "Block size: 4 to 128 tokens", measure, tell)
