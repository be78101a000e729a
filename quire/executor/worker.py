"""A worker: one device's model, KV bytes, persistent batch and sampler.

A step is three calls: `apply` takes a plan's changes, `forward` runs the model, `sample` draws the tokens. None of them
waits for the device. Sampling is a call of its own because what it needs may depend on the tokens of the step before:
the host works that out while the forward pass runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.executor.adapter_store import DeviceAdapters
from quire.executor.batch import PersistentBatch, Unjudged
from quire.executor.clock import StepClock
from quire.executor.decode_graphs import DecodeGraphs
from quire.executor.draft_model import DraftModel
from quire.executor.kv_cache import KVCache
from quire.executor.mixed_graphs import MixedGraphs, MixedShape, drafts_as_decodes
from quire.executor.pooling import PooledBatch, RowPools, pooled_spans
from quire.executor.store_moves import StoreMoves
from quire.grammar.rows import ConstrainedLine, PendingMasks, RowConstraints
from quire.models.decoder import Decoder
from quire.params import SamplingSpec
from quire.plan import StepPlan, TokenLogprobs
from quire.sampling import (
    RankedBatch,
    SampledBatch,
    Sampler,
    TokenMasks,
    VerifiedBatch,
    prompt_logprobs,
    rank_beams,
    verify_drafts,
)
from quire.sampling.transfer import to_device
from quire.tiers.sealed import SealedStore

Sampled = SampledBatch | VerifiedBatch | RankedBatch

# Rows of logits held at once for prompt logprobs: a long prompt over a large vocabulary would not fit.
_PROMPT_LOGPROB_ROWS = 128


@dataclass(slots=True)
class ForwardPass:
    """What a forward pass leaves for sampling."""

    rows: list[int] = field(default_factory=list)  # that sample
    positions: list[int] = field(default_factory=list)  # of the first token that each of them samples
    logits: Tensor | None = None  # [rows, vocab]; with drafts, a line more for each of them
    places: tuple[Tensor, Tensor] | None = None  # rows and positions on the device, where they are there already
    unjudged: list[Unjudged] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row
    pooled: PooledBatch | None = None  # of a model that pools, in the order of the rows


@dataclass(slots=True)
class StepMasks:
    """The masks of a step's lines of logits, which may be on their way."""

    places: list[int]
    pending: PendingMasks

    def finish(self) -> TokenMasks:
        return TokenMasks(self.places, self.pending.finish())


class ElsewhereSampled:
    """Stands in for a sampler on ranks that do not sample, which are told the tokens, and where rows are pooled."""

    def admit(self, row: int, spec: SamplingSpec, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        pass

    def fork(self, source_row: int, row: int, spec: SamplingSpec) -> None:
        pass

    def release(self, row: int) -> None:
        pass


class Worker:
    """One device."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        batch: PersistentBatch,
        sampler: Sampler | ElsewhereSampled,
        *,
        graphs: DecodeGraphs | None = None,
        mixed: MixedGraphs | None = None,
        constraints: RowConstraints | None = None,
        stores: Sequence[SealedStore] = (),
        draft: DraftModel | None = None,
    ) -> None:
        self.decoder = decoder
        self.pools = RowPools(decoder.classifier) if decoder.spec.pooler is not None else None
        self.cache = cache
        self.stores = StoreMoves(cache, stores, decoder.layout)
        self.batch = batch
        self.sampler = sampler
        self.graphs = graphs
        self.mixed = mixed
        self.constraints = constraints
        self.draft = draft
        self.adapters: DeviceAdapters | None = None
        # Fixes the scales of an 8-bit cache by a step's tokens, before anything is written or captured; then None.
        self.measure_scales: Callable[[Tensor], None] | None = None
        self.is_gpu = cache.device_blocks.is_cuda
        # By row: what a prompt's logprobs need while the prompt runs.
        self._prompt_logprob_rows: dict[int, tuple[SamplingSpec, list[int]]] = {}

    def apply(self, plan: StepPlan) -> None:
        """Everything of a plan that comes before the forward pass, in the contract's order."""
        for row in plan.released:
            self.batch.release(row)
            self.sampler.release(row)
            self._prompt_logprob_rows.pop(row, None)
            if self.pools is not None:
                self.pools.release(row)
            if self.constraints is not None:
                self.constraints.release(row)
        for move in plan.moves:
            self.cache.move(move)
        if plan.awaits_loads:
            self.cache.start_moves()  # before all that the host has to do for the step: it takes longer than that
        for keyed in plan.keyed_moves:
            self.stores.move(keyed, plan.step)
        self.cache.copy(plan.copies)
        for new in plan.admitted:
            slot = -1 if new.adapter is None or self.adapters is None else self.adapters.slot_of(new.adapter)
            self.batch.admit(new.row, new.token_ids, new.num_computed_tokens, new.tables, slot)
            if self.pools is not None:
                self.pools.admit(new)
                continue
            self.sampler.admit(new.row, new.sampling, new.token_ids, new.num_prompt_tokens)
            if new.sampling.is_constrained and isinstance(self.sampler, Sampler):
                assert self.constraints is not None, "a grammar came to a worker that knows none"
                self.constraints.admit(new.row, new.sampling, new.token_ids[new.num_prompt_tokens :])
            if new.sampling.prompt_logprobs is not None:
                self._prompt_logprob_rows[new.row] = (new.sampling, new.token_ids[: new.num_prompt_tokens])
        for group in plan.beams:
            self.batch.place_beams(group)
        self.batch.apply_table_diffs(plan)
        if self.draft is not None:
            self.draft.apply(plan)
            self.draft.draft(plan)

    def forward(self, plan: StepPlan, clock: StepClock) -> ForwardPass:
        """Run the plan's tokens: from a captured step where there is one that fits."""
        num_attempts = self._num_capture_attempts
        starts: list[int] = self.batch.starts(plan.spans).tolist()
        if plan.spans.drafts:
            self.batch.write_drafts(plan.spans)
        apart, places = plan, starts
        if plan.spans.drafts and self.graphs is not None:
            apart, places = drafts_as_decodes(plan, starts)
        can_capture = self.measure_scales is None
        can_replay = can_capture and self._can_replay(apart, places)
        shape = self._mixed_shape(apart) if can_capture and not can_replay else None
        if self._num_capture_attempts != num_attempts:
            clock.restart()  # the scheduler would take a capture for a slow step
        if can_replay and self.graphs is not None:
            done = _sampling_pass(plan, starts, self._replay_decodes(apart, places, clock))
            if apart is plan:
                done.places = self.graphs.next_places(len(done.rows))
        elif shape is not None:
            done = _sampling_pass(plan, starts, self._replay_mixed(apart, places, shape, clock))
        elif plan.spans.rows:
            done = self._run(plan, starts, clock)
        else:
            done = ForwardPass()
        done.unjudged = self.batch.advance(plan.spans)
        clock.mark("forward")
        self.stores.on_pass(plan.step)
        self.cache.start_moves()
        return done

    def constrained(self, plan: StepPlan) -> list[ConstrainedLine]:
        """The rows of this step that sample under a grammar. Asked once a step, after `apply`."""
        return self.constraints.of_step(plan) if self.constraints is not None else []

    def begin_masks(self, lines: list[ConstrainedLine], done: ForwardPass) -> StepMasks:
        """Which tokens those rows may sample. Their tokens so far must have been told to them."""
        assert self.constraints is not None
        places: list[int] = [line.index for line in lines]
        drafts: list[list[int]] = [[] for _ in lines]
        if done.unjudged:
            of_row = {each.row: each.drafts for each in done.unjudged}
            drafts = [of_row.get(line.row, []) for line in lines]
            firsts = list(itertools.accumulate((1 + len(of_row.get(row, ())) for row in done.rows), initial=0))
            places = [firsts[p] + i for p, some in zip(places, drafts, strict=True) for i in range(1 + len(some))]
        return StepMasks(places, self.constraints.begin_masks(lines, drafts))

    def sample(self, plan: StepPlan, done: ForwardPass, masks: TokenMasks | None = None) -> Sampled | None:
        """The next tokens of the rows that sample, stored where the next step reads them. None where no row does.
        Beams are ranked, and the next plan says what becomes of them."""
        for fork in plan.forks:
            self.batch.fork(fork.source_row, fork.row)
            self.sampler.fork(fork.source_row, fork.row, fork.sampling)
            if self.draft is not None:
                self.draft.fork(fork.source_row, fork.row)
        if done.logits is None:
            return None  # no row samples, or another rank does it
        return self._rank(plan, done, masks) if plan.beams else self._draw(done, masks)

    def _rank(self, plan: StepPlan, done: ForwardPass, masks: TokenMasks | None) -> RankedBatch:
        """Split a step's logits between its beams and the other rows."""
        assert done.logits is not None and isinstance(self.sampler, Sampler)
        drafts = {each.row: len(each.drafts) for each in done.unjudged}
        firsts = np.cumsum([0] + [1 + drafts.get(row, 0) for row in done.rows]).tolist()
        line_of = {row: firsts[i] for i, row in enumerate(done.rows)}
        beams = [row for group in plan.beams for row in group.rows]
        temperatures = [self.sampler.spec_of(group.rows[0]).temperature for group in plan.beams]
        ranking = rank_beams(self._lines(done.logits, [line_of[row] for row in beams]), plan.beams, temperatures)
        others = [i for i, row in enumerate(done.rows) if row not in set(beams)]
        sampled = None
        if others:
            lines = [line for i in others for line in range(firsts[i], firsts[i + 1])]
            rows, positions = [done.rows[i] for i in others], [done.positions[i] for i in others]
            if masks is not None:
                masks = masks.select(lines)
            alone = ForwardPass(rows, positions, self._lines(done.logits, lines), unjudged=done.unjudged)
            sampled = self._draw(alone, masks)
        return RankedBatch(done.rows, others, sampled, plan.beams, ranking)

    def _lines(self, logits: Tensor, lines: list[int]) -> Tensor:
        if lines == list(range(len(logits))):
            return logits
        return logits.index_select(0, to_device(np.array(lines, dtype=np.int64), logits.device))

    def _draw(self, done: ForwardPass, masks: TokenMasks | None) -> SampledBatch | VerifiedBatch:
        assert done.logits is not None and isinstance(self.sampler, Sampler)
        if done.unjudged:
            drafts = {each.row: each.drafts for each in done.unjudged}
            of_rows = [drafts.get(row, []) for row in done.rows]
            verified = verify_drafts(self.sampler, done.logits, done.rows, done.positions, of_rows, masks)
            for part in verified.parts:
                self.batch.store(self.batch.places(part.rows, part.positions), part.sampled.token_ids)
            return verified
        sampled = self.sampler.sample(done.logits, done.rows, done.positions, masks)
        self.batch.store(done.places or self.batch.places(done.rows, done.positions), sampled.token_ids)
        return sampled

    def capture_more(self) -> bool:
        """One more captured step. False when there is none left, or it is too soon."""
        if self.measure_scales is not None:
            return False
        return any(graphs is not None and graphs.capture_next() for graphs in (self.mixed, self.graphs))

    def reset(self) -> None:
        """Forget every row: the next plan may be another scheduler's first."""
        self._prompt_logprob_rows.clear()
        if self.pools is not None:
            self.pools.clear()
        if self.constraints is not None:
            self.constraints.clear()
        self.cache.forget_moves()
        self.stores.forget_moves()
        if self.draft is not None:
            self.draft.reset()
        for row in self.batch.release_all():
            self.sampler.release(row)

    def _begin(self, plan: StepPlan, clock: StepClock) -> None:
        """The step's inputs are on their way. What comes next reads blocks, and waits for those that its plan loads."""
        clock.mark("prepare")
        if plan.awaits_loads:
            self.cache.hold_steps_for_loads()
            clock.restart()  # the scheduler would take a load for a slow step

    def _replay_decodes(self, plan: StepPlan, starts: list[int], clock: StepClock) -> Tensor | None:
        assert self.graphs is not None
        self.graphs.prepare(plan.spans.rows, starts)
        self._begin(plan, clock)
        return self.graphs.replay(len(plan.spans.rows))

    def _replay_mixed(self, plan: StepPlan, starts: list[int], shape: MixedShape, clock: StepClock) -> Tensor | None:
        assert self.mixed is not None
        self.mixed.prepare(plan, starts, shape)
        self._begin(plan, clock)
        return self.mixed.replay(shape, len(plan.sampled_rows()))

    def _run(self, plan: StepPlan, starts: list[int], clock: StepClock) -> ForwardPass:
        inputs = self.batch.prepare(plan, self._last_group)
        self._begin(plan, clock)
        if self.measure_scales is not None:
            self.measure_scales(inputs.token_ids)
            self.measure_scales = None
        on_written = self.stores.layer_hook(plan.step)
        hidden = self.decoder.forward(inputs.token_ids, inputs.attention, self.cache.layers, inputs.read, on_written)
        done = ForwardPass(inputs.sampled_rows, inputs.sampled_positions)
        if self.pools is not None:
            done.pooled = self.pools.take(self.decoder.normalized(hidden), pooled_spans(plan))
            return done
        done.prompt_logprobs = self._prompt_logprobs(plan, starts, hidden)
        if inputs.sampled_rows:
            done.logits = self.decoder.gathered_logits(hidden, inputs.logit_indices)
        return done

    def _can_replay(self, plan: StepPlan, starts: list[int]) -> bool:
        """Whether the step is one token of each sequence, all of them sampling, and there is a graph for it."""
        spans = plan.spans
        return (
            self.graphs is not None
            and bool(spans.rows)
            and not plan.forks
            and max(spans.num_tokens) == 1
            and all(spans.samples)
            and not self._prompt_logprob_rows
            and self.graphs.choose(spans.rows, starts)
        )

    def _mixed_shape(self, plan: StepPlan) -> MixedShape | None:
        """The captured shape for a step with short prompts, where there is one."""
        if self.mixed is None or plan.forks or self._prompt_logprob_rows:
            return None
        return self.mixed.shape_of(plan)

    @property
    def _last_group(self) -> int | None:
        """The last layer's KV group, where only tokens that give logits are read after it."""
        reads_all = self.pools is not None or self._prompt_logprob_rows or not self.decoder.share.is_last
        return None if reads_all else self.decoder.layout.groups[-1]

    @property
    def _num_capture_attempts(self) -> int:
        return self.graphs.memory.num_attempts if self.graphs is not None else 0

    def _prompt_logprobs(self, plan: StepPlan, starts: list[int], hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """For rows that ask: the logprob of each prompt token that follows a token of this step."""
        found: dict[int, list[TokenLogprobs]] = {}
        if not self._prompt_logprob_rows:
            return found
        first = 0
        for row, start, count in zip(plan.spans.rows, starts, plan.spans.num_tokens, strict=True):
            if row in self._prompt_logprob_rows:
                spec, prompt = self._prompt_logprob_rows[row]
                assert spec.prompt_logprobs is not None
                targets = prompt[start + 1 : start + 1 + count]
                entries: list[TokenLogprobs] = []
                for at in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
                    some = targets[at : at + _PROMPT_LOGPROB_ROWS]
                    indices = torch.arange(first + at, first + at + len(some), device=hidden.device)
                    logits = self.decoder.gathered_logits(hidden, indices)
                    if logits is not None:
                        entries.extend(prompt_logprobs(logits, some, spec.prompt_logprobs))
                if entries:
                    found[row] = entries
                if start + count >= len(prompt):
                    del self._prompt_logprob_rows[row]
            first += count
        return found


def _sampling_pass(plan: StepPlan, starts: list[int], logits: Tensor | None) -> ForwardPass:
    """What a captured step leaves for sampling."""
    spans, drafts = plan.spans, plan.spans.drafts
    columns = zip(spans.rows, starts, spans.num_tokens, spans.samples, strict=True)
    sampled = [(row, start + (1 if row in drafts else count)) for row, start, count, samples in columns if samples]
    rows, positions = [row for row, _ in sampled], [position for _, position in sampled]
    return ForwardPass(rows, positions, logits if rows else None)
