"""Rehearsals on tiny models: the largest step's layout, and scales for an 8-bit cache."""

from __future__ import annotations

import models_harness as harness
import pytest
import torch

from quire.executor.profile import calibrate_kv_scales, prompts_step
from quire.kernels.reference import ReferenceOps

CPU = torch.device("cpu")


def test_the_largest_step_is_wholeprompts_step_in_blocks_of_their_own() -> None:
    model = harness.tiny_model("llama")
    decoder = harness.load_decoder(harness.spec_of(model), model.state_dict(), ReferenceOps("cpu", torch.float32))
    inputs, num_blocks = prompts_step(decoder, CPU, block_size=4, num_tokens=26, max_seq_len=10)
    [batch] = inputs.attention
    assert batch.query_starts.tolist() == [0, 10, 20, 26]
    assert batch.kv_lens.tolist() == [10, 10, 6]
    assert batch.positions.tolist() == [*range(10), *range(10), *range(6)]
    assert len(set(batch.slots.tolist())) == 26
    assert int(batch.slots.max()) < num_blocks * 4
    assert (batch.max_query_len, batch.num_decodes) == (10, 0)


def test_scales_bring_the_largest_value_into_range() -> None:
    model = harness.tiny_model("llama")
    spec = harness.spec_of(model)
    decoder = harness.load_decoder(spec, model.state_dict(), ReferenceOps("cpu", torch.float32))
    scales = calibrate_kv_scales(decoder, spec, device=CPU, dtype=torch.float32, block_size=16)
    assert len(scales) == spec.num_layers
    assert all(0 < k < 448 and 0 < v < 448 for k, v in scales)
    decoder.set_kv_scales(scales)
    again = calibrate_kv_scales(decoder, spec, device=CPU, dtype=torch.float32, block_size=16)
    # Values are stored divided by their scale, and what is measured does not depend on it.
    for pair, before in zip(again, scales, strict=True):
        assert pair == pytest.approx(before, rel=1e-4)
    few = calibrate_kv_scales(
        decoder, spec, device=CPU, dtype=torch.float32, block_size=16, token_ids=torch.arange(5, 12)
    )
    assert few != scales and all(0 < value < 448 for pair in few for value in pair)
