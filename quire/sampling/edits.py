"""What a request does to single tokens' logits: logit_bias, allowed_token_ids, bad_words, min_tokens.

All but allowed_token_ids are sums: a ban adds -inf. They are kept as lists of places, never as [rows, vocab] masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.params import SamplingSpec
from quire.sampling.transfer import to_device

_ANY = -1  # matches every token: fills up the prefixes that are shorter than the longest
_NOTHING = -2  # matches no prefix: stands before a history's first token


class LogitEdits:
    """The edits of all rows, and the last tokens of those rows whose bad words have several tokens."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _RowEdits] = {}
        # The last tokens of each row, the newest on the right; as many as the longest prefix of a bad word needs.
        self._tails = torch.empty((num_rows, 0), dtype=torch.int64, device=device)

    def add(self, row: int, spec: SamplingSpec, token_ids: Sequence[int]) -> None:
        edits = _lower(spec, self._vocab_size)
        if edits is None:
            return
        self._rows[row] = edits
        if edits.phrases:
            self._widen(max(len(prefix) for prefix, _ in edits.phrases))
            width = self._tails.shape[1]
            tail = ([_NOTHING] * width + list(token_ids[-width:]))[-width:]
            self._tails[row].copy_(to_device(np.array(tail, dtype=np.int64), self._device))

    def fork(self, source_row: int, row: int, spec: SamplingSpec) -> None:
        edits = _lower(spec, self._vocab_size)
        if edits is None:
            return
        self._rows[row] = edits
        if edits.phrases:
            source = self._rows.get(source_row)
            assert source and source.phrases == edits.phrases, (
                "a fork needs its source's bad words: only these were followed"
            )
            self._tails[row].copy_(self._tails[source_row])

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def batch(self, rows: Sequence[int], bans_ends: Sequence[bool]) -> EditBatch | None:
        """What these rows, in this order, need. bans_ends: whether a row still has fewer than min_tokens."""
        places: list[npt.NDArray[np.int64]] = []
        values: list[npt.NDArray[np.float32]] = []
        allowed_indices: list[int] = []
        allowed_places: list[npt.NDArray[np.int64]] = []
        prefixes: list[tuple[int, ...]] = []
        phrase_rows: list[int] = []
        phrase_places: list[int] = []
        followed_indices: list[int] = []
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
            if edits.phrases:
                followed_indices.append(i)
            for prefix, last in edits.phrases:
                prefixes.append((_ANY,) * (self._tails.shape[1] - len(prefix)) + prefix)
                phrase_rows.append(row)
                phrase_places.append(first + last)
        sums = None
        if any(map(len, places)):
            sums = _Sums(self._put(np.concatenate(places)), to_device(np.concatenate(values), self._device))
        allowed = None
        if allowed_indices:
            allowed = _Allowed(self._put(allowed_indices), self._put(np.concatenate(allowed_places)))
        phrases = None
        if prefixes:
            followed_rows = [rows[i] for i in followed_indices]
            phrases = _Phrases(
                self._tails,
                *(self._put(x) for x in (prefixes, phrase_rows, phrase_places, followed_indices, followed_rows)),
            )
        if sums is None and allowed is None and phrases is None:
            return None
        return EditBatch(sums, allowed, phrases)

    @property
    def num_bytes(self) -> int:
        return self._tails.nbytes

    def _put(self, values: npt.ArrayLike) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), self._device)

    def _widen(self, width: int) -> None:
        num_new = width - self._tails.shape[1]
        if num_new > 0:
            # What stood before is unknown, but the rows that are here already match no more than they have.
            new = self._tails.new_full((len(self._tails), num_new), _NOTHING)
            self._tails = torch.cat((new, self._tails), dim=1)


@dataclass(slots=True)
class _RowEdits:
    token_ids: npt.NDArray[np.int64]  # what logit_bias and bad words of one token add, and to what
    values: npt.NDArray[np.float32]
    end_token_ids: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.int64] | None
    phrases: list[tuple[tuple[int, ...], int]]  # bad words of several tokens: what stands before, the last token


def _lower(spec: SamplingSpec, vocab_size: int) -> _RowEdits | None:
    """The spec's edits, or None. A ban of an id that has no logit is dropped: it cannot be sampled anyway."""
    sums = [(word[0], -np.inf) for word in spec.bad_words if len(word) == 1 and word[0] < vocab_size]
    if spec.logit_bias:
        assert max(spec.logit_bias) < vocab_size, "logit_bias names a token outside the vocabulary"
        sums.extend(spec.logit_bias.items())
    phrases = [(word[:-1], word[-1]) for word in spec.bad_words if len(word) > 1 and word[-1] < vocab_size]
    allowed = None
    if spec.allowed_token_ids is not None:
        allowed = np.unique(np.array(spec.allowed_token_ids, dtype=np.int64))
        allowed = allowed[allowed < vocab_size]
    ends = np.array([t for t in spec.end_token_ids if t < vocab_size] if spec.min_tokens else [], dtype=np.int64)
    if not sums and not phrases and allowed is None and not len(ends):
        return None
    return _RowEdits(
        np.array([token for token, _ in sums], dtype=np.int64),
        np.array([value for _, value in sums], dtype=np.float32),
        ends,
        allowed,
        phrases,
    )


@dataclass(slots=True)
class _Sums:
    places: Tensor  # [n] in the flattened logits
    values: Tensor  # [n]


@dataclass(slots=True)
class _Allowed:
    indices: Tensor  # [n] rows of the logits
    places: Tensor  # [m] in the flattened logits: their allowed tokens


@dataclass(slots=True)
class _Phrases:
    tails: Tensor  # [rows of the sampler, width]
    prefixes: Tensor  # [n, width], _ANY before shorter ones
    rows: Tensor  # [n] whose tail to compare
    places: Tensor  # [n] in the flattened logits: the last token
    followed_indices: Tensor  # [m] the batch's rows with phrases,
    followed_rows: Tensor  # [m] and which rows of the sampler they are


@dataclass(slots=True)
class EditBatch:
    """The edits of one batch."""

    sums: _Sums | None
    allowed: _Allowed | None
    phrases: _Phrases | None

    def apply(self, logits: Tensor) -> None:
        """Change logits [rows, vocab], contiguous, in place."""
        flat = logits.view(-1)
        if self.allowed is not None:
            kept = flat[self.allowed.places]
            logits.index_fill_(0, self.allowed.indices, -torch.inf)
            flat[self.allowed.places] = kept
        if self.sums is not None:
            flat.index_add_(0, self.sums.places, self.sums.values)
        if self.phrases is not None:
            prefixes = self.phrases.prefixes
            matches = ((prefixes == self.phrases.tails[self.phrases.rows]) | (prefixes == _ANY)).all(1)
            bans = torch.zeros_like(self.phrases.places, dtype=torch.float32).masked_fill_(matches, -torch.inf)
            flat.index_add_(0, self.phrases.places, bans)

    def follow(self, token_ids: Tensor) -> None:
        """Append the sampled tokens, [rows], to the tails that are followed."""
        if self.phrases is not None:
            tails = self.phrases.tails[self.phrases.followed_rows]
            sampled = token_ids[self.phrases.followed_indices]
            self.phrases.tails[self.phrases.followed_rows] = torch.cat((tails[:, 1:], sampled[:, None]), dim=1)
