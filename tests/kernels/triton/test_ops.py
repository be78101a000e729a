"""TritonOps against the reference, operation by operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary, Unscaled
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps, unavailable_reason
from quire.kernels.triton.activation import ActConfig, act_config, act_mul
from quire.kernels.triton.norm import ROWS_OF_SEVERAL_PROGRAMS
from quire.kernels.triton.rope import RopeConfig, rope_and_write, rope_config
from quire.models.layer import DenseMlp, Layer, SelfAttention

SPEC = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=48, scale=0.14)


@pytest.fixture
def ops(device):
    return TritonOps(device, torch.bfloat16, max_seqs=64, max_kv_heads=2)


@pytest.fixture
def oracle(device):
    return ReferenceOps(device, torch.float64)


def close(out, expected, tolerance=1e-2):
    return torch.isfinite(out.float()).all() and (out.double() - expected).norm() <= tolerance * expected.norm()


def prompt_batch(positions, slots):
    """One prompt whose tokens are written to these slots."""
    tokens, device = len(positions), positions.device
    return AttentionBatch(
        positions=positions,
        slots=slots,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        max_query_len=tokens,
        max_kv_len=tokens,
        num_decodes=0,
    )


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (2, 4096)])
def test_normalize(rows, width, ops, oracle, device):
    x, weight = torch.randn(rows, width, device=device).bfloat16(), torch.randn(width, device=device).bfloat16()
    assert close(ops.normalize(x, Norm(weight, 1e-5)), oracle.normalize(x.double(), Norm(weight, 1e-5)))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576)])
def test_add_norm_updates_the_residual(rows, width, ops, oracle, device):
    x, residual = (torch.randn(rows, width, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(width, device=device).bfloat16()
    expected_residual = (x.double() + residual.double()).bfloat16()
    norm = Norm(weight, 1e-5)
    out = ops.add_norm(x, residual, norm)
    assert torch.equal(residual, expected_residual)
    assert close(out, oracle.normalize(expected_residual.double(), norm))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576)])
def test_a_norm_with_a_bias_takes_the_mean_away(rows, width, ops, oracle, device):
    x, residual = (torch.randn(rows, width, device=device).bfloat16() + 3 for _ in range(2))
    norm = Norm(torch.randn(width, device=device), 1e-5, bias=torch.randn(width, device=device))
    assert close(ops.normalize(x, norm), oracle.normalize(x.double(), norm))
    total = (x.double() + residual.double()).bfloat16()
    assert close(ops.add_norm(x, residual, norm), oracle.normalize(total.double(), norm)) and torch.equal(
        residual, total
    )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activate(activation, ops, oracle, device):
    x = torch.randn(3, 1100, device=device).bfloat16() * 4
    expected = oracle.activate(x.double(), activation)
    assert close(ops.activate(x, activation), expected)


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_product_is_followed_by_a_norm_with_a_bias(rows, ops, oracle, device):
    matrix = ops.new_linear(96, 80, bias=True)
    matrix.randomize(0.1, 0)
    norm = Norm(torch.randn(96, device=device), 1e-5, bias=torch.randn(96, device=device))
    assert matrix.fold_norm(norm) is norm
    x, residual = (torch.randn(rows, width, device=device).bfloat16() for width in (80, 96))
    total = residual.double() + x.double() @ matrix.weight.double().T + matrix.bias.double()
    assert close(matrix.multiply_add_norm(x, residual, norm), oracle.normalize(total, norm), 2e-2)
    assert close(residual, total)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_act_mul(activation, ops, oracle, device):
    gate_up = torch.randn(3, 2 * 1100, device=device).bfloat16() * 4
    assert close(ops.act_mul(gate_up, activation), oracle.act_mul(gate_up.double(), activation))


@pytest.mark.parametrize("config", [None, ActConfig(256, 1, 1), ActConfig(256, 2, 1), ActConfig(256, 5, 1)])
def test_act_mul_of_rows_that_are_not_normalised_yet(config, oracle, device):
    """However a row is cut among programs, and its bias left out of the factor."""
    stream, gate_up = (torch.randn(3, n, device=device).bfloat16() for n in (96, 2 * 1100))
    bias = torch.randn(2 * 1100, device=device).bfloat16()
    factor = torch.rsqrt(stream.double().square().mean(1, keepdim=True) + 1e-5)
    out = act_mul(gate_up, "silu", factors_of=Unscaled(stream, None, 1e-5), bias=bias, config=config)
    assert close(out, oracle.act_mul(gate_up.double() * factor + bias.double(), "silu"))


def test_many_rows_have_one_program_each():
    """A program that uses the stream reads a whole row of it: with many rows that is most of what it reads."""
    for rows in (ROWS_OF_SEVERAL_PROGRAMS + 1, 131_072):
        act = act_config(rows, 14336, has_stream=True)
        rope = rope_config(rows, 48, has_stream=True)
        assert act.tile * act.tiles_each >= 14336 and rope.tile_heads * rope.tiles_each >= 48
    few = act_config(ROWS_OF_SEVERAL_PROGRAMS, 14336, has_stream=True)
    assert few.tile * few.tiles_each < 14336


@pytest.mark.parametrize("config", [RopeConfig(1, 1), RopeConfig(2, 2), RopeConfig(2, 3), RopeConfig(4, 2)])
def test_rope_cut_in_any_way_writes_the_same(config, device):
    tokens, width = 3, 5 * SPEC.head_dim
    batch = prompt_batch(torch.tensor([4, 0, 9], device=device), torch.tensor([6, -1, 1], device=device))
    stream, qkv = (torch.randn(tokens, n, device=device).bfloat16() for n in (96, width))
    norms = [torch.randn(SPEC.head_dim, device=device).bfloat16() for _ in range(2)]
    bias = torch.randn(width, device=device).bfloat16()
    rotary = Rotary(torch.randn(10, SPEC.head_dim, device=device), *norms)
    found = []
    for tried in (RopeConfig(16, 1), config):
        kv = torch.full((2, 2, 1, 4, SPEC.head_dim), float("nan"), device=device).bfloat16()
        q = rope_and_write(
            qkv, rotary, kv, batch, SPEC, factors_of=Unscaled(stream, None, 1e-5), bias=bias, config=tried
        )
        found.append((q, kv))
    (q, kv), (other_q, other_kv) = found
    written = ~kv.isnan()
    assert written.sum() == 2 * 2 * SPEC.head_dim and torch.equal(~other_kv.isnan(), written)
    assert close(other_q, q.double(), 1e-3)  # sums may be in another order
    assert close(other_kv[written], kv[written].double(), 1e-3)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 70])
def test_rope_and_write(tokens, kv_dtype, has_norms, ops, oracle, device):
    spec = SPEC
    if kv_dtype.itemsize == 1:
        offset = torch.randn(spec.num_kv_heads, spec.head_dim, device=device) * 3
        spec = replace(SPEC, k_scale=0.125, v_scale=0.0625, k_offset=offset)
    num_blocks, block_size = 24, 4
    batch = prompt_batch(
        torch.randint(0, 100, (tokens,), device=device),
        torch.randperm(num_blocks * block_size, device=device)[:tokens],
    )
    qkv = torch.randn(tokens, 5 * spec.head_dim, device=device).bfloat16()
    cos_sin = torch.randn(100, spec.head_dim, device=device)
    norms = [torch.randn(spec.head_dim, device=device).bfloat16() if has_norms else None for _ in range(2)]
    shape = (num_blocks, 2, 1, block_size, spec.head_dim)
    kv = torch.full(shape, 7.0, device=device).to(kv_dtype)
    expected_kv = torch.full(shape, 7.0, device=device, dtype=torch.float64)
    q = ops.rope_and_write(qkv, Rotary(cos_sin, *norms), kv, batch, spec)
    expected = oracle.rope_and_write(qkv.double(), Rotary(cos_sin.double(), *norms), expected_kv, batch, spec)
    assert close(q, expected)
    # Three bits of mantissa round by up to 6 %.
    assert close(kv, expected_kv, 1e-2 if kv_dtype == torch.bfloat16 else 4e-2)
    untouched = expected_kv == 7.0
    assert (kv.float()[untouched] == 7.0).all()


def test_rope_saturates_eight_bits_and_skips_padding(ops, device):
    batch = AttentionBatch(
        positions=torch.zeros(2, dtype=torch.int64, device=device),
        slots=torch.tensor([5, -1], device=device),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([1, 0], dtype=torch.int32, device=device),
        block_tables=torch.zeros(2, 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_kv_len=1,
        num_decodes=2,
    )
    qkv = torch.full((2, 5 * SPEC.head_dim), 1000.0, device=device).bfloat16()
    cos_sin = torch.cat((torch.ones(1, 24), torch.zeros(1, 24)), dim=1).to(device)
    kv = torch.zeros(2, 2, 1, 4, SPEC.head_dim, device=device).to(torch.float8_e4m3fn)
    ops.rope_and_write(qkv, Rotary(cos_sin), kv, batch, SPEC)
    wide = kv.float()
    assert (wide[1, :, 0, 1] == 448.0).all()  # and not NaN
    assert wide.sum() == 448.0 * 2 * SPEC.head_dim


def test_linear_embed_and_logits(ops, device):
    weight = ops.new_linear(50, 64, bias=True)
    weight.load_rows(0, torch.randn(50, 64))
    weight.load_bias(0, torch.randn(50))
    x = torch.randn(3, 64, device=device).bfloat16()
    expected = x.double() @ weight.weight.double().T + weight.bias.double()
    out = weight.multiply(x)
    assert out.dtype == torch.bfloat16 and close(out, expected)
    logits = weight.logits(x, softcap=5.0)
    assert logits.dtype == torch.float32 and close(logits, 5.0 * torch.tanh(expected / 5.0), 1e-4)
    token_ids = torch.tensor([4, 0, 49], device=device)
    assert torch.equal(weight.embed(token_ids, 2.0), weight.weight[token_ids] * 2.0)


def make_layer(ops, device, *, bias):
    """The four matrices of a small layer."""
    shapes = {"qkv": (5 * 64, 96), "output": (96, 3 * 64), "gate_up": (2 * 80, 96), "down": (96, 80)}
    layer = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        layer[name] = ops.new_linear(*shape, bias=bias)
        layer[name].randomize(0.1, seed)
    return layer


def decode_batch(rows, device):
    """One token of each of so many sequences, in a block of its own."""
    return AttentionBatch(
        positions=torch.randint(0, 50, (rows,), device=device),
        slots=torch.arange(rows, device=device) * 4,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_tables=torch.arange(rows, dtype=torch.int32, device=device)[:, None],
        max_query_len=1,
        max_kv_len=1,
        num_decodes=rows,
    )


LAYER_SPEC = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=64, scale=0.125)
LAYERS = [
    (torch.bfloat16, False, False, False), (torch.bfloat16, False, False, True), (torch.bfloat16, True, False, True),
    (torch.bfloat16, True, True, False), (torch.float16, False, False, False), (torch.float32, False, False, False),
    (torch.float32, True, False, True),
]  # fmt: skip
# Plain products, tensor cores, and cuBLAS, for which only folded norms make a difference.
CASES = [(rows, *layer) for rows in (1, 5) for layer in LAYERS] + [(33, *layer) for layer in LAYERS if layer[3]]


@pytest.mark.parametrize(("rows", "dtype", "has_qk_norms", "is_sandwiched", "is_folded"), CASES)
def test_a_layer_of_paired_operations(rows, dtype, has_qk_norms, is_sandwiched, is_folded, device):
    """Launched in pairs as far as norms and dtypes allow: several rows in float32 are the composition's."""
    ops, oracle = TritonOps(device, dtype, max_seqs=64, max_kv_heads=2), ReferenceOps(device, torch.float64)
    spec = LAYER_SPEC
    layer = make_layer(ops, device, bias=True)
    wide = {name: oracle.new_linear(m.out_features, m.in_features, bias=True) for name, m in layer.items()}
    for name, matrix in layer.items():
        wide[name].load_rows(0, matrix.weight)
        wide[name].load_bias(0, matrix.bias)
    batch = decode_batch(rows, device)
    norms = [Norm(torch.rand(96, device=device) + 0.5, 1e-5) for _ in range(2)]
    qk_norms = [torch.rand(64, device=device) + 0.5 if has_qk_norms else None for _ in range(2)]
    rotary = Rotary(torch.randn(50, 64, device=device), *qk_norms)
    branch_norm = Norm(torch.rand(96, device=device) + 0.5, 1e-5) if is_sandwiched else None
    start = torch.randn(rows, 96, device=device).to(dtype)

    our_norms = norms
    if is_folded:
        first = layer["qkv"].fold_norm(Norm(norms[0].weight.clone(), 1e-5))
        our_norms = [first, layer["gate_up"].fold_norm(Norm(norms[1].weight.clone(), 1e-5))]
        assert all(norm.is_folded and (norm.weight == 1.0).all() for norm in our_norms)

    def run(ops, layer, norms, dtype):
        kv = torch.zeros(rows, 2, 1, 4, 64, device=device, dtype=dtype)
        residual = start.to(dtype, copy=True)
        x = ops.norm(residual, norms[0])
        for _ in range(2):  # the second layer's first product takes what the first one's last one left
            q = layer["qkv"].multiply_rope_write(x, rotary, kv, batch, spec)
            attended = ops.attention(q, kv, batch, spec)
            x = layer["output"].multiply_add_norm(attended, residual, norms[1], branch_norm)
            gated = layer["gate_up"].multiply_act(x, "silu")
            x = layer["down"].multiply_add_norm(gated, residual, norms[0], branch_norm)
        last = layer["down"].multiply_add_norm(gated, residual, None, branch_norm)
        assert last is residual
        return residual, q, kv

    ours, theirs = run(ops, layer, our_norms, dtype), run(oracle, wide, norms, torch.float64)
    for found, expected in zip(ours, theirs, strict=True):
        assert close(found, expected, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("is_folded", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_the_caller_may_add_a_product(rows, is_folded, ops, device):
    """As it does where the product is summed over devices first: what it leaves for the next one is as good."""
    layer = make_layer(ops, device, bias=False)
    norm = Norm(torch.rand(96, device=device) + 0.5, 1e-5)
    if is_folded:
        norm = layer["gate_up"].fold_norm(norm)
    gated, residual = (torch.randn(rows, width, device=device).bfloat16() for width in (80, 96))
    added, apart = residual.clone(), residual.clone()
    together = layer["gate_up"].multiply_act(layer["down"].multiply_add_norm(gated, added, norm), "silu")
    normed = ops.add_norm(layer["down"].multiply(gated), apart, norm)
    assert close(apart, added.double()) and close(
        layer["gate_up"].multiply_act(normed, "silu"), together.double(), 2e-2
    )


# The kernels of a layer, by its rows. With more than 32 its four products are cuBLAS's.
LAUNCHES = {
    1: ["vector_kernel", "decode_kernel", *["vector_kernel", "norm_kernel"], *["vector_kernel"] * 2, "norm_kernel"],
    5: ["tile_kernel", "decode_kernel", "tile_kernel", "tile_kernel", "tile_kernel"],
    33: ["rope_kernel", "decode_kernel", "act_mul_kernel"],
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted in Triton's interpreter")
@pytest.mark.parametrize("rows", LAUNCHES)
def test_what_follows_a_product_is_in_its_launch(rows, ops, device, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    launched, call = [], GridExecutor.__call__

    def record(executor, *args, **kwargs):
        launched.append(executor.fn.__name__)
        return call(executor, *args, **kwargs)

    layer = make_layer(ops, device, bias=False)
    norms = [layer[name].fold_norm(Norm(torch.ones(96), 1e-5)) for name in ("qkv", "gate_up")]
    residual, kv = torch.randn(rows, 96).bfloat16(), torch.zeros(rows, 2, 1, 4, 64).bfloat16()
    attention = SelfAttention(LAYER_SPEC, 0, Rotary(torch.randn(50, 64)), layer["qkv"], layer["output"])
    whole = Layer(norms[0], attention, norms[1], DenseMlp("silu", layer["gate_up"], layer["down"]))
    x, batch = ops.norm(residual, norms[0]), decode_batch(rows, device)
    # The second time as in the middle of a model: the norm before was left by the product before, and the first layer
    # has cut the sequences into pieces.
    for _ in range(2):
        monkeypatch.setattr(GridExecutor, "__call__", record)
        launched.clear()
        x, residual = whole.attend(ops, x, residual, kv, [batch])
        x = whole.mlp.run(x, residual, norms[0])
        monkeypatch.setattr(GridExecutor, "__call__", call)
    assert launched == LAUNCHES[rows]


def test_float16_folds_no_norm(device):
    """Its rows would be multiplied as they are in the residual stream, whose range it may not hold."""
    matrix = TritonOps(device, torch.float16, max_seqs=8, max_kv_heads=2).new_linear(8, 16)
    matrix.randomize(0.1, 0)
    before, norm = matrix.weight.clone(), Norm(torch.rand(16, device=device), 1e-5)
    assert matrix.fold_norm(norm) is norm and torch.equal(matrix.weight, before)


def test_the_reason_names_the_device():
    assert "cpu" in unavailable_reason("cpu")
    assert (unavailable_reason("cuda") is None) == torch.cuda.is_available()
