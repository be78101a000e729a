"""The KV cache as bytes: one tensor on the device, one on the host for swapped blocks.

Layout [layers, blocks, 2, kv_heads, block_size, head_dim]: a layer's slice is what the kernels take, and one block of
one layer is one contiguous run, which is what copy-on-write and swap move.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from quire.models.spec import ModelSpec


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return spec.kv_values_per_token * block_size * dtype.itemsize


class KVCache:
    """Device and host blocks of all layers, and the moves between them."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def allocate(blocks: int, on: torch.device, pin: bool) -> Tensor:
            # Zeros, not empty: masked-out positions of a fresh block must be finite. On a CPU the operating system
            # hands zero pages out on first touch, so an idle cache takes no memory.
            shape = (spec.num_layers, blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
            return torch.zeros(shape, dtype=dtype, device=on, pin_memory=pin)

        # One block more than the scheduler knows of: where the padding of a captured decode step writes.
        self.spare_block = num_blocks
        self.device_blocks = allocate(num_blocks + 1, device, False)
        self.host_blocks = allocate(num_host_blocks, torch.device("cpu"), device.type == "cuda" and num_host_blocks > 0)
        self.layers: list[Tensor] = list(self.device_blocks.unbind(0))
        self.block_bytes = block_bytes(spec, block_size, dtype)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to) device blocks, all layers."""
        if pairs:
            sources, targets = self._columns(pairs)
            self.device_blocks[:, targets] = self.device_blocks[:, sources]

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """(device, host)."""
        for device, host in pairs:
            self.host_blocks[:, host].copy_(self.device_blocks[:, device], non_blocking=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """(host, device)."""
        for host, device in pairs:
            self.device_blocks[:, device].copy_(self.host_blocks[:, host], non_blocking=True)

    def measure_swap_rate(self) -> float | None:
        """Bytes per second between device and host, measured on real blocks; None without a host pool."""
        num = min(self.host_blocks.shape[1], self.spare_block, 32)
        if not num:
            return None
        pairs = [(i, i) for i in range(num)]
        self.swap_in(pairs)  # touches the pages, so that the timed move does not pay for them
        self._synchronize()
        start = time.perf_counter()
        self.swap_out(pairs)
        self._synchronize()
        return num * self.block_bytes / max(time.perf_counter() - start, 1e-9)

    def _synchronize(self) -> None:
        if self.device_blocks.is_cuda:
            torch.cuda.synchronize(self.device_blocks.device)

    def _columns(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        columns = torch.tensor(pairs, dtype=torch.int64).to(self.device_blocks.device)
        return columns[:, 0], columns[:, 1]
