"""Where the server under load is: --base-url, or --host and --port as vLLM's users write them."""

from __future__ import annotations

import argparse

from quire.errors import ConfigError

_HOST, _PORT = "127.0.0.1", 8000


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    # No default: given or not is what tells whether --host may be.
    parser.add_argument("--base-url", metavar="URL", help=f"default http://{_HOST}:{_PORT}; /v1 at its end is fine")
    parser.add_argument("--host", metavar="H", help=f"with --port instead of --base-url (default {_HOST})")
    parser.add_argument("--port", type=int, metavar="P", help=f"with --host instead of --base-url (default {_PORT})")


def server_address(base_url: str | None, host: str | None, port: int | None) -> str:
    """The address without /v1, which every path begins with."""
    if base_url is None:
        return _from_host(host or _HOST, _PORT if port is None else port)
    if host is not None or port is not None:
        raise ConfigError(f"--base-url {base_url} already says which server: leave --host and --port out")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must start with http:// or https://, got {base_url!r}")
    # OpenAI's clients want /v1 in their base URL, so it is often given here too.
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def _from_host(host: str, port: int) -> str:
    if "/" in host:
        raise ConfigError(f"--host must be a name or an address, got {host!r}: give a whole URL as --base-url")
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port must be from 1 to 65535, got {port}")
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"http://[{host}]:{port}" if is_bare_ipv6 else f"http://{host}:{port}"
