"""What an 8-bit KV cache holds of keys and values: scales, which are given in a file, stored with the checkpoint, or
measured; and offsets, which are measured.

An 8-bit float is as precise for small numbers as for large ones, so a scale only has to keep a layer's K and V within
the format's range. But its error grows with the number. So keys lose what all of them have in common, their mean, which
is most of some models' keys: all logits of a query are lower by the same then, and no softmax sees that. Queries look
at the first token more than at any other, and many prompts begin with the same one: offsets are moved by less than a
step of the format, so that its key is one of the format's numbers and loses nothing.

Both are fixed before anything is written to the cache: captured steps, blocks that requests share and blocks in stores
are all made with the same ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.device import Backend
from quire.executor.profile import prompts_step
from quire.models.decoder import Decoder

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks
    from quire.weights import Checkpoint

KVScales = list[tuple[float, float]]  # (k_scale, v_scale) of each layer

_CALIBRATION_TOKENS = 1024
_FORMAT = torch.float8_e4m3fn
_LARGEST = 448.0  # of the format
_TARGET = _LARGEST / 4  # where the largest measured one is put: other tokens may have larger ones


def fit_cache(
    decoder: Decoder,
    backend: Backend,
    *,
    block_size: int,
    known: KVScales | None = None,
    token_ids: Tensor | None = None,
    ranks: Ranks | None = None,
    with_offsets: bool = True,
) -> None:
    """Fix scales and offsets of a decoder's layers, by the K and V of some tokens that are spread through the
    vocabulary.

    known: scales that somebody gave. Those of V are kept, those of K grow where keys less their offsets would not fit.
    token_ids: of requests, which are measured after those: scales grow where these tokens ask for it. With ranks, all
    of a stage have the same scales. with_offsets=False shows what they are worth (benchmarks/kv_precision.py).
    """
    with_offsets = with_offsets and decoder.spec.ignores_key_shifts
    old_scales, old_offsets = decoder.kv_scales, decoder.kv_offsets
    largest, first_keys, offsets = [], [], []
    for index, (keys, values) in enumerate(_keys_and_values(decoder, backend, block_size, token_ids)):
        offset = torch.zeros_like(keys[:, 0])
        if with_offsets:
            offset = keys.mean(1) if token_ids is None or old_offsets is None else old_offsets[index]
        largest.append(((keys - offset[:, None]).abs().max().item(), values.abs().max().item()))
        first_keys.append(keys[:, 0])
        offsets.append(offset)
    if ranks is not None:
        largest = ranks.largest(largest)
    if known is not None:
        scales = [(max(k, most / _LARGEST), v) for (k, v), (most, _) in zip(known, largest, strict=True)]
    else:
        scales = [(max(k, 1e-4) / _TARGET, max(v, 1e-4) / _TARGET) for k, v in largest]
        if token_ids is not None:
            pairs = zip(scales, old_scales, strict=True)
            scales = [(max(k, old_k), max(v, old_v)) for (k, v), (old_k, old_v) in pairs]
    decoder.set_kv_scales(scales)
    if with_offsets:
        rounded = [
            first - ((first - offset) / k_scale).to(_FORMAT).float() * k_scale
            for first, offset, (k_scale, _) in zip(first_keys, offsets, scales, strict=True)
        ]
        decoder.set_kv_offsets(torch.stack(rounded))


def _keys_and_values(
    decoder: Decoder, backend: Backend, block_size: int, token_ids: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer: [kv_heads, tokens, head_dim] float32. Leaves the decoder without scales and
    offsets."""
    num_tokens = min(_CALIBRATION_TOKENS, decoder.max_position)
    if token_ids is None:
        # On every rank the same ones.
        token_ids = torch.arange(num_tokens, device=backend.device) * 7919 % decoder.spec.vocab_size
        first = decoder.spec.bos_token_id
        if first is not None and 0 <= first < decoder.spec.vocab_size:
            token_ids[0] = first
    num_tokens = min(num_tokens, len(token_ids))
    inputs, num_blocks = prompts_step(decoder, backend.device, block_size, num_tokens, num_tokens)
    spec = decoder.share.spec(decoder.spec)
    shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
    kv = torch.zeros(shape, dtype=backend.activation_dtype, device=backend.device)
    decoder.set_kv_scales([(1.0, 1.0)] * spec.num_layers)
    decoder.set_kv_offsets(None)
    decoder.forward(token_ids[:num_tokens], inputs.attention, list(kv.unbind(0)))
    for layer in kv:
        keys, values = layer.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens].float()
        yield keys, values


def known_kv_scales(config: EngineConfig, checkpoint: Checkpoint, num_layers: int) -> KVScales | None:
    """The scales of all layers of the model; None: they are to be measured. A file goes before the checkpoint."""
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
