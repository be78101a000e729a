"""The nearest name to one that is not known, for the end of a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ ": did you mean port?", or nothing where no name is near. `prefix` stands before the name, and is not compared:
    two dashes that all flags begin with would make short ones look alike."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {prefix}{near[0]}?" if near else ""
