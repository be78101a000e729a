"""Standard input, output and error that whoever started us has closed (`quire serve 2>&-`)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Point each of them at the null device, before anything else is opened. A socket that got the number of one would
    be taken for it: libraries write there, libuv aborts on closing it, and an engine would inherit it."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            assert null == descriptor, "the lowest free number: those below are open"
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))
