"""Steps of decodes and prompts, padded: they give what the same step gives unpadded."""

from __future__ import annotations

import random

import models_harness as harness
import numpy as np
import pytest
import torch

from quire.executor import mixed_graphs
from quire.executor.batch import PersistentBatch
from quire.executor.mixed_graphs import MixedInputs, MixedShape, all_shapes, run_mixed_step
from quire.executor.sizing import MAX_MIXED_PROMPTS
from quire.kernels.reference import ReferenceOps
from quire.plan import StepPlan

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def shape_of(plan: StepPlan, most_seqs: int = 1_000) -> MixedShape | None:
    return mixed_graphs.shape_of(plan, most_seqs)


def plan_of(spans: list[tuple[int, int, bool]]) -> StepPlan:
    plan = StepPlan(1)
    for span in spans:
        plan.spans.add(*span)
    return plan


def test_the_smallest_shape_that_fits() -> None:
    decodes = [(row, 1, True) for row in range(9)]
    assert shape_of(plan_of([*decodes, (9, 65, True)])) == MixedShape(16, 128)
    assert shape_of(plan_of([(0, 64, True)])) == MixedShape(0, 64)
    assert shape_of(plan_of(decodes)) is None  # those have graphs of their own
    assert shape_of(plan_of([(0, 513, True)])) is None
    assert shape_of(plan_of([(row, 2, True) for row in range(MAX_MIXED_PROMPTS + 1)])) is None
    assert shape_of(plan_of([(row, 1, True) for row in range(257)] + [(300, 2, True)])) is None


def test_a_shape_with_too_many_sequences_is_passed_over_for_a_longer_one() -> None:
    plan = plan_of([*((row, 1, True) for row in range(60)), (60, 380, True)])
    assert shape_of(plan) == MixedShape(128, 384)
    assert shape_of(plan, 80) == MixedShape(64, 512)  # logits of an engine for 64 sequences
    assert shape_of(plan, 40) is None


def test_every_shape_is_one_that_a_step_can_have() -> None:
    for shape in all_shapes(1_000):
        decodes = [(row, 1, True) for row in range(shape.num_decodes)]
        assert shape_of(plan_of([*decodes, (999, shape.num_tokens, True)])) == shape


def test_the_largest_shape_is_captured_first_and_rows_limit_them() -> None:
    assert all_shapes(1_000)[0] == MixedShape(256, 512)
    assert len(set(all_shapes(1_000))) == len(all_shapes(1_000)) == 46
    assert all_shapes(32)[0] == MixedShape(16, 512)
    assert all(shape.num_seqs <= 32 for shape in all_shapes(32))


def test_parts_do_not_overlap_and_are_aligned() -> None:
    for shape in all_shapes(1_000):
        ints = np.zeros(MixedInputs.NUM_INTS, dtype=np.int64)
        inputs = MixedInputs.of(ints, shape)
        parts = (inputs.rows, inputs.kv_lens, inputs.query_starts, inputs.token_rows, inputs.positions, inputs.indices)
        for part in parts:
            assert (part.ctypes.data - ints.ctypes.data) % 16 == 0
            part += 1
        assert ints.max() == 1
        assert ints.sum() == sum(len(part) for part in parts)


@pytest.mark.parametrize("seed", range(6))
def test_padded_logits_are_the_unpadded_ones(seed: int) -> None:
    rng = random.Random(seed)
    model = harness.tiny_model("llama")
    spec = harness.spec_of(model)
    decoder = harness.load_decoder(spec, model.state_dict(), ReferenceOps("cpu", torch.float32))
    num_rows, num_blocks = 24, 24 * 16
    batch = PersistentBatch(
        num_rows=num_rows, max_model_len=60, block_size=BLOCK_SIZE, device=CPU, spare_block=num_blocks
    )
    shape = (num_blocks + 1, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    caches = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for _ in range(spec.num_layers)]
    blocks = list(range(num_blocks))
    rng.shuffle(blocks)
    spans = []
    for row in rng.sample(range(num_rows), 12):
        is_decode = len(spans) < 7
        start = rng.randint(1, 40) if is_decode or rng.random() < 0.5 else 0
        token_ids = [rng.randrange(spec.vocab_size) for _ in range(50)]
        batch.admit(row, token_ids, start, [(0, [blocks.pop() for _ in range(15)])])
        spans.append((row, 1 if is_decode else rng.randint(2, 9), is_decode or rng.random() < 0.6))
    plan = plan_of(spans)

    inputs = batch.prepare(plan)
    expected_kv = [cache.clone() for cache in caches]
    hidden = decoder.forward(inputs.token_ids, inputs.attention, expected_kv)
    expected = decoder.logits(hidden, inputs.logit_indices)

    mixed = shape_of(plan)
    assert mixed == MixedShape(8, 64)
    host = np.full(MixedInputs.NUM_INTS, -1, dtype=np.int64)
    MixedInputs.of(host, mixed).fill(plan, batch.starts(plan.spans).tolist(), mixed, batch.spare_row)
    out = torch.full((mixed.num_seqs, spec.vocab_size), float("nan"))
    logits = run_mixed_step(
        decoder,
        caches,
        MixedInputs.of(torch.from_numpy(host), mixed),
        mixed,
        tokens=batch.tokens,
        block_tables=batch.block_tables,
        block_size=BLOCK_SIZE,
        max_model_len=60,
        out=out,
    )
    assert torch.allclose(logits[: len(expected)], expected, atol=1e-4)
    for mine, theirs in zip(caches, expected_kv, strict=True):
        assert torch.allclose(mine[:num_blocks], theirs[:num_blocks], atol=1e-5)  # all but the spare block
