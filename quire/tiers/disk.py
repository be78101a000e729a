"""The disk level: blocks in segment files, in a directory that several engines may share.

Each engine writes to one segment at a time, whose lock it holds, and reads all. What others write and delete it learns
by looking at the directory now and then. The unit of eviction is a segment: the one that was not used for longest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quire.errors import ConfigError
from quire.log import get_logger
from quire.sizes import show_size
from quire.tiers.segment import SUFFIX, ForeignFileError, Segment, Shape

_MAX_SEGMENT_BYTES = 256 << 20
_MIN_SEGMENTS = 16  # that the size is cut into, so that evicting one costs little
_DEFAULT_DIVISOR = 5  # of free space: a few models on one disk, each with its own directory, leave most of it free
_MAX_DEFAULT_BYTES = 100 << 30
_LOOK_EVERY_S = 1.0
_TOUCH_EVERY_S = 5.0

TellKey = Callable[[bytes, bool], None]


class DiskStore:
    """A connector. One per engine and directory; any number of engines per directory."""

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int | None,
        record_bytes: int,
        identity: bytes,
        description: str = "",
        num_sharers: int = 1,
    ) -> None:
        """max_bytes: None for a share of what is free. num_sharers: ranks on this machine, each with such a store, that
        divide what is free."""
        self.directory = Path(path).expanduser() / identity.hex()
        self.shape = Shape(identity, record_bytes)
        self._segments: dict[str, Segment] = {}  # by file name
        self._index: dict[bytes, tuple[Segment, int]] = {}
        self._keys: dict[str, set[bytes]] = {}  # by file name
        self._foreign: set[str] = set()
        self._active: Segment | None = None
        self._touched_s: dict[str, float] = {}
        self._tell: TellKey | None = None  # called with each key that is gained or lost
        self._lock = threading.RLock()  # of everything above
        self._stop = threading.Event()
        self.num_rejected = 0  # files and entries that are not right
        self.num_refused = 0  # blocks for which there was no room
        self.num_evicted_segments = 0
        self._prepare_directory(description)
        self.max_bytes, self._capacity = self._sizes(max_bytes, num_sharers)
        self.look()
        self._looker = threading.Thread(target=self._keep_looking, name="kv-disk-look", daemon=True)
        self._looker.start()

    def _prepare_directory(self, description: str) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.directory / "identity.txt").write_text(description + "\n", encoding="utf-8")
            self._lock_path.touch(mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"kv_disk_path: {self.directory} cannot be written ({error.strerror}): give a directory that can"
            ) from None
        for unfinished in self.directory.glob("*.new"):  # of an engine that was ended while it began one
            if time.time() - unfinished.stat().st_mtime > 60:
                unfinished.unlink(missing_ok=True)

    def _sizes(self, max_bytes: int | None, num_sharers: int) -> tuple[int, int]:
        """The most bytes of all files, and the records of a segment. Files that are there already may be replaced, so
        that they count as free, and the default stays the same from one start to the next."""
        rank = " for this rank" if num_sharers > 1 else ""
        room = shutil.disk_usage(self.directory).free // num_sharers + sum(size for _, size, _ in self._files())
        has_room = f"{self.directory} has {show_size(room)} for it"
        if max_bytes is None:
            max_bytes = min(room // _DEFAULT_DIVISOR, _MAX_DEFAULT_BYTES // num_sharers)
            told = f"kv_disk_size is not given: {show_size(max_bytes)}{rank} are taken, as {has_room}"
            advice = "free space there, give another kv_disk_path, or set kv_disk_size"
            get_logger().info(told)
        else:
            told = f"kv_disk_size is {show_size(max_bytes)}{rank}"
            advice = "raise it, to 16GiB for example: without a unit it is bytes"
            if max_bytes > room:
                raise ConfigError(f"{told}, and {has_room}: lower it, or give another kv_disk_path")
        capacity = max(1, min(_MAX_SEGMENT_BYTES, max_bytes // _MIN_SEGMENTS) // self.shape.record_bytes)
        if self.shape.segment_bytes(capacity) > max_bytes:
            one = show_size(self.shape.segment_bytes(1))
            raise ConfigError(f"{told}, which holds no block: one takes {one}; {advice}")
        return max_bytes, capacity

    @property
    def _lock_path(self) -> Path:
        return self.directory / "lock"

    # -- the protocol

    def contains(self, key: bytes) -> bool:
        return self._own_key(key) in self._index

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._load(self._own_key(key)) for key in keys]

    def store(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for key, block in zip(map(self._own_key, keys), blocks, strict=True):
            if key in self._index:
                continue
            segment = self._writable_segment()
            if segment is None:
                self.num_refused += 1
                continue
            index = segment.append(key, block)
            self._note(segment, key, index)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in map(self._own_key, keys):
            place = self._drop_key(key)
            if place is not None:
                place[0].drop(place[1], key)

    def tell_keys(self, tell: TellKey) -> None:
        with self._lock:
            self._tell = tell
            for key in self._index:
                self._say(key, True)

    def close(self) -> None:
        self._stop.set()
        self._looker.join()
        with self._lock:
            if self._active is not None:
                self._active.unlock()
            self._active = None
            self._segments.clear()
            self._index.clear()
            self._keys.clear()

    # -- for operators

    def usage(self) -> dict[str, float]:
        files = self._files()
        now = time.time()
        with self._lock:
            return {
                "num_blocks": len(self._index),
                "num_bytes": len(self._index) * self.shape.record_bytes,
                "file_bytes": sum(size for _, size, _ in files),
                "max_bytes": self.max_bytes,
                "num_segments": len(files),
                "oldest_s": max((now - used for used, _, _ in files), default=0.0),
                "num_rejected": self.num_rejected,
                "num_refused": self.num_refused,
                "num_evicted_segments": self.num_evicted_segments,
            }

    def expire(self, older_than_s: float) -> int:
        """Drop the segments that nobody used for so long; what this engine writes to is kept whole."""
        num_dropped = 0
        with self._directory_lock():
            for used, _, name in sorted(self._files()):
                if time.time() - used >= older_than_s:
                    num_dropped += self._evict(name) or 0
        return num_dropped

    def drop_from_page_cache(self) -> None:
        """For measurements: the next loads come from the disk."""
        with self._lock:
            for segment in self._segments.values():
                segment.drop_from_page_cache()

    # -- inside

    def _own_key(self, key: bytes) -> bytes:
        """The directory is the identity's: entries do without it."""
        return key.removeprefix(self.shape.identity)

    def _load(self, key: bytes) -> bytes | None:
        place = self._index.get(key)
        if place is None:
            return None
        segment, index = place
        try:
            record = segment.read(index, key)
        except OSError:
            record = None
        if record is None:
            self._drop_key(key)
            return None
        name, now = segment.path.name, time.monotonic()
        if now - self._touched_s.get(name, -_TOUCH_EVERY_S) >= _TOUCH_EVERY_S:
            self._touched_s[name] = now
            with contextlib.suppress(OSError):
                segment.touch()
        return record

    def _note(self, segment: Segment, key: bytes, index: int) -> None:
        with self._lock:
            self._index.setdefault(key, (segment, index))
            self._keys.setdefault(segment.path.name, set()).add(key)
            self._say(key, True)

    def _drop_key(self, key: bytes) -> tuple[Segment, int] | None:
        with self._lock:
            place = self._index.pop(key, None)
            if place is not None:
                self._keys[place[0].path.name].discard(key)
                self._say(key, False)
            return place

    def _say(self, key: bytes, is_held: bool) -> None:
        if self._tell is not None:
            self._tell(self.shape.identity + key, is_held)

    def _files(self) -> list[tuple[float, int, str]]:
        """(last use, bytes on disk, name) of the segments there are."""
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and entry.name not in self._foreign:
                    with contextlib.suppress(OSError):  # deleted by another engine just now
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime, status.st_blocks * 512, entry.name))
        return found

    def look(self) -> None:
        """Learn of segments and entries that others wrote, and of segments that are gone."""
        names = {name for _, _, name in self._files()}
        with self._lock:
            for name in self._segments.keys() - names:
                self._forget_segment(name)
            for name in sorted(names - self._segments.keys()):
                try:
                    self._segments[name] = Segment.open(self.directory / name, self.shape)
                except ForeignFileError:
                    self._foreign.add(name)
                    self.num_rejected += 1
                except OSError:
                    continue
            for segment in self._segments.values():
                if segment is not self._active:
                    self._read_new(segment)

    def _read_new(self, segment: Segment) -> None:
        for key, index in segment.read_new():
            if key is None:
                self.num_rejected += 1
            else:
                self._note(segment, key, index)

    def _forget_segment(self, name: str) -> int:
        """Returns how many blocks it had."""
        segment = self._segments.pop(name, None)
        keys = self._keys.pop(name, set())
        for key in keys:
            if self._index.get(key, (None, 0))[0] is segment:
                del self._index[key]
                self._say(key, False)
        return len(keys)

    def _keep_looking(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            with contextlib.suppress(OSError):
                self.look()

    def _writable_segment(self) -> Segment | None:
        with self._lock:
            if self._active is not None and not self._active.is_full and self._active.path.exists():
                return self._active
            if self._active is not None:
                self._active.unlock()
                self._active = None
            with self._directory_lock():
                self._active = self._adopt() or self._create()
            return self._active

    def _adopt(self) -> Segment | None:
        """A segment that another engine left, to be filled up."""
        for segment in self._segments.values():
            if not segment.is_full and segment.try_lock():
                self._read_new(segment)
                segment.skip_unfinished()
                if not segment.is_full:
                    return segment
                segment.unlock()
        return None

    def _create(self) -> Segment | None:
        """A new segment, for which others may have to go; None where there is no room for one."""
        needed = self.shape.segment_bytes(self._capacity)
        files = sorted(self._files())
        held = sum(size for _, size, _ in files)
        while held + needed > self.max_bytes and files:
            _, size, name = files.pop(0)
            if self._evict(name) is not None:
                held -= size
        if held + needed > self.max_bytes:
            return None
        # In nanoseconds: a system's times of change are coarser, and of files with the same one the older goes first.
        path = self.directory / f"{time.time_ns():x}-{os.getpid():x}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        try:
            segment = Segment.create(path, self.shape, self._capacity)
        except OSError:  # the disk is full, whatever the setting says
            return None
        self._segments[path.name] = segment
        return segment

    def _evict(self, name: str) -> int | None:
        """Delete a segment unless somebody writes to it. Returns how many blocks this engine knew in it; None: it
        stays."""
        with self._lock:
            if self._active is not None and self._active.path.name == name:
                return None
            path = self.directory / name
            segment = self._segments.get(name)
            try:
                segment = segment or Segment.open(path, self.shape)
                if not segment.try_lock():
                    return None
                path.unlink(missing_ok=True)
                segment.unlock()
            except (ForeignFileError, OSError):
                return None
            self.num_evicted_segments += 1
            return self._forget_segment(name)

    @contextlib.contextmanager
    def _directory_lock(self) -> Iterator[None]:
        """One engine at a time makes room, or takes over a segment."""
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
