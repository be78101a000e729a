"""What a long run says of itself meanwhile, on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Progress = Callable[[int, int], None]  # called as a run goes, with its output tokens and finished requests so far

WARM_UP = "warming up"
_LINE_EVERY_S = 10.0


class WarmUpInterrupted(KeyboardInterrupt):
    """Ctrl-C before anything was measured: there is nothing to report."""


class _Stage(Protocol):
    """How one stage is shown."""

    def __call__(self, output_tokens: int, completed: int) -> None: ...

    def close(self) -> None: ...


class RunProgress:
    """A run's stages, one after the other: its warm-up, then each of its repeats."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._stage: _Stage | None = None

    def stage(self, name: str, num_requests: int, num_tokens: int | None = None) -> Progress:
        """The next one begins. Where its output tokens are not known before, a bar counts requests."""
        self.close()
        title = f"{self._label}, {name}" if name else self._label
        if sys.stderr.isatty():
            self._stage = _Bar(title, num_requests, num_tokens)
        else:
            self._stage = _Lines(title, num_requests)
        return self._stage

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None


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


class _Bar:
    """A bar that counts tokens or requests, with the other of the two behind it."""

    def __init__(self, title: str, num_requests: int, num_tokens: int | None) -> None:
        from tqdm import tqdm

        self._num_requests = num_requests
        self._counts_tokens = num_tokens is not None
        total, unit = (num_requests, "req") if num_tokens is None else (num_tokens, "tok")
        self._bar = tqdm(total=total, desc=title, unit=unit, dynamic_ncols=True, leave=False)

    def __call__(self, output_tokens: int, completed: int) -> None:
        bar = self._bar
        if self._counts_tokens:
            bar.set_postfix_str(f"{completed} of {self._num_requests} requests", refresh=False)
            bar.update(output_tokens - bar.n)
        else:
            bar.set_postfix_str(f"{output_tokens:,} tokens", refresh=False)
            bar.update(completed - bar.n)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Lines for a log: few of them, each with the speed since the line before."""

    def __init__(self, title: str, num_requests: int) -> None:
        self._title = title
        self._num_requests = num_requests
        self._told_s = time.monotonic()
        self._told_tokens = 0

    def __call__(self, output_tokens: int, completed: int) -> None:
        now = time.monotonic()
        if now - self._told_s < _LINE_EVERY_S:
            return
        tok_s = (output_tokens - self._told_tokens) / (now - self._told_s)
        self._told_s, self._told_tokens = now, output_tokens
        text = f"{completed} of {self._num_requests} requests, {output_tokens:,} tokens out, {tok_s:,.1f} tok/s"
        print(f"quire: {self._title}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The results say the rest."""
