"""The connection between a server and its engine's process: one pair of sockets that both were born with.

A message is a frame: its length in four bytes, then what a codec made of it. Neither side ever waits for the other:
what the other one has not read yet stays in memory here. There is no thread in between, and nothing in a file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from quire.engine.messages import Command, EngineMessage, Launch, Stop
from quire.wire import Codec, encoder

_MESSAGES_PER_TURN = 16  # then others on the event loop have theirs
_READ_BYTES = 1 << 16
_LENGTH_BYTES = 4
_TRY_AGAIN = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)  # what was sent of a frame needs its rest

commands: Codec[Command] = Codec(Command)
messages: Codec[EngineMessage] = Codec(EngineMessage)
encode_launch = encoder.encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode


class FrameSocket:
    """One end of the connection. Any thread may send; one reads."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.descriptor = connected.fileno()
        self._sending = threading.Lock()
        self.unsent = bytearray()  # what the system did not take yet
        self._partial = bytearray()  # the beginning of a frame
        self.is_ended = False  # the other side is gone, and all that it sent was read

    def send(self, frame: bytes) -> None:
        with self._sending:
            self.unsent += len(frame).to_bytes(_LENGTH_BYTES, "little")
            self.unsent += frame
            self._flush()

    def flush(self) -> None:
        """Send what the system takes by now of what it did not take before."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self._socket.send(self.unsent)]
        except OSError as error:
            if error.errno not in _TRY_AGAIN:  # the other side is gone and reads no more
                self.unsent.clear()

    def read(self) -> list[bytes] | None:
        """Read up to `_READ_BYTES` and return the whole frames; None if nothing has come."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # it was reset: the other process was killed while something lay unread there
            data = b""
        if not data:
            self.is_ended = True
            return []
        if self._partial:
            self._partial += data
            data = bytes(self._partial) if self._has_whole_frame() else b""
        frames, begin = [], 0
        while begin + _LENGTH_BYTES <= len(data):
            end = begin + _LENGTH_BYTES + int.from_bytes(data[begin : begin + _LENGTH_BYTES], "little")
            if end > len(data):
                break
            frames.append(data[begin + _LENGTH_BYTES : end])
            begin = end
        if data:
            self._partial = bytearray(data[begin:])
        return frames

    def _has_whole_frame(self) -> bool:
        """Whether a whole frame is here. A long frame in many pieces is not copied before its last piece."""
        length = int.from_bytes(self._partial[:_LENGTH_BYTES], "little")
        return len(self._partial) >= _LENGTH_BYTES + length

    def wait(self, seconds: float | None) -> bool:
        """Wait at most so many seconds; returns whether something has come. Unsent frames are sent meanwhile. For a
        process with few open files: select() takes descriptors below 1,024 only."""
        until_s = None if seconds is None else time.perf_counter() + seconds
        while True:
            writing = [self.descriptor] if self.unsent else []
            # To the microsecond, where a poll knows milliseconds.
            readable, writable, _ = select.select([self.descriptor], writing, [], seconds)
            if writable:
                self.flush()
            if readable or not writable:
                return bool(readable)
            if until_s is not None:
                seconds = max(0.0, until_s - time.perf_counter())

    def close(self, linger_s: float = 0.0) -> None:
        """linger_s: how long the other side may take to read the unsent frames."""
        until_s = time.perf_counter() + linger_s
        while self.unsent and (left_s := until_s - time.perf_counter()) > 0:
            select.select([], [self.descriptor], [], left_s)
            self.flush()
        self._socket.close()


class EngineEnd:
    """The engine's end."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: inherited from the server, where it may be a high one."""
        self._frames = FrameSocket(socket.socket(fileno=os.dup(descriptor)))
        os.close(descriptor)
        self._received: deque[bytes] = deque()
        self.close = self._frames.close

    def send(self, message: EngineMessage) -> None:
        self._frames.send(messages.encode(message))

    def receive(self, wait_s: float | None) -> Command | None:
        """The next command. Waits for one so many seconds, or, with None, until one comes."""
        while not self._received:
            if not self._frames.wait(wait_s):
                return None
            self._received += self._frames.read() or ()
            if self._frames.is_ended:
                return Stop()  # the server is gone
        return commands.decode(self._received.popleft())


class EngineLink:
    """The server's end, in an event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineMessage], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """`on_message` is called for each message, in the event loop; what it raises goes to `on_error`."""
        self._loop = loop
        self._on_message = on_message
        self._on_error = on_error
        ours, self.engines_end = socket.socketpair()
        self._frames = FrameSocket(ours)
        self._received: deque[bytes] = deque()
        self._is_writing = self._is_reading_on = self._is_closed = False
        loop.add_reader(self._frames.descriptor, self.read)

    def send(self, command: Command) -> None:
        if self._is_closed:
            return
        self._frames.send(commands.encode(command))
        if self._frames.unsent and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._frames.descriptor, self._write)

    def _write(self) -> None:
        self._frames.flush()
        if not self._frames.unsent:
            self._is_writing = False
            self._loop.remove_writer(self._frames.descriptor)

    def read(self) -> None:
        """Take some of the messages that have come: the loop calls again for those left in the socket."""
        if self._is_closed:
            return
        if not self._received:
            self._received += self._frames.read() or ()
            if self._frames.is_ended:
                self._loop.remove_reader(self._frames.descriptor)
        for _ in range(min(_MESSAGES_PER_TURN, len(self._received))):
            self._take(self._received.popleft())
        if self._received and not self._is_reading_on:
            self._is_reading_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_reading_on = False
        self.read()

    def read_all(self) -> None:
        """Take all messages that have come, when no more will come."""
        while not self._is_closed and not self._frames.is_ended and (frames := self._frames.read()) is not None:
            self._received += frames
        while self._received:
            self._take(self._received.popleft())

    def _take(self, frame: bytes) -> None:
        try:
            self._on_message(messages.decode(frame))
        except Exception as error:
            self._on_error(error)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._frames.descriptor)
            self._loop.remove_writer(self._frames.descriptor)
        self._frames.close()
        self.engines_end.close()
