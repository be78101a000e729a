"""Kernels of adapters against plain torch: rows of several adapters and of none, of several ranks, in one product."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest
import torch

from quire.kernels.adapters import AdapterBank, AdapterSite, LowRank, LowRankPair
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary, Unscaled
from quire.kernels.triton import TritonOps, adapters
from quire.kernels.triton.one_adapter import OneAdapter
from quire.parallel.linear import SummedLinear

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 96, 3, 1, 32, 80
PARTS = {
    "qkv": (HIDDEN, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
    "gate_up in one": (HIDDEN, (2 * INNER,)),
    "wide gate_up": (HIDDEN, (152, 152)),  # several tiles of columns, the last of them not full
}
RANKS = (5, 16, 20)


def adapted(name, device, *, fold=None, held=slice(None), bias=None):
    """A matrix with adapters of three ranks, or some columns of it; -> it, and the dense matrix that each adapter makes
    of all of it."""
    torch.manual_seed(3)
    columns, parts = PARTS[name]
    ops = TritonOps(device, torch.bfloat16)
    bank = AdapterBank(4, 20, device=device, dtype=torch.bfloat16, tile=ops.adapter_tile)
    base = ops.new_linear(sum(parts), len(range(columns)[held]), bias=bias is not None)
    matrix = ops.new_adapted(base, bank)
    if bias is not None:
        matrix.load_bias(0, bias)
    weight = torch.randn(sum(parts), columns) / columns**0.5
    matrix.load_rows(0, weight, columns=held)
    if fold is not None:
        assert matrix.fold_norm(Norm(fold.clone(), 1e-5)).is_folded
    firsts = np.cumsum([0, *parts[:-1]]).tolist()
    bank.allocate(AdapterSite(f"m{i}", matrix, first, (slice(None), held)) for i, first in enumerate(firsts))
    merged = [weight.double()]
    for slot, rank in zip((2, 0, 3), RANKS, strict=True):
        pairs = {
            f"m{i}": LowRankPair(torch.randn(rank, columns) / columns**0.5, torch.randn(n, rank), 0.5)
            for i, n in enumerate(parts)
            if not (slot == 0 and i == 1)  # one adapter leaves a part alone
        }
        bank.write(slot, bank.pack(pairs))
        whole = weight.double().clone()
        for i, (n, first) in enumerate(zip(parts, firsts, strict=True)):
            if f"m{i}" in pairs:
                a, b, scale = pairs[f"m{i}"]
                whole[first : first + n] += scale * b.double() @ a.double()
        merged.append(whole)
    return matrix, merged


def placed(bank, num_tokens, device):
    """Which adapter each token has: 0 for none, and else which of `merged`; as the bank is told."""
    which = np.arange(num_tokens) * 7 % 4 if num_tokens > 1 else np.array([1])
    slots = np.array([-1, 2, 0, 3])[which]
    bank.rows = bank.unpack_rows(torch.from_numpy(bank.pack_rows(slots)).to(device), num_tokens)
    return which


def products(x, merged, which):
    return torch.stack([merged[one] @ row for one, row in zip(which, x.double().cpu(), strict=True)])


def close(out, expected):
    out = out.double().cpu()
    return torch.isfinite(out).all() and (out - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("num_tokens", [1, 3, 37])
def test_products(name, num_tokens, device):
    matrix, merged = adapted(name, device)
    which = placed(matrix.bank, num_tokens, device)
    x = torch.randn(num_tokens, matrix.in_features, device=device).bfloat16()
    assert close(matrix.multiply(x), products(x, merged, which))
    matrix.bank.rows = None
    assert close(matrix.multiply(x), products(x, merged, which * 0))


@pytest.mark.parametrize("num_tokens", [1, 3, 37])
def test_what_follows_products(num_tokens, device):
    """Where norms are folded, many rows are multiplied before they are normalized."""
    torch.manual_seed(4)
    fold = torch.rand(HIDDEN) + 0.5
    residual = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
    normed = residual.double().cpu()
    normed = normed * torch.rsqrt(normed.square().mean(1, keepdim=True) + 1e-5)
    x = Unscaled(residual, None, 1e-5) if num_tokens > 32 else normed.to(device, torch.bfloat16)

    for name in ("gate_up in one", "gate_up"):
        gate_up, merged = adapted(name, device, fold=fold.to(device))
        which = placed(gate_up.bank, num_tokens, device)
        gate, up = products(normed * fold.double(), merged, which).chunk(2, dim=1)
        gated = torch.nn.functional.silu(gate) * up
        assert close(gate_up.multiply_act(x, "silu"), gated)

    down, merged = adapted("down", device)
    which = placed(down.bank, num_tokens, device)
    inner = gated.to(device, torch.bfloat16)
    expected = residual.double().cpu() + products(inner, merged, which)
    norm = Norm(torch.ones(HIDDEN, device=device), 1e-5, is_folded=True)
    stream = residual.clone()
    left = down.multiply_add_norm(inner, stream, norm)
    assert close(stream, expected)
    assert isinstance(left, Unscaled) == (num_tokens > 32)
    if num_tokens <= 32:
        assert close(left, expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5))
    stream = residual.clone()
    assert down.multiply_add_norm(inner, stream, None) is stream and close(stream, expected)

    qkv, merged = adapted("qkv", device, fold=fold.to(device))
    which = placed(qkv.bank, num_tokens, device)
    kv = torch.zeros(num_tokens, 2, KV_HEADS, 4, HEAD_DIM, dtype=torch.bfloat16, device=device)
    angles = torch.zeros(8, HEAD_DIM, device=device)
    angles[:, : HEAD_DIM // 2] = 1.0  # turns nothing
    batch = AttentionBatch(
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slots=torch.arange(num_tokens, device=device) * 4,
        query_starts=torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(num_tokens, dtype=torch.int32, device=device),
        block_tables=torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None],
        max_query_len=1,
        max_kv_len=1,
        num_decodes=num_tokens,
    )
    q = qkv.multiply_rope_write(x, Rotary(angles), kv, batch, AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, 1.0))
    expected = products(normed * fold.double(), merged, which)
    assert close(torch.cat([q, kv[:, 0, 0, 0], kv[:, 1, 0, 0]], dim=1), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("num_tokens", "few"), [(33, 1024), (140, 1024), (140, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_activation_of_many_rows(has_bias, num_tokens, few, activation, device, monkeypatch):
    """In tiles of 16 tokens and of 64, several of them of one adapter; a row without one is gated all the same."""
    monkeypatch.setattr(adapters, "_FEW_TOKENS", few)
    torch.manual_seed(5)
    bias = torch.randn(304) if has_bias else None
    fold = torch.rand(HIDDEN) + 0.5
    gate_up, merged = adapted("wide gate_up", device, fold=fold.to(device), bias=bias)
    residual = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
    normed = residual.double().cpu() * fold.double()
    normed = normed * torch.rsqrt(residual.double().cpu().square().mean(1, keepdim=True) + 1e-5)
    for kind in ("mixed", "none"):
        which = placed(gate_up.bank, num_tokens, device)
        if kind == "none":
            slots = np.full(num_tokens, -1)
            packed = torch.from_numpy(gate_up.bank.pack_rows(slots)).to(device)
            gate_up.bank.rows = gate_up.bank.unpack_rows(packed, num_tokens)
            which = which * 0
        product = products(normed, merged, which)
        gate, up = (product if bias is None else product + bias.bfloat16().double()).chunk(2, dim=1)
        gated = torch.nn.functional.silu(gate) if activation == "silu" else gelu_tanh(gate)
        assert close(gate_up.multiply_act(Unscaled(residual, None, 1e-5), activation), gated * up)


def gelu_tanh(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("num_tokens", [3, 37])
@pytest.mark.parametrize("is_beside", [False, True])
def test_sums_over_long_rows_are_cut(num_tokens, is_beside, device, monkeypatch):
    """A x in several parts, by programs of their own."""
    launched = []
    kernel = adapters.shrink_kernel

    class Recorded:
        def __getitem__(self, grid):
            launched.append(grid[2])
            return kernel[grid]

    for name, value in {"shrink_kernel": Recorded(), "_TILE_K": 16, "_SPLIT_K": 32, "_SPLIT_K_BESIDE": 48}.items():
        monkeypatch.setattr(adapters, name, value)
    monkeypatch.setattr(adapters, "_MIN_BESIDE", 0 if is_beside else 1 << 22)
    for name in ("qkv", "gate_up", "gate_up in one"):
        matrix, merged = adapted(name, device)
        which = placed(matrix.bank, num_tokens, device)
        x = torch.randn(num_tokens, matrix.in_features, device=device).bfloat16()
        assert close(matrix.multiply(x), products(x, merged, which))
        if num_tokens > 32 and name != "qkv":
            normed = x.double().cpu() * torch.rsqrt(x.double().cpu().square().mean(1, keepdim=True) + 1e-5)
            gate, up = products(normed, merged, which).chunk(2, dim=1)
            gated = torch.nn.functional.silu(gate) * up
            assert close(matrix.multiply_act(Unscaled(x, None, 1e-5), "silu"), gated)
    assert set(launched) == {2 if is_beside else 3}


class Streams:
    """Stands in for CUDA's streams, and keeps the order of what happens."""

    def __init__(self, happened, name):
        self.happened, self.name = happened, name

    def wait_stream(self, other):
        self.happened.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_beside_a_product_x_is_shrunk_between_a_fork_and_a_join(fails, monkeypatch):
    """Also where the product fails: a capture that a stream never left cannot be ended."""
    happened = []
    main, side = Streams(happened, "main"), Streams(happened, "side")

    @contextlib.contextmanager
    def stream(one):
        happened.append(f"on {one.name}")
        yield
        happened.append("on main")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with contextlib.suppress(torch.OutOfMemoryError), adapters._beside(side, "cuda", lambda: happened.append("A x")):
        happened.append("W x")
        if fails:
            raise torch.OutOfMemoryError
    assert happened == ["side waits for main", "on side", "A x", "on main", "W x", "main waits for side"]


def test_x_is_shrunk_beside_large_products_of_few_tokens():
    """By shapes alone: what is compiled beforehand must be what is launched."""
    bank = AdapterBank(1, 16, device="meta", dtype=torch.bfloat16, tile=lambda _: 16)

    def is_beside(num_tokens, k, *parts):
        return adapters._runs_beside(torch.empty(num_tokens, k, device="meta"), LowRank(bank, 0, 0, 0, parts, k))

    for parts, k in (((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336)):
        assert is_beside(2, k, *parts) and is_beside(1024, k, *parts) and not is_beside(1025, k, *parts)
    for parts, k in (((576, 192, 192), 576), ((576,), 576), ((1536, 1536), 576), ((576,), 1536)):
        assert not is_beside(2, k, *parts)


@pytest.mark.parametrize("num_tokens", [1, 3, 37])
def test_inputs_split_among_ranks_are_summed_once(num_tokens, device):
    """A x is a part of a sum on each, and so is what adapters add to the product."""
    (mine, merged), (others, _) = (adapted("down", device, held=held) for held in (slice(0, 48), slice(48, INNER)))
    x = torch.randn(num_tokens, INNER, device=device).bfloat16()
    for part in (mine, others):
        which = placed(part.bank, num_tokens, device)

    class Ranks:
        def sum(self, product):
            return product + others.multiply(x[:, 48:].contiguous())

    residual = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    summed = SummedLinear(mine, mine.ops, Ranks(), adds_bias=True)
    summed.multiply_add_norm(x[:, :48].contiguous(), residual, Norm(torch.ones(HIDDEN, device=device), 1e-5))
    assert close(residual, products(x, merged, which))


def test_an_empty_tile_changes_nothing(device):
    matrix, merged = adapted("down", device)
    for num_tokens in (1, 5):
        slots = np.full(num_tokens, -1)
        packed = torch.from_numpy(matrix.bank.pack_rows(slots)).to(device)
        matrix.bank.rows = matrix.bank.unpack_rows(packed, num_tokens)
        x = torch.randn(num_tokens, INNER, device=device).bfloat16()
        assert close(matrix.multiply(x), products(x, merged, slots * 0))
        residual = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        matrix.multiply_add_norm(x, residual, Norm(torch.ones(HIDDEN, device=device), 1e-5))
        assert close(residual, products(x, merged, slots * 0))


def test_kernels_do_not_depend_on_the_length_of_a_slot():
    """It grows with the layers, and kernels are compiled beforehand for a model with fewer of them."""
    assert "slot_values" in OneAdapter._fields
    for kernel in (adapters.shrink_kernel, adapters.expand_kernel, adapters.expand_act_kernel):
        assert "slot_values" in inspect.signature(kernel.fn).parameters
        assert "slot_values" not in inspect.get_annotations(kernel.fn)  # as a constant has one
