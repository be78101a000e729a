"""Products and attention whose rows do not depend on each other: right everywhere, and on a GPU bitwise the same."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from quire.kernels.interface import AttentionSpec, Rotary
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import invariant_attention as attention_module
from quire.kernels.triton.activation import act_mul
from quire.kernels.triton.common import HAS_GLUON
from quire.kernels.triton.decode import AttentionScratch
from quire.kernels.triton.invariant import InvariantOps
from quire.kernels.triton.invariant_attention import invariant_attention
from quire.kernels.triton.invariant_product import (
    ProductConfig,
    can_rope,
    invariant_act,
    invariant_product,
    invariant_rope_write,
    num_parts,
    product_config,
)
from quire.kernels.triton.skinny import SkinnyScratch
from tests.kernels.triton.test_attention import make_inputs

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SMALL = ProductConfig(64, 32, 64, num_warps=4, num_stages=2, parts_apart=True)
IN_TURN = replace(SMALL, parts_apart=False)
TALL = ProductConfig(128, 192, 64, num_warps=8, num_stages=4, parts_apart=False, uses_bulk_copies=True)


def product_inputs(rows, n, k, device, dtype=torch.bfloat16, bias=False):
    x, weight = torch.randn(rows, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    return x, weight, torch.randn(n, device=device).to(dtype) if bias else None


@pytest.mark.parametrize("config", [None, SMALL, IN_TURN], ids=str)
@pytest.mark.parametrize(("rows", "n", "k", "bias"), [(1, 96, 80, True), (37, 70, 2080, False), (70, 130, 4096, True)])
def test_products(rows, n, k, bias, config, device):
    x, weight, b = product_inputs(rows, n, k, device, bias=bias)
    scratch = SkinnyScratch.allocate(64, device)
    expected = x.double() @ weight.double().t() + (0 if b is None else b.double())
    for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        out = torch.full((rows, n), float("nan"), dtype=dtype, device=device)
        invariant_product(x, weight, b, scratch, out=out, config=config)
        assert (out.double() - expected).norm() <= bound * expected.norm()
        assert not scratch.arrivals.any()  # as the next launch needs them


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 80), (37, 72, 2080), (70, 160, 4096)])
def test_an_activation_in_the_products_launch_gives_the_bits_of_its_own(rows, n, k, activation, device):
    x, weight, bias = product_inputs(rows, 2 * n, k, device, bias=True)
    weight *= k**-0.5  # where the activation is no straight line
    scratch = SkinnyScratch.allocate(64, device)
    for b, config in itertools.product((None, bias), (None, SMALL, IN_TURN)):
        expected = act_mul(invariant_product(x, weight, b, scratch, config=config), activation)
        assert torch.equal(invariant_act(x, weight, b, activation, scratch, config=config), expected)
        assert not scratch.arrivals.any()


@pytest.mark.parametrize(("rows", "head_dim", "k"), [(1, 64, 80), (29, 64, 2080), (5, 128, 4096)])
def test_a_rotation_in_the_products_launch_gives_the_bits_of_its_own(rows, head_dim, k, device):
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=head_dim, scale=0.125)
    x, weight, bias = product_inputs(rows, 5 * head_dim, k, device, bias=True)
    _, kv, batch = make_inputs([rows], [rows], spec, 16, device)
    batch.positions = torch.randint(0, 500, (rows,), device=device)
    batch.slots = torch.randperm(kv.shape[0] * 16, device=device)[:rows]
    if rows > 1:
        batch.slots[0] = -1  # only pads the batch
    rotary = Rotary(torch.randn(500, head_dim, device=device))
    ops = InvariantOps(device, torch.bfloat16)
    for b in (None, bias):
        copies = [kv.clone(), kv.clone()]
        qkv = invariant_product(x, weight, b, ops.skinny_scratch)
        expected = ops.rope_and_write(qkv, rotary, copies[0], batch, spec)
        assert can_rope(rows, len(weight), k, rotary, spec)
        found = invariant_rope_write(x, weight, b, rotary, copies[1], batch, spec, ops.skinny_scratch)
        first, second, before = (cache.view(torch.int16) for cache in (*copies, kv))  # slots that nobody wrote are NaN
        assert torch.equal(found, expected) and torch.equal(first, second) and not torch.equal(first, before)


# In a process of its own: kernels imported under Triton's interpreter, as other tests want them, cannot be compiled.
COMPILE = textwrap.dedent(
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
    from quire.kernels.triton.invariant_product import invariant_act
    from quire.kernels.triton.precompile import collecting
    from quire.kernels.triton.skinny import SkinnyScratch

    target, scratch = GPUTarget("cuda", 90, 32), SkinnyScratch.allocate(64, "meta")
    weight, x = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (28672, 256))
    with collecting(target) as jobs:
        for rows in (64, 192, 256):
            invariant_act(x[:rows], weight, None, "silu", scratch)
    for job in jobs.values():
        source = job.kernel.ASTSource(job.kernel, job.signature, job.constants, job.attributes)
        compiled = compile(source, target=target, options=job.options.__dict__)
        print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
    """
)


@pytest.mark.skipif(not HAS_GLUON, reason="the kernel is written for the Gluon of Triton 3.6 and 3.7")
def test_products_by_bulk_copies_compile_for_a_hopper(tmp_path):
    """Tiles of 64, 128 and 192 rows, for which two, two and three groups of warps issue four instructions each."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    kernels = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [products for _, products in kernels] == [8, 12, 8] and all(shared <= 227 * 1024 for shared, _ in kernels)


def test_no_rows_are_no_launch(device):
    x, weight, _ = product_inputs(0, 64, 64, device)
    assert invariant_product(x, weight, None, SkinnyScratch.allocate(8, device)).shape == (0, 64)


def test_the_order_of_summation_depends_on_the_matrix_alone():
    for n, k in itertools.product((64, 576, 4096, 6144, 28672, 128256), (576, 1536, 4096, 14336)):
        parts = num_parts(n, k)
        assert 1 <= parts <= 8 and (parts == 1 or k // parts >= 1024)
        for rows in (1, 16, 17, 33, 65, 129, 257, 1024, 8192):
            assert 128 % product_config(rows, n, k).tile_k == 0  # parts are multiples of 128


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch, request):
    """Of 512 tokens, so that short sequences have several, where the kernels are not compared bit for bit."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(attention_module, "_PART_TOKENS", 512)


def check(lens, query_lens, spec, block_size, device, *, runs=2, tolerance=1e-2):
    q, kv, batch = make_inputs(lens, query_lens, spec, block_size, device)
    scratch = AttentionScratch.allocate(max(1, batch.num_decodes), spec.num_kv_heads, device)
    expected = ReferenceOps(device, torch.float64).attention(q.double(), kv, batch, spec)
    for _ in range(runs):
        out = invariant_attention(q, kv, batch, spec, scratch)
        assert torch.isfinite(out).all()
        assert (out.double() - expected).norm() <= tolerance * expected.norm()
        assert not scratch.arrivals.any()


@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_a_mixed_batch(block_size, device):
    check([1, 70, 600, 9, 530], [1] * 3 + [9, 40], SPEC, block_size, device)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(80, 2, 2), (256, 2, 1), (64, 17, 1)])
def test_head_widths_and_groups(head_dim, heads, kv_heads, device):
    check([33, 530, 30], [1, 1, 7], AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5), 16, device)


@pytest.mark.parametrize("change", [{"window": 40}, {"window": 520}, {"softcap": 0.7, "scale": 1.0}], ids=str)
def test_windows_and_caps(change, device):
    check([1, 41, 1100, 555], [1] * 3 + [50], replace(SPEC, **change), 16, device)


def test_sequences_without_room_for_parts(monkeypatch, device):
    monkeypatch.setattr(attention_module, "_ROOM", 4)
    check([1100, 1100, 600], [1] * 3, replace(SPEC, num_heads=2, num_kv_heads=1), 16, device)


def test_a_row_that_only_pads_the_batch_gives_zeros(device):
    q, kv, batch = make_inputs([20, 20], [1, 1], SPEC, 16, device)
    batch.kv_lens[1] = 0
    out = invariant_attention(q, kv, batch, SPEC, AttentionScratch.allocate(2, 2, device))
    assert torch.isfinite(out[0]).all() and not out[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1000, 576), (28672, 1040), (300, 1036)])
def test_products_of_any_number_of_rows_are_bitwise_the_same(n, k, dtype, device):
    x, weight, bias = product_inputs(1100, n, k, device, dtype, bias=True)
    scratch = SkinnyScratch.allocate(1 << 14, device)
    alone = invariant_product(x[:1], weight, bias, scratch)
    everything = invariant_product(x, weight, bias, scratch)
    assert torch.equal(everything[:1], alone)
    for rows in (2, 16, 17, 32, 33, 64, 65, 128, 129, 192, 200, 256, 257, 511, 1024):
        assert torch.equal(invariant_product(x[:rows], weight, bias, scratch), everything[:rows]), rows
    for tile, parts_apart in itertools.product((TALL, replace(TALL, tile_rows=128)), (False, True)):
        if k % 8 == 0:
            config = replace(tile, parts_apart=parts_apart)
            assert torch.equal(invariant_product(x[:200], weight, bias, scratch, config=config), everything[:200])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (1000, 2064)])
def test_activations_of_any_number_of_rows_are_bitwise_the_same(n, k, activation, dtype, device):
    x, weight, bias = product_inputs(1100, 2 * n, k, device, dtype, bias=True)
    weight *= k**-0.5
    scratch = SkinnyScratch.allocate(1 << 14, device)
    everything = act_mul(invariant_product(x, weight, bias, scratch), activation)
    for rows in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 256, 300, 1100):
        assert torch.equal(invariant_act(x[:rows], weight, bias, activation, scratch), everything[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(32, 8, 128, 0.09), AttentionSpec(9, 3, 64, 0.125), AttentionSpec(8, 4, 256, 0.06, window=700)],
    ids=["llama", "smollm2", "gemma"],
)
def test_decodes_and_prompts_are_bitwise_the_same(spec, dtype, device, monkeypatch):
    """A sequence's last tokens as one chunk, in several, and each as a decode, with and without room for parts."""
    length, new = 2600, 600
    q, kv, batch = make_inputs([length], [new], spec, 16, device, dtype=dtype)
    scratch = AttentionScratch.allocate(1024, spec.num_kv_heads, device)
    whole = invariant_attention(q, kv, batch, spec, scratch)

    def cut_at(cuts: list[int], num_decodes: int) -> torch.Tensor:
        lens = [length - new + end for end in cuts[1:]]
        part = replace(
            batch,
            query_starts=torch.tensor(cuts, dtype=torch.int32, device=device),
            kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            block_tables=batch.block_tables.expand(len(lens), -1).contiguous(),
            max_query_len=max(b - a for a, b in itertools.pairwise(cuts)),
            num_decodes=num_decodes,
        )
        return invariant_attention(q, kv, part, spec, scratch)

    assert torch.equal(cut_at([0, 1, 2, 65, 300, new], 2), whole)
    assert torch.equal(cut_at([0, 7, 8, 130, 131, 512, new], 0), whole)
    assert torch.equal(cut_at(list(range(new + 1)), new), whole)
    monkeypatch.setattr(attention_module, "_ROOM", 100)
    assert torch.equal(cut_at(list(range(new + 1)), new), whole)
