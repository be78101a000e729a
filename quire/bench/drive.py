"""Running a workload through an engine: the loop that every benchmark times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from quire.bench.workloads import Workload
from quire.params import OutputKind, SamplingParams
from quire.request import Request

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine


def forced_length(num_out: int, **sampling: Any) -> SamplingParams:
    """Greedy unless said, and exactly so many tokens; no text is made of them."""
    values: dict[str, Any] = {"temperature": 0.0} | sampling
    return SamplingParams(
        ignore_eos=True, max_tokens=num_out, detokenize=False, output_kind=OutputKind.FINAL_ONLY, **values
    )


def run_workload(engine: LLMEngine, workload: Workload, sampling: dict[str, float] | None = None) -> tuple[float, int]:
    """Seconds and output tokens, all requests arriving at once, as LLM.generate runs them."""
    from quire.engine.intake import Intake  # brings torch, which users of the rest here may not need

    def add(i: int) -> Request:
        prompt, wanted = workload[i]
        return engine.add_request(str(i), prompt, forced_length(wanted, **(sampling or {})))

    started = time.perf_counter()
    intake = Intake(engine, add, len(workload))
    num_added = num_out = 0
    while num_added < len(workload) or engine.has_unfinished_requests():
        num_added += sum(1 for _ in intake.begin_steps())
        num_out += sum(len(output.outputs[0].token_ids) for output in engine.step())
    seconds = time.perf_counter() - started
    assert num_out == sum(n for _, n in workload), "an output has the wrong length"
    return seconds, num_out
