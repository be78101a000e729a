"""Running a workload through an engine: the loop that every benchmark times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.bench.workloads import Workload
from quire.params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine


def forced_length(num_out: int, **sampling: Any) -> SamplingParams:
    """Greedy unless said, and exactly so many tokens; no text is made of them."""
    values: dict[str, Any] = {"temperature": 0.0} | sampling
    return SamplingParams(
        ignore_eos=True, max_tokens=num_out, detokenize=False, output_kind=OutputKind.FINAL_ONLY, **values
    )


def run_workload(
    engine: LLMEngine,
    workload: Workload,
    sampling: dict[str, float] | None = None,
    after_step: Callable[[], None] | None = None,
) -> tuple[float, int]:
    """Seconds and output tokens, all requests arriving at once."""
    started = time.perf_counter()
    for i, (prompt, num_out) in enumerate(workload):
        engine.add_request(str(i), prompt, forced_length(num_out, **(sampling or {})))
    num_out = 0
    while engine.has_unfinished_requests():
        num_out += sum(len(output.outputs[0].token_ids) for output in engine.step())
        if after_step is not None:
            after_step()
    seconds = time.perf_counter() - started
    assert num_out == sum(n for _, n in workload), "an output has the wrong length"
    return seconds, num_out
