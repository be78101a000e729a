"""Where the sockets between server and engine lie. What goes through them is test_client.py's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from quire import socket_folder
from quire.engine.link import EngineLink
from quire.socket_folder import end_context


async def folder_of_a_link() -> Path:
    link = EngineLink(asyncio.get_running_loop(), lambda message: None, lambda error: None)
    link.close()
    return Path(link.outputs_address.removeprefix("ipc://")).parent


def test_the_folder_is_a_temporary_one_and_goes_with_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = asyncio.run(folder_of_a_link())
    assert folder.parent == tmp_path
    assert not folder.exists()


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "\n".join(
        (
            "import asyncio, sys, tempfile, time",
            "from quire.engine.link import EngineLink",
            "tempfile.tempdir = sys.argv[1]",
            "async def main():",
            "    link = EngineLink(asyncio.get_running_loop(), lambda message: None, lambda error: None)",
            "    print(link.outputs_address, flush=True)",
            "    time.sleep(60)",
            "asyncio.run(main())",
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
        asyncio.run(folder_of_a_link())
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
    folder = asyncio.run(folder_of_a_link())
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
