"""What a long run says of itself meanwhile, on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]  # called as a run goes, with its output tokens and finished requests so far

WARM_UP = "warming up"
_LINE_EVERY_S = 10.0


class WarmUpInterrupted(KeyboardInterrupt):
    """Ctrl-C before anything was measured: there is nothing to report."""


class RunProgress:
    """A run's stages, one after the other: its warm-up, then each of its repeats."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None

    def stage(self, name: str, num_requests: int, num_tokens: int | None = None) -> Progress:
        """The next one begins. Where its output tokens are not known before, a bar counts requests."""
        self.close()
        title = f"{self._label}, {name}" if name else self._label
        if not sys.stderr.isatty():
            return _lines(title, num_requests)
        from tqdm import tqdm

        total, unit = (num_requests, "req") if num_tokens is None else (num_tokens, "tok")
        bar = self._bar = tqdm(total=total, desc=title, unit=unit, dynamic_ncols=True, leave=False)

        def show(output_tokens: int, completed: int) -> None:
            if num_tokens is None:
                bar.set_postfix_str(f"{output_tokens:,} tokens", refresh=False)
                bar.update(completed - bar.n)
            else:
                bar.set_postfix_str(f"{completed} of {num_requests} requests", refresh=False)
                bar.update(output_tokens - bar.n)

        return show

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _lines(title: str, num_requests: int) -> Progress:
    """Lines for a log: few of them, each with the speed since the line before. The results say the rest."""
    told_s, told_tokens = time.monotonic(), 0

    def show(output_tokens: int, completed: int) -> None:
        nonlocal told_s, told_tokens
        now_s = time.monotonic()
        if now_s - told_s < _LINE_EVERY_S:
            return
        tok_s = (output_tokens - told_tokens) / (now_s - told_s)
        told_s, told_tokens = now_s, output_tokens
        text = f"{completed} of {num_requests} requests, {output_tokens:,} tokens out, {tok_s:,.1f} tok/s"
        print(f"quire: {title}: {text}", file=sys.stderr, flush=True)

    return show


@contextmanager
def run_progress(label: str) -> Iterator[RunProgress]:
    progress = RunProgress(label)
    try:
        yield progress
    except WarmUpInterrupted:
        progress.close()
        print(f"quire: {label}: interrupted in the warm-up, nothing was measured yet", file=sys.stderr)
        raise
    finally:
        progress.close()


def repeat_name(index: int, repeats: int) -> str:
    """What to call a repeat; nothing where it is the only one."""
    return f"run {index + 1} of {repeats}" if repeats > 1 else ""
