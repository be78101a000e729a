"""Blocks from engine to engine: an inbox that others send to, and the sending. Each thread that sends has a socket.

    it accepts       a nonce; the caller answers with its digest under the secret, and says what its blocks are
    it answers       nothing, or why it takes none of them: another model, dtype, block size, ...
    then, repeated   a piece: which blocks, which bytes of each of them, these bytes, and a seal over all of it
                     the answer is a byte, 1: taken

A piece is the whole of a few blocks, or a few layers of more, while a step still computes the others. Only blocks of
which every piece has come count: the one with their last bytes comes last, and is taken if nothing lacks then.

Whatever goes wrong is an error at the sender, which keeps what it has. Blocks that are taken make a level of the prefix
cache: the engine finds them by their hash, and loads them as it loads from a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.errors import ConfigError
from quire.log import get_logger
from quire.tiers.connector import Bytes

MAGIC = b"QUIREKVP"
VERSION = 2
SECRET_VARIABLE = "QUIRE_KV_SECRET"
_HELLO = struct.Struct("<8sI32sI")  # magic, version, digest of the nonce, length of the description
_LENGTH = struct.Struct("<I")
# Send id, number of blocks, length of the keys, first byte of a block, the one after the last.
_PIECE = struct.Struct("<16sIIQQ")
_SEAL_BYTES = 16
_NONCE_BYTES = 16
_TIMEOUT_S = 10.0  # of one message: a peer that says nothing for so long is gone
_MAX_TEXT_BYTES = 1 << 20
_MAX_BATCH = 4096
_MAX_PIECES = 256  # of the same blocks: each is compared with those before it


class PeerError(Exception):
    """A peer could not be reached, does not take these blocks, or did not take a piece of them."""


@dataclass(slots=True, frozen=True)
class Piece:
    """Bytes [begin, end) of each of these blocks."""

    send_id: bytes  # of 16 bytes, the same for all pieces of the same blocks from one sender
    keys: list[bytes]
    begin: int
    end: int


def new_send_id() -> bytes:
    return os.urandom(16)


@dataclass(slots=True, eq=False)
class _Incomplete:
    """Blocks of which pieces are coming. These are read to where they belong: nothing is copied when all are there."""

    keys: list[bytes]
    records: list[memoryview]
    begun: list[tuple[int, int]] = field(default_factory=list)  # which bytes of each block
    num_right: int = 0  # bytes of each block that have come and were checked
    arrived: int = 0  # the number of its last piece


class Peers:
    """A `Connector` whose blocks come from other engines, and `send`, which gives blocks to them."""

    def __init__(self, listen: str, *, description: str, block_bytes: int, max_bytes: int) -> None:
        """listen: host:port, or the path of a Unix socket."""
        self._description = description
        self._block_bytes = block_bytes
        self._max_bytes = max(block_bytes, max_bytes)
        self._secret = os.environ.get(SECRET_VARIABLE, "").encode()
        # Both with the oldest first; each block with the number of its last piece.
        self._inbox: OrderedDict[bytes, tuple[int, memoryview]] = OrderedDict()
        self._incomplete: OrderedDict[bytes, _Incomplete] = OrderedDict()  # by send id
        self._lock = threading.Lock()  # guards both of these, the counters, the connections and what follows
        self._is_closed = False
        self._links: dict[tuple[str, int], socket.socket] = {}  # by address and thread
        self._incoming: set[socket.socket] = set()
        self._num_pieces = 0
        self._num_held = 0  # blocks, whole or not
        self.num_received = self.num_sent = self.num_rejected = self.num_incomplete = 0
        self._server = _listen(listen, has_secret=bool(self._secret))
        self.address = _address_of(self._server)
        threading.Thread(target=self._accept, name="kv-peers", daemon=True).start()

    # -- what came

    def contains(self, key: bytes) -> bool:
        return key in self._inbox

    def load(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Each block is given once, and is on the device then. It was checked when it came, and was here since."""
        return self._take(keys)

    def store(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        raise AssertionError("blocks are sent to one peer, not stored with all")

    def forget(self, keys: Sequence[bytes]) -> None:
        self._take(keys)

    def _take(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        with self._lock:
            found = [self._inbox.pop(key, None) for key in keys]
            self._num_held -= sum(each is not None for each in found)
        return [None if each is None else each[1] for each in found]

    def usage(self) -> dict[str, float]:
        """Counts of blocks. num_rejected: of pieces that were wrong, or came when others were missing. num_incomplete:
        blocks of which not all pieces came."""
        with self._lock:
            incomplete_bytes = sum(each.num_right * len(each.keys) for each in self._incomplete.values())
            num_blocks, num_held = len(self._inbox), self._num_held
        return {
            "num_blocks": num_blocks,
            "num_bytes": num_held * self._block_bytes,
            "incomplete_bytes": incomplete_bytes,
            "max_bytes": self._max_bytes,
            "num_received": self.num_received,
            "num_sent": self.num_sent,
            "num_rejected": self.num_rejected,
            "num_incomplete": self.num_incomplete,
        }

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._server.close()
        with self._lock:
            self._is_closed = True
            sockets = [*self._incoming, *self._links.values()]
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        if "/" in self.address:
            with contextlib.suppress(OSError):
                os.unlink(self.address)

    # -- to a peer

    def send(self, to: str, piece: Piece, data: Bytes) -> None:
        """data: the piece's bytes, block after block. Returns once the peer has it, and has checked it. Raises
        PeerError where it has not. The piece with the blocks' last bytes is to be sent when the others have come."""
        keys = b"".join(bytes((len(key),)) + key for key in piece.keys)
        head = _PIECE.pack(piece.send_id, len(piece.keys), len(keys), piece.begin, piece.end) + keys
        view = memoryview(data).cast("B")
        assert len(view) == len(piece.keys) * (piece.end - piece.begin), "a piece is not what it says"
        try:
            connection = self._connection(to)
            connection.sendall(head)
            connection.sendall(view)
            connection.sendall(_seal(head, [view]))
            [is_taken] = _read(connection, 1)
        except (OSError, EOFError) as error:
            self._drop(to)
            raise PeerError(f"{to}: {error or type(error).__name__}") from error
        if not is_taken:
            raise PeerError(f"{to} did not take a piece of {len(piece.keys)} blocks")
        if piece.end == self._block_bytes:
            with self._lock:
                self.num_sent += len(piece.keys)

    def _connection(self, to: str) -> socket.socket:
        """This thread's own."""
        if self._is_closed:
            raise PeerError("this engine is closing")
        place = to, threading.get_ident()
        connection = self._links.get(place)
        if connection is not None:
            return connection
        self._drop_ended()
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

    def _drop_ended(self) -> None:
        """Close this thread's connections to peers that are gone. They may come back under another address."""
        ours = [(to, each) for (to, thread), each in list(self._links.items()) if thread == threading.get_ident()]
        for to, connection in ours:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            if poll.poll(0):  # a peer says nothing unless it is sent something: this is the end
                self._drop(to)

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
            if self._is_closed:  # since it was accepted
                connection.close()
                return
            self._incoming.add(connection)
        try:
            if reason := self._refusal(connection):
                get_logger().warning("blocks of another engine are not taken: %s", reason)
                connection.sendall(_text(reason))
                return
            connection.sendall(_text(""))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                connection.settimeout(None)  # it may be long before something moves again
                begin = _read(connection, 1)
                connection.settimeout(_TIMEOUT_S)
                self._take_piece(connection, begin)
        except (OSError, EOFError, ValueError):
            pass  # it is gone, or talks nonsense: nothing of it is kept that was not whole
        finally:
            with self._lock:
                self._incoming.discard(connection)
            connection.close()

    def _refusal(self, connection: socket.socket) -> str:
        """Why nothing is taken from this caller; empty where its blocks are."""
        nonce = os.urandom(_NONCE_BYTES)
        connection.sendall(nonce)
        magic, version, digest, length = _HELLO.unpack(_read(connection, _HELLO.size))
        if magic != MAGIC or length > _MAX_TEXT_BYTES:
            return "it is no engine of this kind"
        theirs = bytes(_read(connection, length)).decode("utf-8", "replace")
        if version != VERSION:
            return f"it sends blocks by version {version}, this engine takes version {VERSION}: run the same Quire"
        if not hmac.compare_digest(digest, hmac.digest(self._secret, nonce, "sha256")):
            return f"its {SECRET_VARIABLE} is another"
        return difference(self._description, theirs)

    def _take_piece(self, connection: socket.socket, head: bytearray) -> None:
        """head: its first bytes."""
        head += _read(connection, _PIECE.size - len(head))
        send_id, count, keys_length, begin, end = _PIECE.unpack(head)
        if not 0 < count <= _MAX_BATCH or keys_length > count * 256 or count * self._block_bytes > self._max_bytes:
            raise ValueError(f"{count} blocks at once, whose keys take {keys_length} bytes")
        head += _read(connection, keys_length)
        piece = Piece(send_id, _split_keys(head[_PIECE.size :], count), begin, end)
        blocks = self._open(piece)
        try:
            parts = [record[begin:end] for record in blocks.records]
            for part in parts:
                if self._incomplete.get(send_id) is not blocks:
                    raise ValueError("others needed the room, or another piece was wrong")
                _read_into(connection, part)
            is_right = _seal(head, parts) == _read(connection, _SEAL_BYTES)
        except BaseException:
            self._give_up(piece, blocks)
            raise
        is_taken = self._keep(piece, blocks) if is_right else self._give_up(piece, blocks)
        if not is_taken:
            with self._lock:
                self.num_rejected += count
        connection.sendall(bytes((is_taken,)))

    def _open(self, piece: Piece) -> _Incomplete:
        """The blocks that a piece belongs to, where it alone may write its bytes."""
        begin, end, send_id = piece.begin, piece.end, piece.send_id
        if not begin < end <= self._block_bytes:
            raise ValueError(f"bytes {begin} to {end} of blocks of {self._block_bytes}")
        with self._lock:
            blocks = self._incomplete.get(send_id)
            if blocks is None:
                # Not zeroed, which would take as long as reading.
                records = [np.empty(self._block_bytes, dtype=np.uint8).data for _ in piece.keys]
                blocks = self._incomplete[send_id] = _Incomplete(piece.keys, records)
                self._num_held += len(records)
            elif blocks.keys != piece.keys or len(blocks.begun) == _MAX_PIECES:
                raise ValueError("a piece is of other blocks than those before it, or one of too many")
            elif any(begin < last and first < end for first, last in blocks.begun):
                raise ValueError("a piece repeats another one")
            blocks.begun.append((begin, end))
            self._touch(send_id, blocks)
        return blocks

    def _keep(self, piece: Piece, blocks: _Incomplete) -> bool:
        """Whether a piece that is right is of use, with those before it. If it has the blocks' last bytes and another
        piece is missing, none of them is."""
        with self._lock:
            if self._incomplete.get(piece.send_id) is not blocks:
                return False  # others needed the room, or another piece was wrong
            blocks.num_right += piece.end - piece.begin
            if piece.end < self._block_bytes:
                self._touch(piece.send_id, blocks)
                return True
            is_whole = blocks.num_right == self._block_bytes
            self._drop_incomplete(piece.send_id, is_counted=not is_whole)
            if not is_whole:
                return False
            self._num_pieces += 1
            for key, record in zip(blocks.keys, blocks.records, strict=True):
                self._num_held += key not in self._inbox
                self._inbox[key] = self._num_pieces, record
                self._inbox.move_to_end(key)
            self.num_received += len(blocks.keys)
            self._make_room()
        return True

    def _give_up(self, piece: Piece, blocks: _Incomplete) -> bool:
        """A piece did not come as it was sent, and the others are of no use either. Returns False: not taken."""
        with self._lock:
            if self._incomplete.get(piece.send_id) is blocks:
                self._drop_incomplete(piece.send_id, is_counted=True)
        return False

    def _touch(self, send_id: bytes, blocks: _Incomplete) -> None:
        self._num_pieces += 1
        blocks.arrived = self._num_pieces
        self._incomplete.move_to_end(send_id)
        self._make_room()

    def _drop_incomplete(self, send_id: bytes, *, is_counted: bool) -> None:
        count = len(self._incomplete.pop(send_id).keys)
        self._num_held -= count
        self.num_incomplete += count if is_counted else 0

    def _make_room(self) -> None:
        """Drop the oldest blocks, whole or not: a sender that stopped halfway does not come back."""
        while self._num_held * self._block_bytes > self._max_bytes:
            block = next(iter(self._inbox.values()), None)
            send_id = next(iter(self._incomplete), None)
            if send_id is None or (block is not None and block[0] < self._incomplete[send_id].arrived):
                self._inbox.popitem(last=False)
                self._num_held -= 1
            else:
                self._drop_incomplete(send_id, is_counted=True)


def _seal(head: Bytes, parts: Sequence[Bytes]) -> bytes:
    """A digest of a piece, against accidents: any engine that has the secret could make one."""
    digest = hashlib.sha256(head)
    for part in parts:
        digest.update(part)
    return digest.digest()[:_SEAL_BYTES]


def _split_keys(data: bytearray, count: int) -> list[bytes]:
    """Keys, each behind its length."""
    keys, at = [], 0
    for _ in range(count):
        end = at + 1 + (data[at] if at < len(data) else 0)
        keys.append(bytes(data[at + 1 : end]))
        at = end
    if at != len(data):
        raise ValueError("the keys do not add up")
    return keys


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
    _read_into(connection, memoryview(data))
    return data


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]


def _text(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _read_text(connection: socket.socket) -> str:
    [length] = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_TEXT_BYTES:
        raise EOFError("the answer is no text")
    return bytes(_read(connection, length)).decode("utf-8", "replace")
