"""Ranks agree on whether they have each other's memory, before any of them relies on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from quire.errors import RankError
from quire.parallel import peers


@pytest.fixture(autouse=True)
def one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot open what it is handed."""

    def make(store: Any, key: str, rank: int, num_ranks: int, device: torch.device) -> str:
        if rank == 1:
            raise RankError("cuIpcOpenMemHandle_v2 failed")
        return "opened"

    monkeypatch.setattr(peers, "PeerMemory", make)


def open_all(num_ranks: int, *, is_needed: bool) -> list[Any]:
    store, stage = HashStore(), list(range(num_ranks))

    def work(rank: int) -> Any:
        try:
            return peers.open_peers(store, rank, stage, num_ranks, torch.device("cpu"), is_needed=is_needed)
        except RankError as error:
            return str(error)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, range(num_ranks)))


def test_all_have_it_or_none() -> None:
    assert open_all(1, is_needed=True) == ["opened"]
    assert open_all(3, is_needed=False) == [None, None, None]  # NCCL does it


def test_where_there_is_no_other_way_it_is_an_error() -> None:
    assert all("cuIpcOpenMemHandle_v2 failed" in answer for answer in open_all(2, is_needed=True))
