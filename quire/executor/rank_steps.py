"""One rank's steps. Every rank applies the same plans to its own share; one samples, and tells the others the tokens.

A rank that does not sample hears of a step's tokens just before it could need them. Where all ranks work on one step
that is the next. Where there are stages, a sequence is planned again only after its token has come out of the last:
a plan says of how many steps that is true, and a stage does not wait for others.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from quire.executor.batch import Unjudged
from quire.executor.clock import StepClock
from quire.executor.local import LocalExecutor, torch_threads
from quire.executor.worker import Worker
from quire.parallel.ranks import Ranks
from quire.plan import StepPlan, StepResult


@dataclass(slots=True)
class _Untold:
    """A step whose tokens this rank has yet to hear."""

    rows: list[int]
    positions: list[int]  # of the first token that each samples
    occupants: list[int]  # whose rows they were: they may be others' by then
    width: int
    unjudged: list[Unjudged]


class RankSteps:
    """Runs plans on one rank's worker, in order."""

    def __init__(self, worker: Worker, ranks: Ranks, *, lag: int, single_threaded_torch: bool) -> None:
        self._worker = worker
        self._ranks = ranks
        self._lag = lag
        self._local = LocalExecutor(worker, single_threaded_torch=single_threaded_torch)  # of the rank that samples
        self._single_threaded_torch = single_threaded_torch
        self._untold: deque[_Untold | None] = deque()
        self._num_heard = 0
        self.num_steps = 0
        self.busy_s = 0.0

    def run(self, plan: StepPlan, num_collected: int) -> StepResult | None:
        """The step's result on the rank that samples; None on the others. num_collected: how many steps' tokens the
        plan was made with."""
        began_s, waited_s = time.perf_counter(), self._ranks.waited_s
        drafts = plan.spans.drafts.values()
        width = 1 + max((len(each) for each in drafts if not isinstance(each, int)), default=0)
        result = None
        if self._ranks.samples:
            result = self._local.collect(self._local.submit(plan))
            if result.tokens:
                self._tell(result.tokens, width)
        else:
            self._run_untold(plan, width, num_collected)
        self.num_steps += 1
        self.busy_s += time.perf_counter() - began_s - (self._ranks.waited_s - waited_s)
        return result

    def _run_untold(self, plan: StepPlan, width: int, num_collected: int) -> None:
        worker = self._worker
        with torch.inference_mode(), torch_threads(single=self._single_threaded_torch):
            while self._untold and (len(self._untold) >= self._lag or self._num_heard < num_collected):
                self._hear(self._untold.popleft())
            worker.apply(plan)
            done = worker.forward(plan, StepClock(on_gpu=worker.is_gpu))
            worker.sample(plan, done)  # its forks
            worker.cache.take_finished()
            occupants = [worker.batch.occupant(row) for row in done.rows]
            untold = _Untold(done.rows, done.positions, occupants, width, done.unjudged)
            self._untold.append(untold if done.rows else None)

    @property
    def waiting_s(self) -> float:
        """For other ranks' hidden states and tokens."""
        return self._ranks.waited_s

    def reset(self) -> None:
        with torch.inference_mode():
            while self._untold:
                self._hear(self._untold.popleft())
            self._local.reset()

    def _tell(self, tokens: list[list[int]], width: int) -> None:
        """A row's tokens behind their number, for the others."""
        table = torch.zeros((len(tokens), 1 + width), dtype=torch.int64)
        for line, each in zip(table, tokens, strict=True):
            line[0] = len(each)
            line[1 : 1 + len(each)] = torch.tensor(each, dtype=torch.int64)
        self._ranks.send_tokens(table)

    def _hear(self, step: _Untold | None) -> None:
        self._num_heard += 1
        if step is None:
            return  # nothing was sampled in it
        batch = self._worker.batch
        shape = (len(step.rows), 1 + step.width)
        lines = self._ranks.receive_tokens(torch.empty(shape, dtype=torch.int64)).tolist()
        tokens = [line[1 : 1 + line[0]] for line in lines]
        found = [
            (row, position + depth, token)
            for row, position, occupant, each in zip(step.rows, step.positions, step.occupants, tokens, strict=True)
            if batch.occupant(row) == occupant
            for depth, token in enumerate(each)
        ]
        if found:
            columns = [list(column) for column in zip(*found, strict=True)]
            batch.store(batch.places(columns[0], columns[1]), torch.tensor(columns[2], device=batch.device))
        num_tokens = {row: len(each) for row, each in zip(step.rows, tokens, strict=True)}
        for unjudged in step.unjudged:
            batch.judge(unjudged, max(0, num_tokens[unjudged.row] - 1))
