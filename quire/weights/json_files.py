"""JSON files of a model, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import WeightsError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; WeightsError if it is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path}: missing: a model's directory needs it, fetch it again") from None
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds a {type(value).__name__}, expected an object: fetch it again")
    return value
