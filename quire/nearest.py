"""The known names nearest to one that is not known, for the end of a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_CHARS = 200  # of the unknown word: it may be a request's whole body, and indexing that takes seconds


def nearest(word: object, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most `n` names, the nearest first."""
    return difflib.get_close_matches(str(word)[:_MAX_CHARS], list(known), n, cutoff)


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ ": did you mean port?", or nothing where no name is near. `prefix` stands before the name, and is not compared:
    two dashes that all flags begin with would make short ones look alike."""
    near = nearest(word, known)
    return f": did you mean {prefix}{near[0]}?" if near else ""
