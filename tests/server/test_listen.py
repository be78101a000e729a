from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.listen import address_of, open_socket, socket_file
from quire.server.settings import ServerSettings


def test_clients_can_connect_as_soon_as_it_is_open() -> None:
    settings = ServerSettings(port=0)
    with open_socket(settings) as listener:
        address = address_of(listener, settings)
        port = int(address.rpartition(":")[2])
        assert address == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_port_in_use_says_what_to_do() -> None:
    with open_socket(ServerSettings(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use: .*--port"):
            open_socket(ServerSettings(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        open_socket(ServerSettings(host=host, port=0))


def test_every_address_is_shown_as_one_that_can_be_opened() -> None:
    settings = ServerSettings(host="0.0.0.0", port=0)
    with open_socket(settings) as listener:
        assert address_of(listener, settings).startswith("http://localhost:")


def test_a_unix_socket_replaces_a_stale_one_but_never_a_file_or_a_live_one(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    settings = ServerSettings(uds=str(path))
    open_socket(settings).close()  # closed, and its file stays
    assert path.exists()
    with open_socket(settings) as listener:
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        assert address_of(listener, settings) == f"unix:{path}"
        with pytest.raises(ConfigError, match="in use"):
            open_socket(settings)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file"):
        open_socket(ServerSettings(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "quire.sock", tmp_path / "none" / "quire.sock", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match=str(path)) as refused:
            open_socket(ServerSettings(uds=str(path)))
        assert "\n" not in str(refused.value)


def test_a_socket_of_another_kind_is_nobodys_leftover(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(ConfigError, match=str(path)):
            open_socket(ServerSettings(uds=str(path)))
        assert path.exists()


def test_only_the_file_that_was_bound_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    settings = ServerSettings(uds=str(path))
    assert socket_file(ServerSettings()) is None
    with open_socket(settings):
        ours = socket_file(settings)
        assert ours is not None
        path.chmod(0o660)  # it stays ours
    path.unlink()
    ours.remove()  # gone already
    with open_socket(settings):  # where inodes' numbers are used again, it has the same one
        ours.remove()
        assert path.exists()
        theirs = socket_file(settings)
        assert theirs is not None
        path.chmod(0o660)
        theirs.remove()
        assert not path.exists()
