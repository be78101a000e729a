"""JSON files of a model, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import WeightsError
from quire.weights.regular import open_regular


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; WeightsError if it is missing or holds something else."""
    with open_regular(path) as file:
        text = file.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise WeightsError(f"{path}: not valid JSON ({why}): fetch it again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds a {type(value).__name__}, expected an object: fetch it again")
    return value
