"""The simulated executor: keeps the plan's contract to the letter, checks that the scheduler does, and tells time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.params import SamplingSpec
from quire.plan import Admission, Fork, StepPlan, StepResult, StepTimings, TokenLogprobs
from quire.request import FinishReason
from quire.sim.cost import CostModel, SimClock
from quire.sim.language import ToyLanguage
from quire.sim.memory import SimMemory


@dataclass(slots=True)
class _Row:
    """A sequence, as the executor has it."""

    number: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    table: list[int]
    sampling: SamplingSpec
    root: int
    fingerprints: list[int] = field(default_factory=list)  # of each prefix: [p] covers tokens 0..p
    num_computed: int | None = None  # None until its first span: what the prefix cache gave is known then

    def __str__(self) -> str:
        return f"row {self.number} (generation {self.generation})"


class SimExecutor:
    """Runs plans without a model. An AssertionError says which rule a plan broke.

    A step runs when it is submitted, after all earlier ones, as on a device's stream. With a `clock`, collecting a
    step moves time to its end. Transfers to the host finish `transfer_steps` steps later than they start, and their
    bytes are read only then, so that a block which is given away before is noticed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        num_host_blocks: int = 0,
        depth: int = 1,
        language: ToyLanguage | None = None,
        cost: CostModel | None = None,
        clock: SimClock | None = None,
        transfer_steps: int = 0,
        verify: bool = True,
        fault: Callable[[list[int]], str | None] | None = None,
    ) -> None:
        self.language = language or ToyLanguage()
        self.memory = SimMemory(num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        self.rows: list[_Row | None] = [None] * max_num_seqs
        self._depth = depth
        self._cost = cost or CostModel()
        self._clock = clock
        self._transfer_steps = transfer_steps
        self._verify = verify
        self._fault = fault  # given a row's tokens: what is wrong with it, for tests of failing sequences
        self._generations = [0] * max_num_seqs
        self._moving: deque[tuple[int, list[tuple[int, int]]]] = deque()  # (step, pairs on their way to the host)
        self._results: deque[tuple[StepResult, float]] = deque()  # with the time at which the step is done
        self._busy_until_s = 0.0
        self._last_step: int | None = None

    @property
    def depth(self) -> int:
        return self._depth

    def submit(self, plan: StepPlan) -> int:
        assert len(self._results) < self._depth, f"more than {self._depth} steps are in flight"
        assert self._last_step is None or plan.step == self._last_step + 1, f"step {plan.step} after {self._last_step}"
        self._last_step = plan.step
        total_s = self._cost.step_s(plan)
        self._busy_until_s = max(self._busy_until_s, self._clock() if self._clock else 0.0) + total_s
        result = StepResult(step=plan.step, timings=StepTimings(forward_s=total_s, total_s=total_s))
        self._apply(plan)
        if self._verify:
            self._check_writes(plan)
        self._forward(plan, result)
        for fork in plan.forks:
            self._fork(fork)
        self._sample(plan, result)
        result.transfers_done = self._finish_transfers(plan.step - self._transfer_steps)
        self._results.append((result, self._busy_until_s))
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        result, done_s = self._results.popleft()
        assert result.step == ticket, f"step {ticket} is collected, {result.step} is due"
        if self._clock is not None and self._clock() < done_s:
            self._clock.advance_to(done_s)
            result.ended_s = time.perf_counter()
        return result

    def is_idle(self) -> bool:
        return not self._results or self._clock is None or self._clock() >= self._results[-1][1]

    def has_time(self) -> bool:
        return bool(self._results) and self._clock is not None and self._clock() < self._results[0][1]

    def prepare_more(self) -> bool:
        return False

    def close(self) -> None:
        self._results.clear()

    # -- the plan's parts, in their order

    def _apply(self, plan: StepPlan) -> None:
        for number in plan.released:
            self._row(number)
            self.rows[number] = None
        if plan.swap_out or plan.swap_in:
            self._moving.append((plan.step, plan.swap_out))
        if plan.swap_in:
            self._copy_to_host(plan.step)  # bytes move in step order: those to the host first
            self.memory.swap_in(plan.swap_in)
        self.memory.copy(plan.copies)
        for admission in plan.admitted:
            self._admit(admission)
        for number, block_ids in plan.grown:
            self._row(number).table.extend(block_ids)
        for number, index, block in plan.rewired:
            self._row(number).table[index] = block

    def _row(self, number: int) -> _Row:
        row = self.rows[number]
        assert row is not None, f"row {number} is named but holds nothing"
        return row

    def _new_row(self, number: int, generation: int) -> None:
        assert self.rows[number] is None, f"{self.rows[number]} is given out again before it was released"
        assert generation > self._generations[number], f"row {number} comes back with generation {generation}"
        self._generations[number] = generation

    def _admit(self, new: Admission) -> None:
        self._new_row(new.row, new.generation)
        assert len(set(new.block_ids)) == len(new.block_ids), f"row {new.row}'s table has a block twice"
        assert len(new.block_ids) * self.memory.block_size >= len(new.token_ids), f"row {new.row}'s table is too short"
        row = _Row(
            number=new.row,
            generation=new.generation,
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            table=list(new.block_ids),
            sampling=new.sampling,
            root=self.language.root(new.adapter),
        )
        self.language.extend(row.fingerprints, row.root, row.token_ids)
        self.rows[new.row] = row

    def _fork(self, fork: Fork) -> None:
        self._new_row(fork.row, fork.generation)
        source = self._row(fork.source_row)
        self.rows[fork.row] = _Row(
            number=fork.row,
            generation=fork.generation,
            token_ids=list(source.token_ids),
            num_prompt_tokens=source.num_prompt_tokens,
            table=list(source.table),
            sampling=fork.sampling,
            root=source.root,
            fingerprints=list(source.fingerprints),
            num_computed=source.num_computed,
        )

    def _check_writes(self, plan: StepPlan) -> None:
        """Nobody writes a block that another row can read, unless it writes what that row expects there."""
        spans, size = plan.spans, self.memory.block_size
        assert len(set(spans.rows)) == len(spans.rows), f"a row has two spans: {spans.rows}"
        holders: dict[int, list[_Row]] = {}
        for row in self.rows:
            if row is not None:
                for block in row.table:
                    holders.setdefault(block, []).append(row)
        for number, start, num_tokens in zip(spans.rows, spans.starts, spans.num_tokens, strict=True):
            writer = self._row(number)
            self._check_span(writer, start, num_tokens)
            for index in range(start // size, (start + num_tokens - 1) // size + 1):
                first, last = max(start, index * size), min(start + num_tokens, (index + 1) * size)
                for other in holders[writer.table[index]]:
                    if other is not writer:
                        assert other.fingerprints[first:last] == writer.fingerprints[first:last], (
                            f"{writer} writes block {writer.table[index]}, which {other} reads as something else"
                        )

    def _check_span(self, row: _Row, start: int, num_tokens: int) -> None:
        assert num_tokens > 0, f"{row} has an empty span"
        if row.num_computed is not None:
            assert start == row.num_computed, f"{row} goes on at {start}, but {row.num_computed} tokens are computed"
        assert start + num_tokens <= len(row.token_ids), f"{row} has no token at {start + num_tokens - 1}"
        room = len(row.table) * self.memory.block_size
        assert start + num_tokens <= room, f"{row} has room for {room} tokens, its span ends at {start + num_tokens}"

    def _forward(self, plan: StepPlan, result: StepResult) -> None:
        """All of a step's tokens are written before any is read, as each layer does."""
        spans = plan.spans
        for number, start, num_tokens in zip(spans.rows, spans.starts, spans.num_tokens, strict=True):
            row = self._row(number)
            row.num_computed = start + num_tokens
            if self._verify:
                self.memory.write(row.table, row.fingerprints, start, start + num_tokens)
        for number, start, num_tokens, samples in zip(
            spans.rows, spans.starts, spans.num_tokens, spans.samples, strict=True
        ):
            row = self._row(number)
            if self._verify:
                assert not samples or start + num_tokens == len(row.token_ids), f"{row} samples amid known tokens"
                self.memory.check_read(row.table, row.fingerprints, start + num_tokens, str(row))
            if row.sampling.prompt_logprobs is not None:
                piece = self._prompt_logprobs(row, start, num_tokens, row.sampling.prompt_logprobs)
                if piece:
                    result.prompt_logprobs[number] = piece

    def _prompt_logprobs(self, row: _Row, start: int, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
        end = min(start + num_tokens, row.num_prompt_tokens - 1)
        return [self.language.logprobs(row.fingerprints[p], row.token_ids[p + 1], num_top) for p in range(start, end)]

    def _sample(self, plan: StepPlan, result: StepResult) -> None:
        for index, number in enumerate(plan.sampled_rows()):
            row = self._row(number)
            error = self._fault(row.token_ids) if self._fault else None
            if error is not None:
                result.failed[index] = (FinishReason.ERROR, error)
            num_output = len(row.token_ids) - row.num_prompt_tokens
            token = self.language.next_token(row.fingerprints[-1], row.sampling, num_output)
            if row.sampling.logprobs is not None:
                result.logprobs[index] = [self.language.logprobs(row.fingerprints[-1], token, row.sampling.logprobs)]
            row.token_ids.append(token)
            self.language.extend(row.fingerprints, row.root, row.token_ids)
            result.tokens.append([token])

    # -- transfers

    def _copy_to_host(self, through_step: int) -> None:
        for i, (step, pairs) in enumerate(self._moving):
            if step <= through_step:
                self.memory.swap_out(pairs)
                self._moving[i] = (step, [])

    def _finish_transfers(self, through_step: int) -> list[int]:
        self._copy_to_host(through_step)
        done = []
        while self._moving and self._moving[0][0] <= through_step:
            done.append(self._moving.popleft()[0])
        return done
