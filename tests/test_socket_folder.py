"""Where sockets between processes of one engine lie."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from quire import socket_folder
from quire.socket_folder import SocketFolder, end_context


def folder_that_was_closed() -> Path:
    folder = SocketFolder()
    folder.close()
    return Path(folder.address("outputs").removeprefix("ipc://")).parent


def test_the_folder_is_a_temporary_one_and_goes_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = folder_that_was_closed()
    assert folder.parent == tmp_path
    assert not folder.exists()


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "\n".join(
        (
            "import sys, tempfile, time, zmq",
            "from quire.socket_folder import SocketFolder",
            "tempfile.tempdir = sys.argv[1]",
            "folder = SocketFolder()",
            "zmq.Context().socket(zmq.PULL).bind(folder.address('outputs'))",
            "print(folder.address('outputs'), flush=True)",
            "time.sleep(60)",
        )
    )
    servers = []
    for _ in range(2):
        server = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        servers.append((server, Path(server.stdout.readline().strip().removeprefix("ipc://")).parent))
    (killed, abandoned), (_, in_use) = servers
    try:
        killed.kill()
        killed.wait()
        assert (abandoned / "outputs").exists() and (in_use / "outputs").exists()
        others = tmp_path / "quire-lab-x"  # nothing in it says that it is a server's
        others.mkdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "lock").touch()
        (tmp_path / "quire-link").symlink_to(elsewhere)
        folder_that_was_closed()
        assert not abandoned.exists()
        assert (in_use / "outputs").exists() and others.exists() and (elsewhere / "lock").exists()
    finally:
        for server, _ in servers:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = folder_that_was_closed()
    assert folder.parent == Path("/tmp")
    assert not folder.exists()


def test_sockets_that_cannot_be_let_go_of_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_folder, "_END_S", 0.05)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    held = context.socket(zmq.PULL)
    end_context(context)  # waits for the socket
    assert "could not be let go of" in caplog.text
    held.close()
