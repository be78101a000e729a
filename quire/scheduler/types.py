"""What the scheduler tells others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from quire.plan import TokenLogprobs
from quire.pooling import Pooled
from quire.request import Sequence


@dataclass(slots=True, eq=False)
class SequenceUpdate:
    """What a step brought for one sequence. A finished one says why itself (finish_reason, stop_reason)."""

    seq: Sequence
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per new token, where asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # the next ones of the prompt, from its second token on
    pooled: Pooled | None = None
    finished: bool = False
    error: str | None = None  # with FinishReason.ERROR or BANNED: what happened


class Drafter:
    """Guesses how running sequences go on. Whether a guess is right changes only how fast they do."""

    def draft(
        self, running: list[Sequence], most: int, *, ends_together: bool = False
    ) -> Mapping[int, list[int] | int]:
        """A step is planned in which these run; there is room for so many drafts. By seq_id, of some that decode: token
        ids to follow its last one, or how many the executor's own drafter shall propose. Tokens of steps in flight are
        not known here (seq.num_pending_tokens). ends_together: somebody waits for the last of them to end, and nobody
        else will come, so that nothing is gained where some get on faster and others do not."""
        return {}

    def judged(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Told after a step has verified drafts of the sequence."""

    def ended(self, seq: Sequence) -> None:
        """The sequence will not run again."""


class WaitReason(StrEnum):
    """What the head of the queue waits for, and so everyone behind it."""

    ROWS = "rows"  # max_num_seqs are running
    BLOCKS = "blocks"  # its tokens do not fit in the free blocks
    BUDGET = "budget"  # the step's token budget is spent
    IN_FLIGHT = "in_flight"  # it was preempted while a step that samples for it runs
    BEAMS = "beams"  # it is a beam, and the first of its request is still computing what they share


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_finished: int = 0  # sequences, for whatever reason
    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_yields: int = 0  # of the preemptions, those that made way for a tenant that ran nothing: blocks were not short
    num_drafts: int = 0  # sequences' drafts that were verified, and their tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_depth: list[int] = field(default_factory=list)  # how often a first draft was accepted, a second ...
    num_recomputed_tokens: int = 0  # tokens whose KV was dropped and, not found in the prefix cache, computed again

    def count_drafts(self, num_tokens: int, num_accepted: int) -> None:
        """One sequence's drafts were verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        by_depth = self.num_accepted_by_depth
        while len(by_depth) < num_accepted:
            by_depth.append(0)
        for depth in range(num_accepted):
            by_depth[depth] += 1

    @property
    def num_preemptions(self) -> int:
        return self.num_recompute_preemptions + self.num_swap_preemptions


@dataclass(slots=True, frozen=True)
class TenantLoad:
    """How many sequences a tenant has now."""

    num_waiting: int
    num_running: int
    num_waiting_tokens: int  # prompt tokens of those that wait
    counter: float  # virtual tokens: only differences between tenants mean something
