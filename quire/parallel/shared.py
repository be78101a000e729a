"""Ranks of one machine, without a GPU: sums and sends through memory that their processes share.

The memory is a file without a name (memfd), which the others open through /proc: it ends with the last process that
has it, however that ends. kernels/cpu/native/exchange.c does the rest.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from quire.kernels.cpu.library import load_library
from quire.log import get_logger

_SWITCH = "QUIRE_SHARED_MEMORY_RANKS"  # "0": as if every rank had a machine of its own


class RankGoneError(ConnectionError):
    """Another rank of this machine has ended while it was waited for."""

    def __init__(self, rank: int) -> None:
        super().__init__("it has ended")
        self.gone_rank = rank


class _Segment:
    """Memory that several processes have."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._map = mmap.mmap(descriptor, num_bytes)
        self.descriptor = descriptor  # open until all have it
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def new(cls, num_bytes: int) -> _Segment:
        descriptor = os.memfd_create("quire-ranks")
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    @classmethod
    def open(cls, place: str, num_bytes: int) -> _Segment:
        pid, number = place.split(":")
        return cls(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC), num_bytes)

    @property
    def place(self) -> str:
        return f"{os.getpid()}:{self.descriptor}"


class SharedMemory:
    """What one rank shares with others of its machine: a place for sums with the rest of its stage, and a stream for
    each pair of ranks of which one sends to the other."""

    def __init__(self, rank: int, stage: list[int]) -> None:
        library = load_library()
        assert not isinstance(library, str)
        self._library = library
        self._rank, self._stage = rank, stage
        self._sums: _Segment | None = None
        self._streams: dict[tuple[int, int], _Segment] = {}

    def sums(self, x: Tensor) -> bool:
        """Whether `sum` can be asked for."""
        return self._sums is not None and x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()

    def sum(self, x: Tensor) -> None:
        """In place: the same bits on each rank of the stage."""
        assert self._sums is not None
        index = self._rank - self._stage[0]
        gone = self._library.quire_sums_add(self._sums.address, index, len(self._stage), x.data_ptr(), x.numel())
        if gone:
            raise RankGoneError(self._stage[gone - 1])

    def reaches(self, sender: int, receiver: int) -> bool:
        return (sender, receiver) in self._streams

    def send(self, x: Tensor, rank: int) -> None:
        """Waits only where the receiver is several steps behind."""
        x = x.contiguous()
        stream = self._streams[self._rank, rank]
        if not self._library.quire_stream_send(stream.address, x.data_ptr(), x.nbytes):
            raise RankGoneError(rank)

    def receive(self, into: Tensor, rank: int) -> None:
        assert into.is_contiguous()
        stream = self._streams[rank, self._rank]
        if not self._library.quire_stream_receive(stream.address, into.data_ptr(), into.nbytes):
            raise RankGoneError(rank)

    def _join(self, store: Store, machines: list[str], pairs: list[tuple[int, int]]) -> None:
        own, library = machines[self._rank], self._library
        if len(self._stage) > 1 and all(machines[peer] == own for peer in self._stage):
            index, num_bytes = self._rank - self._stage[0], library.quire_sums_bytes(len(self._stage))
            self._sums = self._share(store, f"sums/{self._stage[0]}", num_bytes, is_first=index == 0)
            library.quire_sums_join(self._sums.address, index)
        for sender, receiver in pairs:
            if self._rank in (sender, receiver) and machines[sender] == machines[receiver]:
                sends = sender == self._rank
                name = f"stream/{sender}/{receiver}"
                segment = self._share(store, name, library.quire_stream_bytes(), is_first=sends)
                library.quire_stream_join(segment.address, sends)
                self._streams[sender, receiver] = segment

    @staticmethod
    def _share(store: Store, name: str, num_bytes: int, *, is_first: bool) -> _Segment:
        if not is_first:
            return _Segment.open(store.get(name).decode(), num_bytes)
        segment = _Segment.new(num_bytes)
        store.set(name, segment.place)
        return segment

    def _close_descriptors(self) -> None:
        for segment in (*self._streams.values(), *([self._sums] if self._sums else [])):
            os.close(segment.descriptor)


def share_memory(
    store: Store, rank: int, num_ranks: int, stage: list[int], pairs: list[tuple[int, int]]
) -> SharedMemory | None:
    """Every rank calls it, with the same pairs (sender, receiver). None where no other rank is on this machine, or
    where one of them cannot open what another shares."""
    store.set(f"machine/{rank}", _machine(rank))
    machines = [store.get(f"machine/{peer}").decode() for peer in range(num_ranks)]
    shared, trouble = None, ""
    if machines.count(machines[rank]) > 1:
        shared = SharedMemory(rank, stage)
        try:
            shared._join(store, machines, pairs)
        except OSError as error:
            trouble = str(error)
    store.set(f"shared/{rank}", trouble or "yes")
    answers = [store.get(f"shared/{peer}").decode() for peer in range(num_ranks)]
    if shared is None:
        return None
    shared._close_descriptors()
    if any(answer != "yes" for answer in answers):
        get_logger().warning("ranks of this machine share no memory, and their sums are slower: %s", max(answers))
        return None
    return shared


def _machine(rank: int) -> str:
    """The same for processes that can share memory and see each other's ids."""
    if sys.platform != "linux" or isinstance(load_library(), str) or os.environ.get(_SWITCH) == "0":
        return f"alone {rank}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
