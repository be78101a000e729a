"""A plan in the making, and what the scheduler remembers of it until its result is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from quire.plan import Spans, StepPlan
from quire.request import Sequence


@dataclass(slots=True)
class Draft:
    """Collects one step. Decodes and chunks are kept apart because a plan's decodes stand before its chunks."""

    plan: StepPlan
    budget: int  # tokens that may still be given out
    decodes: list[Sequence] = field(default_factory=list)
    decode_starts: list[int] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    chunk_samples: list[bool] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    catching_up: list[Sequence] = field(default_factory=list)  # running sequences with more than one token to compute
    num_coming_blocks: int = 0  # being swapped out: free when their bytes are on the host
    num_sitting_out: int = 0  # sequences that wait for one of those
    short_of_blocks: bool = False  # a running sequence did not find a block: nobody new is admitted

    @property
    def is_idle(self) -> bool:
        return not (self.decodes or self.chunks or self.plan.swap_out)

    def has_scheduled(self, seq: Sequence) -> bool:
        return seq in self.decodes or seq in self.chunks or seq in self.forked

    def scheduled(self) -> set[Sequence]:
        return {*self.decodes, *self.chunks, *self.forked}

    def add_chunk(self, seq: Sequence, start: int, size: int, samples: bool) -> None:
        self.budget -= size
        if size == 1 and samples:
            self.decodes.append(seq)
            self.decode_starts.append(start)
            return
        self.chunks.append(seq)
        self.chunk_starts.append(start)
        self.chunk_sizes.append(size)
        self.chunk_samples.append(samples)

    def issue(self, released: list[int]) -> tuple[StepPlan, InFlight]:
        """The finished plan and its memory."""
        num_decodes = len(self.decodes)
        rows = [seq.row for seq in self.decodes]
        rows += [seq.row for seq in self.chunks]
        self.plan.released = released
        self.plan.spans = Spans(
            rows=cast("list[int]", rows),  # whoever runs has a row
            starts=self.decode_starts + self.chunk_starts,
            num_tokens=[1] * num_decodes + self.chunk_sizes,
            samples=[True] * num_decodes + self.chunk_samples,
        )
        sampled = self.decodes
        if self.chunks:
            sampled = sampled + [s for s, samples in zip(self.chunks, self.chunk_samples, strict=True) if samples]
        prompts = [
            (cast("int", seq.row), seq, start)
            for seq, start in zip(self.chunks, self.chunk_starts, strict=True)
            if seq.request.params.prompt_logprobs is not None
        ]
        memory = InFlight(
            step=self.plan.step,
            sampled=sampled + self.forked,
            prompts=prompts,
            num_decodes=num_decodes,
            num_prefill_tokens=sum(self.chunk_sizes),
        )
        return self.plan, memory


@dataclass(slots=True)
class InFlight:
    """A submitted step. Results are matched to sequences by position, so a row given to another is no danger."""

    step: int
    sampled: list[Sequence]  # in the order of plan.sampled_rows()
    prompts: list[tuple[int, Sequence, int]]  # row, sequence, first position: spans that want prompt logprobs
    num_decodes: int
    num_prefill_tokens: int
