"""Moving small arrays between host and device without stopping either."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device; an accelerator's is only queued, from pinned memory, so the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host. The copies are queued at once; only `wait` waits, and for them alone.

    Queued here, and not when the values are asked for, so that they do not stand behind the next step's work.
    """

    __slots__ = ("_done", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        self._done: torch.Event | None = None
        if device.type == "cpu":
            self._tensors = list(tensors)
            return
        self._tensors = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensors.append(host.copy_(tensor, non_blocking=True))
        self._done = torch.Event(device)
        self._done.record()

    def wait(self) -> list[Tensor]:
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
