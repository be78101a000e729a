"""Running a workload through an engine as LLM.generate does, and nothing else: for times to compare with others'."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from quire import OutputKind, SamplingParams
from quire.bench.workloads import Workload
from quire.engine.batch import run_batch, runs_beside_host
from quire.request import Request

if TYPE_CHECKING:
    from quire import LLMEngine


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
