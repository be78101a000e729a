"""Which block holds the KV of which prefix, which of them are pinned, and which were evicted lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.kv.blocks import Block
from quire.kv.hashing import BlockHash, hash_blocks, in_group, token_packer
from quire.request import CacheOutcome

# As TableSlices; None: a level below has the block.
MatchedSlices = list[tuple[int, list[int | None]]]

HasBelow = Callable[[BlockHash], bool]


@dataclass(slots=True)
class PrefixMatch:
    """The cached blocks that a sequence could start from. It is a reading, not a claim: `admit()` it before any other
    call that changes the manager, or match again (`previous=` saves the hashing)."""

    slices: MatchedSlices
    num_tokens: int
    outcome: CacheOutcome
    hashes: list[BlockHash] = field(default_factory=list, repr=False)  # of its tokens, of the first miss, maybe more
    tickets: set[int] = field(default_factory=set)  # of loads that bring some of the blocks
    sources: dict[BlockHash, int] = field(default_factory=dict, repr=False)  # levels that have those the device lacks
    load_s: float = 0.0  # about how long these would take to load

    @classmethod
    def nothing(cls, outcome: CacheOutcome) -> PrefixMatch:
        return cls([], 0, outcome)

    @property
    def block_ids(self) -> list[int]:
        """The matched blocks of all groups that the device has, or will have from another's load."""
        return [block_id for _, block_ids in self.slices for block_id in block_ids if block_id is not None]


class PrefixCache:
    """Hash to block, for every block whose content is known.

    Invariants, proved by `check()`: a block has a hash exactly when this map has it under that hash; a pinned block
    has a hash.
    """

    __slots__ = (
        "_blocks",
        "_evicted",
        "_max_evicted",
        "_pack_tokens",
        "_pins",
        "block_size",
        "log",
        "num_evictions",
        "num_pinned_blocks",
        "on_insert",
    )

    def __init__(self, block_size: int, *, max_evicted: int) -> None:
        self.block_size = block_size
        self._pack_tokens = token_packer(block_size)
        self._blocks: dict[BlockHash, Block] = {}
        # A bounded memory of evictions tells "evicted" from "never seen". OrderedDict: dropping the oldest entry of a
        # dict is O(n) after many drops.
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()
        self._max_evicted = max_evicted
        # By the hash of the prefix's last full block. Per prefix, not per block, so that unpinning one prefix leaves
        # the blocks that another pinned prefix shares with it.
        self._pins: dict[BlockHash, dict[BlockHash, Block]] = {}
        self.num_evictions = 0
        self.num_pinned_blocks = 0
        # Told of every hash that comes (True) or goes (False), where somebody outside wants to know (`cache_log`).
        self.log: Callable[[BlockHash, bool], None] | None = None
        self.on_insert: Callable[[Block], None] | None = None  # told of each block whose content became known

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, block_hash: BlockHash, group: int = 0) -> Block | None:
        """The block with this content. It may be in transit: then its bytes are being read, and it can be shared."""
        return self._blocks.get(in_group(block_hash, group))

    def block_ids(self, hashes: Sequence[BlockHash], group: int) -> list[int | None]:
        """The blocks with these contents; None where there is none."""
        blocks = map(self._blocks.get, hashes if not group else [in_group(each, group) for each in hashes])
        return [None if block is None else block.block_id for block in blocks]

    def extend_chain(self, hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], num_blocks: int) -> None:
        """Append to `hashes` until it names the first `num_blocks` blocks of the tokens."""
        if len(hashes) < num_blocks:
            parent, block_size = hashes[-1] if hashes else root, self.block_size
            hashes += hash_blocks(parent, token_ids[len(hashes) * block_size : num_blocks * block_size], block_size)

    def count_prefix(
        self,
        hashes: list[BlockHash],
        root: BlockHash,
        token_ids: Sequence[int],
        num_blocks: int,
        group: int = 0,
        below: HasBelow | None = None,
    ) -> int:
        """How many of the first `num_blocks` blocks of the tokens stand before the first that is neither cached here
        nor `below`.

        `hashes` has the chain as far as it is known, and gets what had to be computed: as many again as were found, so
        that a long prefix takes few calls and a miss at the beginning costs one hash.
        """
        blocks, num_found = self._blocks, 0
        while num_found < num_blocks:
            if num_found == len(hashes):
                self.extend_chain(hashes, root, token_ids, min(num_blocks, 2 * num_found + 1))
            known = hashes[num_found:num_blocks]
            for key in [in_group(each, group) for each in known] if group else known:
                if key not in blocks and not (below and below(key)):
                    return num_found
                num_found += 1
        return num_found

    def runs(self, hashes: list[BlockHash], group: int, below: HasBelow | None = None) -> list[int]:
        """For each of these blocks, how many in a row end with it that are cached here or `below`."""
        found, length = [], 0
        for block_hash in hashes:
            key = in_group(block_hash, group)
            length = length + 1 if key in self._blocks or (below and below(key)) else 0
            found.append(length)
        return found

    def was_lost(self, block_hash: BlockHash) -> bool:
        """It was cached once, and was evicted lately; or only another KV group's block of the same tokens was."""
        return block_hash in self._evicted or block_hash in self._blocks

    def insert(self, block_hash: BlockHash, block: Block) -> bool:
        """Name the content of a block in use; False: it has its name already, or another block has it.

        The first block with a hash keeps it; an equal one stays unhashed.
        """
        holder = self._blocks.setdefault(block_hash, block)
        if holder is not block or block.block_hash == block_hash:
            return False
        assert block.block_hash is None, (
            f"block {block.block_id} has another hash: two sequences disagree on its tokens"
        )
        block.block_hash = block_hash
        if self.log is not None:
            self.log(block_hash, True)
        return True

    def insert_chain(
        self,
        first: int,
        hashes: list[BlockHash],
        root: BlockHash,
        token_ids: Sequence[int],
        blocks: list[Block],
        group: int = 0,
    ) -> None:
        """Name blocks of one sequence: `blocks[0]` is block `first` of the tokens, whose chain is `hashes`."""
        for index, block in enumerate(blocks, start=first):
            if self.insert(in_group(hashes[index], group), block):
                block.parent_hash = in_group(hashes[index - 1], group) if index else root
                block.chain_index = index
                block.packed_tokens = self.pack_tokens(token_ids, index)
                if self.on_insert is not None:
                    self.on_insert(block)

    def pack_tokens(self, token_ids: Sequence[int], index: int) -> bytes:
        """The tokens of one block."""
        return self._pack_tokens(*token_ids[index * self.block_size : (index + 1) * self.block_size])

    def evict(self, block: Block) -> None:
        block_hash = self.forget(block)
        self.num_evictions += 1
        evicted = self._evicted
        evicted[block_hash] = None
        evicted.move_to_end(block_hash)
        if len(evicted) > self._max_evicted:
            evicted.popitem(last=False)

    def forget(self, block: Block) -> BlockHash:
        """Take the block's hash away, without remembering it as evicted."""
        block_hash = block.block_hash
        assert block_hash is not None and not block.num_pins, f"block {block.block_id} is unhashed or pinned"
        del self._blocks[block_hash]
        block.block_hash = block.parent_hash = None
        block.packed_tokens = b""
        block.num_hits = 0
        if self.log is not None:
            self.log(block_hash, False)
        return block_hash

    def blocks(self) -> Iterator[Block]:
        """Every block whose content is known, in the order in which they became so."""
        return iter(self._blocks.values())

    def idle_blocks(self) -> list[Block]:
        return [block for block in self._blocks.values() if block.is_idle]

    def forget_evictions(self) -> None:
        self._evicted.clear()

    # -- pins: only the marks; the pool keeps pinned blocks out of its queue

    def pin(self, prefix: BlockHash, blocks: list[Block]) -> list[Block]:
        """Add blocks to the prefix's pin. Returns those that were not pinned before."""
        if not blocks:
            return []
        pinned = self._pins.setdefault(prefix, {})
        newly_pinned = []
        for block in blocks:
            block_hash = block.block_hash
            assert block_hash is not None
            if block_hash not in pinned:
                pinned[block_hash] = block
                if not block.num_pins:
                    newly_pinned.append(block)
                block.num_pins += 1
        self.num_pinned_blocks += len(newly_pinned)
        return newly_pinned

    def num_pinned_by(self, prefix: BlockHash) -> int:
        """How far the prefix's pin reaches, in blocks. Each KV group may have one of the same tokens."""
        return max((block.chain_index + 1 for block in self._pins.get(prefix, {}).values()), default=0)

    def unpin(self, prefix: BlockHash) -> list[Block]:
        """Drop the prefix's pin. Returns the blocks that no other pin holds, in order."""
        pinned = self._pins.pop(prefix, {})
        unpinned = []
        for block in pinned.values():
            block.num_pins -= 1
            if not block.num_pins:
                unpinned.append(block)
        self.num_pinned_blocks -= len(unpinned)
        return unpinned

    def unpin_idle(self) -> list[Block]:
        """Take every block that is idle out of every pin. Returns them."""
        unpinned = []
        for prefix, pinned in list(self._pins.items()):
            for block_hash, block in list(pinned.items()):
                if block.is_idle:
                    del pinned[block_hash]
                    block.num_pins -= 1
                    if not block.num_pins:
                        unpinned.append(block)
            if not pinned:
                del self._pins[prefix]
        self.num_pinned_blocks -= len(unpinned)
        return unpinned

    def check(self, blocks: list[Block]) -> None:
        for block_hash, block in self._blocks.items():
            assert block.block_hash == block_hash, f"block {block.block_id} is cached under a hash that is not its own"
        for block in blocks:
            assert block.block_hash is not None or not (block.parent_hash or block.packed_tokens or block.num_hits), (
                f"block {block.block_id} has no hash and yet a content"
            )
        num_hashed = sum(block.block_hash is not None for block in blocks)
        assert num_hashed == len(self._blocks), f"{num_hashed} blocks have a hash, the cache knows {len(self._blocks)}"
        num_pins = dict.fromkeys(range(len(blocks)), 0)
        for pinned in self._pins.values():
            assert pinned, "a pin holds no blocks"
            for block_hash, block in pinned.items():
                assert block.block_hash == block_hash, f"pinned block {block.block_id} lost its hash"
                num_pins[block.block_id] += 1
        for block in blocks:
            assert block.num_pins == num_pins[block.block_id], (
                f"block {block.block_id} says {block.num_pins} pins, {num_pins[block.block_id]} hold it"
            )
        num_pinned = sum(block.num_pins > 0 for block in blocks)
        assert num_pinned == self.num_pinned_blocks, f"{num_pinned} blocks pinned, counted {self.num_pinned_blocks}"
        assert len(self._evicted) <= self._max_evicted, "the memory of evictions outgrew its bound"
