"""The server's certificate, read once at start so that a mistake is one line and not a failed handshake."""

from __future__ import annotations

import ssl
from pathlib import Path

from quire.errors import ConfigError
from quire.server.settings import ServerSettings


def make_ssl_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """None without a certificate. TLS 1.2 or newer; with ssl_ca_certs, clients must show a certificate too."""
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
