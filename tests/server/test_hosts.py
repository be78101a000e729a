from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_harness import ScriptedEngine, running

from quire.errors import ConfigError
from quire.server.guards import _name, allowed_hosts
from quire.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("settings", "taken", "refused"),
    [
        ({}, ["localhost", "127.0.0.1", "[::1]"], ["evil.example", "localhost.evil.example", ""]),
        ({"host": "127.0.0.2"}, ["127.0.0.2", "localhost"], ["127.0.0.3"]),
        ({"host": "::1"}, ["[::1]"], ["::1"]),
        ({"allowed_hosts": ("My.Box",)}, ["my.box", "localhost"], ["my.box.evil.example"]),
        ({"host": "0.0.0.0", "allowed_hosts": ("my.box",)}, ["my.box"], ["localhost"]),
    ],
)
def test_names(settings: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    names = allowed_hosts(ServerSettings(**settings))
    assert names is not None
    assert not set(taken) - names
    assert not set(refused) & names


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"allowed_hosts": ("*",)}, {"uds": "/tmp/x"}])
def test_where_any_name_may_be_right(settings: dict[str, Any]) -> None:
    assert allowed_hosts(ServerSettings(**settings)) is None


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b"localhost", "localhost"),
        (b"LocalHost.:8000", "localhost"),
        (b"[::1]:8000", "[::1]"),
        (b"[::1]", "[::1]"),
        (b"127.0.0.1:80", "127.0.0.1"),
        (b"", ""),
        (b"evil\xff:1", "evil\xff"),
    ],
)
def test_a_header_is_read_without_its_port(header: bytes, name: str) -> None:
    assert _name(header) == name


@pytest.mark.parametrize("name", ["http://a", "a:80", "a b", "", "a/b"])
def test_what_is_no_name_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts must be names"):
        ServerSettings(allowed_hosts=(name,))


def test_a_page_that_made_its_name_ours_reads_nothing(tiny_model: Path) -> None:
    with running(ScriptedEngine(tiny_model), cors_origins=("*",)) as server:
        for path in ("/", "/health", "/debug/kv", "/v1/models", "/nowhere"):
            reply = server.request("GET", path, host=f"evil.example:{server.port}", origin="http://evil.example")
            assert reply.status == 403
            assert reply.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-hosts evil.example" in reply.json()["error"]["message"]
            assert "access-control-allow-origin" not in reply.headers
        assert server.request("GET", "/v1/models", host=f"localhost:{server.port}").status == 200
        reply = server.request("GET", "/metrics")
        assert 'reason="host_not_allowed"} 5.0' in reply.text
