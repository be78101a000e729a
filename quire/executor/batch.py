"""The persistent batch: one row per running sequence, kept where the model runs and changed by diffs.

A row holds its sequence's tokens and block table. The executor is their owner: a sampled token is written here, on
the device, and is the next step's input without a round trip through the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch
from quire.plan import StepPlan
from quire.sampling.transfer import to_device


@dataclass(slots=True)
class StepInputs:
    """What one forward pass and its sampling take, as tensors."""

    token_ids: Tensor  # [tokens] int64
    attention: AttentionBatch
    logit_indices: Tensor  # [sampled] int64: which token's hidden state each sampled row's logits come from
    sampled_rows: list[int]
    sampled_positions: list[int]  # of the tokens about to be sampled


class PersistentBatch:
    """Rows of tokens and block tables.

    Invariant: for a live row, block_tables[row, :table_lengths[row]] are its blocks in order, and tokens[row, p] is the
    token at position p for every p that was admitted or sampled.
    """

    def __init__(
        self, *, num_rows: int, max_model_len: int, block_size: int, device: torch.device, spare_block: int = 0
    ) -> None:
        self.block_size = block_size
        self.device = device
        max_blocks = -(-max_model_len // block_size)
        # One token more than the longest sequence: the last sampled one is stored though it never runs.
        # One row more than sequences: padding of a captured decode step reads and writes there.
        self.tokens = torch.zeros((num_rows + 1, max_model_len + 1), dtype=torch.int64, device=device)
        self.block_tables = torch.full((num_rows + 1, max_blocks), spare_block, dtype=torch.int32, device=device)
        self.spare_row = num_rows
        # The same tables where the host can look at them: who shares blocks with whom is found out there.
        self.host_tables = np.full((num_rows + 1, max_blocks), spare_block, dtype=np.int32)
        self.version = 0  # changes whenever a row's sequence, or a block that it has already, does
        self.table_lengths = [0] * num_rows
        self.generations: list[int | None] = [None] * num_rows  # None: the row is free

    def release(self, row: int) -> None:
        assert self.generations[row] is not None, f"row {row} is released but holds nothing"
        self.generations[row] = None
        self.table_lengths[row] = 0
        self.version += 1

    def admit(self, row: int, generation: int, token_ids: list[int], block_ids: list[int]) -> None:
        assert self.generations[row] is None, f"row {row} is admitted while it holds generation {self.generations[row]}"
        self.generations[row] = generation
        self.tokens[row, : len(token_ids)] = to_device(np.array(token_ids, dtype=np.int64), self.device)
        blocks = self.host_tables[row, : len(block_ids)]
        blocks[:] = block_ids
        self.block_tables[row, : len(block_ids)] = to_device(blocks, self.device)
        self.table_lengths[row] = len(block_ids)
        self.version += 1

    def fork(self, source: int, row: int, generation: int) -> None:
        assert self.generations[row] is None, f"row {row} is forked into while it is in use"
        self.generations[row] = generation
        self.tokens[row].copy_(self.tokens[source])
        self.block_tables[row].copy_(self.block_tables[source])
        self.host_tables[row] = self.host_tables[source]
        self.table_lengths[row] = self.table_lengths[source]
        self.version += 1

    def apply_table_diffs(self, plan: StepPlan) -> None:
        """grown and rewired, in one scatter."""
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for row, new_blocks in plan.grown:
            length = self.table_lengths[row]
            for offset, block in enumerate(new_blocks):
                rows.append(row)
                columns.append(length + offset)
                blocks.append(block)
            self.table_lengths[row] = length + len(new_blocks)
        for row, index, block in plan.rewired:
            rows.append(row)
            columns.append(index)
            blocks.append(block)
        if rows:
            host = np.array([rows, columns, blocks], dtype=np.int64)
            self.host_tables[host[0], host[1]] = host[2]
            diff = to_device(host, self.device)
            self.block_tables[diff[0], diff[1]] = diff[2].to(torch.int32)
            self.version += bool(plan.rewired)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Turn the plan's spans into tensors."""
        spans = plan.spans
        rows = np.array(spans.rows, dtype=np.int64)
        starts = np.array(spans.starts, dtype=np.int64)
        counts = np.array(spans.num_tokens, dtype=np.int64)
        num_seqs = len(rows)
        query_starts = np.zeros(num_seqs + 1, dtype=np.int64)
        np.cumsum(counts, out=query_starts[1:])
        num_tokens = int(query_starts[-1])
        num_decodes = int(np.argmax(counts != 1)) if (counts != 1).any() else num_seqs
        kv_lens = starts + counts
        if num_decodes == num_seqs:
            token_rows, positions = rows, starts
        else:
            owner = np.repeat(np.arange(num_seqs), counts)
            token_rows = rows[owner]
            positions = np.arange(num_tokens) - query_starts[owner] + starts[owner]
        max_kv_len = int(kv_lens.max())

        # One transfer for all that changes every step; everything after it happens on the device.
        indices, sampled_positions = self._sampled(plan, query_starts)
        parts = [rows, query_starts, kv_lens, token_rows, positions, indices]
        rows_t, query_starts_t, kv_lens_t, token_rows_t, positions_t, indices_t = _to_device_together(
            parts, self.device
        )
        num_blocks = -(-max_kv_len // self.block_size)
        tables = self.block_tables[:, :num_blocks].index_select(0, rows_t)
        blocks = self.block_tables[token_rows_t, positions_t // self.block_size].to(torch.int64)
        attention = AttentionBatch(
            positions=positions_t,
            slots=blocks * self.block_size + positions_t % self.block_size,
            query_starts=query_starts_t.to(torch.int32),
            kv_lens=kv_lens_t.to(torch.int32),
            block_tables=tables,
            max_query_len=int(counts.max()),
            max_kv_len=max_kv_len,
            num_decodes=num_decodes,
        )
        return StepInputs(
            token_ids=self.tokens[token_rows_t, positions_t],
            attention=attention,
            logit_indices=indices_t,
            sampled_rows=plan.sampled_rows(),
            sampled_positions=sampled_positions,
        )

    def _sampled(self, plan: StepPlan, query_starts: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Which token's hidden state each sampled row reads, and which position it fills; forks read their source's."""
        spans = plan.spans
        samples = np.array(spans.samples, dtype=bool)
        indices = query_starts[1:][samples] - 1
        ends = [s + n for s, n, yes in zip(spans.starts, spans.num_tokens, spans.samples, strict=True) if yes]
        if plan.forks:
            span_of_row = {row: i for i, row in enumerate(spans.rows)}
            sources = [span_of_row[fork.source_row] for fork in plan.forks]
            indices = np.concatenate([indices, query_starts[1:][sources] - 1])
            ends += [spans.starts[i] + spans.num_tokens[i] for i in sources]
        return indices, ends

    def places(self, rows: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """The same, on the device."""
        where = to_device(np.array([rows, positions], dtype=np.int64), self.device)
        return where[0], where[1]

    def store(self, places: tuple[Tensor, Tensor], tokens: Tensor) -> None:
        """Write sampled tokens where the next step will read them."""
        self.tokens[places] = tokens


def _to_device_together(parts: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """In one transfer. Each begins at a multiple of 16 bytes: kernels are compiled once for that, not for any place."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += len(part) + len(part) % 2
    packed = np.empty(end, dtype=np.int64)
    for part, start in zip(parts, starts, strict=True):
        packed[start : start + len(part)] = part
    on_device = to_device(packed, device)
    return [on_device[start : start + len(part)] for part, start in zip(parts, starts, strict=True)]
