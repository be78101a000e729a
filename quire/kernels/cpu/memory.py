"""Memory for weights: a few large slabs instead of a tensor each, so that large pages can back them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_SLAB_BYTES = 64 << 20
_LARGE_PAGE = 2 << 20
_ALIGNMENT = 64  # a cache line


class Arena:
    """Hands out pieces of slabs. A slab lives as long as any of its pieces: they are views of one tensor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._slab: Tensor | None = None
        self._used_bytes = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to a cache line, uninitialised."""
        if num_bytes > _SLAB_BYTES // 4:
            return self._new_slab(num_bytes)
        if self._slab is None or self._used_bytes + num_bytes > len(self._slab):
            self._slab, self._used_bytes = self._new_slab(_SLAB_BYTES), 0
        piece = self._slab[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece

    def _new_slab(self, num_bytes: int) -> Tensor:
        raw = torch.empty(num_bytes + _LARGE_PAGE, dtype=torch.uint8)
        skip = -raw.data_ptr() % _LARGE_PAGE
        slab = raw[skip : skip + num_bytes]
        self._library.quire_advise_large_pages(slab.data_ptr(), num_bytes)
        return slab
