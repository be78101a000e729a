from __future__ import annotations

import asyncio
import shutil
import ssl
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
from quire.server.listen import address_of, make_ssl_context, open_socket
from quire.server.settings import ServerSettings


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
