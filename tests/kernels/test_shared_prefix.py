from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.interface import PREFIX_ALIGN
from quire.kernels.shared_prefix import (
    MIN_MEMBERS,
    find_shared_prefixes,
    pack_shared_prefixes,
    packed_length,
    unpack_shared_prefixes,
)


def make_tables(prefixes, width=400, seed=0):
    """One row for each prefix (a list of block ids), then blocks of its own."""
    tables = np.random.default_rng(seed).integers(10**6, 2**31, (len(prefixes), width), dtype=np.int32)
    for row, prefix in zip(tables, prefixes, strict=True):
        row[: len(prefix)] = prefix
    return tables, np.array([len(prefix) + 1 for prefix in prefixes])


def shape_of(groups):
    return sorted((sorted(group.members.tolist()), group.num_tokens) for group in groups)


@pytest.mark.parametrize("block_size", [4, 16, 64, 128])
def test_one_prefix_for_all(block_size):
    blocks = list(range(2050 // block_size))
    tables, full = make_tables([blocks] * 20, width=600)
    assert shape_of(find_shared_prefixes(tables, full, block_size)) == [(list(range(20)), 2048)]


def test_two_prefixes_among_strangers():
    first, second = list(range(100, 228)), list(range(300, 364))
    prefixes = [first, [], second] * 8
    tables, full = make_tables(prefixes)
    expected = [(list(range(0, 24, 3)), 2048), (list(range(2, 24, 3)), 1024)]
    assert shape_of(find_shared_prefixes(tables, full, 16)) == expected


def test_a_common_head_gives_way_to_longer_prefixes():
    head = list(range(16))  # 256 tokens
    left, right = head + list(range(100, 164)), head + list(range(200, 264))
    tables, full = make_tables([left] * 6 + [right] * 6)
    assert shape_of(find_shared_prefixes(tables, full, 16)) == [(list(range(6)), 1280), (list(range(6, 12)), 1280)]


def test_a_common_head_stays_where_little_follows():
    head = list(range(64))
    tables, full = make_tables([head + [1000 + i % 6] * 9 for i in range(30)])
    assert shape_of(find_shared_prefixes(tables, full, 16)) == [(list(range(30)), 1024)]


def test_only_full_blocks_count():
    tables, _ = make_tables([list(range(128))] * 10)
    full = np.full(10, 128)
    full[3] = 125  # the last unit of 8 blocks is not full: all share one less
    assert shape_of(find_shared_prefixes(tables, full, 16)) == [(list(range(10)), 1920)]
    full[3] = 40  # it would cost the others too much
    assert shape_of(find_shared_prefixes(tables, full, 16)) == [([0, 1, 2, 4, 5, 6, 7, 8, 9], 2048)]
    full[:] = 7
    assert find_shared_prefixes(tables, full, 16) == []


def test_a_few_or_a_little_is_no_group():
    tables, full = make_tables([list(range(128))] * (MIN_MEMBERS - 1) + [[]] * 9)
    assert find_shared_prefixes(tables, full, 16) == []
    tables, full = make_tables([list(range(8))] * 6)
    assert find_shared_prefixes(tables, full, 16) == []


def test_the_best_groups_are_kept():
    prefixes = [[100 * g + i for i in range(64 + 8 * g)] for g in range(5) for _ in range(6)]
    tables, full = make_tables(prefixes)
    groups = find_shared_prefixes(tables, full, 16, max_groups=2)
    assert [group.num_tokens for group in groups] == [1536, 1408]


def test_every_group_is_one_by_the_tables():
    rng = np.random.default_rng()
    for _ in range(30):
        heads = [rng.integers(0, 3, rng.integers(0, 80)).tolist() for _ in range(4)]
        prefixes = [heads[rng.integers(4)][: rng.integers(1, 90)] for _ in range(40)]
        tables, full = make_tables(prefixes, seed=int(rng.integers(2**31)))
        seen = np.zeros(40, dtype=int)
        for group in find_shared_prefixes(tables, full, 16):
            blocks = group.num_tokens // 16
            assert group.num_tokens % PREFIX_ALIGN == 0 < group.num_tokens
            assert (full[group.members] >= blocks).all()
            assert (tables[group.members, :blocks] == tables[group.members[0], :blocks]).all()
            seen[group.members] += 1
        assert seen.max() <= 1


def test_packed_and_unpacked():
    first = list(range(128))
    tables, full = make_tables([[]] * 2 + [first] * 5 + [[]])
    groups = find_shared_prefixes(tables, full, 16)
    packed = pack_shared_prefixes(groups, num_seqs=8, max_groups=3)
    assert packed.dtype == np.int32 and len(packed) == packed_length(8, 3)
    shared = unpack_shared_prefixes(torch.from_numpy(packed), 8, 3)
    assert shared.members.tolist() == [2, 3, 4, 5, 6, 0, 1, 7]
    assert shared.group_starts.tolist() == [0, 5, 5, 5]
    assert shared.group_lens.tolist() == [2048, 0, 0]
    assert shared.seq_lens.tolist() == [0, 0, *[2048] * 5, 0]
