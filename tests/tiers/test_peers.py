"""Blocks over sockets: what arrives is what was sent, or the sender hears that it did not."""

from __future__ import annotations

import contextlib
import hmac
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.tiers import peers
from quire.tiers.peers import PeerError, Peers, Piece, difference, new_send_id

BLOCK = 200
TEXT = "weights: abc\nKV: float32\nblock size: 16"


def make(listen: str, text: str = TEXT, num_blocks: int = 50) -> Peers:
    return Peers(listen, description=text, block_bytes=BLOCK, max_bytes=num_blocks * BLOCK)


def record(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK)


def send(one: Peers, to: str, keys: list[bytes], begin: int = 0, end: int = BLOCK, send_id: bytes = b"") -> None:
    """Bytes [begin, end) of what the keys name: by default all of it."""
    data = b"".join(record(key).ljust(BLOCK + 1)[begin:end] for key in keys)
    one.send(to, Piece(send_id or new_send_id(), keys, begin, end), data)


KEYS = [b"key %d" % i for i in range(8)]


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Peers, Peers]]:
    addresses = [str(tmp_path / name) for name in "ab"] if request.param == "unix" else ["127.0.0.1:0"] * 2
    both = make(addresses[0]), make(addresses[1])
    yield both
    for each in both:
        each.close()


def test_blocks_arrive_and_are_given_once(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    send(one, two.address, KEYS)
    send(two, one.address, KEYS[:1])
    assert all(two.contains(key) for key in KEYS) and one.contains(KEYS[0])
    assert two.load(KEYS[:2]) == [record(key) for key in KEYS[:2]]
    assert two.load(KEYS[:2]) == [None, None]
    two.forget(KEYS[2:3])
    usage = two.usage()
    assert usage["num_received"] == 8 and usage["num_blocks"] == 5 and usage["num_sent"] == 1
    assert one.usage()["num_sent"] == 8


def test_a_block_counts_when_its_last_piece_is_there(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    ours = new_send_id()
    for begin, end in ((80, 130), (0, 80), (130, 180)):  # those before the last in any order
        send(one, two.address, KEYS, begin, end, ours)
        assert not any(two.contains(key) for key in KEYS) and two.load(KEYS) == [None] * 8
        # What another engine computed of the same tokens is not mixed with it.
        send(one, two.address, KEYS[:2], begin, end, new_send_id())
    usage = two.usage()
    assert usage["incomplete_bytes"] == 180 * 8 + 180 * 2 and usage["num_bytes"] == (8 + 3 * 2) * BLOCK
    send(one, two.address, KEYS, 180, BLOCK, ours)
    assert two.usage()["num_received"] == one.usage()["num_sent"] == 8
    assert two.load(KEYS) == [record(key) for key in KEYS]
    assert two.usage()["num_bytes"] == 3 * 2 * BLOCK and two.usage()["num_rejected"] == 0


def test_what_does_not_fit_together_is_not_taken(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    for pieces in ([(0, 50), (100, BLOCK)], [(100, BLOCK)]):  # something lacks when the last one comes
        ours = new_send_id()
        for begin, end in pieces[:-1]:
            send(one, two.address, KEYS, begin, end, ours)
        with pytest.raises(PeerError, match="did not take a piece of 8 blocks"):
            send(one, two.address, KEYS, *pieces[-1], ours)
        assert two.usage()["num_bytes"] == 0
    ours = new_send_id()
    send(one, two.address, KEYS[:2], 0, 100, ours)
    for keys, begin, end in ((KEYS[:2], 0, 100), (KEYS[:2], 50, 150), (KEYS[1:3], 100, 150), (KEYS[:2], 100, 201)):
        with pytest.raises(PeerError):  # nonsense: the connection is closed, and nothing is written
            send(one, two.address, keys, begin, end, ours)
    send(one, two.address, KEYS[:2], 100, BLOCK, ours)
    assert two.load(KEYS) == [*map(record, KEYS[:2]), *[None] * 6]
    usage = two.usage()
    assert usage["num_bytes"] == 0 and usage["num_rejected"] == 16 and usage["num_incomplete"] == 16


def test_what_was_never_finished_makes_room_when_it_is_the_oldest(tmp_path: Path) -> None:
    one, two = make(str(tmp_path / "a")), make(str(tmp_path / "b"), num_blocks=4)
    given_up, ours = new_send_id(), new_send_id()
    send(one, two.address, KEYS[:2], 0, 100, given_up)
    send(one, two.address, KEYS[2:3])
    send(one, two.address, KEYS[3:4], 0, 100, ours)
    assert two.usage()["num_incomplete"] == 0 and two.usage()["num_bytes"] == 4 * BLOCK
    send(one, two.address, KEYS[4:5])
    assert two.usage()["num_incomplete"] == 2 and two.usage()["num_bytes"] == 3 * BLOCK
    send(one, two.address, KEYS[5:7])  # the oldest whole one goes for it
    send(one, two.address, KEYS[3:4], 100, BLOCK, ours)
    assert [two.contains(key) for key in KEYS] == [False] * 3 + [True] * 4 + [False]
    with pytest.raises(PeerError):
        send(one, two.address, KEYS[:2], 100, BLOCK, given_up)
    one.close()
    two.close()


def test_another_version_is_refused_by_number(pair: tuple[Peers, Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    pack = peers._HELLO.pack
    hello = type("Hello", (), {"pack": lambda magic, version, *rest: pack(magic, 1, *rest), "size": peers._HELLO.size})
    hello.unpack = peers._HELLO.unpack
    monkeypatch.setattr(peers, "_HELLO", hello)
    with pytest.raises(PeerError, match="by version 1, this engine takes version 2"):
        send(one, two.address, KEYS[:1])
    assert not two.contains(KEYS[0])


def test_an_inbox_that_is_full_drops_the_oldest(tmp_path: Path) -> None:
    one, two = make(str(tmp_path / "a")), make(str(tmp_path / "b"), num_blocks=3)
    for key in KEYS:
        send(one, two.address, [key])
    assert [two.contains(key) for key in KEYS] == [False] * 5 + [True] * 3
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace("float32", "bfloat16"), "here is KV: bfloat16, there is KV: float32"),
        (TEXT.replace("16", "32"), "block size"),
        (TEXT.replace("abc", "abd"), "weights"),
        (TEXT + "\nmore: 1", "another way"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    one, two = make(str(tmp_path / "a")), make(str(tmp_path / "b"), text)
    with pytest.raises(PeerError, match=words):
        send(one, two.address, KEYS[:1])
    one.close()
    two.close()
    assert difference(TEXT, TEXT) == ""


def test_secrets_must_agree_and_are_needed_beyond_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=peers.SECRET_VARIABLE):
        make("0.0.0.0:0")
    monkeypatch.setenv(peers.SECRET_VARIABLE, "one")
    one, far = make(str(tmp_path / "a")), make("0.0.0.0:0")
    far.close()
    monkeypatch.setenv(peers.SECRET_VARIABLE, "another")
    two = make(str(tmp_path / "b"))
    with pytest.raises(PeerError, match=peers.SECRET_VARIABLE):
        send(one, two.address, KEYS[:1])
    one.close()
    two.close()
    for wrong in ("here", "host:port", "1.2.3.4:99999"):
        with pytest.raises(ConfigError, match="kv_listen"):
            make(wrong)
    with pytest.raises(ConfigError, match="listened on"):
        make(str(tmp_path / "nowhere" / "a"))


def test_a_peer_that_goes_away_is_an_error_and_one_that_comes_back_is_not(tmp_path: Path) -> None:
    one = make(str(tmp_path / "a"))
    address = str(tmp_path / "b")
    with pytest.raises(PeerError):
        send(one, address, KEYS[:1])
    for _ in range(2):
        two = make(address)
        send(one, address, KEYS[:1])
        two.close()
        with pytest.raises(PeerError):
            send(one, address, KEYS[:1])
    one.close()


def greet(to: str) -> socket.socket:
    """What an engine does that is about to send."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(to)
    digest = hmac.digest(b"", connection.recv(16), "sha256")
    connection.sendall(peers._HELLO.pack(peers.MAGIC, peers.VERSION, digest, len(TEXT)) + TEXT.encode())
    assert connection.recv(4) == bytes(4)
    return connection


@pytest.mark.parametrize("num_bytes", [20, 300])  # of the head, or of the blocks too
def test_who_stops_within_a_piece_is_not_kept(num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = make(str(tmp_path / "b"))
    with greet(two.address) as connection:
        head = peers._PIECE.pack(new_send_id(), 2, 4, 0, BLOCK) + b"\1a\1b"
        monkeypatch.setattr(peers, "_TIMEOUT_S", 0.1)
        connection.sendall((head + bytes(2 * BLOCK))[:num_bytes])
        assert connection.recv(1) == b""
    assert two.usage()["num_bytes"] == 0
    two.close()


def test_pieces_of_the_same_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MAX_PIECES", 3)
    one, two = make(str(tmp_path / "a")), make(str(tmp_path / "b"))
    ours = new_send_id()
    for at in range(3):
        send(one, two.address, KEYS[:1], at, at + 1, ours)
    with pytest.raises(PeerError):
        send(one, two.address, KEYS[:1], 3, 4, ours)
    one.close()
    two.close()


def test_connections_to_peers_that_are_gone_are_closed_and_none_is_made_after_the_end(tmp_path: Path) -> None:
    one = make(str(tmp_path / "a"))
    for number in range(3):
        two = make(str(tmp_path / f"b{number}"))  # as one that was started again
        send(one, two.address, KEYS[:1])
        assert [to for to, _ in one._links] == [two.address]
        two.close()
    one.close()
    two = make(str(tmp_path / "c"))
    with pytest.raises(PeerError, match="closing"):
        send(one, two.address, KEYS[:1])
    two.close()


PIECES = {"whole blocks": [(0, BLOCK)], "pieces": [(0, 70), (70, 190), (190, BLOCK)]}


def send_through(two: Peers, pieces: list[tuple[int, int]], cut: int, then: bytes, *, is_flipped: bool) -> bool:
    """Send all keys through something that passes on so many bytes, and then others. Returns whether the sender heard
    of no error. is_flipped: the rest follows as it should be, but for a byte."""
    middle = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        client, _ = middle.accept()
        with client, socket.create_connection(peers.split_address(two.address)) as server:
            back = threading.Thread(target=_pass_on, args=(server, client, 1 << 30), daemon=True)
            back.start()
            _pass_on(client, server, cut)
            with contextlib.suppress(OSError):
                if is_flipped and (byte := client.recv(1)):
                    server.sendall(bytes((byte[0] ^ 64,)))
                    _pass_on(client, server, 1 << 30)
                else:
                    server.sendall(then)
            for call in (lambda: server.shutdown(2), lambda: client.shutdown(2)):
                with contextlib.suppress(OSError):
                    call()
            back.join()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    one, is_well = make("127.0.0.1:0"), True
    try:
        send_id = new_send_id()
        for begin, end in pieces:
            send(one, f"127.0.0.1:{middle.getsockname()[1]}", KEYS, begin, end, send_id)
    except PeerError:
        is_well = False
    one.close()
    thread.join(10)
    middle.close()
    return is_well


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 3000), garbage=st.binary(max_size=40))
def test_a_connection_torn_anywhere_leaves_whole_blocks_only(
    pieces: list[tuple[int, int]], cut: int, garbage: bytes
) -> None:
    two = make("127.0.0.1:0")
    is_well = send_through(two, pieces, cut, garbage, is_flipped=False)
    two.close()
    for key, data in zip(KEYS, two.load(KEYS), strict=True):
        assert (data is None and not is_well) or data == record(key)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@settings(max_examples=15, deadline=None)
@given(at=st.integers(peers._HELLO.size + len(TEXT), 2000))
def test_a_byte_that_changed_anywhere_is_found_out(pieces: list[tuple[int, int]], at: int) -> None:
    """Behind the greeting. A length that changed may leave both sides waiting for the other."""
    two = make("127.0.0.1:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_TIMEOUT_S", 0.3)
        is_well = send_through(two, pieces, at, b"", is_flipped=True)
    two.close()
    around = peers._PIECE.size + sum(1 + len(key) for key in KEYS) + peers._SEAL_BYTES  # of each piece
    assert is_well == (at >= peers._HELLO.size + len(TEXT) + len(KEYS) * BLOCK + len(pieces) * around)
    for key, data in zip(KEYS, two.load(KEYS), strict=True):
        assert data == (record(key) if is_well else None)


def _pass_on(source: socket.socket, target: socket.socket, most: int) -> None:
    while most:
        try:
            data = source.recv(min(most, 4096))
            target.sendall(data)
        except OSError:
            return
        if not data:
            return
        most -= len(data)
