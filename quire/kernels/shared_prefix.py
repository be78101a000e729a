"""Which decodes begin with the same blocks: found on the host, from the block tables, whenever the batch changes.

    groups = find_shared_prefixes(tables, num_full_blocks, block_size)
    packed = pack_shared_prefixes(groups, num_seqs, max_groups)      # one array, one transfer
    batch.shared = unpack_shared_prefixes(packed_on_the_device, num_seqs, max_groups)

A grouping stays right while its members decode: tables only grow at their end, and a block that is full and shared is
never written again. It has to be found anew when a member leaves, since another sequence may get its place in the
batch. Sequences that join meanwhile are served without a prefix until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.kernels.interface import PREFIX_ALIGN, SharedPrefixes

if TYPE_CHECKING:
    from torch import Tensor

MIN_MEMBERS = 4  # below, each sequence reads the prefix about as fast for itself
MIN_SAVED_TOKENS = 4096  # KV tokens that a group must spare each layer to be worth its launch

Ints = NDArray[np.integer[Any]]


@dataclass(slots=True, frozen=True)
class PrefixGroup:
    """Sequences, by their place in the batch, whose first num_tokens tokens lie in the same blocks."""

    members: Ints
    num_tokens: int

    @property
    def num_saved_tokens(self) -> int:
        return (len(self.members) - 1) * self.num_tokens


def find_shared_prefixes(
    tables: Ints,  # [seqs, max_blocks]
    num_full_blocks: Ints,  # [seqs]: blocks of each that are full before this step's token
    block_size: int,
    *,
    max_groups: int = 16,
) -> list[PrefixGroup]:
    """The groups that spare the most reads, each sequence in one of them at most.

    Where all share a little and some share more (a system prompt, then documents), the cut is made where more is
    spared: one large group with a short prefix, or several small ones with longer prefixes.
    """
    step = PREFIX_ALIGN // block_size
    limits = num_full_blocks // step  # in units of PREFIX_ALIGN tokens
    found = _best_groups(tables, limits, np.flatnonzero(limits > 0), 0, step)
    found = [group for group in found if group.num_saved_tokens >= MIN_SAVED_TOKENS]
    return sorted(found, key=lambda group: -group.num_saved_tokens)[:max_groups]


def _best_groups(tables: Ints, limits: Ints, rows: Ints, depth: int, step: int) -> list[PrefixGroup]:
    """The best division into groups of rows whose first `depth` units are equal."""
    rows = rows[limits[rows] > depth]
    if len(rows) < MIN_MEMBERS:
        return []
    best: list[PrefixGroup] = []
    keys = tables[rows, depth * step]
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    for alike in np.split(rows[order], cuts):
        if len(alike) < MIN_MEMBERS:
            continue
        whole = _common_units(tables, alike, depth, int(limits[alike].max()), limits, step)
        if whole == depth:
            continue
        group = PrefixGroup(alike, whole * PREFIX_ALIGN)
        parts = _best_groups(tables, limits, alike, whole, step)
        best += parts if sum(part.num_saved_tokens for part in parts) > group.num_saved_tokens else [group]
    return best


def _common_units(tables: Ints, rows: Ints, depth: int, end: int, limits: Ints, step: int) -> int:
    """How many units all the rows share, given that they share `depth`; `end` bounds it."""
    end = min(end, int(limits[rows].min()))
    first = tables[rows[0]]
    while depth < end:
        # Doubling strides: a long prefix costs few calls, a short one little work.
        stop = min(end, max(2 * depth, depth + 4))
        columns = slice(depth * step, stop * step)
        alike = (tables[rows, columns] == first[columns]).all(axis=0)
        if not alike.all():
            return depth + int(np.argmin(alike)) // step
        depth = stop
    return depth


def pack_shared_prefixes(groups: list[PrefixGroup], num_seqs: int, max_groups: int) -> NDArray[np.int32]:
    """Everything that a SharedPrefixes holds, in one array of fixed length."""
    assert len(groups) <= max_groups
    members = [group.members for group in groups]
    seq_lens = np.zeros(num_seqs, dtype=np.int32)
    group_lens = np.zeros(max_groups, dtype=np.int32)
    starts = np.zeros(max_groups + 1, dtype=np.int32)
    for i, group in enumerate(groups):
        seq_lens[group.members] = group_lens[i] = group.num_tokens
        starts[i + 1] = starts[i] + len(group.members)
    starts[len(groups) + 1 :] = starts[len(groups)]
    rest = np.flatnonzero(seq_lens == 0)
    return np.concatenate([*members, rest, starts, group_lens, seq_lens]).astype(np.int32)


def packed_length(num_seqs: int, max_groups: int) -> int:
    return 2 * num_seqs + 2 * max_groups + 1


def unpack_shared_prefixes(packed: Tensor, num_seqs: int, max_groups: int) -> SharedPrefixes:
    """Views into the packed array on the device: int32 [packed_length]."""
    lengths = [num_seqs, max_groups + 1, max_groups, num_seqs]
    members, starts, lens, seq_lens = packed.split(lengths)  # type: ignore[no-untyped-call]
    return SharedPrefixes(members=members, group_starts=starts, group_lens=lens, seq_lens=seq_lens)
