"""Blocks from engine to engine: an inbox that others send to, and the sending. Each thread that sends has a socket.

    it accepts       a nonce; the caller answers with its digest under the secret, and says what its blocks are
    it answers       nothing, or why it takes none of them: another model, dtype, block size, ...
    then, repeated   a count, and for each block its key and the sealed bytes; the answer is a byte for each, 1: taken

Whatever goes wrong is an error at the sender, who keeps what it has. What is taken is a level of the prefix cache: the
engine finds it by its hash, checks the seal once more, and loads it as it loads from a disk.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from quire.errors import ConfigError
from quire.log import get_logger
from quire.tiers.connector import Bytes

MAGIC = b"QUIREKVP"
VERSION = 1
SECRET_VARIABLE = "QUIRE_KV_SECRET"
_HELLO = struct.Struct("<8sI32sI")  # magic, version, digest of the nonce, length of the description
_LENGTH = struct.Struct("<I")
_NONCE_BYTES = 16
_TIMEOUT_S = 10.0  # of one piece: a peer that says nothing for so long is gone
_MAX_TEXT_BYTES = 1 << 20
_MAX_BATCH = 4096

IsWhole = Callable[[bytes, Bytes], bool]


class PeerError(Exception):
    """A peer could not be reached, does not take these blocks, or did not take all of them."""


class Peers:
    """A `Connector` whose blocks come from other engines, and `send`, which gives blocks to them."""

    def __init__(
        self, listen: str, *, description: str, record_bytes: int, max_bytes: int, is_whole: IsWhole | None = None
    ) -> None:
        """listen: host:port, or the path of a Unix socket. is_whole: whether a record is what its key says."""
        self._description = description
        self._record_bytes = record_bytes
        self._max_blocks = max(1, max_bytes // record_bytes)
        self._is_whole = is_whole or (lambda key, record: True)
        self._secret = os.environ.get(SECRET_VARIABLE, "").encode()
        self._inbox: OrderedDict[bytes, bytearray] = OrderedDict()
        self._lock = threading.Lock()  # guards the inbox, the counters and the connections
        self._links: dict[tuple[str, int], socket.socket] = {}  # by address and thread
        self._incoming: set[socket.socket] = set()
        self.num_received = self.num_sent = self.num_rejected = 0
        self._server = _listen(listen, has_secret=bool(self._secret))
        self.address = _address_of(self._server)
        threading.Thread(target=self._accept, name="kv-peers", daemon=True).start()

    # -- what came

    def contains(self, key: bytes) -> bool:
        return key in self._inbox

    def load(self, keys: Sequence[bytes]) -> list[bytearray | None]:
        """Each is given once: it is on the device then."""
        with self._lock:
            return [self._inbox.pop(key, None) for key in keys]

    def store(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        raise AssertionError("blocks are sent to one peer, not stored with all")

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._inbox.pop(key, None)

    def usage(self) -> dict[str, float]:
        num_blocks = len(self._inbox)
        return {
            "num_blocks": num_blocks,
            "num_bytes": num_blocks * self._record_bytes,
            "max_bytes": self._max_blocks * self._record_bytes,
            "num_received": self.num_received,
            "num_sent": self.num_sent,
            "num_rejected": self.num_rejected,
        }

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._server.close()
        with self._lock:
            sockets = [*self._incoming, *self._links.values()]
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        if "/" in self.address:
            with contextlib.suppress(OSError):
                os.unlink(self.address)

    # -- to a peer

    def send(self, to: str, keys: Sequence[bytes], records: Sequence[Bytes]) -> None:
        """Returns once the peer has all of them, and has checked them. Raises PeerError where it has not."""
        try:
            connection = self._connection(to)
            connection.sendall(_LENGTH.pack(len(keys)))
            for key, record in zip(keys, records, strict=True):
                connection.sendall(bytes((len(key),)) + key)
                connection.sendall(record)
            taken = _read(connection, len(keys))
        except (OSError, EOFError) as error:
            self._drop(to)
            raise PeerError(f"{to}: {error or type(error).__name__}") from error
        num_taken = sum(taken)
        with self._lock:
            self.num_sent += num_taken
        if num_taken < len(keys):
            raise PeerError(f"{to} took {num_taken} of {len(keys)} blocks")

    def _connection(self, to: str) -> socket.socket:
        """This thread's own."""
        place = to, threading.get_ident()
        connection = self._links.get(place)
        if connection is not None:
            return connection
        connection = _connect(to)
        try:
            nonce = bytes(_read(connection, _NONCE_BYTES))
            text = self._description.encode()
            digest = hmac.digest(self._secret, nonce, "sha256")
            connection.sendall(_HELLO.pack(MAGIC, VERSION, digest, len(text)) + text)
            if reason := _read_text(connection):
                raise PeerError(f"{to} takes no blocks of this engine: {reason}")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._links[place] = connection
        return connection

    def _drop(self, to: str) -> None:
        with self._lock:
            connection = self._links.pop((to, threading.get_ident()), None)
        if connection is not None:
            connection.close()

    # -- from peers

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            connection.settimeout(_TIMEOUT_S)
            threading.Thread(target=self._serve, args=(connection,), name="kv-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._incoming.add(connection)
        try:
            if reason := self._refusal(connection):
                get_logger().warning("blocks of another engine are not taken: %s", reason)
                connection.sendall(_text(reason))
                return
            connection.sendall(_text(""))
            connection.settimeout(None)  # it may be long before something moves again
            while True:
                self._take_batch(connection)
        except (OSError, EOFError, ValueError):
            pass  # it is gone, or talks nonsense: nothing of it is kept that was not whole
        finally:
            with self._lock:
                self._incoming.discard(connection)
            connection.close()

    def _refusal(self, connection: socket.socket) -> str:
        """Why nothing is taken from who calls; empty where it is."""
        nonce = os.urandom(_NONCE_BYTES)
        connection.sendall(nonce)
        magic, version, digest, length = _HELLO.unpack(_read(connection, _HELLO.size))
        if (magic, version) != (MAGIC, VERSION) or length > _MAX_TEXT_BYTES:
            return "it speaks another version"
        theirs = bytes(_read(connection, length)).decode("utf-8", "replace")
        if not hmac.compare_digest(digest, hmac.digest(self._secret, nonce, "sha256")):
            return f"its {SECRET_VARIABLE} is another"
        return difference(self._description, theirs)

    def _take_batch(self, connection: socket.socket) -> None:
        [count] = _LENGTH.unpack(_read(connection, _LENGTH.size))
        if not 0 < count <= _MAX_BATCH:
            raise ValueError(f"{count} blocks at once")
        taken = bytearray(count)
        for i in range(count):
            key = bytes(_read(connection, _read(connection, 1)[0]))
            record = _read(connection, self._record_bytes)
            taken[i] = self._is_whole(key, record)
            with self._lock:
                self.num_received += taken[i]
                self.num_rejected += not taken[i]
                if taken[i]:
                    self._inbox[key] = record
                    self._inbox.move_to_end(key)
                    if len(self._inbox) > self._max_blocks:
                        self._inbox.popitem(last=False)
        connection.sendall(taken)


def difference(ours: str, theirs: str) -> str:
    """The first line in which two descriptions of blocks differ; empty where they are one."""
    for mine, other in zip(ours.splitlines(), theirs.splitlines(), strict=False):
        if mine != other:
            return f"here is {_short(mine)}, there is {_short(other)}"
    return "" if ours == theirs else "it describes its blocks in another way"


def _short(line: str) -> str:
    return line if len(line) <= 120 else line[:117] + "..."


def _listen(address: str, *, has_secret: bool) -> socket.socket:
    try:
        if "/" in address:
            return socket.create_server(address, family=socket.AF_UNIX)
        host, port = split_address(address)
        if not has_secret and host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(
                f"kv_listen={address!r} can be reached from other machines: set {SECRET_VARIABLE}, to the same value "
                "for all engines that send each other blocks"
            )
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"kv_listen={address!r} cannot be listened on: {error}") from error


def _connect(to: str) -> socket.socket:
    if "/" not in to:
        connection = socket.create_connection(split_address(to), timeout=_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(to)
    except OSError:
        connection.close()
        raise
    return connection


def _address_of(server: socket.socket) -> str:
    name = server.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"kv_listen must be host:port or the path of a Unix socket, got {address!r}")
    return host.strip("[]") or "0.0.0.0", int(port)


def _read(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return data


def _text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _read_text(connection: socket.socket) -> str:
    [length] = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_TEXT_BYTES:
        raise EOFError("the answer is no text")
    return bytes(_read(connection, length)).decode("utf-8", "replace")
