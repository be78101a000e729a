"""A batch of requests run to its end, as `LLM`, the terminal commands and the benches do.

Where the device works beside the host, requests are taken in slices: the device works on the first while the host
tokenizes the rest. Slices are measured in tokens, never by the clock, so that the same batch is cut into the same steps
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from quire.engine.core import EngineCore
from quire.engine.llm_engine import LLMEngine
from quire.interrupt import stop_on_interrupt
from quire.outputs import RequestOutput
from quire.request import Request

# Steps of work in a slice after the first. A host tokenizes so much in less time than a GPU takes for one step, at
# least with a model of some billion weights.
_STEPS_A_SLICE = 8

# After a batch, for blocks to be written to levels below the device.
_SETTLE_S = 0.5

# Gives the engine the request of that index.
Add = Callable[[int], Request]


def runs_beside_host(core: EngineCore) -> bool:
    """Whether slices gain anything: elsewhere no step runs while requests are prepared."""
    return core.executor.depth > 1


def run_batch(
    engine: LLMEngine, add: Add, count: int, *, in_slices: bool
) -> Generator[list[RequestOutput], None, None]:
    """Yields an empty list when the first step has begun, then what each step brought of the batch's requests.

    Ctrl-C raises between two steps. A caller that leaves early aborts the requests that are left.
    """
    unfinished: set[str] = set()
    with stop_on_interrupt() as stop:

        def add_own(i: int) -> int:
            if stop.is_set:
                raise KeyboardInterrupt
            request = add(i)
            unfinished.add(request.request_id)
            return request.num_prompt_tokens

        intake = Intake(engine.core, add_own, count, in_slices=in_slices)
        try:
            intake.begin_steps()
            if unfinished:
                yield []
            while unfinished or not intake.is_done:
                intake.begin_steps()
                outputs = [output for output in engine.step() if output.request_id in unfinished]
                unfinished.difference_update([output.request_id for output in outputs if output.finished])
                yield outputs
                if stop.is_set:
                    raise KeyboardInterrupt
        finally:
            engine.core.scheduler.is_whole_batch = False
        engine.core.settle(_SETTLE_S)


class Intake:
    """Adds a batch's requests to an engine in their order, each when its slice is due."""

    def __init__(self, core: EngineCore, add: Callable[[int], int], count: int, *, in_slices: bool) -> None:
        """add: gives the engine the request of that index, and returns its prompt's length in tokens.

        Not in slices: no request begins before the last one is there.
        """
        self._core = core
        self._add = add
        self._count = count
        self._next = 0
        self._in_slices = in_slices
        self._slice_steps = 1  # first just enough to begin with

    @property
    def is_done(self) -> bool:
        return self._next == self._count

    def begin_steps(self) -> None:
        """Begin as many steps as there is room for, and take in a slice before each."""
        while self._core.has_room:
            self._take_slice()
            if not self._core.begin_step():
                return

    def _take_slice(self) -> None:
        if self._next > 0:
            self._slice_steps = self._next_slice_steps()
        tokens_left = self._slice_steps * self._core.scheduler.config.max_num_batched_tokens
        while not self.is_done and (tokens_left > 0 or not self._in_slices):
            tokens_left -= self._add(self._next)
            self._next += 1
        self._core.scheduler.is_whole_batch = self.is_done

    def _next_slice_steps(self) -> int:
        if self._slice_steps == 1:
            return _STEPS_A_SLICE
        # With no request left waiting, steps could have been larger: the prefix cache has much of these prompts.
        return self._slice_steps * (2 if self._core.scheduler.num_waiting == 0 else 1)
