"""The adapters of one device: in its slots, and laid out on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import WeightsError
from quire.executor.adapter_slots import AdapterInfo
from quire.kernels.adapters import AdapterBank, PackedAdapter
from quire.models.spec import ModelSpec
from quire.models.stored_names import StoredNames
from quire.models.tensors import adaptable_matrices
from quire.weights.peft import file_marks, find_adapter, read_adapter


class DeviceAdapters:
    """An AdapterStore over a bank. Each rank of a split model checks all of an adapter and keeps its own part."""

    def __init__(self, bank: AdapterBank, spec: ModelSpec, names: StoredNames, *, max_rank: int) -> None:
        """spec: of the whole model; names: how its files name its matrices."""
        self._bank = bank
        self._names = names
        self._head_dim = spec.head_dim
        self._max_rank = max_rank
        self._shapes = adaptable_matrices(spec)
        self._kept: dict[str, PackedAdapter] = {}
        self._slots: dict[str, int] = {}  # by key

    def slot_of(self, key: str) -> int:
        return self._slots[key]

    def read(self, name: str, path: str) -> AdapterInfo:
        folder = find_adapter(path)
        before = file_marks(folder)
        found = read_adapter(folder, self._shapes, self._names, self._head_dim, self._max_rank)
        info = AdapterInfo(f"{name}@{found.digest}", name, path, found.rank)
        packed = self._bank.pack(found.pairs)  # only now the tensors are read: they are the file's, mapped
        if file_marks(folder) != before:  # what was computed with others' tensors would be in caches under this digest
            raise WeightsError(f"{folder}: its files changed while they were read: load it again")
        self._kept[info.key] = packed
        return info

    def keep(self, keys: Sequence[str]) -> None:
        self._kept = {key: self._kept[key] for key in keys}

    def place(self, key: str, slot: int) -> None:
        with torch.inference_mode():
            self._bank.write(slot, self._kept[key])
        self._slots = {one: its for one, its in self._slots.items() if its != slot} | {key: slot}
