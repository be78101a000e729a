"""Contiguous allocators against a map of every slot."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.sim.reservation import (
    Allocator,
    Buddy,
    FirstFit,
    Region,
    ReservedKV,
    next_power_of_two,
    reservation_policies,
)


def longest_hole(slots: list[bool]) -> int:
    longest = run = 0
    for taken in slots:
        run = 0 if taken else run + 1
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("make", [FirstFit, Buddy])
@pytest.mark.parametrize("num_slots", [64, 100, 1])
def test_no_slot_is_given_twice_and_none_is_lost(make: Callable[[int], Allocator], num_slots: int) -> None:
    rng = random.Random(num_slots)
    allocator = make(num_slots)
    slots = [False] * num_slots
    regions: list[Region] = []
    for _ in range(2000):
        if regions and rng.random() < 0.5:
            region = regions.pop(rng.randrange(len(regions)))
            allocator.free(region)
            slots[region.start : region.start + region.num_given] = [False] * region.num_given
        else:
            asked = rng.randint(1, max(1, num_slots // 4))
            found = allocator.allocate(asked)
            if make is FirstFit:  # it finds room whenever there is any
                assert (found is None) == (longest_hole(slots) < asked)
            if found is None:
                continue
            assert found.num_asked == asked <= found.num_given
            assert not any(slots[found.start : found.start + found.num_given])
            assert found.start + found.num_given <= num_slots
            slots[found.start : found.start + found.num_given] = [True] * found.num_given
            regions.append(found)
        assert allocator.num_free_slots == slots.count(False)
    for region in regions:
        allocator.free(region)
    # Everything has merged again: the largest chunk there ever was can be had.
    whole = num_slots if make is FirstFit else 1 << (num_slots.bit_length() - 1)
    assert allocator.allocate(whole) == Region(0, whole, whole)


def test_first_fit_takes_the_lowest_hole() -> None:
    allocator = FirstFit(10)
    a, b, c = (allocator.allocate(n) for n in (2, 3, 2))
    assert a is not None and b is not None and c is not None
    allocator.free(a)
    allocator.free(c)
    assert allocator.allocate(3) == Region(5, 3, 3)  # [0, 2) is too small, [5, 10) is not
    allocator.free(b)
    assert allocator.allocate(5) == Region(0, 5, 5)  # a's and b's slots have merged


def test_a_buddy_gives_powers_of_two_and_fails_though_enough_is_free() -> None:
    allocator = Buddy(16)
    regions = [allocator.allocate(3) for _ in range(4)]
    assert [r and (r.start, r.num_given) for r in regions] == [(0, 4), (4, 4), (8, 4), (12, 4)]
    assert regions[1] is not None and regions[2] is not None
    allocator.free(regions[1])
    allocator.free(regions[2])
    assert allocator.num_free_slots == 8
    assert allocator.allocate(5) is None  # 4..11 are free and no two of them are halves of one chunk
    # 15,728 slots: seven of 2,048 and no eighth.
    pool = Buddy(15_728)
    assert sum(pool.allocate(2048) is not None for _ in range(8)) == 7


def test_policies() -> None:
    assert [next_power_of_two(n) for n in (1, 2, 3, 25, 32, 33)] == [1, 2, 4, 32, 32, 64]
    sizes = {policy.key: policy.num_slots(100, 25) for policy in reservation_policies(2048)}
    assert sizes == {"max": 2048, "pow2": 132, "oracle": 124}
    assert {p.key: p.num_slots(1024, 1000) for p in reservation_policies(2048)}["pow2"] == 2048


def test_a_region_lasts_from_admission_to_the_end() -> None:
    kv = ReservedKV(FirstFit(20), reservation_policies(16)[2])
    kv.expect(1, 6, 5)
    kv.expect(2, 6, 6)
    assert kv.admit(1, [0] * 6, None) == [(0, list(range(10)))]
    assert kv.admit(2, [0] * 6, None) is None
    with pytest.raises(AssertionError, match="outgrew"):
        kv.grow(1, 11, 10)
    kv.free(1)
    assert kv.admit(2, [0] * 6, None) == [(0, list(range(11)))]
