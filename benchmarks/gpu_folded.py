"""Norms folded into their neighbours, against norms in launches of their own; and how the kernels that then work out
the rows' factors are best cut. Of a Llama-3.1-8B layer without its attention, which is the same in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_inputs import LLAMA
from benchmarks.gpu_measure import COLD_BYTES, Report, error, poison, short, time_us
from benchmarks.gpu_products import new_layers, scattered_rows
from quire.kernels.interface import AttentionBatch, Norm, Rotary, Unscaled
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps
from quire.kernels.triton.activation import ActConfig, act_config, act_mul
from quire.kernels.triton.linear import TritonLinear
from quire.kernels.triton.rope import RopeConfig, rope_and_write, rope_config

EPS = 1e-5
ROWS = (48, 64, 128, 256, 512, 1024, 2048, 8192)
_WIDTH, _NUM_HEADS = 14336, 48
_ACT_SWEEP = tuple(
    ActConfig(*config)
    for config in (
        (1024, 1, 4), (2048, 1, 4), (2048, 1, 8), (4096, 1, 4), (4096, 1, 8), (8192, 1, 16), (2048, 2, 4),
        (4096, 2, 8), (1024, 14, 4), (2048, 7, 4), (4096, 4, 8), (16384, 1, 16),
    )
)  # fmt: skip
_ROPE_SWEEP = tuple(
    RopeConfig(*config)
    for config in ((4, 1, 4), (8, 1, 4), (16, 1, 4), (16, 1, 8), (64, 1, 8), (8, 6, 4), (16, 3, 4), (16, 3, 8))
)


@dataclass
class _Layer:
    """Its matrices, the stream before it, and where its tokens stand."""

    matrices: dict[str, TritonLinear]
    residual: Tensor
    kv: Tensor
    batch: AttentionBatch
    rotary: Rotary

    def run(self, ops: TritonOps, norm: Norm) -> Tensor:
        x = ops.norm(self.residual, norm)
        q = self.matrices["qkv"].multiply_rope_write(x, self.rotary, self.kv, self.batch, LLAMA)
        x = self.matrices["o"].multiply_add_norm(q, self.residual, norm)
        gated = self.matrices["gate_up"].multiply_act(x, "silu")
        self.matrices["down"].multiply_add_norm(gated, self.residual, norm)
        return self.residual


def run_folded(report: Report) -> None:
    ops = TritonOps("cuda", torch.bfloat16)
    layers = new_layers(ops, 2)  # too many for the L2 cache
    for rows in ROWS:
        _run_layers(report, ops, layers, rows)
        _sweep_act(report, rows)
        _sweep_rope(report, rows)
        torch.cuda.empty_cache()
    for kind in ("act", "rope"):
        report.print_sweep(f"folded {kind}")


def _run_layers(report: Report, ops: TritonOps, layers: list[dict[str, TritonLinear]], rows: int) -> None:
    kv, batch, rotary = scattered_rows(rows)
    ones = torch.ones(4096, device="cuda")
    begin = torch.randn(rows, 4096, device="cuda").bfloat16()
    times: dict[str, float] = {}
    results: list[Tensor] = []
    for label, norm in (("plain", Norm(ones, EPS)), ("folded", Norm(ones, EPS, is_folded=True))):
        made = [_Layer(matrices, begin.clone(), kv, batch, rotary) for matrices in layers]
        poison()
        results.append(made[0].run(ops, norm).clone())
        times[label] = time_us([partial(layer.run, ops, norm) for layer in made])
    off = error(results[1], results[0].float())
    if not off <= 2e-2:
        report.fail(f"folded layer rows {rows}: error {off:.3g}")
        return
    note = f"norms apart {times['plain']:8.2f} x{times['plain'] / times['folded']:.3f}  error {off:.1e}"
    report.add("folded", f"layer rows {rows}", times["folded"], note, plain_us=times["plain"])


def _sweep_act(report: Report, rows: int) -> None:
    sets = _inputs(rows, 2 * _WIDTH)
    stream, gate_up = sets[0]
    expected = ReferenceOps("cuda", torch.float32).act_mul(_scaled(stream, gate_up), "silu")

    def build(config: Any) -> tuple[float, list[Callable[[], object]]]:
        poison()
        off = error(act_mul(gate_up, "silu", factors_of=stream, config=config), expected)
        return off, [partial(act_mul, g, "silu", factors_of=s, config=config) for s, g in sets]

    own = act_config(rows, _WIDTH, has_stream=True)
    plain_us = time_us([partial(act_mul, g, "silu") for _, g in sets])
    _report_best(report, f"act rows {rows}", (own, *_ACT_SWEEP), build, plain_us)


def _sweep_rope(report: Report, rows: int) -> None:
    kv, batch, rotary = scattered_rows(rows)
    sets = _inputs(rows, _NUM_HEADS * 128)
    stream, qkv = sets[0]
    wide = ReferenceOps("cuda", torch.float32)
    wide_kv = torch.zeros_like(kv, dtype=torch.float32)
    expected = wide.rope_and_write(_scaled(stream, qkv), rotary, wide_kv, batch, LLAMA)

    def call(stream: Unscaled | None, qkv: Tensor, config: RopeConfig | None) -> Tensor:
        return rope_and_write(qkv, rotary, kv, batch, LLAMA, factors_of=stream, config=config)

    def build(config: Any) -> tuple[float, list[Callable[[], object]]]:
        poison()
        return error(call(stream, qkv, config), expected), [partial(call, s, x, config) for s, x in sets]

    own = rope_config(rows, _NUM_HEADS, has_stream=True)
    plain_us = time_us([partial(call, None, x, None) for _, x in sets])
    _report_best(report, f"rope rows {rows}", (own, *_ROPE_SWEEP), build, plain_us)


def _report_best(
    report: Report,
    name: str,
    configs: tuple[Any, ...],
    build: Callable[[Any], tuple[float, list[Any]]],
    plain_us: float,
) -> None:
    """The first configuration is the one that the engine takes."""
    kind, _, _ = name.partition(" ")
    best = report.sweep(f"folded {kind}", name, configs, build)
    if best is None:
        return
    config, us = best
    own_us = time_us(build(configs[0])[1])
    note = f"without factors {plain_us:7.2f}  as chosen {own_us:7.2f}  [{short(config)}]"
    report.add("folded", name, us, note, plain_us=plain_us, own_us=own_us)


def _inputs(rows: int, width: int) -> list[tuple[Unscaled, Tensor]]:
    """Few rows come out of the L2 cache, where the product before left them."""
    num_bytes = rows * width * 2
    num_sets = 1 if num_bytes < 32 << 20 else max(2, COLD_BYTES // num_bytes)
    return [
        (Unscaled(torch.randn(rows, 4096, device="cuda").bfloat16(), None, EPS),
         torch.randn(rows, width, device="cuda").bfloat16())
        for _ in range(num_sets)
    ]  # fmt: skip


def _scaled(stream: Unscaled, product: Tensor) -> Tensor:
    return product.float() * torch.rsqrt(stream.x.float().square().mean(1, keepdim=True) + stream.eps)


def compile_tasks() -> list[Callable[[], object]]:
    """Each runs one variant once: the compiled kernel lands in Triton's cache on disk."""
    return [*(partial(_act_once, config) for config in _ACT_SWEEP), *(partial(_rope_once, c) for c in _ROPE_SWEEP)]


def _act_once(config: ActConfig) -> None:
    stream, gate_up = _inputs(64, 2 * _WIDTH)[0]
    act_mul(gate_up, "silu", factors_of=stream, config=config)


def _rope_once(config: RopeConfig) -> None:
    kv, batch, rotary = scattered_rows(64)
    stream, qkv = _inputs(64, _NUM_HEADS * 128)[0]
    rope_and_write(qkv, rotary, kv, batch, LLAMA, factors_of=stream, config=config)
