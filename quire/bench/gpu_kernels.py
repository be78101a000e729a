"""Check and time every Triton kernel on one GPU, beside FlashAttention-3, cuBLAS and the memory's own speed.

    python -m quire.bench.gpu_kernels [--only check,decode,prefill,skinny,fused,sampling,step] [--no-precompile]

Each configuration is first compared with plain torch in float32 on fresh random inputs, its output poisoned; a wrong
or failing one is reported and left out. Times are medians over replays of a CUDA graph that walks through enough input
sets to leave the L2 cache cold. Numbers go to $OUT/gpu_kernels.json, or ./bench-results/.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.reference import DenseLinear, ReferenceOps
from quire.kernels.triton import TritonOps, unavailable_reason
from quire.kernels.triton.configs import (
    DecodeConfig,
    PrefillConfig,
    SkinnyConfig,
    decode_config,
    prefill_config,
    skinny_config,
)

SECTIONS = ("check", "decode", "prefill", "skinny", "fused", "sampling", "step")
COLD_BYTES = 256 << 20  # several times the L2 cache
LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
BLOCK_SIZE = 16

# name -> (sequences' KV lengths, their new tokens, FlashAttention-3's microseconds on the same machine)
Shape = tuple[list[int], list[int], float]


def _decodes(lens: Sequence[int], anchor_us: float) -> Shape:
    return list(lens), [1] * len(lens), anchor_us


def _spread(count: int, low: int, high: int) -> list[int]:
    """Evenly spread lengths, shuffled by a fixed stride so that neighbours differ."""
    lens = [low + (high - low) * i // max(count - 1, 1) for i in range(count)]
    stride = next(s for s in range(count // 3 + 1, count + 2) if math.gcd(s, count) == 1)
    return [lens[i * stride % count] for i in range(count)]


DECODE_SHAPES: dict[str, Shape] = {
    "1 x 256": _decodes([256], 12.9),
    "1 x 4,096": _decodes([4096], 19.8),
    "1 x 32,768": _decodes([32768], 54.1),
    "16 x 136": _decodes([136] * 16, 14.0),
    "64 x 1,024": _decodes([1024] * 64, 87.9),
    "256 x 843": _decodes([843] * 256, 252),
    "256 x 200..2,048": _decodes(_spread(256, 200, 2048), 305),
    "1,000 x 100..900": _decodes(_spread(1000, 100, 900), 530),
}
PREFILL_SHAPES: dict[str, Shape] = {
    "8 x 2,048": ([2048] * 8, [2048] * 8, 583),
    "1 x 8,192": ([8192], [8192], 967),
    "2,048 after 30,720": ([32768], [2048], 1808),
    "255 x 843 + chunk 1,024": ([843] * 255 + [1024], [1] * 255 + [1024], 327),
}
PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
PRODUCT_ROWS = (1, 2, 4, 8, 16)

DECODE_SWEEP = (
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 4, 4),
    DecodeConfig(32, 4, 4),
    DecodeConfig(32, 2, 5),
    DecodeConfig(128, 4, 3),
    DecodeConfig(128, 8, 3),
    DecodeConfig(64, 4, 3, fused_merge=False),
    DecodeConfig(64, 4, 3, programs_per_sm=3, busy_programs_per_sm=24),
    DecodeConfig(64, 4, 3, programs_per_sm=1, busy_programs_per_sm=4, min_tiles_per_split=4),
    DecodeConfig(64, 4, 4, programs_per_sm=2, busy_programs_per_sm=16, min_tiles_per_split=1),
)
PREFILL_SWEEP = (
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 64, 4, 2),
    PrefillConfig(128, 128, 8, 3),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 128, 4, 2),
)
_VECTOR_SWEEP = (
    SkinnyConfig(False, 4, 512, 4, 1, unroll=4),
    SkinnyConfig(False, 8, 512, 4, 1, unroll=4),
    SkinnyConfig(False, 8, 512, 8, 1, unroll=2),
    SkinnyConfig(False, 4, 1024, 4, 1, unroll=4),
    SkinnyConfig(False, 16, 256, 4, 1, unroll=4),
    SkinnyConfig(False, 8, 512, 4, 4),
    SkinnyConfig(False, 16, 512, 8, 1, unroll=2),
)
_TILE_SWEEP = (
    SkinnyConfig(True, 64, 128, 4, 4),
    SkinnyConfig(True, 64, 128, 4, 4, use_tma=True),
    SkinnyConfig(True, 64, 128, 4, 4, split_k=4),
    SkinnyConfig(True, 64, 128, 4, 4, split_k=4, use_tma=True),
    SkinnyConfig(True, 64, 256, 4, 3, split_k=2),
    SkinnyConfig(True, 64, 256, 4, 3, split_k=2, use_tma=True),
    SkinnyConfig(True, 128, 128, 4, 3, split_k=4, use_tma=True),
    SkinnyConfig(True, 128, 64, 8, 5, split_k=8),
    SkinnyConfig(True, 32, 256, 4, 4),
    SkinnyConfig(True, 16, 512, 4, 3),
)


def skinny_sweep(rows: int) -> tuple[SkinnyConfig, ...]:
    return (*(_VECTOR_SWEEP if rows <= 2 else ()), *_TILE_SWEEP)


# ---------------------------------------------------------------------------------------------------------- measuring
def time_us(calls: Sequence[Callable[[], object]], *, budget_ms: float = 40.0) -> float:
    """Median microseconds of one call; the calls (each on its own input set) run in turn in one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    rough_us = max(begin.elapsed_time(end) * 1e3 / len(calls), 2.0)
    rounds = max(1, min(math.ceil(1500 / (rough_us * len(calls))), 64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    replays = max(5, min(30, int(budget_ms * 1e3 / (rough_us * rounds * len(calls)))))
    times: list[float] = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return sorted(times)[len(times) // 2]


def error(out: Tensor, expected: Tensor) -> float:
    out, expected = out.double(), expected.double()
    if not torch.isfinite(out).all():
        return math.inf
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def poison() -> None:
    """Fill what torch.empty will hand out next with NaN, so that an element that no kernel writes is seen."""
    for numel in (1 << 12, 1 << 18, 1 << 22, 1 << 24):
        torch.full((numel,), math.nan, device="cuda", dtype=torch.float32)


class Report:
    """Collects rows, prints them as they come, and again as one table at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.details: list[dict[str, Any]] = []

    def add(self, section: str, name: str, us: float, note: str, **more: Any) -> None:
        self.rows.append({"section": section, "name": name, "us": round(us, 2), "note": note, **more})
        print(f"{section:9} {name:28} {us:9.2f} us  {note}", flush=True)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED    {what}", flush=True)

    def sweep(
        self, section: str, name: str, configs: Iterable[Any], build: Callable[[Any], tuple[float, list[Any]]]
    ) -> tuple[Any, float] | None:
        """Time each configuration (build gives its error and its calls) and return the best, once checked."""
        best: tuple[Any, float] | None = None
        for config in dict.fromkeys(configs):
            label = f"{section} {name} {_short(config)}"
            try:
                off, calls = build(config)
                if not off <= 1e-2:
                    self.fail(f"{label}: error {off:.3g}")
                    continue
                us = time_us(calls)
            except Exception as exc:  # a configuration may exceed shared memory or trip the compiler: skip it
                self.fail(f"{label}: {type(exc).__name__}: {str(exc).strip().splitlines()[-1:]}")
                continue
            self.details.append({"section": section, "name": name, "config": asdict(config), "us": us, "error": off})
            if best is None or us < best[1]:
                best = config, us
        return best

    def print_sweep(self, section: str) -> None:
        """Each configuration's time over the best for the shape, geometric mean: the one to put in the table."""
        rows = [d for d in self.details if d["section"] == section]
        best = {d["name"]: min(e["us"] for e in rows if e["name"] == d["name"]) for d in rows}
        by_config: dict[str, list[float]] = {}
        for d in rows:
            by_config.setdefault(_short_dict(d["config"]), []).append(math.log(d["us"] / best[d["name"]]))
        for config, logs in sorted(by_config.items(), key=lambda item: sum(item[1]) / len(item[1])):
            print(f"  {section} {config}: x{math.exp(sum(logs) / len(logs)):.3f} of best over {len(logs)} shapes")

    def finish(self) -> None:
        print("\n== summary ==")
        for row in self.rows:
            print(f"{row['section']:9} {row['name']:28} {row['us']:9.2f} us  {row['note']}")
        print(f"{len(self.failures)} failures" + "".join(f"\n  {f}" for f in self.failures[:20]))
        folder = Path(os.environ.get("OUT") or "bench-results")
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": self.rows,
            "failures": self.failures,
            "sweeps": self.details,
        }
        (folder / "gpu_kernels.json").write_text(json.dumps(data, indent=1))


def _short(config: Any) -> str:
    return _short_dict(asdict(config))


def _short_dict(fields: dict[str, Any]) -> str:
    return " ".join(f"{key.replace('num_', '').replace('tile_', '')}={int(value)}" for key, value in fields.items())


# ---------------------------------------------------------------------------------------------------------- inputs
def attention_inputs(
    lens: Sequence[int],
    query_lens: Sequence[int],
    spec: AttentionSpec,
    block_size: int = BLOCK_SIZE,
    *,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Random q and KV with blocks scattered over the cache; what no sequence holds is NaN, table ends are wild."""
    device = "cuda"
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + 4
    kv = torch.empty(num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim, dtype=torch.bfloat16, device=device)
    kv.normal_()
    order = torch.randperm(num_blocks, device=device, dtype=torch.int32)
    tables = torch.full((len(lens), max(counts) + 1), 2**30, dtype=torch.int32, device=device)
    first = 0
    for i, (count, length) in enumerate(zip(counts, lens, strict=True)):
        tables[i, :count] = order[first : first + count]
        if length % block_size:
            kv[int(order[first + count - 1]), :, :, length % block_size :] = math.nan
        first += count
    kv[order[first:].long()] = math.nan
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lens, query_lens, strict=True)])
    batch = AttentionBatch(
        positions=positions.to(device),
        slots=torch.zeros(sum(query_lens), dtype=torch.int64, device=device),
        query_starts=starts,
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables,
        max_query_len=max(query_lens),
        max_kv_len=max(lens),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
    )
    q = torch.randn(sum(query_lens), spec.num_heads * spec.head_dim, device=device).bfloat16()
    return q, kv.to(kv_dtype), batch


def attention_error(out: Tensor, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> float:
    """Against plain torch in float32, for a few of the sequences."""
    num_seqs = batch.kv_lens.shape[0]
    chosen = sorted({0, num_seqs // 3, max(batch.num_decodes - 1, 0), num_seqs - 1})
    starts = batch.query_starts.tolist()
    worst = 0.0 if torch.isfinite(out).all() else math.inf
    for i in chosen:
        rows = slice(starts[i], starts[i + 1])
        length = starts[i + 1] - starts[i]
        kv_len = int(batch.kv_lens[i])
        one = replace(
            batch,
            positions=batch.positions[rows],
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=q.device),
            kv_lens=batch.kv_lens[i : i + 1],
            block_tables=batch.block_tables[i : i + 1],
            max_query_len=length,
            max_kv_len=kv_len,
            num_decodes=int(length == 1),
        )
        expected = ReferenceOps(q.device, torch.float32).attention(q[rows].float(), kv, one, spec)
        worst = max(worst, error(out[rows], expected))
    return worst


# ---------------------------------------------------------------------------------------------------------- sections
CheckCase = tuple[str, AttentionSpec, int, torch.dtype]  # name, layer, block size, the cache's dtype


def check_cases() -> list[CheckCase]:
    cases = [(f"block {size}", LLAMA, size, torch.bfloat16) for size in (4, 8, 16, 32, 64, 128)]
    for head_dim, heads, kv_heads in ((64, 9, 3), (80, 8, 8), (96, 32, 8), (256, 8, 1), (256, 8, 4), (128, 64, 1)):
        spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
        cases.append((f"{heads}/{kv_heads} heads of {head_dim}", spec, 16, torch.bfloat16))
    cases.append(("window 100", replace(LLAMA, window=100), 16, torch.bfloat16))
    cases.append(("window 7, cap 5", replace(LLAMA, window=7, softcap=5.0), 32, torch.bfloat16))
    cases.append(("fp8 cache", replace(LLAMA, k_scale=0.5, v_scale=2.0), 16, torch.float8_e4m3fn))
    return cases


def check_error(case: CheckCase) -> float:
    """Ragged decodes, then prompts and chunks, against plain torch in float32."""
    _, spec, block_size, kv_dtype = case
    lens, queries = [1, 3, 17, 64, 65, 129, 300, 1025, 33, 200, 700, 5], [1] * 8 + [33, 70, 300, 5]
    q, kv, batch = attention_inputs(lens, queries, spec, block_size, kv_dtype=kv_dtype)
    poison()
    out = TritonOps("cuda", torch.bfloat16).attention(q, kv, batch, spec)
    return error(out, ReferenceOps("cuda", torch.float32).attention(q.float(), kv, batch, spec))


def run_check(report: Report) -> None:
    """Attention over what the timed shapes leave out: block sizes, widths, groups, windows, caps, caches."""
    for case in check_cases():
        try:
            off = check_error(case)
        except Exception as exc:
            report.fail(f"check {case[0]}: {type(exc).__name__}: {str(exc).strip().splitlines()[-1:]}")
            continue
        if not off <= 1e-2:
            report.fail(f"check {case[0]}: error {off:.3g}")
        else:
            print(f"check     {case[0]:28} error {off:.2e}", flush=True)


def _run_attention(
    report: Report, section: str, shapes: dict[str, Shape], configs: Sequence[Any], keyword: str
) -> None:
    from quire.kernels.triton.attention import attention
    from quire.kernels.triton.decode import DecodeScratch

    scratch = DecodeScratch.allocate(1024, 8, torch.device("cuda"))
    for name, (lens, queries, anchor_us) in shapes.items():
        kv_bytes = sum(lens) * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 2
        sets = [attention_inputs(lens, queries, LLAMA) for _ in range(max(1, min(24, -(-COLD_BYTES // kv_bytes))))]

        def build(config: Any, sets: list[Any] = sets) -> tuple[float, list[Callable[[], object]]]:
            options = {keyword: config}
            poison()
            q, kv, batch = sets[-1]
            off = attention_error(attention(q, kv, batch, LLAMA, scratch, **options), q, kv, batch, LLAMA)
            return off, [partial(attention, q, kv, batch, LLAMA, scratch, **options) for q, kv, batch in sets]

        best = report.sweep(section, name, configs, build)
        if best is None:
            continue
        config, us = best
        if section == "decode":
            rate = f"{kv_bytes / us / 1e6:.2f} TB/s"
        else:
            pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in zip(lens, queries, strict=True))
            rate = f"{4 * pairs * LLAMA.num_heads * LLAMA.head_dim / us / 1e6:.0f} TFLOP/s"
        note = f"FA3 {anchor_us:7.1f} x{anchor_us / us:.2f}  {rate}  [{_short(config)}]"
        report.add(section, name, us, note, anchor_us=anchor_us)
        del sets, build
        torch.cuda.empty_cache()
    report.print_sweep(section)


def run_decode(report: Report) -> None:
    _run_attention(report, "decode", DECODE_SHAPES, (decode_config(128, 4, 2), *DECODE_SWEEP), "decode")


def run_prefill(report: Report) -> None:
    _run_attention(report, "prefill", PREFILL_SHAPES, (prefill_config(128, 4, 2, 2048), *PREFILL_SWEEP), "prefill")


def run_skinny(report: Report) -> None:
    from quire.kernels.triton.skinny import SkinnyScratch, skinny_linear

    scratch = SkinnyScratch.allocate(1 << 14, torch.device("cuda"))
    totals = {rows: [0.0, 0.0] for rows in PRODUCT_ROWS}
    for name, (n, k) in PRODUCTS.items():
        weight_bytes = n * k * 2
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(1, -(-COLD_BYTES // weight_bytes)))]
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
            totals[rows][0] += times * us / 1e3
            totals[rows][1] += times * cublas_us / 1e3
            note = (
                f"cuBLAS {cublas_us:7.2f} x{cublas_us / us:.2f}  {weight_bytes / us / 1e6:.2f} TB/s  [{_short(config)}]"
            )
            report.add("skinny", f"{name} rows {rows}", us, note, cublas_us=cublas_us)
        del weights
        torch.cuda.empty_cache()
    for rows, (own_ms, cublas_ms) in totals.items():
        note = (
            f"all products of a Llama-3.1-8B step; cuBLAS {cublas_ms * 1e3:.0f} us x{cublas_ms / max(own_ms, 1e-9):.3f}"
        )
        report.add("skinny", f"step rows {rows}", own_ms * 1e3, note)


def run_fused(report: Report) -> None:
    ops, wide = TritonOps("cuda", torch.bfloat16), ReferenceOps("cuda", torch.float32)
    half = ReferenceOps("cuda", torch.bfloat16)
    for rows in (1, 256, 8192):
        num_sets = max(1, min(16, COLD_BYTES // (rows * 4096 * 4)))
        weight = torch.randn(4096, device="cuda").bfloat16()
        xs = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(num_sets)]
        residuals = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(num_sets)]
        residual, expected_residual = residuals[0].clone(), residuals[0].clone()
        poison()
        out = ops.add_rms_norm(xs[0], residual, weight, 1e-5)
        off = error(out, half.add_rms_norm(xs[0], expected_residual, weight, 1e-5))
        off = max(off, error(residual, expected_residual))
        off = max(off, error(ops.rms_norm(xs[0], weight, 1e-5), wide.rms_norm(xs[0].float(), weight, 1e-5)))
        calls = [partial(ops.add_rms_norm, x, r, weight, 1e-5) for x, r in zip(xs, residuals, strict=True)]
        _timed(report, f"add_rms_norm {rows}", off, rows * 4096 * 2 * 4, calls)
        del xs, residuals

        num_sets = max(1, min(8, COLD_BYTES // (rows * 28672 * 2)))
        gate_ups = [torch.randn(rows, 28672, device="cuda").bfloat16() for _ in range(num_sets)]
        poison()
        off = max(
            error(ops.act_mul(gate_ups[0], name), wide.act_mul(gate_ups[0].float(), name))
            for name in ("silu", "gelu_tanh")
        )
        calls = [partial(ops.act_mul, g, "silu") for g in gate_ups]
        _timed(report, f"act_mul {rows}", off, rows * 14336 * 2 * 3, calls)
        del gate_ups
        _run_rope(report, ops, rows)
        torch.cuda.empty_cache()


def _run_rope(report: Report, ops: TritonOps, rows: int) -> None:
    cos_sin = torch.randn(8192, 128, device="cuda")
    num_blocks = rows // BLOCK_SIZE + 64
    norms = [torch.randn(128, device="cuda").bfloat16() for _ in range(2)]
    _, _, batch = attention_inputs([rows], [rows], LLAMA)
    batch.positions = torch.randint(0, 8192, (rows,), device="cuda")
    batch.slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:rows]
    qkvs = [
        torch.randn(rows, 6144, device="cuda").bfloat16() for _ in range(max(1, min(8, COLD_BYTES // (rows << 14))))
    ]
    shape = (num_blocks, 2, 8, BLOCK_SIZE, 128)
    off = 0.0
    for q_norm, k_norm in ((None, None), (norms[0], norms[1])):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            spec = LLAMA if dtype == torch.bfloat16 else replace(LLAMA, k_scale=0.25, v_scale=0.25)
            kv = torch.zeros(shape, device="cuda", dtype=dtype)
            expected_kv = torch.zeros(shape, device="cuda", dtype=torch.float32)
            poison()
            q = ops.rope_and_write(qkvs[0], cos_sin, kv, batch, spec, q_norm, k_norm)
            expected = ReferenceOps("cuda", torch.float32).rope_and_write(
                qkvs[0].float(), cos_sin, expected_kv, batch, spec, q_norm, k_norm
            )
            off = max(off, error(q, expected))
            # An 8-bit float has 3 bits of mantissa: its own rounding is up to 6 %.
            off = max(off, error(kv.float(), expected_kv) / (1.0 if dtype == torch.bfloat16 else 5.0))
    kv = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    calls = [partial(ops.rope_and_write, x, cos_sin, kv, batch, LLAMA) for x in qkvs]
    _timed(report, f"rope_and_write {rows}", off, rows * 6144 * 2 * 2, calls)


def _timed(
    report: Report, name: str, off: float, num_bytes: int, calls: Sequence[Callable[[], object]], section: str = "fused"
) -> None:
    if not off <= 1e-2:
        report.fail(f"{section} {name}: error {off:.3g}")
        return
    us = time_us(calls)
    report.add(section, name, us, f"{num_bytes / us / 1e3:7.0f} GB/s  error {off:.1e}")


def run_sampling(report: Report) -> None:
    from quire.kernels.triton.sampling import sample
    from quire.sampling.noise import exponentials, token_words

    vocab_size = 128256
    words = token_words(vocab_size, torch.device("cuda"))
    for rows in (1, 16, 256):
        num_sets = max(1, min(32, COLD_BYTES // (rows * vocab_size * 4)))
        logits = [torch.randn(rows, vocab_size, device="cuda") * 3 for _ in range(num_sets)]
        keys = torch.randint(-(2**31), 2**31, (rows, 2), device="cuda").int()
        temperature = torch.rand(rows, device="cuda") + 0.3
        poison()
        greedy_wrong = float((sample(logits[0]) != logits[0].argmax(1)).sum())
        z = (logits[0] - logits[0].amax(1, keepdim=True)).double() / temperature[:, None].double()
        race = z - exponentials(keys, words[None]).double().log()
        drawn = sample(logits[0], keys, temperature)
        # Rounding may turn a near tie around, so the drawn token must be within a hair of the winner.
        lost = (race.amax(1) - race.gather(1, drawn[:, None])[:, 0]).max()
        size = rows * vocab_size * 4
        _timed(report, f"greedy {rows}", greedy_wrong, size, [partial(sample, x) for x in logits], "sampling")
        calls = [partial(sample, x, keys, temperature) for x in logits]
        _timed(report, f"temperature {rows}", float(lost) * 100, size, calls, "sampling")
        us = time_us([partial(torch.argmax, x, 1) for x in logits])
        report.add("sampling", f"torch argmax {rows}", us, f"{size / us / 1e3:7.0f} GB/s")
        del logits, race, z


def run_step(report: Report) -> None:
    """All kernels of a Llama-3.1-8B decode step in one graph: 32 layers with their own weights and KV, and the head."""
    from quire.kernels.triton.sampling import sample

    plain = TritonOps("cuda", torch.bfloat16)
    layers = [{name: plain.new_linear(*PRODUCTS[name]) for name in ("qkv", "o", "gate_up", "down")} for _ in range(32)]
    head = plain.new_linear(*PRODUCTS["head"])
    for i, layer in enumerate(layers):
        for j, matrix in enumerate(layer.values()):
            matrix.randomize(0.02, 4 * i + j)
    head.randomize(0.02, 1000)
    norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(8192, 128, device="cuda")

    overlapped = TritonOps("cuda", torch.bfloat16, overlap_launches=True)

    def step(ops: TritonOps, linear: Linear, token_ids: Tensor, batch: AttentionBatch, kvs: list[Tensor]) -> Tensor:
        residual = ops.embed(token_ids, head)
        hidden = ops.rms_norm(residual, norm, 1e-5)
        for layer, kv in zip(layers, kvs, strict=True):
            q = ops.rope_and_write(linear(hidden, layer["qkv"]), cos_sin, kv, batch, LLAMA)
            attended = ops.attention(q, kv, batch, LLAMA)
            hidden = ops.add_rms_norm(linear(attended, layer["o"]), residual, norm, 1e-5)
            hidden = ops.act_mul(linear(hidden, layer["gate_up"]), "silu")
            hidden = ops.add_rms_norm(linear(hidden, layer["down"]), residual, norm, 1e-5)
        return sample(ops.logits(hidden, head))

    variants: dict[str, tuple[TritonOps, Linear]] = {
        "own": (plain, plain.linear),
        "own, overlapped": (overlapped, overlapped.linear),
        "cuBLAS": (plain, _cublas),
        "cuBLAS, overlapped": (overlapped, _cublas),
    }
    for rows, length in ((1, 320), (1, 2048), (16, 136), (64, 843), (256, 843)):
        _, kv, batch = attention_inputs([length] * rows, [1] * rows, LLAMA)
        kvs = [torch.empty_like(kv).normal_() for _ in layers]
        last = batch.block_tables[:, (length - 1) // BLOCK_SIZE].long()
        batch.slots = last * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        batch.max_kv_len = 8192  # a graph is captured for the longest sequence that a server allows
        token_ids = torch.randint(0, 128256, (rows,), device="cuda")
        tokens: dict[str, Tensor] = {}
        for name, (ops, linear) in variants.items():
            if rows > 16 and name.startswith("own"):
                continue  # the same as cuBLAS
            label = f"{rows} x {length} {name}"
            try:
                tokens[name] = step(ops, linear, token_ids, batch, kvs)
                us = time_us([partial(step, ops, linear, token_ids, batch, kvs)], budget_ms=100)
            except Exception as exc:
                report.fail(f"step {label}: {type(exc).__name__}: {str(exc).strip().splitlines()[-1:]}")
                continue
            report.add("step", label, us, f"{rows * 1e6 / us:8.1f} tok/s")
        if rows <= 16 and len(tokens) == 4 and not torch.equal(tokens["own"], tokens["own, overlapped"]):
            report.fail(f"step {rows} x {length}: overlapped launches change the tokens")
        del kv, kvs
        torch.cuda.empty_cache()


Linear = Callable[[Tensor, DenseLinear], Tensor]


def _cublas(x: Tensor, weight: DenseLinear) -> Tensor:
    return F.linear(x, weight.weight)


# ---------------------------------------------------------------------------------------------------------- compiling
def _compile_task(task: tuple[str, Any, int]) -> None:
    """Run one configuration once on a tiny input: the compiled kernel lands in Triton's cache on disk."""
    kind, config, size = task
    try:
        if kind == "check":
            check_error(config)
        elif kind in ("decode", "prefill"):
            from quire.kernels.triton.attention import attention
            from quire.kernels.triton.decode import DecodeScratch

            lens, queries = ([40] * size, [1] * size) if kind == "decode" else ([80], [70])
            q, kv, batch = attention_inputs(lens, queries, LLAMA)
            scratch = DecodeScratch.allocate(1024, 8, torch.device("cuda"))
            attention(q, kv, batch, LLAMA, scratch, **{kind: config})
        else:
            from quire.kernels.triton.skinny import SkinnyScratch, skinny_linear

            rows, k = size % 100, size // 100
            x = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
            weight = torch.zeros(128, k, device="cuda", dtype=torch.bfloat16)
            skinny_linear(x, weight, None, config, SkinnyScratch.allocate(64, torch.device("cuda")))
        torch.cuda.synchronize()
    except Exception:
        return  # reported when it is timed


def precompile(sections: Sequence[str]) -> None:
    tasks: list[tuple[str, Any, int]] = []
    if "check" in sections:
        tasks += [("check", case, 0) for case in check_cases()]
    if "decode" in sections:
        tasks += [("decode", config, size) for config in DECODE_SWEEP for size in (16, 128, 1000)]
    if "prefill" in sections:
        tasks += [("prefill", config, 0) for config in PREFILL_SWEEP]
    if "skinny" in sections:
        tasks += [
            ("skinny", config, k * 100 + rows)
            for rows in PRODUCT_ROWS
            for k in (4096, 14336)
            for config in skinny_sweep(rows)
        ]
    workers = min(12, (os.cpu_count() or 2) - 1, len(tasks))
    if workers < 2:
        return
    began = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_task, tasks))
    print(f"compiled {len(tasks)} variants with {workers} processes in {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run, separated by commas")
    parser.add_argument("--no-precompile", action="store_true", help="compile when a configuration is first timed")
    args = parser.parse_args()
    sections = args.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}: choose from {', '.join(SECTIONS)}")
    if reason := unavailable_reason():
        parser.error(reason)
    torch.manual_seed(time.time_ns() % 2**31)  # fresh inputs every time
    if not args.no_precompile:
        precompile(sections)
    report = Report()
    runners: dict[str, Callable[[Report], None]] = {
        "check": run_check, "decode": run_decode, "prefill": run_prefill, "skinny": run_skinny,
        "fused": run_fused, "sampling": run_sampling, "step": run_step,
    }  # fmt: skip
    for section in SECTIONS:
        if section in sections:
            began = time.perf_counter()
            try:
                runners[section](report)
            except Exception as exc:
                report.fail(f"{section}: {type(exc).__name__}: {exc}")
            torch.cuda.empty_cache()
            print(f"-- {section} took {time.perf_counter() - began:.1f} s", flush=True)
    report.finish()


if __name__ == "__main__":
    main()
