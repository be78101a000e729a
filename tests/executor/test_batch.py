"""The persistent batch: spans become tensors, tables change by diffs."""

from __future__ import annotations

import pytest
import torch

from quire.executor.batch import PersistentBatch
from quire.params import SamplingSpec
from quire.plan import Fork, StepPlan


def make() -> PersistentBatch:
    batch = PersistentBatch(num_rows=4, max_model_len=32, block_size=4, device=torch.device("cpu"))
    batch.admit(2, 1, [10, 11, 12, 13, 14, 15], [7, 3])
    batch.admit(0, 1, [20, 21], [5])
    return batch


def test_a_mixed_step() -> None:
    batch = make()
    plan = StepPlan(1)
    plan.spans.add(0, 1, 1, True)
    plan.spans.add(2, 2, 3, False)
    inputs = batch.prepare(plan)
    attention = inputs.attention
    assert inputs.token_ids.tolist() == [21, 12, 13, 14]
    assert attention.positions.tolist() == [1, 2, 3, 4]
    assert attention.slots.tolist() == [5 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4 + 0]
    assert attention.query_starts.tolist() == [0, 1, 4]
    assert attention.kv_lens.tolist() == [2, 5]
    assert attention.block_tables[1].tolist() == [7, 3]
    assert (attention.max_query_len, attention.max_kv_len, attention.num_decodes) == (3, 5, 1)
    assert (inputs.logit_indices.tolist(), inputs.sampled_rows, inputs.sampled_positions) == ([0], [0], [2])


def test_all_decodes() -> None:
    batch = make()
    plan = StepPlan(1)
    plan.spans.add(0, 1, 1, True)
    plan.spans.add(2, 5, 1, True)
    inputs = batch.prepare(plan)
    assert inputs.token_ids.tolist() == [21, 15]
    assert inputs.attention.num_decodes == 2
    assert inputs.logit_indices.tolist() == [0, 1]


def test_sampled_tokens_feed_the_next_step_and_tables_grow() -> None:
    batch = make()
    batch.store(batch.places([0], [2]), torch.tensor([99]))
    plan = StepPlan(2)
    plan.grown = [(2, [9, 1])]
    plan.rewired = [(0, 0, 6)]
    plan.spans.add(0, 2, 1, True)
    batch.apply_table_diffs(plan)
    inputs = batch.prepare(plan)
    assert inputs.token_ids.tolist() == [99]
    assert inputs.attention.slots.tolist() == [6 * 4 + 2]
    assert batch.block_tables[2, :4].tolist() == [7, 3, 9, 1]
    assert batch.table_lengths[2] == 4


def test_forks_read_their_sources_logits_and_get_its_row() -> None:
    batch = make()
    plan = StepPlan(1)
    plan.spans.add(0, 1, 1, True)
    plan.spans.add(2, 0, 6, True)
    plan.forks = [Fork(2, 1, 1, SamplingSpec()), Fork(2, 3, 1, SamplingSpec())]
    inputs = batch.prepare(plan)
    assert inputs.sampled_rows == [0, 2, 1, 3]
    assert inputs.logit_indices.tolist() == [0, 6, 6, 6]
    assert inputs.sampled_positions == [2, 6, 6, 6]
    batch.fork(2, 1, 1)
    assert batch.block_tables[1, :2].tolist() == [7, 3]
    assert batch.tokens[1, :6].tolist() == [10, 11, 12, 13, 14, 15]


def test_rows_are_taken_and_released_once() -> None:
    batch = make()
    with pytest.raises(AssertionError, match="row 2"):
        batch.admit(2, 2, [1], [1])
    batch.release(2)
    with pytest.raises(AssertionError, match="row 2"):
        batch.release(2)
    batch.admit(2, 2, [1], [1])
