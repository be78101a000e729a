"""Logits processors: code of the user's that changes logits before a token is drawn.

Two kinds. A request may bring callables (`SamplingParams.logits_processors`), each of which sees that request's tokens
and its line of logits. An engine may be made with plugins, classes with vLLM's interface, which see the lines of all
rows at once and are told who stands where. Both run on the host's time, which is counted; what raises ends its request.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.params import SamplingSpec
from quire.request import FinishReason

Failures = dict[int, tuple[FinishReason, str]]  # by line of the logits


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass(slots=True, frozen=True)
class BatchUpdate:
    """What changed in a plugin's batch, in vLLM's order: added, removed, moved. A line that is added where another
    stood replaces it. The lists of output tokens grow while the request runs."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingSpec, list[int], list[int]]]  # place, parameters, prompt tokens, output tokens
    moved: Sequence[tuple[int, int, MoveDirectionality]]  # from, to


class LogitsProcessor(Protocol):
    """vLLM's interface. A class is made with (engine config, device, False)."""

    def apply(self, logits: Tensor) -> Tensor:
        """logits: [batch, vocab] float32. May be changed in place; what is returned counts."""

    def is_argmax_invariant(self) -> bool:
        """True: it never changes which token is the likeliest. Then it runs after penalties and temperature, and not at
        all where every row is greedy. Otherwise it runs on the model's own logits."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each step; None: the batch is the same."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row's tokens as its processors see them."""

    spec: SamplingSpec
    prompt: list[int]
    output: list[int]
    unread: list[Tensor] = field(default_factory=list)  # sampled, and not on the host yet

    def read(self) -> None:
        """Waits for the device."""
        self.output.extend(int(token) for token in self.unread)
        self.unread.clear()


class LogitsProcessors:
    """Those of all rows. Rows of requests without any are not looked at, unless there are plugins."""

    def __init__(self, plugins: Iterable[LogitsProcessor] = ()) -> None:
        plugins = list(plugins)
        self._first = [plugin for plugin in plugins if not plugin.is_argmax_invariant()]
        self._last = [plugin for plugin in plugins if plugin.is_argmax_invariant()]
        self._rows: dict[int, _Row] = {}
        self._batch: list[_Row] = []  # as the plugins know it
        self._seconds = 0.0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def has(self, row: int) -> bool:
        return row in self._rows

    @property
    def has_last(self) -> bool:
        return bool(self._last)

    def take_seconds(self) -> float:
        """Host time since it was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def add(self, row: int, spec: SamplingSpec, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        if spec.logits_processors or self._first or self._last:
            self._rows[row] = _Row(spec, list(token_ids[:num_prompt_tokens]), list(token_ids[num_prompt_tokens:]))

    def fork(self, source_row: int, row: int, spec: SamplingSpec) -> None:
        if (source := self._rows.get(source_row)) is not None:
            source.read()
            self._rows[row] = _Row(spec, source.prompt, list(source.output))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def apply(self, logits: Tensor, rows: Sequence[int]) -> Failures:
        """All that run on the model's own logits, which are changed in place."""
        started = time.perf_counter()
        failures: Failures = {}
        for i, row in enumerate(rows):
            held = self._rows.get(row)
            if held is None:
                continue
            held.read()
            for processor in held.spec.logits_processors:
                try:
                    logits[i] = _checked(_call(processor, held, logits[i]), logits[i])
                except Exception as error:
                    failures[i] = _failure(processor, error)
                    break
        if self._first or self._last:
            self._run_plugins(self._first, logits, rows, failures, update=True)
        self._seconds += time.perf_counter() - started
        return failures

    def apply_last(self, logits: Tensor, rows: Sequence[int], temperatures: Tensor, failures: Failures) -> None:
        """Those that see the logits divided by the temperature, which the draw will do by itself. temperatures:
        [rows]; 0 is greedy."""
        started = time.perf_counter()
        drawn = temperatures > 0
        if bool(drawn.any()):
            scales = torch.where(drawn, temperatures, 1.0)[:, None].to(logits.dtype)
            logits /= scales
            self._run_plugins(self._last, logits, rows, failures, update=False)
            logits *= scales
        self._seconds += time.perf_counter() - started

    def follow(self, rows: Sequence[int], token_ids: Tensor) -> None:
        for i, row in enumerate(rows):
            if (held := self._rows.get(row)) is not None:
                held.unread.append(token_ids[i])

    def _run_plugins(
        self,
        plugins: Sequence[LogitsProcessor],
        logits: Tensor,
        rows: Sequence[int],
        failures: Failures,
        *,
        update: bool,
    ) -> None:
        """A plugin sees all lines: one that raises ends every request of the step, and is told of a new batch next."""
        plugin: LogitsProcessor | None = None
        try:
            if update:
                change = self._update([self._rows[row] for row in rows])
                for plugin in (*self._first, *self._last):
                    plugin.update_state(change)
            if not plugins:
                return
            place_of = {held: i for i, held in enumerate(self._batch)}
            places = [place_of[self._rows[row]] for row in rows]
            is_same = places == list(range(len(rows)))
            to_batch = torch.tensor(sorted(range(len(rows)), key=places.__getitem__), device=logits.device)
            lines = logits if is_same else logits.index_select(0, to_batch)
            for plugin in plugins:
                lines = _checked(plugin.apply(lines), lines)
            if not is_same:
                logits.index_copy_(0, to_batch, lines)
            elif lines is not logits:
                logits.copy_(lines)
        except Exception as error:
            self._batch = []
            failures.update({i: _failure(plugin, error) for i in range(len(rows))})

    def _update(self, held: list[_Row]) -> BatchUpdate | None:
        """Whoever is new takes the place of one that is gone; what is left empty is filled from the end."""
        batch, wanted = self._batch, set(held)
        known = set(batch)
        new = [row for row in held if row not in known]
        empty = [i for i, row in enumerate(batch) if row not in wanted]
        if not new and not empty:
            return None
        added: list[tuple[int, SamplingSpec, list[int], list[int]]] = []
        for row in new:
            if empty:
                place = empty.pop(0)
                batch[place] = row
            else:
                place = len(batch)
                batch.append(row)
            added.append((place, row.spec, row.prompt, row.output))
        removed = list(empty)
        moved: list[tuple[int, int, MoveDirectionality]] = []
        while empty:
            last = len(batch) - 1
            if last == empty[-1]:
                empty.pop()
            else:
                batch[empty[0]] = batch[last]
                moved.append((last, empty.pop(0), MoveDirectionality.UNIDIRECTIONAL))
            batch.pop()
        return BatchUpdate(len(batch), removed, added, moved)


def _call(processor: Any, held: _Row, line: Tensor) -> Any:
    """With the output tokens and the logits, or with the prompt's tokens before them, as it is written."""
    try:
        count = len(inspect.signature(processor).parameters)
    except (TypeError, ValueError):
        count = 2
    return processor(held.prompt, held.output, line) if count == 3 else processor(held.output, line)


def _checked(found: Any, given: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != given.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"it must return logits of shape {tuple(given.shape)}, and gave {what}")
    return found


def _failure(processor: Any, error: Exception) -> tuple[FinishReason, str]:
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    return FinishReason.ERROR, f"logits processor {name} failed: {type(error).__name__}: {error}"


def load_plugins(names: Iterable[str | type], config: object, device: torch.device) -> list[LogitsProcessor]:
    """Plugins from classes, or from "module:Class"."""
    found: list[LogitsProcessor] = []
    for name in names:
        cls = name
        if isinstance(name, str):
            module, _, attribute = name.partition(":")
            try:
                cls = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError) as error:
                message = f"logits_processors: {name!r} cannot be loaded ({error}): write module:Class"
                raise ConfigError(message) from None
        missing = [each for each in ("apply", "is_argmax_invariant", "update_state") if not hasattr(cls, each)]
        if missing or not isinstance(cls, type):
            raise ConfigError(f"logits_processors: {name!r} is no class with {', '.join(missing) or 'these methods'}")
        try:
            found.append(cls(config, device, False))
        except Exception as error:
            raise ConfigError(f"logits_processors: {name!r} could not be made: {error!r}") from error
    return found
