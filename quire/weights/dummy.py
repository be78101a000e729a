"""Random weights for a config: to measure speed and memory, or to test, without a download."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from quire.weights.checkpoint import Checkpoint, ProgressFn

if TYPE_CHECKING:
    from quire.models.slots import WeightSlot

_STD = 0.02  # what most models are initialized with


class DummyCheckpoint(Checkpoint):
    """A config alone. The same seed gives the same weights, whatever order the slots come in."""

    __slots__ = ()

    def tensors(self) -> None:
        return None

    def load_into(
        self,
        slots: Mapping[str, WeightSlot],
        is_ignored: Callable[[str], bool],
        *,
        progress: ProgressFn | None = None,
        seed: int = 0,
    ) -> None:
        for done, (name, slot) in enumerate(slots.items(), 1):
            slot.randomize(_STD, zlib.crc32(f"{seed}:{name}".encode()))
            if progress is not None:
                progress(done, len(slots))
