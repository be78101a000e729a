"""When requests come: seconds from the start, ascending."""

from __future__ import annotations

import math
import random

from quire.errors import ConfigError


def arrival_times(num: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`rate` requests per second on average; inf: all at once.

    The gaps follow a gamma distribution whose shape is `burstiness`: 1 is a Poisson process, less comes in bursts,
    more comes evenly. The first request comes at once.
    """
    if not rate > 0:
        raise ConfigError(f"the request rate must be more than 0 per second (or inf), got {rate:g}")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"burstiness must be more than 0, got {burstiness:g}: 1 is Poisson, less is burstier")
    if math.isinf(rate):
        return [0.0] * num
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
