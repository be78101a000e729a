"""The connection between server and engine, both ends in this process. test_client.py has it between two."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from quire.engine.link import EngineEnd, EngineLink, FrameSocket
from quire.engine.messages import Abort, Call, CallDone, EngineMessage, Heartbeat, Stop


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    one, other = (FrameSocket(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def read_everything(end: FrameSocket) -> list[bytes]:
    found = []
    while (frames := end.read()) is not None and not end.is_ended:
        found += frames
    return found


def test_frames_arrive_whole_and_in_order_whatever_their_lengths(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    rng = random.Random(0)
    sent = [rng.randbytes(rng.choice((0, 1, 3, 200, 70_000, 400_000))) for _ in range(60)]
    found = []
    for frame in sent:
        one.send(frame)  # never waits, though nobody has read the one before
    while one.unsent:
        found += other.read() or ()
        one.flush()
    assert found + read_everything(other) == sent


def test_nothing_waits_for_who_does_not_read_and_nothing_is_lost(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    sent = [bytes([number]) * 100_000 for number in range(50)]
    for frame in sent:
        one.send(frame)
    assert len(one.unsent) > 1_000_000
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(_until_ended(other)))
    reader.start()
    one.close(linger_s=10.0)
    reader.join()
    assert found == sent


def _until_ended(end: FrameSocket) -> Iterator[bytes]:
    while not end.is_ended:
        end.wait(None)
        yield from end.read() or ()


def test_who_waits_for_a_message_sends_what_is_unsent(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    one.send(bytes(1_000_000))

    def answer() -> None:
        while not other.read():
            other.wait(None)
        other.send(b"thanks")

    answering = threading.Thread(target=answer)
    answering.start()
    assert one.wait(10.0) and one.read() == [b"thanks"]
    answering.join()
    assert not one.wait(0.01)


def test_sending_to_who_is_gone_is_no_error(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    other.close()
    one.send(bytes(1_000_000))
    assert not one.unsent
    assert one.wait(None) and one.read() == [] and one.is_ended


def both(on_message: list[EngineMessage], errors: list[Exception]) -> tuple[EngineLink, EngineEnd]:
    def take(message: EngineMessage) -> None:
        if isinstance(message, CallDone) and message.value == "bad":
            raise ValueError("bad")
        on_message.append(message)

    link = EngineLink(asyncio.get_running_loop(), take, errors.append)
    engine = EngineEnd(os.dup(link.engines_end.fileno()))
    link.engines_end.close()
    return link, engine


class Crowded(socket.socket):
    """The system has no memory for what is sent now and then."""

    num_calls = 0

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        self.num_calls += 1
        if self.num_calls % 2:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return super().send(memoryview(data)[:1000], flags)


def test_a_frame_that_was_begun_is_ended_when_memory_is_short() -> None:
    ours, theirs = socket.socketpair()
    one, other = FrameSocket(Crowded(fileno=ours.detach())), FrameSocket(theirs)
    frames = [bytes([number]) * 3_000 for number in range(5)]
    for frame in frames:
        one.send(frame)
    while one.unsent:
        one.flush()
    assert read_everything(other) == frames
    one.close()
    other.close()


async def test_messages_both_ways_and_a_bad_one_takes_no_other_with_it() -> None:
    told: list[EngineMessage] = []
    errors: list[Exception] = []
    link, engine = both(told, errors)
    for number in range(40):
        link.send(Abort(number))
    assert [engine.receive(0.0) for _ in range(40)] == [Abort(number) for number in range(40)]
    assert engine.receive(0.0) is None
    values = [CallDone(number, "bad" if number == 20 else number) for number in range(50)]
    for value in values:
        engine.send(value)
    while len(told) < 49:
        await asyncio.sleep(0)
    assert told == [value for value in values if value.value != "bad"]
    assert [str(error) for error in errors] == ["bad"]
    link.close()
    engine.close()


async def test_a_flood_of_messages_leaves_turns_to_others() -> None:
    told: list[EngineMessage] = []
    most = before = 0
    link, engine = both(told, [])
    for _ in range(3_000):
        engine.send(Heartbeat(1.0, 0, None, None))
    while len(told) < 3_000:
        engine.receive(0.0)  # sends what is unsent
        await asyncio.sleep(0)
        most, before = max(most, len(told) - before), len(told)
    engine.close()
    link.close()
    assert most <= 32


async def test_a_long_command_reaches_an_engine_that_is_busy() -> None:
    link, engine = both([], [])
    call = Call(1, "name", {"text": "x" * 3_000_000})
    link.send(call)
    link.send(Abort(2))
    found = []
    while len(found) < 2:
        await asyncio.sleep(0.001)
        if (command := engine.receive(0.0)) is not None:
            found.append(command)
    assert found == [call, Abort(2)]
    link.close()
    engine.close()


async def test_what_an_engine_said_last_is_read_after_its_end() -> None:
    told: list[EngineMessage] = []
    link, engine = both(told, [])
    words = [Heartbeat(float(number), number, None, None) for number in range(2_000)]
    sending = threading.Thread(target=lambda: ([engine.send(one) for one in words], engine.close(10.0)))
    sending.start()
    while len(told) < len(words) and not link._frames.is_ended:
        link.read_all()
    sending.join()
    link.read_all()
    assert told == words
    link.close()
    link.send(Stop())  # nobody is there: no error


async def test_an_engine_of_a_server_with_thousands_of_connections() -> None:
    link = EngineLink(asyncio.get_running_loop(), lambda message: None, lambda error: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2_048 if hard == resource.RLIM_INFINITY else min(2_048, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        engine = EngineEnd(fcntl.fcntl(link.engines_end.fileno(), fcntl.F_DUPFD, 1_100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    link.send(Abort(1))
    assert engine.receive(1.0) == Abort(1)
    link.close()
    engine.close()


async def test_an_engine_whose_server_is_gone_stops() -> None:
    link, engine = both([], [])
    link.send(Abort(1))
    link.close()
    assert engine.receive(None) == Abort(1)
    assert engine.receive(None) == Stop()
    engine.close()
