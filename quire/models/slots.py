"""Where a checkpoint's tensors go: separate ones in the file, parts of fused matrices here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from quire.kernels.interface import LinearWeight


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """Where one checkpoint tensor goes."""

    name: str  # as Hugging Face names it: model.layers.0.self_attn.q_proj.weight
    shape: tuple[int, ...]
    load: Callable[[Any], None]  # copies it (a Tensor or QuantizedRows) into its part of the parameter, and converts it
    randomize: Callable[[float, int], None]  # (std, seed): dummy weights, made where the parameter lives
    keeps_quantized: bool = False  # whether `load` had rather have a matrix as QuantizedRows than as a tensor


def matrix_slots(weight: LinearWeight, parts: Mapping[str, int]) -> Iterator[WeightSlot]:
    """The slots of one matrix. `parts`: the modules whose rows it holds, from the top, and how many each has.

    A backend randomizes a matrix as a whole, so the first part's slot does it for all.
    """
    first_row = 0
    for module, num_rows in parts.items():
        yield WeightSlot(
            f"{module}.weight",
            (num_rows, weight.in_features),
            partial(weight.load_rows, first_row),
            weight.randomize if first_row == 0 else _randomized_already,
            weight.keeps_quantized,
        )
        if weight.has_bias:
            yield WeightSlot(f"{module}.bias", (num_rows,), partial(weight.load_bias, first_row), _randomized_already)
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


def _randomized_already(std: float, seed: int) -> None:
    """The matrix's first part did it."""
