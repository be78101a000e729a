"""Where a checkpoint's tensors go: separate ones in the file, parts of fused matrices here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.interface import LinearWeight, Norm
from quire.models.share import Cut

_RANDOM_VALUES = 16 << 20  # made at a time, of dummy weights that are split


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """Where one checkpoint tensor goes, or the part of it that this device holds."""

    name: str  # as Hugging Face names it: model.layers.0.self_attn.q_proj.weight
    shape: tuple[int, ...]  # of the whole tensor
    # Copies its part (a Tensor or StoredRows) into the parameter, and converts it.
    load: Callable[[Any], None]
    randomize: Callable[[float, int], None]  # (std, seed): dummy weights, made where the parameter lives
    keeps_quantized: bool = False  # whether `load` had rather have a matrix as QuantizedRows than as a tensor
    part: tuple[slice, ...] | None = None  # what `load` wants of the tensor: rows, and columns; None: all of it
    matrix: LinearWeight | None = None  # that a matrix of the checkpoint goes to, from `first_row` on
    first_row: int = 0
    head_order: Sequence[int] | None = None  # of a head's rows, where it is not the file's


def matrix_slots(
    weight: LinearWeight, parts: Mapping[str, Cut | int], columns: Cut | None = None
) -> Iterator[WeightSlot]:
    """The slots of one matrix. `parts`: the modules whose rows it holds, from the top, and which rows of each, or how
    many if it holds all; columns: which of their columns, where not all.

    A backend randomizes a matrix as a whole, so the first part's slot does it for all. Where several devices hold parts
    of a matrix, each draws all of it and keeps its own part: the same numbers, however it is split.
    """
    columns = columns or Cut.whole(weight.in_features)
    cuts = {name: Cut.whole(rows) if isinstance(rows, int) else rows for name, rows in parts.items()}
    is_split = not (columns.is_whole and all(rows.is_whole for rows in cuts.values()))
    randomize = partial(_randomize_part, weight, list(cuts.values()), columns) if is_split else weight.randomize
    first_row = 0
    for module, rows in cuts.items():
        yield WeightSlot(
            f"{module}.weight",
            (rows.total, columns.total),
            partial(weight.load_rows, first_row),
            randomize if first_row == 0 else _randomized_already,
            weight.keeps_quantized,
            (rows.slice, columns.slice) if is_split else None,
            weight,
            first_row,
        )
        if weight.has_bias:
            yield WeightSlot(
                f"{module}.bias",
                (rows.total,),
                partial(weight.load_bias, first_row),
                _randomized_already,
                part=None if rows.is_whole else (rows.slice,),
            )
        first_row += len(rows)
    assert first_row == weight.out_features, f"{list(parts)} fill {first_row} of {weight.out_features} rows"


def _randomize_part(weight: LinearWeight, parts: Sequence[Cut], columns: Cut, std: float, seed: int) -> None:
    """Draw the whole fused matrix, a few rows at a time, in the order in which one device draws it."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(rows.total for rows in parts)
    step = max(16, _RANDOM_VALUES // columns.total // 16 * 16)
    for at in range(0, total, step):
        chunk = torch.empty(min(step, total - at), columns.total).normal_(0.0, std, generator=generator)
        for first_row, rows in _held_rows(parts, at, len(chunk)):
            weight.load_rows(first_row, chunk, rows=rows, columns=columns.slice)
    if weight.has_bias:
        bias = torch.empty(total).normal_(0.0, std, generator=generator)
        for first_row, rows in _held_rows(parts, 0, total):
            weight.load_bias(first_row, bias[rows])


def _held_rows(parts: Sequence[Cut], start: int, count: int) -> Iterator[tuple[int, slice]]:
    """Which of the rows start .. start + count of the whole fused matrix are held here, and where they go."""
    first_row = at = 0  # in the part, in the whole
    for rows in parts:
        low, high = max(start, at + rows.start), min(start + count, at + rows.stop)
        if low < high:
            yield first_row + low - at - rows.start, slice(low - start, high - start)
        first_row += len(rows)
        at += rows.total


def norm_slots(module: str, norm: Norm, *, offset: bool, scale: float = 1.0) -> Iterator[WeightSlot]:
    """`offset`: the file holds the weight minus 1, as Gemma's do. scale: of what the norm gives, taken into its weight.
    Dummy norms are plain ones."""

    def load(parameter: Tensor, tensor: Tensor) -> None:
        parameter.copy_(tensor)
        if offset:
            parameter.add_(1.0)
        parameter.mul_(scale)

    def fill(parameter: Tensor, value: float, std: float, seed: int) -> None:
        parameter.fill_(value)

    for name, parameter, value in (("weight", norm.weight, scale), ("bias", norm.bias, 0.0)):
        if parameter is not None and (name == "weight" or norm.is_biased):
            yield WeightSlot(
                f"{module}.{name}", tuple(parameter.shape), partial(load, parameter), partial(fill, parameter, value)
            )


def vector_slot(name: str, parameter: Tensor, cut: Cut) -> WeightSlot:
    """A slot for numbers that are neither a norm's nor a matrix's; dummy ones are 0."""

    def load(tensor: Tensor) -> None:
        parameter.copy_(tensor)

    def fill(std: float, seed: int) -> None:
        parameter.zero_()

    return WeightSlot(name, (cut.total,), load, fill, part=None if cut.is_whole else (cut.slice,))


def reordered(slot: WeightSlot, order: Sequence[int]) -> WeightSlot:
    """A slot that takes the rows of each head (as many as `order` has) in another order."""

    def load(tensor: Any) -> None:
        heads = torch.arange(tensor.shape[0]).reshape(-1, len(order))
        rows = heads[:, list(order)].flatten()
        slot.load(tensor[rows] if isinstance(tensor, Tensor) else tensor.with_rows(rows))

    return replace(slot, load=load, head_order=order)


def _randomized_already(std: float, seed: int) -> None:
    """The matrix's first part did it."""
