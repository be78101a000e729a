"""The GPU table: Llama-3.1-8B's shape in bf16 with random weights, or Qwen3-30B-A3B's, on the seeded workloads.

    python -m benchmarks.gpu                        # the whole table, JSON and a chart
    python -m benchmarks.gpu single lab16 --no-profile
    python -m benchmarks.gpu --shape qwen3-30b-a3b

Each workload runs once untimed, on other prompts, and then timed. After that a few steps are profiled, and a step's
time is split into matrix products, attention, other kernels, sampling and gaps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.charts import bar_chart
from quire.bench.engines import forced_length, run_workload
from quire.bench.model_shapes import LLAMA_8B, write_llama_8b, write_shape
from quire.bench.plots import write_charts
from quire.bench.workloads import WORKLOADS
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

# Row of the table -> (workload, sampling, which rate counts, vLLM 0.26.0 on an H200, the limit of the hardware)
ROWS: dict[str, tuple[str, dict[str, float], str, float, float]] = {
    "single": ("single", {}, "output", 201.2, 284.5),
    "lab16": ("lab16", {}, "output", 3104, 4517),
    "mixed256": ("mixed256", {}, "output", 9984, 14372),
    "mixed256-sampled": ("mixed256", {"temperature": 0.8, "top_p": 0.95}, "output", 7725, 14372),
    "sharegpt": ("sharegpt", {}, "output", 12682, 21179),
    "prefill": ("prefill", {}, "total", 40535, 53980),
    "shared_prefix": ("shared_prefix", {}, "output", 8343, 17700),
}
EXPERTS_ROWS: dict[str, tuple[str, dict[str, float], str, float, float]] = {
    "single": ("single", {}, "output", 240, 701),
    "lab16": ("lab16", {}, "output", 1334, 1716),
    "mixed256": ("mixed256", {}, "output", 5784, 8208),
}
QWEN3_30B_A3B = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def write_qwen3_30b_a3b() -> Path:
    return write_shape("qwen3-30b-a3b-shape", QWEN3_30B_A3B)


SHAPES = {
    "llama-3.1-8b": ("Llama-3.1-8B", write_llama_8b, ROWS),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", write_qwen3_30b_a3b, EXPERTS_ROWS),
}
# Parts of a step by the names of the kernels that do them.
_KERNELS = {
    "attention": (
        "decode_kernel",
        "pieces_kernel",
        "prefill_kernel",
        "prefill_hopper_kernel",
        "prefix_kernel",
        "prompt_kernel",
    ),
    "experts": ("route_kernel", "picked_kernel", "grouped_kernel", "combine_kernel"),
    "matrix products": (
        "vector_kernel",
        "tile_kernel",
        "gemm",
        "gemv",
        "cutlass",
        "nvjet",
        "xmma",
        "splitK",
        "cublas",
        "gated_hopper_kernel",
        "product_kernel",
        "product_hopper_kernel",
    ),
    "sampling": ("chunk_kernel", "winner_kernel", "bound_kernel", "gather_kernel", "finish_kernel"),
}


@dataclass(slots=True, frozen=True)
class Row:
    """One line of the table. Seconds are totals over the timed run."""

    name: str
    seconds: float
    tok_s: float
    vllm_tok_s: float
    limit_tok_s: float
    num_steps: int
    gpu_s: float  # from each step's first to its last kernel
    sample_s: float
    schedule_s: float
    submit_s: float
    update_s: float
    num_captures: int


def time_row(engine: LLMEngine, name: str, row: tuple[str, dict[str, float], str, float, float]) -> Row:
    workload_name, sampling, counts, vllm, limit = row
    vocab = 128_000
    run_workload(engine, WORKLOADS[workload_name](vocab, seed=100_000), sampling)
    engine.reset_prefix_cache()
    before = _totals(engine)
    workload = WORKLOADS[workload_name](vocab)
    seconds, num_out = run_workload(engine, workload, sampling)
    spent = [after - earlier for after, earlier in zip(_totals(engine), before, strict=True)]
    num_counted = num_out + (sum(len(p) for p, _ in workload) if counts == "total" else 0)
    num_steps, gpu_s, sample_s, schedule_s, submit_s, update_s, num_captures = spent
    return Row(
        name=name,
        seconds=seconds,
        tok_s=num_counted / seconds,
        vllm_tok_s=vllm,
        limit_tok_s=limit,
        num_steps=int(num_steps),
        gpu_s=gpu_s,
        sample_s=sample_s,
        schedule_s=schedule_s,
        submit_s=submit_s,
        update_s=update_s,
        num_captures=int(num_captures),
    )


def _totals(engine: LLMEngine) -> tuple[float, ...]:
    stats, host = engine.stats, engine.core.host
    graphs = getattr(getattr(engine.core.executor, "worker", None), "graphs", None)
    return (
        stats.num_steps,
        stats.busy_s,
        stats.sample_s,
        host.schedule_s,
        host.submit_s,
        host.update_s,
        0 if graphs is None else graphs.num_captures,
    )


def profile_decode(engine: LLMEngine, num_seqs: int, context: int, num_steps: int = 12) -> dict[str, float]:
    """Milliseconds of one decode step by part, from the GPU's own trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    params = forced_length(256)
    for i in range(num_seqs):
        engine.add_request(f"p{i}", [10 + (i * 7919 + j) % 120_000 for j in range(context)], params)
    num_prefilled, num_quiet = -1, 0
    while num_quiet < 4:  # until the prompts are done and a few steps have only decoded
        engine.step()
        num_now = engine.core.scheduler.stats.num_prefill_tokens
        num_quiet = num_quiet + 1 if num_now == num_prefilled else 0
        num_prefilled = num_now
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - started) * 1e3
    engine.abort_request([f"p{i}" for i in range(num_seqs)])
    parts = dict.fromkeys([*_KERNELS, "other kernels"], 0.0)
    for event in trace.key_averages():
        part = next((p for p, names in _KERNELS.items() if any(n in event.key for n in names)), "other kernels")
        parts[part] += event.device_time_total / 1e3
    parts["gaps"] = max(0.0, wall_ms - sum(parts.values()))
    return {part: ms / num_steps for part, ms in parts.items()}


def _print(ready_s: float, kv_tokens: int, rows: list[Row], splits: dict[str, dict[str, float]]) -> None:
    print(f"\nready in {ready_s:.1f} s, {kv_tokens:,} KV tokens")
    print(f"{'row':<18}{'tok/s':>9}{'vLLM':>9}{'x':>6}{'of limit':>10}{'GPU s':>8}{'wall s':>8}{'sample s':>9}"
          f"{'schedule':>9}{'submit':>8}{'update':>8}{'captures':>9}")  # fmt: skip
    for r in rows:
        print(f"{r.name:<18}{r.tok_s:>9.1f}{r.vllm_tok_s:>9.0f}{r.tok_s / r.vllm_tok_s:>6.2f}"
              f"{r.tok_s / r.limit_tok_s:>9.0%} {r.gpu_s:>8.2f}{r.seconds:>8.2f}{r.sample_s:>9.2f}"
              f"{r.schedule_s:>9.2f}{r.submit_s:>8.2f}{r.update_s:>8.2f}{r.num_captures:>9}")  # fmt: skip
    for name, split in splits.items():
        print(f"step {name}: " + ", ".join(f"{part} {ms:.2f} ms" for part, ms in split.items()))


def _chart(path: Path, rows: list[Row], shape: str) -> None:
    """The picture of the README."""
    columns = {
        "vLLM 0.26.0": [100 * r.vllm_tok_s / r.limit_tok_s for r in rows],
        "Quire": [100 * r.tok_s / r.limit_tok_s for r in rows],
    }
    title = "Tokens per second over the physical limit"
    chart = bar_chart(title, "percent of the hardware's limit", [r.name for r in rows], columns)
    try:
        write_charts(path, [chart], f"{shape}'s shape, bf16, one H200")
    except ConfigError as error:
        print(f"no chart: {error}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--no-profile", action="store_true", help="leave the split of a step out")
    parser.add_argument("--kwargs", default="{}", help='JSON of engine arguments, e.g. \'{"kv_cache_dtype": "fp8"}\'')
    args = parser.parse_args(argv)
    shape, write_model, table = SHAPES[args.shape]
    names = args.rows or list(table)
    unknown = [name for name in names if name not in table]
    try:
        if unknown:
            raise ConfigError(f"unknown row {unknown[0]!r}: there are {', '.join(table)}")
        values = {"device": "cuda", "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
        config = EngineConfig(
            **(values | {"gpu_memory_utilization": 0.9, "model": str(write_model())} | json.loads(args.kwargs))
        )
        started = time.perf_counter()
        from quire.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_config(config)
    except (QuireError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ready_s = time.perf_counter() - started
    print("start-up:", {part: round(s, 2) for part, s in engine.built.timeline_s.items()}, flush=True)
    rows = []
    for name in names:
        rows.append(time_row(engine, name, table[name]))
        print(f"{name}: {rows[-1].tok_s:.1f} tok/s", flush=True)
    splits: dict[str, dict[str, float]] = {}
    if not args.no_profile:
        for num_seqs, context in ((1, 256), (16, 136), (256, 843)):
            splits[f"{num_seqs} x {context}"] = profile_decode(engine, num_seqs, context)
    kv_tokens = engine.ledger.num_blocks * engine.ledger.block_size
    _print(ready_s, kv_tokens, rows, splits)
    folder = Path(os.environ.get("OUT") or "bench-results")
    folder.mkdir(parents=True, exist_ok=True)
    record = {"ready_s": ready_s, "kv_tokens": kv_tokens, "rows": [asdict(r) for r in rows], "step_ms": splits}
    (folder / "gpu.json").write_text(json.dumps(record, indent=1))
    _chart(folder / "gpu.png", rows, shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
