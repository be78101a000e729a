"""One rank's steps. Every rank applies the same plans to its own share; one samples, and tells the others the tokens.

On GPUs the tokens go from device to device behind the step that samples them, and no host waits for them. Otherwise a
rank that does not sample hears of them just before it could need them. Where all ranks work on one step that is the
next. Where there are stages, a sequence is planned again only after its token has come out of the last: a plan says of
how many steps that is true, and a stage does not wait for others.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from quire.executor.batch import Unjudged
from quire.executor.clock import StepClock
from quire.executor.local import LocalExecutor, torch_threads
from quire.executor.rank_adapters import AdapterReader
from quire.parallel.ranks import Ranks
from quire.plan import StepPlan, StepResult
from quire.sampling import SampledBatch
from quire.tiers.split import Order
from quire.tiers.teller import StoreTeller


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

    def __init__(
        self,
        local: LocalExecutor,
        ranks: Ranks,
        *,
        lag: int,
        single_threaded_torch: bool,
        adapters: AdapterReader | None = None,
        teller: StoreTeller | None = None,
    ) -> None:
        """adapters: None: it serves none; teller: where this rank has stores below the device."""
        self.adapters = adapters
        self._worker = local.worker
        self._ranks = ranks
        self._lag = lag
        self._local = local  # of which only the rank that samples submits and collects
        self._single_threaded_torch = single_threaded_torch
        self._teller = teller
        if teller is not None:
            self._worker.stores.on_over = teller.move_over
        self._untold: deque[_Untold | None] = deque()
        self._submitted: deque[tuple[int, int | None]] = deque()  # with the width of what the others are yet to be told
        self._num_heard = 0
        self.num_steps = 0
        self.busy_s = 0.0

    def submit(self, plan: StepPlan, num_collected: int) -> None:
        """num_collected: how many steps' tokens the plan was made with."""
        began_s, waited_s = time.perf_counter(), self._ranks.waited_s
        self._ranks.check()
        drafts = plan.spans.drafts.values()
        width = 1 + max((len(each) for each in drafts if not isinstance(each, int)), default=0)
        # How many tokens come of drafts and which beams go on is known on the host first.
        by_device = self._ranks.has_device_tokens and not plan.spans.drafts and not plan.beams
        if self._ranks.samples:
            self._local.submit(plan)
            if by_device and isinstance(sampled := self._local.last_sampled, SampledBatch):
                with torch.inference_mode():
                    self._ranks.share_tokens(sampled.token_ids, len(sampled.token_ids))
            self._submitted.append((plan.step, None if by_device else width))
        else:
            self._run_untold(plan, width, num_collected, by_device=by_device)
        self.num_steps += 1
        self.busy_s += time.perf_counter() - began_s - (self._ranks.waited_s - waited_s)

    @property
    def num_submitted(self) -> int:
        """Steps whose results this rank has yet to give."""
        return len(self._submitted)

    @property
    def has_result(self) -> bool:
        return bool(self._submitted) and self._local.has_ended

    def collect(self) -> StepResult:
        """The result of the step that was submitted first. Other ranks are told its tokens if they do not have them."""
        began_s = time.perf_counter()
        step, width = self._submitted.popleft()
        result = self._local.collect(step)
        if result.tokens and width is not None:
            self._tell(result.tokens, width)
        self._ranks.check()
        self.busy_s += time.perf_counter() - began_s
        return result

    def _run_untold(self, plan: StepPlan, width: int, num_collected: int, *, by_device: bool) -> None:
        worker = self._worker
        with torch.inference_mode(), torch_threads(single=self._single_threaded_torch):
            while self._untold and (len(self._untold) >= self._lag or self._num_heard < num_collected):
                self._hear(self._untold.popleft())
            worker.cache.hold_steps_for_moves()  # of earlier plans: the first rank tells when its own are over
            worker.apply(plan)
            done = worker.forward(plan, StepClock(on_gpu=worker.is_gpu))
            worker.sample(plan, done)  # its forks
            worker.cache.take_finished()
            if by_device:
                self._num_heard += 1
                if done.rows:
                    tokens = self._ranks.share_tokens(None, len(done.rows))
                    worker.batch.store(done.places or worker.batch.places(done.rows, done.positions), tokens)
                return
            occupants = [worker.batch.occupant(row) for row in done.rows]
            untold = _Untold(done.rows, done.positions, occupants, width, done.unjudged)
            self._untold.append(untold if done.rows else None)

    @property
    def waiting_s(self) -> float:
        """Seconds spent waiting for other ranks' hidden states and tokens."""
        return self._ranks.waited_s

    def reset(self) -> None:
        with torch.inference_mode():
            while self._untold:
                self._hear(self._untold.popleft())
            self._local.reset()
        if self._teller is not None:
            self._teller.reset()

    def carry_out(self, order: Order) -> None:
        assert self._teller is not None, "an order for stores came to a rank that has none"
        self._teller.carry_out(order)

    def close(self) -> None:
        """Finishes the stores that are under way."""
        self._local.close()

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
