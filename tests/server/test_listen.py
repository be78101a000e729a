from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from quire.errors import ConfigError
from quire.server.http_server import HttpServer
from quire.server.listen import address_of, make_ssl_context, open_socket, socket_file
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


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, its key, that key under a password, and a foreign key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for key in ("key.pem", "other.pem"):
        openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", key)
    openssl("pkey", "-in", "key.pem", "-aes128", "-passout", "pass:secret", "-out", "locked.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl("req", "-x509", "-new", "-key", "key.pem", "-days", "2", "-out", "cert.pem", *subject)
    return folder


def settings(folder: Path, **files: str) -> ServerSettings:
    values: dict[str, Any] = {name: str(folder / file) for name, file in files.items()}
    return ServerSettings(port=0, **values)


def test_without_a_certificate_there_is_no_tls() -> None:
    assert make_ssl_context(ServerSettings()) is None


def test_https_is_served_and_client_certificates_can_be_required(pem: Path) -> None:
    async def answer(_: Request) -> PlainTextResponse:
        return PlainTextResponse("over tls")

    def get(url: str, *, with_certificate: bool = False) -> bytes:
        context = ssl.create_default_context(cafile=pem / "cert.pem")
        if with_certificate:
            context.load_cert_chain(pem / "cert.pem", pem / "key.pem")
        with urllib.request.urlopen(url, context=context, timeout=5) as response:
            return bytes(response.read())

    async def run(*, needs_certificate: bool) -> None:
        files = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}
        wanted = settings(pem, **files, **({"ssl_ca_certs": "cert.pem"} if needs_certificate else {}))
        listener = open_socket(wanted)
        url = address_of(listener, wanted)
        assert url.startswith("https://")
        http = HttpServer(Starlette(routes=[Route("/", answer)]), wanted, make_ssl_context(wanted))
        task = asyncio.create_task(http.run_on(listener))
        try:
            got = await asyncio.to_thread(get, url, with_certificate=needs_certificate)
            assert got == b"over tls"
            if needs_certificate:
                with pytest.raises((ssl.SSLError, OSError)):
                    await asyncio.to_thread(get, url)
        finally:
            http.stop()
            await task

    asyncio.run(run(needs_certificate=False))
    asyncio.run(run(needs_certificate=True))


async def test_a_handshake_has_as_long_as_headers_have(pem: Path) -> None:
    wanted = ServerSettings(
        port=0, ssl_certfile=str(pem / "cert.pem"), ssl_keyfile=str(pem / "key.pem"), header_timeout_s=0.3
    )
    listener = open_socket(wanted)
    http = HttpServer(Starlette(), wanted, make_ssl_context(wanted))
    task = asyncio.create_task(http.run_on(listener))
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(20):  # a minute without the limit
            assert await reader.read() == b""
        writer.close()
    finally:
        http.stop()
        await task


def test_a_key_under_a_password_needs_it(pem: Path) -> None:
    files = {"ssl_certfile": str(pem / "cert.pem"), "ssl_keyfile": str(pem / "locked.pem")}
    assert make_ssl_context(ServerSettings(**files, ssl_keyfile_password="secret")) is not None
    for password in (None, "wrong"):
        with pytest.raises(ConfigError, match="ssl_keyfile_password"):
            make_ssl_context(ServerSettings(**files, ssl_keyfile_password=password))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ssl_certfile": "none.pem"}, "none.pem: No such file"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "none.pem"}, "ssl_keyfile .*No such file"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "other.pem"}, "not the key of"),
        ({"ssl_certfile": "key.pem", "ssl_keyfile": "key.pem"}, "not a PEM certificate"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "key.pem"}, "ssl_ca_certs"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_file(pem: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        make_ssl_context(settings(pem, **files))
    assert "\n" not in str(refused.value)
