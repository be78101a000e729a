"""A process that is killed while it stores, again and again: whatever it leaves, nothing wrong is served after."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from quire.tiers.disk import DiskStore
from quire.tiers.sealed import SEAL_BYTES, SealedStore

BLOCK = 20_000
NUM_KEYS = 400
NUM_KILLS = int(os.environ.get("QUIRE_NUM_KILLS", "10"))

WRITER = """
import sys
from tiers.test_kill import open_level, payload, put
level = open_level(sys.argv[1])
number = int(sys.argv[2])
while True:
    put(level, number % 400)
    number += 1
    print(number, flush=True)
"""


def open_level(path: str | Path) -> SealedStore:
    disk = DiskStore(path, max_bytes=4 << 20, record_bytes=BLOCK + SEAL_BYTES, identity=b"k" * 16)
    return SealedStore("disk", disk, identity=b"k" * 16, block_bytes=BLOCK)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(level: SealedStore, number: int) -> None:
    over = threading.Event()
    block = memoryview(bytearray(payload(number) + bytes(SEAL_BYTES)))
    level.start_store([key(number)], lambda: [block], lambda missing: over.set())
    over.wait()


def get(level: SealedStore, numbers: list[int]) -> dict[int, bytes]:
    over, came = threading.Event(), {}
    level.start_load(
        [key(n) for n in numbers],
        lambda place, data: came.__setitem__(numbers[place], bytes(data)),
        lambda missing: over.set(),
    )
    assert over.wait(60)
    return came


def test_killed_while_it_stores(tmp_path: Path) -> None:
    rng = random.Random(1)
    tests = str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((tests, *sys.path))}
    num_found = 0
    for round_number in range(NUM_KILLS):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(round_number * 37)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 120)):  # then at any moment of what comes next
            assert writer.stdout.readline()
        threading.Event().wait(rng.random() * 0.002)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        level = open_level(tmp_path)
        numbers = [n for n in range(NUM_KEYS) if level.contains(key(n))]
        came = get(level, numbers)
        assert all(data == payload(n) for n, data in came.items())
        num_found += len(came)
        level.close()
    assert num_found > NUM_KILLS
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 4 << 20
