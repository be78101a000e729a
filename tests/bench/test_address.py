"""Which server is meant, however it is written."""

from __future__ import annotations

import pytest
from bench_server import FakeServer, serving_in_a_thread

from quire.bench.address import server_address
from quire.cli.main import main
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("base_url", "host", "port", "address"),
    [
        (None, None, None, "http://127.0.0.1:8000"),
        (None, "box", None, "http://box:8000"),
        (None, None, 8020, "http://127.0.0.1:8020"),
        (None, "::1", 80, "http://[::1]:80"),
        (None, "[::1]", 80, "http://[::1]:80"),
        ("http://box:8020/v1", None, None, "http://box:8020"),
        ("http://box:8020/v1//", None, None, "http://box:8020"),
        ("https://box/", None, None, "https://box"),
        ("https://box/models/v1", None, None, "https://box/models"),
        ("https://box/v11", None, None, "https://box/v11"),
    ],
)
def test_addresses(base_url: str | None, host: str | None, port: int | None, address: str) -> None:
    assert server_address(base_url, host, port) == address


@pytest.mark.parametrize(
    ("base_url", "host", "port", "words"),
    [
        ("http://box", "box", None, "leave --host and --port out"),
        ("http://box", None, 8000, "leave --host and --port out"),
        ("box:8000", None, None, "http://"),
        (None, "http://box", None, "--base-url"),
        (None, None, 0, "from 1 to 65535"),
    ],
)
def test_refusals(base_url: str | None, host: str | None, port: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        server_address(base_url, host, port)


def test_the_command_takes_each_of_them() -> None:
    flags = ["bench", "serve", "--num-prompts", "2", "--input-len", "5", "--output-len", "3"]
    with serving_in_a_thread(FakeServer()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        assert main([*flags, "--host", host, "--port", port]) == 0
        assert main([*flags, "--base-url", f"{server.url}/v1/"]) == 0
        assert main([*flags, "--base-url", server.url, "--port", port]) == 2
    assert len(server.bodies) == 4
