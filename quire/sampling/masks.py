"""Masks of a step: which tokens some lines of the logits may become, a bit for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling.transfer import to_device


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

    def apply(self, logits: Tensor) -> None:
        """Ban every other token. logits: [rows, vocab], changed in place."""
        vocab_size = logits.shape[1]
        if logits.device.type == "cpu":
            bits = np.unpackbits(self.packed.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            banned = torch.from_numpy(bits == 0)
        else:
            words = to_device(self.packed, logits.device)
            shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
            banned = ((words[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, :vocab_size]
        if self.lines == list(range(len(logits))):
            logits.masked_fill_(banned, -torch.inf)
            return
        where = to_device(np.array(self.lines, dtype=np.int64), logits.device)
        logits[where] = logits[where].masked_fill(banned, -torch.inf)
