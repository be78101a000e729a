"""A server under load and under clients that hang up: does it stay up, and does it give everything back?

    quire serve --port 8000 &
    python -m benchmarks.soak http://127.0.0.1:8000 --minutes 5

Streaming clients ask again and again; others ask and leave at a random moment. Meanwhile /health is read every second.
At the end every block must be free or cached, and the processes' memory must not have grown since the first minute.
Exit code 1 says that something of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from quire.bench.client import REFUSED, ClientRequest, Target, find_model, send

_WORDS = ("sea", "ship", "storm", "light", "tower", "keeper", "letter", "winter", "harbour", "song", "map", "island")
_GROWTH_ALLOWED = 0.10  # of resident memory, from the first minute to the end


@dataclass(slots=True)
class Tally:
    finished: int = 0
    hung_up: int = 0
    refused: int = 0  # 429
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unhealthy: Counter[str] = field(default_factory=Counter)
    health_checks: int = 0
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)


def _request(rng: random.Random) -> ClientRequest:
    words = " ".join(rng.choices(_WORDS, k=rng.randint(4, 120)))
    style = "You tell very short stories." if rng.random() < 0.7 else "You are terse."
    return ClientRequest(f"{style} A story with: {words}", rng.randint(8, 96))


async def _ask(session: Any, target: Target, request: ClientRequest, tally: Tally, leave_after_s: float | None) -> None:
    """One request. With `leave_after_s` the connection is closed then, wherever the answer stands."""
    try:
        async with asyncio.timeout(leave_after_s):
            outcome = await send(session, target, request)
    except TimeoutError:
        tally.hung_up += 1
        return
    if outcome.error == REFUSED:
        tally.refused += 1
        await asyncio.sleep(1.0)
    elif outcome.error is not None:
        tally.errors[f"{outcome.error} {outcome.detail}"[:80]] += 1
    else:
        tally.tokens += outcome.output_tokens
        tally.finished += 1


async def _client(session: Any, target: Target, seed: int, until: float, tally: Tally) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        await _ask(session, target, _request(rng), tally, None)


async def _quitters(session: Any, target: Target, count: int, started: float, until: float, tally: Tally) -> None:
    """`count` clients spread over the run, each leaving within five seconds."""
    rng = random.Random(10_000)
    tasks = []
    for i in range(count):
        await asyncio.sleep(max(0.0, started + (until - started) * 0.95 * i / count - time.monotonic()))
        request = replace(_request(rng), num_out=512)
        tasks.append(asyncio.create_task(_ask(session, target, request, tally, rng.uniform(0.001, 5.0))))
    await asyncio.gather(*tasks)


async def _watch(session: Any, url: str, pid: int | None, started: float, until: float, tally: Tally) -> None:
    import psutil

    while time.monotonic() < until:
        tally.health_checks += 1
        try:
            async with session.get(f"{url}/health", timeout=5) as reply:
                if reply.status != 200:
                    tally.unhealthy[f"status {reply.status}"] += 1
        except Exception as error:
            tally.unhealthy[type(error).__name__] += 1
        if pid is not None:
            server = psutil.Process(pid)
            family = [server, *server.children(recursive=True)]
            tally.rss_bytes.append((time.monotonic() - started, sum(p.memory_info().rss for p in family)))
        await asyncio.sleep(1.0)


async def _used_blocks(session: Any, url: str) -> float:
    async with session.get(f"{url}/metrics") as reply:
        for line in (await reply.text()).splitlines():
            if line.startswith("quire:kv_blocks_used"):
                return float(line.rsplit(" ", 1)[1])
    raise RuntimeError(f"{url}/metrics has no quire:kv_blocks_used")


async def soak(url: str, minutes: float, num_clients: int, num_quitters: int, pid: int | None) -> tuple[Tally, float]:
    import aiohttp

    tally = Tally()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        target = Target(base_url=url, endpoint="/v1/chat/completions")
        target = replace(target, model=await find_model(target))
        greedy, drawn = (replace(target, body={"temperature": value}) for value in (0.0, 0.8))
        started = time.monotonic()
        until = started + 60 * minutes
        await asyncio.gather(
            *(_client(session, (greedy, drawn)[seed % 2], seed, until, tally) for seed in range(num_clients)),
            _quitters(session, drawn, num_quitters, started, until, tally),
            _watch(session, url, pid, started, until, tally),
        )
        await asyncio.sleep(2.0)
        return tally, await _used_blocks(session, url)


def _grown(tally: Tally, minutes: float) -> float | None:
    """By which share memory grew from the end of the first minute (or first quarter) to the end."""
    after = min(60.0, 15 * minutes)
    first = next((rss for when, rss in tally.rss_bytes if when >= after), None)
    return None if first is None else tally.rss_bytes[-1][1] / first - 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64, help="that stream all the time (default 64)")
    parser.add_argument("--quitters", type=int, default=200, help="that hang up (default 200)")
    parser.add_argument("--pid", type=int, default=None, help="of the server, to watch its memory")
    args = parser.parse_args(argv)
    tally, used_blocks = asyncio.run(soak(args.url, args.minutes, args.clients, args.quitters, args.pid))
    grown = _grown(tally, args.minutes)
    print(f"{tally.finished} answered, {tally.tokens} tokens ({tally.tokens / (60 * args.minutes):.0f} tok/s)")
    print(f"{tally.hung_up} hung up, {tally.refused} refused with 429, errors: {dict(tally.errors) or 'none'}")
    print(f"/health: {tally.health_checks} checks, not 200: {dict(tally.unhealthy) or 'none'}")
    print(f"blocks in use at the end: {used_blocks:g}")
    if grown is not None:
        print(
            f"memory at the end {tally.rss_bytes[-1][1] / 2**20:.0f} MiB, {100 * grown:+.1f} % since the first minute"
        )
    failed = tally.errors or tally.unhealthy or used_blocks or (grown or 0.0) > _GROWTH_ALLOWED
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
