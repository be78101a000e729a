"""Sums and streams in shared memory. Ranks are threads here: the library lets go of the interpreter while it waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore

from quire.child import child_environment
from quire.kernels.cpu import unavailable_reason
from quire.parallel.shared import RankGoneError, SharedMemory, share_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or unavailable_reason() is not None, reason="needs Linux and the native library"
)


def meet(num_ranks: int, pairs: list[tuple[int, int]] | None = None) -> list[SharedMemory | None]:
    store = HashStore()
    stage = list(range(num_ranks))
    return on_all(num_ranks, lambda rank: share_memory(store, rank, num_ranks, stage, pairs or []))


def on_all(num_ranks: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, range(num_ranks)))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_sums_have_the_same_bits_everywhere(num_ranks: int) -> None:
    shared = meet(num_ranks)
    generator = torch.Generator().manual_seed(num_ranks)
    for num_values in (1, 577, 8192, 70_000, 200_001, 3):
        parts = [torch.randn(num_values, generator=generator) for _ in range(num_ranks)]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part  # in the order of ranks
        on_all(num_ranks, lambda rank: shared[rank].sum(parts[rank]))  # noqa: B023
        assert all(torch.equal(part, expected) for part in parts)


def test_many_sums_in_a_row() -> None:
    """Nobody overtakes: a room is written again only when everybody has read it."""
    shared = meet(3)

    def work(rank: int) -> torch.Tensor:
        x = torch.full((64,), float(rank + 1))
        for i in range(300):
            shared[rank].sum(x)
            x /= 6.0
            x *= rank + 1
            x += 0.0 * i
        return x

    for rank, x in enumerate(on_all(3, work)):
        assert torch.allclose(x, torch.full((64,), float(rank + 1)))


def test_a_stream_carries_more_than_it_holds() -> None:
    shared = meet(2, [(0, 1)])
    sent = [torch.randint(0, 1 << 40, (size,)) for size in (1, 3, 700_000, 0, 700_001)]
    assert shared[0].reaches(0, 1) and not shared[0].reaches(1, 0)

    def work(rank: int) -> list[torch.Tensor]:
        if rank == 0:
            for x in sent:
                shared[0].send(x, 1)
            return sent
        found = [torch.empty_like(x) for x in sent]
        for x in found:
            shared[1].receive(x, 0)
        return found

    first, second = on_all(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_peer_that_is_gone_ends_the_wait(tmp_path: Path) -> None:
    """A process that has joined, and then ends without a word."""
    code = (
        "import os, sys\n"
        "from torch._C._distributed_c10d import FileStore\n"
        "from quire.parallel.shared import share_memory\n"
        "share_memory(FileStore(sys.argv[1], 2), 0, 2, [0, 1], [(0, 1)])\n"
        "os._exit(0)\n"
    )
    path = str(tmp_path / "store")
    with subprocess.Popen([sys.executable, "-c", code, path], env=child_environment()):
        shared = share_memory(FileStore(path, 2), 1, 2, [0, 1], [(0, 1)])
    assert shared is not None
    with pytest.raises(RankGoneError) as caught:
        shared.sum(torch.ones(4))
    assert caught.value.gone_rank == 0
    with pytest.raises(RankGoneError):
        shared.receive(torch.empty(4), 0)


def test_ranks_of_several_machines_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SHARED_MEMORY_RANKS", "0")
    assert meet(2) == [None, None]


def test_memory_that_one_cannot_open_is_used_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, *rest: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "not yours")
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert meet(3) == [None, None, None]
