"""Seeded workloads: lists of (prompt token ids, output length). Every engine is measured on exactly these."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Workload = list[tuple[list[int], int]]


def _ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(10, vocab) for _ in range(count)]


def single(vocab: int, seed: int = 4, num_in: int = 128, num_out: int = 256) -> Workload:
    """One stream."""
    return [(_ids(random.Random(seed), num_in, vocab), num_out)]


def single64(vocab: int, seed: int = 4) -> Workload:
    """One stream for a CPU."""
    return single(vocab, seed, 64, 128)


def lab16(vocab: int, seed: int = 0) -> Workload:
    """16 short prompts, 128 new tokens each."""
    rng = random.Random(seed)
    return [(_ids(rng, 8, vocab), 128) for _ in range(16)]


def mixed256(vocab: int, seed: int = 0) -> Workload:
    """256 sequences, 100-1024 tokens in, 100-1024 out."""
    rng = random.Random(seed)
    return [(_ids(rng, rng.randint(100, 1024), vocab), rng.randint(100, 1024)) for _ in range(256)]


def mixed64(vocab: int, seed: int = 0) -> Workload:
    """The same idea for a CPU: 64 sequences, 16-256 in, 16-256 out."""
    rng = random.Random(seed)
    requests: Workload = []
    for _ in range(64):
        num_in, num_out = rng.randint(16, 256), rng.randint(16, 256)
        requests.append((_ids(rng, num_in, vocab), num_out))
    return requests


def sharegpt(vocab: int, seed: int = 1, num: int = 1000) -> Workload:
    """Log-normal lengths with the means of the PagedAttention paper's ShareGPT trace, clipped to 4..2048."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return max(4, min(2048, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    return [(_ids(rng, draw(161, 1.0), vocab), draw(338, 0.9)) for _ in range(num)]


def prefill(vocab: int, seed: int = 3) -> Workload:
    """256 prompts of 2,048, 16 out."""
    rng = random.Random(seed)
    return [(_ids(rng, 2048, vocab), 16) for _ in range(256)]


def prefill512(vocab: int, seed: int = 3) -> Workload:
    """8 prompts of 512, one token out each: prompt speed on a CPU."""
    rng = random.Random(seed)
    return [(_ids(rng, 512, vocab), 1) for _ in range(8)]


def shared_prefix(vocab: int, seed: int = 2, num: int = 256, prefix: int = 2048, suffix: int = 64) -> Workload:
    """A system prompt that every request repeats."""
    rng = random.Random(seed)
    head = _ids(rng, prefix, vocab)
    return [(head + _ids(rng, suffix, vocab), 64) for _ in range(num)]


WORKLOADS: dict[str, Callable[..., Workload]] = {
    f.__name__: f for f in (single, single64, lab16, mixed256, mixed64, sharegpt, prefill, prefill512, shared_prefix)
}
