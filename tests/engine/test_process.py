"""The engine's process among others: signals, its parent's death, rest."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from sim_engine import SimSettings, sim_options

from quire.child import read_launch
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.launch import EngineProcessOptions
from quire.engine.link import decode_launch, encode_launch
from quire.engine.messages import Launch
from quire.params import SamplingParams

_PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from sim_engine import SimSettings, sim_options
from quire.config import EngineConfig
from quire.engine.client import EngineClient

async def main():
    config = EngineConfig(model=sys.argv[2], load_format="dummy")
    client = EngineClient(config, sim_options(SimSettings(hang_s=60)))
    await client.start()
    await client.ready()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def running(tiny_model: Path) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model=str(tiny_model), load_format="dummy")
    client = EngineClient(config, sim_options(SimSettings(step_s=0.005)))
    await client.start()
    await client.ready()
    try:
        yield client
    finally:
        await client.close()


def test_it_dies_with_its_parent(tiny_model: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(Path(__file__).parent.parent), str(tiny_model)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    deadline = time.monotonic() + 20
    while _is_alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its server"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_signals_that_are_the_servers_to_answer(tiny_model: Path) -> None:
    async with running(tiny_model) as client:
        assert client.pid is not None
        request = client.prepare("a", "hello", SamplingParams(max_tokens=50, ignore_eos=True))
        stream = client.stream(request)
        await anext(stream)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(client.pid, number)
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == "length"
        # A terminal's Ctrl-C does not reach it at all.
        assert os.getpgid(client.pid) != os.getpgid(0)


async def test_at_rest_it_burns_nothing(tiny_model: Path) -> None:
    async with running(tiny_model) as client:
        async for _ in client.stream(client.prepare("a", "hello", SamplingParams(max_tokens=5, ignore_eos=True))):
            pass
        processes = [psutil.Process(client.pid), psutil.Process()]
        before = [sum(p.cpu_times()[:2]) for p in processes]
        await asyncio.sleep(1.5)
        spent = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
        # The clock ticks in 10 ms; the heartbeats here are ten times as many as a server's.
        assert max(spent) <= 0.05, spent


def test_what_to_run_is_read_from_standard_input() -> None:
    launch = Launch(
        config=EngineConfig(model="m"),
        link=7,
        parent_pid=1,
        dies_with_parent_thread=False,
        log_level=20,
        options=EngineProcessOptions(),
    )
    data = encode_launch(launch)
    assert decode_launch(read_launch(io.BytesIO(struct.pack("<Q", len(data)) + data + b"more"))) == launch
    with pytest.raises(struct.error):
        read_launch(io.BytesIO(b""))
