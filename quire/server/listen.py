"""The listening socket, bound before anything slow happens: a port in use is one line, at once."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

from quire.errors import ConfigError
from quire.server.settings import ServerSettings

_BACKLOG = 2048


def open_socket(settings: ServerSettings) -> socket.socket:
    """Bound and listening: from here on a client waits instead of being refused."""
    if settings.uds is not None:
        return _unix_socket(settings.uds)
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is no address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port that a stopped server's connections still hold in TIME_WAIT is free for the next one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: stop what uses it, or choose another --port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} needs rights that this user has not: choose a --port over 1023") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _unix_socket(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("uds: this system has no Unix sockets; use --host and --port")
    try:
        if stat.S_ISSOCK(Path(path).stat().st_mode):
            _remove_stale(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"uds {path}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """A socket file outlives the server that made it; nobody listening means it may go."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            Path(path).unlink(missing_ok=True)
            return
    raise ConfigError(f"uds {path} is in use: stop what uses it, or choose another path")


def address_of(listener: socket.socket, settings: ServerSettings) -> str:
    """How a client on this machine reaches it, as a URL."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = settings.host if settings.host not in ("0.0.0.0", "::") else "localhost"
    scheme = "https" if settings.is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
