from __future__ import annotations

import random
import struct
import time
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv import KVManager
from quire.kv.watch import MAX_READERS, WATCH_EXPIRES_S, BlockCode, as_runs

BS = 4


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Viewer:
    """What a reader of the watch knows: it sees nothing of the manager itself."""

    kv: KVManager
    codes: dict[int, int] = field(default_factory=dict)
    ref_counts: dict[int, int] = field(default_factory=dict)
    seq_ids: dict[int, int] = field(default_factory=dict)
    num_seen: int = 0

    def __post_init__(self) -> None:
        self.reader = self.kv.open_watch()

    def read(self, limit: int = 1000) -> int:
        assert self.kv.watch is not None
        changes = self.kv.watch.read_blocks(self.reader, limit)
        changed = struct.unpack(f"<{len(changes.block_ids) // 4}I", changes.block_ids)
        ids = [*range(changes.first, changes.first + changes.num_scanned), *changed]
        assert len(ids) <= limit and len(set(ids)) == len(ids)
        assert len(changes.codes) == len(changes.ref_counts) == len(ids) == len(changes.seq_ids) // 4
        seqs = struct.unpack(f"<{len(ids)}I", changes.seq_ids)
        self.num_seen = len(ids)
        for block_id, code, refs, seq_id in zip(ids, changes.codes, changes.ref_counts, seqs, strict=True):
            self.codes[block_id], self.ref_counts[block_id], self.seq_ids[block_id] = code, refs, seq_id
        return changes.num_left

    def catch_up(self, limit: int = 1000) -> None:
        while self.read(limit):
            pass

    def check(self) -> None:
        """It knows of every block what the manager itself says."""
        holders = {block_id: seq_id for seq_id, table in self.kv.tables.items() for block_id in table.block_ids}
        for block in self.kv.pool.blocks:
            block_id, refs = block.block_id, block.ref_count
            code = {"free": 0, "cached": 1, "in_use": 2, "in_transit": 4}[block.state.value]
            code = (BlockCode.SHARED if refs > 1 else code) + (BlockCode.PINNED if block.num_pins else 0)
            assert self.codes[block_id] == code, f"block {block_id}"
            assert self.ref_counts[block_id] == refs
            assert self.seq_ids[block_id] == (holders[block_id] if refs == 1 else 0), f"block {block_id}"


def make(num_blocks: int = 16, **options: object) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=BS, num_host_blocks=8, watermark=0, **options)  # type: ignore[arg-type]


def admit(kv: KVManager, seq_id: int, tokens: list[int]) -> None:
    assert kv.admit(seq_id, tokens, kv.match(tokens)) is not None
    kv.commit(seq_id, tokens, len(tokens))


def test_nobody_watches_at_first() -> None:
    assert make().watch is None


def test_a_new_reader_gets_every_block_in_pieces() -> None:
    kv = make(num_blocks=16)
    viewer = Viewer(kv)
    assert viewer.read(6) == 10 and viewer.num_seen == 6
    assert viewer.read(6) == 4 and viewer.num_seen == 6
    assert viewer.read(6) == 0 and viewer.num_seen == 4
    viewer.check()
    assert viewer.read(6) == 0 and viewer.num_seen == 0


def test_then_only_what_changed() -> None:
    kv = make()
    viewer = Viewer(kv)
    viewer.catch_up()
    admit(kv, 7, list(range(9)))
    viewer.read()
    assert viewer.num_seen == 3
    viewer.check()
    kv.grow(7, 10, 9)  # room is there: no block changes
    viewer.read()
    assert viewer.num_seen == 0
    kv.grow(7, 13, 12)
    viewer.read()
    assert viewer.num_seen == 1
    kv.free(7)
    viewer.read()
    assert viewer.num_seen == 4
    viewer.check()
    assert viewer.codes[0] == BlockCode.CACHED and viewer.codes[2] == BlockCode.FREE


def test_sharing_and_who_is_left() -> None:
    kv = make()
    viewer = Viewer(kv)
    tokens = list(range(9))
    admit(kv, 1, tokens)
    admit(kv, 2, tokens)
    kv.fork(2, 3)
    viewer.catch_up()
    viewer.check()
    assert viewer.ref_counts[0] == 3 and viewer.codes[0] == BlockCode.SHARED
    kv.free(2)
    kv.free(1)
    viewer.catch_up()
    viewer.check()
    assert viewer.seq_ids[0] == 3  # the one that still holds it, though it came last


def test_pins_swaps_and_resets_are_seen() -> None:
    kv = make()
    viewer = Viewer(kv)
    tokens = list(range(9))
    admit(kv, 1, tokens)
    viewer.catch_up()
    kv.pin(tokens[:4])
    viewer.read()
    viewer.check()
    assert viewer.codes[0] == BlockCode.IN_USE + BlockCode.PINNED
    kv.swap_out(1, 9, ticket=0)
    viewer.read()
    viewer.check()
    assert viewer.codes[1] == BlockCode.IN_TRANSIT
    kv.moves_done(0)
    viewer.read()
    viewer.check()
    kv.swap_in(1, tokens, ticket=1)
    kv.moves_done(1)
    viewer.read()
    viewer.check()
    kv.free(1)
    kv.unpin(tokens[:4])
    viewer.read()
    viewer.check()
    assert kv.reset_prefix_cache()
    viewer.read()
    viewer.check()
    assert set(viewer.codes.values()) == {BlockCode.FREE}


def test_tables_older_than_the_watch_are_entered_bit_by_bit() -> None:
    kv = make(num_blocks=64)
    for seq_id in range(1, 9):
        admit(kv, seq_id, [seq_id * 100 + i for i in range(17)])
    viewer = Viewer(kv)
    viewer.read(5)
    kv.free(3)  # while some are not entered
    kv.grow(5, 25, 17)
    kv.fork(6, 20)
    viewer.catch_up(5)
    viewer.check()


def test_changed_tables_as_runs() -> None:
    kv = make(num_blocks=64)
    admit(kv, 1, list(range(9)))
    viewer = Viewer(kv)
    watch = kv.watch
    assert watch is not None
    assert watch.read_tables(viewer.reader, [1], 100) == {1: [0, 3]}
    assert watch.read_tables(viewer.reader, [1], 100) == {}
    kv.grow(1, 14, 9)
    admit(kv, 2, [50 + i for i in range(6)])
    assert watch.read_tables(viewer.reader, [1, 2], 1) == {2: [4, 2]}
    assert watch.read_tables(viewer.reader, [1, 2], 1) == {1: [0, 4]}
    kv.free(2)
    assert watch.read_tables(viewer.reader, [2], 100) == {2: []}


def test_tables_that_always_change_do_not_starve_others() -> None:
    kv = make(num_blocks=64)
    for seq_id in (1, 2, 3):
        admit(kv, seq_id, [seq_id * 100 + i for i in range(9)])
    viewer = Viewer(kv)
    assert kv.watch is not None
    seen = []
    for num_tokens in (13, 17, 21, 25):
        seen += kv.watch.read_tables(viewer.reader, [1, 2, 3], 1)
        kv.grow(1, num_tokens, num_tokens - 4)
    assert seen == [1, 2, 3, 1]


def test_runs() -> None:
    assert as_runs([]) == []
    assert as_runs([4, 5, 6, 9]) == [4, 3, 9, 1]
    assert as_runs([3, 2, 1]) == [3, 1, 2, 1, 1, 1]


def test_a_watch_that_nobody_reads_ends() -> None:
    clock = Clock()
    kv = make(clock=clock)
    viewer = Viewer(kv)
    clock.now_s += WATCH_EXPIRES_S - 1
    admit(kv, 1, list(range(9)))
    assert kv.watch is not None
    viewer.read()
    clock.now_s += WATCH_EXPIRES_S - 1
    kv.grow(1, 14, 9)
    assert kv.watch is not None
    clock.now_s += 2
    kv.grow(1, 18, 14)
    assert kv.watch is None


def test_one_reader_stops_while_another_reads() -> None:
    clock = Clock()
    kv = make(clock=clock)
    gone, here = Viewer(kv), Viewer(kv)
    watch = kv.watch
    assert watch is not None
    for _ in range(3):
        clock.now_s += WATCH_EXPIRES_S / 2
        here.read()
    assert watch.has(here.reader) and not watch.has(gone.reader)


def test_readers_are_few() -> None:
    clock = Clock()
    kv = make(clock=clock)
    readers = []
    for _ in range(MAX_READERS + 1):
        clock.now_s += 0.1
        readers.append(kv.open_watch())
    assert kv.watch is not None
    assert [kv.watch.has(one) for one in readers] == [False] + [True] * MAX_READERS


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_a_viewer_never_drifts(seed: int, limit: int, is_late: bool) -> None:
    """Random lives of sequences, read in small pieces at random moments: once caught up, it knows everything."""
    rng = random.Random(seed)
    kv = make(num_blocks=24)
    viewer = None if is_late else Viewer(kv)
    tokens: dict[int, list[int]] = {}
    for number in range(1, 60):
        live = list(kv.tables)
        action = rng.random()
        if action < 0.35 or not live:
            prompt = [rng.randrange(2)] * rng.randrange(1, 12) + [number]
            if kv.admit(number, prompt, kv.match(prompt)) is not None:
                kv.commit(number, prompt, len(prompt))
                tokens[number] = prompt
        elif action < 0.6:
            one = rng.choice(live)
            grown = tokens[one] + [rng.randrange(2) for _ in range(3)]
            if kv.grow(one, len(grown), len(tokens[one])) is not None:
                kv.commit(one, grown, len(grown))
                tokens[one] = grown
        elif action < 0.7:
            one = rng.choice(live)
            kv.fork(one, 1000 + number)
            tokens[1000 + number] = list(tokens[one])
        elif action < 0.8:
            one = rng.choice(live)
            kv.swap_out(one, len(tokens[one]), number)
        elif action < 0.85 and kv.swapped:
            one = next(iter(kv.swapped))
            kv.swap_in(one, tokens[one], number)
        elif action < 0.9:
            kv.pin(tokens[rng.choice(live)])
        else:
            kv.free(rng.choice(live))
        if rng.random() < 0.3:
            for step in list(kv.moves):
                kv.moves_done(step)
        if number == 30 and viewer is None:
            viewer = Viewer(kv)
        if viewer is not None and rng.random() < 0.4:
            viewer.read(limit)
    kv.check()
    assert viewer is not None
    viewer.catch_up(limit)
    viewer.check()


def test_a_read_of_a_hundred_thousand_blocks_is_short() -> None:
    kv = KVManager(num_blocks=100_000, block_size=16)
    for seq_id in range(1, 201):
        kv.admit(seq_id, list(range(seq_id, seq_id + 1600)), None)
    reader = kv.open_watch()
    watch = kv.watch
    assert watch is not None
    durations_s = []
    while True:
        started = time.thread_time()
        changes = watch.read_blocks(reader, 2_048)
        durations_s.append(time.thread_time() - started)
        if not changes.num_left:
            break
    assert len(durations_s) == 49
    # Half a millisecond on a quiet machine; the bound leaves room for a busy one.
    assert sorted(durations_s)[len(durations_s) // 2] < 5e-3
