"""A folder for sockets that only this user can enter, and that is gone when we are; and how sockets end."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading

import zmq

from quire.log import get_logger

_PREFIX = "quire-"
_LOCK = "lock"
_SHORT_FOLDER = "/tmp"
_END_S = 5.0


def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """After its sockets were closed. The library waits for its own threads here, and after a peer was killed it has
    been seen to wait forever: whoever closes an engine does not."""
    ending = threading.Thread(target=context.term, name="quire-sockets-end", daemon=True)
    ending.start()
    ending.join(_END_S)
    if ending.is_alive():
        get_logger().warning("sockets to processes that have ended could not be let go of; they end with this process")


class SocketFolder:
    """Made at once; what others left who were killed is removed on the way."""

    def __init__(self) -> None:
        remove_abandoned_folders(_parent_folder())
        self.path, self._lock = _make_folder(_parent_folder())

    def address(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


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
