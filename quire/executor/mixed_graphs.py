"""Graphs of steps that mix decodes with short prompts: launching those one by one takes longer than they do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.executor.captured import CapturedSteps, Fallbacks, StepParts
from quire.executor.mixed_step import MixedInputs, MixedShape, all_shapes, run_mixed_step, shape_of
from quire.executor.transfer import StagingRing
from quire.plan import StepPlan
from quire.sampling.transfer import to_device

_WORTH_PADDING = 512  # tokens: a step of so many computes for about as long as launching its kernels one by one takes


class MixedGraphs(CapturedSteps[MixedShape]):
    """By padded numbers of decodes and of prompts' tokens."""

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
            packed = self._batch.bank.pack_rows(inputs.adapter_slots(self._batch.adapter_slots, self._batch.spare_row))
            self._adapters[: len(packed)].copy_(to_device(packed, self._batch.device))

    def replay(self, shape: MixedShape, num_sampled: int) -> Tensor | None:
        """Run what was prepared; logits of the rows that sample, valid until the next step."""
        return self._replay(shape, num_sampled)

    def _fill_for_capture(self, shape: MixedShape) -> None:
        """With padding alone."""
        self._ints.zero_()
        if shape.adapted:
            self._adapters.zero_()
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
