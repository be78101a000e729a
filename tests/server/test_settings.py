from __future__ import annotations

import math
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.run import process_engine
from quire.server.settings import ApiKey, ServerSettings


def test_the_defaults_are_careful() -> None:
    settings = ServerSettings()
    assert settings.is_local
    assert not settings.is_tls
    assert settings.cors_origins == ()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_is_local(host: str, is_local: bool) -> None:
    assert ServerSettings(host=host).is_local is is_local


def test_tenants_are_kept_apart_where_there_are_several() -> None:
    keys = (ApiKey("a", "key-1"), ApiKey("a", "key-2"))
    assert ServerSettings().isolated_tenants == ServerSettings(api_keys=keys).isolated_tenants == ()
    several = ServerSettings(api_keys=(*keys, ApiKey("b", "key-3")))
    assert several.isolated_tenants == ("a", "b")
    engine: Any = process_engine(EngineConfig(), several)  # which is not started
    assert engine.options.isolated_tenants == ("a", "b")
    assert ServerSettings(api_keys=several.api_keys, share_prefixes_across_keys=True).isolated_tenants == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"host": ""}, "host"),
        ({"port": 70000}, "port must be between"),
        ({"ssl_keyfile": "k.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"max_body_bytes": 0}, "max_body_bytes must be"),
        ({"max_waiting_requests": 0}, "max_waiting_requests must be"),
        ({"header_timeout_s": 0.0}, "header_timeout must be more than 0"),
        ({"default_timeout_s": math.nan}, "default_timeout must be more than 0"),
        ({"max_timeout_s": math.inf}, "max_timeout must be .* at most 1e9 seconds, got inf"),
        ({"drain_timeout_s": -1.0}, "drain_timeout must be 0"),
        ({"drain_timeout_s": math.nan}, "drain_timeout must be 0"),
        ({"default_timeout_s": 10.0, "max_timeout_s": 5.0}, "default_timeout .* must be <= max_timeout"),
        ({"cors_origins": ("example.org",)}, "cors_origin must be like"),
        ({"cors_origins": ("https://example.org/",)}, "cors_origin must be like"),
        ({"log_format": "xml"}, "log_format must be one of text, json"),
        ({"log_level": "loud"}, "log_level must be one of"),
        ({"dump_dir": "/no/such/dir"}, "dump_dir"),
        ({"served_model_names": ("",)}, "served_model_name"),
        ({"api_keys": (ApiKey("a", "k"), ApiKey("b", "k"))}, "given twice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**values)


def test_no_key_or_password_shows_when_printed() -> None:
    text = repr(ServerSettings(api_keys=(ApiKey("alice", "sk-1"),), ssl_certfile="c", ssl_keyfile_password="pw-1"))
    assert "alice" in text
    assert "sk-1" not in text
    assert "pw-1" not in text
