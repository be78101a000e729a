"""The listening socket and its certificate, opened before anything slow happens: a port in use, or a certificate that
cannot be read, is one line, at once."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.server.settings import ServerSettings

_BACKLOG = 2048


@dataclass(slots=True, frozen=True)
class SocketFile:
    """A Unix socket's file, known by more than its name: another server may have put its own there since. An inode's
    number is used again once its file is gone, but not with the same time."""

    path: str
    device: int
    inode: int
    made_ns: int

    def remove(self) -> None:
        """Remove the file, unless it is gone, or another server's by now."""
        with contextlib.suppress(OSError):
            found = Path(self.path).stat()
            if (found.st_dev, found.st_ino, found.st_mtime_ns) == (self.device, self.inode, self.made_ns):
                Path(self.path).unlink()


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
    # A port that a stopped server's connections still hold in TIME_WAIT is free for the next one.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        return _listening(listener, address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: stop what uses it, or choose another --port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} needs rights that this user has not: choose a --port over 1023") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def _unix_socket(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("uds: this system has no Unix sockets; use --host and --port")
    try:
        _remove_stale(path)
        return _listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)
    except OSError as error:
        raise ConfigError(f"uds {path}: {error.strerror or error}") from None


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that was killed: no process listens on it."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return  # bind says what is wrong with it
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        raise ConfigError(f"uds {path} is in use: stop what uses it, or choose another path")


def _listening(listener: socket.socket, address: Any) -> socket.socket:
    """Bind a socket and have it listen; it is closed where that fails."""
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def socket_file(settings: ServerSettings) -> SocketFile | None:
    """The file that `open_socket` has made; None for a port."""
    if settings.uds is None:
        return None
    found = Path(settings.uds).stat()
    return SocketFile(settings.uds, found.st_dev, found.st_ino, found.st_mtime_ns)


def address_of(listener: socket.socket, settings: ServerSettings) -> str:
    """How a client on this machine reaches it, as a URL."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = settings.host if settings.host not in ("0.0.0.0", "::") else "localhost"
    scheme = "https" if settings.is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def make_ssl_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The server's certificate, or None. TLS is 1.2 or newer; with ssl_ca_certs, clients must show one too."""
    if settings.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        if path is not None:
            _check_readable(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    was_asked = False

    def password() -> str:  # without it, OpenSSL would ask on the terminal
        nonlocal was_asked
        was_asked = True
        return settings.ssl_keyfile_password or ""

    key = settings.ssl_keyfile or settings.ssl_certfile
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"ssl_keyfile {key} is not the key of ssl_certfile {settings.ssl_certfile}") from None
        if was_asked:
            raise ConfigError(f"the private key in {key} needs its ssl_keyfile_password") from None
        why = error.reason or error
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile} with key {key}: not a PEM certificate and its key ({why})"
        ) from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"ssl_ca_certs {settings.ssl_ca_certs}: no PEM certificates ({error.reason or error})"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror or error}") from None
