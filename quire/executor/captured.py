"""CUDA graphs of steps, by shape: one launch instead of three hundred.

A graph serves every step of its shape, because all that it reads is in tensors that stay where they are: the persistent
batch, the KV cache, and a few integers that each step overwrites. Shapes are captured at start, while there is nothing
else to do, or when their absence has cost enough; until then steps are padded to a larger one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.executor.batch import PersistentBatch
from quire.executor.profile import hold_activation_memory
from quire.executor.sizing import num_graph_rows
from quire.kernels.adapters import AdapterBank
from quire.models.decoder import Decoder
from quire.sampling.transfer import to_device

# In rows of padding, each of which takes a GPU some 10 us in a step of a hundred or more.
CAPTURE_COST = 2048
COST_WITHOUT_GRAPH = 128  # of launching a step one kernel at a time
COST_WITHOUT_SHARING = 512  # of reading a common prefix for each sequence again

Shape = TypeVar("Shape", bound=Hashable)


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has an error of its own for it. The driver's, for a graph or a kernel's code, and Triton's and cuBLAS's
    tell it in their text. The end of a capture that failed may raise another one over it."""
    found: BaseException | None = error
    while found is not None:
        text = str(found)
        if isinstance(found, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text:
            return True
        found = found.__context__
    return False


class GraphMemory:
    """What captured steps share: only one of them runs at a time."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # That steps are captured on; this engine runs nothing there. It is shared as TritonOps.side_stream is.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One place for all graphs' logits. If each kept its own, every batch size would take half a gigabyte more.
        self.logits = torch.empty((num_graph_rows(max_num_seqs), vocab_size), dtype=torch.float32, device=device)
        self.num_attempts = 0
        self.num_captures = 0  # that succeeded
        self.held_bytes = 0  # for steps without a graph: see hold_activation_memory

    def capture(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """While the GPU goes on with what it has: torch's own context would wait for it, and give back all memory that
        is held for steps."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            # Other threads of a program may use the GPU meanwhile, and are no part of this.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        except RuntimeError:
            if not self.num_captures:
                self._pool = torch.cuda.graph_pool_handle()  # torch gives up a pool when its only graph fails
            raise
        finally:
            torch.cuda.set_stream(current)
        self.num_captures += 1
        return graph

    def hold_again(self) -> bool:
        """Hold memory for steps again, after it was short and was given back. False where others have taken it."""
        return hold_activation_memory(self.held_bytes, self.logits.device)


@dataclass(slots=True, frozen=True)
class StepParts:
    """What every captured step works on."""

    decoder: Decoder
    layers: list[Tensor]  # of the KV cache
    batch: PersistentBatch
    memory: GraphMemory
    max_model_len: int

    def excerpt(self) -> StepParts:
        """The same parts with as few layers as show all kernels."""
        decoder, kept = self.decoder.excerpt()
        return replace(self, decoder=decoder, layers=[self.layers[index] for index in kept])


class Fallbacks(Generic[Shape]):
    """Which captured graph serves a step whose own shape has none yet, and when that shape deserves a capture.

    While a graph is captured everybody waits, so a shape that is only passed through is not worth it: its steps are
    padded to a larger shape that is captured. Once their padding has cost as much as a capture does, the shape gets its
    own. Whatever comes then, at most twice the least possible is lost.
    """

    def __init__(
        self,
        holds: Callable[[Shape, Shape], bool],
        size: Callable[[Shape], int],
        cost: Callable[[Shape], int] = lambda shape: 0,
    ) -> None:
        self._holds = holds  # whether a step of the second fits into the first
        self._size = size
        self._cost = cost  # of any other shape in place of this one, beside padding
        self._costs: Counter[Shape] = Counter()

    def pays(self, shape: Shape, fallback: Shape | None) -> bool:
        """Called for each step of a shape that is not captured, with the graph that serves it. True once these steps
        have cost as much as a capture does."""
        padding = COST_WITHOUT_GRAPH if fallback is None else self._size(fallback) - self._size(shape)
        self._costs[shape] += padding + self._cost(shape)
        return self._costs[shape] >= CAPTURE_COST

    def find(self, shape: Shape, captured: Iterable[Shape]) -> Shape | None:
        """The smallest captured shape that the step fits into."""
        return min((other for other in captured if self._holds(other, shape)), key=self._size, default=None)


class CapturedSteps(ABC, Generic[Shape]):
    """The graphs of one kind of step."""

    _adapters: Tensor  # which token has which adapter, where there is a bank: packed as the bank says

    def __init__(self, parts: StepParts, fallbacks: Fallbacks[Shape], while_idle: list[Shape]) -> None:
        self.memory = parts.memory
        self._parts = parts
        self._excerpt = parts.excerpt()
        self._batch = parts.batch
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._without: set[Shape] = set()  # for which there was no memory
        self._fallbacks = fallbacks
        self._while_idle = while_idle

    def capture_next(self) -> bool:
        """Another shape, when there is time for it. False when there is none left, or no memory for it."""
        while self._while_idle:
            shape = self._while_idle.pop(0)
            if shape in self._graphs or shape in self._without:
                continue
            return self._try_to_capture(shape)
        return False

    def _shape_that_serves(self, shape: Shape, candidates: Iterable[Shape]) -> Shape | None:
        """The shape itself where it has a graph, or has cost so much that it is given one now; else one of these that
        are captured and hold it."""
        if shape in self._graphs:
            return shape
        found = self._fallbacks.find(shape, candidates)
        if shape not in self._without and self._fallbacks.pays(shape, found) and self._try_to_capture(shape):
            return shape
        return found

    def _put_adapters(self, bank: AdapterBank, slots: NDArray[np.int64]) -> None:
        """Tell the graphs the slot of each token of the next step; -1: it has no adapter."""
        packed = bank.pack_rows(slots)
        self._adapters[: len(packed)].copy_(to_device(packed, self._batch.device))

    def _try_to_capture(self, shape: Shape) -> bool:
        """False where memory is short: without its graph a step is slower, and that is all."""
        self.memory.num_attempts += 1
        if self._captures(shape):
            return True
        torch.cuda.empty_cache()  # what is held for steps: torch does not give it back in the middle of a capture
        has_room = self._captures(shape)
        if not has_room:
            torch.cuda.empty_cache()
            self._without.add(shape)
        if not self.memory.hold_again() or not has_room:
            self._while_idle.clear()  # the others would not fit either
        return has_room

    def _captures(self, shape: Shape) -> bool:
        try:
            self._capture(shape)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _capture(self, shape: Shape) -> None:
        self._fill_for_capture(shape)
        self._forward(shape, self._excerpt)  # kernels compile, and cuBLAS chooses, outside of the capture
        self._graphs[shape] = self.memory.capture(lambda: self._forward(shape, self._parts))

    def _replay(self, shape: Shape, num_rows: int) -> Tensor | None:
        """-> logits of the rows that sample, valid until the next step; None where another rank samples."""
        self._graphs[shape].replay()
        return self.memory.logits[:num_rows] if self._parts.decoder.samples else None

    @abstractmethod
    def _fill_for_capture(self, shape: Shape) -> None:
        """Put integers where the step reads them that do no harm."""

    @abstractmethod
    def _forward(self, shape: Shape, parts: StepParts) -> None:
        """The step: only work on the device, on what lies there."""
