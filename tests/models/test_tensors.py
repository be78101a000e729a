"""What a checkpoint must hold is known before a decoder exists, and the decoder asks for the same."""

from __future__ import annotations

import models_harness as harness
import pytest
import torch

from quire.kernels.reference import ReferenceOps
from quire.models.decoder import Decoder
from quire.models.tensors import checkpoint_tensors


@pytest.mark.parametrize("name", harness.TINY_MODELS)
def test_they_are_the_decoders_slots(name):
    spec = harness.spec_of(harness.tiny_model(name))
    decoder = Decoder(
        spec, ReferenceOps("cpu", torch.float32), device="cpu", dtype=torch.float32, max_position=spec.max_position
    )
    assert checkpoint_tensors(spec) == {name: slot.shape for name, slot in decoder.weight_slots().items()}
