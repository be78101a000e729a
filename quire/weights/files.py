"""Files of a model: only what is a file is opened, since a pipe would be waited for and a device never ends; and errors
name the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import WeightsError


def read_json(path: Path) -> Any:
    """What a JSON file holds; WeightsError if it is missing or holds something else."""
    with open_regular(path) as file:
        text = file.read()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise WeightsError(f"{path}: not valid JSON ({why}): fetch it again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds a {type(value).__name__}, expected an object: fetch it again")
    return value


def open_regular(path: Path) -> BinaryIO:
    """The file for reading; WeightsError if it cannot be read or is none."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to write to it. It changes nothing for a file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except FileNotFoundError:
        raise WeightsError(f"{path}: missing: fetch it again") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise WeightsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raise WeightsError(f"{path}: neither a file nor a link to one: put the model's own file there")
