"""Timing and checking of GPU kernels, and the report that collects what was found."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLD_BYTES = 256 << 20  # several times the L2 cache


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
            label = f"{section} {name} {short(config)}"
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

    def timed(self, section: str, name: str, off: float, num_bytes: int, calls: Sequence[Callable[[], object]]) -> None:
        """A kernel without configurations: its time, once its error is small."""
        if not off <= 1e-2:
            self.fail(f"{section} {name}: error {off:.3g}")
            return
        us = time_us(calls)
        self.add(section, name, us, f"{num_bytes / us / 1e3:7.0f} GB/s  error {off:.1e}")

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


def short(config: Any) -> str:
    return _short_dict(asdict(config))


def _short_dict(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{key.replace('num_', '').replace('tile_', '')}={int(value)}"
        for key, value in fields.items()
        if value is not None
    )
