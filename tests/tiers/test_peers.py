"""Blocks over sockets: what arrives is what was sent, or the sender hears that it did not."""

from __future__ import annotations

import contextlib
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
from quire.tiers.peers import PeerError, Peers, difference
from quire.tiers.sealed import SEAL_BYTES, is_whole, seal_of

BLOCK = 200
TEXT = "weights: abc\nKV: float32\nblock size: 16"


def make(listen: str, text: str = TEXT, num_blocks: int = 50) -> Peers:
    record_bytes = BLOCK + SEAL_BYTES
    return Peers(
        listen, description=text, record_bytes=record_bytes, max_bytes=num_blocks * record_bytes, is_whole=is_whole
    )


def record(key: bytes) -> bytes:
    payload = random.Random(key).randbytes(BLOCK)
    return payload + seal_of(key, payload)


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
    one.send(two.address, KEYS, [record(key) for key in KEYS])
    two.send(one.address, KEYS[:1], [record(KEYS[0])])
    assert all(two.contains(key) for key in KEYS) and one.contains(KEYS[0])
    assert two.load(KEYS[:2]) == [record(key) for key in KEYS[:2]]
    assert two.load(KEYS[:2]) == [None, None]
    two.forget(KEYS[2:3])
    usage = two.usage()
    assert usage["num_received"] == 8 and usage["num_blocks"] == 5 and usage["num_sent"] == 1
    assert one.usage()["num_sent"] == 8


def test_a_lie_is_not_taken_and_its_sender_hears_it(pair: tuple[Peers, Peers]) -> None:
    one, two = pair
    records = [record(key) for key in KEYS]
    records[3] = records[4]
    with pytest.raises(PeerError, match="took 7 of 8"):
        one.send(two.address, KEYS, records)
    assert not two.contains(KEYS[3]) and two.usage()["num_rejected"] == 1
    one.send(two.address, KEYS[3:4], [record(KEYS[3])])  # the connection lives
    assert two.contains(KEYS[3])


def test_an_inbox_that_is_full_drops_the_oldest(tmp_path: Path) -> None:
    one, two = make(str(tmp_path / "a")), make(str(tmp_path / "b"), num_blocks=3)
    one.send(two.address, KEYS, [record(key) for key in KEYS])
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
        one.send(two.address, KEYS[:1], [record(KEYS[0])])
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
        one.send(two.address, KEYS[:1], [record(KEYS[0])])
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
        one.send(address, KEYS[:1], [record(KEYS[0])])
    for _ in range(2):
        two = make(address)
        one.send(address, KEYS[:1], [record(KEYS[0])])
        two.close()
        with pytest.raises(PeerError):
            one.send(address, KEYS[:1], [record(KEYS[0])])
    one.close()


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 3000), garbage=st.binary(max_size=40))
def test_a_connection_torn_anywhere_leaves_whole_blocks_only(cut: int, garbage: bytes) -> None:
    """What goes between is passed on up to some byte, and then nonsense follows."""
    two = make("127.0.0.1:0")
    middle = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        client, _ = middle.accept()
        with client, socket.create_connection(peers.split_address(two.address)) as server:
            back = threading.Thread(target=_pass_on, args=(server, client, 1 << 30), daemon=True)
            back.start()
            _pass_on(client, server, cut)
            for call in (lambda: server.sendall(garbage), lambda: server.shutdown(2), lambda: client.shutdown(2)):
                with contextlib.suppress(OSError):
                    call()
            back.join()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    one, is_torn = make("127.0.0.1:0"), False
    try:
        one.send(f"127.0.0.1:{middle.getsockname()[1]}", KEYS, [record(key) for key in KEYS])
    except PeerError:
        is_torn = True
    one.close()
    thread.join(10)
    two.close()
    middle.close()
    for key, data in zip(KEYS, two.load(KEYS), strict=True):
        assert (data is None and is_torn) or data == record(key)


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
