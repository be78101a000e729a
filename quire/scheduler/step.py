"""A plan in the making, and what the scheduler remembers of it until its result is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

from quire.plan import Spans, StepPlan
from quire.request import Sequence
from quire.scheduler.beams import BeamSearch


class SubmittedDrafts(NamedTuple):
    """Drafts whose verification is under way."""

    num_tokens: int
    num_preemptions: int  # of the sequence when they were submitted: after another one, the KV they wrote is gone
    are_forced: bool  # they are no guesses: the sequence's grammar has nothing else there


@dataclass(slots=True)
class StepBuilder:
    """Collects one step: decodes of one token, decodes with drafts, and chunks of prompts, in the plan's order."""

    plan: StepPlan
    budget: int  # tokens that may still be given out
    decodes: list[Sequence] = field(default_factory=list)
    verifying: list[Sequence] = field(default_factory=list)
    drafts: list[list[int] | int] = field(default_factory=list)  # of those
    submitted: list[SubmittedDrafts] = field(default_factory=list)  # of those
    num_draft_tokens: int = 0
    chunks: list[Sequence] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    chunk_samples: list[bool] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    beams: list[BeamSearch] = field(default_factory=list)  # whose beams run and are ranked
    catching_up: list[Sequence] = field(default_factory=list)  # running sequences with more than one token to compute
    num_coming_blocks: int = 0  # being swapped out: free when their bytes are on the host
    num_sitting_out: int = 0  # sequences that wait for one of those
    short_of_blocks: bool = False  # a running sequence did not find a block: nobody new is admitted

    @property
    def is_idle(self) -> bool:
        plan = self.plan
        return not (self.decodes or self.verifying or self.chunks or plan.moves or plan.keyed_moves)

    def has_scheduled(self, seq: Sequence) -> bool:
        return seq in self.decodes or seq in self.verifying or seq in self.chunks or seq in self.forked

    def scheduled(self) -> set[Sequence]:
        return {*self.decodes, *self.verifying, *self.chunks, *self.forked}

    def add_chunk(self, seq: Sequence, start: int, size: int, samples: bool) -> None:
        self.budget -= size
        if size == 1 and samples:
            self.decodes.append(seq)
            return
        self.chunks.append(seq)
        self.chunk_starts.append(start)
        self.chunk_sizes.append(size)
        self.chunk_samples.append(samples)

    def issue(self, released: list[int], trimmed: list[tuple[int, int]]) -> tuple[StepPlan, InFlight]:
        """The finished plan and its memory."""
        plan, num_decodes = self.plan, len(self.decodes)
        one_token = [1] * num_decodes
        rows = [seq.row for seq in self.decodes]
        sampled = self.decodes
        if self.verifying:
            rows += [seq.row for seq in self.verifying]
            one_token += [1 + each.num_tokens for each in self.submitted]
            sampled = sampled + self.verifying
        if self.chunks:
            sampled = sampled + [s for s, samples in zip(self.chunks, self.chunk_samples, strict=True) if samples]
        plan.released, plan.trimmed = released, trimmed
        plan.beams = [search.to_group() for search in self.beams]
        plan.spans = Spans(
            rows=cast("list[int]", rows + [seq.row for seq in self.chunks]),  # whoever runs has a row
            num_tokens=one_token + self.chunk_sizes,
            samples=[True] * len(one_token) + self.chunk_samples,
            drafts={cast("int", seq.row): drafts for seq, drafts in zip(self.verifying, self.drafts, strict=True)},
        )
        prompts = [
            (cast("int", seq.row), seq, start)
            for seq, start in zip(self.chunks, self.chunk_starts, strict=True)
            if seq.request.spec.prompt_logprobs is not None
        ]
        memory = InFlight(
            step=plan.step,
            sampled=sampled + self.forked,
            drafts=dict(enumerate(self.submitted, start=num_decodes)),
            beams=self.beams,
            prompts=prompts,
            num_decodes=len(one_token),
            num_prefill_tokens=sum(self.chunk_sizes),
            num_draft_tokens=self.num_draft_tokens,
        )
        return plan, memory


@dataclass(slots=True)
class InFlight:
    """A submitted step. Results are matched to sequences by position, so a row given to another is no danger."""

    step: int
    sampled: list[Sequence]  # in the order of plan.sampled_rows()
    drafts: dict[int, SubmittedDrafts]  # by index into sampled
    beams: list[BeamSearch]  # in the order of plan.beams
    prompts: list[tuple[int, Sequence, int]]  # row, sequence, first position: spans that want prompt logprobs
    num_decodes: int
    num_prefill_tokens: int
    num_draft_tokens: int = 0
