"""The disk level's files: what is written is found again, and what is not right is never given."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.errors import ConfigError
from quire.tiers import segment as segments
from quire.tiers.disk import DiskStore
from quire.tiers.segment import ENTRY_BYTES, HEADER_BYTES

RECORD = 1000
IDENTITY = b"i" * 16


def open_store(
    path: Path,
    *,
    max_bytes: int | None = 1 << 20,
    identity: bytes = IDENTITY,
    record: int = RECORD,
    num_sharers: int = 1,
) -> DiskStore:
    return DiskStore(
        path,
        max_bytes=max_bytes,
        record_bytes=record,
        identity=identity,
        description="a test",
        num_sharers=num_sharers,
    )


def key(number: int) -> bytes:
    return IDENTITY + number.to_bytes(16, "big")


def block(number: int) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(RECORD)))


def put(store: DiskStore, *numbers: int) -> None:
    store.store([key(n) for n in numbers], [block(n) for n in numbers])


def has(store: DiskStore, *numbers: int) -> list[bool]:
    """What it says that it has, having checked that it gives just that."""
    loaded = store.load([key(n) for n in numbers])
    assert all(got is None or got == block(n) for n, got in zip(numbers, loaded, strict=True))
    return [got is not None for got in loaded]


def files(store: DiskStore) -> list[Path]:
    return sorted(store.directory.glob("*.kv"))


def test_the_next_start_finds_what_was_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, 1, 2, 3)
    assert store.contains(key(2)) and not store.contains(key(9))
    store.close()
    again = open_store(tmp_path)
    assert has(again, 1, 2, 3, 4) == [True, True, True, False]
    put(again, 4)
    assert len(files(again)) == 1  # it goes on in the segment that the first one left
    again.close()


def test_engines_share_a_directory(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    put(one, 1)
    put(two, 2)
    one.look()
    two.look()
    assert has(one, 1, 2) == has(two, 1, 2) == [True, True]
    assert len(files(one)) == 2  # each writes to its own
    put(one, 3)
    two.look()
    assert has(two, 3) == [True]
    one.forget([key(3)])
    assert has(two, 3) == [False]  # though it has not looked
    one.close()
    two.close()


def test_others_models_and_block_sizes_are_not_seen(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, 1)
    other = open_store(tmp_path, identity=b"o" * 16)
    assert not other.contains(b"o" * 16 + key(1)[16:])
    # Even a file in the right place that is another's.
    shutil.copy(files(store)[0], other.directory / "copied.kv")
    other.look()
    assert (other.num_rejected, other.usage()["num_blocks"]) == (1, 0)
    store.close()
    other.close()
    with_other_size = open_store(tmp_path, record=RECORD + 1)
    assert (with_other_size.num_rejected, with_other_size.usage()["num_blocks"]) == (1, 0)
    with_other_size.close()


def test_forgotten_blocks_stay_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, 1, 2)
    store.forget([key(1), key(7)])
    assert has(store, 1, 2) == [False, True]
    store.close()
    again = open_store(tmp_path)
    assert has(again, 1, 2) == [False, True]
    put(again, 1)
    assert has(again, 1) == [True]
    again.close()


def test_the_least_recently_used_segment_goes_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=16 * 12_000)
    per_segment = store._capacity
    for first in range(0, 200, per_segment):
        put(store, *range(first, first + per_segment))
        for age, path in enumerate(reversed(files(store))):  # files of one moment have one time
            os.utime(path, (1e9 - age, 1e9 - age))
        has(store, 0)  # used again and again: a load makes its segment's time new
        store._touched_s.clear()
        assert sum(path.stat().st_blocks * 512 for path in files(store)) <= store.max_bytes
    assert store.num_evicted_segments > 3
    assert has(store, 0, per_segment, 199) == [True, False, True]
    store.close()


def test_a_segment_that_another_writes_to_is_not_evicted(tmp_path: Path) -> None:
    one, two = open_store(tmp_path, max_bytes=16 * 12_000), open_store(tmp_path, max_bytes=16 * 12_000)
    put(one, 1000)
    for number in range(250):
        put(two, number)
    assert two.num_evicted_segments > 0
    assert has(one, 1000) == [True]
    one.close()
    two.close()


def test_expired_segments_go(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=16 * 12_000)
    put(store, *range(store._capacity * 2 + 1))
    old = files(store)[0]
    os.utime(old, (1, 1))
    assert store.expire(3600.0) == store._capacity
    assert not old.exists() and len(files(store)) == 2
    store.close()


def test_it_tells_of_every_key_that_it_gains_and_loses(tmp_path: Path) -> None:
    one = open_store(tmp_path, max_bytes=16 * 12_000)
    put(one, 1, 2)
    told: dict[bytes, bool] = {}
    one.tell_keys(told.__setitem__)
    assert told == {key(1): True, key(2): True}
    put(one, 3)
    one.forget([key(1)])
    two = open_store(tmp_path, max_bytes=16 * 12_000)
    put(two, 4)
    one.look()
    assert told == {key(1): False, key(2): True, key(3): True, key(4): True}
    for number in range(100, 400):
        put(two, number)  # which evicts what the first one has, but for the segment that it writes to
    one.look()
    assert {k for k, is_held in told.items() if is_held} == {IDENTITY + k for k in one._index} and not told[key(4)]
    one.close()
    two.close()


def test_a_full_disk_refuses_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    put(store, 1)
    real, room = os.pwrite, [2500]

    def limited(fd: int, data: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, data[: min(len(data), room[0], 700)], offset)  # in pieces, and then no more
        room[0] -= written
        return written

    monkeypatch.setattr(segments.os, "pwrite", limited)
    for number in (2, 3, 4, 5):
        try:
            put(store, number)
        except OSError:
            break
    monkeypatch.undo()
    assert has(store, 1, 2, 5) == [True, True, False]
    put(store, 5)
    store.close()
    again = open_store(tmp_path)
    assert has(again, 1, 2, 5) == [True, True, True]
    again.close()


def test_a_cut_or_changed_file_loses_blocks_and_never_lies(tmp_path: Path) -> None:
    """At any byte: a crash leaves a file that ends there, or one whose later parts were never written."""
    store = open_store(tmp_path / "good", max_bytes=1 << 16)
    put(store, 0, 1, 2)
    good = files(store)[0].read_bytes()
    directory = store.directory
    store.close()
    table = range(HEADER_BYTES, HEADER_BYTES + 4 * ENTRY_BYTES, 3)
    cuts = [0, 1, 50, HEADER_BYTES - 1, *table, len(good) // 2, len(good) - 1]
    rng = random.Random(5)
    for at in cuts:
        for damage in ("cut", "zeros", "noise"):
            damaged = bytearray(good)
            if damage == "cut":
                del damaged[at:]
            elif damage == "zeros":
                damaged[at:] = bytes(len(good) - at)
            else:
                damaged[at : at + 1] = rng.randbytes(1)
            (directory / "x.kv").write_bytes(damaged)
            for path in directory.glob("*.kv"):
                if path.name != "x.kv":
                    path.unlink()
            opened = open_store(tmp_path / "good", max_bytes=1 << 16)
            loaded = opened.load([key(n) for n in range(3)])
            # Records are sealed by the engine: here only their places are checked. See test_sealed.
            assert all(got is None or len(got) == RECORD for got in loaded)
            put(opened, 7)
            assert has(opened, 7) == [True]
            opened.close()


def test_garbage_in_the_directory_is_counted_and_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / IDENTITY.hex()
    directory.mkdir()
    (directory / "empty.kv").write_bytes(b"")
    (directory / "text.kv").write_text("not a segment at all\n" * 500)
    (directory / "link.kv").symlink_to(tmp_path / "nowhere")
    (directory / "notes.txt").write_text("mine")
    store = open_store(tmp_path)
    assert store.num_rejected == 2
    put(store, 1)
    assert has(store, 1) == [True]
    store.close()
    assert (directory / "text.kv").exists() and (directory / "notes.txt").exists()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk_path"):
        open_store(tmp_path / "file")
    with pytest.raises(ConfigError, match="kv_disk_size"):
        open_store(tmp_path, max_bytes=1 << 60)
    with pytest.raises(ConfigError, match="for this rank"):  # each of two could have it, and not both
        free = shutil.disk_usage(tmp_path).free
        open_store(tmp_path, max_bytes=free * 2 // 3, num_sharers=2)
    with pytest.raises(ConfigError, match="no block"):
        open_store(tmp_path, max_bytes=1000)


def free_space(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))


def test_without_a_size_it_takes_a_share_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_space(monkeypatch, 1 << 20)
    with caplog.at_level(logging.INFO, logger="quire"):
        store = open_store(tmp_path, max_bytes=None)
    assert store.max_bytes == (1 << 20) // 5
    assert "kv_disk_size" in caplog.text and "204.80 KiB" in caplog.text and str(tmp_path) in caplog.text
    for number in range(400):  # more than it may keep
        put(store, number)
    held = sum(path.stat().st_blocks * 512 for path in files(store))
    assert 0 < held <= store.max_bytes and store.num_evicted_segments
    store.close()
    free_space(monkeypatch, (1 << 20) - held)
    again = open_store(tmp_path, max_bytes=None)
    assert again.max_bytes == (1 << 20) // 5  # what it has filled itself counts as free
    again.close()


@pytest.mark.parametrize(("num_sharers", "expected"), [(1, 100 << 30), (4, 25 << 30)])
def test_the_share_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_sharers: int, expected: int
) -> None:
    free_space(monkeypatch, 8 << 40)
    store = open_store(tmp_path, max_bytes=None, num_sharers=num_sharers)
    assert store.max_bytes == expected
    store.close()


@pytest.mark.parametrize("free", [0, 4 * RECORD])
def test_a_disk_without_room_for_a_block_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    free_space(monkeypatch, free)
    with pytest.raises(ConfigError, match=r"no block.* free space there, give another kv_disk_path, or set"):
        open_store(tmp_path, max_bytes=None)
