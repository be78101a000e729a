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
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.executor.pinned_memory import PinnedMemory
from quire.executor.transfer import Transfers
from quire.models.kv_layout import KVLayout
from quire.models.spec import ModelSpec
from quire.plan import Move
from quire.sampling.transfer import to_device

# Moves are of words, whatever they hold: the widest, of 16 bytes, of which every block of a layer is a multiple.
_WORD = torch.complex128
# Blocks cross the link by way of device memory, so many bytes at a time. Larger pieces would keep the few integers of
# each step waiting for the copy engine; smaller ones cost the host more than the device needs for them.
_PIECE_BYTES = 16 << 20


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


def take_pages(tensor: Tensor) -> None:
    """Have the system give all of its memory now, and not at the first writes. The content stays."""
    tensor.flatten().view(torch.uint8)[:: mmap.PAGESIZE].bitwise_or_(0)


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
        self.block_bytes = layout.block_bytes(spec, block_size, dtype.itemsize)
        if on_gpu and num_host_blocks:
            self._pinned = PinnedMemory(
                num_host_blocks * self.block_bytes,
                purpose="blocks on the host",
                instead="lower kv_offloading_size or swap_space_gb",
            )
            self.host_blocks = self._pinned.zeros(host_shape, dtype)
        else:
            self.host_blocks = _untouched_zeros(host_shape, dtype)
        slots = self.device_blocks.unbind(0)
        self.layers: list[Tensor] = [slots[slot] for slot in layout.slots]
        self._device_words = self.device_blocks.flatten(2).view(_WORD)  # [slots, blocks, words]
        # One row of words for each block of each slot. By rows a block is moved in one launch, however large the cache:
        # torch splits what spans more than 2 GiB otherwise.
        self._rows = self._device_words.flatten(0, 1)
        self._first_rows = np.arange(layout.num_slots) * (num_blocks + 1)
        self._host_words = self.host_blocks.flatten(2).view(_WORD)  # [host blocks, slots, words]
        self._transfers: Transfers | None = None
        self._staging = torch.empty(0)
        if on_gpu:
            self._open_link(Transfers(device))
        self._waiting: list[tuple[Move, torch.cuda.Event]] = []  # moves that have not been started
        self._threads = threading.local()
        self._moved: list[int] = []  # of a CPU, whose moves are over at once
        self._kept: tuple[list[int], Tensor] = ([], torch.empty(0))  # during a sleep: block ids and their content

    def _open_link(self, transfers: Transfers) -> None:
        """Moves take time from now on. Each lane has room for a piece, and what goes out for another."""
        self._transfers = transfers
        num_staged = min(len(self.host_blocks), max(1, _PIECE_BYTES // self.block_bytes))
        shape = (transfers.NUM_LANES + 1, num_staged, *self._host_words.shape[1:])
        self._staging = torch.empty(shape, dtype=_WORD, device=self.device_blocks.device)

    def take_pages(self) -> None:
        """Make steps that write a block for the first time take no longer than later ones. A GPU has its memory."""
        if not self.device_blocks.is_cuda:
            take_pages(self.device_blocks)

    # -- sleep: on a GPU, `virtual_memory.py` takes the device's memory after the one and brings it before the other

    def fall_asleep(self, kept: list[int]) -> None:
        """Nobody needs these blocks for a while, and nobody will ask for the content of others than those kept."""
        self._kept = (kept, self._read(kept))
        if not self.device_blocks.is_cuda:
            release_pages(self.device_blocks)

    def wake_up(self) -> None:
        """Restore all blocks: those kept with their content, the others as zeros."""
        kept, words = self._kept
        for first in range(0, len(kept), _BLOCKS_AT_ONCE):
            some = words[first : first + _BLOCKS_AT_ONCE].to(self.device_blocks.device)
            self._rows[self._rows_of(kept[first : first + _BLOCKS_AT_ONCE])] = some.flatten(0, 1)
        self._synchronize()
        self._kept = ([], torch.empty(0))

    def _read(self, block_ids: list[int]) -> Tensor:
        """Copies of these blocks on the host, a bounded number at a time."""
        found = torch.empty((len(block_ids), *self._host_words.shape[1:]), dtype=_WORD)
        for first in range(0, len(block_ids), _BLOCKS_AT_ONCE):
            found[first : first + _BLOCKS_AT_ONCE] = self._gather(block_ids[first : first + _BLOCKS_AT_ONCE])
        return found

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to) device blocks, all layers. All are read before any is written."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self._rows[self._rows_of(targets)] = self._rows[self._rows_of(sources)]

    def move(self, move: Move) -> None:
        """Begin a move. On a GPU it waits until `start_moves` puts it on a stream for moves."""
        if self._transfers is not None:
            self._waiting.append((move, self._transfers.mark()))
            return
        devices, hosts = zip(*move.pairs, strict=True)
        if move.is_load:
            self._rows[self._rows_of(devices)] = self._host_words[list(hosts)].flatten(0, 1)
        else:
            self._host_words[list(hosts)] = self._gather(devices)
        if not move.is_awaited:
            self._moved.append(move.ticket)

    def start_moves(self) -> None:
        """Queue the moves so far behind the steps that were submitted before each. It takes the host a while: call it
        when the next step is on its way."""
        waiting, self._waiting = self._waiting, []
        for move, after in waiting:
            (self._load if move.is_load else self._store)(move, after)

    # -- blocks as bytes, for stores below: begun in the order of plans, carried out on other threads

    def payloads(self, block_ids: list[int], room_bytes: int) -> Callable[[], list[memoryview]]:
        """A function that gives these blocks' bytes as earlier steps left them, each with so much room behind."""
        staged: Tensor | None = None
        ready: torch.cuda.Event | None = None
        if self._transfers is not None:
            with self._transfers.outward(self._transfers.mark()):
                gathered = self._gather(block_ids)
                staged = torch.empty(gathered.shape, dtype=_WORD, pin_memory=True)
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
                array = words.numpy()
                np.copyto(rows[i, : self.block_bytes].view(array.dtype).reshape(array.shape), array)
            return [row.data for row in rows]

        return read

    def mark(self) -> torch.cuda.Event | None:
        """An event for all that was submitted; None on a CPU, where it is over. A wait for it takes no processor."""
        if self._transfers is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device_blocks.device))
        return event

    def read_slots(self, block_ids: list[int], slots: range) -> memoryview:
        """Bytes of some slots of these blocks, block after block. To be called on a thread beside the steps, once what
        was written there is over, and before anybody writes there again."""
        rows = np.array(block_ids, dtype=np.int64)[:, None] + self._first_rows[slots.start : slots.stop]
        if self._transfers is None:
            taken = self._rows.numpy().take(rows.ravel(), axis=0)  # torch would use threads of its own
            return taken.view(np.uint8).data.cast("B")
        stream = self._own_stream()
        with torch.cuda.stream(stream):
            gathered = self._rows.index_select(0, to_device(rows.ravel(), self.device_blocks.device))
            staged = torch.empty(gathered.shape, dtype=_WORD, pin_memory=True)
            staged.copy_(gathered, non_blocking=True)
        stream.synchronize()
        return staged.numpy().view(np.uint8).data.cast("B")

    def fillers(self, block_ids: list[int]) -> Callable[[int, memoryview], None]:
        """A function that writes the bytes of one of these blocks, by its place, once earlier steps are over."""
        before: torch.cuda.Event | None = None
        if self._transfers is not None:
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record()

        def fill(place: int, payload: memoryview) -> None:
            if before is None:
                target = self._device_words[:, block_ids[place]].numpy()
                np.copyto(target, np.frombuffer(payload, dtype=target.dtype).reshape(target.shape))
                return
            writable = bytearray(payload) if payload.readonly else payload  # torch takes no other
            words = torch.frombuffer(writable, dtype=_WORD).view(-1, self._rows.shape[1])
            stream = self._own_stream()
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                self._rows[self._rows_of([block_ids[place]])] = words.to(self.device_blocks.device)
            stream.synchronize()

        return fill

    def _own_stream(self) -> torch.cuda.Stream:
        """One for each thread that loads or sends."""
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

    def hold_steps_for_loads(self) -> None:
        """Steps submitted from now on run behind all loads so far; the host does not wait."""
        self.start_moves()
        if self._transfers is not None:
            self._transfers.hold_steps_for_loads()

    def hold_steps_for_moves(self) -> None:
        """Likewise, and behind all other moves: for a rank that is not told when these are over."""
        self.hold_steps_for_loads()
        if self._transfers is not None:
            self._transfers.hold_steps_for_stores()

    def wait_for_a_move(self) -> None:
        """Wait until a move is over, where there is any."""
        if self._transfers is not None:
            self._transfers.wait_for_one()

    def forget_moves(self) -> None:
        """Nobody will hear of those that were made; their blocks may be given to others."""
        self.start_moves()
        self._synchronize()
        self.take_finished()

    def _store(self, move: Move, after: torch.cuda.Event) -> None:
        assert self._transfers is not None
        with self._transfers.storing(move.ticket, after, frozenset(host for _, host in move.pairs)):
            rows = self._rows_of([block_id for block_id, _ in move.pairs]).view(len(move.pairs), -1)
            for first, piece in self._pieces(move.pairs):
                staged = self._staging[-1, : len(piece)]
                sources = rows[first : first + len(piece)].flatten()
                torch.index_select(self._rows, 0, sources, out=staged.view(len(sources), -1))
                for place, host, count in _runs(piece):
                    self._host_words[host : host + count].copy_(staged[place : place + count], non_blocking=True)

    def _load(self, move: Move, after: torch.cuda.Event) -> None:
        """Bytes cross the link in few large copies, and are spread over the layers on the device. The first copy begins
        at once, and the rows that its blocks go to are worked out meanwhile. They cross the link before the second, on
        the other lane: later, they would wait for the copy engine behind one piece more."""
        assert self._transfers is not None
        ticket = None if move.is_awaited else move.ticket
        with self._transfers.loading(ticket, after, frozenset(host for _, host in move.pairs)):
            rows: Tensor | None = None
            for number, (first, piece) in enumerate(self._pieces(move.pairs), start=1):
                lane = number % self._transfers.NUM_LANES
                staged = self._staging[lane, : len(piece)]
                with self._transfers.lane(lane):
                    for place, host, count in _runs(piece):
                        staged[place : place + count].copy_(self._host_words[host : host + count], non_blocking=True)
                if rows is None:
                    # On lane 0, which ends behind the other: its memory is not given out again before that.
                    with self._transfers.lane(0):
                        rows = self._rows_of([block_id for block_id, _ in move.pairs]).view(len(move.pairs), -1)
                    self._transfers.follow(lane, 0)
                with self._transfers.lane(lane):
                    self._rows[rows[first : first + len(piece)].flatten()] = staged.flatten(0, 1)

    def _pieces(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Pieces that the staging buffer holds, and where each begins. Moves share it: a lane's are in order."""
        size = self._staging.shape[1]
        return ((first, pairs[first : first + size]) for first in range(0, len(pairs), size))

    def measure_swap_rate(self) -> float | None:
        """Bytes per second between device and host, measured on real blocks; None without a host pool."""
        num = min(self.host_blocks.shape[0], self.spare_block, 32)
        if not num:
            return None
        pairs = [(i, i) for i in range(num)]
        # The first two write to the pages of both, so that the timed one need not.
        for is_load in (True, False, False):
            start = time.perf_counter()
            self.move(Move(0, is_load, pairs))
            self.forget_moves()
        return num * self.block_bytes / max(time.perf_counter() - start, 1e-9)

    def measure_link_rates(self, num_bytes: int) -> tuple[float, float]:
        """Bytes per second from pinned host memory to a GPU: of one copy, and of as many bytes in blocks, as loads move
        them. The shortest of several; the blocks that it writes to must be nobody's."""
        assert self._transfers is not None, "a CPU's host memory is its own"
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device_blocks.device)
        num_blocks = min(num_bytes // self.block_bytes, len(self.host_blocks), self.spare_block)
        move = Move(0, True, [(i, i) for i in range(num_blocks)])

        def load() -> None:
            self.move(move)
            self.start_moves()

        calls: tuple[tuple[int, Callable[[], object]], ...] = (
            (num_bytes, lambda: target.copy_(source, non_blocking=True)),
            (num_blocks * self.block_bytes, load),
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

    def _rows_of(self, block_ids: Sequence[int]) -> Tensor:
        """The rows of these blocks, block after block, on the device."""
        rows = np.array(block_ids, dtype=np.int64)[:, None] + self._first_rows
        return to_device(rows.ravel(), self.device_blocks.device)

    def _gather(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of these blocks, each in one piece."""
        return self._rows.index_select(0, self._rows_of(block_ids)).view(len(block_ids), *self._host_words.shape[1:])


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(place, host block, how many) of host blocks that follow one another: one copy moves them."""
    first = 0
    for end in range(1, len(pairs) + 1):
        if end == len(pairs) or pairs[end][1] != pairs[end - 1][1] + 1:
            yield first, pairs[first][1], end - first
            first = end
