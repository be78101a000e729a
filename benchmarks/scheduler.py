"""How long the scheduler takes per step: `python -m benchmarks.scheduler`.

No model runs: the results are made up, so that what is timed is schedule() and update() alone. Times are of this
thread on the CPU, which other programs on the machine do not stretch.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

from quire.kv import KVManager
from quire.plan import StepResult
from quire.request import Request
from quire.scheduler import Scheduler, SchedulerConfig

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64


@dataclass(slots=True, frozen=True)
class Measurement:
    """Medians over the steps, in milliseconds."""

    num_seqs: int
    schedule_ms: float
    update_ms: float
    step_ms: float


def measure(num_seqs: int, num_steps: int) -> Measurement:
    """Decode `num_seqs` sequences for `num_steps` steps."""
    max_len = _PROMPT_TOKENS + num_steps + 2
    kv = KVManager(num_blocks=num_seqs * (max_len // _BLOCK_SIZE + 2), block_size=_BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * _PROMPT_TOKENS, max_model_len=max_len
    )
    scheduler = Scheduler(config, kv)
    for i in range(num_seqs):
        request = Request(
            request_id=str(i),
            prompt_token_ids=[i * _PROMPT_TOKENS + j for j in range(_PROMPT_TOKENS)],
            max_tokens=max_len,
            end_token_ids=frozenset([2]),
        )
        scheduler.add(request)
    _step(scheduler)  # the prompts
    times = [_step(scheduler) for _ in range(num_steps)]
    schedule_s, update_s = zip(*times, strict=True)
    both_s = [sum(pair) for pair in times]
    median = statistics.median
    return Measurement(num_seqs, median(schedule_s) * 1e3, median(update_s) * 1e3, median(both_s) * 1e3)


def _step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of schedule() and of update()."""
    start = time.thread_time()
    plan = scheduler.schedule()
    scheduled = time.thread_time()
    assert plan is not None
    result = StepResult(step=plan.step, tokens=[[7] for _ in plan.sampled_rows()])
    ran = time.thread_time()
    scheduler.update(result)
    return scheduled - start, time.thread_time() - ran


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time schedule() and update() over decoding sequences.", allow_abbrev=False
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    print(f"{'sequences':>9}  {'schedule ms':>11}  {'update ms':>9}  {'both ms':>8}  {'us per sequence':>15}")
    for num_seqs in args.num_seqs:
        gc.collect()
        m = measure(num_seqs, args.steps)
        per_seq_us = m.step_ms * 1e3 / num_seqs
        print(f"{num_seqs:>9}  {m.schedule_ms:>11.3f}  {m.update_ms:>9.3f}  {m.step_ms:>8.3f}  {per_seq_us:>15.2f}")


if __name__ == "__main__":
    main()
