"""Numbers as people write them, in tables, on axes and in sentences; and tables of text."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, with commas: 1,234 and 12.3 and 0.045. A dash stands for a missing value."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places > digits else text


def about(value: float) -> str:
    """Two significant digits, for an extrapolation: 37,000."""
    return number(float(f"{value:.2g}"))


def short(value: float) -> str:
    """For axes: no trailing zeros, and k, M, G instead of thousands."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            divisor = 1e3 if unit == "k" else scale
            return f"{value / divisor:g}{unit}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(num_bytes: float | None, places: int | None = None) -> str:
    """1.23 GiB: three digits, or so many places."""
    if num_bytes is None:
        return "–"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{number(value) if places is None else f'{value:,.{places}f}'} {unit}"
    return f"{num_bytes:,.0f} B"


def duration(seconds: float | None) -> str:
    """1.23 s, 45.6 ms, 3 min 20 s."""
    if seconds is None:
        return "–"
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1:
        return f"{number(seconds)} s"
    if seconds >= 1e-3:
        return f"{number(1e3 * seconds)} ms"
    return f"{number(1e6 * seconds)} µs"


def ms(seconds: float | None) -> str:
    """Seconds as milliseconds, without the unit, for a column that names it."""
    return number(None if seconds is None else 1e3 * seconds)


def times(ratio: float) -> str:
    """A ratio: 2.3 times, or percent where it is below 1.1."""
    if ratio >= 1.1:
        return f"{number(ratio, 2 if ratio < 10 else 3)} times"
    return f"{100 * ratio:.0f} %"


def times_the(ratio: float, what: str) -> str:
    """2.3 times the throughput, or 94 % of the throughput."""
    return f"{times(ratio)} {'' if ratio >= 1.1 else 'of '}the {what}"


def change(ratio: float) -> str:
    """A ratio as a change: 12 % more, 3 % less, the same."""
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.5:
        return "the same"
    return f"{abs(percent):.0f} % {'more' if percent > 0 else 'less'}"


def signed_percent(value: float) -> str:
    """+0.023 %, and no sign where it rounds to zero."""
    return "0.000 %" if abs(value) < 0.0005 else f"{value:+.3f} %"


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def counted(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = aligned([heads, *rows])
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, the others to the right, as wide as they need to be."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
