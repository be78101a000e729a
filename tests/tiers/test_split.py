"""Stores of a split model: a block counts while all ranks have their part of it, whatever each does and when."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.plan import KeyedMove
from quire.tiers.disk import DiskStore
from quire.tiers.memory_store import MemoryStore
from quire.tiers.sealed import SEAL_BYTES, SealedStore
from quire.tiers.split import Expire, Forget, Order, SplitStores, StoreNews, Told
from quire.tiers.teller import StoreTeller

BLOCK = 512
LIMIT_S = 30.0


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def news(
    gained: Sequence[int] = (), lost: Sequence[int] = (), num_carried_out: int = 0, block_s: float = 1e-3, **usage: Any
) -> StoreNews:
    return StoreNews([key_of(n) for n in gained], [key_of(n) for n in lost], num_carried_out, block_s, usage or None)


def split_of(num_ranks: int = 2, orders: list[Order] | None = None) -> SplitStores:
    return SplitStores(["disk"], num_ranks, (orders if orders is not None else []).append)


def tell(split: SplitStores, rank: int, *moved: tuple[int, list[int]], num_resets: int = 0, **said: Any) -> None:
    split.hear(Told(rank, num_resets, [news(**said)], list(moved)))
    split.check()


# -- what the engine makes of what it is told


def test_a_block_is_there_while_all_ranks_have_it() -> None:
    split = split_of(3)
    [store] = split.stores
    for rank in (2, 0):
        tell(split, rank, gained=[1, 2])
        assert not store.contains(key_of(1))
    assert not split.wait_for_all(0.0)
    tell(split, 1, gained=[1])
    assert split.wait_for_all(0.0)
    assert store.contains(key_of(1)) and not store.contains(key_of(2))
    tell(split, 1, gained=[1])  # once more
    tell(split, 0, lost=[1])
    assert not store.contains(key_of(1))
    tell(split, 0, gained=[1])
    assert store.contains(key_of(1))


def test_a_move_is_over_when_every_rank_says_so_and_whole_if_none_misses_anything() -> None:
    split = split_of(2)
    pairs = [(n, key_of(n)) for n in range(4)]
    split.begin([KeyedMove(7, 0, True, pairs), KeyedMove(8, 0, False, pairs)])
    assert split.stores[0].load_s(0) == pytest.approx(1e-3)  # nobody has told how long a block takes
    tell(split, 0, (8, []), (7, [3]), block_s=0.5)
    assert split.take_finished() == []
    assert split.stores[0].load_s(2) == pytest.approx(1e-3 + 6 * 0.5)
    tell(split, 1, (7, [1, 3]), block_s=2.0)
    assert split.take_finished() == [(7, [1, 3])] and split.take_finished() == []
    assert split.stores[0].load_s(2) == pytest.approx(1e-3 + 2 * 2.0)  # as the slowest
    tell(split, 1, (8, []))
    assert split.take_finished() == [(8, [])]


def test_tickets_of_before_a_reset_mean_nothing() -> None:
    split = split_of(2)
    pairs = [(0, key_of(0))]
    split.begin([KeyedMove(0, 0, True, pairs)])
    tell(split, 0, (0, []))
    split.reset()
    split.check()
    split.begin([KeyedMove(0, 0, True, pairs)])
    tell(split, 1, (0, []), gained=[5])  # of the first: it has not heard yet
    tell(split, 0, (0, [0]), num_resets=1)
    assert split.take_finished() == []
    tell(split, 1, (0, []), num_resets=1)
    assert split.take_finished() == [(0, [0])]


def test_what_is_forgotten_does_not_count_before_every_rank_has_forgotten_it() -> None:
    orders: list[Order] = []
    split = split_of(2, orders)
    [store] = split.stores
    store.forget([])
    tell(split, 0, gained=[1, 2])
    tell(split, 1, gained=[1, 2])
    store.forget([key_of(1)])
    store.forget([key_of(1), key_of(2)])
    assert orders == [Forget(0, [key_of(1)]), Forget(0, [key_of(1), key_of(2)])]
    assert not store.contains(key_of(1)) and not store.contains(key_of(2))
    tell(split, 0, gained=[1], lost=[2], num_carried_out=2)  # stored anew behind the second
    tell(split, 1, gained=[1], num_carried_out=1)  # stored between the two
    assert not store.contains(key_of(1))
    tell(split, 1, lost=[1, 2], num_carried_out=2)
    assert not store.contains(key_of(1))
    tell(split, 1, gained=[1], num_carried_out=2)
    assert store.contains(key_of(1)) and not store.contains(key_of(2))


def test_of_a_store_that_tells_no_losses_the_oldest_keys_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tiers.split._MAX_KEYS", 16)
    split = split_of(2)
    [store] = split.stores
    for n in range(100):
        tell(split, 0, gained=[n])
        tell(split, 1, gained=[n] if n % 3 else [])
        usage = store.usage()
        assert min(n, 14) <= usage["num_blocks"] + usage["num_partial_blocks"] <= 16
    assert store.contains(key_of(98)) and not store.contains(key_of(1))
    tell(split, 0, gained=[1])
    tell(split, 1, gained=[1])
    assert store.contains(key_of(1))


def test_numbers_of_ranks_make_those_of_the_level() -> None:
    orders: list[Order] = []
    split = split_of(2, orders)
    [store] = split.stores
    tell(split, 0, gained=[1, 2, 3], num_bytes=30, oldest_s=5.0, num_rejected=1, block_s=0.1)
    tell(split, 1, gained=[2, 3, 4], num_bytes=60, oldest_s=9.0, num_rejected=0, block_s=0.3)
    tell(split, 1)  # says nothing of numbers
    expected = {"num_blocks": 2, "num_partial_blocks": 2, "num_bytes": 90, "oldest_s": 9.0, "num_rejected": 1}
    assert store.usage() == expected | {"load_block_s": 0.1}
    dropped: list[int] = []
    store.expire(60.0, dropped.append)
    assert orders == [Expire(0, 60.0)]
    tell(split, 0, lost=[1, 2], num_carried_out=1)
    assert not dropped
    tell(split, 1, lost=[2, 4], num_carried_out=1)
    assert dropped == [1] and store.usage()["num_blocks"] == 1


class FakeRank:
    """A rank at whatever pace: it takes messages in order, writes in order, loads in any order, loses parts and finds
    those of other engines when it likes, and tells the last word of each key now and then. Of a part it keeps the
    version: of how many the key's content has been forgotten when it was computed."""

    def __init__(self, number: int, split: SplitStores, versions: Counter[bytes], rng: random.Random) -> None:
        self.number, self.split, self.versions, self.rng = number, split, versions, rng
        self.parts: dict[bytes, int] = {}
        self.inbox: deque[Any] = deque()
        self.writing: deque[Callable[[], None]] = deque()
        self.loading: list[Callable[[], None]] = []
        self.words: dict[bytes, bool] = {}
        self.moved: list[tuple[int, list[int]]] = []
        self.num_carried_out = self.num_resets = 0
        self.is_slow = False  # at writing
        self.sent: deque[Told] = deque()
        self.loads: dict[tuple[int, int], list[int | None]] = {}  # by reset and ticket: the versions that came

    def take(self) -> None:
        match self.inbox.popleft():
            case (KeyedMove() as move, versions) if not move.is_load:
                self.writing.append(lambda: self.store(move, versions))
            case (KeyedMove() as move, _):
                self.loading.append(lambda: self.load(move))
            case Forget(_, keys):
                self.writing.append(lambda: self.carry_out(keys))
            case Expire():
                self.writing.append(lambda: self.carry_out(self.rng.sample(sorted(self.parts), len(self.parts) // 3)))
            case _:
                while self.writing:
                    self.writing.popleft()()
                while self.loading:
                    self.loading.pop()()
                self.moved.clear()
                self.num_resets += 1

    def put(self, key: bytes, version: int) -> None:
        self.parts.setdefault(key, version)
        self.words[key] = True

    def lose(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.parts.pop(key, None)
            self.words[key] = False

    def store(self, move: KeyedMove, versions: list[int]) -> None:
        is_broken = self.rng.random() < 0.05
        for (_, key), version in zip(move.pairs, versions, strict=True):
            if not is_broken and self.rng.random() < 0.97:  # else its disk is full
                self.put(key, version)
        self.moved.append((move.ticket, list(range(len(move.pairs))) if is_broken else []))

    def load(self, move: KeyedMove) -> None:
        damaged = [key for _, key in move.pairs if self.rng.random() < 0.03]
        self.lose(damaged)
        found = [self.parts.get(key) for _, key in move.pairs]
        self.loads[self.num_resets, move.ticket] = found
        self.moved.append((move.ticket, [i for i, version in enumerate(found) if version is None]))

    def carry_out(self, keys: Sequence[bytes]) -> None:
        self.lose(keys)
        self.num_carried_out += 1

    def tell(self) -> None:
        gained = [key for key, is_held in self.words.items() if is_held]
        lost = [key for key, is_held in self.words.items() if not is_held]
        said = StoreNews(gained, lost, self.num_carried_out, 1e-3, None)
        self.sent.append(Told(self.number, self.num_resets, [said], self.moved))
        self.words, self.moved = {}, []

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.01:
            self.lose(self.rng.sample(sorted(self.parts), min(len(self.parts), self.rng.randrange(1, 4))))
        elif chance < 0.03:
            key = key_of(self.rng.randrange(30))
            self.put(key, self.versions[key])  # another engine's, who computed it right
        elif chance < 0.2:
            self.tell()
        elif chance < 0.4 and self.inbox:
            self.take()
        elif chance < 0.6 and self.writing and not self.is_slow:
            self.writing.popleft()()
        elif chance < 0.8 and self.loading:
            self.loading.pop(self.rng.randrange(len(self.loading)))()
        elif self.sent:
            self.split.hear(self.sent.popleft())

    def settle(self) -> None:
        while self.inbox:
            self.take()
        while self.writing:
            self.writing.popleft()()
        while self.loading:
            self.loading.pop()()
        self.tell()
        while self.sent:
            self.split.hear(self.sent.popleft())


@pytest.mark.parametrize(("num_ranks", "seed"), [(1, 1), (2, 2), (2, 3), (3, 4), (4, 5)])
def test_ranks_that_do_what_they_like(num_ranks: int, seed: int) -> None:
    """A load is whole only where all ranks brought their parts, and brings nothing that was forgotten before it began.
    When all has been told, a block counts exactly where all ranks have it."""
    rng = random.Random(seed)
    versions: Counter[bytes] = Counter()
    orders: list[Order] = []
    split = split_of(num_ranks, orders)
    [store] = split.stores
    ranks = [FakeRank(number, split, versions, rng) for number in range(num_ranks)]
    moves: dict[int, tuple[KeyedMove, list[int]]] = {}
    ticket = num_resets = num_whole = num_missing = num_expired = 0

    def to_all(message: Any) -> None:
        for rank in ranks:
            rank.inbox.append(message)

    def take_finished() -> None:
        nonlocal num_whole, num_missing
        for finished, missing in split.take_finished():
            move, wanted = moves.pop(finished)
            if not move.is_load:
                continue
            found = [rank.loads[num_resets, finished] for rank in ranks]
            for i, version in enumerate(wanted):
                if i in missing:
                    num_missing += 1
                    continue
                came = [each[i] for each in found]
                assert all(part is not None and part >= version for part in came), "wrong content counts as whole"
                num_whole += 1

    def expired(num_dropped: int) -> None:
        nonlocal num_expired
        num_expired += num_dropped

    paces: list[float] = []
    for turn in range(15_000):
        if turn % 50 == 0:
            paces = [rng.choice((0.2, 2.0, 4.0)) for _ in ranks]
            for rank in ranks:
                rank.is_slow = rng.random() < 0.3
        for rank, pace in zip(ranks, paces, strict=True):
            for _ in range(int(pace + rng.random())):
                rank.act()
        chance = rng.random()
        if chance < 0.1:
            keys = rng.sample([key_of(n) for n in range(30)], rng.randrange(1, 6))
            for is_load in (True, False):
                of_kind = [key for key in keys if store.contains(key) == is_load]
                if of_kind:
                    move = KeyedMove(ticket, 0, is_load, list(enumerate(of_kind)))
                    current = [versions[key] for key in of_kind]
                    split.begin([move])
                    to_all((move, current))
                    moves[ticket] = (move, current)
                    ticket += 1
        elif chance < 0.105:
            keys = [key_of(rng.randrange(30)) for _ in range(2)]
            versions.update(set(keys))
            store.forget(list(set(keys)))
        elif chance < 0.106:
            store.expire(60.0, expired)
        elif chance < 0.107:
            split.reset()
            moves.clear()
            to_all(None)
            ticket, num_resets = 0, num_resets + 1
        for order in orders:
            to_all(order)
        orders.clear()
        take_finished()
        split.check()
        if turn % 500 == 499:
            for rank in ranks:
                rank.settle()
            take_finished()
            split.check()
            assert not moves
            for key in map(key_of, range(30)):
                assert store.contains(key) == all(key in rank.parts for rank in ranks)
    assert num_whole > 500 and num_missing > 100 and num_expired > 50 and num_resets > 5


# -- ranks' own stores


def payload(rank: int, key: bytes) -> bytes:
    return random.Random(key + bytes([rank])).randbytes(BLOCK)


class Rank:
    """A rank's store, its teller, and moves without a device."""

    def __init__(self, number: int, connector: Any, split: SplitStores) -> None:
        self.number = number
        self.store = SealedStore("disk", connector, identity=b"r" * 15 + bytes([number]), block_bytes=BLOCK)
        self.teller = StoreTeller(number, [self.store], split.hear)

    def move(self, move: KeyedMove) -> None:
        keys = [key for _, key in move.pairs]

        def done(missing: list[int]) -> None:
            self.teller.move_over(move, missing)

        def use(place: int, block: memoryview) -> None:
            assert block == payload(self.number, keys[place])

        def read() -> list[memoryview]:
            return [memoryview(bytearray(payload(self.number, key) + bytes(SEAL_BYTES))) for key in keys]

        if move.is_load:
            self.store.start_load(keys, use, done)
        else:
            self.store.start_store(keys, read, done)

    def close(self) -> None:
        self.teller.close()
        self.store.close()


class Engine:
    """Ranks in this process, of which each has the store that `connectors` gives it."""

    def __init__(self, *connectors: Any) -> None:
        self.split = SplitStores(["disk"], len(connectors), self.give)
        self.ranks: list[Rank] = []
        self.ranks = [Rank(number, connector, self.split) for number, connector in enumerate(connectors)]
        assert self.split.wait_for_all(LIMIT_S)
        [self.store] = self.split.stores
        self.ticket = 0

    def give(self, order: Order) -> None:
        for rank in self.ranks:
            rank.teller.carry_out(order)

    def move(self, is_load: bool, *numbers: int) -> list[int]:
        """The numbers of the blocks that did not come, or were not stored."""
        move = KeyedMove(self.ticket, 0, is_load, [(n, key_of(n)) for n in numbers])
        self.ticket += 1
        self.split.begin([move])
        for rank in self.ranks:
            rank.move(move)
        until_s = time.monotonic() + LIMIT_S
        while not (finished := self.split.take_finished()):
            assert time.monotonic() < until_s, "the move is not over"
            self.split.wait_a_moment()
        [(ticket, missing)] = finished
        assert ticket == move.ticket
        self.split.check()
        return [numbers[i] for i in missing]

    def has(self, *numbers: int) -> list[bool]:
        return [self.store.contains(key_of(n)) for n in numbers]

    def wait(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until_s, "it did not happen"
            time.sleep(0.01)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def disk(path: Path, number: int, max_bytes: int = 1 << 20) -> DiskStore:
    identity = b"r" * 15 + bytes([number])
    return DiskStore(path, max_bytes=max_bytes, record_bytes=BLOCK + SEAL_BYTES, identity=identity)


def test_a_restart_has_what_all_ranks_kept_and_damage_at_one_is_damage(tmp_path: Path) -> None:
    engine = Engine(disk(tmp_path, 0), disk(tmp_path, 1))
    assert engine.has(1) == [False] and engine.move(False, 1, 2, 3) == []
    assert engine.has(1, 2, 3, 4) == [True, True, True, False]
    engine.close()
    [file] = (tmp_path / (b"r" * 15 + bytes([1])).hex()).glob("*.kv")
    data = bytearray(file.read_bytes())
    at = data.index(payload(1, key_of(2)))
    data[at + 5] ^= 1
    file.write_bytes(data)
    engine = Engine(disk(tmp_path, 0), disk(tmp_path, 1))
    assert engine.has(1, 2, 3) == [True, True, True]
    assert engine.move(True, 1, 2, 3) == [2]
    assert engine.has(1, 2, 3) == [True, False, True]
    engine.wait(lambda: engine.store.usage().get("num_rejected") == 1)
    assert engine.store.usage()["num_blocks"] == 2 and engine.store.usage()["num_partial_blocks"] == 1
    assert engine.move(False, 2) == [] and engine.move(True, 2) == [] and engine.has(2) == [True]
    engine.close()


def test_a_rank_whose_disk_is_full_or_which_evicts_sooner(tmp_path: Path) -> None:
    """It has room for a few blocks, and evicts; of the others' parts none is taken for a whole block."""
    engine = Engine(disk(tmp_path, 0), disk(tmp_path, 1, max_bytes=100_000))
    for first in range(0, 160, 8):
        assert engine.move(False, *range(first, first + 8)) == []
    held = [n for n in range(160) if engine.has(n) == [True]]
    assert 0 < len(held) < 150
    assert engine.move(True, *held) == []
    usage = engine.store.usage()
    assert usage["num_blocks"] == len(held) and usage["num_partial_blocks"] == 160 - len(held)
    other = disk(tmp_path, 1, max_bytes=100_000)  # another engine's, which evicts all of them
    other.expire(0.0)
    engine.wait(lambda: engine.store.usage()["num_blocks"] < len(held))
    other.close()
    engine.close()


def test_what_is_forgotten_is_forgotten_by_all(tmp_path: Path) -> None:
    engine = Engine(disk(tmp_path, 0), MemoryStore())
    assert engine.move(False, 1, 2) == []
    engine.store.forget([key_of(1)])
    assert engine.has(1, 2) == [False, True]
    engine.wait(lambda: engine.store.usage()["num_blocks"] == 1)
    assert engine.has(1) == [False] and engine.move(True, 1) == [1]
    assert engine.move(False, 1) == [] and engine.has(1) == [True] and engine.move(True, 1) == []
    is_done = threading.Event()
    engine.store.expire(3600.0, lambda num_dropped: is_done.set() if num_dropped == 0 else None)
    assert is_done.wait(LIMIT_S)
    engine.close()
