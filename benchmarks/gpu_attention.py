"""Attention kernels on a GPU: correct on what the timed shapes leave out, and timed beside FlashAttention-3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_inputs import LLAMA, Shape, attention_error, attention_inputs, decodes, spread
from benchmarks.gpu_measure import COLD_BYTES, Report, error, poison, short, time_us
from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps
from quire.kernels.triton.configs import (
    DecodeConfig,
    HopperPrefillConfig,
    PrefillConfig,
    PrefixConfig,
    decode_config,
    prefill_config,
    prefix_config,
)

DECODE_SHAPES = {
    "1 x 256": decodes([256], 12.9),
    "1 x 4,096": decodes([4096], 19.8),
    "1 x 32,768": decodes([32768], 54.1),
    "16 x 136": decodes([136] * 16, 14.0),
    "64 x 1,024": decodes([1024] * 64, 87.9),
    "256 x 843": decodes([843] * 256, 252),
    "256 x 200..2,048": decodes(spread(256, 200, 2048), 305),
    "1,000 x 100..900": decodes(spread(1000, 100, 900), 530),
}
PREFILL_SHAPES = {
    "8 x 2,048": Shape([2048] * 8, [2048] * 8, 583),
    "4 x 2,048": Shape([2048] * 4, [2048] * 4, 269),
    "8 x 1,024": Shape([1024] * 8, [1024] * 8, 170),
    "16 x 512": Shape([512] * 16, [512] * 16, 123),
    "1 x 8,192": Shape([8192], [8192], 896),
    "2,048 after 6,144": Shape([8192], [2048], 382),
    "2,048 after 30,720": Shape([32768], [2048], 1704),
    "255 x 843 + chunk 1,024": Shape([843] * 255 + [1024], [1] * 255 + [1024], 327),
    "48 x 500 + chunk 320": Shape([500] * 48 + [320], [1] * 48 + [320]),
    "48 x 500 + 320 after 640": Shape([500] * 48 + [960], [1] * 48 + [320]),
}
PREFIX_SHAPES = {
    f"{count} x {prefix:,} + {low}..{high}" + (f" in {groups}" if groups > 1 else ""): Shape(
        [prefix + n for n in spread(count, low, high)], [1] * count, prefix_groups=groups, prefix_len=prefix
    )
    for count, groups, prefix, low, high in (
        (256, 1, 2048, 64, 128),
        (256, 8, 2048, 64, 128),
        (64, 1, 8192, 64, 256),
        (16, 1, 2048, 64, 128),
        (8, 2, 4096, 100, 200),
    )
}

DECODE_SWEEP = (
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 4, 3, programs_per_sm=1, min_tiles_per_split=2),
    DecodeConfig(64, 4, 3, programs_per_sm=1, min_tiles_per_split=1),
    DecodeConfig(64, 4, 3, programs_per_sm=2, min_tiles_per_split=2),
    DecodeConfig(64, 4, 3, programs_per_sm=2, min_tiles_per_split=1),
    DecodeConfig(32, 4, 4, programs_per_sm=2, min_tiles_per_split=2),
    DecodeConfig(32, 4, 4, programs_per_sm=1, min_tiles_per_split=4),
    DecodeConfig(128, 4, 2, programs_per_sm=1, min_tiles_per_split=1),
    DecodeConfig(64, 4, 3, busy_programs_per_sm=8, min_tiles_per_split=4),
)
PREFILL_SWEEP = (
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 4),
    PrefillConfig(128, 128, 8, 3),
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 64, 4, 2),
)
PREFIX_SWEEP = (
    PrefixConfig(64, 64, 4, 3, programs_per_sm=2),
    PrefixConfig(64, 64, 4, 3, programs_per_sm=1),
    PrefixConfig(64, 64, 4, 2, programs_per_sm=2),
    PrefixConfig(64, 64, 4, 3, programs_per_sm=4),
    PrefixConfig(128, 64, 8, 3, programs_per_sm=1),
    PrefixConfig(128, 128, 8, 2, programs_per_sm=1),
    PrefixConfig(32, 64, 4, 3, programs_per_sm=2),
)

CheckCase = tuple[str, AttentionSpec, int, torch.dtype, torch.dtype]  # name, layer, block size, q's dtype, the cache's


def check_cases() -> list[CheckCase]:
    half, single = torch.bfloat16, torch.float32
    cases = [(f"block {size}", LLAMA, size, half, half) for size in (4, 8, 16, 32, 64, 128)]
    for head_dim, heads, kv_heads in ((64, 9, 3), (80, 8, 8), (96, 32, 8), (256, 8, 1), (256, 8, 4), (128, 64, 1)):
        spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
        cases.append((f"{heads}/{kv_heads} heads of {head_dim}", spec, 16, half, half))
        cases.append((f"{heads}/{kv_heads} heads of {head_dim}, float32", spec, 16, single, single))
    cases.append(("window 100", replace(LLAMA, window=100), 16, half, half))
    cases.append(("window 7, cap 5", replace(LLAMA, window=7, softcap=5.0), 32, half, half))
    cases.append(("float16", LLAMA, 16, torch.float16, torch.float16))
    cases.append(("float32", LLAMA, 16, single, single))
    cases.append(("fp8 cache", replace(LLAMA, k_scale=0.5, v_scale=2.0), 16, half, torch.float8_e4m3fn))
    return cases


def check_error(case: CheckCase) -> float:
    """Ragged decodes, two groups of them with shared prefixes, then prompts and chunks, against torch in float64."""
    _, spec, block_size, dtype, kv_dtype = case
    lens, queries = [1, 3, 17, 64, 65, 129, 300, 1025, 33, 200, 700, 5], [1] * 8 + [33, 70, 300, 5]
    shared = [1024 + n for n in (1, 2, 64, 65, 100, 128, 129, 300, 31, 7)]
    worst = 0.0
    for shape in (Shape(lens, queries), Shape(shared, [1] * 10, prefix_groups=2, prefix_len=1024)):
        q, kv, batch = attention_inputs(shape, spec, block_size, dtype=dtype, kv_dtype=kv_dtype)
        poison()
        out = TritonOps("cuda", dtype).attention(q, kv, batch, spec)
        assert isinstance(out, torch.Tensor)
        worst = max(worst, error(out, ReferenceOps("cuda", torch.float64).attention(q.double(), kv, batch, spec)))
    return worst


def run_check(report: Report) -> None:
    """Attention over what the timed shapes leave out: block sizes, widths, groups, windows, caps, caches."""
    for case in check_cases():
        try:
            off = check_error(case)
        except Exception as exc:
            report.fail(f"check {case[0]}: {type(exc).__name__}: {str(exc).strip().splitlines()[-1:]}")
            continue
        if not off <= (1e-5 if case[3] == torch.float32 else 1e-2):
            report.fail(f"check {case[0]}: error {off:.3g}")
        else:
            print(f"check     {case[0]:34} error {off:.2e}", flush=True)


def run_decode(report: Report) -> None:
    _run(report, "decode", DECODE_SHAPES, (decode_config(128, 4, 2), *DECODE_SWEEP))


def run_prefill(report: Report) -> None:
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    hopper = (HopperPrefillConfig(), HopperPrefillConfig(heads_at_once=8)) if is_hopper else ()
    _run(report, "prefill", PREFILL_SHAPES, (*hopper, prefill_config(128, 4, 2, 2048), *PREFILL_SWEEP))


def run_prefix(report: Report) -> None:
    _run(report, "prefix", PREFIX_SHAPES, (prefix_config(128, 4, 2), *PREFIX_SWEEP))


def _run(report: Report, section: str, shapes: dict[str, Shape], configs: Sequence[Any]) -> None:
    from quire.kernels.triton.attention import attention
    from quire.kernels.triton.decode import AttentionScratch

    scratch = AttentionScratch.allocate(1024, 8, torch.device("cuda"))
    for name, shape in shapes.items():
        sets = [attention_inputs(shape) for _ in range(max(1, min(24, -(-COLD_BYTES // shape.kv_bytes))))]

        def build(config: Any, sets: list[Any] = sets) -> tuple[float, list[Callable[[], object]]]:
            options = {section: config}
            poison()
            q, kv, batch = sets[-1]
            off = attention_error(attention(q, kv, batch, LLAMA, scratch, **options), q, kv, batch, LLAMA)
            return off, [partial(_attention, q, kv, batch, scratch, **options) for q, kv, batch in sets]

        best = report.sweep(section, name, configs, build)
        if best is None:
            continue
        config, us = best
        if section == "prefill":
            pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in zip(shape.lens, shape.queries, strict=True))
            note = f"{4 * pairs * LLAMA.num_heads * LLAMA.head_dim / us / 1e6:.0f} TFLOP/s"
        else:
            note = f"{shape.kv_bytes / us / 1e6:.2f} TB/s"
        if section != "prefill":
            calls = [partial(_attention, q, kv, b, scratch, **{section: config}, cuts=False) for q, kv, b in sets]
            note += f"  cut before {time_us(calls):.1f} us"
        if section == "prefix":
            calls = [partial(_attention, q, kv, replace(b, shared=None), scratch) for q, kv, b in sets]
            alone_us = time_us(calls)
            note += f"  read by each {alone_us:.1f} us: x{alone_us / us:.2f}"
        if not math.isnan(shape.anchor_us):
            note += f"  FA3 {shape.anchor_us:.1f} us: x{shape.anchor_us / us:.2f}"
        report.add(section, name, us, f"{note}  [{short(config)}]", anchor_us=shape.anchor_us)
        del sets, build
        torch.cuda.empty_cache()
    report.print_sweep(section)


def _attention(
    q: Tensor, kv: Tensor, batch: AttentionBatch, scratch: Any, *, cuts: bool = True, **options: Any
) -> Tensor:
    """As a step's first layer calls it, which cuts the sequences into pieces; the others find them cut."""
    from quire.kernels.triton.attention import attention

    if cuts:
        batch.decode_pieces.clear()
    return attention(q, kv, batch, LLAMA, scratch, **options)


def compile_tasks(sections: Sequence[str]) -> list[Callable[[], object]]:
    """Each runs one variant once on a tiny input: the compiled kernel lands in Triton's cache on disk."""
    tasks: list[Callable[[], object]] = []
    if "check" in sections:
        tasks += [partial(check_error, case) for case in check_cases()]
    if "decode" in sections:
        tasks += [partial(_once, "decode", c, decodes([40] * n)) for c in DECODE_SWEEP for n in (16, 128, 1000)]
    if "prefill" in sections:
        tasks += [partial(_once, "prefill", c, Shape([80], [70])) for c in PREFILL_SWEEP]
    if "prefix" in sections:
        sizes = (16, 128, 256)
        tasks += [
            partial(_once, "prefix", c, Shape([1030] * n, [1] * n, prefix_groups=1, prefix_len=1024))
            for c in PREFIX_SWEEP
            for n in sizes
        ]
    return tasks


def _once(section: str, config: Any, shape: Shape) -> None:
    from quire.kernels.triton.attention import attention
    from quire.kernels.triton.decode import AttentionScratch

    q, kv, batch = attention_inputs(shape)
    attention(q, kv, batch, LLAMA, AttentionScratch.allocate(1024, 8, torch.device("cuda")), **{section: config})
