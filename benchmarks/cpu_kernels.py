"""The native CPU kernels beside torch's: `python -m benchmarks.cpu_kernels`.

Weights are read from memory, as in a real step: enough copies of each matrix are multiplied in turn to overflow the
caches. Times are the best of several rounds, ours and torch's alternating, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.cpu.library import available_isas
from quire.kernels.interface import AttentionBatch, AttentionSpec

# [outputs, inputs] of SmolLM2-135M: qkv, attention output, gate and up, down, vocabulary.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
BLOCK_SIZE = 16
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="tokens a product")
    parser.add_argument("--isas", nargs="+", default=[isa for isa in available_isas() if isa != "generic"] or None)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(WEIGHT_BYTES))
    parser.add_argument("--threads", type=int, default=None, help="default: as the engine chooses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--working-set-mb", type=int, default=256, help="of each matrix's copies")
    args = parser.parse_args()
    if reason := unavailable_reason():
        raise SystemExit(reason)
    isas = args.isas or ["generic"]
    columns = (
        ("rows", 6),
        ("stored", 9),
        ("isa", 8),
        ("ms", 9),
        ("GB/s", 7),
        ("GFLOP/s", 8),
        ("torch ms", 9),
        ("gain", 6),
    )
    print(f"{'kernel':24}", *(f"{name:>{width}}" for name, width in columns))
    for dtype in args.dtypes:
        backends = [CpuOps(dtype, args.threads, isa=isa) for isa in isas]
        torch.set_num_threads(backends[0].num_threads)
        for shape in SHAPES:
            _linear(backends, shape, args.rows, args.rounds, args.working_set_mb << 20)
    for kv_dtype in (torch.float32, torch.bfloat16):
        backends = [CpuOps("float32", args.threads, isa=isa) for isa in isas]
        _attention(backends, "decode 64 x 300", [(300, 1)] * 64, kv_dtype, args.rounds, args.working_set_mb << 20)
        _attention(backends, "decode 1 x 1000", [(1000, 1)], kv_dtype, args.rounds, args.working_set_mb << 20)
        _attention(backends, "prefill 512", [(512, 512)], kv_dtype, args.rounds, args.working_set_mb << 20)


def _best(functions: list[Callable[[], None]], rounds: int) -> list[float]:
    """Each function's shortest time in seconds; they take turns."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def _row(
    kernel: str, rows: int, dtype: str, isa: str, seconds: float, num_bytes: float, flops: float, torch_seconds: float
) -> None:
    rates = f"{seconds * 1e3:9.3f} {num_bytes / seconds / 1e9:7.1f} {flops / seconds / 1e9:8.1f}"
    print(
        f"{kernel:24} {rows:6} {dtype:>9} {isa:>8} {rates} {torch_seconds * 1e3:9.3f} {torch_seconds / seconds:5.2f}x"
    )


def _linear(
    backends: list[CpuOps], shape: tuple[int, int], all_rows: list[int], rounds: int, working_bytes: int
) -> None:
    out_features, in_features = shape
    dtype = backends[0].weight_dtype
    copies = max(1, working_bytes // (out_features * in_features * 4))
    matrix = torch.randn(shape) * 0.05
    ours = [[ops.new_linear(*shape) for _ in range(copies)] for ops in backends]
    for weights in ours:
        for weight in weights:
            weight.load_rows(0, matrix)
    theirs = [matrix.clone() for _ in range(copies)]

    for rows in all_rows:
        x = torch.randn(rows, in_features)

        def run_torch(x: Tensor = x) -> None:
            for weight in theirs:
                F.linear(x, weight)

        def run_ours(i: int, x: Tensor = x) -> None:
            for weight in ours[i]:
                weight.multiply(x)

        functions: list[Callable[[], None]] = [run_torch]
        functions += [lambda i=i, run=run_ours: run(i) for i in range(len(backends))]  # type: ignore[misc]
        torch_seconds, *seconds = (total / copies for total in _best(functions, rounds))
        for ops, ours_seconds in zip(backends, seconds, strict=True):
            num_bytes = out_features * in_features * WEIGHT_BYTES[dtype]
            flops = 2.0 * rows * out_features * in_features
            name = f"linear {out_features} x {in_features}"
            _row(name, rows, dtype, ops.isa, ours_seconds, num_bytes, flops, torch_seconds)


def _attention(
    backends: list[CpuOps],
    name: str,
    sequences: list[tuple[int, int]],
    kv_dtype: torch.dtype,
    rounds: int,
    working_bytes: int,
) -> None:
    """sequences: (tokens with KV, new tokens). torch attends to the same KV laid out contiguously, already float32."""
    kv_len, query_len = sequences[0]
    blocks_each = -(-kv_len // BLOCK_SIZE)
    num_blocks = blocks_each * len(sequences)
    shape = (num_blocks, 2, SPEC.num_kv_heads, BLOCK_SIZE, SPEC.head_dim)
    copies = max(1, working_bytes // (4 * num_blocks * 2 * SPEC.num_kv_heads * BLOCK_SIZE * SPEC.head_dim))
    caches = [torch.randn(shape).to(kv_dtype) for _ in range(copies)]
    tokens = query_len * len(sequences)
    batch = AttentionBatch(
        positions=torch.arange(kv_len - query_len, kv_len).repeat(len(sequences)),
        slots=torch.zeros(tokens, dtype=torch.int64),
        query_starts=torch.arange(0, tokens + 1, query_len, dtype=torch.int32),
        kv_lens=torch.full((len(sequences),), kv_len, dtype=torch.int32),
        block_tables=torch.randperm(num_blocks).to(torch.int32).view(len(sequences), blocks_each),
        max_query_len=query_len,
        max_kv_len=kv_len,
        num_decodes=len(sequences) if query_len == 1 else 0,
    )
    q = torch.randn(tokens, SPEC.num_heads * SPEC.head_dim)
    dense_q = q.view(len(sequences), query_len, SPEC.num_heads, SPEC.head_dim).transpose(1, 2)
    dense = [torch.randn(2, len(sequences), SPEC.num_kv_heads, kv_len, SPEC.head_dim) for _ in range(copies)]

    def run_torch() -> None:
        for k, v in dense:
            F.scaled_dot_product_attention(dense_q, k, v, is_causal=query_len > 1, scale=SPEC.scale, enable_gqa=True)

    def run_ours(ops: CpuOps) -> None:
        for kv in caches:
            ops.attention(q, kv, batch, SPEC)

    functions: list[Callable[[], None]] = [run_torch]
    functions += [lambda ops=ops: run_ours(ops) for ops in backends]  # type: ignore[misc]
    torch_seconds, *seconds = (total / copies for total in _best(functions, rounds))
    num_bytes = len(sequences) * kv_len * 2 * SPEC.num_kv_heads * SPEC.head_dim * kv_dtype.itemsize
    visible = sum(new * (total - (new - 1) / 2) for total, new in sequences)
    for ops, ours_seconds in zip(backends, seconds, strict=True):
        flops = visible * SPEC.num_heads * SPEC.head_dim * 4
        dtype = str(kv_dtype).removeprefix("torch.")
        _row(name, tokens, dtype, ops.isa, ours_seconds, num_bytes, flops, torch_seconds)


if __name__ == "__main__":
    main()
