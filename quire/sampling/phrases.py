"""Bad words of several tokens: the last one is banned while the others stand before it.

A row's words are flattened once, when the row is taken: one entry for each token that has to stand before another. So
a step costs what the words of its rows have together, however long the longest of them is. What depends on the rows
alone stays on the device until a row with such words comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling.transfer import to_device

_NOTHING = -1  # equals no token: stands before a history's first


@dataclass(slots=True)
class RowPhrases:
    """One row's words. Rows that were forked share it."""

    before: npt.NDArray[np.int32]  # [entries] the tokens that stand before, word by word
    columns: npt.NDArray[np.int32]  # [entries] where, counted from the right end of the tail: -1 is the newest token
    words: npt.NDArray[np.int32]  # [entries] whose they are
    last: npt.NDArray[np.int64]  # [words] the token that is banned then
    width: int  # the longest word's tokens but the last

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]]) -> RowPhrases | None:
        """None where there are no words. Each has two tokens or more."""
        if not words:
            return None
        lengths = np.array([len(word) - 1 for word in words], dtype=np.int32)
        num_entries = int(lengths.sum())
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        within = np.arange(num_entries, dtype=np.int32) - np.repeat(starts, lengths)
        return cls(
            before=np.fromiter(chain.from_iterable(word[:-1] for word in words), np.int32, num_entries),
            columns=within - np.repeat(lengths, lengths),
            words=np.repeat(np.arange(len(words), dtype=np.int32), lengths),
            last=np.array([word[-1] for word in words], dtype=np.int64),
            width=int(lengths.max()),
        )


class Phrases:
    """The words of all rows that have some, and those rows' last tokens."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, RowPhrases] = {}
        # The last tokens of each row, the newest on the right; as many as the longest word of them all needs.
        self._tails = torch.empty((num_rows, 0), dtype=torch.int32, device=device)
        self._last_table: tuple[list[int], _Table] | None = None

    def add(self, row: int, phrases: RowPhrases, token_ids: Sequence[int]) -> None:
        self._rows[row] = phrases
        self._fit()
        width = self._tails.shape[1]
        tail = ([_NOTHING] * width + list(token_ids[-width:]))[-width:]
        self._tails[row].copy_(to_device(np.array(tail, dtype=np.int32), self._device))

    def fork(self, source_row: int, row: int) -> None:
        self._rows[row] = self._rows[source_row]
        self._tails[row].copy_(self._tails[source_row])
        self._last_table = None

    def release(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._fit()

    def batch(self, rows: Sequence[int]) -> PhraseBatch | None:
        """What those of these rows, in this order, need that have words; None where none has."""
        indices = [i for i, row in enumerate(rows) if row in self._rows]
        if not indices:
            return None
        followed = [rows[i] for i in indices]
        if self._last_table is None or self._last_table[0] != followed:
            self._last_table = (followed, self._new_table(followed))
        table = self._last_table[1]
        placed = to_device(np.array(indices, dtype=np.int64), self._device)
        return PhraseBatch(self._tails, table, placed, placed[table.owners] * self._vocab_size + table.last)

    @property
    def num_bytes(self) -> int:
        return self._tails.nbytes

    def _new_table(self, rows: list[int]) -> _Table:
        found = [self._rows[row] for row in rows]
        num_words = np.array([len(phrases.last) for phrases in found])
        first_words = np.cumsum(num_words) - num_words
        width = self._tails.shape[1]
        ends = [(row + 1) * width for row in rows]
        return _Table(
            before=self._put([phrases.before for phrases in found]),
            places=self._put([phrases.columns + np.int32(end) for phrases, end in zip(found, ends, strict=True)]),
            words=self._put([p.words + np.int32(first) for p, first in zip(found, first_words, strict=True)]),
            last=self._put([phrases.last for phrases in found]),
            owners=self._put([np.repeat(np.arange(len(rows)), num_words)]),
            rows=self._put([np.array(rows, dtype=np.int64)]),
        )

    def _put(self, pieces: list[npt.NDArray[np.int32]] | list[npt.NDArray[np.int64]]) -> Tensor:
        return to_device(np.concatenate(pieces), self._device)

    def _fit(self) -> None:
        """Make the tails as wide as the longest word of the rows that are here needs, after these changed."""
        self._last_table = None
        width = max((phrases.width for phrases in self._rows.values()), default=0)
        num_new = width - self._tails.shape[1]
        if num_new > 0:
            # What stood before is unknown, but the rows that are here already look no further than they have.
            new = self._tails.new_full((len(self._tails), num_new), _NOTHING)
            self._tails = torch.cat((new, self._tails), dim=1)
        elif num_new < 0:
            self._tails = self._tails[:, -num_new:].clone()


@dataclass(slots=True)
class _Table:
    """The words of some rows, one after another."""

    before: Tensor  # [entries] int32
    places: Tensor  # [entries] int32, in the flattened tails
    words: Tensor  # [entries] int32
    last: Tensor  # [words] int64
    owners: Tensor  # [words] int64, which of the rows
    rows: Tensor  # [n] int64


@dataclass(slots=True)
class PhraseBatch:
    """The words of one batch."""

    tails: Tensor  # [rows of the sampler, width] int32
    table: _Table
    indices: Tensor  # [n] the batch's rows with words
    bans: Tensor  # [words] in the flattened logits: what each word's last token is

    def apply(self, flat_logits: Tensor) -> None:
        """Ban the last token of each word whose others stand before it."""
        table = self.table
        differs = self.tails.view(-1).index_select(0, table.places) != table.before
        num_differing = torch.zeros_like(table.last, dtype=torch.int32).index_add_(0, table.words, differs.int())
        added = torch.zeros_like(num_differing, dtype=torch.float32).masked_fill_(num_differing == 0, -torch.inf)
        flat_logits.index_add_(0, self.bans, added)

    def follow(self, token_ids: Tensor) -> None:
        """Append the sampled tokens, [rows], to the tails."""
        sampled = token_ids[self.indices, None].int()
        rows = self.table.rows
        self.tails[rows] = torch.cat((self.tails[rows, 1:], sampled), dim=1)
