"""Workloads of the experiments, by the lengths they mix. All are seeded."""

from __future__ import annotations

import random

from quire.bench.workloads import Workload


def even_lengths(vocab: int, seed: int, num: int, prompt: tuple[int, int], output: tuple[int, int]) -> Workload:
    """Lengths drawn evenly from a range, both ends included."""
    rng = random.Random(seed)
    found: Workload = []
    for _ in range(num):
        num_in, num_out = rng.randint(*prompt), rng.randint(*output)
        found.append(([rng.randrange(10, vocab) for _ in range(num_in)], num_out))
    return found


def long_tail(vocab: int, seed: int, num: int, longest: int) -> Workload:
    """Mostly short, a few very long: Pareto lengths from 8 up, cut at `longest`."""
    from quire.bench.workloads import longtail

    return longtail(vocab, seed=seed, num=num, longest=longest)


def static_share(workload: Workload, batch_size: int) -> float:
    """Share of a static batch's rows by steps that make a token somebody asked for."""
    outputs = [num_out for _, num_out in workload]
    batches = [outputs[i : i + batch_size] for i in range(0, len(outputs), batch_size)]
    return sum(outputs) / sum(len(batch) * max(batch) for batch in batches)
