"""What a request does to single tokens' logits: logit_bias, allowed_token_ids, bad_words, min_tokens.

All are sums, a ban adds -inf, but for allowed_token_ids of few tokens. They are kept as lists of places, never as
[rows, vocab] masks; only an allowed_token_ids of many tokens is a line over the vocabulary, which a request's rows
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.params import SamplingSpec
from quire.sampling.phrases import PhraseBatch, Phrases, RowPhrases
from quire.sampling.transfer import to_device

# A list of places takes 8 bytes a token and row, a line 4 bytes a token of the vocabulary, once for a request.
_MANY_ALLOWED = 1024


class LogitEdits:
    """The edits of all rows."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _RowEdits] = {}
        self._phrases = Phrases(num_rows=num_rows, vocab_size=vocab_size, device=device)

    def add(self, row: int, spec: SamplingSpec, token_ids: Sequence[int]) -> None:
        edits = self._lower(spec)
        if edits is None:
            return
        self._rows[row] = edits
        if edits.phrases is not None:
            self._phrases.add(row, edits.phrases, token_ids)

    def fork(self, source_row: int, row: int, spec: SamplingSpec) -> None:
        source = self._rows.get(source_row)
        if source is not None and _wishes(source.spec) == _wishes(spec):
            edits: _RowEdits | None = source  # as in all forks of a request: its lists may be long
        else:
            edits = self._lower(spec)
        if edits is None:
            return
        self._rows[row] = edits
        if edits.phrases is not None:
            assert source is not None and source.spec.bad_words == spec.bad_words, (
                "a fork needs its source's bad words: only these were followed"
            )
            self._phrases.fork(source_row, row)

    def release(self, row: int) -> None:
        self._rows.pop(row, None)
        self._phrases.release(row)

    def has_phrases(self, row: int) -> bool:
        return row in self._rows and self._rows[row].phrases is not None

    def batch(self, rows: Sequence[int], bans_ends: Sequence[bool]) -> EditBatch | None:
        """What these rows, in this order, need. bans_ends: whether a row still has fewer than min_tokens."""
        places: list[npt.NDArray[np.int64]] = []
        values: list[npt.NDArray[np.float32]] = []
        allowed_indices: list[int] = []
        allowed_places: list[npt.NDArray[np.int64]] = []
        lines: dict[int, tuple[Tensor, list[int]]] = {}  # by the line's id
        for i, (row, bans_end) in enumerate(zip(rows, bans_ends, strict=True)):
            edits = self._rows.get(row)
            if edits is None:
                continue
            first = i * self._vocab_size
            if bans_end:
                places.append(edits.end_token_ids + first)
                values.append(np.full(len(edits.end_token_ids), -np.inf, dtype=np.float32))
            places.append(edits.token_ids + first)
            values.append(edits.values)
            if edits.allowed is not None:
                allowed_indices.append(i)
                allowed_places.append(edits.allowed + first)
            if edits.line is not None:
                lines.setdefault(id(edits.line), (edits.line, []))[1].append(i)
        sums = None
        if any(map(len, places)):
            sums = _Sums(self._put(np.concatenate(places)), to_device(np.concatenate(values), self._device))
        allowed = None
        if allowed_indices:
            allowed = _Allowed(self._put(allowed_indices), self._put(np.concatenate(allowed_places)))
        batch = EditBatch(
            sums,
            allowed,
            [(line, self._put(indices)) for line, indices in lines.values()],
            self._phrases.batch(rows),
        )
        return batch if batch.edits_any else None

    @property
    def num_bytes(self) -> int:
        lines = {id(edits.line): edits.line.nbytes for edits in self._rows.values() if edits.line is not None}
        return self._phrases.num_bytes + sum(lines.values())

    def _put(self, values: npt.ArrayLike) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), self._device)

    def _lower(self, spec: SamplingSpec) -> _RowEdits | None:
        """The spec's edits, or None. A ban of an id that has no logit is dropped: it cannot be sampled anyway."""
        bans = [word for word in spec.bad_words if word[-1] < self._vocab_size]
        sums: list[tuple[int, float]] = [(word[0], -np.inf) for word in bans if len(word) == 1]
        if spec.logit_bias:
            assert max(spec.logit_bias) < self._vocab_size, "logit_bias names a token outside the vocabulary"
            sums.extend(spec.logit_bias.items())
        phrases = RowPhrases.of([word for word in bans if len(word) > 1])
        allowed, line = None, None
        if spec.allowed_token_ids is not None:
            allowed = np.unique(np.array(spec.allowed_token_ids, dtype=np.int64))
            allowed = allowed[allowed < self._vocab_size]
            if len(allowed) > _MANY_ALLOWED:
                host_line = np.full(self._vocab_size, -np.inf, dtype=np.float32)
                host_line[allowed] = 0
                allowed, line = None, to_device(host_line, self._device)
        ends = [token for token in spec.end_token_ids if token < self._vocab_size] if spec.min_tokens else []
        if not sums and not ends and allowed is None and line is None and phrases is None:
            return None
        return _RowEdits(
            spec,
            np.array([token for token, _ in sums], dtype=np.int64),
            np.array([value for _, value in sums], dtype=np.float32),
            np.array(ends, dtype=np.int64),
            allowed,
            line,
            phrases,
        )


@dataclass(slots=True)
class _RowEdits:
    spec: SamplingSpec
    token_ids: npt.NDArray[np.int64]  # what logit_bias and bad words of one token add, and to what
    values: npt.NDArray[np.float32]
    end_token_ids: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.int64] | None  # where they are few,
    line: Tensor | None  # [vocab] where they are many: 0 for those, -inf for the others
    phrases: RowPhrases | None  # bad words of several tokens


def _wishes(spec: SamplingSpec) -> tuple[object, ...]:
    """All of a spec that edits depend on."""
    return spec.bad_words, spec.logit_bias, spec.allowed_token_ids, spec.min_tokens > 0, spec.end_token_ids


@dataclass(slots=True)
class _Sums:
    places: Tensor  # [n] in the flattened logits
    values: Tensor  # [n]


@dataclass(slots=True)
class _Allowed:
    indices: Tensor  # [n] rows of the logits
    places: Tensor  # [m] in the flattened logits: their allowed tokens


@dataclass(slots=True)
class EditBatch:
    """The edits of one batch."""

    sums: _Sums | None
    allowed: _Allowed | None
    lines: list[tuple[Tensor, Tensor]]  # [vocab] to add to each of these rows of the logits
    phrases: PhraseBatch | None

    @property
    def edits_any(self) -> bool:
        return bool(self.lines) or not (self.sums is None and self.allowed is None and self.phrases is None)

    def apply(self, logits: Tensor) -> None:
        """Change logits [rows, vocab], contiguous, in place."""
        flat = logits.view(-1)
        if self.allowed is not None:
            kept = flat[self.allowed.places]
            logits.index_fill_(0, self.allowed.indices, -torch.inf)
            flat[self.allowed.places] = kept
        for line, indices in self.lines:
            logits.index_add_(0, indices, line.expand(len(indices), -1))
        if self.sums is not None:
            flat.index_add_(0, self.sums.places, self.sums.values)
        if self.phrases is not None:
            self.phrases.apply(flat)

    def follow(self, token_ids: Tensor) -> None:
        """Append the sampled tokens, [rows], to the histories that bad words need."""
        if self.phrases is not None:
            self.phrases.follow(token_ids)
