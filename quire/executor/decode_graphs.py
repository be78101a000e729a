"""Graphs of decode steps, by padded batch size.

Common sizes are captured at start. What changes from step to step is one small block of integers. Padding rows point at
a spare row and a spare block of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.executor.captured import COST_WITHOUT_SHARING, CapturedSteps, Fallbacks, StepParts
from quire.executor.sizing import MAX_GRAPH_SEQS, padded_size
from quire.executor.transfer import StagingRing
from quire.kernels.adapters import AdapterBank
from quire.kernels.interface import AttentionBatch
from quire.kernels.shared_prefix import (
    PrefixGroup,
    find_shared_prefixes,
    pack_shared_prefixes,
    packed_length,
    unpack_shared_prefixes,
)
from quire.log import get_logger
from quire.sampling.transfer import to_device

MAX_GROUPS = 8  # of sequences with a common prefix; more are served, each reading for itself
# The bytes of keys and values that reading once for all drafts of a sequence must spare each layer. Fewer are found in
# the GPU's own cache.
_MIN_SAVED_BYTES = 16 << 20
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


@dataclass(slots=True, frozen=True)
class DecodeShape:
    """Padded batch size, whether the step reads shared prefixes once for all that share them, and whether it has
    adapters."""

    size: int
    shares: bool
    adapted: bool = False

    def holds(self, other: DecodeShape) -> bool:
        """Shared or not is only a matter of speed; but groups are packed for one size. Nobody pays for adapters that
        another step has."""
        return self.size >= other.size and not self.shares and self.adapted == other.adapted


class DecodeGraphs(CapturedSteps[DecodeShape]):
    """The graphs of decode steps, by padded batch size."""

    def __init__(self, parts: StepParts, max_num_seqs: int) -> None:
        self._max_num_seqs = min(max_num_seqs, MAX_GRAPH_SEQS)
        super().__init__(
            parts,
            Fallbacks(
                holds=DecodeShape.holds,
                size=lambda shape: shape.size,
                cost=lambda shape: COST_WITHOUT_SHARING if shape.shares else 0,
            ),
            while_idle=_plain_shapes(other_sizes(self._max_num_seqs), parts.decoder.adapters),
        )
        batch, size = parts.batch, padded_size(self._max_num_seqs)
        # [rows, positions, kv_lens] of each sequence: what changes from step to step.
        self._step = torch.zeros((3, size), dtype=torch.int64, device=batch.device)
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=batch.device)
        self._staging = StagingRing(3 * size)
        self._groups = torch.zeros(packed_length(size, MAX_GROUPS), dtype=torch.int32, device=batch.device)
        self._bank = parts.decoder.adapters  # a draft model has none
        num_ints = 0 if self._bank is None else self._bank.rows_length(size)
        self._adapters = torch.zeros(num_ints, dtype=torch.int32, device=batch.device)
        self._adapters_of: tuple[int, list[int], int] | None = None  # version, rows and size that _adapters is about
        self._grouped: tuple[int, list[int]] | None = None  # the batch's version and rows that _groups is about
        self._has_groups = False
        self._token_bytes = parts.layers[0][0].nbytes // batch.block_size
        self._sequences: tuple[int, list[int]] | None = None  # the version and rows that _do_share is about
        self._do_share = False
        self._has_full_attention = parts.decoder.layout.windows[0] is None
        self._next = DecodeShape(0, shares=False)
        self._rows: list[int] = []  # of the step that is about to run; none while idle
        self._positions: list[int] = []

    @property
    def num_captures(self) -> int:
        """Graphs of decode-only and of mixed steps, which share their memory."""
        return self.memory.num_captures

    def capture_common(self) -> None:
        """Largest first: the smaller ones then fit into memory that the pool already has."""
        shapes = _plain_shapes(common_sizes(self._max_num_seqs), self._bank)
        if without := [shape.size for shape in shapes if not self._try_to_capture(shape)]:
            get_logger().warning(
                "no GPU memory is left for captured steps of %s sequences, which will be slower: lower "
                "gpu_memory_utilization, or see what else uses this GPU",
                ", ".join(map(str, without)),
            )

    def capture_common_later(self) -> None:
        """Capture the common sizes before the others, when there is time."""
        self._while_idle[:0] = _plain_shapes(common_sizes(self._max_num_seqs), self._bank)

    def choose(self, rows: list[int], positions: list[int]) -> bool:
        """The graph that is to run one token of each row; it may have to be captured first. False: there is none."""
        if len(rows) > self._max_num_seqs:
            return False
        size = padded_size(len(rows))
        if self._grouped != (self._batch.version, rows):
            self._group(rows, positions, size)
        self._rows, self._positions = rows, positions
        adapted = self._bank is not None and self._batch.have_adapters(rows)
        chosen = self._shape_for(DecodeShape(size, self._has_groups, adapted))
        self._rows, self._positions = [], []
        if chosen is None:
            return False
        self._next = chosen
        return True

    def prepare(self, rows: list[int], positions: list[int]) -> None:
        """Fill the inputs of the graph that was chosen."""
        self._fill(rows, positions, self._next.size)
        if self._next.adapted:
            self._place_adapters(rows, self._next.size)

    def replay(self, num_rows: int) -> Tensor | None:
        """Run what was prepared; logits [rows, vocab], valid until the next step; None where another rank samples."""
        return self._replay(self._next, num_rows)

    def next_places(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Rows and positions, on the device, of the tokens that the step samples: right after those that it ran."""
        return self._step[0, :num_rows], self._step[2, :num_rows]

    def _shape_for(self, shape: DecodeShape) -> DecodeShape | None:
        if found := self._shape_that_serves(shape, self._graphs):
            return found
        # One capture that then serves all, instead of one for each size that a growing batch passes through.
        largest = DecodeShape(padded_size(self._max_num_seqs), shares=False, adapted=shape.adapted)
        return largest if largest not in self._without and self._try_to_capture(largest) else None

    def _group(self, rows: list[int], positions: list[int], size: int) -> None:
        """Find the sequences that share a prefix. They do until the batch changes: tables only grow at their end."""
        batch = self._batch
        self._grouped = (batch.version, list(rows))
        self._has_groups = False
        if not self._has_full_attention:
            return  # a window moves away from a prefix
        if groups := self._groups_of(rows, positions):
            self._has_groups = True
            packed = pack_shared_prefixes(groups, size, MAX_GROUPS)
            self._groups[: len(packed)].copy_(to_device(packed, batch.device))

    def _groups_of(self, rows: list[int], positions: list[int]) -> list[PrefixGroup]:
        """A sequence's drafts stand in its row as well, and how many there are changes from step to step. Whether its
        sequences share anything does not, until the batch changes: where they do not, nothing is looked for."""
        last = dict(zip(rows, positions, strict=True))
        has_drafts = len(last) < len(rows)
        if has_drafts:
            counts = Counter(rows)
            if any((counts[row] - 1) * place * self._token_bytes >= _MIN_SAVED_BYTES for row, place in last.items()):
                return self._find_groups(rows, positions)
        if self._sequences != (key := (self._batch.version, sorted(last))):
            groups = self._find_groups([*last], [*last.values()])
            self._sequences, self._do_share = key, bool(groups)
            if not has_drafts:
                return groups
        return self._find_groups(rows, positions) if self._do_share else []

    def _find_groups(self, rows: list[int], positions: list[int]) -> list[PrefixGroup]:
        batch = self._batch
        num_full_blocks = np.array(positions) // batch.block_size
        tables = batch.host_tables[0, rows, : int(num_full_blocks.max())]
        return find_shared_prefixes(tables, num_full_blocks, batch.block_size, max_groups=MAX_GROUPS)

    def _place_adapters(self, rows: list[int], size: int) -> None:
        """Which rows have which adapter. It stays true until the batch changes."""
        batch, bank = self._batch, self._bank
        assert bank is not None
        if self._adapters_of != (batch.version, rows, size):
            self._adapters_of = (batch.version, list(rows), size)
            slots = np.full(size, -1, dtype=np.int64)
            slots[: len(rows)] = batch.adapter_slots[rows]
            self._put_adapters(bank, slots)

    def _fill(self, rows: list[int], positions: list[int], size: int) -> None:
        host = np.empty((3, size), dtype=np.int64)
        host[0], host[1], host[2] = self._batch.spare_row, 0, 1
        host[0, : len(rows)] = rows
        host[1, : len(rows)] = positions
        host[2, : len(rows)] = host[1, : len(rows)] + 1
        self._staging.copy_to(host, self._step[:, :size])

    def _fill_for_capture(self, shape: DecodeShape) -> None:
        self._adapters_of = None
        if shape.adapted:
            assert self._bank is not None
            self._put_adapters(self._bank, np.full(shape.size, -1, dtype=np.int64))  # nobody has one
        # With the step that is about to run, where there is one: what the kernels write now, it writes again. Groups
        # of sequences, which lie there already, would not agree with padding.
        if self._rows:
            self._fill(self._rows, self._positions, shape.size)
            return
        # Behind a step that runs for long, the host would wait for a buffer to fill.
        rows, positions, kv_lens = self._step[:, : shape.size].unbind(0)
        rows.fill_(self._batch.spare_row)
        positions.zero_()
        kv_lens.fill_(1)

    def _forward(self, shape: DecodeShape, parts: StepParts) -> None:
        """One token of each sequence, all of it from the device's own state."""
        size = shape.size
        batch = self._batch
        step = self._step[:, :size]
        groups = [
            parts.decoder.ops.place_decodes(step, batch.tokens, tables, batch.block_size)
            for tables in batch.block_tables.unbind(0)
        ]
        attention = [
            AttentionBatch(
                positions=step[1],
                slots=placed.slots,
                query_starts=self._query_starts[: size + 1],
                kv_lens=placed.kv_lens,
                block_tables=placed.block_tables,
                max_query_len=1,
                max_kv_len=parts.max_model_len,
                num_decodes=size,
            )
            for placed in groups
        ]
        if shape.shares:
            packed = self._groups[: packed_length(size, MAX_GROUPS)]
            for each in attention:  # layers with a window take no notice
                each.shared = unpack_shared_prefixes(packed, size, MAX_GROUPS)
        if shape.adapted:
            assert self._bank is not None
            attention[0].adapters = self._bank.unpack_rows(self._adapters, size)
        hidden = parts.decoder.forward(groups[0].token_ids, attention, parts.layers)
        parts.decoder.gathered_logits(hidden, None, self.memory.logits[:size])


def _plain_shapes(sizes: list[int], bank: AdapterBank | None) -> list[DecodeShape]:
    """Shapes without sharing; where there may be adapters, each size without them and with them."""
    kinds = (False,) if bank is None else (False, True)
    return [DecodeShape(size, shares=False, adapted=adapted) for adapted in kinds for size in sizes]
