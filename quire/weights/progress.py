"""A progress bar on the terminal; silent in a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_REDRAW_SECONDS = 0.1
_WIDTH = 20


class ProgressBar:
    """Call it with (done_bytes, total_bytes). Draws on stderr, and only where that is a terminal."""

    __slots__ = ("_drawn_at", "_is_full", "_label", "_length", "_started_at", "_stream", "enabled")

    def __init__(self, label: str, *, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self.enabled = self._stream.isatty()
        self._started_at: float | None = None
        self._drawn_at = 0.0
        self._length = 0
        self._is_full = False

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if not self.enabled:
            return
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now
        is_full = done_bytes >= total_bytes
        if self._is_full or (now - self._drawn_at < _REDRAW_SECONDS and not is_full):
            return
        self._drawn_at = now
        self._is_full = is_full
        share = min(1.0, done_bytes / total_bytes) if total_bytes else 1.0
        filled = round(share * _WIDTH)
        seconds = now - self._started_at
        rate = f"  {format_bytes(round(done_bytes / seconds))}/s" if seconds > 0.2 else ""
        self._draw(
            f"{self._label} {'█' * filled}{'░' * (_WIDTH - filled)} {share:4.0%}"
            f"  {format_bytes(done_bytes)} of {format_bytes(total_bytes)}{rate}"
        )

    def close(self) -> None:
        """Wipe the line: what remains on the screen is what the caller prints."""
        if self._length:
            self._draw("")
            self._length = 0

    def _draw(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._length)}" + ("" if text else "\r"))
        self._stream.flush()
        self._length = len(text)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def format_bytes(num_bytes: int) -> str:
    """94 MB, 1.5 GB: decimal units, as package indexes and hubs show them."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 99.5 or unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
