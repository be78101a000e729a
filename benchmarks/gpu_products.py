"""Products of few rows on a GPU beside cuBLAS, alone and with what follows them; and the kernels between products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_inputs import BLOCK_SIZE, LLAMA, Shape, attention_inputs, decodes
from benchmarks.gpu_measure import COLD_BYTES, Report, error, poison, short, time_us
from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import AttentionBatch, Norm, Rotary, Unscaled
from quire.kernels.reference import ReferenceOps
from quire.kernels.reference.linear import ReferenceLinear
from quire.kernels.triton import TritonOps
from quire.kernels.triton.configs import SkinnyConfig, skinny_config
from quire.kernels.triton.linear import TritonLinear

PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32)
ALL_ROWS = (*range(40, 1048, 8), *range(1152, 4224, 128))
_SLOW_RATIO = 1.02  # times what some larger number takes
_PAIR_ROWS = PRODUCT_ROWS[1:]  # a single row is faster without
_VECTOR_SWEEP = (
    SkinnyConfig(False, 8, 512, 4, 1, unroll=4),
    SkinnyConfig(False, 4, 1024, 4, 1, unroll=4),
    SkinnyConfig(False, 8, 1024, 8, 1, unroll=4),
    SkinnyConfig(False, 16, 512, 8, 1, unroll=4),
)
_TILE_SWEEP = (
    SkinnyConfig(True, 64, 128, 4, 4),
    SkinnyConfig(True, 64, 128, 4, 3),
    SkinnyConfig(True, 64, 64, 4, 6),
    SkinnyConfig(True, 64, 128, 4, 4, split_k=2),
    SkinnyConfig(True, 64, 128, 4, 4, split_k=4),
    SkinnyConfig(True, 64, 256, 4, 3, split_k=2),
    SkinnyConfig(True, 128, 64, 4, 5, split_k=4),
    SkinnyConfig(True, 32, 256, 4, 4),
)


def skinny_sweep(rows: int) -> tuple[SkinnyConfig, ...]:
    return (*(_VECTOR_SWEEP if rows == 1 else ()), *_TILE_SWEEP)


def new_layers(ops: TritonOps, count: int) -> list[dict[str, TritonLinear]]:
    """The matrices of so many layers, each with numbers of its own."""
    names = ("qkv", "o", "gate_up", "down")
    layers = [{name: ops.new_float_linear(*PRODUCTS[name]) for name in names} for _ in range(count)]
    for i, layer in enumerate(layers):
        for j, matrix in enumerate(layer.values()):
            matrix.randomize(0.02, 4 * i + j)
    return layers


def scattered_rows(rows: int) -> tuple[Tensor, AttentionBatch, Rotary]:
    """For kernels that rotate and write: a cache, where the rows stand and go in it, and the rotary table."""
    num_blocks = rows // BLOCK_SIZE + 64
    _, _, batch = attention_inputs(Shape([rows], [rows]))
    batch.positions = torch.randint(0, 8192, (rows,), device="cuda")
    batch.slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:rows]
    kv = torch.zeros((num_blocks, 2, 8, BLOCK_SIZE, 128), device="cuda", dtype=torch.bfloat16)
    return kv, batch, Rotary(torch.randn(8192, 128, device="cuda"))


def run_skinny(report: Report) -> None:
    from quire.kernels.triton.skinny import SkinnyScratch, skinny_linear

    scratch = SkinnyScratch.allocate(1 << 14, torch.device("cuda"))
    totals = {rows: [0.0, 0.0] for rows in PRODUCT_ROWS}
    for name, (n, k) in PRODUCTS.items():
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(_num_cold(n * k * 2))]
        for rows in PRODUCT_ROWS:
            x = torch.randn(rows, k, device="cuda").bfloat16()
            expected = x.float() @ weights[-1].float().T
            cublas_us = time_us([partial(F.linear, x, w) for w in weights])

            def build(
                config: Any, weights: list[Tensor] = weights, x: Tensor = x, expected: Tensor = expected
            ) -> tuple[float, list[Callable[[], object]]]:
                poison()
                off = error(skinny_linear(x, weights[-1], None, config, scratch), expected)
                return off, [partial(skinny_linear, x, w, None, config, scratch) for w in weights]

            current = skinny_config(rows, n, k)
            configs = (*((current,) if current is not None else ()), *skinny_sweep(rows))
            best = report.sweep("skinny", f"{name} rows {rows}", configs, build)
            if best is None:
                continue
            config, us = best
            times = 1 if name == "head" else 32
            totals[rows][0] += times * us
            totals[rows][1] += times * cublas_us
            note = f"cuBLAS {cublas_us:7.2f} x{cublas_us / us:.2f}  {n * k * 2 / us / 1e6:.2f} TB/s  [{short(config)}]"
            report.add("skinny", f"{name} rows {rows}", us, note, cublas_us=cublas_us)
        del weights
        torch.cuda.empty_cache()
    for rows, (own_us, cublas_us) in totals.items():
        note = f"all products of a Llama-3.1-8B step; cuBLAS {cublas_us:.0f} us x{cublas_us / max(own_us, 1e-9):.3f}"
        report.add("skinny", f"step rows {rows}", own_us, note)


def run_pairs(report: Report) -> None:
    """Each product of a layer with what follows it, in one launch and in several. Rows past the table's limit show
    whether it should be higher."""
    from quire.kernels.triton.skinny import skinny_act, skinny_add_norm, skinny_rope_write

    ops, oracle = TritonOps("cuda", torch.bfloat16), ReferenceOps("cuda", torch.float32)
    scratch = ops.skinny_scratch
    norm, ones = (
        Norm(weight, 1e-5) for weight in (torch.rand(4096, device="cuda") + 0.5, torch.ones(1, device="cuda"))
    )
    rotary = Rotary(torch.randn(8192, 128, device="cuda"))
    totals = {rows: [0.0, 0.0] for rows in _PAIR_ROWS}
    for name in ("qkv", "o", "gate_up", "down"):
        n, k = PRODUCTS[name]
        weights = [ops.new_float_linear(n, k) for _ in range(_num_cold(n * k * 2))]
        for i, weight in enumerate(weights):
            weight.randomize(0.02, i)
        for rows in _PAIR_ROWS:
            config = skinny_config(rows, n, k) or skinny_config(16, n, k)
            assert config is not None
            x = torch.randn(rows, k, device="cuda").bfloat16()
            residual = torch.randn(rows, n, device="cuda").bfloat16()
            # As the norm before this product leaves it: 64 tiles' sums, as the table's configurations give.
            parts = torch.stack([p.square().sum(1) for p in x.float().chunk(64, dim=1)])
            lazy, normed = Unscaled(x, parts, 1e-5), oracle.normalize(x.float(), ones).bfloat16()
            q_kv = attention_inputs(decodes([40] * rows))
            kv, batch = q_kv[1], q_kv[2]
            batch.slots = torch.randperm(kv.shape[0] * BLOCK_SIZE, device="cuda")[:rows]
            last = weights[-1]
            one: list[Callable[[], Any]]
            several: list[Callable[[], Any]]
            poison()
            if name == "qkv":
                one = [partial(skinny_rope_write, lazy, w.weight, None, rotary, kv, batch, LLAMA, config, scratch)
                       for w in weights]  # fmt: skip
                several = [partial(ComposedLinear.multiply_rope_write, w, normed, rotary, kv, batch, LLAMA)
                           for w in weights]  # fmt: skip
                off = error(one[-1](), oracle.rope_and_write(
                    _wide(oracle, last).multiply(normed.float()), rotary, kv.float(), batch, LLAMA))  # fmt: skip
            elif name == "gate_up":
                one = [partial(skinny_act, lazy, w.weight, None, "silu", config, scratch) for w in weights]
                several = [partial(ComposedLinear.multiply_act, w, normed, "silu") for w in weights]
                off = error(one[-1](), oracle.act_mul(_wide(oracle, last).multiply(normed.float()), "silu"))
            else:
                one = [partial(skinny_add_norm, x, w.weight, None, residual, norm, config, scratch)
                       for w in weights]  # fmt: skip
                several = [partial(ComposedLinear.multiply_add_norm, w, x, residual, norm) for w in weights]
                expected = residual.float() + _wide(oracle, last).multiply(x.float())
                found = one[-1]()
                assert isinstance(found, Unscaled) and found.square_sums is not None
                rms = torch.rsqrt(found.square_sums.sum(0) / n + 1e-5)
                off = max(error(residual, expected), error(found.x.float() * rms[:, None],
                                                           oracle.normalize(expected, norm)))  # fmt: skip
            label = f"{name} rows {rows}"
            if not off <= 1e-2:
                report.fail(f"pairs {label}: error {off:.3g}")
                continue
            one_us, several_us = time_us(one), time_us(several)
            totals[rows][0] += 32 * one_us
            totals[rows][1] += 32 * several_us
            report.add(
                "pairs", label, one_us, f"apart {several_us:7.2f} us x{several_us / one_us:.3f}  error {off:.1e}"
            )
        del weights
        torch.cuda.empty_cache()
    for rows, (one_us, several_us) in totals.items():
        report.add("pairs", f"32 layers rows {rows}", one_us, f"apart {several_us:.0f} us x{several_us / one_us:.3f}")


def run_rows(report: Report) -> None:
    """A layer's products at each number of rows that a step may have: where more rows would take less time, steps are
    better padded. cuBLAS chooses a kernel for each number, and not always well: see `is_slow` in executor/sizing.py."""
    ops = TritonOps("cuda", torch.bfloat16)
    layers = new_layers(ops, 2)  # too many for the L2 cache
    times = {
        rows: time_us([partial(_multiply_layer, layer, *_row_inputs(rows)) for layer in layers]) for rows in ALL_ROWS
    }
    for rows, us in times.items():
        best = min((other for other in ALL_ROWS if other >= rows), key=times.__getitem__)
        is_slow = us > _SLOW_RATIO * times[best]
        if is_slow or rows % 64 == 0:
            note = f"{best} rows take {times[best]:8.2f} us: x{us / times[best]:.3f}" if is_slow else ""
            report.add("rows", f"layer's products, {rows}", us, note, best_rows=best)


def _multiply_layer(layer: dict[str, TritonLinear], x: Tensor, wide: Tensor, residual: Tensor) -> None:
    """Multiply as the steps do."""
    layer["qkv"].multiply(x)
    layer["o"].multiply_add_norm(x, residual, None)
    layer["gate_up"].multiply(x)
    layer["down"].multiply_add_norm(wide, residual, None)


def _row_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x, wide = (torch.randn(rows, width, device="cuda").bfloat16() for width in (4096, 14336))
    return x, wide, torch.zeros_like(x)


def _wide(oracle: ReferenceOps, weight: TritonLinear) -> ReferenceLinear:
    wide = oracle.new_linear(*weight.weight.shape)
    wide.load_rows(0, weight.weight)
    return wide


def _num_cold(num_bytes: int) -> int:
    return max(1, -(-COLD_BYTES // num_bytes))


def run_fused(report: Report) -> None:
    ops, wide = TritonOps("cuda", torch.bfloat16), ReferenceOps("cuda", torch.float32)
    half = ReferenceOps("cuda", torch.bfloat16)
    for rows in (1, 16, 256, 8192):
        num_sets = max(1, min(16, COLD_BYTES // (rows * 4096 * 4)))
        norm = Norm(torch.randn(4096, device="cuda"), 1e-5)
        xs = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(num_sets)]
        residuals = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(num_sets)]
        residual, expected_residual = residuals[0].clone(), residuals[0].clone()
        poison()
        out, expected = ops.add_norm(xs[0], residual, norm), half.add_norm(xs[0], expected_residual, norm)
        assert isinstance(out, Tensor) and isinstance(expected, Tensor)
        off = error(out, expected)
        off = max(off, error(residual, expected_residual))
        off = max(off, error(ops.normalize(xs[0], norm), wide.normalize(xs[0].float(), norm)))
        calls: list[Callable[[], object]]
        calls = [partial(ops.add_norm, x, r, norm) for x, r in zip(xs, residuals, strict=True)]
        report.timed("fused", f"add_norm {rows}", off, rows * 4096 * 2 * 4, calls)
        del xs, residuals

        num_sets = max(1, min(8, COLD_BYTES // (rows * 28672 * 2)))
        gate_ups = [torch.randn(rows, 28672, device="cuda").bfloat16() for _ in range(num_sets)]
        poison()
        off = max(
            error(ops.act_mul(gate_ups[0], name), wide.act_mul(gate_ups[0].float(), name))
            for name in ("silu", "gelu_tanh")
        )
        calls = [partial(ops.act_mul, g, "silu") for g in gate_ups]
        report.timed("fused", f"act_mul {rows}", off, rows * 14336 * 2 * 3, calls)
        del gate_ups
        _run_rope(report, ops, rows)
        torch.cuda.empty_cache()


def _run_rope(report: Report, ops: TritonOps, rows: int) -> None:
    kv, batch, rotary = scattered_rows(rows)
    norms = [torch.randn(128, device="cuda").bfloat16() for _ in range(2)]
    qkvs = [
        torch.randn(rows, 6144, device="cuda").bfloat16() for _ in range(max(1, min(8, COLD_BYTES // (rows << 14))))
    ]
    off = 0.0
    for with_norms in (rotary, replace(rotary, q_norm=norms[0], k_norm=norms[1])):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            spec = LLAMA if dtype == torch.bfloat16 else replace(LLAMA, k_scale=0.25, v_scale=0.25)
            found_kv, expected_kv = torch.zeros_like(kv, dtype=dtype), torch.zeros_like(kv, dtype=torch.float32)
            poison()
            q = ops.rope_and_write(qkvs[0], with_norms, found_kv, batch, spec)
            expected = ReferenceOps("cuda", torch.float32).rope_and_write(
                qkvs[0].float(), with_norms, expected_kv, batch, spec
            )
            off = max(off, error(q, expected))
            # An 8-bit float has 3 bits of mantissa: its own rounding is up to 6 %.
            off = max(off, error(found_kv.float(), expected_kv) / (1.0 if dtype == torch.bfloat16 else 5.0))
    calls = [partial(ops.rope_and_write, x, rotary, kv, batch, LLAMA) for x in qkvs]
    report.timed("fused", f"rope_and_write {rows}", off, rows * 6144 * 2 * 2, calls)


def compile_tasks(sections: Sequence[str]) -> list[Callable[[], object]]:
    """Each runs one variant once: the compiled kernel lands in Triton's cache on disk."""
    tasks: list[Callable[[], object]] = []
    if "skinny" in sections:
        sizes = [(rows, k) for rows in PRODUCT_ROWS for k in (4096, 14336)]
        tasks += [partial(_once, config, rows, k) for rows, k in sizes for config in skinny_sweep(rows)]
    if "pairs" in sections or "step" in sections:
        tasks += [partial(_pair_once, name, rows) for name in PRODUCTS if name != "head" for rows in _PAIR_ROWS]
    return tasks


def _pair_once(name: str, rows: int) -> None:
    from quire.kernels.triton.skinny import SkinnyScratch, skinny_act, skinny_add_norm, skinny_linear, skinny_rope_write

    n, k = PRODUCTS[name]
    config = skinny_config(rows, n, k) or skinny_config(16, n, k)
    assert config is not None
    scratch = SkinnyScratch.allocate(1 << 14, torch.device("cuda"))
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
    lazy = Unscaled(x, torch.zeros(64, rows, device="cuda"), 1e-5)
    skinny_linear(x, weight, None, config, scratch)
    if name == "qkv":
        _, kv, batch = attention_inputs(decodes([40] * rows))
        skinny_rope_write(
            lazy, weight, None, Rotary(torch.zeros(64, 128, device="cuda")), kv, batch, LLAMA, config, scratch
        )
    elif name == "gate_up":
        skinny_act(lazy, weight, None, "silu", config, scratch)
    else:
        residual = torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16)
        skinny_add_norm(x, weight, None, residual, Norm(torch.zeros(n, device="cuda"), 1e-5), config, scratch)


def _once(config: SkinnyConfig, rows: int, k: int) -> None:
    from quire.kernels.triton.skinny import SkinnyScratch, skinny_linear

    x = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(128, k, device="cuda", dtype=torch.bfloat16)
    skinny_linear(x, weight, None, config, SkinnyScratch.allocate(64, torch.device("cuda")))
