"""The scheduler: which sequences run how many tokens in which blocks, step by step.

There is no prefill phase and no decode phase: a sequence has num_computed_tokens and wants to reach the tokens it has.
A step gives its token budget first to decodes, then to chunks of running prompts, then to who waits; within each of
these, in the order of `queue.place`. Where several tenants are about, prompts of the one that has had least go first,
running or waiting (`queue`).

Blocks: admission takes them for every token known, so chunks never allocate. Only decodes grow, and only growth
preempts, but for a tenant that runs nothing, for which others make way. Who is preempted finds no room again before
someone ends, so somebody always gets on and nothing thrashes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from quire.errors import BadRequestError
from quire.kv import UNCHANGED, KVManager
from quire.plan import BeamCandidate, StepPlan, StepResult
from quire.request import FinishReason, Request, Sequence, SequenceState
from quire.scheduler.admission import Prompts, refuse_if_it_never_fits
from quire.scheduler.beams import BeamSearch, schedule_beams
from quire.scheduler.config import SchedulerConfig
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.preemption import Room, pick_victim_for_fairness
from quire.scheduler.results import PromptLogprobs, append_until_stop
from quire.scheduler.step import InFlight, StepBuilder, SubmittedDrafts
from quire.scheduler.traffic import BlockTraffic
from quire.scheduler.types import Drafter, SchedulerStats, SequenceUpdate, TenantLoad
from quire.step_costs import StepCosts, StepKind

_PLENTY = 0.5  # of all blocks: while so many are free, sequences keep those that their drafts did not need
_BACKLOG_STEPS = 4  # smooth steps work off a quarter of what waits

# Looked up once: reading an enum's member costs as much as the rest of a sequence's turn in a loop.
_RUNNING, _FINISHED = SequenceState.RUNNING, SequenceState.FINISHED


class Scheduler:
    """Owns the state of every sequence. Not thread-safe: one loop calls it."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._kv = kv
        self._clock = clock
        self._life = Lifecycle(config, kv, clock)
        self.traffic = BlockTraffic(self._life, kv)  # with other engines
        self.costs = StepCosts(prefill_tokens_per_s=config.prefill_tokens_per_s, plans_ahead=config.max_in_flight > 1)
        self._room = Room(self._life, kv, self.costs)
        self.target_step_s = None if config.target_step_ms is None else config.target_step_ms / 1e3
        self._prompts_match_decodes = False
        self._next_step = 0
        self._in_flight: deque[InFlight] = deque()
        self._prefill_limit: int | None = None
        self._smooth_tokens: Callable[[int], int] | None = None
        self._prompt_logprobs = PromptLogprobs()
        self._prompts = Prompts(self._life, kv, self._room, self.costs, self._prompt_logprobs)
        self._failures: list[SequenceUpdate] = []
        self.drafter: Drafter | None = None  # guesses tokens, for the executor to verify
        # Whether all requests are of one batch that is complete, and whoever gave it waits for its end.
        self.is_whole_batch = False
        # The tokens that a sequence's grammar leaves no choice of: verified like guesses, and always right.
        self.forced_tokens: Callable[[Sequence], list[int]] | None = None

    # -- what there is

    @property
    def stats(self) -> SchedulerStats:
        return self._life.stats

    @property
    def has_work(self) -> bool:
        is_busy = self._life.requests or self._in_flight or self._life.moving or self._failures or self.traffic.has_work
        return bool(is_busy) or (self._kv.tiers is not None and self._kv.tiers.has_stores_waiting)

    @property
    def num_waiting(self) -> int:
        """New and preempted sequences; swapped ones are counted apart."""
        return len(self._life.queue) - self._life.num_swapped

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of all sequences in the queue, preempted and swapped ones too."""
        return self._life.queue.num_waiting_tokens

    @property
    def takes_newcomers(self) -> bool:
        """Whether a request that came now would likely be in the next step: nobody was left waiting by the last, and
        there is a row."""
        return self._prompts.blocked_on is None and len(self._life.queue) < self._life.rows.num_free

    @property
    def requests(self) -> dict[str, Request]:
        """Requests that have not ended, by id, the earliest first."""
        return self._life.requests

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a row and blocks, in the order in which they are served. To be read only."""
        return self._life.running

    @property
    def num_running(self) -> int:
        return len(self._life.running)

    @property
    def num_swapped(self) -> int:
        """Sequences whose blocks are on the host, or on their way back."""
        life = self._life
        return life.num_swapped + len(life.loading) + len(life.loaded)

    @property
    def num_loading(self) -> int:
        """Sequences that wait for blocks to come back, from swap or from a level below."""
        return len(self._life.loading)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """The queue is strict: what its head waits for, everyone behind it waits for."""
        queue, reason = self._life.queue, self._prompts.blocked_on
        return {reason.value: len(queue)} if queue and reason else {}

    @property
    def tenant_loads(self) -> dict[str, TenantLoad]:
        """Tenants that wait or run, by name."""
        return {
            name: TenantLoad(len(tenant.waiting), tenant.num_running, tenant.num_waiting_tokens, tenant.counter)
            for name, tenant in self._life.queue.tenants.items()
            if not tenant.is_idle
        }

    def set_prefill_limit(self, num_tokens: int | None) -> None:
        """At most so many prompt tokens in steps that also decode; None: as many as the budget has.

        Prompts that may not be split (enable_chunked_prefill=False) and are longer wait for a step without decodes.
        """
        assert num_tokens is None or num_tokens > 0, f"a prefill limit must be > 0 or None, not {num_tokens}"
        self._prefill_limit = num_tokens

    def smooth_steps(self, prompt_tokens: Callable[[int], int]) -> None:
        """In steps that also decode, about so many prompt tokens beside a number of decodes, so that who reads along
        does not see them stall; more when more wait, so that a backlog is worked off in a few steps all the same."""
        self._smooth_tokens = prompt_tokens if self.config.enable_chunked_prefill else None

    def set_target_step(self, seconds: float) -> None:
        """What `target_step_ms` does, for an engine that learns only after it is built whether somebody reads along.

        Nobody asked for this time, so prompts get at least as much of a step as its decodes: those of a large model
        may take longer than that on their own, and prompts would be computed a block at a time.
        """
        self.target_step_s = seconds if self.config.enable_chunked_prefill else None
        self._prompts_match_decodes = True

    # -- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Refuses, with the numbers, what could never run."""
        self.check_new(request)
        self._life.enqueue(request)

    def check_new(self, request: Request) -> None:
        """Raises BadRequestError where `add` would."""
        if request.request_id in self._life.requests:
            raise BadRequestError(f"request id {request.request_id!r} is in use: choose another", param="request_id")
        refuse_if_it_never_fits(request, self.config, self._kv)

    def abort(self, request_id: str) -> list[SequenceUpdate]:
        """End a request, wherever it is. Its blocks are free at once; tokens in flight are dropped when they come."""
        updates = self._take_failures_of(request_id)
        request = self._life.requests.get(request_id)
        if request is not None:
            updates += [self._end(seq, FinishReason.ABORT) for seq in request.sequences if seq.state is not _FINISHED]
        return updates

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End one sequence for a cause that only its reader sees, such as a stop string. False: it has ended before."""
        if seq.state is _FINISHED:
            return False
        seq.stop_reason = stop_reason
        self._end(seq, reason)
        return True

    def give_up(self, request: Request, reason: FinishReason, error: str) -> None:
        """End a request that waits, with a cause that was found after it came."""
        self._failures += [self._end(seq, reason, error) for seq in request.sequences]

    def take_failures(self) -> list[SequenceUpdate]:
        """Sequences that `schedule()` had to give up. `update()` returns them too: this is for when no step runs."""
        failures, self._failures = self._failures, []
        return failures

    def _take_failures_of(self, request_id: str) -> list[SequenceUpdate]:
        """The updates of a request that was given up and that nobody has heard of yet."""
        own = [update for update in self._failures if update.seq.request.request_id == request_id]
        if own:
            self._failures = [update for update in self._failures if update.seq.request.request_id != request_id]
        return own

    # -- a step is planned

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or nothing to do before a result comes.

        May be called again before the last plan's result is in, up to max_in_flight. An empty plan is to be submitted
        like any other: it waits for block transfers, without which nobody can run.
        """
        if self._life.awaited:
            self._life.take_in_awaited()
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        while True:
            step = StepBuilder(StepPlan(self._next_step), budget=self.config.max_num_batched_tokens)
            step.num_coming_blocks = sum(self._life.moving.values())
            if self._kv.tiers is not None:
                self._life.enter_moves(step.plan, self._kv.tiers.start_stores(self._life.take_ticket))
            self.traffic.plan(step.plan)
            if self._life.queue.is_shared and (
                victim := pick_victim_for_fairness(self._life, self._kv, self._prompts.refusal, step)
            ):
                self._room.preempt(victim, step)
                self.stats.num_yields += 1
            self._schedule_decodes(step)
            self._prompts.schedule_chunks(step)
            self._prompts.admit(step)
            if not step.is_idle or (self._life.moving and not self._in_flight):
                return self._issue(step)
            if self._in_flight or not self._life.queue:
                return None
            if not self._preempt_waiting_beams(step):
                self._give_up_head()

    def _schedule_decodes(self, step: StepBuilder) -> None:
        """Every running sequence that lacks just its last token. The one loop that runs for thousands each step."""
        grow, unforked = self._kv.grow, self._life.reserved_rows
        decodes, catching_up = step.decodes, step.catching_up
        beams = self._life.beams
        drafts: Mapping[int, list[int] | int] = {}
        may_force = self.forced_tokens is not None
        num_stages = self.config.num_stages
        most = None if num_stages == 1 else -(-len(self._life.running) // num_stages)
        if self.drafter is not None and self._life.running:
            running = self._life.running
            drafted = [seq for seq in running if not self._life.is_beam(seq)] if beams else running
            is_last = self.is_whole_batch and not self._life.queue  # else those who end make way for others
            drafts = self.drafter.draft(drafted, step.budget - len(running), ends_together=is_last)
        # A preemption inside takes the list's last sequence away, which iteration over a list allows. With several
        # tenants it may be any.
        for seq in self._still_running() if self._life.queue.is_shared else self._life.running:
            if beams and (search := beams.get(seq.request.request_id)) is not None:
                schedule_beams(seq, search, step, self._kv, self._room)
                continue
            start = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens
            if start != num_tokens - 1 or (unforked and seq.seq_id in unforked):
                catching_up.append(seq)
                continue
            if most is not None and (seq.num_pending_tokens or len(decodes) + len(step.verifying) >= most):
                continue  # its token is still in the pipeline, or another step will have it
            unverified = seq.num_unverified_drafts
            if num_tokens + unverified >= seq.max_len:
                continue  # its last token is, or may be, in flight
            guess: list[int] | int = drafts.get(seq.seq_id, 0) if drafts else 0
            if (guess or may_force) and self._schedule_verification(seq, num_tokens, guess, step):
                continue
            allocation = grow(seq.seq_id, num_tokens, start, unverified)
            if allocation is not UNCHANGED and not self._room.take(seq, num_tokens, allocation, step):
                continue
            seq.num_computed_tokens = num_tokens
            seq.num_pending_tokens += 1
            decodes.append(seq)
        served = decodes + step.verifying if step.verifying else decodes
        step.budget -= len(served) + step.num_draft_tokens
        self._life.queue.charge_decodes(served, self._life.running, catching_up)
        if not served:
            return
        if self.target_step_s is not None:
            within_s = self.target_step_s
            if self._prompts_match_decodes:
                within_s = max(within_s, 2 * self.costs.decodes_s)
            if step.num_draft_tokens:
                within_s -= self.costs.drafts_s(len(served), step.num_draft_tokens)
            # One block at least: prompts never starve.
            allowance = max(self._kv.block_size, self.costs.prompt_tokens_within(within_s))
            step.budget = min(step.budget, allowance)
        if self._prefill_limit is not None:
            step.budget = min(step.budget, self._prefill_limit)
        if self._smooth_tokens is not None:
            backlog = self._life.queue.num_waiting_tokens
            backlog += sum(len(seq.token_ids) - seq.num_computed_tokens for seq in catching_up)
            step.budget = min(step.budget, max(self._smooth_tokens(len(served)), backlog // _BACKLOG_STEPS))

    def _schedule_verification(
        self, seq: Sequence, num_tokens: int, drafts: list[int] | int, step: StepBuilder
    ) -> bool:
        """A decode with drafts, if there are any. Nobody waits for a guess: it takes what budget the others' decodes
        leave, and blocks that are free."""
        unverified = seq.num_unverified_drafts
        most = min(
            step.budget - len(self._life.running) - step.num_draft_tokens, seq.max_len - num_tokens - unverified - 1
        )
        if most <= 0:
            return False
        are_forced = False
        if self.forced_tokens is not None and seq.request.spec.is_constrained and (forced := self.forced_tokens(seq)):
            drafts, are_forced = forced, True
        if isinstance(drafts, int):
            size = drafts = min(drafts, most)
        else:
            drafts = drafts if len(drafts) <= most else drafts[:most]
            size = len(drafts)
        if not size:
            return False
        allocation = self._kv.grow(seq.seq_id, num_tokens, seq.num_computed_tokens, unverified + size)
        if allocation is None:
            return False
        if allocation is not UNCHANGED:
            self._room.enter(seq, allocation, step.plan)
        seq.num_computed_tokens = num_tokens
        seq.num_pending_tokens += 1
        seq.num_unverified_drafts = unverified + size
        step.verifying.append(seq)
        step.drafts.append(drafts)
        step.submitted.append(SubmittedDrafts(size, seq.num_preemptions, are_forced))
        step.num_draft_tokens += size
        return True

    def _still_running(self) -> Iterable[Sequence]:
        return (seq for seq in list(self._life.running) if seq.state is _RUNNING)

    def _issue(self, step: StepBuilder) -> StepPlan:
        self.traffic.plan_filled(step)
        plan, memory = step.issue(self._life.rows.take_released(), self._life.rows.take_trimmed())
        self._in_flight.append(memory)
        self._next_step += 1
        self.stats.num_steps += 1
        self.stats.num_decode_tokens += memory.num_decodes
        self.stats.num_prefill_tokens += memory.num_prefill_tokens
        return plan

    def _preempt_waiting_beams(self, step: StepBuilder) -> bool:
        """Nothing can be scheduled: what runs are beams that wait for the rest of theirs, which the head of the queue
        is before. True where some of them made way for it."""
        head = self._life.queue.head
        victim = next((seq for seq in reversed(self._life.running) if seq.request is not head.request), None)
        if victim is not None:
            assert self._life.is_beam(victim), "sequences run, nothing is in flight, and yet nothing can be scheduled"
            self._room.preempt(victim, step)
        return victim is not None

    def _give_up_head(self) -> None:
        """Nothing runs and yet the head does not fit, though `add` saw that it would: pinned blocks are in the way."""
        seq = self._life.queue.head
        num_needed = self._kv.num_blocks_for(len(seq.token_ids))
        error = (
            f"{len(seq.token_ids)} tokens need {num_needed} blocks, but only {self._kv.num_free_blocks} of "
            f"{self._kv.num_blocks} can be had though nothing else runs: unpin prefixes that hold the others"
        )
        together = seq.request.sequences if self._life.is_beam(seq) else [seq]
        self._failures += [self._end(each, FinishReason.ERROR, error) for each in together]

    def check(self) -> None:
        """Prove that every sequence is in one place and holds what it should there. Costs a look at each."""
        self._life.check()

    # -- a result comes

    def update(self, result: StepResult, interval_s: float | None = None) -> list[SequenceUpdate]:
        """Take in the oldest submitted step's result: append tokens, end what ends, say what is new. interval_s: since
        the result before, where sequences ran on after it."""
        memory = self._in_flight.popleft()
        assert memory.step == result.step, f"the result of step {result.step} came, that of {memory.step} is due"
        self._life.take_in_awaited()  # where no other step could be planned beside it
        for ticket in result.moved:
            self._life.moving.pop(ticket)
            is_complete = self._kv.moves_done(ticket, result.missing.get(ticket, ()))
            self._life.on_loaded(ticket, is_complete)
            self.traffic.on_moved(ticket, is_complete)
        timings = result.timings
        kind = StepKind(memory.num_decodes, memory.num_prefill_tokens, memory.num_draft_tokens)
        self.costs.observe_step(
            kind,
            device_s=timings.forward_s + timings.sample_s,
            total_s=timings.total_s,
            interval_s=interval_s,
            precedes_drafts=bool(self._in_flight) and self._in_flight[0].num_draft_tokens > 0,
        )
        updates = self.take_failures()
        prompts = self._prompt_logprobs.take_new(memory, result) if result.prompt_logprobs else {}
        drafts, logprobs, failed = memory.drafts, result.logprobs, result.failed
        now = self._clock()
        for i, (seq, new_token_ids) in enumerate(zip(memory.sampled, result.tokens, strict=True)):
            if seq.state is _FINISHED:
                continue  # it ended while this step was in flight
            seq.num_pending_tokens -= 1
            if memory.beams and seq.request.beams is not None:
                if failed and i in failed:
                    updates.append(self._end(seq, *failed[i]))
                continue
            if result.pooled and i in result.pooled:
                seq.first_token_s = seq.last_token_s = now
                updates.append(self._end(seq, FinishReason.STOP))
                updates[-1].pooled = result.pooled[i]
                continue
            if drafts and i in drafts:
                self._count_accepted(seq, drafts[i], len(new_token_ids) - 1)
            taken = append_until_stop(seq, new_token_ids)
            if taken:
                if seq.first_token_s is None:
                    seq.first_token_s = now
                seq.last_token_s = now
            if seq.finish_reason:
                update = self._end(seq, seq.finish_reason, new_token_ids=taken)
            elif failed and i in failed:
                update = self._end(seq, *failed[i], new_token_ids=taken)
            else:
                update = SequenceUpdate(seq, taken)
            if logprobs and i in logprobs:
                update.logprobs = logprobs[i][: len(taken)]
            if prompts:
                update.prompt_logprobs = prompts.pop(seq, None)
            updates.append(update)
        updates.extend(SequenceUpdate(seq, [], prompt_logprobs=piece) for seq, piece in prompts.items())
        for search, candidates in zip(memory.beams, result.candidates, strict=True):
            if not search.request.is_finished:
                updates += self._rank_beams(search, candidates, now)
        return updates

    def _rank_beams(self, search: BeamSearch, candidates: list[BeamCandidate], now: float) -> list[SequenceUpdate]:
        """Beams are told at the end of their search, each with all of its tokens; until then any may be given up."""
        seqs = search.request.sequences
        placed = search.rank(candidates)
        for seq in seqs:
            seq.last_token_s = now
            if seq.first_token_s is None:
                seq.first_token_s = now
        if placed is not None:
            self._life.place_beams(search, placed)
            return []
        updates = []
        for seq, best in zip(seqs, search.ended, strict=True):
            seq.stop_reason = best.stop_reason
            update = self._end(seq, best.reason, new_token_ids=best.token_ids)
            update.logprobs = best.logprobs
            seq.token_ids = [*search.request.prompt_token_ids, *best.token_ids]
            updates.append(update)
        return updates

    def _count_accepted(self, seq: Sequence, drafts: SubmittedDrafts, num_accepted: int) -> None:
        """Drafts were verified: those that were accepted have KV, and blocks for the others are given back."""
        num_tokens, num_preemptions, are_forced = drafts
        if num_accepted < 0:
            num_accepted = 0  # a sequence that failed may have no token at all
        if not are_forced:
            seq.num_draft_tokens += num_tokens
            seq.num_accepted_tokens += num_accepted
            self.stats.count_drafts(num_tokens, num_accepted)
            if self.drafter is not None:
                self.drafter.judged(seq, num_tokens, num_accepted)
        if num_accepted:
            self._life.queue.charge(seq, num_output_tokens=num_accepted)
        if seq.state is not _RUNNING or seq.num_preemptions != num_preemptions:
            return
        seq.num_unverified_drafts -= num_tokens
        seq.num_computed_tokens += num_accepted
        if self._kv.num_free_blocks > _PLENTY * self._kv.num_blocks:
            return  # it will grow into them, and nobody else misses them: tables that change take the host's time
        # One more than what is computed: its next token will need it.
        num_kept = self._kv.trim(seq.seq_id, seq.num_computed_tokens + seq.num_unverified_drafts + 1)
        if num_kept is not None:
            assert seq.row is not None
            self._life.rows.note_trimmed(seq.row, num_kept)

    def _end(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, *, new_token_ids: list[int] | None = None
    ) -> SequenceUpdate:
        update = SequenceUpdate(seq, new_token_ids or [], finished=True, error=error)
        if new_token_ids is None and self._life.is_beam(seq):  # nobody has heard of its tokens
            update.new_token_ids = seq.output_token_ids
            update.logprobs = self._life.beams[seq.request.request_id].logprobs[seq.index]
        self._life.end(seq, reason)
        self._prompt_logprobs.forget(seq)
        if self.drafter is not None and seq.request.beams is None:
            self.drafter.ended(seq)
        return update
