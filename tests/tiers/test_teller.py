"""What a rank tells of its stores, whatever these do and say."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from tiers.test_split import BLOCK, LIMIT_S, Engine, key_of

from quire.executor.rank_messages import from_rank
from quire.plan import KeyedMove
from quire.tiers.memory_store import MemoryStore
from quire.tiers.sealed import SealedStore
from quire.tiers.split import Told
from quire.tiers.teller import StoreTeller


class Troublesome(MemoryStore):
    """Fails, keeps nothing, or has nothing of what it says."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if self.trouble == "load":
            raise OSError("it does not answer")
        return super().load(keys)

    def store(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        if self.trouble == "store":
            raise OSError("it does not answer")
        if self.trouble != "keeps nothing":
            super().store(keys, blocks)

    def usage(self) -> dict[str, Any]:
        if self.trouble == "usage":
            raise OSError("it does not answer")
        return {"num_bytes": 3, "its name": "mine"}


@pytest.mark.parametrize("trouble", ["load", "store", "keeps nothing", "usage"])
def test_a_store_that_tells_nothing_of_its_keys(trouble: str) -> None:
    """What went there counts, until a load brings nothing: then it is not asked again."""
    engine = Engine(MemoryStore(), Troublesome(trouble))
    assert engine.move(False, 1, 2) == ([1, 2] if trouble == "store" else [])
    is_kept = trouble in ("load", "usage")
    assert engine.has(1, 2) == [is_kept] * 2
    assert engine.move(True, 1) == ([] if trouble == "usage" else [1])
    assert engine.has(1, 2) == [trouble == "usage", is_kept]
    assert engine.store.usage().get("its name") is None
    engine.close()


def test_a_store_that_hangs_when_it_is_looked_at_holds_up_no_word_of_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    store, is_let_go = Troublesome("nothing"), threading.Event()
    monkeypatch.setattr(store, "usage", lambda: is_let_go.wait(2 * LIMIT_S))
    engine = Engine(MemoryStore(), store)
    assert engine.move(False, 1) == [] and engine.move(True, 1) == [] and engine.has(1) == [True]
    engine.close()
    is_let_go.set()


def test_what_a_store_says_of_itself_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of somebody's own store it may be anything, and what is told of moves comes with it."""
    said = {"num_rejected": "none", "is_up": True, "rate": np.float64(1.5), "big": 2**70, 5: 1, "nan": float("nan")}
    store = Troublesome("nothing")
    monkeypatch.setattr(store, "usage", lambda: said)
    heard: list[Told] = []
    has_heard = threading.Event()

    def send(told: Told) -> None:
        heard.append(cast(Told, from_rank.decode(from_rank.encode(told))))
        if heard[-1].stores[0].usage is not None:
            has_heard.set()

    teller = StoreTeller(0, [SealedStore("own", store, identity=b"i" * 16, block_bytes=BLOCK)], send)
    assert has_heard.wait(LIMIT_S)
    usage = heard[-1].stores[0].usage
    assert usage is not None and usage.items() >= {"is_up": 1, "rate": 1.5, "num_rejected": 0}.items()
    assert not usage.keys() & {"big", "nan", 5}
    teller.close()


def test_what_was_under_way_at_a_reset_is_told_to_nobody() -> None:
    engine = Engine(MemoryStore(), MemoryStore())
    for rank in engine.ranks:
        rank.teller.move_over(KeyedMove(0, 0, False, [(0, key_of(0))]), [])
        rank.teller.reset()
    engine.split.reset()
    assert engine.move(False, 5) == []  # the ticket after the reset is 0, too
    engine.close()
