"""Verifying drafts: every position of a span is sampled from, and drafts count while they equal what was sampled.

Noise is a function of seed and position alone, so a position gets the token that decoding one by one would have drawn
there from the same logits. A draft is never more than a guess of that token: accepting it changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.plan import TokenLogprobs
from quire.request import FinishReason
from quire.sampling.masks import TokenMasks
from quire.sampling.sampler import SampledBatch, Sampler
from quire.sampling.transfer import to_device

_Lists = tuple[list[list[int]], dict[int, list[TokenLogprobs]], dict[int, tuple[FinishReason, str]]]


@dataclass(slots=True)
class SampledPart:
    """Some positions that were sampled together: entry i is the (depths[i])th token of the (owners[i])th row."""

    owners: list[int]
    depths: list[int]
    rows: list[int]
    positions: list[int]
    sampled: SampledBatch


class VerifiedBatch:
    """As SampledBatch, with a list of tokens for each row."""

    def __init__(self, drafts: list[list[int]], parts: list[SampledPart]) -> None:
        self._drafts = drafts
        self.parts = parts
        self._lists: _Lists | None = None

    def to_lists(self) -> _Lists:
        """As of SampledBatch: the accepted drafts of each row and the token after them. Waits for the device. Asked by
        whoever judges the drafts and by whoever collects the step: worked out once."""
        if self._lists is None:
            self._lists = self._to_lists()
        return self._lists

    def _to_lists(self) -> _Lists:
        tokens: list[dict[int, int]] = [{} for _ in self._drafts]
        entries: dict[tuple[int, int], TokenLogprobs] = {}
        failures: dict[tuple[int, int], tuple[FinishReason, str]] = {}
        for part in self.parts:
            part_tokens, part_logprobs, part_failed = part.sampled.to_lists()
            for i, (owner, depth) in enumerate(zip(part.owners, part.depths, strict=True)):
                if i in part_failed:
                    failures[owner, depth] = part_failed[i]
                else:
                    tokens[owner][depth] = part_tokens[i][0]
                if i in part_logprobs:
                    entries[owner, depth] = part_logprobs[i][0]
        accepted = [_accepted(drafts, tokens[i]) for i, drafts in enumerate(self._drafts)]
        # A row fails only at a position that it comes to. The tokens before it count all the same.
        failed = {i: failures[i, len(line)] for i, line in enumerate(accepted) if (i, len(line)) in failures}
        logprobs = {
            i: [entries[i, depth] for depth in range(len(line))]
            for i, line in enumerate(accepted)
            if line and (i, 0) in entries
        }
        return accepted, logprobs, failed


def verify_drafts(
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    drafts: list[list[int]],
    masks: TokenMasks | None = None,
) -> VerifiedBatch:
    """Sample rows whose drafts were run: logits has 1 + len(drafts[i]) lines for rows[i], whose first token is drawn at
    positions[i].

    Where a row's logits depend on the tokens before them (penalties, bad words of several tokens), its positions are
    sampled one after another, and only as long as its drafts are right.
    """
    firsts = np.cumsum([0] + [1 + len(each) for each in drafts]).tolist()
    at_once: list[tuple[int, int]] = []
    in_turn: list[int] = []
    for i, row in enumerate(rows):
        if drafts[i] and sampler.has_history(row):
            in_turn.append(i)
        else:
            at_once += [(i, depth) for depth in range(1 + len(drafts[i]))]

    def sample(entries: list[tuple[int, int]]) -> SampledPart:
        owners, depths = [owner for owner, _ in entries], [depth for _, depth in entries]
        some_rows = [rows[owner] for owner in owners]
        some_positions = [positions[owner] + depth for owner, depth in entries]
        lines, of_lines = logits, masks
        if len(entries) != len(logits):
            places = [firsts[owner] + depth for owner, depth in entries]
            lines = logits.index_select(0, to_device(np.array(places, dtype=np.int64), logits.device))
            of_lines = masks and masks.select(places)
        sampled = sampler.sample(lines, some_rows, some_positions, of_lines)
        return SampledPart(owners, depths, some_rows, some_positions, sampled)

    parts = [sample(at_once)] if at_once else []
    depth, alive = 0, in_turn
    while alive:
        part = sample([(owner, depth) for owner in alive])
        parts.append(part)
        tokens, _, _ = part.sampled.to_lists()
        alive = [
            owner
            for owner, drawn in zip(alive, tokens, strict=True)
            if depth < len(drafts[owner]) and drawn == [drafts[owner][depth]]
        ]
        depth += 1
    return VerifiedBatch(drafts, parts)


def _accepted(drafts: list[int], tokens: dict[int, int]) -> list[int]:
    """What was sampled at each depth, up to and with the first that the drafts did not foresee."""
    line: list[int] = []
    for depth in range(1 + len(drafts)):
        if depth not in tokens:
            break  # it failed, or it was not come to
        line.append(tokens[depth])
        if depth < len(drafts) and tokens[depth] != drafts[depth]:
            break
    return line
