"""The server's end of the sockets between it and the engine's process."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable

import zmq

from quire.engine.messages import Command, News, decode_news, encode

_MESSAGES_PER_TURN = 16  # then others on the event loop have theirs
_PREFIX = "quire-"
_SHORT_FOLDER = "/tmp"


class EngineLink:
    """Two sockets in a folder that only this user can enter. Neither side ever waits for the other."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_news: Callable[[News], None], on_error: Callable[[Exception], None]
    ) -> None:
        """`on_news` is called for each message, in the event loop; what it raises goes to `on_error`."""
        self._loop = loop
        self._on_news = on_news
        self._on_error = on_error
        self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_parent_folder())
        self.news_address = f"ipc://{self._folder}/news"
        self.commands_address = f"ipc://{self._folder}/commands"
        self._context = zmq.Context()
        self._news = self._context.socket(zmq.PULL)
        self._news.setsockopt(zmq.RCVHWM, 0)
        self._news.bind(self.news_address)
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        loop.add_reader(self._news.FD, self.read)

    def connect(self) -> None:
        """The engine listens now: commands can be sent."""
        self._commands.connect(self.commands_address)

    def send(self, command: Command) -> None:
        if not self._commands.closed:
            self._commands.send(encode(command), zmq.NOBLOCK)

    def read(self) -> None:
        """What has come. The descriptor tells of it once: whoever stops before the end must come again."""
        if self._news.closed:
            return
        for _ in range(_MESSAGES_PER_TURN):
            if not self._read_one():
                return
        self._loop.call_soon(self.read)

    def read_all(self) -> None:
        """Everything that there is: nothing more will come."""
        while not self._news.closed and self._read_one():
            pass

    def close(self) -> None:
        self._loop.remove_reader(self._news.FD)
        self._news.close(linger=0)
        self._commands.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_one(self) -> bool:
        try:
            message = self._news.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._on_news(decode_news(message))
        except Exception as error:
            self._on_error(error)
        return True


def _parent_folder() -> str:
    """The temporary folder; where TMPDIR makes a longer path of it than a Unix socket can have, a short one."""
    folder = tempfile.gettempdir()
    longest = f"{folder}/{_PREFIX}12345678/commands"
    return folder if len(os.fsencode(longest)) <= zmq.IPC_PATH_MAX_LEN else _SHORT_FOLDER
