"""Messages as bytes, and the server's end of the sockets between it and the engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from quire.engine.messages import Command, EngineMessage, Launch
from quire.socket_folder import SocketFolder, end_context
from quire.wire import Codec, encoder

_MESSAGES_PER_TURN = 16  # then others on the event loop have theirs

commands: Codec[Command] = Codec(Command)
messages: Codec[EngineMessage] = Codec(EngineMessage)
encode_launch = encoder.encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode


class EngineLink:
    """Two sockets in a folder that only this user can enter. Neither side ever waits for the other."""

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
        self._folder = SocketFolder()
        self.outputs_address = self._folder.address("outputs")
        self.commands_address = self._folder.address("commands")
        self._context = zmq.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.setsockopt(zmq.RCVHWM, 0)
        self._outputs.bind(self.outputs_address)
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        loop.add_reader(self._outputs.FD, self.read)

    def connect(self) -> None:
        """The engine listens now: commands can be sent."""
        self._commands.connect(self.commands_address)

    def send(self, command: Command) -> None:
        if not self._commands.closed:
            self._commands.send(commands.encode(command), zmq.NOBLOCK)

    def read(self) -> None:
        """What has come. The descriptor tells of it once: whoever stops before the end must come again."""
        if self._outputs.closed:
            return
        for _ in range(_MESSAGES_PER_TURN):
            if not self._read_one():
                return
        self._loop.call_soon(self.read)

    def read_all(self) -> None:
        """Everything that there is: nothing more will come."""
        while not self._outputs.closed and self._read_one():
            pass

    def close(self) -> None:
        self._loop.remove_reader(self._outputs.FD)
        self._outputs.close(linger=0)
        self._commands.close(linger=0)
        end_context(self._context)
        self._folder.close()

    def _read_one(self) -> bool:
        try:
            message = self._outputs.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._on_message(messages.decode(message))
        except Exception as error:
            self._on_error(error)
        return True
