"""The known names nearest to one that is not known, for the end of a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_CHARS = 200  # of the unknown word: it may be a request's whole body, and indexing that takes seconds


def nearest(word: object, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most `n` names, the nearest first. Names that go on after the word are nearer than all others."""
    text, names = str(word)[:_MAX_CHARS], list(known)
    longer = sorted((name for name in names if len(text) >= 3 and name.startswith(text)), key=len)
    close = difflib.get_close_matches(text, names, n, cutoff)
    return [*longer, *(name for name in close if name not in longer)][:n]


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ ": did you mean port?", or nothing where no name is near. `prefix` stands before the name, and is not compared:
    two dashes that all flags begin with would make short ones look alike."""
    near = nearest(word, known)
    return f": did you mean {prefix}{near[0]}?" if near else ""
