"""The simulated executor: keeps the plan's contract to the letter, checks that the scheduler does, and tells time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sim_language import ToyLanguage
from sim_memory import SimMemory, SimStore, SimTable

from quire.kv import KVManager
from quire.params import SamplingSpec
from quire.plan import (
    Admission,
    BeamCandidate,
    BeamGroup,
    Fork,
    KeyedMove,
    Move,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from quire.request import FinishReason
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel, SimClock


@dataclass(slots=True)
class _Row:
    """A sequence, as the executor has it."""

    number: int
    token_ids: list[int]
    num_computed: int
    num_prompt_tokens: int
    tables: list[SimTable]
    sampling: SamplingSpec
    root: int
    fingerprints: list[int] = field(default_factory=list)  # of each prefix: [p] covers tokens 0..p
    is_ranked: bool = False  # a beam that has not been put in its place since: what it was may be others' by now

    def __str__(self) -> str:
        return f"row {self.number}"


@dataclass(slots=True)
class _Span:
    """A row's part in the step that runs: its tokens, and the drafts that it verifies, from `start` on."""

    row: _Row
    start: int
    num_tokens: int
    samples: bool
    drafts: list[int]
    fingerprints: list[int]  # the row's, and those of the drafts

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class SimExecutor:
    """Runs plans without a model. An AssertionError says which rule a plan broke.

    A step runs when it is submitted, after all earlier ones, as on a device's stream. With a `clock`, collecting a
    step moves time to its end. Moves from and to the host finish `transfer_steps` steps later than they start, and only
    then are their bytes moved, so that a block which is given away or read before is noticed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        windows: Sequence[int | None] = (None,),
        num_host_blocks: int = 0,
        stores: Sequence[SimStore] = (),
        depth: int = 1,
        language: ToyLanguage | None = None,
        cost: CostModel | None = None,
        clock: SimClock | None = None,
        transfer_steps: int = 0,
        verify: bool = True,
        fault: Callable[[list[int]], str | None] | None = None,
        drafter: Callable[[list[int], int], list[int]] | None = None,
    ) -> None:
        self.language = language or ToyLanguage()
        self.memory = SimMemory(num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        self.rows: list[_Row | None] = [None] * max_num_seqs
        self._windows = windows
        self._depth = depth
        self._cost = cost or CostModel()
        self._clock = clock
        self._transfer_steps = transfer_steps
        self._verify = verify
        self._fault = fault  # given a row's tokens: what is wrong with it, for tests of failing sequences
        self._drafter = drafter  # its own: given a row's tokens and how many at most
        self._stores = list(stores)
        self._moving: deque[tuple[int, Move | KeyedMove]] = deque()  # (step, blocks on their way)
        self._useless: set[int] = set()  # tickets of sends whose own step has failed
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
        self._apply(plan)
        spans = self._spans(plan)
        if self._verify:
            self._check_filled(plan, spans)
        counts, starts = [span.num_tokens for span in spans], [span.start for span in spans]
        num_moved = sum(len(move.pairs) for move in plan.all_moves())
        total_s = self._cost.step_s(counts, starts, num_moved)
        self._busy_until_s = max(self._busy_until_s, self._clock() if self._clock else 0.0) + total_s
        result = StepResult(step=plan.step, timings=StepTimings(forward_s=total_s, total_s=total_s))
        if self._verify:
            self._check_writes(spans)
        self._forward(spans, result)
        self._sample(plan, spans, result)
        if any(reason is FinishReason.ERROR for reason, _ in result.failed.values()):
            self._useless |= {move.ticket for move in plan.keyed_moves if move.filled_group is not None}
        self._finish_moves(plan.step - self._transfer_steps, result)
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
        for move in plan.all_moves():
            if isinstance(move, Move) and move.is_awaited:
                self.memory.move(move)
            else:
                self._moving.append((plan.step, move))
        self.memory.copy(plan.copies)
        for admission in plan.admitted:
            self._admit(admission)
        for beams in plan.beams:
            self._place_beams(beams)
        for number, num_blocks in plan.trimmed:
            for table in self._row(number).tables:
                del table.block_ids[max(0, num_blocks - table.first) :]
        for number, group, block_ids in plan.appended:
            self._row(number).tables[group].block_ids.extend(block_ids)
        for number, group, index, block in plan.remapped:
            table = self._row(number).tables[group]
            table.block_ids[index - table.first] = block

    def _row(self, number: int) -> _Row:
        row = self.rows[number]
        assert row is not None, f"row {number} is named but holds nothing"
        return row

    def _take_row(self, row: _Row) -> None:
        assert self.rows[row.number] is None, f"{row} is given out again before it was released"
        self.rows[row.number] = row

    def _admit(self, new: Admission) -> None:
        block_ids = [block_id for _, block_ids in new.tables for block_id in block_ids]
        assert len(set(block_ids)) == len(block_ids), f"row {new.row}'s tables have a block twice"
        assert len(new.tables) == len(self._windows), f"row {new.row} has {len(new.tables)} tables"
        assert 0 <= new.num_computed_tokens < len(new.token_ids), f"row {new.row} comes with nothing left to compute"
        row = _Row(
            number=new.row,
            token_ids=list(new.token_ids),
            num_computed=new.num_computed_tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            tables=[
                SimTable(group, self._windows[group], first, list(block_ids))
                for group, (first, block_ids) in enumerate(new.tables)
            ],
            sampling=new.sampling,
            root=self.language.root(new.adapter),
        )
        self.language.extend(row.fingerprints, row.root, row.token_ids)
        self._take_row(row)

    def _fork(self, fork: Fork) -> None:
        source = self._row(fork.source_row)
        self._take_row(
            replace(
                source,
                number=fork.row,
                token_ids=list(source.token_ids),
                tables=[table.copy() for table in source.tables],
                sampling=fork.sampling,
                fingerprints=list(source.fingerprints),
            )
        )

    def _place_beams(self, group: BeamGroup) -> None:
        before = {parent: self._row(parent) for parent in group.parents}
        for number, parent, token in zip(group.rows, group.parents, group.tokens, strict=False):
            source = before[parent]
            assert source.num_computed == len(source.token_ids), f"{source} was ranked before it had its logits"
            row = self.rows[number] = replace(
                source,
                number=number,
                token_ids=[*source.token_ids, token],
                tables=[table.copy() for table in source.tables],
                fingerprints=list(source.fingerprints),
                is_ranked=False,
            )
            self.language.extend(row.fingerprints, row.root, row.token_ids)

    def _spans(self, plan: StepPlan) -> list[_Span]:
        """What runs, from where each row is."""
        found, spans = [], plan.spans
        for number, num_tokens, samples in zip(spans.rows, spans.num_tokens, spans.samples, strict=True):
            row = self._row(number)
            drafts = spans.drafts.get(number, [])
            if isinstance(drafts, int):
                assert num_tokens == 1 + drafts, f"{row} has {num_tokens} tokens with {drafts} drafts"
                drafts = self._drafter(row.token_ids, drafts) if self._drafter else []
                num_tokens = 1 + len(drafts)
            fingerprints = row.fingerprints
            if drafts:
                assert samples and num_tokens == 1 + len(drafts), f"{row} has {num_tokens} tokens and drafts {drafts}"
                fingerprints = list(fingerprints)
                self.language.extend(fingerprints, row.root, row.token_ids + drafts)
            found.append(_Span(row, row.num_computed, num_tokens, samples, drafts, fingerprints))
        return found

    def _check_writes(self, spans: list[_Span]) -> None:
        """Nobody writes a block that another row can read, unless it writes what that row expects there."""
        size = self.memory.block_size
        numbers = [span.row.number for span in spans]
        assert len(set(numbers)) == len(numbers), f"a row has two spans: {numbers}"
        holders: dict[int, list[_Row]] = {}
        for row in self.rows:
            if row is not None and not row.is_ranked:
                for table in row.tables:
                    for block in table.readable(row.num_computed, size):
                        holders.setdefault(block, []).append(row)
        for span in spans:
            self._check_span(span)
            for table in span.row.tables:
                for index in range(span.start // size, (span.end - 1) // size + 1):
                    first, last = max(span.start, index * size), min(span.end, (index + 1) * size)
                    block = table.block_at(index)
                    for other in holders[block]:
                        if other is not span.row:
                            assert other.fingerprints[first:last] == span.fingerprints[first:last], (
                                f"{span.row} writes block {block}, which {other} reads as something else"
                            )

    def _check_filled(self, plan: StepPlan, spans: list[_Span]) -> None:
        """What goes out with a step are blocks that a span of it fills."""
        size = self.memory.block_size
        filled = {
            (table.group, table.block_at(index))
            for span in spans
            for table in span.row.tables
            for index in range(span.start // size, span.end // size)
        }
        for move in plan.keyed_moves:
            if move.filled_group is not None:
                sent = {(move.filled_group, block) for block, _ in move.pairs}
                assert sent <= filled, f"move {move.ticket} sends blocks that step {plan.step} does not fill"

    def _check_span(self, span: _Span) -> None:
        row, num_known = span.row, len(span.row.token_ids)
        assert span.num_tokens > 0, f"{row} has an empty span"
        num_ran = span.end - len(span.drafts)
        assert num_ran <= num_known, f"{row} has no token at {num_ran - 1}"
        assert not span.samples or num_ran == num_known, f"{row} samples amid known tokens"
        room = min(table.end for table in row.tables) * self.memory.block_size
        assert span.end <= room, f"{row} has room for {room} tokens, its span ends at {span.end}"

    def _forward(self, spans: list[_Span], result: StepResult) -> None:
        """All of a step's tokens are written before any is read, as each layer does."""
        for span in spans:
            for table in span.row.tables if self._verify else ():
                self.memory.write(table, span.fingerprints, span.start, span.end)
            span.row.num_computed = span.end  # less the drafts that are not accepted
        for span in spans:
            row = span.row
            for table in row.tables if self._verify else ():
                self.memory.check_read(table, span.fingerprints, span.start, span.end, str(row))
            if row.sampling.prompt_logprobs is not None:
                piece = self._prompt_logprobs(span, row.sampling.prompt_logprobs)
                if piece:
                    result.prompt_logprobs[row.number] = piece

    def _prompt_logprobs(self, span: _Span, num_top: int) -> list[TokenLogprobs]:
        row, end = span.row, min(span.end, span.row.num_prompt_tokens - 1)
        positions = range(span.start, end)
        return [self.language.logprobs(row.fingerprints[p], row.token_ids[p + 1], num_top) for p in positions]

    def _sample(self, plan: StepPlan, spans: list[_Span], result: StepResult) -> None:
        for fork in plan.forks:
            self._fork(fork)
        drafts = {span.row.number: span.drafts for span in spans}
        beams = {number for group in plan.beams for number in group.rows}
        for index, number in enumerate(plan.sampled_rows()):
            if number in beams:
                result.tokens.append([])
                error = self._fault(self._row(number).token_ids) if self._fault else None
                if error is not None:
                    result.failed[index] = (FinishReason.ERROR, error)
                continue
            result.tokens.append(self._sample_row(self._row(number), drafts.get(number, []), index, result))

        result.candidates = [self._rank(group) for group in plan.beams]
        for number in beams:
            self._row(number).is_ranked = True

    def _rank(self, group: BeamGroup) -> list[BeamCandidate]:
        found = [
            BeamCandidate(i, token, score + logprob, logprob, rank)
            for i, (number, score) in enumerate(zip(group.rows, group.scores, strict=True))
            for rank, (token, logprob) in enumerate(
                self.language.likeliest(self._row(number).fingerprints[-1], group.num_candidates), start=1
            )
        ]
        return sorted(found, key=lambda one: -one.score)[: group.num_candidates]

    def _sample_row(self, row: _Row, drafts: list[int], index: int, result: StepResult) -> list[int]:
        """The token after the row's last one, and as long as drafts agree with it, the next."""
        tokens: list[int] = []
        while True:
            num_output = len(row.token_ids) - row.num_prompt_tokens
            token = self.language.next_token(row.fingerprints[-1], row.sampling, num_output)
            num_accepted = len(tokens)
            error = self._fault(row.token_ids) if self._fault else None
            if error is not None:
                result.failed[index] = (FinishReason.ERROR, error)  # a token for its next step, all the same
            else:
                if row.sampling.logprobs is not None:
                    entry = self.language.logprobs(row.fingerprints[-1], token, row.sampling.logprobs)
                    result.logprobs.setdefault(index, []).append(entry)
                tokens.append(token)
            row.token_ids.append(token)
            self.language.extend(row.fingerprints, row.root, row.token_ids)
            if error is not None or num_accepted == len(drafts) or token != drafts[num_accepted]:
                row.num_computed -= len(drafts) - num_accepted
                return tokens

    # -- transfers

    def _finish_moves(self, through_step: int, result: StepResult) -> None:
        """Bytes are moved as late as they may be, in the order of tickets."""
        while self._moving and self._moving[0][0] <= through_step:
            move = self._moving.popleft()[1]
            if isinstance(move, KeyedMove):
                is_useless = move.ticket in self._useless
                missing = self._stores[move.level].move(move, self.memory.device, is_useless=is_useless)
                if missing:
                    result.missing[move.ticket] = missing
            else:
                self.memory.move(move)
            result.moved.append(move.ticket)


def verified(cost: CostModel) -> Callable[[KVManager, SchedulerConfig, SimClock], Callable[[StepPlan], StepResult]]:
    """For `SimRun.build`: steps run here, so that every read and write of KV memory is checked."""

    def make(kv: KVManager, config: SchedulerConfig, clock: SimClock) -> Callable[[StepPlan], StepResult]:
        executor = SimExecutor(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            max_num_seqs=config.max_num_seqs,
            cost=cost,
            clock=clock,
        )
        return lambda plan: executor.collect(executor.submit(plan))

    return make
