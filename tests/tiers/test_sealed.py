"""What the engine makes of a store: nothing that a store does gives wrong bytes, or stops the engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from quire.errors import ConfigError
from quire.tiers.connector import make_connector
from quire.tiers.memory_store import MemoryStore
from quire.tiers.sealed import SEAL_BYTES, SealedStore

BLOCK = 256


def sealed(connector: object) -> SealedStore:
    return SealedStore("test", connector, identity=b"i" * 16, block_bytes=BLOCK)  # type: ignore[arg-type]


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK)


def store(level: SealedStore, *numbers: int) -> list[int]:
    """Returns the places of what was not stored."""
    over, missing = threading.Event(), []

    def done(places: list[int]) -> None:
        missing.extend(places)
        over.set()

    blocks = [memoryview(bytearray(payload(n) + bytes(SEAL_BYTES))) for n in numbers]
    level.start_store([b"%d" % n for n in numbers], lambda: blocks, done)
    assert over.wait(60)
    return missing


def load(level: SealedStore, *numbers: int) -> list[int]:
    """The numbers of those that came, having checked that they are what was stored."""
    over, came = threading.Event(), {}
    level.start_load(
        [b"%d" % n for n in numbers],
        lambda place, data: came.__setitem__(numbers[place], bytes(data)),
        lambda missing: over.set(),
    )
    assert over.wait(60)
    assert all(data == payload(n) for n, data in came.items())
    return sorted(came)


def test_what_is_stored_is_loaded_and_measured() -> None:
    level = sealed(MemoryStore())
    before = level.block_s
    assert store(level, 1, 2) == []
    assert level.contains(b"1") and not level.contains(b"3")
    assert load(level, 1, 2, 3) == [1, 2]
    assert load(level, 1, 2) == [1, 2] and level.block_s != before
    counters = level.counters
    assert (counters.num_stored, counters.num_loaded, counters.num_missing, counters.num_rejected) == (2, 4, 1, 0)
    assert level.usage()["num_blocks"] == 2
    level.close()


def test_forgetting_comes_after_the_stores_before_it() -> None:
    level = sealed(MemoryStore())
    gate = threading.Event()
    block = memoryview(bytearray(BLOCK + SEAL_BYTES))
    level.start_store([b"1"], lambda: [block][: gate.wait(60)], lambda missing: None)
    level.forget([b"1"])
    assert not level.contains(b"1")
    gate.set()
    assert store(level, 2) == []  # behind both
    assert not level.contains(b"1") and load(level, 1) == []
    level.close()


class Liar(MemoryStore):
    """Gives other bytes than it was given."""

    def __init__(self, lie: str) -> None:
        super().__init__()
        self.lie = lie

    def contains(self, key: bytes) -> bool:
        if self.lie == "raises":
            raise RuntimeError("no")
        return True

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        blocks = super().load(keys)
        match self.lie:
            case "flipped bit":
                return [None if b is None else b[:9] + bytes([b[9] ^ 1]) + b[10:] for b in blocks]
            case "swapped":
                return blocks[::-1]
            case "cut":
                return [None if b is None else b[:-1] for b in blocks]
            case "zeros":
                return [bytes(BLOCK + SEAL_BYTES)] * len(keys)
            case "too few":
                return blocks[:1]
            case "nothing":
                return [None] * len(keys)
        raise RuntimeError("no")


@pytest.mark.parametrize("lie", ["flipped bit", "swapped", "cut", "zeros", "too few", "nothing", "raises"])
def test_a_store_that_lies_costs_time_and_nothing_else(lie: str) -> None:
    level = sealed(Liar(lie))
    store(level, 1, 2)
    assert load(level, 1, 2) == ([1] if lie == "too few" else [])
    assert level.contains(b"1") == (lie != "raises")
    counters = level.counters
    assert counters.num_rejected + counters.num_missing + counters.num_errors > 0
    level.close()


def test_identities_do_not_meet() -> None:
    memory = MemoryStore()
    store(sealed(memory), 1)
    other = SealedStore("other", memory, identity=b"o" * 16, block_bytes=BLOCK)
    assert not other.contains(b"1") and load(other, 1) == []


def test_the_example_keeps_to_its_limit() -> None:
    memory = MemoryStore(max_bytes=3 * (BLOCK + SEAL_BYTES))
    level = sealed(memory)
    store(level, 1, 2, 3)
    load(level, 1)
    store(level, 4)
    assert load(level, 1, 2, 3, 4) == [1, 3, 4]
    level.close()


def test_connectors_from_settings() -> None:
    name, made = make_connector({"kv_connector": "MemoryStore", "kv_connector_extra_config": {"max_bytes": 10}})
    assert name == "MemoryStore" and isinstance(made, MemoryStore)
    name, made = make_connector({"kv_connector": "quire.tiers.memory_store.MemoryStore", "kv_role": "kv_both"})
    assert name == "MemoryStore" and isinstance(made, MemoryStore)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_connector": 3},
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "quire.nowhere.Store"},
        {"kv_connector": "collections.OrderedDict"},
        {"kv_connector": "MemoryStore", "kv_connector_extra_config": {"size": 3}},
        {"kv_connector": "MemoryStore", "kv_role": "kv_producer"},
    ],
)
def test_connectors_that_cannot_be_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="kv_"):
        make_connector(config)
