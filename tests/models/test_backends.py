"""The fast backends give transformers' logits, too: native on the CPU in float32, Triton on CUDA in bf16."""

from __future__ import annotations

import functools
from typing import Any

import models_harness as harness
import pytest
import torch

from quire.kernels import cpu as native
from tests.models.families import FAMILIES, saved, tiny_model

LENGTHS = (37, 19, 1, 26)


@functools.cache
def _case(name: str) -> tuple[Any, Any, list[list[int]], list[torch.Tensor]]:
    model = harness.tiny_model(name)
    sequences = harness.random_sequences(model.config.vocab_size, LENGTHS)
    return model, harness.spec_of(model), sequences, [harness.oracle_logits(model, s) for s in sequences]


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
@pytest.mark.parametrize("schedule", harness.SCHEDULES)
@pytest.mark.parametrize("name", harness.TINY_MODELS)
def test_native_cpu_logits(name: str, schedule: str) -> None:
    model, spec, sequences, expected = _case(name)
    ops = native.CpuOps(num_threads=1)
    if not ops.supported_block_sizes(spec.head_dim):
        pytest.skip(f"a head dimension of {spec.head_dim} is served by the reference")
    steps = harness.SCHEDULES[schedule](LENGTHS)
    for block_size in (4, 16):
        logits = harness.run_paged(spec, model.state_dict(), ops, sequences, steps, block_size)
        for got, want in zip(logits, expected, strict=True):
            assert (got - want).abs().max().item() <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", harness.TINY_MODELS)
def test_triton_in_bf16_is_as_close_as_transformers_in_bf16(name: str) -> None:
    from quire.kernels.triton import TritonOps

    model, spec, sequences, expected = _case(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    half = harness.tiny_model(name).to("cuda", torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(torch.tensor([s], device="cuda")).logits[0].float().cpu() for s in sequences]
    ops = TritonOps(torch.device("cuda"), torch.bfloat16)
    for schedule in ("whole", "mixed"):
        ours = harness.run_paged(
            spec,
            state,
            ops,
            sequences,
            harness.SCHEDULES[schedule](LENGTHS),
            16,
            device="cuda",
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
        )
        assert _error(ours, expected) <= 1.5 * _error(theirs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_triton_in_bf16(name: str, tmp_path) -> None:
    from quire.kernels.triton import TritonOps

    model = tiny_model(FAMILIES[name])
    spec, tensors = saved(model, tmp_path)
    sequences = harness.random_sequences(spec.vocab_size, (29, 9, 1))
    expected = [harness.oracle_logits(model, sequence) for sequence in sequences]
    ops = TritonOps(torch.device("cuda"), torch.bfloat16)
    for schedule in ("whole", "mixed"):
        steps = harness.SCHEDULES[schedule]((29, 9, 1))
        ours = harness.run_paged(
            spec, tensors, ops, sequences, steps, 16, device="cuda", dtype=torch.bfloat16, kv_dtype=torch.bfloat16
        )
        assert _error(ours, expected) <= 3e-2


def _error(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative error over all sequences."""
    got, want = torch.cat([x.float().cpu() for x in logits]), torch.cat(expected)
    return float((got - want).norm() / want.norm())
