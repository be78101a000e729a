"""The moves of a sequence: into the queue, onto a row, off it again, out.

             run                end
WAITING ----------> RUNNING ----------> FINISHED        from every state there is an end
                    |  ^  ^
            preempt |  |  | resume
                    |  |  LOADING
                    v  |  ^ load
             PREEMPTED |  |
                    SWAPPED

WAITING and PREEMPTED sequences load too, where levels below the device have their prefix; if not all of it comes, they
go back to what they were.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quire.kv import KVManager, TableSlices
from quire.plan import Admission, BeamCandidate, Fork, KeyedMove, Move, StepPlan
from quire.request import CacheOutcome, FinishReason, Request, Sequence, SequenceState
from quire.scheduler.beams import BeamSearch
from quire.scheduler.config import SchedulerConfig
from quire.scheduler.preemption import PreemptionKind
from quire.scheduler.queue import FairQueue, OrderedSequences, place
from quire.scheduler.types import SchedulerStats

_RUNNING = (SequenceState.RUNNING,)
_LOADING = (SequenceState.LOADING,)
_QUEUED = (SequenceState.WAITING, SequenceState.PREEMPTED, SequenceState.SWAPPED)


class RowPool:
    """Rows 0..num_rows-1. The lowest free row goes out first, which keeps the executor's batch dense.

    A row that an executor has seen must be named in a plan's `released` before it is given out again: `take_back`
    notes it, and the plan being made takes the notes with `take_released`. As an executor applies `released` first, the
    row may be given out again in that same plan. Trimmed tables are noted likewise.
    """

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._released: list[int] = []
        self._trimmed: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free)
        return [heapq.heappop(self._free) for _ in range(count)]

    def take_back(self, row: int) -> None:
        self._released.append(row)
        self._trimmed.pop(row, None)
        heapq.heappush(self._free, row)

    def take_back_unused(self, rows: list[int]) -> None:
        """Rows that were only reserved: the executor never heard of them."""
        for row in rows:
            heapq.heappush(self._free, row)

    def note_trimmed(self, row: int, num_blocks: int) -> None:
        self._trimmed[row] = num_blocks

    def take_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def take_trimmed(self) -> list[tuple[int, int]]:
        trimmed, self._trimmed = self._trimmed, {}
        return list(trimmed.items())


@dataclass(slots=True)
class Loading:
    """A sequence that waits for its blocks' bytes."""

    seq: Sequence
    tables: TableSlices
    tickets: set[int]  # of moves that are not over
    before: SequenceState
    outcome: CacheOutcome | None = None  # of the lookup, where blocks come from a level of the prefix cache
    num_below: int = 0  # tokens that the device did not have
    is_complete: bool = True  # nothing is missing so far


class Lifecycle:
    """Where every sequence is, and what it holds there.

    Each unfinished sequence is either in `queue` (WAITING, PREEMPTED, SWAPPED), without row and blocks, in `running`
    (RUNNING), with both, or in `loading` or `loaded` (LOADING), with both but unknown to the executor. Its request
    is in `requests` until the last of its sequences has ended.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, clock: Callable[[], float]) -> None:
        self.requests: dict[str, Request] = {}
        # A step's worth of tokens is what a tenant may be ahead of others when a queue forms.
        self.queue = FairQueue(
            prompt_token_weight=config.prompt_token_weight,
            output_token_weight=config.output_token_weight,
            max_credit=config.max_num_batched_tokens * config.prompt_token_weight,
        )
        self.running = OrderedSequences()
        self.num_swapped = 0
        self.next_ticket = 0
        self.moving: dict[int, int] = {}  # by ticket, until a move is over: how many blocks come free then
        self.awaited: list[int] = []  # tickets of loads that are over when the plan that has them is submitted
        self.loading: list[Loading] = []
        self.loaded: list[Loading] = []  # whose blocks have arrived
        self.rows = RowPool(config.max_num_seqs)
        # By seq_id, for n > 1 until the prompt is done: the rows of the sequences that will be forked from this one.
        self.reserved_rows: dict[int, list[int]] = {}
        self.lost_tokens: dict[int, int] = {}  # by seq_id: tokens whose KV a preemption dropped
        # By seq_id, until they are computed again: tokens that its tenant was charged for before the KV was dropped.
        self.paid_tokens: dict[int, int] = {}
        self.beams: dict[str, BeamSearch] = {}  # by request_id, from the end of its prompt on
        self.stats = SchedulerStats()
        self.config = config
        self._kv = kv
        self._clock = clock
        self._num_added = 0

    def enqueue(self, request: Request) -> None:
        order = place(self.config, request, self._num_added)
        request.sequences = []
        for index, output_token_ids in (request.continued or {0: []}).items():
            seq = Sequence(request, index, request.prompt_token_ids + output_token_ids)
            seq.order = (*order, index)
            seq.max_len = min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)
            if output_token_ids:  # from here on it is one that was preempted: its tokens are computed again, unpaid
                seq.state = SequenceState.PREEMPTED
                self.lost_tokens[seq.seq_id] = self.paid_tokens[seq.seq_id] = len(seq.token_ids) - 1
            request.sequences.append(seq)
            self.queue.add(seq)
        self._num_added += 1
        self.requests[request.request_id] = request

    def num_rows_for(self, seq: Sequence) -> int:
        """One, or one for each sequence of a request whose prompt is not done yet."""
        request = seq.request
        return request.n if len(request.sequences) == 1 and not request.continued else 1

    @property
    def has_one_only(self) -> bool:
        """Whether the head of the queue is the only sequence there is."""
        return len(self.queue) == 1 and not (self.running or self.loading or self.loaded)

    def is_beam(self, seq: Sequence) -> bool:
        """Whether it is one of several: its last token runs with theirs, and not before."""
        return bool(self.beams) and seq.request.request_id in self.beams

    def run(self, seq: Sequence, tables: TableSlices, plan: StepPlan) -> None:
        """Move a sequence from the queue onto a row."""
        self._take_row(seq)
        self._start(seq, tables, plan)

    def load(
        self,
        seq: Sequence,
        tables: TableSlices,
        tickets: Iterable[int],
        outcome: CacheOutcome | None = None,
        num_below: int = 0,
    ) -> None:
        """Move a sequence onto a row, where it waits for its blocks' bytes. Nobody behind it waits for them."""
        entry = Loading(seq, tables, set(tickets), seq.state, outcome, num_below)
        self._take_row(seq)
        seq.state = SequenceState.LOADING
        self.num_swapped -= entry.before is SequenceState.SWAPPED
        (self.loading if entry.tickets else self.loaded).append(entry)

    def on_loaded(self, ticket: int, is_complete: bool) -> None:
        """A move is over. Who waited for it last runs on, or begins anew if something did not come."""
        for entry in [entry for entry in self.loading if ticket in entry.tickets]:
            entry.tickets.discard(ticket)
            entry.is_complete &= is_complete
            if not entry.tickets:
                self.loading.remove(entry)
                if entry.is_complete:
                    self.loaded.append(entry)
                else:
                    self._begin_anew(entry)

    def _begin_anew(self, entry: Loading) -> None:
        """Back into the queue, at its old place. What did come is in the cache."""
        seq = entry.seq
        self._kv.free(seq.seq_id)
        self._give_up_load(seq)
        seq.state, seq.num_computed_tokens = entry.before, 0
        self.queue.add(seq)

    def resume(self, plan: StepPlan) -> None:
        """The first of those whose blocks have arrived runs on."""
        entry = self.loaded.pop(0)
        self._start(entry.seq, entry.tables, plan)

    def _take_row(self, seq: Sequence) -> None:
        seq.row, *reserved = self.rows.take(self.num_rows_for(seq))
        is_lone_beam = seq.request.beams is not None and seq.request.request_id not in self.beams
        if reserved or is_lone_beam:  # a search of one beam has none to fork, and its prompt's end is no plain decode
            self.reserved_rows[seq.seq_id] = reserved
        self.queue.on_run(seq)
        self.queue.drop(seq)

    def _start(self, seq: Sequence, tables: TableSlices, plan: StepPlan) -> None:
        assert seq.row is not None
        self.running.add(seq)
        seq.state = SequenceState.RUNNING
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = self._clock()
        request = seq.request
        plan.admitted.append(
            Admission(
                row=seq.row,
                token_ids=list(seq.token_ids),
                num_computed_tokens=seq.num_computed_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                tables=tables,
                sampling=request.spec_of(seq.index),
                adapter=request.adapter,
                pooling=request.pooling,
            )
        )

    def fork(self, seq: Sequence, plan: StepPlan) -> list[Sequence]:
        """The prompt is done with this step: the request's other sequences start from it, on their reserved rows."""
        assert seq.row is not None
        request, num_tokens = seq.request, len(seq.token_ids)
        children = []
        for index, row in enumerate(self.reserved_rows.pop(seq.seq_id), start=1):
            child = Sequence(request, index, list(seq.token_ids), state=SequenceState.RUNNING)
            child.num_computed_tokens, child.num_pending_tokens = num_tokens, 1
            child.row = row
            child.order, child.max_len = (*seq.order[:-1], index), seq.max_len
            child.num_cached_tokens, child.cache_outcome = seq.num_cached_tokens, seq.cache_outcome
            child.first_scheduled_s = seq.first_scheduled_s
            self._kv.fork(seq.seq_id, child.seq_id)
            request.sequences.append(child)
            self.running.add(child)
            self.queue.on_run(child)
            plan.forks.append(Fork(seq.row, row, request.spec_of(index)))
            children.append(child)
        return children

    def place_beams(self, search: BeamSearch, placed: list[BeamCandidate]) -> None:
        """Each of the request's sequences becomes a candidate: its parent's tokens and blocks, and a token more."""
        seqs = search.request.sequences
        lines = [[*seqs[each.parent].token_ids, each.token_id] for each in placed]
        for i, (seq, each) in enumerate(zip(seqs, placed, strict=True)):
            if each.parent != i:
                self._kv.free(seq.seq_id)
                self._kv.fork(seqs[each.parent].seq_id, seq.seq_id)
        for seq, line in zip(seqs, lines, strict=True):
            seq.token_ids = line

    def preempt_beams(self, search: BeamSearch, plan: StepPlan) -> None:
        """All beams of a request that run. They are computed again: a swap would copy what they share for each."""
        search.parents = []  # whoever comes back brings its tokens
        for seq in search.request.sequences:
            if seq.state is SequenceState.RUNNING:
                self.preempt(seq, PreemptionKind.RECOMPUTE, plan)

    def charge_chunk(self, seq: Sequence, start: int, end: int) -> None:
        """Charge its tenant for tokens [start, end), less what was computed and paid for before a preemption."""
        if self.paid_tokens and seq.seq_id in self.paid_tokens:
            num_paid = self.paid_tokens[seq.seq_id]
            start = max(start, min(end, num_paid))
            if end >= num_paid:
                del self.paid_tokens[seq.seq_id]
        num_sampled = self.num_rows_for(seq) if end == len(seq.token_ids) else 0
        self.queue.charge(seq, num_prompt_tokens=end - start, num_output_tokens=num_sampled)

    def preempt(self, seq: Sequence, kind: PreemptionKind, plan: StepPlan) -> int:
        """Off its row and back into the queue, at its old place. Tokens in flight are appended when they come.

        Returns how many of its blocks come free only when they are on the host.
        """
        num_computed = seq.num_computed_tokens
        seq.num_unverified_drafts = 0
        self._kv.commit(seq.seq_id, seq.token_ids, num_computed)
        pairs = None
        if kind is PreemptionKind.SWAP:
            pairs = self._kv.swap_out(seq.seq_id, num_computed, self.next_ticket)
        if pairs is None:  # by choice, or because the host pool is full
            self._kv.free(seq.seq_id)
            seq.state = SequenceState.PREEMPTED
            seq.num_computed_tokens = 0
            self.lost_tokens[seq.seq_id] = num_computed
            self.paid_tokens[seq.seq_id] = max(num_computed, self.paid_tokens.get(seq.seq_id, 0))
            self.stats.num_recompute_preemptions += 1
        else:
            self.move(plan, False, pairs)
            seq.state = SequenceState.SWAPPED
            self.num_swapped += 1
            self.stats.num_swap_preemptions += 1
        seq.num_preemptions += 1
        self.queue.add(seq)
        self._leave_row(seq)
        return len(pairs or ())

    def take_ticket(self) -> int:
        self.next_ticket += 1
        return self.next_ticket - 1

    def move(self, plan: StepPlan, is_load: bool, pairs: list[tuple[int, int]]) -> None:
        """Enter a swap under the next ticket."""
        ticket = self.take_ticket()
        if pairs:
            self.moving[ticket] = 0 if is_load else len(pairs)
            plan.moves.append(Move(ticket, is_load, pairs))

    def enter_moves(self, plan: StepPlan, moves: Iterable[Move | KeyedMove]) -> None:
        """Moves between the device and levels below it. Nobody counts on the blocks of those that go out."""
        for move in moves:
            self.moving[move.ticket] = 0
            if isinstance(move, KeyedMove):
                plan.keyed_moves.append(move)
            else:
                plan.moves.append(move)

    def enter_awaited(self, plan: StepPlan, moves: Iterable[Move]) -> None:
        """Loads that the plan's own step waits for on the device."""
        for move in moves:
            self.awaited.append(move.ticket)
            plan.moves.append(replace(move, is_awaited=True))

    def take_in_awaited(self) -> None:
        """Their plan was submitted. What comes is named only now, and not while that plan was made: the device is at
        work meanwhile."""
        awaited, self.awaited = self.awaited, []
        for ticket in awaited:
            self._kv.moves_done(ticket)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """The one exit: gives back whatever the sequence holds, in whatever state it is."""
        if seq.state is SequenceState.RUNNING:
            has_failed = reason is FinishReason.ERROR  # and may have left bad KV
            if not has_failed:
                self._kv.commit(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            self._kv.free(seq.seq_id, distrust=has_failed)
            self._leave_row(seq)
        elif seq.state is SequenceState.LOADING:
            self._kv.free(seq.seq_id)
            self._give_up_load(seq)
        else:
            self.queue.drop(seq)
            if seq.state is SequenceState.SWAPPED:
                self._kv.drop_swapped(seq.seq_id)
                self.num_swapped -= 1
        self.lost_tokens.pop(seq.seq_id, None)
        self.paid_tokens.pop(seq.seq_id, None)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = reason
        seq.finished_s = self._clock()
        self.stats.num_finished += 1
        request = seq.request
        if all(one.state is SequenceState.FINISHED for one in request.sequences):
            request.is_finished = True
            self.beams.pop(request.request_id, None)
            del self.requests[request.request_id]

    def check(self) -> None:
        """Prove what the class says of itself; AssertionError says what is wrong."""
        seqs = [seq for request in self.requests.values() for seq in request.sequences]
        assert self.running == sorted(self.running, key=lambda seq: seq.order), "running sequences are not in order"
        self.queue.check()
        waiting_for_blocks = [entry.seq for entry in (*self.loading, *self.loaded)]
        assert all(entry.tickets <= self.moving.keys() for entry in self.loading), "someone waits for no move"
        num_running = Counter(seq.request.tenant for seq in (*self.running, *waiting_for_blocks))
        assert all(num_running[t.name] == t.num_running for t in self.queue.tenants.values()), "tenants do not add up"
        places = ((list(self.running), _RUNNING), (list(self.queue), _QUEUED), (waiting_for_blocks, _LOADING))
        for here, states in places:
            should_be = {seq.seq_id for seq in seqs if seq.state in states}
            assert len(here) == len(should_be) and {seq.seq_id for seq in here} == should_be, f"{states} do not add up"
        with_rows = {seq.seq_id for seq in (*self.running, *waiting_for_blocks)}
        rows = [seq.row for seq in (*self.running, *waiting_for_blocks)]
        rows += [row for rows in self.reserved_rows.values() for row in rows]
        assert None not in rows and len(set(rows)) == len(rows), f"a row is held twice, or a sequence has none: {rows}"
        assert len(rows) + self.rows.num_free == self.config.max_num_seqs, "rows do not add up"
        assert all(seq.row is None for seq in self.queue), "a sequence in the queue has a row"
        assert self.reserved_rows.keys() <= with_rows, "rows are reserved for a sequence that has none"
        assert with_rows == self._kv.tables.keys(), "blocks are not with those that run"
        swapped = {seq.seq_id for seq in self.queue if seq.state is SequenceState.SWAPPED}
        assert swapped == self._kv.swapped.keys() and len(swapped) == self.num_swapped, "swapped ones do not add up"

    def _give_up_load(self, seq: Sequence) -> None:
        """The executor has not heard of its row yet."""
        assert seq.row is not None
        self.loading = [entry for entry in self.loading if entry.seq is not seq]
        self.loaded = [entry for entry in self.loaded if entry.seq is not seq]
        self.rows.take_back_unused([seq.row])
        self._forget_row(seq)

    def _leave_row(self, seq: Sequence) -> None:
        assert seq.row is not None
        self.rows.take_back(seq.row)
        self.running.drop(seq)
        self._forget_row(seq)

    def _forget_row(self, seq: Sequence) -> None:
        self.rows.take_back_unused(self.reserved_rows.pop(seq.seq_id, []))
        self.queue.on_leave(seq)
        seq.row = None
