"""Pinned memory: the system's own pages, registered with the driver and unregistered again."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from quire.errors import MemoryBudgetError
from quire.executor import pinned_memory
from quire.executor.pinned_memory import PinnedMemory


class FakeDriver:
    """Stands in for libcuda."""

    def __init__(self) -> None:
        self.status = 0
        self.registered: dict[int, int] = {}  # bytes by address

    def cuMemHostRegister_v2(self, address: ctypes.c_void_p, num_bytes: ctypes.c_size_t, flags: int) -> int:
        if not self.status:
            assert address.value is not None
            self.registered[address.value] = num_bytes.value
        return self.status

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:
        assert address.value is not None
        del self.registered[address.value]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(pinned_memory, "_libcuda", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return fake


def pinned(num_bytes: int) -> PinnedMemory:
    return PinnedMemory(num_bytes, purpose="a test", instead="ask for less")


def test_zeros_of_the_size_asked_for(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "_PIECE_BYTES", 4096)  # so that several threads touch it
    memory = pinned(3 * 8200)
    blocks = memory.zeros((3, 2, 1025), torch.float32)
    assert driver.registered == {blocks.data_ptr(): 3 * 8200}
    assert not blocks.any()
    blocks[2, 1] = 7.0
    assert memory.bytes[-4:].view(torch.float32) == 7.0


@pytest.mark.parametrize("by_hand", [True, False])
def test_it_is_unregistered_once(driver: FakeDriver, by_hand: bool) -> None:
    memory = pinned(10_000)
    seen = memory.bytes
    if by_hand:
        memory.release()
        assert not driver.registered
    del memory
    gc.collect()
    assert not driver.registered
    assert not seen.any()  # who still looks finds the pages


def test_more_than_the_host_has_is_refused_before_it_is_touched(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_memory, "available_host_bytes", lambda: 9_999)
    with pytest.raises(MemoryBudgetError, match="ask for less"):
        pinned(10_000)
    driver.status = 2
    monkeypatch.setattr(pinned_memory, "available_host_bytes", lambda: None)
    with pytest.raises(MemoryBudgetError, match="CUDA error 2"):
        pinned(10_000)
