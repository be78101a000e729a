"""Small arrays on their way to the device, without the host waiting for it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array on the device. Pinned on the way to a GPU: from pageable memory the copy would wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class StagingRing:
    """Pinned buffers taken in turn, so that the host may fill one while copies from the others are still queued."""

    def __init__(self, num_values: int, depth: int = 4) -> None:
        self._buffers = [torch.empty(num_values, dtype=torch.int64, pin_memory=True) for _ in range(depth)]
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def copy_to(self, array: npt.NDArray[Any], target: Tensor) -> None:
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()  # only after `depth` copies without a step being collected: never in the loop
        staged = self._buffers[index][: array.size].view(array.shape)
        staged.copy_(torch.from_numpy(array))
        target.copy_(staged, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._events[index] = done
