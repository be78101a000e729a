"""Rehearsals on tiny models: the largest step's layout."""

from __future__ import annotations

import models_harness as harness
import torch

from quire.executor.profile import prompts_step
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
