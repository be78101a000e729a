"""Presence, frequency and repetition penalties: how often each token stands in a row's history.

One integer per row and token: bit 0 says that the prompt has the token, the bits above count it in the output. Only
rows with a penalty have such a line of counts; lines are allocated when first used, and grow by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.params import SamplingSpec
from quire.sampling.scratch import Scratch
from quire.sampling.select import chunks
from quire.sampling.transfer import to_device

_MIN_LINES = 4


def has_penalties(spec: SamplingSpec) -> bool:
    return spec.presence_penalty != 0 or spec.frequency_penalty != 0 or spec.repetition_penalty != 1


class Penalties:
    """The counts of all rows that have penalties, on the device. A row has a line from add or fork until release."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device, max_model_len: int) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = device
        # A count reaches max_model_len at most, and is doubled.
        self._dtype = torch.int16 if 2 * max_model_len + 1 <= torch.iinfo(torch.int16).max else torch.int32
        self._counts = torch.zeros((0, vocab_size), dtype=self._dtype, device=device)
        self._line_of: dict[int, int] = {}  # by row
        self._free: list[int] = []
        self._specs: dict[int, SamplingSpec] = {}

    def add(self, row: int, spec: SamplingSpec, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        line = self._take_line(row, spec)
        counts = self._counts[line].zero_()
        history = np.asarray(token_ids, dtype=np.int64)
        prompt = np.unique(history[:num_prompt_tokens])
        output, num_times = np.unique(history[num_prompt_tokens:], return_counts=True)
        for tokens, increments in ((prompt, np.ones_like(prompt)), (output, 2 * num_times)):
            known = tokens < self._vocab_size  # a prompt may hold ids that have no logit
            if known.any():
                values = to_device(increments[known], self._device).to(self._dtype)
                counts.index_add_(0, to_device(tokens[known], self._device), values)

    def fork(self, source_row: int, row: int, spec: SamplingSpec) -> None:
        assert source_row in self._line_of, f"row {source_row} has no penalties to fork"
        line = self._take_line(row, spec)
        self._counts[line].copy_(self._counts[self._line_of[source_row]])

    def release(self, row: int) -> None:
        if row in self._line_of:
            self._free.append(self._line_of.pop(row))
            del self._specs[row]

    def has(self, row: int) -> bool:
        return row in self._line_of

    def batch(self, rows: Sequence[int]) -> PenaltyBatch | None:
        """What these rows, in this order, need to apply and to follow their penalties; None where none has any."""
        indices = [i for i, row in enumerate(rows) if row in self._line_of]
        if not indices:
            return None
        specs = [self._specs[rows[i]] for i in indices]
        values = [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in specs]
        columns = to_device(np.array(values, dtype=np.float32), self._device)
        lines = np.array([self._line_of[rows[i]] for i in indices], dtype=np.int64)
        return PenaltyBatch(
            self._counts,
            None if len(indices) == len(rows) else to_device(np.array(indices, dtype=np.int64), self._device),
            to_device(lines, self._device),
            repetition=columns[:, 0:1] if any(s.repetition_penalty != 1 for s in specs) else None,
            frequency=columns[:, 1:2],
            presence=columns[:, 2:3],
        )

    @property
    def num_bytes(self) -> int:
        return self._counts.nbytes

    @property
    def max_num_bytes(self) -> int:
        return self._num_rows * self._vocab_size * self._dtype.itemsize

    def _take_line(self, row: int, spec: SamplingSpec) -> int:
        assert row not in self._line_of, f"row {row} already has penalties"
        if not self._free:
            old = len(self._counts)
            new = min(self._num_rows, max(_MIN_LINES, 2 * old))
            grown = torch.zeros((new, self._vocab_size), dtype=self._dtype, device=self._device)
            grown[:old] = self._counts
            self._counts = grown
            self._free.extend(reversed(range(old, new)))
        self._specs[row] = spec
        self._line_of[row] = self._free.pop()
        return self._line_of[row]


@dataclass(slots=True)
class PenaltyBatch:
    """The penalised rows of one batch."""

    counts: Tensor  # [lines, vocab]: all rows' counts
    indices: Tensor | None  # [n] places in the batch; None: the batch itself
    lines: Tensor  # [n] lines of counts
    repetition: Tensor | None  # [n, 1] float32 each
    frequency: Tensor
    presence: Tensor

    def apply(self, logits: Tensor, scratch: Scratch) -> None:
        """Change the penalised rows of logits [rows, vocab] in place."""
        for rows in chunks(len(self.lines), logits.shape[1], logits.device):
            shape = (len(self.lines[rows]), logits.shape[1])
            counts = scratch.get("counts", shape, self.counts.dtype)
            torch.index_select(self.counts, 0, self.lines[rows], out=counts)
            if self.indices is None:
                self._penalise(logits[rows], counts, rows, scratch)
            else:
                penalised = torch.index_select(logits, 0, self.indices[rows], out=scratch.get("taken", shape))
                self._penalise(penalised, counts, rows, scratch)
                logits.index_copy_(0, self.indices[rows], penalised)

    def _penalise(self, logits: Tensor, counts: Tensor, rows: slice, scratch: Scratch) -> None:
        first, second = scratch.get("weights", logits.shape), scratch.get("noise", logits.shape)
        if self.repetition is not None:
            # Divided where positive, multiplied where negative: one of the two terms is zero.
            penalty = first.copy_(counts).clamp_(max=1).mul_(self.repetition[rows] - 1).add_(1)  # 1 where not seen
            negative = torch.clamp(logits, max=0, out=second).mul_(penalty)
            logits.clamp_(min=0).div_(penalty).add_(negative)
        num_times = first.copy_(counts.bitwise_right_shift_(1))
        logits.sub_(torch.clamp(num_times, max=1, out=second).mul_(self.presence[rows]))
        logits.sub_(num_times.mul_(self.frequency[rows]))

    def follow(self, token_ids: Tensor) -> None:
        """Count the sampled tokens: [rows], one for each row of the batch."""
        sampled = token_ids if self.indices is None else token_ids[self.indices]
        places = self.lines * self.counts.shape[1] + sampled
        self.counts.view(-1).index_add_(0, places, torch.full_like(places, 2, dtype=self.counts.dtype))
