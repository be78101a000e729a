"""Load on replicas of one model behind their router, each an engine process of its own that records its steps."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quire.bench.report import Percentiles, RunReport
from quire.bench.workloads import Workload
from quire.config import EngineConfig
from quire.engine.api import EngineInfo
from quire.engine.launch import EngineProcessOptions
from quire.params import OutputKind, SamplingParams
from quire.router.replicas import ReplicaSet


@dataclass(slots=True)
class TimedLoad:
    """What the readers of one load saw, and when that was, by the clock that all processes have."""

    began_s: float
    ended_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)  # from output to output
    num_tokens: int = 0


def report_of_loads(loads: Sequence[TimedLoad]) -> RunReport:
    """What all readers of several loads saw, together."""
    seconds, num_tokens = sum(one.ended_s - one.began_s for one in loads), sum(one.num_tokens for one in loads)
    return RunReport(
        workload="replicas",
        seconds=seconds,
        output_tokens=num_tokens,
        output_tok_s=num_tokens / seconds,
        ttft_s=Percentiles.of([first_s for one in loads for first_s in one.first_s]),
        itl_s=Percentiles.of([between_s for one in loads for between_s in one.between_s]),
    )


class ReplicaBench:
    """Serves loads, one after the other. `steps` has the recorded columns of each replica, once it has ended."""

    def __init__(self, group: ReplicaSet) -> None:
        self._group = group
        self._numbers = itertools.count()
        self.steps: list[dict[str, list[float]]] = []

    @property
    def info(self) -> EngineInfo:
        return self._group.info

    async def run(self, workload: Workload, arrivals: Sequence[float] | None = None) -> TimedLoad:
        """`arrivals` in seconds; None: all at once."""
        load = TimedLoad(time.monotonic())
        times = arrivals if arrivals is not None else [0.0] * len(workload)
        await asyncio.gather(*(self._read(load, *one, at) for one, at in zip(workload, times, strict=True)))
        load.ended_s = time.monotonic()
        return load

    async def _read(self, load: TimedLoad, prompt: list[int], num_out: int, at_s: float) -> None:
        await asyncio.sleep(max(0.0, load.began_s + at_s - time.monotonic()))
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=num_out, detokenize=False, output_kind=OutputKind.DELTA
        )
        last_s = None
        async for _ in self._group.stream(self._group.prepare(str(next(self._numbers)), prompt, params)):
            now_s = time.monotonic()
            if last_s is None:
                load.first_s.append(now_s - load.began_s - at_s)
            else:
                load.between_s.append(now_s - last_s)
            last_s = now_s
        load.num_tokens += num_out


@asynccontextmanager
async def replica_bench(config: EngineConfig, num_replicas: int) -> AsyncIterator[ReplicaBench]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        command = (sys.executable, "-P", "-m", "quire.bench.recorded_engine", folder)
        group = ReplicaSet(config, num_replicas, EngineProcessOptions(command=command))
        bench = ReplicaBench(group)
        try:
            await group.start()
            await group.ready()
            yield bench
        finally:
            await group.close()
        bench.steps = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
