"""Which layers keep their K and V together: KV groups, and where each layer's lie in a block.

Layers that see everything keep all positions; layers with a sliding window can give back what is behind it. So they
have block tables of their own. All groups have the same number of layers, so that one pool of equal blocks serves
them all: a block is `block_size` tokens of one group's layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from quire.models.spec import ModelSpec
from quire.plan import max_window_blocks

_MAX_PADDING = 0.1  # share of a block that may belong to no layer, for fewer groups


@dataclass(slots=True, frozen=True)
class KVLayout:
    """Layer i belongs to group groups[i], and is layer slots[i] of that group's blocks."""

    windows: tuple[int | None, ...]  # by group; groups that see everything come first
    num_slots: int  # layers in a block, of which some groups may leave a few empty
    groups: tuple[int, ...]
    slots: tuple[int, ...]

    def block_bytes(self, spec: ModelSpec, block_size: int, value_bytes: int) -> int:
        return self.num_slots * spec.kv_values_per_layer * block_size * value_bytes

    def blocks_for(self, num_tokens: int, block_size: int, max_span_tokens: int) -> int:
        """Blocks that one sequence takes at most, in all groups, where a step computes so many of its tokens."""
        num = -(-num_tokens // block_size)
        limits = [num if w is None else max_window_blocks(w, block_size, max_span_tokens) for w in self.windows]
        return sum(min(num, limit) for limit in limits)

    def capacity_tokens(self, num_blocks: int, block_size: int, max_span_tokens: int, most: int) -> int:
        """The longest sequence that so many blocks hold, where none is longer than `most` tokens."""
        lengths = range(0, -(-most // block_size) * block_size + 1, block_size)
        num_fit = bisect_right(lengths, num_blocks, key=lambda n: self.blocks_for(n, block_size, max_span_tokens))
        return lengths[num_fit - 1]


def kv_layout(spec: ModelSpec, max_model_len: int | None) -> KVLayout:
    """max_model_len: the longest that sequences get; a window at least as long is none."""
    longest = max_model_len or spec.max_position
    windows = [None if layer.window is None or layer.window >= longest else layer.window for layer in spec.layers]
    kinds = Counter(windows)
    # Full attention first: shared prefixes are looked up in the first group's tables.
    order = sorted(kinds, key=lambda window: (window is not None, window))
    num_slots = next(
        size
        for size in range(min(kinds.values()), 0, -1)
        if sum(-count % size for count in kinds.values()) <= _MAX_PADDING * spec.num_layers
    )
    first_group: dict[int | None, int] = {}
    group_windows: list[int | None] = []
    for window in order:
        first_group[window] = len(group_windows)
        group_windows += [window] * -(-kinds[window] // num_slots)
    groups, slots = [], []
    seen: Counter[int | None] = Counter()
    for window in windows:
        groups.append(first_group[window] + seen[window] // num_slots)
        slots.append(seen[window] % num_slots)
        seen[window] += 1
    return KVLayout(tuple(group_windows), num_slots, tuple(groups), tuple(slots))
