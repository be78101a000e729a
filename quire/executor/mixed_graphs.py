"""CUDA graphs of steps that mix decodes with short prompts: launching those one by one takes longer than they do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.executor.batch import PersistentBatch
from quire.executor.graphs import GraphMemory, out_of_memory_is_survived
from quire.executor.mixed_step import MixedInputs, MixedShape, all_shapes, run_mixed_step, shape_of
from quire.executor.stand_in import StandIns
from quire.executor.transfer import StagingRing
from quire.models.decoder import Decoder
from quire.plan import StepPlan

_WORTH_PADDING = 448  # tokens: a step of so many computes for about as long as launching its kernels one by one takes


class MixedGraphs:
    """Graphs by padded shape, beside those of decode steps. Captured while there is nothing else to do, or when a shape
    has come so often that it pays."""

    def __init__(
        self,
        decoder: Decoder,
        layers: list[Tensor],
        batch: PersistentBatch,
        memory: GraphMemory,
        *,
        max_model_len: int,
    ) -> None:
        self._decoder = decoder
        self._layers = layers
        self._batch = batch
        self._memory = memory
        self._max_model_len = max_model_len
        self._ints = torch.zeros(MixedInputs.NUM_INTS, dtype=torch.int64, device=batch.device)
        self._staging = StagingRing(MixedInputs.NUM_INTS)
        self._graphs: dict[MixedShape, torch.cuda.CUDAGraph] = {}
        self._stand_ins: StandIns[MixedShape] = StandIns(holds=MixedShape.holds, size=lambda shape: shape.total_tokens)
        self._without: set[MixedShape] = set()  # for which there was no memory
        self._not_captured = all_shapes(len(memory.logits))

    def shape_of(self, plan: StepPlan) -> MixedShape | None:
        """The shape that serves the step; None: it has to run without a graph."""
        shape = shape_of(plan)
        if shape is None or shape in self._graphs:
            return shape
        can_capture = self._fits(shape) and shape not in self._without
        if can_capture and self._stand_ins.pays(shape) and self._capture(shape):
            return shape
        return self._stand_ins.find(shape, (one for one in self._graphs if one.total_tokens <= _WORTH_PADDING))

    def prepare(self, plan: StepPlan, shape: MixedShape) -> None:
        host = np.empty(MixedInputs.NUM_INTS, dtype=np.int64)
        MixedInputs.of(host, shape).fill(plan, shape, self._batch.spare_row)
        self._staging.copy_to(host, self._ints)

    def replay(self, shape: MixedShape, num_sampled: int) -> Tensor:
        """Run what was prepared; logits of the rows that sample, valid until the next step."""
        self._graphs[shape].replay()
        return self._memory.logits[:num_sampled]

    def capture_next(self) -> bool:
        """Capture another shape. False when there is none left."""
        while self._not_captured:
            shape = self._not_captured.pop(0)
            if shape not in self._graphs and shape not in self._without:
                if not self._capture(shape):
                    self._not_captured.clear()  # the others would not fit either
                    return False
                return True
        return False

    def _fits(self, shape: MixedShape) -> bool:
        return shape.num_seqs <= len(self._memory.logits)

    def _capture(self, shape: MixedShape) -> bool:
        """On padding alone. False where memory is short: such steps then run without a graph."""
        self._ints.zero_()
        inputs = MixedInputs.of(self._ints, shape)
        inputs.rows.fill_(self._batch.spare_row)
        inputs.token_rows.fill_(self._batch.spare_row)
        inputs.kv_lens.fill_(1)
        with out_of_memory_is_survived() as outcome:
            self._forward(shape)  # kernels compile, and cuBLAS chooses, outside of the capture
            self._graphs[shape] = self._memory.capture(lambda: self._forward(shape))
        if not outcome.had_room:
            self._without.add(shape)
        return outcome.had_room

    def _forward(self, shape: MixedShape) -> None:
        run_mixed_step(
            self._decoder,
            self._layers,
            MixedInputs.of(self._ints, shape),
            shape,
            tokens=self._batch.tokens,
            block_tables=self._batch.block_tables,
            block_size=self._batch.block_size,
            max_model_len=self._max_model_len,
            out=self._memory.logits[: shape.num_seqs],
        )
