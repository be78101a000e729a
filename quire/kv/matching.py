"""How long a prefix is there already: on the device, and with what levels below it have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.kv.hashing import BlockHash, in_group
from quire.kv.prefix_cache import HasBelow, MatchedSlices, PrefixMatch
from quire.kv.table import first_seen_block
from quire.request import CacheOutcome

if TYPE_CHECKING:
    from quire.kv.manager import KVManager
    from quire.kv.tiers import Tiers

_MAX_CUTS = 16  # lengths at which loading may stop, that are weighed against each other


def longest_match(
    kv: KVManager,
    hashes: list[BlockHash],
    root: BlockHash,
    token_ids: Sequence[int],
    num_blocks: int,
    below: HasBelow | None = None,
) -> int:
    """The longest prefix of at most `num_blocks` blocks that the device has, or that is `below`. A windowed group needs
    only the blocks that the token after it sees. `hashes` is the chain as far as it is known, and is extended."""
    cache, num_matched = kv.cache, num_blocks
    if None not in kv.windows:
        cache.extend_chain(hashes, root, token_ids, num_blocks)
    for group, window in enumerate(kv.windows):
        if window is None:
            num_matched = cache.count_prefix(hashes, root, token_ids, num_matched, group, below)
    return _with_windows(kv, hashes, num_matched, below)


def _with_windows(kv: KVManager, hashes: list[BlockHash], num_blocks: int, below: HasBelow | None) -> int:
    """The longest part of a prefix, whose blocks other groups have, of which windowed groups have what they need."""
    # By windowed group: how many known blocks in a row end with each index.
    runs = [
        (window, kv.cache.runs(hashes[:num_blocks], group, below))
        for group, window in enumerate(kv.windows)
        if window is not None
    ]
    while num_blocks and any(
        run[num_blocks - 1] < num_blocks - first_seen_block(num_blocks * kv.block_size, window, kv.block_size)
        for window, run in runs
    ):
        num_blocks -= 1
    return num_blocks


def slices_of(kv: KVManager, hashes: list[BlockHash], num_blocks: int) -> MatchedSlices:
    """The blocks of each group that a prefix of so many blocks needs; None where the device has not got it."""
    slices: MatchedSlices = []
    for group, window in enumerate(kv.windows):
        first = 0 if window is None else first_seen_block(num_blocks * kv.block_size, window, kv.block_size)
        slices.append((first, kv.cache.block_ids(hashes[first:num_blocks], group)))
    return slices


def match_below(
    kv: KVManager,
    tiers: Tiers,
    match: PrefixMatch,
    root: BlockHash,
    token_ids: Sequence[int],
    prefill_tokens_per_s: float,
) -> PrefixMatch | None:
    """A longer match, with blocks that are to be loaded; None where there is none, or computing is cheaper.

    Loading may end wherever the level changes: what is quick to load is loaded, and the rest computed.
    """
    num_here, block_size = match.num_tokens // kv.block_size, kv.block_size
    sources: dict[BlockHash, int] = {}
    is_below = _finder(tiers, sources)
    num_most = longest_match(kv, match.hashes, root, token_ids, (len(token_ids) - 1) // block_size, is_below)
    if num_most <= num_here:
        return None
    block_s = block_size / prefill_tokens_per_s
    best, best_s = None, (num_most - num_here) * block_s
    for cut in _cuts(sources, match.hashes, num_here, num_most):
        length = _with_windows(kv, match.hashes, cut, is_below)
        if length <= num_here:
            continue
        slices = slices_of(kv, match.hashes, length)
        tickets = _join(tiers, slices, match.hashes)
        holes: Counter[int] = Counter()
        for group, (first, block_ids) in enumerate(slices):
            lacking = [index for index, block_id in enumerate(block_ids, start=first) if block_id is None]
            holes.update([sources[in_group(match.hashes[index], group)] for index in lacking])
        load_s = sum(tiers.levels[number].load_s(num_blocks) for number, num_blocks in holes.items())
        total_s = load_s + (num_most - length) * block_s
        if total_s < best_s:
            outcome = CacheOutcome.HIT if length == (len(token_ids) - 1) // block_size else CacheOutcome.PARTIAL
            best_s = total_s
            best = PrefixMatch(slices, length * block_size, outcome, match.hashes, tickets, sources, load_s)
    return best


def _join(tiers: Tiers, slices: MatchedSlices, hashes: list[BlockHash]) -> set[int]:
    """Fill in blocks that are on their way up already. Returns the tickets that bring them."""
    tickets: set[int] = set()
    if not tiers.incoming:
        return tickets
    for group, (first, block_ids) in enumerate(slices):
        for place, block_id in enumerate(block_ids):
            if block_id is None and (coming := tiers.incoming.get(in_group(hashes[first + place], group))) is not None:
                block_ids[place], ticket = coming
                tickets.add(ticket)
    return tickets


def _finder(tiers: Tiers, sources: dict[BlockHash, int]) -> HasBelow:
    """A function that says whether a block is below or on its way up, and notes the nearest level that has it."""
    incoming = tiers.incoming
    levels = [(number, level.contains) for number, level in enumerate(tiers.levels)]

    def is_below(key: BlockHash) -> bool:
        if key in sources or key in incoming:
            return True
        for number, contains in levels:
            if contains(key):
                sources[key] = number
                return True
        return False

    return is_below


def _cuts(sources: dict[BlockHash, int], hashes: list[BlockHash], num_here: int, num_most: int) -> list[int]:
    """Lengths after which blocks come from another level, the longest first."""
    found = [sources.get(block_hash) for block_hash in hashes[num_here:num_most]]  # of the first group
    cuts = [num_here + i for i in range(1, len(found)) if found[i] != found[i - 1]]
    return [num_most, *reversed(cuts)][:_MAX_CUTS]
