"""Scales of an 8-bit KV cache: given in a file, stored with the checkpoint, or measured.

An 8-bit float is as precise for small numbers as for large ones, so a scale only has to keep a layer's K and V within
the format's range. It is fixed before anything is written to the cache: captured steps, blocks that requests share and
blocks in stores are all of one scale.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.weights import Checkpoint

KVScales = list[tuple[float, float]]  # (k_scale, v_scale) of each layer


def known_kv_scales(config: EngineConfig, checkpoint: Checkpoint, num_layers: int) -> KVScales | None:
    """Of all layers of the model; None: they are to be measured. A file goes before the checkpoint."""
    if config.quantization_param_path is not None:
        return read_scales(Path(config.quantization_param_path), num_layers)
    return None if config.calculate_kv_scales else checkpoint.kv_scales(num_layers)


def read_scales(path: Path, num_layers: int) -> KVScales:
    """Out of a JSON file: {"kv_scales": [[k, v], ...]}, a pair for each layer; or vLLM's older schema, whose one number
    of a layer is both."""
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"quantization_param_path: {path} cannot be read as JSON: {error}") from None
    layers = _layers(given)
    if layers is None or len(layers) != num_layers:
        found = "no scales" if layers is None else f"those of {len(layers)} layers"
        raise ConfigError(
            f'quantization_param_path: {path} has {found}, expected {{"kv_scales": [[k, v], ...]}} with a pair for '
            f"each of {num_layers} layers"
        )
    for index, pair in enumerate(layers):
        if len(pair) != 2 or not all(_is_scale(value) for value in pair):
            raise ConfigError(f"quantization_param_path: {path}: layer {index} has {pair}, expected 2 positive numbers")
    return [(float(k), float(v)) for k, v in layers]


def _layers(given: Any) -> list[list[Any]] | None:
    if not isinstance(given, dict):
        return None
    if isinstance(pairs := given.get("kv_scales"), list):
        return [pair if isinstance(pair, list) else [] for pair in pairs]
    factors = given.get("kv_cache", {}).get("scaling_factor") if isinstance(given.get("kv_cache"), dict) else None
    # By rank, and within that by layer; ranks that differ are cut in another way than ours.
    if not isinstance(factors, dict) or not factors or any(each != factors.get("0") for each in factors.values()):
        return None
    by_layer = factors["0"]
    if not isinstance(by_layer, dict) or set(by_layer) != {str(index) for index in range(len(by_layer))}:
        return None
    return [[by_layer[str(index)]] * 2 for index in range(len(by_layer))]


def _is_scale(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
