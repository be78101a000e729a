"""A beam search: which candidates go on, which have ended, and when it is over. As transformers' `generate` does it, so
that the same model gives the same texts and scores.

The beams of a request are its sequences. They run in one step or not at all, and none is planned while the ranking of
the last step is under way: only its result says which blocks each of them has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.kv import KVManager
from quire.plan import BeamCandidate, BeamGroup, TokenLogprobs
from quire.request import FinishReason, Request, Sequence, SequenceState

if TYPE_CHECKING:
    from quire.scheduler.preemption import Room
    from quire.scheduler.step import StepBuilder


@dataclass(slots=True)
class Hypothesis:
    """A continuation that has ended."""

    token_ids: list[int]  # generated
    logprobs: list[TokenLogprobs]
    score: float  # with the length penalty
    reason: FinishReason
    stop_reason: int | None


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One request's search, from the end of its prompt on. Entry i of each list is the request's i-th sequence."""

    request: Request
    scores: list[float] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    ended: list[Hypothesis] = field(default_factory=list)  # the best so far, as many as there are beams, best first
    # What the last ranking decided and no plan has said yet: whose place each sequence continues from.
    parents: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Copies of one prompt: tokens of the first alone win, else all beams would be the same.
        self.scores = [0.0] + [-math.inf] * (self.request.n - 1)
        self.logprobs = [[] for _ in range(self.request.n)]

    @property
    def num_candidates(self) -> int:
        """Enough that as many as there are beams do not end, and transformers' number."""
        return max(2, 1 + len(self.request.end_token_ids)) * self.request.n

    @property
    def is_ready(self) -> bool:
        """Whether all beams run and lack just their last token."""
        return all(
            seq.state is SequenceState.RUNNING and seq.num_computed_tokens == len(seq.token_ids) - 1
            for seq in self.request.sequences
        )

    def to_group(self) -> BeamGroup:
        """For the plan that runs them. Said once: the executor's rows are in their places then."""
        seqs = self.request.sequences
        rows = [seq.row for seq in seqs if seq.row is not None]
        assert len(rows) == len(seqs), "a beam that runs has no row"
        parents, self.parents = [rows[parent] for parent in self.parents], []
        tokens = [seq.token_ids[-1] for seq in seqs] if parents else []
        return BeamGroup(rows, list(self.scores), self.num_candidates, parents, tokens)

    def rank(self, candidates: list[BeamCandidate]) -> list[BeamCandidate] | None:
        """Take in what a step brought. Returns the candidate that each sequence becomes; None: the search is over.

        A sequence with several children goes on as the first of them. The others take the places of those that have
        none.
        """
        request = self.request
        num_tokens = len(self.logprobs[0]) + 1
        max_tokens = request.sequences[0].max_len - request.num_prompt_tokens
        going_on: list[BeamCandidate] = []
        for nth, candidate in enumerate(candidates):
            is_end = candidate.token_id in request.end_token_ids
            if is_end or num_tokens == max_tokens:
                if nth < request.n:  # the others are there only so that enough are left
                    self._end(candidate, num_tokens, is_end)
            elif len(going_on) < request.n:
                going_on.append(candidate)
        self.ended.sort(key=lambda one: -one.score)
        del self.ended[request.n :]
        if num_tokens == max_tokens or self._is_over(going_on[0].score, num_tokens, max_tokens):
            return None
        return self._take_places(going_on)

    def _end(self, last: BeamCandidate, num_tokens: int, is_end: bool) -> None:
        request = self.request
        generated = request.sequences[last.parent].output_token_ids
        score = last.score / num_tokens**request.beams.length_penalty if request.beams else last.score
        stop_reason = last.token_id if is_end and last.token_id not in request.eos_token_ids else None
        reason = FinishReason.STOP if is_end else FinishReason.LENGTH
        logprobs = [*self.logprobs[last.parent], _entry(last)]
        self.ended.append(Hypothesis([*generated, last.token_id], logprobs, score, reason, stop_reason))

    def _is_over(self, best: float, num_tokens: int, max_tokens: int) -> bool:
        """Whether no beam is worth going on with, given the best score of those that could."""
        spec = self.request.beams
        assert spec is not None
        if len(self.ended) < self.request.n:
            return False
        if spec.early_stopping is True:
            return True
        likely_length = max_tokens if spec.early_stopping == "never" and spec.length_penalty > 0 else num_tokens
        return not best / likely_length**spec.length_penalty > self.ended[-1].score

    def _take_places(self, going_on: list[BeamCandidate]) -> list[BeamCandidate]:
        first_of: dict[int, BeamCandidate] = {}
        others = [each for each in going_on if first_of.setdefault(each.parent, each) is not each]
        placed = [first_of.get(i) or others.pop(0) for i in range(self.request.n)]
        logprobs = self.logprobs
        self.logprobs = [[*logprobs[each.parent], _entry(each)] for each in placed]
        self.scores = [each.score for each in placed]
        self.parents = [each.parent for each in placed]
        return placed


def _entry(candidate: BeamCandidate) -> TokenLogprobs:
    return TokenLogprobs(candidate.token_id, candidate.logprob, candidate.rank, [], [])


def is_ranked(seq: Sequence) -> bool:
    """Whether it is a beam whose ranking is under way: nobody knows which blocks it will need."""
    return seq.request.beams is not None and seq.num_pending_tokens > 0


def schedule_beams(seq: Sequence, search: BeamSearch, step: StepBuilder, kv: KVManager, room: Room) -> None:
    """A beam that has computed less than the others catches up. With the first of them all run, once all can."""
    if seq.num_computed_tokens < len(seq.token_ids) - 1:
        step.catching_up.append(seq)
        return
    seqs = search.request.sequences
    if seq is not seqs[0] or not search.is_ready:
        return
    ids, position = [each.seq_id for each in seqs], seq.num_computed_tokens
    while (num_needed := kv.num_blocks_to_write(ids, position)) > kv.num_free_blocks:
        step.short_of_blocks = True
        if step.num_coming_blocks > step.num_sitting_out:
            step.num_sitting_out += num_needed
            return
        victim = room.pick_victim(seq, step)
        room.preempt(victim, step)
        if victim.request is seq.request:
            return
    for each in seqs:
        allocation = kv.grow(each.seq_id, position + 1, position)
        assert allocation is not None, "there was room for all beams"
        room.enter(each, allocation, step.plan)
        each.num_computed_tokens = position + 1
        each.num_pending_tokens = 1
    step.decodes.extend(seqs)
    step.beams.append(search)
