"""CUDA graphs of decode steps: one launch instead of three hundred.

Common padded batch sizes are captured at start; the others while there is nothing else to do, or when they have come
often. Everything a graph reads is in tensors that stay where they are: the persistent batch, the KV cache,
and one small block of integers that each step overwrites. Padding rows point at a spare row and a spare block of their
own.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.executor.batch import PersistentBatch
from quire.executor.sizing import MAX_GRAPH_SEQS, num_graph_rows, padded_size
from quire.executor.stand_in import StandIns
from quire.executor.transfer import StagingRing
from quire.kernels.interface import AttentionBatch
from quire.kernels.shared_prefix import (
    find_shared_prefixes,
    pack_shared_prefixes,
    packed_length,
    unpack_shared_prefixes,
)
from quire.models.decoder import Decoder
from quire.sampling.transfer import to_device

MAX_GROUPS = 8  # of sequences with a common prefix; more are served, each reading for itself
_COMMON_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def common_sizes(max_num_seqs: int) -> list[int]:
    """The padded sizes that are captured at start, the largest first."""
    return [size for size in sorted(_COMMON_SIZES, reverse=True) if size <= padded_size(max_num_seqs)]


def other_sizes(max_num_seqs: int) -> list[int]:
    """The padded sizes that are not captured at start. First the largest, into whose memory the others then fit; then
    from the smallest on, because most servers are not full."""
    every = {padded_size(num_seqs) for num_seqs in range(1, max_num_seqs + 1)}
    rest = sorted(every - set(_COMMON_SIZES))
    return rest[-1:] + rest[:-1]


@dataclass(slots=True)
class CaptureOutcome:
    had_room: bool = True


@contextlib.contextmanager
def out_of_memory_is_survived() -> Iterator[CaptureOutcome]:
    """Around a capture that nobody waits for: without its graph a step is slower, and that is all."""
    outcome = CaptureOutcome()
    try:
        yield outcome
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        # The driver's own allocations, for a graph or a kernel's code, fail with the second kind.
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        outcome.had_room = False
        torch.cuda.empty_cache()


class GraphMemory:
    """What captured steps share: only one of them runs at a time."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One place for all graphs' logits. If each kept its own, every batch size would take half a gigabyte more.
        self.logits = torch.empty((num_graph_rows(max_num_seqs), vocab_size), dtype=torch.float32, device=device)
        self.num_captures = 0

    def capture(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self.num_captures += 1
        return graph


class DecodeGraphs:
    """Graphs by padded batch size, over one decoder, cache and persistent batch."""

    def __init__(
        self,
        decoder: Decoder,
        layers: list[Tensor],
        batch: PersistentBatch,
        memory: GraphMemory,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._memory = memory
        self._decoder = decoder
        self._layers = layers
        self._batch = batch
        self._max_model_len = max_model_len
        self._max_num_seqs = min(max_num_seqs, MAX_GRAPH_SEQS)
        size = padded_size(self._max_num_seqs)
        # [rows, positions, kv_lens] of each sequence: what changes from step to step.
        self._step = torch.zeros((3, size), dtype=torch.int64, device=batch.device)
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=batch.device)
        self._staging = StagingRing(3 * size)
        # By padded size, and whether the step reads shared prefixes once for all that share them.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._not_captured = other_sizes(self._max_num_seqs)
        self._stand_ins: StandIns[int] = StandIns(holds=operator.ge, size=int)
        self._groups = torch.zeros(packed_length(size, MAX_GROUPS), dtype=torch.int32, device=batch.device)
        self._grouped: tuple[int, list[int]] | None = None  # the batch's version and rows that _groups is about
        self._has_groups = False
        self._next = (0, False)

    @property
    def num_captures(self) -> int:
        """Of decode steps and mixed ones."""
        return self._memory.num_captures

    def capture_common(self) -> None:
        """Largest first: the smaller ones then fit into memory that the pool already has."""
        for size in common_sizes(self._max_num_seqs):
            self._fill([], [], size)
            self._capture(size, False)

    def capture_next(self) -> bool:
        """While nothing runs: another size. False when there is none left, or no memory for it."""
        while self._not_captured:
            size = self._not_captured.pop(0)
            if (size, False) in self._graphs:
                continue
            self._fill([], [], size)
            with out_of_memory_is_survived() as outcome:
                self._capture(size, False)
            if not outcome.had_room:
                self._not_captured.clear()
            return outcome.had_room
        return False

    def serves(self, num_seqs: int) -> bool:
        return num_seqs <= self._max_num_seqs

    def prepare(self, rows: list[int], positions: list[int]) -> bool:
        """For one token of each row. True where the graph had to be captured first: time that is not the step's."""
        size = padded_size(len(rows))
        if self._grouped != (self._batch.version, rows):
            self._group(rows, positions, size)
        if not self._has_groups and (size, False) not in self._graphs:
            captured = [other for other, shares in self._graphs if not shares]
            size = self._stand_ins.choose(size, captured) or size
        self._fill(rows, positions, size)
        self._next = (size, self._has_groups)
        if self._next in self._graphs:
            return False
        self._capture(*self._next)
        return True

    def replay(self, num_rows: int) -> Tensor:
        """Run what was prepared; logits [num_rows, vocab], valid until the next step."""
        self._graphs[self._next].replay()
        return self._memory.logits[:num_rows]

    def _group(self, rows: list[int], positions: list[int], size: int) -> None:
        """Find who shares a prefix. It stays true until the batch changes: tables only grow at their end."""
        batch = self._batch
        num_full_blocks = np.array(positions) // batch.block_size
        width = int(num_full_blocks.max())
        groups = find_shared_prefixes(
            batch.host_tables[rows, :width], num_full_blocks, batch.block_size, max_groups=MAX_GROUPS
        )
        self._has_groups = bool(groups)
        self._grouped = (batch.version, list(rows))
        if groups:
            packed = pack_shared_prefixes(groups, size, MAX_GROUPS)
            self._groups[: len(packed)].copy_(to_device(packed, batch.device))

    def _fill(self, rows: list[int], positions: list[int], size: int) -> None:
        host = np.empty((3, size), dtype=np.int64)
        host[0], host[1], host[2] = self._batch.spare_row, 0, 1
        host[0, : len(rows)] = rows
        host[1, : len(rows)] = positions
        host[2, : len(rows)] = host[1, : len(rows)] + 1
        self._staging.copy_to(host, self._step[:, :size])

    def _capture(self, size: int, shares: bool) -> None:
        # Kernels compile, and cuBLAS chooses, outside of the capture. Their writes go where this step's go anyway.
        self._forward(size, shares)
        self._graphs[size, shares] = self._memory.capture(lambda: self._forward(size, shares))

    def _forward(self, size: int, shares: bool) -> None:
        """One token of each sequence, all of it from the device's own state."""
        batch, block_size = self._batch, self._batch.block_size
        rows, positions, kv_lens = self._step[:, :size].unbind(0)
        tables = batch.block_tables.index_select(0, rows)
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)
        attention = AttentionBatch(
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            query_starts=self._query_starts[: size + 1],
            kv_lens=kv_lens.to(torch.int32),
            block_tables=tables,
            max_query_len=1,
            max_kv_len=self._max_model_len,
            num_decodes=size,
        )
        if shares:
            packed = self._groups[: packed_length(size, MAX_GROUPS)]
            attention.shared = unpack_shared_prefixes(packed, size, MAX_GROUPS)
        hidden = self._decoder.forward(batch.tokens[rows, positions], attention, self._layers)
        self._decoder.logits(hidden, None, self._memory.logits[:size])
