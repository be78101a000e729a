from __future__ import annotations

import pytest

from quire.kv.blocks import Block, BlockState, FreeQueue


def ids(queue: FreeQueue) -> list[int]:
    return [block.block_id for block in queue]


@pytest.fixture
def blocks() -> list[Block]:
    return [Block(block_id) for block_id in range(5)]


def test_blocks_leave_in_the_order_in_which_they_came(blocks: list[Block]) -> None:
    queue = FreeQueue(blocks)
    assert [block.block_id for block in queue.take(5)] == [0, 1, 2, 3, 4]
    assert len(queue) == 0
    with pytest.raises(AssertionError, match="0 free"):
        queue.take(1)


@pytest.mark.parametrize("removed", range(5))
def test_a_block_leaves_from_anywhere(blocks: list[Block], removed: int) -> None:
    queue = FreeQueue(blocks)
    queue.remove(blocks[removed])
    queue.check()
    assert ids(queue) == [i for i in range(5) if i != removed]
    assert blocks[removed] not in queue
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(blocks[removed])


def test_front_and_back(blocks: list[Block]) -> None:
    queue = FreeQueue(blocks[:3])
    queue.push_front(blocks[3])
    queue.push_back(blocks[4])
    assert ids(queue) == [3, 0, 1, 2, 4]
    with pytest.raises(AssertionError, match="already"):
        queue.push_back(blocks[0])


def test_check_finds_an_unhashed_block_behind_a_cached_one(blocks: list[Block]) -> None:
    queue = FreeQueue(blocks)
    blocks[3].block_hash = blocks[4].block_hash = b"x"
    queue.check()
    blocks[4].block_hash = None
    with pytest.raises(AssertionError, match="block 4 has no hash"):
        queue.check()


def test_check_finds_torn_links_and_wrong_counts(blocks: list[Block]) -> None:
    queue = FreeQueue(blocks)
    queue.num_blocks += 1
    with pytest.raises(AssertionError, match="says 6 blocks and holds 5"):
        queue.check()
    queue.num_blocks -= 1
    blocks[2].prev = blocks[0]
    with pytest.raises(AssertionError, match="block 2"):
        queue.check()


@pytest.mark.parametrize(
    ("ref_count", "num_transfers", "block_hash", "state"),
    [
        (0, 0, None, BlockState.FREE),
        (0, 0, b"x", BlockState.CACHED),
        (2, 0, b"x", BlockState.IN_USE),
        (1, 1, None, BlockState.IN_USE),
        (0, 1, None, BlockState.IN_TRANSIT),
        (0, 2, b"x", BlockState.IN_TRANSIT),
    ],
)
def test_a_block_is_in_exactly_one_state(
    ref_count: int, num_transfers: int, block_hash: bytes | None, state: BlockState
) -> None:
    block = Block(0, ref_count=ref_count, num_transfers=num_transfers, block_hash=block_hash)
    assert block.state is state
    assert block.is_idle == (state in (BlockState.FREE, BlockState.CACHED))
