"""Where a checkpoint's tensors go: separate ones in the file, parts of fused matrices here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.interface import LinearWeight, QuantizedRows


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """Where one checkpoint tensor goes."""

    name: str  # as Hugging Face names it: model.layers.0.self_attn.q_proj.weight
    shape: tuple[int, ...]
    load: Callable[[Tensor], None]  # copies it into its part of the parameter, converting as needed
    randomize: Callable[[float, int], None]  # (std, seed): dummy weights, made where the parameter lives
    # Takes a quantized file's own numbers, if it can: False asks for `load` instead. None: it never can.
    load_quantized: Callable[[QuantizedRows], bool] | None = None


def matrix_slots(
    weight: LinearWeight, parts: Mapping[str, int], *, bias: bool, device: torch.device
) -> Iterator[WeightSlot]:
    """The slots of one matrix. `parts`: the modules whose rows it holds, from the top, and how many each has.

    A backend randomizes a matrix as a whole, so the first part's slot does it for all.
    """
    first_row = 0
    for module, num_rows in parts.items():
        randomize = weight.randomize if first_row == 0 else _randomized_already
        yield WeightSlot(
            f"{module}.weight",
            (num_rows, weight.in_features),
            _row_loader(weight, first_row),
            randomize,
            _quantized_loader(weight, first_row) if weight.keeps_quantized else None,
        )
        if bias:
            load = _bias_loader(weight, first_row)
            yield WeightSlot(f"{module}.bias", (num_rows,), load, _noise_maker(load, num_rows, device))
        first_row += num_rows
    assert first_row == weight.out_features, f"{list(parts)} fill {first_row} of {weight.out_features} rows"


def norm_slot(name: str, parameter: Tensor, *, offset: bool) -> WeightSlot:
    """`offset`: the file holds the weight minus 1, as Gemma's do. Dummy norms are plain ones."""

    def load(tensor: Tensor) -> None:
        parameter.copy_(tensor)
        if offset:
            parameter.add_(1.0)

    def randomize(std: float, seed: int) -> None:
        parameter.fill_(1.0)

    return WeightSlot(name, tuple(parameter.shape), load, randomize)


def _row_loader(weight: LinearWeight, first_row: int) -> Callable[[Tensor], None]:
    return lambda rows: weight.load_rows(first_row, rows)


def _quantized_loader(weight: LinearWeight, first_row: int) -> Callable[[QuantizedRows], bool]:
    return lambda rows: weight.load_quantized(first_row, rows)


def _bias_loader(weight: LinearWeight, first_row: int) -> Callable[[Tensor], None]:
    return lambda bias: weight.load_bias(first_row, bias)


def _noise_maker(load: Callable[[Tensor], None], size: int, device: torch.device) -> Callable[[float, int], None]:
    def randomize(std: float, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        load(torch.empty(size, device=device).normal_(0.0, std, generator=generator))

    return randomize


def _randomized_already(std: float, seed: int) -> None:
    """The matrix's first part did it."""
