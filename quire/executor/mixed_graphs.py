"""Graphs of steps that mix decodes with short prompt chunks: launching those one by one takes longer than they do.

A step is padded to one of a few shapes, so that a captured one serves it.

    sequences   decodes, padding | prompts, padding          num_decodes + MAX_MIXED_PROMPTS
    tokens      one of each      | the chunks', then padding num_decodes + num_tokens

All that changes from step to step is one run of integers. A padding decode is a sequence of one token in the spare row
and the spare block; a padding prompt has no token; padding tokens belong to nobody, and write to the spare block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.executor.batch import attention_batches
from quire.executor.captured import CapturedSteps, Fallbacks, StepParts
from quire.executor.sizing import MAX_MIXED_DECODES, MAX_MIXED_PROMPTS, MAX_MIXED_TOKENS, mixed_sizes
from quire.executor.transfer import StagingRing
from quire.kernels.interface import AdapterRows
from quire.models.decoder import Decoder
from quire.plan import Spans, StepPlan

_WORTH_PADDING = 512  # tokens: a step of so many computes for about as long as launching its kernels one by one takes


@dataclass(slots=True, frozen=True)
class MixedShape:
    """Padded sizes: decodes, and tokens of prompts; and whether any of them has an adapter."""

    num_decodes: int
    num_tokens: int
    adapted: bool = False

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + MAX_MIXED_PROMPTS

    @property
    def total_tokens(self) -> int:
        return self.num_decodes + self.num_tokens

    def holds(self, other: MixedShape) -> bool:
        fits = self.num_decodes >= other.num_decodes and self.num_tokens >= other.num_tokens
        return fits and self.adapted == other.adapted


_SHAPES = sorted((MixedShape(*sizes) for sizes in mixed_sizes()), key=lambda shape: shape.total_tokens)


def all_shapes(most_seqs: int) -> list[MixedShape]:
    """The shapes of at most so many sequences. First the largest, into whose memory the others then fit; then the
    likeliest: a prompt or two beside a few decodes."""
    shapes = [shape for shape in _SHAPES if shape.num_seqs <= most_seqs]
    # Prompts of a usual length, and the chunks that smooth steps cut long ones into.
    shapes.sort(key=lambda shape: min(abs(shape.num_tokens - 160), abs(shape.num_tokens - 320)) + shape.num_decodes)
    largest = max(shapes, key=lambda shape: shape.total_tokens)
    return [largest, *(shape for shape in shapes if shape != largest)]


def shape_of(plan: StepPlan, most_seqs: int, *, adapted: bool = False) -> MixedShape | None:
    """The smallest shape that the step fits into, of those with at most so many sequences; None: there is none."""
    counts = plan.spans.num_tokens
    num_decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    if not 0 < len(counts) - num_decodes <= MAX_MIXED_PROMPTS:
        return None
    step = MixedShape(num_decodes, sum(counts) - num_decodes)
    found = next((shape for shape in _SHAPES if shape.holds(step) and shape.num_seqs <= most_seqs), None)
    return found if found is None or not adapted else replace(found, adapted=True)


def drafts_as_decodes(plan: StepPlan, starts: list[int]) -> tuple[StepPlan, list[int]]:
    """The plan with every draft as a decode of its own, and where each span then starts. A layer writes the keys and
    values of all tokens before any of them is attended to, so a draft may read those of the drafts before it; and a
    captured step of so many decodes serves as it is."""
    spans = Spans()
    positions: list[int] = []
    for row, start, count, samples in zip(
        plan.spans.rows, starts, plan.spans.num_tokens, plan.spans.samples, strict=True
    ):
        for offset in range(count) if row in plan.spans.drafts else (0,):
            spans.add(row, 1 if row in plan.spans.drafts else count, samples)
            positions.append(start + offset)
    return replace(plan, spans=spans), positions


@dataclass(slots=True)
class MixedInputs:
    """A step's integers, as views of one run: numpy's on the host, torch's on the device."""

    rows: Any  # [sequences]
    kv_lens: Any  # [sequences]
    query_starts: Any  # [sequences + 1]
    token_rows: Any  # [tokens]
    positions: Any  # [tokens]
    indices: Any  # [sequences]: the tokens whose logits are wanted

    NUM_INTS: ClassVar[int] = (
        4 * (MAX_MIXED_DECODES + MAX_MIXED_PROMPTS) + 2 + 2 * (MAX_MIXED_DECODES + MAX_MIXED_TOKENS)
    )

    @classmethod
    def of(cls, ints: Any, shape: MixedShape) -> MixedInputs:
        """Each part begins at the same place whatever the shape, and at a multiple of 16 bytes."""
        most_seqs, most_tokens = MAX_MIXED_DECODES + MAX_MIXED_PROMPTS, MAX_MIXED_DECODES + MAX_MIXED_TOKENS
        seqs, tokens = shape.num_seqs, shape.total_tokens
        starts = np.cumsum([0, most_seqs, most_seqs, most_seqs + 2, most_tokens, most_tokens])
        sizes = (seqs, seqs, seqs + 1, tokens, tokens, seqs)
        return cls(*(ints[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=True)))

    def adapter_slots(self, of_rows: Any, num_rows: int) -> Any:
        """The slot of each token, on the host, given those of the batch's rows; -1 for padding."""
        slots = np.full(len(self.token_rows), -1, dtype=np.int64)
        is_token = self.token_rows < num_rows
        slots[is_token] = of_rows[self.token_rows[is_token]]
        return slots

    def fill(self, plan: StepPlan, first_positions: list[int], shape: MixedShape, spare_row: int) -> None:
        """Write the integers of a step, on the host."""
        spans = plan.spans
        columns = (spans.rows, first_positions, spans.num_tokens)
        rows, starts, counts = (np.array(part, dtype=np.int64) for part in columns)
        num_decodes = next(i for i, count in enumerate(spans.num_tokens) if count != 1)
        num_prompts = len(rows) - num_decodes
        first = shape.num_decodes  # sequence, and token, of the first prompt
        chunks = counts[num_decodes:]
        ends = first + np.cumsum(chunks)
        self.rows[:], self.kv_lens[:] = spare_row, 1
        self.token_rows[:], self.positions[:] = spare_row, 0
        self.rows[:num_decodes] = self.token_rows[:num_decodes] = rows[:num_decodes]
        self.positions[:num_decodes] = starts[:num_decodes]
        self.kv_lens[:num_decodes] = starts[:num_decodes] + 1
        self.rows[first : first + num_prompts] = rows[num_decodes:]
        self.kv_lens[first : first + num_prompts] = starts[num_decodes:] + chunks
        self.query_starts[: first + 1] = np.arange(first + 1)
        self.query_starts[first + 1 : first + 1 + num_prompts] = ends
        self.query_starts[first + 1 + num_prompts :] = ends[-1]
        owner = np.repeat(np.arange(num_prompts), chunks)
        tokens = slice(first, int(ends[-1]))
        self.token_rows[tokens] = rows[num_decodes:][owner]
        self.positions[tokens] = np.arange(first, int(ends[-1])) - (ends - chunks)[owner] + starts[num_decodes:][owner]
        wanted = np.concatenate([np.arange(num_decodes), ends - 1])[np.array(spans.samples, dtype=bool)]
        self.indices[:] = 0
        self.indices[: len(wanted)] = wanted


def run_mixed_step(
    decoder: Decoder,
    layers: list[Tensor],
    inputs: MixedInputs,
    shape: MixedShape,
    *,
    tokens: Tensor,  # [rows, positions]: the persistent batch's
    block_tables: Tensor,  # [groups, rows, blocks]: likewise
    block_size: int,
    max_model_len: int,
    adapters: AdapterRows | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Logits of the wanted tokens, in their order; what follows them is padding. None where another rank samples."""
    attention = attention_batches(
        block_tables,
        block_size,
        rows=inputs.rows,
        token_rows=inputs.token_rows,
        positions=inputs.positions,
        query_starts=inputs.query_starts,
        kv_lens=inputs.kv_lens,
        max_query_len=shape.num_tokens,
        max_kv_len=max_model_len,
        num_decodes=shape.num_decodes,
    )
    attention[0].adapters = adapters
    hidden = decoder.forward(tokens[inputs.token_rows, inputs.positions], attention, layers)
    return decoder.gathered_logits(hidden, inputs.indices, out)


class MixedGraphs(CapturedSteps[MixedShape]):
    """The graphs of mixed steps, by padded numbers of decodes and of prompts' tokens."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(
            parts,
            Fallbacks(holds=MixedShape.holds, size=lambda shape: shape.total_tokens),
            while_idle=all_shapes(len(parts.memory.logits)),
        )
        if (bank := parts.batch.bank) is not None:
            self._while_idle += [replace(shape, adapted=True) for shape in self._while_idle]
            most = max(shape.total_tokens for shape in self._while_idle)
            self._adapters = torch.zeros(bank.rows_length(most), dtype=torch.int32, device=parts.batch.device)
        self._ints = torch.zeros(MixedInputs.NUM_INTS, dtype=torch.int64, device=parts.batch.device)
        self._staging = StagingRing(MixedInputs.NUM_INTS)

    def shape_of(self, plan: StepPlan) -> MixedShape | None:
        """The shape that serves the step; None: it has to run without a graph."""
        shape = shape_of(plan, len(self.memory.logits), adapted=self._batch.have_adapters(plan.spans.rows))
        if shape is None:
            return None
        return self._shape_that_serves(shape, (one for one in self._graphs if one.total_tokens <= _WORTH_PADDING))

    def prepare(self, plan: StepPlan, starts: list[int], shape: MixedShape) -> None:
        host = np.empty(MixedInputs.NUM_INTS, dtype=np.int64)
        inputs = MixedInputs.of(host, shape)
        inputs.fill(plan, starts, shape, self._batch.spare_row)
        self._staging.copy_to(host, self._ints)
        if shape.adapted:
            assert self._batch.bank is not None
            slots = inputs.adapter_slots(self._batch.adapter_slots, self._batch.spare_row)
            self._put_adapters(self._batch.bank, slots)

    def replay(self, shape: MixedShape, num_sampled: int) -> Tensor | None:
        """Run what was prepared; logits of the rows that sample, valid until the next step."""
        return self._replay(shape, num_sampled)

    def _fill_for_capture(self, shape: MixedShape) -> None:
        """Fill the inputs with padding alone."""
        self._ints.zero_()
        if shape.adapted:
            assert self._batch.bank is not None
            self._put_adapters(self._batch.bank, np.full(shape.total_tokens, -1, dtype=np.int64))
        inputs = MixedInputs.of(self._ints, shape)
        inputs.rows.fill_(self._batch.spare_row)
        inputs.token_rows.fill_(self._batch.spare_row)
        inputs.kv_lens.fill_(1)

    def _forward(self, shape: MixedShape, parts: StepParts) -> None:
        bank = self._batch.bank if shape.adapted else None
        run_mixed_step(
            parts.decoder,
            parts.layers,
            MixedInputs.of(self._ints, shape),
            shape,
            tokens=self._batch.tokens,
            block_tables=self._batch.block_tables,
            block_size=self._batch.block_size,
            max_model_len=parts.max_model_len,
            adapters=None if bank is None else bank.unpack_rows(self._adapters, shape.total_tokens),
            out=self.memory.logits[: shape.num_seqs],
        )
