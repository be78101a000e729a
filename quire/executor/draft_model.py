"""A draft model: a second, smaller decoder that guesses how rows of the batch go on.

It has KV of its own in blocks of its own, which go by the same numbers as the model's: block 7 holds both models' keys
and values of the same tokens, so that one allocator, one prefix cache and one swap serve both. What it guesses is never
more than a guess, so its KV may be missing anywhere: it is computed when a row is first drafted for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.batch import PersistentBatch, starts_of
from quire.executor.decode_graphs import DecodeGraphs
from quire.executor.device import Backend
from quire.executor.kv_cache import KVCache
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.kv_layout import kv_layout
from quire.models.spec import ModelSpec
from quire.plan import StepPlan
from quire.sampling.transfer import to_device
from quire.weights import Checkpoint, open_checkpoint, resolve_model

_CHUNK = 512  # tokens of one pass, where a prompt has to be caught up with
_MAX_CAPTURED = 64  # tokens of a pass that is run as decodes: more of them are faster as prompts


@dataclass(slots=True, frozen=True)
class OpenedDraft:
    """A draft model's config and headers, checked against the model that it is for."""

    spec: ModelSpec
    checkpoint: Checkpoint

    def block_bytes(self, block_size: int, itemsize: int) -> int:
        return kv_layout(self.spec, None).block_bytes(self.spec, block_size, itemsize)

    def load(self, backend: Backend, max_position: int, seed: int) -> Decoder:
        decoder = Decoder(
            self.spec,
            backend.ops,
            device=backend.device,
            dtype=backend.activation_dtype,
            max_position=min(max_position, self.spec.max_position),
        )
        self.checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight, seed=seed)
        with torch.inference_mode():
            decoder.finish_loading()
        return decoder


def open_draft(config: EngineConfig, spec: ModelSpec, backend: Backend) -> OpenedDraft | None:
    """The draft model that a config names; None where it names none. Refuses what it could not draft for."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return None
    path = resolve_model(speculation.model, load_format=config.load_format, download_dir=config.download_dir)
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    own = spec_from_config(checkpoint.config, source=str(path))
    checkpoint.check(own)
    if own.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"the draft model {speculation.model} has a vocabulary of {own.vocab_size} tokens and {config.model} "
            f"one of {spec.vocab_size}: use one of the same family"
        )
    for name, one in ((config.model, spec), (speculation.model, own)):
        if kv_layout(one, None).windows != (None,):
            raise ConfigError(
                f"speculative_config: {name} has layers with a sliding window; use method suffix or ngram"
            )
    return OpenedDraft(own, checkpoint)


class DraftModel:
    """Guesses for rows of a batch.

    Invariant: the first _num_known[row] tokens of a live row have this model's KV, and so have the first _num_full[b]
    tokens of block b, for as long as the block holds what it holds.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, batch: PersistentBatch, graphs: DecodeGraphs | None = None
    ) -> None:
        self.decoder = decoder
        self._graphs = graphs
        self._cache = cache
        self._batch = batch
        self._num_known = np.zeros(batch.spare_row, dtype=np.int64)
        self._num_full = np.zeros(cache.spare_block + 1, dtype=np.int64)
        self._num_full_on_host = np.zeros(len(cache.host_blocks), dtype=np.int64)

    @property
    def max_position(self) -> int:
        return self.decoder.max_position

    def apply(self, plan: StepPlan) -> None:
        """A plan's changes, after the batch has taken them. What the step's own tokens overwrite is known no more."""
        for move in plan.moves:
            self._cache.move(move)
            if move.pairs:
                devices, hosts = np.array(move.pairs).T
                if move.is_load:
                    self._num_full[devices] = self._num_full_on_host[hosts]
                else:
                    self._num_full_on_host[hosts] = self._num_full[devices]
        if plan.moves:
            self._cache.hold_steps_for_moves()
            self._cache.take_finished()  # the model's own cache tells of them
        for keyed in plan.keyed_moves:
            if keyed.is_load:  # a store keeps the model's own bytes only
                self._num_full[[block for block, _ in keyed.pairs]] = 0
        if plan.copies:
            self._cache.copy(plan.copies)
            sources, targets = np.array(plan.copies).T
            self._num_full[targets] = self._num_full[sources]
        for new in plan.admitted:
            self._num_known[new.row] = min(new.num_computed_tokens, self._num_found(new.tables[0][1]))
        size, tables = self._batch.block_size, self._batch.host_tables[0]
        starts = self._batch.starts(plan.spans).tolist()
        for row, start, count in zip(plan.spans.rows, starts, plan.spans.num_tokens, strict=True):
            first = start // size
            blocks = tables[row, first : (start + count - 1) // size + 1]
            self._num_full[blocks[0]] = min(self._num_full[blocks[0]], start - first * size)
            self._num_full[blocks[1:]] = 0
            self._num_known[row] = min(self._num_known[row], start)

    def fork(self, source: int, row: int) -> None:
        self._num_known[row] = self._num_known[source]

    def fall_asleep(self) -> None:
        """Forget the cache, which is computed again as it is needed."""
        self._cache.fall_asleep([])
        self.reset()

    def reset(self) -> None:
        self._num_known[:] = 0
        self._num_full[:] = 0

    def draft(self, plan: StepPlan) -> None:
        """Put guesses where the plan asks for a number of them."""
        wanted = {row: drafts for row, drafts in plan.spans.drafts.items() if isinstance(drafts, int)}
        if not wanted:
            return
        # The last token of each of them is where its next one is guessed from.
        ends = {row: int(self._batch.num_computed[row]) + 1 for row in wanted}
        self._catch_up(ends)
        starts = {row: int(self._num_known[row]) for row in wanted}
        owners: list[int] = []
        tokens: list[Tensor] = []
        for depth in range(max(wanted.values())):
            rows = [row for row, size in wanted.items() if size > depth]
            rows.sort(key=lambda row: ends[row] - starts[row] != 1)  # decodes come first
            counts = [ends[row] - starts[row] for row in rows]
            tokens.append(self._next_tokens(rows, [starts[row] for row in rows], counts))
            owners += rows
            for row in rows:
                starts[row] = ends[row]
                ends[row] += 1
        drafts: dict[int, list[int]] = {row: [] for row in wanted}
        for row, token in zip(owners, torch.cat(tokens).tolist(), strict=True):
            drafts[row].append(token)
        for row in wanted:
            self._know(row, starts[row])
        plan.spans.drafts |= drafts

    def _catch_up(self, ends: dict[int, int]) -> None:
        """Long pieces before the last tokens, a row at a time: their logits are of no use."""
        for row, end in ends.items():
            while end - int(self._num_known[row]) > _CHUNK:
                start = int(self._num_known[row])
                self._forward([row], [start], [_CHUNK])
                self._know(row, start + _CHUNK)

    def _next_tokens(self, rows: list[int], starts: list[int], counts: list[int]) -> Tensor:
        """Stored where the next pass reads them."""
        logits = self._replayed(rows, starts, counts)
        if logits is None:
            hidden, last = self._forward(rows, starts, counts)
            logits = self.decoder.logits(hidden, last)
        tokens = logits.argmax(dim=1)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self._batch.store(self._batch.places(rows, ends), tokens)
        return tokens

    def _replayed(self, rows: list[int], starts: list[int], counts: list[int]) -> Tensor | None:
        """Logits out of a captured step, each token as a decode of its own; None where there is none."""
        if self._graphs is None or sum(counts) > max(_MAX_CAPTURED, len(rows)):
            return None
        token_rows = np.repeat(rows, counts).tolist()
        ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        positions = list(itertools.chain.from_iterable(ranges))
        if not self._graphs.choose(token_rows, positions):
            return None
        self._graphs.prepare(token_rows, positions)
        logits = self._graphs.replay(len(token_rows))
        if logits is None or len(token_rows) == len(rows):
            return logits
        return logits.index_select(0, to_device(np.cumsum(counts) - 1, self._batch.device))

    def _forward(self, rows: list[int], starts: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Run the rows' tokens; rows of one token stand first. -> hidden states, and where each row's last one is."""
        query_starts = starts_of(np.array(counts))
        columns = (np.array(rows), np.array(starts), np.array(counts), query_starts, query_starts[1:] - 1)
        inputs = self._batch.place(*columns)
        assert inputs.logit_indices is not None
        return self.decoder.forward(inputs.token_ids, inputs.attention, self._cache.layers), inputs.logit_indices

    def _know(self, row: int, end: int) -> None:
        """The row's tokens up to there have KV now."""
        size, start = self._batch.block_size, int(self._num_known[row])
        indices = np.arange(start // size, -(-end // size))
        self._num_full[self._batch.host_tables[0, row, indices]] = np.minimum(size, end - indices * size)
        self._num_known[row] = end

    def _num_found(self, blocks: list[int]) -> int:
        """How many tokens at the front of a table have KV."""
        full = self._num_full[blocks]
        partly = np.flatnonzero(full < self._batch.block_size)
        if not len(partly):
            return len(blocks) * self._batch.block_size
        return int(partly[0]) * self._batch.block_size + int(full[partly[0]])
