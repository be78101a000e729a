"""Ranking beams where their logits are: of all tokens after all beams of a request, those with the largest scores.

Each row's own best tokens are found first, then the best of these: a group needs no more of a row than it answers in
all. Groups of one shape are ranked together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.plan import BeamCandidate, BeamGroup, TokenLogprobs
from quire.request import FinishReason
from quire.sampling.logprobs import log_totals, top_tokens
from quire.sampling.sampler import NOT_FINITE, SampledBatch
from quire.sampling.transfer import HostCopy, to_device
from quire.sampling.verification import VerifiedBatch


class PendingRanking:
    """Candidates of some groups on their way to the host; only `to_lists` waits for them."""

    def __init__(self, groups: Sequence[BeamGroup], copies: dict[tuple[int, int], tuple[list[int], HostCopy]]) -> None:
        self._groups = groups
        self._copies = copies  # by shape: which groups, and their candidates

    def to_lists(self) -> list[list[BeamCandidate]]:
        """The candidates of each group, the best first; none where its logits are not finite."""
        found: list[list[BeamCandidate]] = [[] for _ in self._groups]
        for members, copy in self._copies.values():
            integers, floats = copy.wait()
            for group, ints, numbers in zip(members, integers.tolist(), floats.tolist(), strict=True):
                if all(map(np.isfinite, numbers[0])):
                    found[group] = [
                        BeamCandidate(parent, token, score, logprob, rank)
                        for parent, token, rank, score, logprob in zip(*ints, *numbers, strict=True)
                    ]
        return found


def rank_beams(logits: Tensor, groups: Sequence[BeamGroup], temperatures: Sequence[float]) -> PendingRanking:
    """logits: [beams, vocab] float32, the rows of each group in turn. A temperature of 0 changes nothing, as 1."""
    copies: dict[tuple[int, int], tuple[list[int], HostCopy]] = {}
    firsts = np.cumsum([0] + [len(group.rows) for group in groups])
    shapes: dict[tuple[int, int], list[int]] = {}
    for i, group in enumerate(groups):
        shapes.setdefault((len(group.rows), group.num_candidates), []).append(i)
    for (width, num_candidates), members in shapes.items():
        lines = logits
        if len(shapes) > 1:
            indices = np.concatenate([np.arange(firsts[i], firsts[i] + width) for i in members])
            lines = logits.index_select(0, to_device(indices, logits.device))
        scales = [temperatures[i] or 1.0 for i in members]
        if any(scale != 1.0 for scale in scales):
            lines = lines / to_device(np.repeat(np.array(scales, dtype=np.float32), width), logits.device)[:, None]
        scores = np.array([groups[i].scores for i in members], dtype=np.float32)
        copies[width, num_candidates] = members, _rank(lines, to_device(scores, logits.device), num_candidates)
    return PendingRanking(groups, copies)


def _rank(logits: Tensor, scores: Tensor, num_candidates: int) -> HostCopy:
    """logits: [groups * width, vocab]; scores: [groups, width]. Gives [groups, 3, candidates] integers (parent, token,
    rank) and [groups, 2, candidates] floats (score, logprob)."""
    num_groups, width = scores.shape
    values, token_ids = top_tokens(logits, min(num_candidates, logits.shape[1]))
    logprobs = values - log_totals(logits)
    num_top = values.shape[1]
    logprobs = logprobs.reshape(num_groups, width * num_top)
    totals = (logprobs.view(num_groups, width, num_top) + scores[:, :, None]).view(num_groups, -1)
    best, places = totals.topk(num_candidates, dim=1)
    integers = torch.stack(
        [places // num_top, token_ids.reshape(num_groups, -1).gather(1, places), places % num_top + 1], dim=1
    )
    return HostCopy(integers, torch.stack([best, logprobs.gather(1, places)], dim=1))


class RankedBatch:
    """As SampledBatch, for a step with beams: their rows have no tokens, and `candidates` has what they have."""

    def __init__(
        self,
        rows: Sequence[int],
        others: Sequence[int],
        sampled: SampledBatch | VerifiedBatch | None,
        groups: Sequence[BeamGroup],
        ranking: PendingRanking,
    ) -> None:
        """`others`: which of the rows are no beams; they were sampled."""
        self._rows = rows
        self._others = others
        self._sampled = sampled
        self._groups = groups
        self._ranking = ranking

    def candidates(self) -> list[list[BeamCandidate]]:
        """Waits for the device."""
        return self._ranking.to_lists()

    def to_lists(
        self,
    ) -> tuple[list[list[int]], dict[int, list[TokenLogprobs]], dict[int, tuple[FinishReason, str]]]:
        """As of SampledBatch."""
        tokens: list[list[int]] = [[] for _ in self._rows]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        failed: dict[int, tuple[FinishReason, str]] = {}
        if self._sampled is not None:
            some_tokens, some_logprobs, some_failed = self._sampled.to_lists()
            for i, line in zip(self._others, some_tokens, strict=True):
                tokens[i] = line
            logprobs = {self._others[i]: entries for i, entries in some_logprobs.items()}
            failed = {self._others[i]: why for i, why in some_failed.items()}
        places = {row: i for i, row in enumerate(self._rows)}
        for group, found in zip(self._groups, self.candidates(), strict=True):
            if not found:
                failed |= {places[row]: NOT_FINITE for row in group.rows}
        return tokens, logprobs, failed
