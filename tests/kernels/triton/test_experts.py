"""A mixture of experts in few launches is the one that plain torch computes, with any routing and any tiles."""

from __future__ import annotations

import models_harness as harness
import pytest
import torch

from quire.kernels.composed import ComposedExperts
from quire.kernels.interface import Norm, Quantized, SharedExpert, Unscaled
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps, experts
from quire.kernels.triton.configs import GroupedConfig, PickedConfig, experts_config
from tests.models.families import EXPERTS, saved, tiny_model

PICKED = PickedConfig(tile_n=4, tile_k=32, num_warps=4, unroll=2)
GROUPED = GroupedConfig(tile_m=16, tile_n=16, tile_k=32, num_warps=4, num_stages=2)


def pair(device, dtype, num_experts, inner, hidden, **kwargs):
    """The same experts on Triton's kernels, and in plain torch with more digits."""
    ops = TritonOps(device, dtype)
    made = ops.new_experts(num_experts, inner, hidden, **kwargs)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    reference = ReferenceOps(device, wide)
    twin = reference.new_experts(num_experts, inner, hidden, **kwargs)
    assert isinstance(twin, ComposedExperts)
    for seed, (ours, theirs) in enumerate(
        zip([made.router, *made.gate_ups, *made.downs], [twin.router, *twin.gate_ups, *twin.downs], strict=True)
    ):
        ours.randomize(0.3, seed)
        theirs.load_rows(0, ours.weight)
        if ours.has_bias:
            theirs.load_bias(0, ours.bias)
    return ops, made, twin


def close(out, expected, tolerance):
    assert torch.isfinite(out.float()).all()
    return (out.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@pytest.fixture(params=[PICKED, GROUPED], ids=["picked", "grouped"])
def config(request, monkeypatch):
    monkeypatch.setattr(experts, "experts_config", lambda *args, **kwargs: request.param)
    return request.param


@pytest.mark.parametrize(
    ("normalizes", "tokens", "num_experts", "top_k", "inner", "hidden"),
    [(True, 1, 8, 2, 32, 64), (False, 3, 6, 3, 20, 48), (True, 17, 4, 1, 8, 32), (False, 6, 20, 8, 8, 32)],
)
def test_the_mixture_of_plain_torch(config, normalizes, tokens, num_experts, top_k, inner, hidden, device):
    ops, made, twin = pair(
        device, torch.float32, num_experts, inner, hidden, top_k=top_k, normalizes=normalizes, activation="silu"
    )
    x = torch.randn(tokens, hidden, device=device)
    expected = twin.multiply(x.double())
    for _ in range(2):  # the second run finds counts and arrivals as the first one left them
        assert close(made.multiply(x), expected, 1e-5)
        scratch = ops.routing_scratch(num_experts)
        assert not scratch.counts.any() and not scratch.arrivals.any()


def test_biases_and_a_clamped_activation(config, device):
    """gpt-oss's: half of the gates and ups lie outside of the clamps."""
    _, made, twin = pair(
        device, torch.float32, 6, 20, 48, top_k=3, normalizes=True, activation="clamped_silu", bias=True
    )
    x = torch.randn(9, 48, device=device) * 4
    assert close(made.multiply(x), twin.multiply(x.double()), 1e-5)
    squares, scale = x.square().sum(1)[None], x.square().mean(1, keepdim=True).add(1e-5).rsqrt()
    assert close(made.multiply(Unscaled(x, squares, 1e-5)), twin.multiply((x * scale).double()), 1e-5)


def test_a_shared_expert_the_residual_stream_and_the_next_norm(config, device):
    _, made, twin = pair(device, torch.float32, 6, 12, 48, top_k=2, normalizes=True, activation="gelu_tanh")
    x, residual = torch.randn(7, 48, device=device), torch.randn(7, 48, device=device)
    norm = Norm(torch.randn(48, device=device), 1e-5)
    for gate in (torch.randn(7, 1, device=device), None):
        shared = SharedExpert(torch.randn(7, 48, device=device), gate)
        wide = SharedExpert(shared.branch.double(), None if gate is None else gate.double())
        for next_norm in (norm, None):
            stream, expected_stream = residual.clone(), residual.double()
            out = made.multiply_add_norm(x, stream, next_norm, shared)
            expected = twin.multiply_add_norm(x.double(), expected_stream, next_norm, wide)
            assert close(stream, expected_stream, 1e-5) and close(out, expected, 1e-5)


def test_rows_that_are_not_normalised_yet(config, device):
    _, made, twin = pair(device, torch.float32, 6, 32, 64, top_k=2, normalizes=True, activation="silu")
    stream, norm = torch.randn(5, 64, device=device) * 3, torch.randn(64, device=device)
    squares = torch.stack([part.square().sum(1) for part in stream.tensor_split(3, dim=1)])
    normed = ReferenceOps(device, torch.float64).normalize(stream.double(), Norm(norm, 1e-5))
    assert close(made.multiply(Unscaled(stream * norm, squares, 1e-5)), twin.multiply(normed), 1e-5)


def test_half_precision(config, device):
    for dtype in (torch.bfloat16, torch.float16):
        _, made, twin = pair(device, dtype, 8, 16, 64, top_k=2, normalizes=True, activation="silu")
        # A clear choice: its third is far from its second whatever the rounding.
        made.router.weight.copy_(torch.eye(8, 64))
        twin.router.weight.copy_(torch.eye(8, 64))
        x = torch.randn(6, 64, device=device)
        x[:, :8] = torch.stack([torch.randperm(8) for _ in range(6)])
        x = x.to(dtype)
        assert close(made.multiply(x), twin.multiply(x.float()), 1e-2)


def test_all_tokens_of_one_expert_and_rows_that_are_not_numbers(config, device):
    """The fullest list there can be; and a row of NaN spoils no other."""
    _, made, twin = pair(device, torch.float32, 4, 8, 32, top_k=2, normalizes=True, activation="silu")
    for matrix in (made.router, twin.router):
        matrix.weight.fill_(0.0)
        matrix.weight[2, 0], matrix.weight[1, 0] = 5.0, 4.0
    x = torch.rand(20, 32, device=device) + 0.1
    expected = twin.multiply(x.double())
    assert close(made.multiply(x), expected, 1e-5)
    x[3] = float("nan")
    out = made.multiply(x)
    others = [row for row in range(20) if row != 3]
    assert close(out[others], expected[others], 1e-5) and out[3].isnan().all()


@pytest.mark.parametrize("tokens", [3, 17])
def test_experts_in_8_bits(config, tokens, device):
    """Rows are multiplied as they are by what the experts hold, each row of it with its own scale."""
    ops = TritonOps(device, torch.bfloat16, quantization="fp8")
    made = ops.new_experts(6, 16, 32, top_k=1, normalizes=True, activation="silu")
    twin = ReferenceOps(device, torch.float32).new_experts(6, 16, 32, top_k=1, normalizes=True, activation="silu")
    made.router.weight.copy_(torch.eye(6, 32))  # a clear choice, whatever the rounding
    twin.router.weight.copy_(torch.eye(6, 32))
    for ours, theirs in zip([*made.gate_ups, *made.downs], [*twin.gate_ups, *twin.downs], strict=True):
        ours.load_rows(0, torch.randn(ours.out_features, ours.in_features) * torch.rand(ours.out_features, 1))
        theirs.load_rows(0, ours.weight.float() * ours.scales[:, None])
    x = torch.randn(tokens, 32, device=device)
    x[:, :6] = torch.stack([torch.randperm(6) for _ in range(tokens)])
    x = x.bfloat16()
    norm, residual = Norm(torch.rand(32, device=device) + 0.5, 1e-5, quantizes=True), torch.zeros_like(x)
    left = made.multiply_add_norm(x, residual, norm)
    assert close(residual, twin.multiply(x.float()), 1e-2) and isinstance(left, Quantized) == (tokens > 16)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_routing_that_needs_more_blocks_than_the_grid_has(num_blocks, monkeypatch, device):
    monkeypatch.setattr(experts, "experts_config", lambda *args, **kwargs: GROUPED)
    monkeypatch.setattr(GroupedConfig, "num_blocks", lambda *args: num_blocks)
    _, made, twin = pair(device, torch.float32, 6, 20, 48, top_k=2, normalizes=True, activation="silu")
    x = torch.randn(40, 48, device=device)
    assert close(made.multiply(x), twin.multiply(x.double()), 1e-5)


@pytest.mark.parametrize("picks", [24, 128, 2048, 8192, 65536])
def test_the_grid_has_the_blocks_of_a_routing_by_chance(picks):
    config = experts_config(picks, 128, 768, 2048, 2, is_gated=True)
    counts = torch.multinomial(torch.ones(picks // 8, 128), 8).flatten().bincount(minlength=128)
    num_blocks = config.num_blocks(picks, picks // 8, 128)
    assert abs(num_blocks - int((-(-counts // config.tile_m)).sum())) <= 0.1 * num_blocks + 2
    assert config.num_blocks(picks, picks, 128) >= num_blocks - 1
    assert config.num_blocks(8, 8, 128) == 8 and config.num_blocks(8, 1, 128) == 8  # no more than there are picks


@pytest.mark.parametrize("tokens", [5, 40])
def test_a_folded_norm(config, tokens, device):
    """The rows' factors are then worked out beside the router's product."""
    _, made, twin = pair(device, torch.float32, 6, 32, 64, top_k=2, normalizes=True, activation="silu")
    stream, norm = torch.randn(tokens, 64, device=device) * 3, Norm(torch.randn(64, device=device), 1e-5)
    normed = ReferenceOps(device, torch.float64).normalize(stream.double(), norm)
    left = made.fold_norm(norm)
    assert left.is_folded and (left.weight == 1).all()
    residual = stream.clone()  # the stream itself is multiplied, and added to
    made.multiply_add_norm(Unscaled(residual, None, 1e-5), residual, None)
    assert close(residual, stream.double() + twin.multiply(normed), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "quantization", "has_bias"),
    [(torch.float16, None, False), (torch.bfloat16, "fp8", False), (torch.float32, None, True)],
)
def test_norms_that_are_not_folded(dtype, quantization, has_bias, device):
    """float16 may not hold the residual stream, 8-bit experts stay as they are, and a LayerNorm takes means away."""
    made = TritonOps(device, dtype, quantization=quantization).new_experts(
        4, 16, 32, top_k=2, normalizes=True, activation="silu"
    )
    norm = Norm(torch.rand(32, device=device), 1e-5, bias=torch.zeros(32, device=device) if has_bias else None)
    assert made.fold_norm(norm) is norm


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "olmoe"])
def test_whole_models_whose_norms_are_folded(name, tmp_path, device):
    """More than 32 tokens: rows are multiplied before they are normalized, but for OLMoE's q and k."""
    spec, tensors = saved(tiny_model(EXPERTS[name]), tmp_path)
    sequences, schedule = harness.random_sequences(spec.vocab_size, (40,)), harness.whole((40,))
    [found], [expected] = (
        harness.run_paged(spec, tensors, ops, sequences, schedule, 16, device=device)
        for ops in (TritonOps(device, torch.float32), ReferenceOps(device, torch.float32))
    )
    assert close(found, expected, 1e-4)
