"""A batch's requests, taken in slices: the device works on the first while the host tokenizes the rest.

Slices are measured in tokens, never by the clock, so that the same batch is cut into the same steps each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.engine.llm_engine import LLMEngine
from quire.request import Request

_STEPS_A_SLICE = 8  # of work; to prepare so many tokens takes a host less time than a GPU needs for one step


class Intake:
    """Adds a batch's requests to an engine in their order, each when its slice is due."""

    def __init__(self, engine: LLMEngine, add: Callable[[int], Request], count: int, *, in_order: bool = True) -> None:
        """add: prepares and adds the request of that index.

        Where nothing runs beside the host, and where the last may have to go first (not in_order), no request begins
        before the last one is there.
        """
        self._engine = engine
        self._add = add
        self._count = count
        self._next = 0
        in_slices = in_order and engine.core.executor.depth > 1
        self._step_tokens = engine.core.scheduler.config.max_num_batched_tokens if in_slices else None

    def begin_steps(self) -> Iterator[Request]:
        """Begin as many steps as there is room for, and take in a slice before each. Gives each request once it is
        added: who stops listening stops all of it."""
        while self._engine.has_room:
            yield from self._take_slice()
            if not self._engine.begin_step():
                return

    def _take_slice(self) -> Iterator[Request]:
        """The first is just enough to begin with. Nothing once all are taken."""
        tokens_left = self._step_tokens
        if tokens_left is not None and self._next > 0:
            tokens_left *= _STEPS_A_SLICE
        while self._next < self._count and (tokens_left is None or tokens_left > 0):
            request = self._add(self._next)
            self._next += 1
            if tokens_left is not None:
                tokens_left -= request.num_prompt_tokens
            yield request
