"""Masks of a step: which tokens some lines of the logits may become, a bit for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.cpu.masks import allowed_tokens, ban_tokens
from quire.sampling.transfer import to_device

_FEW_TOKENS = 2048  # so many are drawn from apart from the rest of the vocabulary


@lru_cache(maxsize=8)
def _lines_on(device: torch.device, lines: tuple[int, ...]) -> Tensor:
    """Steps after each other mostly have masks for the same lines."""
    return to_device(np.array(lines, dtype=np.int64), device)


@dataclass(slots=True)
class TokenMasks:
    """Token t of line lines[i] is allowed where bit t % 32 of packed[i, t // 32] is set."""

    lines: list[int]
    packed: npt.NDArray[np.int32]  # [lines, words]

    def select(self, places: Sequence[int]) -> TokenMasks | None:
        """The masks of some lines, numbered anew by their places in `places`."""
        of_line = {line: i for i, line in enumerate(self.lines)}
        found = [(new, of_line[old]) for new, old in enumerate(places) if old in of_line]
        return TokenMasks([new for new, _ in found], self.packed[[i for _, i in found]]) if found else None

    def apply(self, logits: Tensor) -> Tensor | None:
        """Ban every other token. logits: [rows, vocab], changed in place.

        Returns, on a CPU, the tokens that any line may become, in order; None where they are many, or there are lines
        without a mask."""
        if logits.device.type != "cpu":
            from quire.kernels.triton import masks

            lines = _lines_on(logits.device, tuple(self.lines))
            masks.ban_tokens(logits, lines, to_device(self.packed, logits.device))
            return None
        counts = ban_tokens(logits, self.lines, self.packed)
        if len(self.lines) < len(logits) or not all(0 < count <= _FEW_TOKENS for count in counts):
            return None
        few = [np.flatnonzero(allowed_tokens(words, logits.shape[1])) for words in self.packed]
        return torch.from_numpy(few[0] if len(few) == 1 else np.unique(np.concatenate(few)))
