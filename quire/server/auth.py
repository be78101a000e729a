"""API keys: who may ask, and under which tenant's name.

With at least one key everything is guarded except `/health` and `/ping`, which a supervisor must reach, and the live
page's own files (`/`, `/static/…`), which hold no data. That includes `/docs`, `/openapi.json` and `/metrics`. Where
keys have several names, each sees its own requests on the live page and under `/debug/kv`, and an admin's key sees all.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.settings import ApiKey

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OnRefused = Callable[[ApiError, tuple[str, int] | None], None]  # is told what was turned away, and whom

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")  # what a header can carry


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


def is_open(path: str, method: str) -> bool:
    """What anyone may read."""
    if path == "/ping":
        return True
    return method in ("GET", "HEAD") and (path in ("/health", "/", "/favicon.ico") or path.startswith("/static/"))


class Auth:
    """ASGI middleware: refuses what carries no known key, and notes in scope["state"] the `tenant`, and whose requests
    it `sees`: that tenant's, or everybody's (None)."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], on_refused: OnRefused | None = None) -> None:
        self._app = app
        self._on_refused = on_refused
        # Digests have one length, so that comparing them does not tell a key's.
        self._digests = [(_digest(key.key.encode()), key) for key in keys]
        self._has_tenants = len({key.tenant for key in keys}) > 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant, sees = "", None
        if self._digests and not is_open(scope["path"], scope["method"]):
            given = _given_key(scope)
            key = None if given is None else self.key_of(given)
            if key is None:
                missing = "no API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
                error = ApiError(
                    401,
                    "this API key is not known here" if given else missing,
                    code="invalid_api_key",
                    headers={"www-authenticate": 'Bearer realm="quire"'},
                )
                if self._on_refused is not None:
                    self._on_refused(error, scope.get("client"))
                await error.respond(send)
                return
            tenant = key.tenant
            sees = tenant if self._has_tenants and not key.is_admin else None
        scope.setdefault("state", {}).update(tenant=tenant, sees=sees)
        await self._app(scope, receive, send)

    def key_of(self, key: bytes) -> ApiKey | None:
        """Which key it is. Every key is compared, whichever matches: the time taken tells nothing."""
        digest = _digest(key)
        found = None
        for known, one in self._digests:
            if hmac.compare_digest(known, digest):
                found = one
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given_key(scope: Scope) -> bytes | None:
    """The key of the Authorization header, or of Anthropic's x-api-key; None without one. Two of a kind are as good as
    none."""
    bearers = [bytes(value) for name, value in scope["headers"] if name == b"authorization"]
    keys = [bytes(value) for name, value in scope["headers"] if name == b"x-api-key"]
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        return key.strip() or None if scheme.lower() == b"bearer" else None
    return keys[0].strip() or None if len(keys) == 1 and not bearers else None
