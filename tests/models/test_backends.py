"""The fast backends give transformers' logits, too: native on the CPU in float32, Triton on CUDA in bf16."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import models_harness as harness
import pytest
import torch

from quire.kernels import cpu as native
from quire.models.spec import ModelSpec
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
    model, spec, sequences, _ = _case(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    _check_in_bf16(harness.tiny_model(name), spec, state, sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_triton_in_bf16(name: str, tmp_path: Path) -> None:
    model = tiny_model(FAMILIES[name])
    spec, tensors = saved(model, tmp_path)
    _check_in_bf16(model, spec, tensors, harness.random_sequences(spec.vocab_size, (29, 9, 1)))


def test_slopes_on_triton(tmp_path: Path) -> None:
    """Interpreted where there is no GPU."""
    from quire.kernels.triton import TritonOps

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model(FAMILIES["mpt"])
    spec, tensors = saved(model, tmp_path)
    sequences = harness.random_sequences(spec.vocab_size, (6, 4))
    ops = TritonOps(torch.device(device), torch.float32)
    steps = [[(0, 5), (1, 3)], [(0, 1), (1, 1)]]  # a prompt each, then a decode each
    logits = harness.run_paged(spec, tensors, ops, sequences, steps, 16, device=device)
    for got, sequence in zip(logits, sequences, strict=True):
        assert (got - harness.oracle_logits(model, sequence)).abs().max() <= 1e-4


def _check_in_bf16(model: Any, spec: ModelSpec, tensors: dict[str, torch.Tensor], sequences: list[list[int]]) -> None:
    """That Triton's kernels in bf16 are as close to the model in float32 as transformers are in bf16."""
    from quire.kernels.triton import TritonOps

    expected = [harness.oracle_logits(model, sequence) for sequence in sequences]
    half = model.to("cuda", torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(torch.tensor([s], device="cuda")).logits[0].float().cpu() for s in sequences]
    ops = TritonOps(torch.device("cuda"), torch.bfloat16)
    for schedule in ("whole", "mixed"):
        steps = harness.SCHEDULES[schedule]([len(s) for s in sequences])
        ours = harness.run_paged(
            spec, tensors, ops, sequences, steps, 16, device="cuda", dtype=torch.bfloat16, kv_dtype=torch.bfloat16
        )
        assert _error(ours, expected) <= 1.5 * _error(theirs, expected)


def _error(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative error over all sequences."""
    got, want = torch.cat([x.float().cpu() for x in logits]), torch.cat(expected)
    return float((got - want).norm() / want.norm())
