"""What Python's garbage collector need not look at."""

from __future__ import annotations

import gc


def keep_what_is_built() -> None:
    """Model, kernels and modules stay: without this, each full collection would walk over all of them."""
    gc.collect()
    gc.freeze()


def settle_for_serving() -> None:
    """For a process that serves from now on: young garbage, too, need not be looked for at every step."""
    keep_what_is_built()
    gc.set_threshold(10_000, 10, 10)
