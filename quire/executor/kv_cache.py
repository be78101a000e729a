"""The KV cache as bytes: one tensor on the device, one on the host for swapped blocks.

Layout on the device [slots, blocks, 2, kv_heads, block_size, head_dim]: a slot's slice is what the kernels take for a
layer, and one block of one layer is one contiguous run. Layers of different KV groups share a slot, and have other
blocks of it. On the host the block comes first.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from quire.executor.transfer import Transfers
from quire.models.kv_layout import KVLayout
from quire.models.spec import ModelSpec
from quire.plan import Move
from quire.sampling.transfer import to_device

_STAGED_BYTES = 64 << 20  # device memory by way of which blocks are copied between host and device


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: numpy asks the system for zero pages, torch would fill them."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def release_pages(tensor: Tensor) -> None:
    """Zeros again, whose memory the system has back where it knows how to take it."""
    page = mmap.PAGESIZE
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // page) * page, end // page * page
    if sys.platform != "linux" or first >= last:
        tensor.zero_()
        return
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        tensor.zero_()


_BLOCKS_AT_ONCE = 256  # of those that outlive a sleep


class KVCache:
    """Device and host blocks of all layers, and the moves between them."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inner = (2, spec.num_kv_heads, block_size, spec.head_dim)
        on_gpu = device.type == "cuda"
        # Zeros, not empty: masked-out positions of a fresh block must be finite.
        # One block more than the scheduler knows of: where the padding of a captured decode step writes.
        self.spare_block = num_blocks
        device_shape = (layout.num_slots, num_blocks + 1, *inner)
        self.device_blocks = (
            torch.zeros(device_shape, dtype=dtype, device=device) if on_gpu else _untouched_zeros(device_shape, dtype)
        )
        # A host block holds all its layers in one piece: one copy moves it.
        host_shape = (num_host_blocks, layout.num_slots, *inner)
        self.host_blocks = (
            torch.zeros(host_shape, dtype=dtype, pin_memory=True)
            if on_gpu and num_host_blocks
            else _untouched_zeros(host_shape, dtype)
        )
        slots = self.device_blocks.unbind(0)
        self.layers: list[Tensor] = [slots[slot] for slot in layout.slots]
        self.block_bytes = layout.block_bytes(spec, block_size, dtype.itemsize)
        # Moves are of words, whatever they hold: not every operation knows every dtype.
        self._device_words = self.device_blocks.view(torch.int32)
        self._host_words = self.host_blocks.view(torch.int32)
        self._transfers = Transfers(device) if on_gpu else None
        num_staged = min(num_host_blocks, max(1, _STAGED_BYTES // 2 // self.block_bytes)) if on_gpu else 0
        # Two halves, in turn: while one is spread over the layers, the next bytes come into the other.
        self._staging = torch.empty((2, num_staged, *self._host_words.shape[1:]), dtype=torch.int32, device=device)
        self._threads = threading.local()
        self._moved: list[int] = []  # of a CPU, whose moves are over at once
        self._kept: tuple[list[int], Tensor] = ([], torch.empty(0))  # during a sleep: block ids and their content

    # -- sleep: on a GPU, `virtual_memory.py` takes the device's memory after the one and brings it before the other

    def fall_asleep(self, kept: list[int]) -> None:
        """Nobody needs these blocks for a while, and nobody will ask for the content of others than those kept."""
        self._kept = (kept, self._read(kept))
        if not self.device_blocks.is_cuda:
            release_pages(self.device_blocks)

    def wake_up(self) -> None:
        """All blocks are there again: those kept with their content, the others as zeros."""
        kept, words = self._kept
        for first in range(0, len(kept), _BLOCKS_AT_ONCE):
            ids = torch.tensor(kept[first : first + _BLOCKS_AT_ONCE], device=self.device_blocks.device)
            some = words[first : first + _BLOCKS_AT_ONCE].to(self.device_blocks.device)
            self._device_words[:, ids] = some.transpose(0, 1)
        self._synchronize()
        self._kept = ([], torch.empty(0))

    def _read(self, block_ids: list[int]) -> Tensor:
        """Copies of these blocks on the host, a bounded number at a time."""
        shape = self._device_words.shape
        found = torch.empty((len(block_ids), shape[0], *shape[2:]), dtype=torch.int32)
        for first in range(0, len(block_ids), _BLOCKS_AT_ONCE):
            ids = torch.tensor(block_ids[first : first + _BLOCKS_AT_ONCE], device=self.device_blocks.device)
            found[first : first + _BLOCKS_AT_ONCE] = self._device_words[:, ids].transpose(0, 1)
        return found

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to) device blocks, all layers. All are read before any is written."""
        if pairs:
            sources, targets = self._columns(pairs)
            self._device_words[:, targets] = self._device_words[:, sources]

    def move(self, move: Move) -> None:
        """On a GPU moves have a stream of their own, and steps compute meanwhile."""
        copy = self._copy_in if move.is_load else self._copy_out
        if self._transfers is None:
            copy(move.pairs)
            self._moved.append(move.ticket)
            return
        with self._transfers.after_computing():
            copy(move.pairs)
        self._transfers.track(move.ticket)

    # -- blocks as bytes, for stores below: begun in the order of plans, carried out on other threads

    def payloads(self, block_ids: list[int], room_bytes: int) -> Callable[[], list[memoryview]]:
        """A function that gives these blocks' bytes as earlier steps left them, each with so much room behind."""
        staged: Tensor | None = None
        ready: torch.cuda.Event | None = None
        if self._transfers is not None:
            with self._transfers.after_computing():
                ids = to_device(np.array(block_ids, dtype=np.int64), self.device_blocks.device)
                gathered = self._device_words.index_select(1, ids).transpose(0, 1).contiguous()
                staged = torch.empty(gathered.shape, dtype=torch.int32, pin_memory=True)
                staged.copy_(gathered, non_blocking=True)
                gathered.record_stream(torch.cuda.current_stream())
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record()

        def read() -> list[memoryview]:
            if ready is not None:
                ready.synchronize()
            rows = np.empty((len(block_ids), self.block_bytes + room_bytes), dtype=np.uint8)
            for i, block_id in enumerate(block_ids):
                words = self._device_words[:, block_id] if staged is None else staged[i]
                into = rows[i, : self.block_bytes].view(np.int32).reshape(words.shape)
                np.copyto(into, words.numpy())
            return [row.data for row in rows]

        return read

    def fillers(self, block_ids: list[int]) -> Callable[[int, memoryview], None]:
        """A function that writes the bytes of one of these blocks, by its place, once earlier steps are over."""
        before: torch.cuda.Event | None = None
        if self._transfers is not None:
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record()

        def fill(place: int, payload: memoryview) -> None:
            target = self._device_words[:, block_ids[place]]
            words = np.frombuffer(payload, dtype=np.int32).reshape(target.shape)
            if before is None:
                np.copyto(target.numpy(), words)
                return
            stream = self._loading_stream()
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                target.copy_(torch.from_numpy(words.copy()))  # from pageable memory: it returns when it is done
            stream.synchronize()

        return fill

    def _loading_stream(self) -> torch.cuda.Stream:
        """One for each thread that loads."""
        stream: torch.cuda.Stream | None = getattr(self._threads, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(self.device_blocks.device)  # type: ignore[no-untyped-call]
            self._threads.stream = stream
        return stream

    def take_finished(self) -> list[int]:
        """Tickets of moves that are over, each told once."""
        if self._transfers is not None:
            return self._transfers.take_finished()
        moved, self._moved = self._moved, []
        return moved

    def hold_steps_for_moves(self) -> None:
        """Steps submitted from now on run behind all moves so far: for who does not hear when these are over."""
        if self._transfers is not None:
            self._transfers.before_computing()

    def wait_for_a_move(self) -> None:
        """Until the oldest move is over, where there is any."""
        if self._transfers is not None:
            self._transfers.wait_for_oldest()

    def forget_moves(self) -> None:
        """Nobody will hear of those that were made; their blocks may be given to others."""
        self._synchronize()
        self.take_finished()

    def _copy_out(self, pairs: list[tuple[int, int]]) -> None:
        for piece in self._pieces(pairs):
            devices, hosts = self._columns(piece)
            words = self._device_words.index_select(1, devices).transpose(0, 1)
            if self._transfers is None:
                self._host_words[hosts] = words
                continue
            staged = self._staging[0, : len(piece)].copy_(words)
            for first, host, count in _runs(piece):
                self._host_words[host : host + count].copy_(staged[first : first + count], non_blocking=True)

    def _copy_in(self, pairs: list[tuple[int, int]]) -> None:
        if self._transfers is None:
            devices, hosts = self._columns(pairs)
            self._device_words[:, devices] = self._host_words[hosts].transpose(0, 1)
            return
        for number, piece in enumerate(self._pieces(pairs)):
            staged = self._staging[number % 2, : len(piece)]
            self._transfers.await_spread(number % 2)
            for first, host, count in _runs(piece):
                staged[first : first + count].copy_(self._host_words[host : host + count], non_blocking=True)
            with self._transfers.spreading(number % 2):
                devices, _ = self._columns(piece)
                self._device_words[:, devices] = staged.transpose(0, 1)
        self._transfers.await_spread(0, 1)

    def _pieces(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """What half of the staging buffer holds. Moves share it: they run one after the other on one stream."""
        size = self._staging.shape[1] or max(1, len(pairs))
        return (pairs[first : first + size] for first in range(0, len(pairs), size))

    def measure_swap_rate(self) -> float | None:
        """Bytes per second between device and host, measured on real blocks; None without a host pool."""
        num = min(self.host_blocks.shape[0], self.spare_block, 32)
        if not num:
            return None
        pairs = [(i, i) for i in range(num)]
        self._copy_in(pairs)  # writes to the pages of both, so that the timed one need not
        self._synchronize()
        self._copy_out(pairs)
        self._synchronize()
        start = time.perf_counter()
        self._copy_out(pairs)
        self._synchronize()
        return num * self.block_bytes / max(time.perf_counter() - start, 1e-9)

    def measure_link_rates(self, num_bytes: int) -> tuple[float, float]:
        """Bytes per second from pinned host memory to a GPU: of one copy, and of as many bytes in blocks, as loads move
        them. The shortest of several; the blocks that it writes to must be nobody's."""
        assert self._transfers is not None, "a CPU's host memory is its own"
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device_blocks.device)
        num_blocks = min(num_bytes // self.block_bytes, len(self.host_blocks), self.spare_block)
        move = Move(0, True, [(i, i) for i in range(num_blocks)])
        calls: tuple[tuple[int, Callable[[], object]], ...] = (
            (num_bytes, lambda: target.copy_(source, non_blocking=True)),
            (num_blocks * self.block_bytes, lambda: self.move(move)),
        )
        rates = []
        for moved_bytes, call in calls:
            seconds = []
            for _ in range(5):
                self._synchronize()
                started = time.perf_counter()
                call()
                self._synchronize()
                seconds.append(time.perf_counter() - started)
            rates.append(moved_bytes / min(seconds))
        self.take_finished()
        return rates[0], rates[1]

    def _synchronize(self) -> None:
        if self.device_blocks.is_cuda:
            torch.cuda.synchronize(self.device_blocks.device)

    def _columns(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        columns = to_device(np.array(pairs, dtype=np.int64).T.copy(), self.device_blocks.device)
        return columns[0], columns[1]


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(place, host block, how many) of host blocks that follow one another: one copy moves them."""
    first = 0
    for end in range(1, len(pairs) + 1):
        if end == len(pairs) or pairs[end][1] != pairs[end - 1][1] + 1:
            yield first, pairs[first][1], end - first
            first = end
