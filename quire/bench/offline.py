"""Offline throughput on the seeded workloads, beside transformers' generate() where that is installed.

    python -m quire.bench.offline single64 lab16 mixed64 --baseline hf
    python -m quire.bench.offline lab16 --dtype bfloat16 --json

Each workload runs once untimed, on other prompts of the same lengths, and then timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.drive import run_workload
from quire.bench.workloads import WORKLOADS, Workload
from quire.cli.options import add_engine_flags, engine_config
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError


@dataclass(slots=True, frozen=True)
class Timing:
    """One engine on one workload. Only asked-for output tokens count."""

    engine: str
    workload: str
    seconds: float
    output_tok_s: float
    total_tok_s: float
    waste_percent: float | None = None
    peak_blocks: int | None = None


def time_quire(config: EngineConfig, names: list[str]) -> list[Timing]:
    from quire.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_config(config)
    kv, vocab = engine.core.kv, engine.spec.vocab_size

    def run(workload: Workload) -> tuple[float, float, int]:
        peak, waste = 0, 0.0

        def look_at_cache() -> None:
            nonlocal peak, waste
            if kv.num_used_blocks > peak:
                peak, waste = kv.num_used_blocks, kv.stats.waste_percent

        seconds, _ = run_workload(engine, workload, after_step=look_at_cache)
        return seconds, waste, peak

    timings = []
    for name in names:
        run(WORKLOADS[name](vocab, seed=100_000))
        engine.reset_prefix_cache()
        workload = WORKLOADS[name](vocab)
        seconds, waste, peak = run(workload)
        timings.append(_timing("quire", name, workload, seconds, waste, peak))
    return timings


def time_transformers(config: EngineConfig, names: list[str], batch_size: int = 16) -> list[Timing]:
    """generate() in static batches, in order of arrival: the baseline without paging."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError("--baseline hf needs transformers: pip install 'quire[test]'") from None
    from quire.weights import resolve_model

    path = resolve_model(config.model)
    where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    source = path.parent if where else path
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **where)
    model.eval()

    def run(workload: Workload) -> float:
        started = time.perf_counter()
        for first in range(0, len(workload), batch_size):
            batch = workload[first : first + batch_size]
            width, longest = max(len(p) for p, _ in batch), max(n for _, n in batch)
            ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
        return time.perf_counter() - started

    timings = []
    for name in names:
        workload = WORKLOADS[name](model.config.vocab_size)
        run([(p, 4) for p, _ in workload[:batch_size]])
        timings.append(_timing("transformers", name, workload, run(workload)))
    return timings


def _timing(
    engine: str, name: str, workload: Workload, seconds: float, waste: float | None = None, peak: int | None = None
) -> Timing:
    num_out = sum(n for _, n in workload)
    num_in = sum(len(p) for p, _ in workload)
    return Timing(engine, name, round(seconds, 3), num_out / seconds, (num_in + num_out) / seconds, waste, peak)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.bench.offline", description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--baseline", choices=["hf"], help="time transformers' generate() on the same work too")
    parser.add_argument("--json", action="store_true")
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    try:
        unknown = [name for name in args.workloads if name not in WORKLOADS]
        if unknown:
            raise ConfigError(f"unknown workload {unknown[0]!r}: there are {', '.join(WORKLOADS)}")
        config = engine_config(args)
        timings = time_quire(config, args.workloads)
        if args.baseline:
            timings += time_transformers(config, args.workloads)
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([asdict(t) for t in timings], indent=1))
        return 0
    print(f"{'engine':<14}{'workload':<16}{'seconds':>9}{'out tok/s':>11}{'all tok/s':>11}{'blocks':>8}{'waste':>8}")
    for t in timings:
        cache = "" if t.peak_blocks is None else f"{t.peak_blocks:>8}{t.waste_percent:>7.1f}%"
        print(f"{t.engine:<14}{t.workload:<16}{t.seconds:>9.2f}{t.output_tok_s:>11.1f}{t.total_tok_s:>11.1f}{cache}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
