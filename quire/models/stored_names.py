"""How a family's checkpoints name and lay out tensors, where they differ from the names that the decoder has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A tensor of the decoder, out of one that is stored."""

    name: str
    shape: tuple[int, ...]
    view: Callable[[Any], Any] | None  # takes it out of the stored tensor; None: it is that one


class Stacked(NamedTuple):
    """All experts' matrices, or biases, in one tensor: [experts, rows, columns] or [experts, rows]."""

    modules: tuple[str, ...]  # of an expert, whose rows it has
    suffix: str = "weight"
    is_interleaved: bool = False  # a row of each module in turn, not the modules one after the other
    is_transposed: bool = False  # [experts, columns, rows]
    is_packed: bool = False  # MXFP4: [experts, rows, columns / 32, 16], two numbers a byte

    @property
    def num_dimensions(self) -> int:
        return 4 if self.is_packed else 3 if self.suffix == "weight" else 2


@dataclass(slots=True, frozen=True)
class StoredNames:
    """The differences. Ends of module names are those after renaming."""

    renames: tuple[tuple[str, str], ...] = ()  # patterns and what stands in their place, one after the other
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # end of a module -> those whose rows it holds
    by_head: bool = False  # rows of a fused tensor: a head's part of each, then the next head's
    stacked: Mapping[str, Stacked] = field(default_factory=dict)  # end of a tensor's name -> what is in it
    transposed: tuple[str, ...] = ()  # ends of modules whose matrices are stored [inputs, outputs]

    def parts(
        self, stored_name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], head_dim: int
    ) -> Iterator[Part]:
        """shapes: of the decoder's tensors. A fused tensor of another size is left as it is: nothing will want it."""
        name = self._renamed(stored_name)
        for stacked_end, stacked in self.stacked.items():
            if name.endswith(stacked_end) and len(shape) == stacked.num_dimensions:
                yield from _expert_parts(name.removesuffix(stacked_end), shape, stacked)
                return
        module, _, suffix = name.rpartition(".")
        is_transposed = len(shape) == 2 and self.is_transposed(stored_name)
        shape = shape[::-1] if is_transposed else shape
        end = next((end for end in self.fused if module.endswith(end)), None)
        if end is None:
            yield Part(name, shape, _transposed if is_transposed else None)
            return
        names = [f"{module.removesuffix(end)}{part}.{suffix}" for part in self.fused[end]]
        rows = [shapes[part][0] if part in shapes else 0 for part in names]
        if sum(rows) != shape[0] or (self.by_head and shape[0] % (len(names) * head_dim)):
            yield Part(name, shape, None)
            return
        first = 0
        for number, (part, count) in enumerate(zip(names, rows, strict=True)):
            if self.by_head:
                view = partial(_head_rows, number, len(names), head_dim)
            else:
                view = partial(_rows, first, first + count, is_transposed)
            yield Part(part, (count, *shape[1:]), view)
            first += count

    def is_transposed(self, stored_name: str) -> bool:
        """Whether it is a matrix that is stored [inputs, outputs]."""
        return bool(self.transposed) and self._renamed(stored_name).rpartition(".")[0].endswith(self.transposed)

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


def _expert_parts(prefix: str, shape: tuple[int, ...], stacked: Stacked) -> Iterator[Part]:
    rows, *columns = shape[:0:-1] if stacked.is_transposed else shape[1:]
    if stacked.is_packed:
        columns = [columns[0] * 32]
    count = len(stacked.modules)
    for expert in range(shape[0]):
        for number, module in enumerate(stacked.modules):
            view = partial(_expert_rows, expert, number, count, stacked)
            yield Part(f"{prefix}{expert}.{module}.{stacked.suffix}", (rows // count, *columns), view)


def _expert_rows(expert: int, number: int, count: int, stacked: Stacked, tensor: Any) -> Any:
    of_expert = tensor[expert].T if stacked.is_transposed else tensor[expert]
    if stacked.is_interleaved:
        return of_expert[number::count]
    rows = of_expert.shape[0] // count
    return of_expert[number * rows : (number + 1) * rows]


def _transposed(tensor: Any) -> Any:
    return tensor.T


def _rows(first: int, last: int, is_transposed: bool, tensor: Any) -> Any:
    return (tensor.T if is_transposed else tensor)[first:last]


def _head_rows(number: int, count: int, head_dim: int, tensor: Any) -> Any:
    heads = tensor.reshape(-1, count, head_dim, *tensor.shape[1:])
    return heads[:, number].reshape(-1, *tensor.shape[1:])
