"""ServerSettings: what an operator asked of the server, checked once. The engine's own settings are EngineConfig."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import urlsplit

from quire.config import EngineConfig
from quire.errors import ConfigError

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
MIB = 1 << 20
_HOST = re.compile(r"\*|[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")  # what a header can carry


@dataclass(slots=True, frozen=True)
class ApiKey:
    """One key and whose it is. The tenant's name goes into logs and metrics; the key never does."""

    tenant: str
    key: str = field(repr=False)
    is_admin: bool = False  # sees every tenant's requests, but only its own requests' text


def make_key(key: str, *, name: str | None = None, is_admin: bool = False, source: str) -> ApiKey:
    """A key that a header can carry. Without a name its tenant is a short hash, so that logs tell keys apart."""
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{source}: an API key must be 1 to 512 visible ASCII characters without spaces")
    if name is None:
        name = "key-" + hashlib.sha256(b"quire tenant\0" + key.encode()).hexdigest()[:8]
    return ApiKey(name, key, is_admin)


def read_key_file(path: str) -> list[ApiKey]:
    """One key a line, as `key` or `name:key`, with ` admin` after it where it may see everybody's requests; empty lines
    and lines that begin with # are skipped."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {path}: not a text file in UTF-8") from None
    keys = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        text, _, scope = line.partition(" ")
        if is_admin := scope.strip() == "admin":
            line = text
        named = _NAMED.fullmatch(line)
        source = f"api_key_file {path}, line {number}"  # never the line itself: it is a secret
        if ":" in line and named is None:  # read as one key, `team:` would be a key that anyone can guess
            raise ConfigError(
                f"{source}: must be KEY or NAME:KEY, with a key after the colon and a name of 1 to 64 letters, digits, "
                "'_', '.' or '-' before it"
            )
        name, key = (named[1], named[2]) if named else (None, line)
        keys.append(make_key(key, name=name, is_admin=is_admin, source=source))
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key: the server would be open to anyone")
    return keys


@dataclass(slots=True, frozen=True)
class ModelSettings:
    """One of the models to serve."""

    config: EngineConfig
    names: tuple[str, ...] = ()  # under which clients ask for it; empty: as the operator named it


@dataclass(slots=True, frozen=True)
class LoraModule:
    """An adapter that is there from the start."""

    name: str
    path: str
    base_model_name: str | None = None  # None: the first model that is served

    @classmethod
    def of(cls, given: LoraModule | str | Mapping[str, Any]) -> LoraModule:
        """NAME=PATH, or vLLM's keys."""
        if isinstance(given, LoraModule):
            return given
        if isinstance(given, str):
            name, _, path = given.partition("=")
            given = {"name": name, "path": path}
        is_text = all(isinstance(value, str) and value for value in given.values())
        if not is_text or not {"name", "path"} <= set(given) <= {"name", "path", "base_model_name"}:
            raise ConfigError(f"lora_modules must be NAME=PATH, or JSON with name and path, got {given!r}")
        return cls(**given)


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerSettings:
    """Everything but the engine. `None` means "no limit" or "choose for me", as each comment says."""

    # Where it listens
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one, told in the ready line
    uds: str | None = None  # a Unix socket's path, instead of host and port
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None  # None: the certificate's file holds it too
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None  # given: clients must show a certificate that one of these signed
    # What clients see
    served_model_names: tuple[str, ...] = ()  # empty: the model as the operator named it
    lora_modules: tuple[LoraModule, ...] = ()  # adapters that are there from the start
    # Who may ask
    api_keys: tuple[ApiKey, ...] = ()  # empty: anyone
    share_prefixes_across_keys: bool = False  # then how fast an answer comes tells what other keys have sent
    allowed_hosts: tuple[str, ...] = ()  # names to answer under, or *; empty: on loopback its own, elsewhere any
    cors_origins: tuple[str, ...] = ()  # empty: no other site's page may
    max_body_bytes: int = 4 * MIB  # a prompt of 128k tokens in any script, escaped
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_s: float = 60.0
    # How much may wait, and how long
    max_waiting_requests: int | None = None  # None: as many as an eighth of the memory holds
    max_waiting_tokens: int | None = None  # None: as many as an eighth of the memory holds
    wake_timeout_s: float = 120.0  # for a model that sleeps to have its turn
    default_timeout_s: float | None = None  # for requests that name no timeout; None: no limit
    max_timeout_s: float | None = None  # the most that a request may name; None: no limit
    brownout: bool = True
    brownout_max_tokens: int = 256  # output tokens of new requests while memory is short
    # Files of requests
    batch_dir: str | None = None  # None: /v1/files and /v1/batches are refused
    batch_dir_bytes: int = 1 << 30
    # Life
    drain_timeout_s: float = 60.0
    step_timeout_s: float = 60.0  # a step that takes longer is stuck
    dump_dir: str = field(default_factory=gettempdir)  # where the watchdog writes what it saw
    # Logs
    log_format: str = "text"
    log_level: str = "info"
    otlp_traces_endpoint: str | None = None  # None: no traces are sent

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must be an address or a name: 0.0.0.0 listens on every IPv4 address")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile, the server's own certificate")
        self._check_positive()
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise ConfigError(f"allowed_hosts must be names without scheme and port, or *, got {name!r}")
        for origin in self.cors_origins:
            _check_origin(origin)
        if len({key.key for key in self.api_keys}) != len(self.api_keys):
            raise ConfigError("the same API key is given twice")
        object.__setattr__(self, "lora_modules", tuple(LoraModule.of(one) for one in self.lora_modules))
        names = [module.name for module in self.lora_modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"lora_modules: two adapters are named {twice!r}")
        if any(not name for name in self.served_model_names):
            raise ConfigError("served_model_name must not be empty")
        if self.default_timeout_s and self.max_timeout_s and self.default_timeout_s > self.max_timeout_s:
            raise ConfigError(
                f"default_timeout ({self.default_timeout_s:g} s) must be <= max_timeout ({self.max_timeout_s:g} s)"
            )
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")
        object.__setattr__(self, "log_level", self.log_level.lower())
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")
        if not Path(self.dump_dir).is_dir():
            raise ConfigError(f"dump_dir must be a directory that exists, got {self.dump_dir!r}")

    def _check_positive(self) -> None:
        for name in (
            *("max_body_bytes", "max_header_bytes", "max_waiting_requests", "max_waiting_tokens"),
            *("brownout_max_tokens", "batch_dir_bytes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be a whole number >= 1, got {value}")
        for name in (
            *("header_timeout_s", "body_timeout_s", "keep_alive_s", "default_timeout_s", "max_timeout_s"),
            *("step_timeout_s", "wake_timeout_s"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e9:
                raise ConfigError(
                    f"{name.removesuffix('_s')} must be more than 0 and at most 1e9 seconds, got {value:g}"
                )
        if not 0 <= self.drain_timeout_s <= 1e9:
            raise ConfigError(f"drain_timeout must be 0 to 1e9 seconds, got {self.drain_timeout_s:g}")

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names that the keys have; several keys may have one."""
        return tuple(dict.fromkeys(key.tenant for key in self.api_keys))

    @property
    def isolated_tenants(self) -> tuple[str, ...]:
        """The tenants that must not find each other's prefixes in the cache; none if there is only one."""
        return () if self.share_prefixes_across_keys or len(self.tenants) < 2 else self.tenants

    @property
    def is_tls(self) -> bool:
        return self.ssl_certfile is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine's users can reach it."""
        return self.uds is not None or self.host in ("localhost", "::1") or self.host.startswith("127.")


def _check_origin(origin: str) -> None:
    """An origin is scheme://host[:port] and nothing else; with a path the browser's would never equal it."""
    if origin == "*":
        return
    parts = urlsplit(origin)
    if not parts.scheme or not parts.netloc or parts.path or parts.query or parts.fragment:
        raise ConfigError(f"cors_origin must be like https://example.org or *, got {origin!r}")
