"""What a request costs beside the model: processor time of a server's processes, and of the router before it.

    python -m benchmarks.http_cost                      # a server of `quire bench router`'s small model
    python -m benchmarks.http_cost --router --only completions-stream --num 600

Short prompts of which most is cached, answers of eight tokens. Processor time, unlike the clock, is nearly the same
on a busy machine; the model's own steps are in the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import psutil

from quire.bench.router import BLOCK_SIZE, Processes, free_port, serve_command, write_model

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_PROMPT = "a prefix that every prompt begins with, four blocks of it: " + "." * 5
KINDS = ("completions-stream", "completions", "chat-stream", "chat")


def body_of(kind: str, num_out: int, rng: random.Random) -> tuple[str, dict[str, object]]:
    text = _PROMPT + "".join(rng.choices("abcdefgh", k=BLOCK_SIZE))
    body: dict[str, object] = {"model": "bench", "max_tokens": num_out, "temperature": 0.0, "ignore_eos": True}
    if kind.endswith("-stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind.startswith("chat"):
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


async def send_all(session: aiohttp.ClientSession, url: str, kind: str, args: argparse.Namespace, num: int) -> None:
    rng = random.Random(time.time_ns())
    places = asyncio.Semaphore(args.concurrency)

    async def one() -> None:
        async with places:
            path, body = body_of(kind, args.tokens, rng)
            async with session.post(url + path, json=body) as response:
                answer = await response.read()
                assert response.status == 200, answer

    await asyncio.gather(*(one() for _ in range(num)))


def cpu_times(pids: dict[str, int]) -> Iterator[tuple[str, float]]:
    """Seconds by name: of a process's main thread and of its others."""
    for name, pid in pids.items():
        process = psutil.Process(pid)
        for thread in process.threads():
            yield name if thread.id == pid else f"{name}, threads", thread.user_time + thread.system_time


def totals(pids: dict[str, int]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in cpu_times(pids):
        found[name] = found.get(name, 0.0) + seconds
    return found


async def measure(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        processes = Processes(session, folder)
        stack.callback(processes.end)
        template = folder / "template.jinja"
        template.write_text(_TEMPLATE)
        server = url = f"http://127.0.0.1:{free_port()}"
        command = serve_command(write_model(folder), server, num_blocks=200, log_level=args.log_level)
        child = processes.start(server, *command, "--chat-template", str(template))
        await processes.ready(server)
        pids = {"HTTP": child.pid} | children_of(child)
        if args.router:
            url = f"http://127.0.0.1:{free_port()}"
            port = url.rsplit(":", 1)[1]
            flags = ["--port", port, "--log-level", args.log_level]
            pids["router"] = processes.start(url, sys.executable, "-P", "-m", "quire", "router", server, *flags).pid
            await processes.ready(url)
        for kind in args.only:
            await send_all(session, url, kind, args, 50)
            for _ in range(args.repeats):
                before, started_s = totals(pids), time.perf_counter()
                await send_all(session, url, kind, args, args.num)
                seconds = time.perf_counter() - started_s
                spent = {name: 1e3 * (s - before.get(name, 0.0)) / args.num for name, s in totals(pids).items()}
                shown = ", ".join(f"{name} {ms:.2f}" for name, ms in spent.items())
                print(f"{kind:>20}: ms a request: {shown}; {args.num / seconds:,.0f} requests/s", flush=True)


def children_of(child: subprocess.Popen[bytes]) -> dict[str, int]:
    found = psutil.Process(child.pid).children(recursive=True)
    names = ["engine" if "quire.engine" in " ".join(one.cmdline()) else "templates" for one in found]
    return {name: one.pid for name, one in zip(names, found, strict=True)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--num", type=int, default=300, metavar="N", help="requests a repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="of an answer (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--router", action="store_true", help="send through `quire router`")
    parser.add_argument("--log-level", default="error")
    asyncio.run(measure(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
