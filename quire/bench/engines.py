"""Engines for benchmarks: made when needed, kept while the settings stay the same, given back before the next; and a
workload run through one as LLM.generate does, with nothing else, for times to compare with others'."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire import EngineConfig, OutputKind, SamplingParams
from quire.bench.workloads import Workload
from quire.engine.batch import run_batch, runs_beside_host
from quire.request import Request

if TYPE_CHECKING:
    from quire import LLMEngine
    from quire.bench.hf import HFBaseline


Encode = Callable[[str], list[int]]


class EngineShelf:
    """Holds one engine at a time: two would not fit in memory. A sweep over workloads reuses it.

    `encoder` gives a model's tokenizer without its weights, for what runs in other engines.
    """

    def __init__(self, encoder: Callable[[EngineConfig], Encode]) -> None:
        self.encoder = encoder
        self._config: EngineConfig | None = None
        self._engine: LLMEngine | None = None
        self._baseline: tuple[EngineConfig, int, HFBaseline] | None = None

    def engine(self, config: EngineConfig) -> LLMEngine:
        if self._engine is not None and self._config == config:
            self._engine.reset_prefix_cache()
            return self._engine
        self.clear()
        from quire import LLMEngine
        from quire.llm import log_start

        started = time.perf_counter()
        self._engine, self._config = LLMEngine.from_config(config, show_progress=True), config
        log_start(self._engine, time.perf_counter() - started)
        return self._engine

    def baseline(self, config: EngineConfig, batch_size: int) -> HFBaseline:
        if self._baseline is not None and self._baseline[:2] == (config, batch_size):
            return self._baseline[2]
        self.clear()
        from quire.bench.hf import HFBaseline

        self._baseline = (config, batch_size, HFBaseline(config, batch_size=batch_size))
        return self._baseline[2]

    def clear(self) -> None:
        """Give the memory back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._config = self._baseline = None
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def forced_length(num_out: int, **sampling: Any) -> SamplingParams:
    """Greedy unless said, and exactly so many tokens; no text is made of them."""
    values: dict[str, Any] = {"temperature": 0.0} | sampling
    return SamplingParams(
        ignore_eos=True, max_tokens=num_out, detokenize=False, output_kind=OutputKind.FINAL_ONLY, **values
    )


def run_workload(engine: LLMEngine, workload: Workload, sampling: dict[str, float] | None = None) -> tuple[float, int]:
    """Seconds and output tokens, all requests arriving at once, as LLM.generate runs them."""

    def add(i: int) -> Request:
        prompt, wanted = workload[i]
        return engine.add_request(str(i), prompt, forced_length(wanted, **(sampling or {})))

    started = time.perf_counter()
    num_out = 0
    for outputs in run_batch(engine, add, len(workload), in_slices=runs_beside_host(engine.core)):
        num_out += sum(len(output.outputs[0].token_ids) for output in outputs)
    seconds = time.perf_counter() - started
    assert num_out == sum(n for _, n in workload), "an output has the wrong length"
    return seconds, num_out
