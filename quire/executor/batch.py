"""The persistent batch: one row per running sequence, kept where the model runs and changed by diffs.

A row holds its sequence's tokens, its length and its block table. The executor is their owner: a sampled token is
written here, on the device, and is the next step's input without a round trip through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.adapters import AdapterBank
from quire.kernels.interface import AttentionBatch
from quire.models.layer import ReadRows
from quire.plan import BeamGroup, Spans, StepPlan
from quire.sampling.transfer import to_device

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """What one forward pass takes, as tensors, and which tokens are sampled after it."""

    token_ids: Tensor  # [tokens] int64
    attention: list[AttentionBatch]  # by KV group
    logit_indices: Tensor | None  # [logits] int64: the tokens whose hidden states give logits; None: all that are left
    read: ReadRows | None  # the same tokens, where the last layer computes them alone
    sampled_rows: list[int] = field(default_factory=list)
    sampled_positions: list[int] = field(default_factory=list)  # of the first token that each of them samples


class PersistentBatch:
    """Rows of tokens and block tables.

    Invariant: for a live row, block_tables[group, row, :table_lengths[group][row]] are its blocks of a KV group in
    order (leading ones that no token sees any more are arbitrary), tokens[row, p] is the token at position p for every
    p that was admitted or sampled, and num_computed[row] of these have KV once all submitted steps have run. Until a
    step's drafts are judged, num_computed counts none of them (`Unjudged`).
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        spare_block: int = 0,
        bank: AdapterBank | None = None,
    ) -> None:
        self.block_size = block_size
        self.device = device
        max_blocks = -(-max_model_len // block_size)
        # One token more than the longest sequence: the last sampled one is stored though it never runs.
        # One row more than sequences: padding of a captured decode step reads and writes there.
        self.tokens = torch.zeros((num_rows + 1, max_model_len + 1), dtype=torch.int64, device=device)
        shape = (num_groups, num_rows + 1, max_blocks)
        self.block_tables = torch.full(shape, spare_block, dtype=torch.int32, device=device)
        self.spare_row = num_rows
        # The same tables where the host can look at them, to find which sequences share blocks.
        self.host_tables = np.full(shape, spare_block, dtype=np.int32)
        self.version = 0  # changes whenever a row's sequence, or a block that it has already, does
        self.table_lengths = [[0] * num_rows for _ in range(num_groups)]
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.bank = bank
        self.adapter_slots = np.full(num_rows, -1, dtype=np.int64)  # of the bank; -1: the sequence has no adapter
        self._occupants = [0] * num_rows  # changes when another sequence takes the row
        self._is_held = [False] * num_rows

    def release(self, row: int) -> None:
        assert self._is_held[row], f"row {row} is released but holds nothing"
        self._is_held[row] = False
        self.version += 1

    def occupant(self, row: int) -> int:
        """A number that changes when another sequence takes the row."""
        return self._occupants[row]

    def release_all(self) -> list[int]:
        """Every row that is held; returns them."""
        held = [row for row, is_held in enumerate(self._is_held) if is_held]
        for row in held:
            self.release(row)
        return held

    def admit(
        self,
        row: int,
        token_ids: list[int],
        num_computed: int,
        tables: Sequence[tuple[int, list[int]]],
        adapter_slot: int = -1,
    ) -> None:
        """tables: see Admission."""
        self._take(row)
        self.adapter_slots[row] = adapter_slot
        self.tokens[row, : len(token_ids)] = to_device(np.array(token_ids, dtype=np.int64), self.device)
        self.num_computed[row] = num_computed
        for group, (first, block_ids) in enumerate(tables):
            end = first + len(block_ids)
            blocks = self.host_tables[group, row, first:end]
            blocks[:] = block_ids
            self.block_tables[group, row, first:end] = to_device(blocks, self.device)
            self.table_lengths[group][row] = end

    def fork(self, source: int, row: int) -> None:
        self._take(row)
        self.tokens[row].copy_(self.tokens[source])
        self.num_computed[row] = self.num_computed[source]
        self.adapter_slots[row] = self.adapter_slots[source]
        self.block_tables[:, row] = self.block_tables[:, source]
        self.host_tables[:, row] = self.host_tables[:, source]
        for lengths in self.table_lengths:
            lengths[row] = lengths[source]

    def place_beams(self, group: BeamGroup) -> None:
        """Make each beam's row what its parent's was, with a token more."""
        if not group.parents:
            return
        length = int(self.num_computed[group.rows[0]])
        assert (self.num_computed[group.rows] == length).all(), "beams of one request have different lengths"
        moved = [(row, parent) for row, parent in zip(group.rows, group.parents, strict=True) if row != parent]
        if moved:
            host = np.array(moved, dtype=np.int64).T.copy()
            rows, parents = to_device(host, self.device)
            self.tokens[rows, :length] = self.tokens[parents, :length]
            self.block_tables[:, rows] = self.block_tables[:, parents]
            self.host_tables[:, host[0]] = self.host_tables[:, host[1]]
            for lengths in self.table_lengths:
                for row, before in zip(host[0].tolist(), [lengths[parent] for _, parent in moved], strict=True):
                    lengths[row] = before
            self.version += 1
        new = to_device(np.array([group.rows, group.tokens], dtype=np.int64), self.device)
        self.tokens[new[0], length] = new[1]

    def _take(self, row: int) -> None:
        assert not self._is_held[row], f"row {row} is given out while it is held"
        self._is_held[row] = True
        self._occupants[row] += 1
        self.version += 1

    def apply_table_diffs(self, plan: StepPlan) -> None:
        """Apply what a plan changes in tables, in one scatter."""
        for row, num_blocks in plan.trimmed:
            for lengths in self.table_lengths:
                lengths[row] = min(lengths[row], num_blocks)
        changes: list[tuple[int, int, int, int]] = []  # group, row, index, block
        for row, group, new_blocks in plan.appended:
            length = self.table_lengths[group][row]
            changes += [(group, row, length + offset, block) for offset, block in enumerate(new_blocks)]
            self.table_lengths[group][row] = length + len(new_blocks)
        changes += [(group, row, index, block) for row, group, index, block in plan.remapped]
        if changes:
            host = np.array(changes, dtype=np.int64).T.copy()
            self.host_tables[host[0], host[1], host[2]] = host[3]
            diff = to_device(host, self.device)
            self.block_tables[diff[0], diff[1], diff[2]] = diff[3].to(torch.int32)
            self.version += bool(plan.remapped)

    def starts(self, spans: Spans) -> Ints:
        """How many tokens of each span's row have KV before it."""
        found: Ints = self.num_computed[spans.rows]
        return found

    def advance(self, spans: Spans) -> list[Unjudged]:
        """The spans are submitted: their tokens count as computed, but for drafts, which are to be judged."""
        self.num_computed[spans.rows] += np.array(spans.num_tokens, dtype=np.int64)
        unjudged = []
        for row, drafts in spans.drafts.items():
            assert not isinstance(drafts, int), "this executor has no drafter of its own"
            self.num_computed[row] -= len(drafts)
            unjudged.append(Unjudged(row, self._occupants[row], drafts))
        return unjudged

    def judge(self, unjudged: Unjudged, num_accepted: int) -> None:
        """Count the accepted drafts as computed, unless another sequence has the row by now."""
        if self._occupants[unjudged.row] == unjudged.occupant:
            self.num_computed[unjudged.row] += num_accepted

    def prepare(self, plan: StepPlan, last_group: int | None = None) -> StepInputs:
        """Turn the plan's spans into tensors. last_group: the last layer's KV group, where that layer need not compute
        tokens that give no logits."""
        spans = plan.spans
        rows, starts = np.array(spans.rows, dtype=np.int64), self.starts(spans)
        counts = np.array(spans.num_tokens, dtype=np.int64)
        query_starts = starts_of(counts)
        indices, sampled_positions = _sampled(plan, query_starts, starts + counts)
        have_adapters = self.have_adapters(spans.rows)
        inputs = self.place(rows, starts, counts, query_starts, indices, None if have_adapters else last_group)
        inputs.sampled_rows, inputs.sampled_positions = plan.sampled_rows(), sampled_positions
        if have_adapters:
            assert self.bank is not None
            packed = self.bank.pack_rows(np.repeat(self.adapter_slots[rows], counts))
            adapters = self.bank.unpack_rows(to_device(packed, self.device), int(query_starts[-1]))
            inputs.attention[0].adapters = adapters
        return inputs

    def place(
        self, rows: Ints, starts: Ints, counts: Ints, query_starts: Ints, indices: Ints, last_group: int | None = None
    ) -> StepInputs:
        """The inputs of a pass over so many tokens of each row, from its start on; rows of one token stand first.
        indices: the tokens that give logits; last_group: see `prepare`."""
        num_decodes = int(np.argmax(counts != 1)) if (counts != 1).any() else len(rows)
        kv_lens = starts + counts
        if num_decodes == len(rows):
            token_rows, positions = rows, starts
        else:
            owner = np.repeat(np.arange(len(rows)), counts)
            token_rows = rows[owner]
            positions = np.arange(len(owner)) - query_starts[owner] + starts[owner]
        max_kv_len = int(kv_lens.max())
        # One transfer for all that changes every step; everything after it happens on the device.
        parts = [rows, query_starts, kv_lens, token_rows, positions, indices]
        rows_t, query_starts_t, kv_lens_t, token_rows_t, positions_t, indices_t = to_device_together(parts, self.device)
        tables = self.block_tables[..., : -(-max_kv_len // self.block_size)]
        attention = attention_batches(
            tables,
            self.block_size,
            rows=rows_t,
            token_rows=token_rows_t,
            positions=positions_t,
            query_starts=query_starts_t,
            kv_lens=kv_lens_t,
            max_query_len=int(counts.max()),
            max_kv_len=max_kv_len,
            num_decodes=num_decodes,
        )
        read = None
        if last_group is not None and 2 * len(indices) <= len(token_rows):
            of_last = tables[last_group : last_group + 1]
            read = _alone(of_last, self.block_size, token_rows_t, positions_t, indices_t, max_kv_len)
        token_ids = self.tokens[token_rows_t, positions_t]
        return StepInputs(token_ids, attention, indices_t if read is None else None, read)

    def have_adapters(self, rows: list[int]) -> bool:
        """Whether any of these rows' sequences has one."""
        return self.bank is not None and bool((self.adapter_slots[rows] >= 0).any())

    def write_drafts(self, spans: Spans) -> None:
        """Write drafts behind each row's last token, where the step reads its input."""
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        for row, drafts in spans.drafts.items():
            assert not isinstance(drafts, int), "this executor has no drafter of its own"
            first = int(self.num_computed[row]) + 1
            rows += [row] * len(drafts)
            positions += range(first, first + len(drafts))
            tokens += drafts
        where = to_device(np.array([rows, positions, tokens], dtype=np.int64), self.device)
        self.tokens[where[0], where[1]] = where[2]

    def places(self, rows: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """Rows and positions as tensors on the device."""
        where = to_device(np.array([rows, positions], dtype=np.int64), self.device)
        return where[0], where[1]

    def store(self, places: tuple[Tensor, Tensor], tokens: Tensor) -> None:
        """Write sampled tokens where the next step will read them."""
        self.tokens[places] = tokens


@dataclass(slots=True, frozen=True)
class Unjudged:
    """Drafts of a row that a submitted step verifies."""

    row: int
    occupant: int  # whose they are: the row may be given to another sequence before the result is there
    drafts: list[int]


def attention_batches(
    block_tables: Tensor,  # [groups, rows, blocks]
    block_size: int,
    *,
    rows: Tensor,  # [sequences]
    token_rows: Tensor,  # [tokens]: the row that each token belongs to
    positions: Tensor,  # [tokens]
    query_starts: Tensor,  # [sequences + 1]
    kv_lens: Tensor,  # [sequences]
    max_query_len: int,
    max_kv_len: int,
    num_decodes: int,
) -> list[AttentionBatch]:
    """Where a step's tokens stand, for each KV group. All integers are on the device already."""
    query_starts, kv_lens = query_starts.to(torch.int32), kv_lens.to(torch.int32)
    found = []
    for tables in block_tables.unbind(0):
        blocks = tables[token_rows, positions // block_size].to(torch.int64)
        found.append(
            AttentionBatch(
                positions=positions,
                slots=blocks * block_size + positions % block_size,
                query_starts=query_starts,
                kv_lens=kv_lens,
                block_tables=tables.index_select(0, rows),
                max_query_len=max_query_len,
                max_kv_len=max_kv_len,
                num_decodes=num_decodes,
            )
        )
    return found


def _alone(
    block_tables: Tensor, block_size: int, token_rows: Tensor, positions: Tensor, indices: Tensor, max_kv_len: int
) -> ReadRows:
    """Treat each of a step's tokens at `indices` as a decode of its own."""
    rows, ends = token_rows[indices], positions[indices]
    [batch] = attention_batches(
        block_tables,
        block_size,
        rows=rows,
        token_rows=rows,
        positions=ends,
        query_starts=torch.arange(len(indices) + 1, device=indices.device),
        kv_lens=ends + 1,
        max_query_len=1,
        max_kv_len=max_kv_len,
        num_decodes=len(indices),
    )
    return ReadRows(indices, batch)


def starts_of(counts: Ints) -> Ints:
    """Where the tokens of each row begin in a step, and where the last row's end."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _sampled(plan: StepPlan, query_starts: Ints, ends: Ints) -> tuple[Ints, list[int]]:
    """Which tokens' hidden states give logits, and the first position that each sampled row fills.

    One token of each row, its last; with drafts also the last tokens before it. Forks read their source's.
    """
    spans = plan.spans
    sampled = np.flatnonzero(np.array(spans.samples, dtype=bool))
    firsts = ends[sampled].tolist()
    indices = query_starts[1:][sampled] - 1
    if spans.drafts:
        pieces = []
        for i, span in enumerate(sampled.tolist()):
            num_drafts = len(spans.drafts.get(spans.rows[span], ()))  # type: ignore[arg-type]
            firsts[i] -= num_drafts
            pieces.append(np.arange(indices[i] - num_drafts, indices[i] + 1))
        indices = np.concatenate(pieces)
    if plan.forks:
        span_of_row = {row: i for i, row in enumerate(spans.rows)}
        sources = [span_of_row[fork.source_row] for fork in plan.forks]
        indices = np.concatenate([indices, query_starts[1:][sources] - 1])
        firsts += ends[sources].tolist()
    return indices, firsts


def to_device_together(parts: list[Ints], device: torch.device) -> list[Tensor]:
    """Copy the parts in one transfer. Each begins at a multiple of 16 bytes, for which kernels are compiled once."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += len(part) + len(part) % 2
    packed = np.empty(end, dtype=np.int64)
    for part, start in zip(parts, starts, strict=True):
        packed[start : start + len(part)] = part
    on_device = to_device(packed, device)
    return [on_device[start : start + len(part)] for part, start in zip(parts, starts, strict=True)]
