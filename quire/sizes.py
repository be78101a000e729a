"""Sizes of memory as people write them, read the same way everywhere."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgt])(i?b|i)?|b)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_size(text: str) -> int:
    """Bytes. 4GiB and 4G are 4 times 2^30, 4GB and 4g 4 times 10^9 (a single letter as vLLM reads it), 4096 is bytes.
    ValueError that says what it wants."""
    match = _SIZE.fullmatch(text.strip())
    num_bytes = 0.0
    if match is not None:
        number, unit, rest = match.groups(default="")
        is_binary = "i" in rest.lower() or (not rest and unit.isupper())
        num_bytes = float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.lower()]
    if num_bytes < 1:
        raise ValueError("a size such as 4GiB, 4G, 4096M or 4294967296 (bytes)")
    return int(num_bytes)


def show_size(num_bytes: int) -> str:
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.2f} {unit}"
    return f"{num_bytes} B"
