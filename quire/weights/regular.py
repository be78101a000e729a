"""Opening a model's files: only what is a file, since a pipe would be waited for and a device never ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from quire.errors import WeightsError


def open_regular(path: Path) -> BinaryIO:
    """The file for reading; WeightsError if it cannot be read or is none."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to write to it. It changes nothing for a file.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except FileNotFoundError:
        raise WeightsError(f"{path}: missing: fetch it again") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise WeightsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raise WeightsError(f"{path}: neither a file nor a link to one: put the model's own file there")
