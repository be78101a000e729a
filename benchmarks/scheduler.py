"""How long the scheduler takes per step: `python -m benchmarks.scheduler`.

No model runs: the results are made up, so that what is timed is schedule() and update() alone. Times are of this
thread on the CPU, which other programs on the machine do not stretch. `--drafts` has every sequence write its prompt
once more with a tenth of the words changed, and drafts that cost nothing, so that as many as there are are verified.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from dataclasses import dataclass

from quire.drafting import LookupDrafter
from quire.kv import KVManager
from quire.plan import StepPlan, StepResult
from quire.request import Request, Sequence
from quire.scheduler import Scheduler, SchedulerConfig
from quire.speculation import SpeculativeConfig
from quire.step_costs import DraftCosts

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 64


@dataclass(slots=True, frozen=True)
class Measurement:
    """Medians over the steps, in milliseconds."""

    num_seqs: int
    schedule_ms: float
    update_ms: float
    step_ms: float
    num_tokens: int


class Answers:
    """What a step brings: a token of each sequence, or the drafts that are right and the token after them."""

    def __init__(self, scheduler: Scheduler, *, with_drafts: bool) -> None:
        self._scheduler = scheduler
        self._rng = random.Random(1)
        self._coming: dict[Sequence, list[int]] = {}
        if with_drafts:
            costs = scheduler.costs
            costs.draft_costs = lambda num_decodes: DraftCosts(1.0, 0.0, [512], [0.0])  # type: ignore[method-assign]
            scheduler.drafter = LookupDrafter(SpeculativeConfig.read({"method": "ngram"}), costs)

    def of(self, plan: StepPlan) -> list[list[int]]:
        if self._scheduler.drafter is None:
            return [[7] for _ in plan.sampled_rows()]
        seqs = {seq.row: seq for seq in self._scheduler.running}
        return [self._of_row(seqs[row], plan.spans.drafts.get(row, [])) for row in plan.sampled_rows()]

    def _of_row(self, seq: Sequence, drafts: list[int] | int) -> list[int]:
        assert isinstance(drafts, list)
        line = self._coming.get(seq)
        if line is None:
            words = seq.request.prompt_token_ids * 40
            line = self._coming[seq] = [word if self._rng.random() < 0.9 else 7 for word in words]
        line = line[seq.num_output_tokens :]
        num_right = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, line, strict=False))
        )
        return line[: num_right + 1]


def measure(num_seqs: int, num_steps: int, *, with_drafts: bool = False) -> Measurement:
    """Decode `num_seqs` sequences for `num_steps` steps."""
    max_len = _PROMPT_TOKENS + num_steps * (24 if with_drafts else 1) + 2
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
    answers = Answers(scheduler, with_drafts=with_drafts)
    while scheduler.num_waiting or scheduler.stats.num_decode_tokens < num_seqs:
        _step(scheduler, answers)  # the prompts
    times = [_step(scheduler, answers) for _ in range(num_steps)]
    schedule_s, update_s, num_tokens = zip(*times, strict=True)
    both_s = [sum(each[:2]) for each in times]
    schedule_ms, update_ms, step_ms = (statistics.median(each) * 1e3 for each in (schedule_s, update_s, both_s))
    return Measurement(num_seqs, schedule_ms, update_ms, step_ms, int(statistics.median(num_tokens)))


def _step(scheduler: Scheduler, answers: Answers) -> tuple[float, float, int]:
    """Seconds of schedule() and of update(), and the tokens that came."""
    start = time.thread_time()
    plan = scheduler.schedule()
    scheduled = time.thread_time()
    assert plan is not None
    result = StepResult(step=plan.step, tokens=answers.of(plan))
    ran = time.thread_time()
    scheduler.update(result)
    return scheduled - start, time.thread_time() - ran, sum(map(len, result.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time schedule() and update() over decoding sequences.", allow_abbrev=False
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--drafts", action="store_true", help="with drafts for as many sequences as have some")
    args = parser.parse_args()
    heads = f"{'sequences':>9}  {'schedule ms':>11}  {'update ms':>9}  {'both ms':>8}  {'us per sequence':>15}"
    print(f"{heads}  {'tokens a step':>13}")
    for num_seqs in args.num_seqs:
        gc.collect()
        m = measure(num_seqs, args.steps, with_drafts=args.drafts)
        per_seq_us = m.step_ms * 1e3 / num_seqs
        times = f"{num_seqs:>9}  {m.schedule_ms:>11.3f}  {m.update_ms:>9.3f}  {m.step_ms:>8.3f}  {per_seq_us:>15.2f}"
        print(f"{times}  {m.num_tokens:>13}")


if __name__ == "__main__":
    main()
