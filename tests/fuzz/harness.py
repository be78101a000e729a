"""A small fuzzer: known inputs of a parser, changed at random, and what must hold for each of them.

An input must be taken, or refused with one of the target's own errors, within `max_cpu_s` and `MAX_GROWTH_BYTES`, and
a refusal must stay short: one that repeats its input is an attack on the log and on the answer. README.md says how to
add a target.
"""

from __future__ import annotations

import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
MAX_GROWTH_BYTES = 256 << 20  # of the process's memory at its peak, over what it was before an input
_FORGET_PEAK, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_PEAK = re.compile(r"VmHWM:\s*(\d+) kB")
_NUMBER = re.compile(rb"-?\d{1,20}")
_NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"255",
    b"65536",
    b"2147483648",
    b"4294967295",
    b"9223372036854775808",
    b"1e999",
    b"1e-9",
)
_MAX_CHANGES = 4
_MAX_REPEATED_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Target:
    """`parse` takes an input, or raises one of `refusals`. Anything else is a finding."""

    name: str  # also the folder of its known inputs in corpus/
    parse: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    words: tuple[bytes, ...] = ()  # what the format's syntax is made of, put in at random places
    seeds: Callable[[], list[bytes]] = list  # known inputs that are made in code, beside those in corpus/
    max_input_bytes: int = 1 << 18
    max_message_chars: int = 1_500  # of a refusal
    max_cpu_s: float = 1.0  # far over what an input so long takes, far under what a quadratic one does

    def known_inputs(self) -> list[bytes]:
        files = sorted(path for path in (CORPUS / self.name).glob("*") if path.is_file())
        return [path.read_bytes() for path in files] + self.seeds()


class Finding(Exception):
    """An input for which something does not hold."""

    def __init__(self, target: Target, data: bytes, what: str) -> None:
        shown = repr(data[:200]) + ("..." if len(data) > 200 else "")
        super().__init__(f"{target.name}: {what}; {len(data)} bytes: {shown}")
        self.data = data


class _TooSlow(BaseException):
    """From the timer, through parsers that catch every Exception."""


def fuzz(target: Target, *, seconds: float, seed: int = 0) -> int:
    """Try the known inputs, then changed ones for so many seconds of CPU time; returns how many. Raises a Finding."""
    known = target.known_inputs()
    assert known, f"{target.name} has nothing to begin with: put an input into {CORPUS / target.name}"
    for data in known:
        check(target, data)
    chance = random.Random(seed)
    num_inputs = len(known)
    ends_s = time.process_time() + seconds
    while time.process_time() < ends_s:
        check(target, changed(chance, known, target.words, target.max_input_bytes))
        num_inputs += 1
    return num_inputs


def check(target: Target, data: bytes) -> None:
    before = _peak_bytes(starts_anew=True)
    try:
        with _at_most(target.max_cpu_s):
            target.parse(data)
    except target.refusals as refusal:
        if len(str(refusal)) > target.max_message_chars:
            raise Finding(target, data, f"a refusal of {len(str(refusal))} characters") from refusal
    except _TooSlow:
        raise Finding(target, data, f"took more than {target.max_cpu_s:g} s of CPU time") from None
    except Exception as error:
        raise Finding(target, data, f"{type(error).__name__}: {str(error)[:500]}") from error
    if (growth := _peak_bytes() - before) > MAX_GROWTH_BYTES:
        raise Finding(target, data, f"took {growth >> 20} MiB of memory")


@contextmanager
def _at_most(cpu_s: float) -> Iterator[None]:
    """CPU time, so that a busy machine makes no finding. Only a program's first thread can be told."""
    assert threading.current_thread() is threading.main_thread()

    def stop(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _peak_bytes(*, starts_anew: bool = False) -> int:
    """The peak memory of the process so far. Linux can forget an old peak, and then also shows one that is lower."""
    if _FORGET_PEAK.exists():
        if starts_anew:
            _FORGET_PEAK.write_text("5")
        return int(_PEAK.search(_STATUS.read_text())[1]) << 10  # type: ignore[index]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def changed(chance: random.Random, known: list[bytes], words: tuple[bytes, ...], max_bytes: int) -> bytes:
    """One of the known inputs with one to four changes."""
    data = chance.choice(known)
    for _ in range(chance.randint(1, _MAX_CHANGES)):
        data = chance.choice(_CHANGES)(chance, data, known, words)[:max_bytes]
    return data


def _span(chance: random.Random, data: bytes) -> tuple[int, int]:
    """A piece of it, more often a short one."""
    start = chance.randint(0, len(data))
    return start, min(len(data), start + int(2 ** chance.uniform(0, 10)))


def _flip(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    if not data:
        return b"\0"
    flipped = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        flipped[chance.randrange(len(flipped))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return bytes(flipped)


def _drop(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    start, end = _span(chance, data)
    return data[:start] + data[end:]


def _cut(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    return data[: chance.randint(0, len(data))]


def _repeat(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A piece, or a word of the syntax, many times: what is quadratic shows, and what recurses."""
    start, end = _span(chance, data)
    piece = chance.choice(words) if words and chance.random() < 0.5 else data[start:end]
    times = min(int(2 ** chance.uniform(1, 17)), _MAX_REPEATED_BYTES // max(len(piece), 1))
    return data[:start] + piece * times + data[start:]


def _insert(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    start, _ = _span(chance, data)
    piece = chance.choice(words) if words else chance.randbytes(chance.randint(1, 8))
    return data[:start] + piece + data[start:]


def _number(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A number that is written out becomes an extreme one."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return _integer(chance, data, known, words)
    at = chance.choice(found)
    return data[: at.start()] + chance.choice(_NUMBERS) + data[at.end() :]


def _integer(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """Bytes of a binary format's integer become an extreme one."""
    num_bytes = chance.choice((1, 2, 4, 8))
    largest = 256**num_bytes - 1
    value = chance.choice((0, 1, largest, largest // 2, largest // 2 + 1, 10**7 % (largest + 1)))
    start = chance.randint(0, len(data))
    return data[:start] + value.to_bytes(num_bytes, "little") + data[start + num_bytes :]


def _splice(chance: random.Random, data: bytes, known: list[bytes], words: tuple[bytes, ...]) -> bytes:
    other = chance.choice(known)
    start, end = _span(chance, other)
    at, until = _span(chance, data)
    return data[:at] + other[start:end] + data[until:]


_CHANGES = (_flip, _drop, _cut, _repeat, _insert, _insert, _number, _number, _integer, _splice)
