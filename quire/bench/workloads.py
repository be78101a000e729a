"""Seeded workloads: lists of (prompt token ids, output length), and when they arrive. All engines get the same."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

from quire.errors import ConfigError

Workload = list[tuple[list[int], int]]

# Large vocabularies end in special tokens; prompts are made of what stands before.
_LARGEST_VOCAB = 128_000


def usable_vocab(vocab_size: int) -> int:
    """Token ids of prompts are below this."""
    return min(vocab_size, _LARGEST_VOCAB)


def _ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(10, vocab) for _ in range(count)]


# -- of one size


def single(vocab: int, seed: int = 4, num_in: int = 128, num_out: int = 256) -> Workload:
    """One stream."""
    return [(_ids(random.Random(seed), num_in, vocab), num_out)]


def single64(vocab: int, seed: int = 4) -> Workload:
    """One stream for a CPU: 64 in, 128 out."""
    return single(vocab, seed, 64, 128)


def lab16(vocab: int, seed: int = 0) -> Workload:
    """16 short prompts, 128 new tokens each."""
    rng = random.Random(seed)
    return [(_ids(rng, 8, vocab), 128) for _ in range(16)]


def prefill(vocab: int, seed: int = 3, num: int = 256, num_in: int = 2048, num_out: int = 16) -> Workload:
    """Prompts of 2,048, 16 out."""
    rng = random.Random(seed)
    return [(_ids(rng, num_in, vocab), num_out) for _ in range(num)]


def prefill512(vocab: int, seed: int = 3) -> Workload:
    """8 prompts of 512, one token out each: prompt speed on a CPU."""
    return prefill(vocab, seed, 8, 512, 1)


def fixed(vocab: int, seed: int = 5, num: int = 16, num_in: int = 64, num_out: int = 64) -> Workload:
    """Every prompt and every output of the same length, which flags choose."""
    return prefill(vocab, seed, num, num_in, num_out)


# -- of many sizes


def mixed256(vocab: int, seed: int = 0, num: int = 256) -> Workload:
    """256 sequences, 100-1024 tokens in, 100-1024 out."""
    rng = random.Random(seed)
    return [(_ids(rng, rng.randint(100, 1024), vocab), rng.randint(100, 1024)) for _ in range(num)]


def mixed64(vocab: int, seed: int = 0, num: int = 64) -> Workload:
    """The same idea for a CPU: 64 sequences, 16-256 in, 16-256 out."""
    return even_lengths(vocab, seed, num, (16, 256), (16, 256))


def sharegpt(vocab: int, seed: int = 1, num: int = 1000) -> Workload:
    """Log-normal lengths with the means of the PagedAttention paper's ShareGPT trace, clipped to 4..2048."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return max(4, min(2048, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    return [(_ids(rng, draw(161, 1.0), vocab), draw(338, 0.9)) for _ in range(num)]


def random_lengths(
    vocab: int, seed: int = 6, num: int = 16, num_in: int = 64, num_out: int = 64, range_ratio: float = 0.5
) -> Workload:
    """Lengths drawn evenly from (1 - range_ratio) to (1 + range_ratio) times what flags choose."""
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"the range ratio must be from 0 to below 1, got {range_ratio:g}")
    rng = random.Random(seed)

    def draw(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - range_ratio))), math.ceil(mean * (1 + range_ratio)))

    requests: Workload = []
    for _ in range(num):
        length = draw(num_in)
        requests.append((_ids(rng, length, vocab), draw(num_out)))
    return requests


def even_lengths(vocab: int, seed: int, num: int, prompt: tuple[int, int], output: tuple[int, int]) -> Workload:
    """Lengths drawn evenly from a range, both ends included."""
    rng = random.Random(seed)
    requests: Workload = []
    for _ in range(num):
        num_in, num_out = rng.randint(*prompt), rng.randint(*output)
        requests.append((_ids(rng, num_in, vocab), num_out))
    return requests


def longtail(vocab: int, seed: int = 7, num: int = 32, longest: int = 512) -> Workload:
    """Mostly short, a few very long: Pareto lengths from 8 up, cut at `longest`."""
    rng = random.Random(seed)

    def draw() -> int:
        return min(longest, int(8 * rng.paretovariate(0.9)))

    requests: Workload = []
    for _ in range(num):
        length = draw()
        requests.append((_ids(rng, length, vocab), draw()))
    return requests


def burst(vocab: int, seed: int = 8, num: int = 48) -> Workload:
    """Chat-sized requests, 16-128 in and out, that arrive in groups of 16, two seconds apart."""
    return even_lengths(vocab, seed, num, (16, 128), (16, 128))


# -- with something in common


def shared_prefix(
    vocab: int, seed: int = 2, num: int = 256, prefix: int = 2048, suffix: int = 64, num_out: int = 64
) -> Workload:
    """A system prompt of 2,048 tokens that every request repeats."""
    rng = random.Random(seed)
    head = _ids(rng, prefix, vocab)
    return [(head + _ids(rng, suffix, vocab), num_out) for _ in range(num)]


def shared16(
    vocab: int, seed: int = 2, num: int = 16, prefix: int = 256, suffix: int = 32, num_out: int = 32
) -> Workload:
    """The same idea for a CPU: 16 requests, a system prompt of 256 tokens."""
    return shared_prefix(vocab, seed, num, prefix, suffix, num_out)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    f.__name__: f
    for f in (
        single, single64, lab16, mixed256, mixed64, sharegpt, prefill, prefill512,
        shared_prefix, shared16, fixed, longtail, burst,
    )
}  # fmt: skip
WORKLOADS["random"] = random_lengths


# Parameter -> what people call it.
_WORDS = {
    "num": "number of prompts",
    "num_in": "input length",
    "num_out": "output length",
    "range_ratio": "range ratio",
    "prefix": "shared prefix length",
    "suffix": "own part's length",
    "longest": "longest length",
}


def make_workload(name: str, vocab: int, **parameters: Any) -> Workload:
    """A workload by its name; parameters that are None keep its defaults, and one it does not have is refused."""
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}: there are {', '.join(sorted(WORKLOADS))}")
    make = WORKLOADS[name]
    given = {key: value for key, value in parameters.items() if value is not None}
    known = inspect.signature(make).parameters
    for key, value in given.items():
        if key not in known:
            able = sorted(other for other, f in WORKLOADS.items() if key in inspect.signature(f).parameters)
            raise ConfigError(f"the {_WORDS[key]} of workload {name} is fixed: it can be set for {', '.join(able)}")
        if key not in ("seed", "range_ratio") and value < 1:
            raise ConfigError(f"the {_WORDS[key]} of workload {name} must be at least 1, got {value}")
    if vocab <= 10:
        raise ConfigError(f"prompts need a vocabulary of more than 10 tokens, got {vocab}")
    return make(vocab, **given)


# -- when requests arrive: seconds from the start, ascending


def arrival_times(num: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`rate` requests per second on average; inf: all at once.

    The gaps follow a gamma distribution whose shape is `burstiness`: 1 is a Poisson process, less comes in bursts,
    more comes evenly, and inf at a fixed interval. The first request comes at once.
    """
    if not rate > 0:
        raise ConfigError(f"the request rate must be more than 0 per second (or inf), got {rate:g}")
    if not burstiness > 0:
        raise ConfigError(f"burstiness must be more than 0, got {burstiness:g}: 1 is Poisson, less is burstier")
    if math.isinf(rate):
        return [0.0] * num
    if math.isinf(burstiness):
        return [i / rate for i in range(num)]
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(num):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def burst_times(num: int, *, size: int = 16, every_s: float = 2.0) -> list[float]:
    """Groups of `size` at once, one every so many seconds."""
    if size < 1 or every_s <= 0:
        raise ConfigError(f"bursts need at least one request and some time between them, got {size} every {every_s} s")
    return [every_s * (i // size) for i in range(num)]
