"""The persistent batch: spans become tensors, tables change by diffs, lengths are its own."""

from __future__ import annotations

import models_harness as harness
import pytest
import torch

from quire.executor.batch import PersistentBatch
from quire.kernels.reference import ReferenceOps
from quire.params import SamplingSpec
from quire.plan import Fork, Spans, StepPlan


def make(computed_2: int = 0, computed_0: int = 1) -> PersistentBatch:
    """Row 2 has six tokens, row 0 has two: of these so many have KV."""
    batch = PersistentBatch(num_rows=4, max_model_len=32, block_size=4, device=torch.device("cpu"))
    batch.admit(2, [10, 11, 12, 13, 14, 15], computed_2, [(0, [7, 3])])
    batch.admit(0, [20, 21], computed_0, [(0, [5])])
    return batch


def step(*spans: tuple[int, int, bool], drafts: dict[int, list[int] | int] | None = None) -> StepPlan:
    rows, counts, samples = zip(*spans, strict=True)
    return StepPlan(1, spans=Spans(list(rows), list(counts), list(samples), drafts or {}))


def test_a_mixed_step() -> None:
    inputs = make(computed_2=2).prepare(step((0, 1, True), (2, 3, False)))
    [attention] = inputs.attention
    assert inputs.token_ids.tolist() == [21, 12, 13, 14]
    assert attention.positions.tolist() == [1, 2, 3, 4]
    assert attention.slots.tolist() == [5 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4 + 0]
    assert attention.query_starts.tolist() == [0, 1, 4]
    assert attention.kv_lens.tolist() == [2, 5]
    assert attention.block_tables[1].tolist() == [7, 3]
    assert (attention.max_query_len, attention.max_kv_len, attention.num_decodes) == (3, 5, 1)
    assert (inputs.logit_indices.tolist(), inputs.sampled_rows, inputs.sampled_positions) == ([0], [0], [2])


def test_all_decodes() -> None:
    inputs = make(computed_2=5).prepare(step((0, 1, True), (2, 1, True)))
    assert inputs.token_ids.tolist() == [21, 15]
    assert inputs.attention[0].num_decodes == 2
    assert inputs.logit_indices.tolist() == [0, 1]


def test_sampled_tokens_feed_the_next_step_and_tables_change() -> None:
    batch = make()
    first = step((0, 1, True))
    batch.prepare(first)
    batch.advance(first.spans)
    batch.store(batch.places([0], [2]), torch.tensor([99]))
    plan = step((0, 1, True))
    plan.appended = [(2, 0, [9, 1])]
    plan.remapped = [(0, 0, 0, 6)]
    batch.apply_table_diffs(plan)
    inputs = batch.prepare(plan)
    assert inputs.token_ids.tolist() == [99]
    assert inputs.attention[0].slots.tolist() == [6 * 4 + 2]
    assert batch.block_tables[0, 2, :4].tolist() == [7, 3, 9, 1]
    batch.apply_table_diffs(StepPlan(3, trimmed=[(2, 3)], appended=[(2, 0, [8])]))
    assert batch.block_tables[0, 2, :4].tolist() == [7, 3, 9, 8]


def test_forks_read_their_sources_logits_and_get_its_row() -> None:
    batch = make()
    plan = step((0, 1, True), (2, 6, True))
    plan.forks = [Fork(2, 1, SamplingSpec()), Fork(2, 3, SamplingSpec())]
    inputs = batch.prepare(plan)
    batch.advance(plan.spans)
    assert inputs.sampled_rows == [0, 2, 1, 3]
    assert inputs.logit_indices.tolist() == [0, 6, 6, 6]
    assert inputs.sampled_positions == [2, 6, 6, 6]
    batch.fork(2, 1)
    assert batch.block_tables[0, 1, :2].tolist() == [7, 3]
    assert batch.tokens[1, :6].tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.num_computed[1] == 6


def test_drafts_run_behind_the_last_token_and_each_position_gives_logits() -> None:
    batch = make(computed_2=5)
    plan = step((0, 1, True), (2, 3, True), drafts={2: [70, 71]})
    batch.write_drafts(plan.spans)
    inputs = batch.prepare(plan)
    assert inputs.token_ids.tolist() == [21, 15, 70, 71]
    assert inputs.attention[0].positions.tolist() == [1, 5, 6, 7]
    assert inputs.logit_indices.tolist() == [0, 1, 2, 3]
    assert (inputs.sampled_rows, inputs.sampled_positions) == ([0, 2], [2, 6])


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_a_length_grows_by_what_is_accepted(num_accepted: int) -> None:
    batch = make(computed_2=5)
    [unjudged] = batch.advance(step((2, 3, True), drafts={2: [70, 71]}).spans)
    assert batch.num_computed[2] == 6
    batch.judge(unjudged, num_accepted)
    assert batch.num_computed[2] == 6 + num_accepted


def test_a_late_judgement_does_not_touch_the_rows_next_sequence() -> None:
    batch = make(computed_2=5)
    [unjudged] = batch.advance(step((2, 3, True), drafts={2: [70, 71]}).spans)
    batch.release(2)
    batch.admit(2, [1, 2, 3], 0, [(0, [6])])
    batch.judge(unjudged, 2)
    assert batch.num_computed[2] == 0


def test_rows_are_taken_and_released_once() -> None:
    batch = make()
    with pytest.raises(AssertionError, match="row 2"):
        batch.admit(2, [1], 0, [(0, [1])])
    batch.release(2)
    with pytest.raises(AssertionError, match="row 2"):
        batch.release(2)
    batch.admit(2, [1], 0, [(0, [1])])
    assert batch.release_all() == [0, 2]


def test_every_kv_group_has_its_own_tables() -> None:
    batch = PersistentBatch(num_rows=2, max_model_len=32, block_size=4, device=torch.device("cpu"), num_groups=2)
    batch.admit(1, list(range(13)), 12, [(0, [4, 5, 6, 7]), (2, [8, 9])])
    plan = step((1, 1, True))
    plan.appended = [(1, 1, [3])]
    plan.remapped = [(1, 0, 3, 2)]
    batch.apply_table_diffs(plan)
    full, windowed = batch.prepare(plan).attention
    assert (full.slots.tolist(), windowed.slots.tolist()) == ([2 * 4], [9 * 4])
    assert full.block_tables[0].tolist() == [4, 5, 6, 2]
    assert windowed.block_tables[0, 2:].tolist() == [8, 9]
    assert batch.block_tables[1, 1, 4] == 3


def test_tokens_that_give_logits_are_decodes_of_their_own_in_the_last_layer() -> None:
    plan = step((0, 1, True), (2, 6, True), drafts={})
    inputs = make().prepare(plan, last_group=0)
    assert inputs.read is not None and inputs.logit_indices is None
    batch = inputs.read.batch
    assert inputs.read.indices.tolist() == [0, 6]
    assert (batch.query_starts.tolist(), batch.kv_lens.tolist(), batch.num_decodes) == ([0, 1, 2], [2, 6], 2)
    assert batch.block_tables[1].tolist() == [7, 3]
    none = make().prepare(step((2, 6, False)), last_group=0)
    assert none.read is not None and len(none.read.indices) == 0
    most = make(computed_2=4).prepare(step((0, 1, True), (2, 2, True)), last_group=0)
    assert most.read is None and most.logit_indices is not None


def test_a_last_layer_of_the_tokens_that_are_read_gives_the_same_states() -> None:
    """Also where layers differ in their windows."""
    for name in ("llama", "gemma3"):
        model = harness.tiny_model(name)
        spec = harness.spec_of(model)
        decoder = harness.load_decoder(spec, model.state_dict(), ReferenceOps("cpu", torch.float32))
        found = []
        for last_group in (None, decoder.layout.groups[-1]):
            batch = PersistentBatch(
                num_rows=2,
                max_model_len=32,
                block_size=4,
                device=torch.device("cpu"),
                num_groups=len(decoder.layout.windows),
            )
            num_groups = len(decoder.layout.windows)
            batch.admit(0, list(range(9)), 0, [(0, [1, 2, 3])] * num_groups)
            batch.admit(1, list(range(20, 25)), 0, [(0, [4, 5])] * num_groups)
            inputs = batch.prepare(step((0, 9, True), (1, 5, True)), last_group)
            kv = [torch.zeros(6, 2, spec.num_kv_heads, 4, spec.head_dim) for _ in spec.layers]
            hidden = decoder.forward(inputs.token_ids, inputs.attention, kv, inputs.read)
            found.append((hidden if inputs.logit_indices is None else hidden[inputs.logit_indices], kv))
        (states, written), (read_states, read_written) = found
        assert len(read_states) == 2
        torch.testing.assert_close(read_states, states, atol=1e-5, rtol=1e-5)
        for layer, other in zip(written, read_written, strict=True):
            assert torch.equal(layer, other)
