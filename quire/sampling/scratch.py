"""Memory for intermediates."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers by name, each good until the name is asked for again.

    A CPU keeps them from call to call: fresh memory of this size costs more in page faults than the arithmetic that is
    done in it. An accelerator's allocator keeps memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Not initialised. A name has one dtype."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        num_elements = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_elements:
            buffer = self._buffers[name] = torch.empty(num_elements, dtype=dtype)
        assert buffer.dtype is dtype
        return buffer[:num_elements].view(shape)
