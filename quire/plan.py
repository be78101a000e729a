"""The contract between scheduler and executor: plain data, no tensors.

`StepPlan` says what one step does; `StepResult` says what came of it. Scheduler and executor share nothing else, so
either can be replaced (a simulated executor, a GPU, many ranks) and a process border fits in between.

The executor owns each row's tokens, its length and its block table. A plan holds neither the tokens that a running
request sampled last nor how long it is by now, so it can be made while the step before it still runs. Where drafts are
verified, the scheduler does not even know how many tokens that step will bring: it plans with an upper bound, the
executor starts from its own length, and the result says how many tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.params import SamplingSpec
from quire.pooling import Pooled, PoolingSpec
from quire.request import FinishReason


def max_window_blocks(window: int, block_size: int, num_tokens: int = 1) -> int:
    """Blocks that a KV group with a sliding window has at most of one sequence: those that a span of so many tokens
    sees, and those that it writes."""
    return -(-(window - 1 + num_tokens) // block_size) + 1


@dataclass(slots=True)
class Spans:
    """The tokens that this step computes, in columns: entry i is one running sequence. Plain decodes come first.

    A row's next `num_tokens[i]` tokens run, from the executor's own length of that row on. Where samples[i] is true
    they end with the last token that the row has, and the token after it is sampled; or, for a row that was admitted
    to be pooled, its vectors are made.

    A span with drafts runs the row's last token and then the drafts: num_tokens[i] is one more than there may be. Each
    of these positions is sampled from, and a draft is accepted while it equals what was sampled before it. So the
    result has between one and num_tokens[i] tokens, and the row's length grows by as many.
    """

    rows: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    # By row: token ids to verify, or how many at most the executor's own drafter may propose.
    drafts: dict[int, list[int] | int] = field(default_factory=dict)

    def add(self, row: int, num_tokens: int, samples: bool) -> None:
        self.rows.append(row)
        self.num_tokens.append(num_tokens)
        self.samples.append(samples)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True, frozen=True)
class Admission:
    """A sequence new to the executor, or back after preemption. Takes a row until the row is released."""

    row: int
    token_ids: list[int]  # every token known: the prompt, then what was generated before a preemption
    num_computed_tokens: int  # of these, how many have KV in the blocks already: found in the cache, or swapped in
    num_prompt_tokens: int
    tables: list[tuple[int, list[int]]]  # by KV group: index of the first block that it has, and the block ids
    sampling: SamplingSpec
    adapter: str | None = None
    pooling: PoolingSpec | None = None  # it is pooled at the end of its tokens, and nothing is sampled


@dataclass(slots=True, frozen=True)
class Fork:
    """A new row that continues `source_row`: same tokens, same blocks, own randomness.

    It is made after the forward pass and before sampling: both rows sample from the source's logits of this step.
    """

    source_row: int
    row: int
    sampling: SamplingSpec


@dataclass(slots=True, frozen=True)
class BeamGroup:
    """The beams of one request, all of which sample in this step. They are not drawn from but ranked: of all tokens
    after all of these rows, those count that have the largest score, which is the row's own and the token's logprob.

    Beams that the step before has ranked are first put in their new places: `rows[i]` becomes what `parents[i]` was,
    its tokens and its block tables, with `tokens[i]` after it. All rows change at once. Both lists are empty where
    every row has its tokens already: at the end of a prompt, and when all are back after a preemption.
    """

    rows: list[int]
    scores: list[float]  # the logprob of what each row has generated; -inf for a copy that shall win nothing
    num_candidates: int  # to be answered
    parents: list[int] = field(default_factory=list)  # rows of this group
    tokens: list[int] = field(default_factory=list)


class BeamCandidate(NamedTuple):
    """A beam with one token more."""

    parent: int  # index into the group's rows
    token_id: int
    score: float
    logprob: float  # of the token
    rank: int  # of the token after its parent: 1 is the likeliest


@dataclass(slots=True, frozen=True)
class Move:
    """Blocks on their way between the device and what lies beyond it. They move beside steps: a result names the ticket
    when they have arrived. What goes out is read after all earlier steps; what comes in may be written only after them,
    and is read by no step before it has arrived, unless it is awaited. What goes to a host block and what comes from it
    do so in the order of tickets."""

    ticket: int
    is_load: bool  # to the device; else from it
    pairs: list[tuple[int, int]]  # (device block, block on the host)
    # A load that its own plan's step reads. That step, and whatever later plans do, runs behind it: it counts as over
    # once it is submitted, and no result names it.
    is_awaited: bool = False


@dataclass(slots=True, frozen=True)
class KeyedMove:
    """Blocks on their way between the device and a store that knows them by their hashes. As with `Move`, what goes out
    is read after all earlier steps, and what comes in is written after them. They may be over in any order."""

    ticket: int
    level: int  # which store
    is_load: bool
    pairs: list[tuple[int, bytes]]  # (device block, its hash)
    to: str | None = None  # of a store whose blocks go to other engines: which one
    # The KV group of blocks that go out while the plan's own step fills them, each layer's part once that layer is
    # computed. They count as arrived only if the step has ended well. None: earlier steps have filled them.
    filled_group: int | None = None


@dataclass(slots=True)
class StepPlan:
    """One step. An executor applies the parts in the order in which they stand here, then samples.

    Sampled tokens come back in `sampled_rows` order.
    """

    step: int
    released: list[int] = field(default_factory=list)  # rows whose sequences ended or were preempted
    moves: list[Move] = field(default_factory=list)
    keyed_moves: list[KeyedMove] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) device blocks: copy-on-write
    admitted: list[Admission] = field(default_factory=list)
    beams: list[BeamGroup] = field(default_factory=list)  # put in their places here, ranked after the forward pass
    trimmed: list[tuple[int, int]] = field(default_factory=list)  # (row, blocks that its tables keep)
    appended: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (row, KV group, blocks for its table)
    remapped: list[tuple[int, int, int, int]] = field(default_factory=list)  # (row, KV group, index, its own block now)
    spans: Spans = field(default_factory=Spans)
    forks: list[Fork] = field(default_factory=list)

    def sampled_rows(self) -> list[int]:
        """Rows that sample: the spans' in their order, then the forks' in theirs."""
        rows = [row for row, samples in zip(self.spans.rows, self.spans.samples, strict=True) if samples]
        rows.extend(fork.row for fork in self.forks)
        return rows

    def all_moves(self) -> list[Move | KeyedMove]:
        return [*self.moves, *self.keyed_moves]

    @property
    def awaits_loads(self) -> bool:
        """Whether the step reads what its own moves bring."""
        return any(move.is_awaited for move in self.moves)

    @property
    def is_empty(self) -> bool:
        """True when an executor would have nothing at all to do."""
        moves = self.moves or self.keyed_moves
        return not (self.spans.rows or self.released or moves or self.copies or self.admitted)


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """One position's logprobs: the token that stands there, its rank (1 is the likeliest), and the top ones asked."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepTimings:
    """Seconds, as the executor measured them."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    processors_s: float = 0.0  # of the host, in logits processors: part of sample_s
    total_s: float = 0.0


@dataclass(slots=True)
class StepResult:
    """What came of a plan. `tokens[i]` belongs to `plan.sampled_rows()[i]`: the drafts that were accepted and the token
    after them, or without drafts one token. A beam has none: `candidates` has what came of its group."""

    step: int
    tokens: list[list[int]] = field(default_factory=list)
    candidates: list[list[BeamCandidate]] = field(default_factory=list)  # of each of plan.beams, the best first
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index into tokens, one per token
    # By row: the logprobs of the prompt tokens that follow each token of this step's span, where asked for.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, Pooled] = field(default_factory=dict)  # by index into tokens, of rows that pool: they have none
    # By index into tokens: this one sequence cannot go on after those, how that counts (ERROR or BANNED), and what
    # happened. Without drafts it has no token then.
    failed: dict[int, tuple[FinishReason, str]] = field(default_factory=dict)
    moved: list[int] = field(default_factory=list)  # tickets of moves that are over, each told once
    # By ticket in `moved`: the entries of a keyed move whose blocks did not come, or were not stored.
    missing: dict[int, list[int]] = field(default_factory=dict)
    timings: StepTimings = field(default_factory=StepTimings)
    ended_s: float | None = None  # perf_counter() when the wait for it ended; None: it had ended before
    # Whether the step after this one waits to be sampled until another is submitted: then that is urgent.
    next_is_unsampled: bool = False
