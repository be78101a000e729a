"""A lock that one process at a time can hold, tied to a file. The system releases it when its holder dies."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

_POLL_SECONDS = 0.1

if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class FileLock:
    """`with FileLock(path):` waits its turn. The file stays: removing it would let two holders in at once."""

    __slots__ = ("_file", "_on_wait", "path")

    def __init__(self, path: Path, *, on_wait: Callable[[], None] | None = None) -> None:
        self.path = path
        self._on_wait = on_wait  # called once, when somebody else holds the lock
        self._file: IO[bytes] | None = None

    def __enter__(self) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        try:
            if not _try_lock(file):
                if self._on_wait is not None:
                    self._on_wait()
                while not _try_lock(file):
                    time.sleep(_POLL_SECONDS)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()  # releases the lock too
        self._file = None
