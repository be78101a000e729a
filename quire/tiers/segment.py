"""A segment: one file of blocks, with a table of what they are in front.

| header, 4 KiB | table: `capacity` entries of 64 bytes | records of `record_bytes` each |

A record is written before its entry, and the entry has a checksum. Nothing is synchronized: what a crash leaves is
either right or found out, by the entry's checksum or by the record's seal, which is checked when it is loaded.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSION = b"QUIREKV\0", 1
HEADER_BYTES = 4096
SUFFIX = ".kv"
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, capacity, record bytes, identity; then a checksum
_ENTRY = struct.Struct("<BBxx40sdxxxxxxxx")  # kind, length of the key, key, when; then a checksum
ENTRY_BYTES = _ENTRY.size + 4
MAX_KEY_BYTES = 40
_HELD, _GONE = 1, 2
_NO_ENTRY = bytes(ENTRY_BYTES)
_SCAN_ENTRIES = 1024

assert ENTRY_BYTES == 64


class ForeignFileError(Exception):
    """A file that is no segment of this store."""


@dataclass(slots=True, frozen=True)
class Shape:
    """What all segments of a store have in common."""

    identity: bytes
    record_bytes: int

    def segment_bytes(self, capacity: int) -> int:
        return _table_end(capacity) + capacity * self.record_bytes


def _table_end(capacity: int) -> int:
    return -(-(HEADER_BYTES + capacity * ENTRY_BYTES) // 4096) * 4096


class Segment:
    """An open segment. Any number of threads may read it; one may write, and has to hold its lock."""

    __slots__ = ("_fd", "_records_at", "capacity", "next_entry", "path", "shape")

    def __init__(self, path: Path, fd: int, shape: Shape, capacity: int) -> None:
        self.path = path
        self.shape = shape
        self.capacity = capacity
        self.next_entry = 0  # the first that was not read, or is to be written
        self._fd = fd
        self._records_at = _table_end(capacity)

    @classmethod
    def create(cls, path: Path, shape: Shape, capacity: int) -> Segment:
        """A new one, locked. Takes all of its space on disk at once, so that a full disk is noticed here."""
        unfinished = path.with_suffix(".new")
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, shape.segment_bytes(capacity))
            head = _HEADER.pack(MAGIC, VERSION, capacity, shape.record_bytes, shape.identity)
            _write_all(fd, head + struct.pack("<I", zlib.crc32(head)), 0)
            os.rename(unfinished, path)
        except BaseException:
            os.close(fd)
            unfinished.unlink(missing_ok=True)
            raise
        return cls(path, fd, shape, capacity)

    @classmethod
    def open(cls, path: Path, shape: Shape) -> Segment:
        """Raises ForeignFileError where it is none of this store's, OSError where it is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            head = os.pread(fd, _HEADER.size + 4, 0)
            if len(head) < _HEADER.size + 4 or struct.unpack("<I", head[-4:])[0] != zlib.crc32(head[:-4]):
                raise ForeignFileError(f"{path}: no header of a segment")
            magic, version, capacity, record_bytes, identity = _HEADER.unpack(head[:-4])
            if (magic, version, record_bytes, identity) != (MAGIC, VERSION, shape.record_bytes, shape.identity):
                raise ForeignFileError(f"{path}: a segment of another version or model")
            if not 0 < capacity < 1 << 31:
                raise ForeignFileError(f"{path}: a segment of {capacity} records")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, shape, capacity)

    def __del__(self) -> None:
        # Not before the last reader has let go of it: its number could be another file's by then.
        os.close(self._fd)

    @property
    def is_full(self) -> bool:
        return self.next_entry >= self.capacity

    def try_lock(self) -> bool:
        """Become its writer, unless it has one. The lock ends with `unlock` or with the process."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read_new(self) -> Iterator[tuple[bytes | None, int]]:
        """(key, index) of entries that were not read before; None for one whose checksum is wrong.

        The last entry may be only half written yet: while none follows it, it is looked at again next time.
        """
        while self.next_entry < self.capacity:
            first = self.next_entry
            count = min(_SCAN_ENTRIES, self.capacity - first)
            table = os.pread(self._fd, count * ENTRY_BYTES, HEADER_BYTES + first * ENTRY_BYTES)
            entries = [table[at : at + ENTRY_BYTES] for at in range(0, len(table), ENTRY_BYTES)]
            for i, entry in enumerate(entries):
                if entry == _NO_ENTRY or len(entry) < ENTRY_BYTES:
                    return
                held = _read_entry(entry)
                is_last = i + 1 >= len(entries) or entries[i + 1] == _NO_ENTRY
                if held is None and is_last:
                    return
                self.next_entry = first + i + 1
                if held is None or held[0] == _HELD:
                    yield (None if held is None else held[1]), first + i
            if len(entries) < count:
                return

    def skip_unfinished(self) -> None:
        """Go on writing where another engine stopped, behind an entry that it left half written."""
        entry = os.pread(self._fd, ENTRY_BYTES, HEADER_BYTES + self.next_entry * ENTRY_BYTES)
        if not self.is_full and entry.strip(b"\0"):
            self.next_entry += 1

    def append(self, key: bytes, record: memoryview) -> int:
        """Returns its index. After an OSError nothing has changed that anybody would read."""
        index = self.next_entry
        assert index < self.capacity and len(record) == self.shape.record_bytes
        _write_all(self._fd, record, self._records_at + index * self.shape.record_bytes)
        self._write_entry(index, _HELD, key)
        self.next_entry = index + 1
        return index

    def drop(self, index: int, key: bytes) -> None:
        """Mark the entry so that the record is not found again."""
        self._write_entry(index, _GONE, key)

    def _write_entry(self, index: int, kind: int, key: bytes) -> None:
        entry = _ENTRY.pack(kind, len(key), key, time.time())
        _write_all(self._fd, entry + struct.pack("<I", zlib.crc32(entry)), HEADER_BYTES + index * ENTRY_BYTES)

    def read(self, index: int, key: bytes) -> bytes | None:
        """The record, if the entry still says that it is this key's."""
        held = _read_entry(os.pread(self._fd, ENTRY_BYTES, HEADER_BYTES + index * ENTRY_BYTES))
        if held is None or held != (_HELD, key):
            return None
        record = os.pread(self._fd, self.shape.record_bytes, self._records_at + index * self.shape.record_bytes)
        return record if len(record) == self.shape.record_bytes else None

    def touch(self) -> None:
        """Mark it as used, so that it is evicted after segments that were not."""
        os.utime(self._fd)

    def drop_from_page_cache(self) -> None:
        """For measurements: the next read comes from the disk."""
        if hasattr(os, "posix_fadvise"):
            os.fsync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_entry(entry: bytes) -> tuple[int, bytes] | None:
    """Its kind and key; None where its checksum is wrong."""
    if len(entry) != ENTRY_BYTES or struct.unpack("<I", entry[-4:])[0] != zlib.crc32(entry[:-4]):
        return None
    kind, length, key, _ = _ENTRY.unpack(entry[:-4])
    return (kind, key[:length]) if kind in (_HELD, _GONE) and length <= MAX_KEY_BYTES else None


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
