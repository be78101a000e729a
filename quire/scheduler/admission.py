"""Prompts: the chunks of those under way, and who is admitted from the queue.

Requests that could never run are refused when they come. A head of the queue that did not fit is looked at again only
when something has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.errors import BadRequestError
from quire.kv import UNCHANGED, KVManager, PrefixMatch, TableSlices
from quire.plan import Move
from quire.request import CacheOutcome, Request, Sequence, SequenceState
from quire.scheduler.beams import BeamSearch
from quire.scheduler.config import SchedulerConfig
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.preemption import Room
from quire.scheduler.results import PromptLogprobs
from quire.scheduler.step import StepBuilder
from quire.scheduler.types import SchedulerStats, WaitReason
from quire.step_costs import StepCosts

_AWAITED_LOAD_S = 0.03  # at most: who comes meanwhile waits for the step that waits


def refuse_if_it_never_fits(request: Request, config: SchedulerConfig, kv: KVManager) -> None:
    """Raise BadRequestError if the request could not be served even alone."""
    num_prompt = request.num_prompt_tokens
    if not num_prompt:
        raise BadRequestError("the prompt is empty: it needs at least one token", param="prompt")
    request.check_limits(config.max_model_len, config.max_num_seqs)
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        instead = "set enable_chunked_prefill=True" if kv.windows else "shorten it: an encoder computes it in one step"
        raise BadRequestError(
            f"the prompt has {num_prompt} tokens and a step computes at most max_num_batched_tokens="
            f"{config.max_num_batched_tokens}: raise it, or {instead}",
            param="prompt",
        )
    # The last token that is sampled needs no KV.
    num_tokens = max(num_prompt, min(num_prompt + request.max_tokens, config.max_model_len) - 1)
    if request.beams is not None:
        num_blocks = kv.num_blocks_for_beams(num_prompt, num_tokens, request.n)
        if num_blocks > kv.num_blocks:
            raise BadRequestError(
                f"{request.n} beams of {num_prompt} prompt tokens and max_tokens={request.max_tokens} may need "
                f"{num_blocks} blocks of {kv.block_size} tokens, the KV cache has {kv.num_blocks}: lower beam_width or "
                f"max_tokens",
                param="beam_width",
            )
    elif not kv.can_ever_fit(num_tokens):
        param = "max_tokens" if kv.can_ever_fit(num_prompt) else "prompt"
        raise BadRequestError(
            f"{num_prompt} prompt tokens with max_tokens={request.max_tokens} need {kv.num_blocks_for(num_tokens)} "
            f"blocks of {kv.block_size} tokens, the KV cache has {kv.num_blocks}: lower {param}",
            param=param,
        )


@dataclass(slots=True, frozen=True)
class BlockedHead:
    """The head of the queue that did not fit, and the state it met. It saves looking up a long prompt at every step."""

    seq_id: int
    match: PrefixMatch | None
    num_free_blocks: int
    num_prefill_tokens: int

    @property
    def num_matched_blocks(self) -> int:
        return len(self.match.block_ids) if self.match is not None else 0

    def lacks_blocks(self, seq: Sequence, kv: KVManager) -> bool:
        """True while it is this sequence that waits, and no more blocks are free than when it did not fit."""
        return self.seq_id == seq.seq_id and kv.num_free_blocks <= self.num_free_blocks

    def holds(self, seq: Sequence, kv: KVManager, stats: SchedulerStats) -> bool:
        """True while it lacks blocks and no prompt has filled any that it could share: no need to look again."""
        return (
            self.lacks_blocks(seq, kv)
            and bool(kv.tables)  # someone runs, whose end will change things
            and stats.num_prefill_tokens == self.num_prefill_tokens
        )


class Prompts:
    """Gives what decodes leave of a step's budget to prompts: first to those that run, then to the queue's head."""

    def __init__(
        self, life: Lifecycle, kv: KVManager, room: Room, costs: StepCosts, prompt_logprobs: PromptLogprobs
    ) -> None:
        self._life = life
        self._kv = kv
        self._room = room
        self._costs = costs
        self._prompt_logprobs = prompt_logprobs
        self.blocked_on: WaitReason | None = None  # what the queue's head waits for
        self.refusal: BlockedHead | None = None

    def schedule_chunks(self, step: StepBuilder) -> None:
        queue = self._life.queue
        is_shared = queue.is_shared
        if is_shared:
            step.catching_up.sort(key=queue.counter_of)
        for seq in step.catching_up:
            if seq.state is not SequenceState.RUNNING:
                continue  # preempted above
            if is_shared:  # a tenant's long prompt is not before another's that has had less
                self.admit(step, below=queue.counter_of(seq))
            num_wanted = len(seq.token_ids) - seq.num_computed_tokens - self._life.is_beam(seq)
            size = self._chunk_size(num_wanted, step)
            if not size:
                continue
            # A prompt has its blocks. Only one that caught several new tokens at once may have to grow.
            allocation = self._kv.grow(seq.seq_id, len(seq.token_ids), seq.num_computed_tokens)
            if allocation is UNCHANGED or self._room.take(seq, len(seq.token_ids), allocation, step):
                self._add_chunk(seq, size, step)

    def _chunk_size(self, num_wanted: int, step: StepBuilder) -> int:
        """How many of a sequence's tokens this step takes; 0: not its turn."""
        if self._life.config.enable_chunked_prefill:
            return min(num_wanted, step.budget, self._life.config.long_prefill_token_threshold or num_wanted)
        # Whole or not at all, but for those that grew past a whole step's budget before they were preempted.
        if num_wanted <= step.budget or num_wanted > self._life.config.max_num_batched_tokens:
            return min(num_wanted, step.budget)
        return 0

    def _add_chunk(self, seq: Sequence, size: int, step: StepBuilder) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = start + size
        samples = end == len(seq.token_ids)
        step.add_chunk(seq, start, size, samples)
        self._life.charge_chunk(seq, start, end)
        # Committed at once: who is admitted later in this step may read what this one writes in it.
        self._kv.commit(seq.seq_id, seq.token_ids, end)
        if samples:
            seq.num_pending_tokens = 1
            if seq.seq_id in self._life.reserved_rows:
                step.forked.extend(self._life.fork(seq, step.plan))
            if seq.request.beams is not None:
                search = self._life.beams[seq.request.request_id] = BeamSearch(seq.request)
                step.beams.append(search)

    def admit(self, step: StepBuilder, below: float = math.inf) -> None:
        """Admit from the head of the queue until one does not fit; only tenants whose counters are `below`."""
        self._resume_loaded(step)
        self.blocked_on = WaitReason.BLOCKS if step.short_of_blocks else None
        queue = self._life.queue
        while queue and self.blocked_on is None:
            seq = queue.head
            if queue.counter_of(seq) >= below:
                return
            if seq.num_pending_tokens:
                self.blocked_on = WaitReason.IN_FLIGHT
            elif step.budget <= 0:
                self.blocked_on = WaitReason.BUDGET
            elif self._life.rows.num_free < self._life.num_rows_for(seq):
                self.blocked_on = WaitReason.ROWS
            elif self._waits_for_first_beam(seq):
                self.blocked_on = WaitReason.BEAMS
            elif self.refusal is not None and self.refusal.holds(seq, self._kv, self._life.stats):
                self.blocked_on = WaitReason.BLOCKS
            elif seq.state is SequenceState.SWAPPED:
                self.blocked_on = self._swap_in(seq, step)
            else:
                self.blocked_on = self._start(seq, step)

    def _waits_for_first_beam(self, seq: Sequence) -> bool:
        """Beams that come back after a preemption find what they share in the cache when one of them has it."""
        if not self._life.is_beam(seq):
            return False
        first = seq.request.sequences[0]
        return seq is not first and first.num_computed_tokens < len(first.token_ids) - 1

    def _start(self, seq: Sequence, step: StepBuilder) -> WaitReason | None:
        """Blocks for all tokens of a new or preempted sequence, less what the prefix cache has."""
        match = self._match(seq)
        below = self._match_below(seq, match)
        num_cached = match.num_tokens if match else 0
        size = self._chunk_size(len(seq.token_ids) - num_cached - self._life.is_beam(seq), step)
        if below is None and not size:
            return WaitReason.BUDGET
        request = seq.request
        is_back = seq.state is SequenceState.PREEMPTED
        tables = self._kv.admit(
            seq.seq_id, seq.token_ids, below or match, salt=request.salt, adapter=request.adapter, recompute=is_back
        )
        if tables is None:
            return self._refuse(seq, match)
        if self._kv.tiers is not None and match is not None:
            self._kv.tiers.counters.num_queries += len(seq.token_ids) - num_cached
        if below is not None:
            self._load(seq, below, tables, below.num_tokens - num_cached, step)
            return None
        seq.num_computed_tokens = num_cached
        self._note_cached(seq, match.outcome if match else CacheOutcome.SKIPPED)
        self._life.run(seq, tables, step.plan)
        self._add_chunk(seq, size, step)
        return None

    def _load(self, seq: Sequence, below: PrefixMatch, tables: TableSlices, num_below: int, step: StepBuilder) -> None:
        """Blocks of an admitted sequence come from below the device. It runs when they have come; at once, in a step
        that waits for them on the device, where that step is its own and the wait is short."""
        is_alone = not below.tickets and below.load_s <= _AWAITED_LOAD_S and self._life.has_one_only
        moves = self._kv.start_loads(seq.seq_id, below, seq.token_ids, self._life.take_ticket)
        seq.num_computed_tokens = below.num_tokens
        size = self._chunk_size(len(seq.token_ids) - below.num_tokens, step)
        host_moves = [move for move in moves if isinstance(move, Move)]  # others may not bring what they should
        if not is_alone or not size or len(host_moves) < len(moves):
            self._life.enter_moves(step.plan, moves)
            self._life.load(seq, tables, below.tickets, below.outcome, num_below)
            return
        self._life.enter_awaited(step.plan, host_moves)
        self._note_loaded(seq, below.outcome, num_below)
        self._life.run(seq, tables, step.plan)
        self._add_chunk(seq, size, step)

    def _note_loaded(self, seq: Sequence, outcome: CacheOutcome, num_below: int) -> None:
        assert self._kv.tiers is not None
        self._note_cached(seq, outcome)
        self._kv.tiers.counters.num_hits += num_below

    def _note_cached(self, seq: Sequence, outcome: CacheOutcome) -> None:
        """A sequence is about to run, with the tokens computed that were found."""
        num_lost = self._life.lost_tokens.pop(seq.seq_id, None)
        if num_lost is not None:  # it was preempted
            num_lost = max(0, num_lost - seq.num_computed_tokens)
            seq.num_recomputed_tokens += num_lost
            self._life.stats.num_recomputed_tokens += num_lost
        else:
            seq.num_cached_tokens, seq.cache_outcome = seq.num_computed_tokens, outcome

    def _match_below(self, seq: Sequence, match: PrefixMatch | None) -> PrefixMatch | None:
        if match is None or self._kv.tiers is None or self._life.is_beam(seq):  # beams come back together, and compute
            return None
        request = seq.request
        return self._kv.match_below(
            match,
            seq.token_ids,
            salt=request.salt,
            adapter=request.adapter,
            prefill_tokens_per_s=self._costs.prefill_tokens_per_s,
        )

    def _match(self, seq: Sequence) -> PrefixMatch | None:
        request = seq.request
        if request.skip_prefix_cache_read or self._prompt_logprobs.are_missing(seq):
            return None
        refusal = self.refusal
        previous = refusal.match if refusal and refusal.seq_id == seq.seq_id else None
        # A beam's last token runs with the others', and so that it has any before that, its last but one runs too.
        token_ids = seq.token_ids[:-1] if self._life.is_beam(seq) else seq.token_ids
        return self._kv.match(token_ids, salt=request.salt, adapter=request.adapter, previous=previous)

    def _swap_in(self, seq: Sequence, step: StepBuilder) -> WaitReason | None:
        """Blocks for a swapped sequence, and the move that fills them. It runs when they have arrived."""
        swapped = self._kv.swap_in(seq.seq_id, seq.token_ids, self._life.next_ticket)
        if swapped is None:
            return self._refuse(seq, None)
        pairs, tables = swapped
        self._life.load(seq, tables, [self._life.next_ticket] if pairs else [])  # it may have computed nothing
        self._life.move(step.plan, True, pairs)
        return None

    def _resume_loaded(self, step: StepBuilder) -> None:
        """Sequences whose blocks have arrived go on, before anybody new is admitted."""
        while self._life.loaded:
            entry = self._life.loaded[0]
            seq = entry.seq
            size = self._chunk_size(len(seq.token_ids) - seq.num_computed_tokens, step)
            if not size:
                return
            if entry.outcome is not None:
                self._note_loaded(seq, entry.outcome, entry.num_below)
            self._life.resume(step.plan)
            self._add_chunk(seq, size, step)

    def _refuse(self, seq: Sequence, match: PrefixMatch | None) -> WaitReason:
        self.refusal = BlockedHead(seq.seq_id, match, self._kv.num_free_blocks, self._life.stats.num_prefill_tokens)
        return WaitReason.BLOCKS
