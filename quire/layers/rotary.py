"""Tables of rotary position embeddings, for every kind of scaling that a served model may ask for.

Frequencies are computed in float32 step by step as transformers does, so that the tables agree to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError


def rotary_table(
    theta: float,
    scaling: Mapping[str, Any] | None,
    head_dim: int,
    max_position: int,
    device: torch.device | str = "cpu",
    *,
    num_turned: int | None = None,
) -> Tensor:
    """[max_position, head_dim] float32: each position's cosines, then its sines.

    `scaling` names its `rope_type` (a key of ROPE_TYPES) and holds that type's numbers; None is plain rotary. Pairs
    past the first `num_turned` / 2 are not turned: see `pairs_order`.
    """
    num_turned = head_dim if num_turned is None else num_turned
    half, turned = head_dim // 2, num_turned // 2
    table = torch.zeros(max_position, head_dim)
    table[:, turned:half] = 1.0
    if turned:
        frequencies, magnitude = rotary_frequencies(theta, scaling, num_turned, max_position)
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
        torch.mul(angles.cos(), magnitude, out=table[:, :turned])
        torch.mul(angles.sin(), magnitude, out=table[:, half : half + turned])
    return table.to(device)


def pairs_order(head_dim: int, num_turned: int, *, neighbours: bool = False) -> list[int]:
    """Where only the first `num_turned` elements of a head turn, element i with i + num_turned / 2, or with
    `neighbours` 2i with 2i + 1: the order in which i turns with i + head_dim / 2, as kernels do it. Attention is the
    same in any order that q and k share."""
    if neighbours:
        assert num_turned == head_dim
        return [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    turned, rest = num_turned // 2, (head_dim - num_turned) // 2
    firsts = [*range(turned), *range(num_turned, num_turned + rest)]
    seconds = [*range(turned, num_turned), *range(num_turned + rest, head_dim)]
    return firsts + seconds


def rotary_frequencies(
    theta: float, scaling: Mapping[str, Any] | None, head_dim: int, max_position: int
) -> tuple[Tensor, float]:
    """Radians per position, [head_dim / 2] float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = theta**exponents  # in positions per radian
    if scaling is None:
        return 1.0 / wavelengths, 1.0
    return ROPE_TYPES[scaling["rope_type"]](wavelengths, scaling, theta, max_position)


def _linear(wavelengths: Tensor, scaling: Mapping[str, Any], theta: float, max_position: int) -> tuple[Tensor, float]:
    return (1.0 / wavelengths) / scaling["factor"], 1.0


def _factors(wavelengths: Tensor, scaling: Mapping[str, Any], theta: float, max_position: int) -> tuple[Tensor, float]:
    """A divisor for each frequency, as GGUF files carry the llama3 scaling."""
    return (1.0 / wavelengths) / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0


def _dynamic(wavelengths: Tensor, scaling: Mapping[str, Any], theta: float, max_position: int) -> tuple[Tensor, float]:
    """Changes theta with the sequence's length once that passes the trained one, and nothing before.

    Past it, keys in the cache would have to turn with every token, so that is where it ends.
    """
    trained = scaling["original_max_position_embeddings"]
    if max_position > trained:
        raise ConfigError(
            f"dynamic rotary scaling is served up to the model's trained length: lower max_model_len to {trained}"
        )
    return 1.0 / wavelengths, 1.0


def _llama3(wavelengths: Tensor, scaling: Mapping[str, Any], theta: float, max_position: int) -> tuple[Tensor, float]:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    frequencies = 1.0 / wavelengths
    periods = 2 * math.pi / frequencies
    stretched = torch.where(periods > trained / low, frequencies / factor, frequencies)
    share_kept = (trained / periods - low) / (high - low)
    blended = (1 - share_kept) * stretched / factor + share_kept * stretched
    between = (periods >= trained / high) & (periods <= trained / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(wavelengths: Tensor, scaling: Mapping[str, Any], theta: float, max_position: int) -> tuple[Tensor, float]:
    """Frequencies that turn often within the trained length are kept, rare ones stretched, with a ramp between."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    num_frequencies = wavelengths.shape[0]
    head_dim = 2 * num_frequencies

    def index_of(turns: float) -> float:
        """The (fractional) frequency that turns so often over the trained length."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling["beta_fast"]), index_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(num_frequencies, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_magnitude(scaling)


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    factor = scaling["factor"]

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling["attention_factor"] is not None:
        return float(scaling["attention_factor"])
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(wavelengths: Tensor, scaling: Mapping[str, Any], theta: float, max_position: int) -> tuple[Tensor, float]:
    """Phi 3: a divisor for each frequency, one list up to the trained length and another past it.

    A sequence that grows past it would have to turn its keys again. So an engine that may run longer ones has the
    second list for all of them.
    """
    is_long = max_position > scaling["original_max_position_embeddings"]
    factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    return 1.0 / (factors * wavelengths), scaling["attention_factor"]


ROPE_TYPES: dict[str, Callable[[Tensor, Mapping[str, Any], float, int], tuple[Tensor, float]]] = {
    "linear": _linear,
    "factors": _factors,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
