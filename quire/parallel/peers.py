"""Memory of GPUs of one machine that all ranks of a stage have opened (CUDA IPC), and sums through it.

NCCL's sums are made for large messages. Those of a decode step are a few KB, sixty and more of them a step, and take
as long as their start takes: reading the peers' memory directly is one kernel, which a captured graph can hold.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from quire.errors import RankError
from quire.kernels.triton import peers as kernels
from quire.log import get_logger

ROOM_BYTES = 8 << 20  # of one message; longer ones go in pieces
_NUM_WARPS = 16
_PROGRAM_BYTES = 16 * 32 * _NUM_WARPS  # 16 bytes a thread
# One shot reads (ranks - 1) messages over the link, two shots 2 (ranks - 1) / ranks of one but meet twice, which takes
# as long as so many bytes do: 4 us at 340 GB/s (quire/sim/devices.py has the same formulas).
_MEETING_BYTES = 1.3e6
_MAX_POLLS = 50_000_000  # of a flag, about a microsecond each: then its rank is given up


def open_peers(
    store: Store, rank: int, stage: list[int], num_ranks: int, device: torch.device, *, is_needed: bool
) -> PeerMemory | None:
    """Every rank calls it. None where ranks of a stage are on several machines, or cannot open each other's memory;
    is_needed: there is no other way, and that is an error."""
    found, trouble = None, ""
    try:
        found = PeerMemory(store, f"peers/{stage[0]}", rank - stage[0], len(stage), device)
    except RankError as error:
        trouble = str(error)
        store.set(f"peers/{stage[0]}/{rank - stage[0]}", "")
    store.set(f"opened/{rank}", trouble or "yes")
    answers = [store.get(f"opened/{peer}").decode() for peer in range(num_ranks)]
    if all(answer == "yes" for answer in answers):
        return found
    trouble = max(answer for answer in answers if answer != "yes")
    if is_needed:
        raise RankError(f"ranks on one GPU cannot open each other's memory: {trouble}")
    get_logger().warning("GPUs of this machine do not open each other's memory, and small sums are slower: %s", trouble)
    return None


class PeerMemory:
    """One rank's view of the memory of all ranks of its stage."""

    def __init__(self, store: Store, key: str, rank: int, num_ranks: int, device: torch.device) -> None:
        """key: of this stage, in the store through which ranks find each other."""
        self._rank, self._num_ranks = rank, num_ranks
        torch.zeros(1, device=device)  # makes the device's context this thread's
        self._driver = _Driver()
        own = self._driver.allocate(kernels.FLAG_BYTES + 2 * ROOM_BYTES)
        store.set(f"{key}/{rank}", self._driver.handle_of(own).hex())
        handles = [bytes.fromhex(store.get(f"{key}/{peer}").decode()) for peer in range(num_ranks)]
        if not all(handles):
            raise RankError("another rank has none to share")
        addresses = [own if peer == rank else self._driver.open(handle) for peer, handle in enumerate(handles)]
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(kernels.STATE_WORDS, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # kernels write it, the host reads it
        self._starts: tuple[list[int], Tensor] | None = None

    def fits(self, x: Tensor) -> bool:
        """Whether a sum is one call."""
        return x.nbytes <= ROOM_BYTES

    def sum(self, x: Tensor) -> Tensor:
        """In place: the same bits on each rank."""
        assert x.is_contiguous()
        flat, at_once = x.view(-1), ROOM_BYTES // x.element_size()
        for first in range(0, len(flat), at_once):
            self._sum(flat[first : first + at_once])
        return x

    def gather(self, part: Tensor, widths: list[int], whole: Tensor | None) -> None:
        """[rows, width] of each rank, side by side in `whole` on the first."""
        part = part.contiguous()
        assert (whole is not None or self._rank) and part.shape[1] == widths[self._rank]
        if self._starts is None or self._starts[0] != widths:
            starts = torch.tensor([0, *widths], dtype=torch.int64).cumsum(0)
            self._starts = (list(widths), starts.to(part.device))
        at_once = max(1, ROOM_BYTES // (max(widths) * part.element_size()))
        for first in range(0, len(part), at_once):
            rows = part[first : first + at_once]
            out = rows if whole is None else whole[first : first + at_once]
            kernels.gather_kernel[(min(kernels.MAX_PROGRAMS, len(rows)),)](
                rows, out, self._starts[1], self._peers, self._state, self._failed, len(rows), ROOM_BYTES, _MAX_POLLS,
                out.stride(0), **self._constants(), BLOCK=_PROGRAM_BYTES // part.element_size(), num_warps=_NUM_WARPS,
            )  # fmt: skip

    def check(self) -> None:
        """Raises if a kernel waited in vain. Does not wait for the device."""
        if peer := int(self._failed[0]):
            raise RankError(f"the GPU of rank {peer - 1} of this stage has not answered for about a minute")

    def _sum(self, x: Tensor) -> None:
        block = _PROGRAM_BYTES // x.element_size()
        ranks = self._num_ranks
        two_shot = ranks > 2 and x.nbytes * (ranks - 1) * (1 - 2 / ranks) > _MEETING_BYTES
        unit = block * ranks if two_shot else block
        chunk = -(-len(x) // (kernels.MAX_PROGRAMS * unit)) * unit
        kernels.sum_kernel[(-(-len(x) // chunk),)](
            x, self._peers, self._state, self._failed, len(x), chunk, ROOM_BYTES, _MAX_POLLS, **self._constants(),
            TWO_SHOT=two_shot, IS_FLOAT=x.is_floating_point(), ALIGNED=len(x) % 16 == 0, BLOCK=block,
            num_warps=_NUM_WARPS,
        )  # fmt: skip

    def _constants(self) -> dict[str, Any]:
        return {
            "RANK": self._rank,
            "WORLD": self._num_ranks,
            "MAX_PROGRAMS": kernels.MAX_PROGRAMS,
            "MAX_RANKS": kernels.MAX_RANKS,
            "FLAG_BYTES": kernels.FLAG_BYTES,
        }


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


class _Driver:
    """The few calls of CUDA's driver that torch has no names for. torch shares memory too, but counts its users in
    files, which a killed process leaves behind."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        """Zeroed. Freed with the process: peers may read it until they have ended."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")
        return address.value

    def handle_of(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        with_peer_access = ctypes.c_uint(1)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), with_peer_access)
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RankError(f"{name} failed: {(text.value or b'unknown').decode()} ({status})")
