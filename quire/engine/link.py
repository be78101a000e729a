"""Messages as bytes, and the server's end of the sockets between it and the engine's process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable

import msgspec
import zmq

from quire.engine.messages import Command, EngineMessage, Launch
from quire.wire import Codec, encoder

_MESSAGES_PER_TURN = 16  # then others on the event loop have theirs
_PREFIX = "quire-"
_LOCK = "lock"
_SHORT_FOLDER = "/tmp"

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
        remove_abandoned_folders(_parent_folder())
        self._folder, self._lock = _make_folder(_parent_folder())
        self.outputs_address = f"ipc://{self._folder}/outputs"
        self.commands_address = f"ipc://{self._folder}/commands"
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
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

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


def _make_folder(parent: str) -> tuple[str, int]:
    """A folder of our own, and the descriptor that holds its lock: the system lets go of that when we die."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        lock = _try_lock(folder, os.O_CREAT | os.O_EXCL)
        if lock is not None and os.path.exists(folder):
            return folder, lock
        # A server that starts beside us took the folder, which was not locked yet, for a dead one's.
        if lock is not None:
            os.close(lock)


def remove_abandoned_folders(parent: str) -> None:
    """What servers left that were killed: folders of this user whose lock nobody holds. Others' are left alone, and so
    is what has no lock."""
    with os.scandir(parent) as entries:
        folders = [one for one in entries if one.name.startswith(_PREFIX) and one.is_dir(follow_symlinks=False)]
    for folder in folders:
        try:
            is_ours = folder.stat(follow_symlinks=False).st_uid == os.getuid()
            lock = _try_lock(folder.path) if is_ours else None
        except OSError:  # it has no lock, or is gone
            continue
        if lock is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: str, flags: int = 0) -> int | None:
    """None: somebody holds it."""
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _parent_folder() -> str:
    """The temporary folder; where TMPDIR makes a longer path of it than a Unix socket can have, a short one."""
    folder = tempfile.gettempdir()
    longest = f"{folder}/{_PREFIX}12345678/commands"
    return folder if len(os.fsencode(longest)) <= zmq.IPC_PATH_MAX_LEN else _SHORT_FOLDER
